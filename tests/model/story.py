"""A trace told in sentences: who does what, one move a line, and how it ends."""

from __future__ import annotations

from tests.model.cluster import Cluster
from tests.model.search import Result, after

WAITS = {
    "input": "waits for input: it has no work",
    "forward": "waits in a forward pass",
    "failed": "waits for recovery",
    "gather": "waits in the gather",
    "sync": "waits in the sync",
    "resume": "waits in the collective of resume",
}


def title(result: Result) -> str:
    setup = result.setup
    return (
        f"The gather {setup.placement}: {setup.ranks} ranks, {setup.scheduling} scheduling, "
        f"generation {setup.generation!r}"
    )


def story(result: Result) -> list[str]:
    """The sentences of the trace of a result, the last ones being who waits for whom."""
    lines = []
    cluster = Cluster(result.setup, result.trace[0])
    before = _waits(cluster)
    for old, new in zip(result.trace, result.trace[1:], strict=False):
        cluster = next(cluster for _, cluster in after(result.setup, old) if cluster.freeze() == new)
        now = _waits(cluster)
        said = [*cluster.notes, *(item for item in now.items() if before[item[0]] != item[1])]
        before = now
        if said:
            lines.append("; ".join(_sentences([(who, text) for who, text in said if text])))
    numbered = [f"{number:3}. {line}." for number, line in enumerate(filter(None, lines), start=1)]
    return [*numbered, f"     Nothing can move: {_end(cluster)}."]


def _waits(cluster):
    """What each rank waits in."""
    return {f"rank {rank.number}": WAITS.get(rank.kind or rank.at, "") for rank in cluster.ranks}


def _sentences(said):
    """One clause for each who acts, in order."""
    clauses = []
    for who, text in said:
        if clauses and clauses[-1][0] == who:
            clauses[-1][1].append(text)
        else:
            clauses.append((who, [text]))
    return [f"{who} {', '.join(texts)}" for who, texts in clauses]


def _end(cluster):
    return "; ".join(f"{who} {text}" for who, text in _waits(cluster).items())
