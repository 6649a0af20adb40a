"""Match every delta on the pristine tree and say what would be done where.

Nothing is edited here. A plan either places every delta of a feature or lists every reason why
it cannot, each with the nearest candidate. Deltas are never matched on each other's output.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .delta import (
    PARAMETERS,
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    Edit,
    Feature,
    InsertAfter,
    Prologue,
    Replace,
    Variant,
    edit_text,
)
from .errors import Failure, Outcome, PatchError
from .pattern import Bindings, Bound, Mismatch, Pattern, Template, compile_pattern
from .render import head, shown
from .source import Lane, ModuleText

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (*Function, ast.ClassDef, ast.Lambda)
_NEAR = 0.55  # a candidate that scores less than this is not worth naming
# What standing in the right place, or doing the right thing, adds to how much of the pattern a candidate has.
_IN_PLACE, _BESIDE, _SUITES = 0.6, 0.1, 0.5
_CHANGED = 1.4  # from here on a candidate is the anchor itself, changed where it stands


@dataclass(frozen=True)
class Target:
    """One upstream function in a module's text.

    Attributes:
        text: The module.
        qualname: ``Class.method`` or ``function``.
        node: Its definition.
        owner: Its class, if it has one.
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
                    if not isinstance(statement, _SCOPES):
                        parents.append(statement)
        return dict(sorted(found.items(), key=lambda item: _position(item[1])))

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


@dataclass(frozen=True)
class Match:
    """One place where an anchor stands.

    Attributes:
        statements: The matched run of statements; for an expression, the statement that holds it.
        levels: The anchor's named levels.
        bound: What the holes are bound to.
        node: The matched node itself.
    """

    statements: tuple[ast.stmt, ...]
    levels: dict[str, ast.stmt]
    bound: Bindings
    node: ast.AST

    def at(self, name: str) -> tuple[ast.stmt, ...]:
        return self.statements if name == "anchor" else (self.levels[name],)


@dataclass(frozen=True)
class Miss:
    """A candidate that is no match: what differs, and how near it is (2 and more: only its place differs)."""

    node: ast.AST
    code: str
    reason: str
    score: float


@dataclass(frozen=True)
class Step:
    """One edit, placed.

    Attributes:
        delta: The delta that it belongs to.
        edit: The declaration.
        text: What is put in, holes filled; no indentation.
        statements: What it stands at; empty for edits of the whole function.
    """

    delta: Delta
    edit: Edit
    text: str
    statements: tuple[ast.stmt, ...] = ()
    template: str = ""


@dataclass
class Placement:
    """What became of one delta on one lane.

    ``status`` is ``applied``, ``absorbed``, ``not-applicable`` or ``failed``.
    """

    delta: Delta
    status: str
    variant: Variant | None = None
    target: Target | None = None
    line: int | None = None
    matches: int = 0
    bound: Bindings = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    exports: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        if self.status != "failed":
            return Outcome.HOLDS
        return Outcome.worst(failure.outcome for failure in self.failures)


@dataclass
class Plan:
    """Every delta of a feature, placed on one lane."""

    feature: Feature
    lane: Lane
    placements: list[Placement]
    failures: list[Failure] = field(default_factory=list)

    @property
    def all_failures(self) -> list[Failure]:
        return [failure for placement in self.placements for failure in placement.failures] + self.failures

    def placement(self, delta: str) -> Placement:
        return next(placement for placement in self.placements if placement.delta.name == delta)

    @property
    def steps(self) -> dict[str, list[Step]]:
        """The edits by target, in declared order."""
        found: dict[str, list[Step]] = {}
        for placement in self.placements:
            if placement.steps:
                found.setdefault(placement.delta.target, []).extend(placement.steps)
        return found

    def target(self, name: str) -> Target:
        return next(p.target for p in self.placements if p.target is not None and p.delta.target == name)


