"""Packages that are only there with an extra: found when they are needed, never before.

The base install has no dependencies, so that an engine process imports nothing for our sake. What
only the command line needs is asked for here, inside the function that uses it, and a missing
package is a refusal that says what to install instead of a traceback.
"""

from __future__ import annotations

import importlib
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
            next=f"pip install 'balance_patcher[{extra}]'",
        ) from error
