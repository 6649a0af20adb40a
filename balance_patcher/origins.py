"""Where a live object comes from, and what stands around it: who put it there, by module, file and line.

Nothing here imports anything, and nothing fails because a module is half imported or odd.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .proof import reached

#: What stands where nothing stands: an attribute that is to be added.
MISSING = object()

#: Our classes, each with the one of upstream's that it extends and stands in the name of.
_OURS: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def note_ours(cls: type, upstream: type) -> None:
    """Remember a class that was made here, and what it extends."""
    _OURS[cls] = upstream


def is_ours(cls: type) -> bool:
    """Whether a class was made here, or carries a feature in one that was."""
    return cls in _OURS


def genuine(found: Any) -> Any:
    """Upstream's own class where one of ours is bound in its name; anything else is itself.

    What is edited in place is edited there, whatever else of ours is bound, and in whatever order.
    """
    return _OURS.get(found, found) if isinstance(found, type) else found


@dataclass(frozen=True)
class Origin:
    """Where an object was defined.

    Attributes:
        name: ``module.qualified.name`` as its code has it, not as ``functools.wraps`` says.
        module: The module whose globals it uses.
        file: Its file, or the name under which its text is shown; ``None`` where it has none.
        line: The line of its definition; ``None`` where that is not known.
    """

    name: str
    module: str
    file: str | None
    line: int | None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.name} ({where})" if where else self.name


def shown(code: CodeType) -> bool:
    """Whether code was made here, of a text that is shown under a name of ours."""
    return code.co_filename.startswith("<balance_patcher ")


def origin_of(live: Any) -> Origin:
    """Where a function, class or other attribute was defined."""
    if live is MISSING:
        return Origin("nothing", "", None, None)
    plain = live.__func__ if isinstance(live, (staticmethod, classmethod)) else live
    if isinstance(plain, FunctionType):
        module = str(plain.__globals__.get("__name__", plain.__module__))
        code = plain.__code__
        # Ours keep upstream's name in their code; what they are called is what was put on the function.
        named = plain.__qualname__ if shown(code) else None
        qualname = named or getattr(code, "co_qualname", code.co_name)
        return Origin(f"{module}.{qualname}", module, code.co_filename, code.co_firstlineno)
    kind = plain if isinstance(plain, type) else type(plain)
    file, line = _defined(kind)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return Origin(name if kind is plain else f"an object of {name}", str(kind.__module__), file, line)


def _defined(kind: type) -> tuple[str | None, int | None]:
    """File and line of a class; found in its source where that can be read."""
    file = line = None
    with suppress(Exception):
        file = inspect.getfile(kind)
        line = inspect.findsource(kind)[1] + 1
    return file, line


def wrapped_by(live: Any, inner: Any) -> tuple[Origin, ...] | None:
    """What stands around ``inner`` in an attribute, the outermost first; ``None`` where it is not reached."""
    wanted = inner.__func__ if isinstance(inner, (staticmethod, classmethod)) else inner
    if live is inner or live is wanted:
        return ()
    if isinstance(live, type) and isinstance(wanted, type):
        return tuple(map(origin_of, live.__mro__[: live.__mro__.index(wanted)])) if wanted in live.__mro__ else None
    for function, around in reached(live):
        if function is wanted:
            return tuple(origin_of(outer) for outer in around if not isinstance(outer, (staticmethod, classmethod)))
    return None


def imported(name: str) -> ModuleType | None:
    """A module, if this process has imported it to its end; it is not imported for this."""
    module = sys.modules.get(name)
    if not isinstance(module, ModuleType):
        return None
    return None if getattr(vars(module).get("__spec__"), "_initializing", False) else module


def attribute_at(target: str) -> tuple[bool, Any]:
    """Whether ``module:Qual.name`` is there in this process, and what its class or module holds under that name."""
    module_name, _, qualname = target.partition(":")
    found: Any = imported(module_name)
    *outer, last = qualname.split(".")
    for part in outer:
        found = vars(found).get(part) if isinstance(found, (type, ModuleType)) else None
    for owner in (found, genuine(found)):
        if isinstance(owner, (type, ModuleType)) and last in vars(owner):
            return True, vars(owner)[last]
    return False, None
