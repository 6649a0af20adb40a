"""Requests and tokens per second of real engines: unpatched, balance off, balance on; and what they read of a device.

All three are started side by side and then take turns, one burst each, so that only one is at work. There are two
bursts. With one request less than the cap on each rank the gate never closes, and what differs is what the patch costs.
With more than the cap on one rank it does close, and what differs is what the gate is for: no cost, and no target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .ratios import middle, ratio
from .results import Row, row

RANKS = 2

MODES = ("unpatched", "off", "on")
BURSTS = {"open": (36, False), "closes": (24, True)}
TITLES = {"open": "gate never closes", "closes": "gate closes"}
ROUNDS = 8


def measure(lane: str, tell: Callable[[str], None], scale: float = 1.0) -> list[Row]:
    """Everything on real engines.

    Args:
        lane: Its name.
        tell: Is told what is measured now.
        scale: Of the number of rounds.
    """
    from balance_patcher.npu.engines import engines
    from balance_patcher.npu.figures import seen
    from balance_patcher.npu.plugin import COUNT

    rounds = max(2, round(ROUNDS * scale))
    sent: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    seconds = 0.0
    with engines() as start:
        tell("engine: starting three engines, two engine cores each")
        running = {mode: start(mode, "", "cpu") for mode in MODES}
        for engine in running.values():
            engine.start()
        for at in range(-1, rounds):  # the first round warms up
            tell(f"engine: round {at + 1} of {rounds}")
            for mode in (*MODES[at % 3 :], *MODES[: at % 3]):
                for load, (requests, full) in BURSTS.items():
                    done = running[mode].burst(requests, full=full)
                    seconds += done["seconds"] if mode == "on" else 0.0
                    if at >= 0:
                        sent.setdefault((load, mode), []).append(done)
        tell("engine: counting reads")
        for engine in running.values():
            engine.burst(BURSTS["closes"][0], full=True, phase=COUNT)
            engine.burst(2, full=True)  # what was counted is written when the next steps come
        found = {mode: seen(engine.written()) for mode, engine in running.items()}
    return [*rates(lane, sent, gathered(found["on"].gathers, seconds)), *reads(lane, found)]


def gathered(gathers: Sequence[int], seconds: float) -> str:
    """What a rank spends in its gathers, in words.

    Args:
        gathers: Nanoseconds of all gathers of all ranks.
        seconds: How long all bursts took.
    """
    if not gathers:
        return "no gather was timed"
    whole = sum(gathers) / 1e9
    share, mean, usual = whole / RANKS / seconds, whole / len(gathers), sorted(gathers)[len(gathers) // 2] / 1e9
    return (
        f"a rank is in its gather for {100 * share:.1f} % of the time, {1000 * mean:.2f} ms a step (half of them under "
        f"{1000 * usual:.2f}), in which it waits for the other rank too"
    )


def rates(lane: str, sent: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], gather: str = "") -> list[Row]:
    """What the bursts took, in rows.

    Args:
        lane: Its name.
        sent: By load and mode, an entry a round.
        gather: What is said of the gathers.
    """
    rows = []
    for load, title in TITLES.items():
        for mode in MODES:
            tokens = middle([one["tokens"] / one["seconds"] for one in sent[load, mode]])
            requests = middle([one["requests"] / one["seconds"] for one in sent[load, mode]])
            rows += [
                row("engine", lane, f"{title}, {mode}: tokens", "/s", tokens),
                row("engine", lane, f"{title}, {mode}: requests", "/s", requests),
            ]
        base = [one["seconds"] for one in sent[load, "unpatched"]]
        for mode in MODES[1:]:
            took = ratio([one["seconds"] for one in sent[load, mode]], base)
            why = "of the time" if load == "open" else "of the time: what the gate does, not what it costs"
            if (load, mode) == ("open", "on") and gather:
                why = f"{why}; {gather}"
            rows.append(row("engine", lane, f"{title}: {mode} / unpatched", "x", took, why=why))
    return rows


def reads(lane: str, found: Mapping[str, Any]) -> list[Row]:
    """What was read from the host, a step of one engine core; the CPU stands in for a device.

    Args:
        lane: Its name.
        found: What was seen in each mode, as :func:`balance_patcher.npu.figures.seen` adds it up.
    """
    from balance_patcher.npu.counter import KINDS
    from balance_patcher.npu.figures import OURS

    base = found["unpatched"].a_step(KINDS, OURS)
    rows = []
    for mode in MODES:
        whole, ours = found[mode].a_step(), found[mode].a_step(KINDS, OURS)
        why = f"{whole:.2f} a step in all; the CPU stands in for a device, of which there is none here"
        sound = all(facts["sound"] for facts in found[mode].first.values()) and found[mode].steps > 0
        limit = base if mode != "unpatched" else None
        what = f"host reads where balance works, {mode}"
        if sound:
            rows.append(Row("engine", lane, what, "n", ours, ours, ours, limit, why=why))
        else:
            rows.append(Row("engine", lane, what, "n", limit=base, why="the counter did not count"))
    return rows
