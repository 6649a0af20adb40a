"""What the gate did, in figures, with vLLM's own classes: across the border between processes, and on its metrics."""

import gc
import json
import logging
import os
import queue
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest
from harness import Shape

from balance_patcher import carried, decision, guards, plugin, readback
from balance_patcher.installation import uninstall

ON = {"enable_balance_scheduling": True}
SHAPE = Shape(seqs=4, ranks=2, tokens=256)
CAP = SHAPE.cap
FIGURES = {
    "frozen_steps": 3,
    "frozen_seconds": 1.5,
    "gather_seconds": [0.001, 0.02],
    "requests_waiting_while_frozen": 2,
}
TOLD = {
    "balance": {"on": True, "about": {"digest": "d", "patcher": "1", "cap": "4", "source": "s"}, "figures": FIGURES}
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins
    from vllm.v1.engine import core_client  # noqa: F401 - imported while nothing arms itself
    from vllm.v1.metrics import loggers  # noqa: F401
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    harness.engine_core()
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setattr(carried, "_complained", set())
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    yield
    plugin.disarm()
    uninstall("balance")
    unregister_vllm_metrics()


@pytest.fixture
def said(caplog):
    name = "vllm.balance_patcher"
    caplog.set_level(logging.DEBUG, name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == name]


def message(**stats):
    """A message of an engine core with statistics, as upstream makes them."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    return EngineCoreOutputs(engine_index=1, scheduler_stats=SchedulerStats(num_running_reqs=3, **stats))


def carrying(told):
    made = message(kv_cache_usage=0.5)
    carried.attach(made.scheduler_stats, told)
    return made


def client():
    """As much of a client as reads messages: the decoder that upstream's constructor makes."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    return SimpleNamespace(decoder=MsgpackDecoder(EngineCoreOutputs))


def sent(made, to):
    from vllm.v1.serial_utils import MsgpackEncoder

    return to.decoder.decode(MsgpackEncoder().encode(made))


# -- across the border ------------------------------------------------------------------------


class TestTheBorder:
    def test_what_is_carried_arrives(self):
        server = client()
        carried.receive(server)
        arrived = sent(carrying(TOLD), server)
        assert carried.read(arrived.scheduler_stats) == TOLD
        assert (arrived.engine_index, arrived.scheduler_stats.num_running_reqs) == (1, 3)
        assert arrived.scheduler_stats.kv_cache_usage == 0.5

    @pytest.mark.parametrize("nonsense", ["text", 7, [1], {"balance": 7}, {"other": {}}], ids=repr)
    def test_whatever_is_carried_the_message_arrives(self, nonsense):
        server = client()
        carried.receive(server)
        arrived = sent(carrying(nonsense), server)
        assert arrived.scheduler_stats.num_running_reqs == 3
        assert carried.read(arrived.scheduler_stats) == (nonsense if isinstance(nonsense, dict) else {})

    def test_a_server_without_us_reads_what_upstream_sends(self):
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats

        arrived = sent(carrying(TOLD), client())
        assert (type(arrived), type(arrived.scheduler_stats)) == (EngineCoreOutputs, SchedulerStats)
        assert arrived.scheduler_stats == message(kv_cache_usage=0.5).scheduler_stats
        assert carried.read(arrived.scheduler_stats) == {}

    def test_an_engine_core_without_us_is_read_as_before(self):
        from vllm.v1.engine import EngineCoreOutputs

        server = client()
        carried.receive(server)
        arrived = sent(message(kv_cache_usage=0.25), server)
        assert carried.read(arrived.scheduler_stats) == {}
        assert harness.plain(arrived.scheduler_stats)["kv_cache_usage"] == 0.25
        assert isinstance(arrived, EngineCoreOutputs)
        for more in ({"wave_complete": 3}, {"start_wave": 4}, {"finished_requests": {"a", "b"}}):
            arrived = sent(EngineCoreOutputs(timestamp=2.5, **more), server)
            assert {name: getattr(arrived, name) for name in more} == more
            assert (arrived.timestamp, arrived.scheduler_stats, arrived.outputs) == (2.5, None, [])

    def test_vllms_own_classes_are_as_they_were(self):
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats

        before = {cls: dict(vars(cls)) for cls in (EngineCoreOutputs, SchedulerStats)}
        server = client()
        carried.receive(server)
        sent(carrying(TOLD), server)
        for cls, attributes in before.items():
            kept = {name: value for name, value in vars(cls).items() if not name.startswith("__msgspec")}
            assert kept == {name: value for name, value in attributes.items() if not name.startswith("__msgspec")}

    def test_the_decoder_keeps_its_hooks(self):
        server = client()
        before = server.decoder.decoder
        carried.receive(server)
        assert server.decoder.decoder is not before
        assert server.decoder.decoder.ext_hook == before.ext_hook
        assert server.decoder.decoder.dec_hook == before.dec_hook


# -- engine cores -----------------------------------------------------------------------------


def engine_core(additional, monkeypatch=None):
    """An engine core that was decided on, built with a real scheduler, and looked at."""
    config = harness.vllm_config(SHAPE, additional)
    engine = harness.Loop()
    decision.decide(engine, config)
    engine.scheduler = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, config)
    engine.output_queue = queue.Queue()
    readback.confirm(engine, config)
    return engine


