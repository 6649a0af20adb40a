"""Slips that everybody makes: each is told what was meant, and nothing is done in silence."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import balance_patcher
from balance_patcher import byname, cli, installation, registry
from balance_patcher.check import check_lane
from balance_patcher.errors import PatchError, did_you_mean
from balance_patcher.examples import check_examples
from balance_patcher.feature import Feature
from balance_patcher.limits import KNOWN
from balance_patcher.loading import feature_of_file, feature_of_text
from balance_patcher.proof import _or_keep
from balance_patcher.relations import unknown
from balance_patcher.source import DirSource, LaneSpec
from balance_patcher.terminal_status import _absent, as_text
from tests.conftest import RELEASES

Capture = pytest.CaptureFixture[str]
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"

TOY = '''
from balance_patcher.delta import Anchor, Delta, InsertAfter, Variant
from balance_patcher.feature import Example, Feature, Refusal

DELTA = Delta(
    "toy.level", "vllm.toy:Pump.run", "why", "upstream", "when",
    (Variant("only", Anchor(ANCHOR), (InsertAfter(EDIT),)),),
)
FEATURE = Feature("toy", "A toy.", (DELTA,))
BEFORE = """
class Pump:
    def run(self):
        room = self.room()
        return room
"""
AFTER = """
class Pump:
    def run(self):
        room = self.room()
        room -= 2
        return room
