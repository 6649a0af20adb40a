"""`status` in processes without vLLM, with a toy one, and with one that is half imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import balance_patcher
from balance_patcher import cli, environment, inspection, outcome, plugin
from balance_patcher.digests import declaration_digest, tree_digest
from balance_patcher.errors import Failure, PatchError
from balance_patcher.feature import LaunchPath
from balance_patcher.registry import find_feature
from balance_patcher.states import Status
from balance_patcher.terminal_status import as_text
from tests.conftest import ROOT

HEAVY = {"torch", "vllm", "typer", "rich", "requests", "git", "astor", "asyncio"}


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BALANCE_PATCHER", "BALANCE_PATCHER_ON_FAILURE", "BALANCE_PATCHER_STALL", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    # Whether the package is installed where the tests run is not what they are about.
    monkeypatch.setattr(environment.metadata, "entry_points", lambda **_: ())


def fresh(code: str, *, path: str = str(ROOT)) -> Any:
    """What a fresh process prints as JSON."""
    environment_ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment_, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- the public names ------------------------------------------------------------------------


def test_importing_the_package_imports_none_of_its_modules() -> None:
    loaded = fresh("import json, sys, balance_patcher; print(json.dumps(sorted(sys.modules)))")
    assert [name for name in loaded if name.partition(".")[0] == "balance_patcher"] == ["balance_patcher"]
    assert not HEAVY & set(loaded)


def test_the_public_functions_stay_functions_whatever_is_imported() -> None:
    for module in ("installation", "inspection", "plugin", "launch", "cli"):
        importlib.import_module(f"balance_patcher.{module}")
    assert balance_patcher.status is inspection.status
    assert all(callable(getattr(balance_patcher, name)) for name in balance_patcher.__all__)
    assert not any(isinstance(getattr(balance_patcher, name), ModuleType) for name in balance_patcher.__all__)
    assert set(balance_patcher.__all__) <= set(dir(balance_patcher))
    with pytest.raises(AttributeError, match="nope"):
        balance_patcher.nope  # noqa: B018


def test_no_module_of_the_package_has_a_public_functions_name() -> None:
    names = {path.stem for path in Path(balance_patcher.__path__[0]).iterdir()}
    assert not names & set(balance_patcher.__all__)


def test_a_status_imports_nothing_heavy() -> None:
    loaded = fresh(
        "import json, sys; from balance_patcher import status; status(); "
        "print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"
    )
    assert not HEAVY & set(loaded)


# -- without vLLM ----------------------------------------------------------------------------


def test_without_vllm_it_says_so_and_names_what_is_declared() -> None:
    status = balance_patcher.status()
    assert status.vllm == environment.Vllm(None, None, imported=False)
    assert not status.armed.armed
    balance = status.feature("balance")
    assert not balance.active
    assert not balance.installed
    assert "not imported" in balance.why
    assert [delta.name for delta in balance.deltas] == [delta.name for delta in find_feature("balance").deltas]
    assert {delta.status for delta in balance.deltas} == {None}
    assert not any(target.imported for target in balance.targets)
    with pytest.raises(KeyError):
        status.feature("nope")


def objects(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """The keys of every object in a JSON value, by its path; the items of a list are one."""
    if isinstance(value, dict):
        yield at, " ".join(value)
        for name, item in value.items():
            yield from objects(item, f"{at}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from objects(item, f"{at}[]")


def test_the_keys_of_the_json_are_these() -> None:
    """They are public: one that goes, or means something else, makes another ``schema``."""
    ours = environment.EntryPoint(environment.PLATFORM, "n", "m:f", "d 1", "p", filtered=False)
    origin = inspection.origin_of(fresh)
    binding = inspection.BindingState("p", origin, origin, origin, "wrapped", (origin,))
    takeover = inspection.TakeOverState("f", "o", "m", "file", ours=True, why=None)
    failure = Failure("BP599", "w", "n", (("a", "b"),))
    status = balance_patcher.status()
    feature = status.feature("balance")
    changed: dict[str, Any] = {
        "decisions": (inspection.DecisionState(0, active=True, reason="r", failures=(failure,)),),
        "bindings": (binding,),
        "targets": (inspection.TargetState("t", None, None, None, True, origin, (origin,)),),
        "rebased": ("a",),
        "stale": ("b",),
        "ranks": (inspection.RankState(0, "h", 1),),
        "launches": (LaunchPath("HTTP server", "untested", "no time"),),
        "needs": (inspection.Relation("other", "why"),),
        "conflicts": (inspection.Relation("another", "why"),),
        "failures": (failure,),
    }
    whole = Status(**{
        **vars(status), "entry_points": (ours,), "features": (type(feature)(**{**vars(feature), **changed}),),
        "takeovers": (takeover,), "failures": (failure,),
    })  # fmt: skip
    told = json.loads(json.dumps(whole.as_dict()))
    assert told["schema"] == 1
    assert dict(objects(told)) == KEYS


ORIGIN = "name module file line"
FAILURE = "code title what fields next file line"
FEATURE = "features[]"
KEYS = {
    "": "schema version python vllm switches entry_points armed takeovers features failures",
    "vllm": "version place imported",
    "switches[]": "name value means",
    "entry_points[]": "group name value distribution place filtered",
    "armed": "armed how would_arm why run_engine_core",
    "takeovers[]": "feature owner module file ours why",
    "failures[]": FAILURE,
    "failures[].fields": "a",
    FEATURE: "name summary distribution declared digest armed decisions installed running ranks active why deltas "
    "targets bindings rebased stale launches needs conflicts after remove_when failures",
    f"{FEATURE}.needs[]": "feature why",
    f"{FEATURE}.conflicts[]": "feature why",
    f"{FEATURE}.ranks[]": "rank host pid",
    f"{FEATURE}.launches[]": "name standing note test",
    f"{FEATURE}.decisions[]": "engine active reason failures",
    f"{FEATURE}.decisions[].failures[]": FAILURE,
    f"{FEATURE}.decisions[].failures[].fields": "a",
    f"{FEATURE}.deltas[]": "name target status variant file line declared digest remove_when",
    f"{FEATURE}.targets[]": "name file line digest imported now around",
    f"{FEATURE}.targets[].now": ORIGIN,
    f"{FEATURE}.targets[].around[]": ORIGIN,
    f"{FEATURE}.bindings[]": "place before after now state around",
    f"{FEATURE}.bindings[].before": ORIGIN,
    f"{FEATURE}.bindings[].after": ORIGIN,
    f"{FEATURE}.bindings[].now": ORIGIN,
    f"{FEATURE}.bindings[].around[]": ORIGIN,
    f"{FEATURE}.failures[]": FAILURE,
    f"{FEATURE}.failures[].fields": "a",
}


# -- switches and entry points ---------------------------------------------------------------


class Point:
    def __init__(self, group: str, value: str, name: str = "balance_patcher") -> None:
        self.group, self.value, self.name = group, value, name
        self.dist = None


def points(monkeypatch: pytest.MonkeyPatch, *found: Point) -> tuple[environment.EntryPoint, ...]:
    monkeypatch.setattr(environment.metadata, "entry_points", lambda *, group: [p for p in found if p.group == group])
    return environment.entry_points()


OURS = (
    Point(environment.PLATFORM, "balance_patcher.entry:platform"),
    Point(environment.GENERAL, "balance_patcher.entry:general"),
)


def test_with_our_entry_points_vllm_would_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = points(monkeypatch, *OURS, Point(environment.PLATFORM, "vllm_ascend:register", "ascend"))
    assert [point.value for point in found] == [point.value for point in OURS]
    assert environment.would_arm(found)[0]


@pytest.mark.parametrize("value", ["", "ascend", "ascend,other", "Balance_patcher"])
def test_vllm_plugins_that_does_not_name_us_is_told(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    would, why = environment.would_arm(points(monkeypatch, *OURS))
    assert not would
    assert "VLLM_PLUGINS" in why


def test_vllm_plugins_that_names_us_lets_us_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ascend,balance_patcher")
    assert environment.would_arm(points(monkeypatch, *OURS))[0]


def test_without_the_platform_entry_point_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    would, why = environment.would_arm(points(monkeypatch, OURS[1]))
    assert not would
    assert environment.PLATFORM in why


def test_without_entry_points_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "install balance_patcher" in environment.would_arm(points(monkeypatch))[1]


@pytest.mark.parametrize(("value", "means"), [("off", "nothing of ours is armed"), ("perhaps", "BP006")])
def test_a_switch_is_told_with_what_it_means(value: str, means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_PATCHER", value)
    monkeypatch.setattr(environment.metadata, "entry_points", lambda *, group: [p for p in OURS if p.group == group])
    status = balance_patcher.status()
    assert means in next(switch for switch in status.switches if switch.name == "BALANCE_PATCHER").means
    assert (status.armed.would_arm, status.armed.why) == (False, f"BALANCE_PATCHER={value}")


@pytest.mark.parametrize(
    ("value", "means"),
    [("", "waits 20 s is told"), ("2.5", "waits 2.5 s is told"), ("0", "no gather that waits"), ("soon", "BP006")],
)
def test_the_time_after_which_a_wait_is_told_is_told(value: str, means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_PATCHER_STALL", value)
    assert means in next(switch for switch in environment.switches() if switch.name == "BALANCE_PATCHER_STALL").means


# -- decided ---------------------------------------------------------------------------------


def test_every_decision_of_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure("BP701", "this and that", "choose")
    made = [
        outcome.Outcome((outcome.Decision("balance", active=False, reason="OFF because"),), object, "engine"),
        outcome.Outcome((outcome.Decision("balance", False, "OFF since", (failure,)),), object, "engine"),
    ]
    monkeypatch.setattr(outcome, "_OUTCOMES", made)
    balance = balance_patcher.status().feature("balance")
    assert [(one.engine, one.active, one.reason, one.failures) for one in balance.decisions] == [
        (0, False, "OFF because", ()), (1, False, "OFF since", (failure,)),
    ]  # fmt: skip
    assert balance.why == "OFF since"
    assert not balance.active


# -- half imported, and odd ------------------------------------------------------------------


@pytest.fixture
def toy_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that is called vllm, with whatever the test writes into it."""
    (tmp_path / "vllm" / "v1" / "engine").mkdir(parents=True)
    for package in ("vllm", "vllm/v1", "vllm/v1/engine"):
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "vllm"
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_it_can_be_asked_while_the_engine_core_is_being_imported(toy_vllm: Path) -> None:
    core = toy_vllm / "v1/engine/core.py"
    core.write_text(
        "from balance_patcher import status\n"
        "class DPEngineCoreProc:\n    pass\n"
        "SEEN = status()\n"
        "class EngineCore:\n    def __init__(self):\n        pass\n"
    )
    module = importlib.import_module("vllm.v1.engine.core")
    seen = module.SEEN
    assert seen.vllm.imported
    assert not seen.armed.armed
    assert "not imported" in seen.armed.how
    assert not any(target.imported for target in seen.feature("balance").targets)


