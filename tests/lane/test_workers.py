"""What belongs to a worker is decided as a worker is built: real ``WorkerBase`` and ``WorkerWrapperBase``.

The engine core has nothing to do with it: a worker may be in a process where none is built.
"""

import logging
import pickle
import sys

import harness
import pytest
from vllm.distributed.eplb import async_worker, eplb_state
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

from balance_patcher import decision, guards, plugin, wanted
from balance_patcher.decided import carried, decided
from balance_patcher.errors import PatchError
from balance_patcher.installation import bound, uninstall

KEY = "enable_eplb_hooks"
ON = {KEY: True}


class Own(WorkerBase):
    """One that sets itself up, and never calls the constructor of vLLM's own."""

    def __init__(self, vllm_config, **_):
        self.vllm_config, self.device = vllm_config, None

    def init_device(self):
        self.device = "there"


class Worker(WorkerBase):
    """As a device's own worker: it sets up nothing before its base has run."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.after = bound("eplb_hooks") is not None


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    original = WorkerBase.__init__, WorkerWrapperBase.init_device
    hooked = dict(vars(eplb_state.EplbState)), async_worker.run_rebalance_experts
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    plugin.arm()
    yield
    plugin.disarm()
    uninstall("eplb_hooks")
    assert (WorkerBase.__init__, WorkerWrapperBase.init_device) == original
    assert (dict(vars(eplb_state.EplbState)), async_worker.run_rebalance_experts) == hooked


def config(additional=None, *, eplb=True):
    made = harness.vllm_config(harness.Shape(), additional)
    object.__setattr__(made.parallel_config, "enable_eplb", eplb)
    return made


def worker(vllm_config, rank=0):
    return Worker(vllm_config, local_rank=rank, rank=rank, distributed_init_method="")


def last():
    (made,) = [made for made in decision.decisions()[-1] if made.feature == "eplb_hooks"]
    return made


@pytest.mark.parametrize("additional", [ON, {"scheduler_config": ON}], ids=["top level", "nested"])
def test_asked_for_the_hooks_are_there_before_the_worker_goes_on(additional, caplog):
    caplog.set_level(logging.INFO, "vllm.balance_patcher")
    built = worker(config(additional), rank=3)
    assert built.after
    assert hasattr(eplb_state.EplbState, "create_policy")
    assert last().active
    (line,) = [line for line in caplog.messages if line.startswith("eplb_hooks: ON")]
    assert " worker=3 " in line
    assert "deltas=policy,one-policy,model-state,planning,commit,workspace,async-planning" in line


@pytest.mark.parametrize("additional", [None, {KEY: False}, {"enable_balance_scheduling": True}])
def test_not_asked_for_upstreams_own_objects_are_untouched(additional):
    before = dict(vars(eplb_state.EplbState)), async_worker.run_rebalance_experts
    assert not worker(config(additional)).after
    assert (dict(vars(eplb_state.EplbState)), async_worker.run_rebalance_experts) == before
    assert not last().active
    assert "does not ask for it" in last().reason


def test_without_the_balancer_there_is_nothing_to_hook_into(caplog):
    caplog.set_level(logging.INFO, "vllm.balance_patcher")
    assert not worker(config(ON, eplb=False)).after
    assert "nothing to hook into: enable_eplb is off" in last().reason
    assert any("enable_eplb is off" in line for line in caplog.messages)


@pytest.fixture
def foreign():
    """Somebody else's function in the place of a target."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eplb_state.EplbState, "rearrange", lambda self, *_, **__: None)
        yield


def test_asked_for_and_not_to_be_had_the_worker_stops_with_the_reason(foreign):
    with pytest.raises(PatchError, match=r"BP603.*EplbState\.rearrange is not upstream's function"):
        worker(config(ON))
    assert bound("eplb_hooks") is None
    assert not last().active


def test_a_value_that_says_neither_yes_nor_no_stops_the_worker():
    with pytest.raises(PatchError, match="BP703"):
        worker(config({KEY: "on"}))
    assert bound("eplb_hooks") is None


def test_an_operator_may_have_it_serve_without(foreign, monkeypatch, caplog):
    monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
    assert not worker(config(ON)).after
    assert any("eplb_hooks: OFF because it cannot run" in line for line in caplog.messages)


def test_a_worker_that_fails_leaves_no_decision_that_it_is_on():
    def failing(*_, **__):
        raise OSError("no device")

    plugin.disarm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerBase, "__init__", failing)
        plugin.arm()
        with pytest.raises(OSError, match="no device"):
            worker(config(ON))
        plugin.disarm()
    assert not last().active
    assert "OFF because the engine was not built: OSError: no device" in last().reason


def test_an_engine_core_is_not_asked_for_what_a_worker_decides():
    assert wanted.asked_for(config(ON)) == ()
    assert wanted.asked_for(config(ON), "worker") == ("eplb_hooks",)
    made = decision.decide(harness.Loop(), config(ON))
    assert "eplb_hooks" not in {each.feature for each in made}
    assert bound("eplb_hooks") is None


def test_a_worker_does_not_decide_what_an_engine_core_does():
    worker(config({**ON, "enable_balance_scheduling": True}))
    assert {made.feature for made in decision.decisions()[-1]} == {"eplb_hooks"}


