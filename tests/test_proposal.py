"""The anchor that is proposed for a statement: found once on every lane, the smallest, or refused with the reason."""

from __future__ import annotations

import ast
import contextlib
import itertools
import random
import re
import textwrap
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_patcher.anchors import all_places, find_anchor
from balance_patcher.bound import suites_of
from balance_patcher.delta import Anchor
from balance_patcher.errors import PatchError
from balance_patcher.generalise import HEADER, WHOLE
from balance_patcher.parts import Part, cheapest
from balance_patcher.pointing import counterpart
from balance_patcher.proposal import Frame, Place, Proposal, propose
from balance_patcher.source import Lane
from balance_patcher.targets import Target, find_target

HERE = settings(
    deadline=None, derandomize=True, database=None, max_examples=60, suppress_health_check=list(HealthCheck)
)  # fmt: skip


class Memory:
    """A source that holds one module, ``m``."""

    spec = "memory"

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, path: str) -> bytes | None:
        return self.text.encode() if path == "m.py" else None

    def display(self, path: str) -> str:
        return path

    def commit(self) -> str | None:
        return None


def function(body: str) -> Target:
    text = "def run(self):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
    found = find_target(Lane("memory", Memory(text)), "m:run")
    assert isinstance(found, Target)
    return found


def statements(target: Target) -> list[ast.stmt]:
    return [suite[at] for _, _, suite, at in target.places.values()]


def marked(body: str) -> Place:
    """The statement on the line that ends in ``# here``."""
    target = function(body)
    line = next(at for at, text in enumerate(target.text.lines, 1) if text.rstrip().endswith("# here"))
    return Place("one", target, next(s for s in statements(target) if s.lineno == line))


def proposed(*bodies: str) -> Proposal:
    return propose([marked(body) for body in bodies])


def shape(proposal: Proposal) -> str:
    """The anchor on one line, its levels from the outermost."""
    levels = [f"{level.pattern}{'' if level.direct else ' …'} > " for level in proposal.anchor.inside]
    return "".join(levels) + str(proposal.anchor.compiled)


# -- one lane ----------------------------------------------------------------------------------

ONE = {
    "a name alone is enough": ("x = f(a, b)  # here\ny = f(a, b)", "x = $_"),
    "of two to one name, what differs": ("x = f(a, b)  # here\nx = g(a, b)", "x = f($$$_)"),
    "the argument that differs, and those before it as holes": (
        "x = f(a(), b, c, e)\nx = f(a(), d, c, e)  # here",
        "x = f($_, d, $$$_)",
    ),
    "keywords stand together": ("x = f(a, k=1)\nx = f(a, k=2)  # here", "x = f(a, k=2)"),
    "a dotted name is one": ("x = self.a.b  # here\nx = self.a.c", "x = self.a.b"),
    "a call that no assignment holds": ("self.f(x, y)  # here\nself.g(x)", "self.f($$$_)"),
    "something has a name": ("a, b = 1, 2  # here\nc = 1", "a, b = $_"),
    "a header is enough": ("if a.b > 1:  # here\n    f()\nif c:\n    g()", "if a.b > 1"),
    "a suite where the header is not": ("if a:  # here\n    f()\nif a:\n    g()", "if a: f()"),
    "a jump needs a level": ("for x in y:\n    break  # here\nwhile z:\n    break", "for x in y > break"),
    "the nearest level": (
        "while a:\n    if b:\n        x = 1  # here\n    if c:\n        x = 1\nif b:\n    x = 2",
        "if b > x = 1",
    ),
    "a level in whose else it stands is none": (
        "while a:\n    if b:\n        pass\n    else:\n        x = 1  # here\nx = 1",
        "while a … > x = 1",
    ),
    "two levels": (
        "while a:\n    if b:\n        x = 1  # here\n    if c:\n        x = 1\nwhile d:\n    if b:\n        x = 1",
        "while a > if b > x = 1",
    ),
    "no level, no neighbour where the statement does it": ("if a:\n    x = f()  # here\n    y = 2", "x = $_"),
    "a neighbour where nothing around it does": ("x = 1  # here\ny = 2\nx = 1\nz = 3", "x = 1 y = 2"),
    "a whole statement is no part of another": ("if a:\n    self.f(x)  # here\ny = self.f(x)", "if a > self.f(x)"),
    "a call in itself": ("self.f(self.f(x))  # here", "self.f(self.f(x))"),
    "of two levels that do, the smaller anchor": (
        "while f(a, b):\n    if d:\n        x = 1  # here\nx = 1",
        "if d > x = 1",
    ),
    "of two levels that do, the smaller anchor, though it is farther": (
        "while d:\n    if f(a) == g(b):\n        x = 1  # here\nif f(a) == g(c):\n    x = 1\nif h == g(b):\n    x = 1",
        "while d … > x = 1",
    ),
    "a comparison keeps its operator": ("assert a() == b  # here\nassert a() >= b", "assert $_ == b"),
    "a text is one node": ("x = 'a' 'b'  # here\nx = 'a'", "x = 'ab'"),
    "an empty list is no larger than a hole": ("x: int = []  # here\ny = 1", "x: int = []"),
    "try": ("try:  # here\n    a()\nfinally:\n    b()", "try"),
    "with": ("with f(a) as b:  # here\n    pass\nwith f(a) as c:\n    pass", "with $_ as b"),
    "a nested function": ("def inner(a): return a  # here\nx = 1", "def inner(a)"),
    "a boolean operator has an operand": ("if a and b and c:  # here\n    x()\nif a or b:\n    x()", "if a and $$$_"),
}


