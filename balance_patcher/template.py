"""The text that an edit puts in, with the holes that its anchor binds."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import refuse
from .holes import Hole, fill, scan
from .matching import Bindings, Bound, render_bound

#: What needs no parentheses, or cannot have any.
_ATOMS = (
    ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict, ast.Set, ast.keyword,
    ast.Slice, ast.Starred,
)  # fmt: skip


@dataclass(frozen=True)
class Template:
    """Text that an edit puts in, with the holes that its anchor binds."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", textwrap.dedent(self.text).strip("\n").rstrip())

    @property
    def holes(self) -> frozenset[str]:
        return frozenset(hole.name for hole in scan(self.text))

    def fill(self, bound: Bindings) -> str:
        """The text with every hole replaced by what was bound.

        Raises:
            PatchError: BP002, for a hole that the anchor does not bind, or statements within a line.
        """

        def put(hole: Hole) -> str:
            if hole.name not in bound:
                raise refuse(
                    "BP002", f"`${hole.name}` is used in an edit but no anchor binds it",
                    ("text", self.text), next="bind it in the anchor's pattern or write it out",
                )  # fmt: skip
            value = bound[hole.name]
            nodes = value if isinstance(value, tuple) else (value,)
            if any(isinstance(node, ast.stmt) for node in nodes):
                return self._statements(hole, nodes)
            text = render_bound(value)
            if isinstance(value, ast.expr) and not isinstance(value, _ATOMS):
                text = f"({text})"
            return text

        return fill(self.text, scan(self.text), put)

    def _statements(self, hole: Hole, nodes: Sequence[Bound]) -> str:
        """Statements, each on lines of its own, at the hole's indentation."""
        indent = self.text[: hole.start].rpartition("\n")[2]
        if indent.strip() or self.text[hole.end :].partition("\n")[0].strip():
            raise refuse(
                "BP002", f"`${hole.name}` is bound to statements and stands within a line", ("text", self.text),
                next="give it a line of its own",
            )  # fmt: skip
        lines = [line for node in nodes for line in render_bound(node).split("\n")]
        return f"\n{indent}".join(lines)
