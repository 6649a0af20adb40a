"""Standing in for a host's module when that is imported: on a toy vLLM and a toy host, in this process."""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import inspect
import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from balance_patcher import installation, steps, takeover
from balance_patcher.bindings import overwritten, wrapped
from balance_patcher.delta import Anchor, Delta, InsertAfter, Prologue, Variant
from balance_patcher.errors import PatchError
from balance_patcher.feature import Feature, RuntimeClass
from balance_patcher.standin import STAND_IN, Bind, Cover, StandIn

TOY = """
class Pump:
    def __init__(self):
        self.level = 0

    def run(self):
        self.level += 1
        return self.level


class Motor:
    def turn(self):
        self.turns = 1

    def start():
        return "upstream"

    start = staticmethod(start)
"""

HOST = """
import vllm.v1.core.sched.toy
from vllm.v1.core.sched.toy import Motor, Pump

RAN = True


class HostPump(Pump):
    def run(self):
        self.level += 1
        if self.host:
            self.level += 1
        return self.level


def start():
    return "host"


Motor.start = staticmethod(start)
vllm.v1.core.sched.toy.Pump = HostPump
"""

MODULE = "toyhost.patches.pump"


class Base:
    on = False


def make(upstream: type) -> type:
    return type("OurPump", (upstream,), {"_toy": False})


def start() -> str:
    return "ours"


def fill(module: ModuleType, ours: type, bind: Bind) -> None:
    motor = importlib.import_module("vllm.v1.core.sched.toy").Motor
    start.__module__ = module.__name__
    vars(module).update(HostPump=ours, start=start, genuine=vars(motor)["start"])
    if vars(motor)["start"] is not start and getattr(vars(motor)["start"], "__func__", None) is not start:
        bind(motor, "start", staticmethod(start))


RUN, TURN = "vllm.v1.core.sched.toy:Pump.run", "vllm.v1.core.sched.toy:Motor.turn"
DELTAS = (
    Delta(
        "toy.off", RUN, "why", "toy", "never",
        variants=(Variant("off", edits=(Prologue("if not self._toy:\n    return super().run($$$PARAMETERS)"),)),),
    ),
    Delta(
        "toy.twice", RUN, "why", "toy", "never", after=("toy.off",),
        variants=(Variant("twice", Anchor("self.level += 1"), edits=(InsertAfter("self.level += 1"),)),),
    ),
    Delta(
        "toy.turn", TURN, "why", "toy", "never",
        variants=(Variant("turn", Anchor("self.turns = 1"), edits=(InsertAfter("self.turns += 1"),)),),
    ),
)  # fmt: skip
COVERS = (
    Cover("", "RAN = True", STAND_IN),
    Cover("", "class HostPump(Pump)", STAND_IN),
    Cover("HostPump.run", "if self.host: self.level += 1", "toy.twice"),
    Cover("start", "return 'host'", STAND_IN),
    Cover("", "Motor.start = staticmethod(start)", STAND_IN),
    Cover("", "vllm.v1.core.sched.toy.Pump = HostPump", STAND_IN),
)


def feature(*covers: Cover) -> Feature:
    stand_in = StandIn(
        "toyhost",
        MODULE,
        fill,
        copies={"HostPump.run": RUN},
        imports={"vllm": "vllm.v1.core.sched.toy"},
        signatures={"start": ("",)},
        covers=covers or COVERS,
    )
    runtime = RuntimeClass("OurPump", "vllm.v1.core.sched.toy:Pump", make, frozenset({"_toy"}))
    return Feature("toy", "A toy.", deltas=DELTAS, runtime=runtime, stand_in=stand_in)