@pytest.mark.parametrize("name", ONE)
def test_the_smallest_anchor_on_one_lane(name: str) -> None:
    body, wanted = ONE[name]
    assert shape(proposed(body)) == wanted


def test_behind_its_neighbour_where_only_what_is_before_it_differs() -> None:
    proposal = proposed("y = 1\nx = 1  # here\nw = 1\nx = 1\nw = 1")
    assert (shape(proposal), proposal.behind) == ("y = 1 x = 1", True)
    assert not proposed("x = 1  # here\ny = 1\nx = 1\nz = 1").behind


def test_a_pattern_too_long_to_say_is_said_by_its_beginning() -> None:
    body = "for x in y:  # here\n    a()\n    b()\n    c()\n    d()\nfor x in y:\n    a()\n    e()\n    c()\n    d()"
    assert shape(proposed(body)) == "for x in y: $_ b() $$$_"


EQUAL = {
    "twice in a row": "x = 1  # here\nx = 1\nx = 1\nx = 1\nx = 1",
    "with the same around": "if a:\n    stop()  # here\n" + "if a:\n    stop()\n" * 2,
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_cannot_be_told_apart_is_refused_with_where_it_stands(name: str) -> None:
    with pytest.raises(PatchError, match="BP805") as caught:
        proposed(EQUAL[name])
    (failure,) = caught.value.failures
    fields = dict(failure.fields)
    assert re.fullmatch(r"m\.py:\d+, and m\.py:\d+(, m\.py:\d+)*", fields["one"])
    assert fields["anchor"].startswith("`x = 1`" if "row" in name else "`stop()`  inside  `if a`")
    assert failure.line == marked(EQUAL[name]).statement.lineno


# -- several lanes -------------------------------------------------------------------------------

SEVERAL = {
    "equal": (["x = 1  # here", "y = 2\nx = 1  # here"], "x = 1"),
    "an operator and a cap": (
        ["if f(a) == self.cap:  # here\n    stop()\nif b == c:\n    go()", "if n >= self.top:  # here\n    stop()"],
        "if $LEFT <$OP> self.$ATTR",
    ),
    "another value": (["x = f(a)  # here\ny = 1", "x = g  # here"], "x = $VALUE"),
    "more arguments": (["f(a)  # here\nf(b)", "f(a, c)  # here\nf(b)"], "f(a, $$$_)"),
    "another keyword": (["f(a, k=1)  # here\nf(b)", "f(a, j=1)  # here\nf(b)"], "f(a, $$$_)"),
    "the same difference twice is one hole": (["a.x = b(a.x)  # here\na.y = b(a.z)", "a.w = b(a.w)  # here"],
                                              "a.$ATTR = b(a.$ATTR)"),
    "a level on one of them only is none": (
        ["while a:\n    if b:\n        x = 1  # here\nx = 1", "while a:\n    x = 1  # here\nx = 1"],
        "while a … > x = 1",
    ),
    "unique on one, not on the other": (["x = f(a)  # here", "x = f(a)  # here\nx = f(b)"], "x = f(a)"),
    "other handlers": (
        ["try:  # here\n    a()\nexcept B:\n    c()", "try:  # here\n    a()\nexcept B:\n    c()\nexcept D:\n    e()"],
        "try",
    ),
    "an else on one of them": (
        ["if a:  # here\n    b()\nelse:\n    c()\nif a:\n    c()", "if a:  # here\n    b()\nif a:\n    c()"],
        "if a: b() else: $$$_",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_the_smallest_anchor_on_several_lanes(name: str) -> None:
    bodies, wanted = SEVERAL[name]
    assert shape(proposed(*bodies)) == wanted


def test_what_the_holes_are_bound_to_is_told_by_lane() -> None:
    proposal = proposed(*SEVERAL["an operator and a cap"][0])
    assert proposal.differs == {"ATTR": ("cap", "top"), "LEFT": ("f(a)", "n"), "OP": ("==", ">=")}
    assert proposal.anchor.allow == {"OP": ("==", ">=")}


def test_an_operator_that_no_lane_has_is_not_allowed() -> None:
    proposal = proposed(*SEVERAL["an operator and a cap"][0])
    assert find_anchor(function("if n < self.cap:\n    stop()"), proposal.anchor)[0] == []
    assert len(find_anchor(function("if n == self.cap:\n    stop()"), proposal.anchor)[0]) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = f(a)", "if a: pass"),
        ("x = f(a)", "b(1)"),
        ("x = f(a)", "y = g()"),
        ("x = f(a)", "x = z = f(a)"),
        ("assert a < b", "assert a < b < c"),
        ("return a", "return"),
        ("def f(a): pass", "def f(b): pass"),
        ("import a", "import b"),
    ],
)
def test_lanes_with_nothing_in_common_are_refused(one: str, other: str) -> None:
    with pytest.raises(PatchError, match="BP804") as caught:
        proposed(f"{one}  # here", f"{other}  # here")
    assert "m.py:2" in str(caught.value)


def test_what_lanes_have_in_common_may_be_too_little() -> None:
    with pytest.raises(PatchError, match=r"BP805 .*what the lanes have in common of `x = f\(a\)` is found more"):
        proposed("x = f(a)  # here\nx = g(a)", "x = h(a)  # here")


# -- the search ----------------------------------------------------------------------------------


def sizes(parts: Sequence[Part], kept: frozenset[int]) -> int:
    return sum(parts[number].size for number in kept)


def whole_sets(parts: Sequence[Part]) -> list[frozenset[int]]:
    """Every set of parts that has what each of them hangs on."""
    numbers = [part.number for part in parts if part.size]
    found = []
    for count in range(len(numbers) + 1):
        for chosen in itertools.combinations(numbers, count):
            kept = set(chosen)
            for number in chosen:
                at = number
                while at >= 0:
                    kept.add(at)
                    at = parts[at].under
            if sum(1 for number in kept if parts[number].size) == len(chosen):
                found.append(frozenset(kept))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_set_is_the_cheapest_of_all(seed: int) -> None:
    chance = random.Random(seed)
    parts = [Part(at, chance.randrange(-1, at), chance.choice([0, 1, 1, 2])) for at in range(9)]
    costly = [part for part in parts if part.size]
    clauses = [chance.sample(costly, chance.randint(1, min(3, len(costly)))) for _ in range(4)]
    met = [kept for kept in whole_sets(parts) if all(any(part.number in kept for part in clause) for clause in clauses)]
    assert sizes(parts, cheapest(parts, clauses)) == min(sizes(parts, kept) for kept in met)


# -- random functions ----------------------------------------------------------------------------

NAMES = ["a", "b", "self.c", "self.d"]
EXPRESSION = st.recursive(
    st.sampled_from([*NAMES, "0", "None", "'t'"]),
    lambda inner: st.one_of(
        st.builds(lambda f, xs: f"{f}({', '.join(xs)})", st.sampled_from(["f", "self.g"]), st.lists(inner, max_size=2)),
        st.builds(lambda f, x: f"{f}(k={x})", st.sampled_from(["f", "g"]), inner),
        st.builds(lambda x, op, y: f"({x} {op} {y})", inner, st.sampled_from(["+", "<", "==", "and"]), inner),
        st.builds(lambda x: f"[{x}]", inner),
        st.builds(lambda x, y: f"{x}[{y}]", st.sampled_from(NAMES), inner),
    ),
    max_leaves=3,
)
SIMPLE = st.one_of(
    st.builds(lambda x, v: f"{x} = {v}", st.sampled_from(NAMES), EXPRESSION),
    st.builds(lambda x, v: f"{x} += {v}", st.sampled_from(NAMES), EXPRESSION),
    st.builds(lambda x: f"f({x})", EXPRESSION),
    st.builds(lambda x: f"assert {x}", EXPRESSION),
    st.just("return"),
    st.builds(lambda x: f"return {x}", EXPRESSION),
)


def suite(lines: Sequence[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


STATEMENT = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(
            lambda head, body: f"{head}:\n{suite(body)}",
            st.one_of(
                st.builds(lambda x: f"if {x}", EXPRESSION),
                st.builds(lambda x: f"while {x}", EXPRESSION),
                st.builds(lambda x: f"for a in {x}", EXPRESSION),
                st.builds(lambda x: f"with {x} as b", EXPRESSION),
            ),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(
            lambda x, one, other: f"if {x}:\n{suite(one)}\nelse:\n{suite(other)}",
            EXPRESSION,
            st.lists(inner, min_size=1, max_size=2),
            st.lists(inner, min_size=1, max_size=2),
        ),
    ),
    max_leaves=6,
)
BODY = st.lists(STATEMENT, min_size=2, max_size=7).map("\n".join)
CHANGES = [(r"self\.c", "self.e"), ("==", ">="), (r"f\(", "f(a, "), ("while ", "if "), (r"\ba =", "b ="), ("0", "1")]


@given(BODY, st.data())
@HERE
def test_any_statement_of_any_function_is_found_once_or_refused(body: str, data: st.DataObject) -> None:
    target = function(body)
    statement = data.draw(st.sampled_from(statements(target)))
    check([Place("one", target, statement)])


@given(BODY, st.sets(st.sampled_from(CHANGES), max_size=3), st.data())
@HERE
def test_the_same_on_two_lanes(body: str, changes: set[tuple[str, str]], data: st.DataObject) -> None:
    target = function(body)
    place = Place("one", target, data.draw(st.sampled_from(statements(target))))
    other = body
    for old, new in sorted(changes):
        other = re.sub(old, new, other)
    lane = function("pre()\n" + other)
    with contextlib.suppress(PatchError):
        check([place, counterpart(place, "two", lane)])
        return
    with pytest.raises(PatchError, match="BP804"):
        counterpart(place, "two", lane)


@given(BODY, st.data())
@HERE
def test_nothing_changed_means_the_same_statement(body: str, data: st.DataObject) -> None:
    target, other = function(body), function(body)
    place = Place("one", target, data.draw(st.sampled_from(statements(target))))
    assert counterpart(place, "two", other).statement.lineno == place.statement.lineno


@given(BODY, st.data())
@HERE
def test_no_smaller_pattern_is_found_once(body: str, data: st.DataObject) -> None:
    """Every set of parts of the statement alone is asked, where there are few enough."""
    target = function(body)
    place = Place("one", target, data.draw(st.sampled_from(statements(target))))
    for form in (HEADER, WHOLE) if any(suites_of(place.statement)) else (HEADER,):
        frame = Frame([place], [], (), form=form)
        best = frame.smallest()
        if sum(1 for part in frame.parts.all if part.size) > 9:
            return
        clauses = [clause for common in frame.run if common and (clause := common.naming())]
        others = [
            frame.run[0].size + sizes(frame.parts.all, kept)
            for kept in whole_sets(frame.parts.all)
            if not frame.strangers(kept) and all(any(p.number in kept for p in clause) for clause in clauses)
        ]
        assert (best[0] if best else None) == min(others, default=None)


def check(places: list[Place]) -> None:
    proposal: Proposal | None = None
    with contextlib.suppress(PatchError):
        proposal = propose(places)
    if proposal is None:
        with pytest.raises(PatchError, match="BP805" if len(places) == 1 else "BP80[45]"):
            propose(places)
        if len(places) == 1:
            equal(places[0])
        return
    for place, match in zip(places, proposal.matches, strict=True):
        found = find_anchor(place.target, proposal.anchor)[0]
        assert found == [match]
        assert match.statements[-1 if proposal.behind else 0] is place.statement
    assert propose(places) == proposal


def equal(place: Place) -> None:
    """What is refused on one lane is said once more, word for word."""
    assert len(all_places(place.target, Anchor(ast.unparse(place.statement)))) > 1
