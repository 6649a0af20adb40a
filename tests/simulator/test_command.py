"""The command: what it leaves, what it refuses before anything starts, and what an interrupt leaves whole."""

import csv
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from balance_patcher.extras import command_for
from tools.simulator import cli, running

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--ranks", "2", "--requests", "40", "--prompt", "20", "--output", "6", "--no-plots")


@pytest.fixture
def lane(tmp_path):
    """A Python that stands in for a lane's."""
    file = tmp_path / "python"
    here = Path(__file__).parent
    file.write_text(
        f'#!/bin/sh\nPYTHONPATH="{here}:$PYTHONPATH" exec {sys.executable} {here / "lane_standin.py"} "$@"\n'
    )
    file.chmod(0o755)
    (tmp_path / "pids").mkdir()
    return str(file)


@pytest.fixture
def command(capsys):
    """Run the command in this process: its exit status, and what it printed."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main([str(one) for one in arguments])
        said = capsys.readouterr()
        return caught.value.code, said.out + said.err

    return run


def started(*arguments, tmp_path, **standin):
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "STANDIN": json.dumps(standin), "STANDIN_PIDS": str(tmp_path / "pids"),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "tools.simulate", *map(str, arguments)], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left(folder):
    return sorted(entry.name for entry in folder.iterdir())


class TestRun:
    def test_it_leaves_a_folder_for_each_part_and_a_summary(self, command, lane, tmp_path):
        out = tmp_path / "out"
        code, said = command("run", *SMALL, "--ranks", "2,4", "--lane", lane, "-o", out)
        assert code == 0, said
        parts = [f"{ranks}-ranks-{gate}" for ranks in (2, 4) for gate in ("off", "on", "catch-up")]
        assert left(out) == sorted([*parts, "job.json", "summary.csv", "worker.log"])
        with (out / "summary.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [f"{row['ranks']}-ranks-{row['gate']}" for row in rows] == parts
        assert [row["requests"] for row in rows] == ["20"] * 3 + ["40"] * 3
        assert "4 ranks, 40 requests" in said
        assumed = " ".join(said.split())
        assert "vLLM 0.0; cap 32, 8,192 tokens a step; 5 requests/s a rank (Poisson), 20 + 6 tokens" in assumed
        assert "a step takes 20 ms, 80 µs a prompt token, 200 µs a decoding request" in assumed
        assert {row["vllm"] for row in rows} == {"0.0"}
        assert left(out / parts[0]) == ["figures.json", "requests.csv", "running.csv", "steps.csv"]

    def test_what_it_leaves_of_the_requests_is_a_trace_again(self, command, lane, tmp_path):
        assert command("run", *SMALL, "--lane", lane, "-o", tmp_path / "one")[0] == 0
        trace = tmp_path / "one" / "2-ranks-off" / "requests.csv"
        code, said = command(
            "run", "--ranks", 2, "--trace", trace, "--lane", lane, "-o", tmp_path / "two", "--no-plots"
        )
        assert code == 0, said
        assert (tmp_path / "two" / "2-ranks-off" / "requests.csv").read_text() == trace.read_text()

    def test_a_failed_part_is_told_with_the_log_and_the_finished_ones_are_shown(
        self, command, lane, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("STANDIN", '{"fail": "on"}')
        out = tmp_path / "out"
        code, said = command("run", *SMALL, "--gates", "off,on", "--lane", lane, "-o", out, "-j", 1)
        assert code == 3
        assert "BP952" in said
        assert "this vLLM has another scheduler" in said
        assert "2 ranks, 40 requests" in said
        assert left(out) == ["2-ranks-off", "job.json", "summary.csv", "worker.log"]

    def test_a_part_of_before_is_not_shown_as_one_of_now(self, command, lane, tmp_path, monkeypatch):
        arguments = ("run", *SMALL, "--gates", "off", "--lane", lane, "-o", tmp_path / "out")
        assert command(*arguments)[0] == 0
        monkeypatch.setenv("STANDIN", '{"fail": "off"}')
        code, said = command(*arguments)
        assert code == 3
        assert "output tokens/s" not in said
        assert "2-ranks-off" not in left(tmp_path / "out")

    def test_the_help_shows_the_step_and_the_lane_that_are_taken(self, command):
        code, said = command("run", "--help")
        words = re.sub(r"[\s│]+", "", said)
        assert code == 0
        assert "leftoutisbase=0.02,prefill=8e-05,decode=0.0002." in words
        assert "[default:(thisPythonifithasvLLM,elsemain)]" in words

    def test_without_matplotlib_there_are_tables_and_the_extra_is_named(self, command, lane, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        arguments = [one for one in SMALL if one != "--no-plots"]
        code, said = command("run", *arguments, "--lane", lane, "-o", tmp_path / "out")
        assert code == 0, said
        assert command_for("plots") in said
        code, said = command("plot", tmp_path / "out")
        assert code == 3
        assert "BP513" in said
        assert command_for("plots") in said

    def test_plots_are_drawn_again_from_what_was_left(self, command, lane, tmp_path):
        pytest.importorskip("matplotlib")
        out = tmp_path / "out"
        assert command("run", *SMALL, "--ranks", "2,9", "--lane", lane, "-o", out)[0] == 0
        code, said = command("plot", out)
        assert code == 0
        assert [Path(line).name for line in said.split()] == ["running-2-ranks.png", "running-9-ranks.png"]
        for line in said.split():
            assert Path(line).read_bytes().startswith(b"\x89PNG")

    def test_a_plot_of_parts_whose_settings_are_lost_is_refused(self, command, lane, tmp_path):
        assert command("run", *SMALL, "--lane", lane, "-o", tmp_path / "out")[0] == 0
        (tmp_path / "out" / "job.json").unlink()
        code, said = command("plot", tmp_path / "out")
        assert code == 3
        assert "BP514" in said
        assert "job.json: No such file" in said


class TestWhatIsAssumed:
    def job(self, *arguments, command, lane, tmp_path):
        code, said = command("run", *SMALL, *arguments, "--lane", lane, "-o", tmp_path / "out")
        assert code == 0, said
        return running.job_in(tmp_path / "out").described()

    def test_bursts_and_what_the_rank_has(self, command, lane, tmp_path):
        arguments = ("--burst", 8, "--rate", 2.5, "--async-scheduling", "--kv-tokens", 4096, "--max-num-seqs", 4)
        said = self.job(*arguments, "--dispatcher", "round-robin", command=command, lane=lane, tmp_path=tmp_path)
        assert said == (
            "cap 4, 8,192 tokens a step, asynchronous scheduling, KV cache of 4,096 tokens; 2.5 requests/s a rank "
            "(bursts of 8), 20 + 6 tokens on average; dispatcher round-robin; "
            "a step takes 20 ms, 80 µs a prompt token, 200 µs a decoding request"
        )

    def test_a_closed_loop(self, command, lane, tmp_path):
        said = self.job("--closed", 40, command=command, lane=lane, tmp_path=tmp_path)
        assert "; closed loop, 40 requests a rank, 20 + 6 tokens on average; " in said

    def test_a_recorded_trace(self, command, lane, tmp_path):
        trace = tmp_path / "mine.csv"
        trace.write_text("arrival,prompt,output\n0,5,3\n1,5,3\n")
        said = self.job("--trace", trace, command=command, lane=lane, tmp_path=tmp_path)
        assert "; trace mine.csv; dispatcher vllm; " in said


class TestInterrupt:
    def test_finished_parts_are_left_whole_the_missing_are_named_and_nothing_goes_on(self, lane, tmp_path):
        out = tmp_path / "out"
        arguments = ("run", *SMALL, "--lane", lane, "-o", out, "-j", 2)
        process = started(*arguments, tmp_path=tmp_path, hang=["on", "catch-up"])
        pids = tmp_path / "pids"
        until(lambda: (out / "2-ranks-off").exists() and len(left(pids)) == 2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert "Not simulated: 2-ranks-on, 2-ranks-catch-up." in said
        assert "--resume" in said
        assert left(out) == ["2-ranks-off", "job.json", "summary.csv", "worker.log"]
        assert json.loads((out / "2-ranks-off" / "figures.json").read_text())["requests"] == 40
        assert len((out / "summary.csv").read_text().splitlines()) == 2
        until(lambda: not any(alive(pid) for pid in left(pids)), 10)

        before = (out / "2-ranks-off").stat().st_mtime_ns
        process = started(*arguments, "--resume", tmp_path=tmp_path)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert len((out / "summary.csv").read_text().splitlines()) == 4
        assert (out / "2-ranks-off").stat().st_mtime_ns == before

    def test_it_ends_with_whoever_started_it(self, lane, tmp_path):
        process = started(
            "run", *SMALL, "--lane", lane, "-o", tmp_path / "out", "-j", 3, tmp_path=tmp_path, hang=["on"]
        )
        pids = tmp_path / "pids"
        until(lambda: left(pids))
        process.kill()
        process.communicate(timeout=60)
        until(lambda: not any(alive(pid) for pid in left(pids)), 10)

    def test_other_settings_are_not_gone_on_with(self, command, lane, tmp_path):
        out = tmp_path / "out"
        assert command("run", *SMALL, "--lane", lane, "-o", out, "-j", 1)[0] == 0
        code, said = command("run", *SMALL, "--seed", 2, "--lane", lane, "-o", out, "--resume")
        assert code == 2
        assert "BP007" in said
        code, said = command("run", *SMALL, "--lane", lane, "-o", out, "--resume", "-j", 2)
        assert code == 0, said


class TestRefusals:
    """Each before anything is started or written."""

    @pytest.mark.parametrize(
        ("text", "line", "what"),
        [
            ("arrival,prompt,output\n0,5,5\n1,-5,5\n", 3, "below 1"),
            ("arrival,prompt,output\n0,5,5\n2,5,5\n1,5,5\n", 4, "not sorted"),
            ("arrival,prompt\n0,5\n", 1, "no column output"),
            ("arrival,prompt,output\n0,60,9000\n", 2, "the model takes 8192"),
            ("arrival,prompt,output\n0,many,5\n", 2, "not a number"),
            ("arrival,prompt,output\n", 1, "no request follows the header"),
            ("", 1, "no column"),
            ("\ufeffarrival,prompt,output\r\n0,5,5\r\n\r\n0,5,0\r\n", 4, "below 1"),
        ],
        ids="negative unsorted columns long word header empty bom-crlf".split(),
    )
    def test_a_bad_trace_is_refused_with_its_line(self, command, lane, tmp_path, text, line, what):
        file = tmp_path / "trace.csv"
        file.write_bytes(text.encode())
        code, said = command("run", "--trace", file, "--lane", lane, "-o", tmp_path / "out")
        assert code == 2
        assert said.startswith("BP950")
        assert f"{file}:{line}: " in said
        assert what in said
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("rank", ["2", "-1"])
    def test_a_rank_that_is_not_there_is_refused_with_its_line(self, command, lane, tmp_path, rank):
        file = tmp_path / "trace.csv"
        file.write_text(f"arrival,prompt,output,rank\n0,5,5,1\n0,5,5,{rank}\n")
        code, said = command(
            "run", "--ranks", 2, "--dispatcher", "recorded", "--trace", file, "--lane", lane, "-o", tmp_path / "out"
        )
        assert code == 2
        assert f"{file}:3: rank {rank}" in said

    @pytest.mark.parametrize(
        "wrong",
        [
            ("--ranks", "1"), ("--ranks", "513"), ("--ranks", "x"), ("--gates", "half"), ("--step", "speed=2"),
            ("--kv-tokens", "50"), ("--requests", "0"), ("--dispatcher", "clever"),
        ],
        ids=" ".join,
    )  # fmt: skip
    def test_wrong_usage_is_refused(self, command, lane, tmp_path, wrong):
        code, _ = command("run", *SMALL, *wrong, "--lane", lane, "-o", tmp_path / "out")
        assert code == 2
        assert not (tmp_path / "out").exists()

    def test_a_folder_that_cannot_be_written_is_refused(self, command, lane, tmp_path):
        (tmp_path / "file").touch()
        code, said = command("run", *SMALL, "--lane", lane, "-o", tmp_path / "file" / "out")
        assert code == 3
        assert "BP515" in said

    def test_nothing_to_plot_is_refused(self, command, tmp_path):
        code, said = command("plot", tmp_path)
        assert code == 3
        assert "BP514" in said


class TestLane:
    def test_a_lane_that_is_not_there_is_refused_with_how_to_make_it(self, command, tmp_path):
        code, said = command("run", *SMALL, "--lane", "nowhere", "-o", tmp_path / "out")
        assert code == 3
        assert "BP512" in said
        assert "python -m tools.lanes nowhere" in said

    def test_without_any_the_one_to_make_is_named(self, command, tmp_path, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: find(name, *more) if name != "vllm" else None
        )
        monkeypatch.setattr(running, "LANES", tmp_path)
        code, said = command("run", *SMALL, "-o", tmp_path / "out")
        assert code == 3
        assert "python -m tools.lanes main" in said

    def test_a_python_without_vllm_says_so(self, command, tmp_path):
        if importlib.util.find_spec("vllm") is not None:
            pytest.skip("this Python has vLLM")
        code, said = command("run", *SMALL, "--lane", sys.executable, "-o", tmp_path / "out")
        assert code == 3
        assert "BP952" in said
        assert "vllm" in said


class TestHelp:
    def test_every_command_has_one(self, command):
        assert {*"run fit plot recorder".split()} <= {*command("--help")[1].split()}
        for name, option in (("run", "--dispatcher"), ("fit", "CSV"), ("plot", "DIR"), ("recorder", "DIR")):
            code, said = command(name, "--help")
            assert code == 0
            assert option in said


def test_fit_prints_what_step_takes(command, tmp_path):
    for rank, scale in enumerate((1, 3)):
        rows = [f"{step},{step % 7 * 100 * scale},{step % 5 * scale},{0.02 + step % 7 * 0.03 + step % 5 * 0.006}"
                for step in range(35)]  # fmt: skip
        (tmp_path / f"steps-{rank}.csv").write_text("step,prefill_tokens,decode_batch,seconds\n" + "\n".join(rows))
    code, said = command("fit", *sorted(tmp_path.iterdir()))
    assert code == 0
    # All ranks took what the second, which had three times as much to do, needed.
    assert said.startswith("--step base=0.02,prefill=0.0001,decode=0.002\n34 steps")


def test_the_recorder_is_plugged_in_by_a_folder_on_the_path(command, tmp_path):
    code, said = command("recorder", tmp_path / "plug")
    assert code == 0
    assert f"BALANCE_STEPS={tmp_path / 'plug'}" in said
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "plug")])
    (entry,) = found.entry_points
    assert (entry.group, entry.load().__name__) == ("vllm.general_plugins", "register")
