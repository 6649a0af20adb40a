"""Find the functions that deltas speak of, in a module's text.

A target is found exactly once, undecorated, neither async nor a generator, or it is refused with the
nearest candidate.
"""

from __future__ import annotations

import ast
import bisect
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .bound import begins_at, children, definitions, suites_of, walk, words_at
from .errors import Failure
from .render import head
from .source import Lane, ModuleText

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_OTHERS = re.compile(r"[^\x00-\x7f]")
SCOPES = (*Function, ast.ClassDef, ast.Lambda)
Kinds = dict[type[ast.AST], list[tuple[ast.AST, list[ast.stmt], int]]]


@dataclass(frozen=True)
class Target:
    """One upstream function in a module's text.

    Attributes:
        text: The module.
        qualname: ``Class.method`` or ``function``.
        node: Its definition.
        owner: Its class, if it has one; of somebody else's function, the class of the target that it stands on.
    """

    text: ModuleText
    qualname: str
    node: FunctionNode
    owner: ast.ClassDef | None

    @property
    def name(self) -> str:
        return f"{self.text.module}:{self.qualname}"

    @cached_property
    def places(self) -> dict[int, tuple[ast.AST, str, list[ast.stmt], int]]:
        """For each statement of the function, by id: parent, field, suite, index; in the order of the text.

        Statements of nested functions and classes are left out.
        """
        found: dict[int, tuple[ast.AST, str, list[ast.stmt], int]] = {}
        parents: list[ast.AST] = [self.node]
        while parents:
            parent = parents.pop()
            for name, suite in suites_of(parent):
                for at, statement in enumerate(suite):
                    found[id(statement)] = (parent, name, suite, at)
                    if not isinstance(statement, SCOPES):
                        parents.append(statement)
        return dict(sorted(found.items(), key=lambda item: _position(item[1])))

    @cached_property
    def expressions(self) -> tuple[tuple[ast.expr, list[ast.stmt]], ...]:
        """Every expression of the function with the statement that holds it; nested functions are left out."""
        found: list[tuple[ast.expr, list[ast.stmt]]] = []
        _expressions(self.node, [], found)
        return tuple(found)

    @cached_property
    def _statements(self) -> Kinds:
        found: Kinds = {}
        for _, _, suite, at in self.places.values():
            found.setdefault(type(suite[at]), []).append((suite[at], suite, at))
        return found

    @cached_property
    def _expressions(self) -> Kinds:
        found: Kinds = {}
        for node, holder in self.expressions:
            found.setdefault(type(node), []).append((node, holder, 0))
        return found

    def of_kind(
        self, kind: type[ast.AST], words: Collection[str] = ()
    ) -> Sequence[tuple[ast.AST, list[ast.stmt], int]]:
        """Its statements of a kind, each with its suite and index; or expressions, with the statement that holds each.

        Args:
            kind: Of the nodes.
            words: Names that stand in what is looked for. There are ten times as many expressions as statements, so
                only those are looked at that stand where one of these does.
        """
        if not issubclass(kind, ast.expr):
            return self._statements.get(kind, ())
        if words and self.plain:
            holders = self._with(max(words, key=len))
            return [(node, [at], 0) for at in holders for node in _own(at) if type(node) is kind]
        return self._expressions.get(kind, ())

    def _with(self, word: str) -> Iterator[ast.stmt]:
        """Its statements on whose lines a word stands; of a compound one, its header's lines are not told apart."""
        first, text = self._own_lines
        lines = [first + text.count("\n", 0, at) for at in words_at(text, word)]
        for _, _, suite, at in self.places.values():
            if isinstance(suite[at], SCOPES):
                continue
            nearest = bisect.bisect_left(lines, suite[at].lineno)
            if nearest < len(lines) and lines[nearest] <= (suite[at].end_lineno or 0):
                yield suite[at]

    @cached_property
    def _own_lines(self) -> tuple[int, str]:
        parts: list[ast.stmt] = [self.node, *self.node.body]
        first, last = min(map(begins_at, parts)), max(part.end_lineno or 0 for part in parts)
        return first, "".join(self.text.lines[first - 1 : last])

    @property
    def own_text(self) -> str:
        """Its lines, decorators included; of a suite that was made a function to be looked at, the suite's."""
        return self._own_lines[1]

    @cached_property
    def plain(self) -> bool:
        """Whether its text can be searched: only a line feed ends a line, and each name is written as it is called.

        Letters of others may be another name's.
        """
        text = self.own_text
        return "\r" not in text and (text.isascii() or not any(map(str.isalnum, _OTHERS.findall(text))))

    def may_hold(self, words: Iterable[str]) -> bool:
        """Whether its text leaves room for some names; to look at each of its nodes takes far longer."""
        return not self.plain or all(word in self.own_text for word in words)

    @cached_property
    def unusable(self) -> Failure | None:
        """Why this function cannot be a target (BP107–BP109), if it cannot."""
        return _unusable(self)

    def ancestors(self, statement: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
        """The compound statements around one, the nearest first, each with the field it stands in."""
        at: ast.AST = statement
        while id(at) in self.places:
            parent, name, _, _ = self.places[id(at)]
            yield parent, name
            at = parent

    def where(self, node: ast.AST) -> str:
        """``file:line`` of a node."""
        return f"{short(self.text.display)}:{getattr(node, 'lineno', '?')}"


def short(path: str) -> str:
    """The last part of a path, for the lines that a person reads."""
    return path.replace("\\", "/").rpartition("/")[2]


def find_target(lane: Lane, name: str) -> Target | Failure:
    """A target in a lane, or why it is not there (BP104–BP110).

    It is looked for once: what is worked out about a target is worked out once, too.
    """
    if name not in lane.found:
        lane.found[name] = _find(lane, name)
    found: Target | Failure = lane.found[name]
    return found


def is_there(lane: Lane, name: str) -> bool:
    """Whether a target is in a lane; what comes near it is not looked for, which takes longer than all the rest."""
    found = lane.found.get(name) or _find(lane, name, near=False)
    if isinstance(found, Target):
        lane.found[name] = found
    return isinstance(found, Target)


def _find(lane: Lane, name: str, *, near: bool = True) -> Target | Failure:
    module, _, qualname = name.partition(":")
    text = lane.module(module)
    if text is None:
        lane.require_vllm()
        return Failure(
            "BP110", f"{module} is not in {lane.source.spec}", fields=(("target", name),),
            next="find where upstream moved it and change the delta's target",
        )  # fmt: skip
    scope: ast.AST = text.outline
    owner: ast.ClassDef | None = None
    *classes, last = rest = qualname.split(".")
    for at, part in enumerate(classes):
        found = [node for node in definitions(scope) if isinstance(node, ast.ClassDef) and node.name == part]
        meanings = [*found, *rebindings(scope, part)] if found else []
        if len(meanings) != 1:
            return _no_definition(text, name, part, "class", meanings, scope if near else None, rest[at + 1])
        scope = owner = found[0]
    functions = [node for node in definitions(scope) if isinstance(node, Function) and node.name == last]
    meanings = [*functions, *rebindings(scope, last)] if functions else []
    if len(meanings) != 1:
        return _no_definition(text, name, last, "function", meanings, scope if near else None, "")
    if owner is None and name in lane.homes:
        stands = find_target(lane, lane.homes[name])
        owner = stands.owner if isinstance(stands, Target) else None
    text.fill(functions[0])
    return Target(text, qualname, functions[0], owner)


def absent(lane: Lane, name: str) -> bool:
    """Whether a target's module, its class or itself is nowhere in a lane: not defined in another way, nor imported.

    Stricter than not being found, because a delta that may be missing must not go missing with a refactoring.
    """
    module, _, qualname = name.partition(":")
    text = lane.module(module)
    if text is None:
        lane.require_vllm()
        return True
    for part in qualname.split("."):
        if not text.mentions(part):
            return True
        # It is at the top or in a class there, as a rule: then the whole tree need not be walked through.
        if part not in text.outer and part not in text.defined:
            return False
    return False


def rebindings(scope: ast.AST, name: str) -> Iterator[ast.stmt]:
    """The assignments by which a scope gives a name another meaning, ``schedule = wrap(schedule)``."""
    for _, suite in suites_of(scope):
        for child in suite:
            if isinstance(child, (ast.ClassDef, *Function)):
                continue
            if isinstance(child, (ast.Assign, ast.AnnAssign)):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                if child.value is not None and any(_names(target, name) for target in targets):
                    yield child
            else:
                yield from rebindings(child, name)


def _names(target: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in walk(target))


def _no_definition(
    text: ModuleText, target: str, name: str, kind: str, found: Sequence[ast.AST], scope: ast.AST | None, member: str
) -> Failure:
    if found:
        places = [f"{short(text.display)}:{getattr(node, 'lineno', '?')}  `{head(node)}`" for node in found]
        return Failure(
            "BP106", f"{name} is defined {len(found)} times",
            fields=(("target", target), ("nearest", "\n".join(places))),
            next="decide which definition runs and make the target unambiguous upstream or in the delta",
            file=text.display, line=getattr(found[-1], "lineno", None),
        )  # fmt: skip
    kinds = ast.ClassDef if kind == "class" else Function
    others = [node for node in definitions(scope) if isinstance(node, kinds)] if scope is not None else []

    def likeness(node: ast.AST) -> float:
        has = member and any(getattr(inner, "name", "") == member for inner in definitions(node))
        return difflib.SequenceMatcher(None, name, getattr(node, "name", "")).ratio() + bool(has)

    best = max(others, key=likeness, default=None)
    nearest = "nothing of that kind"
    if best is not None:
        nearest = f"{short(text.display)}:{best.lineno}  `{best.name}`"
    return Failure(
        "BP105" if kind == "class" else "BP104", f"{name} is not in {text.module}; nothing was patched",
        fields=(("target", target), ("nearest", nearest)),
        next="find what it was renamed to and change the delta's target",
        file=text.display, line=getattr(best, "lineno", None),
    )  # fmt: skip


def _unusable(target: Target) -> Failure | None:
    node = target.node
    code, what = "", ""
    if node.decorator_list:
        code, what = "BP107", f"{target.qualname} stands under `@{head(node.decorator_list[0])}`"
    elif isinstance(node, ast.AsyncFunctionDef):
        code, what = "BP108", f"{target.qualname} is `async def`"
    elif _yields(target):
        code, what = "BP109", f"{target.qualname} yields"
    if not code:
        return None
    return Failure(
        code, f"{what}; nothing was patched",
        fields=(("target", target.name), ("nearest", f"{target.where(node)}  `def {node.name}`")),
        next="look at what upstream made of it; the deltas were written for a plain function",
        file=target.text.display, line=node.lineno,
    )  # fmt: skip


def _yields(target: Target) -> bool:
    lines = target.text.lines[target.node.lineno - 1 : target.node.end_lineno]
    if not any("yield" in line for line in lines):
        return False  # as below, without a look at each node
    return any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in own_nodes(target.node))