def make_plan(lane: Lane, feature: Feature) -> Plan:
    """Place every delta of a feature on a lane; failures are collected, not raised.

    Raises:
        PatchError: BP5xx, if the lane cannot be read.
    """
    targets: dict[str, Target | Failure] = {}
    placements = []
    for delta in feature.deltas:
        if delta.target not in targets:
            targets[delta.target] = find_target(lane, delta.target)
        placements.append(_place(delta, targets[delta.target]))
    plan = Plan(feature, lane, placements)
    plan.failures += _collisions(plan)
    return plan


# -- targets ---------------------------------------------------------------------------------


def find_target(lane: Lane, name: str) -> Target | Failure:
    """A target in a lane, or why it is not there (BP104–BP110)."""
    module, _, qualname = name.partition(":")
    text = lane.module(module)
    if text is None:
        lane.require_vllm()
        return Failure(
            "BP110", f"{module} is not in {lane.source.spec}", fields=(("target", name),),
            next="find where upstream moved it and change the delta's target",
        )  # fmt: skip
    scope: ast.AST = text.tree
    owner: ast.ClassDef | None = None
    *classes, last = qualname.split(".")
    for at, part in enumerate(classes):
        found = [node for node in definitions(scope) if isinstance(node, ast.ClassDef) and node.name == part]
        meanings = [*found, *rebindings(scope, part)] if found else []
        if len(meanings) != 1:
            return _no_definition(text, name, part, "class", meanings, scope, qualname.split(".")[at + 1])
        scope = owner = found[0]
    functions = [node for node in definitions(scope) if isinstance(node, Function) and node.name == last]
    meanings = [*functions, *rebindings(scope, last)] if functions else []
    if len(meanings) != 1:
        return _no_definition(text, name, last, "function", meanings, scope, "")
    return Target(text, qualname, functions[0], owner)


def definitions(scope: ast.AST) -> Iterator[ast.AST]:
    """The classes and functions that a scope defines itself, under ``if`` and ``try`` too."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.ClassDef, *Function)):
            yield child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from definitions(child)


def rebindings(scope: ast.AST, name: str) -> Iterator[ast.stmt]:
    """The assignments by which a scope gives a name another meaning, ``schedule = wrap(schedule)``."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.ClassDef, *Function)):
            continue
        if isinstance(child, (ast.Assign, ast.AnnAssign)) and child.value is not None:
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if any(isinstance(node, ast.Name) and node.id == name for target in targets for node in ast.walk(target)):
                yield child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from rebindings(child, name)


def _no_definition(
    text: ModuleText, target: str, name: str, kind: str, found: Sequence[ast.AST], scope: ast.AST, member: str
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
    others = [node for node in definitions(scope) if isinstance(node, kinds)]

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
    elif any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in own_nodes(node)):
        code, what = "BP109", f"{target.qualname} yields"
    if not code:
        return None
    return Failure(
        code, f"{what}; nothing was patched",
        fields=(("target", target.name), ("nearest", f"{target.where(node)}  `def {node.name}`")),
        next="look at what upstream made of it; the deltas were written for a plain function",
        file=target.text.display, line=node.lineno,
    )  # fmt: skip


