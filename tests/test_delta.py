"""Declarations: what is refused when it is made, with its id, and where it says that it was made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Level,
    Override,
    Prologue,
    Replace,
    Variant,
    edit_text,
)
from balance_patcher.errors import PatchError
from balance_patcher.feature import Agree, CalledOnce, Enabling, Feature, Invariant, Ordered, Pure, RuntimeClass, Sets

STOP = Anchor("if $COUNT <$OP> self.$CAP: break", inside=(Level("loop", "while $_"),))
INSERT = InsertAfter("f($COUNT)")


def variant(*edits: Edit, name: str = "v", anchor: Anchor | None = STOP, **more: Any) -> Variant:
    return Variant(name, anchor, edits, **more)


def delta(name: str = "f.d", **more: Any) -> Delta:
    said = {"target": "m:C.f", "why": "w", "upstream": "u", "remove_when": "r", "variants": (variant(INSERT),)}
    return Delta(name, **{**said, **more})


def feature(*deltas: Delta, **more: Any) -> Feature:
    return Feature("f", "s", deltas, **more)


SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def ours(base: str, *provides: str) -> RuntimeClass:
    return RuntimeClass("Ours", base, lambda upstream: type("Ours", (upstream,), {}), frozenset(provides))


def refusal(make: Callable[[], object]) -> str:
    """The one sentence of a refused declaration."""
    with pytest.raises(PatchError) as caught:
        make()
    (failure,) = caught.value.failures
    return failure.headline


# -- what holds ------------------------------------------------------------------------------

GOOD: list[Edit] = [
    InsertAfter("async def g():\n    return await h()"),
    InsertAfter("g = lambda: (yield)"),
    InsertAfter("if $COUNT:\n    continue"),
    Prologue("for one in self:\n    break"),
    Prologue("if not self:\n    return super().f($$$PARAMETERS)"),
    InsertBefore("n = $COUNT", at="loop"),
    InsertAfter("if a <$OP> self.$CAP:\n    break\n\n# a comment\nf('$')"),
    InsertAfter("x = ('a'\n     'b')"),
    InsertAfter("def g():\n    return 1"),
    InsertAfter("f(\n    1,\n)"),
    Replace("pass\nf()"),
    Prologue("if not self.on:\n    return super().f($$$PARAMETERS)"),
    AddParameter("more", "None"),
    AddParameter("more", "-1.5"),
    AddParameter("more", "('a', 2)"),
    CallThrough("self.g()"),
    CallThrough("def g():\n    return 1\ng()"),
]


@pytest.mark.parametrize("edit", GOOD, ids=repr)
def test_a_good_edit_can_be_declared(edit: Edit) -> None:
    assert variant(edit).edits == (edit,)


def test_edits_of_the_whole_function_need_no_anchor() -> None:
    assert variant(Prologue("f($$$PARAMETERS)"), AddParameter("a", "1"), anchor=None).anchor is None


def test_an_export_is_an_expression_on_what_the_anchor_binds() -> None:
    made = variant(INSERT, exports={"_count": "len($COUNT)", "_over": "$COUNT <$OP> self.$CAP"})
    assert set(made.exports) == {"_count", "_over"}


@pytest.mark.parametrize("status", ["absorbed", "not-applicable"])
def test_a_shape_with_nothing_to_do_has_no_edits(status: str) -> None:
    assert variant(status=status).edits == ()


def test_what_an_anchor_binds_and_how_it_reads() -> None:
    anchor = Anchor("f($A)", inside=(Level("outer", "if $B"), Level("loop", "while $_")), after="$C = 1", before="g()")
    assert anchor.holes == {"A", "B", "C"}
    assert str(anchor) == "`f($A)`  inside  `while $_`  inside  `if $B`  after  `$C = 1`  before  `g()`"
    assert STOP.operators == {"OP"}


def test_the_parts_of_a_target() -> None:
    made = delta(target="a.b:C.D.f")
    assert (made.module, made.qualname) == ("a.b", "C.D.f")


def test_a_feature_has_each_target_once_and_in_order() -> None:
    one, two, three = delta("f.a", target="m:g"), delta("f.b", target="m:f"), delta("f.c", target="m:g")
    assert feature(one, two, three).targets == ("m:g", "m:f")


def test_the_text_of_an_edit() -> None:
    assert [edit_text(edit) for edit in (AddParameter("a", "1"), CallThrough("f()"), Replace("g()"))] == [
        "",
        "f()",
        "g()",
    ]


# -- BP001, in the patterns of a declaration -------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Anchor("if $A ==", ()),
        lambda: Anchor("$A"),
        lambda: Anchor("f()", inside=(Level("loop", "while"),)),
        lambda: Anchor("f()", after="else: pass"),
        lambda: Anchor("f()", before="f($lower)"),
        lambda: variant(InsertAfter("f($lower)")),
        lambda: variant(InsertAfter("f'{$COUNT}'")),
        lambda: CalledOnce("i", "m:f", call="f(", idle="if $_: continue"),
        lambda: CalledOnce("i", "m:f", call="f()", idle="$_"),
        lambda: Ordered("i", "m:f", first="else: pass", then="f()"),
        lambda: Agree("i", "m:f", one="$A", other="f($A)", holes=("A",)),
    ],
)
def test_a_bad_pattern_is_refused_where_it_is_declared(make: Callable[[], object]) -> None:
    assert refusal(make).startswith("BP001 bad pattern: ")


# -- BP002: anchors and variants -------------------------------------------------------------

DECLARATIONS: list[tuple[Callable[[], object], str]] = [
    (lambda: Anchor("f($A)", allow={"B": ("x",)}), "`allow` names $B, which the anchor does not bind"),
    (lambda: Anchor("f()", inside=(Level("a", "if $_"), Level("a", "while $_"))), "levels need names of their own"),
    (lambda: Anchor("f()", inside=(Level("anchor", "if $_"),)), "`anchor` is taken"),
    (lambda: Anchor("f()", inside=(Level("loop", "g()"),)), "level 'loop' is no compound statement: `g()`"),
    (lambda: Anchor("f()", inside=(Level("loop", "x = 1\ny = 2"),)), "level 'loop' is no compound statement"),
    (lambda: Anchor("f()", after="x = 1\ny = 2"), "`after` and `before` are one statement each: `x = 1 y = 2`"),
    (lambda: Anchor("f()", before="x = 1\ny = 2"), "`after` and `before` are one statement each"),
    (lambda: variant(InsertAfter("f($OTHER)")), "variant 'v' uses $OTHER, which its anchor does not bind"),
    (lambda: variant(Prologue("f($COUNT)"), anchor=None), "variant 'v' uses $COUNT, which its anchor does not bind"),
    (lambda: variant(InsertAfter("f($_)")), "variant 'v' uses $_, which its anchor does not bind"),
    (lambda: variant(InsertAfter("a <$COUNT> b")), "variant 'v' uses <$COUNT>, which is no operator in its anchor"),
    (lambda: variant(INSERT, exports={"_n": "$OTHER"}), "variant 'v' uses $OTHER, which its anchor does not bind"),
    (lambda: variant(INSERT, exports={"_n": "x = $COUNT"}), "the export '_n' is no expression: x = $COUNT"),
    (lambda: variant(INSERT, exports={"_n": ""}), "the export '_n' is no expression"),
    (lambda: variant(InsertBefore("f()", at="lop")), "variant 'v' edits at 'lop', which is no level of its anchor"),
    (lambda: variant(InsertAfter("f()", at="lop")), "variant 'v' edits at 'lop'"),
    (lambda: variant(Replace("f()", at="lop")), "variant 'v' edits at 'lop'"),
    (
        lambda: variant(InsertAfter("f()"), anchor=None),
        "variant 'v' edits at 'anchor', which is no level of its anchor",
    ),
    (lambda: variant(INSERT, status="done"), "variant 'v' has the unknown status 'done'"),
    (variant, "variant 'v': edits go with `applied`, and only with it"),
    (lambda: variant(INSERT, status="absorbed"), "variant 'v': edits go with `applied`, and only with it"),
    (lambda: variant(status="absorbed", anchor=None), "variant 'v' has no anchor, so it would match everything"),
    # the text of an edit
    (lambda: variant(InsertAfter("if a")), "the text of an edit is not Python"),
    (lambda: variant(InsertAfter("x = (")), "the text of an edit is not Python"),
    (lambda: variant(InsertAfter("else: pass")), "the text of an edit is not Python"),
    (lambda: variant(InsertAfter("assert a")), "must not rely on `assert`"),
    (lambda: variant(InsertAfter("if a:\n    assert b")), "must not rely on `assert`"),
    (lambda: variant(InsertAfter("global x\nx = 1")), "must not declare global or nonlocal names"),
    (lambda: variant(InsertAfter("def f():\n    nonlocal x\n    x = 1")), "must not declare global or nonlocal names"),
    (lambda: variant(InsertAfter('x = """a\nb"""')), "no multi-line strings, no backslashes"),
    (lambda: variant(InsertAfter("f('''\n''')")), "no multi-line strings, no backslashes"),
    (lambda: variant(InsertAfter("x = 1 + \\\n    2")), "no multi-line strings, no backslashes"),
    (lambda: variant(InsertAfter("x = 'a\\\nb'")), "no multi-line strings, no backslashes"),
    (lambda: variant(InsertAfter("f()  # \\\ng()")), "no multi-line strings, no backslashes"),
    (lambda: variant(InsertAfter("x = 'a\u2028b'")), "no multi-line strings, no backslashes"),
    (lambda: variant(Prologue("x = '''\n'''"), anchor=None), "no multi-line strings, no backslashes"),
    (lambda: variant(CallThrough("return 1"), anchor=None), "a call-through returns upstream's result"),
    (lambda: variant(CallThrough("if a:\n    yield"), anchor=None), "a call-through returns upstream's result"),
    (lambda: variant(CallThrough("x = yield"), anchor=None), "a call-through returns upstream's result"),
    (lambda: variant(CallThrough("balance_result = None"), anchor=None), "`balance_result` stays what it is"),
    (lambda: variant(CallThrough("f(balance_result := 1)"), anchor=None), "`balance_result` stays what it is"),
    # a parameter
    (lambda: variant(AddParameter("a", "b")), "the default of parameter 'a' is no literal on one line: b"),
    (lambda: variant(AddParameter("a", "f()")), "the default of parameter 'a' is no literal"),
    (lambda: variant(AddParameter("a", "")), "the default of parameter 'a' is no literal"),
    (lambda: variant(AddParameter("a", "1 +")), "the default of parameter 'a' is no literal"),
    (lambda: variant(AddParameter("a", "{[]: 1}")), "the default of parameter 'a' is no literal"),
    (lambda: variant(AddParameter("a", "(1,\n2)")), "the default of parameter 'a' is no literal on one line"),
    (lambda: variant(AddParameter("a b", "1")), "a parameter cannot be called 'a b'"),
    (lambda: variant(AddParameter("class", "1")), "a parameter cannot be called 'class'"),
    (lambda: variant(AddParameter("*a", "1")), "a parameter cannot be called '*a'"),
    # deltas
    *[
        (lambda target=target: delta(target=target), f"is not written `module:Qual.name`: {target!r}")
        for target in ["", "m", "m.f", "m:", ":f", "m:f()", "m:C..f", "m:1f", "m:C.f:g", " m:f", "m:f\n"]
    ],
    (lambda: delta(variants=()), "delta 'f.d' has no variants"),
    (lambda: delta(variants=(variant(INSERT), variant(INSERT))), "delta 'f.d' has two variants of one name"),
    *[
        (lambda label=label, text=text: delta(**{label: text}), f"delta 'f.d' does not say `{label}`")
        for label in ("why", "upstream", "remove_when")
        for text in ("", " \n")
    ],
    # features
    (feature, "feature 'f' needs deltas with names of their own"),
    (lambda: feature(delta(), delta()), "feature 'f' needs deltas with names of their own"),
    (
        lambda: feature(delta("f.a", after=("f.b",)), delta("f.b", after=("f.a",)), delta("f.c", after=("f.a",))),
        "feature 'f': 'f.a' and 'f.b' and 'f.c' come after each other",
    ),
    (
        lambda: feature(delta(), invariants=(Pure("i", "f.x", "COUNT"),)),
        "invariant 'i' speaks of the unknown delta 'f.x'",
    ),
    (lambda: feature(delta(), invariants=(Pure("i", "f.d", "OTHER"),)), "invariant 'i': 'f.d' does not bind $OTHER"),
    # invariants
    (lambda: Agree("i", "m:f", one="f($A)", other="g($B)", holes=("A",)), "needs holes that both patterns bind: ['A']"),
    (lambda: Agree("i", "m:f", one="f($A)", other="g($A)", holes=()), "needs holes that both patterns bind"),
    (lambda: Sets("i", "m.f", "a"), "the target of invariant 'i' is not written `module:Qual.name`: 'm.f'"),
    (lambda: Ordered("i", "f", "a()", "b()"), "the target of invariant 'i' is not written"),
    (lambda: variant(InsertAfter("yield $COUNT")), "an edit must not yield or await"),
    (lambda: variant(InsertAfter("n = yield from f()")), "an edit must not yield or await"),
    (lambda: variant(InsertAfter("n = [(yield a) for a in f()]")), "an edit must not yield or await"),
    (lambda: variant(Prologue("await f()")), "an edit must not yield or await"),
    (lambda: variant(Override("async with f():\n    g()"), anchor=None), "an edit must not yield or await"),
    (lambda: variant(InsertAfter("n = [a async for a in f()]")), "an edit must not yield or await"),
    (lambda: variant(CallThrough("n = [a async for a in f()]"), anchor=None), "no return, yield or await of its own"),
    (lambda: variant(InsertAfter("from os import *")), "cannot stand in a function (import * only allowed at module"),
    (lambda: variant(Prologue("if a:\n    break"), anchor=None), "cannot stand in a function ('break' outside loop"),
    (lambda: variant(CallThrough("continue"), anchor=None), "cannot stand in a function ('continue' not properly in"),
    (lambda: delta(target="m:C.__f"), "the target of 'f.d' is __f, which Python keeps private to its class"),
    (lambda: Sets("i", "m:C.__f", "a"), "the target of invariant 'i' is __f, which Python keeps private"),
    (lambda: variant(AddParameter("__more", "1")), "a parameter cannot be called '__more'"),
    (lambda: variant(INSERT, exports={"__n": "self.n"}), "an export cannot be called '__n'"),
    (lambda: variant(INSERT, exports={"n n": "self.n"}), "an export cannot be called 'n n'"),
    (lambda: ours("m:C", "__n"), "Ours provides __n, which would be another name in upstream's class"),
]


@pytest.mark.parametrize(("make", "what"), DECLARATIONS, ids=[what for _, what in DECLARATIONS])
def test_a_wrong_declaration_is_refused(make: Callable[[], object], what: str) -> None:
    said = refusal(make)
    assert said.startswith("BP002 bad declaration: ")
    assert what in said


@pytest.mark.parametrize(
    "text", ["pass", "pass\npass", "", "\n\n", "# only a comment", "...", "'a docstring'", "1\npass"]
)
@pytest.mark.parametrize("kind", [InsertBefore, InsertAfter, Replace, Prologue, CallThrough])
def test_an_edit_that_does_nothing_is_refused(kind: Callable[[str], Edit], text: str) -> None:
    assert refusal(lambda: variant(kind(text))).startswith("BP002 bad declaration: the text of an edit does nothing")


def test_deltas_in_a_row_are_no_circle() -> None:
    row = feature(
        delta("f.a", after=("f.b", "f.a")), delta("f.b", after=("other.x",)), delta("f.c", after=("f.a", "f.b"))
    )
    assert len(row.deltas) == 3


def test_an_invariant_may_speak_of_one_variant_of_several() -> None:
    made = delta(variants=(variant(CallThrough("g()"), name="w", anchor=None), variant(INSERT)))
    assert feature(made, invariants=(Pure("e", "f.d", "COUNT"),)).invariants


def test_good_invariants_can_be_declared() -> None:
    made: tuple[Invariant, ...] = (
        CalledOnce("a", "m:f", call="f($$$_)", idle="if not $_: continue"),
        Ordered("b", "m:f", first="f()", then="g()"),
        Sets("c", "m:f", "x"),
        Agree("d", "m:f", one="f($A)", other="g($A)", holes=("A",)),
        Pure("e", "f.d", "COUNT"),
    )
    assert feature(delta(), invariants=made).invariants == made


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ours("vllm.v1.engine.core:EngineCore"), "Ours extends vllm.v1.engine.core:EngineCore, and of vLLM's"),
        (lambda: ours("vllm.v1.core.scheduler:Scheduler"), "only those of vllm.v1.core.sched can be extended"),
        (lambda: ours("vllm.v1.core.sched:Scheduler"), "method in its place, without a runtime class"),
        (lambda: ours("vllm.v1.core.scheduled.scheduler:Scheduler"), "only those of vllm.v1.core.sched can"),
        (lambda: ours("Scheduler"), "the base of Ours is not written `module:Class`: 'Scheduler'"),
        (
            lambda: feature(delta(), runtime=ours(SCHEDULER), enabling=Enabling(process="worker")),
            "feature 'f' is decided in workers, and Ours would be a scheduler, which they have not",
        ),
    ],
)
def test_a_class_that_nobody_would_take_is_refused(make: Callable[[], object], what: str) -> None:
    said = refusal(make)
    assert said.startswith("BP002 bad declaration: ")
    assert what in said


@pytest.mark.parametrize("base", [SCHEDULER, "vllm.v1.core.sched.async_scheduler:AsyncScheduler", "others.plan:Plan"])
def test_a_scheduler_can_be_extended(base: str) -> None:
    runtime = ours(base)
    assert feature(delta(), runtime=runtime, enabling=Enabling()).runtime is runtime


# -- where it was declared -------------------------------------------------------------------


def this_line() -> int:
    """The line that called."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def plain() -> tuple[Delta, int]:
    return Delta("f.d", "m:f", "w", "u", "r", (variant(INSERT),)), this_line()


