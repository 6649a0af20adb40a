"""Compile a proven rewrite and rebuild the functions on vLLM's live objects.

The whole spliced module is compiled and the one code object is taken out of it, so that
mangling, ``__future__``, ``__class__`` and nested functions come out as upstream's own. Defaults,
keyword defaults, annotations and ``__dict__`` stay the same objects. Nothing of vLLM is changed
here: the result waits for :mod:`balance_patcher.install` to bind it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

from .delta import AddParameter, CallThrough, Feature, RuntimeClass
from .errors import PatchError, refuse
from .invariants import check_invariants
from .names import check_names
from .pattern import render_bound
from .plan import PARAMETERS, Plan, Step, Target, _forwarded, in_order, make_plan
from .proof import compile_text, find_code, first_line, prove
from .rewrite import MARK, Rewrite, rewrite
from .source import InstalledSource, Lane

_UPSTREAM = "balance_patcher_upstream"


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


@dataclass
class Built:
    """A feature, ready to be bound.

    Attributes:
        feature: The declaration.
        plan: How it was placed.
        rewrites: The rewritten modules.
        functions: The new functions by target.
        originals: The upstream functions that they stand for, as the class ``__dict__`` has them.
        classes: The runtime classes by the upstream class that they extend (``module:Class``).
    """

    feature: Feature
    plan: Plan
    rewrites: dict[str, Rewrite]
    functions: dict[str, FunctionType] = field(default_factory=dict)
    originals: dict[str, object] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)


def compile_plan(plan: Plan) -> tuple[dict[str, Rewrite], list[Compiled]]:
    """Rewrite and compile what a plan says; needs no vLLM.

    Raises:
        PatchError: With every failure of placing, naming, splicing and compiling.
    """
    failures = [*plan.all_failures, *check_names(plan)]
    if failures:
        raise PatchError(*failures)
    rewrites = rewrite(plan)
    return rewrites, [*_spliced(rewrites), *_called_through(plan)]


def _spliced(rewrites: dict[str, Rewrite]) -> list[Compiled]:
    found = []
    for result in rewrites.values():
        try:
            module = compile_text(result.text, result.filename)
        except (SyntaxError, ValueError) as error:
            raise refuse(
                "BP305", f"{result.original.module}: {error}", next="report this with the source file",
                file=result.original.display,
            ) from error  # fmt: skip
        for name, target in result.targets.items():
            code = find_code(module, target.qualname, first_line(target.node))
            if code is None:
                raise refuse(
                    "BP306", f"{name} is not in the compiled module", ("file", result.original.display),
                    next="report this with the source file", file=result.original.display,
                )  # fmt: skip
            found.append(Compiled(name, code, result.filename, result.text))
    return found


def _called_through(plan: Plan) -> list[Compiled]:
    found = []
    for name, steps in plan.steps.items():
        through = [step for step in in_order(steps) if isinstance(step.edit, CallThrough)]
        if through:
            target = plan.target(name)
            text = through_text(target, through)
            filename = f"<balance_patcher {name}>"
            maker = next(c for c in compile_text(text, filename).co_consts if isinstance(c, CodeType))
            code = next(c for c in maker.co_consts if isinstance(c, CodeType))
            found.append(Compiled(name, code, filename, text))
    return found


def through_text(target: Target, steps: list[Step]) -> str:
    """The text of a function that calls upstream's, then ours, and returns upstream's result."""
    arguments = ast.parse(f"def f({ast.unparse(_bare(target.node.args))}): pass").body[0]
    signature = ast.unparse(arguments.args)  # type: ignore[attr-defined]
    first = [ast.Name(a.arg) for a in [*target.node.args.posonlyargs, *target.node.args.args][:1]] if target.owner else []
    passed = render_bound((*first, *_forwarded(target)))
    mark = f"{MARK}{steps[0].delta.name}"
    lines = [f"def upstream({_UPSTREAM}):", f"    def {target.node.name}({signature}):{mark}"]
    lines.append(f"        balance_result = {_UPSTREAM}({passed}){mark}")
    for step in steps:
        lines += [f"        {line}{MARK}{step.delta.name}" for line in step.text.splitlines()]
    lines += [f"        return balance_result{mark}", f"    return {target.node.name}", ""]
    return "\n".join(lines)


def _bare(arguments: ast.arguments) -> ast.arguments:
    """The same parameters without annotations; defaults only say that there are some."""

    def bare(args: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(a.arg) for a in args]

    none = ast.Constant(None)
    return ast.arguments(
        posonlyargs=bare(arguments.posonlyargs), args=bare(arguments.args),
        vararg=ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        kwonlyargs=bare(arguments.kwonlyargs), kw_defaults=[none if d else None for d in arguments.kw_defaults],
        kwarg=ast.arg(arguments.kwarg.arg) if arguments.kwarg else None, defaults=[none for _ in arguments.defaults],
    )  # fmt: skip


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
    lane = lane or Lane("installed", InstalledSource())
    plan = make_plan(lane, feature)
    rewrites, compiled = compile_plan(plan)
    broken = [f for finding in check_invariants(plan, rewrites) for f in finding.failures if finding.status != "holds"]
    if broken:
        raise PatchError(*broken)
    built = Built(feature, plan, rewrites)
    if feature.runtime is not None:
        built.classes[feature.runtime.base] = _runtime_class(feature.runtime, plan)
    for item in compiled:
        _rebuild(built, item)
    return built


def _live(name: str) -> Any:
    """The live object ``module:Qual.name``."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _runtime_class(runtime: RuntimeClass, plan: Plan) -> type:
    base = _live(runtime.base)
    made = runtime.make(base)
    if not made.__bases__ or made.__bases__[0] is not base:
        raise refuse(
            "BP002", f"{runtime.name}: its first base is not {runtime.base}", next="let `make` derive from what it is given"
        )
    for placement in plan.placements:
        for name, text in placement.exports.items():
            setattr(made, name, _export(runtime, name, text, _live(runtime.base.partition(":")[0] + ":__dict__")))
    return made


