"""Check every name and attribute that inserted code uses, before anything is compiled.

A rename upstream must be refused here, not raise a NameError at the first request. New names may
stand nowhere in the function's scopes or the module; all other names must exist; an attribute of
``self`` must be set somewhere in the text of the class chain, or be brought by the feature.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from collections.abc import Iterator
from functools import lru_cache

from .bound import stored
from .chain import ClassChain, line_at
from .delta import APART, RESULT, CallThrough, Delta
from .errors import Failure
from .feature import RuntimeClass
from .plan import Placement, Plan, Step
from .scope import Scope, in_class
from .targets import Target, find_target, short
from .template import Template

_PROBE = "__bp_probe"
_WORD = re.compile(r"(?<![\w.$])[A-Za-z_]\w*")
_BUILTINS = frozenset(dir(builtins))
#: Nothing can be bound to these, though they are there.
_CONSTANTS = {"True", "False", "None", "__debug__"}


def check_names(plan: Plan) -> list[Failure]:
    """Every name or attribute that is taken (BP301) or missing (BP302, BP303), or ``super`` misused (BP304)."""
    failures: list[Failure] = [*_brought_twice(plan)]
    carried: set[str] = set()
    scopes: dict[str, Scope] = {}
    for placement in plan.placements:
        if placement.target is None or placement.status != "applied":
            continue
        scope = scopes.setdefault(placement.target.name, Scope(placement.target))
        home = _home(plan, placement.target)
        chain = ClassChain(plan.lane, home.text, home.owner)
        brought = (_provided(plan, placement.target) | set(placement.exports)) - carried
        carried |= brought
        failures += [
            _taken(f"{name!r}, which the feature's class brings, is upstream's", scope, placement, name)
            for name in sorted(brought)
            if chain.has(name)
        ]
        for step in placement.steps:
            if step.text and step.template:
                failures += _check(plan, placement, step, scope, chain)
        for name, text in placement.exports.items():
            failures += _check_export(plan, placement, name, text, scope, chain)
    return failures


def _brought_twice(plan: Plan) -> Iterator[Failure]:
    """What a delta exports and another feature brings too: the class has one of a name."""
    placed = [(p, name, feature) for p in plan.placements for name in p.exports for feature in plan.feature.parts]
    for placement, name, feature in placed:
        if placement.target is None or feature.name in owners_of(placement.delta):
            continue
        others = [p.delta for p in plan.placements if name in p.exports and feature.name in owners_of(p.delta)]
        if others or (feature.runtime is not None and name in feature.runtime.provides):
            what = f"{name!r}, which delta {placement.delta.name!r} exports, feature {feature.name!r} brings too"
            row = ("the other", others[0].declared if others else feature.declared)
            next_step = f"rename it in {placement.delta.declared}"
            yield _failure("BP301", what, placement.target, placement, placement.target.node.lineno, next_step, row)


def new_names(step: Step) -> frozenset[str]:
    """The names that an edit binds itself; what a hole binds is upstream's."""
    template = Template(step.template)
    operator = _has_operator(template)
    return _binds(step.text if operator else template.fill(dict.fromkeys(template.holes, _PROBE)))


@lru_cache(maxsize=256)
def _binds(text: str) -> frozenset[str]:
    return frozenset(name for name in stored(ast.parse(text)) if name != _PROBE)


def _has_operator(template: Template) -> bool:
    return "<$" in template.text


