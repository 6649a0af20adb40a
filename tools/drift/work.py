"""Do many looks: those that are known are taken from the index, the others are divided among processes.

Neighbouring columns share most of their texts, so a process gets a run of them and parses each text once.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from balance_patcher.errors import Failure, PatchError
from balance_patcher.feature import Feature
from balance_patcher.loading import feature_of_file
from balance_patcher.registry import find_feature

from .columns import UNTOLD, NotingLane, Place
from .index import Index, about_calls, about_feature
from .looks import CallsLook, Look, calls_at, calls_look_of, look_at, look_of, plain

_SELDOM = 50_000  # objects that are made between two searches for garbage
_ALONE = 12  # so few looks are done before another process has started


@dataclass(frozen=True)
class Subject:
    """What is looked at: a feature, with the file that declares it where it is no declared one; or a target's calls."""

    kind: str
    name: str
    file: Path | None = None
    about: str = ""

    def feature(self) -> Feature:
        return feature_of_file(self.file) if self.file is not None else find_feature(self.name)


def subject_of_feature(feature: Feature, file: Path | None, own_file: Path | None) -> Subject:
    """A feature to look at; ``file`` is given only where the registry does not know it."""
    return Subject("feature", feature.name, file, about_feature(feature, own_file))


def subject_of_calls(target: str) -> Subject:
    return Subject("calls", target, None, about_calls(target))


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Search for garbage less often: a parsed module is a hundred thousand objects, and none of them is garbage.

    That was a third of the time of a look. What is dropped is freed at once, as ever.
    """
    before = gc.get_threshold()
    gc.set_threshold(_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


Answer = Look | CallsLook
Job = tuple[int, Subject, Place]


@dataclass
class Done:
    """What came of it: the answers by number of the job, how many were known, and how many were looked for."""

    answers: dict[int, Answer] = field(default_factory=dict)
    remembered: int = 0
    judged: int = 0


def do(
    jobs: Sequence[Job], index: Index, *, processes: int = 0, tell: Callable[[int, int], None] | None = None
) -> Done:
    """All looks. Equal texts are looked at once.

    Args:
        jobs: Each with a number of its own; neighbours in it should be neighbours in the history.
        index: What is known, and where it is kept.
        processes: How many; 0 takes one for each core, and this one alone where there is little to do.
        tell: Told how many of how many are done.
    """
    done = Done()
    left = []
    for job in jobs:
        known = _known(job, index)
        if known is None:
            left.append(job)
        else:
            done.answers[job[0]] = known
            done.remembered += 1
    count = processes or min(os.cpu_count() or 1, 8)
    for number, answer in _answers(left, count if processes or len(left) > _ALONE else 1, index):
        done.answers[number] = answer
        done.judged += 1
        if tell is not None:
            tell(len(done.answers), len(jobs))
    return done


def _known(job: Job, index: Index) -> Answer | None:
    _, subject, place = job
    try:
        found = index.find(subject.about, place.blob)
    except PatchError:
        return None  # the look itself will say what is wrong
    return None if found is None else _answer(subject, found)


def _answer(subject: Subject, data: Mapping[str, Any]) -> Answer:
    return look_of(data) if subject.kind == "feature" else calls_look_of(data)


def _answers(jobs: list[Job], processes: int, index: Index) -> Iterator[tuple[int, Answer]]:
    subjects = {number: subject for number, subject, _ in jobs}
    runs = [list(run) for run in _runs(jobs, processes)]
    if processes == 1 or len(runs) <= 1:
        for run in runs:
            for job in run:
                known = _known(job, index)
                answer = known if known is not None else _look(job)
                if known is None:
                    _keep(index, job[1], answer)
                yield job[0], answer
        return
    # Not forked: git's processes and the threads of a progress bar would be forked with it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, gc.set_threshold, (_SELDOM,)) as pool:
        waiting = [pool.submit(_run, run) for run in runs]
        try:
            for future in as_completed(waiting):
                for number, data in future.result():
                    answer = _answer(subjects[number], data)
                    _keep(index, subjects[number], answer)
                    yield number, answer
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _runs(jobs: list[Job], processes: int) -> Iterator[list[Job]]:
    """Neighbours together, and several runs for each process, so that none is idle at the end."""
    size = max(4, len(jobs) // (processes * 6) + 1)
    for at in range(0, len(jobs), size):
        yield jobs[at : at + size]


def _keep(index: Index, subject: Subject, answer: Answer) -> None:
    # What could not be read may be readable tomorrow; a text that does not parse is so for whoever reads it.
    codes = {failure.code for failure in answer.failures} if isinstance(answer, Look) else set()
    dark = isinstance(answer, Look) and answer.status == "unreadable" and not codes <= {"BP508", "BP505"}
    if answer.reads and UNTOLD not in answer.reads.values() and not dark:
        index.keep(subject.about, answer.reads, plain(answer))


# -- in a process of its own ---------------------------------------------------------------------


def _run(jobs: list[Job]) -> list[tuple[int, dict[str, Any]]]:
    memory = Index(None)
    found = []
    for job in jobs:
        known = _known(job, memory)
        answer = known if known is not None else _look(job)
        if known is None:
            _keep(memory, job[1], answer)
        found.append((job[0], plain(answer)))
    return found


def _look(job: Job) -> Answer:
    _, subject, place = job
    lane = NotingLane(place)
    if subject.kind != "feature":
        return calls_at(lane, subject.name)
    try:
        feature = _feature(subject)
        return look_at(lane, feature)
    except Exception as error:  # noqa: BLE001 - one surprise must not take the report of all other refs with it
        why = Failure("BP599", f"{type(error).__name__}: {error}", "report this with the ref and the repository")
        return Look(subject.name, "unreadable", dict(lane.reads), (), (), (why,))


_features: dict[Subject, Feature] = {}


def _feature(subject: Subject) -> Feature:
    if subject not in _features:
        _features[subject] = subject.feature()
    return _features[subject]
