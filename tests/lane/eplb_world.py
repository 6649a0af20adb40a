"""EPLB without a device: a model of plain tensors, a stand-in for the device's streams, and ranks that talk over gloo.

A module apart, so that a spawned process imports it by a plain name under every import mode. All but the streams
and their events is vLLM's own: groups, communicator, state, policy and worker.
"""

import contextlib
import dataclasses
import inspect
import threading
import time
from types import SimpleNamespace

import torch
from vllm.config.parallel import EPLBConfig
from vllm.distributed.eplb import async_worker, eplb_state

import balance_patcher

LAYERS, EXPERTS, REDUNDANT, HIDDEN = 3, 8, 4, 5


# -- the device ------------------------------------------------------------------------------


class Stream:
    """The one thing that there is none of on a CPU."""

    def __init__(self):
        self.entered = 0

    def synchronize(self):
        pass

    wait_stream = wait_event = record_event = synchronize


class Event:
    """What is recorded on a CPU has happened."""

    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    wait = synchronize = record

    def elapsed_time(self, _):
        return 0.0


class Device:
    """Stands in for the streams of ``torch.cuda`` (to 0.30) and ``torch.accelerator``, by thread."""

    def __init__(self):
        self._of = threading.local()
        self.default = Stream()

    @property
    def current(self):
        return getattr(self._of, "stream", self.default)

    def set(self, stream):
        self._of.stream = stream
        stream.entered += 1

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current
        self.set(stream or before)
        try:
            yield
        finally:
            self.set(before)


@contextlib.contextmanager
def device():
    """The stand-in, in torch's place until the end."""
    made = Device()
    ours = {
        torch.cuda: {"stream": made.stream, "current_stream": lambda *_: made.current, "Event": Event},
        torch.accelerator: {"current_stream": lambda *_: made.current, "set_stream": made.set},
        torch: {"Event": Event},
    }
    before = [(module, name, getattr(module, name)) for module, names in ours.items() for name in names]
    try:
        for module, names in ours.items():
            for name, value in names.items():
                setattr(module, name, value)
        yield made
    finally:
        for module, name, value in before:
            setattr(module, name, value)


# -- the model -------------------------------------------------------------------------------


class Model:
    """A mixture of experts whose weights say which expert they are: ``1000 * layer + expert``."""

    num_moe_layers = LAYERS
    num_routed_experts = num_logical_experts = EXPERTS
    num_redundant_experts = REDUNDANT
    num_physical_experts = EXPERTS + REDUNDANT
    num_expert_groups = 1
    moe_layers = ()

    def __init__(self, rank=0, ranks=1):
        local = self.num_physical_experts // ranks
        self.num_local_physical_experts = local
        slots = [slot % EXPERTS for slot in range(self.num_physical_experts)][rank * local : (rank + 1) * local]
        self.expert_weights = [
            [torch.tensor([[1000.0 * layer + expert] * HIDDEN for expert in slots])] for layer in range(LAYERS)
        ]

    def set_eplb_state(self, *_):
        pass


def config(**changed):
    """As much of a ``ParallelConfig`` as a state reads; its EPLB part is vLLM's own."""
    settings = {"window_size": 4, "step_interval": 8, "communicator": "torch_gloo", "num_redundant_experts": REDUNDANT}
    return SimpleNamespace(
        eplb_config=EPLBConfig(**{**settings, "use_async": False, **changed}),
        num_ubatches=0,
        enable_elastic_ep=False,
        enable_eplb=True,
    )


def new_state(class_=None, rank=0, ranks=1, **changed):
    """A state with one model in it."""
    state = (class_ or eplb_state.EplbState)(config(**changed), torch.device("cpu"))
    state.add_model(Model(rank, ranks), SimpleNamespace(model="toy", compute_hash=lambda: "toy"))
    return state


def only(state):
    (model_state,) = state.model_states.values()
    return model_state


def give_load(state, seed, rank):
    """Each rank has seen another load; some experts are much hotter than others."""
    made = torch.Generator().manual_seed(1000 * seed + rank)
    window = only(state).expert_load_window
    hot = torch.rand(window.shape, generator=made) ** 4
    window.copy_((hot * 1000).to(window.dtype))


def right(state, rank, ranks):
    """Whether each slot of this rank holds the expert that the map says."""
    model_state = only(state)
    local = Model.num_physical_experts // ranks
    maps = model_state.physical_to_logical_map[:, rank * local : (rank + 1) * local]
    weights = torch.stack([layer[0][:, 0] for layer in model_state.model.expert_weights])
    return torch.equal(weights, 1000.0 * torch.arange(LAYERS)[:, None] + maps)


def maps_of(state):
    """All three maps of the model, as lists."""
    model_state = only(state)
    names = ("physical_to_logical_map", "logical_replica_count")
    slots = model_state.logical_to_physical_map[..., : REDUNDANT + 1]
    return [*(getattr(model_state, name).tolist() for name in names), slots.tolist()]


# -- a device's own state --------------------------------------------------------------------


