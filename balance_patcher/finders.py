"""Be there when certain modules are imported: found as they always are, executed by a loader of ours.

What finds a module is left to the other finders of ``sys.meta_path``; only the loader is wrapped. The module
and its spec keep the loader that Python gave them, for whoever looks at them afterwards.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class WrappingFinder(importlib.abc.MetaPathFinder):
    """Finds its modules as the other finders do, and wraps their loaders. Subclasses say which, and how."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def wanted(self, fullname: str) -> bool:
        """Whether a module is one of its."""
        raise NotImplementedError

    def wrap(self, fullname: str, loader: Any) -> WrappedLoader:
        """The loader that executes one of its modules."""
        raise NotImplementedError

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Another finder may ask all others as we do, and we are one of those.
        before = getattr(self._asking, "name", None)
        if not self.wanted(fullname) or before == fullname:
            return None
        self._asking.name = fullname
        try:
            spec = self._found(fullname, path, target)
        finally:
            self._asking.name = before
        if spec is not None and spec.loader is not None:
            spec.loader = self.wrap(fullname, spec.loader)
        return spec

    def _found(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the first of the other finders finds."""
        for finder in [finder for finder in sys.meta_path if not isinstance(finder, type(self))]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None


def put(kind: type[WrappingFinder]) -> None:
    """Put a finder of a kind in front of all others; twice is once."""
    if not any(isinstance(finder, kind) for finder in sys.meta_path):
        sys.meta_path.insert(0, kind())


def take_out(kind: type[WrappingFinder]) -> None:
    """Take the finders of a kind out again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, kind)]


class WrappedLoader(importlib.abc.Loader):
    """Another loader, in all but how a module is executed; subclasses say that."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        # For ``inspect``, ``runpy`` and ``pkgutil``, which ask a loader for its code, source, data and path.
        if name == "_loader":  # not made yet, as in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def execute(self, module: ModuleType) -> None:
        """Execute the module as its own loader does; it and its spec have that loader from then on."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