def over_several_lines() -> tuple[Delta, int]:
    line = this_line() + 1
    made = Delta(
        name="f.d",
        target="m:f",
        why="w",
        upstream="u",
        remove_when="r",
        variants=(variant(INSERT),),
    )
    return made, line


def in_a_list() -> tuple[Delta, int]:
    return [Delta(name, "m:f", "w", "u", "r", (variant(INSERT),)) for name in ("f.a", "f.b")][1], this_line()


@pytest.mark.parametrize("make", [plain, over_several_lines, in_a_list])
def test_a_delta_knows_the_line_that_made_it(make: Callable[[], tuple[Delta, int]]) -> None:
    made, line = make()
    assert made.declared == f"tests/test_delta.py:{line}"


def test_a_helper_function_is_where_a_delta_is_declared() -> None:
    source, first = inspect.getsourcelines(delta)
    line = first + next(at for at, text in enumerate(source) if "return Delta(" in text)
    assert delta().declared == f"tests/test_delta.py:{line}"


def test_the_place_of_declaration_does_not_count_for_equality() -> None:
    one, other = plain()[0], in_a_list()[0]
    assert one.declared != other.declared
    assert one == Delta("f.d", "m:f", "w", "u", "r", (variant(INSERT),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Anchor("f($A)", allow={"B": ()}),
        lambda: Variant("v", STOP, (InsertAfter("assert a"),)),
        lambda: Delta("f.d", "m", "w", "u", "r", ()),
        lambda: Feature("f", "s", ()),
        lambda: Sets("i", "m.f", "a"),
    ],
)
def test_a_refusal_names_the_file_and_line_of_the_declaration(make: Callable[[], object]) -> None:
    with pytest.raises(PatchError) as caught:
        make()
    fields = dict(caught.value.failures[0].fields)
    assert fields["declared"] == f"tests/test_delta.py:{make.__code__.co_firstlineno}"
    assert re.search(r"^  declared  +tests/test_delta.py:\d+$", str(caught.value), re.MULTILINE)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Anchor("if $A: break", allow={"A": "full"}), "`allow['A']` is no tuple of str"),
        (lambda: Anchor("stop()", inside=Level("loop", "while $_")), "`inside` is no tuple of Level"),
        (lambda: Variant("v", edits=Prologue("go()")), "`edits` is no tuple of "),
        (lambda: Delta("t.d", "m:f", "w", "u", "r", Variant("v", edits=(Prologue("go()"),))), "`variants` is no tuple"),
    ],
    ids=["a text for texts", "a level for levels", "an edit for edits", "a variant for variants"],
)
def test_a_forgotten_comma_is_refused(make: Callable[[], object], what: str) -> None:
    assert what in refusal(make)


def test_a_bad_pattern_says_where_it_is_declared() -> None:
    with pytest.raises(PatchError) as caught:
        Anchor("while (")
    assert dict(caught.value.failures[0].fields)["declared"].startswith("tests/test_delta.py:")
