"""Proof that the text on disk is the code that runs, and every way in which it can be something else."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from balance_patcher.errors import PatchError
from balance_patcher.proof import compile_text, find_code, inner_functions, prove, same_code
from balance_patcher.source import DirSource, Lane
from balance_patcher.targets import Target, find_target

NUMBERS = itertools.count()

ENGINE = """
    SCALE = 2

    class Engine:
        rate = 1

        def step(self, x):
            "What it does."
            total = x * SCALE + 1
            for n in range(total):
                if n in (1, 2.0, "three"):
                    total += (lambda y: y + n)(n)
            return total

        def other(self, x):
            return x


    def run(x):
        return x
"""

WRAPPERS = """
    import functools

    def wrapped(function):
        @functools.wraps(function)
        def around(*args, **keywords):
            return function(*args, **keywords)
        return around

    def closed(function):
        def around(self, *args):
            return function(self, *args)
        return around

    def kept_as_default(function):
        def around(self, *args, _function=function):
            return _function(self, *args)
        return around

    def kept_as_first_default(function):
        def around(self, x=0, function=function):
            return function(self, x)
        return around

    def kept_as_attribute(function):
        def around(self, *args):
            return around.upstream(self, *args)
        around.upstream = function
        return around

    ORIGINAL = None

    def kept_in_the_module(function):
        global ORIGINAL
        ORIGINAL = function
        def around(self, *args):
            return ORIGINAL(self, *args)
        return around

    class Caller:
        def __init__(self, function):
            self.function = function

        def __call__(self, *args):
            return self.function(*args)

        def method(self, *args):
            return self.function(*args)

    class Slotted:
        __slots__ = ("function",)

        def __init__(self, function):
            self.function = function

        def __call__(self, *args):
            return self.function(*args)

    def foreign(self, x):
        return -x

    CLOSURE = 1
"""


class Live:
    def __init__(self, root, module):
        self.root, self.name, self.file = root, module, root.joinpath(*module.split(".")).with_suffix(".py")

    @property
    def module(self):
        return importlib.import_module(self.name)

    def target(self, qualname="Engine.step") -> Target:
        found = find_target(Lane("live", DirSource("dir", self.root)), f"{self.name}:{qualname}")
        assert isinstance(found, Target), found
        return found

    def prove(self, qualname="Engine.step") -> types.FunctionType:
        """What ``build`` does for a target: the text as it is now, the attribute as it is now."""
        target = self.target(qualname)
        outer, _, last = qualname.rpartition(".")
        owner = functools.reduce(getattr, filter(None, outer.split(".")), self.module)
        return prove(target.text, qualname, target.node, vars(owner)[last])

    def refused(self, qualname="Engine.step") -> PatchError:
        with pytest.raises(PatchError) as error:
            self.prove(qualname)
        return error.value


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write modules into a package that no other test has; the first one is handed back."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(text=ENGINE, *, module="engine", package=None, **others) -> Live:
        name = package or f"proven_{os.getpid()}_{next(NUMBERS)}"
        made.append(name)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        for stem, content in {module: text, **others}.items():
            (folder / f"{stem}.py").write_text(textwrap.dedent(content).replace("PACKAGE", name))
        importlib.invalidate_caches()
        return Live(tmp_path, f"{name}.{module}")

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in made]:
        del sys.modules[name]


@pytest.fixture
def wrappers(package):
    """A foreign module: somebody else's patch."""
    return package(WRAPPERS, module="wrappers").module


def codes(error: PatchError) -> list[str]:
    return [failure.code for failure in error.failures]


def line_of(module, text) -> int:
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


# -- what is proven -----------------------------------------------------------------------------


@pytest.mark.parametrize("qualname", ["Engine.step", "Engine.other", "run"])
def test_an_untouched_function_is_proven(qualname, package):
    live = package()
    assert live.prove(qualname) is functools.reduce(getattr, qualname.split("."), live.module)


