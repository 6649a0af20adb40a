"""Proof that a module's text is the code that runs.

The unmodified text is compiled here and compared with the live function's code object. Equal
means: what we are about to patch is what the process would have run. Everything else is refused
by name: a file that was edited after the import, a wrapper, a function from somewhere else.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial, partialmethod
from types import CodeType, FunctionType, MethodType
from typing import Any

from .alone import code_alone, inner_codes
from .byname import COMPOSE, composable
from .errors import Failure, PatchError
from .source import ModuleText

_PLAIN = (
    "co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags",
    "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_firstlineno", "co_code",
)  # fmt: skip
_SINCE_3_11 = ("co_qualname", "co_exceptiontable")
#: How many objects are looked at behind a wrapper before it is taken for a replacement.
_REACH = 500


@lru_cache(maxsize=4)
def compile_text(text: str, filename: str) -> CodeType:
    """Compile a module's text the way an import would, without warnings and without our flags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(text, filename, "exec", dont_inherit=True)


def find_code(module: CodeType, qualname: str, line: int) -> CodeType | None:
    """The code object of one function in a compiled module, by qualified name and first line.

    Args:
        module: The compiled module.
        qualname: ``Class.method``; the scopes that PEP 695 adds are looked through.
        line: ``co_firstlineno``: the line of its first decorator, else of its ``def``.
    """
    scopes = [module]
    *outer, last = qualname.split(".")
    for name in outer:
        scopes = [code for scope in scopes for code in inner_codes(scope) if code.co_name == name]
    found = [code for scope in scopes for code in inner_codes(scope)]
    return next((code for code in found if code.co_name == last and code.co_firstlineno == line), None)


def take(code: CodeType, *names: str) -> CodeType:
    """A code object out of a text of ours, by the names of the scopes around it."""
    for name in names:
        code = next(inner for inner in code.co_consts if isinstance(inner, CodeType) and inner.co_name == name)
    return code


