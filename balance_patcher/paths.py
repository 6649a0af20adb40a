"""How often a hook is called on each path through a loop, told from the text.

A rank that skips the hook, or calls it twice, leaves the others waiting in a collective; so what cannot be
told is refused.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Sequence

from .anchors import find_anchor
from .bound import definitions, walk
from .delta import Anchor
from .errors import Failure, PatchError
from .feature import CalledOnce, Invariant
from .matching import Mismatch
from .pattern import compile_pattern
from .plan import Plan
from .render import head
from .rewrite import Rewrite
from .targets import Target, find_target, own_nodes, short

_OTHER_WAYS = (ast.While, ast.For, ast.AsyncFor, ast.Return, ast.Yield, ast.YieldFrom)
_MORE = 2  # stands for every number of calls over one


def target_of(plan: Plan, name: str) -> Target:
    found = find_target(plan.lane, name)
    if isinstance(found, Failure):
        raise PatchError(found)
    return found


def broken(code: str, invariant: Invariant, target: Target, what: str, node: ast.AST, next_step: str) -> PatchError:
    line = getattr(node, "lineno", target.node.lineno)
    rows = (
        ("invariant", invariant.name),
        ("target", f"{target.name}   ({target.where(target.node)})"),
        ("nearest", f"{short(target.text.display)}:{line}  `{head(node)}`"),
    )
    return PatchError(Failure(code, what, next_step, rows, target.text.display, line))


def called_once(invariant: CalledOnce, plan: Plan, _: dict[str, Rewrite]) -> str:
    target = target_of(plan, invariant.target)
    loops = [node for node in target.node.body if isinstance(node, (ast.While, ast.For))]
    if len(loops) != 1:
        node = loops[1] if loops else target.node
        raise broken(
            "BP203",
            invariant,
            target,
            f"{target.qualname} has {len(loops)} loops at its top, not one",
            node,
            "read upstream's loop anew; the hook rests on its shape",
        )
    inside = set(map(id, walk(loops[0])))
    for other in own_nodes(target.node):
        if id(other) not in inside and isinstance(other, _OTHER_WAYS):
            what = f"`{head(other)}` stands beside the loop of {target.qualname}"
            raise broken("BP203", invariant, target, what, other, "find out whether turns can run without the hook")
    _not_overridden(invariant, target)
    paths = _Paths(invariant, target)
    header = loops[0].test if isinstance(loops[0], ast.While) else loops[0].iter
    for part, word in ((header, "header"), (ast.Module(loops[0].orelse, []), "else")):
        paths.refuse_within(part, f"the loop's {word}")
    ends = paths.suite(loops[0].body, frozenset({0}))
    call = compile_pattern(invariant.call)
    if not paths.calls:
        near = max(
            (n for n in ast.walk(loops[0]) if isinstance(n, ast.Call)),
            key=lambda n: _likeness(call.text, n),
            default=loops[0],
        )
        raise broken(
            "BP201",
            invariant,
            target,
            f"`{call}` is not called in the loop at all",
            near,
            "find what upstream calls instead; the gather must follow it",
        )
    if _MORE in ends:
        raise broken(
            "BP202",
            invariant,
            target,
            f"`{call}` is called more than once on a path through the loop",
            paths.calls[-1],
            "decide after which call the gather belongs, and change the delta",
        )
    if 0 in ends:
        raise broken(
            "BP201",
            invariant,
            target,
            f"a path through the loop does not call `{call}`",
            paths.calls[0],
            "a rank that skips it leaves the others waiting: do not use this version before it is understood",
        )
    _called_nowhere_else(invariant, target, paths)
    if invariant.step:
        _steps_before(invariant, target, paths.calls[0])
    lines = ", ".join(str(node.lineno) for node in paths.calls)  # type: ignore[attr-defined]
    return f"called once on every path, {short(target.text.display)}:{lines}"


def dominates(target: Target, first: ast.stmt, then: ast.stmt) -> bool:
    """Whether ``first`` stands before ``then`` or one of its ancestors, in a suite that is always run through."""
    around = {id(then): then, **{id(node): node for node, _ in target.ancestors(then)}}
    at: ast.stmt = first
    while id(at) in target.places:
        parent, name, suite, index = target.places[id(at)]
        if any(id(later) in around for later in suite[index + 1 :]):
            return True
        if not isinstance(parent, (ast.With, ast.AsyncWith)) or name != "body" or swallows(parent):
            return False
        at = parent
    return False


def _not_overridden(invariant: CalledOnce, target: Target) -> None:
    """A subclass in the module that has a loop or a hook of its own would run that instead."""
    hook = getattr(getattr(compile_pattern(invariant.call).nodes[0], "func", None), "attr", "")
    owner = target.owner.name if target.owner else ""
    for node in target.text.outline.body:
        if isinstance(node, ast.ClassDef) and owner in {base.id for base in node.bases if isinstance(base, ast.Name)}:
            for own in definitions(node):
                if getattr(own, "name", "") in (hook, target.node.name):
                    what = f"{node.name} derives from {owner} and has its own {own.name}"  # type: ignore[attr-defined]
                    raise broken("BP203", invariant, target, what, own, "read that class; the delta must reach it too")


def _steps_before(invariant: CalledOnce, target: Target, call: ast.AST) -> None:
    """What must be done once a turn, before the hook, is."""
    found, _ = find_anchor(target, Anchor(invariant.step), near=False)
    around = [suite[at] for _, _, suite, at in target.places.values() if call in walk(suite[at])]
    holder = min(around, key=lambda statement: sum(1 for _ in walk(statement)))
    if len(found) != 1 or not dominates(target, found[0].statements[0], holder):
        what = f"`{compile_pattern(invariant.step)}` is not called once before the hook"
        node = found[0].node if found else call
        raise broken("BP204", invariant, target, what, node, "read upstream's loop anew; what is gathered may be stale")


def _likeness(text: str, node: ast.AST) -> float:
    return difflib.SequenceMatcher(None, text, ast.unparse(node)).ratio()


def _called_nowhere_else(invariant: CalledOnce, target: Target, paths: _Paths) -> None:
    """A second call in a helper, before the loop, in a nested function or by another name may run in the same turn."""
    name = getattr(getattr(paths.call.nodes[0], "func", None), "attr", "")
    seen = {id(part) for call in paths.calls for part in (call, getattr(call, "func", None))}
    for node in (node for part in target.text.parts_with(name) for node in walk(part)):
        named = isinstance(node, ast.Attribute) and node.attr == name
        if id(node) not in seen and (named or paths.is_call(node)):
            raise broken(
                "BP202",
                invariant,
                target,
                f"`{name}` is used outside the loop's own statements too",
                node,
                "find out whether a turn of the loop can call it twice; the gather follows every call",
            )


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
            counts = self._expression(node.test, counts)
            if self._is_idle(node):
                return self.suite(node.orelse, counts)
            return self.suite(node.body, counts) | self.suite(node.orelse, counts)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(node, counts)
        if isinstance(node, (ast.Continue, ast.Break, ast.Return)):
            if isinstance(node, ast.Return) and node.value is not None:
                counts = self._expression(node.value, counts)
            if counts - {1}:
                word = type(node).__name__.lower()
                raise broken(
                    "BP201",
                    self.invariant,
                    self.target,
                    f"`{word}` leaves a turn of the loop before `{self.call}`",
                    node,
                    f"only `{self.idle}` may skip it; find out when upstream takes this way",
                )
            return frozenset()
        if isinstance(node, ast.Raise):
            return frozenset()
        if isinstance(node, _UNCLEAR):
            self.refuse_within(node, f"a `{type(node).__name__.lower()}`")
            return self._without_calls(node, counts)
        return self._expression(node, counts)

    def _with(self, node: ast.With | ast.AsyncWith, counts: frozenset[int]) -> frozenset[int]:
        if swallows(node):
            self.refuse_within(node, "a `with` that swallows exceptions")
            return counts | self.suite(node.body, counts)
        for item in node.items:
            counts = self._expression(item, counts)
        return self.suite(node.body, counts)

    def refuse_within(self, node: ast.AST, where: str) -> None:
        """Refuse a call whose number cannot be told from where it stands (BP203)."""
        found = next((child for child in walk(node) if self.is_call(child)), None)
        if found is not None:
            raise broken(
                "BP203",
                self.invariant,
                self.target,
                f"`{self.call}` stands inside {where}",
                found,
                "read upstream's loop anew; how often it is called cannot be told",
            )

    def _without_calls(self, node: ast.stmt, counts: frozenset[int]) -> frozenset[int]:
        for leaving in _leaving(node):
            self.statement(leaving, counts)
        return counts

    def _is_idle(self, node: ast.If) -> bool:
        bare = ast.If(node.test, node.body, [])
        return not isinstance(self.idle.match(bare), Mismatch)

    def is_call(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and not isinstance(self.call.match(node), Mismatch)

    def _expression(self, node: ast.AST, counts: frozenset[int]) -> frozenset[int]:
        """The counts after a node was evaluated; what is only defined (a lambda, a function) is not evaluated."""
        if isinstance(node, ast.Lambda):
            return self._all(_defaults(node.args), counts)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self._all([*node.decorator_list, *_defaults(node.args)], counts)
        if isinstance(node, ast.BoolOp):
            return self._perhaps(node.values[1:], self._expression(node.values[0], counts))
        if isinstance(node, ast.Compare):
            return self._perhaps(node.comparators[1:], self._all([node.left, node.comparators[0]], counts))
        if isinstance(node, ast.IfExp):
            counts = self._expression(node.test, counts)
            return self._expression(node.body, counts) | self._expression(node.orelse, counts)
        if isinstance(node, ast.Assert):
            return self._perhaps([node.test, *([node.msg] if node.msg else [])], counts)  # -O leaves it out
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            counts = self._expression(node.generators[0].iter, counts)
            rest = [child for child in ast.iter_child_nodes(node) if child is not node.generators[0]]
            inner = [*rest, node.generators[0].target, *node.generators[0].ifs]
            return self._perhaps([*inner, *inner], counts)  # any number of times
        counts = self._all(ast.iter_child_nodes(node), counts)
        if self.is_call(node):
            self.calls.append(node)
            counts = frozenset(min(count + 1, _MORE) for count in counts)
        return counts

    def _all(self, nodes: Iterable[ast.AST], counts: frozenset[int]) -> frozenset[int]:
        for node in nodes:
            counts = self._expression(node, counts)
        return counts

    def _perhaps(self, nodes: Iterable[ast.AST], counts: frozenset[int]) -> frozenset[int]:
        """The counts after some of the nodes were evaluated, from the first on."""
        for node in nodes:
            counts = counts | self._expression(node, counts)
        return counts


#: Compound statements whose suites may run any number of times, or in part.
_UNCLEAR: tuple[type[ast.stmt], ...] = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.Try,
    getattr(ast, "TryStar", ast.Try),
    ast.Match,
    ast.ClassDef,
)


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]


def swallows(node: ast.With | ast.AsyncWith) -> bool:
    """Whether a ``with`` is one of ``contextlib.suppress``; all others are believed to let exceptions through."""
    calls = [item.context_expr.func for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any("suppress" in (getattr(func, "id", ""), getattr(func, "attr", "")) for func in calls)


def _leaving(node: ast.AST, *, own_loop: bool = False) -> list[ast.stmt]:
    """The statements below a node that leave a turn of the loop around it."""
    kinds: tuple[type[ast.stmt], ...] = (ast.Return,) if own_loop else (ast.Return, ast.Continue, ast.Break)
    if isinstance(node, kinds):
        return [node]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return []
    if isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
        # A `break` in a loop's `else` leaves the loop around it.
        return [
            found
            for part, own in ((node.body, True), (node.orelse, own_loop))
            for s in part
            for found in _leaving(s, own_loop=own)
        ]
    return [found for child in ast.iter_child_nodes(node) for found in _leaving(child, own_loop=own_loop)]


def conditional(root: ast.AST, part: ast.AST) -> bool:
    """Whether a statement may be executed without evaluating a part of it."""
    for node in walk(root):
        late: Iterable[ast.AST] = ()
        if isinstance(node, ast.BoolOp):
            late = node.values[1:]
        elif isinstance(node, ast.IfExp):
            late = (node.body, node.orelse)
        elif isinstance(node, ast.Compare):
            late = node.comparators[1:]
        elif isinstance(node, (ast.Assert, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            late = (node,)
        if any(part is inner for item in late for inner in walk(item)):
            return True
    return False