def _export(runtime: RuntimeClass, name: str, text: str, namespace: dict[str, Any]) -> FunctionType:
    """A method that evaluates what a delta bound, on the live globals of upstream's module."""
    filename = f"<balance_patcher {runtime.base}.{name}>"
    source = f"def {name}(self):\n    return {text}\n"
    code = next(c for c in compile_text(source, filename).co_consts if isinstance(c, CodeType))
    show(filename, source)
    function = FunctionType(code, namespace, name)
    function.__qualname__ = f"{runtime.name}.{name}"
    function.__module__ = namespace["__name__"]
    return function


def _rebuild(built: Built, item: Compiled) -> None:
    module, _, qualname = item.target.partition(":")
    owner_name, _, name = item.target.rpartition(".")
    owner = _live(owner_name) if "." in qualname else importlib.import_module(module)
    target = built.plan.target(item.target)
    if name not in vars(owner):
        raise refuse(
            "BP603", f"{qualname} is not in the live {owner.__name__}", ("target", item.target),
            next="find out who removed it",
        )  # fmt: skip
    live = vars(owner)[name]
    original = prove(target.text, target.qualname, target.node, live)
    runtime = built.classes.get(owner_name)
    through = item.filename.endswith(f"{item.target}>")
    cells: dict[str, Any] = dict(zip(original.__code__.co_freevars, original.__closure__ or ()))
    if runtime is not None:
        cells["__class__"] = CellType(runtime)
    elif isinstance(owner, type):
        cells.setdefault("__class__", CellType(owner))
    if through:
        cells[_UPSTREAM] = CellType(built.functions.get(item.target, original))
    function = _function(item, original, cells, _added_defaults(built.plan, item.target))
    if runtime is not None:
        function.__qualname__ = f"{runtime.__qualname__}.{name}"
        setattr(runtime, name, function)
    show(item.filename, item.text)
    built.functions[item.target] = function
    built.originals[item.target] = live


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
    for name in ("__annotate__",) if hasattr(original, "__annotate__") else ("__annotations__",):
        setattr(function, name, getattr(original, name))
    if hasattr(original, "__type_params__"):
        function.__type_params__ = original.__type_params__
    return function


def _added_defaults(plan: Plan, target: str) -> tuple[object, ...]:
    steps = in_order(plan.steps.get(target, []))
    return tuple(ast.literal_eval(step.edit.default) for step in steps if isinstance(step.edit, AddParameter))


def show(filename: str, text: str) -> None:
    """Let tracebacks, ``pdb`` and ``inspect.getsource`` find a text; no file, so no mtime."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def signature_of(target: Target) -> inspect.Signature:
    """The signature of a target as its text has it, for binding without importing."""
    arguments = target.node.args
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    parameters = []
    for at, a in enumerate(positional):
        kind = kinds.POSITIONAL_ONLY if at < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        parameters.append(kinds(a.arg, kind, default=kinds.empty if at < without else None))
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        parameters.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)