class World:
    """The toy packages, which a test may change before they are imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {
            "vllm/__init__.py": "", "vllm/v1/core/sched/toy.py": TOY,
            "toyhost/__init__.py": "", "toyhost/patches/pump.py": HOST,
            "toyhost/patches/__init__.py": "import toyhost.patches.pump\n",
        }.items():  # fmt: skip
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def load(self) -> Any:
        importlib.invalidate_caches()
        importlib.import_module("toyhost.patches")
        return sys.modules[MODULE]

    @property
    def toy(self) -> Any:
        return importlib.import_module("vllm.v1.core.sched.toy")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    before = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] in {"vllm", "toyhost"}}
    for name in before:
        del sys.modules[name]
    finders = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(takeover, "features", lambda: (feature(),))
    monkeypatch.setattr(takeover, "_DONE", {})
    monkeypatch.setattr(installation, "_INSTALLED", {})
    yield World(tmp_path)
    takeover.unwatch()
    assert sys.meta_path == finders
    for name in [name for name in sys.modules if name.partition(".")[0] in {"vllm", "toyhost"}]:
        del sys.modules[name]
    sys.modules.update(before)


def test_the_module_is_filled_and_its_text_never_run(world: World) -> None:
    takeover.watch()
    module = world.load()
    assert not hasattr(module, "RAN")
    assert world.toy.Pump is module.HostPump
    assert world.toy.Motor.start is start
    assert start() == "ours"


def test_python_knows_it_as_any_other_module(world: World) -> None:
    takeover.watch()
    module = world.load()
    parent = sys.modules["toyhost.patches"]
    assert parent.pump is module
    assert module.__name__ == module.__spec__.name == MODULE
    assert module.__package__ == "toyhost.patches"
    assert inspect.getsourcefile(module) == __file__
    assert importlib.import_module(MODULE) is module
    assert pickle.loads(pickle.dumps(start)) is start  # noqa: S301 - it was just written


def test_the_functions_of_upstream_wait_for_a_decision(world: World) -> None:
    turn = vars(world.toy.Motor)["turn"]
    takeover.watch()
    world.load()
    assert vars(world.toy.Motor)["turn"] is turn
    assert installation.bound("toy") is not None
    assert installation.installed("toy") is None
    installation.install(feature())
    assert vars(world.toy.Motor)["turn"] is not turn
    assert installation.installed("toy") is installation.bound("toy")


def test_off_is_upstreams_own_method_and_on_is_ours(world: World) -> None:
    takeover.watch()
    ours = world.load().HostPump
    assert ours().run() == 1
    ours._toy = True
    assert ours().run() == 2
    del ours._toy
    ours._toy = False


def test_an_engine_that_cannot_have_it_leaves_the_class_and_upstreams_hook(world: World) -> None:
    turn = vars(world.toy.Motor)["turn"]
    takeover.watch()
    module = world.load()

    def refused(*_: object) -> None:
        raise RuntimeError("not this engine")

    with pytest.raises(RuntimeError, match="not this engine"):
        installation.install_together([feature()], refused)
    assert vars(world.toy.Motor)["turn"] is turn
    assert world.toy.Pump is module.HostPump
    assert installation.installed("toy") is None
    installation.install_together([feature()])
    assert vars(world.toy.Motor)["turn"] is not turn


def test_a_feature_that_would_have_to_join_is_refused_with_what_to_write(world: World) -> None:
    off = "if not self._more:\n    return super().run($$$PARAMETERS)"
    more = Feature(
        "more", "More.",
        (Delta("more.off", RUN, "why", "toy", "never", (Variant("off", edits=(Prologue(off),)),)),),
    )  # fmt: skip
    takeover.watch()
    module = world.load()
    with pytest.raises(PatchError) as caught:
        installation.install_together([more])
    (failure,) = caught.value.failures
    assert failure.code == "BP610"
    assert f"which stands in for {MODULE}" in failure.what
    assert failure.next.endswith("stand_in(__name__, 'more')")
    assert world.toy.Pump is module.HostPump
    assert installation.bound("more") is None


def test_uninstalling_puts_back_everything_that_the_take_over_changed(world: World) -> None:
    pump, begin, turn = world.toy.Pump, vars(world.toy.Motor)["start"], vars(world.toy.Motor)["turn"]
    takeover.watch()
    world.load()
    installation.install(feature())
    installation.uninstall("toy")
    assert world.toy.Pump is pump
    assert vars(world.toy.Motor)["start"] is begin
    assert vars(world.toy.Motor)["turn"] is turn
    assert installation.bound("toy") is None


def test_a_failing_second_stage_leaves_the_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    takeover.watch()
    module = world.load()
    turn = vars(world.toy.Motor)["turn"]

    def failing(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "bind", failing)
        with pytest.raises(RuntimeError, match="no"):
            installation.install(feature())
    assert vars(world.toy.Motor)["turn"] is turn
    assert world.toy.Pump is module.HostPump
    assert installation.installed("toy") is None
    assert not list(overwritten(installation.bound("toy")))


def test_a_wrapper_that_reaches_ours_is_told_and_not_refused_but_not_lost_either(world: World) -> None:
    takeover.watch()
    world.load()
    installation.install(feature())
    ours = vars(world.toy.Motor)["turn"]

    def theirs(self: object) -> None:
        ours(self)

    world.toy.Motor.turn = theirs
    done = installation.install(feature())
    assert [failure.code for failure in wrapped(done)] == ["BP606"]
    with pytest.raises(PatchError, match="BP606"):
        installation.uninstall("toy")
    world.toy.Motor.turn = ours


def test_loading_it_again_changes_nothing(world: World) -> None:
    takeover.watch()
    module = world.load()
    genuine, bindings = module.genuine, len(installation.bound("toy").bindings)
    assert importlib.reload(module) is module
    assert len(installation.bound("toy").bindings) == bindings
    assert world.toy.Motor.start is start
    assert genuine.__func__() == "upstream"


def test_importing_it_again_gives_the_stand_in_again(world: World) -> None:
    takeover.watch()
    module = world.load()
    del sys.modules[MODULE]
    again = importlib.import_module(MODULE)
    assert again is not module
    assert not hasattr(again, "RAN")
    assert again.HostPump is module.HostPump is world.toy.Pump
    assert [done.declined for done in takeover.take_overs()] == [None]


def test_the_loader_is_the_hosts_in_all_but_running_it(world: World) -> None:
    takeover.watch()
    module = world.load()
    loader, file = module.__spec__.loader, str(world.folder / "toyhost/patches/pump.py")
    assert loader.get_source(MODULE) == HOST
    assert loader.get_data(file) == HOST.encode()
    assert loader.get_code(MODULE).co_filename == loader.path == loader.get_filename(MODULE) == file
    assert not loader.is_package(MODULE)
    assert not hasattr(loader, "nothing_like_it")
    assert copy.copy(loader).path == file


class Nosy(importlib.abc.MetaPathFinder):
    """A finder that asks all others, as many an import hook does."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        return next((spec for spec in found if spec is not None), None)


