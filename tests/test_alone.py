"""A function by itself is what it is in its module: its code, its symbols, its tree."""

from __future__ import annotations

import ast
import symtable
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from balance_patcher.alone import code_alone, span, symbols_of
from balance_patcher.bound import begins_at, children, definitions, stored, walk
from balance_patcher.errors import PatchError
from balance_patcher.outline import function_alone, text_alone
from balance_patcher.proof import compile_text, find_code, same_code
from balance_patcher.source import ModuleText

HERE = Path(__file__).resolve().parent
STDLIB = Path(sysconfig.get_path("stdlib"))
# Decorators, nested classes, private names, comprehensions, imports under `try`, functions under `if`, type hints.
FILES = [
    *sorted((HERE.parent / "balance_patcher").glob("*.py"))[::4],
    *(STDLIB / f"{name}.py" for name in ("ast", "dataclasses", "enum", "functools", "inspect", "logging/__init__")),
    *(STDLIB / f"{name}.py" for name in ("pathlib", "subprocess", "tempfile", "threading", "typing", "zipfile")),
]


def module(path: Path) -> ModuleText | None:
    return ModuleText("m", str(path), str(path), path.read_text(encoding="utf-8")) if path.is_file() else None


def functions(scope: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Those that are defined once in their scope, as targets are (BP106)."""
    found = [node for node in definitions(scope) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    names = [node.name for node in found]
    for node in found:
        if names.count(node.name) == 1:
            if isinstance(node, ast.ClassDef):
                yield from functions(node, f"{outer}{node.name}.")
            else:
                yield f"{outer}{node.name}", node


def symbols(table: symtable.SymbolTable) -> tuple[list[object], list[str]]:
    own = sorted((s.get_name(), s.is_local(), s.is_parameter(), s.is_free()) for s in table.get_symbols())
    return own, sorted(every(table))


def every(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (symbol.get_name() for symbol in table.get_symbols())
    for child in table.get_children():
        yield from every(child)


def in_whole(text: ModuleText, qualname: str) -> symtable.SymbolTable:
    table = symtable.symtable(text.text, text.display, "exec")
    for name in qualname.split("."):
        table = next(c for c in table.get_children() if c.get_name() == name and c.get_type() in ("class", "function"))
    return table


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_function_of_a_real_module_compiles_and_parses_as_in_the_whole(path: Path) -> None:
    text = module(path)
    if text is None:
        pytest.skip("this Python has it elsewhere")
    compile_text.cache_clear()
    whole = compile_text(text.text, text.display)
    seen = 0
    for qualname, node in functions(text.tree):
        expected = find_code(whole, qualname, begins_at(node))
        assert expected is not None, qualname
        assert same_code(code_alone(text.tree, qualname, node, text.display), expected), qualname
        first, last = span(text, node)
        found = function_alone(text.lines[first - 1 : last], qualname, first)
        seen += 1
        if "." not in qualname and node.col_offset:
            assert found is None, "under `if`, with no class around it, its lines alone are no module"
            continue
        assert found is not None, qualname
        assert ast.dump(found, include_attributes=True) == ast.dump(node, include_attributes=True), qualname
    assert seen or path.name in ("limits.py", "__init__.py")  # these have constants only


@pytest.mark.parametrize("path", FILES[::4], ids=lambda path: path.name)
def test_the_symbols_of_a_function_are_those_in_the_whole(path: Path) -> None:
    text = module(path)
    if text is None:
        pytest.skip("this Python has it elsewhere")
    # `<generic …>` scopes have no part in these files, so the plain way down finds each.
    for qualname, node in list(functions(text.tree))[::5]:
        assert symbols(symbols_of(text, qualname, node)) == symbols(in_whole(text, qualname)), qualname


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_module_binds_is_what_the_compiler_says(path: Path) -> None:
    text = module(path)
    if text is None:
        pytest.skip("this Python has it elsewhere")
    table = symtable.symtable(text.text, text.display, "exec").get_symbols()
    theirs = {s.get_name() for s in table if s.is_assigned() or s.is_imported() or s.is_namespace()} - {"*"}
    # From 3.12 on it says of a comprehension's own names, too, that they are the module's.
    own = {
        name.id
        for node in ast.walk(text.tree)
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    assert set(text.bound) <= theirs
    assert theirs - text.bound <= own


@pytest.mark.parametrize("path", FILES[::6], ids=lambda path: path.name)
def test_the_nodes_are_those_of_the_standard_walk(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.parse("a < b + c")
    said = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
    assert list(walk(tree)) == [node for node in ast.walk(tree) if not isinstance(node, said)]
    assert children(tree) == list(ast.iter_child_nodes(tree))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("a = b", {"a"}),
        ("(a, *b), c[d], e.f = g", {"a", "b"}),
        ("for a in b: c = 1", {"a", "c"}),
        ("with a as b: pass", {"b"}),
        ("try: pass\nexcept A as b: pass", {"b"}),
        ("import a.b, c as d\nfrom e import f as g, h\nfrom i import *", {"a", "d", "g", "h"}),
        ("def f(a=(b := 1), *, c=(d := 2)): e = 1", {"f", "b", "d"}),
        ("@(a := b)\nclass C((c := d), metaclass=(e := f)): g = 1", {"C", "a", "c", "e"}),
        ("[a for b in c if (d := b)]", {"d"}),
        ("lambda a=(b := 1): (c := 2)", {"b"}),
        ("match a:\n case {'b': c, **d}: pass\n case [*e]: pass\n case F(g=h) as i: pass", {"c", "d", "e", "h", "i"}),
        ("del a", {"a"}),
        ("a += 1", {"a"}),
        ("a: int", {"a"}),
    ],
)
def test_names_that_are_bound(text: str, bound: set[str]) -> None:
    assert set(stored(ast.parse(text))) == bound


IMPORTS = "import time\ntry:\n    import a\nexcept ImportError:\n    from b import c as a\nif time:\n    import d\n"


@pytest.mark.parametrize("name", ["time", "a", "d", "other"])
def test_a_call_of_what_an_imported_module_has_is_compiled_as_in_the_module(name: str) -> None:
    # From 3.11 the compiler makes other code of it than of a call of a method.
    text = ModuleText("m", "m.py", "m.py", f"{IMPORTS}class C:\n    def f(self):\n        return {name}.g()\n")
    node = text.tree.body[-1].body[0]  # type: ignore[attr-defined]
    expected = find_code(compile_text(text.text, "m.py"), "C.f", begins_at(node))
    assert expected is not None
    assert same_code(code_alone(text.tree, "C.f", node, "m.py"), expected)
    if name == "other":
        return
    without = ast.Module([text.tree.body[-1]], [])
    alone = code_alone(without, "C.f", node, "m.py")
    assert same_code(alone, expected) is not _knows_imports()


def _knows_imports() -> bool:
    """Whether this compiler makes something else of a call of what an imported module has."""
    texts = (f"{line}\ndef f():\n    return a.g()\n" for line in ("import a", "b = 1"))
    one, other = (find_code(compile_text(text, "m"), "f", 2) for text in texts)
    assert one is not None
    assert other is not None
    return not same_code(one, other)


@pytest.mark.parametrize(
    "lines",
    [
        ["    def f(self):\n", "        pass\n", "    def g(self):\n", "        pass\n"],  # more than the function
        ["    def g(self):\n", "        pass\n"],  # another
        ["    f = 1\n"],  # none
        ["def f(self):\n", "    pass\n"],  # not in its class
        ["    def f(self):\n", "        '''\n"],  # a text that has no end
        ["    def f(self):\n", "        pass\n", "x = 1\n"],  # more behind the class
    ],
)
def test_lines_that_are_not_one_function_of_that_name(lines: list[str]) -> None:
    assert function_alone(lines, "C.f", 5) is None


def test_there_must_be_room_for_the_headers_of_the_classes() -> None:
    assert function_alone(["    def f(self): pass\n"], "C.f", 1) is None
    assert function_alone(["    def f(self): pass\n"], "C.f", 2) is not None


def test_the_lines_keep_their_numbers() -> None:
    text = text_alone(["      def f(self):\n", "        pass\n"], "A.B.f", 12)
    assert text.count("\n") == 13
    assert text.splitlines()[9:12] == ["class A:", " class B:", "      def f(self):"]


def test_a_backslash_in_front_of_a_function_does_no_harm() -> None:
    text = ModuleText("m", "m.py", "m.py", "class C:\n    \\\n  def f(self, a):\n        b = a\n")
    node = text.tree.body[0].body[0]  # type: ignore[attr-defined]
    assert {s.get_name() for s in symbols_of(text, "C.f", node).get_symbols()} == {"self", "a", "b"}


def test_names_in_annotations_are_no_symbols_where_they_are_not_evaluated() -> None:
    body = "def f(a: A) -> B:\n    b: D = 1\n"
    for head, more in (("from __future__ import annotations\n\n", set()), ("x = 1\n\n", set())):
        text = ModuleText("m", "m.py", "m.py", head + body)
        node = text.tree.body[-1]
        assert isinstance(node, ast.FunctionDef)
        names = set(every(symbols_of(text, "f", node)))
        assert names == set(every(in_whole(text, "f"))) | more


@pytest.mark.parametrize(
    ("head", "evaluated"),
    [
        ("from __future__ import (\n    annotations,\n)\n", []),
        ("from __future__ import \\\n annotations as a, division\n", []),
        ("'a doc'; from __future__ import annotations\n", []),
        ("# from __future__ import annotations\nannotations = 1\n", ["D"]),
        ("from __future__ import division\nfrom a import annotations\n", ["D"]),
    ],
)
def test_annotations_are_evaluated_later_however_that_is_written(head: str, evaluated: list[str]) -> None:
    body = "class C:\n    def f(self, a: A):\n        b: B = 1\n        def g(d: D): pass\n"
    text = ModuleText("m", "m.py", "m.py", head + body)
    node = text.tree.body[-1].body[0]  # type: ignore[attr-defined]
    assert set(every(symbols_of(text, "C.f", node))) == set(every(in_whole(text, "C.f")))
    assert [name for name in every(symbols_of(text, "C.f", node)) if name == "D"] == evaluated


def test_the_symbols_of_what_parses_and_does_not_compile_are_refused() -> None:
    text = ModuleText("m", "m.py", "m.py", "def f():\n    print(a)\n    global a\n")
    node = text.tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    with pytest.raises(PatchError) as caught:
        symbols_of(text, "f", node)
    assert [(failure.code, failure.line) for failure in caught.value.failures] == [("BP508", 3)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
def test_the_type_parameters_of_its_classes_are_names_around_a_function() -> None:
    text = ModuleText("m", "m.py", "m.py", "class C[T]:\n class D[U]:\n  def f[V](self): return T, U, V\n")
    node = text.tree.body[0].body[0].body[0]  # type: ignore[attr-defined]
    free = {symbol.get_name() for symbol in symbols_of(text, "C.D.f", node).get_symbols() if symbol.is_free()}
    assert free == {"T", "U", "V"}


def test_what_the_compiler_warns_of_is_not_said_again() -> None:
    text = ModuleText("m", "m.py", "m.py", "def f():\n    return 1 is 1, '\\d'\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        node = text.tree.body[0]
        assert isinstance(node, ast.FunctionDef)
        code_alone(text.tree, "f", node, "m.py")


def test_what_parses_and_does_not_compile_is_an_error() -> None:
    text = ModuleText("m", "m.py", "m.py", "def f():\n    global a\n    nonlocal a\n")
    node = text.tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    with pytest.raises(SyntaxError):
        code_alone(text.tree, "f", node, "m.py")