def test_a_hot_function_is_proven(package):
    live = package()
    for _ in range(3000):
        live.module.Engine().step(3)
    assert live.prove() is live.module.Engine.step


def test_columns_and_the_file_name_do_not_matter(package):
    live = package()
    other = compile_text(live.file.read_text().replace("x * SCALE + 1", "x  *  SCALE  +  1"), "elsewhere.py")
    found = find_code(other, "Engine.step", live.target().node.lineno)
    assert same_code(found, live.module.Engine.step.__code__)
    assert found.co_filename != live.module.Engine.step.__code__.co_filename


# -- edited after the import --------------------------------------------------------------------

EDITS = {
    "a constant": ("SCALE + 1", "SCALE + 2"),
    "its type": ("SCALE + 1", "SCALE + 1.0"),
    "a constant in a tuple": ("(1, 2.0,", "(1, 2,"),
    "a nested function": ("y + n", "y - n"),
    "an operator": ("x * SCALE", "x + SCALE"),
    "a name": ("x * SCALE", "x * RATE"),
    "a local": ("total", "all_of_it"),
    "a docstring": ("What it does", "What it did"),
    "a parameter": ('self, x):\n        "What', 'self, x, y=1):\n        "What'),
    "a line above": ("class Engine:", "UNUSED = 1\nclass Engine:"),
    "a comment above": ("class Engine:", "# a comment\nclass Engine:"),
    "a comment inside": ("        total = x", "        # a comment\n        total = x"),
    "a blank line inside": ("        total = x", "\n        total = x"),
    "a decorator": ("    def step", "    @property\n    def step"),
    "async": ("    def step", "    async def step"),
    "a yield": ("return total", "yield total"),
    "nothing compiled": ("class Engine:", "if __debug__ is None:\n  pass\nclass Engine:"),
}
HARMLESS = {
    "a comment on a line": ("total = x * SCALE + 1", "total = x * SCALE + 1  # a comment"),
    "spaces": ("total = x * SCALE + 1", "total  =  x * SCALE + 1"),
    "parentheses": ("total = x * SCALE + 1", "total = ((x * SCALE) + 1)"),
    "quotes": ('"three"', "'three'"),
    "something below": ("def run(x):", "def run(x, y):"),
    "indentation": ("for n in range(total):\n            if n in", "for n in range(total):\n           if n in"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_edited_after_its_import_is_refused_by_name(edit, package):
    live = package()
    assert live.prove()
    old, new = EDITS[edit]
    text = live.file.read_text()
    assert old in text
    live.file.write_text(text.replace(old, new))
    error = live.refused()
    assert codes(error) == ["BP601"]
    name = "Engine.step" if sys.version_info >= (3, 11) else "step"
    assert f"{live.name}.{name} ({live.file}:7)" in str(error)
    assert "restart" in error.failures[0].next


@pytest.mark.parametrize("edit", HARMLESS)
def test_what_does_not_reach_the_code_is_not_refused(edit, package):
    live = package()
    assert live.prove()
    old, new = HARMLESS[edit]
    text = live.file.read_text()
    assert old in text
    indented = text.replace(old, new)
    if edit == "indentation":
        indented = indented.replace("                total +=", "               total +=")
    live.file.write_text(indented)
    assert live.prove() is live.module.Engine.step


def test_an_edited_file_is_found_through_a_symbolic_link(package, tmp_path):
    live = package()
    assert live.prove()
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    live.file.write_text(live.file.read_text().replace("SCALE + 1", "SCALE + 2"))
    assert codes(Live(link, live.name).refused()) == ["BP601"]


def test_a_live_code_object_that_was_exchanged_is_refused(package, wrappers):
    live = package()
    step = live.module.Engine.step
    step.__code__ = step.__code__.replace(co_consts=tuple(9 if c == 1 else c for c in step.__code__.co_consts))
    assert codes(live.refused()) == ["BP601"]
    step.__code__ = wrappers.foreign.__code__
    assert codes(live.refused()) == ["BP603"]


# -- wrapped ------------------------------------------------------------------------------------

WAYS = ["wrapped", "closed", "kept_as_default", "kept_as_first_default", "kept_as_attribute", "kept_in_the_module"]


@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_wrapper_is_named_with_module_file_and_line(way, package, wrappers):
    live = package()
    live.module.Engine.step = getattr(wrappers, way)(live.module.Engine.step)
    error = live.refused()
    assert codes(error) == ["BP602"]
    around = live.module.Engine.step
    assert f"{wrappers.__name__}." in error.failures[0].what
    assert f"around ({wrappers.__file__}:{around.__code__.co_firstlineno})" in error.failures[0].what
    assert wrappers.__name__ in error.failures[0].next
    assert f"{live.name}:Engine.step" in str(error)


@pytest.mark.parametrize("inner", [way for way in WAYS if way != "kept_in_the_module"])
@pytest.mark.parametrize("outer", WAYS)
def test_of_wrappers_in_wrappers_each_is_named_the_outermost_first(outer, inner, package, wrappers):
    live = package()
    one = getattr(wrappers, inner)(live.module.Engine.step)
    live.module.Engine.step = two = getattr(wrappers, outer)(one)
    error = live.refused()
    assert codes(error) == ["BP602"]
    at = [error.failures[0].what.index(f"around ({wrappers.__file__}:{f.__code__.co_firstlineno})") for f in (two, one)]
    assert at == sorted(at)


def test_a_wrapper_behind_another_that_calls_by_a_name_of_its_module_is_still_a_replacement(package, wrappers):
    """Names are followed from the outermost function only; what is behind them is refused all the same."""
    live = package()
    live.module.Engine.step = outer = wrappers.closed(wrappers.kept_in_the_module(live.module.Engine.step))
    error = live.refused()
    assert codes(error) == ["BP603"]
    assert f"{wrappers.__file__}:{outer.__code__.co_firstlineno}" in error.failures[0].what


def test_a_wrapper_is_not_passed_over_by_an_attribute_that_was_copied_from_it(package, wrappers):
    live = package(DECORATED.replace("DECORATORS", "@with_wraps"), helpers=HELPERS)
    module = live.module
    module.Engine.step = module.with_wraps(wrappers.kept_as_attribute(module.Engine.step.__wrapped__))
    assert module.Engine.step.upstream
    assert codes(live.refused()) == ["BP602"]


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda w, f: w.Caller(f), "wrappers.Caller"),
        (lambda w, f: w.Slotted(f), "wrappers.Slotted"),
        (lambda w, f: w.Caller(f).method, "wrappers.Caller.method"),
        (lambda w, f: functools.partial(f), "functools.partial"),
        (lambda w, f: functools.partial(w.foreign, f), "wrappers.foreign"),
        (lambda w, f: functools.partialmethod(f), "functools.partialmethod"),
        (lambda w, f: functools.lru_cache(f), "functools._lru_cache_wrapper"),
        (lambda w, f: property(f), "property"),
        (lambda w, f: staticmethod(f), "staticmethod"),
        (lambda w, f: classmethod(f), "classmethod"),
        (lambda w, f: staticmethod(w.closed(f)), "wrappers.closed"),
        (lambda w, f: types.MethodType(f, object()), "method"),
        (lambda w, f: mock.Mock(wraps=f), "mock.Mock"),
    ],
)
def test_an_object_around_upstreams_function_is_named(wrap, named, package, wrappers):
    live = package()
    live.module.Engine.step = wrap(wrappers, live.module.Engine.step)
    error = live.refused()
    assert codes(error) == ["BP602"]
    assert named.replace("closed", "closed.<locals>.around" if sys.version_info >= (3, 11) else "around").replace(
        "Caller.method", "Caller.method" if sys.version_info >= (3, 11) else "method"
    ) in error.failures[0].what  # fmt: skip


