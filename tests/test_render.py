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
