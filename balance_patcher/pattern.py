"""Patterns: Python text with holes, matched on the syntax tree.

========== ===========================================================================
``$NAME``  one node: an expression, a statement (alone on its line), or an identifier
``$_``     the same, not kept
``$$$REST`` any number of statements or call arguments (``$$$_``: not kept)
``<$OP>``  a comparison operator, ``$COUNT <$OP> self.$CAP``
========== ===========================================================================

A hole that stands twice binds equal nodes. Constants compare by type and value, ``ctx`` is
ignored, formatting and comments do not exist. A compound header without a suite (``while $_``,
``if $A``) matches the statement whatever its suites hold. What cannot be parsed, is only holes,
or could never match is a :class:`~balance_patcher.errors.PatchError` (BP001) at definition.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .bound import children, walk
from .holes import Hole, bad, fill, scan
from .matching import (
    LIST,
    ONE,
    OP,
    Allowed,
    Bindings,
    Found,
    Matcher,
    Mismatch,
    OperatorHole,
    hole_name,
    overlap,
    weight,
)

# `case` is an identifier too: `case.run()`, `case = 1`.
_LOOSE = re.compile(r"\s*((else|elif|except|finally)\b|case\s+(?!(in|is|if|and|or|not)\b)[\w\"'(\[{$-])")
_HEADER = re.compile(r"\s*(if|while|for|with|async|def|class|try)\b")


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern; make it with :func:`compile_pattern`.

    Attributes:
        text: As it was written, dedented.
        nodes: The expression or the statements, holes as marked names.
        kind: ``expression``, ``statement``, ``statements`` or ``header``.
        holes: The names that it binds, list holes with ``$$$`` and operators with ``<$…>`` left out.
    """

    text: str
    nodes: tuple[ast.AST, ...]
    kind: str
    holes: frozenset[str]

    def match(
        self, candidate: ast.AST | Sequence[ast.AST], known: Bindings | None = None, allow: Allowed | None = None
    ) -> Found | Mismatch:
        """Match one node (or, for several statements, a run of them) and return what was bound.

        Args:
            candidate: The node, or the run of statements.
            known: What is bound already.
            allow: For a hole, the texts that it may be bound to.
        """
        matcher = Matcher(allow or {})
        bound = dict(known or {})
        nodes = [candidate] if isinstance(candidate, ast.AST) else list(candidate)
        if self.kind == "statements":
            return matcher.sequence(list(self.nodes), nodes, bound, "statements")
        if len(nodes) != 1:
            return Mismatch("", "one node", f"{len(nodes)} nodes")
        return matcher.node(self.nodes[0], nodes[0], bound, "", header=self.kind == "header")

    def similarity(self, candidate: ast.AST, allow: Allowed | None = None) -> float:
        """How much of the pattern a node has, up to 1; for naming the nearest miss."""
        first = self.nodes[0]
        header = self.kind == "header"
        return overlap(first, candidate, allow or {}, header=header) / weight(first, header=header)

    @cached_property
    def sketch(self) -> tuple[tuple[str, type[ast.AST], str], ...]:
        """What a node has at least that matches: fields of its first node, with their kind and an attribute's name."""
        found: list[tuple[str, type[ast.AST], str]] = []
        first = self.nodes[0]
        for name in first._fields:
            part = getattr(first, name, None)
            if isinstance(part, (ast.Attribute, ast.Call, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Subscript)):
                attribute: str = getattr(part, "attr", "")
                found.append((name, type(part), "" if attribute.startswith(ONE) else attribute))
        return tuple(found)

    @cached_property
    def words(self) -> frozenset[str]:
        """Names and attributes that stand in whatever it matches; where a header has its suite, nothing is named."""
        found = {_identifier(part) for node in self.nodes for part in walk(node)} - {""}
        return frozenset(word for word in found if "__bp_" not in word)

    @property
    def opens(self) -> bool:
        """Whether a list hole stands among the pattern's own statements, so that its length is open."""
        return any(hole_name(node, LIST) is not None for node in self.nodes)

    def __str__(self) -> str:
        return " ".join(line.strip() for line in self.text.splitlines())


