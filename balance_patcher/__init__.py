"""Patch vLLM at run time from declared deltas; see the README.

Importing this imports nothing else: each name is fetched from its module when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .byname import ask
    from .inspection import status
    from .installation import install, uninstall

__version__ = "0.1.0"
__all__ = ["ask", "install", "status", "uninstall"]

# No module of the package may have one of these names: the import system would put it in the function's place.
_PUBLIC = {"ask": "byname", "install": "installation", "status": "inspection", "uninstall": "installation"}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
