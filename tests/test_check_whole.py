"""Where nothing runs, a new text is compiled as a whole: what no import could have made is not called sound."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from balance_patcher.build import check_whole, compile_plan
from balance_patcher.delta import Anchor, Delta, InsertBefore, Variant
from balance_patcher.errors import PatchError
from balance_patcher.feature import Feature
from balance_patcher.plan import make_plan
from balance_patcher.proof import compile_text, find_code
from balance_patcher.source import Lane

MakeLane = Callable[[Mapping[str, "str | bytes"]], Lane]
TOP = "stop = print\n\n\n"
CLASS = "class C:\n    def f(self):\n        stop()\n"
BODY = TOP + CLASS
EDIT = Variant("v", Anchor("stop()"), edits=(InsertBefore("stop()"),))
FEATURE = Feature("t", "t", (Delta("t.d", "vllm.m:C.f", "w", "u", "r", variants=(EDIT,)),))


def checked(text_lane: MakeLane, text: str) -> None:
    plan = make_plan(text_lane({"vllm/__init__.py": "", "vllm/m.py": text}), FEATURE)
    check_whole(*compile_plan(plan))


@pytest.mark.parametrize("text", [BODY, f"def g():\n    pass\n\n\n{BODY}", f"import os\n\nif os:\n    x = 1\n{BODY}"])
def test_a_module_that_compiles_is_sound(text: str, text_lane: MakeLane) -> None:
    checked(text_lane, text)


@pytest.mark.parametrize("more", ["def g():\n    break\n", "return 1\n", "def g():\n    global a\n    nonlocal a\n"])
def test_one_that_does_not_compile_beside_the_target_is_not(more: str, text_lane: MakeLane) -> None:
    with pytest.raises(PatchError) as raised:
        checked(text_lane, f"{BODY}\n\n{more}")
    (failure,) = raised.value.failures
    assert failure.code == "BP305"
    assert failure.what.startswith("vllm.m: ")


def test_a_function_that_the_compiler_leaves_out_is_not(text_lane: MakeLane) -> None:
    text = f"{TOP}if 0:\n{textwrap.indent(CLASS, '    ')}"
    if find_code(compile_text(text, "m.py"), "C.f", 6) is not None:
        pytest.skip("before 3.12 the compiler keeps what is never run")
    with pytest.raises(PatchError) as raised:
        checked(text_lane, text)
    (failure,) = raised.value.failures
    assert failure.code == "BP305"
    assert "the compiler leaves it out there" in failure.what


def test_code_that_is_another_in_the_whole_is_not(text_lane: MakeLane) -> None:
    lane = text_lane({"vllm/__init__.py": "", "vllm/m.py": BODY})
    rewrites, compiled = compile_plan(make_plan(lane, FEATURE))
    other = replace(compiled[0], code=compiled[0].code.replace(co_names=("other",)))
    with pytest.raises(PatchError, match="BP305"):
        check_whole(rewrites, [other])
