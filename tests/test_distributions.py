"""Features of other distributions: found, told by whose they are, and imported only when somebody asks for them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from balance_patcher import byname, cli, distributions, inspection, registry
from balance_patcher.build import compile_plan
from balance_patcher.check import check_lane
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.plan import make_plan
from balance_patcher.source import Lane, LaneSpec
from balance_patcher.terminal_status import as_text
from tests.conftest import RELEASES
from tests.distributions import put, put_example

OWN = ["balance", "prefill_preemption"]
TOY = """
from balance_patcher.delta import Delta, Prologue, Variant
from balance_patcher.feature import Feature

STOP = Delta(
    "NAME.stop", "vllm.toy:Pump.run", "why", "upstream", "when", (Variant("only", edits=(Prologue("self.x = 1"),)),),
)
FEATURE = Feature("NAME", "A toy.", (STOP,))
"""


def toy(name: str) -> str:
    return TOY.replace("NAME", name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Install distributions into a folder that is on the path; what was imported from it is forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)

    def make(name: str = "", points: dict[str, str] | None = None, files: dict[str, str] | None = None) -> Path:
        info = put(folder, name, points or {}, files or {}) if name else put_example(folder)
        importlib.invalidate_caches()
        distributions.offers.cache_clear()
        return info

    distributions.load.cache_clear()
    yield make
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
    distributions.offers.cache_clear()
    distributions.load.cache_clear()


def names() -> list[str]:
    return [feature.name for feature in registry.all_features()]


class TestFound:
    def test_one_that_is_installed_is_among_all(self, site: Callable[..., Path]) -> None:
        site()
        assert names() == [*(feature.name for feature in registry.features()), "step_tally"]
        assert registry.all_broken() == ()
        feature = registry.find_feature("step_tally")
        assert feature.distribution == "vllm-step-tally 1.0"
        assert re.fullmatch(r"/.*/site/step_tally\.py:\d+", feature.declared)
        assert feature.remove_when == ("vLLM counts its steps itself", "vLLM counts its requests itself")

    def test_an_entry_point_may_lead_to_the_feature_itself(self, site: Callable[..., Path]) -> None:
        site("toys", {"toy": "toys:FEATURE"}, {"toys.py": toy("toy")})
        assert registry.find_feature("toy").deltas[0].name == "toy.stop"

    def test_who_asks_for_ours_alone_looks_for_no_distribution(
        self, site: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site()
        monkeypatch.setattr(registry, "offers", lambda: pytest.fail("it was looked for"))
        assert registry.of_others(OWN) == ((), {})
        assert registry.find_feature("balance").name == "balance"
        assert "step_tally" not in {feature.name for feature in registry.features()}

    def test_of_those_that_are_found_only_what_is_asked_for_is_imported(self, site: Callable[..., Path]) -> None:
        site()
        site("toys", {"toy": "toys"}, {"toys.py": "raise RuntimeError('imported')"})
        (feature,), lost = registry.of_others(["step_tally"])
        assert (feature.name, lost) == ("step_tally", {})
        assert "toys" not in sys.modules

    def test_they_are_looked_for_once_a_process(
        self, site: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site()
        from importlib import metadata

        real, asked = metadata.distributions, []
        monkeypatch.setattr(metadata, "distributions", lambda: asked.append(1) or real())
        registry.all_features()
        registry.find_feature("step_tally")
        registry.all_broken()
        assert asked == [1]

    def test_a_distribution_behind_another_of_its_name_does_not_count(
        self, site: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tmp_path / "behind", "toys", {"toy": "toys"}, {"toys.py": toy("other")}, "0.9")
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "behind")])
        site("toys", {"toy": "toys"}, {"toys.py": toy("toy")})
        assert [offer.distribution for offer in distributions.offers()] == ["toys 1.0"]
        assert "toy" in names()

    def test_the_command_line_starts_without_looking(self) -> None:
        """Finding them costs milliseconds, and importing what finds them costs more."""
        code = (
            "import sys\nfrom balance_patcher import plugin\nplugin.arm()\n"
            "print('importlib.metadata' in sys.modules, 'balance_patcher.distributions' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == ["False", "True"]


BROKEN = {
    "no module": ({"toy": "nowhere"}, {}, "ModuleNotFoundError: No module named 'nowhere'"),
    "no attribute": ({"toy": "toys:THING"}, {"toys.py": toy("toy")}, "AttributeError"),
    "an import that fails": ({"toy": "toys"}, {"toys.py": "\nimport torch_of_nobody\n"}, "torch_of_nobody"),
    "no Python": ({"toy": "toys"}, {"toys.py": "x = (\n"}, "SyntaxError"),
    "one that ends the process": ({"toy": "toys"}, {"toys.py": "raise SystemExit(3)"}, "SystemExit: 3"),
    "no feature": ({"toy": "toys"}, {"toys.py": "x = 1"}, "toys is no feature and has no FEATURE"),
    "something else": ({"toy": "toys"}, {"toys.py": "FEATURE = 'toy'"}, "toys is no feature and has no FEATURE"),
    "another name": ({"toy": "toys"}, {"toys.py": toy("pump")}, "it is called 'pump' there"),
    "a bad declaration": ({"toy": "toys"}, {"toys.py": toy("toy").replace('"when"', '" "')}, "`remove_when`"),
    "a name of ours": ({"balance": "toys"}, {"toys.py": toy("balance")}, "balance_patcher has one of that name"),
}


class TestBroken:
    @pytest.mark.parametrize(("points", "files", "said"), BROKEN.values(), ids=BROKEN)
    def test_it_is_told_by_its_distribution_and_takes_no_sound_one_down(
        self, points: dict[str, str], files: dict[str, str], said: str, site: Callable[..., Path]
    ) -> None:
        site()
        site("broken-toys", points, files)
        assert names() == [*(feature.name for feature in registry.features()), "step_tally"]
        (failure,) = registry.all_broken()
        assert failure.code == "BP002"
        assert said in failure.what
        assert dict(failure.fields)["distribution"].startswith("broken-toys 1.0 in ")

    def test_where_it_failed_is_told(self, site: Callable[..., Path]) -> None:
        site("toys", {"toy": "toys"}, {"toys.py": "\n\nVarient()\n"})
        (failure,) = registry.all_broken()
        assert re.search(r"/site/toys\.py:3$", dict(failure.fields)["declared"])

    def test_two_distributions_of_one_name_are_both_left_out(self, site: Callable[..., Path]) -> None:
        site("toys-a", {"toy": "toys_a"}, {"toys_a.py": toy("toy")})
        site("toys-b", {"toy": "toys_b"}, {"toys_b.py": toy("toy")})
        assert "toy" not in names()
        assert [failure.what for failure in registry.all_broken()] == [
            "feature 'toy' of toys-a 1.0 cannot be used: toys-b 1.0 brings one of that name too",
            "feature 'toy' of toys-b 1.0 cannot be used: toys-a 1.0 brings one of that name too",
        ]
        with pytest.raises(PatchError, match="toys-a") as caught:
            registry.find_feature("toy")
        assert "toys-b" in str(caught.value)

    def test_entry_points_that_cannot_be_read_are_told(self, site: Callable[..., Path]) -> None:
        info = site("toys", {"toy": "toys"}, {"toys.py": toy("toy")})
        (info / "entry_points.txt").write_text("[balance_patcher.features]\ntoy\n")
        site()
        assert "step_tally" in names()
        (failure,) = registry.all_broken()
        assert dict(failure.fields)["distribution"].startswith("toys 1.0 in ")

    def test_a_stand_in_is_for_our_own_features_only(self, site: Callable[..., Path]) -> None:
        text = toy("toy").replace('"A toy.", (STOP,)', '"A toy.", (STOP,), stand_in=StandIn("o", "their.patch", print)')
        site("toys", {"toy": "toys"}, {"toys.py": f"from balance_patcher.standin import StandIn\n{text}"})
        (failure,) = registry.all_broken()
        assert "stands in for another project's module" in failure.what

    def test_one_that_nobody_brings_is_unknown_and_all_are_named(self, site: Callable[..., Path]) -> None:
        site()
        with pytest.raises(PatchError, match=r"BP003.*'pump'") as caught:
            registry.find_feature("pump")
        assert "balance, " in caught.value.failures[0].next
        assert caught.value.failures[0].next.endswith(", step_tally")


class TestShown:
    def lane(self, folder: Path) -> str:
        (folder / "vllm").mkdir(parents=True)
        (folder / "vllm" / "__init__.py").write_text("")
        (folder / "vllm" / "toy.py").write_text("class Pump:\n    def run(self):\n        self.x = 0\n")
        return f"dir:{folder}"

    def run(self, *arguments: str) -> int:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        return int(stop.value.code or 0)

    def test_verify_looks_at_it_and_at_nothing_that_is_broken(
        self, site: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        site("toys", {"toy": "toys"}, {"toys.py": toy("toy")})
        lane = self.lane(tmp_path / "lane")
        assert self.run("verify", lane, "--feature", "toy", "--format", "json") == 0
        (found,) = json.loads(capsys.readouterr().out)["lanes"][0]["features"]
        assert (found["name"], found["status"]) == ("toy", "applied")
        site("broken-toys", {"pump": "pumps"}, {"pumps.py": "x = 1"})
        assert self.run("verify", lane, "--feature", "toy") == 0
        assert self.run("verify", lane) == 2
        out = capsys.readouterr().out
        assert "feature 'pump' of broken-toys 1.0 cannot be used" in out
        assert "toy.stop" in out

    def test_status_says_who_brings_it_and_what_it_says_of_others(
        self, site: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site()
        monkeypatch.setenv(byname.FEATURES, "step_tally")
        status = inspection.status()
        state = status.feature("step_tally")
        assert (state.distribution, state.after, state.active) == ("vllm-step-tally 1.0", ("balance",), False)
        text = as_text(status)
        assert "brought by   vllm-step-tally 1.0" in text
        assert "can go when  disabled-path, count-step: vLLM counts its steps itself" in text
        assert "features asked for by name: step_tally" in text

    def test_status_tells_what_is_broken(self, site: Callable[..., Path]) -> None:
        site("broken-toys", {"pump": "pumps"}, {"pumps.py": "x = 1"})
        assert "feature 'pump' of broken-toys 1.0 cannot be used" in as_text(inspection.status())


@pytest.mark.parametrize("version", RELEASES)
def test_the_example_is_placed_on_every_release_beside_ours(
    version: str, release_dir: Callable[[str], Path], site: Callable[..., Path]
) -> None:
    site()
    report, _ = check_lane(LaneSpec(version, f"dir:{release_dir(version)}"), registry.all_features())
    assert report.outcome is Outcome.HOLDS, [str(failure) for failure in report.all_failures]
    (tally,) = [feature for feature in report.features if feature.name == "step_tally"]
    assert [(delta.name, delta.status) for delta in tally.deltas] == [
        (f"step_tally.{name}", "applied") for name in ("disabled-path", "count-step", "count-request")
    ]


def test_the_examples_of_the_example_hold(site: Callable[..., Path], text_lane: Callable[..., Lane]) -> None:
    site()
    registry.find_feature("step_tally")
    module = sys.modules["step_tally"]
    deltas = {delta.name: delta for delta in module.FEATURE.deltas}
    for example in module.EXAMPLES:
        delta = deltas[example.delta]
        lane = text_lane({delta.module.replace(".", "/") + ".py": example.before, "vllm/__init__.py": ""})
        _, (compiled,) = compile_plan(make_plan(lane, replace(module.FEATURE, deltas=(delta,), invariants=())))
        assert re.sub(r"  # bp: \S+$", "", compiled.text, flags=re.MULTILINE).strip() == example.after.strip()
    for refusal in module.REFUSES:
        delta = deltas[refusal.delta]
        lane = text_lane({delta.module.replace(".", "/") + ".py": refusal.before, "vllm/__init__.py": ""})
        with pytest.raises(PatchError) as caught:
            compile_plan(make_plan(lane, replace(module.FEATURE, deltas=(delta,), invariants=())))
        assert [failure.code for failure in caught.value.failures] == [refusal.code]
