"""What a person reads of a status: the environment, then each feature with its deltas and what is bound."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from .environment import EntryPoint
from .origins import Origin
from .states import BindingState, DeltaState, FeatureState, Status, TakeOverState, TargetState
from .targets import short
from .terminal import COLOURS, folded

_NOWHERE = "vLLM is not installed in this Python"


def as_text(status: Status) -> str:
    console = Console(record=True, file=io.StringIO())
    print_status(status, console)
    return console.export_text()


def print_status(status: Status, console: Console) -> None:
    width = console.width if console.is_terminal else None
    lines = [*_environment(status, width), Text()]
    for feature in status.features:
        lines += [*_feature(feature, width, vllm=bool(status.vllm.place)), Text()]
    failures = [*status.failures, *(failure for feature in status.features for failure in feature.failures)]
    for failure in failures:
        lines += [*(Text(line) for part in str(failure).split("\n") for line in folded(part, width, 12)), Text()]
    while lines and not lines[-1].plain:
        lines.pop()
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)


# -- the environment -------------------------------------------------------------------------


def _environment(status: Status, width: int | None) -> Iterator[Text]:
    yield Text(f"balance_patcher {status.version}  Python {status.python}", "bold")
    vllm = status.vllm
    there = f"{vllm.version or 'of an unknown version'}  {vllm.place}" if vllm.place else _NOWHERE
    rows = [("vLLM", f"{there}{'' if vllm.imported else '  (not imported here)'}")]
    rows += [(switch.name, f"{_value(switch.value)}: {switch.means}") for switch in status.switches]
    rows += [("entry point", _point(point)) for point in status.entry_points]
    rows += [] if status.entry_points else [("entry point", "none is found")]
    rows.append(("would arm", f"{'yes' if status.armed.would_arm else 'no'}: {status.armed.why}"))
    rows.append(("armed here", f"{'yes' if status.armed.armed else 'no'}: {status.armed.how}"))
    if status.armed.run_engine_core:
        rows.append(("launch", "EngineCoreProc.run_engine_core is ours"))
    rows += [("stands in", _stands_in(done)) for done in status.takeovers]
    yield from labelled(rows, width)


def _value(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def _point(point: EntryPoint) -> str:
    told = f"{point.group}  {point.name} = {point.value}  of {point.distribution}"
    told += f" in {point.place}" if point.place else ""
    return f"{told}  (left out by VLLM_PLUGINS)" if point.filtered else told


def _stands_in(done: TakeOverState) -> str:
    if done.ours:
        return f"{done.feature} for {done.module} of {done.owner}; {done.file} was read and not run"
    return f"not for {done.module} of {done.owner}, whose own text runs: {done.why}"


# -- a feature -------------------------------------------------------------------------------


def _absent(target: TargetState, feature: FeatureState, *, vllm: bool) -> str:
    """What is said of a target that was not found: not an error where there is none to find."""
    if not vllm:
        return "no vLLM here"
    statuses = {delta.status for delta in feature.deltas if delta.target == target.name}
    return "not found" if statuses & {"failed", "applied"} else "not in this vLLM, and not needed"


def _feature(feature: FeatureState, width: int | None, *, vllm: bool) -> Iterator[Text]:
    state = "active" if feature.active else "installed" if feature.installed else "declared"
    colour = {"active": "green", "installed": "yellow"}.get(state, "cyan")
    yield Text.assemble((f"{feature.name}  {feature.declared}  digest {feature.digest}", "bold"), "  ", (state, colour))
    yield from _table(feature.deltas)
    rows = [("brought by", feature.distribution)] if feature.distribution else []
    rows += [("why", feature.why)]
    rows += [("needs", f"{other.feature}: {other.why}") for other in feature.needs]
    rows += [("excludes", f"{other.feature}: {other.why}") for other in feature.conflicts]
    rows += [("comes after", ", ".join(feature.after))] if feature.after else []
    rows += [("can go when", text) for text in _remove_when(feature)]
    rows += [(f"decision {made.engine}", made.reason) for made in feature.decisions]
    rows += [("running", f"digest {feature.running}")] if feature.running else []
    rows += [("ranks", ", ".join(f"{r.rank} (host={r.host} pid={r.pid})" for r in feature.ranks))] * bool(feature.ranks)
    rows += [("target", _target(target, _absent(target, feature, vllm=vllm))) for target in feature.targets]
    rows += [("bound", _bound(binding)) for binding in feature.bindings]
    rows += [("rebased", text) for text in feature.rebased]
    rows += [("stale", f"{name} still means what was replaced") for name in feature.stale]
    rows += [("launch path", f"{path.standing}: {path.name}; {path.note}") for path in feature.launches]
    yield from labelled(rows, width)


def _table(deltas: Sequence[DeltaState]) -> Iterator[Text]:
    rows = [("delta", "status", "variant", "where", "declared", "digest")]
    for delta in deltas:
        where = f"{short(delta.file)}:{delta.line}" if delta.file else ""
        rows.append((delta.name, delta.status or "unknown", delta.variant or "", where, delta.declared, delta.digest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for at, row in enumerate(rows):
        line = Text("  ")
        for column, cell in enumerate(row):
            line.append(cell.ljust(widths[column] + 2), "dim" if not at else COLOURS[cell] if column == 1 else "")
        yield line


def _remove_when(feature: FeatureState) -> list[str]:
    """For each reason the deltas that can go then, by what is their own in the name; of a single delta without it."""
    reasons: dict[str, list[str]] = {}
    for delta in feature.deltas:
        reasons.setdefault(delta.remove_when, []).append(delta.name.partition(".")[2])
    return [f"{', '.join(names)}: {why}" if len(feature.deltas) > 1 else why for why, names in reasons.items()]


def _target(target: TargetState, there: str) -> str:
    where = f"{short(target.file)}:{target.line}" if target.file else there
    told = f"{target.name}  {where}" + (f"  digest {target.digest}" if target.digest else "")
    if not target.imported:
        return f"{told}  not imported here"
    return f"{told}  runs {target.now}{_around(target.around)}"


def _bound(binding: BindingState) -> str:
    told = f"{binding.place} is {binding.after}, was {binding.before}"
    if binding.state == "overwritten":
        return f"{told}; OVERWRITTEN, now {binding.now}"
    return f"{told}{_around(binding.around)}"


def _around(origins: Sequence[Origin]) -> str:
    return "".join(f"; wrapped by {origin}" for origin in origins)


def labelled(rows: Sequence[tuple[str, str]], width: int | None) -> Iterator[Text]:
    """Lines of a label and what it says, in two columns."""
    column = max(len(label) for label, _ in rows) + 2
    for label, value in rows:
        for at, line in enumerate(value.split("\n")):
            head = f"  {label if not at else '':<{column}}"
            yield from map(Text, folded(f"{head}{line}", width, column + 2))