def own_classes():
    """What a device outside of vLLM would write: a policy, and the classes of its states. Made once it is installed."""
    from vllm.distributed.eplb.policy import EplbStats

    class Seen:
        def __init__(self, stats, maps):
            load = stats.global_expert_load_window
            self.stats, self.devices, self.shape = stats, (load.device.type, maps.device.type), tuple(load.shape)
            self.thread = threading.current_thread().name
            self.facts = (stats.num_replicas, stats.num_groups, stats.num_nodes, stats.num_gpus)

    class OwnPolicy:
        """Turns every layer's map by one slot: easy to tell from vLLM's."""

        def __init__(self):
            self.seen = []

        def rebalance_experts(self, eplb_stats, physical_to_logical_map):
            if not isinstance(eplb_stats, EplbStats):
                raise TypeError(type(eplb_stats))
            self.seen.append(Seen(eplb_stats, physical_to_logical_map))
            return physical_to_logical_map.roll(1, dims=1)

    @dataclasses.dataclass
    class OwnModelState(eplb_state.EplbModelState):
        done: list = dataclasses.field(default_factory=list)

        def commit_eplb_maps(self, new_physical_to_logical_map):
            self.done.append("commit")
            super().commit_eplb_maps(new_physical_to_logical_map)

        def move_to_workspace(self, ep_rank):
            self.done.append(f"move {self.pending_result.layer_idx} on {ep_rank}")
            super().move_to_workspace(ep_rank)

    class OwnState(eplb_state.EplbState):
        model_state_cls = OwnModelState

        def create_policy(self):
            return OwnPolicy()

    return SimpleNamespace(State=OwnState, ModelState=OwnModelState, Policy=OwnPolicy)


# -- two ranks -------------------------------------------------------------------------------


def groups(rank, ranks, port):
    """vLLM's own groups over gloo, the expert-parallel ones among them."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    # Ranks that have vLLM's kernels ask each other for shared memory, and wait for ever for one that has none: in a
    # process in which other tests have run, something may have loaded them.
    current_platform.import_kernels()
    vllm_config = VllmConfig(parallel_config=ParallelConfig())
    # What a CPU refuses is the balancer at large; the groups are made all the same.
    object.__setattr__(vllm_config.parallel_config, "enable_eplb", True)
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        initialize_model_parallel(ranks)


def run_async(state, rank, ranks):
    """Let the asynchronous worker move every layer, while this thread steps as a model runner does."""
    group = async_worker.get_eplb_group().device_group
    values = {"state": state, "eplb_group": group, "cuda_stream": Stream(), "is_profile": False}
    values["stream"] = values["cuda_stream"]
    taken = inspect.signature(async_worker.transfer_run_periodically).parameters
    failed = []

    def run():
        try:
            async_worker.transfer_run_periodically(**{name: values[name] for name in taken})
        except Exception as error:  # noqa: BLE001 - it is told where the test can see it
            failed.append(repr(error))

    threading.Thread(target=run, name="async worker", daemon=True).start()
    state.expert_rearrangement_step = 0
    state.rearrange()
    until = time.monotonic() + 30
    while only(state).rebalanced:
        state.expert_rearrangement_step = 0  # no other rearrangement meanwhile
        state.step(is_dummy=True)
        if failed or time.monotonic() > until:
            raise RuntimeError(failed or "the layers do not come")
    return right(state, rank, ranks)


def sync_maps(rank, ranks, seeds):
    """The maps after each of so many loads, one after another, and whether the weights followed."""
    state = new_state(rank=rank, ranks=ranks)
    found = []
    for seed in range(seeds):
        give_load(state, seed, rank)
        state.rearrange()
        found.append((maps_of(state), right(state, rank, ranks)))
    return found


def async_maps(rank, ranks, seed=0):
    state = new_state(rank=rank, ranks=ranks, use_async=True)
    give_load(state, seed, rank)
    followed = run_async(state, rank, ranks)
    return maps_of(state), followed


def own(rank, ranks):
    """What a device's own classes see and do, on the profiling, the synchronous and the asynchronous path."""
    classes = own_classes()
    state = new_state(classes.State, rank, ranks)
    before = maps_of(state)
    state.rearrange(is_profile=True)
    profiled = maps_of(state) == before
    give_load(state, 1, rank)
    state.rearrange()
    later = new_state(classes.State, rank, ranks, use_async=True)
    give_load(later, 1, rank)
    followed = run_async(later, rank, ranks)
    turned = torch.tensor(before[0]).roll(1, dims=1).tolist()
    return {
        "profiling changes nothing": profiled,
        "the maps are the policy's": [maps_of(s)[0] == turned for s in (state, later)],
        "the weights followed": [right(state, rank, ranks), followed],
        "seen": [(s.devices, s.shape, s.facts, s.thread) for s in state.policy.seen + later.policy.seen],
        "the worker's object is the state's": later.policy.seen[0].stats is only(later).eplb_stats,
        "done": [only(state).done, only(later).done],
    }


def run_rank(rank, ranks, port, seeds):
    """One rank: upstream's results, then the same with the hooks, then a device's own classes."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    groups(rank, ranks, port)
    try:
        with device():
            found = {"upstream": sync_maps(rank, ranks, seeds), "upstream async": async_maps(rank, ranks)}
            balance_patcher.install("eplb_hooks")
            found |= {"hooked": sync_maps(rank, ranks, seeds), "hooked async": async_maps(rank, ranks)}
            found["own"] = own(rank, ranks)
        return found
    finally:
        balance_patcher.uninstall("eplb_hooks")
        destroy_model_parallel()
        destroy_distributed_environment()


def other_rank(port, pipe, seeds):
    """Rank 1 of two, in a process of its own: say when it is ready to meet rank 0, then what it found."""
    pipe.send("ready")
    pipe.send(run_rank(1, 2, port, seeds))
