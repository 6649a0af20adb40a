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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

from .errors import PatchError, refuse

#: What a hole can be bound to: a node, an identifier, or a list of nodes.
Bound = Union[ast.AST, str, "tuple[ast.AST, ...]"]
Bindings = Mapping[str, Bound]
Found = dict[str, Bound]
#: For a hole, the texts that it may be bound to.
Allowed = Mapping[str, "tuple[str, ...]"]

_ONE, _LIST, _OP = "__bp_one_", "__bp_list_", "__bp_op_"
_HOLE = re.compile(
    r"<\$(?P<op>[A-Z][A-Z0-9_]*|_)>|\$\$\$(?P<list>[A-Z][A-Z0-9_]*|_)(?!\w)|\$(?P<one>[A-Z][A-Z0-9_]*|_)(?!\w)"
)
_QUOTE = re.compile(r"(?P<prefix>[A-Za-z]{0,2})(?P<quote>'''|\"\"\"|'|\")")
_SKIPPED = {"ctx", "type_comment", "kind", "type_ignores"}
_SUITES = {"body", "orelse", "handlers", "finalbody", "cases", "decorator_list"}
# `case` is an identifier too: `case.run()`, `case = 1`.
_LOOSE = re.compile(r"\s*((else|elif|except|finally)\b|case\s+(?!(in|is|if|and|or|not)\b)[\w\"'(\[{$-])")
_HEADER = re.compile(r"\s*(if|while|for|with|async|def|class|try)\b")

#: Comparison operators as they are written.
OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip


@dataclass(frozen=True)
class Hole:
    """A hole in a text: its span, its kind (``one``, ``list``, ``op``) and its name."""

    start: int
    end: int
    kind: str
    name: str


@dataclass(frozen=True)
class Mismatch:
    """Where a node first differs from a pattern.

    Attributes:
        path: The field, from the statement down: ``test.comparators[0].attr``.
        wanted: What the pattern has there.
        found: What the node has there.
    """

    path: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"differs at {self.path or 'the node itself'}: {self.wanted} → {self.found}"


def scan(text: str) -> list[Hole]:
    """The holes of a text, outside strings and comments.

    Raises:
        PatchError: BP001, for a hole inside an f-string, a ``$`` that is no hole, or a hole that is
            a part of a longer name.
    """
    holes, at = [], 0
    while at < len(text):
        char = text[at]
        if char == "#":
            at = (text.find("\n", at) + 1) or len(text)
        elif (match := _QUOTE.match(text, at)) and not (match["prefix"] and _in_word(text, at)):
            end = _string_end(text, match.end(), match["quote"])
            if "f" in match["prefix"].lower() and _hole_in_braces(text[match.end() : end]):
                raise _bad(text, "a hole inside an f-string", "move the expression out of the f-string")
            at = end
        elif (match := _HOLE.match(text, at)) and not (char == "$" and _in_word(text, at)):
            if text.startswith(">=", match.end() - 1):
                raise _bad(text, f"`{match.group()}=` is no hole", "an operator hole stands for the whole operator")
            kind = match.lastgroup or ""
            holes.append(Hole(at, match.end(), kind, match[kind]))
            at = match.end()
        elif char == "$":
            raise _bad(text, f"`{text[at : at + 8]}` is no hole", "write $NAME, $_, $$$NAME or <$OP> in capitals")
        else:
            at += 1
    return holes


def _in_word(text: str, at: int) -> bool:
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_")


def _string_end(text: str, at: int, quote: str) -> int:
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        else:
            at += 1
    return len(text)


def _hole_in_braces(body: str) -> bool:
    depth, at = 0, 0
    while at < len(body):
        if body[at : at + 2] in ("{{", "}}") and depth == 0:
            at += 2
            continue
        depth += (body[at] == "{") - (body[at] == "}")
        if depth > 0 and body[at] == "$":
            return True
        at += 1
    return False


