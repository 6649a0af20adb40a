"""Read the module that a feature stands in for, and say what of it is accounted for; it is never run.

A function of it that began as a copy of upstream's is compared with the installed upstream's, suite by
suite: what it has besides is an addition, what it lacks is only behind. Every addition, and every
statement of everything else in the module, needs a declared :class:`~balance_patcher.standin.Cover`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from .anchors import all_places
from .errors import Failure
from .render import head
from .source import Lane, ModuleText
from .standin import STALE, Cover, StandIn
from .targets import Function, FunctionNode, Target, find_target, short, suites_of

UNCOVERED, BEHIND = "not covered", "behind upstream"
_IMPORTS = (ast.Import, ast.ImportFrom)
_CALLERS = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)


@dataclass(frozen=True)
class Finding:
    """One statement of the module, and who answers for it.

    Attributes:
        place: The function or class that it stands in; empty for the module itself.
        file: The file that it is in; upstream's, for a statement that only upstream has.
        line: Its line there.
        text: Its first line.
        by: What covers it: a delta, a feature, ``stale``, ``stand-in``; or ``not covered``, ``behind upstream``.
        why: What the declaration says about it, or why it is not covered.
    """

    place: str
    file: str
    line: int
    text: str
    by: str
    why: str = ""

    @property
    def where(self) -> str:
        return f"{short(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.where}  `{self.text}`"


@dataclass(frozen=True)
class Coverage:
    """What was found in one module.

    Attributes:
        module: Its dotted name.
        file: Its file.
        findings: In the order of its text.
        failures: Why parts of it could not be compared.
    """

    module: str
    file: str
    findings: tuple[Finding, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def uncovered(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.by == UNCOVERED)

    @property
    def behind(self) -> tuple[Finding, ...]:
        """Where it is an older upstream: lines of its own that upstream has no more, and lines that it lacks."""
        return tuple(finding for finding in self.findings if finding.by in {STALE, BEHIND})

    @property
    def covered(self) -> bool:
        """Whether the module may be stood in for."""
        return not self.uncovered and not self.failures

    def by(self) -> dict[str, tuple[Finding, ...]]:
        """The covered statements by what covers them."""
        found: dict[str, tuple[Finding, ...]] = {}
        for finding in self.findings:
            if finding.by not in {UNCOVERED, BEHIND, STALE}:
                found[finding.by] = (*found.get(finding.by, ()), finding)
        return found

    def features(self) -> tuple[str, ...]:
        """The features that have to run for the module to be covered, by name."""
        return tuple(dict.fromkeys(finding.by.partition(".")[0] for finding in self.findings if _feature(finding)))


def _feature(finding: Finding) -> bool:
    return finding.by not in {UNCOVERED, BEHIND} and Cover("", "pass", finding.by).feature is not None


def read_module(stand_in: StandIn, text: ModuleText, upstream: Lane) -> Coverage:
    """What of a host's module is accounted for.

    Args:
        stand_in: What is declared about it.
        text: The module.
        upstream: The vLLM beside it, which its copies are compared with.
    """
    return _Reader(stand_in, text, upstream).read()


class _Reader:
    """One reading of one module."""

    def __init__(self, stand_in: StandIn, text: ModuleText, upstream: Lane) -> None:
        self.stand_in, self.text, self.upstream = stand_in, text, upstream
        self.findings: list[Finding] = []
        self.failures: list[Failure] = []

    def read(self) -> Coverage:
        self._scope("", self.text.tree.body)
        self.findings.sort(key=lambda finding: (finding.by == BEHIND, finding.line))
        return Coverage(self.text.module, self.text.display, tuple(self.findings), tuple(self.failures))

    @cached_property
    def _places(self) -> Mapping[str, tuple[Cover, ...]]:
        found: dict[str, tuple[Cover, ...]] = {}
        for cover in self.stand_in.covers:
            found[cover.place] = (*found.get(cover.place, ()), cover)
        return found

    def _note(self, place: str, node: ast.AST, by: str, why: str = "") -> None:
        self.findings.append(Finding(place, self.text.display, getattr(node, "lineno", 0), _line(node), by, why))

    # -- the module and its classes

    def _scope(self, place: str, body: Sequence[ast.stmt]) -> None:
        target = Target(self.text, place, _function_of(body), None)
        covers = _Covers(target, self._places.get(place, ()))
        for statement in body:
            if isinstance(statement, Function):
                self._function(f"{place}.{statement.name}".lstrip("."), statement)
            elif isinstance(statement, ast.ClassDef):
                self._class(place, statement, covers)
            else:
                self._addition(place, statement, covers)

    def _class(self, place: str, node: ast.ClassDef, covers: _Covers) -> None:
        cover = covers.of(node)
        if cover is None or node.decorator_list:
            self._note(place, node, UNCOVERED, "the class is not declared, or has another base or a decorator")
        else:
            self._note(place, node, cover.by, cover.why)
        self._scope(f"{place}.{node.name}".lstrip("."), node.body)

    def _function(self, place: str, node: FunctionNode) -> None:
        if place not in self._places and place not in self.stand_in.copies:
            self._note(place.rpartition(".")[0], node, UNCOVERED, "the function is not declared")
            return
        for decorator in node.decorator_list:
            self._note(place, decorator, UNCOVERED, "a decorator")
        target = Target(self.text, place, node, None)
        covers = _Covers(target, self._places.get(place, ()))
        copied = self.stand_in.copies.get(place)
        original: FunctionNode | None = None
        lines = self.text
        if copied is not None:
            found = find_target(self.upstream, copied)
            if isinstance(found, Failure):
                self.failures.append(found.with_fields(("copied by", f"{short(self.text.display)}:{node.lineno}")))
            else:
                original, lines = found.node, found.text
        self._suite(place, original.body if original else [], node.body, covers, lines)

    # -- suites

    def _suite(
        self, place: str, wanted: Sequence[ast.AST], found: Sequence[ast.AST], covers: _Covers, upstream: ModuleText
    ) -> None:
        """Compare two suites; ``wanted`` is upstream's."""
        wanted, found = _doing(wanted), _doing(found)
        keys = [_header(node) for node in wanted], [_header(node) for node in found]
        for kind, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
            if kind == "equal":
                for one, other in zip(wanted[a:b], found[c:d], strict=True):
                    self._suites(place, one, other, covers, upstream)
                continue
            left = list(wanted[a:b])
            for node in found[c:d]:
                left = self._changed(place, node, left, covers, upstream)
            self.findings += [
                Finding(place, upstream.display, getattr(node, "lineno", 0), _line(node), BEHIND) for node in left
            ]

    def _suites(self, place: str, one: ast.AST, other: ast.AST, covers: _Covers, upstream: ModuleText) -> None:
        ours, theirs = dict(_suites(one)), dict(_suites(other))
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            self._suite(place, ours.get(name, ()), theirs.get(name, ()), covers, upstream)

    def _changed(
        self, place: str, node: ast.AST, left: list[ast.AST], covers: _Covers, upstream: ModuleText
    ) -> list[ast.AST]:
        """An addition; or, where only its header is declared, upstream's statement in an older wording."""
        older = next((other for other in left if self._older_call(place, other, node, covers)), None)
        if older is not None:
            at = getattr(older, "lineno", 0)
            self.findings.append(Finding(place, upstream.display, at, _line(older), BEHIND, "with other arguments"))
            return [other for other in left if other is not older]
        cover = covers.of(node)
        if cover is None or cover.compiled.kind != "header" or cover.by != STALE:
            self._addition(place, node, covers)
            return left
        self._note(place, node, cover.by, cover.why)
        pair = next((other for other in left if type(other) is type(node)), None)
        if pair is None:
            for _, suite in _suites(node):
                self._suite(place, [], suite, covers, upstream)
            return left
        self.findings.append(Finding(place, upstream.display, getattr(pair, "lineno", 0), _line(pair), BEHIND))
        self._suites(place, pair, node, covers, upstream)
        return [other for other in left if other is not pair]

    def _older_call(self, place: str, one: ast.AST, other: ast.AST, covers: _Covers) -> bool:
        """Whether both make one call, and the second has no keyword argument that is not upstream's or covered."""
        if type(one) is not type(other) or not isinstance(one, _CALLERS) or not isinstance(other, _CALLERS):
            return False
        if not (isinstance(one.value, ast.Call) and isinstance(other.value, ast.Call)):
            return False
        wanted = {keyword.arg: ast.unparse(keyword.value) for keyword in one.value.keywords}
        found = {keyword.arg: keyword.value for keyword in other.value.keywords}
        changed = [value for name, value in found.items() if ast.unparse(value) != wanted.get(name)]
        reasons = [covers.of(value) for value in changed]
        bare = [ast.unparse(_without_keywords(statement)) for statement in (one, other)]
        if bare[0] != bare[1] or not found.keys() <= wanted.keys() or not all(reasons):
            return False
        for value, cover in zip(changed, reasons, strict=True):
            self._note(place, value, cover.by if cover else "", cover.why if cover else "")
        return True

    def _addition(self, place: str, node: ast.AST, covers: _Covers) -> None:
        if _does_nothing(node):
            return
        if isinstance(node, _IMPORTS):
            strange = [name for name in _imported(node, self.text.module) if not self.stand_in.allows(name)]
            if strange:
                self._note(place, node, UNCOVERED, f"nothing is declared to come from {', '.join(strange)}")
            return
        cover = covers.of(node)
        if cover is None:
            self._note(place, node, UNCOVERED)
            return
        self._note(place, node, cover.by, cover.why)
        if cover.compiled.kind == "header":
            for _, suite in _suites(node):
                for statement in suite:
                    self._addition(place, statement, covers)


