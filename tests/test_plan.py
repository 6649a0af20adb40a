"""Placing deltas on small synthetic modules: every refusal has a mutant, and names the candidate that is meant."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from balance_patcher.anchors import find_anchor
from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Level,
    Prologue,
    Replace,
    Variant,
)
from balance_patcher.errors import Failure, Outcome, PatchError
from balance_patcher.feature import Feature
from balance_patcher.pattern import Pattern
from balance_patcher.plan import Plan, in_order, make_plan
from balance_patcher.source import Lane
from balance_patcher.targets import Target, find_target

MakeLane = Callable[..., Lane]
MODULE = "vllm.engine"
STEP = f"{MODULE}:Core.step"


def declared(name: str, *variants: Variant, target: str = STEP, after: tuple[str, ...] = ()) -> Delta:
    return Delta(name, target, why="w", upstream="u", remove_when="r", variants=variants, after=after)


def edited(name: str, anchor: Anchor | None, *edits: Edit, after: tuple[str, ...] = ()) -> Delta:
    return declared(name, Variant("v", anchor, edits=edits), after=after)


def planned(make: MakeLane, text: str, *deltas: Delta) -> Plan:
    lane = make({"vllm/__init__.py": "", "vllm/engine.py": textwrap.dedent(text).lstrip("\n")})
    return make_plan(lane, Feature("f", "s", deltas))


def only(plan: Plan) -> Failure:
    (failure,) = plan.all_failures
    return failure


def field(failure: Failure, name: str) -> str:
    return next(value for label, value in failure.fields if label == name)


def step(body: str, header: str = "def step(self):") -> str:
    return (
        "class Core:\n"
        + textwrap.indent(header + "\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    "), "    ")
        + "\n"
    )


# -- targets ---------------------------------------------------------------------------------

NOOP = (InsertBefore("self.x = 1"),)
RETURN = Anchor("return $VALUE")
PLAIN = step("return 1")

TARGETS = {
    "function renamed": (
        "class Core:\n    def steps(self):\n        return 1\n    def other(self): pass",
        "BP104",
        "engine.py:2  `steps`",
    ),
    "function gone": ("class Core:\n    x = 1", "BP104", "nothing of that kind"),
    "class renamed": (
        "class Other: pass\nclass CoreProc:\n    def step(self):\n        return 1",
        "BP105",
        "engine.py:2  `CoreProc`",
    ),
    "class renamed, told by the method": (
        "class Cores: pass\nclass Engine:\n    def step(self):\n        return 1",
        "BP105",
        "engine.py:2  `Engine`",
    ),
    "class gone": ("x = 1", "BP105", "nothing of that kind"),
    "function is now a lambda": ("class Core:\n    step = lambda self: 1", "BP104", "nothing of that kind"),
    "function twice": (PLAIN + "    def step(self):\n        return 2", "BP106", "engine.py:4  `def step`"),
    "function in if and else": (
        "class Core:\n    if A:\n        def step(self): return 1\n    else:\n        def step(self): return 2",
        "BP106",
        "engine.py:3  `def step`",
    ),
    "function in try and except": (
        "class Core:\n    try:\n        def step(self): return 1\n    except E:\n        def step(self): return 2",
        "BP106",
        "engine.py:5  `def step`",
    ),
    "function assigned anew": (PLAIN + "    step = cached(step)", "BP106", "engine.py:4  `step = cached(step)`"),
    "function assigned anew in an if": (
        PLAIN + "    if A:\n        step = cached(step)",
        "BP106",
        "engine.py:5  `step = cached(step)`",
    ),
    "class twice": (PLAIN + PLAIN, "BP106", "engine.py:4  `class Core`"),
    "class assigned anew": (PLAIN + "Core = traced(Core)", "BP106", "engine.py:4  `Core = traced(Core)`"),
    "decorated": (step("return 1", "@traced\ndef step(self):"), "BP107", "engine.py:3  `def step`"),
    "decorated with a call": (step("return 1", "@traced(1)\ndef step(self):"), "BP107", "engine.py:3  `def step`"),
    "async": (step("return 1", "async def step(self):"), "BP108", "engine.py:2  `def step`"),
    "generator": (step("yield 1\nreturn 1"), "BP109", "engine.py:2  `def step`"),
    "delegating generator": (step("yield from self\nreturn 1"), "BP109", "engine.py:2  `def step`"),
    "generator by an expression": (step("x = (yield)\nreturn 1"), "BP109", "engine.py:2  `def step`"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_is_not_as_declared_is_refused(name: str, text_lane: MakeLane) -> None:
    text, code, near = TARGETS[name]
    made = edited("f.a", RETURN, *NOOP)
    failure = only(planned(text_lane, text, made))
    assert failure.code == code
    assert near in field(failure, "nearest").splitlines()
    assert field(failure, "declared") == made.declared
    assert STEP in field(failure, "target")
    assert failure.next


@pytest.mark.parametrize(
    "text",
    [
        step("return 1\ndef told():\n    yield 1"),
        step("x = lambda: (yield)\nreturn 1"),
        step("async def told():\n    pass\nreturn 1"),
        step("@traced\ndef told():\n    pass\nreturn 1"),
        PLAIN + "    steps = step\n    x: int = 1\n    step: int\n",
        PLAIN + "    def other(self):\n        step = 1\n",
        "def step():\n    return 2\nstep = 1\n" + PLAIN,
        "if A:\n    " + PLAIN.replace("\n", "\n    ").rstrip(),
        "try:\n    " + PLAIN.replace("\n", "\n    ").rstrip() + "\nexcept E:\n    pass",
    ],
)
def test_a_target_may_stand_among_other_things(text: str, text_lane: MakeLane) -> None:
    assert planned(text_lane, text, edited("f.a", RETURN, *NOOP)).all_failures == []


def test_a_module_that_is_gone_is_refused(text_lane: MakeLane) -> None:
    lane = text_lane({"vllm/__init__.py": "version = 1"})
    failure = only(make_plan(lane, Feature("f", "s", (edited("f.a", RETURN, *NOOP),))))
    assert (failure.code, failure.outcome) == ("BP110", Outcome.BROKEN)


def test_a_source_without_vllm_cannot_be_checked(text_lane: MakeLane) -> None:
    with pytest.raises(PatchError) as caught:
        make_plan(text_lane({"README": ""}), Feature("f", "s", (edited("f.a", RETURN, *NOOP),)))
    assert ([f.code for f in caught.value.failures], caught.value.outcome) == (["BP503"], Outcome.UNKNOWN)


def test_a_module_that_is_a_package_is_found(text_lane: MakeLane) -> None:
    lane = text_lane({"vllm/__init__.py": "", "vllm/engine/__init__.py": PLAIN})
    assert isinstance(find_target(lane, STEP), Target)


# -- anchors ---------------------------------------------------------------------------------

LOOP = (Level("loop", "while $_"),)
STOP = Anchor("if $COUNT <$OP> self.$CAP: break", inside=LOOP, allow={"CAP": ("cap",), "OP": ("==", ">=")})


def in_loop(stop: str, before: str = "", after: str = "self.admit()") -> str:
    body = textwrap.indent("\n".join(part for part in (before, stop, after) if part), "    ")
    return step(f"while self.waiting:\n{body}")


#: What stands in the loop, the id, and the line, of the module, that is named.
MUTANTS = {
    "another attribute": ("if n >= self.limit:\n    break", "BP101", 4),
    "on another object": ("if n >= other.cap:\n    break", "BP101", 4),
    "an offset": ("if n >= self.cap - 1:\n    break", "BP101", 4),
    "a helper": ("if self.full():\n    break", "BP101", 4),
    "turned round": ("if self.cap <= n:\n    break", "BP112", 4),
    "a negation": ("if not n >= self.cap:\n    break", "BP101", 4),
    "a chain": ("if 0 < n >= self.cap:\n    break", "BP112", 4),
    "another operator": ("if n > self.cap:\n    break", "BP112", 4),
    "a return": ("if n >= self.cap:\n    return", "BP113", 4),
    "a continue": ("if n >= self.cap:\n    continue", "BP113", 4),
    "nothing": ("if n >= self.cap:\n    pass", "BP113", 4),
    "an effect before": ("if n >= self.cap:\n    self.log()\n    break", "BP114", 4),
    "an effect after": ("if n >= self.cap:\n    break\n    self.log()", "BP114", 4),
    "an else": ("if n >= self.cap:\n    break\nelse:\n    self.log()", "BP115", 4),
    "an elif": ("if n >= self.cap:\n    break\nelif self.log():\n    pass", "BP115", 4),
    "deeper in an if": ("if a:\n    if n >= self.cap:\n        break", "BP117", 5),
    "deeper in a with": ("with a:\n    if n >= self.cap:\n        break", "BP117", 5),
    "in an else": ("if a:\n    pass\nelse:\n    if n >= self.cap:\n        break\n    x = 1", "BP117", 7),
    "in the else of the loop": ("pass", "BP101", 2),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_anchor_is_refused_by_what_changed(name: str, text_lane: MakeLane) -> None:
    stop, code, line = MUTANTS[name]
    made = edited("f.a", STOP, InsertAfter("self.x = 1"))
    failure = only(planned(text_lane, in_loop(stop), made))
    assert (failure.code, failure.line) == (code, line)
    assert field(failure, "nearest").startswith(f"engine.py:{line}  ")
    assert field(failure, "anchor").endswith("need 1, found 0")
    assert field(failure, "declared") == made.declared
    assert field(failure, "target") == f"{STEP}   (engine.py:2)"


def test_what_differs_is_said(text_lane: MakeLane) -> None:
    failure = only(
        planned(text_lane, in_loop("if self.full():\n    break"), edited("f.a", STOP, InsertAfter("self.x = 1")))
    )
    assert field(failure, "nearest") == "engine.py:4  `if self.full(): break`  differs at test: Compare → Call"


NEAREST = {
    "the changed one, not a likeness elsewhere": (
        "if x == y.cap:\n    break\nwhile a:\n    if n >= self.cap - 1:\n        break\n",
        6,
    ),
    "the one with the break": (
        "while a:\n    if self.none():\n        continue\n    if self.full():\n        break\n",
        6,
    ),
    "the likeness elsewhere, if there is none in place": ("while a:\n    pass\nif n >= self.cap_:\n    break\n", 5),
    "the one that differs least": (
        "while a:\n    if n > self.cap:\n        break\n    if n > self.limit:\n        continue\n",
        4,
    ),
    "the one that differs least, the other order": (
        "while a:\n    if n > self.limit:\n        continue\n    if n > self.cap:\n        break\n",
        6,
    ),
}


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_candidate_is(name: str, text_lane: MakeLane) -> None:
    body, line = NEAREST[name]
    failure = only(planned(text_lane, step(body), edited("f.a", STOP, InsertAfter("self.x = 1"))))
    assert field(failure, "nearest").startswith(f"engine.py:{line}  ")


def test_the_statement_beside_tells_two_equal_ones_apart(text_lane: MakeLane) -> None:
    anchor = Anchor("if $COUNT <$OP> self.$CAP: break", inside=LOOP, after="$COUNT = $VALUE")
    text = in_loop("if self.full():\n    break", "if self.none():\n    break\nn = self.count")
    failure = only(planned(text_lane, text, edited("f.a", anchor, InsertAfter("self.x = 1"))))
    assert field(failure, "nearest").startswith("engine.py:7  `if self.full(): break`")


def test_nothing_near_is_said_to_be_nothing(text_lane: MakeLane) -> None:
    failure = only(planned(text_lane, step("return 1"), edited("f.a", STOP, InsertAfter("self.x = 1"))))
    assert (failure.code, field(failure, "nearest")) == ("BP101", "engine.py:2  nothing in Core.step comes near")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (in_loop("if n >= self.cap:\n    break\nif n >= self.cap:\n    break"), "engine.py:4, engine.py:6"),
        (in_loop("if n == self.cap:\n    break\nif m >= self.cap:\n    break"), "engine.py:4, engine.py:6"),
        (
            step("while a:\n    if n >= self.cap:\n        break\nwhile b:\n    if n >= self.cap:\n        break"),
            "engine.py:4, engine.py:7",
        ),
    ],
)
def test_an_anchor_that_stands_twice_is_refused(text: str, lines: str, text_lane: MakeLane) -> None:
    failure = only(planned(text_lane, text, edited("f.a", STOP, InsertAfter("self.x = 1"))))
    assert (failure.code, field(failure, "nearest")) == ("BP102", lines)
    assert field(failure, "anchor").endswith("need 1, found 2")


MOVED = {
    "a nested function": step("def told():\n    while a:\n        if n >= self.cap:\n            break\ntold()"),
    "a method": step("self.admit()")
    + "    def admit(self):\n        while a:\n            if n >= self.cap:\n                break\n",
    "a function": step("admit(self)")
    + "def admit(self):\n    while a:\n        if n >= self.cap:\n            break\n",
    "a method, the loop left behind": step("while a:\n    self.admit()")
    + "    def admit(self):\n        if n >= self.cap:\n            break_()\n"
    + "        for x in y:\n            if n >= self.cap:\n                break\n",
}


@pytest.mark.parametrize("name", MOVED)
def test_an_anchor_that_moved_out_is_found_where_it_went(name: str, text_lane: MakeLane) -> None:
    text = MOVED[name]
    failure = only(planned(text_lane, text, edited("f.a", STOP, InsertAfter("self.x = 1"))))
    line = next(
        at
        for at, content in enumerate(text.splitlines(), 1)
        if "self.cap" in content and "break_" not in text.splitlines()[at]
    )
    assert (failure.code, failure.line) == ("BP116", line)
    assert field(failure, "nearest").startswith(f"engine.py:{line}  `if n >= self.cap: break`  in `")


def test_an_anchor_that_was_changed_in_place_did_not_move(text_lane: MakeLane) -> None:
    other = "    def other(self):\n        for x in y:\n            if n >= self.cap:\n                break\n"
    failure = only(
        planned(
            text_lane,
            in_loop("if n >= self.cap:\n    continue") + other,
            edited("f.a", STOP, InsertAfter("self.x = 1")),
        )
    )
    assert (failure.code, failure.line) == ("BP113", 4)


AFTER = Anchor("assert $QUEUE", after="$QUEUE = self.select()")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("queue = self.other()\nassert queue", "`queue = self.other()`"),
        ("assert queue", "nothing"),
        ("other = self.select()\nassert queue", "`other = self.select()`"),
        ("queue = self.select()\nself.log()\nassert queue", "`self.log()`"),
        ("queue = self.select()\nif a:\n    assert queue", "nothing"),
    ],
)
def test_an_anchor_beside_the_wrong_statement_is_refused(body: str, found: str, text_lane: MakeLane) -> None:
    failure = only(planned(text_lane, step(body), edited("f.a", AFTER, Replace("self.x = 1"))))
    assert failure.code == "BP117"
    assert field(failure, "nearest").endswith(
        f"the statement before it must be `$QUEUE = self.select()` and is {found}"
    )


def test_the_statement_after_counts_too(text_lane: MakeLane) -> None:
    anchor = Anchor("$Q = self.select()", before="$Q.pop()")
    good = planned(
        text_lane, step("queue = self.select()\nqueue.pop()"), edited("f.a", anchor, InsertBefore("self.x = 1"))
    )
    assert good.all_failures == []
    bad = planned(
        text_lane, step("queue = self.select()\nother.pop()"), edited("f.a", anchor, InsertBefore("self.x = 1"))
    )
    assert only(bad).code == "BP117"


def test_levels_that_need_not_be_direct_are_searched_outwards(text_lane: MakeLane) -> None:
    loose = Anchor(
        "if n >= self.cap: break",
        inside=(Level("outer", "if $_", direct=False), Level("loop", "while $_", direct=False)),
    )
    text = step("if a:\n  with b:\n    while c:\n      for d in e:\n        if n >= self.cap:\n          break")
    target = find_target(text_lane({"vllm/__init__.py": "", "vllm/engine.py": text}), STEP)
    assert isinstance(target, Target)
    (match,), _ = find_anchor(target, loose)
    assert (match.at("loop")[0].lineno, match.at("outer")[0].lineno, match.at("anchor")[0].lineno) == (5, 3, 7)


def test_statements_of_nested_functions_are_not_searched(text_lane: MakeLane) -> None:
    text = step("def told():\n    return 1\nreturn 2")
    plan = planned(text_lane, text, edited("f.a", RETURN, *NOOP))
    assert plan.all_failures == []
    assert plan.placement("f.a").line == 5


# -- variants --------------------------------------------------------------------------------


def test_the_variant_that_fits_is_taken(text_lane: MakeLane) -> None:
    old = Variant("old", Anchor("self.old()"), edits=NOOP, exports={"_what": "self.x"})
    new = Variant("new", Anchor("self.$NEW(1)"), edits=(InsertAfter("self.$NEW = 2"),), exports={"_what": "self.$NEW"})
    gone = Variant("gone", Anchor("self.gone()"), status="absorbed")
    plan = planned(text_lane, step("self.fresh(1)"), declared("f.a", old, new, gone))
    placement = plan.placement("f.a")
    assert placement.variant is new
    assert (placement.status, placement.line, placement.matches) == ("applied", 3, 1)
    assert placement.exports == {"_what": "self.fresh"}
    assert [step.text for step in placement.steps] == ["self.fresh = 2"]


def test_what_comes_near_is_not_looked_for_where_a_variant_fits(
    text_lane: MakeLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine waits for this when it starts: to compare every statement costs far more than to match."""
    compared = []
    similarity = Pattern.similarity
    monkeypatch.setattr(Pattern, "similarity", lambda *args: compared.append(args) or similarity(*args))
    variants = [Variant(name, Anchor(f"self.{name}()"), edits=NOOP) for name in ("gone", "fresh")]
    assert planned(text_lane, step("self.fresh()"), declared("f.a", *variants)).all_failures == []
    assert not compared
    assert only(planned(text_lane, step("self.other()"), declared("f.a", *variants))).code == "BP101"
    assert compared


