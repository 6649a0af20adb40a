"""Compile a proven rewrite and rebuild the functions on vLLM's live objects.

The whole spliced module is compiled and the one code object is taken out of it, so that
mangling, ``__future__``, ``__class__`` and nested functions come out as upstream's own. Defaults,
keyword defaults, annotations and ``__dict__`` stay the same objects. Nothing of vLLM is changed
here: the result waits for :mod:`balance_patcher.installation` to bind it.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

from .adding import check_additions, make_additions
from .alone import code_alone
from .beneath import attribute, member
from .delta import APART, AddParameter, There
from .errors import Failure, PatchError, refuse
from .feature import CalledOnce, Feature
from .foreign import Moved, as_method, callable_there, move
from .invariants import check_invariants
from .lines import physical_lines
from .names import check_names
from .origins import MISSING, genuine
from .plan import Plan, in_order, make_plan
from .proof import compile_text, find_code, prove, same_code, take
from .rewrite import Rewrite, rewrite
from .runtime import make_class, refuse_unreached
from .source import Lane, ModuleText, installed_lane
from .splice import MARKED
from .targets import Target, find_target
from .through import UPSTREAM, next_below, through_text


@dataclass(frozen=True)
class Compiled:
    """The code of one rewritten target, made without importing vLLM.

    Attributes:
        target: ``module:Qual.name``.
        code: The code object to put on live globals.
        filename: What tracebacks call its text.
        text: The whole text that stands under that name.
    """

    target: str
    code: CodeType
    filename: str
    text: str

    @property
    def through(self) -> bool:
        """Whether this is a call-through, with a text of its own, and not a part of a rewritten module."""
        return self.filename == f"<balance_patcher {self.target}>"


@dataclass(repr=False)
class Built:
    """A feature, ready to be bound.

    Attributes:
        feature: The declaration.
        plan: How it was placed.
        rewrites: The rewritten modules.
        functions: The new functions by target.
        originals: The functions that they stand for, as the class ``__dict__`` has them: upstream's, or
            somebody else's that was asked for.
        classes: The runtime classes by the upstream class that they extend (``module:Class``).
        texts: What runs, by the file name that tracebacks give it.
        homes: The functions of others that the plan edits, each with the target that it stands on.
        added: What upstream's modules and classes get under names of their own, by place.
    """

    feature: Feature
    plan: Plan
    rewrites: dict[str, Rewrite]
    functions: dict[str, FunctionType] = field(default_factory=dict)
    originals: dict[str, object] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Built {self.feature.name}: {', '.join([*self.functions, *self.added])}>"

    added: dict[str, object] = field(default_factory=dict)


def compile_plan(plan: Plan) -> tuple[dict[str, Rewrite], list[Compiled]]:
    """Rewrite and compile what a plan says; needs no vLLM.

    Raises:
        PatchError: With every failure of placing, naming, splicing and compiling.
    """
    failures = [*plan.all_failures, *check_names(plan), *check_additions(plan)]
    if failures:
        raise PatchError(*failures)
    rewrites = rewrite(plan)
    return rewrites, [*_spliced(plan, rewrites), *_called_through(plan, rewrites)]


def _spliced(plan: Plan, rewrites: dict[str, Rewrite]) -> list[Compiled]:
    found: list[Compiled] = []
    failures = []
    # One that is only called through, or overridden, stands in the same text unchanged: upstream's own is called.
    edited = {name for name, steps in plan.steps.items() if not all(isinstance(s.edit, APART) for s in steps)}
    for result in rewrites.values():
        try:
            for name, target in [item for item in result.targets.items() if item[0] in edited]:
                if target.owner is not None and "." not in target.qualname:
                    code = as_method(result.text, result.filename, target.node)
                else:
                    code = code_alone(result.original.outline, target.qualname, target.node, result.filename)
                found.append(Compiled(name, code, result.filename, result.text))
        except (SyntaxError, ValueError) as error:
            failures.append(_uncompiled(result, error))
    if failures:
        raise PatchError(*failures)
    return found


def check_whole(rewrites: Mapping[str, Rewrite], compiled: Sequence[Compiled]) -> None:
    """Where nothing runs, the whole of each new text must compile, and have the code in it that was made of its parts.

    An installation need not ask: there the code is compared with what runs, which was made of the whole.

    Raises:
        PatchError: BP305.
    """
    failures = []
    for result in rewrites.values():
        try:
            module = compile_text(result.text, result.filename)
        except (SyntaxError, ValueError) as error:
            failures.append(_uncompiled(result, error))
            continue
        for item in (item for item in compiled if item.filename == result.filename):
            whole = find_code(module, item.target.partition(":")[2], item.code.co_firstlineno)
            if whole is None or not same_code(whole, item.code):
                what = (
                    f"{item.target} is not in the compiled module as it is by itself: the compiler leaves it out there"
                )
                next_step = "find out when upstream runs it, and change the delta's target"
                failures.append(Failure("BP305", what, next_step, file=result.original.display))
    if failures:
        raise PatchError(*failures)


def _uncompiled(result: Rewrite, error: SyntaxError | ValueError) -> Failure:
    """Why a text that parses does not compile; of a line that a delta put in, the delta is named."""
    what, file = f"{result.original.module}: {error}", result.original.display
    lines = physical_lines(result.text)
    line = getattr(error, "lineno", None) or 0
    marked = MARKED.match(lines[line - 1].rstrip("\r\n")) if 0 < line <= len(lines) else None
    if marked is None:
        return Failure("BP305", what, "report this with the source file", file=file)
    next_step = "change its text: it cannot stand at that place"
    return Failure("BP305", f"{what}: a line of delta {marked['delta']!r}", next_step, file=file)


def _called_through(plan: Plan, rewrites: dict[str, Rewrite]) -> list[Compiled]:
    found = []
    for name, steps in plan.steps.items():
        through = [step for step in in_order(steps) if isinstance(step.edit, APART)]
        if through:
            target = plan.target(name)
            spliced = rewrites.get(target.text.module)
            # Where other edits rewrote the target too, that is what is called, with the parameters that it has.
            target = spliced.targets.get(name, target) if spliced else target
            below = "" if len(through) < len(steps) else next_below(plan, target)
            text = through_text(target, through, below)
            filename = f"<balance_patcher {name}>"
            owner = [target.owner.name] if target.owner else []
            code = take(compile_text(text, filename), "upstream", *owner, target.node.name)
            found.append(Compiled(name, code, filename, text))
    return found


def build(feature: Feature | str, lane: Lane | None = None) -> Built:
    """Plan, rewrite, prove and compile a feature against the vLLM of this process; binds nothing.

    Args:
        feature: A feature, or the name of one in ``deltas/``.
        lane: Where the text comes from; the installed vLLM unless a test says otherwise.

    Raises:
        PatchError: With every failure; nothing was changed.
    """
    if isinstance(feature, str):
        from .registry import find_feature

        feature = find_feature(feature)
    with no_collection():
        return _build(feature, lane or installed_lane())


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Parsing makes many objects at once; on a heap full of torch each collection that sets off costs 100 ms."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _build(feature: Feature, lane: Lane) -> Built:
    moved = move(feature, lane, _live_member)
    plan = make_plan(moved.lane, moved.feature)
    failures = list(moved.failures)
    rewrites: dict[str, Rewrite] | None = None
    compiled: list[Compiled] = []
    try:
        rewrites, compiled = compile_plan(plan)
    except PatchError as error:
        failures += error.failures
    failures += [failure for finding in check_invariants(plan, rewrites) for failure in finding.failures]
    failures += _nothing(plan)
    proven, unproven = _prove_all(plan, moved)
    failures += unproven or refuse_unreached(plan, _live)
    if failures or rewrites is None:
        raise PatchError(*dict.fromkeys(failures))
    if plan.idle:
        raise refuse(
            "BP126", f"feature {feature.name!r} has nothing to do here: {plan.idle}",
            next="leave it out; with this vLLM the engine is as with it",
        )  # fmt: skip
    built = Built(feature, plan, rewrites, homes=moved.homes)
    if feature.runtime is not None:
        base = feature.runtime.base
        namespace = vars(_live(base.partition(":")[0] + ":"))
        built.classes[base], texts = make_class(feature.runtime, plan, _live(base), namespace)
        for filename, text in texts.items():
            show(filename, text)
    for item in compiled:
        _rebuild(built, item, *proven[item.target])
    built.added, texts = make_additions(plan, _live)
    for filename, text in texts.items():
        show(filename, text)
        built.texts[filename] = text
    return built


def _nothing(plan: Plan) -> Iterator[Failure]:
    """A feature of which every target is missing cannot be installed there: it would be on and do nothing."""
    if all(placement.status == "not-applicable" and placement.variant is None for placement in plan.placements):
        reasons = dict.fromkeys(placement.why for placement in plan.placements)
        what = f"{plan.feature.name} in vLLM {plan.lane.version or 'of an unknown version'}: {'; '.join(reasons)}"
        yield Failure("BP127", what, f"switch {plan.feature.name} off with this vLLM")


def _prove_all(plan: Plan, moved: Moved) -> tuple[dict[str, tuple[object, FunctionType]], list[Failure]]:
    """Each target as its class has it and the plain function that runs; or why that cannot be proven.

    The loops that an invariant speaks of, and what a variant says of other functions, are proven too: what was read
    of them must be what runs. Nothing of theirs is edited, so a wrapper through which they are reached does no harm
    (BP602 is a refusal for targets).
    """
    targets = {p.delta.target: p.target for p in plan.placements if p.target is not None}
    read = [invariant.target for invariant in plan.feature.invariants if isinstance(invariant, CalledOnce)]
    applied = [p.variant for p in plan.placements if p.variant is not None and p.status == "applied"]
    read += [given.target for variant in applied for given in variant.given if isinstance(given, There)]
    for name in read:
        found = find_target(plan.lane, name) if name not in targets else None
        if isinstance(found, Target):
            targets[name] = found
    edited = {placement.delta.target for placement in plan.placements}
    proven: dict[str, tuple[object, FunctionType]] = {}
    failures: list[Failure] = []
    for name, target in targets.items():
        try:
            live = _live_member(moved.home(name))
            kept = callable_there(plan.feature, target, name, live)
            proven[name] = live, kept or prove(target.text, target.qualname, target.node, live)
        except PatchError as error:
            failures += [failure for failure in error.failures if name in edited or failure.code != "BP602"]
    return proven, failures


def _live(name: str, target: str = "") -> Any:
    """The live object ``module:Qual.name``, or the live module ``module:``.

    Args:
        name: What is looked up.
        target: What a refusal names instead.

    Raises:
        PatchError: BP603, if it is not there; BP604, if its module cannot be imported.
    """
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise refuse(
            "BP604", f"{module} cannot be imported: {type(error).__name__}: {error}", ("target", target or name),
            next="run it with the Python that has vLLM, and mend that import first",
        ) from error  # fmt: skip
    for part in filter(None, qualname.split(".")):
        inner = attribute(found, part)
        if inner is MISSING:
            raise _gone(target or name, part, found)
        found = inner
    return found


def _live_member(name: str) -> object:
    """A target as the ``__dict__`` of its live class or module has it; of upstream's own, where ours is bound."""
    module, _, qualname = name.partition(":")
    outer, _, last = qualname.rpartition(".")
    owner = genuine(_live(f"{module}:{outer}", name))
    found: object = member(owner, last)
    if found is MISSING:
        raise _gone(name, last, owner)
    return found


