"""Proof that a module's text is the code that runs.

The unmodified text is compiled here and compared with the live function's code object. Equal
means: what we are about to patch is what the process would have run. Everything else is refused
by name: a file that was edited after the import, a wrapper, a function from somewhere else.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from .errors import PatchError, refuse
from .source import ModuleText

_PLAIN = (
    "co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_names", "co_varnames",
    "co_freevars", "co_cellvars", "co_firstlineno", "co_code",
)  # fmt: skip


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
        scopes = [code for scope in scopes for code in _children(scope) if code.co_name == name]
    found = [code for scope in scopes for code in _children(scope)]
    return next((code for code in found if code.co_name == last and code.co_firstlineno == line), None)


def _children(scope: CodeType) -> Iterator[CodeType]:
    for constant in scope.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name.startswith("<generic parameters of"):
                yield from _children(constant)
            else:
                yield constant


def same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects are the same but for columns and file name."""
    if any(getattr(one, name) != getattr(other, name) for name in _PLAIN):
        return False
    if list(one.co_lines()) != list(other.co_lines()):
        return False
    if getattr(one, "co_exceptiontable", b"") != getattr(other, "co_exceptiontable", b""):
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


def inner_functions(function: Any) -> Iterator[FunctionType]:
    """The functions that a wrapper reaches through ``__wrapped__`` and its closure cells, nearest first."""
    seen: set[int] = set()
    queue = [function]
    while queue:
        current = queue.pop(0)
        current = getattr(current, "__func__", current)
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, FunctionType):
            if current is not function:
                yield current
            for cell in current.__closure__ or ():
                try:
                    queue.append(cell.cell_contents)
                except ValueError:
                    continue
        if hasattr(current, "__wrapped__"):
            queue.append(current.__wrapped__)


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """``co_firstlineno`` of a definition."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def prove(text: ModuleText, qualname: str, node: ast.FunctionDef | ast.AsyncFunctionDef, live: object) -> FunctionType:
    """Prove that a definition in a module's text is what a live attribute runs.

    Args:
        text: The module's text as it is on disk.
        qualname: The function's qualified name in it.
        node: Its definition in ``text.tree``.
        live: The attribute as the class's ``__dict__`` has it.

    Returns:
        The plain function that runs: ``live`` itself, or the one inside upstream's own decorator.

    Raises:
        PatchError: BP601, BP602, BP603 by name, file and line; BP604 if it has no code to compare.
    """
    expected = find_code(compile_text(text.text, text.display), qualname, first_line(node))
    function = live.__func__ if isinstance(live, (staticmethod, classmethod)) else live
    target = ("target", f"{text.module}:{qualname}   ({text.display}:{node.lineno})")
    if not isinstance(function, FunctionType):
        inner = [found for found in inner_functions(function) if expected and same_code(found.__code__, expected)]
        kind = f"{type(function).__module__}.{type(function).__qualname__}"
        if inner:
            raise _wrapped(target, f"an object of {kind}", kind)
        raise refuse(
            "BP604", f"{qualname} is an object of {kind}, which has no code to compare", target,
            next="find out who put it there; it must be a plain function",
        )  # fmt: skip
    if expected is None:
        raise _edited(target, qualname, function)
    if same_code(function.__code__, expected):
        return function
    for inner_function in inner_functions(function):
        if same_code(inner_function.__code__, expected):
            if node.decorator_list and _from_upstream(function, text.module):
                return inner_function
            raise _wrapped(target, _place(function), function.__qualname__)
    if function.__code__.co_filename == text.display:
        raise _edited(target, qualname, function)
    raise refuse(
        "BP603", f"{qualname} is not upstream's function but {_place(function)}", target,
        next="remove the other patch, or import it after balance_patcher and let it call through",
    )  # fmt: skip


def _wrapped(target: tuple[str, str], by: str, name: str) -> PatchError:
    return refuse(
        "BP602", f"by {by}", target,
        next=f"install balance_patcher before {name} is applied, or remove that wrapper",
    )  # fmt: skip


def _edited(target: tuple[str, str], qualname: str, function: FunctionType) -> PatchError:
    return refuse(
        "BP601", f"{qualname} as it runs was not compiled from this text", target, ("running", _place(function)),
        next="restart the process: the file was changed after vLLM was imported",
    )  # fmt: skip


def _from_upstream(function: FunctionType, module: str) -> bool:
    return function.__globals__.get("__name__", "").partition(".")[0] == module.partition(".")[0]


def _place(function: FunctionType) -> str:
    """``module.name (file:line)`` of a live function."""
    code = function.__code__
    where = function.__globals__.get("__name__", function.__module__)
    return f"{where}.{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
