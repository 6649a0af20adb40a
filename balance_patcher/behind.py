"""Upstream's statements that a copy is without: which of them an older copy may simply not have yet.

A copy that lacks a statement of upstream's is behind, and the installed upstream runs instead. But one that
leaves a loop or the function decides what runs at all, and whoever takes it out of a copy means it. So each of
those that an older copy has not yet is declared.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .anchors import all_places
from .delta import Anchor
from .matching import Mismatch
from .pattern import compile_pattern
from .statements import leaves
from .targets import Target


class Lacks:
    """What one copy may be without, each statement once; a copy that has one of a group is not that old."""

    def __init__(self, copied: Target, groups: Sequence[Sequence[str]]) -> None:
        older = [group for group in groups if not any(all_places(copied, Anchor(text)) for text in group)]
        self._left = [compile_pattern(text) for group in older for text in group]

    def why_not(self, node: ast.AST) -> str | None:
        """Why a copy may not be without a statement of upstream's; ``None`` where it may."""
        if not leaves(node):
            return None
        for pattern in self._left:
            if not isinstance(pattern.match(node), Mismatch):
                self._left.remove(pattern)
                return None
        return "upstream has it, and it decides what runs"
