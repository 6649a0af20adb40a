"""Names that a feature adds to upstream's own classes and modules: declared, checked, made, bound and taken away.

Every test writes a package of its own into a folder, imports it for real, and installs against it. The functions of
modules are bound here too: they have no class to stand on.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from balance_patcher import installation
from balance_patcher.addition import Addition
from balance_patcher.bindings import overwritten, stale
from balance_patcher.build import build, compile_plan
from balance_patcher.compose import compose
from balance_patcher.delta import Anchor, Delta, Replace, Variant
from balance_patcher.errors import PatchError
from balance_patcher.feature import Feature
from balance_patcher.plan import make_plan
from balance_patcher.source import DirSource, Lane

NUMBERS = itertools.count()

UPSTREAM = """
    LIMIT = 3

    class Base:
        def __init__(self):
            self.inherited = 1

    class Pump(Base):
        def __init__(self, name):
            self.name = name

        def flow(self):
            return work(self.name)

    def work(name):
        return f"{name} works"
"""


@pytest.fixture
def live(tmp_path, monkeypatch) -> Iterator[Any]:
    """A package of one module, imported, and what is installed is installed against it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"pumps_{os.getpid()}_{next(NUMBERS)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "engine.py").write_text(textwrap.dedent(UPSTREAM))
    module = importlib.import_module(f"{name}.engine")
    lane = Lane("live", DirSource(f"dir:{tmp_path}", tmp_path))
    monkeypatch.setattr(installation, "build", lambda feature: build(feature, lane))
    yield SimpleNamespace(module=module, name=module.__name__, lane=lane)
    installation.uninstall("made")


def feature(module: str, *adds: Addition, name: str = "made") -> Feature:
    """One that calls a function of the module in another way, and adds what it is given."""
    variants = (Variant("only", Anchor("return work($NAME)"), (Replace("return work($NAME) + '!'"),)),)
    delta = Delta(f"{name}.edit", f"{module}:Pump.flow", "why", "upstream", "remove when", variants)
    return Feature(name, "made for a test", (delta,), adds=adds)


def to_class(module: str, text: str) -> Addition:
    return Addition(f"{module}:Pump", text, why="why")


HOOKS = """
    size = LIMIT

    def double(self):
        "Twice the flow."
        return [work(self.name), work(self.name)]

    @staticmethod
    def plain(value):
        return value
"""


# -- bound and taken away --------------------------------------------------------------------


def test_the_class_itself_has_the_names_and_loses_them_again(live):
    pump, module = live.module.Pump("north"), live.module
    before = dict(vars(module.Pump))
    made = installation.install(feature(live.name, to_class(live.name, HOOKS)))
    assert pump.size == 3
    assert pump.double() == ["north works"] * 2
    assert pump.plain(4) == module.Pump.plain(4) == 4
    assert pump.flow() == "north works!"
    assert made.hooked == {f"{live.name}:Pump.{name}" for name in ("size", "double", "plain", "flow")}
    assert list(overwritten(made)) == []
    assert stale(made) == []
    installation.uninstall("made")
    assert dict(vars(module.Pump)) == before
    assert [vars(module.Pump)[name] is before[name] for name in before] == [True] * len(before)


def test_installed_twice_is_once(live):
    wanted = feature(live.name, to_class(live.name, HOOKS))
    first = installation.install(wanted)
    bindings = len(first.bindings)
    assert installation.install(wanted) is first
    assert len(first.bindings) == bindings


def test_what_an_addition_calls_is_looked_up_when_it_is_called(live, monkeypatch):
    installation.install(feature(live.name, to_class(live.name, HOOKS)))
    monkeypatch.setattr(live.module, "work", lambda name: f"{name} rests")
    assert live.module.Pump("north").double() == ["north rests"] * 2


def test_a_function_is_what_it_would_be_in_the_class(live):
    made = installation.install(feature(live.name, to_class(live.name, HOOKS)))
    double = live.module.Pump.double
    assert (double.__qualname__, double.__module__) == ("Pump.double", live.name)
    assert double.__doc__ == "Twice the flow."
    assert inspect.getsource(double).startswith("def double(self):")
    assert live.module.Pump.plain.__qualname__ == "Pump.plain"
    assert "return [work(self.name), work(self.name)]" in made.built.texts[f"<balance_patcher {live.name}:Pump adds>"]


