"""Tests that the declarations bring along: every example becomes what it says, every refusal is refused."""

from __future__ import annotations

import pytest

from balance_patcher.errors import PatchError
from balance_patcher.examples import becomes
from balance_patcher.feature import Example, Refusal
from balance_patcher.registry import delta_modules, features

EXAMPLES = [example for module in delta_modules() for example in getattr(module, "EXAMPLES", ())]
REFUSES = [refusal for module in delta_modules() for refusal in getattr(module, "REFUSES", ())]
DELTAS = {delta.name: (feature, delta) for feature in features() for delta in feature.deltas}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.delta}-{EXAMPLES.index(e)}")
def test_an_example_becomes_what_it_says(example: Example) -> None:
    feature, _ = DELTAS[example.delta]
    assert becomes(feature, example) == example.after.strip()


@pytest.mark.parametrize("refusal", REFUSES, ids=lambda r: f"{r.delta}-{r.code}-{REFUSES.index(r)}")
def test_a_refusal_is_refused_by_its_id(refusal: Refusal) -> None:
    feature, delta = DELTAS[refusal.delta]
    with pytest.raises(PatchError) as caught:
        becomes(feature, refusal)
    assert [failure.code for failure in caught.value.failures] == [refusal.code]
    assert delta.declared in str(caught.value)


@pytest.mark.parametrize("name", DELTAS)
def test_every_delta_brings_an_example_and_a_refusal(name: str) -> None:
    assert any(example.delta == name for example in EXAMPLES), f"add an Example of {name} to EXAMPLES"
    assert any(refusal.delta == name for refusal in REFUSES), f"add a Refusal of {name} to REFUSES"


def test_the_deltas_import_neither_torch_nor_vllm() -> None:
    import sys

    assert not {"torch", "vllm"} & set(sys.modules)
