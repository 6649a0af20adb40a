"""What engine cores wrote down is compared rightly: each line holds, and each has a way to be broken.

The reports are made here, from what the text of a release gives; tests/lane has those of real engine cores.
"""

from __future__ import annotations

import base64
import copy
import json
import marshal
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from balance_patcher import cli, live
from balance_patcher.bound import begins_at
from balance_patcher.build import compile_plan
from balance_patcher.errors import Failure, Outcome
from balance_patcher.live_checks import Run, compare
from balance_patcher.plan import make_plan
from balance_patcher.probe import FOLDER
from balance_patcher.proof import compile_text, find_code
from balance_patcher.registry import find_feature
from balance_patcher.report import FeatureReport, LaneReport
from balance_patcher.source import DirSource, Lane
from tests.conftest import ROOT

BALANCE = find_feature("balance")
SCHEDULE, HOOK = (target for target in BALANCE.targets if target.endswith((".schedule", "_unfinished_reqs")))
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
OURS = "balance_patcher.deltas.balance:balance_scheduler.<locals>.BalanceScheduler"


@pytest.fixture
def lane(release_dir: Callable[[str], Path]) -> Lane:
    return Lane("installed", DirSource("installed", release_dir("0.32.0")))


def item(code: CodeType, origin: str) -> dict[str, str]:
    return {"code": base64.b64encode(marshal.dumps(code)).decode(), "origin": origin}


def foreign(name: str = "theirs") -> dict[str, str]:
    return item(compile(f"def {name}(): pass", "/their/patch.py", "exec"), f"{name} (/their/patch.py:1)")


class Reports:
    """The reports of two ranks, as they should be."""

    def __init__(self, lane: Lane) -> None:
        plan = make_plan(lane, BALANCE)
        self.ours = {c.target: item(c.code, f"ours ({c.filename}:1)") for c in compile_plan(plan)[1]}
        self.upstream = {}
        for target in (plan.target(name) for name in plan.steps):
            module = compile_text(target.text.text, target.text.display)
            code = find_code(module, target.qualname, begins_at(target.node))
            assert code is not None
            self.upstream[target.name] = item(code, f"upstream ({target.text.display}:{target.node.lineno})")

    def run(self, *, on: bool) -> Run:
        found = self.ours if on else self.upstream
        state = {
            "name": "balance", "installed": on, "running": "abc" if on else None, "failures": [],
            "decisions": [{"engine": 0, "active": on, "reason": "because", "failures": []}],
            "bindings": [{"place": HOOK}] if on else [],
        }  # fmt: skip
        report = {
            "reached": True, "start_method": "spawn", "engine": "vllm.v1.engine.core:DPEngineCoreProc",
            "scheduler": [*([OURS] if on else []), SCHEDULER],
            "targets": {name: {"holder": "somebody", "reached": [found[name]]} for name in found},
            "parts": {"balance": ["balance"] if on else None},
            "taken_out": {"balance": {"clean": True, "lost": [], "failures": []} if on else None},
            "status": {
                "features": [state], "takeovers": [], "armed": {"how": "calls through us"},
                "switches": [{"name": "VLLM_PLUGINS", "value": None, "means": ""}],
            },
        }  # fmt: skip
        return Run("balance" if on else "off", {}, [{**copy.deepcopy(report), "rank": rank} for rank in (1, 0)])


@pytest.fixture
def reports(lane: Lane) -> Reports:
    return Reports(lane)


def state(report: dict[str, Any]) -> dict[str, Any]:
    (found,) = report["status"]["features"]
    assert isinstance(found, dict)
    return found


def seen(run: Run, lane: Lane) -> FeatureReport:
    return compare(BALANCE, run, lane, "spawn")


def codes(found: FeatureReport) -> list[str]:
    return [failure.code for failure in found.failures]


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_what_is_right_holds_in_every_line(on: bool, reports: Reports, lane: Lane) -> None:  # noqa: FBT001
    found = seen(reports.run(on=on), lane)
    assert (found.outcome, found.status) == (Outcome.HOLDS, "holds")
    assert {line.status for line in found.invariants} == {"holds"}
    assert len(found.invariants) == len(reports.ours) + (5 if on else 4)
    assert found.reversible is (True if on else None)
    assert found.invariants[0].detail == "ranks 0, 1: vllm.v1.engine.core:DPEngineCoreProc, by spawn"


