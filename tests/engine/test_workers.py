"""Real workers in processes of their own: what belongs to a worker is decided there, before its device and weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from processes import HERE, ROOT, end, ended, plugin_site, surroundings

LOADING = "Starting to load model"

pytestmark = pytest.mark.timeout(600)


def engine(folder, worker, additional):
    """What one engine with two workers printed, that was to answer two prompts."""
    settings = {
        "model": str(HERE.parent / "lane" / "tiny_moe"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "tensor_parallel_size": 2,
        "worker_cls": f"own_worker.{worker}",
        "additional_config": additional,
    }
    told = [{"environment": {}, "settings": settings, "prompts": [2]}]
    environment = surroundings([plugin_site(folder), ROOT, HERE / "site"])
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_PLUGINS": "balance_patcher"}
    words = [sys.executable, str(HERE / "offline.py"), json.dumps(told)]
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=400)
    finally:
        end(ended(process.pid, 0 if process.poll() is None else 10))
    return printed


@pytest.mark.launch("one lane")
def test_each_worker_has_the_hooks_before_it_loads_weights(tmp_path):
    printed = engine(tmp_path, "Worker", {"enable_eplb_hooks": True})
    assert '"answers": [[5, 5], [12, 12]]' in printed, printed[-5000:]
    workers = dict(re.findall(r"OWN WORKER (\d+) of (\d+) hooks=True", printed))
    assert len(workers) == 2
    assert len(set(workers.values())) == 1  # the engine core's process, which is another
    before, _, _ = printed.partition(LOADING)
    assert sorted(re.findall(r"eplb_hooks: ON rank 0/1 worker=(\d)", before)) == ["0", "1"]
    assert not re.search(r"EngineCore.*eplb_hooks:", printed)


@pytest.mark.launch("rest")
def test_asked_for_and_not_to_be_had_no_weights_are_loaded(tmp_path):
    printed = engine(tmp_path, "Broken", {"enable_eplb_hooks": True})
    assert '"error"' in printed
    assert "BP603 target was replaced: EplbState.rearrange is not upstream's function" in printed
    assert LOADING not in printed
    assert "hooks=" not in printed


@pytest.mark.launch("rest")
def test_not_asked_for_nothing_is_there(tmp_path):
    printed = engine(tmp_path, "Worker", {})
    assert '"answers": [[5, 5], [12, 12]]' in printed, printed[-5000:]
    assert len(re.findall(r"OWN WORKER \d+ of \d+ hooks=False", printed)) == 2
    assert "eplb_hooks: ON" not in printed