def _gone(name: str, part: str, owner: Any) -> PatchError:
    return refuse(
        "BP603", f"{part} is not in the live {owner.__name__}", ("target", name), next="find out who removed it"
    )


def _rebuild(built: Built, item: Compiled, live: object, original: FunctionType) -> None:
    place = built.homes.get(item.target, item.target)
    owner_name, _, name = place.rpartition(".")  # of a module-level function there is no owner
    runtime = built.classes.get(owner_name)
    cells: dict[str, Any] = {}
    if item.through:
        cells[UPSTREAM] = CellType(built.functions.get(place, original))
    else:
        # Upstream's own `__class__` among them: its `super()` goes on to mean upstream's class.
        cells |= zip(original.__code__.co_freevars, original.__closure__ or (), strict=True)
    if "." in place.partition(":")[2]:
        cells.setdefault("__class__", CellType(runtime or genuine(_live(owner_name))))
    function = _function(item, original, cells, _added_defaults(built.plan, item.target))
    if runtime is not None:
        function.__qualname__ = f"{runtime.__qualname__}.{name}"
        setattr(runtime, name, function)
    show(item.filename, item.text)
    built.texts[item.filename] = item.text
    built.functions[place] = function
    built.originals[place] = live


def _function(item: Compiled, original: FunctionType, cells: dict[str, Any], added: tuple[object, ...]) -> FunctionType:
    closure = tuple(cells[name] for name in item.code.co_freevars)
    defaults = original.__defaults__
    if added:
        defaults = (*(defaults or ()), *added)
    function = FunctionType(item.code, original.__globals__, original.__name__, defaults, closure or None)
    function.__kwdefaults__ = original.__kwdefaults__
    function.__dict__ = original.__dict__
    function.__doc__ = original.__doc__
    function.__module__ = original.__module__
    function.__qualname__ = original.__qualname__
    # From 3.14 annotations are computed when they are asked for, unless somebody has set them.
    lazy = getattr(original, "__annotate__", None) is not None
    for name in ("__annotate__" if lazy else "__annotations__", "__type_params__"):
        if hasattr(original, name):
            setattr(function, name, getattr(original, name))
    return function


def _added_defaults(plan: Plan, target: str) -> tuple[object, ...]:
    steps = in_order(plan.steps.get(target, []))
    return tuple(ast.literal_eval(step.edit.default) for step in steps if isinstance(step.edit, AddParameter))


def show(filename: str, text: str) -> None:
    """Let tracebacks, ``pdb`` and ``inspect.getsource`` find a text; no file, so no mtime.

    The lines are the compiler's (a form feed ends none), with the line ends that ``linecache`` gives a file's.
    """
    lines = ModuleText("", "", filename, text).lines
    if "\r" in text or not text.endswith("\n"):
        lines = [line.rstrip("\r\n") + "\n" for line in lines]
    linecache.cache[filename] = (len(text), None, lines, filename)
