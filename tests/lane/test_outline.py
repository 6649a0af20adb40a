"""Each module of this vLLM that is read piece by piece is what it is as a whole."""

import ast
from pathlib import Path

import pytest
import vllm.v1

from balance_patcher.source import ModuleText

FILES = sorted(Path(vllm.v1.__file__).parent.rglob("*.py"))


def test_each_module_of_the_engine():
    hollow = outlined = 0
    for file in FILES:
        text = ModuleText("m", "m.py", "m.py", file.read_text("utf-8"), piecemeal=True)
        whole = ast.parse(text.text)
        if text._outline is not None:
            outlined += 1
            gaps = list(text._outline.gaps.values())
            hollow += len(gaps)
            text.fill(*(gap.node for gap in gaps[::2]))
        assert ast.dump(text.tree, include_attributes=True) == ast.dump(whole, include_attributes=True), file
        assert text.tree is text.outline, file
    assert outlined > 100
    assert hollow > 2000


@pytest.mark.parametrize("name", ["core/sched/scheduler.py", "engine/core.py"])
def test_what_balance_edits_is_read_like_this(name):
    file = Path(vllm.v1.__file__).parent / name
    text = ModuleText("m", "m.py", "m.py", file.read_text("utf-8"), piecemeal=True)
    assert text._outline is not None
    assert len(text._outline.gaps) > 40