@pytest.mark.parametrize("status", ["absorbed", "not-applicable"])
def test_a_variant_without_edits_gives_its_status(status: str, text_lane: MakeLane) -> None:
    plan = planned(text_lane, step("self.gone()"), declared("f.a", Variant("v", Anchor("self.gone()"), status=status)))
    assert (plan.placement("f.a").status, plan.steps, plan.all_failures) == (status, {}, [])


def test_two_variants_that_fit_are_refused(text_lane: MakeLane) -> None:
    variants = (Variant("one", Anchor("self.a()"), edits=NOOP), Variant("two", Anchor("self.b()"), status="absorbed"))
    failure = only(planned(text_lane, step("self.a()\nself.b()"), declared("f.a", *variants)))
    assert (failure.code, "'one' and 'two'" in failure.what) == ("BP103", True)


def test_a_variant_that_fits_twice_is_not_saved_by_another_that_fits(text_lane: MakeLane) -> None:
    variants = (Variant("one", Anchor("self.a()"), edits=NOOP), Variant("two", Anchor("self.b()"), edits=NOOP))
    failure = only(planned(text_lane, step("self.a()\nself.a()\nself.b()"), declared("f.a", *variants)))
    assert failure.code == "BP102"


# -- edits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "edit"),
    [
        ("def step(self):", Replace("return 1")),
        ("def step(self, throttle=False):", AddParameter("throttle", "False")),
        ("def step(self, *, throttle):", AddParameter("throttle", "False")),
    ],
)
def test_an_edit_that_changes_nothing_is_refused(header: str, edit: Edit, text_lane: MakeLane) -> None:
    assert only(planned(text_lane, step("return 1", header), edited("f.a", RETURN, edit))).code == "BP111"


