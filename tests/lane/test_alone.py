"""Each function of the modules that deltas edit compiles by itself as it was compiled with its module."""

import importlib

import pytest

from balance_patcher.alone import code_alone
from balance_patcher.bound import begins_at, definitions
from balance_patcher.proof import compile_text, find_code, same_code
from balance_patcher.registry import all_features
from balance_patcher.source import InstalledSource, Lane

MODULES = sorted({delta.module for feature in all_features() for delta in feature.deltas})


@pytest.mark.parametrize("name", MODULES)
def test_every_function_compiles_as_in_its_module(name):
    import ast

    text = Lane("installed", InstalledSource()).module(name)
    if text is None:
        pytest.skip(f"this vLLM has no {name}")
    importlib.import_module(name)
    whole, seen = compile_text(text.text, text.display), 0

    def look(scope, outer):
        nonlocal seen
        found = list(definitions(scope))
        for node in found:
            if [other.name for other in found].count(node.name) > 1:
                continue
            if isinstance(node, ast.ClassDef):
                look(node, f"{outer}{node.name}.")
                continue
            qualname = f"{outer}{node.name}"
            expected = find_code(whole, qualname, begins_at(node))
            assert same_code(code_alone(text.tree, qualname, node, text.display), expected), qualname
            seen += 1

    look(text.tree, "")
    assert seen