def _loaded(tree: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[str]:
    """The names that a text reads from outside itself."""
    if isinstance(tree, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        bound = {n.id for g in tree.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        local = local | bound
    elif isinstance(tree, ast.Lambda):
        local = local | {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
    elif isinstance(tree, ast.Name) and isinstance(tree.ctx, ast.Load) and tree.id not in local:
        yield tree.id
    for node in ast.iter_child_nodes(tree):
        yield from _loaded(node, local)


def _check(plan: Plan, placement: Placement, step: Step, scope: Scope, chain: ClassChain) -> Iterator[Failure]:
    target = scope.target
    fresh = new_names(step)
    for name in sorted(fresh):
        meant = in_class(name, target.owner)
        taken = "the function" if scope.uses(meant) else "the module" if meant in scope.module else ""
        if taken:
            line = scope.line_of(name)
            meant = "" if name in scope.module else "; if upstream's own is meant, let the anchor bind it, `$NAME`"
            yield _failure(
                "BP301",
                f"{name!r}, which delta {step.delta.name!r} puts in, is used in {taken}",
                target,
                placement,
                line,
                f"rename it in {step.delta.declared}{meant}",
                ("nearest", line_at(target.text, line)),
            )
    yield from _bound_twice(plan, placement, step, fresh, target)
    tree = ast.parse(step.text)
    # A function of its own sees none of what upstream's binds in its body.
    apart = isinstance(step.edit, APART)
    bound = {in_class(name, target.owner) for name in fresh | _bound_in_feature(plan, target, step)}
    known = bound | scope.parameters | scope.module | _BUILTINS
    if isinstance(step.edit, CallThrough) and not step.edit.first:
        known.add(RESULT)
    yield from _unknown(tree, known, scope, placement, step.text, local=not apart)
    yield from _shadowed(Template(step.template), scope, placement)
    yield from _attributes(tree, target, placement, chain, _provided(plan, target) | _added(plan, target))
    if "super" in set(_loaded(tree)) and not isinstance(step.edit, APART):
        used = {name for name in ("__class__", "super") if scope.uses(name)}
        if used:
            yield _failure(
                "BP304",
                f"{target.qualname} uses {min(used)} itself",
                target,
                placement,
                (line := scope.line_of(min(used))),
                "call the base class by name in the delta",
                ("nearest", line_at(target.text, line)),
            )


def _shadowed(template: Template, scope: Scope, placement: Placement) -> Iterator[Failure]:
    """Builtins that the delta's own text uses and that upstream gives another meaning."""
    used = {name for name in _WORD.findall(template.text) if not name.startswith("__")}
    for name in sorted(name for name in (used & _BUILTINS) - _CONSTANTS if name in scope.module or scope.binds(name)):
        yield _taken(
            f"{name!r}, which delta {placement.delta.name!r} uses, is not the builtin here", scope, placement, name
        )


def _taken(what: str, scope: Scope, placement: Placement, name: str) -> Failure:
    line = scope.line_of(name)
    next_step = f"change {placement.delta.declared}"
    return _failure(
        "BP301", what, scope.target, placement, line, next_step, ("nearest", line_at(scope.target.text, line))
    )


def _bound_in_feature(plan: Plan, target: Target, of: Step) -> set[str]:
    """Names that edits of the same feature put into the same function; parameters are there for all."""
    steps = plan.steps.get(target.name, [])
    added = {step.edit.name for step in steps if hasattr(step.edit, "default") and hasattr(step.edit, "name")}
    return added.union(
        *(new_names(step) for step in steps if step.template and owners_of(step.delta) & owners_of(of.delta))
    )


def _bound_twice(
    plan: Plan, placement: Placement, step: Step, fresh: frozenset[str], target: Target
) -> Iterator[Failure]:
    """A name that another feature binds too: each would read what the other has put there."""
    for other in plan.steps.get(target.name, []):
        if not other.template or owners_of(other.delta) & owners_of(step.delta):
            continue
        common = {in_class(name, target.owner) for name in fresh} & {
            in_class(name, target.owner) for name in new_names(other)
        }
        if common and not isinstance(other.edit, APART) and not isinstance(step.edit, APART):
            what = f"{min(common)!r} is put in by {step.delta.name!r} and by {other.delta.name!r}"
            next_step = f"rename it in {step.delta.declared}"
            row = ("the other", other.delta.declared)
            yield _failure("BP301", what, target, placement, target.node.lineno, next_step, row)


def owners_of(delta: Delta) -> set[str]:
    """The features whose delta it is; one that several share has the names of all."""
    return set(delta.name.rpartition(".")[0].split("+"))


def _check_export(
    plan: Plan, placement: Placement, name: str, text: str, scope: Scope, chain: ClassChain
) -> Iterator[Failure]:
    tree = ast.parse(text, mode="eval")
    known = {"self"} | scope.module | _BUILTINS
    yield from _shadowed(Template(text), scope, placement)
    label = f"export {name!r}: {text}"
    yield from _unknown(tree, known, scope, placement, label, local=False)
    provided = _provided(plan, scope.target) | _added(plan, scope.target)
    yield from _attributes(tree, scope.target, placement, chain, provided)


def _unknown(
    tree: ast.AST, known: set[str], scope: Scope, placement: Placement, text: str, *, local: bool
) -> Iterator[Failure]:
    """Names that are not known; ``local``: those of the function's own are."""
    target = scope.target
    meant = {name: in_class(name, target.owner) for name in set(_loaded(tree))}
    strange = [name for name, is_ in meant.items() if is_ not in known and not (local and scope.binds(is_))]
    known = known | scope.local if strange and local else known
    for name in sorted(strange):
        yield _failure(
            "BP302",
            f"{name!r}, which delta {placement.delta.name!r} uses, is neither in {target.qualname} nor in the module",
            target,
            placement,
            placement.line or target.node.lineno,
            "find what upstream calls it now and change the delta",
            ("text", text),
            _nearest_name(name, known, target),
        )


def _nearest_name(name: str, known: set[str], target: Target) -> tuple[str, str]:
    near = difflib.get_close_matches(name, known, 1)
    return "nearest", near[0] if near else f"{target.where(target.node)}  nothing in {target.qualname} comes near"


def _home(plan: Plan, target: Target) -> Target:
    """Upstream's function where somebody else's stands: what its class sets is there for theirs."""
    home = plan.lane.homes.get(target.name)
    found = find_target(plan.lane, home) if home is not None else target
    return found if isinstance(found, Target) else target


def _provided(plan: Plan, target: Target) -> frozenset[str]:
    runtime: RuntimeClass | None = plan.feature.runtime
    owner = plan.lane.homes.get(target.name, target.name).rpartition(".")[0]
    return runtime.provides if runtime is not None and runtime.base == owner else frozenset()


def _added(plan: Plan, target: Target) -> frozenset[str]:
    """The names that the feature adds to a target's own class."""
    owner = target.name.rpartition(".")[0]
    return frozenset(name for addition in plan.feature.adds if addition.owner == owner for name in addition.names)


def _attributes(
    tree: ast.AST, target: Target, placement: Placement, chain: ClassChain, provided: frozenset[str]
) -> Iterator[Failure]:
    if target.owner is None:
        return
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for name in sorted(names - provided):
        if not chain.has(name):
            yield _failure(
                "BP303",
                f"self.{name}, which delta {placement.delta.name!r} uses, is set nowhere in {chain.described}",
                target,
                placement,
                placement.line or target.node.lineno,
                "find what upstream calls it now and change the delta",
                chain.nearest(name),
            )


def _failure(
    code: str, what: str, target: Target, placement: Placement, line: int, next_step: str, *rows: tuple[str, str]
) -> Failure:
    where = f"{target.name}   ({short(target.text.display)}:{line})"
    return Failure(
        code,
        what,
        next_step,
        (("target", where), *rows, ("declared", placement.delta.declared)),
        target.text.display,
        line,
    )