@pytest.mark.parametrize(("kind", "way"), [("Caller", "__call__"), ("Slotted", "__call__")])
def test_the_line_of_a_callable_object_is_that_of_its_call(kind, way, package, wrappers):
    live = package()
    live.module.Engine.step = getattr(wrappers, kind)(live.module.Engine.step)
    line = vars(getattr(wrappers, kind))[way].__code__.co_firstlineno
    assert f"{wrappers.__name__}.{kind} ({wrappers.__file__}:{line})" in str(live.refused())


def test_a_wrapper_around_an_edited_function_is_both(package, wrappers):
    live = package()
    live.module.Engine.step = wrappers.wrapped(live.module.Engine.step)
    live.file.write_text(live.file.read_text().replace("SCALE + 1", "SCALE + 2"))
    assert codes(live.refused()) == ["BP602", "BP601"]


def test_an_object_that_answers_everything_does_not_hold_up_the_search(package):
    live = package()
    live.module.Engine.step = mock.MagicMock()
    assert codes(live.refused()) == ["BP604"]


def test_an_object_that_fails_when_it_is_looked_at_is_refused_like_any_other(package):
    class Hostile:
        __slots__ = ("empty",)

        def __getattr__(self, name):
            raise RuntimeError(name)

        def __call__(self):
            raise NotImplementedError

    live = package()
    live.module.Engine.step = Hostile()
    assert codes(live.refused()) == ["BP604"]