@lru_cache(maxsize=512)
def compile_pattern(text: str) -> Pattern:
    """Parse a pattern.

    Raises:
        PatchError: BP001, if it cannot be parsed, is only holes, or could never match.
    """
    text = textwrap.dedent(text).strip("\n").rstrip()
    if "__bp_" in text:
        raise bad(text, "the reserved prefix `__bp_`", "use another name")
    if _LOOSE.match(text):
        raise bad(text, f"a loose `{text.split()[0]}` header", "match the whole statement it belongs to")
    holes = scan(text)
    plain = fill(text, holes, _marker)
    tree, header = _parse(text, plain)
    if any(hole.kind == "op" for hole in holes):
        tree = _Collapse().visit(tree)
    body = list(tree.body)
    if not body:
        raise bad(text, "nothing to match", "write a statement or an expression")
    if all(hole_name(node, ONE) or hole_name(node, LIST) for node in body):
        raise bad(text, "only holes", "give the pattern some structure to hold on to")
    if holes:
        _check_placement(text, tree)
    names = frozenset(hole.name for hole in holes if hole.name != "_")
    if header:
        return Pattern(text, (body[0],), "header", names)
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        return Pattern(text, (body[0].value,), "expression", names)
    return Pattern(text, tuple(body), "statement" if len(body) == 1 else "statements", names)


def _marker(hole: Hole) -> str:
    if hole.kind == "op":
        return f"< {OP}{hole.name} >"
    return (LIST if hole.kind == "list" else ONE) + hole.name


def _parse(text: str, plain: str) -> tuple[ast.Module, bool]:
    try:
        return ast.parse(plain), False
    except SyntaxError as error:
        if _HEADER.match(plain):
            end = ": pass" if not plain.endswith(":") else " pass"
            tail = "\nfinally: pass" if plain.lstrip().startswith("try") else ""
            try:
                tree = ast.parse(plain + end + tail)
            except SyntaxError:
                tree = None
            if tree is not None and len(tree.body) == 1:
                return tree, True
        why = f"not Python ({error.msg})"
    raise bad(text, why, "write the pattern as Python with holes; a header stands alone, without its suite")


class _Collapse(ast.NodeTransformer):
    """Turn ``a < OP > b`` back into one comparison whose operator is a hole."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        ops: list[ast.cmpop] = []
        comparators: list[ast.expr] = []
        parts = list(zip(node.ops, node.comparators, strict=True))
        while parts:
            op, value = parts.pop(0)
            if isinstance(value, ast.Name) and value.id.startswith(OP):
                op = OperatorHole(value.id[len(OP) :])
                _, value = parts.pop(0)
            ops.append(op)
            comparators.append(value)
        return ast.copy_location(ast.Compare(node.left, ops, comparators), node)


def _check_placement(text: str, tree: ast.Module) -> None:
    for node in walk(tree):
        if isinstance(node, ast.arguments) and any(a.arg.startswith(LIST) for a in node.args + node.kwonlyargs):
            raise bad(text, "a list hole among parameters", "use one $NAME for each parameter")
        if isinstance(node, ast.JoinedStr) and "__bp_" in ast.unparse(node):
            raise bad(text, "a hole inside an f-string", "move the expression out of the f-string")
        for word in _words(node):
            if "__bp_" not in word:
                continue
            if isinstance(node, ast.Constant):
                raise bad(text, "a hole inside a string", "match the string as a whole")
            if word.startswith((LIST, OP)) and not isinstance(node, ast.Name):
                raise bad(text, "a list hole in place of an identifier", "use $NAME there")
            if not word.isidentifier():
                raise bad(text, "a hole inside a dotted name", "write the whole name, or make all of it one hole")
        for child in children(node):
            if hole_name(child, LIST) is not None and not _takes_list(node, child):
                next_step = "use $NAME, or put it among statements or arguments"
                raise bad(text, "a list hole where one node stands", next_step)
            if isinstance(child, ast.Name) and child.id.startswith(OP):
                raise bad(text, "an operator hole outside a comparison", "write it between two operands")


def _identifier(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _words(node: ast.AST) -> list[str]:
    """The identifiers and texts that stand in a node itself."""
    fields = [getattr(node, name, None) for name in node._fields]
    values = [value for field in fields for value in (field if isinstance(field, list) else [field])]
    return [repr(value) if isinstance(value, bytes) else value for value in values if isinstance(value, (str, bytes))]


def _takes_list(parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(child, ast.stmt):
        return True
    if isinstance(parent, ast.Expr):
        return True  # its statement is looked at in its own right
    return isinstance(parent, (ast.Call, ast.Tuple, ast.List, ast.Set, ast.BoolOp, ast.ClassDef)) and any(
        isinstance(value, list) and child in value for _, value in ast.iter_fields(parent)
    )
