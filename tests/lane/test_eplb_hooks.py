"""The hooks of the expert-parallel load balancer: upstream's placements to the number, and a device's own classes.

Two ranks that really talk over gloo, and the asynchronous worker's own loop; only the device's streams and events are
stand-ins (``eplb_world``).
"""

import copy
import dataclasses
import inspect
import multiprocessing
import os
import socket
import threading
from types import SimpleNamespace

import eplb_world as world
import pytest
import torch
import vllm.distributed.eplb.policy as policies
from vllm.config.parallel import EPLBConfig
from vllm.distributed.eplb import async_worker, eplb_state

import balance_patcher
from balance_patcher.deltas.eplb_hooks import adapted
from balance_patcher.errors import PatchError

SEEDS = 100
NAMES = {"create_policy", "adapted_policy", "model_state_cls", "commit_eplb_maps", "move_to_workspace"}


@pytest.fixture
def hooked(monkeypatch):
    """The hooks in this process, and a state that needs no group to get a model."""
    monkeypatch.setattr(eplb_state, "create_eplb_communicator", lambda **_: None)
    monkeypatch.setattr(eplb_state, "get_eplb_group", lambda: None)
    with world.device() as device:
        balance_patcher.install("eplb_hooks")
        yield device
        balance_patcher.uninstall("eplb_hooks")


def attributes():
    owners = (eplb_state.EplbState, eplb_state.EplbModelState, eplb_state, async_worker, policies)
    return [dict(vars(owner)) for owner in owners]


# -- two ranks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    """What each of two ranks found; rank 0 is this process."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["VLLM_DIST_IDENT"] = str(port)  # by which the ranks of a CPU know each other, as its worker sets it
    ours, theirs = context.Pipe()
    process = context.Process(target=world.other_rank, args=(port, theirs, SEEDS), daemon=True)
    process.start()
    # Ranks that wait for each other hear no signal: without the other one, this one gets an error.
    patience = threading.Timer(240, process.kill)
    patience.start()
    try:
        theirs.close()
        assert ours.poll(120), "the other rank did not start"
        assert ours.recv() == "ready"
        found = world.run_rank(0, 2, port, SEEDS)
        assert ours.poll(60), "the other rank did not finish"
        other = ours.recv()
    finally:
        patience.cancel()
        del os.environ["VLLM_DIST_IDENT"]
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    return found, other


def test_a_hundred_seeded_placements_equal_upstreams(ranks):
    for found in ranks:
        assert len(found["upstream"]) == SEEDS
        assert found["hooked"] == found["upstream"]
    assert ranks[0]["hooked"] == ranks[1]["hooked"]
    assert len({str(maps) for maps, _ in ranks[0]["hooked"]}) == SEEDS  # no two are equal: the loads matter


def test_the_weights_go_where_the_maps_say(ranks):
    for found in ranks:
        assert all(followed for _, followed in found["upstream"] + found["hooked"])


def test_the_asynchronous_worker_comes_to_the_same_placement(ranks):
    for found in ranks:
        maps, followed = found["hooked async"]
        assert followed
        assert (maps, followed) == found["upstream async"]
        assert maps == found["upstream"][0][0]


def test_a_devices_policy_decides_on_all_three_paths(ranks):
    for found in ranks:
        own = found["own"]
        assert own["profiling changes nothing"]
        assert own["the maps are the policy's"] == [True, True]
        assert own["the weights followed"] == [True, True]


def test_the_load_is_passed_once_and_on_the_cpu_on_all_three_paths(ranks):
    shape, facts = (world.LAYERS, world.EXPERTS), (world.Model.num_physical_experts, 1, 1, 2)
    for found in ranks:
        profiling, synchronous, asynchronous = found["own"]["seen"]
        assert profiling == synchronous == (("cpu", "cpu"), shape, facts, "MainThread")
        assert asynchronous == (("cpu", "cpu"), shape, facts, "async worker")
        assert found["own"]["the worker's object is the state's"]