# -- replaced -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "code", "named"),
    [
        (lambda live, w: w.foreign, "BP603", "wrappers.foreign"),
        (lambda live, w: lambda self, x: x, "BP603", "<lambda>"),
        (lambda live, w: live.module.Engine.other, "BP603", "other"),
        (lambda live, w: live.module.run, "BP603", "run"),
        (lambda live, w: staticmethod(w.foreign), "BP603", "wrappers.foreign"),
        (lambda live, w: len, "BP604", "builtin_function_or_method"),
        (lambda live, w: dict.get, "BP604", "method_descriptor"),
        (lambda live, w: w.Caller(w.foreign), "BP604", "wrappers.Caller"),
        (lambda live, w: functools.partial(w.foreign), "BP604", "wrappers.foreign"),
        (lambda live, w: w.Caller, "BP604", "type"),
        (lambda live, w: 3, "BP604", "int"),
        (lambda live, w: None, "BP604", "NoneType"),
    ],
    ids=["function", "lambda", "another method", "another function", "static", "builtin", "descriptor", "object",
         "partial", "class", "number", "nothing"],
)  # fmt: skip
def test_a_foreign_replacement_is_refused_by_name(make, code, named, package, wrappers):
    live = package()
    live.module.Engine.step = replacement = make(live, wrappers)
    error = live.refused()
    assert codes(error) == [code]
    named = named if sys.version_info >= (3, 11) else named.replace("wrappers.Caller.", "")
    assert named in error.failures[0].what
    if isinstance(replacement, types.FunctionType):
        at = replacement.__code__
        assert f"({at.co_filename}:{at.co_firstlineno})" in error.failures[0].what


def test_equal_code_on_other_globals_is_a_replacement(package):
    """The same file, executed a second time: its names are not those that upstream's other modules see."""
    live = package()
    copy = types.ModuleType("copy_of_it")
    exec(compile(live.file.read_text(), str(live.file), "exec", dont_inherit=True), copy.__dict__)  # noqa: S102
    assert same_code(copy.Engine.step.__code__, live.module.Engine.step.__code__)
    live.module.Engine.step = copy.Engine.step
    error = live.refused()
    assert codes(error) == ["BP603"]
    assert "copy_of_it" in error.failures[0].what


def test_the_same_function_in_a_module_that_was_reloaded_is_proven(package):
    live = package()
    module = live.module
    importlib.reload(module)
    assert live.prove() is module.Engine.step


