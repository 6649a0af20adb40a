"""Packages that are only there with an extra: found when they are needed, never before.

The base install has no dependencies, so that an engine process imports nothing for our sake. What
only the command line needs is asked for here, inside the function that uses it, and a missing
package is a refusal that says what to install instead of a traceback.
"""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

from .errors import refuse


def require(module: str, extra: str = "cli") -> Any:
    """The imported module, by its import name (``git``, not ``GitPython``).

    Raises:
        PatchError: BP513, if it is not installed or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        what = f"the Python module '{module}' " + (
            "is not installed." if missing else "is installed but cannot be imported."
        )
        raise refuse(
            "BP513",
            what,
            ("cause", str(error).strip()),
            next=command_for(extra),
        ) from error


def command_for(extra: str) -> str:
    """The command that installs an extra from where this package came: its name alone may be somebody else's."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install {shlex.quote(f'balance_patcher[{extra}]{_origin()}')}"


def _origin() -> str:
    """`` @ URL``, if it was installed from one that is known."""
    from importlib import metadata

    try:
        told = json.loads(metadata.distribution("balance_patcher").read_text("direct_url.json") or "{}")
        vcs = told.get("vcs_info")
        return f" @ {vcs['vcs']}+{told['url']}@{vcs['commit_id']}" if vcs else f" @ {told['url']}"
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return ""