def test_a_devices_model_state_commits_and_moves(ranks):
    for rank, found in enumerate(ranks):
        synchronous, asynchronous = found["own"]["done"]
        assert synchronous == ["commit"]  # profiling commits nothing
        assert asynchronous == [f"move {layer} on {rank}" for layer in range(world.LAYERS)]


# -- the policy ------------------------------------------------------------------------------


def test_the_policy_is_one_instance_and_a_model_leaves_it_alone(hooked):
    state = eplb_state.EplbState(world.config(), torch.device("cpu"))
    policy = state.policy
    assert type(state.create_policy()) is policies.DefaultEplbPolicy
    for name in ("main", "drafter"):
        state.add_model(world.Model(), SimpleNamespace(model=name, compute_hash=lambda name=name: name))
    assert state.policy is policy
    assert len(state.model_states) == 2


def test_the_configurations_name_chooses_among_vllms_policies(hooked, monkeypatch):
    class Other(policies.DefaultEplbPolicy):
        pass

    monkeypatch.setitem(eplb_state.EPLB_POLICIES, "default", Other)
    assert type(world.new_state().create_policy()) is Other


def test_a_hundred_plans_of_an_adapted_policy_equal_the_policys_own(hooked):
    made = torch.Generator().manual_seed(5)
    planned = set()
    for seed in range(SEEDS):
        nodes, gpus = [(1, 4), (2, 4), (2, 8), (4, 8)][seed % 4]
        groups = [1, 4, 8][seed % 3]
        replicas, experts, layers = 32 + 8 * (seed % 3), 32, 1 + seed % 4
        load = torch.randint(0, 1000, (layers, experts), generator=made) ** 2
        old = torch.stack([torch.randperm(replicas, generator=made) % experts for _ in range(layers)])
        stats = eplb_state.EplbStats(load.clone(), replicas, groups, nodes, gpus)
        theirs = policies.DefaultEplbPolicy.rebalance_experts(load, replicas, groups, nodes, gpus, old)
        assert torch.equal(adapted(policies.DefaultEplbPolicy()).rebalance_experts(stats, old), theirs)
        planned.add(str(theirs.tolist()))
    assert len(planned) == SEEDS


def test_who_calls_the_policy_with_six_values_gets_through(hooked):
    """A subclass of the state may have a `rearrange` of its own, written for upstream."""
    load, old = torch.ones(1, 8), torch.arange(8)[None]
    policy = world.new_state().policy
    theirs = policies.DefaultEplbPolicy.rebalance_experts(load, 8, 1, 1, 1, old)
    assert torch.equal(policy.rebalance_experts(load, 8, 1, 1, 1, old), theirs)
    assert torch.equal(policy.rebalance_experts(load, 8, 1, 1, 1, old_global_expert_indices=old), theirs)
    assert policy.replicate_experts == policies.DefaultEplbPolicy.replicate_experts
    assert copy.copy(policy).policy is policy.policy


def test_a_policy_with_the_two_values_is_called_itself():
    class Own:
        def rebalance_experts(self, eplb_stats, physical_to_logical_map):
            pass

    own = Own()
    assert adapted(own) is own


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (policies.DefaultEplbPolicy, "is a class"),
        (object(), "has no attribute 'rebalance_experts'"),
        (SimpleNamespace(rebalance_experts=3), "not a callable"),
        (SimpleNamespace(rebalance_experts=lambda one: one), "neither two values nor upstream's six"),
    ],
    ids=["a class", "no method", "not callable", "another signature"],
)
def test_what_is_no_policy_stops_the_state_with_the_reason(policy, why, hooked):
    class State(eplb_state.EplbState):
        def create_policy(self):
            return policy

    with pytest.raises(PatchError, match="BP120") as caught:
        State(world.config(), torch.device("cpu"))
    assert why in str(caught.value)


# -- the asynchronous planning function ------------------------------------------------------


class Load:
    """A load on a device: it can be copied from there, and says in which stream that was."""

    def __init__(self, values, device):
        self.values, self.device_, self.within = values, device, []

    def cpu(self):
        self.within.append(self.device_.current)
        return self.values


