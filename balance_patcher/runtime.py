"""The class that carries features at run time: made over upstream's live one, and what would be dead in it.

Several features that share it have a class each between the one that is bound and upstream's. From a method of one
name only ``super()`` leads to the next below it. So whatever of one feature stands in front of another's has to go
on there; what would not is refused, by the names of both. So is what would hide a name that somebody has put on the
live class, of which the text says nothing.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from .beneath import member
from .bound import definitions
from .chain import sets_attribute
from .delta import CallThrough, Override
from .errors import Failure, PatchError
from .feature import RuntimeClass
from .names import owners_of
from .origins import MISSING, genuine, note_ours, shown
from .plan import Plan, Step
from .proof import compile_text, place_of, take
from .through import every_way_goes_on, on_class

Texts = dict[str, str]
# What Python itself puts on a class, beside what is written `__so__`.
_PYTHONS_OWN = frozenset({"_abc_impl"})


def make_class(runtime: RuntimeClass, plan: Plan, upstream: Any, namespace: dict[str, Any]) -> tuple[type, Texts]:
    """The class over upstream's live one, with what the deltas export; and the texts of that, by file name.

    Args:
        runtime: The declaration.
        plan: The placed feature.
        upstream: The live class that it extends.
        namespace: The globals of its module.

    Raises:
        PatchError: BP130 and BP301, if a method of one feature or of somebody else's would be dead under another's.
    """
    made = runtime.extend(upstream)
    carried = _carried(runtime, plan, made)
    exports = {name: text for placement in plan.placements for name, text in placement.exports.items()}
    failures = [
        *_hidden(runtime, plan, upstream, {*exports, *(name for cls in carried.values() for name in vars(cls))}),
        *_dead_under_a_class(runtime, carried),
        *_dead_under_a_delta(runtime, plan, carried),
        *_dead_under_an_export(runtime, plan, carried),
        *_dead_in_place(upstream, carried),
    ]
    if failures:
        raise PatchError(*failures)
    if any(name in vars(made) for name in _methods(runtime, plan)):
        made = _above(made)  # a class that has the method itself is called through by one above it
    for cls in made.__mro__[: made.__mro__.index(upstream)]:
        note_ours(cls, upstream)
    texts: Texts = {}
    for name, text in exports.items():
        function, filename, source = _export(runtime, name, text, namespace, made)
        setattr(made, name, function)
        texts[filename] = source
    return made, texts


def _carried(runtime: RuntimeClass, plan: Plan, made: type) -> dict[str, type]:
    """The class of each feature that has one, by the feature's name."""
    parts = [part for part in (plan.feature.parts or (plan.feature,)) if part.runtime is not None]
    return dict(zip([part.name for part in parts], made.__bases__ if runtime.composed else [made], strict=True))


