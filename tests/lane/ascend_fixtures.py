"""A release of vllm-ascend beside a lane, and jobs for it: each is a process of its own, and is run once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LANE = Path(sys.prefix)
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["balance_patcher"]["beside"]
WHEELS = LANE / "beside"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The metadata of an installed balance_patcher, so that vLLM finds its plugins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path_factory.mktemp("site") / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return info.parent


@pytest.fixture(scope="session")
def ascend(site, tmp_path_factory):
    """Run a job of the driver; the same job in the same environment is run once."""
    assert (WHEELS / "vllm_ascend" / "__init__.py").is_file(), f"{WHEELS} is missing: make lanes"
    done = {}

    def run(job, **environment):
        key = json.dumps([job, environment], sort_keys=True)
        if key not in done:
            folder = tmp_path_factory.mktemp(job)
            first = environment.pop("first", "")
            path = [first, str(ROOT), str(HERE), str(ROOT / "tests" / "stubs"), str(site), str(WHEELS)]
            child = {
                **os.environ, "BALANCE_PATCHER": "auto", "ASCEND_FOLDER": str(folder), "VLLM_LOGGING_LEVEL": "INFO",
                "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(LANE / ".vllm-cache"),
                # vllm-ascend's platform needs an NPU; its connector plugin applies all its global patches.
                "VLLM_PLUGINS": "balance_patcher,ascend_kv_connector",
                "PYTHONPATH": os.pathsep.join(filter(None, path)), **environment,
            }  # fmt: skip
            command = [sys.executable, "-c", "import ascend_driver; ascend_driver.main()", job]
            answer = subprocess.run(
                command, env=child, cwd=folder, capture_output=True, text=True, timeout=1500, check=False
            )
            lines = [line for line in answer.stdout.splitlines() if line.startswith('{"ascend"')]
            assert lines, f"{answer.stdout[-4000:]}\n{answer.stderr[-4000:]}"
            done[key] = json.loads(lines[-1])["ascend"], answer.stdout + answer.stderr
        return done[key]

    return run
