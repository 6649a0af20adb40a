"""With upstream's seam in this lane's scheduler: the same decisions, gate on and off, and the gate an override of it.

``tools/upstream_seam.py`` writes the seam; what runs is real, and only the scheduler's module is another.
"""

import inspect
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import seamed
import traces
from harness import Shape

from tests.engine.processes import with_another_scheduler

ROOT = Path(__file__).resolve().parents[2]
NAME = "_should_stop_admitting_waiting"

#: The seeds of the equivalence tests; with the gate off no counts matter, and fewer do.
ON, OFF = range(100), range(1000, 1020)


def chosen(shape, plain, asynchronous):
    return asynchronous if shape.asynchronous else plain


def against_upstream(seed, plain, asynchronous, config):
    """The first difference between a class and the lane's own scheduler, without any counts."""
    script = traces.trace(seed)
    own = chosen(script.shape, harness.upstream_scheduler(), harness.async_scheduler())
    made = [
        harness.new_scheduler(class_, script.shape, config(script.shape))
        for class_ in (chosen(script.shape, plain, asynchronous), own)
    ]
    return traces.compare(script, *(traces.World(one, script, traces.ignore_counts) for one in made))


def test_the_lanes_own_scheduler_has_no_seam():
    assert not hasattr(harness.upstream_scheduler(), NAME)
    assert NAME in vars(seamed.classes().plain)
    assert seamed.classes().plain is not harness.upstream_scheduler()


@pytest.mark.parametrize("seed", OFF)
def test_upstream_decides_as_it_did(seed):
    made = seamed.classes()
    found = against_upstream(seed, made.plain, made.asynchronous, harness.vllm_config)
    assert found is None, found


@pytest.mark.parametrize("seed", OFF)
def test_with_the_gate_off_ours_decides_as_upstream_did(seed):
    made = seamed.classes()
    found = against_upstream(seed, made.balance, made.balance_asynchronous, harness.vllm_config)
    assert found is None, found


@pytest.mark.parametrize("seed", ON)
def test_with_the_gate_on_every_step_equals_the_oracle_over_the_lanes_own(seed):
    """As the gate in ``schedule`` does in ``test_oracle.py``, on the same traces; so the two are equal."""
    made = seamed.classes()
    found = traces.against_oracle(seed, made.balance, made.balance_asynchronous)
    assert found is None, found


# -- a wrong override is found --------------------------------------------------------------------


def upstreams_answer(scheduler):
    return getattr(seamed.classes().plain, NAME)(scheduler)


class StopIgnored:
    def _should_stop_admitting_waiting(self):
        return upstreams_answer(self)


class FreezesOneTooEarly:
    def _should_stop_admitting_waiting(self):
        return upstreams_answer(self) or max(count.item() for count in self.balance_queue) >= self._balance_cap() - 1


class ForgetsUpstreamsOwn:
    def _should_stop_admitting_waiting(self):
        return max(count.item() for count in self.balance_queue) == self._balance_cap()


class NoStop:
    def _should_stop_admitting_waiting(self):
        return False


def differs(compare, seed, *arguments):
    try:
        return compare(seed, *arguments) is not None
    except AssertionError:  # upstream's own, when more run than its cap
        return True


@pytest.mark.parametrize("mutant", [StopIgnored, FreezesOneTooEarly, ForgetsUpstreamsOwn], ids=lambda m: m.__name__)
def test_the_oracle_finds_a_wrong_override(mutant):
    made = seamed.classes()
    wrong = [type("Mutant", (mutant, class_), {}) for class_ in (made.balance, made.balance_asynchronous)]
    assert any(differs(traces.against_oracle, seed, *wrong) for seed in ON), f"{mutant.__name__} passed for correct"


def test_a_lost_stop_is_found_with_the_gate_off():
    made = seamed.classes()
    wrong = [type("Mutant", (NoStop, class_), {}) for class_ in (made.plain, made.asynchronous)]
    assert any(differs(against_upstream, seed, *wrong, harness.vllm_config) for seed in OFF)


# -- what is kept of the contract -----------------------------------------------------------------


def test_nothing_is_put_into_schedule_and_the_override_shows_its_text():
    made = seamed.classes()
    placed = {p.delta.name: p for p in made.built.plan.placements}
    assert (placed["balance.admission-gate"].status, placed["balance.admission-gate"].variant.name) == (
        "absorbed", "upstream's seam",
    )  # fmt: skip
    assert "balance_flag" not in inspect.getsource(made.balance.schedule)
    shown = inspect.getsource(getattr(made.balance, NAME))
    assert shown.splitlines()[1].strip().startswith(f"if super().{NAME}():")
    assert f" self.{harness.cap_attribute()}  # bp: balance.admission-seam" in shown
    assert getattr(made.plain, NAME).__code__.co_filename.endswith("scheduler.py")