def _bad(text: str, why: str, next_step: str) -> PatchError:
    shown = textwrap.shorten(" ".join(text.split()), 100)
    return refuse("BP001", f"{why} in `{shown}`", next=next_step)


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
        matcher = _Matcher(allow or {})
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
        return _overlap(first, candidate, allow or {}, header=header) / _weight(first, header=header)

    @property
    def opens(self) -> bool:
        """Whether a list hole stands among the pattern's own statements, so that its length is open."""
        return any(_hole(node, _LIST) is not None for node in self.nodes)

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
        raise _bad(text, "the reserved prefix `__bp_`", "use another name")
    if _LOOSE.match(text):
        raise _bad(text, f"a loose `{text.split()[0]}` header", "match the whole statement it belongs to")
    holes = scan(text)
    plain = _fill(text, holes, _marker)
    tree, header = _parse(text, plain)
    tree = _Collapse().visit(tree)
    body = list(tree.body)
    if not body:
        raise _bad(text, "nothing to match", "write a statement or an expression")
    if all(_hole(node, _ONE) or _hole(node, _LIST) for node in body):
        raise _bad(text, "only holes", "give the pattern some structure to hold on to")
    _check_placement(text, tree)
    names = frozenset(hole.name for hole in holes if hole.name != "_")
    if header:
        return Pattern(text, (body[0],), "header", names)
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        return Pattern(text, (body[0].value,), "expression", names)
    return Pattern(text, tuple(body), "statement" if len(body) == 1 else "statements", names)


def _marker(hole: Hole) -> str:
    if hole.kind == "op":
        return f"< {_OP}{hole.name} >"
    return (_LIST if hole.kind == "list" else _ONE) + hole.name


def _fill(text: str, holes: Sequence[Hole], put: Callable[[Hole], str]) -> str:
    parts, at = [], 0
    for hole in holes:
        parts += [text[at : hole.start], put(hole)]
        at = hole.end
    return "".join([*parts, text[at:]])


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
    raise _bad(text, why, "write the pattern as Python with holes; a header stands alone, without its suite")


class _Collapse(ast.NodeTransformer):
    """Turn ``a < OP > b`` back into one comparison whose operator is a hole."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        ops: list[ast.cmpop] = []
        comparators: list[ast.expr] = []
        parts = list(zip(node.ops, node.comparators, strict=True))
        while parts:
            op, value = parts.pop(0)
            if isinstance(value, ast.Name) and value.id.startswith(_OP):
                op = _OperatorHole(value.id[len(_OP) :])
                _, value = parts.pop(0)
            ops.append(op)
            comparators.append(value)
        return ast.copy_location(ast.Compare(node.left, ops, comparators), node)


class _OperatorHole(ast.cmpop):
    """Stands in a pattern for any comparison operator."""

    _fields = ()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def _check_placement(text: str, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments) and any(a.arg.startswith(_LIST) for a in node.args + node.kwonlyargs):
            raise _bad(text, "a list hole among parameters", "use one $NAME for each parameter")
        if isinstance(node, ast.JoinedStr) and "__bp_" in ast.unparse(node):
            raise _bad(text, "a hole inside an f-string", "move the expression out of the f-string")
        for word in _words(node):
            if "__bp_" not in word:
                continue
            if isinstance(node, ast.Constant):
                raise _bad(text, "a hole inside a string", "match the string as a whole")
            if word.startswith((_LIST, _OP)) and not isinstance(node, ast.Name):
                raise _bad(text, "a list hole in place of an identifier", "use $NAME there")
            if not word.isidentifier():
                raise _bad(text, "a hole inside a dotted name", "write the whole name, or make all of it one hole")
        for child in ast.iter_child_nodes(node):
            if _hole(child, _LIST) is not None and not _takes_list(node, child):
                next_step = "use $NAME, or put it among statements or arguments"
                raise _bad(text, "a list hole where one node stands", next_step)
            if isinstance(child, ast.Name) and child.id.startswith(_OP):
                raise _bad(text, "an operator hole outside a comparison", "write it between two operands")


def _words(node: ast.AST) -> list[str]:
    """The identifiers and texts that stand in a node itself."""
    values = [value for _, field in ast.iter_fields(node) for value in (field if isinstance(field, list) else [field])]
    return [repr(value) if isinstance(value, bytes) else value for value in values if isinstance(value, (str, bytes))]


def _takes_list(parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(child, ast.stmt):
        return True
    if isinstance(parent, ast.Expr):
        return True  # its statement is looked at in its own right
    return isinstance(parent, (ast.Call, ast.Tuple, ast.List, ast.Set, ast.BoolOp, ast.ClassDef)) and any(
        isinstance(value, list) and child in value for _, value in ast.iter_fields(parent)
    )


def _hole(node: ast.AST, prefix: str) -> str | None:
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Name) and node.id.startswith(prefix):
        return node.id[len(prefix) :]
    return None


def kind_of(value: object) -> str:
    """How to name a node or a field's value to a person."""
    if isinstance(value, ast.AST):
        if isinstance(value, _OperatorHole):
            return "any operator"
        if type(value) in OPERATORS:
            return OPERATORS[type(value)]  # type: ignore[index]
        if isinstance(value, ast.Name):
            return f"`{value.id}`"
        if isinstance(value, ast.Constant):
            return repr(value.value)
        return type(value).__name__
    return f"`{value}`" if isinstance(value, str) else repr(value)