def test_a_part_of_a_statement_cannot_be_replaced(text_lane: MakeLane) -> None:
    failure = only(
        planned(text_lane, step("x = self.a()\nreturn x"), edited("f.a", Anchor("self.a()"), Replace("self.x = 1")))
    )
    assert (failure.code, failure.line) == ("BP117", 3)


@pytest.mark.parametrize(
    ("header", "passed"),
    [
        ("def step(self):", ""),
        ("def step(self, a, b=1):", "a, b"),
        ("def step(self, a, /, b, *, c, d=2):", "a, b, c=c, d=d"),
        ("def step(self, *rest, **more):", "*rest, **more"),
        ("def step(self, a, *rest, c, **more):", "a, *rest, c=c, **more"),
    ],
)
def test_upstreams_own_parameters_are_passed_on(header: str, passed: str, text_lane: MakeLane) -> None:
    edits = (AddParameter("throttle", "False"), Prologue("return super().step($$$PARAMETERS)"))
    if "rest" in header or "more" in header:
        edits = edits[1:]  # type: ignore[assignment]
    plan = planned(text_lane, step("return 1", header), edited("f.a", None, *edits))
    assert plan.placement("f.a").steps[-1].text == f"return super().step({passed})"


# -- overlaps --------------------------------------------------------------------------------

