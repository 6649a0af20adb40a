"""The bench without vLLM: intervals, verdicts, stages, what is printed and what is written."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from balance_patcher.errors import PatchError
from tools.measuring import cli, commands, engines, installing, machine, table, turns
from tools.measuring.lanes import Lane, declared, run_in
from tools.measuring.ratios import Interval, difference, middle, ratio, slope
from tools.measuring.results import Results, Row, Verdict, counted, row, shares
from tools.measuring.stages import REST, STAGES, Stages

FACTS = {
    "cpu": "made up", "cores": 2, "system": "x", "python": "3.11.7", "commit": "0123456789abcdef", "changed": False,
    "started": "now", "load before": 0.1, "load after": 0.2, "lanes": {"main": {"vllm": "0.32.0"}},
}  # fmt: skip


def drawn(centre: float, spread: float, seed: int, count: int = 300) -> list[float]:
    pick = random.Random(seed)
    return [centre + pick.gauss(0, spread) for _ in range(count)]


# -- intervals -------------------------------------------------------------------------------


class TestIntervals:
    def test_the_median_lies_in_its_interval_which_narrows_with_more_samples(self):
        few, many = (middle(drawn(100, 10, 1, count)) for count in (20, 2000))
        assert few.low <= few.value <= few.high
        assert many.low < 100 < many.high
        assert many.high - many.low < (few.high - few.low) / 4

    def test_the_same_samples_give_the_same_interval(self):
        samples = drawn(100, 10, 2)
        assert middle(samples) == middle(samples)

    @pytest.mark.parametrize(("figure", "truth"), [(ratio, 1.03), (difference, 3.0)])
    def test_the_truth_lies_in_about_95_of_100_intervals(self, monkeypatch, figure, truth):
        monkeypatch.setattr("tools.measuring.ratios.DRAWS", 200)
        found = [figure(drawn(103, 5, seed, 60), drawn(100, 5, seed + 1000, 60)) for seed in range(100)]
        assert 88 <= sum(one.low < truth < one.high for one in found) <= 99

    def test_what_hits_a_whole_round_does_not_widen_a_ratio(self):
        """That is what measuring in turns is for; in another order the same samples say less."""
        pick = random.Random(5)
        slow = [pick.uniform(1, 3) for _ in range(300)]
        ours, theirs = [101 * one for one in slow], [100 * one for one in slow]
        apart = theirs[:]
        pick.shuffle(apart)
        together, shuffled = ratio(ours, theirs), ratio(ours, apart)
        assert together.high - together.low < (shuffled.high - shuffled.low) / 10

    def test_one_slow_sample_says_nothing(self):
        samples = [*drawn(100, 1, 6), 1e6]
        assert middle(samples).high < 101

    def test_a_slope_is_what_the_cost_grows_by(self):
        bases = [drawn(100, 1, 7), drawn(5000, 1, 8)]
        flat = slope([[one + 10 for one in base] for base in bases], bases)
        assert flat.low <= 0 <= flat.high
        grown = slope([[one + 10 for one in bases[0]], [one + 50 for one in bases[1]]], bases)
        assert grown.low <= 40 <= grown.high
        assert grown.low > 30


# -- verdicts --------------------------------------------------------------------------------


def of(value, low, high, limit, **more):
    return Row("schedule", "main", "on / upstream", "x", value, low, high, limit, **more)


class TestVerdicts:
    @pytest.mark.parametrize(
        ("one", "verdict"),
        [
            (of(1.01, 1.00, 1.015, 1.02), Verdict.MET),
            (of(1.01, 1.00, 1.02, 1.02), Verdict.MET),
            (of(1.01, 0.99, 1.03, 1.02), Verdict.UNSURE),
            (of(1.03, 1.01, 1.05, 1.02), Verdict.UNSURE),
            (of(1.05, 1.03, 1.07, 1.02), Verdict.MISSED),
            (of(None, 0, 0, 1.02), Verdict.UNKNOWN),
            (of(1.05, 1.03, 1.07, None), Verdict.NONE),
            (of(1.05, 1.05, 1.05, 1.02, once=True), Verdict.UNSURE),
            (of(1.01, 1.01, 1.01, 1.02, once=True), Verdict.UNSURE),
            (of(6.0, 5.9, 6.1, 2.0, spent=1.3), Verdict.UNSURE),
            (of(6.0, 5.9, 6.1, 2.0, spent=2.3), Verdict.MISSED),
            (of(1.9, 1.8, 1.95, 2.0, spent=2.3), Verdict.MET),
        ],
    )
    def test_an_interval_on_both_sides_of_the_target_is_no_pass(self, one, verdict):
        assert one.verdict is verdict

    @pytest.mark.parametrize(
        ("rows", "lost", "failed"),
        [
            ([of(1, 1, 1, 2), of(9, 9, 9, None)], {}, False),
            ([of(1, 1, 1, 2), of(2, 1, 3, 2)], {}, True),
            ([of(3, 3, 3, 2)], {}, True),
            ([of(None, 0, 0, 2)], {}, True),
            ([of(1, 1, 1, 2)], {"engine on main": "it died"}, True),
        ],
    )
    def test_only_what_is_met_for_sure_is_no_failure(self, rows, lost, failed):
        assert Results({}, rows, lost).failed() is failed

    def test_what_asks_for_attention_is_counted_first(self):
        rows = [of(1, 1, 1, 2), of(1, 1, 1, 2), of(3, 3, 3, 2), of(1, 1, 1, None)]
        assert counted(rows) == [(Verdict.MISSED, 1), (Verdict.MET, 2)]

    def test_the_largest_stages_are_named(self):
        assert shares({"a": 1.0, "b": 20.0, "c": 3.0, "d": 2.0}) == "b 20.0 ms, c 3.0 ms, d 2.0 ms of 26.0 ms"


# -- what is written and printed ----------------------------------------------------------------


def results() -> Results:
    rows = [
        row("install", "main", "balance, fresh process", "ms", Interval(52.1, 50, 54), limit=40.0,
            why="parse 20.0 ms of 52.1 ms", detail={"parse": 20.0}),
        of(1.008, 1.001, 1.013, 1.02, why="the gate takes 15.1 µs"),
        of(1.008, 0.99, 1.03, 1.01),
        row("schedule", "main", "gate", "µs", Interval(12.34, 12, 13)),
    ]  # fmt: skip
    return Results(dict(FACTS), rows)


class TestOutputs:
    def test_the_json_is_whole_and_gives_the_same_results_back(self):
        text = results().text()
        content = json.loads(text)
        assert content["schema"] == 1
        assert content["machine"]["lanes"] == {"main": {"vllm": "0.32.0"}}
        assert [one["verdict"] for one in content["rows"]] == ["missed", "met", "unsure", ""]
        assert content["rows"][0]["detail"] == {"parse": 20.0}
        assert Results.of(text).text() == text

    @pytest.mark.parametrize("width", [80, 150])
    def test_the_table_says_what_was_measured_wanted_and_why(self, width):
        out = io.StringIO()
        table.show(results(), Console(file=out, width=width))
        text = " ".join(out.getvalue().split())
        if width > 100:
            assert "52.1 ms │ 50.0 ms .. 54.0 ms │ ≤ 40.0 ms │ missed: parse 20.0 ms of 52.1 ms" in text
            assert "1.008 │ 1.001 .. 1.013 │ ≤ 1.020 │ met: the gate takes 15.1 µs" in text
        assert "targets: 1 missed, 1 unsure, 1 met" in text
        assert "load 0.1 before, 0.2 after" in text
        assert "busy" not in text

    def test_a_busy_machine_and_a_lost_part_are_said(self):
        out = io.StringIO()
        table.show(Results(FACTS | {"load before": 3.0}, [], {"engine on main": "it died"}), Console(file=out))
        assert "The machine was busy" in out.getvalue()
        assert "not measured: engine on main: it died" in out.getvalue()

    @pytest.mark.parametrize(
        ("value", "unit", "text"),
        [(1.0078, "x", "1.008"), (0.0, "n", "0"), (3.14159, "ms", "3.14 ms"), (31.4159, "ms", "31.4 ms"),
         (3141.59, "/s", "3,142 /s")],
    )  # fmt: skip
    def test_figures_have_three_digits(self, value, unit, text):
        assert table.number(value, unit) == text

    def test_the_machine_is_described(self):
        found = machine.facts()
        assert found["cpu"]
        assert len(found["commit"]) == 40
        assert found["load before"] >= 0


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def lane(tmp_path):
    return f"main={sys.executable}"


class TestCommand:
    def run(self, monkeypatch, rows, *words):
        def measured(lanes, scale, tell):
            return rows

        monkeypatch.setattr(commands, "verify", measured)
        return CliRunner().invoke(cli.app, ["--part", "verify", *words])

    @pytest.mark.parametrize(
        ("one", "check", "status"),
        [
            (of(1, 1, 1, 2), False, 0), (of(3, 3, 3, 2), False, 0), (of(1, 1, 1, 2), True, 0),
            (of(3, 3, 3, 2), True, 1), (of(2, 1, 3, 2), True, 1),
        ],
    )  # fmt: skip
    def test_a_missed_target_is_an_error_only_when_that_is_asked(self, monkeypatch, tmp_path, lane, one, check, status):
        words = ["--lane", lane, "--output", str(tmp_path / "out"), *(["--check"] if check else [])]
        done = self.run(monkeypatch, [one], *words)
        assert done.exit_code == status, done.output
        assert Results.of((tmp_path / "out" / "verify.json").read_text("utf-8")).rows == [one]

    def test_nothing_measured_is_could_not_check(self, monkeypatch, tmp_path, lane):
        assert self.run(monkeypatch, [], "--lane", lane, "--output", str(tmp_path)).exit_code == 3

    def test_a_lane_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(PatchError, match="BP512"):
            Lane.of("nowhere", tmp_path)

    def test_the_lanes_are_those_that_are_declared(self, monkeypatch):
        monkeypatch.setattr(Lane, "of", staticmethod(lambda text: text))
        assert declared() == ["release", "main"]

    def test_a_part_that_fails_is_told_with_its_log_and_the_others_go_on(self, tmp_path):
        """This Python has no vLLM, so the worker cannot even say its versions."""
        found = Results(dict(FACTS))
        run_in(Lane("main", Path(sys.executable)), "schedule", 0.1, tmp_path, found, lambda _: None, 60)
        assert found.rows == []
        (why,) = found.lost.values()
        assert "No module named" in why

    def test_a_command_that_fails_is_named_with_what_it_said(self, monkeypatch):
        monkeypatch.setattr(commands, "sys", types.SimpleNamespace(executable="false"))
        with pytest.raises(PatchError, match=r"BP960 .*-m balance_patcher verify main` ended with status 1"):
            commands.verify(["main"], 0.1, lambda _: None)


# -- stages ------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch):
    """Two modules of a made-up stage each; the second has the first's function under a name of its own."""
    clock = iter(range(100))
    monkeypatch.setattr("tools.measuring.stages.time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    inner, outer = types.ModuleType("balance_patcher.inner"), types.ModuleType("balance_patcher.outer")

    def work():
        return "done"

    def many():
        yield from "ab"

    inner.work, inner.many = work, many
    outer.known = work

    def whole():
        return outer.known()

    outer.whole = whole
    for one in (inner, outer):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return inner, outer


class TestStages:
    def test_a_stage_has_its_own_time_without_what_stands_in_it(self, package):
        _, outer = package
        stages = Stages({"inner": ("balance_patcher.inner:work",), "outer": ("balance_patcher.outer:whole",)})
        with stages:
            assert outer.whole() == "done"
        # The clock goes on by one at each look: outer begins, inner begins, inner ends, outer ends.
        assert stages.times == {"inner": 1000.0, "outer": 2000.0, REST: 0.0}
        stages.rest(5000.0)
        assert stages.times[REST] == 2000.0

    def test_everything_is_as_before_afterwards(self, package):
        inner, outer = package
        before = inner.work, outer.known
        with Stages({"inner": ("balance_patcher.inner:work",)}):
            assert inner.work is outer.known is not before[0]
        assert (inner.work, outer.known) == before

    def test_a_lazy_function_is_timed_to_its_end(self, package):
        inner, _ = package
        stages = Stages({"inner": ("balance_patcher.inner:many",)})
        with stages:
            assert "".join(inner.many()) == "ab"
        assert stages.times["inner"] == 1000.0

    def test_parsing_is_no_compiling(self, package):
        stages = Stages({"parse": ("ast:parse",), "compile": ("builtins:compile",)})
        with stages:
            ast.parse("1 + 1")
            assert stages.times == {"parse": 1000.0, "compile": 0.0, REST: 0.0}
            assert eval(compile("1 + 1", "x", "eval")) == 2  # noqa: S307 - ours
        assert stages.times == {"parse": 1000.0, "compile": 1000.0, REST: 0.0}

    def test_a_function_that_is_gone_is_said(self, package):
        with Stages({"inner": ("balance_patcher.inner:nobody",)}) as stages:
            pass
        assert stages.missing == ["balance_patcher.inner:nobody"]

    def test_the_reason_of_a_miss_is_made_of_the_stages(self):
        stages = dict.fromkeys([*STAGES, REST], 1.0) | {"compile": 30.0}
        samples = [
            {"install": 45.0, "spent": 44.0, "stages": stages, "import": 20.0, "again": [], "features": ["balance"]}
        ] * 3
        assert installing.rows("main", "balance", samples[:1])[0].verdict is Verdict.UNSURE
        first, *others = installing.rows("main", "balance", samples)
        assert (first.verdict, first.why.partition(",")[0]) == (Verdict.MISSED, "compile 30.0 ms")
        assert [one.what.strip() for one in others[:-1]] == list(stages)


# -- turns -------------------------------------------------------------------------------------


class TestTurns:
    def test_each_variant_is_asked_once_a_round_in_a_process_of_its_own(self):
        def make(base):
            def ready():
                calls = iter(range(1000))
                return lambda: 1_000_000 * base + next(calls)

            return ready

        found = turns.in_turns({"a": make(1), "b": make(2)}, 20)
        assert [len(samples) for samples in found.values()] == [20, 20]
        # As many rounds more came before those that are kept.
        assert found["a"] == [1_000_000 + at for at in range(15, 35)]
        assert found["b"] == [2_000_000 + at for at in range(15, 35)]

    def test_each_life_is_a_new_process_and_warms_up_again(self):
        def ready():
            calls = iter(range(1000))
            return lambda: next(calls)

        assert turns.in_turns({"a": ready}, 3, lives=2)["a"] == [3, 4, 5, 3, 4, 5]

    def test_a_variant_that_fails_is_named_and_nothing_is_left(self, capfd):
        def broken():
            raise ValueError("no such shape")

        def children():
            return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

        before = children()  # other tests may have left some of theirs
        with pytest.raises(RuntimeError, match="'b' failed"):
            turns.in_turns({"a": lambda: lambda: 1, "b": broken}, 3)
        assert "no such shape" in capfd.readouterr().err
        assert children() <= before


# -- real engines -------------------------------------------------------------------------------


class TestEngines:
    def test_what_differs_while_the_gate_is_open_is_the_cost(self):
        seconds = {"unpatched": 2.0, "off": 2.0, "on": 2.1}
        sent = {
            (load, mode): [{"requests": 36, "tokens": 840, "seconds": seconds[mode]}] * 4
            for load in engines.BURSTS for mode in engines.MODES
        }  # fmt: skip
        gather = engines.gathered([1_000_000, 2_000_000, 6_000_000, 1_000_000], 0.05)
        rows = {one.what: one for one in engines.rates("main", sent, gather)}
        assert rows["gate never closes, off: tokens"].value == 420
        assert rows["gate never closes, on: requests"].value == pytest.approx(36 / 2.1)
        assert rows["gate never closes: on / unpatched"].value == pytest.approx(1.05)
        assert rows["gate never closes: on / unpatched"].why == (
            "of the time; a rank is in its gather for 10.0 % of the time, 2.50 ms a step (half of them under 2.00), "
            "in which it waits for the other rank too"
        )
        assert rows["gate never closes: off / unpatched"].why == "of the time"
        assert engines.gathered([], 1.0) == "no gather was timed"
        assert "not what it costs" in rows["gate closes: on / unpatched"].why
        assert all(one.limit is None for one in rows.values())

    @pytest.mark.parametrize(
        ("sound", "reads", "verdict"),
        [(True, 0.0, Verdict.MET), (True, 0.5, Verdict.MISSED), (False, 0.0, Verdict.UNKNOWN)],
    )
    def test_reads_beyond_upstreams_and_a_blind_counter_are_no_pass(self, sound, reads, verdict):
        def mode(ours):
            return types.SimpleNamespace(
                first={"rank-0": {"sound": sound}},
                steps=10,
                a_step=lambda kinds=(), places=None: ours if places else 1.0,
            )

        rows = engines.reads("main", {"unpatched": mode(0.0), "off": mode(0.0), "on": mode(reads)})
        assert rows[-1].verdict is verdict
