"""Disabled, the class is upstream's scheduler: same decisions, no queue, no collective."""

import harness
import pytest
import torch
import traces

SEEDS = range(1000, 1060)


def off(shape):
    return harness.vllm_config(shape, {"enable_balance_scheduling": False})


@pytest.mark.parametrize("seed", SEEDS)
def test_disabled_decides_like_upstream_step_by_step(seed, balance_class, balance_async_class):
    trace = traces.trace(seed)
    shape = trace.shape
    ours = balance_async_class if shape.asynchronous else balance_class
    theirs = harness.async_scheduler() if shape.asynchronous else harness.upstream_scheduler()
    config = off(shape)
    worlds = [
        traces.World(harness.new_scheduler(class_, shape, config), trace, traces.ignore_counts)
        for class_ in (ours, theirs)
    ]
    assert (found := traces.compare(trace, *worlds)) is None, found


@pytest.mark.parametrize(
    "additional",
    [
        {},
        {"enable_balance_scheduling": False},
        {"scheduler_config": {"enable_balance_scheduling": False}},
        {"scheduler_config": {}},
        {"something_else": True},
    ],
    ids=repr,
)
def test_nothing_is_allocated_unless_enabled(additional, balance_class):
    shape = harness.Shape()
    scheduler = harness.new_scheduler(balance_class, shape, harness.vllm_config(shape, additional))
    assert scheduler._balance_enabled is False
    assert not hasattr(scheduler, "balance_queue")


def test_disabled_gather_runs_no_collective(balance_class, monkeypatch):
    def refuse(*args, **keywords):
        raise AssertionError("a collective was called while disabled")

    for name in ("all_gather", "all_reduce", "all_gather_into_tensor", "all_gather_object", "barrier"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    scheduler = harness.new_scheduler(balance_class, harness.Shape())
    scheduler.balance_gather(object())
    assert not hasattr(scheduler, "balance_queue")


@pytest.mark.parametrize(
    "additional",
    [{"enable_balance_scheduling": True}, {"scheduler_config": {"enable_balance_scheduling": True}}],
    ids=["top-level", "nested"],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_enabled_has_one_zero_count_per_rank(additional, ranks, balance_class):
    shape = harness.Shape(ranks=ranks)
    scheduler = harness.new_scheduler(balance_class, shape, harness.vllm_config(shape, additional))
    assert scheduler._balance_enabled is True
    assert [tensor.tolist() for tensor in scheduler.balance_queue] == [[0]] * ranks
    assert {(tensor.device.type, tensor.is_floating_point()) for tensor in scheduler.balance_queue} == {("cpu", False)}
    assert len({tensor.data_ptr() for tensor in scheduler.balance_queue}) == ranks
