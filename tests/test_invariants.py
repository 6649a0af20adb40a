"""Invariants on small synthetic modules: for each way to break one there is a mutant that proves it is seen."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace

import pytest

from balance_patcher.build import compile_plan
from balance_patcher.delta import Anchor, Delta, InsertAfter, InsertBefore, Level, Variant
from balance_patcher.feature import Agree, CalledOnce, Feature, Invariant, Ordered, Pure, Sets
from balance_patcher.invariants import Finding, check_invariants
from balance_patcher.plan import make_plan
from balance_patcher.source import Lane

MakeLane = Callable[..., Lane]
MODULE = "vllm.engine"


def delta(target: str, *variants: Variant) -> Delta:
    return Delta("f.delta", target, why="w", upstream="u", remove_when="r", variants=variants)


#: A delta that can always be placed, so that the invariants are what a test is about.
NOOP = delta(f"{MODULE}:placed", Variant("before", Anchor("return $VALUE"), edits=(InsertBefore("told = $VALUE"),)))
PLACED = "\n\ndef placed(value):\n    return value\n"


def finding(make: MakeLane, text: str, invariant: Invariant, feature: Feature | None = None) -> Finding:
    lane = make({"vllm/__init__.py": "", "vllm/engine.py": textwrap.dedent(text) + PLACED})
    feature = replace(feature or Feature("f", "s", (NOOP,)), invariants=(invariant,))
    plan = make_plan(lane, feature)
    rewrites, _ = compile_plan(plan)
    (found,) = check_invariants(plan, rewrites)
    return found


def nearest(found: Finding) -> str:
    return next(value for label, value in found.failures[0].fields if label == "nearest")


# -- called once -----------------------------------------------------------------------------

ONCE = CalledOnce("once", f"{MODULE}:Core.run", call="self.hook($$$_)", idle="if not $_ and not self.running: continue")


def core(body: str, loop: str = "while True:", after: str = "") -> str:
    lines = ["class Core:", "    def run(self):", f"        {loop}"]
    lines.append(textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 12))
    lines.append(textwrap.indent(textwrap.dedent(after).strip("\n"), " " * 8))
    return "\n".join(lines)


HOLDS = {
    "a statement": "self.hook()",
    "assigned": "self.running = self.hook(work)",
    "annotated": "going: bool = self.hook(work)",
    "added": "self.n += self.hook()",
    "in an argument": "print(self.hook())",
    "in a subscript": "x[self.hook()] = 1",
    "by a walrus": "if (more := self.hook()):\n    self.more()",
    "in the test of an if": "if self.hook():\n    self.more()",
    "in the test of an if with an else": "if not self.hook():\n    self.more()\nelse:\n    self.less()",
    "in both branches": "if a:\n    self.hook(1)\nelse:\n    self.hook(2)",
    "in every branch": "if a:\n    self.hook(1)\nelif b:\n    self.hook(2)\nelse:\n    self.hook(3)",
    "in nested branches": "if a:\n  if b:\n    self.hook()\n  else:\n    self.hook()\nelse:\n  self.hook()",
    "first of an and": "self.hook() and self.more()",
    "first of an or": "self.hook() or self.more()",
    "both ways of a conditional expression": "x = self.hook(1) if a else self.hook(2)",
    "test of a conditional expression": "x = 1 if self.hook() else 2",
    "first of a chain": "x = 0 < self.hook() < y",
    "first iterable of a comprehension": "x = [y for y in self.hook()]",
    "in a with": "with self.trace():\n    self.hook()",
    "as a context": "with self.hook():\n    self.more()",
    "after a with": "with self.trace():\n    self.more()\nself.hook()",
    "after a try": "try:\n    self.more()\nexcept OSError:\n    pass\nself.hook()",
    "after a for": "for x in y:\n    if x:\n        break\n    continue\nself.hook()",
    "after a while": "while x:\n    break\nelse:\n    pass\nself.hook()",
    "after a match": "match x:\n    case 1:\n        pass\n    case _:\n        self.more()\nself.hook()",
    "after an idle continue": "if not work and not self.running:\n    continue\nself.hook()",
    "an idle continue with an else": "if not a and not self.running:\n  continue\nelse:\n  self.more()\nself.hook()",
    "after a nested idle continue": "if a:\n  if not b and not self.running:\n    continue\n  self.c()\nself.hook()",
    "before a continue": "self.hook()\nif a:\n    continue\nself.more()",
    "before a break": "self.hook()\nif a:\n    break",
    "before a return": "self.hook()\nif a:\n    return",
    "in a return": "if a:\n    return self.hook()\nself.hook()",
    "in a branch that leaves": "if a:\n    self.hook()\n    continue\nself.hook()",
    "after a raise": "if a:\n    raise SystemExit\nself.hook()",
    "after a function": "def told():\n    return 1\nself.hook()",
    "in the default of a function": "def told(x=self.hook()):\n    return 1",
}


@pytest.mark.parametrize("name", HOLDS)
def test_called_once_holds(name: str, text_lane: MakeLane) -> None:
    found = finding(text_lane, core(HOLDS[name]), ONCE)
    assert (found.status, found.detail.partition(",")[0]) == ("holds", "called once on every path")


#: What breaks it, the id, and the line of the module that is named.
BROKEN = {
    "not at all": ("self.more()", "BP201"),
    "another method": ("self.hooked()", "BP201"),
    "on another object": ("other.hook()", "BP201"),
    "only named": ("call(self.hook)", "BP201"),
    "one branch": ("if a:\n    self.hook()", "BP201"),
    "only the else": ("if a:\n    pass\nelse:\n    self.hook()", "BP201"),
    "not in the elif": ("if a:\n    self.hook()\nelif b:\n    pass\nelse:\n    self.hook()", "BP201"),
    "a nested if": ("if a:\n    if b:\n        self.hook()\nelse:\n    self.hook()", "BP201"),
    "second of an and": ("a and self.hook()", "BP201"),
    "second of an or": ("a or self.hook()", "BP201"),
    "one way of a conditional expression": ("x = self.hook() if a else 0", "BP201"),
    "end of a chain": ("x = 0 < y < self.hook()", "BP201"),
    "in an assert": ("assert self.hook()", "BP201"),
    "in the message of an assert": ("assert a, self.hook()", "BP201"),
    "behind a continue": ("if a:\n    continue\nself.hook()", "BP201"),
    "behind a break": ("if a:\n    break\nself.hook()", "BP201"),
    "behind a return": ("if a:\n    return 1\nself.hook()", "BP201"),
    "behind another idle": ("if not work and not self.stopped:\n    continue\nself.hook()", "BP201"),
    "behind an idle that does more": (
        "if not work and not self.running:\n    self.more()\n    continue\nself.hook()",
        "BP201",
    ),
    "behind an idle that breaks": ("if not work and not self.running:\n    break\nself.hook()", "BP201"),
    "behind a continue in a with": ("with a:\n    continue\nself.hook()", "BP201"),
    "behind a continue in a try": ("try:\n    continue\nfinally:\n    pass\nself.hook()", "BP201"),
    "behind a continue in a handler": ("try:\n    a()\nexcept OSError:\n    continue\nself.hook()", "BP201"),
    "behind a continue in a match": ("match a:\n    case 1:\n        continue\nself.hook()", "BP201"),
    "behind a return in a for": ("for x in y:\n    return\nself.hook()", "BP201"),
    "behind a continue in the else of a for": ("for x in y:\n    pass\nelse:\n    continue\nself.hook()", "BP201"),
    "behind a break in the else of a while": ("while x:\n    y()\nelse:\n    break\nself.hook()", "BP201"),
    "behind a continue in the else of a loop in a try": (
        "try:\n    for x in y:\n        pass\n    else:\n        continue\nfinally:\n    pass\nself.hook()",
        "BP201",
    ),
    "in a nested function": ("def told():\n    self.hook()", "BP201"),
    "in a nested function that is called": ("def told():\n    self.hook()\ntold()", "BP201"),
    "in a lambda": ("x = lambda: self.hook()", "BP201"),
    "element of a comprehension": ("x = [self.hook() for y in z]", "BP202"),
    "condition of a comprehension": ("x = {y for y in z if self.hook()}", "BP202"),
    "second iterable of a comprehension": ("x = [y for z in a for y in self.hook()]", "BP202"),
    "twice": ("self.hook()\nself.hook()", "BP202"),
    "twice in one expression": ("x = self.hook() + self.hook()", "BP202"),
    "twice in an and": ("x = self.hook() and self.hook()", "BP202"),
    "again in a branch": ("self.hook()\nif a:\n    self.hook()", "BP202"),
    "again in a test": ("if self.hook():\n    self.hook()\n", "BP202"),
    "again in a nested function": ("self.hook()\ndef told():\n    self.hook()", "BP202"),
    "again by another name": ("self.hook()\nagain = self.hook", "BP202"),
    "again in a partial": ("self.hook()\nqueue.put(partial(self.hook, 1))", "BP202"),
    "again through super": ("self.hook()\nsuper().hook()", "BP202"),
    "again in a lambda": ("self.hook()\nx = lambda: self.hook()", "BP202"),
    "in the idle test and after it": ("if not self.hook() and not self.running:\n    continue\nself.hook()", "BP202"),
    "three times on a path": ("self.hook()\nself.hook()\nself.hook()", "BP202"),
    "in a for": ("for x in y:\n    self.hook()", "BP203"),
    "in a while": ("while x:\n    self.hook()", "BP203"),
    "in the test of a while": ("while self.hook():\n    pass", "BP203"),
    "in a try": ("try:\n    self.hook()\nexcept OSError:\n    pass", "BP203"),
    "in a handler": ("try:\n    a()\nexcept OSError:\n    self.hook()", "BP203"),
    "in a finally": ("try:\n    a()\nfinally:\n    self.hook()", "BP203"),
    "in a match": ("match x:\n    case 1:\n        self.hook()\n    case _:\n        self.hook()", "BP203"),
    "in a class": ("class Told:\n    x = self.hook()", "BP203"),
    "under suppress": ("with contextlib.suppress(OSError):\n    a()\n    self.hook()", "BP203"),
    "under a bare suppress": ("with suppress(OSError):\n    self.hook()", "BP203"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_called_once_is_broken(name: str, text_lane: MakeLane) -> None:
    body, code = BROKEN[name]
    found = finding(text_lane, core(body), ONCE)
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", [code])
    assert nearest(found).startswith("engine.py:")
    assert dict(found.failures[0].fields)["invariant"] == "once"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came in 3.11")
def test_a_call_under_except_star_is_refused(text_lane: MakeLane) -> None:
    found = finding(text_lane, core("try:\n    self.hook()\nexcept* OSError:\n    pass"), ONCE)
    assert [failure.code for failure in found.failures] == ["BP203"]


SHAPES = {
    "no loop": ("if True:", "self.hook()", "", "BP203"),
    "loop in a try": ("try:", "while True:\n    self.hook()", "finally:\n    pass", "BP203"),
    "loop in a with": ("with self.trace():", "while True:\n    self.hook()", "", "BP203"),
    "two loops": ("while True:", "self.hook()", "while True:\n    self.hook()", "BP203"),
    "call in the loop's test": ("while self.hook():", "self.more()", "", "BP203"),
    "call in the loop's test too": ("while self.hook():", "self.hook()", "", "BP203"),
    "call in the loop's iterable": ("for x in self.hook():", "self.hook()", "", "BP203"),
    "call in the loop's else": ("while True:", "self.hook()", "else:\n    self.hook()", "BP203"),
    "call after the loop": ("while True:", "self.hook()", "self.hook()", "BP202"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_loop_of_another_shape_is_refused(name: str, text_lane: MakeLane) -> None:
    loop, body, after, code = SHAPES[name]
    found = finding(text_lane, core(body, loop, after), ONCE)
    assert [failure.code for failure in found.failures] == [code]


def test_a_call_in_a_helper_is_refused(text_lane: MakeLane) -> None:
    text = core("self.step()\nself.hook()") + "\n    def step(self):\n        self.hook()\n"
    found = finding(text_lane, text, ONCE)
    assert [failure.code for failure in found.failures] == ["BP202"]
    assert nearest(found) == "engine.py:8  `self.hook()`"


def test_the_loop_is_read_under_a_decorator(text_lane: MakeLane) -> None:
    text = core("self.hook()").replace("    def run", "    @tolerant\n    def run")
    assert finding(text_lane, text, ONCE).status == "holds"


def test_what_is_named_when_the_hook_is_gone_is_the_call_that_is_most_like_it(text_lane: MakeLane) -> None:
    found = finding(text_lane, core("self.handle()\nself.hook_now(1)\nself.other()"), ONCE)
    assert nearest(found) == "engine.py:5  `self.hook_now(1)`"


def test_what_is_named_is_the_way_out_that_skips_the_hook(text_lane: MakeLane) -> None:
    found = finding(text_lane, core("self.more()\nif a:\n    continue\nself.hook()"), ONCE)
    assert nearest(found) == "engine.py:6  `continue`"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("class Core:\n    pass", "BP104"),
        ("class Other:\n    pass", "BP105"),
        (core("self.hook()") + "\n    def run(self):\n        pass", "BP106"),
    ],
)
def test_an_invariant_whose_function_is_gone_is_broken(text: str, code: str, text_lane: MakeLane) -> None:
    found = finding(text_lane, text, ONCE)
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", [code])


def test_an_invariant_whose_module_cannot_be_parsed_is_unknown(text_lane: MakeLane) -> None:
    lane = text_lane({"vllm/__init__.py": "", "vllm/engine.py": PLACED, "vllm/core.py": "def run(:\n"})
    elsewhere = replace(ONCE, target="vllm.core:Core.run")
    plan = make_plan(lane, Feature("f", "s", (NOOP,), invariants=(elsewhere,)))
    (found,) = check_invariants(plan, {})
    assert (found.status, [failure.code for failure in found.failures]) == ("unknown", ["BP508"])


# -- order -----------------------------------------------------------------------------------

ORDER = Ordered("order", f"{MODULE}:Core.__init__", first="self.group()", then="super().__init__($$$_)")


def init(body: str) -> str:
    return "class Core(Base):\n    def __init__(self):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8)


@pytest.mark.parametrize(
    "body",
    [
        "self.group()\nsuper().__init__()",
        "self.group()\nif a:\n    super().__init__(1)\n",
        "with a:\n    self.group()\nsuper().__init__()",
        "with a:\n    with b:\n        self.group()\n        super().__init__()",
        "with a:\n  self.group()\n  with b:\n    try:\n      super().__init__()\n    finally:\n      pass",
        "if a:\n    self.group()\n    super().__init__()",
        "x = self.group()\nsuper().__init__()",
        "if self.group():\n    pass\nsuper().__init__()",
        "x = self.group() and 1\nsuper().__init__()",
    ],
)
def test_order_holds(body: str, text_lane: MakeLane) -> None:
    assert finding(text_lane, init(body), ORDER).status == "holds"


@pytest.mark.parametrize(
    "body",
    [
        "super().__init__()\nself.group()",
        "if a:\n    self.group()\nsuper().__init__()",
        "if a:\n    self.group()\nelse:\n    super().__init__()",
        "for x in y:\n    self.group()\nsuper().__init__()",
        "while x:\n    self.group()\nsuper().__init__()",
        "try:\n    self.group()\nexcept OSError:\n    pass\nsuper().__init__()",
        "try:\n    a()\nfinally:\n    self.group()\nsuper().__init__()",
        "with suppress(OSError):\n    a()\n    self.group()\nsuper().__init__()",
        "match a:\n    case 1:\n        self.group()\nsuper().__init__()",
        "x = a and self.group()\nsuper().__init__()",
        "x = self.group() if a else 1\nsuper().__init__()",
        "x = lambda: self.group()\nsuper().__init__()",
        "assert self.group()\nsuper().__init__()",
        "def told():\n    self.group()\nsuper().__init__()",
        "super().__init__()",
        "self.group()",
        "self.group()\nself.group()\nsuper().__init__()",
        "self.group()\nif a:\n    super().__init__()\nelse:\n    super().__init__()",
    ],
)
def test_order_is_broken(body: str, text_lane: MakeLane) -> None:
    found = finding(text_lane, init(body), ORDER)
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", ["BP204"])
    assert nearest(found).startswith("engine.py:")


# -- attributes ------------------------------------------------------------------------------

SETS = Sets("sets", f"{MODULE}:Core.__init__", "group")


@pytest.mark.parametrize(
    "body",
    [
        "self.group = 1",
        "self.group: int = 1",
        "self.group, self.store = a",
        "with a as self.group:\n    pass",
        "if a:\n    self.group = 1",
    ],
)
def test_an_attribute_that_is_set_is_seen(body: str, text_lane: MakeLane) -> None:
    assert finding(text_lane, init(body), SETS).status == "holds"


@pytest.mark.parametrize(
    "body",
    [
        "self.other = 1",
        "self.group: int",
        "other.group = 1",
        "self.x.group = 1",
        "x = self.group",
        "group = 1",
        "def told(self):\n    self.group = 1",
    ],
)
def test_an_attribute_that_is_not_set_is_missed(body: str, text_lane: MakeLane) -> None:
    found = finding(text_lane, init(body), SETS)
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", ["BP207"])


# -- agreement and purity --------------------------------------------------------------------

STEP = f"{MODULE}:Core.step"
WITH_STOP = """
class Core:
    def __init__(self):
        self.cap, self.limit, self.running = 8, 9, []

    def step(self):
        while self.waiting:
            count = len(self.running)
            if count >= self.cap:
                break
            self.admit()
