"""EPLB's hooks on every release: what each delta becomes, what would run, and what is refused when upstream changes.

The sources are vLLM's own, read when the tests run; each mutant changes one of them in one way.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from balance_patcher.build import compile_plan
from balance_patcher.check import check_lane
from balance_patcher.deltas.eplb_hooks import SixValues, adapted
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.plan import Plan, make_plan
from balance_patcher.registry import find_feature
from balance_patcher.report import FeatureReport
from balance_patcher.source import DirSource, Lane, LaneSpec
from tests.conftest import RELEASES

FEATURE = find_feature("eplb_hooks")
OLDER, NEWER = RELEASES[:2], RELEASES[2:]
STATE = Path("vllm/distributed/eplb/eplb_state.py")
WORKER = Path("vllm/distributed/eplb/async_worker.py")
POLICY = Path("vllm/distributed/eplb/policy/__init__.py")


def looked_at(folder: Path) -> FeatureReport:
    report, _ = check_lane(LaneSpec("lane", f"dir:{folder}"), [FEATURE])
    (found,) = report.features
    return found


def plan_of(folder: Path) -> Plan:
    return make_plan(Lane("lane", DirSource(f"dir:{folder}", folder)), FEATURE)


# -- every release ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", NEWER)
def test_from_0_20_every_delta_is_applied(version: str, release_dir: Callable[[str], Path]) -> None:
    found = looked_at(release_dir(version))
    assert found.failures == []
    assert {delta.status for delta in found.deltas} == {"applied"}
    assert {delta.matches for delta in found.deltas} == {1}
    assert {item.status for item in found.invariants} == {"holds"}
    assert {call.status for call in found.calls} == {"holds"}
    assert found.reversible is True


@pytest.mark.parametrize("version", OLDER)
def test_before_there_is_nothing_to_hook_into(version: str, release_dir: Callable[[str], Path]) -> None:
    found = looked_at(release_dir(version))
    assert found.outcome is Outcome.HOLDS
    assert found.failures == []
    assert {delta.status for delta in found.deltas} == {"not-applicable"}
    assert all(delta.detail.startswith("until 0.19") for delta in found.deltas)
    assert found.calls == []


def rewritten(folder: Path) -> dict[str, ast.AST]:
    """The functions as they would run, by name."""
    rewrites, _ = compile_plan(plan_of(folder))
    return {name: target.node for result in rewrites.values() for name, target in result.targets.items()}


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [call for call in found if ast.unparse(call.func).rpartition(".")[2] == name]


@pytest.mark.parametrize("version", NEWER)
def test_both_places_give_the_policy_the_stats_and_the_map_and_nothing_else(
    version: str, release_dir: Callable[[str], Path]
) -> None:
    functions = rewritten(release_dir(version))
    planned = []
    for name in ("eplb_state:EplbState.rearrange", "async_worker:run_rebalance_experts"):
        (call,) = calls(functions[f"vllm.distributed.eplb.{name}"], "rebalance_experts")
        assert not call.keywords
        planned.append([ast.unparse(argument) for argument in call.args])
    (stats, synchronous), (passed, asynchronous) = planned
    assert stats.startswith("EplbStats(global_expert_load_window=global_expert_load_window.cpu(), num_replicas=")
    assert synchronous == "eplb_model_state.physical_to_logical_map.cpu()"
    assert (passed, asynchronous) == ("eplb_stats", "physical_to_logical_map_cpu")


@pytest.mark.parametrize("version", NEWER)
def test_the_worker_copies_the_load_within_its_stream(version: str, release_dir: Callable[[str], Path]) -> None:
    worker = rewritten(release_dir(version))["vllm.distributed.eplb.async_worker:run_rebalance_experts"]
    (within,) = [node for node in ast.walk(worker) if isinstance(node, ast.With)]
    (copied,) = within.body
    window = "eplb_stats.global_expert_load_window"
    assert ast.unparse(copied) == f"{window} = {window}.cpu()"
    assert "stream" in ast.unparse(within.items[0])
    assert ast.unparse(worker).count(".cpu()") == 1


@pytest.mark.parametrize("version", NEWER)
def test_what_is_made_of_a_model_keeps_every_field(version: str, release_dir: Callable[[str], Path]) -> None:
    name = "vllm.distributed.eplb.eplb_state:EplbState.add_model"
    plan = plan_of(release_dir(version))
    (before,) = calls(plan.target(name).node, "EplbModelState")
    function = rewritten(release_dir(version))[name]
    (after,) = calls(function, "model_state_cls")
    assert ast.dump(ast.Tuple(after.args)) == ast.dump(ast.Tuple(before.args))
    assert [ast.dump(field) for field in after.keywords] == [ast.dump(field) for field in before.keywords]
    assert not calls(function, "EplbModelState")
    assert "EPLB_POLICIES" not in ast.unparse(function)


# -- changed in one way ----------------------------------------------------------------------

#: What is found once, a pattern; what stands there then; the delta that cannot be placed, if it is one; why.
MUTANTS = {
    "the policy has another default": (STATE, r" = DefaultEplbPolicy\b", " = None", "policy", "BP101"),
    "the state may have no configuration": (
        STATE,
        r"(        )(self\.parallel_config = parallel_config\n)",
        r"\1if device:\n\1    \2",
        None,
        "BP204",
    ),
    "the state may have no device": (
        STATE,
        r"(        )(self\.device = device\n)",
        r"\1if device:\n\1    \2",
        None,
        "BP204",
    ),
    "the policy is chosen in another way": (STATE, r"EPLB_POLICIES\[policy_type\]", "choose()", "one-policy", "BP101"),
    "the policy is chosen twice": (
        STATE,
        r"( +policy_type = self.+\n +self\.policy = EPLB_POLICIES.+\n +logger\.debug.+\n)",
        r"\1\1",
        "one-policy",
        "BP102",
    ),
    "a model's state is made elsewhere": (STATE, r" = EplbModelState\(", " = made(", "model-state", "BP101"),
    "the plan gets the load on the device": (
        STATE,
        r"global_expert_load_window\.cpu\(\),",
        "global_expert_load_window,",
        "planning",
        "BP101",
    ),
    "the plan gets one value more": (STATE, r"(global_expert_load_window\.cpu\(\),)", r"\1 0,", "planning", "BP101"),
    "a commit gets one value more": (
        STATE,
        r" {8}_commit_eplb_maps\(",
        "        _commit_eplb_maps(0, ",
        "commit",
        "BP101",
    ),
    "a move goes by position": (STATE, r"model_state=eplb_model_state,", "eplb_model_state,", "workspace", "BP101"),
    "the worker copies without its stream": (
        WORKER,
        r"\n    with (\S+)\(\w*stream\):\n    ",
        r"\n",
        "async-planning",
        "BP101",
    ),
    "the worker copies more in its stream": (
        WORKER,
        r"(\n +)(global_\w+ = eplb_stats\.global_\w+\.cpu\(\))",
        r"\1\2\1more = 1",
        "async-planning",
        "BP114",
    ),
    "the worker plans with a value less": (WORKER, r"eplb_stats\.num_nodes,", "", "async-planning", "BP101"),
    "upstream has a hook of that name": (
        STATE,
        r"(    )def step\(",
        r"\1def create_policy(self):\n\1    pass\n\n\1def step(",
        None,
        "BP301",
    ),
    "upstream's model state has one": (
        STATE,
        r"class EplbModelState:\n",
        "class EplbModelState:\n    move_to_workspace = None\n",
        None,
        "BP301",
    ),
    "the policies are called otherwise": (STATE, r"import EPLB_POLICIES,", "import POLICIES,", None, "BP302"),
    "a commit is called otherwise": (STATE, r"def _commit_eplb_maps\(", "def _commit(", None, "BP302"),
    "a commit takes something else": (STATE, r"(def _commit_eplb_maps\()", r"\1first,", None, "BP120"),
    "a move takes something else": (STATE, r"(def _move_to_workspace\()", r"\1first,", None, "BP120"),
    "the stats are with the policies": (POLICY, r"(__all__ = \[)", r"EplbStats = None\n\1", None, "BP301"),
    "there are no policies": (POLICY, "", None, None, "BP110"),
    "there is no asynchronous worker": (WORKER, "", None, "async-planning", "BP110"),
}


def change(file: Path, was: str, now: str | None) -> None:
    if now is None:
        file.unlink()
        return
    text, count = re.subn(was, now, file.read_text("utf-8"))
    assert count == 1, f"{was} was found {count} times"
    file.write_text(text, "utf-8")


@pytest.mark.parametrize("version", ["0.20.0", "0.27.1", "0.33.0"])
@pytest.mark.parametrize("case", MUTANTS)
def test_a_change_upstream_is_refused(case: str, version: str, release_copy: Callable[[str], Path]) -> None:
    path, was, now, delta, code = MUTANTS[case]
    folder = release_copy(version)
    change(folder / path, was, now)
    found = looked_at(folder)
    assert found.outcome is Outcome.BROKEN
    assert {failure.code for failure in found.failures} == {code}
    failed = {row.name for row in found.deltas if row.status == "failed"}
    assert failed == ({f"eplb_hooks.{delta}"} if delta else set())


@pytest.mark.parametrize("case", ["upstream has a hook of that name", "there are no policies"])
def test_where_there_is_nothing_to_hook_into_no_change_matters(case: str, release_copy: Callable[[str], Path]) -> None:
    path, was, now, _, _ = MUTANTS[case]
    folder = release_copy("0.19.0")
    change(folder / path, was, now)
    assert looked_at(folder).failures == []


def test_that_the_older_shape_is_gone_is_no_reason_to_leave_a_release_out(release_copy: Callable[[str], Path]) -> None:
    """A function that upstream renames must not make the feature silently not applicable."""
    folder = release_copy("0.33.0")
    text = (folder / STATE).read_text("utf-8")
    (folder / STATE).write_text(text.replace("_move_to_workspace", "_move_layer"), "utf-8")
    found = looked_at(folder)
    assert found.outcome is Outcome.BROKEN
    assert {row.status for row in found.deltas} == {"applied", "failed"}


# -- who asks --------------------------------------------------------------------------------


def config(additional: object, *, eplb: bool = True) -> SimpleNamespace:
    return SimpleNamespace(additional_config=additional, parallel_config=SimpleNamespace(enable_eplb=eplb))


@pytest.mark.parametrize(
    ("additional", "source"),
    [
        (None, None),
        ({}, None),
        ({"enable_eplb_hooks": False}, None),
        ({"enable_eplb_hooks": True}, "additional_config.enable_eplb_hooks"),
        ({"scheduler_config": {"enable_eplb_hooks": True}}, "additional_config.scheduler_config.enable_eplb_hooks"),
        ({"scheduler_config": {"enable_eplb_hooks": False}, "enable_eplb_hooks": True}, None),
    ],
)
def test_the_configuration_asks(additional: object, source: str | None) -> None:
    assert FEATURE.enabling is not None
    assert FEATURE.enabling.asked(config(additional)) == source


def test_a_value_that_says_neither_is_refused() -> None:
    assert FEATURE.enabling is not None
    with pytest.raises(PatchError, match="BP703"):
        FEATURE.enabling.asked(config({"enable_eplb_hooks": "yes"}))


def test_it_is_decided_in_the_worker_and_needless_without_the_balancer() -> None:
    assert FEATURE.process == "worker"
    assert FEATURE.enabling is not None
    assert FEATURE.enabling.needless(None, config({})) is None
    assert FEATURE.enabling.needless(None, config({}, eplb=False)) == "nothing to hook into: enable_eplb is off"


class Two:
    def rebalance_experts(self, eplb_stats, physical_to_logical_map):
        pass


class Several:
    def rebalance_experts(self, *values):
        pass


class Six:
    def rebalance_experts(self, weight, num_replicas, num_groups=1, num_nodes=1, num_ranks=1, old=None):
        pass


@pytest.mark.parametrize(("policy", "kind"), [(Two(), Two), (Several(), Several), (Six(), SixValues)])
def test_a_policy_with_upstreams_six_values_is_called_with_six_though_two_would_do(policy: object, kind: type) -> None:
    assert type(adapted(policy)) is kind


def test_the_declaration_needs_neither_torch_nor_vllm() -> None:
    assert not {"torch", "vllm"} & set(sys.modules)