Change = Callable[[Reports, dict[str, Any]], object]
GONE = {"code": "BP606", "what": "gone", "next": "look"}


def reaches(target: str, report: dict[str, Any], *items: dict[str, str]) -> None:
    report["targets"][target]["reached"] = list(items)


#: On or off, what one rank has of another kind, the ids of the findings, and something that they say.
BREAKS: dict[str, tuple[bool, Change, str, str]] = {
    "nobody decided": (True, lambda _, r: state(r).update(decisions=[]), "BP608", "is not in rank 1"),
    "nobody decided, off": (False, lambda _, r: state(r).update(decisions=[]), "BP608", "is not in rank 1"),
    "decided twice": (True, lambda _, r: state(r)["decisions"].append(state(r)["decisions"][0]), "BP609", "ON once"),
    "decided otherwise": (False, lambda _, r: state(r)["decisions"][0].update(active=True), "BP609", "OFF once"),
    "not installed": (True, lambda _, r: state(r).update(installed=False), "BP609", "is not installed"),
    "installed though off": (False, lambda _, r: state(r).update(installed=True), "BP609", "is installed"),
    "bound though off": (False, lambda _, r: state(r).update(bindings=[{"place": "p"}]), "BP609", "is installed"),
    "overwritten": (True, lambda _, r: state(r).update(failures=[GONE]), "BP606", "in rank 1: gone"),
    "upstream's runs": (True, lambda s, r: reaches(HOOK, r, s.upstream[HOOK]), "BP609", "in rank 1"),
    "somebody else's runs": (True, lambda _, r: reaches(SCHEDULE, r, foreign()), "BP609", "/their/patch.py"),
    "nothing runs": (True, lambda _, r: reaches(SCHEDULE, r), "BP609", "nothing that has code"),
    "ours runs though off": (False, lambda s, r: reaches(HOOK, r, s.ours[HOOK]), "BP609", "nothing of ours"),
    "another scheduler": (True, lambda _, r: r.update(scheduler=[SCHEDULER]), "BP609", "Scheduler"),
    "ours though off": (False, lambda _, r: r.update(scheduler=[OURS, SCHEDULER]), "BP609", "BalanceScheduler"),
    "ranks disagree": (True, lambda _, r: state(r).update(running="xyz"), "BP609", "digests"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_in_one_rank_is_a_finding(name: str, reports: Reports, lane: Lane) -> None:
    on, change, expected, said = BREAKS[name]
    run = reports.run(on=on)
    change(reports, run.reports[0])
    found = seen(run, lane)
    assert set(codes(found)) == {expected}
    assert found.outcome is Outcome.BROKEN
    assert said in "\n".join(map(str, found.failures))
    assert any(line.status == "broken" for line in found.invariants)


def test_a_wrapper_through_which_ours_is_reached_is_told_and_no_finding(reports: Reports, lane: Lane) -> None:
    run = reports.run(on=True)
    run.reports[0]["targets"][HOOK]["reached"].insert(0, foreign())
    found = seen(run, lane)
    assert found.outcome is Outcome.HOLDS
    (line,) = [line for line in found.invariants if line.name.startswith(HOOK)]
    assert "rank 1: ours" in line.detail
    assert "wrapped by theirs (/their/patch.py:1)" in line.detail


def test_what_others_do_to_an_engine_that_is_off_is_told_and_no_finding(reports: Reports, lane: Lane) -> None:
    run = reports.run(on=False)
    run.reports[0]["targets"][HOOK]["reached"].insert(0, foreign())
    run.reports[1]["targets"][HOOK]["reached"] = [foreign("another")]
    found = seen(run, lane)
    assert found.outcome is Outcome.HOLDS
    (line,) = [line for line in found.invariants if line.name.startswith(HOOK)]
    assert "wrapped by theirs" in line.detail
    assert "somebody else's another" in line.detail


def test_what_does_not_come_out_clean_is_a_finding(reports: Reports, lane: Lane) -> None:
    run = reports.run(on=True)
    run.reports[1]["taken_out"]["balance"]["clean"] = False
    found = seen(run, lane)
    assert (found.reversible, found.outcome) == (False, Outcome.BROKEN)


def test_where_a_feature_stands_in_its_class_may_be_there_though_it_is_off(reports: Reports, lane: Lane) -> None:
    run = reports.run(on=False)
    for report in run.reports:
        report["status"]["takeovers"] = [{"feature": "balance", "ours": True}]
        report["parts"]["balance"] = ["balance"]
        report["scheduler"] = [OURS, SCHEDULER]
        report["targets"][SCHEDULE]["reached"] = [reports.ours[SCHEDULE]]
        state(report)["bindings"] = [{"place": "p"}]
    assert seen(run, lane).outcome is Outcome.HOLDS
    run.reports[0]["targets"][HOOK]["reached"] = [reports.ours[HOOK]]  # but the engine core is upstream's
    assert codes(seen(run, lane)) == ["BP609"]


def test_an_engine_core_that_did_not_get_there_was_not_checked(reports: Reports, lane: Lane) -> None:
    run = reports.run(on=True)
    del run.reports[0]
    run.ended, run.log = "they had not ended after 9 s", "the last lines"
    found = seen(run, lane)
    assert (codes(found), found.outcome, found.status) == (["BP516"], Outcome.UNKNOWN, "unknown")
    assert "1 of 2 engine cores came to their executor; they had not ended after 9 s" in found.failures[0].what
    assert "the last lines" in str(found.failures[0])


def test_another_start_method_than_asked_for_was_not_checked(reports: Reports, lane: Lane) -> None:
    run = reports.run(on=True)
    for report in run.reports:
        report["start_method"] = "fork"
    assert seen(run, lane).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("reached", [True, False], ids=["serving without", "stopped"])
def test_what_stood_against_it_comes_through_whole(reached: bool, reports: Reports, lane: Lane) -> None:  # noqa: FBT001
    failure = Failure("BP701", "this and that", "choose one", (("asked for by", "you"),), "file.py", 3)
    run = reports.run(on=True)
    for report in run.reports:
        state(report)["decisions"][0].update(active=False, failures=[failure.as_dict()])
        if not reached:
            report.update(reached=False, decisions=[[{"feature": "balance", "failures": [failure.as_dict()]}]])
    (told,) = seen(run, lane).failures
    assert str(failure).split("\n", 1)[0] in str(told)
    assert ("asked for by", "you") in told.fields
    assert (told.next, told.file, told.line) == ("choose one", "file.py", 3)


# -- starting --------------------------------------------------------------------------------


REFUSING = """
import multiprocessing
import sys

from balance_patcher.probe import Probe


def run(_):
    from balance_patcher.errors import Failure, PatchError
    from balance_patcher.outcome import Decision, keep

    failure = Failure("BP701", "this and that", "choose")
    keep((Decision("balance", False, "OFF", (failure,)),), object(), "engine", ())
    raise PatchError(failure)


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    children = [context.Process(target=run, args=(Probe,)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_engine_core_that_refuses_writes_down_why(method: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "refusing.py", tmp_path / "reports"
    script.write_text(REFUSING)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), method], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), FOLDER: str(folder)},
    )  # fmt: skip
    written = [json.loads(file.read_text()) for file in folder.iterdir()]
    assert len(written) == 2, done.stderr
    for report in written:
        ((decision,),) = report["decisions"]
        assert report["reached"] is False
        assert (decision["feature"], decision["failures"][0]["code"]) == ("balance", "BP701")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Another program in the place of the one that starts engine cores."""
    popen = subprocess.Popen

    def put(code: str) -> None:
        file = tmp_path / "toy.py"
        file.write_text(code)
        monkeypatch.setattr(
            live.subprocess, "Popen", lambda command, **more: popen([sys.executable, str(file), command[-1]], **more)
        )

    return put


def test_what_each_run_wrote_down_is_read(toy: Callable[[str], None]) -> None:
    toy(
        "import json, pathlib, sys\n"
        "for folder, config in json.loads(sys.argv[1])['runs'].items():\n"
        "    pathlib.Path(folder, '1.json').write_text(json.dumps(config))\n"
        "print('the end')\n"
    )
    runs = [Run("off", {}), Run("balance", {"a": 1})]
    live.start(runs, "spawn", 60)
    assert [(run.reports, run.ended, run.log) for run in runs] == [([{}], "", "the end"), ([{"a": 1}], "", "the end")]


def test_a_bad_end_is_told(toy: Callable[[str], None]) -> None:
    toy("raise SystemExit(7)")
    (run,) = runs = [Run("off", {})]
    live.start(runs, "spawn", 60)
    assert run.ended == "the process that starts them ended with status 7"


def test_what_does_not_end_is_ended_with_all_that_it_started(toy: Callable[[str], None], tmp_path: Path) -> None:
    toy(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    (run,) = runs = [Run("off", {})]
    live.start(runs, "spawn", 3)
    assert run.ended == "they had not ended after 3 s"
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 20
    while (
        time.monotonic() < until and Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()
    ):
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- the command -----------------------------------------------------------------------------


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize("lanes", [["dir:."], ["main"], ["installed", "main"]])
def test_it_speaks_of_the_installed_vllm_only(lanes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--live", *lanes) == 2
    assert "--live speaks of the installed vLLM" in capsys.readouterr().err


def test_without_vllm_nothing_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--live") == 3
    out = capsys.readouterr().out
    assert out.count("BP512") == 2
    assert "Could not check: installed, live (2 of 2 lanes)." in out


@pytest.mark.parametrize("format_", ["json", "github", "markdown", "junit", "text"])
def test_every_format_carries_what_was_seen(
    format_: str, release_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], reports: Reports, lane: Lane,
) -> None:  # fmt: skip
    broken = reports.run(on=True)
    broken.reports[0]["targets"][HOOK]["reached"] = [foreign()]
    told = LaneReport("live balance", "2 engine cores, spawn", "0.32.0", features=[seen(broken, lane)])
    fine = LaneReport("live off", "2 engine cores, spawn", "0.32.0", features=[seen(reports.run(on=False), lane)])
    monkeypatch.setattr(cli, "check_live", lambda *_: [fine, told])
    monkeypatch.setattr(
        "balance_patcher.source.InstalledSource.__init__", lambda self: _at(self, release_dir("0.32.0"))
    )
    assert run("verify", "--live", "--feature", "balance", "--format", format_) == 1
    out = capsys.readouterr().out
    assert "/their/patch.py" in out
    assert "live balance" in out
    assert "does not take out clean" not in out


def _at(source: Any, root: Path) -> None:
    source.spec, source.root = "installed", root


def test_the_process_that_starts_engine_cores_imports_nothing_of_ours_until_it_is_asked() -> None:
    """vLLM's coordinator is spawned from it, too, and runs it again."""
    code = (
        "import sys, balance_patcher.live_engine\n"
        "print([n for n in sys.modules if n.startswith('balance_patcher.') and not n.endswith('live_engine')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


# -- features of other distributions ----------------------------------------------------------


class TestOfAnotherDistribution:
    THEIRS = replace(BALANCE, distribution="somebody-else 1.0")

    def test_off_nobody_has_decided_on_it(self, reports: Reports, lane: Lane) -> None:
        run_ = reports.run(on=False)
        for report in run_.reports:
            state(report)["decisions"] = []
        found = compare(self.THEIRS, run_, lane, "spawn")
        assert found.outcome is Outcome.HOLDS
        assert found.invariants[1].detail == "ranks 0, 1: somebody-else 1.0"

    def test_off_a_decision_on_it_is_told(self, reports: Reports, lane: Lane) -> None:
        found = compare(self.THEIRS, reports.run(on=False), lane, "spawn")
        assert codes(found) == ["BP609"]

    def test_on_it_is_looked_at_like_ours(self, reports: Reports, lane: Lane) -> None:
        assert compare(self.THEIRS, reports.run(on=True), lane, "spawn").outcome is Outcome.HOLDS

    def test_it_is_asked_for_by_its_name(self) -> None:
        assert live._example(self.THEIRS) == {"balance_patcher": {"features": ["balance"]}}
        assert live._example(BALANCE) == BALANCE.enabling.example  # type: ignore[union-attr]
        assert live._example(replace(BALANCE, enabling=None)) == {}
