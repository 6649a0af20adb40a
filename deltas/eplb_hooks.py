"""Extension hooks of the expert-parallel load balancer (EPLB), for devices that live outside of vLLM.

vLLM's balancer picks its policy by a name that must be one of its own, makes its own class for each model's state,
and calls its own functions to commit maps and to move weights. A device that does one of these in another way
has to copy ``EplbState``. With these hooks it derives from it and overrides what differs (vLLM PR 49700):

``EplbState.create_policy()``
    Returns the policy, an instance. Called once, in ``EplbState.__init__``, when ``parallel_config`` and ``device``
    are set. **That one instance is shared**: by all models of the state (a drafter beside its main model), by the
    synchronous and the profiling path on the worker's main thread, and, with ``use_async``, **by the thread of the
    asynchronous worker**, which calls it while the main thread serves requests. A policy that remembers something
    guards it itself. vLLM's own policies are stateless.
``policy.rebalance_experts(eplb_stats, physical_to_logical_map)``
    Gets the load once, in ``eplb_stats.global_expert_load_window``, shape (layers, logical experts), and it is on the
    CPU on all three paths; so is the map, shape (layers, physical experts). Returns the new map, on the CPU. The
    asynchronous path copies the load within its own stream and puts it back into the same object, so a subclass
    of ``EplbStats`` that a device has put into ``model_state.eplb_stats`` is what its policy gets. Policies that take
    upstream's six values, vLLM's own among them, are called through an adapter.
``EplbState.model_state_cls``
    The class of the state that is kept for each model; a subclass of ``EplbModelState``.
``EplbModelState.commit_eplb_maps(new_physical_to_logical_map)``, ``EplbModelState.move_to_workspace(ep_rank)``
    Commit new maps of all layers, and take over one layer that the asynchronous worker has sent. The defaults call
    the functions of ``eplb_state`` by their names when they are called, so who has wrapped one of those is called too.

**Who constructs a subclass of EplbState**: the device's own model runner. vLLM's runners write ``EplbState(…)``, by
the name that they have imported (``vllm/v1/worker/gpu_model_runner.py`` and ``vllm/v1/worker/gpu/eplb_utils.py``),
in ``load_model`` and, for ranks that join an elastic group, by ``EplbState.from_mapping``, which makes what it is
called on. So a runner derived from one of those either makes its own state there, or binds its subclass to that
name in the runner's module, from its general plugin. ``EplbStats`` is imported from ``vllm.distributed.eplb.eplb_state``,
as ever, or from ``vllm.distributed.eplb.policy``, which can be imported without the whole state.

States that were made before the hooks were there keep upstream's policy, which no longer fits: they are decided before a
worker makes its model runner, and a plugin that installs them by a call does so before that, too.

What vLLM checks of an ``EPLBConfig`` stays as it is; that the asynchronous worker and NCCL exclude each other too.
"""

from __future__ import annotations

import inspect
from typing import Any

from balance_patcher.addition import Addition
from balance_patcher.delta import Anchor, Delta, Replace, Variant
from balance_patcher.errors import refuse
from balance_patcher.feature import CallShape, Enabling, Example, Feature, Ordered, Refusal

from .asking import asked

MODULE = "vllm.distributed.eplb.eplb_state"
STATE = f"{MODULE}:EplbState"
MODEL_STATE = f"{MODULE}:EplbModelState"

UPSTREAM = "vLLM PR 49700, not merged; in no release to 0.33.0"
REMOVE = "vLLM has these hooks, or others that out-of-tree devices use"
# Both have the method, and no function that moves a layer: a state of that kind has nothing to hook into.
OLDER = {f"{STATE}.post_eplb": "until 0.19 the state itself moves the layers, and there is no commit to hook into"}


def _from_20(anchor: str, text: str) -> tuple[Variant, ...]:
    """One statement, or a run of them, that is replaced; its shape is the same in all releases that have it."""
    return (Variant("from 0.20", Anchor(anchor), edits=(Replace(text),)),)


# -- what is changed -------------------------------------------------------------------------

POLICY = Delta(
    name="eplb_hooks.policy",
    target=f"{STATE}.__init__",
    why="The state asks itself for its policy, and a device overrides what it answers.",
    upstream=UPSTREAM,
    remove_when=REMOVE,
    not_with=OLDER,
    variants=_from_20(
        "self.policy: $_ = DefaultEplbPolicy",
        "self.policy = self.adapted_policy(self.create_policy())",
    ),
)

# It is by the configuration's name here that the first model would overwrite the instance.
ONE_POLICY = Delta(
    name="eplb_hooks.one-policy",
    target=f"{STATE}.add_model",
    why="A model that is added leaves the policy alone: there is one instance, and it may have a memory.",
    upstream=UPSTREAM,
    remove_when=REMOVE,
    not_with=OLDER,
    variants=_from_20(
        """
        $NAME = self.parallel_config.eplb_config.policy
        self.policy = EPLB_POLICIES[$NAME]
        logger.debug($_, $NAME)
        """,
        'logger.debug("EPLB policy: %s", self.policy)',
    ),
)