def planning(device, stats, policy):
    """The asynchronous worker's planning function, called as the worker calls it; the stream that it was given."""
    stream = world.Stream()
    old = torch.arange(12)[None] % 8
    state, model_state = SimpleNamespace(policy=policy), SimpleNamespace(eplb_stats=stats)
    return async_worker.run_rebalance_experts(model_state, state, old, stream), stream, old


def test_the_worker_copies_the_load_within_its_own_stream_once(hooked):
    values = torch.randint(0, 100, (1, 8), generator=torch.Generator().manual_seed(3))
    load = Load(values, hooked)
    stats = eplb_state.EplbStats(load, 12, 1, 1, 2)
    found, stream, old = planning(hooked, stats, adapted(policies.DefaultEplbPolicy()))
    assert load.within == [stream]
    assert hooked.current is hooked.default
    assert torch.equal(found, policies.DefaultEplbPolicy.rebalance_experts(values, 12, 1, 1, 2, old))


def test_the_policy_gets_the_devices_own_stats_object(hooked):
    @dataclasses.dataclass
    class OwnStats(eplb_state.EplbStats):
        temperature: float = 0.0

    got = []

    class Own:
        def rebalance_experts(self, eplb_stats, physical_to_logical_map):
            got.append((eplb_stats, eplb_stats.global_expert_load_window))
            return physical_to_logical_map

    values = torch.ones(1, 8)
    stats = OwnStats(Load(values, hooked), 12, 1, 1, 2, temperature=40.0)
    planning(hooked, stats, Own())
    ((seen, load),) = got
    assert seen is stats
    assert load is values
    assert seen.temperature == 40.0


def test_what_is_not_on_the_cpu_is_still_refused(hooked):
    class Own:
        def rebalance_experts(self, eplb_stats, physical_to_logical_map):
            return physical_to_logical_map.to("meta")

    with pytest.raises(AssertionError):
        planning(hooked, eplb_state.EplbStats(torch.ones(1, 8), 12, 1, 1, 2), Own())


# -- the state of a model --------------------------------------------------------------------


def test_a_function_that_somebody_wraps_by_name_is_called_wrapped(hooked, monkeypatch):
    """vllm-ascend wraps `_move_to_workspace` in its module, before or after the hooks are there."""
    model_state, called = world.only(world.new_state()), []
    for name in ("_move_to_workspace", "_commit_eplb_maps"):
        monkeypatch.setattr(eplb_state, name, lambda *args, name=name, **named: called.append((name, args, named)))
    maps = model_state.physical_to_logical_map.clone()
    model_state.move_to_workspace(3)
    model_state.commit_eplb_maps(maps)
    assert called == [
        ("_move_to_workspace", (), {"model_state": model_state, "ep_rank": 3}),
        ("_commit_eplb_maps", (model_state,), {"new_physical_to_logical_map": maps}),
    ]


def test_a_wrapper_that_was_there_before_does_not_keep_the_hooks_out(monkeypatch):
    theirs = eplb_state._move_to_workspace

    def wrapper(**named):
        return theirs(**named)

    monkeypatch.setattr(eplb_state, "_move_to_workspace", wrapper)
    balance_patcher.install("eplb_hooks")
    balance_patcher.uninstall("eplb_hooks")


def test_a_state_is_of_the_class_that_the_device_chose(hooked):
    classes = world.own_classes()
    state = world.new_state(classes.State)
    assert type(world.only(state)) is classes.ModelState
    assert type(world.only(world.new_state())) is eplb_state.EplbModelState


def test_a_state_that_joins_is_made_of_the_class_that_it_is_called_on(hooked):
    classes = world.own_classes()
    model, model_config = world.Model(), SimpleNamespace(model="toy", compute_hash=lambda: "toy")
    slots = torch.arange(model.num_physical_experts).repeat(world.LAYERS, 1) % world.EXPERTS
    named = {
        "model": model,
        "model_config": model_config,
        "device": torch.device("cpu"),
        "parallel_config": world.config(),
        "expanded_physical_to_logical": slots,
        "num_valid_physical_experts": 12,
    }
    taken = inspect.signature(classes.State.from_mapping).parameters
    state = classes.State.from_mapping(**{name: value for name, value in named.items() if name in taken})
    assert type(state) is classes.State
    assert type(state.policy) is classes.Policy
    assert type(world.only(state)) is classes.ModelState