class _Matcher:
    """One match; ``allow`` limits what its holes can be bound to."""

    def __init__(self, allow: Allowed) -> None:
        self.allow = allow

    def node(self, pat: ast.AST, node: ast.AST, bound: Found, path: str, *, header: bool = False) -> Found | Mismatch:
        name = _hole(pat, _ONE)
        if name is not None:
            if isinstance(pat, ast.Expr) and not isinstance(node, ast.stmt):
                return Mismatch(path, "a statement", kind_of(node))
            if isinstance(node, ast.keyword):
                return Mismatch(path, "a positional argument", kind_of(node))
            return self.bind(name, node, bound, path)
        if isinstance(pat, _OperatorHole):
            return self.bind(pat.name, node, bound, path)
        if type(pat) is not type(node):
            return Mismatch(path, kind_of(pat), kind_of(node))
        open_call = isinstance(pat, ast.Call) and _takes_keywords(pat)
        for field, wanted in ast.iter_fields(pat):
            if field in _SKIPPED or (header and field in _SUITES) or (open_call and field == "keywords"):
                continue
            found = getattr(node, field, None)
            if open_call and field == "args":
                found = [*node.args, *node.keywords]  # type: ignore[attr-defined]
            result = self.value(pat, wanted, found, bound, f"{path}.{field}" if path else field)
            if isinstance(result, Mismatch):
                return result
            bound = result
        return bound

    def value(self, pat: ast.AST, wanted: object, found: object, bound: Found, path: str) -> Found | Mismatch:
        if isinstance(wanted, list):
            return self.sequence(wanted, found if isinstance(found, list) else [], bound, path)
        if isinstance(wanted, ast.AST):
            if not isinstance(found, ast.AST):
                return Mismatch(path, kind_of(wanted), "nothing")
            return self.node(wanted, found, bound, path)
        if isinstance(wanted, str) and wanted.startswith(_ONE) and not isinstance(pat, ast.Constant):
            if not isinstance(found, str):
                return Mismatch(path, "an identifier", kind_of(found))
            return self.bind(wanted[len(_ONE) :], found, bound, path)
        if type(wanted) is type(found) and repr(wanted) == repr(found):
            return bound
        return Mismatch(path, kind_of(wanted), "nothing" if found is None else kind_of(found))

    def sequence(self, pats: list[ast.AST], nodes: list[ast.AST], bound: Found, path: str) -> Found | Mismatch:
        for at, pat in enumerate(pats):
            name = _hole(pat, _LIST) if isinstance(pat, ast.AST) else None
            if name is not None:
                return self.rest(name, pats[at + 1 :], nodes[at:], bound, path)
            if at >= len(nodes):
                return Mismatch(f"{path}[{at}]", kind_of(pat), "nothing")
            result = self.value(pat, pat, nodes[at], bound, f"{path}[{at}]")
            if isinstance(result, Mismatch):
                return result
            bound = result
        if len(nodes) > len(pats):
            return Mismatch(f"{path}[{len(pats)}]", "nothing", kind_of(nodes[len(pats)]))
        return bound

    def rest(self, name: str, pats: list[ast.AST], nodes: list[ast.AST], bound: Found, path: str) -> Found | Mismatch:
        last: Found | Mismatch = Mismatch(path, "more", "nothing")
        for taken in range(len(nodes) + 1):
            last = self.bind(name, tuple(nodes[:taken]), bound, path)
            if not isinstance(last, Mismatch):
                last = self.sequence(pats, nodes[taken:], last, path)
            if not isinstance(last, Mismatch):
                break
        return last

    def bind(self, name: str, value: Bound, bound: Found, path: str) -> Found | Mismatch:
        if name == "_":
            return bound
        if name in bound:
            if same(bound[name], value):
                return bound
            return Mismatch(path, f"the same as ${name} before", render_bound(value))
        if name in self.allow and render_bound(value) not in self.allow[name]:
            return Mismatch(path, " or ".join(self.allow[name]), render_bound(value))
        return {**bound, name: value}