RETURN_1, RETURN_2 = Anchor("return 1"), Anchor("x = 1")
TWO = step("x = 1\nreturn 1")

OVERLAPS: dict[str, tuple[tuple[Anchor | None, Edit], tuple[Anchor | None, Edit], str | None]] = {
    "before one statement": ((RETURN_1, InsertBefore("self.x = 1")), (RETURN_1, InsertBefore("self.y = 1")), "BP118"),
    "after one statement": ((RETURN_2, InsertAfter("self.x = 1")), (RETURN_2, InsertAfter("self.y = 1")), "BP118"),
    "after one and before the next": (
        (RETURN_2, InsertAfter("self.x = 1")),
        (RETURN_1, InsertBefore("self.y = 1")),
        "BP118",
    ),
    "two prologues": ((None, Prologue("self.x = 1")), (None, Prologue("self.y = 1")), "BP118"),
    "prologue and before the first": ((None, Prologue("self.x = 1")), (RETURN_2, InsertBefore("self.y = 1")), "BP118"),
    "two parameters": ((None, AddParameter("a", "1")), (None, AddParameter("b", "1")), "BP118"),
    "two call-throughs": ((None, CallThrough("self.x = 1")), (None, CallThrough("self.y = 1")), "BP118"),
    "two replacements": ((RETURN_1, Replace("return 2")), (RETURN_1, Replace("return 3")), "BP119"),
    "replaced and inserted before": ((RETURN_1, Replace("return 2")), (RETURN_1, InsertBefore("self.y = 1")), "BP119"),
    "one parameter twice": ((None, AddParameter("a", "1")), (None, AddParameter("a", "2")), "BP119"),
    "before and after": ((RETURN_1, InsertBefore("self.x = 1")), (RETURN_1, InsertAfter("self.y = 1")), None),
    "two statements": ((RETURN_2, InsertBefore("self.x = 1")), (RETURN_1, InsertBefore("self.y = 1")), None),
    "replaced and inserted elsewhere": ((RETURN_1, Replace("return 2")), (RETURN_2, InsertBefore("self.y = 1")), None),
    "parameter and prologue": ((None, AddParameter("a", "1")), (None, Prologue("self.y = 1")), None),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", OVERLAPS)
def test_two_deltas_at_one_point_need_an_order(name: str, swapped: object, text_lane: MakeLane) -> None:
    one, two, code = OVERLAPS[name]
    if swapped:
        one, two = two, one
    deltas = (edited("f.one", *one), edited("f.two", *two))
    plan = planned(text_lane, TWO, *deltas)
    assert [failure.code for failure in plan.failures] == ([code] if code else [])
    for failure in plan.failures:
        assert "'f.one' and 'f.two'" in failure.what
        assert {deltas[0].declared, deltas[1].declared} <= {value for _, value in failure.fields}
    ordered = planned(text_lane, TWO, deltas[0], edited("f.two", *two, after=("f.one",)))
    assert [failure.code for failure in ordered.failures] == ([code] if code == "BP119" else [])


def test_a_replaced_block_covers_what_stands_in_it(text_lane: MakeLane) -> None:
    outer = edited("f.outer", Anchor("while $_"), Replace("self.x = 1"))
    inner = edited("f.inner", STOP, InsertAfter("self.y = 1"))
    plan = planned(text_lane, in_loop("if n >= self.cap:\n    break"), outer, inner)
    assert [failure.code for failure in plan.failures] == ["BP119"]


def test_one_deltas_own_edits_at_one_point_keep_their_order(text_lane: MakeLane) -> None:
    plan = planned(text_lane, TWO, edited("f.a", RETURN_1, InsertBefore("self.x = 1"), InsertBefore("self.y = 1")))
    assert plan.all_failures == []
    assert [step.text for step in plan.steps[STEP]] == ["self.x = 1", "self.y = 1"]


def test_steps_come_after_those_of_the_deltas_they_name(text_lane: MakeLane) -> None:
    late = edited("f.late", RETURN_1, InsertBefore("self.x = 1"), after=("f.early",))
    early = edited("f.early", RETURN_1, InsertBefore("self.y = 1"))
    plan = planned(text_lane, TWO, late, early)
    assert plan.all_failures == []
    assert [step.delta.name for step in in_order(plan.steps[STEP])] == ["f.early", "f.late"]


def test_every_failure_of_a_feature_is_collected(text_lane: MakeLane) -> None:
    deltas = (
        edited("f.a", STOP, InsertAfter("self.x = 1")),
        edited("f.b", RETURN, *NOOP),
        edited("f.c", AFTER, Replace("self.x = 1")),
    )
    plan = planned(text_lane, step("return 1"), *deltas)
    assert [placement.status for placement in plan.placements] == ["failed", "applied", "failed"]
    assert [failure.code for failure in plan.all_failures] == ["BP101", "BP101"]
    assert [placement.outcome for placement in plan.placements] == [Outcome.BROKEN, Outcome.HOLDS, Outcome.BROKEN]


# -- a target that need not be there ---------------------------------------------------------

OPTIONAL = {"the function": STEP, "the class": f"{MODULE}:Core.step", "the module": "vllm.other:Core.step"}
GONE = {"the function": "class Core:\n    x = 1", "the class": "x = 1", "the module": "x = 1"}
STILL_THERE = {
    "a lambda": "class Core:\n    step = lambda self: 1",
    "imported": "from vllm.other import Core",
    "in a base": "class Base:\n    def step(self): pass\nclass Core(Base): pass",
    "defined twice": "class Core:\n    def step(self): pass\n    def step(self): return 1",
    "only called": "class Core:\n    def other(self):\n        self.step()",
}


def optional(target: str = STEP) -> Delta:
    return Delta(
        "f.one", target, why="w", upstream="u", remove_when="r", unless_missing="older ones have no step",
        variants=(Variant("v", edits=(CallThrough("self.x"),)),),
    )  # fmt: skip


@pytest.mark.parametrize("gone", GONE)
def test_a_target_that_need_not_be_there_is_not_applicable_where_it_is_nowhere(gone: str, text_lane: MakeLane) -> None:
    plan = planned(text_lane, GONE[gone], optional(OPTIONAL[gone]))
    assert plan.all_failures == []
    assert plan.placement("f.one").status == "not-applicable"
    assert plan.steps == {}


@pytest.mark.parametrize("there", STILL_THERE)
def test_one_that_is_there_in_another_way_is_a_failure(there: str, text_lane: MakeLane) -> None:
    plan = planned(text_lane, STILL_THERE[there], optional())
    assert plan.placement("f.one").status == "failed"
    assert plan.all_failures


def test_a_source_without_vllm_is_not_one_where_it_is_missing(text_lane: MakeLane) -> None:
    lane = text_lane({"other/__init__.py": ""})
    with pytest.raises(PatchError, match="BP503"):
        make_plan(lane, Feature("f", "s", (optional(),)))
