"""A feature that this lane leaves nothing to do: asked for it is off, with the reason, and nothing is bound for it."""

import logging

import harness
import pytest

from balance_patcher import decision, installation
from balance_patcher.build import build
from balance_patcher.errors import PatchError
from balance_patcher.registry import find_feature

RETRY = "defer_preemption"
KEY = "defer_aware_preemption"


def why():
    """What is known of the lane, read from upstream's own class."""
    if hasattr(harness.upstream_scheduler(), "_request_blocks_can_be_freed"):
        return "upstream looks at the victim first, from 0.30"
    return "upstream returns blocks at once, until 0.23"


@pytest.fixture(autouse=True)
def nothing_is_left():
    from vllm.v1.core.sched import scheduler

    before = scheduler.Scheduler, harness.async_scheduler().__bases__
    yield
    for name in ("balance", RETRY):
        installation.uninstall(name)
    assert (scheduler.Scheduler, harness.async_scheduler().__bases__) == before


def decided(**asked):
    config = harness.vllm_config(harness.Shape(), asked)
    return config, {one.feature: one for one in decision.decide(harness.Loop(), config)}


def test_an_engine_that_asks_for_it_runs_as_upstream_and_is_told_why(caplog):
    with caplog.at_level(logging.INFO, "vllm.balance_patcher"):
        config, made = decided(**{KEY: True})
    assert (made[RETRY].active, made[RETRY].failures) == (False, ())
    assert made[RETRY].reason == f"{RETRY}: OFF because {why()}"
    assert made[RETRY].source == f"additional_config.{KEY}"
    assert f"{RETRY}: {why()}; the engine runs as upstream's" in caplog.messages
    assert installation.bound(RETRY) is None
    subject = harness.new_scheduler(harness.upstream_scheduler(), harness.Shape(), config)
    assert not hasattr(subject, "_defer_preemption")


def test_what_it_is_asked_for_together_with_goes_on_without_it():
    _, made = decided(**{KEY: True, "enable_balance_scheduling": True})
    assert (made["balance"].active, made[RETRY].active) == (True, False)
    assert installation.installed("balance").feature is find_feature("balance")


def test_nobody_is_warned_of_it_who_does_not_ask(caplog):
    with caplog.at_level(logging.WARNING, "vllm.balance_patcher"):
        _, made = decided()
    assert made[RETRY].reason == f"{RETRY}: OFF because the configuration does not ask for it"
    assert [record for record in caplog.records if record.name == "vllm.balance_patcher"] == []


def test_by_hand_it_is_refused_with_the_reason():
    with pytest.raises(PatchError) as caught:
        build(RETRY)
    (failure,) = caught.value.failures
    assert failure.code == "BP126"
    assert why() in failure.what
