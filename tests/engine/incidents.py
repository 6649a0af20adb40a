"""What befalls engine cores while requests run: one is slow, stopped for a while or killed, or all are paused.

Each takes the drive (see waves.py) and returns what came of it, as seen by who sent the requests.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from processes import session_of
from records import busy, folder, gathered, pids

#: Upstream synchronises the ranks in steps that are a multiple of this, on the one lane in all, on the other in half.
SYNC = 16
#: Fewer requests than both ranks may run together, more of them, and two that come while nothing runs.
LOAD, BURST, LATE = 6, 12, 2

#: Every way to hold the engines for a while, and to let them go on.
PAUSES = (
    ("abort", {"clear_cache": True}), ("wait", {"clear_cache": True}), ("keep", {"clear_cache": True}),
    ("abort", {"clear_cache": False}), ("wait", {"clear_cache": False}), ("keep", {"clear_cache": False}),
    ("abort", {"level": 0}), ("wait", {"level": 0}), ("keep", {"level": 0}),
    ("abort", {"level": 1}), ("wait", {"level": 1}), ("keep", {"level": 1}), ("keep", {"level": 2}),
)  # fmt: skip


async def begun(run, count, length):
    """Requests to both ranks, which have begun to be answered."""
    before = run.tokens
    jobs = [asyncio.ensure_future(run.one(8, length, rank=at % 2)) for at in range(count)]
    while run.tokens < before + 30:  # noqa: ASYNC110 - each token is counted where it comes in
        await asyncio.sleep(0.005)
    return jobs


async def loaded(run, length=60):
    """Requests that run on both ranks: none is at its cap, or the other might be frozen until they are answered."""
    jobs = await begun(run, LOAD, length)
    while not all(busy()):  # noqa: ASYNC110 - another process writes it down
        await asyncio.sleep(0.005)
    return jobs


@contextlib.contextmanager
def slowed(rank, seconds):
    """Steps of a rank that take long, by a file that the probe looks for."""
    file, written = folder() / f"slow-{rank}", folder() / "written"
    written.write_text(str(seconds))
    written.rename(file)  # so that it is never read half written
    yield
    file.unlink()


async def asleep(rank):
    """Wait until a slow rank has done what a step does, and rests: in which step.

    The model has run in it, for both ranks, and upstream does not synchronise them: soon the other waits in the gather.
    """
    while True:
        with contextlib.suppress(OSError, ValueError):  # not there, or not yet written
            step = int((folder() / f"asleep-{rank}").read_text())
            if step % SYNC:
                return step
        await asyncio.sleep(0.01)


async def steps(count):
    """Wait for some more steps of both ranks."""
    wanted = min(gathered()) + count
    while min(gathered()) < wanted:  # noqa: ASYNC110 - another process writes them down
        await asyncio.sleep(0.02)


async def slow(run, rank, count):
    """Some steps of one rank take a second more."""
    jobs = await loaded(run)
    with slowed(rank, 1):
        await steps(1)
        began = time.monotonic()
        await run.moving(steps(count))
        took = time.monotonic() - began
    return {"seconds": round(took, 1), "answers": Counter(await run.moving(asyncio.gather(*jobs)))}


async def stop(run, rank, seconds):
    """An engine core stands still in the middle of requests, and goes on some seconds later.

    It does when the other rank waits in the gather, and nowhere else: it is slow then.
    """
    jobs = await loaded(run)
    with slowed(rank, 2):
        step = await run.moving(asleep(rank))
        await asyncio.sleep(0.5)
        still, said = await stopped(pids()[rank], seconds)
    return {"step": step, "still": still, "asked": said, "answers": Counter(await run.moving(asyncio.gather(*jobs)))}


async def stop_worker(run, rank, seconds):
    """What runs the model for an engine core stands still, as a device that hangs: neither rank ends its step."""
    jobs = await loaded(run)
    (worker,) = [pid for pid in children(pids()[rank]) if b"resource_tracker" not in command(pid)]
    still, said = await stopped(worker, seconds)
    return {"still": still, "asked": said, "answers": Counter(await run.moving(asyncio.gather(*jobs)))}


async def stopped(pid, seconds):
    """SIGSTOP, and SIGCONT some seconds later: whether nothing was gathered between them, and how all said they stand.

    What the engine cores say about it, they have said a moment after it is over.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(0.1)
        gathers = gathered()
        await asyncio.sleep(seconds)
        said = await asked(os.getpid())
        return gathers == gathered(), said
    finally:
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1.5)


async def asked(pid):
    """What `status --pid` tells of a process, or of all below it: the JSON, and the exit status in it."""
    command = [sys.executable, "-m", "balance_patcher", "status", "--pid", str(pid), "--format", "json"]
    status = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await status.communicate()
    return {**json.loads(out), "code": status.returncode}


async def kill(run, rank):
    """End one engine core: how long until who sent the requests sees an error, and which.

    And how long until the other engine core is gone, with nobody asking it to end.
    """
    jobs = await loaded(run, length=400)
    other = pids()[1 - rank]
    os.kill(pids()[rank], signal.SIGKILL)
    killed = time.monotonic()
    done, waiting = await asyncio.wait(jobs, timeout=run.wanted["limit"])
    if waiting:
        raise TimeoutError
    errors = sorted({type(job.exception()).__name__ if job.exception() else "none" for job in done})
    seen = time.monotonic() - killed
    while session_of(other) is not None:
        await asyncio.sleep(0.05)
        if time.monotonic() - killed > run.wanted["limit"]:
            raise TimeoutError
    return {"errors": errors, "seen": round(seen, 2), "ended": round(time.monotonic() - killed, 2)}


async def pauses(run, count, hold=0.0):
    """Pause and resume, or sleep and wake up, in the middle of bursts; the last time for ``hold`` seconds.

    Each burst has answers before the pause, so that all ranks are in its wave, and the pause has come to its end
    before it is over: upstream's ranks wait for each other for good when a start of a wave is under way during the
    one or the other (``make model`` tells how; it is theirs also with balance off).
    """
    rounds = []
    for number in range(count):
        mode, options = PAUSES[number % len(PAUSES)]
        run.where = {"incident": "pauses", "round": number, "mode": mode, **options}
        rounds.append({"mode": mode, **options, **await one_pause(run, mode, options, hold * (number == count - 1))})
    return rounds


async def one_pause(run, mode, options, hold):
    engine = run.engine
    jobs = await run.moving(begun(run, BURST, 30))
    await run.moving(
        engine.sleep(mode=mode, **options) if "level" in options else engine.pause_generation(mode=mode, **options)
    )
    asked, gathers, tokens = await engine.is_paused(), gathered(), run.tokens
    late = [asyncio.ensure_future(run.one(5, 5, rank=at)) for at in range(LATE)]
    await asyncio.sleep(max(0.1, hold))
    still = (gathers, tokens) == (gathered(), run.tokens)
    await run.moving(engine.wake_up() if "level" in options else engine.resume_generation())
    answers, later = [Counter(await run.moving(asyncio.gather(*some))) for some in (jobs, late)]
    return {"paused": asked, "still": still, "gathers": gathers, "answers": answers, "late": later}


# -- processes --


def children(pid):
    return [int(child) for child in (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()]


def command(pid):
    return (Path("/proc") / str(pid) / "cmdline").read_bytes()