def told_by(engine):
    return carried.read(engine.scheduler.make_stats()).get("balance")


@pytest.fixture
def gathering(monkeypatch):
    """Let a scheduler gather what it is told to."""
    import torch.distributed as dist

    group = SimpleNamespace(size=lambda: SHAPE.ranks)

    def gather(engine, counts):
        def all_gather(outputs, mine, group=None):
            for tensor, count in zip(outputs, counts, strict=True):
                tensor.fill_(count)

        monkeypatch.setattr(dist, "all_gather", all_gather)
        engine.dp_group = group
        engine.scheduler.balance_gather(group)

    return gather


class TestEngineCores:
    def test_one_with_balance_on_says_so_at_once(self, said):
        engine = engine_core(ON)
        client_index, first = engine.output_queue.get_nowait()
        told = carried.read(first.scheduler_stats)["balance"]
        assert (client_index, engine.output_queue.empty()) == (0, True)
        assert told["on"] is True
        (line,) = [line for line in said() if ": ON " in line]
        assert line.endswith(f"digest={told['about']['digest']}")
        assert f" cap={told['about']['cap']} " in line
        assert told["about"]["source"] == "additional_config.enable_balance_scheduling"

    def test_its_steps_are_told_as_differences(self, gathering):
        engine = engine_core(ON)
        scheduler = engine.scheduler
        for number in range(6):
            scheduler.add_request(harness.new_request(f"r{number}", range(3 + 40 * number, 23 + 40 * number), 50))
            if number == 1:
                scheduler.schedule()
                gathering(engine, (CAP, 2))
        told_by(engine)
        for _ in range(3):
            assert not scheduler.schedule().scheduled_new_reqs
            gathering(engine, (CAP, 2))
        figures = told_by(engine)["figures"]
        assert (figures["frozen_steps"], figures["requests_waiting_while_frozen"]) == (3, 4)
        assert 0 < figures["frozen_seconds"] < 60
        assert len(figures["gather_seconds"]) == 3
        assert not scheduler.schedule().scheduled_new_reqs
        gathering(engine, (1, 2))
        assert scheduler.schedule().scheduled_new_reqs
        gathering(engine, (1, CAP))
        figures = told_by(engine)["figures"]
        assert (figures["frozen_steps"], figures["requests_waiting_while_frozen"]) == (1, 0)

    def test_a_gate_that_nothing_comes_to_freezes_nothing(self, gathering):
        from vllm.v1.core.sched.interface import PauseState

        engine = engine_core(ON)
        scheduler = engine.scheduler
        scheduler.add_request(harness.new_request("r", range(3, 23), 50))
        gathering(engine, (CAP, 0))
        told_by(engine)
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        scheduler.schedule()
        gathering(engine, (CAP, 0))
        assert told_by(engine)["figures"]["frozen_steps"] == 0
        scheduler.set_pause_state(PauseState.UNPAUSED)
        scheduler.schedule()
        gathering(engine, (CAP, 0))
        assert told_by(engine)["figures"]["frozen_steps"] == 1

    def test_at_rest_the_server_is_told_the_rest(self, gathering):
        engine = engine_core(ON)
        engine.output_queue.get_nowait()
        gathering(engine, (0, 0))
        engine.scheduler.balance_rest()
        _, last = engine.output_queue.get_nowait()
        assert len(carried.read(last.scheduler_stats)["balance"]["figures"]["gather_seconds"]) == 1

    def test_one_that_cannot_have_it_says_why(self, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        engine = engine_core({**ON, "dyntra_lb_config": {"enabled": True}})
        _, first = engine.output_queue.get_nowait()
        told = carried.read(first.scheduler_stats)["balance"]
        assert told["on"] is False
        assert told["about"]["reason"].startswith("BP701 ")
        assert "dyntra_lb_config.enabled" in told["about"]["reason"]
        assert type(engine.scheduler).__name__ != "BalanceScheduler"
        assert carried.read(engine.scheduler.make_stats())["balance"] == told

    def test_one_that_nobody_asks_is_upstreams(self):
        engine = engine_core({})
        assert engine.output_queue.empty()
        assert "make_stats" not in vars(engine.scheduler)
        assert carried.read(engine.scheduler.make_stats()) == {}

    def test_one_that_joins_a_group_waits_until_the_server_knows_it(self, monkeypatch):
        monkeypatch.setattr(readback, "joins", lambda: True)
        engine = engine_core(ON)
        assert engine.output_queue.empty()
        assert told_by(engine)["on"] is True

    def test_what_upstream_tells_is_what_it_told(self):
        engine = engine_core(ON)
        ours = harness.plain(engine.scheduler.make_stats())
        plain = harness.plain(type(engine.scheduler).make_stats(engine.scheduler))
        assert {name: value for name, value in ours.items() if name != carried.FIELD} == plain

    def test_a_scheduler_that_makes_its_own_statistics_is_no_harm(self):
        engine = engine_core(ON)
        other = type("Other", (type(engine.scheduler),), {"make_stats": lambda self: None})
        engine.scheduler.__class__ = other
        assert engine.scheduler.make_stats() is None
        del engine, other
        gc.collect()  # a class that derives from ours would be in the way of taking ours out


# -- servers ----------------------------------------------------------------------------------


def manager(additional, **more):
    from vllm.v1.metrics.loggers import StatLoggerManager

    return StatLoggerManager(vllm_config=harness.vllm_config(SHAPE, additional), engine_idxs=[0, 1], **more)


def page():
    """Our metrics in vLLM's registry, each with its values by engine."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    found = {}
    for family in get_prometheus_registry().collect():
        for sample in family.samples if family.name.startswith("vllm:balance_") else ():
            if not sample.name.endswith(("_bucket", "_created")):
                found.setdefault(sample.name.removeprefix("vllm:balance_"), {})[sample.labels["engine"]] = sample.value
    return found


def hear(made, told, engine):
    """A server hears statistics that carry something, or nothing."""
    server = client()
    carried.receive(server)
    arrived = sent(carrying(told) if told is not None else message(), server)
    made.record(scheduler_stats=arrived.scheduler_stats, iteration_stats=None, engine_idx=engine)


class TestServers:
    @pytest.fixture(autouse=True)
    def armed(self, clean):
        plugin.arm()

    def test_where_nobody_asks_nothing_is_there(self):
        made = manager({})
        plugin.disarm()
        alone = manager({})
        assert list(map(type, made.stat_loggers)) == list(map(type, alone.stat_loggers))
        hear(made, TOLD, 0)
        assert page() == {}

    def test_the_metrics_of_two_engines(self):
        made = manager(ON)
        assert page() == {}
        hear(made, TOLD, 0)
        for _ in range(2):
            hear(made, TOLD, 1)
        found = page()
        assert found["enabled"] == found["info"] == {"0": 1.0, "1": 1.0}
        assert found["frozen_steps_total"] == {"0": 3.0, "1": 6.0}
        assert found["frozen_seconds_total"] == {"0": 1.5, "1": 3.0}
        assert found["gather_seconds_count"] == {"0": 2.0, "1": 4.0}
        assert found["gather_seconds_sum"] == pytest.approx({"0": 0.021, "1": 0.042})
        assert found["requests_waiting_while_frozen"] == {"0": 2.0, "1": 2.0}
        assert found["stalls_total"] == {"0": 0.0, "1": 0.0}

    def test_vllms_own_are_there_too(self):
        from prometheus_client import REGISTRY

        hear(manager(ON), TOLD, 1)
        labels = {"model_name": harness.MODEL, "engine": "1"}
        assert REGISTRY.get_sample_value("vllm:num_requests_running", labels) == 3
        assert REGISTRY.get_sample_value("vllm:balance_enabled", labels) == 1

    def test_an_engine_core_without_us_is_off(self):
        made = manager(ON)
        hear(made, None, 0)
        hear(made, TOLD, 1)
        assert page()["enabled"] == {"0": 0.0, "1": 1.0}
        assert page()["frozen_steps_total"] == {"1": 3.0}

    def test_one_that_cannot_have_it_is_off(self):
        hear(manager(ON), {"balance": {"on": False, "about": {"reason": "BP101 anchor not found"}}}, 0)
        assert page() == {"enabled": {"0": 0.0}, "info": {"0": 1.0}}

    def test_loggers_that_are_made_anew_show_them_anew(self):
        """Elastic scaling makes a new manager while the server runs; upstream's own metrics begin at zero there too."""
        hear(manager(ON), TOLD, 0)
        again = manager(ON)
        assert page() == {}
        hear(again, TOLD, 1)
        assert page()["frozen_steps_total"] == {"1": 3.0}

    def test_the_periodic_log_has_one_line(self, said):
        made = manager(ON)
        made.log()
        hear(made, TOLD, 0)
        hear(made, TOLD, 1)
        made.log()
        made.log()
        (line,) = [line for line in said() if line.startswith("balance: on in ")]
        assert line.startswith(
            "balance: on in 2 engines; frozen 6 of 4 steps (150.0 %, most of them in engine 0), 3.0 s"
        )

    @pytest.mark.parametrize("more", [{"client_count": 2}, {"enable_default_loggers": False}])
    def test_it_has_none_where_vllm_has_none(self, more, said):
        made = manager(ON, **more)
        hear(made, TOLD, 0)
        made.log()
        assert not [line for line in said() if line.startswith("balance: on in ")]
        assert page()["enabled"] == {"0": 1.0}

    def test_all_that_the_manager_asks_of_a_logger_is_there(self):
        made = manager(ON)
        made.log_engine_initialized()
        made.record_sleep_state(1, 1)
        made.record(scheduler_stats=None, iteration_stats=None, engine_idx=0)
        if hasattr(made, "record_admission_rejection"):
            made.record_admission_rejection("max_num_queued_reqs")

    def test_nonsense_is_said_once_and_the_server_goes_on(self, said):
        made = manager(ON)
        for figures in ({"frozen_steps": "many"}, {"gather_seconds": 3}):
            hear(made, {"balance": {"on": True, "about": {}, "figures": figures}}, 0)
        hear(made, {"balance": 7}, 1)
        hear(made, TOLD, 0)
        assert page()["requests_waiting_while_frozen"] == {"0": 2.0}
        assert len([line for line in said() if "cannot be shown" in line]) == 1

    def test_a_client_reads_what_is_carried_where_somebody_asks(self, monkeypatch):
        from vllm.v1.engine import core_client

        plugin.disarm()

        def upstream(self, asyncio_mode, vllm_config, executor_class, log_stats):
            self.decoder = client().decoder

        with monkeypatch.context() as patch:
            patch.setattr(core_client.MPClient, "__init__", upstream)
            patch.setattr(core_client.MPClient, "__del__", lambda _: None, raising=False)
            plugin.arm()
            for additional, expected in ((ON, TOLD), ({}, {})):
                config = harness.vllm_config(SHAPE, additional)
                made = core_client.MPClient(False, vllm_config=config, executor_class=None, log_stats=True)
                assert carried.read(sent(carrying(TOLD), made).scheduler_stats) == expected
            plugin.disarm()

    def test_disarmed_the_identical_constructors_are_back(self):
        plugin.disarm()
        guarded = [(guard.owner, vars(guard.owner)["__init__"]) for guard in (plugin.CLIENT, plugin.LOGGERS)]
        plugin.arm()
        assert all(vars(owner)["__init__"] is not before for owner, before in guarded)
        plugin.arm()
        plugin.disarm()
        assert all(vars(owner)["__init__"] is before for owner, before in guarded)
        assert not guards._AWAITED


#: What one of several servers does: it hears some statistics of both engines, and is still there when it is asked.
SERVER = """
import json, sys
from test_figures import ON, TOLD, hear, manager, page, plugin
plugin.arm()
made = manager(ON, client_count=2)
for engine, times in json.loads(sys.argv[1]).items():
    for _ in range(times):
        hear(made, TOLD, int(engine))
print(json.dumps(page()) if len(sys.argv) > 2 else "", flush=True)
"""


def test_two_servers_count_nothing_twice(tmp_path):
    here = Path(__file__).resolve().parent
    told = {
        **os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(here.parent.parent), str(here)]),
    }  # fmt: skip
    for heard, *more in (({"0": 2, "1": 1}, []), ({"1": 4}, ["ask"])):
        words = [sys.executable, "-c", SERVER, json.dumps(heard), *(word for one in more for word in one)]
        done = subprocess.run(words, env=told, capture_output=True, text=True, check=False, timeout=250)
        assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["enabled"] == {"0": 1.0, "1": 1.0}
    assert found["frozen_steps_total"] == {"0": 6.0, "1": 15.0}
    assert found["gather_seconds_count"] == {"0": 4.0, "1": 10.0}
    assert found["requests_waiting_while_frozen"] == {"0": 2.0, "1": 2.0}
