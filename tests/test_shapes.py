"""Cases 19 and 21 (vllm #39366, #38761, #55229; #56610): the synchronisation has had four shapes.

On each, upstream's part is whole, and the gather is on the group that the engine has in that moment.

Upstream's own method and ours around it are compiled from the sources of every known release, and run with
stand-ins for what they call. No vLLM is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import pytest

from balance_patcher.bound import begins_at
from balance_patcher.build import compile_plan
from balance_patcher.plan import make_plan
from balance_patcher.proof import compile_text, find_code
from balance_patcher.registry import find_feature
from balance_patcher.source import DirSource, Lane
from balance_patcher.through import UPSTREAM
from tests.conftest import RELEASES

HOOK = "vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs"
GROUP = "the group of the step"

Method = Callable[[Any, Any], Any]
each_release = pytest.mark.parametrize("version", RELEASES)


def shape_of(version: str) -> tuple[str, str, bool]:
    """Which function upstream calls, on what it finds it, and whether its interval is configured."""
    minor = int(version.split(".")[1])
    if minor <= 20:
        return "has_unfinished_dp", "ParallelConfig", False
    return "sync_dp_state", "ParallelConfig" if minor < 33 else "self", minor >= 30


@pytest.fixture(scope="session")
def method(release_dir: Callable[[str], Path]) -> Callable[[str, Any], Method]:
    """Our method of a release, around upstream's, with a stand-in for ``ParallelConfig``."""
    codes: dict[str, tuple[Any, Any]] = {}

    def get(version: str, parallel_config: Any) -> Method:
        if version not in codes:
            root = release_dir(version)
            plan = make_plan(Lane(version, DirSource(f"dir:{root}", root)), find_feature("balance"))
            target = plan.target(HOOK)
            whole = compile_text(target.text.text, target.text.display)
            upstream = find_code(whole, target.qualname, begins_at(target.node))
            (ours,) = [item for item in compile_plan(plan)[1] if item.target == HOOK]
            assert ours.through
            codes[version] = upstream, ours.code
        upstream, code = codes[version]
        names = {"ParallelConfig": parallel_config, "logger": SimpleNamespace(debug=lambda *_: None)}
        inner = FunctionType(upstream, names)
        assert code.co_freevars == (UPSTREAM,)
        return FunctionType(code, names, closure=(CellType(inner),))

    return get


class Parallel:
    """``ParallelConfig``, as far as the ranks synchronise through it; it writes down who asked it what."""

    def __init__(self, log: list[Any], name: str, answer: Any, *, consensus: bool) -> None:
        self.log, self.name, self.answer, self.consensus = log, name, answer, consensus

    def has_unfinished_dp(self, group: Any, unfinished: Any) -> Any:
        return self._synchronise("has_unfinished_dp", group, unfinished)

    def sync_dp_state(self, group: Any, has_unfinished: Any, pending_pause: Any) -> Any:
        return self._synchronise("sync_dp_state", group, has_unfinished), self.consensus

    def _synchronise(self, function: str, group: Any, unfinished: Any) -> Any:
        self.log.append((function, self.name, group, unfinished))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Step:
    """An engine core at the end of one step, and what happens in it, in order."""

    def __init__(self, answer: Any = None, *, due: bool, consensus: bool = False, enabled: bool = True) -> None:
        self.log: list[Any] = []
        self.dp_group = GROUP
        self.scheduler = SimpleNamespace(
            _balance_enabled=enabled,
            balance_gather=lambda group: self.log.append(("gather", group)),
            balance_rest=lambda: self.log.append(("rest",)),
        )
        # Upstream synchronises in every step whose number its interval divides, on all releases.
        self.step_counter = 31 if due else 4
        self.pending_pause = self.ignore_start_dp_wave = False
        self.intervals = 0
        self.vllm_config = SimpleNamespace(parallel_config=Parallel(self.log, "self", answer, consensus=consensus))
        self.theirs = Parallel(self.log, "ParallelConfig", answer, consensus=consensus)

    @property
    def dp_sync_interval(self) -> int:
        self.intervals += 1
        return 32

    @property
    def synchronised(self) -> list[Any]:
        return [entry for entry in self.log if entry[0] not in ("gather", "rest")]