def suites_of(statement: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The suites directly below a statement, each with its field; those of handlers and cases among them."""
    for name in ("body", "orelse", "finalbody"):
        suite = getattr(statement, name, None)
        if isinstance(suite, list) and suite:
            yield name, suite
    for name in ("handlers", "cases"):
        for part in getattr(statement, name, ()):
            yield name, part.body


def _position(place: tuple[ast.AST, str, list[ast.stmt], int]) -> tuple[int, int]:
    statement = place[2][place[3]]
    return statement.lineno, statement.col_offset


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Every node of a function but those of nested functions, classes and lambdas."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, _SCOPES):
            yield from own_nodes(child)


# -- anchors ---------------------------------------------------------------------------------


def find_anchor(target: Target, anchor: Anchor) -> tuple[list[Match], list[Miss]]:
    """All places of an anchor in a target, and, where it is not found once, the candidates that come near."""
    matches: list[Match] = []
    misses: list[Miss] = []
    pattern = anchor.compiled
    for node, statements in _candidates(target, pattern):
        result = pattern.match(statements if pattern.kind == "statements" else node, {}, anchor.allow)
        if isinstance(result, Mismatch):
            continue
        placed = _inside(target, anchor, statements, result)
        if isinstance(placed, str):
            misses.append(Miss(node, "BP117", placed, 2.0))
        else:
            matches.append(Match(tuple(statements), placed[0], placed[1], node))
    if len(matches) == 1:
        beside = _beside(target, anchor, matches[0])
        if not isinstance(beside, str):
            return [beside], misses
        return [], [*misses, Miss(matches[0].node, "BP117", beside, 3.0)]
    return matches, misses if matches else [*misses, *_near_misses(target, anchor)]


def _near_misses(target: Target, anchor: Anchor) -> list[Miss]:
    pattern = anchor.compiled
    found = []
    for node, statements in _candidates(target, pattern):
        score = pattern.similarity(node, anchor.allow) + _SUITES * _same_suites(pattern.nodes[0], node)
        if not isinstance(_inside(target, anchor, statements, {}), str):
            score += _IN_PLACE if anchor.inside else 0.0
            score += _BESIDE * (not isinstance(_beside(target, anchor, Match(tuple(statements), {}, {}, node)), str))
        if score >= _NEAR:
            result = pattern.match(statements if pattern.kind == "statements" else node, {}, anchor.allow)
            if isinstance(result, Mismatch):
                found.append(Miss(node, _code_of(result, pattern, statements), str(result), score))
    return found


def _same_suites(wanted: ast.AST, node: ast.AST) -> bool:
    """Whether a compound statement has statements of the same kinds in it, ``break`` and ``break``."""
    kinds = [[[type(statement) for statement in suite] for _, suite in suites_of(item)] for item in (wanted, node)]
    return type(wanted) is type(node) and kinds[0] == kinds[1] != []


def _candidates(target: Target, pattern: Pattern) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    if pattern.kind == "expression":
        yield from _expressions(target.node)
        return
    size = len(pattern.nodes) if pattern.kind == "statements" else 1
    kind = type(pattern.nodes[0])
    for _, _, suite, at in target.places.values():
        statement = suite[at]
        if at + size <= len(suite) and (type(statement) is kind or kind is ast.Expr):
            yield statement, suite[at : at + size]


def _expressions(function: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    def below(node: ast.AST, holder: ast.stmt | None) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _SCOPES):
                continue
            inner = child if isinstance(child, ast.stmt) else holder
            if isinstance(child, ast.expr) and inner is not None:
                yield child, [inner]
            yield from below(child, inner)

    yield from below(function, None)


def _code_of(miss: Mismatch, pattern: Pattern, statements: Sequence[ast.stmt]) -> str:
    """Which refusal a first difference stands for."""
    within = re.match(r"statements\[(\d+)\]\.", miss.path)
    at = int(within[1]) if within else 0
    path = miss.path[within.end() :] if within else miss.path
    if path.rpartition(".")[2].startswith("ops["):
        return "BP112"
    if path.startswith("orelse[") and miss.wanted == "nothing":
        return "BP115"
    if path.startswith("body["):
        wanted, found = (len(getattr(node, "body", ())) for node in (pattern.nodes[at], statements[at]))
        return "BP114" if found > wanted else "BP113"
    return "BP101"


def _inside(
    target: Target, anchor: Anchor, statements: Sequence[ast.stmt], bound: dict[str, Bound]
) -> tuple[dict[str, ast.stmt], dict[str, Bound]] | str:
    levels: dict[str, ast.stmt] = {}
    chain = list(target.ancestors(statements[0]))
    for level in reversed(anchor.inside):
        pattern = compile_pattern(level.pattern)
        for at, (parent, name) in enumerate(chain):
            result = pattern.match(parent, bound, anchor.allow)
            if not isinstance(result, Mismatch) and name == "body" and isinstance(parent, ast.stmt):
                bound, levels[level.name], chain = result, parent, chain[at + 1 :]
                break
            if level.direct:
                found = f"`{type(parent).__name__}`" if parent is not target.node else "the function itself"
                return f"stands directly in {found}, not in `{pattern}`"
        else:
            return f"is not inside `{pattern}`"
    return levels, bound


def _beside(target: Target, anchor: Anchor, match: Match) -> Match | str:
    _, _, suite, first = target.places[id(match.statements[0])]
    bound = dict(match.bound)
    for text, at, word in (
        (anchor.after, first - 1, "before"),
        (anchor.before, first + len(match.statements), "after"),
    ):
        if text is None:
            continue
        pattern = compile_pattern(text)
        neighbour = suite[at] if 0 <= at < len(suite) else None
        result = (
            pattern.match(
                neighbour.value if isinstance(neighbour, ast.Expr) and pattern.kind == "expression" else neighbour,
                bound,
                anchor.allow,
            )
            if neighbour is not None
            else None
        )
        if result is None or isinstance(result, Mismatch):
            found = f"`{head(neighbour)}`" if neighbour is not None else "nothing"
            return f"the statement {word} it must be `{pattern}` and is {found}"
        bound = result
    return Match(match.statements, match.levels, bound, match.node)


# -- deltas ----------------------------------------------------------------------------------


def _place(delta: Delta, target: Target | Failure) -> Placement:
    if isinstance(target, Failure):
        return Placement(delta, "failed", failures=[_name(delta, target)])
    if target.unusable is not None:
        return Placement(
            delta, "failed", target=target, line=target.node.lineno, failures=[_name(delta, target.unusable)]
        )
    found: list[tuple[Variant, Match | None]] = []
    often: list[tuple[Variant, list[Match]]] = []
    misses: list[tuple[Variant, Miss]] = []
    for variant in delta.variants:
        if variant.anchor is None:
            found.append((variant, None))
            continue
        matches, near = find_anchor(target, variant.anchor)
        misses += [(variant, miss) for miss in near]
        if len(matches) == 1:
            found.append((variant, matches[0]))
        elif matches:
            often.append((variant, matches))
    if often:
        return _refused(delta, target, _too_often(delta, target, *often[0]), len(often[0][1]))
    if len(found) > 1:
        return _refused(delta, target, _several(delta, target, [variant.name for variant, _ in found]), len(found))
    if not found:
        return _refused(delta, target, _not_found(delta, target, misses), 0)
    variant, match = found[0]
    node = match.node if match else target.node
    placement = Placement(
        delta, variant.status, variant, target, getattr(node, "lineno", None), 1, match.bound if match else {}
    )
    bound = {**placement.bound, PARAMETERS: _forwarded(target)}
    try:
        placement.steps = tuple(step for edit in variant.edits if (step := _step(delta, edit, match, bound, target)))
        placement.exports = {name: Template(text).fill(bound) for name, text in variant.exports.items()}
        if variant.edits and not placement.steps:
            raise PatchError(_nothing(delta, target))
    except PatchError as error:
        return _refused(delta, target, error.failures[0], 1)
    return placement


def _step(delta: Delta, edit: Edit, match: Match | None, bound: Bindings, target: Target) -> Step | None:
    if isinstance(edit, AddParameter):
        arguments = target.node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return None if edit.name in names else Step(delta, edit, f"{edit.name}={edit.default}")
    text = Template(edit_text(edit)).fill(bound)
    if isinstance(edit, (Prologue, CallThrough)):
        return Step(delta, edit, text, (), edit_text(edit))
    if match is None:  # pragma: no cover - refused when the variant is declared
        raise PatchError(_nothing(delta, target))
    statements = match.at(edit.at)
    if isinstance(edit, Replace):
        whole = ast.dump(ast.Module([*statements], []))
        if whole == ast.dump(ast.parse(text)):
            raise PatchError(_nothing(delta, target))
        only = statements[0]
        if isinstance(match.node, ast.expr) and not (isinstance(only, ast.Expr) and only.value is match.node):
            raise PatchError(_part_of(delta, target, only))
    return Step(delta, edit, text, statements, edit_text(edit))


def _forwarded(target: Target) -> tuple[ast.AST, ...]:
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


def _refused(delta: Delta, target: Target, failure: Failure, matches: int) -> Placement:
    return Placement(delta, "failed", target=target, line=failure.line, matches=matches, failures=[failure])


def _name(delta: Delta, failure: Failure) -> Failure:
    return failure.with_fields(("delta", delta.name), ("declared", delta.declared))


def _about(target: Target) -> tuple[tuple[str, str], ...]:
    return (("target", f"{target.name}   ({target.where(target.node)})"),)


def _fail(
    delta: Delta, target: Target, code: str, what: str, rows: Sequence[tuple[str, str]], line: int, next_step: str
) -> Failure:
    return Failure(
        code, what, fields=(*_about(target), *rows, ("declared", delta.declared)), next=next_step,
        file=target.text.display, line=line,
    )  # fmt: skip


def _not_found(delta: Delta, target: Target, misses: Sequence[tuple[Variant, Miss]]) -> Failure:
    what = f"delta {delta.name!r} cannot be placed; nothing was patched."
    ranked = sorted(misses, key=lambda pair: -pair[1].score)
    changed = bool(ranked) and ranked[0][1].score >= _CHANGED
    outside = _outside(delta, target, loose=not changed)
    if outside is not None:
        variant, function, node = outside
        rows = [
            ("anchor", f"{variant.anchor}   need 1, found 0"),
            ("nearest", f"{target.where(node)}  {shown(node)}  in `{function.name}`"),
        ]
        return _fail(
            delta,
            target,
            "BP116",
            what,
            rows,
            node.lineno,
            f"change the target to {function.name} if the code moved there",
        )
    if ranked:
        variant, miss = ranked[0]
        line = getattr(miss.node, "lineno", target.node.lineno)
        rows = [
            ("anchor", f"{variant.anchor}   need 1, found 0"),
            ("nearest", f"{target.where(miss.node)}  {shown(miss.node)}  {miss.reason}"),
        ]
        code = miss.code
    else:
        line, code = target.node.lineno, "BP101"
        rows = [("anchor", f"{v.anchor}   need 1, found 0") for v in delta.variants if v.anchor]
        rows.append(("nearest", f"{target.where(target.node)}  nothing in {target.qualname} comes near"))
    return _fail(delta, target, code, what, rows, line, f"compare with upstream and add a variant to {delta.declared}")


def _outside(delta: Delta, target: Target, *, loose: bool) -> tuple[Variant, FunctionNode, ast.stmt | ast.expr] | None:
    """Another function that holds the anchor; ``loose``: without the levels around it, which may have stayed behind."""
    anchors = [(variant, variant.anchor) for variant in delta.variants if variant.anchor is not None]
    others = [node for node in ast.walk(target.text.tree) if isinstance(node, Function) and node is not target.node]
    for whole in (True, False) if loose else (True,):
        for function in others:
            other = Target(target.text, function.name, function, None)
            for variant, anchor in anchors:
                matches, _ = find_anchor(other, anchor if whole else replace(anchor, inside=()))
                for match in matches:
                    return variant, function, match.node  # type: ignore[return-value]
    return None


def _too_often(delta: Delta, target: Target, variant: Variant, matches: Sequence[Match]) -> Failure:
    lines = [getattr(match.node, "lineno", 0) for match in matches]
    rows = [
        ("anchor", f"{variant.anchor}   need 1, found {len(matches)}"),
        ("nearest", ", ".join(target.where(match.node) for match in matches)),
    ]
    what = f"delta {delta.name!r} cannot be placed; nothing was patched."
    return _fail(
        delta, target, "BP102", what, rows, lines[-1], f"make the anchor in {delta.declared} say which one is meant"
    )


def _several(delta: Delta, target: Target, names: Sequence[str]) -> Failure:
    what = f"delta {delta.name!r}: {' and '.join(map(repr, names))}; nothing was patched."
    return _fail(delta, target, "BP103", what, (), target.node.lineno, "make the variants exclude each other")


def _nothing(delta: Delta, target: Target) -> Failure:
    what = f"delta {delta.name!r} leaves {target.qualname} as it is"
    return _fail(
        delta, target, "BP111", what, (), target.node.lineno, "declare this shape as absorbed, or mend the edit"
    )


def _part_of(delta: Delta, target: Target, statement: ast.stmt) -> Failure:
    what = f"delta {delta.name!r} would replace only a part of a statement"
    rows = [("nearest", f"{target.where(statement)}  `{head(statement)}`")]
    return _fail(delta, target, "BP117", what, rows, statement.lineno, "make the anchor match the whole statement")


# -- overlaps --------------------------------------------------------------------------------


def _collisions(plan: Plan) -> list[Failure]:
    failures = []
    for name, steps in plan.steps.items():
        target = plan.target(name)
        for at, step in enumerate(steps):
            for other in steps[:at]:
                failure = _collision(target, other, step)
                if failure is not None:
                    failures.append(failure)
    return failures


def _collision(target: Target, one: Step, other: Step) -> Failure | None:
    both = f"{one.delta.name!r} and {other.delta.name!r}"
    rows = [("one", one.delta.declared), ("other", other.delta.declared)]
    line = (one.statements or other.statements or (target.node,))[0].lineno
    if _covers(one, other) or _covers(other, one):
        return _fail(
            one.delta, target, "BP119", f"{both} at {short(target.text.display)}:{line}", rows, line,
            "let one delta make both changes, or anchor them at different statements",
        )  # fmt: skip
    if isinstance(one.edit, AddParameter) and isinstance(other.edit, AddParameter) and one.edit.name == other.edit.name:
        return _fail(
            one.delta,
            target,
            "BP119",
            f"{both} add the parameter {one.edit.name}",
            rows,
            line,
            "let one of them add it",
        )
    same_point = _point(target, one) is not None and _point(target, one) == _point(target, other)
    if not same_point or one.delta is other.delta:
        return None
    if one.delta.name in other.delta.after or other.delta.name in one.delta.after:
        return None
    return _fail(
        one.delta, target, "BP118", f"{both} edit at one point, {short(target.text.display)}:{line}", rows, line,
        f"say in one of them which comes first: after=({one.delta.name!r},)",
    )  # fmt: skip


def _covers(one: Step, other: Step) -> bool:
    """Whether ``one`` replaces a node that ``other`` edits or stands in."""
    if not isinstance(one.edit, Replace):
        return False
    inner = {id(node) for statement in one.statements for node in ast.walk(statement)}
    return any(id(statement) in inner for statement in other.statements)


def _point(target: Target, step: Step) -> tuple[int, int] | str | None:
    """The gap between two statements where an insertion stands."""
    if isinstance(step.edit, Prologue):
        return id(target.node.body), docstring_length(target.node)
    if isinstance(step.edit, AddParameter):
        return "parameters"
    if isinstance(step.edit, CallThrough):
        return "around"
    if isinstance(step.edit, Replace) or not step.statements:
        return None
    _, _, suite, at = target.places[id(step.statements[0])]
    return id(suite), at + (len(step.statements) if isinstance(step.edit, InsertAfter) else 0)


def docstring_length(function: FunctionNode) -> int:
    """1 if the function has a docstring, else 0: the index of its first statement that does something."""
    return int(ast.get_docstring(function, clean=False) is not None)


def in_order(steps: Sequence[Step]) -> list[Step]:
    """Steps sorted so that each delta comes after those it names; else as they were declared."""
    left = list(steps)
    done: list[Step] = []
    while left:
        waiting = {step.delta.name for step in left}
        ready = next((s for s in left if not (set(s.delta.after) & waiting - {s.delta.name})), left[0])
        left.remove(ready)
        done.append(ready)
    return done