def _above(made: type) -> type:
    def body(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": __name__, "__doc__": made.__doc__}

    return types.new_class(f"Patched{made.__bases__[0].__name__}", (made,), exec_body=body)


def _methods(runtime: RuntimeClass, plan: Plan) -> dict[str, list[Step]]:
    """What the deltas do to the methods of the class, by the name of the method."""
    homes = plan.lane.homes
    named = {homes.get(target, target): steps for target, steps in plan.steps.items()}
    return {name.rpartition(".")[2]: steps for name, steps in named.items() if on_class(runtime, name)}


# -- what would be dead ----------------------------------------------------------------------


def _hidden(runtime: RuntimeClass, plan: Plan, upstream: type, names: set[str]) -> Iterator[Failure]:
    """A name that is live on upstream's class and not in its text: somebody put it there, and ours would hide it."""
    for name in sorted({*names, *runtime.provides} - _PYTHONS_OWN):
        holder = next((cls for cls in upstream.__mro__ if member(cls, name) is not MISSING), None)
        if holder is None or _pythons(name) or _in_text(plan, holder, name):
            continue
        where = f"on the live {holder.__qualname__} and not in its text"
        yield Failure(
            "BP301", f"{name!r}, which {runtime.name} brings, is {where}: {place_of(member(holder, name))}",
            "find out who put it there; let one of the two go", (("target", runtime.base), *_declared(plan)),
        )  # fmt: skip


def _in_text(plan: Plan, holder: type, name: str) -> bool:
    """Whether the text of a class sets a name; of one whose text is not in the lane nothing is known."""
    text = plan.lane.module(holder.__module__)
    scope: ast.AST | None = text.outline if text is not None else None
    for part in holder.__qualname__.split("."):
        classes = [node for node in definitions(scope) if isinstance(node, ast.ClassDef)] if scope is not None else []
        scope = next((node for node in classes if node.name == part), None)
    return text is None or not isinstance(scope, ast.ClassDef) or sets_attribute(text, scope, name)


def _dead_under_a_class(runtime: RuntimeClass, carried: Mapping[str, type]) -> Iterator[Failure]:
    """What the classes of two features have both; whichever comes first, the other's must run too."""
    for at, (one, first) in enumerate(carried.items()):
        for other, second in list(carried.items())[at + 1 :]:
            for name in sorted((vars(first).keys() & vars(second).keys()) - _PYTHONS_OWN):
                if _pythons(name) and not isinstance(vars(first)[name], FunctionType):
                    continue
                ends = [whose for whose, cls in ((one, first), (other, second)) if not _goes_on(vars(cls)[name], name)]
                if ends:
                    who = f"that of {ends[0]!r} does" if len(ends) == 1 else "they do"
                    what = f"the classes of {one!r} and {other!r} both have {name}, and {who} not go on with super()"
                    yield _dead(runtime.base, what, carried[ends[0]], name)


def _dead_under_a_delta(runtime: RuntimeClass, plan: Plan, carried: Mapping[str, type]) -> Iterator[Failure]:
    for name, steps in _methods(runtime, plan).items():
        for who in [who for who, cls in carried.items() if name in vars(cls)]:
            for step in steps:
                why = _why_dead(step, name, plan, own=who in owners_of(step.delta))
                if why:
                    what = f"delta {step.delta.name!r} {why}, and the class of {who!r} has {name} too"
                    yield _dead(runtime.base, what, carried[who], name, ("declared", step.delta.declared))


def _dead_in_place(upstream: type, carried: Mapping[str, type]) -> Iterator[Failure]:
    """What a feature has put on upstream's own class in place, and the class of another would never go on to."""
    for who, cls in carried.items():
        for name in sorted(vars(cls).keys() & vars(upstream).keys()):
            code = getattr(member(upstream, name), "__code__", None)
            if code is not None and shown(code) and not _goes_on(vars(cls)[name], name):
                what = f"a feature that is bound edits {name} in place, and the class of {who!r} does not go on to it"
                yield _dead(f"{upstream.__module__}:{upstream.__qualname__}", what, cls, name)


def refuse_unreached(plan: Plan, bound: Callable[[str], Any]) -> Iterator[Failure]:
    """What would be put in place on upstream's own class, where a class of ours is bound that does not go on to it.

    Args:
        plan: The placed feature.
        bound: Gives what stands in the name of a class.
    """
    for target, steps in plan.steps.items():
        base, _, name = plan.lane.homes.get(target, target).rpartition(".")
        if ":" not in base or on_class(plan.feature.runtime, f"{base}.{name}"):
            continue
        stands = bound(base)
        for cls in stands.__mro__[: stands.__mro__.index(genuine(stands))]:
            if name in vars(cls) and not _goes_on(vars(cls)[name], name):
                what = f"delta {steps[0].delta.name!r} edits {name} in place, and {cls.__name__} does not go on to it"
                yield _dead(base, what, cls, name, ("declared", steps[0].delta.declared))


def _why_dead(step: Step, name: str, plan: Plan, *, own: bool) -> str:
    """Why a method of that name below would not run; empty where it does."""
    if own:
        return f"and its own feature's class both give {name}"
    if isinstance(step.edit, CallThrough):
        target = plan.target(step.delta.target)
        return "" if [*target.node.args.posonlyargs, *target.node.args.args] else "has nothing to call super() with"
    if isinstance(step.edit, Override):
        return "" if every_way_goes_on(step.text, name) else f"does not call super().{name}(…) in every way through it"
    return f"edits upstream's {name}, which has no super() to go on to"


def _dead_under_an_export(runtime: RuntimeClass, plan: Plan, carried: Mapping[str, type]) -> Iterator[Failure]:
    for placement in plan.placements:
        for name in placement.exports:
            for who in [who for who, cls in carried.items() if name in vars(cls)]:
                what = f"delta {placement.delta.name!r} exports {name}, and the class of {who!r} has {name} too"
                yield _dead(runtime.base, what, carried[who], name, ("declared", placement.delta.declared))


def _dead(base: str, what: str, cls: type, name: str, *rows: tuple[str, str]) -> Failure:
    rows = (("target", f"{base}.{name}"), *rows, ("method", place_of(vars(cls)[name])))
    next_step = "let the method go on with super(), or leave one of the two out"
    return Failure("BP130", f"{what}: one of the two would never run", next_step, rows)


def _goes_on(method: object, name: str) -> bool:
    """Whether a method mentions ``super`` and its own name: more cannot be told of it without its text."""
    parts = [method.fget, method.fset, method.fdel] if isinstance(method, property) else [method]
    functions = [getattr(part, "__func__", part) for part in parts if part is not None or part is method]
    return all(isinstance(f, FunctionType) and {"super", name} <= _said(f.__code__) for f in functions)


def _said(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_said(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _pythons(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _declared(plan: Plan) -> tuple[tuple[str, str], ...]:
    return (("declared", plan.feature.declared),)


# -- what deltas export ----------------------------------------------------------------------


def _export(
    runtime: RuntimeClass, name: str, text: str, namespace: dict[str, Any], made: type
) -> tuple[FunctionType, str, str]:
    """A method that evaluates what a delta bound, on the live globals of upstream's module; its file name and text."""
    owner = runtime.base.replace(":", ".").rpartition(".")[2]  # the class whose private names the text may use
    filename = f"<balance_patcher {runtime.base}.{name}>"
    source = f"class {owner}:\n    def {name}(self):\n        return {text}\n"
    code = take(compile_text(source, filename), owner, name)
    function = FunctionType(code, namespace, name, None, tuple(CellType(made) for _ in code.co_freevars) or None)
    function.__qualname__ = f"{runtime.name}.{name}"
    function.__module__ = namespace["__name__"]
    return function, filename, source