"""
STOP = Anchor("if $COUNT <$OP> self.$CAP: break", inside=(Level("loop", "while $_"),), after="$COUNT = $VALUE")
AGREE = Agree(
    "agree", STEP, one="flag = $_ <$OP> self.$CAP", other="if $COUNT <$OP> self.$CAP: break", holes=("OP", "CAP")
)


def gate(text: str) -> Feature:
    edits = (InsertBefore(text, at="loop"), InsertAfter("if flag:\n    break"))
    return Feature("f", "s", (delta(STEP, Variant("gate", STOP, edits=edits)),))


def test_a_gate_that_takes_what_the_stop_has_agrees(text_lane: MakeLane) -> None:
    found = finding(text_lane, WITH_STOP, AGREE, gate("flag = max(self.running) <$OP> self.$CAP"))
    assert (found.status, found.detail) == ("holds", "OP >=, CAP cap")


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("flag = max(self.running) >= self.limit", "CAP differs: `limit` and `cap`"),
        ("flag = max(self.running) == self.cap", "OP differs: `==` and `>=`"),
        ("flag = max(self.running) >= self.cap + 1", "stands 0 times in what would run"),
        ("flag = False", "stands 0 times in what would run"),
        ("flag = 1 >= self.cap\nflag = 2 >= self.cap", "stands 2 times in what would run"),
    ],
)
def test_a_gate_that_repeats_and_is_wrong_is_refused(text: str, detail: str, text_lane: MakeLane) -> None:
    found = finding(text_lane, WITH_STOP, AGREE, gate(text))
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", ["BP205"])
    assert detail in found.failures[0].what


@pytest.mark.parametrize(
    "value", ["len(self.running)", "len(self.running) + self.cap", "self.cap * 2 - 1", "len(self.running[1:])"]
)
def test_a_count_that_only_reads_is_pure(value: str, text_lane: MakeLane) -> None:
    text = WITH_STOP.replace("len(self.running)", value)
    found = finding(text_lane, text, Pure("pure", "f.delta", "VALUE"), gate("flag = True"))
    assert found.status == "holds"
    assert found.detail.endswith("only reads")


@pytest.mark.parametrize(
    "value",
    [
        "self.running.pop()",
        "len(self.running.copy())",
        "(n := 3)",
        "sum(self.running)",
        "[*self.count()]",
        "(yield_ := self.cap) + 1",
    ],
)
def test_a_count_that_may_do_more_is_refused(value: str, text_lane: MakeLane) -> None:
    text = WITH_STOP.replace("len(self.running)", value)
    found = finding(text_lane, text, Pure("pure", "f.delta", "VALUE"), gate("flag = True"))
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", ["BP206"])
    assert nearest(found).startswith("engine.py:8 ")


def test_a_hole_that_this_variant_does_not_bind_needs_no_proof(text_lane: MakeLane) -> None:
    stop = Anchor("if len(self.running) <$OP> self.$CAP: break", inside=(Level("loop", "while $_"),))
    plain = delta(
        STEP,
        Variant("plain", stop, edits=(InsertAfter("self.cap = 1"),)),
        Variant("gate", STOP, edits=(InsertAfter("self.cap = 1"),)),
    )
    text = WITH_STOP.replace("            count = len(self.running)\n", "").replace("count >=", "len(self.running) >=")
    found = finding(text_lane, text, Pure("pure", "f.delta", "VALUE"), Feature("f", "s", (plain,)))
    assert (found.status, found.detail) == ("holds", "nothing is bound to $VALUE here")


@pytest.mark.parametrize("invariant", [AGREE, Pure("pure", "f.delta", "VALUE")], ids=["agree", "pure"])
def test_what_speaks_of_the_rewrite_is_unknown_without_one(invariant: Invariant, text_lane: MakeLane) -> None:
    lane = text_lane({"vllm/__init__.py": "", "vllm/engine.py": "class Core:\n    def step(self):\n        pass\n"})
    plan = make_plan(lane, replace(gate("flag = 1"), invariants=(invariant,)))
    (found,) = check_invariants(plan, None)
    assert (found.status, found.failures) == ("unknown", ())
