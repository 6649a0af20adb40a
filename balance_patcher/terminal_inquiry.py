"""What a person reads of the processes that were asked: one sentence, a table by rank, then each engine by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .inquiry import Inquiry
from .terminal import folded
from .terminal_status import labelled

_HEAD = ("rank", "pid", "step", "wave", "running", "waiting", "counts / cap", "stands")
#: Seconds in a gather from which on that is a wait: every step is in it for a moment.
LONG = 1.0
#: Seconds in a step from which on that is told: as far as a watchdog knows it, which looks every few seconds.
LATE = 5.0
#: Other ranks that a sentence names.
NAMED = 3
Engine = Mapping[str, Any]


def print_inquiry(found: Inquiry, console: Console) -> None:
    width = console.width if console.is_terminal else None
    several = len(found.answers) + len(found.silent) > 1
    alone = any(answer["engines"] for answer in found.answers)
    lines: list[Text] = [*map(Text, folded(judged(found), width)), Text()] if several or alone else []
    lines += [*_table(found), Text()] if several else []
    for answer in found.answers:
        lines += [*_process(answer, width), Text()]
    for failure in found.failures:
        lines += [*(Text(part) for line in str(failure).split("\n") for part in folded(line, width, 12)), Text()]
    for line in lines[:-1]:
        line.rstrip()
        console.print(line, soft_wrap=True)


# -- all together ----------------------------------------------------------------------------


def judged(found: Inquiry) -> str:
    """In one sentence, who waits for whom."""
    engines = [(answer, engine) for answer in found.answers for engine in answer["engines"]]
    waits = [_called(engine, answer) for answer, engine in engines if _in_gather(engine, LONG)]
    missing = [_called(engine, answer) for answer, engine in engines if _due(engine)]
    silent = [f"{_rank_of(pid, found)} (pid {pid}, {word})" for pid, word in found.silent.items()]
    if waits and (missing or silent):
        return f"{_and(waits)} {_verb(waits, 'waits', 'wait')} in the gather for {_and([*missing, *silent])}."
    late = [_called(engine, answer) for answer, engine in engines if _late(engine)]
    have = _verb(late, "has not come to its gather", "have not come to their gather")
    slow = f"{_and(late)} {have} for more than {LATE:g} s"
    frozen = any(tells.get("frozen") for _, engine in engines for tells in _tells(engine))
    if len(engines) == 1 and not silent and not late:
        return _of_one(*engines[0], waits=bool(waits), frozen=frozen)
    if silent:
        told = f"{_and(silent)} {_verb(silent, 'does', 'do')} not answer"
        return f"{told}, and {slow}." if late else f"{told}."
    if waits:
        return f"All ranks that were asked are in their gather: {_and(waits)}."
    if late:
        return f"{slow}: a long prefill or a compilation, or a worker or a device hangs."
    if frozen:
        return "All ranks that were asked answer and go on; one is at its cap, so none admits."
    return f"All ranks that were asked answer and go on: {_and([_called(e, a) for a, e in engines])}."


def _of_one(answer: Mapping[str, Any], engine: Engine, *, waits: bool, frozen: bool) -> str:
    """Of an engine core that was asked by itself, where others may be the ones that stand."""
    name = _called(engine, answer)
    if not waits:
        return f"{name} answers and goes on{'; a rank is at its cap, so none admits' if frozen else ''}."
    others = {rank: said for rank, said in _peers(answer) if rank != str(engine.get("rank"))}
    places = [f"rank {rank} is process {said.get('pid')} on {said.get('host')}" for rank, said in others.items()]
    more = [f"{len(places) - NAMED} more"] if len(places) > NAMED else []
    asked = f"ask the others too: {_and([*places[:NAMED], *more])}" if places else "ask what has started the others"
    return f"{name} waits in the gather; {asked}."


def _called(engine: Engine, answer: Mapping[str, Any]) -> str:
    return f"rank {engine['rank']}" if engine.get("rank") is not None else f"the engine of process {answer['asked']}"


def _verb(names: Sequence[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "nobody"


def _rank_of(pid: int, found: Inquiry) -> str:
    """The rank of a process that does not answer, as those that do have agreed on it."""
    for answer in found.answers:
        for rank, said in _peers(answer):
            if said.get("pid") == pid and said.get("host") == answer["host"]:
                return f"rank {rank}"
    return "a rank"


def _peers(answer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for engine in answer["engines"]:
        for one in engine["features"].values():
            yield from one["ranks"].items()


def _table(found: Inquiry) -> Iterator[Text]:
    rows: list[tuple[str, ...]] = [_HEAD]
    rows += [
        (
            _known(engine["rank"]), _known(answer["asked"]), _known(engine["step"]), _known(engine["wave"]),
            _known(engine["running"]), _known(engine["waiting"]), _counts(engine), _stands(engine),
        )
        for answer in found.answers for engine in answer["engines"]
    ]  # fmt: skip
    rows += [
        (_rank_of(pid, found).rpartition(" ")[2], str(pid), *["?"] * 5, word) for pid, word in found.silent.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for at, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield Text(f"  {line}", "" if at else "dim")


# -- one process -----------------------------------------------------------------------------


def _process(answer: Mapping[str, Any], width: int | None) -> Iterator[Text]:
    inner = f" (in its container {answer['pid']})" if answer["pid"] != answer["asked"] else ""
    told = f"process {answer['asked']}{inner}  host {answer['host']}  balance_patcher {answer['balance_patcher']}"
    yield Text(f"{told}  vLLM {answer['vllm']}  Python {answer['python']}", "bold")
    if not answer["engines"]:
        yield Text("  its engine is gone")
    for engine in answer["engines"]:
        yield from labelled(list(_engine(engine)), width)


def _engine(engine: Engine) -> Iterator[tuple[str, str]]:
    rank = f"rank {engine['rank']} of {_known(engine['ranks'])}" if engine["rank"] is not None else "one rank"
    runs = {True: "engines running", False: "at rest"}.get(engine["engines_running"], "")
    at = f"step {engine['step']} of wave {engine['wave']}" if engine["step"] is not None else ""
    yield "engine", ", ".join(filter(None, [rank, at, runs]))
    yield "requests", f"running {_known(engine['running'])}, waiting {_known(engine['waiting'])}"
    for name, one in engine["features"].items():
        yield name, one["line"]
        yield from ((key, text) for key, text in _told(one))
    for error in engine["errors"]:
        yield "not read", error


def _told(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tells = dict(one["tells"] or {})
    if "counts" in tells and "cap" in tells:
        counts, cap = tells.pop("counts"), tells.pop("cap")
        since = tells.pop("frozen_for", None)
        leaders = [f"rank {rank}" for rank, count in enumerate(counts) if count >= cap]
        closed = (
            f": {_and(leaders)} at the cap of {cap}, so no rank admits" if leaders else f": none at the cap of {cap}"
        )
        held = f"; requests wait here because of that for {since:.1f} s" if since is not None else ""
        yield "counts", f"{counts}{closed}{held}"
        tells.pop("frozen", None)
    yield from ((key.replace("_", " "), _plain(value)) for key, value in tells.items())
    dog = one["watchdog"]
    if dog:
        waits, last = dog["in_gather_for"], dog["last_gather_ago"]
        now = f"waits in it for {waits:.1f} s; " if waits is not None else ""
        now += f"not come to it for {dog['in_step_for']:.1f} s; " if _late_by(dog) else ""
        before = f"{dog['gathers']} done, the last one {last:.1f} s ago" if last is not None else "none done"
        yield "gather", now + before
        if dog["stall"]:
            yield "stall", dog["stall"]
    others = ", ".join(f"rank {rank} (host={said['host']} pid={said['pid']})" for rank, said in one["ranks"].items())
    if others:
        yield "ranks", others


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else _known(value)


def _known(value: object) -> str:
    return "?" if value is None else str(value)


# -- what an engine's answer means -----------------------------------------------------------


def _tells(engine: Engine) -> list[Mapping[str, Any]]:
    return [one["tells"] or {} for one in engine["features"].values()]


def _dogs(engine: Engine) -> list[Mapping[str, Any]]:
    return [one["watchdog"] for one in engine["features"].values() if one["watchdog"]]


def _in_gather(engine: Engine, seconds: float = 0.0) -> bool:
    return any(dog["in_gather_for"] is not None and dog["in_gather_for"] >= seconds for dog in _dogs(engine))


def _due(engine: Engine) -> bool:
    """Whether a gather of this rank is to come: it is at work, and not in the gather."""
    return bool(_dogs(engine)) and bool(engine["engines_running"]) and not _in_gather(engine)


def _late(engine: Engine) -> bool:
    return any(map(_late_by, _dogs(engine)))


def _late_by(dog: Mapping[str, Any]) -> bool:
    return (dog["in_step_for"] or 0.0) >= LATE


def _stands(engine: Engine) -> str:
    """Where a rank is; one that has been in the same step for long does not go on."""
    if _in_gather(engine):
        return "in the gather"
    return "in a step" if _late(engine) else "steps" if _due(engine) else "rests"


def _counts(engine: Engine) -> str:
    told = next((tells for tells in _tells(engine) if "counts" in tells), None)
    return f"{told['counts']} / {_known(told.get('cap'))}" if told else "?"
