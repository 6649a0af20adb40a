"""`verify --live` on real engine cores of this lane: what it sees, and that it sees what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.processes import members, plugin_site

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
HOOK = "vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs"

pytestmark = pytest.mark.timeout(900)

# Each of these is a general plugin of somebody else.
OVERWRITES = f"""
def register():
    from balance_patcher import guards
    from vllm.v1.engine.core import DPEngineCoreProc

    decide = guards.decide

    def later(*args):
        made = decide(*args)
        if any(decision.active for decision in made):
            DPEngineCoreProc.{HOOK.rpartition(".")[2]} = lambda self, local: local
        return made

    guards.decide = later
"""
WRAPS_BEFORE = f"""
def register():
    from vllm.v1.engine.core import DPEngineCoreProc

    upstream = DPEngineCoreProc.{HOOK.rpartition(".")[2]}

    def theirs(self, *args):
        return upstream(self, *args)

    DPEngineCoreProc.{HOOK.rpartition(".")[2]} = theirs
"""
HANGS = """
def register():
    import multiprocessing
    import time

    if multiprocessing.parent_process() is not None:
        time.sleep(1000)
"""


def their_site(folder, text):
    """A folder with somebody else's general plugin."""
    info = folder / "theirs" / "somebody_else-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-else\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsomebody_else = somebody_else:register\n")
    (info.parent / "somebody_else.py").write_text(text)
    return info.parent


def package(folder):
    """A folder with our package alone: beside it in a checkout may lie the metadata of an installed one."""
    bare = folder / "package"
    bare.mkdir()
    (bare / "balance_patcher").symlink_to(ROOT / "balance_patcher")
    return bare


