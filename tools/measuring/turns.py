"""Processes that take turns: each variant has one of its own, and all of them are asked once a round.

In one process they would not be alone with what they share. Upstream's code objects remember the class of the last
``self`` in their inline caches, one class each, so a subclass that runs in turns with upstream's own class looked 10 %
dearer than it is where it runs by itself. So each is forked from one process that has imported vLLM, and they all run
on one core: only one of them works at a time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

#: Gives a sample, in nanoseconds. What is done beside it, before or after, is not in it.
Sample = Callable[[], int]
#: Makes a variant ready in its own process.
Make = Callable[[], Sample]

WARM_UP = 15


def in_turns(variants: Mapping[str, Make], rounds: int, lives: int = 1) -> dict[str, list[float]]:
    """Samples of each variant, in nanoseconds; the n-th of all were taken in one round, each time in another order.

    Args:
        variants: By name.
        rounds: How many are kept; some more come before them.
        lives: How often all processes are started anew for so many rounds. Where things happen to lie in the memory
            of a process makes it faster or slower by half a per cent for its whole life; so each life puts them
            elsewhere.

    Raises:
        RuntimeError: If a variant fails; what it said is on standard error.
    """
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    warm_up = min(WARM_UP, rounds)
    for life in range(lives):
        with _started(variants, life) as pipes:
            for at in range(warm_up + rounds):
                first = at % len(names)
                for name in [*names[first:], *names[:first]]:
                    taken = _asked(name, pipes[name])
                    if at >= warm_up:
                        samples[name].append(float(taken))
    return samples


def _asked(name: str, pipe: Connection) -> int:
    try:
        pipe.send_bytes(b"go")
        return int(pipe.recv_bytes())
    except (EOFError, OSError) as error:
        raise RuntimeError(f"the process of {name!r} failed: see the log") from error


@contextlib.contextmanager
def _started(variants: Mapping[str, Make], life: int) -> Iterator[dict[str, Connection]]:
    pipes: dict[str, Connection] = {}
    pids: list[int] = []
    cores = sorted(os.sched_getaffinity(0))
    core = [cores[os.getpid() % len(cores)]]  # another bench beside this one need not take the same
    # What is there at the fork stays where it is: a collection would touch, and so copy, all of it.
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for number, (name, make) in enumerate(variants.items()):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                _serve(make, theirs, core, [*pipes.values(), ours], life * len(variants) + number)
            theirs.close()
            pids.append(pid)
            pipes[name] = ours
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.close()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        gc.unfreeze()


def _serve(make: Make, pipe: Connection, core: Sequence[int], others: Sequence[Connection], seed: int) -> None:
    """The life of a forked process: it never returns."""
    try:
        pick = random.Random(seed)  # noqa: S311 - no secret
        padding = [bytes(pick.randrange(16, 500)) for _ in range(pick.randrange(20_000))]
        for other in others:
            other.close()
        os.sched_setaffinity(0, core)
        sample = make()
        gc.disable()
        count = 0
        while pipe.recv_bytes() and padding is not None:
            pipe.send_bytes(b"%d" % sample())
            count += 1
            if count % 20 == 0:
                gc.collect()
    except EOFError:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - whatever it is, it must not go on as a second parent
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
