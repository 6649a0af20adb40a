"""One function out of a module's text, as if nothing else stood there.

What the compiler makes of a function depends on the function, on the classes that it stands in, whose names mangle
its private ones, and on what its module imports (``__future__`` statements; and calls of what an imported module has
are compiled in a way of their own): not on what stands beside it. So its symbols and its code are made of those alone,
in a fraction of the time of the whole module. Lines keep their numbers.

Were that wrong for some function, its code would differ from the one that runs, and it would be refused.
"""

from __future__ import annotations

import ast
import symtable
import warnings
from collections.abc import Iterator
from types import CodeType

from .bound import DEFINITIONS, begins_at, definitions
from .errors import refuse
from .outline import FunctionNode, text_alone
from .source import ModuleText


def code_alone(tree: ast.Module, qualname: str, node: FunctionNode, filename: str) -> CodeType:
    """The code object of a function, as an import of its module would make it, without our flags.

    Args:
        tree: Its module's.
        qualname: ``Class.method``.
        node: Its definition; where another tree is given, one that has the same classes around it.
        filename: What tracebacks call its text.

    Raises:
        SyntaxError: If it parses and does not compile.
    """
    body: list[ast.stmt] = [node]
    for owner in reversed(_owners(tree, qualname)):
        # Its type parameters are a scope around its methods.
        body = [_bare(owner, body)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile(ast.Module([*_imports(tree), *body], []), filename, "exec", dont_inherit=True)
    for name in qualname.split("."):
        code = next(inner for inner in inner_codes(code) if inner.co_name == name)
    return code


def _imports(scope: ast.AST) -> Iterator[ast.stmt]:
    """The imports of a module, under ``if`` and ``try`` too, in their order."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not isinstance(child, DEFINITIONS):
            yield from _imports(child)


def _bare(owner: ast.ClassDef, body: list[ast.stmt]) -> ast.ClassDef:
    fields = {name: getattr(owner, name) for name in owner._fields if name not in ("bases", "keywords", "body")}
    fields["decorator_list"] = []
    return ast.copy_location(ast.ClassDef(**fields, bases=[], keywords=[], body=body), owner)


def _owners(tree: ast.Module, qualname: str) -> list[ast.ClassDef]:
    """The classes around a function, the outermost first; each is defined once in its scope."""
    owners: list[ast.ClassDef] = []
    scope: ast.AST = tree
    for name in qualname.split(".")[:-1]:
        scope = next(n for n in definitions(scope) if isinstance(n, ast.ClassDef) and n.name == name)
        owners.append(scope)
    return owners


def inner_codes(scope: CodeType) -> Iterator[CodeType]:
    """The code objects that stand in one; the scopes that PEP 695 adds are looked through."""
    for constant in scope.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name.startswith("<generic parameters of"):
                yield from inner_codes(constant)
            else:
                yield constant


def span(text: ModuleText, node: FunctionNode) -> tuple[int, int]:
    """The first line of a function, its decorators with it, and its last."""
    return first_line(text, node), node.end_lineno or node.lineno


def first_line(text: ModuleText, statement: ast.stmt) -> int:
    """The line where a statement begins, its decorators with it."""
    first = begins_at(statement)
    while getattr(statement, "decorator_list", ()) and not text.lines[first - 1].lstrip(" \t\f").startswith("@"):
        first -= 1
    return first


def symbols_of(text: ModuleText, qualname: str, node: FunctionNode) -> symtable.SymbolTable:
    """The symbol table of a function.

    Raises:
        PatchError: BP508, if its module parses and does not compile.
    """
    first, last = span(text, node)
    # With this one, the names in annotations are not the function's.
    future = "from __future__ import annotations" * _annotates_later(text.outline)
    try:
        # The type parameters of its classes are a scope around it, which bare headers do not have.
        whole = any(getattr(owner, "type_params", ()) for owner in _owners(text.outline, qualname))
        alone = text.text if whole else future + text_alone(text.lines[first - 1 : last], qualname, first)
        table = symtable.symtable(alone, text.display, "exec")
    except SyntaxError:  # its lines alone do not say how deep it stands: a backslash before them, for one
        table = _in_whole(text)
    for name in qualname.split("."):
        found = [child for child in _inner(table) if child.get_name() == name]
        # A definition is unique in its scope (BP106), but a comprehension or a nested scope may share its name.
        table = next((child for child in found if child.get_type() in ("class", "function")), found[0])
    return table


def _in_whole(text: ModuleText) -> symtable.SymbolTable:
    try:
        return symtable.symtable(text.text, text.display, "exec")
    except SyntaxError as error:
        raise refuse(
            "BP508", f"{text.display}:{error.lineno or '?'}: {error.msg}",
            next="no Python can import this text: the file is damaged",
            file=text.display, line=error.lineno,
        ) from error  # fmt: skip


def _annotates_later(tree: ast.Module) -> bool:
    """Whether a module has ``from __future__ import annotations``, however that is written."""
    futures = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__")
    return any(alias.name == "annotations" for node in futures for alias in node.names)


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        if "type param" in str(child.get_type()).lower():
            yield from _inner(child)
        else:
            yield child
