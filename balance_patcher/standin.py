"""Another project's module that a feature stands in for, and what of it is accounted for.

A host project may carry a patch of its own that does what a feature does: a module with a copy of the
function, say. The feature can take that module's place, at its place in the host's import order, if
nothing that the module does would be lost. So every statement of it is declared here: which delta does
the same, or why it may be dropped. What is not declared is a reason to leave the module alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from .delta import TARGET, Anchor, Level, bad, declared_here, need_all
from .holes import scan
from .pattern import Pattern, compile_pattern

#: Their wording is an older one of upstream's own; the installed upstream runs instead.
STALE = "stale"
#: The module that stands in does it itself.
STAND_IN = "stand-in"

#: How a stand-in changes an attribute, so that it is read back and put back: owner, name, value.
Bind = Callable[[Any, str, object], None]

_PLACE = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?")
_ORIGIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*(:[A-Za-z_]\w*)?")


@dataclass(frozen=True)
class Cover:
    """One kind of statement of the host's module, and who does it instead.

    Attributes:
        place: The function or class that it stands in, ``Class.method``; empty for the module itself.
        pattern: The statement; of a header alone, what its suites hold has to be covered by itself. Its holes
            have names: each stands for a name, an attribute or a constant, never for anything that is run.
        by: The name of a delta, of a feature, or :data:`STALE` or :data:`STAND_IN`.
        why: What a person should know about it.
        inside: The statements around it, as for an anchor.
        after: The statement right before it.
        before: The statement right after it.
        role: What it is, where the module is not itself without it: see :attr:`StandIn.needs`.

    The covers of one place stand in the order in which the statements may stand, each for one of them. What may
    stand twice is declared twice.
    """

    place: str
    pattern: str
    by: str
    why: str = ""
    inside: tuple[Level, ...] = ()
    after: str | None = None
    before: str | None = None
    role: str = ""

    def __post_init__(self) -> None:
        if not _PLACE.fullmatch(self.place):
            raise bad(f"the place of a cover is a qualified name or empty: {self.place!r}")
        if declared_here(partial(compile_pattern, self.pattern)).kind == "statements":
            raise bad(f"a cover speaks of one statement: `{self.compiled}`")
        if any(hole.name == "_" for hole in scan(self.pattern)):
            raise bad(f"a hole of a cover has a name, so that what it stands for is looked at: `{self.compiled}`")
        if not self.by:
            raise bad(f"who covers `{self.compiled}`? Name a delta, a feature, {STALE!r} or {STAND_IN!r}")
        need_all("inside", self.inside, Level)
        declared_here(lambda: self.anchor)

    @property
    def compiled(self) -> Pattern:
        return compile_pattern(self.pattern)

    @property
    def anchor(self) -> Anchor:
        return Anchor(self.pattern, inside=self.inside, after=self.after, before=self.before)

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
        imports: What each name that it imports has to be, ``module`` or ``module:name``. Names that the modules of
            the copied targets import or define need not be here: they have to be what they are there.
        signatures: For each of its functions the parameters that it may have, without annotations. A copy may have
            upstream's too.
        covers: Everything else that it may do.
        lacks: For each copy, groups of upstream's statements that it may be without although they leave a loop or
            the function, or hold one that does. An older copy has none of a group. Of other statements it may be
            without any.
        needs: For each place that the module has, the roles of covers that have to be found somewhere in it.
    """

    owner: str
    module: str
    fill: Callable[[ModuleType, type, Bind], None]
    copies: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, str] = field(default_factory=dict)
    signatures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    covers: tuple[Cover, ...] = ()
    lacks: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need_all("covers", self.covers, Cover)
        for member, target in self.copies.items():
            if not member or not _PLACE.fullmatch(member) or not TARGET.fullmatch(target):
                raise bad(f"a copy is a member and its target, `module:Qual.name`: {member!r}: {target!r}")
        for name, origin in self.imports.items():
            if not name.isidentifier() or not _ORIGIN.fullmatch(origin):
                raise bad(f"an import is a name and what it is, `module` or `module:name`: {name!r}: {origin!r}")
        for place, texts in self.signatures.items():
            need_all("signatures", texts, str)
            for text in texts:
                _check_parameters(place, text)
        for place, groups in self.lacks.items():
            need_all("lacks", groups, tuple)
            if place not in self.copies:
                raise bad(f"only a copy can lack something of upstream's: {place!r}")
            for group in groups:
                need_all("lacks", group, str)
                for pattern in group:
                    declared_here(partial(Anchor, pattern))
        known = {cover.role for cover in self.covers if cover.role}
        for place, roles in self.needs.items():
            need_all("needs", roles, str)
            unknown = set(roles) - known
            if unknown:
                raise bad(f"{place or 'the module'!r} needs {min(unknown)!r}, which is no role of a cover")


def _check_parameters(place: str, text: str) -> None:
    try:
        ast.parse(f"def probe({text}): pass")
    except SyntaxError as error:
        raise bad(f"the parameters of {place!r} are not Python ({error.msg}): {text}") from None
