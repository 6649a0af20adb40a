"""What a feature gives to one of upstream's modules or classes under a name that upstream does not have.

Other modules have imported that class by name, so it is the class itself that gets the name: a subclass would reach
none of them. A frozen declaration, checked when it is made, like those of :mod:`balance_patcher.delta`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from .delta import bad, declared_at
from .template import Template

OWNER = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?")

_MAKES = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Addition:
    """Names that upstream does not have, made by a text and put on a module or a class in place.

    The text is run once, when the feature is built, on the live globals of the owner's module: what a function in it
    calls is looked up there when it is called, so another project's wrapper around that is called too.

    Attributes:
        owner: ``module`` or ``module:Class``.
        text: Functions, assignments and imports; each binds a name.
        why: Why it is needed, in a sentence or two.
    """

    owner: str
    text: str
    why: str
    declared: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", Template(self.text).text)
        if not OWNER.fullmatch(self.owner):
            raise bad(f"the owner of an addition is not written `module` or `module:Class`: {self.owner!r}")
        if not self.why.strip():
            raise bad(f"the addition to {self.owner} does not say `why`")
        try:
            tree = ast.parse(self.text)
        except SyntaxError as error:
            raise bad(f"the text of an addition is not Python ({error.msg})", ("text", self.text)) from None
        self._check(tree)
        names = self.names
        if not names or len(set(names)) < len(names):
            raise bad(f"the addition to {self.owner} needs names, each once: {', '.join(names) or 'none'}")
        if not self.declared:
            object.__setattr__(self, "declared", declared_at())

    def _check(self, tree: ast.Module) -> None:
        strange = next((s for s in tree.body if not isinstance(s, _MAKES) or not all(_names(s))), None)
        if strange is not None:
            raise bad(f"an addition is functions, assignments and imports, not `{ast.unparse(strange)}`")
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                raise bad("an addition must not rely on `assert`, which -O removes; write `if …: raise`")
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                raise bad("an addition must not declare global or nonlocal names")
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None) or ""
            # It is not compiled in the class's own body: neither would mean there what it means here.
            if name in ("super", "__class__") or (str(name).startswith("__") and not str(name).endswith("__")):
                raise bad(f"an addition cannot use {name!r}: it is made outside of the class")

    @property
    def module(self) -> str:
        return self.owner.partition(":")[0]

    @property
    def class_name(self) -> str:
        """The class that gets the names; empty where the module does."""
        return self.owner.partition(":")[2]

    @property
    def names(self) -> tuple[str, ...]:
        """What its statements bind, in order."""
        return tuple(name for statement in ast.parse(self.text).body for name in _names(statement))

    @property
    def places(self) -> tuple[str, ...]:
        """The same, as targets are written: ``module:Class.name`` or ``module:name``."""
        return tuple(f"{self.owner}.{name}" if self.class_name else f"{self.module}:{name}" for name in self.names)


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement binds; an empty one for what is no name."""
    if isinstance(statement, ast.Assign):
        return [target.id if isinstance(target, ast.Name) else "" for target in statement.targets]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0].replace("*", "") for alias in statement.names]
    return [getattr(statement, "name", "")]