class Live:
    """One run of the command: its status, its report as JSON and as text, and what it left running."""

    def __init__(self, folder, *, ours=True, theirs="", method="fork", environment=()):
        path = [package(folder), *([plugin_site(folder)] if ours else [])]
        path += [their_site(folder, theirs)] if theirs else []
        text = folder / "report.txt"
        command = [sys.executable, "-m", "balance_patcher", "verify", "--live", "--feature", "balance"]
        command += ["--start-method", method, "--format", "json", "--report", f"text:{text}"]
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={
                **os.environ, "BALANCE_PATCHER": "auto", "PYTHONPATH": os.pathsep.join(map(str, path)),
                **dict(environment),
            },
        )  # fmt: skip
        out, self.error = process.communicate(timeout=800)
        self.code, self.text = process.returncode, text.read_text(encoding="utf-8")
        self.left = members(process.pid)
        self.lanes = {lane["name"]: lane for lane in json.loads(out)["lanes"]}

    def lines(self, lane):
        (feature,) = self.lanes[lane]["features"]
        return {line["name"]: (line["status"], line["detail"]) for line in feature["invariants"]}

    def failures(self, lane):
        (feature,) = self.lanes[lane]["features"]
        return [failure["code"] for failure in feature["failures"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def live(folder):
    return Live(folder(), method="spawn")


class TestInstalled:
    """With our entry points, in spawned engine cores, as vLLM's servers start them."""

    def test_it_passes_on_the_installed_lane_off_and_on(self, live):
        assert live.code == 0, live.text + live.error
        assert list(live.lanes) == ["installed", "live off", "live balance"]
        assert {lane["status"] for lane in live.lanes.values()} == {"ok"}

    def test_both_ranks_are_real_and_spawned(self, live):
        status, detail = live.lines("live balance")["the engine cores start"]
        assert status == "holds"
        assert detail == "ranks 0, 1: vllm.v1.engine.core:DPEngineCoreProc, by spawn"

    def test_on_the_declared_functions_run(self, live):
        lines = live.lines("live balance")
        for target, file in ((SCHEDULE, SCHEDULE.partition(":")[0]), (HOOK, HOOK)):
            status, detail = lines[f"{target} as declared"]
            assert status == "holds"
            assert f"(<balance_patcher {file}>:" in detail
            assert detail.startswith("ranks 0, 1: ")

    def test_on_the_decision_the_class_and_the_ranks_agree(self, live):
        lines = live.lines("live balance")
        assert "balance: ON rank" in lines["each of them decided once"][1]
        assert "BalanceScheduler" in lines["the scheduler class is BalanceScheduler"][1]
        assert lines["the ranks run the same"][1].startswith("digest ")
        assert HOOK in lines["what was bound is there"][1]

    def test_it_was_taken_out_again_without_a_trace(self, live):
        assert live.lanes["live balance"]["features"][0]["reversible"] is True

    def test_off_upstreams_own_run(self, live):
        lines = live.lines("live off")
        for target in (SCHEDULE, HOOK):
            status, detail = lines[f"{target} without ours"]
            assert status == "holds"
            assert ".py:" in detail
            assert "somebody else" not in detail
        assert "OFF because" in lines["each of them decided once"][1]
        assert lines["nothing is bound"][0] == "holds"
        assert lines["the scheduler class is not BalanceScheduler"][0] == "holds"

    def test_a_person_is_told_each_line(self, live):
        for lane in ("live off", "live balance"):
            for name, (status, detail) in live.lines(lane).items():
                assert f"{status:<8}{name}: {detail}" in live.text
        assert "takes out clean" in live.text

    def test_nothing_is_left_running(self, live):
        assert live.left == []


def test_case_5_without_entry_points_it_is_declared_but_not_installed(folder):
    """vllm-ascend #7479, #7611: the import of the patch was dropped, and nobody noticed."""
    live = Live(folder(), ours=False)
    assert live.code == 1, live.text + live.error
    assert live.failures("live balance") == live.failures("live off") == ["BP608"]
    assert "BP608 declared but not installed: feature 'balance' is not in rank 0, 1" in live.text
    assert "no distribution of this Python has our entry points" in live.text
    assert live.lanes["installed"]["status"] == "ok"


def test_case_5_filtered_by_vllm_plugins_it_is_declared_but_not_installed(folder):
    live = Live(folder(), environment={"VLLM_PLUGINS": "somebody_else"})
    assert live.code == 1, live.text + live.error
    assert live.failures("live balance") == ["BP608"]
    assert "VLLM_PLUGINS=somebody_else leaves balance_patcher out" in live.text


def test_a_patch_that_overwrites_ours_later_is_named(folder):
    live = Live(folder(), theirs=OVERWRITES)
    assert live.code == 1, live.text + live.error
    assert live.failures("live off") == []
    assert set(live.failures("live balance")) == {"BP606", "BP609"}
    assert "somebody_else.py:" in live.text
    assert live.lines("live balance")[f"{HOOK} as declared"][0] == "broken"
    assert live.lines("live balance")[f"{SCHEDULE} as declared"][0] == "holds"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_what_stops_the_engine_reaches_the_parent_whole(method, folder):
    live = Live(folder(), theirs=WRAPS_BEFORE, method=method)
    assert live.code == 1, live.text + live.error
    assert set(live.failures("live balance")) == {"BP602"}
    assert "BP602 target is wrapped" in live.text
    assert f"  target    {HOOK}   (" in live.text
    assert "somebody_else.py:" in live.text
    assert "  next      install balance_patcher before somebody_else" in live.text
    off = live.lines("live off")[f"{HOOK} without ours"]
    assert off[0] == "holds"
    assert "wrapped by somebody_else.register.<locals>.theirs" in off[1]


def test_engine_cores_that_hang_are_ended_and_nothing_was_checked(folder, monkeypatch):
    from balance_patcher import live
    from balance_patcher.registry import find_feature

    where = folder()
    for name, value in {
        "BALANCE_PATCHER": "auto", "PYTHONPATH": os.pathsep.join([str(ROOT), str(their_site(where, HANGS))]),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(live.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    reports = live.check_live([find_feature("balance")], "spawn", limit=60)
    assert {report.status for report in reports} == {"unknown"}
    codes = {failure.code for report in reports for failure in report.all_failures}
    assert codes == {"BP516"}
    assert "they had not ended after 60 s" in str(reports[0].all_failures[0])
    assert members(started[0].pid) == []


def test_our_own_target_arms_a_spawned_engine_core_without_entry_points(folder):
    """Where nobody installed us properly, but whoever starts engines binds ours first."""
    where = folder()
    for name in ("off", "on"):
        (where / name).mkdir()
    runs = {str(where / "off"): {}, str(where / "on"): {"enable_balance_scheduling": True}}
    settings = json.dumps({"start_method": "spawn", "runs": runs})
    script = where / "start.py"
    script.write_text(
        "import sys\n"
        "from balance_patcher import launch, live_engine, plugin\n"
        "if __name__ == '__main__':\n"
        "    launch.bind()\n"
        "    live_engine.main(sys.argv[1])\n"
        "    assert not plugin.armed()\n"
    )
    environment = {**os.environ, "BALANCE_PATCHER": "auto", "PYTHONPATH": str(package(where))}
    done = subprocess.run(
        [sys.executable, str(script), settings],
        env=environment,
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for name, active in (("off", False), ("on", True)):
        reports = [json.loads(file.read_text()) for file in (where / name).glob("*.json")]
        assert len(reports) == 2, done.stdout[-4000:]
        states = [f for report in reports for f in report["status"]["features"] if f["name"] == "balance"]
        assert [[made["active"] for made in state["decisions"]] for state in states] == [[active]] * 2
        assert {report["start_method"] for report in reports} == {"spawn"}
