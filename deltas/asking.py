"""Where a configuration asks for a feature, and what counts as yes: shared by the features, none itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from balance_patcher.errors import refuse

NESTED = "additional_config.scheduler_config"


def places(vllm_config: Any) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Where a setting may be written in a ``vllm.config.VllmConfig``, the place that wins first."""
    extra = getattr(vllm_config, "additional_config", None)
    extra = extra if isinstance(extra, Mapping) else {}
    nested = extra.get("scheduler_config")
    return ((NESTED, nested if isinstance(nested, Mapping) else {}), ("additional_config", extra))


def written(vllm_config: Any, key: str) -> list[tuple[str, Any]]:
    """Every place where a setting is written, by its whole name, with its value; the one that wins first."""
    return [(f"{name}.{key}", place[key]) for name, place in places(vllm_config) if place.get(key) is not None]


def asked(vllm_config: Any, key: str) -> str | None:
    """The place that asks for a feature by a switch of that name; ``None`` where none does.

    Raises:
        PatchError: BP703, if what is written there says neither yes nor no.
    """
    name, value = next(iter(written(vllm_config, key)), ("", None))
    return name if yes_or_no(name, value) else None


def kv_role(vllm_config: Any) -> str | None:
    """What this node does in prefill/decode disaggregation; ``None`` without it."""
    role: str | None = getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_role", None)
    return role


def yes_or_no(name: str, value: object) -> bool:
    """A switch as it was written; nothing is guessed.

    Raises:
        PatchError: BP703, for anything but a truth value, 0, 1 or nothing.
    """
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise refuse("BP703", f"{name}={value!r}", next="write true or false there, without quotes")