@pytest.mark.parametrize("odd", [None, object(), 3], ids=["none", "object", "number"])
def test_odd_things_among_the_modules_do_no_harm(odd: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler", "odd"):
        monkeypatch.setitem(sys.modules, name, odd)  # type: ignore[arg-type]
    balance = balance_patcher.status().feature("balance")
    assert not balance.active
    assert not any(target.imported for target in balance.targets)


def test_a_part_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise LookupError("odd process")

    monkeypatch.setattr(plugin, "armed", broken)
    status = balance_patcher.status()
    assert [failure.code for failure in status.failures] == ["BP599"]
    assert "odd process" in status.failures[0].what
    assert status.feature("balance").deltas


# -- digests ---------------------------------------------------------------------------------


def test_a_declarations_digest_is_that_of_what_it_says_not_of_where() -> None:
    from dataclasses import replace

    delta = find_feature("balance").deltas[0]
    same = declaration_digest([delta])
    assert declaration_digest([replace(delta, declared="elsewhere.py:1")]) == same
    assert declaration_digest([replace(delta, why="another")]) != same


def test_before_and_after_are_two_declarations() -> None:
    from balance_patcher.delta import Anchor, Delta, InsertAfter, InsertBefore, Variant

    def digest(edit: InsertAfter | InsertBefore) -> str:
        return declaration_digest([Delta("t.t", "m:f", "w", "u", "r", (Variant("v", Anchor("x = 1"), (edit,)),))])

    assert digest(InsertBefore("y = 1")) != digest(InsertAfter("y = 1"))


def test_a_trees_digest_does_not_see_comments_and_places() -> None:
    import ast

    def digest(text: str) -> str:
        return tree_digest(ast.parse(text))

    assert digest("def f(): return 1") == digest("\n# one\ndef f():\n    return 1  # two\n")
    assert digest("def f(): return 1") != digest("def f(): return 2")


def test_two_processes_have_the_same_digests() -> None:
    code = "import json; from balance_patcher import status; print(json.dumps([f.digest for f in status().features]))"
    assert fresh(code) == fresh(code) == [feature.digest for feature in balance_patcher.status().features]


# -- the command -----------------------------------------------------------------------------


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_command_writes_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(balance_patcher.status().as_dict()))