MODEL_STATE_CLASS = Delta(
    name="eplb_hooks.model-state",
    target=f"{STATE}.add_model",
    why="The state of a model is of the class that the device chooses.",
    upstream=UPSTREAM,
    remove_when=REMOVE,
    not_with=OLDER,
    variants=_from_20(
        "$STATE = EplbModelState($$$FIELDS)",
        "$STATE = self.model_state_cls($$$FIELDS)",
    ),
)

PLANNING = Delta(
    name="eplb_hooks.planning",
    target=f"{STATE}.rearrange",
    why="The synchronous and the profiling path give the policy what the asynchronous one does: one object, on the CPU.",
    upstream=UPSTREAM,
    remove_when=REMOVE,
    not_with=OLDER,
    variants=_from_20(
        "$NEW = self.policy.rebalance_experts($LOAD.cpu(), $REPLICAS, $GROUPS, $NODES, $GPUS, $OLD.cpu())",
        """
        $NEW = self.policy.rebalance_experts(
            EplbStats(
                global_expert_load_window=$LOAD.cpu(),
                num_replicas=$REPLICAS,
                num_groups=$GROUPS,
                num_nodes=$NODES,
                num_gpus=$GPUS,
            ),
            $OLD.cpu(),
        )
        """,
    ),
)

COMMIT = Delta(
    name="eplb_hooks.commit",
    target=f"{STATE}.rearrange",
    why="New maps are committed by the state of the model that they are for.",
    upstream=UPSTREAM,
    remove_when=REMOVE,
    not_with=OLDER,
    variants=_from_20(
        "_commit_eplb_maps($STATE, new_physical_to_logical_map=$NEW)",
        "$STATE.commit_eplb_maps($NEW)",
    ),
)

WORKSPACE = Delta(
    name="eplb_hooks.workspace",
    target=f"{STATE}.step",
    why="A layer that has arrived is taken over by the state of its model.",
    upstream=UPSTREAM,
    remove_when=REMOVE,
    not_with=OLDER,
    variants=_from_20(
        "_move_to_workspace(model_state=$STATE, ep_rank=$RANK)",
        "$STATE.move_to_workspace(ep_rank=$RANK)",
    ),
)

# The copy stays within the worker's own stream. The object stays the same one: it may be of a device's own class.
ASYNC_PLANNING = Delta(
    name="eplb_hooks.async-planning",
    target="vllm.distributed.eplb.async_worker:run_rebalance_experts",
    why="The asynchronous path gives the policy the state's own object, with the load on the CPU.",
    upstream=UPSTREAM,
    remove_when=REMOVE,
    not_with=OLDER,
    variants=_from_20(
        """
        with $STREAM:
            $LOAD = $STATS.global_expert_load_window.cpu()
        $NEW = $EPLB.policy.rebalance_experts(
            $LOAD, $STATS.num_replicas, $STATS.num_groups, $STATS.num_nodes, $STATS.num_gpus, $OLD
        )
        """,
        """
        with $STREAM:
            $STATS.global_expert_load_window = $STATS.global_expert_load_window.cpu()
        $NEW = $EPLB.policy.rebalance_experts($STATS, $OLD)
        """,
    ),
)


# -- what is added ---------------------------------------------------------------------------

STATE_HOOKS = Addition(
    STATE,
    f"""
    model_state_cls = EplbModelState

    def create_policy(self):
        "The policy of this state, an instance: shared by its models, and by the worker thread."
        return EPLB_POLICIES[self.parallel_config.eplb_config.policy]()

    @staticmethod
    def adapted_policy(policy):
        "The policy as the state calls it; one that takes six values is called through an adapter."
        from {__name__} import adapted

        return adapted(policy)
    """,
    why="The hooks that a device overrides; vLLM's runners and workers have imported the class by name.",
)

MODEL_STATE_HOOKS = Addition(
    MODEL_STATE,
    """
    def commit_eplb_maps(self, new_physical_to_logical_map):
        "Make new maps of all layers the current ones; shape (layers, physical experts), on the CPU."
        _commit_eplb_maps(self, new_physical_to_logical_map=new_physical_to_logical_map)

    def move_to_workspace(self, ep_rank):
        "Take the pending layer over from the buffer, commit its map, and let the asynchronous worker go on."
        _move_to_workspace(model_state=self, ep_rank=ep_rank)
    """,
    why="Commits and moves are methods of the state of the model that they change.",
)