def run(method: Callable[[str, Any], Method], version: str, step: Step, unfinished: Any = "unfinished") -> Any:
    return method(version, step.theirs)(step, unfinished)


@each_release
@pytest.mark.parametrize("answer", [True, False, ["what upstream returned"], []])
def test_the_ranks_synchronise_once_and_get_upstreams_answer_then_they_gather(
    version: str, answer: Any, method: Callable[[str, Any], Method]
) -> None:
    step = Step(due=True, answer=answer)
    assert run(method, version, step) is answer
    function, on, configured = shape_of(version)
    assert step.log[:2] == [(function, on, GROUP, "unfinished"), ("gather", GROUP)]
    assert step.log[2:] == ([] if answer else [("rest",)])
    assert bool(step.intervals) is configured
    assert step.step_counter == 32


@each_release
def test_a_step_in_which_they_do_not_synchronise_gathers_too(
    version: str, method: Callable[[str, Any], Method]
) -> None:
    step = Step(due=False)
    assert run(method, version, step) is True
    assert step.log == [("gather", GROUP)]
    assert step.step_counter == 5


@each_release
def test_where_upstream_fails_nothing_is_gathered(version: str, method: Callable[[str, Any], Method]) -> None:
    failure = RuntimeError("a rank went away")
    step = Step(due=True, answer=failure)
    with pytest.raises(RuntimeError) as caught:
        run(method, version, step)
    assert caught.value is failure
    assert len(step.synchronised) == len(step.log) == 1


@each_release
def test_with_balance_off_it_is_upstreams_alone(version: str, method: Callable[[str, Any], Method]) -> None:
    step = Step(due=True, answer=False, enabled=False)
    assert run(method, version, step) is False
    assert len(step.synchronised) == len(step.log) == 1


@pytest.mark.parametrize("version", [version for version in RELEASES if shape_of(version)[0] == "sync_dp_state"])
def test_a_pause_that_all_ranks_agree_on_is_taken_up_by_upstream(
    version: str, method: Callable[[str, Any], Method]
) -> None:
    step = Step(due=True, answer=False, consensus=True)
    step.pending_pause = True
    run(method, version, step)
    assert (step.pending_pause, step.ignore_start_dp_wave) == (False, True)
    assert [entry[0] for entry in step.log] == ["sync_dp_state", "gather", "rest"]


@each_release
def test_the_gather_is_on_the_group_that_the_engine_has_by_then(
    version: str, method: Callable[[str, Any], Method]
) -> None:
    """Elastic scaling replaces it between two steps, and on some releases while the ranks synchronise."""
    step = Step(due=False, answer=True)
    seen: list[Any] = []
    step.scheduler.balance_gather = seen.append
    for group in ("two ranks", "four ranks", "two again"):
        step.dp_group = group
        step.step_counter = 4
        run(method, version, step)
    step.step_counter = 31

    class Replaces(Parallel):
        def _synchronise(self, function: str, group: Any, unfinished: Any) -> Any:
            step.dp_group = "the next one"
            return super()._synchronise(function, group, unfinished)

    step.theirs = Replaces(step.log, "ParallelConfig", True, consensus=False)
    step.vllm_config = SimpleNamespace(parallel_config=Replaces(step.log, "self", True, consensus=False))
    run(method, version, step)
    assert seen == ["two ranks", "four ranks", "two again", "the next one"]


@each_release
def test_a_gather_that_fails_is_an_error_of_the_step_and_the_next_step_gathers_anew(
    version: str, method: Callable[[str, Any], Method]
) -> None:
    step = Step(due=True, answer=False)
    failure = RuntimeError("a rank went away")

    def fails(group: Any) -> None:
        step.log.append(("gather", group))
        raise failure

    gathers, step.scheduler.balance_gather = step.scheduler.balance_gather, fails
    with pytest.raises(RuntimeError) as caught:
        run(method, version, step)
    assert caught.value is failure
    assert [entry[0] for entry in step.log[1:]] == ["gather"]  # and no rest: nothing was agreed on
    # What upstream's recovery does: another group, and the counter at zero.
    step.dp_group, step.step_counter, step.scheduler.balance_gather = "recovered", 0, gathers
    run(method, version, step)
    assert ("gather", "recovered") in step.log


def test_there_are_four_shapes() -> None:
    assert len({shape_of(version) for version in RELEASES}) == 4
