"""The other of two data-parallel ranks, in a process of its own.

A module apart, so that a spawned process imports it by a plain name under every import mode.
"""

import datetime

import harness
import torch.distributed as dist
import traces
from harness import Shape

TIMEOUT = datetime.timedelta(seconds=60)


def enabled(class_, shape=None, running=0):
    """An enabled scheduler that runs ``running`` requests."""
    shape = shape or Shape(seqs=4, ranks=2, tokens=256)
    scheduler = harness.new_scheduler(class_, shape, harness.enabled_config(shape))
    for number in range(running):
        scheduler.add_request(harness.new_request(f"r{number}", 10, 50))
    world = traces.World(scheduler, traces.Trace(0, shape, []), traces.ignore_counts)
    world.schedule(traces.Step())
    world.answer(0)
    assert len(scheduler.running) == running
    return scheduler


def gathered(scheduler, rank, port):
    """What the queue of ``scheduler`` holds after one gather with the other rank."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=TIMEOUT)
    try:
        scheduler.balance_gather(dist.group.WORLD)
        return [tensor.tolist() for tensor in scheduler.balance_queue]
    finally:
        dist.destroy_process_group()


def other_rank(running, port, pipe):
    """Rank 1: say when it is ready to meet rank 0, then what its queue holds."""
    shape = Shape(seqs=4, ranks=2, rank=1, tokens=256)
    scheduler = enabled(harness.balance_scheduler(), shape, running)
    pipe.send("ready")
    pipe.send(gathered(scheduler, 1, port))