def test_the_digest_speaks_of_what_is_added(live):
    digests = set()
    for text in (HOOKS, HOOKS.replace("size = LIMIT", "size = 4")):
        digests.add(installation.install(feature(live.name, to_class(live.name, text))).digest)
        installation.uninstall("made")
    assert len(digests) == 2


def test_a_module_gets_names_and_loses_them(live):
    package = importlib.import_module(live.name.partition(".")[0])
    added = Addition(package.__name__, f"from {live.name} import Pump\nHALF = 0.5", why="why")
    installation.install(feature(live.name, added))
    assert package.Pump is live.module.Pump
    assert package.HALF == 0.5
    installation.uninstall("made")
    assert not {"Pump", "HALF"} & set(vars(package))


def test_a_function_of_a_module_is_edited_in_its_place(live):
    before = live.module.work
    variants = (Variant("only", Anchor("return $_"), (Replace("return name * LIMIT"),)),)
    delta = Delta("made.edit", f"{live.name}:work", "why", "upstream", "remove when", variants)
    made = installation.install(Feature("made", "made for a test", (delta,)))
    assert live.module.Pump("a").flow() == live.module.work("a") == "aaa"
    assert [(binding.owner, binding.name) for binding in made.bindings] == [(live.module, "work")]
    other = ModuleType("other")
    other.taken = before
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "other", other)
        assert stale(made) == ["other.taken"]
    installation.uninstall("made")
    assert live.module.work is before


def test_what_fails_on_the_way_leaves_nothing_behind(live):
    before = dict(vars(live.module.Pump))

    def fail(*_: object) -> None:
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        installation.install(feature(live.name, to_class(live.name, HOOKS)), then=fail)
    assert dict(vars(live.module.Pump)) == before
    assert installation.bound("made") is None


def test_what_somebody_overwrites_is_noticed_and_not_lost(live):
    made = installation.install(feature(live.name, to_class(live.name, HOOKS)))
    ours = vars(live.module.Pump)["double"]
    live.module.Pump.double = lambda self: None
    (failure,) = overwritten(made)
    assert failure.code == "BP606"
    assert "Pump.double" in failure.what
    with pytest.raises(PatchError, match="BP606"):
        installation.uninstall("made")
    live.module.Pump.double = ours


def test_one_that_is_none_and_that_somebody_deletes_is_noticed_too(live):
    made = installation.install(feature(live.name, to_class(live.name, "kind = None")))
    del live.module.Pump.kind
    (failure,) = overwritten(made)
    assert failure.headline.endswith("Pump.kind, which feature 'made' put there, is gone")
    with pytest.raises(PatchError, match="BP606"):
        installation.uninstall("made")
    live.module.Pump.kind = None


def test_what_somebody_deletes_is_noticed(live):
    made = installation.install(feature(live.name, to_class(live.name, HOOKS)))
    ours = vars(live.module.Pump)["double"]
    del live.module.Pump.double
    assert [failure.code for failure in overwritten(made)] == ["BP606"]
    live.module.Pump.double = ours


def test_composed_features_bring_what_each_adds(live):
    other = Delta(
        "other.edit", f"{live.name}:work", "why", "upstream", "remove when",
        (Variant("only", Anchor("return $_"), (Replace("return name"),)),),
    )  # fmt: skip
    extra = Feature("other", "made for a test", (other,), adds=(to_class(live.name, "more = 1"),))
    both = compose([feature(live.name, to_class(live.name, HOOKS)), extra])
    made = installation.install(both)
    assert live.module.Pump.more == 1
    assert live.module.Pump.size == 3
    assert made.hooks("other") == (f"{live.name}:Pump.more", f"{live.name}:work")
    assert f"{live.name}:Pump.size" in made.hooks("made")
    installation.uninstall(both.name)


# -- refused ---------------------------------------------------------------------------------

