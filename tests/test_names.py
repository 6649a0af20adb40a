"""The names and attributes that inserted code uses: what is new may be nowhere, all else must be somewhere."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from balance_patcher.chain import sets_attribute
from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Prologue,
    Replace,
    Variant,
)
from balance_patcher.errors import Failure
from balance_patcher.feature import Feature, RuntimeClass
from balance_patcher.names import check_names, new_names
from balance_patcher.plan import Step, make_plan
from balance_patcher.source import Lane, ModuleText

MakeLane = Callable[..., Lane]
STEP = "pool.engine:Core.step"
ANCHOR = Anchor("self.$CALL()")
HEAD = """
import os
from math import pi as circle

LIMIT = 3

class Core(Base):
    shared = 1
    declared: int

    def __init__(self):
        self.ready = True
        self.first, self.second = 1, 2
        with open(os.devnull) as self.file:
            pass
        self.annotated: int = 1
        self.promised: int

    @property
    def size(self):
        return 1

    @staticmethod
    def told(other):
        other.foreign = 1

"""


def module(step: str, head: str = HEAD) -> str:
    return head + textwrap.indent(textwrap.dedent(step).strip("\n"), "    ") + "\n"


def delta(target: str, *edits: Edit, anchor: Anchor | None = ANCHOR, exports: Mapping[str, str] | None = None) -> Delta:
    variant = Variant("v", anchor, edits=edits, exports=exports or {})
    return Delta("f.delta", target, why="w", upstream="u", remove_when="r", variants=(variant,))


def failures(
    make: MakeLane,
    text: str,
    *edits: Edit,
    anchor: Anchor | None = ANCHOR,
    files: Mapping[str, str] | None = None,
    exports: Mapping[str, str] | None = None,
    feature: Feature | None = None,
) -> list[Failure]:
    lane = make({"vllm/__init__.py": "", "pool/engine.py": text, **(files or {})})
    made = delta(STEP, *edits, anchor=anchor, exports=exports)
    plan = make_plan(lane, replace(feature, deltas=(made,)) if feature else Feature("f", "s", (made,)))
    assert plan.all_failures == []
    return check_names(plan)


def codes(found: list[Failure]) -> list[str]:
    return [failure.code for failure in found]


def field(failure: Failure, name: str) -> str:
    return next(value for label, value in failure.fields if label == name)


# -- new names -------------------------------------------------------------------------------

PLAIN = "def step(self):\n    self.work()"
TAKEN = {
    "a local": "def step(self):\n    ours = 1\n    self.work()",
    "a local set later": "def step(self):\n    self.work()\n    ours = 1",
    "a name that is read": "def step(self):\n    self.work()\n    print(ours)",
    "a parameter": "def step(self, ours=None):\n    self.work()",
    "a keyword-only parameter": "def step(self, *, ours=None):\n    self.work()",
    "the rest parameter": "def step(self, **ours):\n    self.work()",
    "the target of a for": "def step(self):\n    for ours in ():\n        pass\n    self.work()",
    "a with": "def step(self):\n    with open(LIMIT) as ours:\n        pass\n    self.work()",
    "a handler": "def step(self):\n    try:\n        pass\n    except OSError as ours:\n        pass\n    self.work()",
    "a walrus": "def step(self):\n    print(ours := 1)\n    self.work()",
    "an import": "def step(self):\n    import ours\n    self.work()",
    "an import under another name": "def step(self):\n    import os as ours\n    self.work()",
    "a match": "def step(self):\n    match LIMIT:\n        case ours:\n            pass\n    self.work()",
    "a global statement": "def step(self):\n    global ours\n    ours = 1\n    self.work()",
    "a nested function": "def step(self):\n    def ours():\n        pass\n    self.work()",
    "a local of a nested function": "def step(self):\n  def told():\n    ours = 1\n    return ours\n  self.work()",
    "a local two functions down": "def step(self):\n  def a():\n    def b():\n      ours = 1\n  self.work()",
    "a comprehension": "def step(self):\n    x = [ours for ours in ()]\n    self.work()",
    "a lambda": "def step(self):\n    x = lambda ours: 1\n    self.work()",
    "a nested class": "def step(self):\n    class Told:\n        ours = 1\n    self.work()",
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_new_name_that_the_function_has_is_refused(name: str, text_lane: MakeLane) -> None:
    text = module(TAKEN[name])
    (failure,) = failures(text_lane, text, InsertBefore("ours = 1"))
    assert failure.code == "BP301"
    assert "is used in the function" in failure.what
    line = failure.line or 0
    assert "ours" in text.splitlines()[line - 1]
    assert field(failure, "nearest") == f"engine.py:{line}  `{text.splitlines()[line - 1].strip()}`"
    assert field(failure, "declared").startswith("tests/test_names.py:")


@pytest.mark.parametrize(
    "head",
    [
        "ours = 1",
        "import ours",
        "from os import path as ours",
        "def ours():\n    pass",
        "class ours:\n    pass",
        "for ours in ():\n    pass",
    ],
)
def test_a_new_name_that_the_module_has_is_refused(head: str, text_lane: MakeLane) -> None:
    (failure,) = failures(text_lane, module(PLAIN, f"{head}\n{HEAD}"), InsertBefore("ours = 1"))
    assert (failure.code, failure.line) == ("BP301", 1)
    assert "is used in the module" in failure.what


def test_a_name_of_another_function_is_not_taken(text_lane: MakeLane) -> None:
    text = module(PLAIN + "\n\ndef other(self):\n    ours = 1\n    return self.ours")
    assert failures(text_lane, text, InsertBefore("ours = 1")) == []


NEW = {
    "ours = 1": {"ours"},
    "a, (b, *c) = x": {"a", "b", "c"},
    "a += 1": {"a"},
    "for a in x:\n    b = 1": {"a", "b"},
    "with x as a, y as (b, c):\n    pass": {"a", "b", "c"},
    "print(a := 1)": {"a"},
    "x = [a for a in b]": {"x"},
    "x = [(y := a) for a in b]": {"x", "y"},
    "x = lambda a: a": {"x"},
    "def a(b):\n    c = 1": {"a"},
    "class A:\n    b = 1": {"A"},
    "import a.b": {"a"},
    "import a.b as c": {"c"},
    "from a import b as c": {"c"},
    "try:\n    pass\nexcept E as a:\n    pass": {"a"},
    "match x:\n    case [a, *b]:\n        pass\n    case {'k': c, **d}:\n        pass": {"a", "b", "c", "d"},
    "del a": {"a"},
    "self.x = 1": set(),
    "print(a)": set(),
    "$QUEUE = 1\nours = $QUEUE": {"ours"},
}


@pytest.mark.parametrize("text", NEW)
def test_the_names_that_a_text_binds(text: str) -> None:
    step = Step(
        delta(STEP, InsertBefore("x = 1")), InsertBefore("x = 1"), text.replace("$QUEUE", "queue"), template=text
    )
    assert new_names(step) == NEW[text]


# -- names that must be there ----------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "print(circle, os, LIMIT)",
        "queue.pop()",
        "self.ready = queue",
        "x = [queue for y in self.first]",
        "x = lambda a: a",
        "x = {k: v for k, v in queue}",
        "print(__name__)",
        "x = [b for a in queue for b in a]",
        "x = 1\nprint(x)",
        "print(max(len(queue), id(Core)))",
    ],
)
def test_a_name_that_is_there_is_accepted(text: str, text_lane: MakeLane) -> None:
    step = "def step(self, queue):\n    self.work()"
    assert failures(text_lane, module(step), InsertBefore(text)) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("print(queu)", "queu"),
        ("x = queu", "queu"),
        ("x = [y for y in queu]", "queu"),
        ("x = [queu for y in self.first]", "queu"),
        ("x = lambda a: queu", "queu"),
        ("if queu:\n    x = 1", "queu"),
        ("math.floor(1)", "math"),
        ("queu.x = 1", "queu"),
    ],
)
def test_a_name_that_is_not_there_is_refused(text: str, missing: str, text_lane: MakeLane) -> None:
    step = "def step(self, queue):\n    self.work()"
    (failure,) = failures(text_lane, module(step), InsertBefore(text))
    assert failure.code == "BP302"
    assert failure.what.startswith(f"{missing!r}, which delta 'f.delta' uses")
    if missing == "queu":
        assert field(failure, "nearest") == "queue"


def test_the_name_of_an_added_parameter_is_known(text_lane: MakeLane) -> None:
    edits = (AddParameter("throttle", "False"), InsertAfter("print(throttle)"))
    assert failures(text_lane, module(PLAIN), *edits) == []


def test_a_name_that_another_edit_puts_in_is_known(text_lane: MakeLane) -> None:
    assert failures(text_lane, module(PLAIN), InsertBefore("ours = 1"), InsertAfter("print(ours)")) == []


def test_a_name_that_a_hole_binds_is_upstreams(text_lane: MakeLane) -> None:
    anchor = Anchor("assert $QUEUE is not None")
    text = module("def step(self, queue):\n    assert queue is not None")
    assert failures(text_lane, text, Replace("if $QUEUE is None:\n    $QUEUE = ()"), anchor=anchor) == []


# -- attributes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["ready", "first", "second", "file", "annotated", "shared", "declared", "size", "told", "step", "inherited", "far"],
)
def test_an_attribute_of_the_class_chain_is_accepted(name: str, text_lane: MakeLane) -> None:
    head = HEAD.replace("import os", "import os\nfrom vllm.base import Foundation as Base")
    base = (
        "from vllm.far import Far\nclass Foundation(Far[int]):\n    def __init__(self):\n        self.inherited = 1\n"
    )
    files = {"vllm/base.py": base, "vllm/far.py": "class Far:\n    far = 1\n"}
    assert failures(text_lane, module(PLAIN, head), InsertBefore(f"print(self.{name})"), files=files) == []


@pytest.mark.parametrize("name", ["foreign", "promised", "read_only", "nowhere", "LIMIT"])
def test_an_attribute_that_is_set_nowhere_is_refused(name: str, text_lane: MakeLane) -> None:
    step = PLAIN + "\n    print(self.read_only)"
    (failure,) = failures(text_lane, module(step), InsertBefore(f"print(self.{name})"))
    assert failure.code == "BP303"
    assert failure.what.startswith(f"self.{name}, which delta 'f.delta' uses, is set nowhere in Core")


def test_the_attribute_that_has_almost_the_name_is_named(text_lane: MakeLane) -> None:
    text = module(PLAIN)
    (failure,) = failures(text_lane, text, InsertBefore("print(self.redy)"))
    line = next(at for at, content in enumerate(text.splitlines(), 1) if "self.ready =" in content)
    assert field(failure, "nearest") == f"engine.py:{line}  `self.ready = True`"


def test_an_attribute_that_nothing_resembles_is_said_to_be_alone(text_lane: MakeLane) -> None:
    (failure,) = failures(text_lane, module(PLAIN), InsertBefore("print(self.zzzz)"))
    assert field(failure, "nearest") == "nothing in Core comes near"


def test_what_the_runtime_class_brings_is_accepted_on_its_base_only(text_lane: MakeLane) -> None:
    made = delta(STEP, InsertBefore("print(self.ours)"))
    for base, expected in (("pool.engine:Core", []), ("pool.engine:Other", ["BP303"])):
        runtime = RuntimeClass("Ours", base, make=lambda upstream: upstream, provides=frozenset({"ours"}))
        feature = Feature("f", "s", (made,), runtime=runtime)
        found = failures(text_lane, module(PLAIN), InsertBefore("print(self.ours)"), feature=feature)
        assert codes(found) == expected


# -- private names ---------------------------------------------------------------------------

SECRETS = """
    def step(self, n):
        __kept = n
        self.first()
        return self.__secret(__kept)

    def __secret(self, n):
        return n
