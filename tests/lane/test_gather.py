"""The gather: one collective on the group it is given, with what upstream's stop counts."""

import copy
import multiprocessing
import pickle
import socket
from types import SimpleNamespace

import harness
import pytest
import torch
import torch.distributed as dist
from harness import Shape
from two_ranks import TIMEOUT, enabled, gathered, other_rank


class Recorder:
    """Stands in for ``torch.distributed.all_gather`` with the calls it got, and calls it if it may."""

    def __init__(self, genuine=None):
        self.genuine = genuine
        self.calls = []

    def __call__(self, outputs, payload, group=None, **keywords):
        self.calls.append((outputs, payload.clone(), group))
        if self.genuine is not None:
            return self.genuine(outputs, payload, group=group, **keywords)
        return None


@pytest.fixture
def single_process_group():
    """A real gloo group with this process alone in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("running", [0, 1, 3])
def test_one_collective_with_the_count_on_the_group_given(running, balance_class, single_process_group, monkeypatch):
    scheduler = enabled(balance_class, running=running)
    recorder = Recorder(dist.all_gather)
    monkeypatch.setattr(dist, "all_gather", recorder)
    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_object", "barrier", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *a, **k: pytest.fail("another collective was called"))
    scheduler.balance_gather(single_process_group)
    ((_, payload, group),) = recorder.calls
    assert payload.tolist() == [running] == [harness.admission_count(scheduler)]
    assert group is single_process_group


def test_the_queue_has_the_size_of_the_group_after_a_gather(balance_class, single_process_group):
    """Elastic expert parallelism replaces the group at run time, with another number of ranks."""
    scheduler = enabled(balance_class, Shape(seqs=4, ranks=3, tokens=256), running=2)
    assert len(scheduler.balance_queue) == 3
    scheduler.balance_gather(single_process_group)
    assert [tensor.tolist() for tensor in scheduler.balance_queue] == [[2]]


def test_every_gather_sends_the_count_of_its_moment(balance_class, single_process_group):
    from vllm.v1.request import RequestStatus

    scheduler = enabled(balance_class, running=3)
    seen = []
    for name in ("r0", "r1", "r2", None):
        scheduler.balance_gather(single_process_group)
        seen.append(scheduler.balance_queue[0].item())
        if name:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    assert seen == [3, 2, 1, 0]


def test_the_payload_counts_paused_sessions_where_upstreams_stop_does(balance_class, single_process_group):
    scheduler = enabled(balance_class, running=1)
    scheduler.num_waiting_for_streaming_input = 2
    scheduler.balance_gather(single_process_group)
    assert scheduler.balance_queue[0].item() == (3 if harness.counts_paused_sessions() else 1)


def test_after_a_gather_that_fails_every_count_is_zero(balance_class, single_process_group, monkeypatch):
    """What was true before the ranks lost each other freezes nobody after it."""

    def fail(*args, **keywords):
        raise RuntimeError("connection closed by peer")

    scheduler = enabled(balance_class, running=1)
    scheduler.balance_gather(single_process_group)
    scheduler.balance_queue[0].fill_(4)
    monkeypatch.setattr(dist, "all_gather", fail)
    with pytest.raises(RuntimeError, match="connection closed"):
        scheduler.balance_gather(single_process_group)
    assert {tensor.item() for tensor in scheduler.balance_queue} == {0}


def test_who_looks_during_the_first_gather_on_another_group_takes_nothing_away(
    balance_class, single_process_group, monkeypatch
):
    """A new queue is put in place for a new group, where somebody looks: not while the counts of it are coming."""
    scheduler = enabled(balance_class, running=2)
    engine = SimpleNamespace(dp_group=single_process_group)
    scheduler._balance_engine, scheduler._balance_group = (lambda: engine), object()
    genuine = dist.all_gather

    def looked_at(outputs, payload, group):
        assert payload.item() == 2
        before = scheduler.balance_queue
        genuine(outputs, payload, group=group)
        assert before is scheduler.balance_queue is outputs

    monkeypatch.setattr(dist, "all_gather", looked_at)
    scheduler.balance_gather(single_process_group)
    assert [count.item() for count in scheduler.balance_queue] == [2]


def test_the_group_may_be_an_attribute_as_on_vllm_ascends_main(balance_class, single_process_group):
    scheduler = enabled(balance_class, running=2)
    scheduler.dp_group = single_process_group
    scheduler.balance_gather()
    assert scheduler.balance_queue[0].item() == 2


def test_a_queue_set_from_outside_is_gathered_where_balance_was_off(balance_class, single_process_group):
    scheduler = harness.new_scheduler(balance_class, harness.Shape())
    scheduler._balance_enabled = True
    scheduler.balance_queue = [torch.full((1,), 4, dtype=torch.int)]
    scheduler.balance_gather(single_process_group)
    assert [(type(count), count.item()) for count in scheduler.balance_queue] == [(torch.Tensor, 0)]


def test_without_a_group_an_enabled_gather_says_so(balance_class):
    with pytest.raises(ValueError, match="dp_group"):
        enabled(balance_class).balance_gather()


def test_a_scheduler_that_was_installed_by_hand_lets_its_group_be_scaled(balance_class, single_process_group):
    """Its ranks have not agreed on anything, so there is nothing that a new one has to fit."""
    scheduler = enabled(balance_class)
    request = SimpleNamespace(new_data_parallel_master_ip="127.0.0.1", new_data_parallel_size=2, coord_store_port=1)
    scheduler.balance_scales(SimpleNamespace(dp_group=single_process_group), request)
    assert scheduler.balance_fits()
    assert not scheduler.balance_gives_up()


def test_schedule_runs_no_collective(balance_class, monkeypatch):
    """A drained rank never calls ``schedule``, so a collective in it hangs the others."""
    scheduler = enabled(balance_class, running=1)
    recorder = Recorder()
    monkeypatch.setattr(dist, "all_gather", recorder)
    scheduler.add_request(harness.new_request("late", 10, 5))
    scheduler.schedule()
    assert recorder.calls == []


# -- two processes ------------------------------------------------------------------------------


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.timeout(400)
def test_two_processes_see_both_counts(balance_class, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    pipe, theirs = context.Pipe(duplex=False)
    other = context.Process(target=other_rank, args=(1, port, theirs), daemon=True)
    other.start()
    theirs.close()
    try:
        scheduler = enabled(balance_class, running=3)
        # The other rank imports vLLM first. Only then do the ranks meet, each for TIMEOUT at most.
        assert pipe.poll(300), "rank 1 never was ready"
        assert pipe.recv() == "ready"
        assert gathered(scheduler, 0, port) == [[3], [1]]
        assert pipe.poll(60), "rank 1 sent nothing"
        assert pipe.recv() == [[3], [1]]
        other.join(60)
        assert other.exitcode == 0
    finally:
        if other.is_alive():
            other.kill()
        other.join()


class TestCounts:
    """What the gate reads is what any tensor operation wrote, at a price that does not grow with torch's."""

    def test_each_is_a_tensor_and_reads_what_was_written_to_it(self, balance_class):
        scheduler = enabled(balance_class, Shape(seqs=4, ranks=3, tokens=256))
        queue = scheduler.balance_queue
        queue[0].fill_(7)
        queue[1].copy_(torch.tensor([5], dtype=torch.int))
        queue[2] += 2
        assert [count.item() for count in queue] == [int(count) for count in queue] == [7, 5, 2]
        assert torch.cat(queue).tolist() == [7, 5, 2]
        assert {(count.dtype, tuple(count.shape), count.device.type) for count in queue} == {(torch.int, (1,), "cpu")}

    def test_copies_are_plain_tensors_and_stand_alone(self, balance_class):
        queue = enabled(balance_class).balance_queue
        taken = [queue[0].clone(), copy.deepcopy(queue[0])]
        taken += [copy.copy(queue[0]), *pickle.loads(pickle.dumps(queue))]  # noqa: S301 - our own
        queue[0].fill_(3)
        assert {type(one) for one in taken} == {torch.Tensor}
        assert [one.item() for one in taken] == [0] * len(taken)

    def test_the_gate_does_not_go_through_torch(self, balance_class):
        """So it cannot wait for a device; an ordinary tensor in its place shows that a read would be seen."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Seen(TorchDispatchMode):
            reads = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                self.reads += function is torch.ops.aten._local_scalar_dense.default
                return function(*args, **(kwargs or {}))

        scheduler = enabled(balance_class, running=1)
        with Seen() as seen:
            scheduler.schedule()
            assert seen.reads == 0
            scheduler.balance_queue = [torch.zeros(1, dtype=torch.int) for _ in range(2)]
            scheduler.add_request(harness.new_request("late", 10, 5))
            scheduler.schedule()
        assert seen.reads == 2