def _takes_keywords(call: ast.Call) -> bool:
    """A call whose last argument is a list hole takes keyword arguments too."""
    return bool(call.args) and not call.keywords and _hole(call.args[-1], _LIST) is not None


def same(one: Bound, other: Bound) -> bool:
    """Whether two bound values are equal trees; an identifier equals the name node of it."""
    if isinstance(one, ast.Name) and isinstance(other, str):
        return one.id == other
    if isinstance(other, ast.Name) and isinstance(one, str):
        return other.id == one
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, ast.AST) and isinstance(other, ast.AST):
        return not isinstance(_Matcher({}).node(one, other, {}, ""), Mismatch)
    return one == other


def render_bound(value: Bound) -> str:
    """A bound value as Python text on one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(map(render_bound, value))
    if type(value) in OPERATORS:
        return OPERATORS[type(value)]  # type: ignore[index]
    return ast.unparse(value)


#: What needs no parentheses, or cannot have any.
_ATOMS = (
    ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict, ast.Set, ast.keyword,
    ast.Slice, ast.Starred,
)  # fmt: skip


@dataclass(frozen=True)
class Template:
    """Text that an edit puts in, with the holes that its anchor binds."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", textwrap.dedent(self.text).strip("\n").rstrip())

    @property
    def holes(self) -> frozenset[str]:
        return frozenset(hole.name for hole in scan(self.text))

    def fill(self, bound: Bindings) -> str:
        """The text with every hole replaced by what was bound.

        Raises:
            PatchError: BP002, for a hole that the anchor does not bind, or statements within a line.
        """

        def put(hole: Hole) -> str:
            if hole.name not in bound:
                raise refuse(
                    "BP002", f"`${hole.name}` is used in an edit but no anchor binds it",
                    ("text", self.text), next="bind it in the anchor's pattern or write it out",
                )  # fmt: skip
            value = bound[hole.name]
            nodes = value if isinstance(value, tuple) else (value,)
            if any(isinstance(node, ast.stmt) for node in nodes):
                return self._statements(hole, nodes)
            text = render_bound(value)
            if isinstance(value, ast.expr) and not isinstance(value, _ATOMS):
                text = f"({text})"
            return text

        return _fill(self.text, scan(self.text), put)

    def _statements(self, hole: Hole, nodes: Sequence[Bound]) -> str:
        """Statements, each on lines of its own, at the hole's indentation."""
        indent = self.text[: hole.start].rpartition("\n")[2]
        if indent.strip() or self.text[hole.end :].partition("\n")[0].strip():
            raise refuse(
                "BP002", f"`${hole.name}` is bound to statements and stands within a line", ("text", self.text),
                next="give it a line of its own",
            )  # fmt: skip
        lines = [line for node in nodes for line in render_bound(node).split("\n")]
        return f"\n{indent}".join(lines)


def _weight(node: ast.AST, *, header: bool = False) -> int:
    fields = (value for field, value in ast.iter_fields(node) if not (header and field in _SUITES))
    children = [child for value in fields for child in (value if isinstance(value, list) else [value])]
    return 1 + sum(_weight(child) for child in children if isinstance(child, ast.AST) and not _is_context(child))


def _is_context(node: ast.AST) -> bool:
    return isinstance(node, ast.expr_context)


def _overlap(pat: ast.AST, node: ast.AST, allow: Allowed, *, header: bool = False) -> float:
    if _is_context(pat):
        return 0.0
    hole = _hole(pat, _ONE)
    if isinstance(pat, _OperatorHole):
        hole = pat.name
    if hole is not None:
        return float(hole not in allow or render_bound(node) in allow[hole])
    if type(pat) is not type(node):
        return 0.0
    score = 1.0
    for field, wanted in ast.iter_fields(pat):
        if field in _SKIPPED or (header and field in _SUITES):
            continue
        found = getattr(node, field, None)
        if isinstance(wanted, list):
            pairs = zip(wanted, found or [], strict=False)
            score += sum(_overlap(p, n, allow) for p, n in pairs if isinstance(p, ast.AST))
        elif isinstance(wanted, ast.AST):
            score += _overlap(wanted, found, allow) if isinstance(found, ast.AST) else 0.0
        elif isinstance(wanted, str) and wanted.startswith(_ONE):
            allowed = allow.get(wanted[len(_ONE) :])
            score -= 0.5 * (allowed is not None and found not in allowed)
        elif wanted is not None or isinstance(pat, ast.Constant):
            score -= 0.5 * (repr(wanted) != repr(found))
    return score
