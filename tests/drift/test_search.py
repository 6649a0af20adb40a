"""The first bad commit, as a table: what each commit has, which one is found, and whether that is proven."""

from __future__ import annotations

import pytest

from tools.drift.matrix import Commit
from tools.drift.search import Line, first_bad


def commits(count: int) -> tuple[Commit, ...]:
    return tuple(
        Commit(f"{at:040x}", f"Commit {at}", "A", "2026-01-01", (f"{at - 1:040x}",)) for at in range(1, count + 1)
    )


@pytest.mark.parametrize(
    ("states", "found", "proven"),
    [
        ("+-", 1, True),
        ("++-", 2, True),
        ("++++++---", 6, True),
        ("+--------", 1, True),
        ("+++++++++-", 9, True),
        ("+?-", 1, False),  # what cannot be read may have been good
        ("++?--", 2, False),
    ],
)  # fmt: skip
def test_the_first_bad_commit(states: str, found: int, *, proven: bool) -> None:
    line = Line("HEAD", "0", commits(len(states) - 1))
    told = first_bad(line, "+", lambda commit: {"?": None}.get(states[int(commit, 16)], states[int(commit, 16)]))
    assert told is not None
    assert told.commit is not None
    assert (int(told.commit.hash, 16), told.proven) == (found, proven)
    assert told.tries <= len(states).bit_length() + 1


def test_a_merge_has_several_parents() -> None:
    merge = Commit("3", "Merge", "A", "2026-01-01", ("1", "2"))
    state = {"1": "+", "2": "-", "3": "-"}.get
    first, every = (first_bad(Line("HEAD", "0", (merge,), flag), "+", state) for flag in (False, True))
    assert first is not None
    assert every is not None
    assert (first.proven, every.proven, every.parent_status) == (True, False, "-")


def test_without_commits_nothing_is_found() -> None:
    assert first_bad(Line("HEAD", "0", ()), "+", lambda _: "-") is None