def _expressions(node: ast.AST, holder: list[ast.stmt], found: list[tuple[ast.expr, list[ast.stmt]]]) -> None:
    for child in children(node):
        if isinstance(child, SCOPES):
            continue
        inner = [child] if isinstance(child, ast.stmt) else holder
        if isinstance(child, ast.expr) and inner:
            found.append((child, inner))
        if not isinstance(child, (ast.Name, ast.Constant)):
            _expressions(child, inner, found)


def _own(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement that stand in no other one; nested functions are left out."""
    for child in children(node):
        if isinstance(child, (ast.stmt, *SCOPES)):
            continue
        if isinstance(child, ast.expr):
            yield child
        if not isinstance(child, (ast.Name, ast.Constant)):
            yield from _own(child)


def _position(place: tuple[ast.AST, str, list[ast.stmt], int]) -> tuple[int, int]:
    statement = place[2][place[3]]
    return statement.lineno, statement.col_offset


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Every node of a function but those of nested functions, classes and lambdas."""
    todo = children(function)[::-1]
    while todo:
        child = todo.pop()
        yield child
        if not isinstance(child, SCOPES):
            todo += children(child)[::-1]


def forwarded(target: Target) -> tuple[ast.AST, ...]:
    """Upstream's own parameters as call arguments, without ``self``."""
    arguments = target.node.args
    positional = [*arguments.posonlyargs, *arguments.args][1 if target.owner is not None else 0 :]
    passed: list[ast.AST] = [ast.Name(a.arg, ast.Load()) for a in positional]
    if arguments.vararg:
        passed.append(ast.Starred(ast.Name(arguments.vararg.arg, ast.Load()), ast.Load()))
    passed += [ast.keyword(a.arg, ast.Name(a.arg, ast.Load())) for a in arguments.kwonlyargs]
    if arguments.kwarg:
        passed.append(ast.keyword(None, ast.Name(arguments.kwarg.arg, ast.Load())))
    return tuple(passed)


def docstring_length(function: FunctionNode) -> int:
    """1 if the function has a docstring, else 0: the index of its first statement that does something."""
    return int(ast.get_docstring(function, clean=False) is not None)