# -- upstream's own decorators ------------------------------------------------------------------

DECORATED = """
    import functools
    from PACKAGE.helpers import elsewhere

    def with_wraps(function):
        @functools.wraps(function)
        def around(*args):
            return function(*args)
        return around

    def without(function):
        def around(*args):
            return function(*args)
        return around

    def made_of(rate):
        return without

    def nothing(function):
        return function

    class Engine:
        DECORATORS
        def step(self, x):
            return x
"""
HELPERS = """
    def elsewhere(function):
        def around(*args):
            return function(*args)
        return around
"""


@pytest.mark.parametrize(
    "decorators",
    ["@with_wraps", "@without", "@made_of(3)", "@nothing", "@elsewhere", "@staticmethod", "@classmethod",
     "@with_wraps\n        @without\n        @elsewhere", "@staticmethod\n        @without",
     "@classmethod\n        @with_wraps"],
    ids=lambda text: " ".join(text.split()),
)  # fmt: skip
def test_under_upstreams_own_decorator_the_inner_function_is_proven(decorators, package):
    live = package(DECORATED.replace("DECORATORS", decorators), helpers=HELPERS)
    found = live.prove()
    assert (found.__code__.co_name, found.__code__.co_varnames) == ("step", ("self", "x"))
    assert found.__code__.co_firstlineno == line_of(live.module, decorators.split()[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_wrapper_around_upstreams_decorator_is_refused(way, package, wrappers):
    live = package(DECORATED.replace("DECORATORS", "@without"), helpers=HELPERS)
    live.module.Engine.step = getattr(wrappers, way)(live.module.Engine.step)
    error = live.refused()
    assert codes(error) == ["BP602"]
    assert wrappers.__file__ in error.failures[0].what
    assert live.name + ".without" not in error.failures[0].what


def test_a_foreign_wrapper_under_upstreams_decorator_is_refused(package, wrappers):
    live = package(DECORATED.replace("DECORATORS", "@with_wraps"), helpers=HELPERS)
    module = live.module
    module.Engine.step = module.with_wraps(wrappers.closed(module.Engine.step.__wrapped__))
    assert codes(live.refused()) == ["BP602"]


def test_upstreams_decorator_put_on_at_run_time_is_refused(package):
    """It is not in the text, so what runs is not what the text says."""
    live = package(DECORATED.replace("DECORATORS", ""), helpers=HELPERS)
    live.module.Engine.step = live.module.without(live.module.Engine.step)
    assert codes(live.refused()) == ["BP602"]


def test_a_file_edited_under_upstreams_decorator_is_refused(package):
    live = package(DECORATED.replace("DECORATORS", "@without"), helpers=HELPERS)
    assert live.prove()
    live.file.write_text(live.file.read_text().replace("return x", "return -x"))
    assert codes(live.refused()) == ["BP601"]


# -- equality of code ---------------------------------------------------------------------------


def code_of(text, name="f") -> types.CodeType:
    return find_code(compile_text(textwrap.dedent(text), "text.py"), name, 1)


def function_of(expression) -> types.CodeType:
    return code_of(f"def f(x, y):\n    return {expression}\n")


DIFFERENT = [
    ("1", "True"), ("1", "1.0"), ("0", "False"), ("0.0", "-0.0"), ("0j", "-0j"), ("1", "1j"), ("''", "b''"),
    ("(1, 2)", "(1, 2.0)"), ("(1, (0.0, 2))", "(1, (-0.0, 2))"), ("x in {1, 2}", "x in {1, 2.0}"),
    ("x in {1, 2}", "x in {1, 2, 3}"), ("x in {1, 2}", "x in (1, 2)"), ("x in {'a', ()}", "x in {'b', ()}"),
    ("None", "..."), ("x.a", "x.b"), ("x.a", "y.a"), ("g(x)", "h(x)"), ("g(a=1)", "g(b=1)"), ("x + y", "x - y"),
    ("x == y", "x >= y"), ("lambda: 1", "lambda: 2"), ("lambda z: 1", "lambda w: 1"), ("lambda: x", "lambda: y"),
    ("[a for a in x]", "[a for a in y]"), ("[lambda: 1 for a in x]", "[lambda: True for a in x]"),
    ("(lambda: (lambda: 1))", "(lambda: (lambda: 1.0))"), ("1e308 * 10", "-1e308 * 10"),
    ("g(\n1)", "g(1\n)"), ("lambda *a: 0", "lambda **a: 0"), ("lambda a, /: 0", "lambda a: 0"),
    ("lambda a: 0", "lambda *, a: 0"), ("(yield)", "None"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_code_that_differs_in_anything_but_columns_is_not_the_same(one, other):
    assert not same_code(function_of(one), function_of(other))
    assert not same_code(function_of(other), function_of(one))


@pytest.mark.parametrize("one", sorted({text for pair in DIFFERENT for text in pair}))
def test_code_compiled_twice_is_the_same(one):
    compile_text.cache_clear()
    first = function_of(one)
    compile_text.cache_clear()
    assert first is not (second := function_of(one))
    assert same_code(first, second)
    assert same_code(second, first)


@pytest.mark.parametrize(
    ("one", "other"),
    [("x+y", "x  +  y"), ("(x)", "x"), ("'a'", '"a"'), ("0x10", "16"), ("g( x )", "g(x)"), ("'a' 'b'", "'ab'"),
     ("x in {1, 2, 'a'}", "x in {'a', 2, 1}"), ("1_000", "1000"), ("x  # a comment", "x")],
)  # fmt: skip
def test_columns_spelling_and_the_order_of_a_set_do_not_matter(one, other):
    assert same_code(function_of(one), function_of(other))


SAMPLE = """
    def f(a, b=1, /, c=2, *d, e, **g):
        cell = a
        try:
            def inner(x):
                return cell + x
            return inner(b) in {1, 2}, "text", (1, (2.0, None))
        except ValueError:
            return global_name.attribute
"""
MUTANTS: dict[str, Callable[[types.CodeType], dict[str, object]]] = {
    "co_name": lambda code: {"co_name": "other"},
    "co_qualname": lambda code: {"co_qualname": "other"},
    "co_argcount": lambda code: {"co_argcount": code.co_argcount - 1, "co_posonlyargcount": 1},
    "co_posonlyargcount": lambda code: {"co_posonlyargcount": 1},
    "co_kwonlyargcount": lambda code: {"co_kwonlyargcount": 0},
    "co_stacksize": lambda code: {"co_stacksize": code.co_stacksize + 1},
    "co_flags": lambda code: {"co_flags": code.co_flags ^ 0x01000000},
    "co_names": lambda code: {"co_names": ("other", *code.co_names[1:])},
    "co_varnames": lambda code: {"co_varnames": (*code.co_varnames[:-1], "other")},
    "co_cellvars": lambda code: {"co_cellvars": tuple("other" for _ in code.co_cellvars)},
    "co_freevars": lambda code: {"co_freevars": ("other",)},
    "co_firstlineno": lambda code: {"co_firstlineno": code.co_firstlineno + 1},
    "co_code": lambda code: {"co_code": code.co_code[:-2] + bytes([code.co_code[-2] ^ 1, 0])},
    "co_exceptiontable": lambda code: {"co_exceptiontable": b""},
    "co_consts": lambda code: {"co_consts": (*code.co_consts, None)},
    "co_consts, a type": lambda code: {"co_consts": tuple(b"text" if c == "text" else c for c in code.co_consts)},
    "co_consts, inside": lambda code: {
        "co_consts": tuple((1, (2, None)) if c == (1, (2.0, None)) else c for c in code.co_consts)
    },
    "co_consts, a set": lambda code: {
        "co_consts": tuple(frozenset({1, True + 2}) if isinstance(c, frozenset) else c for c in code.co_consts)
    },
    "co_consts, nested code": lambda code: {
        "co_consts": tuple(c.replace(co_name="other") if isinstance(c, types.CodeType) else c for c in code.co_consts)
    },
    "co_lines": lambda code: {
        "co_linetable" if hasattr(code, "co_linetable") else "co_lnotab": _other_lines(code)
    },
}  # fmt: skip


def _other_lines(code) -> bytes:
    """The line table of the same function with its last line one further down."""
    text = textwrap.dedent(SAMPLE).replace("        return global", "\n        return global")
    return code_of("def f" + text.partition("def f")[2]).co_linetable


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_attribute_of_code_counts(mutant):
    code = code_of("def f" + textwrap.dedent(SAMPLE).partition("def f")[2])
    attribute = mutant.partition(",")[0]
    if attribute not in ("co_lines", "co_linetable") and not hasattr(code, attribute):
        pytest.skip(f"this Python has no {attribute}")
    change = MUTANTS[mutant](code)
    if attribute == "co_freevars":
        inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
        assert inner.co_freevars
        changed, code = inner.replace(co_freevars=("other",)), inner
    else:
        changed = code.replace(**change)
    assert same_code(code, code.replace())
    assert not same_code(code, changed)
    assert not same_code(changed, code)


def test_the_file_name_and_the_columns_are_all_that_is_left_out():
    code = code_of("def f" + textwrap.dedent(SAMPLE).partition("def f")[2])
    assert same_code(code, code.replace(co_filename="elsewhere"))
    known = {
        "co_name", "co_qualname", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals",
        "co_stacksize", "co_flags", "co_names", "co_varnames", "co_cellvars", "co_freevars", "co_firstlineno",
        "co_code", "co_consts", "co_exceptiontable", "co_lines",
    }  # fmt: skip
    derived = {"co_linetable", "co_lnotab", "co_positions", "co_filename", "co_branches"}
    assert {name for name in dir(code) if name.startswith("co_")} - known - derived - {"_co_code_adaptive"} == set()


# -- finding the code ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qualname", "line", "found"),
    [("A.f", 2, True), ("A.B.f", 5, True), ("A.f", 5, False), ("f", 8, True), ("f", 2, False), ("A.g", 2, False),
     ("C.f", 2, False), ("d", 10, True), ("d", 11, False)],
)  # fmt: skip
def test_code_is_found_by_its_qualified_name_and_first_line(qualname, line, found):
    text = "class A:\n def f(): 1\n class B:\n\n  def f(): 2\n\n\ndef f(): 3\n\n@cache\ndef d(): 4\n"
    code = find_code(compile_text(text, "text.py"), qualname, line)
    assert (code is not None) is found
    assert code is None or (code.co_name, code.co_firstlineno) == (qualname.rpartition(".")[2], line)


def test_the_functions_behind_a_wrapper_are_listed_without_the_wrapper(package, wrappers):
    step = package().module.Engine.step
    outer = wrappers.closed(middle := wrappers.kept_as_default(step))
    assert list(inner_functions(outer)) == [middle, step]
    assert list(inner_functions(step)) == []


def test_of_two_definitions_in_one_class_the_line_decides():
    module = compile_text("class A:\n if x:\n  def f(): 1\n else:\n  def f(): 2\n", "text.py")
    assert find_code(module, "A.f", 3).co_firstlineno == 3
    assert find_code(module, "A.f", 5).co_firstlineno == 5


def test_warnings_of_upstreams_text_stay_silent():
    compile_text("x = 1 is 1\ny = '\\d'\nassert (x, 'always true')\n", "text.py")


def test_our_own_future_imports_are_not_inherited():
    code = compile_text("def f(x: int): pass\n", "text.py")
    assert not code.co_flags & __import__("__future__").annotations.compiler_flag
