"""Short fingerprints of what is declared and of what it is declared on: equal on ranks that run the same.

They are made of syntax trees and of declarations, not of text: a comment, a blank line or the place of
a file changes neither.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from .delta import Delta

LENGTH = 12


def declaration_digest(deltas: Iterable[Delta]) -> str:
    """Twelve hex digits over declarations, all but the lines on which they stand."""
    return _digest(json.dumps([_plain(delta) for delta in deltas]))


def tree_digest(node: ast.AST) -> str:
    """Twelve hex digits over a syntax tree, all but its positions."""
    return _digest(ast.dump(node))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        # The kind belongs to it: InsertBefore and InsertAfter have the same fields.
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return [type(value).__name__, {name: _plain(getattr(value, name)) for name in fields}]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
