"""Signatures as a target's text has them, and the text of a function that stands around upstream's or over it."""

from __future__ import annotations

import ast
import inspect

from .bound import suites_of
from .delta import RESULT, Override
from .feature import RuntimeClass
from .matching import render_bound
from .paths import swallows
from .plan import Plan, Step
from .source import ModuleText
from .splice import MARK
from .targets import Target, forwarded

UPSTREAM = "balance_patcher_upstream"


def on_class(runtime: RuntimeClass | None, place: str) -> bool:
    """Whether what is made of a place stands on the feature's class, above upstream's."""
    return runtime is not None and place.rpartition(".")[0] == runtime.base


def next_below(plan: Plan, target: Target) -> str:
    """The method that a call-through of a target reaches by ``super()``; empty where it calls the function itself.

    On the feature's class it is not upstream's alone that is below: another feature's class may have the method too.
    """
    home = plan.lane.homes.get(target.name, target.name)
    first = [*target.node.args.posonlyargs, *target.node.args.args]
    return home.rpartition(".")[2] if on_class(plan.feature.runtime, home) and first else ""


def through_text(target: Target, steps: list[Step], below: str = "") -> str:
    """The text of a function that calls upstream's, before and after it ours, and returns upstream's result.

    Or of one that overrides upstream's: that is its delta's text. A method stands in a class of its class's name, so
    that private names and ``super()`` come out right. With ``below``, it calls ``super()``'s method of that name.
    """
    arguments = ast.parse(f"def f({ast.unparse(_bare(target.node.args))}): pass").body[0]
    signature = ast.unparse(arguments.args)  # type: ignore[attr-defined]
    positional = [*target.node.args.posonlyargs, *target.node.args.args]
    own = [ast.Name(a.arg) for a in positional[:1]] if target.owner else []
    passed = render_bound(forwarded(target) if below else (*own, *forwarded(target)))
    called = f"super().{below}" if below else UPSTREAM
    mark = f"{MARK}{steps[0].delta.name}"
    name, indent = target.node.name, "    "
    lines = [f"def upstream({UPSTREAM}):"]
    if target.owner is not None:
        name, indent = target.owner.name, indent * 2
        lines.append(f"    class {name}:")
    lines.append(f"{indent}def {target.node.name}({signature}):{mark}")
    over = isinstance(steps[0].edit, Override)
    for first in (True, False):
        for step in steps:
            if getattr(step.edit, "first", False) is first:
                lines += [f"{indent}    {line}{MARK}{step.delta.name}" for line in step.text.splitlines()]
        lines += [f"{indent}    {RESULT} = {called}({passed}){mark}"] * (first and not over)
    lines += [f"{indent}    return {RESULT}{mark}"] * (not over)
    lines += [f"    return {name}", ""]
    return "\n".join(lines)


def every_way_goes_on(text: str, name: str) -> bool:
    """Whether a method of that text calls ``super().name(…)`` in every way through it that does not raise."""
    return _goes_on(ast.parse(text).body, name) is True


def _goes_on(suite: list[ast.stmt], name: str) -> bool | None:
    """Whether every way through a suite does; ``None`` where one that does not runs on behind it."""
    for statement in suite:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if _calls(statement, name) or isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, (ast.Break, ast.Continue)):
            return None
        if isinstance(statement, ast.Return):
            return False
        ways, whole = _ways(statement, name)
        if False in ways:
            return False
        if whole and all(ways):
            return True
    return None


def _ways(statement: ast.stmt, name: str) -> tuple[list[bool | None], bool]:
    """What the ways through a compound statement do, and whether one of them is always taken to its end."""
    if isinstance(statement, ast.Try):
        if _goes_on(statement.finalbody, name):
            return [True], True
        suites = [[*statement.body, *statement.orelse], *(handler.body for handler in statement.handlers)]
        return [_goes_on(suite, name) for suite in suites], True
    ways = [_goes_on(suite, name) for _, suite in suites_of(statement)]
    if isinstance(statement, ast.With):
        return ways, not swallows(statement)
    return ways, isinstance(statement, ast.If) and bool(statement.orelse)


def _calls(node: ast.AST, name: str) -> bool:
    """Whether what a statement evaluates before its suites, or an expression in any case, calls the method."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == f"super().{name}":
        return True
    if isinstance(node, ast.IfExp):
        return _calls(node.test, name) or (_calls(node.body, name) and _calls(node.orelse, name))
    first: list[ast.AST | None]
    if isinstance(node, ast.BoolOp):
        first = [node.values[0]]
    elif isinstance(node, ast.Compare):
        first = [node.left, node.comparators[0]]
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
        first = [node.generators[0].iter]
    elif isinstance(node, ast.Match):
        first = [node.subject]
    elif isinstance(node, (ast.Lambda, ast.GeneratorExp, ast.Try)):
        first = []
    else:
        first = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    return any(_calls(child, name) for child in first if child is not None)


def override_of(plan: Plan, name: str) -> Target | None:
    """The method that overrides a target, as it would run; ``None`` if none does."""
    steps = [step for step in plan.steps.get(name, ()) if isinstance(step.edit, Override)]
    if not steps:
        return None
    target = plan.target(name)
    text = ModuleText(target.text.module, "", f"<balance_patcher {name}>", through_text(target, steps))
    owner = text.tree.body[0].body[0]  # type: ignore[attr-defined]
    return Target(text, target.qualname, owner.body[0], owner)


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
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)
