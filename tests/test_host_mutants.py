"""One edit of a released patch module of vllm-ascend: each does something that ours would not, so each is declined.

The module's text is read from the wheel. An edit that does not change it is an error of the test.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from balance_patcher.coverage import Coverage, read_module
from balance_patcher.registry import find_feature
from balance_patcher.source import DirSource, Lane, module_text, open_source

FILE = "vllm_ascend/patch/platform/patch_balance_schedule.py"
VLLM = {"0.23.0": "0.23.0", "0.24.0rc1": "0.24.0", "0.25.1rc1": "0.25.1"}
OLD, MIDDLE, NEW = VLLM
Read = Callable[[str, str], Coverage]


@lru_cache
def released(version: str) -> str:
    data = open_source(f"pypi:vllm-ascend=={version}").read(FILE)
    assert data is not None
    return data.decode()


@pytest.fixture
def read(release_dir: Callable[[str], Path]) -> Read:
    def get(version: str, text: str) -> Coverage:
        ast.parse(text)
        stand_in = find_feature("balance").stand_in
        assert stand_in is not None
        lane = Lane("upstream", DirSource("dir", release_dir(VLLM[version])))
        return read_module(stand_in, module_text(stand_in.module, FILE, FILE, text.encode()), lane)

    return get


def changed(version: str, old: str, new: str) -> str:
    text = released(version)
    assert old in text, f"{version} has no {old!r}"
    return text.replace(old, new, 1)


def block(version: str, first: str) -> str:
    """A statement and all that is in it, by its first line."""
    lines = released(version).splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if line.strip().startswith(first))
    depth = _depth(lines[at])
    end = at + 1
    while end < len(lines) and (lines[end].strip() in {"", ") -> None:"} or _depth(lines[end]) > depth):
        end += 1
    return "".join(lines[at:end])


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


GATE = {OLD: "balance_flag = max(", MIDDLE: "if max(t.item()", NEW: "if max(t.item()"}


def gate(version: str) -> str:
    found = block(version, GATE[version])
    if version == OLD:
        before, _, _ = released(version).partition(found)
        start = before.rindex("if self._balance_enabled:")
        found = block(version, released(version)[start:].splitlines()[2].strip())
        text = released(version)
        begin = text.rindex("\n", 0, start) + 1
        end = text.index(found) + len(found)
        found = text[begin:end]
    return found


@pytest.mark.parametrize("version", VLLM)
def test_the_release_itself_is_covered(read: Read, version: str) -> None:
    assert read(version, released(version)).covered


def declined(read: Read, version: str, text: str) -> Coverage:
    assert text != released(version)
    found = read(version, text)
    assert not found.covered
    assert all(finding.line > 0 and finding.text for finding in found.uncovered)
    return found


# ruff: noqa: E501 - one edit a line


SIGNATURES = [
    ("throttle_prefills: bool = False)", "throttle_prefills: bool = False, hook=install_hook())"),
    ("throttle_prefills: bool = False)", "throttle_prefills: bool = False, hook=lambda step: step)"),
    ("throttle_prefills: bool = False)", "throttle_prefills: bool = True)"),
    ("schedule(self, throttle_prefills:", "schedule(self, throttle:"),
    ("throttle_prefills: bool = False)", "throttle_prefills: patch_it() = False)"),
    (") -> SchedulerOutput:", ") -> patch_it():"),
    ("    def schedule(self", "    async def schedule(self"),
    ("    def balance_gather(self", "    async def balance_gather(self"),
    ("log_stats: bool = False,", "log_stats: bool = False, post=lambda made: made.retune(),"),
    ("log_stats: bool = False,", "log_stats: bool = True,"),
    ("def _balance_scheduling_enabled(vllm_config)", "def _balance_scheduling_enabled(vllm_config=find_one())"),
    ("def balance_gather(self", "def balance_gather(self, *, every=4"),
]
IMPORTS = [
    (
        "from vllm.v1.core.sched.scheduler import Scheduler",
        "from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Scheduler",
    ),
    ("import torch.distributed as dist", "import vllm_ascend.utils as dist"),
    ("from vllm.logger import logger", "from vllm_ascend.utils import logger"),
    (
        "from vllm.v1.request import Request, RequestStatus",
        "from vllm.v1.request import Request\nfrom vllm_ascend.utils import AscendStatus as RequestStatus",
    ),
    (
        "from vllm.v1.request import Request, RequestStatus",
        "from vllm.v1.request import Request as RequestStatus, RequestStatus as Request",
    ),
    ("import time\n", "import time\nfrom vllm_ascend.utils import *\n"),
    ("import time\n", "import time\nfrom vllm.v1.core.sched.scheduler import *\n"),
    ("import time\n", "import time\nimport vllm_ascend.utils.install_everything\n"),
    ("import time\n", "import time\nimport vllm.v1.core.sched.new_patch\n"),
    ("import time\n", "import time\nimport torch.fresh\n"),
    ("import time\n", "import time\nfrom . import patch_other\n"),
    ("import time\n", "import time as time, os as torch\n"),
    (
        "        scheduled_timestamp = time.monotonic()",
        "        from vllm_ascend.utils import fast_time as time\n        scheduled_timestamp = time.monotonic()",
    ),
]
CALLS = [
    ("super().__init__(\n            vllm_config,", "super().__init__(\n            retune(vllm_config),"),
    ("            log_stats,\n        )", "            log_stats,\n            hash_seed=pick(),\n        )"),
    ("for _ in range(self.vllm_config", "for self.x in range(self.vllm_config"),
    ("data_parallel_size)\n            ]", "data_parallel_size * 2)\n            ]"),
    ("range(self.vllm_config.parallel_config.data_parallel_size)", "range(grow(self))"),
    ("group=", "group=other or "),
    ("return bool(get_ascend_config()", "return bool(get_ascend_config().x.f(side())"),
    ('return bool(additional_config["enable_balance_scheduling"])', 'return bool(environment_of(vllm_config)["enable_balance_scheduling"])'),
    ("def _balance_scheduling_enabled(vllm_config) -> bool:\n", "def _balance_scheduling_enabled(vllm_config) -> bool:\n    return False\n"),
    ("        return scheduler_output\n", ""),
    ("        if not self._balance_enabled", "        self.seen = 1\n        if not self._balance_enabled"),
]  # fmt: skip


@pytest.mark.parametrize("version", VLLM)
@pytest.mark.parametrize(("old", "new"), [*SIGNATURES, *IMPORTS, *CALLS])
def test_what_every_release_has_in_another_wording(read: Read, version: str, old: str, new: str) -> None:
    declined(read, version, changed(version, old, new))


STOP = "                if len(self.running) == self.max_num_running_reqs:\n                    break\n"
LATE = "                num_encoder_tokens = 0\n"
BUSY = "            self.scheduler.balance_gather(self.dp_group)\n"
SYNC = "            self.engines_running = self._has_global_unfinished_reqs(local_unfinished_reqs)\n"
KEEP = "                    if self._disable_preemption:\n                        break\n"


@pytest.mark.parametrize(
    ("version", "old", "new"),
    [
        # calls that an open hole would swallow
        (OLD, "_ORIGINAL_RUN_ENGINE_CORE(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)", "_ORIGINAL_RUN_ENGINE_CORE(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **tune(kwargs))"),
        (OLD, 'set_process_title("EngineCore", f"DP{dp_rank}")', 'set_process_title(bind_numa(dp_rank), f"DP{dp_rank}")'),
        (OLD, 'logger.debug("EngineCore exiting.")', "logger.debug(flush_all())"),
        (OLD, 'logger.warning("Automatic', 'logger.warning(self.switch() or "Automatic'),
        (OLD, 'raise RuntimeError(\n                "Cannot', 'raise RuntimeError(\n                self.abort_all() or "Cannot'),
        (OLD, "signal.signal(signal.SIGINT, signal_handler)", "signal.signal(signal.SIGINT, signal_handler)\n    signal.signal(signal.SIGUSR1, signal_handler)"),
        (OLD, 'if not vllm_version_is("0.23.0"):\n        return False', 'if not vllm_version_is("0.99.0"):\n        return False'),
        (OLD, '    if not vllm_version_is("0.23.0"):\n        return False\n', ""),
        (OLD, '            if vllm_version_is("0.23.0"):', "            if vllm_version_is(enable_everything()):"),
        (OLD, "return super().schedule(throttle_prefills)", "return super().schedule()"),
        (OLD, "reset_connector: bool = False,\n    ) -> bool", "reset_connector: bool = True,\n    ) -> bool"),
        (MIDDLE, "def _balance_run_engine_core(*args, dp_rank: int = 0", "def _balance_run_engine_core(*args, dp_rank: int = start_agent()"),
        # another place, or a second time
        (OLD, f"{SYNC}{BUSY}", f"{BUSY}{SYNC}"),
        (OLD, BUSY, f"{BUSY}{BUSY}"),
        (OLD, "            self._process_input_queue()\n", "            self._process_input_queue()\n            self.execute_dummy_batch()\n"),
        (OLD, LATE, f"{STOP}{LATE}"),
        (MIDDLE, LATE, f"{STOP}{LATE}"),
        (NEW, LATE, f"{STOP}{LATE}"),
        (OLD, "        self.kv_cache_manager.new_step_starts()\n", "        self.kv_cache_manager.new_step_starts()\n        limit_lookahead_tokens = load_kv_async and self.use_eagle\n"),
        (MIDDLE, "        self.kv_cache_manager.new_step_starts()\n", "        self.kv_cache_manager.new_step_starts()\n        limit_lookahead_tokens = load_kv_async and self.use_eagle\n"),
        (OLD, KEEP, f"{KEEP}{KEEP}"),
        (MIDDLE, "        self.scheduler.balance_gather()\n", "        self.scheduler.balance_gather()\n        self.scheduler.balance_gather()\n"),
        (MIDDLE, "    def balance_gather", "    def schedule(self, throttle_prefills=False):\n        pass\n\n    def balance_gather"),
        # not there any more
        (OLD, BUSY, ""),
        (OLD, KEEP, ""),
        (OLD, STOP, ""),
        (MIDDLE, STOP, ""),
        (NEW, STOP, ""),
        (OLD, "                req_index += 1\n                continue\n", "                req_index += 1\n"),
        (OLD, "                    if balance_flag:\n                        break\n", ""),
        (OLD, "vllm.v1.core.sched.scheduler.Scheduler = BalanceScheduler", ""),
        (OLD, "EngineCoreProc.run_engine_core = run_engine_core", ""),
        (MIDDLE, "_sched_mod.Scheduler = BalanceScheduler", ""),
        (MIDDLE, "EngineCoreProc.run_engine_core = staticmethod(_balance_run_engine_core)", ""),
        (MIDDLE, "        self.scheduler.dp_group = self.dp_group\n", ""),
        (MIDDLE, "        self.scheduler.balance_gather()\n", ""),
        (MIDDLE, "        return result\n", ""),
    ],
)  # fmt: skip
def test_what_one_release_has_in_another_wording(read: Read, version: str, old: str, new: str) -> None:
    declined(read, version, changed(version, old, new))


@pytest.mark.parametrize("version", VLLM)
def test_the_gate_in_another_place_twice_or_not_there(read: Read, version: str) -> None:
    text, found = released(version), gate(version)
    assert text.count(found) == 1
    late = text.replace(found, "").replace(LATE, f"{found}{LATE}")
    twice = text.replace(found, f"{found}{found}")
    for mutant in (late, twice, text.replace(found, "")):
        assert "balance_queue" in mutant
        declined(read, version, mutant)


@pytest.mark.parametrize("version", VLLM)
def test_a_second_definition_of_a_known_function(read: Read, version: str) -> None:
    more = "\n\ndef _balance_scheduling_enabled(vllm_config) -> bool:\n    return False\n"
    found = declined(read, version, released(version) + more)
    assert "it is defined a second time" in [finding.why for finding in found.uncovered]


@pytest.mark.parametrize("version", VLLM)
@pytest.mark.parametrize("method", ["schedule", "balance_gather", "__init__"])
def test_a_method_that_is_not_there(read: Read, version: str, method: str) -> None:
    declined(read, version, released(version).replace(block(version, f"def {method}("), ""))


@pytest.mark.parametrize("version", VLLM)
def test_an_else_of_upstreams_that_is_not_there(read: Read, version: str) -> None:
    text = released(version)
    at = text.index("new_computed_blocks = self.kv_cache_manager.empty_kv_cache_blocks")
    begin = text.rindex("                else:\n", 0, at)
    found = block(version, "new_computed_blocks = self.kv_cache_manager.empty")
    after = text.index(found) + len(found)
    while text[after:].startswith(" " * 20) or text[after] == "\n":
        after = text.index("\n", after) + 1
    told = declined(read, version, text[:begin] + text[after:])
    assert [finding.why for finding in told.uncovered] == ["upstream's `else` is not there"]


def test_a_module_that_does_nothing_any_more(read: Read) -> None:
    (finding,) = declined(read, MIDDLE, "import time\n").uncovered
    assert finding.why == "the class, or the call that asks for ours is not there"


def test_what_an_older_copy_lacks_is_not_taken_out_of_a_newer_one(read: Read) -> None:
    lost = block(MIDDLE, "if self.current_step < request.next_decode_eligible_step")
    (finding,) = declined(read, MIDDLE, released(MIDDLE).replace(lost, "")).uncovered
    assert finding.why == "upstream has it, and it decides what runs"


@pytest.mark.parametrize("version", VLLM)
def test_a_plain_statement_that_it_lacks_is_only_behind(read: Read, version: str) -> None:
    text = changed(version, "        self.kv_cache_manager.new_step_starts()\n", "")
    found = read(version, text)
    assert found.covered
    assert "self.kv_cache_manager.new_step_starts()" in [finding.text for finding in found.behind]
