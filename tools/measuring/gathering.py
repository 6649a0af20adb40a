"""The gather of a step against one bare ``all_gather`` of the same size, between real processes over gloo.

Each rank has a real enabled scheduler with its watchdog, and calls the two in turns. Both wait for the slowest rank,
and the order changes every round, so that the wait is neither's.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .ratios import difference, middle, ratio
from .results import Row, row

RANKS = (2, 4)
LIMIT = 1.15
ROUNDS, WARM_UP = 1500, 100
TIMEOUT = datetime.timedelta(seconds=60)


class Engine:
    """As much of a data-parallel engine core as the gather and its watchdog look at."""

    def __init__(self, rank: int, group: Any, scheduler: Any) -> None:
        self.dp_rank, self.dp_group, self.dp_store, self.scheduler = rank, group, None, scheduler
        self.step_counter = self.current_wave = 0
        self.engines_running = True


class Peers:
    """As much of the ranks' agreement as the watchdog looks at."""

    names: dict[int, str] = {}  # noqa: RUF012 - there are none


def measure(lane: str, tell: Callable[[str], None], scale: float = 1.0) -> list[Row]:
    """The gather between 2 and 4 processes, as rank 0 sees it.

    Args:
        lane: Its name.
        tell: Is told what is measured now.
        scale: Of the number of rounds.
    """
    import harness

    harness.balance_scheduler()  # built once, before the ranks are forked
    rows = []
    for ranks in RANKS if scale >= 1 else RANKS[:1]:
        rounds = max(50, int(ROUNDS * scale))
        tell(f"gather: {ranks} processes, {rounds} rounds")
        ours, bare, alone = _ranks(ranks, rounds)
        more = difference(ours, bare)
        why = (
            f"{more.value / 1e3:.1f} µs more than the collective; what it does around it takes "
            f"{middle(alone).value / 1e3:.1f} µs without any other rank"
        )
        rows += [
            row("gather", lane, f"{ranks} processes: gather / bare all_gather", "x", ratio(ours, bare), limit=LIMIT,
                why=why),
            row("gather", lane, f"{ranks} processes: bare all_gather", "µs", _micro(middle(bare))),
            row("gather", lane, f"{ranks} processes: gather", "µs", _micro(middle(ours))),
        ]  # fmt: skip
    return rows


def _micro(interval: Any) -> Any:
    return replace(interval, value=interval.value / 1e3, low=interval.low / 1e3, high=interval.high / 1e3)


def _ranks(ranks: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Nanoseconds of our gathers, of the bare ones beside them, and of what ours does without a collective.

    Raises:
        RuntimeError: If a rank fails; what it said is on standard error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="balance-bench-") as folder:
        pids = []
        try:
            for rank in range(ranks):
                pid = os.fork()
                if pid == 0:
                    _live(rank, ranks, rounds, Path(folder))
                pids.append(pid)
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in list(pids)]
            pids = []
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        if any(statuses):
            raise RuntimeError(f"ranks ended with {statuses}: see the log")
        ours, bare, alone = json.loads((Path(folder) / "rank-0.json").read_text(encoding="utf-8"))
    return ours, bare, alone


def _live(rank: int, ranks: int, rounds: int, folder: Path) -> None:
    """The life of a forked rank: it never returns."""
    try:
        samples = _rank(rank, ranks, rounds, folder)
        (folder / f"rank-{rank}.json").write_text(json.dumps(samples), encoding="utf-8")
        sys.stderr.flush()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - whatever it is, it must not go on as a second parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _rank(rank: int, ranks: int, rounds: int, folder: Path) -> list[list[int]]:
    import harness
    import torch
    import torch.distributed as dist

    from balance_patcher.registry import find_feature

    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    group = dist.group.WORLD
    shape = harness.Shape(ranks=ranks, rank=rank, log_stats=False)
    scheduler = harness.new_scheduler(harness.balance_scheduler(), shape, harness.enabled_config(shape))
    engine = Engine(rank, group, scheduler)
    enabling = find_feature("balance").enabling
    assert enabling is not None and enabling.started is not None  # noqa: S101, PT018 - balance has both
    enabling.started(engine, Peers())
    outputs = [torch.zeros(1, dtype=torch.int, device="cpu") for _ in range(ranks)]
    payload = torch.zeros(1, dtype=torch.int, device="cpu")

    def gather() -> None:
        scheduler.balance_gather(group)

    def bare() -> None:
        dist.all_gather(outputs, payload, group=group)

    ours, theirs = _timed_in_turns(gather, bare, rounds)
    genuine, dist.all_gather = dist.all_gather, lambda *_, **__: None
    alone, _ = _timed_in_turns(gather, lambda: None, min(rounds, 300))
    dist.all_gather = genuine
    scheduler._balance_watch.stop()  # noqa: SLF001 - our own
    dist.barrier()
    dist.destroy_process_group()
    return [ours, theirs, alone]


def _timed_in_turns(one: Callable[[], None], other: Callable[[], None], rounds: int) -> tuple[list[int], list[int]]:
    times: dict[Any, list[int]] = {one: [], other: []}
    for at in range(WARM_UP + rounds):
        for call in (one, other) if at % 2 else (other, one):
            begin = time.perf_counter_ns()
            call()
            if at >= WARM_UP:
                times[call].append(time.perf_counter_ns() - begin)
            else:
                times[call].clear()
    return times[one], times[other]