REFUSED = {
    "a name of the class": ("def flow(self): pass", "BP301", "'flow', which is to be added to"),
    "an attribute of the class": ("name = 1", "BP301", "'name', which is to be added to"),
    "an attribute of a base": ("inherited = 1", "BP301", "'inherited', which is to be added to"),
    "an unknown name": ("size = LIMITS", "BP302", "'LIMITS', which the addition to"),
    "an unknown name in a function": ("def f(self): return works()", "BP302", "'works', which"),
    "an unknown name in a nested function": ("def f(self):\n    return lambda: works()", "BP302", "'works', which"),
    "an unknown attribute": ("def f(self): return self.nam", "BP303", "self.nam, which the addition to"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_addition_may_not_do_to_a_class(case, live):
    text, code, what = REFUSED[case]
    before = dict(vars(live.module.Pump))
    with pytest.raises(PatchError) as caught:
        installation.install(feature(live.name, to_class(live.name, text)))
    (failure,) = caught.value.failures
    assert failure.code == code
    assert failure.what.startswith(what)
    assert dict(failure.fields)["declared"].startswith("tests/test_additions.py:")
    assert dict(vars(live.module.Pump)) == before


def test_the_nearest_attribute_is_named(live):
    with pytest.raises(PatchError, match=r"nearest +engine.py:\d+  `self.name = name`"):
        installation.install(feature(live.name, to_class(live.name, "def f(self): return self.nam")))


ACCEPTED = {
    "its own names": "size = 1\ndef f(self): return self.size + self.g()\ndef g(self): return 0",
    "upstream's names and builtins": "def f(self): return len(work(self.name)) + LIMIT",
    "locals and parameters": "def f(self, one, *two, three=4, **five):\n    six = [x for x in two]\n    return six",
    "what it imports": "def f(self):\n    from os import path\n    return path",
    "an inherited attribute": "def f(self): return self.inherited",
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_an_addition_may_use(case, live):
    installation.install(feature(live.name, to_class(live.name, ACCEPTED[case])))
    assert live.module.Pump.f


def test_an_addition_may_use_what_another_adds_to_the_module(live):
    more = Addition(live.name, "MORE = 5", why="why")
    installation.install(feature(live.name, to_class(live.name, "def f(self): return MORE"), more))
    assert live.module.Pump("north").f() == 5


def test_an_edit_may_use_what_is_added(live):
    variants = (Variant("only", Anchor("return work($NAME)"), (Replace("return self.double()"),)),)
    delta = Delta("made.edit", f"{live.name}:Pump.flow", "why", "upstream", "remove when", variants)
    alone = Feature("made", "made for a test", (delta,))
    with pytest.raises(PatchError, match=r"BP303.*self\.double"):
        installation.install(alone)
    installation.install(replace(alone, adds=(to_class(live.name, HOOKS),)))
    assert live.module.Pump("north").flow() == ["north works"] * 2


@pytest.mark.parametrize(
    ("owner", "text", "code"),
    [
        ("{}:Fountain", "x = 1", "BP104"),
        ("{}:work", "x = 1", "BP104"),
        ("{}_more:Pump", "x = 1", "BP110"),
        ("{}", "LIMIT = 1", "BP301"),
        ("{}", "def work(): pass", "BP301"),
        ("{}", "MORE = LIMITS", "BP302"),
    ],
)
def test_an_owner_must_be_there_and_have_no_such_name(owner, text, code, live, monkeypatch):
    monkeypatch.setattr(Lane, "require_vllm", lambda self: None)
    with pytest.raises(PatchError) as caught:
        installation.install(feature(live.name, Addition(owner.format(live.name), text, why="why")))
    assert [failure.code for failure in caught.value.failures] == [code]


@pytest.mark.parametrize("owner", ["{}:Pump", "{}"])
def test_a_name_that_somebody_put_there_in_this_process_is_refused(owner, live, monkeypatch):
    place = live.module.Pump if ":" in owner else live.module
    monkeypatch.setattr(place, "extra", lambda: None, raising=False)
    with pytest.raises(PatchError, match=r"BP301.*'extra'.*there already: .*test_additions"):
        installation.install(feature(live.name, Addition(owner.format(live.name), "extra = 1", why="why")))


# -- a wrong declaration ---------------------------------------------------------------------

WRONG = {
    "no owner": ({"owner": "a:"}, "is not written `module` or `module:Class`"),
    "a nested class": ({"owner": "a:B.C"}, "is not written `module` or `module:Class`"),
    "no reason": ({"why": " "}, "does not say `why`"),
    "no Python": ({"text": "def f(:"}, "is not Python"),
    "nothing": ({"text": ""}, "needs names, each once: none"),
    "a name twice": ({"text": "x = 1\ndef x(): pass"}, "needs names, each once: x, x"),
    "a call": ({"text": "print()"}, "is functions, assignments and imports, not `print()`"),
    "a loop": ({"text": "for x in y: z = 1"}, "is functions, assignments and imports"),
    "no name": ({"text": "x.y = 1"}, "is functions, assignments and imports, not `x.y = 1`"),
    "every name": ({"text": "from a import *"}, "is functions, assignments and imports"),
    "an assert": ({"text": "def f():\n    assert f"}, "must not rely on `assert`"),
    "a global": ({"text": "def f():\n    global x"}, "must not declare global or nonlocal names"),
    "super": ({"text": "def f(self): return super().f()"}, "cannot use 'super'"),
    "the class": ({"text": "def f(self): return __class__"}, "cannot use '__class__'"),
    "a private name": ({"text": "def f(self): return self.__x"}, "cannot use '__x'"),
    "a private function": ({"text": "def __f(self): pass"}, "cannot use '__f'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_declaration_is_an_error_where_it_is_made(case):
    changed, why = WRONG[case]
    with pytest.raises(PatchError, match=r"BP002") as caught:
        Addition(**{"owner": "a:B", "text": "x = 1", "why": "why", **changed})
    assert why in str(caught.value)
    assert "tests/test_additions.py:" in str(caught.value)


def test_a_feature_adds_each_name_once():
    with pytest.raises(PatchError, match=r"BP002.*adds m:Pump\.x twice"):
        feature("m", to_class("m", "x = 1"), to_class("m", "def x(): pass"))
    with pytest.raises(PatchError, match="`adds` is no tuple of Addition"):
        replace(feature("m"), adds=to_class("m", "x = 1"))  # type: ignore[arg-type]


# -- nothing to patch ------------------------------------------------------------------------

OLDER = "the pump does it itself"


def older(module: str, *adds: Addition) -> Feature:
    made = feature(module, *adds)
    (delta,) = made.deltas
    return replace(made, deltas=(replace(delta, not_with={f"{module}:Pump.drain": OLDER}),))


@pytest.mark.parametrize("drain", ["", "    def drain(self): pass\n", "    drain = None\n"])
def test_beside_a_function_of_an_older_shape_nothing_is_patched(drain: str, text_lane: Callable[..., Lane]) -> None:
    text = "class Pump:\n    name = ''\n    def flow(self): return work(self.name)\n" + drain + "def work(name): pass\n"
    lane = text_lane({"vllm/__init__.py": "", "vllm/pumps.py": text})
    plan = make_plan(lane, older("vllm.pumps", to_class("vllm.pumps", "size = LIMITS")))
    (placement,) = plan.placements
    if "def" in drain:
        assert (placement.status, placement.why, plan.steps) == ("not-applicable", OLDER, {})
        assert compile_plan(plan)[1] == []  # and what it adds is not asked about either
    else:
        assert (placement.status, placement.why) == ("applied", "")


def test_a_feature_that_has_nothing_to_patch_cannot_be_installed(live, monkeypatch):
    monkeypatch.setattr(Lane, "version", "0.1")
    (delta,) = feature(live.name).deltas
    wanted = replace(
        feature(live.name, to_class(live.name, HOOKS)),
        deltas=(replace(delta, not_with={f"{live.name}:work": OLDER}),),
    )
    with pytest.raises(PatchError, match=rf"BP127 nothing to patch: made in vLLM 0\.1: {OLDER}"):
        installation.install(wanted)
    assert not hasattr(live.module.Pump, "size")


@pytest.mark.parametrize("wrong", [{"nothing": "why"}, {"m:f": " "}])
def test_an_older_shape_is_a_target_and_a_reason(wrong: Mapping[str, str]) -> None:
    (delta,) = feature("m").deltas
    with pytest.raises(PatchError, match=r"BP002.*`not_with` of 'made.edit'"):
        replace(delta, not_with=wrong)
