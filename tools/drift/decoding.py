"""Frozen data of what ``dataclasses.asdict`` made of it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def decoded(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """A frozen dataclass of what ``dataclasses.asdict`` made; what it does not know is left out."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name in data]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], data[name]) for name in names})


def _value(hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [one for one in get_args(hint) if one is not type(None)]
        return None if value is None else _value(inner[0], value)
    if origin is tuple:
        parts = get_args(hint)
        if parts[-1] is Ellipsis:
            return tuple(_value(parts[0], one) for one in value)
        return tuple(_value(part, one) for part, one in zip(parts, value, strict=True))
    if dataclasses.is_dataclass(hint):
        return decoded(hint, value)  # type: ignore[arg-type]
    return value