def test_armed_by_the_general_plugin_within_init_worker_is_early_enough(monkeypatch):
    """The only plugin there is: ``VLLM_PLUGINS`` filters the platform plugins by name too."""
    import vllm.plugins

    plugin.disarm()
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", plugin.arm_late)
    wrapper = wrapped(config(ON), "Worker")
    assert wrapper.worker.after


def wrapped(vllm_config, worker):
    """A worker that an executor has made, before its device is set up."""
    vllm_config.parallel_config.worker_cls = f"{__name__}.{worker}"
    wrapper = WorkerWrapperBase(rpc_rank=0)
    arguments = {"vllm_config": vllm_config, "local_rank": 0, "rank": 0, "distributed_init_method": ""}
    wrapper.init_worker([{**arguments, "shared_worker_lock": None}])
    return wrapper


class TestWorkerThatDidNotAsk:
    @pytest.mark.parametrize("armed", ["before", "while it is made"])
    def test_asked_for_it_does_not_get_its_device(self, armed, monkeypatch):
        if armed != "before":
            import vllm.plugins

            plugin.disarm()
            monkeypatch.setattr(vllm.plugins, "load_general_plugins", plugin.arm_late)
        wrapper = wrapped(config(ON), "Own")
        with pytest.raises(PatchError, match=r"BP611.*eplb_hooks is asked for by a worker that did not ask us: .*Own"):
            wrapper.init_device()
        assert wrapper.worker.device is None

    @pytest.mark.parametrize("asked", [None, {KEY: False}, {"enable_balance_scheduling": True}], ids=str)
    def test_not_asked_for_it_stops_nobody(self, asked):
        wrapper = wrapped(config(asked), "Own")
        wrapper.init_device()
        assert wrapper.worker.device == "there"

    def test_one_that_did_is_not_stopped(self, monkeypatch):
        monkeypatch.setattr(Worker, "init_device", lambda self: setattr(self, "device", "there"))
        wrapper = wrapped(config(ON), "Worker")
        wrapper.init_device()
        assert (wrapper.worker.after, wrapper.worker.device) == (True, "there")

    def test_an_operator_may_have_it_serve_without(self, monkeypatch, caplog):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        wrapper = wrapped(config(ON), "Own")
        wrapper.init_device()
        assert wrapper.worker.device == "there"
        assert any(line.startswith("BP611") for line in caplog.messages)


def test_what_the_engine_core_decided_goes_with_its_configuration_to_the_workers():
    sent = config({**ON, "enable_balance_scheduling": True})
    before = sent.compute_hash()
    decision.decide(harness.Loop(), sent)
    found = pickle.loads(pickle.dumps(sent))  # noqa: S301 - written here
    assert carried(found, "balance") == carried(sent, "balance") is not None
    assert carried(found, "eplb_hooks") is None
    assert (found.compute_hash(), decided(found, "balance")) == (before, None)
    uninstall("balance")


def test_a_hosts_plugin_may_ask_by_a_call(monkeypatch, caplog):
    import vllm.plugins

    import balance_patcher

    caplog.set_level(logging.INFO, "vllm.balance_patcher")
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: balance_patcher.install("eplb_hooks"))
    for number in range(2):  # a second worker in this process finds it there
        assert worker(config(), rank=number).after
        assert last().active
    assert [line.partition("source=")[2].split()[0] for line in caplog.messages if "eplb_hooks: ON" in line] == [
        "install()",
        "install()",
    ]


def test_armed_before_the_workers_are_imported_they_are_guarded_on_import(monkeypatch):
    module = sys.modules[plugin.WORKER.module]
    plugin.disarm()
    monkeypatch.setattr(sys.modules[plugin.WORKER.module.rpartition(".")[0]], "worker_base", module)
    monkeypatch.delitem(sys.modules, plugin.WORKER.module)
    plugin.arm()
    assert plugin.WORKER.armed()
    again = __import__(plugin.WORKER.module, fromlist=["WorkerBase"])
    assert again is not module
    assert again.WorkerBase.__init__.__code__ is guards.CALL_THROUGH
    assert plugin.WORKER.module not in guards._AWAITED
    monkeypatch.undo()


def test_arming_twice_is_once_and_a_wrapper_is_not_lost():
    ours = WorkerBase.__init__
    plugin.arm()
    assert WorkerBase.__init__ is ours

    def theirs(self, *args, **kwargs):
        ours(self, *args, **kwargs)

    WorkerBase.__init__ = theirs
    assert plugin.WORKER.armed()
    with pytest.raises(PatchError, match="BP606"):
        plugin.disarm()
    assert WorkerBase.__init__ is theirs
    WorkerBase.__init__ = ours


def test_without_a_configuration_upstream_says_what_it_misses():
    with pytest.raises(TypeError, match="vllm_config"):
        WorkerBase()


def test_switched_off_nothing_is_armed(monkeypatch):
    plugin.disarm()
    original = WorkerBase.__init__
    monkeypatch.setenv("BALANCE_PATCHER", "off")
    plugin.arm()
    assert WorkerBase.__init__ is original
    assert not plugin.WORKER.armed()
