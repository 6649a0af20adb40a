"""What must hold upstream besides the anchors, looked at in the text.

A delta that can be placed may still be wrong: the gather rests on the busy loop calling its hook
once a turn on every rank. Each kind of invariant here is a mechanism; features declare which
function it speaks of. Upstream's own decorators do not matter: the text under them is read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .delta import Agree, Anchor, CalledOnce, Invariant, Ordered, Pure, Sets
from .errors import Failure, Outcome, PatchError
from .pattern import Mismatch, compile_pattern, render_bound, same
from .plan import Plan, Target, find_anchor, find_target, own_nodes, short
from .render import head
from .rewrite import Rewrite


@dataclass(frozen=True)
class Finding:
    """One invariant on one lane: ``holds``, ``broken`` or ``unknown``, and why."""

    name: str
    status: str
    detail: str
    failures: tuple[Failure, ...] = ()


def check_invariants(plan: Plan, rewrites: dict[str, Rewrite] | None) -> list[Finding]:
    """Every invariant of the plan's feature, in declared order.

    Args:
        plan: The placed feature.
        rewrites: The rewritten modules; ``None`` when the feature could not be placed, which leaves the
            invariants of the rewritten text ``unknown``.
    """
    return [_check(invariant, plan, rewrites) for invariant in plan.feature.invariants]


def _check(invariant: Invariant, plan: Plan, rewrites: dict[str, Rewrite] | None) -> Finding:
    if rewrites is None and isinstance(invariant, (Agree, Pure)):
        return Finding(invariant.name, "unknown", "the feature could not be placed")
    try:
        detail = _KINDS[type(invariant)](invariant, plan, rewrites or {})
    except PatchError as error:
        status = "broken" if error.outcome is Outcome.BROKEN else "unknown"
        return Finding(invariant.name, status, error.failures[0].headline, error.failures)
    return Finding(invariant.name, "holds", detail)


def _target(plan: Plan, name: str) -> Target:
    found = find_target(plan.lane, name)
    if isinstance(found, Failure):
        raise PatchError(found)
    return found


def _broken(code: str, invariant: Invariant, target: Target, what: str, node: ast.AST, next_step: str) -> PatchError:
    line = getattr(node, "lineno", target.node.lineno)
    rows = (
        ("invariant", invariant.name),
        ("target", f"{target.name}   ({target.where(target.node)})"),
        ("nearest", f"{short(target.text.display)}:{line}  `{head(node)}`"),
    )
    return PatchError(Failure(code, what, next_step, rows, target.text.display, line))


# -- called once -----------------------------------------------------------------------------


def _called_once(invariant: CalledOnce, plan: Plan, _: dict[str, Rewrite]) -> str:
    target = _target(plan, invariant.target)
    loops = [node for node in target.node.body if isinstance(node, (ast.While, ast.For))]
    if len(loops) != 1:
        node = loops[1] if loops else target.node
        raise _broken("BP203", invariant, target, f"{target.qualname} has {len(loops)} loops at its top, not one", node,
                      "read upstream's loop anew; the hook rests on its shape")  # fmt: skip
    paths = _Paths(invariant, target)
    ends = paths.suite(loops[0].body, frozenset({0}))
    call = compile_pattern(invariant.call)
    if not paths.calls:
        near = next((n for n in ast.walk(loops[0]) if isinstance(n, ast.Call) and call.similarity(n) > 0.5), loops[0])
        raise _broken("BP201", invariant, target, f"`{call}` is not called in the loop at all", near,
                      "find what upstream calls instead; the gather must follow it")  # fmt: skip
    if 2 in ends:
        raise _broken("BP202", invariant, target, f"`{call}` is called more than once on a path through the loop", paths.calls[-1],
                      "decide after which call the gather belongs, and change the delta")  # fmt: skip
    if 0 in ends:
        raise _broken("BP201", invariant, target, f"a path through the loop does not call `{call}`", paths.calls[0],
                      "a rank that skips it leaves the others waiting: do not use this version before it is understood")  # fmt: skip
    lines = ", ".join(str(node.lineno) for node in paths.calls)  # type: ignore[attr-defined]
    return f"called once on every path, {short(target.text.display)}:{lines}"


class _Paths:
    """How often the hook can have been called (0, 1, 2 for more) when a path reaches a point."""

    def __init__(self, invariant: CalledOnce, target: Target) -> None:
        self.invariant, self.target = invariant, target
        self.call, self.idle = compile_pattern(invariant.call), compile_pattern(invariant.idle)
        self.calls: list[ast.AST] = []

    def suite(self, statements: Sequence[ast.stmt], counts: frozenset[int]) -> frozenset[int]:
        for statement in statements:
            counts = self.statement(statement, counts)
        return counts

    def statement(self, node: ast.stmt, counts: frozenset[int]) -> frozenset[int]:
        if isinstance(node, ast.If):
            if self._is_idle(node):
                return self.suite(node.orelse, counts)
            counts = self._expression(node.test, counts)
            return self.suite(node.body, counts) | self.suite(node.orelse, counts)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self.suite(node.body, self._expression(ast.Tuple([i.context_expr for i in node.items]), counts))
        if isinstance(node, (ast.Continue, ast.Break, ast.Return)):
            if isinstance(node, ast.Return) and node.value is not None:
                counts = self._expression(node.value, counts)
            if counts - {1}:
                word = type(node).__name__.lower()
                raise _broken("BP201", self.invariant, self.target, f"`{word}` leaves a turn of the loop before `{self.call}`", node,
                              f"only `{self.idle}` may skip it; find out when upstream takes this way")  # fmt: skip
            return frozenset()
        if isinstance(node, ast.Raise):
            return frozenset()
        inner = [child for child in ast.walk(node) if self._calls(child)]
        if inner and isinstance(node, (ast.For, ast.While, ast.Try, ast.AsyncFor)) or inner and hasattr(ast, "Match") and isinstance(node, ast.Match):
            self.calls += inner
            word = type(node).__name__.lower()
            raise _broken("BP203", self.invariant, self.target, f"`{self.call}` stands inside a `{word}`", inner[0],
                          "read upstream's loop anew; how often it is called cannot be told")  # fmt: skip
        if inner:
            return self._expression(node, counts)
        if isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
            return self._without_calls(node.body, counts, own_loop=True)
        if isinstance(node, ast.Try):
            suites = [node.body, node.orelse, node.finalbody, *(handler.body for handler in node.handlers)]
            return self._without_calls([s for suite in suites for s in suite], counts, own_loop=False)
        if hasattr(ast, "Match") and isinstance(node, ast.Match):
            return counts.union(*(self.suite(case.body, counts) for case in node.cases))
        return counts

    def _without_calls(self, statements: Sequence[ast.stmt], counts: frozenset[int], *, own_loop: bool) -> frozenset[int]:
        for statement in statements:
            for node in _leaving(statement, own_loop=own_loop):
                self.statement(node, counts)
        return counts

    def _is_idle(self, node: ast.If) -> bool:
        bare = ast.If(node.test, node.body, [])
        return not isinstance(self.idle.match(bare), Mismatch)

    def _calls(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and not isinstance(self.call.match(node), Mismatch)

    def _expression(self, node: ast.AST, counts: frozenset[int]) -> frozenset[int]:
        for call in (child for child in ast.walk(node) if self._calls(child)):
            self.calls.append(call)
            after = frozenset(min(count + 1, 2) for count in counts)
            counts = counts | after if _conditional(node, call) else after
        return counts


def _leaving(node: ast.AST, *, own_loop: bool) -> list[ast.stmt]:
    """The statements below a node that leave the loop around it."""
    kinds: tuple[type[ast.stmt], ...] = (ast.Return,) if own_loop else (ast.Return, ast.Continue, ast.Break)
    if isinstance(node, kinds):
        return [node]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return []
    inner = own_loop or isinstance(node, (ast.For, ast.While, ast.AsyncFor))
    return [found for child in ast.iter_child_nodes(node) for found in _leaving(child, own_loop=inner)]


def _conditional(root: ast.AST, call: ast.AST) -> bool:
    """Whether an expression may leave out the evaluation of a part of it."""
    for node in ast.walk(root):
        late: Iterable[ast.AST] = ()
        if isinstance(node, ast.BoolOp):
            late = node.values[1:]
        elif isinstance(node, ast.IfExp):
            late = (node.body, node.orelse)
        elif isinstance(node, ast.Compare):
            late = node.comparators[1:]
        elif isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            late = (node,)
        if any(call is part for item in late for part in ast.walk(item)):
            return True
    return False


# -- the others ------------------------------------------------------------------------------


def _ordered(invariant: Ordered, plan: Plan, _: dict[str, Rewrite]) -> str:
    target = _target(plan, invariant.target)
    first, then = (_one(invariant, target, text) for text in (invariant.first, invariant.then))
    if not _dominates(target, first, then):
        raise _broken("BP204", invariant, target, f"`{head(first)}` is not executed on every path before `{head(then)}`", then,
                      "read upstream's start-up anew; what the hook uses may not be there yet")  # fmt: skip
    return f"{short(target.text.display)}:{first.lineno} before {then.lineno}"


def _one(invariant: Invariant, target: Target, text: str) -> ast.stmt:
    matches, misses = find_anchor(target, Anchor(text))
    if len(matches) != 1:
        near = max(misses, key=lambda miss: miss.score, default=None)
        raise _broken("BP204", invariant, target, f"`{compile_pattern(text)}` was found {len(matches)} times, not once",
                      near.node if near else target.node, "read upstream's function anew")  # fmt: skip
    return matches[0].statements[0]


def _dominates(target: Target, first: ast.stmt, then: ast.stmt) -> bool:
    """Whether ``first`` stands before ``then`` or one of its ancestors, in a suite that is always run through."""
    around = {id(then): then, **{id(node): node for node, _ in target.ancestors(then)}}
    at: ast.stmt = first
    while id(at) in target.places:
        parent, name, suite, index = target.places[id(at)]
        if any(id(later) in around for later in suite[index + 1 :]):
            return True
        if not isinstance(parent, (ast.With, ast.AsyncWith)) or name != "body":
            return False
        at = parent
    return False


def _sets(invariant: Sets, plan: Plan, _: dict[str, Rewrite]) -> str:
    target = _target(plan, invariant.target)
    for node in own_nodes(target.node):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == invariant.attribute:
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return f"{short(target.text.display)}:{node.lineno}"
    raise _broken("BP207", invariant, target, f"{target.qualname} does not set self.{invariant.attribute}", target.node,
                  "find where upstream sets it now")  # fmt: skip


def _agree(invariant: Agree, plan: Plan, rewrites: dict[str, Rewrite]) -> str:
    module = invariant.target.partition(":")[0]
    result = rewrites.get(module)
    target = result.targets.get(invariant.target) if result else None
    if target is None:
        target = _target(plan, invariant.target)
    bound = []
    for text in (invariant.one, invariant.other):
        matches, misses = find_anchor(target, Anchor(text))
        if len(matches) != 1:
            near = max(misses, key=lambda miss: miss.score, default=None)
            raise _broken("BP205", invariant, target, f"`{compile_pattern(text)}` stands {len(matches)} times in what would run",
                          near.node if near else target.node, "place the feature's deltas first; then read this again")  # fmt: skip
        bound.append(matches[0])
    one, other = bound
    for hole in invariant.holes:
        if not same(one.bound[hole], other.bound[hole]):
            values = " and ".join(f"`{render_bound(match.bound[hole])}`" for match in bound)
            raise _broken("BP205", invariant, target, f"{hole} differs: {values}", other.node,
                          "bind it from upstream's own statement instead of repeating it")  # fmt: skip
    return ", ".join(f"{hole} {render_bound(one.bound[hole])}" for hole in invariant.holes)


def _pure(invariant: Pure, plan: Plan, _: dict[str, Rewrite]) -> str:
    placement = plan.placement(invariant.delta)
    if placement.target is None or invariant.hole not in placement.bound:
        return f"nothing is bound to ${invariant.hole} here"
    value = placement.bound[invariant.hole]
    if not isinstance(value, ast.AST):
        return f"`{render_bound(value)}`"
    for node in ast.walk(value):
        effect = isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
        foreign = isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in invariant.calls)
        if effect or foreign:
            raise _broken("BP206", invariant, placement.target, f"`{render_bound(value)}` may do more than count", node,
                          "find out what upstream does there; the gate would leave it out or do it twice")  # fmt: skip
    return f"`{render_bound(value)}` only reads"


_KINDS: dict[type, Callable[..., str]] = {
    CalledOnce: _called_once, Ordered: _ordered, Sets: _sets, Agree: _agree, Pure: _pure,
}  # fmt: skip
