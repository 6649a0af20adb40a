"""Tests that the declarations bring along: every example becomes what it says, every refusal is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from balance_patcher.build import compile_plan
from balance_patcher.delta import Delta
from balance_patcher.errors import PatchError
from balance_patcher.feature import Example, Feature, Refusal
from balance_patcher.plan import make_plan
from balance_patcher.registry import delta_modules, features
from balance_patcher.source import Lane

EXAMPLES = [example for module in delta_modules() for example in getattr(module, "EXAMPLES", ())]
REFUSES = [refusal for module in delta_modules() for refusal in getattr(module, "REFUSES", ())]
DELTAS = {delta.name: (feature, delta) for feature in features() for delta in feature.deltas}


def alone(name: str) -> Feature:
    """The feature of one delta with all others left out."""
    feature, delta = DELTAS[name]
    adds = tuple(addition for addition in feature.adds if addition.module == delta.module)
    return replace(feature, deltas=(delta,), invariants=(), adds=adds)


def lane_of(text_lane: Callable[..., Lane], delta: Delta, text: str) -> Lane:
    return text_lane({delta.module.replace(".", "/") + ".py": text, "vllm/__init__.py": ""})


def unmarked(text: str) -> str:
    return re.sub(r"  # bp: [\w.-]+$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.delta}-{EXAMPLES.index(e)}")
def test_an_example_becomes_what_it_says(example: Example, text_lane: Callable[..., Lane]) -> None:
    _, delta = DELTAS[example.delta]
    plan = make_plan(lane_of(text_lane, delta, example.before), alone(example.delta))
    _, compiled = compile_plan(plan)
    assert [unmarked(item.text).strip() for item in compiled] == [example.after.strip()]


@pytest.mark.parametrize("refusal", REFUSES, ids=lambda r: f"{r.delta}-{r.code}-{REFUSES.index(r)}")
def test_a_refusal_is_refused_by_its_id(refusal: Refusal, text_lane: Callable[..., Lane]) -> None:
    _, delta = DELTAS[refusal.delta]
    plan = make_plan(lane_of(text_lane, delta, refusal.before), alone(refusal.delta))
    with pytest.raises(PatchError) as caught:
        compile_plan(plan)
    assert [failure.code for failure in caught.value.failures] == [refusal.code]
    assert delta.declared in str(caught.value)


@pytest.mark.parametrize("name", DELTAS)
def test_every_delta_brings_an_example_and_a_refusal(name: str) -> None:
    assert any(example.delta == name for example in EXAMPLES), f"add an Example of {name} to EXAMPLES"
    assert any(refusal.delta == name for refusal in REFUSES), f"add a Refusal of {name} to REFUSES"


def test_the_deltas_import_neither_torch_nor_vllm() -> None:
    import sys

    assert not {"torch", "vllm"} & set(sys.modules)
