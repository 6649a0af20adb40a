"""Read the module that a feature stands in for, and say what of it is accounted for; it is never run.

A function of it that began as a copy of upstream's is compared with the installed upstream's, suite by
suite: what it has besides is an addition, what it lacks is behind. Every addition, and every statement of
everything else in the module, needs a declared :class:`~balance_patcher.standin.Cover`; signatures and imports
have to be upstream's or declared ones; and what makes the module what it is has to be there.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from .behind import Lacks
from .covering import Covers
from .errors import Failure
from .importing import Origins, is_import
from .signatures import strange_signature
from .source import Lane, ModuleText
from .standin import STALE, Cover, StandIn
from .statements import alike, does_nothing, doing, function_of, header, line, suites, without_keywords
from .targets import Function, FunctionNode, Target, find_target, short

UNCOVERED, BEHIND = "not covered", "behind upstream"
_BRANCHES = {"orelse": "else", "finalbody": "finally", "handlers": "except", "cases": "case", "body": "suite"}
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


@dataclass(frozen=True)
class _Copy:
    """What one function is compared with.

    Attributes:
        covers: Its additions.
        lacks: What it may be without.
        upstream: The module of the function that it began as.
    """

    covers: Covers
    lacks: Lacks
    upstream: ModuleText


class _Reader:
    """One reading of one module."""

    def __init__(self, stand_in: StandIn, text: ModuleText, upstream: Lane) -> None:
        self.stand_in, self.text, self.upstream = stand_in, text, upstream
        self.findings: list[Finding] = []
        self.failures: list[Failure] = []
        self._seen: dict[str, ast.AST] = {}
        self._roles: set[str] = set()

    def read(self) -> Coverage:
        self._scope("", self.text.tree.body)
        if not self.failures and all(finding.by != UNCOVERED for finding in self.findings):
            self._missing()  # a module with unknown statements may well do it by one of those
        self.findings.sort(key=lambda finding: (finding.file != self.text.display, finding.line))
        return Coverage(self.text.module, self.text.display, tuple(self.findings), tuple(self.failures))

    @cached_property
    def _places(self) -> Mapping[str, tuple[Cover, ...]]:
        found: dict[str, tuple[Cover, ...]] = {}
        for cover in self.stand_in.covers:
            found[cover.place] = (*found.get(cover.place, ()), cover)
        return found

    @cached_property
    def _origins(self) -> Origins:
        return Origins(self.stand_in, self.upstream)

    def _note(self, place: str, node: ast.AST, by: str, why: str = "") -> None:
        self.findings.append(Finding(place, self.text.display, getattr(node, "lineno", 1), line(node), by, why))

    def _covered(self, place: str, node: ast.AST, cover: Cover) -> None:
        self._roles.add(cover.role)
        self._note(place, node, cover.by, cover.why)

    def _missing(self) -> None:
        """Say what the module needs, for the places that it has, and does not have."""
        for place, roles in self.stand_in.needs.items():
            if place and place not in self._seen:
                continue
            for role in (role for role in roles if role not in self._roles):
                wanted = next(cover for cover in self.stand_in.covers if cover.role == role)
                at = getattr(self._seen.get(place), "lineno", 1)
                text, why = str(wanted.compiled), f"{role} is not there"
                self.findings.append(Finding(wanted.place, self.text.display, at, text, UNCOVERED, why))

    # -- the module and its classes

    def _scope(self, place: str, body: Sequence[ast.stmt]) -> None:
        target = Target(self.text, place, function_of(body), None)
        covers = Covers(target, self._places.get(place, ()))
        for statement in body:
            if isinstance(statement, Function):
                self._function(f"{place}.{statement.name}".lstrip("."), statement)
            elif isinstance(statement, ast.ClassDef):
                self._class(place, statement, covers)
            else:
                self._addition(place, statement, covers)

    def _class(self, place: str, node: ast.ClassDef, covers: Covers) -> None:
        cover = covers.use(node)
        if cover is None or node.decorator_list:
            self._note(place, node, UNCOVERED, "the class is not declared, or has another base or a decorator")
        else:
            self._covered(place, node, cover)
        inner = f"{place}.{node.name}".lstrip(".")
        self._seen[inner] = node
        self._scope(inner, node.body)

    def _function(self, place: str, node: FunctionNode) -> None:
        if place not in self._places and place not in self.stand_in.copies:
            self._note(place.rpartition(".")[0], node, UNCOVERED, "the function is not declared")
            return
        if place in self._seen:
            self._note(place, node, UNCOVERED, "it is defined a second time")
        self._seen[place] = node
        for decorator in node.decorator_list:
            self._note(place, decorator, UNCOVERED, "a decorator")
        original, lines = self._original(place, node)
        why = strange_signature(node, self.stand_in.signatures.get(place, ()), original)
        if why is not None:
            self._note(place, node, UNCOVERED, why)
        target = Target(self.text, place, node, None)
        covers = Covers(target, self._places.get(place, ()))
        copied = _Copy(covers, Lacks(target, self.stand_in.lacks.get(place, ())), lines)
        self._suite(place, original.body if original else [], node.body, copied)

    def _original(self, place: str, node: FunctionNode) -> tuple[FunctionNode | None, ModuleText]:
        """The upstream function that one began as, and the module that it is in."""
        copied = self.stand_in.copies.get(place)
        if copied is None:
            return None, self.text
        found = find_target(self.upstream, copied)
        if isinstance(found, Failure):
            self.failures.append(found.with_fields(("copied by", f"{short(self.text.display)}:{node.lineno}")))
            return None, self.text
        return found.node, found.text

    # -- suites

    def _suite(self, place: str, wanted: Sequence[ast.AST], found: Sequence[ast.AST], copied: _Copy) -> None:
        """Compare two suites; ``wanted`` is upstream's."""
        wanted, found = doing(wanted), doing(found)
        keys = [header(node) for node in wanted], [header(node) for node in found]
        for kind, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
            if kind == "equal":
                for one, other in zip(wanted[a:b], found[c:d], strict=True):
                    self._suites(place, one, other, copied)
                continue
            left = list(wanted[a:b])
            for node in found[c:d]:
                left = self._changed(place, node, left, copied)
            for node in left:
                self._behind(place, node, copied)

    def _suites(self, place: str, one: ast.AST, other: ast.AST, copied: _Copy) -> None:
        ours, theirs = dict(suites(one)), dict(suites(other))
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            if name not in theirs:
                self._behind(place, ours[name][0], copied, f"upstream's `{_BRANCHES[name]}` is not there")
            else:
                self._suite(place, ours.get(name, ()), theirs[name], copied)

    def _behind(self, place: str, node: ast.AST, copied: _Copy, why: str | None = None) -> None:
        why = why or copied.lacks.why_not(node)
        by = BEHIND if why is None else UNCOVERED
        at = getattr(node, "lineno", 1)
        self.findings.append(Finding(place, copied.upstream.display, at, line(node), by, why or ""))

    def _changed(self, place: str, node: ast.AST, left: list[ast.AST], copied: _Copy) -> list[ast.AST]:
        """An addition; or, where it is declared as one, upstream's statement in an older wording."""
        older = next((other for other in left if self._older_call(place, other, node, copied.covers)), None)
        if older is not None:
            self._older(place, older, copied, "with other arguments")
            return [other for other in left if other is not older]
        if does_nothing(node) or is_import(node):
            self._addition(place, node, copied.covers)
            return left
        cover = copied.covers.use(node)
        if cover is None or cover.by != STALE:
            self._judged(place, node, cover, copied.covers)
            return left
        self._covered(place, node, cover)
        whole = cover.compiled.kind != "header"
        pair = next((other for other in left if (alike(other, node) if whole else type(other) is type(node))), None)
        if pair is not None:
            self._older(place, pair, copied, "")
        if not whole:
            if pair is not None:
                self._suites(place, pair, node, copied)
            else:
                for _, suite in suites(node):
                    self._suite(place, [], suite, copied)
        return [other for other in left if other is not pair]

    def _older(self, place: str, node: ast.AST, copied: _Copy, why: str) -> None:
        at = getattr(node, "lineno", 1)
        self.findings.append(Finding(place, copied.upstream.display, at, line(node), BEHIND, why))

    def _older_call(self, place: str, one: ast.AST, other: ast.AST, covers: Covers) -> bool:
        """Whether both make one call, and the second has no keyword argument that is not upstream's or covered."""
        if type(one) is not type(other) or not isinstance(one, _CALLERS) or not isinstance(other, _CALLERS):
            return False
        if not (isinstance(one.value, ast.Call) and isinstance(other.value, ast.Call)):
            return False
        wanted = {keyword.arg: ast.unparse(keyword.value) for keyword in one.value.keywords}
        found = {keyword.arg: keyword.value for keyword in other.value.keywords}
        changed = [value for name, value in found.items() if ast.unparse(value) != wanted.get(name)]
        bare = [ast.unparse(without_keywords(statement)) for statement in (one, other)]
        if bare[0] != bare[1] or not found.keys() <= wanted.keys():
            return False
        reasons = covers.use_all(changed)
        if reasons is None:
            return False
        for value, cover in zip(changed, reasons, strict=True):
            self._covered(place, value, cover)
        return True

    def _addition(self, place: str, node: ast.AST, covers: Covers) -> None:
        if does_nothing(node):
            return
        if isinstance(node, ast.stmt) and is_import(node):
            strange = self._origins.strange(node, self.text.module.rpartition(".")[0])
            if strange:
                self._note(place, node, UNCOVERED, f"neither declared nor upstream's: {', '.join(strange)}")
            return
        self._judged(place, node, covers.use(node), covers)

    def _judged(self, place: str, node: ast.AST, cover: Cover | None, covers: Covers) -> None:
        """An addition, and all that its suites hold, where only its header is declared."""
        if cover is None:
            self._note(place, node, UNCOVERED, covers.why_not(node))
            return
        self._covered(place, node, cover)
        if cover.compiled.kind == "header":
            for _, suite in suites(node):
                for statement in suite:
                    self._addition(place, statement, covers)