def test_the_gather_sends_what_the_seam_counts():
    made = seamed.classes()
    shape = Shape(seqs=3, ranks=2, tokens=256)
    scheduler = harness.new_scheduler(made.balance, shape, harness.enabled_config(shape))
    for number in range(2):
        scheduler.add_request(harness.new_request(f"r{number}", 10, 9))
    scheduler.add_request(harness.new_request("s", 10, 1, resumable=True))
    world = traces.World(scheduler, traces.Trace(0, shape, []), traces.ignore_counts)
    world.schedule(traces.Step())
    world.answer(0)
    assert (len(scheduler.running), scheduler.num_waiting_for_streaming_input) == (2, 1)
    assert scheduler._balance_count() == harness.admission_count(scheduler)
    assert scheduler._balance_cap() == harness.admission_cap(scheduler) == shape.cap


def test_the_cap_is_that_of_the_seam_where_it_is_lower():
    if not harness.supports_active_cap():
        assert harness.cap_attribute() == "max_num_running_reqs"
        return
    made = seamed.classes()
    shape = Shape(seqs=4, active=2, ranks=2, tokens=256)
    scheduler = harness.new_scheduler(made.balance, shape, harness.enabled_config(shape))
    assert (scheduler._balance_cap(), scheduler.max_num_running_reqs) == (2, 4)
    for counts, stops in (((0, 1), False), ((0, 2), True)):
        harness.set_counts(scheduler, counts)
        assert getattr(scheduler, NAME)() is stops


def test_disabled_there_is_no_queue_and_upstreams_own_answer():
    made = seamed.classes()
    shape = Shape(seqs=2, ranks=2, tokens=256)
    scheduler = harness.new_scheduler(made.balance, shape)
    assert not hasattr(scheduler, "balance_queue")
    assert getattr(scheduler, NAME)() is False
    for number in range(3):
        scheduler.add_request(harness.new_request(f"r{number}", 10, 9))
    assert len(scheduler.schedule().scheduled_new_reqs) == 2
    assert getattr(scheduler, NAME)() is True


# -- a process whose vLLM has the seam ------------------------------------------------------------

CHILD = """
import sys, inspect, json
sys.path.insert(0, sys.argv[1])
from vllm.v1.core.sched import async_scheduler, scheduler  # imported before: what is installed must be effective
upstream, name = scheduler.Scheduler, "_should_stop_admitting_waiting"
before = async_scheduler.AsyncScheduler.__bases__, vars(upstream)[name], vars(upstream)["schedule"]

import harness
from balance_patcher import install, status, uninstall

install("balance")
made = async_scheduler.AsyncScheduler
shape = harness.Shape(seqs=2, ranks=2, tokens=256)
admitted = []
for counts in ((0, 1), (0, 2)):
    one = harness.new_scheduler(made, shape, harness.enabled_config(shape))
    harness.set_counts(one, counts)
    one.add_request(harness.new_request("r", 10, 9))
    admitted.append(len(one.schedule().scheduled_new_reqs))
seen = {delta.name: delta.status for delta in status().feature("balance").deltas}
owner = next(cls for cls in made.__mro__ if name in vars(cls))
same = vars(upstream)[name] is before[1]
uninstall("balance")
after = async_scheduler.AsyncScheduler.__bases__, vars(upstream)[name], vars(upstream)["schedule"]
print(json.dumps({
    "file": scheduler.__file__, "admitted": admitted, "owner": owner.__name__, "upstream's own stays": same,
    "gate": seen["balance.admission-gate"], "seam": seen["balance.admission-seam"],
    "undone": all(one is other for one, other in zip(before, after)) and scheduler.Scheduler is upstream,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_another_scheduler(tmp_path_factory.mktemp("with-the-seam"), lambda _: seamed.text())


def run(folder, *arguments):
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, env=seamed.environment(folder), cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_installed_it_is_effective_and_taken_out_it_is_upstreams(folder):
    import json

    done = run(folder, "-c", CHILD, str(ROOT / "tests/lane"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {
        "file": str(folder / seamed.PATH), "admitted": [1, 0], "owner": "BalanceScheduler",
        "upstream's own stays": True, "gate": "absorbed", "seam": "applied", "undone": True,
    }  # fmt: skip


def test_verify_is_green_through_the_seam(folder):
    done = run(folder, "-m", "balance_patcher", "verify", "installed", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"variant": "upstream\'s seam"' in done.stdout
