"""Which lanes are meant when the command names none: ``[tool.balance_patcher.lanes]``, else what is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .errors import refuse
from .extras import require
from .source import LaneSpec


def declared_lanes(folder: Path) -> list[LaneSpec]:
    """The lanes of the nearest ``pyproject.toml`` that declares some, else ``installed``.

    Raises:
        PatchError: BP005, if that file cannot be read or the table is no table of texts.
    """
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if file.is_file():
            table = _read(file)
            if table:
                return [LaneSpec(name, _from_file(spec, place)) for name, spec in table.items()]
    return [LaneSpec("installed", "installed")]


def _read(file: Path) -> dict[str, str]:
    toml = require("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        content = toml.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise refuse(
            "BP005", f"{file}: {error}", next="mend the file, or name the lanes on the command line"
        ) from error
    table: Any = content
    for name in ("tool", "balance_patcher", "lanes"):
        table = table.get(name, {}) if isinstance(table, dict) else None
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