def test_the_stats_are_imported_from_both_places(hooked):
    from vllm.distributed.eplb.eplb_state import EplbStats as Old
    from vllm.distributed.eplb.policy import EplbStats as New

    assert New is Old


# -- what stays ------------------------------------------------------------------------------


def outcomes():
    """What vLLM says of each combination of worker, communicator and policy."""
    found = {}
    for asynchronous in (False, True):
        for communicator in (None, "torch_gloo", "torch_nccl", "pynccl"):
            for policy in ("default", "own"):
                said = "accepted"
                try:
                    EPLBConfig(use_async=asynchronous, communicator=communicator, policy=policy)
                except ValueError as error:
                    said = str(error)
                found[asynchronous, communicator, policy] = said
    return found


def test_what_vllm_refuses_of_a_configuration_is_refused_as_before():
    before, validators = outcomes(), dict(vars(EPLBConfig))
    balance_patcher.install("eplb_hooks")
    try:
        assert outcomes() == before
        assert dict(vars(EPLBConfig)) == validators
    finally:
        balance_patcher.uninstall("eplb_hooks")
    assert all(said != "accepted" for (_, _, policy), said in before.items() if policy == "own")
    assert before[True, "torch_gloo", "default"] == "accepted"


def test_uninstalled_every_attribute_is_the_identical_object():
    before = attributes()
    balance_patcher.install("eplb_hooks")
    changed = {
        name for was, now in zip(before, attributes(), strict=True) for name in now if now[name] is not was.get(name)
    }
    assert changed == NAMES | {"__init__", "add_model", "rearrange", "step", "run_rebalance_experts", "EplbStats"}
    balance_patcher.uninstall("eplb_hooks")
    for was, now in zip(before, attributes(), strict=True):
        assert was.keys() == now.keys()
        assert all(now[name] is was[name] for name in was)


def test_a_name_that_somebody_has_put_there_first_keeps_the_hooks_out(monkeypatch):
    before = attributes()
    monkeypatch.setattr(eplb_state.EplbState, "create_policy", lambda self: None, raising=False)
    with pytest.raises(PatchError, match=r"BP301.*'create_policy'.*is there already.*test_eplb_hooks"):
        balance_patcher.install("eplb_hooks")
    monkeypatch.undo()
    assert attributes() == before


def test_a_hook_that_somebody_overwrites_is_noticed(monkeypatch):
    installation = balance_patcher.install("eplb_hooks")
    ours = vars(eplb_state.EplbModelState)["commit_eplb_maps"]
    eplb_state.EplbModelState.commit_eplb_maps = lambda self, maps: None
    with pytest.raises(PatchError, match=r"BP606.*EplbModelState\.commit_eplb_maps"):
        balance_patcher.uninstall("eplb_hooks")
    eplb_state.EplbModelState.commit_eplb_maps = ours
    assert installation.bindings
    balance_patcher.uninstall("eplb_hooks")


def test_the_text_of_a_hook_can_be_seen(hooked):
    assert "_move_to_workspace(model_state=self, ep_rank=ep_rank)" in inspect.getsource(
        eplb_state.EplbModelState.move_to_workspace
    )
    state = eplb_state.EplbState
    assert state.create_policy.__qualname__ == "EplbState.create_policy"
    assert state.create_policy.__module__ == eplb_state.__name__
    (feature,) = [feature for feature in balance_patcher.status().features if feature.name == "eplb_hooks"]
    places = {binding.place: binding for binding in feature.bindings}
    binding = places[f"{eplb_state.__name__}:EplbModelState.move_to_workspace"]
    assert binding.before.name == "nothing"
    assert binding.state == "ours"
