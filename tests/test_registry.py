"""Features are found by themselves; a broken file is named, and takes no sound one down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from balance_patcher import deltas, registry
from balance_patcher.errors import PatchError

TOY = """
from balance_patcher.delta import Delta, Prologue, Variant
from balance_patcher.feature import Feature

STOP = Delta(
    "NAME.stop",
    "vllm.toy:Pump.run",
    "why",
    "upstream",
    "when",
    (Variant("only", edits=(Prologue("self.ran = True"),)),),
)
FEATURE = Feature("NAME", "A toy.", (STOP,))
"""

#: The features of this repository.
DECLARED = ["balance", "defer_preemption", "eplb_hooks", "prefill_preemption"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Put a file beside those in ``deltas/``."""
    monkeypatch.setattr(deltas, "__path__", [*deltas.__path__, str(tmp_path)])
    registry._loaded.cache_clear()
    yield lambda name, text: (tmp_path / f"{name}.py").write_text(text)
    registry._loaded.cache_clear()
    for name in [name for name in sys.modules if name.startswith("balance_patcher.deltas.toy")]:
        del sys.modules[name]
        vars(deltas).pop(name.rpartition(".")[2], None)


def names() -> list[str]:
    return [feature.name for feature in registry.features()]


def test_a_file_that_defines_a_feature_is_found(write: Callable[[str, str], None]) -> None:
    write("toy", TOY.replace("NAME", "toy"))
    assert "toy" in names()
    assert registry.find_feature("toy").deltas[0].declared.endswith("/toy.py:5")


def test_a_file_without_a_feature_is_no_feature(write: Callable[[str, str], None]) -> None:
    write("toyless", "x = 1\n")
    assert names() == DECLARED
    assert registry.broken() == ()


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("x = 1\nx = (\n", 2, "SyntaxError"),
        ("x = 1\n\nVarient()\n", 3, "NameError"),
        (TOY.replace('    "when",\n', "").replace("NAME", "toy"), 5, "TypeError"),
    ],
    ids=["no Python", "a typo", "a field left out"],
)
def test_a_broken_file_is_named_with_its_line_and_sound_ones_go_on(
    write: Callable[[str, str], None], text: str, line: int, said: str
) -> None:
    write("toy", text)
    assert names() == DECLARED
    (failure,) = registry.broken()
    assert failure.code == "BP002"
    assert said in failure.what
    assert dict(failure.fields)["declared"] == f"deltas/toy.py:{line}"
    assert registry.find_feature("balance").name == "balance"
    with pytest.raises(PatchError) as caught:
        registry.find_feature("toy")
    assert [found.code for found in caught.value.failures] == ["BP003", "BP002"]


def test_two_files_that_declare_one_name_are_refused(write: Callable[[str, str], None]) -> None:
    write("toy_a", TOY.replace("NAME", "toy"))
    write("toy_b", TOY.replace("NAME", "toy"))
    assert names().count("toy") == 1
    assert "toy_a.py and deltas/toy_b.py both declare 'toy'" in registry.broken()[0].what


def test_a_delta_that_is_not_called_after_its_feature_is_refused(write: Callable[[str, str], None]) -> None:
    write("toy", TOY.replace('"NAME.stop"', '"stop"').replace("NAME", "toy"))
    (failure,) = registry.broken()
    assert "'stop' of feature 'toy' is not called `toy.WHAT`" in failure.what
