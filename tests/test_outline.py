"""A module that is parsed piece by piece is the module that is parsed as a whole, or is not parsed like that."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import balance_patcher
from balance_patcher.bound import definitions, stored, walk
from balance_patcher.chain import ClassChain, sets_attribute
from balance_patcher.errors import PatchError
from balance_patcher.outline import Outline, outline_of
from balance_patcher.source import DirSource, Lane, ModuleText
from balance_patcher.targets import Target, absent, find_target

HERE = Path(__file__).resolve().parent


def piecemeal(text: str) -> ModuleText:
    return ModuleText("m", "m.py", "m.py", text, piecemeal=True)


def outlined(text: str) -> Outline:
    found = outline_of(text, piecemeal(text).starts)
    assert found is not None
    return found


def gaps(text: str) -> list[str]:
    return [gap.qualname for gap in outlined(text).gaps.values()]


def dumped(tree: ast.AST) -> str:
    return ast.dump(tree, include_attributes=True)


def function(text: ModuleText, qualname: str) -> Any:
    scope: Any = text.outline
    for name in qualname.split("."):
        scope = next(node for node in definitions(scope) if getattr(node, "name", "") == name)
    return scope


PLAIN = dedent('''\
    """A module."""

    from __future__ import annotations

    import os as system

    LIMIT = 3


    def first(a, b=LIMIT):
        """Not much."""
        return a + b


    class Engine(Base, metaclass=Meta):
        """Of its kind."""

        size: int = 4

        def __init__(
            self,
            size: int,
            *,
            name: str = "x",
        ) -> None:  # a comment
            self.size = size
            # a comment at the end

        @property
        def cap(self) -> int:

            def inner():
                yield 1

            return self.size

        async def step(self): # done at once
            await self.other()

        # what comes next
        def last(self):
            return """
    at the margin
    """


    if LIMIT:
        LIMIT += 1
''')

#: Texts in which bodies end where they seem not to, or do not end where they seem to.
# ruff: noqa: E501
ODD: dict[str, str] = {
    "a string at the margin": 'def f():\n    x = """\ndef g():\n    pass\n"""\n    return x\n\n\ndef h():\n    return 1\n',
    "a definition in a string": 'TEXT = """\ndef f():\n    return 1\n"""\n\n\ndef f():\n    return 2\n',
    "one that ends in a string": "def f():\n    return '''\na'''\n\n\ndef g():\n    return 1\n",
    "a string that begins in a comment": 'def f():\n    # it is """\n    return 1\n\n\ndef g():\n    return """\nx"""\n',
    "an apostrophe in a comment": "def f():\n    return 1  # it's\n\n\ndef g():\n    return '''\nx'''\n",
    "quotes in quotes": "def f():\n    return \"'''\", '\"\"\"'\n\n\ndef g():\n    return 1\n",
    "an escaped quote": 'def f():\n    return """\\"""\ndef g():\n    pass\n"""\n\n\ndef h():\n    return 1\n',
    "a comment at the margin": "def f():\n    a = 1\n# here\n    return a\n\n\ndef g():\n    return 1\n",
    "a line that goes on at the margin": "def f():\n    return 1 + \\\n2\n\n\ndef g():\n    return 1\n",
    "a bracket at the margin": "def f():\n    return (\n1,\n2)\n\n\ndef g():\n    return 1\n",
    "a name in brackets at the margin": "def f():\n    return (\nf\n)\n\n\ndef g():\n    return 1\n",
    "one line": "def f(): return 1\n\n\ndef g():\n    return 1\n",
    "one line and a comment": "def f(): return 1  # (a):\n\n\ndef g():\n    return 1\n",
    "parameters in brackets": "def f(a=d[g():\n          2]):\n    return 1\n\n\ndef h():\n    return 1\n",
    "a result over several lines": "def f() -> tuple[\n    int,\n]:\n    return 1\n\n\ndef g():\n    return 1\n",
    "a result on the first line": "def f() -> dict[str, int]:\n    return {}\n\n\ndef g():\n    return 1\n",
    "decorated": "@a(\n    1\n)\n@b\ndef f():\n    return 1\n\n\ndef g():\n    return 1\n",
    "nested": "def f():\n    def g():\n        return 1\n\n    class C:\n        def h(self):\n            pass\n",
    "nested in one that is kept": "def f() -> a[\n    0\n]:\n    def g():\n        return 1\n\n    return g\n",
    "a class in a class": "class C:\n    class D:\n        def f(self):\n            return 1\n\n    def g(self):\n        return 2\n",
    "under a condition": "if x:\n    def f():\n        return 1\nelse:\n    def f():\n        return 2\n\n\ndef g():\n    return 1\n",
    "under an exception": "try:\n    import a\nexcept ImportError:\n    def f():\n        return 1\n\n    def g():\n        return 2\n",
    "a class under a condition": "try:\n  class C:\n    def f(self):\n        return 1\nexcept E:\n    pass\n",
    "twice": "def f():\n    return 1\n\n\ndef f():\n    return 2\n",
    "tabs": "class C:\n\tdef f(self):\n\t\treturn 1\n\n\ndef g():\n\treturn 2\n",
    "two columns": "class C:\n  def f(self):\n    return 1\n\n  def g(self):\n    return 2\n",
    "no end of line": "def f():\n    return 1",
    "a comment without end of line": "def f():\n    return 1\n    # here",
    "carriage returns": "def f():\r\n    return 1\r\n\r\n\r\ndef g():\r\n    return 2\r\n",
    "a form feed": "def f():\n    return 1\n\x0c\ndef g():\n    return 2\n",
    "only a docstring": 'def f():\n    """Of no use."""\n\n\ndef g():\n    """\n    Neither.\n"""\n',
    "letters of others": "def f():\n    ü = 'ä€𝄞'; return ü\n\n\nclass C:\n    def g(self): # ü\n        return 'ä'; 1\n",
    "a lambda": "def f(a=lambda: (1)):\n    return 1\n\n\ndef g(a=(lambda:\n        1)):\n    return 2\n",
    "a type comment": "def f(a):  # type: (int) -> int\n    return a\n\n\ndef g():\n    return 1\n",
    "an arrow in a comment": "def f(): # see (a) ->:\n    return 1\n\n\ndef g():\n    return 1\n",
    "stubs": "@overload\ndef f(a: int) -> int: ...\n@overload\ndef f(a: str) -> str:\n    ...\ndef f(a):\n    return a\n",
    "semicolons": "def f():\n    a = 1; b = 2\n    return a; 1\nx = 1; y = 2\ndef g():\n    return 1\n",
    "an f-string": "def f(a):\n    return f\"{a['x']} {a!r:>{3}}\"\n\n\ndef g():\n    return f'''\n{1}'''\n",
    "a raw string": 'def f():\n    return r\'\\\', r"""\n\\"""\n\n\ndef g():\n    return 1\n',
}
if sys.version_info >= (3, 12):
    ODD["type parameters"] = (
        "def f[T](a: T) -> T:\n    return a\n\n\nclass C[T]:\n    def g(self) -> T:\n        return 1\n"
    )
    ODD["quotes in an f-string"] = "def f(a):\n    return f\"{a[\"'''\"]}\"\n\n\ndef g():\n    return '''\n'''\n"


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