STATS = Addition(
    "vllm.distributed.eplb.policy",
    "from vllm.distributed.eplb.eplb_state import EplbStats",
    why="A policy is written against the policies' package, and names the class that it gets.",
)


class SixValues:
    """A policy with upstream's signature, called with the two values that the hooks give.

    What calls it in upstream's own way gets through as before, and so does everything else that the policy has.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        if name == "policy":  # not made yet, as in a copy
            raise AttributeError(name)
        return getattr(self.policy, name)

    def __repr__(self) -> str:
        return f"{self.policy!r}, called with six values"

    def rebalance_experts(self, eplb_stats: Any, *others: Any, **named: Any) -> Any:
        """The new map, shape (layers, physical experts), on the CPU.

        Args:
            eplb_stats: An ``EplbStats`` whose load is on the CPU.
            *others: The current map, on the CPU; or, with ``named``, the rest of upstream's values.
            **named: As ``others``.
        """
        if named or len(others) != 1:
            return self.policy.rebalance_experts(eplb_stats, *others, **named)
        return self.policy.rebalance_experts(
            eplb_stats.global_expert_load_window,
            eplb_stats.num_replicas,
            eplb_stats.num_groups,
            eplb_stats.num_nodes,
            eplb_stats.num_gpus,
            *others,
        )


_UPSTREAMS = 6  # so many values does upstream's own call pass


def adapted(policy: Any) -> Any:
    """A policy as ``EplbState`` calls it: itself, or the adapter around one that takes six values.

    Raises:
        PatchError: BP120, if it is a class and no instance, or can be called in neither way.
    """
    if isinstance(policy, type):
        raise _no_policy(f"{_called(policy)} is a class", "return an instance")
    try:
        signature = inspect.signature(policy.rebalance_experts)
    except (AttributeError, TypeError, ValueError) as error:
        raise _no_policy(f"{_called(type(policy))}: {error}", "give it a method `rebalance_experts`") from error
    ways = [(2, policy), (_UPSTREAMS, SixValues(policy))]
    # Upstream's six, of which the last have defaults, can be called with two as well.
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if sum(parameter.kind in positional for parameter in signature.parameters.values()) >= _UPSTREAMS:
        ways.reverse()
    for count, called in ways:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return called
    raise _no_policy(
        f"{_called(type(policy))}.rebalance_experts{signature} takes neither two values nor upstream's six",
        "let it take (eplb_stats, physical_to_logical_map)",
    )


def _called(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _no_policy(what: str, next_step: str) -> Exception:
    return refuse("BP120", f"what create_policy() returned cannot be used: {what}", next=next_step)


# -- when it is on ---------------------------------------------------------------------------

KEY = "enable_eplb_hooks"


def eplb_asked_by(vllm_config: Any) -> str | None:
    """The place in ``additional_config`` that asks for the hooks.

    Args:
        vllm_config: A ``vllm.config.VllmConfig``.
    """
    return asked(vllm_config, KEY)


def eplb_excluded(*_: Any) -> tuple[str, ...]:
    """Nothing excludes them: a state that nobody derives from plans as upstream's."""
    return ()


def eplb_needless(_: Any, vllm_config: Any) -> str | None:
    """Why no worker makes such a state."""
    return None if vllm_config.parallel_config.enable_eplb else "nothing to hook into: enable_eplb is off"


FEATURE = Feature(
    name="eplb_hooks",
    summary="Extension hooks of the expert-parallel load balancer, for devices that live outside of vLLM.",
    deltas=(POLICY, ONE_POLICY, MODEL_STATE_CLASS, PLANNING, COMMIT, WORKSPACE, ASYNC_PLANNING),
    adds=(STATE_HOOKS, MODEL_STATE_HOOKS, STATS),
    invariants=(
        Ordered(
            "a policy is asked for when the state has its configuration",
            target=f"{STATE}.__init__",
            first="self.parallel_config = parallel_config",
            then="self.policy: $_ = DefaultEplbPolicy",
        ),
        Ordered(
            "a policy is asked for when the state has its device",
            target=f"{STATE}.__init__",
            first="self.device = device",
            then="self.policy: $_ = DefaultEplbPolicy",
        ),
    ),
    call_shapes=(
        CallShape(f"{STATE}.rearrange", ""),
        CallShape(f"{STATE}.rearrange", "is_profile=True"),
        CallShape(f"{MODULE}:_commit_eplb_maps", "state, new_physical_to_logical_map=maps"),
        CallShape(f"{MODULE}:_move_to_workspace", "model_state=state, ep_rank=rank"),
    ),
    enabling=Enabling(
        asked=eplb_asked_by,
        excluded=eplb_excluded,
        needless=eplb_needless,
        process="worker",
    ),
)


# -- what it does to a function, and what it refuses -----------------------------------------


