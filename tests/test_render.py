"""How nodes are shown to a person."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from balance_patcher import render

LONG = "value = call(" + ", ".join(f"argument_number_{at}" for at in range(12)) + ")"


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    yield
    render._renderer = ast.unparse


def node(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def test_a_short_statement_stands_on_one_line() -> None:
    assert render.shown(node("if full:\n    break\nelse:\n    go()")) == "`if full: break`"


COMPOUND = (
    "if full and (a or b):\n    break\nelif other:\n    go()\nelse:\n    go()",
    "if first:\n    'a text that looks like a docstring'",
    "for at, one in pairs:\n    go()\nelse:\n    go()",
    "while True:\n    go()",
    "with one as a, two(b) as c:\n    go()",
    "async def f():\n    async with one:\n        go()",
    "try:\n    go()\nexcept (A, B) as error:\n    go()\nelse:\n    go()\nfinally:\n    go()",
    "match value:\n    case [1, *rest]:\n        go()\n    case _:\n        go()",
)


@pytest.mark.parametrize("text", COMPOUND)
def test_the_first_line_of_a_statement_is_that_of_its_whole_text_and_nothing_is_lost(text: str) -> None:
    for statement in [inner for inner in ast.walk(ast.parse(text)) if isinstance(inner, ast.stmt)]:
        before = ast.dump(statement)
        if not isinstance(statement, ast.AsyncFunctionDef):
            assert render.head(statement) == ast.unparse(statement).splitlines()[0]
        assert ast.dump(statement) == before


def test_a_long_statement_is_wrapped_by_astor() -> None:
    render.prefer_astor()
    text = render.shown(node(LONG))
    assert len(text.strip().splitlines()) > 1
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(LONG))


def test_without_astor_a_long_statement_is_rendered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "astor", None)
    render.prefer_astor()
    assert ast.dump(ast.parse(render.shown(node(LONG)))) == ast.dump(ast.parse(LONG))


def test_what_astor_gets_wrong_is_rendered_by_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import astor

    monkeypatch.setattr(astor, "to_source", lambda _: "value = call()\n")
    render.prefer_astor()
    assert "argument_number_11" in render.shown(node(LONG))


def test_astor_is_not_loaded_by_the_install_path() -> None:
    import subprocess

    code = "import balance_patcher.build, sys; sys.exit('astor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
