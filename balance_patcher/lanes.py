"""Which lanes are meant when the command names none: ``[tool.balance_patcher.lanes]``, else what is installed."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

from .errors import PatchError, refuse
from .extras import require
from .source import FORMS, REMOTE_FORMS, LaneSpec, open_source


def declared_lanes(folder: Path) -> list[LaneSpec]:
    """The lanes of the nearest ``pyproject.toml`` that declares some, else ``installed``.

    Raises:
        PatchError: BP005, if that file cannot be read or the table is no table of texts; BP512, if it speaks of
            this package, declares no lane, and vLLM is not installed either.
    """
    silent: Path | None = None
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if file.is_file():
            table = _read(file)
            if table:
                return [LaneSpec(name, _from_file(spec, place)) for name, spec in table.items()]
            silent = silent or (file if table is not None else None)
    if silent is not None:
        _need_installed(silent)
    return [LaneSpec("installed", "installed")]


def lane_named(text: str, folder: Path) -> LaneSpec:
    """The lane that a person wrote: a source, ``NAME=SOURCE``, or the name of a declared lane.

    Raises:
        PatchError: BP004, if it is none of these; what :func:`declared_lanes` raises.
    """
    if text == "installed" or ":" in text or "=" in text:
        return LaneSpec.parse(text)
    declared = {spec.name: spec for spec in _declared(folder)}
    if text in declared:
        return declared[text]
    near = difflib.get_close_matches(text, [*declared, "installed"], 1)
    names = ", ".join(declared) or "none"
    raise refuse(
        "BP004", f"`{text}` is neither a source nor a declared lane", ("declared", names), ("sources", FORMS),
        next=f"did you mean `{near[0]}`?" if near else "name a declared lane, or write a source",
    )  # fmt: skip


def _declared(folder: Path) -> list[LaneSpec]:
    try:
        return [spec for spec in declared_lanes(folder) if spec != LaneSpec("installed", "installed")]
    except PatchError as error:
        if error.failures[0].code == "BP512":
            return []
        raise


def _need_installed(file: Path) -> None:
    try:
        open_source("installed")
    except PatchError as error:
        raise refuse(
            "BP512", f"no lanes declared in {file}, and this Python has no package `vllm`",
            next=f'declare [tool.balance_patcher.lanes] there, as name = "SOURCE", or name a lane: {REMOTE_FORMS}',
        ) from error  # fmt: skip


def _read(file: Path) -> dict[str, str] | None:
    """The declared lanes; ``None`` where the file does not speak of this package."""
    toml = require("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        content: Any = toml.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise refuse(
            "BP005", f"{file}: {error}", next="mend the file, or name the lanes on the command line"
        ) from error
    tools = content.get("tool", {})
    ours = tools.get("balance_patcher") if isinstance(tools, dict) else 0
    if ours is None:
        return None
    table: Any = ours.get("lanes", {}) if isinstance(ours, dict) else None
    if not isinstance(table, dict) or not all(isinstance(spec, str) for spec in table.values()):
        raise refuse(
            "BP005", f"{file}: [tool.balance_patcher.lanes] is no table of texts", next='write lanes as name = "SOURCE"'
        )
    return table


def _from_file(spec: str, folder: Path) -> str:
    """A lane's source with its relative path taken from the file's own folder."""
    form, _, rest = spec.partition(":")
    if form in ("dir", "wheel", "git") and rest:
        return f"{form}:{folder / Path(rest).expanduser()}"
    return spec
