"""What a real engine's process answers to `status --pid`: what its scheduler and its ranks are, read at that moment."""

import gc
import logging
import os
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import answering, decision, outcome, plugin, readback
from balance_patcher.errors import PatchError
from balance_patcher.inquiry import inquire
from balance_patcher.installation import installed, uninstall

ON = {"enable_balance_scheduling": True}
SHAPE = harness.Shape(ranks=2)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    harness.engine_core()  # imported while nothing arms itself
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setattr(outcome, "_OUTCOMES", [])
    monkeypatch.setattr(answering._Here, "answerer", answering.Answerer())
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    yield
    answering._Here.answerer.close(30)
    plugin.disarm()
    uninstall("balance")


def built(additional=ON):
    """An engine with the scheduler that its configuration chooses, looked at as one that has been built."""
    config = harness.vllm_config(SHAPE, additional)
    engine = harness.Loop()
    engine.dp_group = SimpleNamespace(size=lambda: 2)
    decision.decide(engine, config)
    engine.scheduler = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, config)
    readback.confirm(engine, config)
    return engine


def told(at=0):
    (answer,) = inquire(os.getpid()).answers
    return answer, answer["engines"][at]


def balance(at=0):
    return told(at)[1]["features"]["balance"]


def test_it_says_what_the_log_says_and_what_runs(caplog):
    import vllm

    caplog.set_level(logging.INFO, "vllm.balance_patcher")
    engine = built()
    answer, one = told()
    assert (answer["pid"], answer["vllm"]) == (os.getpid(), vllm.__version__)
    assert (one["rank"], one["ranks"], one["errors"]) == (engine.dp_rank, 2, [])
    assert balance()["line"] in caplog.messages
    assert balance()["line"].startswith("balance: ON rank 1/2")
    assert balance()["digest"] == installed("balance").digest
    assert balance()["watchdog"]["gathers"] == 0


def test_the_counts_are_those_of_the_last_gather_and_the_cap_is_the_gates():
    engine = built()
    cap = harness.admission_cap(engine.scheduler)
    assert balance()["tells"] == {"cap": cap, "counts": [0, 0], "frozen": False}
    harness.set_counts(engine.scheduler, [cap - 1, cap - 2])
    assert balance()["tells"] == {"cap": cap, "counts": [cap - 1, cap - 2], "frozen": False}
    harness.set_counts(engine.scheduler, [1, cap])
    assert balance()["tells"] == {"cap": cap, "counts": [1, cap], "frozen": True}


def test_of_another_group_nothing_has_been_counted_and_asking_changes_nothing():
    engine = built()
    harness.set_counts(engine.scheduler, [1, 2])
    engine.scheduler._balance_group = engine.dp_group
    assert balance()["tells"]["counts"] == [1, 2]
    engine.dp_group = SimpleNamespace(size=lambda: 4)
    assert balance()["tells"] == {"cap": harness.admission_cap(engine.scheduler), "counts": [], "frozen": False}
    assert told()[1]["ranks"] == 4
    assert [int(count) for count in engine.scheduler._balance_counts] == [1, 2]


def test_requests_are_those_of_the_scheduler():
    engine = built()
    for number in range(3):
        engine.scheduler.add_request(harness.new_request(f"r{number}", 10, 50))
    assert (told()[1]["running"], told()[1]["waiting"]) == (0, 3)
    engine.scheduler.schedule()
    running = len(engine.scheduler.running)
    assert running > 0
    assert (told()[1]["running"], told()[1]["waiting"]) == (running, 3 - running)


def test_several_engines_of_a_process_are_all_told_and_one_that_is_gone_is_not():
    first, second = built(), built()
    second.dp_rank = 0
    assert [one["rank"] for one in told()[0]["engines"]] == [1, 0]
    del first
    gc.collect()
    assert [one["rank"] for one in told()[0]["engines"]] == [0]


@pytest.mark.parametrize("why", ["not asked for", "switched off", "its engine is gone"])
def test_nobody_answers(why, monkeypatch):
    if why == "switched off":
        monkeypatch.setenv(answering.VARIABLE, "off")
    engine = built(ON if why != "not asked for" else None)
    if why == "its engine is gone":
        assert inquire(os.getpid()).answers
        del engine
        gc.collect()
    with pytest.raises(PatchError, match="BP751"):
        inquire(os.getpid())


def test_an_engine_in_which_it_does_not_run_is_refused_and_does_not_answer():
    config = harness.vllm_config(SHAPE, ON)
    engine = harness.Loop()
    decision.decide(engine, config)
    engine.scheduler = harness.new_scheduler(harness.upstream_scheduler(), SHAPE, config)
    with pytest.raises(PatchError, match="BP702"):
        readback.confirm(engine, config)
    with pytest.raises(PatchError, match="BP751"):
        inquire(os.getpid())


def test_a_bad_switch_stops_an_engine_that_asks_and_no_other(monkeypatch):
    monkeypatch.setenv(answering.VARIABLE, "maybe")
    assert built(None)
    with pytest.raises(PatchError, match="BP006"):
        built()
