"""Against vllm-ascend's own copy of ``schedule``, where one for this lane's vLLM is at hand.

A copy falls behind. What upstream's ``schedule`` uses and the copy's does not is left out of the
comparison, and is read from both: on 0.23.0 the copy counts no steps, reserves no blocks for loads
on their way, and tells the workers of no blocks to clear. The rest has to be equal.

It is looked for in an installed ``vllm_ascend``, or in the file that ``VERBATIM_COPY`` names (the
``patch_balance_schedule.py`` of a wheel). The module is not imported, because it changes vLLM: only
its imports, its functions and the class are executed.
"""

import ast
import importlib.util
import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import traces

# Fields of a shape, and the name by which ``schedule`` reads what they set.
SETTINGS = {
    "zeroing": "needs_kv_cache_zeroing",
    "reserve_full": "scheduler_reserve_full_isl",
    "v2_runner": "next_decode_eligible_step",
}
PLACE = Path("patch", "platform", "patch_balance_schedule.py")


def copy_file():
    """The file with the copy, or ``None``."""
    if named := os.environ.get("VERBATIM_COPY"):
        return Path(named)
    package = importlib.util.find_spec("vllm_ascend")
    roots = package.submodule_search_locations if package is not None else ()
    return next((Path(root) / PLACE for root in roots or () if (Path(root) / PLACE).is_file()), None)


COPY = copy_file()
pytestmark = pytest.mark.skipif(COPY is None, reason="no verbatim copy: vllm_ascend is not installed")


@pytest.fixture(scope="module")
def copies():
    """The copy's class, alone and under ``AsyncScheduler``."""
    import vllm

    tree = ast.parse(COPY.read_text())
    keep = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    tree.body = [
        node for node in tree.body if isinstance(node, keep) and getattr(node, "name", "") != "run_engine_core"
    ]
    utils = types.ModuleType("vllm_ascend.utils")
    utils.vllm_version_is = lambda version: vllm.__version__.split("+")[0] == version
    stubs = {"vllm_ascend": types.ModuleType("vllm_ascend"), "vllm_ascend.utils": utils}
    namespace = {"__name__": "verbatim_copy"}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stubs.items():
            patch.setitem(sys.modules, name, module)
        exec(compile(tree, str(COPY), "exec"), namespace)  # noqa: S102
    alone = namespace["BalanceScheduler"]
    return alone, type("CopyAsyncScheduler", (harness.async_scheduler(), alone), {})


@pytest.fixture(scope="module")
def left_behind(copies):
    """Names that upstream's ``schedule`` uses and the copy's does not."""
    return harness.schedule_names() - frozenset(copies[0].schedule.__code__.co_names)


@pytest.mark.parametrize("seed", range(3000, 3200) if COPY else [])
def test_decides_like_the_verbatim_copy(seed, copies, left_behind, balance_class, balance_async_class):
    trace = traces.trace(seed)
    # Settings that the copy does not know are off in both, and no load has to be refused for want of room.
    unknown = {field for field, name in SETTINGS.items() if name in left_behind}
    shape = replace(trace.shape, **dict.fromkeys(unknown, False))
    if "_inflight_prefill_reserved_blocks" in left_behind and shape.connector:
        shape = replace(shape, blocks=400)
    trace = replace(trace, shape=shape)
    config = harness.enabled_config(shape)
    ours = balance_async_class if shape.asynchronous else balance_class
    worlds = [
        traces.World(harness.new_scheduler(class_, shape, config), trace, harness.set_counts)
        for class_ in (ours, copies[1] if shape.asynchronous else copies[0])
    ]
    assert (found := traces.compare(trace, *worlds, without=left_behind)) is None, found
