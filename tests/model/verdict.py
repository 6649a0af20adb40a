"""What has to be true of the shipped placement."""

from __future__ import annotations

from tests.model.cluster import Cluster
from tests.model.matrix import upstream
from tests.model.search import Result, explore


def complaints(result: Result) -> list[str]:
    """What is wrong with a search of the shipped placement; nothing is if all is well.

    Up to 0.32 upstream has deadlocks of its own, around aborts, pauses and faults. There each of ours must
    be one of its own too: the same ranks idle, in the same waves, with the same belief of the coordinator.
    """
    said = [*result.errors, *result.miscounts]
    said += [f"ranks have gathered unevenly in {result.uneven} states at rest"] * bool(result.uneven)
    said += [f"{result.stale} states at rest are frozen by old counts"] * bool(result.stale)
    said += [f"{result.livelocks} states lead neither to rest nor to a deadlock"] * bool(result.livelocks)
    said += [] if result.rests else ["nothing ever comes to rest"]
    if result.doomed:
        new = shapes(result) - shapes(explore(upstream(result.setup)))
        said += [f"{len(new)} deadlocks are not upstream's own"] * bool(new)
        said += [f"{result.doomed} states are doomed, with no deadlock"] * (not result.stuck)
    return said


def shapes(result: Result) -> set[tuple]:
    """The deadlocks, without where a rank that waits for an idle one waits: with a gather that is a step sooner."""
    found = set()
    for state in result.stuck:
        cluster = Cluster(result.setup, state)
        first, *rest = [(rank.at == "input", rank.wave, rank.running) for rank in cluster.ranks]
        found.add((first, *sorted(rest), cluster.wave, cluster.running, cluster.phase))
    return found
