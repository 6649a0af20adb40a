"""Where an anchor may stand is narrowed down before anything is compared, and nothing is lost by that."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from balance_patcher.anchors import _candidates, _of_its_kind
from balance_patcher.bound import definitions
from balance_patcher.errors import PatchError
from balance_patcher.matching import Mismatch
from balance_patcher.pattern import Pattern, compile_pattern
from balance_patcher.registry import features
from balance_patcher.source import ModuleText
from balance_patcher.targets import Target

HERE = Path(__file__).resolve()


def targets(path: Path) -> Iterator[Target]:
    text = ModuleText("m", str(path), str(path), path.read_text(encoding="utf-8"))
    for node in definitions(text.tree):
        for inner in definitions(node) if isinstance(node, ast.ClassDef) else (node,):
            if isinstance(inner, ast.FunctionDef):
                yield Target(text, inner.name, inner, None)


def found(places: Iterator[tuple[ast.AST, list[ast.stmt]]], pattern: Pattern) -> list[int]:
    """Where it matches; statements by the first of them."""
    pairs = ((node, statements if pattern.kind == "statements" else node) for node, statements in places)
    return sorted(id(node) for node, at in pairs if not isinstance(pattern.match(at), Mismatch))


def patterns(target: Target) -> Iterator[Pattern]:
    """Of a function's own statements and expressions; and with holes for names, attributes and operands."""
    nodes: list[ast.AST] = [suite[at] for _, _, suite, at in target.places.values()]
    nodes += [node for node, _ in target.expressions]
    for node in nodes[::5]:
        text = ast.unparse(node)
        for old, new in (("", ""), (".", ".$A."), ("self", "$SELF"), ("==", "<$OP>")):
            try:
                yield compile_pattern(textwrap.dedent(text.replace(old, new) if old else text))
            except PatchError:
                continue


@pytest.mark.parametrize("name", ["anchors.py", "matching.py", "names.py"])
def test_the_same_places_are_found_as_by_comparing_each(name: str) -> None:
    seen = 0
    for target in targets(HERE.parent.parent / "balance_patcher" / name):
        for pattern in patterns(target):
            fast = found(_of_its_kind(target, pattern), pattern)
            assert fast == found(_candidates(target, pattern), pattern), pattern.text
            seen += len(fast)
    assert seen > 100


def test_the_same_holds_for_the_patterns_that_are_declared() -> None:
    deltas = [delta for feature in features() for delta in feature.deltas]
    anchors = [v.anchor for delta in deltas for v in delta.variants if v.anchor is not None]
    texts = {text for anchor in anchors for text in (anchor.pattern, anchor.after, anchor.before) if text}
    for target in targets(HERE.parent.parent / "balance_patcher" / "plan.py"):
        for pattern in map(compile_pattern, sorted(texts)):
            assert found(_of_its_kind(target, pattern), pattern) == found(_candidates(target, pattern), pattern)
    assert len(texts) > 10


@pytest.mark.parametrize(
    ("pattern", "sketch"),
    [
        ("if len(self.a) <$OP> self.$CAP: break", [("test", ast.Compare, "")]),
        ("$A = self.take()", [("value", ast.Call, "")]),
        ("a.b.c(d)", [("func", ast.Attribute, "c")]),
        ("a.$B(d)", [("func", ast.Attribute, "")]),
        ("$F(d)", []),
        ("while $_", []),
        ("assert $A is not None", [("test", ast.Compare, "")]),
    ],
)
def test_what_a_match_has_at_least(pattern: str, sketch: list[tuple[str, type[ast.AST], str]]) -> None:
    assert list(compile_pattern(pattern).sketch) == sketch


@pytest.mark.parametrize(
    ("text", "word", "there"),
    [
        ("a = b", "b", True),
        ("ab = abc", "b", False),
        ("b", "b", True),
        ("bb b", "b", True),
        ("_b b_ b1 éb", "b", False),
        ("a.b", "b", True),
        ("# b\n'c'", "b", True),
        ("", "b", False),
    ],
)
def test_a_word_is_there_as_a_whole(text: str, word: str, there: bool) -> None:  # noqa: FBT001
    assert ModuleText("m", "m.py", "m.py", text).mentions(word) is there


def test_the_lines_that_hold_a_name() -> None:
    text = ModuleText("m", "m.py", "m.py", "a.b\r\nabb\rc\n\n  b b\nb")
    assert text.lines_with("b") == [1, 2, 2, 5, 5, 6]
    assert text.lines_with("x") == []
