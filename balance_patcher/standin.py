"""Another project's module that a feature stands in for, and what of it is accounted for.

A host project may carry a patch of its own that does what a feature does: a module with a copy of the
function, say. The feature can take that module's place, at its place in the host's import order, if
nothing that the module does would be lost. So every statement of it is declared here: which delta does
the same, or why it may be dropped. What is not declared is a reason to leave the module alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from .delta import TARGET, Anchor, Level, bad, declared_here, need_all
from .pattern import Pattern, compile_pattern

#: Their wording is an older one of upstream's own; the installed upstream runs instead.
STALE = "stale"
#: The module that stands in does it itself.
STAND_IN = "stand-in"

#: How a stand-in changes an attribute, so that it is read back and put back: owner, name, value.
Bind = Callable[[Any, str, object], None]

_PLACE = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?")


@dataclass(frozen=True)
class Cover:
    """One kind of statement of the host's module, and who does it instead.

    Attributes:
        place: The function or class that it stands in, ``Class.method``; empty for the module itself.
        pattern: The statement; of a header alone, what its suites hold has to be covered by itself.
        by: The name of a delta, of a feature, or :data:`STALE` or :data:`STAND_IN`.
        why: What a person should know about it.
        inside: The statements around it, as for an anchor.
    """

    place: str
    pattern: str
    by: str
    why: str = ""
    inside: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        if not _PLACE.fullmatch(self.place):
            raise bad(f"the place of a cover is a qualified name or empty: {self.place!r}")
        if declared_here(partial(compile_pattern, self.pattern)).kind == "statements":
            raise bad(f"a cover speaks of one statement: `{self.compiled}`")
        if not self.by:
            raise bad(f"who covers `{self.compiled}`? Name a delta, a feature, {STALE!r} or {STAND_IN!r}")
        need_all("inside", self.inside, Level)

    @property
    def compiled(self) -> Pattern:
        return compile_pattern(self.pattern)

    @property
    def anchor(self) -> Anchor:
        return Anchor(self.pattern, inside=self.inside)

    @property
    def feature(self) -> str | None:
        """The feature that has to run for this to be covered."""
        return None if self.by in {STALE, STAND_IN} else self.by.partition(".")[0]


@dataclass(frozen=True)
class StandIn:
    """A module of another project that a feature stands in for.

    Attributes:
        owner: Whose module it is, as a person calls that project.
        module: Its dotted name.
        fill: Gives the fresh module the names that others take from it, and changes what it has to change
            through the third argument. Gets the module, the class that was bound, and that function.
        copies: For each of its functions that began as a copy, the upstream target that was copied.
        imports: The modules that it may import from; a package's name allows all that is in it.
        covers: Everything else that it may do.
    """

    owner: str
    module: str
    fill: Callable[[ModuleType, type, Bind], None]
    copies: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    covers: tuple[Cover, ...] = ()

    def __post_init__(self) -> None:
        need_all("imports", self.imports, str)
        need_all("covers", self.covers, Cover)
        for member, target in self.copies.items():
            if not member or not _PLACE.fullmatch(member) or not TARGET.fullmatch(target):
                raise bad(f"a copy is a member and its target, `module:Qual.name`: {member!r}: {target!r}")

    def allows(self, module: str) -> bool:
        """Whether the module may import from another."""
        return any(module == name or module.startswith(f"{name}.") for name in self.imports)