def test_the_command_tells_a_person_what_would_happen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    monkeypatch.setattr(environment.metadata, "entry_points", lambda *, group: [p for p in OURS if p.group == group])
    assert run("status") == 0
    out = capsys.readouterr().out
    for said in (
        "vLLM is not installed in this Python",
        "balance_patcher = balance_patcher.entry:platform",
        "(left out by VLLM_PLUGINS)",
        "would arm",
        "no: VLLM_PLUGINS=ascend leaves balance_patcher out; name it there too",
        "balance.admission-gate",
        "deltas/balance.py:",
    ):
        assert said in out, said


def test_a_person_is_told_who_wraps_and_who_overwrote() -> None:
    status = balance_patcher.status()
    feature = status.feature("balance")
    origin = inspection.origin_of(fresh)
    bindings = (
        inspection.BindingState("m:C.one", origin, origin, origin, "wrapped", (origin,)),
        inspection.BindingState("m:C.two", origin, origin, origin, "overwritten", ()),
    )
    shown = type(feature)(**{**vars(feature), "bindings": bindings, "stale": ("m.old",)})
    text = as_text(type(status)(**{**vars(status), "features": (shown,)}))
    assert f"; wrapped by {__name__}.fresh ({__file__}:" in text
    assert f"; OVERWRITTEN, now {__name__}.fresh ({__file__}:" in text
    assert "m.old still means what was replaced" in text


def test_a_person_is_told_the_ranks_and_how_engine_cores_may_be_started() -> None:
    status = balance_patcher.status()
    feature = status.feature("balance")
    ranks = (inspection.RankState(0, "a", 1), inspection.RankState(1, "b", 2))
    launches = (LaunchPath("Ray", "untested", "no Ray here"),)
    shown = type(feature)(**{**vars(feature), "ranks": ranks, "launches": launches})
    text = as_text(type(status)(**{**vars(status), "features": (shown,)}))
    assert "0 (host=a pid=1), 1 (host=b pid=2)" in text
    assert "untested: Ray; no Ray here" in text


@pytest.mark.parametrize(("standing", "test"), [("perhaps", ""), ("untested", "tests/a.py::b"), ("tested", "")])
def test_a_launch_path_has_a_standing_and_a_test_if_it_was_tested(standing: str, test: str) -> None:
    with pytest.raises(PatchError, match="BP002 bad declaration: launch path 'Ray'"):
        LaunchPath("Ray", standing, "note", test)


def test_wrong_formats_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--format", "yaml") == 2
    assert capsys.readouterr().err
