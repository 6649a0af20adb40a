"""Signatures as a target's text has them, and the text of a function that stands around upstream's or over it."""

from __future__ import annotations

import ast
import inspect

from .delta import RESULT, Override
from .matching import render_bound
from .plan import Plan, Step
from .source import ModuleText
from .splice import MARK
from .targets import Target, forwarded

UPSTREAM = "balance_patcher_upstream"


def through_text(target: Target, steps: list[Step]) -> str:
    """The text of a function that calls upstream's, before and after it ours, and returns upstream's result.

    Or of one that overrides upstream's: that is its delta's text. A method stands in a class of its class's name, so
    that private names and ``super()`` come out right.
    """
    arguments = ast.parse(f"def f({ast.unparse(_bare(target.node.args))}): pass").body[0]
    signature = ast.unparse(arguments.args)  # type: ignore[attr-defined]
    positional = [*target.node.args.posonlyargs, *target.node.args.args]
    own = [ast.Name(a.arg) for a in positional[:1]] if target.owner else []
    passed = render_bound((*own, *forwarded(target)))
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
        lines += [f"{indent}    {RESULT} = {UPSTREAM}({passed}){mark}"] * (first and not over)
    lines += [f"{indent}    return {RESULT}{mark}"] * (not over)
    lines += [f"    return {name}", ""]
    return "\n".join(lines)


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
