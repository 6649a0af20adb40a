"""GitHub's workflow commands: a finding, shown on the line of the file that it is about.

GitHub finds a file by its path from the root of what the job has checked out, and a report is often made in a folder
below that. So where the job says its root, a file that lies in it is named from there.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_WORKSPACE = "GITHUB_WORKSPACE"


def command(level: str, place: str, title: str, text: str) -> str:
    """One command, on one line.

    Args:
        level: ``error``, ``warning`` or ``notice``.
        place: ``deltas/balance.py:41``; either part may be missing.
        title: What is shown in bold.
        text: What is shown below it, in as many lines as it has.
    """
    file, _, line = place.rpartition(":")
    where = "".join(
        f"{key}={_escaped(value)}," for key, value in (("file", _in_workspace(file)), ("line", line)) if value
    )
    return f"::{level} {where}title={_escaped(title)}::{_escaped(text, data=True)}"


def _in_workspace(file: str) -> str:
    """A file as it is named from the root of the job; as it is, where there is no job or it lies elsewhere."""
    workspace = os.environ.get(_WORKSPACE, "")
    if not file or not workspace:
        return file
    try:
        found = next((path for path in (Path.cwd() / file, _ROOT / file) if path.is_file()), None)
        if found is None:
            return file
        # The file itself, and not a link to it: the link's folder has no file of that name.
        return found.resolve().relative_to(Path(workspace).resolve()).as_posix()
    except (OSError, ValueError):
        return file


def _escaped(text: str, *, data: bool = False) -> str:
    """A text as a property of a command, or as its message."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text if data else text.replace(":", "%3A").replace(",", "%2C")
