"""The Markdown block that an owner of NPUs pastes into a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .counter import KINDS
from .figures import OURS, Judged, Seen, Verdict

NO_DEVICE = (
    "There is no NPU here: the CPU was counted instead, to show that the check runs and that its counter counts. "
    "This proves nothing for NPUs."
)

NOT_VERIFIED = (
    "Not verified here: what a kernel of the device does inside itself, and graphs (the run is eager). Rows of other "
    "places may differ, because off and on do not run the same requests in the same step."
)


def block(off: Seen, on: Seen, versions: Mapping[str, str], device: str, judged: Judged) -> str:
    """The block; the verdict comes first."""
    lines = [f"### balance: device synchronisations per step ({device})", "", f"**{_headline(judged, device)}**", ""]
    lines += [f"- {reason}" for reason in judged.reasons]
    lines += [""] if judged.reasons else []
    lines += ["| per step of one engine core | balance off | balance on |", "| --- | ---: | ---: |"]
    rows: list[tuple[str, Sequence[str], Sequence[str] | None]] = []
    rows += [(kind, [kind], None) for kind in KINDS]
    rows += [(f"of them in `{place}`", KINDS, [place]) for place in OURS]
    for title, kinds, places in rows:
        lines.append(f"| {title} | {off.a_step(kinds, places):.2f} | {on.a_step(kinds, places):.2f} |")
    lines += [f"| steps counted | {off.steps} | {on.steps} |", ""]
    if on.gathers:
        took = f"p50 {on.gather(0.5):.0f} µs, p99 {on.gather(0.99):.0f} µs of {len(on.gathers)}"
        lines.append(f"Gather, with the wait for the slower rank: {took}.")
    facts = [one for seen in (off, on) for one in seen.first.values()]
    sound = sum(bool(one["sound"]) for one in facts)
    lines += [
        f"Counter tried on {device} in {sound} of {len(facts)} processes. {_control(on, device)}",
        "",
        f"- hardware: {_listed(on.first.values(), 'hardware')}",
        f"- versions: {', '.join(f'{name} {number}' for name, number in versions.items())}",
        f"- digest: {_listed(on.ranks, 'digest')}",
        "",
        NOT_VERIFIED,
    ]
    return "\n".join(lines)


def _headline(judged: Judged, device: str) -> str:
    if device == "cpu" and judged.verdict is not Verdict.UNKNOWN:
        return f"Not checked. {NO_DEVICE} Counted on the CPU: {judged.verdict.value}."
    return f"{judged.verdict.value[0].upper()}{judged.verdict.value[1:]}."


def _control(on: Seen, device: str) -> str:
    where = f"With the counts of the ranks put on the {device.upper()} as a control"
    return f"{where}, {on.control} reads were seen in `schedule`."


def _listed(facts: Iterable[Mapping[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(str(one[name]) for one in facts)) or "unknown"
