"""The counter of the NPU check around a real scheduler and a real gather; the CPU stands in for the device."""

import time
from types import SimpleNamespace

import harness
import pytest
import torch
import torch.distributed as dist
from two_ranks import TIMEOUT, enabled

from balance_patcher.driven import Lines
from balance_patcher.npu import plugin
from balance_patcher.npu.counter import READ, WAIT, Counts, mode, passes, self_test, wrap_waits
from balance_patcher.npu.figures import Verdict, judge, seen

SHAPE = harness.Shape(seqs=4, ranks=1, tokens=256)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def unwrapped(monkeypatch):
    """What the counter wraps in torch is torch's own again afterwards."""
    for owner in (torch.cpu, torch.cpu.Stream, getattr(torch.cpu, "Event", torch.cpu.Stream)):
        if hasattr(owner, "synchronize"):
            monkeypatch.setattr(owner, "synchronize", owner.synchronize)


class Core:
    """As much of an engine core as a recorder looks at: its step is a schedule, and then the ranks agree."""

    dp_rank = 0

    def __init__(self, scheduler, group):
        self.scheduler, self.group = scheduler, group

    def _has_global_unfinished_reqs(self):
        if getattr(self.scheduler, "_balance_enabled", False):
            self.scheduler.balance_gather(self.group)
        return True

    def step(self):
        self.scheduler.schedule()
        self._has_global_unfinished_reqs()


@pytest.fixture
def run(tmp_path, monkeypatch, group, unwrapped):
    """What is seen of an engine core whose processes go through all phases; two ranks write the same."""

    def get(scheduler, name):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv(plugin.FOLDER, str(folder))
        monkeypatch.setenv(plugin.DEVICE, "cpu")
        monkeypatch.setattr(plugin, "INTERVAL", 0.0)
        core = Core(scheduler, group)
        plugin.Recorder(core)
        for phase in (plugin.COUNT, plugin.CONTROL, ""):
            (folder / plugin.PHASE).write_text(phase)
            for number in range(5):
                scheduler.add_request(harness.new_request(f"{phase}{number}", 8, 4))
                core.step()
                time.sleep(0.001)
        core.step()
        lines = Lines(folder / "rank-0.jsonl").new()
        return seen({"rank-0": lines, "rank-1": lines})

    return get


def test_the_gate_and_the_gather_read_no_tensor_and_the_control_does(run, balance_class):
    off = run(harness.new_scheduler(balance_class, SHAPE), "off")
    on = run(enabled(balance_class, SHAPE), "on")
    assert on.steps == off.steps == 10
    assert on.counts == off.counts == {}
    assert on.control > 0
    assert off.control == 0
    assert len(on.gathers) >= 4
    assert judge(off, on).verdict is Verdict.NONE_ADDED


def test_a_gate_that_reads_tensors_is_seen(run, balance_class):
    """The same counts as ordinary tensors, of which each read goes through torch."""
    off = run(harness.new_scheduler(balance_class, SHAPE), "off")
    scheduler = enabled(balance_class, SHAPE)
    gather = scheduler.balance_gather

    def gathering(dp_group):
        gather(dp_group)
        scheduler.balance_queue = [torch.tensor([count.item()], dtype=torch.int) for count in scheduler.balance_queue]

    scheduler.balance_gather = gathering
    scheduler.balance_queue = [torch.zeros(1, dtype=torch.int)]
    on = run(scheduler, "on")
    judged = judge(off, on)
    assert judged.verdict is Verdict.ADDED
    assert any("1.00 x scalar read a step in schedule, 0.00 with balance off" in reason for reason in judged.reasons)


class TestCounter:
    def test_it_tries_itself_and_sees_what_it_did(self, unwrapped):
        counts = Counts("cpu")
        assert "torch.cpu.synchronize" in wrap_waits(counts)
        found = self_test(counts)
        assert found == {READ: 1, WAIT: 1}
        assert passes(found, "cpu")
        assert not passes({READ: 1}, "cpu")
        assert not passes({READ: 1, WAIT: 1}, "npu")

    def test_a_second_counter_of_a_process_hears_the_same_waits(self, unwrapped):
        first, second = Counts("cpu"), Counts("cpu")
        assert wrap_waits(first) == wrap_waits(second)
        first.open = second.open = True
        torch.cpu.synchronize()
        assert first.taken() == second.taken() == {"": {WAIT: 1}}

    @pytest.mark.parametrize(
        ("work", "kinds"),
        [
            (lambda one: one.item(), {READ: 1}), (bool, {READ: 1}), (int, {READ: 1}),
            (lambda one: one.nonzero(), {READ: 1}), (lambda one: one + 1, {}), (lambda one: one.clone(), {}),
            (lambda one: torch.equal(one, one + 1), {READ: 1}), (torch.unique, {READ: 1}),
            (torch.unique_consecutive, {READ: 1}), (lambda one: torch.bincount(one.int()), {READ: 1}),
            (lambda one: one.masked_select(one > 0), {READ: 1}), (lambda one: one[one > 0], {READ: 1}),
            (lambda one: one.__setitem__(one > 0, torch.ones(1)), {READ: 1}),
            (lambda one: one[torch.tensor([0])], {}), (lambda one: one.__setitem__(torch.tensor([0]), 1), {}),
            (lambda one: one.repeat_interleave(one.long()), {READ: 1}),
            (lambda one: one.repeat_interleave(one.long(), output_size=1), {}),
            (lambda one: one.repeat_interleave(2), {}),
        ],
    )  # fmt: skip
    def test_reads_are_counted_and_work_is_not(self, work, kinds):
        counts = Counts("cpu")
        counts.open = True
        with mode(counts):
            work(torch.ones(1))
        assert counts.taken() == ({"": kinds} if kinds else {})

    def test_another_devices_memory_is_not_counted_and_neither_is_anything_while_it_is_shut(self):
        counts = Counts("npu")
        counts.open = True
        with mode(counts):
            torch.ones(1).item()
        assert counts.taken() == {}
        shut = Counts("cpu")
        with mode(shut):
            torch.ones(1).item()
        assert shut.taken() == {}

    def test_a_copy_to_the_cpu_is_counted_when_it_blocks(self):
        """Of tensors of a device that is not here, by what a copy is asked to do."""
        counts = Counts("npu")
        counts.open = True
        there, cpu = SimpleNamespace(device=SimpleNamespace(type="npu")), torch.device("cpu")
        counts.add("copy to the CPU", there, cpu)
        counts.add("copy to the CPU", there, SimpleNamespace(type="npu"))
        counts.add("copy to the CPU", torch.ones(1), cpu)
        counts.add("copy to the CPU", there, None)
        assert counts.taken() == {"": {"copy to the CPU": 1}}

    def test_a_place_within_a_place_is_its_own(self):
        counts = Counts("cpu")
        counts.open = True
        read = counts.at("gather", lambda: counts.add(READ))
        counts.at("agree", lambda: (counts.add(READ), read(), counts.add(READ)))()
        assert counts.taken() == {"agree": {READ: 2}, "gather": {READ: 1}}
        assert counts.place == ""