@pytest.mark.parametrize("place", [0, 1])
def test_another_finder_that_asks_all_others_does_no_harm(world: World, place: int) -> None:
    takeover.watch()
    nosy = Nosy()
    sys.meta_path.insert(place, nosy)
    try:
        module = world.load()
    finally:
        sys.meta_path.remove(nosy)
    assert not hasattr(module, "RAN")
    assert [done.declined for done in takeover.take_overs()] == [None]


def test_a_finder_that_fails_once_does_not_stop_the_watch(world: World) -> None:
    class Failing(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
            raise ZeroDivisionError("oh")

    takeover.watch()
    failing = Failing()
    sys.meta_path.insert(1, failing)
    try:
        with pytest.raises(ZeroDivisionError):
            sys.meta_path[0].find_spec(MODULE)
    finally:
        sys.meta_path.remove(failing)
    assert not hasattr(world.load(), "RAN")


def test_watching_twice_is_once_and_looking_does_not_touch(world: World) -> None:
    takeover.watch()
    takeover.watch()
    assert sum(isinstance(finder, takeover.Finder) for finder in sys.meta_path) == 1
    importlib.import_module("toyhost")
    world.write("toyhost/patches/__init__.py", "")
    pump = world.toy.Pump
    assert importlib.util.find_spec(MODULE) is not None
    assert world.toy.Pump is pump
    assert takeover.take_overs() == ()


def runs_by_itself(world: World, caplog: pytest.LogCaptureFixture) -> str:
    """Load the host's module, which has to run as it is; the one warning."""
    pump = world.toy.Pump
    takeover.watch()
    with caplog.at_level(logging.WARNING):
        module = world.load()
    assert module.RAN
    assert module.HostPump.__bases__ == (pump,)
    assert world.toy.Motor.start() == "host"
    assert inspect.getsourcefile(module) == module.__file__ == str(world.folder / "toyhost/patches/pump.py")
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert installation.bound("toy") is None
    (record,) = caplog.records
    return record.getMessage()


def test_anything_that_is_not_covered_lets_the_host_run(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write("toyhost/patches/pump.py", HOST.replace("RAN = True", "RAN = True\nimport os\nos.getpid()"))
    told = runs_by_itself(world, caplog)
    assert "pump.py:6  `import os` is not covered, and 1 more" in told
    assert "pump.py:7  os.getpid()" in told
    assert takeover.left_alone("toy") == ("toyhost's own copy runs (pump.py:6  `import os` is not covered, and 1 more)")
    assert takeover.left_alone("other") is None


OTHER = (*COVERS, Cover("HostPump.run", "self.level += 2", "other.thing"))


@pytest.mark.parametrize("text", ["self.level += 2", "pass"])
def test_only_what_its_own_text_does_is_left_to_the_host(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(takeover, "features", lambda: (feature(*OTHER),))
    does = text != "pass"
    more = HOST.replace("        return self.level", f"        {text}\n        return self.level")
    world.write("toyhost/patches/pump.py", more.replace("RAN = True", "RAN = True\nprint()"))
    runs_by_itself(world, caplog)
    (done,) = takeover.take_overs()
    assert done.left_to_host("toy")
    assert takeover.left_alone("toy") is not None
    assert done.left_to_host("other") is does
    assert (takeover.left_alone("other") is not None) is does


def test_a_file_that_cannot_be_read_is_left_the_feature_that_stands_in_and_no_other(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(takeover, "features", lambda: (feature(*OTHER),))
    monkeypatch.setattr(takeover, "read_module", unreadable)
    assert "ZeroDivisionError: oh" in runs_by_itself(world, caplog)
    assert takeover.left_alone("toy") is not None
    assert takeover.left_alone("other") is None


def test_a_copy_that_fails_when_it_runs_does_nobodys_job(world: World) -> None:
    world.write("toyhost/patches/pump.py", HOST.replace("RAN = True", "RAN = True\nraise KeyError('theirs')"))
    takeover.watch()
    with pytest.raises(KeyError, match="theirs"):
        world.load()
    (done,) = takeover.take_overs()
    assert done.failed == "KeyError: 'theirs'"
    assert done.declined == (
        "pump.py:6  `raise KeyError('theirs')` is not covered; and running its own text failed: KeyError: 'theirs'"
    )
    assert takeover.left_alone("toy") is None
    world.write("toyhost/patches/pump.py", HOST)
    world.load()
    (done,) = takeover.take_overs()
    assert done.declined is done.failed is None


def test_while_its_own_text_is_being_run_nothing_is_said_of_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(takeover, "seen", lambda: seen.append(takeover.left_alone("toy")), raising=False)
    asks = "RAN = True\nfrom balance_patcher import takeover\ntakeover.seen()"
    world.write("toyhost/patches/pump.py", HOST.replace("RAN = True", asks))
    takeover.watch()
    world.load()
    assert seen == [None]
    assert takeover.left_alone("toy") is not None


def test_a_feature_that_cannot_be_built_lets_the_host_run(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write("vllm/v1/core/sched/toy.py", TOY.replace("self.turns = 1", "self.turns = 2"))
    assert "BP101 anchor not found" in runs_by_itself(world, caplog)


def test_a_stand_in_that_fails_lets_the_host_run(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(module: ModuleType, ours: type, bind: Bind) -> None:
        fill(module, ours, bind)
        module.left_behind = True  # type: ignore[attr-defined]
        raise ZeroDivisionError("oh")

    declared = feature()
    object.__setattr__(declared.stand_in, "fill", failing)
    monkeypatch.setattr(takeover, "features", lambda: (declared,))
    assert "ZeroDivisionError: oh" in runs_by_itself(world, caplog)
    assert not hasattr(sys.modules[MODULE], "left_behind")


def test_a_feature_that_the_hosts_text_needs_and_that_is_not_here_lets_the_host_run(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    covers = tuple(
        cover if cover.feature is None else Cover(cover.place, cover.pattern, "other.thing") for cover in COVERS
    )
    monkeypatch.setattr(takeover, "features", lambda: (feature(*covers),))
    assert "there is no feature 'other'" in runs_by_itself(world, caplog)


def test_an_error_of_the_host_is_the_hosts(world: World) -> None:
    world.write("toyhost/patches/pump.py", HOST + "\nraise KeyError('theirs')\n")
    takeover.watch()
    with pytest.raises(KeyError, match="theirs"):
        world.load()
    assert MODULE not in sys.modules


def test_a_module_that_is_not_there_is_missing_as_before(world: World) -> None:
    (world.folder / "toyhost/patches/pump.py").unlink()
    takeover.watch()
    with pytest.raises(ModuleNotFoundError, match=MODULE):
        world.load()


# -- a host that asks for it


def asking(world: World, *, change: bool) -> Any:
    call = f"takeover.stand_in(sys.modules[__name__], change={change})"
    world.write("toyhost/patches/pump.py", f"import sys\nfrom balance_patcher import takeover\n{call}\n")
    return world.load()


def test_a_module_that_asks_for_it_is_filled(world: World) -> None:
    module = asking(world, change=True)
    assert world.toy.Pump is module.HostPump
    assert installation.bound("toy") is not None


def test_switched_off_it_has_the_names_and_nothing_is_changed(world: World) -> None:
    pump, begin = world.toy.Pump, vars(world.toy.Motor)["start"]
    module = asking(world, change=False)
    assert module.HostPump is pump is world.toy.Pump
    assert vars(world.toy.Motor)["start"] is begin
    assert installation.bound("toy") is None


def test_a_feature_that_it_asks_for_besides_has_to_be_there(world: World) -> None:
    world.write("toyhost/patches/pump.py", "RAN = True\n")
    with pytest.raises(PatchError, match=r"BP003.*'other'"):
        takeover.stand_in(world.load(), ["other"], change=True)


def test_a_module_that_nobody_stands_in_for_is_refused() -> None:
    with pytest.raises(PatchError, match=r"BP003.*some_other"):
        takeover.stand_in(ModuleType("some_other"), change=True)