class _Covers:
    """The covers of one function, by the nodes that they match."""

    def __init__(self, target: Target, covers: Sequence[Cover]) -> None:
        self._found: dict[int, Cover] = {}
        for cover in covers:
            for match in all_places(target, cover.anchor):
                (statement,) = match.statements
                # An expression covers itself and the statement that it is, never one that only contains it.
                self._found.setdefault(id(match.node), cover)
                if isinstance(statement, ast.Expr) and statement.value is match.node:
                    self._found.setdefault(id(statement), cover)

    def of(self, node: ast.AST) -> Cover | None:
        return self._found.get(id(node))


def _function_of(body: Sequence[ast.stmt]) -> ast.FunctionDef:
    """A function with these very statements, so that a module and a class are looked at as a function is."""
    made = ast.parse("def scope(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)  # noqa: S101 - it was just parsed
    made.body = list(body)
    return made


def _suites(node: ast.AST) -> Iterator[tuple[str, Sequence[ast.AST]]]:
    """The suites below a statement by name; ``except`` and ``case`` clauses are statements of a suite of their own."""
    for name, suite in suites_of(node):
        if name not in {"handlers", "cases"}:
            yield name, suite
    for name in ("handlers", "cases"):
        clauses = getattr(node, name, None)
        if clauses:
            yield name, clauses


def _doing(suite: Sequence[ast.AST]) -> list[ast.AST]:
    return [node for node in suite if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def _does_nothing(node: ast.AST) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _header(node: ast.AST) -> str:
    """A statement's text without its suites."""
    bare = copy.copy(node)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(getattr(bare, name, None), list):
            setattr(bare, name, [])
    return f"{type(node).__name__} {ast.unparse(bare)}"


def _line(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return _header(node).splitlines()[-1].removeprefix("ClassDef ").rstrip(":")
    return head(node).rstrip(":")


def _without_keywords(statement: ast.AST) -> ast.AST:
    bare = copy.copy(statement)
    call = copy.copy(bare.value)  # type: ignore[attr-defined]
    call.keywords = []
    bare.value = call  # type: ignore[attr-defined]
    return bare


def _imported(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = module.split(".")[: -node.level] if node.level else []
        yield ".".join([*package, *([node.module] if node.module else [])])