def same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects are the same but for columns and file name."""
    if any(getattr(one, name) != getattr(other, name) for name in _PLAIN):
        return False
    if any(getattr(one, name, None) != getattr(other, name, None) for name in _SINCE_3_11):
        return False
    if list(one.co_lines()) != list(other.co_lines()):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return same_code(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_constant, one, other))
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return sorted(map(_typed, one)) == sorted(map(_typed, other))
    return _typed(one) == _typed(other)


def _typed(value: object) -> str:
    return f"{type(value).__name__}:{value!r}"


def reached(live: object, *, kept: bool = True) -> Iterator[tuple[FunctionType, tuple[object, ...]]]:
    """The functions that an attribute is or can call, each with what stands around it, the outermost first.

    Looked through are ``__wrapped__``, closure cells, defaults, attributes of functions and of callable
    objects, bound methods, partial objects, and the functions that the outermost one names in its module.

    Args:
        live: The attribute.
        kept: Also what a function only keeps, as ``__wrapped__`` or another attribute. A copy that replaces a function
            may keep that and never call it.
    """
    seen: dict[int, object] = {}
    queue: list[tuple[object, tuple[object, ...]]] = [(live, ())]
    # Depth first, and first along `__wrapped__`: `functools.wraps` copies the attributes of what it wraps, and by
    # such a copy a wrapper in between would be passed over.
    while queue and len(seen) < _REACH:
        current, around = queue.pop()
        if id(current) in seen:
            continue
        seen[id(current)] = current
        if isinstance(current, FunctionType):
            yield current, around
        held = list(_held(current, kept=kept))
        if not around and isinstance(current, FunctionType):
            named = [current.__globals__.get(name) for name in current.__code__.co_names]
            held += [value for value in named if isinstance(value, FunctionType)]
        queue += [(inner, (*around, current)) for inner in reversed(held) if _callable(inner)]


def inner_functions(function: object) -> Iterator[FunctionType]:
    """The functions that a wrapper calls, as far as can be seen, see :func:`reached`; itself is left out."""
    return (inner for inner, _ in reached(function, kept=False) if inner is not function)


def _held(current: Any, *, kept: bool) -> Iterator[object]:
    kept = kept or not isinstance(current, FunctionType)
    if kept:
        with suppress(Exception):  # a foreign object may do anything when it is asked
            yield current.__wrapped__
    if isinstance(current, FunctionType):
        for cell in current.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from current.__defaults__ or ()
        yield from (current.__kwdefaults__ or {}).values()
    elif isinstance(current, (staticmethod, classmethod)):
        yield current.__func__
    elif isinstance(current, MethodType):
        yield from (current.__func__, current.__self__)
    elif isinstance(current, (partial, partialmethod)):
        yield from (current.func, *current.args, *current.keywords.values())
    elif isinstance(current, property):
        yield from (current.fget, current.fset, current.fdel)
    for name in (name for kind in type(current).__mro__ for name in _slots(kind)):
        with suppress(Exception):
            yield getattr(current, name)
    if kept:
        with suppress(Exception):
            yield from vars(current).values()


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _callable(value: object) -> bool:
    return isinstance(value, classmethod) or (callable(value) and not isinstance(value, type))


def prove(text: ModuleText, qualname: str, node: ast.FunctionDef | ast.AsyncFunctionDef, live: object) -> FunctionType:
    """Prove that a definition in a module's text is what a live attribute runs.

    Args:
        text: The module's text as it is on disk.
        qualname: The function's qualified name in it.
        node: Its definition in ``text.outline``, complete.
        live: The attribute as the class's ``__dict__`` has it.

    Returns:
        The plain function that runs: ``live`` itself, or the one inside upstream's own decorator.

    Raises:
        PatchError: BP601, BP602, BP603 by name, file and line; BP604 if it has no code to compare.
    """
    try:
        expected = code_alone(text.outline, qualname, node, text.display)
    except SyntaxError:  # it parses and does not compile: nothing that runs was made of it
        expected = None
    target = ("target", f"{text.module}:{qualname}   ({text.display}:{node.lineno})")
    for function, around in reached(live):
        same = expected is not None and _of_module(function, text.module) and same_code(function.__code__, expected)
        if not same and not _stands_in(function, text, qualname):
            continue
        # A decorator in upstream's own text is upstream's; without one, whatever stands around is foreign.
        foreign = [outer for outer in around if not (node.decorator_list and _from_upstream(outer, text.module))]
        failures = [_wrapped(target, foreign)] if foreign else []
        if not same:
            failures.append(_edited(target, qualname, function))
        if failures:
            raise PatchError(*failures)
        return function
    plain = live.__func__ if isinstance(live, (staticmethod, classmethod)) else live
    if isinstance(plain, FunctionType):
        raise PatchError(Failure(
            "BP603", f"{qualname} is not upstream's function but {place_of(live)}",
            f"remove the other patch, let it call through and import it after balance_patcher, {_or_keep(plain)}",
            (target,),
        ))  # fmt: skip
    raise PatchError(Failure(
        "BP604", f"{qualname} is {place_of(live)}, which has no code to compare",
        "find out who put it there; it must be a plain function", (target,),
    ))  # fmt: skip


def _wrapped(target: tuple[str, str], foreign: list[object]) -> Failure:
    return Failure(
        "BP602", f"by {' around '.join(map(place_of, foreign))}",
        f"install balance_patcher before {_name(foreign[0])} is applied, remove that wrapper, {_or_keep(*foreign)}",
        (target,),
    )  # fmt: skip


def _or_keep(*foreign: object) -> str:
    names = [in_module(function) for function in foreign if isinstance(function, FunctionType)]
    if names and all(map(composable, names)):
        return f"or ask for both: {COMPOSE}={','.join(names)}"
    return "or switch one of the two off"


def _edited(target: tuple[str, str], qualname: str, function: FunctionType) -> Failure:
    return Failure(
        "BP601", f"{qualname} as it runs was not compiled from this text",
        "restart the process: the file was changed after vLLM was imported", (target, ("running", place_of(function))),
    )  # fmt: skip


def _of_module(function: FunctionType, module: str) -> bool:
    """Whether a function reads its globals from a module; equal code on other globals is another function."""
    return bool(function.__globals__.get("__name__") == module)


def _stands_in(function: FunctionType, text: ModuleText, qualname: str) -> bool:
    """Whether a live function is the one of that name in the module's file, whatever its code is now."""
    code = function.__code__
    # Before 3.11 only the function knows its qualified name, which `functools.wraps` copies.
    full = getattr(code, "co_qualname", function.__qualname__)
    named = full == qualname and code.co_name == qualname.rpartition(".")[2]
    return named and _of_module(function, text.module) and _same_file(code.co_filename, text.display)


def _same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _from_upstream(outer: object, module: str) -> bool:
    if isinstance(outer, (staticmethod, classmethod)):
        return True
    name = outer.__globals__.get("__name__", "") if isinstance(outer, FunctionType) else ""
    return bool(name.partition(".")[0] == module.partition(".")[0])


def in_module(function: FunctionType) -> str:
    """``module:Qual.name`` of a function as its code has it: by this name an operator asks for it."""
    module = function.__globals__.get("__name__", function.__module__)
    return f"{module}:{getattr(function.__code__, 'co_qualname', function.__qualname__)}"


def _name(live: object) -> str:
    if isinstance(live, FunctionType):
        # Not the function's own `__qualname__`, which `functools.wraps` makes upstream's.
        where = live.__globals__.get("__name__", live.__module__)
        return f"{where}.{getattr(live.__code__, 'co_qualname', live.__code__.co_name)}"
    return f"{type(live).__module__}.{type(live).__qualname__}"


def place_of(live: object) -> str:
    """``module.name (file:line)`` of a live function, or the same of a callable object's class."""
    if isinstance(live, FunctionType):
        return f"{_name(live)} ({live.__code__.co_filename}:{live.__code__.co_firstlineno})"
    if isinstance(live, (partial, partialmethod, MethodType, staticmethod, classmethod)):
        inner = live.func if isinstance(live, (partial, partialmethod)) else live.__func__
        return f"an object of {_name(live)} over {place_of(inner)}"
    call = next((vars(kind)["__call__"] for kind in type(live).__mro__ if "__call__" in vars(kind)), None)
    where = f" ({call.__code__.co_filename}:{call.__code__.co_firstlineno})" if isinstance(call, FunctionType) else ""
    return f"an object of {_name(live)}{where}"
