"""The NPU check without vLLM: what it makes of what was counted, what it says, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from balance_patcher.errors import Outcome
from balance_patcher.npu import session
from balance_patcher.npu.block import NO_DEVICE, block
from balance_patcher.npu.counter import COPY, READ, WAIT
from balance_patcher.npu.engines import DEVICE_MOE, environment, furnish, plugins
from balance_patcher.npu.figures import Judged, Verdict, judge, seen
from balance_patcher.npu.plugin import CONTROL, COUNT, DEVICE, FOLDER

VERSIONS = {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch": "2.11.0"}


def process(*, enabled=None, sound=True, counts=None, steps=100, control=0, gathers=()):
    first = {"waits": [], "seen": {READ: 1, COPY: 1, WAIT: 1}, "sound": sound, "hardware": "Ascend910B"}
    first |= {} if enabled is None else {"enabled": enabled, "digest": "503ea7a72908"}
    lines = [
        {"phase": "", "steps": 0, "counts": {}, "gathers": list(gathers)},
        {"phase": COUNT, "steps": steps, "counts": counts or {}, "gathers": []},
        {"phase": CONTROL, "steps": steps, "counts": {"schedule": {READ: control}} if control else {}, "gathers": []},
    ]
    return [first, *lines]


def off(**more):
    rank = process(enabled=False, **more)
    return seen({"rank-0": rank, "rank-1": rank})


def on(**more):
    rank = process(**({"enabled": True, "control": 200, "gathers": [100_000] * 99 + [900_000]} | more))
    return seen({"rank-0": rank, "rank-1": rank})


class TestVerdict:
    def test_nothing_where_balance_works_is_nothing_added(self):
        upstreams = {"": {COPY: 100}, "agree": {READ: 3}}
        assert judge(off(counts=upstreams), on(counts=upstreams)).verdict is Verdict.NONE_ADDED

    @pytest.mark.parametrize("place", ["schedule", "gather"])
    @pytest.mark.parametrize("kind", [READ, COPY, WAIT])
    def test_one_wait_in_all_steps_is_enough(self, place, kind):
        judged = judge(off(), on(counts={place: {kind: 1}}))
        assert judged.verdict is Verdict.ADDED
        assert judged.reasons == (f"0.01 x {kind} a step in {place}, 0.00 with balance off",)

    def test_what_upstream_does_in_the_same_place_leaves_it_open(self):
        judged = judge(off(counts={"schedule": {READ: 50}}), on(counts={"schedule": {READ: 60}}))
        assert judged.verdict is Verdict.UNKNOWN

    @pytest.mark.parametrize(
        ("one", "other", "why"),
        [
            (off(sound=False), on(), "balance off, rank-0: of one read, one copy and one wait the counter saw"),
            (off(), on(sound=False), "balance on, rank-0"),
            (off(), on(control=0), "the counter is blind in schedule()"),
            (off(), on(steps=0), "balance on: no step was counted"),
            (off(), on(gathers=[]), "no gather was timed"),
            (off(), on(enabled=False), "balance was not on"),
            (seen({"rank-0": process(enabled=True)} | {"rank-1": process(enabled=True)}), on(), "balance was on"),
            (seen({}), on(), "0 of 2 engine cores wrote anything"),
        ],
    )
    def test_what_could_not_be_seen_is_no_pass(self, one, other, why):
        judged = judge(one, other)
        assert judged.verdict is Verdict.UNKNOWN
        assert any(why in reason for reason in judged.reasons), judged.reasons

    def test_a_blind_worker_is_no_pass_either(self):
        rank = process(enabled=True, control=200, gathers=[1])
        workers = seen({"rank-0": rank, "rank-1": rank, "worker-7": process(sound=False)})
        assert judge(off(), workers).verdict is Verdict.UNKNOWN

    def test_what_workers_saw_is_counted_a_step_of_an_engine_core(self):
        rank = process(enabled=False)
        found = seen({"rank-0": rank, "rank-1": rank, "worker-7": process(counts={"": {COPY: 400}})})
        assert found.steps == 200
        assert found.a_step([COPY]) == 2.0


class TestBlock:
    def test_it_can_be_pasted(self):
        one, other = off(), on()
        text = block(one, other, VERSIONS, "npu", judge(one, other))
        for line in (
            "### balance: device synchronisations per step (npu)",
            "**Balance adds no device synchronisation.**",
            "| scalar read | 0.00 | 0.00 |",
            "| of them in `gather` | 0.00 | 0.00 |",
            "| steps counted | 200 | 200 |",
            "Gather, with the wait for the slower rank: p50 100 µs, p99 900 µs of 200.",
            "- hardware: Ascend910B",
            "- versions: vllm 0.23.0, vllm-ascend 0.23.0, torch 2.11.0",
            "- digest: 503ea7a72908",
        ):
            assert line in text.splitlines()
        assert "put on the NPU as a control, 400 reads were seen in `schedule`" in text
        assert "Not verified here" in text
        assert "This proves nothing" not in text

    def test_reasons_are_listed(self):
        one, other = off(), on(counts={"schedule": {READ: 100}})
        lines = block(one, other, VERSIONS, "npu", judge(one, other)).splitlines()
        assert "**Balance makes the host wait for the device.**" in lines
        assert "- 1.00 x scalar read a step in schedule, 0.00 with balance off" in lines

    def test_without_a_device_it_says_that_it_proves_nothing(self):
        one, other = off(), on()
        text = block(one, other, VERSIONS, "cpu", judge(one, other))
        assert f"**Not checked. {NO_DEVICE}" in text

    def test_nothing_written_is_a_block_too(self):
        text = block(seen({}), seen({}), {}, "npu", judge(seen({}), seen({})))
        assert "**Could not be checked.**" in text
        assert "- hardware: unknown" in text


class TestEnd:
    @pytest.mark.parametrize(
        ("verdict", "device", "outcome"),
        [
            (Verdict.NONE_ADDED, "npu", Outcome.HOLDS), (Verdict.NONE_ADDED, "cuda", Outcome.HOLDS),
            (Verdict.ADDED, "npu", Outcome.BROKEN), (Verdict.UNKNOWN, "npu", Outcome.UNKNOWN),
            (Verdict.NONE_ADDED, "cpu", Outcome.UNKNOWN), (Verdict.ADDED, "cpu", Outcome.BROKEN),
        ],
    )  # fmt: skip
    def test_the_cpu_is_never_a_pass(self, verdict, device, outcome):
        assert session.outcome(Judged(verdict, ()), device) is outcome

    def test_without_vllm_it_says_so(self):
        with pytest.raises(Exception, match="BP512"):
            session.run_check("", "cpu", lambda _: None)


class TestSurroundings:
    def test_the_owners_plugins_are_kept(self):
        assert plugins({}) == {}
        assert plugins({"VLLM_PLUGINS": "ascend"}) == {"VLLM_PLUGINS": "ascend,balance_patcher,balance_patcher_npu"}

    def test_on_an_npu_the_owners_environment_holds(self, monkeypatch, tmp_path):
        monkeypatch.setenv("OMP_NUM_THREADS", "24")
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        found = environment(tmp_path, tmp_path / "on", "on", "npu", str(tmp_path))
        assert found["OMP_NUM_THREADS"] == "24"
        assert "VLLM_PLUGINS" not in found
        assert (found["BALANCE_PATCHER"], found[DEVICE], found[FOLDER]) == ("auto", "npu", str(tmp_path / "on"))
        assert environment(tmp_path, tmp_path, "on", "cpu", str(tmp_path))["OMP_NUM_THREADS"] == "1"

    def test_a_model_of_ones_own_may_be_fetched(self, monkeypatch, tmp_path):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert environment(tmp_path, tmp_path, "on", "npu", str(tmp_path))["HF_HUB_OFFLINE"] == "1"
        assert "HF_HUB_OFFLINE" not in environment(tmp_path, tmp_path, "on", "npu", "somebody/moe")

    def test_unpatched_arms_nothing(self, tmp_path):
        assert environment(tmp_path, tmp_path, "unpatched", "cpu", str(tmp_path))["BALANCE_PATCHER"] == "off"

    def test_the_models_and_the_plugin_are_written(self, tmp_path: Path):
        furnish(tmp_path)
        assert {place.name for place in tmp_path.iterdir()} == {"cpu", "npu", "cuda", "site"}
        (points,) = tmp_path.glob("site/*/entry_points.txt")
        assert "balance_patcher.npu.plugin:register" in points.read_text()
        assert DEVICE_MOE["head_dim"] % 64 == 0