"""
EXAMPLES = (Example("toy.level", BEFORE, AFTER),)
REFUSES = (Refusal("toy.level", BEFORE.replace("room()", "space()"), "BP101"),)
'''


def toy(anchor: str = "$LEFT = self.room()", edit: str = "$LEFT -= 2", **changed: str) -> Feature:
    text = TOY.replace("ANCHOR", repr(anchor)).replace("EDIT", repr(edit))
    for old, new in changed.values() if changed else ():
        assert old in text
        text = text.replace(old, new)
    return feature_of_text(text, Path("toy.py"))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def refused(call: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(PatchError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.fixture
def lane(tmp_path: Path) -> str:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    (tmp_path / "vllm/toy.py").write_text(
        "class Pump:\n    def run(self):\n        room = self.room()\n        return room\n"
    )
    return f"dir:{tmp_path}"


# -- names ------------------------------------------------------------------------------------


def test_what_is_near_goes_before_everything_else() -> None:
    assert did_you_mean("balence", ["eplb_hooks", "balance"], "use one of …") == "did you mean `balance`? use one of …"
    assert did_you_mean("zzz", ["eplb_hooks", "balance"], "use one of …") == "use one of …"


@pytest.mark.parametrize("call", [registry.find_feature, balance_patcher.install, balance_patcher.uninstall])
def test_a_feature_that_there_is_not(call: Callable[[str], object]) -> None:
    said = refused(call, "balence")
    assert said.startswith("BP003 unknown feature or target: there is no feature 'balence'\n")
    assert "did you mean `balance`? use one of: balance, " in said


@pytest.mark.parametrize(
    ("what", "meant"),
    [
        ("balence", "balance"),
        (SCHEDULE.replace(":", "."), SCHEDULE),
        (SCHEDULE.replace("schedule", "shedule"), SCHEDULE),
    ],
)
def test_what_cannot_be_shown(what: str, meant: str, lane: str, capsys: Capture) -> None:
    assert run("show", what, "--lane", lane) == 2
    assert f"did you mean `{meant}`?" in capsys.readouterr().err


def test_of_a_delta_file_its_own_names_are_told(tmp_path: Path, lane: str, capsys: Capture) -> None:
    file = tmp_path / "toy.py"
    file.write_text(TOY.replace("ANCHOR", "'room = $_'").replace("EDIT", "'self.seen = 1'"))
    assert run("show", "tay", "--deltas", str(file), "--lane", lane) == 2
    said = capsys.readouterr().err
    assert "did you mean `toy`? use one of: toy\n" in said
    assert run("show", "balance", "--deltas", str(file), "--lane", lane) == 2
    assert "use one of: toy\n" in capsys.readouterr().err


def test_a_state_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="there is no feature 'balence': did you mean `balance`"):
        balance_patcher.status().feature("balence")


# -- installing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "what", "follow"),
    [
        (["balance"], "not list", "call install() for each of them"),
        (Path("toy.py"), "not PosixPath", "install(feature_of_file('toy.py'))"),
        (None, "not NoneType", 'write install("NAME")'),
    ],
)
def test_what_is_no_feature_is_refused_with_what_was_meant(given: Any, what: str, follow: str) -> None:
    said = refused(balance_patcher.install, given)
    assert said.startswith(f"BP007 wrong usage: install() takes a feature or its name, {what}")
    assert follow in said


def test_a_file_may_be_named_by_its_text_and_by_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "toy.py"
    file.write_text(TOY.replace("ANCHOR", "'room = $_'").replace("EDIT", "'self.seen = 1'"))
    assert feature_of_file(str(file)).name == "toy"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as an editor on Windows writes it
    assert feature_of_file(file).name == "toy"
    said = refused(feature_of_file, 3)
    assert said.startswith("BP007 wrong usage: feature_of_file() takes the path of a file, not int")


@pytest.fixture
def bound(lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Feature:
    """A feature that is declared nowhere, installed against a module of its own."""
    name = f"slips_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text((tmp_path / "vllm/toy.py").read_text().replace("self.room()", "9"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("balance_patcher.source.InstalledSource", lambda: DirSource("installed", tmp_path))
    feature = toy("$LEFT = 9", changed=("vllm.toy", name))
    installation.install(feature)
    assert sys.modules[name].Pump().run() == 7
    return feature


def test_one_that_was_installed_by_hand_is_in_the_status(bound: Feature) -> None:
    state = balance_patcher.status().feature("toy")
    assert state.installed
    assert "installed by hand" in state.why
    balance_patcher.uninstall("toy")
    assert "toy" not in [feature.name for feature in balance_patcher.status().features]


def test_what_is_uninstalled_twice_is_no_error_and_can_be_given_itself(bound: Feature) -> None:
    balance_patcher.uninstall(bound)
    assert installation.bound("toy") is None
    balance_patcher.uninstall("toy")
    balance_patcher.uninstall("balance")  # declared, and not installed


# -- an edit of what is upstream's --------------------------------------------------------------


def made_of(feature: Feature) -> tuple[str, ...]:
    return tuple(str(failure) for failure in check_examples(feature))


def test_a_variable_of_upstreams_is_changed_through_its_hole() -> None:
    assert made_of(toy()) == ()


def test_by_its_name_it_is_refused_with_how_it_is_meant() -> None:
    (example, refusal) = made_of(toy("room = $_", "room -= 2"))
    assert "BP301 name already in use: 'room', which delta 'toy.level' puts in, is used in the function" in example
    assert "if upstream's own is meant, let the anchor bind it, `$NAME`" in example
    assert "toy.level is refused with BP301, and BP101 is declared" in refusal


# -- examples -----------------------------------------------------------------------------------

WRONG = {
    "another text": (
        ('room -= 2\n        return room\n"""\nEX', 'room -= 3\n        return room\n"""\nEX'),
        "EXAMPLES, item 1: toy.level makes something else of it",
        "-        room -= 3\n",
    ),
    "another refusal": (
        ('"BP101"', '"BP104"'),
        "REFUSES, item 1: toy.level is refused with BP101, and BP104 is declared",
        "BP101",
    ),
    "no refusal": (
        ('"space()"', '"room()"'),
        "REFUSES, item 1: toy.level can be placed, and BP101 is declared",
        "room -= 2",
    ),
    "no such delta": (
        ('Example("toy.level"', 'Example("toy.lvel"'),
        "EXAMPLES, item 1: there is no delta 'toy.lvel'",
        "toy.level",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_example_that_does_not_hold_is_a_finding(name: str) -> None:
    change, what, row = WRONG[name]
    (said,) = made_of(toy(changed=change))
    assert said.startswith(f"BP808 example does not hold: {what}")
    assert row in said


def test_an_example_of_the_wrong_kind_is_a_finding() -> None:
    (said,) = made_of(toy(changed=('EXAMPLES = (Example("toy.level", BEFORE, AFTER),)', "EXAMPLES = ('x',)")))
    assert said.startswith("BP808 example does not hold: EXAMPLES, item 1: it is str, and no Example")


def test_verify_runs_the_examples_of_a_delta_file(tmp_path: Path, lane: str, capsys: Capture) -> None:
    file = tmp_path / "toy.py"
    text = TOY.replace("ANCHOR", "'$LEFT = self.room()'").replace("EDIT", "'$LEFT -= 2'")
    file.write_text(text)
    assert run("verify", "--deltas", str(file), lane) == 0
    assert "All deltas hold on 1 lane." in capsys.readouterr().out
    file.write_text(text.replace("room -= 2", "room -= 3"))
    assert run("verify", "--deltas", str(file), lane) == 1
    said = capsys.readouterr().out
    assert "deltas: BP808" in said
    assert "Broken: deltas. All else holds on 1 lane." in said  # what is wrong is no lane


# -- what is said of others ---------------------------------------------------------------------


def test_a_need_that_nobody_can_meet_and_a_slip_are_findings() -> None:
    whole = registry.find_feature("prefill_preemption")
    feature = replace(whole, needs={"balence": "it"}, conflicts={"theirs": "both"}, after=("defer_premption",))
    needs, after = unknown([feature], [one.name for one in registry.features()])
    assert str(needs).startswith(
        "BP708 a needed feature is missing: 'prefill_preemption' needs 'balence', which there is"
    )
    assert needs.next.startswith("did you mean `balance`?")
    assert "`after` of 'prefill_preemption' speaks of 'defer_premption'" in after.what
    assert after.next == "did you mean `defer_preemption`? mend the declaration"
    assert unknown(registry.features(), [one.name for one in registry.features()]) == ()


def test_verify_tells_of_them(tmp_path: Path, lane: str, capsys: Capture) -> None:
    file = tmp_path / "toy.py"
    text = TOY.replace("ANCHOR", "'$LEFT = self.room()'").replace("EDIT", "'$LEFT -= 2'")
    file.write_text(text.replace("(DELTA,))", "(DELTA,), needs={'balence': 'it'})"))
    assert run("verify", "--deltas", str(file), lane) == 1
    assert "BP708 a needed feature is missing: 'toy' needs 'balence'" in capsys.readouterr().out


# -- switches -----------------------------------------------------------------------------------


def test_names_stand_with_commas_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(byname.FEATURES, "one, two,")
    assert byname.operators() == ("one", "two")
    monkeypatch.setenv(byname.FEATURES, "one two")
    assert "`one two` is no name; several stand with commas between them" in refused(byname.operators)


def test_only_what_can_be_asked_for_is_advised() -> None:
    assert _or_keep(refused) == f"or ask for both: {byname.COMPOSE}={__name__}:refused"
    nameless = lambda: None  # noqa: E731 - that is the point
    assert _or_keep(nameless) == "or switch one of the two off"
    assert not byname.composable("__main__:schedule")


def test_a_start_method_without_engines_is_refused(lane: str, capsys: Capture) -> None:
    assert run("verify", lane, "--start-method", "fork") == 2
    assert "--start-method speaks of --live" in capsys.readouterr().err


# -- what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "status"), [("0.32.0", "absorbed"), ("0.23.0", "not-applicable")])
@pytest.mark.parametrize("options", [("defer_preemption",), (SCHEDULE, "--feature", "defer_preemption", "--diff")])
def test_of_what_is_not_put_in_the_reason_is_shown(
    version: str, status: str, options: tuple[str, ...], release_dir: Callable[[str], Path], capsys: Capture
) -> None:
    assert run("show", *options, "--lane", f"it=dir:{release_dir(version)}") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"# {options[0]}: nothing is put in on it, because\n")
    assert re.search(rf"^#   defer_preemption\.retry is {status}: \w.+ \(scheduler\.py:\d+\)$", said, re.MULTILINE)


def test_of_a_target_what_some_features_put_in(release_dir: Callable[[str], Path], capsys: Capture) -> None:
    lane = f"it=dir:{release_dir('0.32.0')}"
    assert run("show", SCHEDULE, "--feature", "prefill_preemption", "--lane", lane, "--diff") == 0
    said = capsys.readouterr().out
    assert "prefill_preemption.disabled-path" in said
    assert "balance" not in said.replace("balance_patcher", "")


# -- what nobody has looked at --------------------------------------------------------------------


def test_what_is_known_is_what_is_tested() -> None:
    assert tuple(version.rpartition(".")[0] for version in (RELEASES[0], RELEASES[-1])) == KNOWN


@pytest.mark.parametrize(
    ("version", "told"), [("0.17.1", "0.17.1"), ("0.34.0", "0.34.0"), ("0.33.0", ""), ("0.1.dev1+g1", "")]
)
def test_a_finding_on_a_release_that_nobody_has_looked_at_says_so(version: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    (tmp_path / "vllm/_version.py").write_text(f"version = '{version}'\n")
    (tmp_path / "vllm/toy.py").write_text("class Pump:\n    def run(self):\n        pass\n")
    report, _ = check_lane(LaneSpec("it", f"dir:{tmp_path}"), [toy()])
    (failure,) = report.all_failures
    assert dict(failure.fields).get("vLLM", "") == (f"{told}; known are 0.18 to 0.33" if told else "")


# -- status -------------------------------------------------------------------------------------


def test_without_a_vllm_nothing_is_said_to_be_missing() -> None:
    text = as_text(balance_patcher.status())
    assert f"{SCHEDULE}  no vLLM here  not imported here" in text
    assert "not found" not in text
    assert "unknown  not imported" not in text


def test_what_is_not_needed_is_not_said_to_be_missing() -> None:
    state = balance_patcher.status().feature("balance")
    target = next(one for one in state.targets if one.name.endswith("_should_stop_admitting_waiting"))

    def told(status: str) -> str:
        deltas = tuple(replace(delta, status=status) for delta in state.deltas)
        return _absent(target, replace(state, deltas=deltas), vllm=True)

    assert told("not-applicable") == "not in this vLLM, and not needed"
    assert told("failed") == "not found"


def test_when_it_can_go_is_said_of_each_delta() -> None:
    text = as_text(balance_patcher.status())
    assert "  can go when  disabled-path, gather: balance scheduling is an option of vLLM itself\n" in text
    assert "  can go when  empty-queue-guard: the oldest supported vLLM is 0.31.0\n" in text


# -- where it is declared -----------------------------------------------------------------------


def test_a_declaration_is_told_as_a_path_that_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TOY.replace("ANCHOR", "'room = $_'").replace("EDIT", "'self.seen = 1'")
    for place in (tmp_path / "here/toy.py", tmp_path / "else/where/toy.py"):
        place.parent.mkdir(parents=True)
        place.write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    assert feature_of_file("toy.py").declared == "toy.py:5"
    assert feature_of_file(tmp_path / "else/where/toy.py").declared == f"{tmp_path}/else/where/toy.py:5"
    assert registry.find_feature("balance").declared.startswith("deltas/balance.py:")
