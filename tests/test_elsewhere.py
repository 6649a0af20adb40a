"""What a variant says of other functions: it decides which variant it is, and half of a change is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from balance_patcher.delta import Anchor, Delta, InsertAfter, Nowhere, There, Variant
from balance_patcher.errors import PatchError
from balance_patcher.feature import Feature
from balance_patcher.plan import Placement, make_plan
from balance_patcher.source import Lane

Lanes = Callable[[Mapping[str, str | bytes]], Lane]

PUMP = "pkg.pump:Pump"
TEXT = """
class Pump:
    def run(self):
        self.turn()

    def turn(self):
        self.level = self.level + 1
"""
ASK = "    def full(self):\n        return self.level > 9\n"


def placed(text_lane: Lanes, text: str, *variants: Variant) -> Placement:
    delta = Delta("toy.x", f"{PUMP}.run", "why", "upstream", "never", variants)
    lane = text_lane({"pkg/__init__.py": "", "pkg/pump.py": text})
    (placement,) = make_plan(lane, Feature("toy", "toy", (delta,))).placements
    return placement


def edit(*given: There | Nowhere, name: str = "edit") -> Variant:
    return Variant(name, Anchor("self.turn()"), (InsertAfter("self.ran = True"),), given=given)


TURNS = There(f"{PUMP}.turn", "self.level = $_")
UNASKED = Nowhere(f"{PUMP}.full")


def test_an_anchor_with_all_that_goes_with_it_is_placed(text_lane: Lanes) -> None:
    assert placed(text_lane, TEXT, edit(TURNS, UNASKED)).status == "applied"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.replace("self.level = ", "level = "), "Pump.turn has `self.level = $_` 0 times, not once: pump.py:7"),
        (TEXT + "        self.level = 0\n", "Pump.turn has `self.level = $_` 2 times, not once: pump.py:6"),
        (TEXT.replace("def turn", "def other"), "Pump.turn is not there"),
        (TEXT + ASK, "Pump.full is there: pump.py:8"),
        # Not defined as a method, but the name is used: something else may answer to it.
        (TEXT + "        self.full = None\n", "Pump.full is there: pump.py:8"),
    ],
)
def test_half_of_it_is_refused_with_what_is_missing(text_lane: Lanes, text: str, said: str) -> None:
    placement = placed(text_lane, text, edit(TURNS, UNASKED))
    (failure,) = placement.failures
    assert (placement.status, failure.code) == ("failed", "BP125")
    assert dict(failure.fields)["anchor"] == "'edit': `self.turn()`   pump.py:4"
    assert [value for label, value in failure.fields if label == "but"] == [said]
    assert "declared" in dict(failure.fields)


def test_every_variant_whose_anchor_was_found_says_why_it_is_not_the_one(text_lane: Lanes) -> None:
    placement = placed(
        text_lane, TEXT,
        edit(There(f"{PUMP}.full", "return $_"), name="asks"), edit(Nowhere(f"{PUMP}.turn"), name="turns"),
    )  # fmt: skip
    (failure,) = placement.failures
    assert [value for label, value in failure.fields if label in ("anchor", "but")] == [
        "'asks': `self.turn()`   pump.py:4", "Pump.full is not there",
        "'turns': `self.turn()`   pump.py:4", "Pump.turn is there: pump.py:4",
    ]  # fmt: skip


def test_variants_of_one_anchor_are_told_apart_by_it(text_lane: Lanes) -> None:
    absorbed = Variant("asks", Anchor("self.turn()"), status="absorbed", given=(There(f"{PUMP}.full", "return $_"),))
    for text, status in ((TEXT, "applied"), (TEXT + ASK, "absorbed")):
        assert placed(text_lane, text, edit(UNASKED), absorbed).status == status


def test_a_variant_without_an_anchor_is_decided_by_it_alone(text_lane: Lanes) -> None:
    absorbed = Variant("asks", status="absorbed", given=(There(f"{PUMP}.full", "return $_"),))
    assert placed(text_lane, TEXT + ASK, absorbed).status == "absorbed"
    (failure,) = placed(text_lane, TEXT, absorbed).failures
    assert failure.code == "BP125"
    assert dict(failure.fields)["anchor"] == "'asks': the function itself   pump.py:3"


def test_an_anchor_that_is_not_there_is_what_is_told(text_lane: Lanes) -> None:
    (failure,) = placed(
        text_lane, TEXT.replace("self.turn()", "self.go()"), edit(There(f"{PUMP}.full", "x()"))
    ).failures
    assert failure.code == "BP101"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: There("Pump.turn", "x()"),
        lambda: Nowhere("pkg.pump"),
        lambda: edit("x"),
        lambda: Variant("none", status="absorbed"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_made(wrong: Callable[[], object]) -> None:
    with pytest.raises(PatchError) as caught:
        wrong()
    (failure,) = caught.value.failures
    assert failure.code == "BP002"
    assert dict(failure.fields)["declared"].startswith("tests/test_elsewhere.py:")


def test_a_pattern_that_is_none_is_refused_where_it_is_written() -> None:
    with pytest.raises(PatchError, match=r"tests/test_elsewhere\.py") as caught:
        There(f"{PUMP}.turn", "x = (")
    assert caught.value.failures[0].code == "BP001"