def _module(state: str = "pass", method: str = "__init__") -> str:
    """Upstream's module, with as much of it as one delta looks at."""
    body = state.replace("\n", "\n        ")
    more = (
        "    def __init__(self, given):\n        self.parallel_config = self.policy = given\n\n"
        if method != "__init__"
        else ""
    )
    return f"""
class EplbStats:
    pass

class EplbModelState:
    pass

EPLB_POLICIES = {{"default": object}}
DefaultEplbPolicy = _commit_eplb_maps = _move_to_workspace = logger = None

class EplbState:
{more}    def {method}(self, parallel_config=None, model=None):
        {body}
"""


_INIT = "self.parallel_config = parallel_config\nself.policy: type = DefaultEplbPolicy"
_NAMED = """name = self.parallel_config.eplb_config.policy
self.policy = EPLB_POLICIES[name]
logger.debug("policy: %s", name)
return name"""
_MADE = "state = EplbModelState(model=model, rebalanced=False)\nreturn state"
_PLANNED = "maps = self.policy.rebalance_experts(model.load.cpu(), 6, 1, 1, 2, model.maps.cpu())\nreturn maps"
_COMMITTED = "_commit_eplb_maps(model, new_physical_to_logical_map=self.maps)\nself.maps = None"
_MOVED = "_move_to_workspace(model_state=model, ep_rank=self.rank())\nself.rank = None"
_WORKER = """
def run_rebalance_experts(model_state, eplb_state, maps, stream):
    stats = model_state.eplb_stats
    # Within the stream.
    with on(stream):
        load = stats.global_expert_load_window.cpu()
    # The plan.
    new = eplb_state.policy.rebalance_experts(
        load, stats.num_replicas, stats.num_groups, stats.num_nodes, stats.num_gpus, maps
    )
    return new

def on(stream):
    return stream
"""


def _example(delta: str, method: str, before: str, was: str, now: str) -> Example:
    return Example(f"eplb_hooks.{delta}", _module(before, method), _module(before.replace(was, now), method))


EXAMPLES = (
    _example(
        "policy", "__init__", _INIT,
        "self.policy: type = DefaultEplbPolicy",
        "self.policy = self.adapted_policy(self.create_policy())",
    ),
    _example(
        "one-policy", "add_model", _NAMED + "\n",
        _NAMED,
        'logger.debug("EPLB policy: %s", self.policy)\nreturn name',
    ),
    _example(
        "model-state", "add_model", _MADE,
        "EplbModelState(model=model, rebalanced=False)",
        "self.model_state_cls(model=model, rebalanced=False)",
    ),
    _example(
        "planning", "rearrange", _PLANNED,
        "(model.load.cpu(), 6, 1, 1, 2, model.maps.cpu())",
        """(
    EplbStats(
        global_expert_load_window=model.load.cpu(),
        num_replicas=6,
        num_groups=1,
        num_nodes=1,
        num_gpus=2,
    ),
    model.maps.cpu(),
)""",
    ),
    _example(
        "commit", "rearrange", _COMMITTED,
        "_commit_eplb_maps(model, new_physical_to_logical_map=self.maps)",
        "model.commit_eplb_maps(self.maps)",
    ),
    _example(
        "workspace", "step", _MOVED,
        "_move_to_workspace(model_state=model, ep_rank=self.rank())",
        "model.move_to_workspace(ep_rank=self.rank())",
    ),
    Example(
        "eplb_hooks.async-planning",
        before=_WORKER,
        after="""
def run_rebalance_experts(model_state, eplb_state, maps, stream):
    stats = model_state.eplb_stats
    # Within the stream.
    # The plan.
    with on(stream):
        stats.global_expert_load_window = stats.global_expert_load_window.cpu()
    new = eplb_state.policy.rebalance_experts(stats, maps)
    return new

def on(stream):
    return stream
""",
    ),
)  # fmt: skip

REFUSES = (
    Refusal("eplb_hooks.policy", _module(_INIT.replace(": type", "")), "BP101"),
    Refusal("eplb_hooks.one-policy", _module(_NAMED.replace("[name]", "[0]"), "add_model"), "BP101"),
    Refusal("eplb_hooks.model-state", _module(f"{_MADE.replace('return state', '')}{_MADE}", "add_model"), "BP102"),
    Refusal("eplb_hooks.planning", _module(_PLANNED.replace("load.cpu()", "load"), "rearrange"), "BP101"),
    Refusal("eplb_hooks.commit", _module(_COMMITTED.replace("new_p", "p"), "rearrange"), "BP101"),
    Refusal("eplb_hooks.workspace", _module(_MOVED.replace("ep_rank", "rank"), "step"), "BP101"),
    Refusal("eplb_hooks.async-planning", _WORKER.replace("stats.num_gpus, ", ""), "BP101"),
    Refusal("eplb_hooks.async-planning", _WORKER.replace("load =", "load, more ="), "BP101"),
)
