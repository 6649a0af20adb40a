"""Somebody else's function in a real vLLM: noticed before and after, and composed with where it is asked for."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import byname, decision, plugin, readback
from balance_patcher.errors import PatchError
from balance_patcher.installation import installed, uninstall

ON = {"enable_balance_scheduling": True}
SHAPE = harness.Shape(ranks=2)
HOOK = "_has_global_unfinished_reqs"
COPY = "their_copy"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    harness.dp_engine_core()
    harness.async_scheduler()
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    monkeypatch.delenv(byname.COMPOSE, raising=False)
    with pytest.MonkeyPatch.context() as theirs:
        yield theirs
        plugin.disarm()
        # What a test has put on our classes goes first, so that ours can be taken out.
    uninstall("balance")


@pytest.fixture
def theirs(clean):
    """Put something of theirs on an attribute; it is gone before ours is taken out."""
    return clean.setattr


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A whole copy of this lane's scheduler with one line more, as a plugin would carry it; made here, kept nowhere."""
    from vllm.v1.core.sched import scheduler

    folder = tmp_path_factory.mktemp("theirs")
    lines = Path(scheduler.__file__).read_text().splitlines(keepends=True)
    node = next(
        at for at, line in enumerate(lines) if line.startswith("        token_budget = self.max_num_scheduled_t")
    )
    lines.insert(node, "        CALLS.append(self)\n")
    (folder / f"{COPY}.py").write_text("".join([*lines, "\n\nCALLS: list = []\n\n\n", IDLE]))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield importlib.import_module(COPY)
    sys.path.remove(str(folder))
    del sys.modules[COPY]


def compose(monkeypatch, *names):
    monkeypatch.setenv(byname.COMPOSE, ",".join(names))


def built(config):
    """An engine with the scheduler that its configuration chooses."""
    engine = harness.Loop()
    decision.decide(engine, config)
    engine.scheduler = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, config)
    return engine


#: One that is called as ``schedule`` is, and has none of its places.
IDLE = """\
class Idle:
    def schedule(self, *args, **kwargs):
        return None
"""


class TestCopy:
    """A plugin's whole copy of ``schedule`` stands on upstream's class; both were meant to run."""

    def test_it_is_refused_by_module_file_and_line_and_how_to_keep_it_is_told(self, copy, theirs):
        theirs(harness.upstream_scheduler(), "schedule", copy.Scheduler.schedule)
        with pytest.raises(PatchError, match="BP603") as caught:
            built(harness.vllm_config(SHAPE, ON))
        line = copy.Scheduler.schedule.__code__.co_firstlineno
        assert f"{COPY}.Scheduler.schedule ({copy.__file__}:{line})" in str(caught.value)
        assert f"BALANCE_PATCHER_COMPOSE={COPY}:Scheduler.schedule" in str(caught.value)
        assert installed("balance") is None

    def test_asked_for_theirs_runs_with_the_gate_in_it(self, copy, theirs, monkeypatch):
        upstream = harness.upstream_scheduler()
        theirs(upstream, "schedule", copy.Scheduler.schedule)
        compose(monkeypatch, f"{COPY}:Scheduler.schedule")
        config = harness.vllm_config(SHAPE, ON)
        engine = built(config)
        readback.confirm(engine, config)
        copy.CALLS.clear()
        scheduler = engine.scheduler
        scheduler.add_request(harness.new_request("r", range(100, 110), 3))
        harness.set_counts(scheduler, [0, harness.admission_cap(scheduler)])
        assert scheduler.schedule().num_scheduled_tokens == {}
        harness.set_counts(scheduler, [0, 0])
        assert scheduler.schedule().num_scheduled_tokens == {"r": 10}
        assert [scheduler, scheduler] == copy.CALLS
        assert type(scheduler).schedule.__code__.co_filename == f"<balance_patcher {COPY}>"
        uninstall("balance")
        assert vars(upstream)["schedule"] is copy.Scheduler.schedule

    def test_an_engine_that_is_off_has_theirs_alone(self, copy, theirs, monkeypatch):
        theirs(harness.upstream_scheduler(), "schedule", copy.Scheduler.schedule)
        compose(monkeypatch, f"{COPY}:Scheduler.schedule")
        built(harness.vllm_config(SHAPE, ON))
        off = built(harness.vllm_config(SHAPE)).scheduler
        copy.CALLS.clear()
        off.schedule()
        assert [off] == copy.CALLS

    def test_one_in_which_the_anchor_does_not_hold_is_refused(self, copy, theirs, monkeypatch):
        theirs(harness.upstream_scheduler(), "schedule", copy.Idle.schedule)
        compose(monkeypatch, f"{COPY}:Idle.schedule")
        with pytest.raises(PatchError, match=r"balance\.admission-gate") as caught:
            built(harness.vllm_config(SHAPE, ON))
        assert any(failure.file == copy.__file__ for failure in caught.value.failures)
        assert installed("balance") is None


