"""The signature of a host's function: what its parameters are, and whether anything runs for it.

Defaults and annotations are run where a function is defined. So they are part of what a module does.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable

from .targets import FunctionNode

#: What an annotation may be made of: nothing of it calls anything.
_INERT = (
    ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.BinOp, ast.BitOr, ast.expr_context,
)  # fmt: skip


def strange_signature(node: FunctionNode, declared: Iterable[str], copied: FunctionNode | None) -> str | None:
    """Why a function's signature is not accounted for, if it is not.

    Args:
        node: The function.
        declared: The parameters that it may have, as they are written, without annotations.
        copied: The upstream function that it began as.
    """
    if isinstance(node, ast.AsyncFunctionDef):
        return "it is async"
    if getattr(node, "type_params", None):
        return "it has type parameters"
    annotations = [argument.annotation for argument in _all(node.args)]
    for annotation in [*annotations, node.returns]:
        if annotation is not None and not all(isinstance(part, _INERT) for part in ast.walk(annotation)):
            return f"something runs in its annotation `{ast.unparse(annotation)}`"
    known = [_bare(_parsed(text)) for text in declared]
    known += [_bare(copied.args)] if copied is not None else []
    found = _bare(node.args)
    if found in known:
        return None
    return f"its parameters are ({found}); known are {' and '.join(f'({text})' for text in known) or 'none'}"


def _parsed(text: str) -> ast.arguments:
    (made,) = ast.parse(f"def probe({text}): pass").body
    assert isinstance(made, ast.FunctionDef)  # noqa: S101 - it was just written
    return made.args


def _bare(arguments: ast.arguments) -> str:
    """Parameters as they are written, without annotations."""
    bare = copy.deepcopy(arguments)
    for argument in _all(bare):
        argument.annotation = None
    return ast.unparse(bare)


def _all(arguments: ast.arguments) -> list[ast.arg]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [*named, *(extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None)]
