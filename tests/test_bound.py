"""What is read of a function without a look at each of its nodes is what a look at each would tell."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from balance_patcher.bound import attributes_set, definitions, suites_of, walk, words_at
from balance_patcher.pattern import compile_pattern
from balance_patcher.scope import Scope
from balance_patcher.source import ModuleText
from balance_patcher.targets import Function, Target

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
FILES = sorted(LIBRARY.glob("*.py"))[::9]

TEXT = dedent('''\
    class C:
        def f(self, max, *rest, key=1, **more):
            """A max( and a min = 1 in a text."""
            self.a = self.b[self.c].d = 1
            self.e: int = 1
            self.f: int
            self.g += 1
            self.h, (self.i, *self.j) = x
            for self.k in y:
                with z as self.m, (w) as (self.n, self.o):
                    pass
            try:
                self.p = 1
            except E as min:
                self.q = self.r
            else:
                self.s = 1
            finally:
                self.t = 1
            while self.u:
                self.v = 1
            del self.w
            match x:
                case {"y": self.y}:
                    self.z = 1
            def inner():
                self.inside = 1
            # sum is named here
            return len(abs), any (x)
''')


def method() -> ast.FunctionDef:
    found = next(definitions(ast.parse(TEXT).body[0]))
    assert isinstance(found, ast.FunctionDef)
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


class TestAttributesSet:
    def test_of_each_kind_of_statement(self) -> None:
        found = [node.attr for node in attributes_set(method(), nested=True)]
        assert sorted(found) == sorted([*"adeghijkmnopqstvz", "inside"])

    def test_without_what_stands_in_nested_functions(self) -> None:
        found = {node.attr for node in attributes_set(method(), nested=False)}
        assert found == set("adeghijkmnopqstvz")

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
    def test_as_a_walk_through_all_nodes_finds_them(self, path: Path) -> None:
        for function in functions(ast.parse(path.read_text("utf-8"))):
            bare = {id(n.target) for n in ast.walk(function) if isinstance(n, ast.AnnAssign) and n.value is None}
            stores = (n for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            whole = {id(node) for node in stores if id(node) not in bare}
            assert {id(node) for node in attributes_set(function, nested=True)} == whole, function.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_definitions_are_those_that_a_walk_through_all_statements_finds(path: Path) -> None:
    def slowly(scope: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(scope):
            if isinstance(child, (*Function, ast.ClassDef)):
                yield child
            elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                yield from slowly(child)

    tree = ast.parse(path.read_text("utf-8"))
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, (*Function, ast.ClassDef)))]:
        assert list(definitions(scope)) == list(slowly(scope))


def test_definitions_are_told_in_the_order_of_the_text() -> None:
    text = """
        def a(): pass
        try:
            def b(): pass
        except E:
            def c(): pass
        except F:
            def d(): pass
        else:
            def e(): pass
        finally:
            def f(): pass
        if x:
            def g(): pass
        elif y:
            def h(): pass
        else:
            def i(): pass
        match x:
            case 1:
                def j(): pass
            case _:
                def k(): pass
    """
    assert [node.name for node in definitions(ast.parse(dedent(text)))] == [*"abcdefghijk"]  # type: ignore[attr-defined]


def test_the_suites_of_a_statement() -> None:
    (statement,) = ast.parse("try:\n    a\nexcept E:\n    b\nexcept F:\n    c\nelse:\n    d\nfinally:\n    e\n").body
    told = [(name, [ast.unparse(one) for one in suite]) for name, suite in suites_of(statement)]
    assert told == [("body", ["a"]), ("orelse", ["d"]), ("finalbody", ["e"]), ("handlers", ["b"]), ("handlers", ["c"])]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("max", [0]), ("a max b", [2]), ("maxi max_ _max imax max1 1max", []), ("max.max(max)", [0, 4, 8]),
        ("ümax maxü", []), ("", []), ("maxmax max", [7]), ("«max»", [1]),
    ],
)  # fmt: skip
def test_where_a_word_stands(text: str, at: list[int]) -> None:
    assert list(words_at(text, "max")) == at


#: Expressions of nested scopes are none of a function's own, wherever they stand.
SCOPES = dedent("""\
    def f(a):
        @wraps(a.b)
        def g(x=a.b(), *, y: a.b = a.b[0]) -> a.b():
            return a.b()

        @wraps(a.b())
        class C(a.b()):
            z = a.b()

        try:
            a.b()
        except a.b(
            a.b
        ):
            (lambda: a.b())(a.b)
        with a.b() as a.b[0]:
            match a.b():
                case a.b if a.b():
                    return [a.b() for a.b in a.b() if a.b()]
                case _:
                    a.b(
                        a.b()
                    )
""")


def _named(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute))


def _holds(node: ast.AST, word: str) -> bool:
    return any(word in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(node))


def target(text: str, qualname: str) -> Target:
    module = ModuleText("m", "m.py", "m.py", text)
    scope, owner = module.tree, None
    for name in qualname.split("."):
        found = next(node for node in definitions(scope) if getattr(node, "name", "") == name)
        owner, scope = (scope if isinstance(scope, ast.ClassDef) else None), found  # type: ignore[assignment]
    return Target(module, qualname, scope, owner)  # type: ignore[arg-type]


class TestWhatAFunctionBinds:
    """Told from its text where that leaves no room for a name, else from its symbols."""

    def scope(self, text: str = TEXT, qualname: str = "C.f") -> Scope:
        return Scope(target(text, qualname))

    @pytest.mark.parametrize(
        ("name", "binds", "asked"),
        [
            ("max", True, False),  # a parameter
            ("rest", True, False),
            ("more", True, False),
            ("key", True, False),
            ("min", True, True),  # an exception's name; the one in the text alone would do no harm
            ("inner", True, True),
            ("len", False, False),  # it is called
            ("any", False, False),
            ("sum", False, False),  # in a comment
            ("abs", False, True),  # it is read, and text alone does not say so
            ("nowhere", False, False),
            ("v", False, False),  # an attribute
        ],
    )
    def test_is_told_as_its_symbols_tell_it(self, name: str, binds: bool, asked: bool) -> None:  # noqa: FBT001
        scope = self.scope()
        assert scope.binds(name) is binds
        assert binds is (name in scope.parameters | scope.local)
        alone = self.scope()
        alone.binds(name)
        assert ("_symbols" in vars(alone)) is asked

    def test_what_a_statement_assigns_to_needs_no_symbols(self) -> None:
        text = """
            class C:
                def f(self):
                    if x:
                        a = __b = 1
                    def g():
                        c = 1
        """
        scope = self.scope(dedent(text), "C.f")
        assert scope.binds("a")
        assert scope.binds("_C__b")
        assert "_symbols" not in vars(scope)
        assert not scope.binds("c")
        assert scope.local == {"self", "a", "_C__b", "g"}

    @pytest.mark.parametrize(
        ("inner", "outer", "binds"),
        [("global a", "global b", (True, False)), ("nonlocal a", "b = 0", (True, True)), ("a", "b", (True, True))],
    )
    def test_unless_one_is_declared_to_be_anothers(self, inner: str, outer: str, binds: tuple[bool, bool]) -> None:
        text = f"def f():\n    a = 1\n    def g():\n        {inner}\n        a = 2\n    {outer}\n    b = 1\n"
        scope = self.scope(text, "f")
        assert tuple(scope.binds(name) for name in "ab") == tuple(name in scope.local for name in "ab") == binds
        assert bool(scope._assigned) is (inner == "a")

    def test_a_private_parameter_is_called_by_its_class(self) -> None:
        scope = self.scope("class _C:\n    def f(self, __x, __y__):\n        __z = 1\n", "_C.f")
        assert scope.parameters == {"self", "_C__x", "__y__"} <= scope.local
        assert scope.binds("_C__z")
        assert scope.uses("_C__z")
        assert not scope.binds("_C__a")

    def test_a_name_may_be_written_with_letters_of_others(self) -> None:
        scope = self.scope("def f():\n    \N{LATIN SMALL LIGATURE FI}t = 1\n", "f")
        assert scope.binds("fit")
        assert scope.uses("fit")

    def test_a_comment_may_end_where_no_line_feed_is(self) -> None:
        scope = self.scope("def f():\r    # here\r    len = 1\r    return len\n", "f")
        assert scope.binds("len")

    def test_a_sign_is_no_letter(self) -> None:
        scope = self.scope("def f():\n    a = '\N{EM DASH}'\n", "f")
        assert not scope.uses("b")
        assert "_symbols" not in vars(scope)

    def test_it_uses_what_stands_in_nested_scopes(self) -> None:
        scope = self.scope("def f():\n    def g():\n        def h():\n            print(deep)\n", "f")
        assert scope.uses("deep")
        assert scope.uses("h")
        assert not scope.binds("deep")

    @pytest.mark.parametrize("path", FILES[::4], ids=lambda path: path.name)
    def test_of_functions_of_others(self, path: Path) -> None:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        tops = [node for node in definitions(tree) if isinstance(node, Function)]
        for node in (node for node in tops if [other.name for other in tops].count(node.name) == 1):
            scope = self.scope(text, node.name)
            words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {"super", "len", "self"}
            for word in words:
                assert scope.binds(word) is (word in scope.local), (node.name, word)
                assert scope.uses(word) is (word in scope._everywhere), (node.name, word)


class TestWhatAPatternHolds:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("if len(self.running) <$OP> self.$CAP: break", {"len", "self", "running"}),
            ("$QUEUE = self._select()", {"self", "_select"}),
            ("while $_", set()),
            ("$A + $B", set()),
            ("f($$$REST, key=$X)", {"f"}),
            ("assert $QUEUE is not None", set()),
        ],
    )
    def test_its_names_and_attributes(self, text: str, words: set[str]) -> None:
        assert compile_pattern(text).words == words

    def test_a_function_without_them_cannot_hold_it(self) -> None:
        one = target(TEXT, "C.f")
        assert one.may_hold({"inner", "self"})
        assert not one.may_hold({"inner", "nowhere"})
        assert one.may_hold(())

    @pytest.mark.parametrize("path", [*FILES[::3], None], ids=lambda path: getattr(path, "name", "made up"))
    def test_what_stands_where_a_name_does_is_what_a_look_at_all_finds(self, path: Path | None) -> None:
        text = path.read_text("utf-8") if path is not None else SCOPES
        tree = ast.parse(text)
        tops = [node for node in definitions(tree) if isinstance(node, Function)]
        for node in (node for node in tops if [other.name for other in tops].count(node.name) == 1):
            one = target(text, node.name)
            for word in {n.id if isinstance(n, ast.Name) else n.attr for n, _ in one.expressions if _named(n)}:
                for kind in (ast.Call, ast.Attribute, ast.Compare, ast.Name, ast.Subscript):
                    holding = [(n, holder) for n, holder in one.expressions if type(n) is kind and _holds(n, word)]
                    found = [(n, holder) for n, holder, _ in one.of_kind(kind, [word]) if _holds(n, word)]
                    assert sorted((id(n), *map(id, h)) for n, h in found) == sorted(
                        (id(n), *map(id, h)) for n, h in holding
                    ), (node.name, word, kind)

    def test_one_with_letters_of_others_may(self) -> None:
        assert target("def f():\n    \N{LATIN SMALL LIGATURE FI}t()\n", "f").may_hold({"fit"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a\n",
        "a\n\nb",
        "a\r\nb\r\n",
        "a\rb",
        "a\x0cb\n",
        "a\x0b\n",
        "a\x1cb\nc",
        "a\u2028b\n",
        "a\x85b",
        "\n\n",
    ],
)
def test_lines_end_where_the_compiler_says(text: str) -> None:
    lines = ModuleText("m", "m.py", "m.py", text).lines
    assert "".join(lines) == text
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    assert len(lines) == plain.count("\n") + (plain != "" and not plain.endswith("\n"))
    assert all(line.endswith(("\n", "\r")) for line in lines[:-1])


def test_walk_gives_what_ast_walk_gives_but_contexts_and_operators() -> None:
    tree = ast.parse(TEXT)
    left_out = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
    assert list(walk(tree)) == [node for node in ast.walk(tree) if not isinstance(node, left_out)]