class Engine:
    """An engine core in a step in which upstream does not synchronise."""

    def __init__(self):
        self.gathered = []
        self.scheduler = SimpleNamespace(
            _balance_enabled=True, balance_gather=self.gathered.append, balance_rest=lambda: None
        )
        self.dp_group = object()
        self.step_counter, self.dp_sync_interval = 1, 32
        self.pending_pause = self.ignore_start_dp_wave = False


def around(function):
    def their_wrapper(self, *args):
        return function(self, *args)

    return their_wrapper


class TestWrapper:
    """Case 16, verl #7837: before or after ours, exactly one gather a step."""

    NAME = f"{__name__}:around.<locals>.their_wrapper"

    @pytest.mark.parametrize("order", ["before", "after", "both"])
    def test_asked_for_it_leaves_one_gather_a_step(self, order, monkeypatch):
        owner = harness.dp_engine_core()
        original = vars(owner)[HOOK]
        compose(monkeypatch, self.NAME)
        try:
            if order != "after":
                setattr(owner, HOOK, around(original))
            decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))
            bound = vars(owner)[HOOK]
            if order != "before":
                setattr(owner, HOOK, around(bound))
            decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))  # a second engine of this process
            engine = Engine()
            vars(owner)[HOOK](engine, True)
            assert engine.gathered == [engine.dp_group]
            setattr(owner, HOOK, bound)
            uninstall("balance")
            assert (vars(owner)[HOOK] is original) is (order == "after")
        finally:
            setattr(owner, HOOK, original)

    def test_around_schedule_it_is_refused_because_it_has_no_place_for_an_edit(self, theirs, monkeypatch):
        upstream = harness.upstream_scheduler()
        theirs(upstream, "schedule", around(upstream.schedule))
        compose(monkeypatch, self.NAME)
        with pytest.raises(PatchError, match=r"BP612.*their_wrapper.*is made inside another function"):
            built(harness.vllm_config(SHAPE, ON))
        assert installed("balance") is None


class TestLater:
    """What is put there after ours was installed is noticed when the engine has been built."""

    @pytest.mark.parametrize("where", ["our class", "upstream's class"])
    def test_a_replaced_method(self, where, theirs):
        config = harness.vllm_config(SHAPE, ON)
        engine = built(config)
        owner = type(engine.scheduler) if where == "our class" else harness.upstream_scheduler()
        theirs(owner, "schedule", their_schedule)
        with pytest.raises(PatchError, match=r"BP606.*their_schedule") as caught:
            readback.confirm(engine, config)
        assert f"({__file__}:{their_schedule.__code__.co_firstlineno})" in str(caught.value)

    def test_a_method_on_the_subclass_that_the_engine_runs(self, theirs):
        shape = harness.Shape(ranks=2, asynchronous=True)
        config = harness.vllm_config(shape, ON)
        engine = built(config)
        assert harness.async_scheduler() in type(engine.scheduler).__mro__
        readback.confirm(engine, config)
        harness.async_scheduler().schedule = their_schedule
        try:
            with pytest.raises(PatchError, match=r"BP702.*AsyncScheduler runs schedule of") as caught:
                readback.confirm(engine, config)
        finally:
            del harness.async_scheduler().schedule
        assert f"their_schedule ({__file__}:{their_schedule.__code__.co_firstlineno})" in str(caught.value)

    def test_such_a_method_that_was_there_before(self):
        harness.async_scheduler().schedule = their_schedule
        try:
            with pytest.raises(PatchError, match=r"BP702.*AsyncScheduler runs schedule of") as caught:
                built(harness.vllm_config(harness.Shape(ranks=2, asynchronous=True), ON))
        finally:
            del harness.async_scheduler().schedule
        assert f"their_schedule ({__file__}:" in str(caught.value)
        assert installed("balance") is None


def their_schedule(self, *_):
    raise AssertionError("not called")