"""


def test_a_private_name_is_that_of_its_class(text_lane: MakeLane) -> None:
    (failure,) = failures(text_lane, module(SECRETS), InsertBefore("__kept = 1\nprint(__kept)"))
    assert (failure.code, failure.what) == ("BP301", "'__kept', which delta 'f.delta' puts in, is used in the function")
    assert failures(text_lane, module(SECRETS), InsertBefore("print(__kept, self.__secret(1))")) == []
    assert codes(failures(text_lane, module(SECRETS), InsertBefore("print(__lost)"))) == ["BP302"]
    assert failures(text_lane, module(SECRETS), InsertBefore("__new = 1\nprint(__new)")) == []


def test_a_private_name_of_the_module_is_not_seen_in_a_class(text_lane: MakeLane) -> None:
    assert codes(failures(text_lane, module(PLAIN, f"__held = 1\n{HEAD}"), InsertBefore("print(__held)"))) == ["BP302"]


def test_a_private_attribute_of_a_base_is_another(text_lane: MakeLane) -> None:
    base = "class Base:\n    def __secret(self): ...\n    def open(self): ...\n"
    text = module(PLAIN, base + HEAD)
    assert codes(failures(text_lane, text, InsertBefore("print(self.__secret())"))) == ["BP303"]
    assert failures(text_lane, text, InsertBefore("print(self.open())")) == []


# -- exports ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [("len(self.first)", []), ("LIMIT + 1", []), ("count", ["BP302"]), ("self.nowhere", ["BP303"]), ("self", [])],
)
def test_an_export_knows_the_module_and_the_class_but_no_locals(
    value: str, expected: list[str], text_lane: MakeLane
) -> None:
    anchor = Anchor("self.$CALL()", after="count = $VALUE")
    text = module(f"def step(self):\n    count = {value.replace('count', 'LIMIT')}\n    self.work()")
    exported = "$VALUE" if value != "count" else "count"
    found = failures(text_lane, text, InsertBefore("x = 1"), anchor=anchor, exports={"_count": exported})
    assert codes(found) == expected


# -- super -----------------------------------------------------------------------------------

SUPER = Prologue("if not self.ready:\n    return super().step($$$PARAMETERS)")


def test_a_zero_argument_super_is_accepted_where_there_is_none(text_lane: MakeLane) -> None:
    assert failures(text_lane, module(PLAIN), SUPER, anchor=None) == []


@pytest.mark.parametrize(
    "body",
    ["super().step()", "print(__class__)", "x = [super().step() for y in ()]", "def told():\n        return super"],
)
def test_a_second_super_is_refused(body: str, text_lane: MakeLane) -> None:
    text = module(f"def step(self):\n    {body}\n    self.work()")
    (failure,) = failures(text_lane, text, SUPER, anchor=None)
    assert failure.code == "BP304"
    assert field(failure, "nearest").startswith("engine.py:")


def test_a_call_through_may_be_put_around_a_function_that_uses_super(text_lane: MakeLane) -> None:
    text = module("def step(self):\n    return super().step()")
    assert failures(text_lane, text, CallThrough("print(self.ready)"), anchor=None) == []


def test_names_are_not_looked_at_where_nothing_is_applied(text_lane: MakeLane) -> None:
    absorbed = Variant("a", ANCHOR, status="absorbed")
    made = Delta("f.delta", STEP, why="w", upstream="u", remove_when="r", variants=(absorbed,))
    lane = text_lane({"vllm/__init__.py": "", "pool/engine.py": module(PLAIN)})
    assert check_names(make_plan(lane, Feature("f", "s", (made,)))) == []


@pytest.mark.parametrize(
    ("method", "sets"),
    [
        ("def f(self): self.a = 1", True),
        ("def f(me, /, b): me.a = 1", True),
        ("def f(*, b): b.c.a = 1", False),
        ("def f(*b): b[0].a = 1", False),
        ("def f(self): self.b.a = 1", False),
        ("def f(self): self.a: int", False),
    ],
)
def test_an_attribute_is_set_on_the_first_parameter_wherever_that_stands(method: str, sets: bool) -> None:  # noqa: FBT001
    text = ModuleText("m", "m.py", "m.py", f"class C:\n    {method}\n")
    owner = text.tree.body[0]
    assert isinstance(owner, ast.ClassDef)
    assert sets_attribute(text, owner, "a") is sets
