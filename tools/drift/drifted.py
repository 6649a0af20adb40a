"""The callees that changed, each with the column, the commit and the lines of both sides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from balance_patcher.errors import PatchError
from balance_patcher.source import Lane

from .callees import Change, changes
from .changed import CalleeChange, Snippet
from .looks import CallsLook
from .shapes import Shape
from .snippets import snippet
from .work import Answer, subject_of_calls

if TYPE_CHECKING:
    from .engine import Engine

_NEXT = {
    "return": "look at every copy of {target}: what unpacks this has to unpack the other number",
    "gone": "find what {target} calls instead, and mend copies of it",
    "parameters": "look at every copy of {target}, whether its call still fits",
    "kind": "look at every copy of {target}, whether it calls this in the same way",
    "body": "read the change, if a copy of {target} relies on what this does",
}


def callee_changes(engine: Engine) -> Iterator[CalleeChange]:
    """Every change of a callee of a target, the likeliest to matter first, and of those the first one."""
    found = [change for target in engine.targets for change in _of_target(engine, target)]
    order = {column.ref.name: at for at, column in enumerate(engine.columns)}
    yield from sorted(found, key=lambda change: (change.rank, order[change.after], change.callee, change.target))


def _of_target(engine: Engine, target: str) -> Iterator[CalleeChange]:
    subject = subject_of_calls(target)
    for at, column in enumerate(engine.columns):
        before = engine.last_seen(at, lambda i: engine.calls(target, i) is not None) if at else None
        new, old = engine.calls(target, at), engine.calls(target, before) if before is not None else None
        if new is None or old is None or before is None or old == new:
            continue
        if any(engine.calls(target, other) == new for other in engine.before(at)[1:]):
            continue  # it came with a merged branch, and is told there
        for change in changes(old, new, column.lane()):
            made = _told(engine, target, before, at, change)
            yield replace(made, first_bad=engine.search(subject, before, at, _state(change)))


def _state(change: Change):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """What has to be equal for a callee not to have changed in that respect."""
    field = {"return": "returns", "parameters": "parameters", "kind": "kind", "body": "body", "gone": "name"}[
        change.what
    ]

    def state(answer: Answer) -> str | None:
        if not isinstance(answer, CallsLook) or answer.calls is None:
            return None
        shape = next((one for one, _ in answer.calls.callees if one.name == change.was.name), None)
        return getattr(shape, field) if shape is not None else "not called"

    return state


def _told(engine: Engine, target: str, before: int, at: int, change: Change) -> CalleeChange:
    was, now = change.texts
    name = change.was.name.partition(":")[2]
    return CalleeChange(
        target=target,
        callee=change.was.name,
        what=change.what,
        rank=change.rank,
        was=was,
        now=now,
        explanation=_sentence(change, name),
        next=_NEXT[change.what].format(target=target.partition(":")[2]),
        calls=change.lines,
        before=engine.columns[before].ref.name,
        after=engine.columns[at].ref.name,
        old=_shown(engine.columns[before].lane(), change.was),
        new=_shown(engine.columns[at].lane(), change.now) if change.now is not None else None,
    )


def _sentence(change: Change, name: str) -> str:
    was, now = change.texts
    if change.what == "return":
        return f"{name} returns {now}; it returned {was}"
    if change.what == "gone":
        return f"{name} is not there any more"
    if change.what == "kind":
        return f"{name} is a {now}; it was a {was}"
    if change.what == "parameters":
        return f"{name} {parameters_said(was, now)}"
    return f"{name} does something else; its parameters and what it returns are as they were"


def parameters_said(was: str, now: str) -> str:
    """How parameters changed: ``lost `a` and gained `b`, which is required``."""
    old, new = _parameters(was), _parameters(now)
    lost = [name for name in old if name not in new]
    gained = [name for name in new if name not in old]
    parts = [f"lost the parameter{_s(lost)} {_listed(lost)}"] if lost else []
    if gained:
        required = [name for name in gained if not new[name] and not name.startswith("*")]
        more = ", which may be left out"
        if required:
            more = ", which must be given" if len(required) == len(gained) else f"; {_listed(required)} must be given"
        parts.append(f"gained the parameter{_s(gained)} {_listed(gained)}{more}")
    if not parts:
        parts = ["takes its parameters in another order" if list(old) != list(new) else "has other defaults"]
    return " and ".join(parts)


def _parameters(text: str) -> dict[str, str]:
    """Names with their defaults; of ``(a, b=f(1, 2))`` a and b."""
    parts, depth, start = [], 0, 1
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            parts.append(text[start:at].strip())
            start = at + 1
    found = [re.match(r"(\*{0,2}\w*|/)\s*=?\s*(.*)", part, re.DOTALL) for part in parts if part]
    return {match[1]: match[2] for match in found if match is not None and match[1] not in {"*", "/"}}


def _s(names: list[str]) -> str:
    return "" if len(names) == 1 else "s"


def _listed(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _shown(lane: Lane, shape: Shape) -> Snippet | None:
    """The head of a callee; of one that is short, all of it."""
    try:
        text = lane.module(shape.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    except PatchError:
        return None
    if text is None or not 0 < shape.line <= len(text.lines):
        return None
    shown = snippet(text, shape.line, min(shape.last, shape.line + 20), around=0)
    return replace(shown, marked=(shape.line,))