ODD = {name: text for name, text in ODD.items() if compiles(text)}


class TestTheOutline:
    def test_leaves_out_what_stands_in_functions(self) -> None:
        found = outlined(PLAIN)
        assert [gap.qualname for gap in found.gaps.values()] == [
            "first", "Engine.__init__", "Engine.cap", "Engine.step",
        ]  # fmt: skip
        assert {type(node) for gap in found.gaps.values() for node in gap.node.body} == {ast.Expr}
        inner = [node for node in ast.walk(found.tree) if isinstance(node, (ast.Return, ast.Await, ast.Yield))]
        assert [ast.unparse(node) for node in inner] == ["return '\\nat the margin\\n'"]  # its lines do not say so

    def test_has_what_does_not(self) -> None:
        whole = ast.parse(PLAIN)
        assert [n.name for n in definitions(outlined(PLAIN).tree)] == [n.name for n in definitions(whole)]  # type: ignore[attr-defined]
        assert (
            set(stored(outlined(PLAIN).tree))
            == set(stored(whole))
            == {"annotations", "system", "LIMIT", "first", "Engine"}
        )

    def test_says_where_a_function_ends_at_the_latest(self) -> None:
        whole = {
            n.name: n for n in ast.walk(ast.parse(PLAIN)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        for gap in outlined(PLAIN).gaps.values():
            found = whole[gap.node.name]
            assert gap.first == found.lineno
            assert gap.last >= (found.end_lineno or 0)
            following = [
                n.lineno for n in whole.values() if n.lineno > found.lineno and n.col_offset <= found.col_offset
            ]
            assert all(gap.last < line for line in following)

    @pytest.mark.parametrize("name", ["carriage returns", "a form feed", "a class in a class of no function"])
    def test_is_not_tried_where_lines_are_not_plain(self, name: str) -> None:
        text = ODD.get(name, "class C:\n    class D:\n        x = 1\n")
        assert outline_of(text, piecemeal(text).starts) is None

    def test_is_none_of_a_text_that_is_no_python(self) -> None:
        text = "def f():\n    return 1\n\n\nclass\n"
        assert outline_of(text, piecemeal(text).starts) is None
        with pytest.raises(PatchError, match="BP508"):
            _ = piecemeal(text).outline

    @pytest.mark.parametrize(
        "name", ["a bracket at the margin", "a name in brackets at the margin", "one line and a comment"]
    )
    def test_is_none_where_a_body_does_not_end_where_it_seems_to(self, name: str) -> None:
        assert outline_of(ODD[name], piecemeal(ODD[name]).starts) is None

    @pytest.mark.timeout(10)
    @pytest.mark.parametrize(
        "text",
        [
            "def f(\n" + "    a,\n" * 4000 + ") -> tuple[\n    int,\n]:\n    return 1\n",
            "def f(\n" + " \t " * 4000 + "\n" * 4000,
            "def f():\n" + "    # \n \n\t\n    \n" * 4000 + "    return 1",
            "def f(a, b=g(), c=(1, 2)) -> x: # (a) -> b: (c) ->" + " -> (d)" * 4000 + "\n",
            "x = '''" + '\n""" \\\n' * 4000 + "'''\n\n\ndef f():\n    return 1\n",
        ],
    )
    def test_is_made_in_a_moment_of_whatever_text(self, text: str) -> None:
        outline_of(text, piecemeal(text).starts)

    def test_knows_a_definition_from_a_text_of_one(self) -> None:
        assert gaps(ODD["a definition in a string"]) == ["f"]
        assert gaps(ODD["a string at the margin"]) == ["h"]
        assert gaps(ODD["a string that begins in a comment"]) == ["f"]


def one_by_one(text: ModuleText) -> None:
    assert text._outline is not None
    for gap in list(text._outline.gaps.values()):
        text.fill(gap.node)


def at_once(text: ModuleText) -> None:
    _ = text.tree


def by_halves(text: ModuleText) -> None:
    assert text._outline is not None
    for gap in list(text._outline.gaps.values())[::2]:
        text.fill(gap.node)
    at_once(text)


@pytest.mark.parametrize("how", [one_by_one, at_once, by_halves])
class TestWhatIsFilledIsTheWhole:
    @pytest.mark.parametrize("name", ["plain", *ODD])
    def test_of_odd_texts(self, name: str, how: Callable[[ModuleText], None]) -> None:
        text = piecemeal(ODD.get(name, PLAIN))
        before = text.outline
        if text._outline is not None:
            how(text)
            assert not text._outline.gaps
        assert text.outline is before
        assert ast.dump(text.outline) == ast.dump(ast.parse(text.text))
        functions = [
            n for n in ast.walk(ast.parse(text.text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        ours = [n for n in ast.walk(text.outline) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        assert [*map(dumped, ours)] == [*map(dumped, functions)]
        assert text.tree is text.outline
        assert dumped(text.tree) == dumped(ast.parse(text.text))

    @pytest.mark.parametrize(
        "path", sorted(Path(balance_patcher.__file__).parent.rglob("*.py"))[::7], ids=lambda path: path.name
    )
    def test_of_our_own(self, path: Path, how: Callable[[ModuleText], None]) -> None:
        text = piecemeal(path.read_text("utf-8"))
        if text._outline is not None:
            how(text)
        assert dumped(text.tree) == dumped(ast.parse(text.text))


class TestNodesStayWhatTheyAre:
    def test_when_the_whole_is_asked_for(self) -> None:
        text = piecemeal(PLAIN)
        before = [function(text, name) for name in ("first", "Engine", "Engine.cap")]
        _ = text.tree
        assert all(
            one is function(text, name) for one, name in zip(before, ("first", "Engine", "Engine.cap"), strict=True)
        )

    def test_also_where_lines_alone_do_not_say_what_a_function_is(self) -> None:
        text = piecemeal("if x:\n    def f():\n        return 1\n\n\ndef g():\n    return 2\n")
        node, other = function(text, "f"), function(text, "g")
        text.fill(node)
        assert ast.unparse(node) == "def f():\n    return 1"
        assert ast.unparse(other) == "def g():\n    return 2"
        assert function(text, "f") is node

    def test_filling_again_changes_nothing(self) -> None:
        text = piecemeal(PLAIN)
        node = function(text, "Engine.cap")
        text.fill(node)
        body = node.body
        text.fill(node, function(text, "Engine"))
        assert node.body is body


class TestAnOutlineThatIsWrong:
    """It cannot be, as far as is known; were it, the whole is taken."""

    @pytest.fixture
    def text(self) -> ModuleText:
        return piecemeal(PLAIN)

    def test_of_a_function_that_is_not_there(self, text: ModuleText) -> None:
        other = ast.parse(PLAIN.replace("def cap", "def cup"))
        assert not outlined(PLAIN).fill_from(other)

    def test_of_another_kind(self) -> None:
        assert not outlined(PLAIN).fill_from(ast.parse(PLAIN.replace("async def", "def")))

    @pytest.mark.parametrize("more", ["x = 1\n", "def another(): pass\n"])
    def test_of_a_tree_with_more(self, more: str) -> None:
        assert not outlined(PLAIN).fill_from(ast.parse(PLAIN + more))

    def test_the_whole_is_taken_then(self, text: ModuleText, monkeypatch: pytest.MonkeyPatch) -> None:
        assert text.outline is not None
        monkeypatch.setattr(Outline, "fill_from", lambda *_: False)
        assert dumped(text.tree) == dumped(ast.parse(PLAIN))


class TestWhatHoldsAName:
    def names(self, name: str) -> list[str]:
        text = piecemeal(PLAIN)
        found = [getattr(part, "name", type(part).__name__) for part in text.parts_with(name)]
        assert text._outline is not None
        left = {gap.qualname.rpartition(".")[2] for gap in text._outline.gaps.values()}
        assert not left & set(found)
        return found

    def test_functions_and_statements(self) -> None:
        # What stands in the head of a class is always told: it is no line's alone.
        head = ["Name", "keyword"]
        assert self.names("LIMIT") == ["Assign", "first", *head, "If"]
        assert self.names("inner") == [*head, "cap"]
        assert self.names("size") == [*head, "AnnAssign", "__init__", "cap"]
        assert self.names("property") == [*head, "cap"]
        assert self.names("Base") == head

    def test_as_a_walk_through_all_of_it_would_find_it(self) -> None:
        text = piecemeal(PLAIN)
        for name in ("LIMIT", "size", "self", "other", "system", "property", "Base", "Meta"):

            def spoken(node: ast.AST, name: str = name) -> bool:
                return name in (getattr(node, "id", None), getattr(node, "attr", None))

            found = [ast.dump(n) for part in text.parts_with(name) for n in walk(part) if spoken(n)]
            assert sorted(found) == sorted(ast.dump(n) for n in walk(ast.parse(PLAIN)) if spoken(n)), name

    def test_also_under_a_condition(self) -> None:
        text = piecemeal(ODD["under a condition"])
        (part,) = text.parts_with("x")
        assert ast.unparse(part) == ast.unparse(ast.parse(text.text).body[0])


class TestALaneThatIsReadPieceByPiece:
    @pytest.fixture
    def lane(self, tmp_path: Path) -> Lane:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("")
        (tmp_path / "vllm" / "m.py").write_text(PLAIN)
        (tmp_path / "vllm" / "other.py").write_text(
            "from vllm.m import Engine\n\n\nclass Own(Engine):\n    def go(self):\n        self.speed = 1\n"
        )
        return Lane("here", DirSource(f"dir:{tmp_path}", tmp_path), piecemeal=True)

    def left(self, lane: Lane, module: str = "vllm.m") -> list[str]:
        text = lane.module(module)
        assert text is not None
        assert text._outline is not None
        return [gap.qualname for gap in text._outline.gaps.values()]

    def test_parses_the_targets_that_are_looked_for(self, lane: Lane) -> None:
        found = find_target(lane, "vllm.m:Engine.cap")
        assert isinstance(found, Target)
        assert [type(statement).__name__ for statement in found.node.body] == ["FunctionDef", "Return"]
        assert self.left(lane) == ["first", "Engine.__init__", "Engine.step"]

    def test_and_the_methods_that_may_set_an_attribute(self, lane: Lane) -> None:
        text = lane.module("vllm.m")
        assert text is not None
        owner = function(text, "Engine")
        assert sets_attribute(text, owner, "size")  # the class has it
        assert not sets_attribute(text, owner, "missing")
        assert len(self.left(lane)) == 4
        chain = ClassChain(lane, other := lane.module("vllm.other"), function(other, "Own"))  # type: ignore[arg-type]
        assert chain.has("speed")
        assert chain.has("size")
        assert not chain.has("name")
        assert self.left(lane) == ["first", "Engine.cap", "Engine.step"]

    def test_knows_what_is_defined_without_the_whole(self, lane: Lane) -> None:
        assert not absent(lane, "vllm.m:Engine.step")
        assert absent(lane, "vllm.m:Engine.missing")
        assert len(self.left(lane)) == 4
        assert not absent(lane, "vllm.m:Engine.inner")  # it is defined in a function
        assert self.left(lane) == []
