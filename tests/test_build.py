"""Rebuilt functions on live objects: what stays the same object, what runs, and what is refused.

Every test writes a package of its own into a folder, imports it for real, and builds against it.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import inspect
import itertools
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from balance_patcher.build import Built, build
from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    InsertAfter,
    InsertBefore,
    Prologue,
    Replace,
    Variant,
)
from balance_patcher.errors import PatchError
from balance_patcher.feature import CalledOnce, Feature, RuntimeClass, Sets
from balance_patcher.plan import make_plan
from balance_patcher.source import DirSource, Lane
from balance_patcher.through import through_text

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = itertools.count()


class Live:
    """An imported package of one module, and a lane that reads its text."""

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.package, self.name = root, package, f"{package}.engine"
        self.file = root / package / "engine.py"

    @property
    def lane(self) -> Lane:
        return Lane("live", DirSource(f"dir:{self.root}", self.root))

    @property
    def module(self):
        return importlib.import_module(self.name)

    def delta(self, qualname, *edits, anchor=None, name="made.edit", exports=None, after=()):
        variant = Variant("only", Anchor(anchor) if anchor else None, edits, exports or {})
        target = f"{self.name}:{qualname}"
        return Delta(name, target, "why", "upstream", "remove when", (variant,), after=after)

    def feature(self, *deltas, runtime=None, invariants=()):
        return Feature("made", "made for a test", deltas, runtime, invariants)

    def runtime(self, make, base="Engine", provides=()):
        return RuntimeClass("Ours", f"{self.name}:{base}", make, frozenset(provides))

    def build(self, *deltas, **keywords) -> Built:
        return build(self.feature(*deltas, **keywords), self.lane)

    def edited(self, qualname, *edits, **keywords) -> types.FunctionType:
        """The function that one delta makes of a target."""
        return self.build(self.delta(qualname, *edits, **keywords)).functions[f"{self.name}:{qualname}"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write one module of upstream's, in a package that no other test has, and make it importable."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(text):
        live = Live(tmp_path, f"upstream_{os.getpid()}_{next(NUMBERS)}")
        made.append(live.package)
        live.file.parent.mkdir()
        (live.file.parent / "__init__.py").write_text("")
        live.file.write_bytes(textwrap.dedent(text).encode() if isinstance(text, str) else text)
        importlib.invalidate_caches()
        return live

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in made]:
        del sys.modules[name]


def codes(error) -> list[str]:
    return [failure.code for failure in error.value.failures]


LOG = Prologue("self.log.append('ours')")


# -- the same objects ---------------------------------------------------------------------------

WITH_EVERYTHING = """
    class Engine:
        def __init__(self):
            self.log = []

        def step(self, first: int, second: "str" = [], *, third: "list[int]" = {}, fourth=None) -> "dict":
            "What a step does."
            return first, second, third, fourth
"""


@pytest.mark.parametrize(
    "attribute",
    ["__defaults__", "__kwdefaults__", "__dict__", "__annotations__", "__globals__", "__doc__", "__module__"],
)
def test_what_hangs_on_upstreams_function_is_the_same_object_on_ours(attribute, package):
    live = package(WITH_EVERYTHING)
    upstream = live.module.Engine.step
    upstream.note = ["kept"]
    ours = live.edited("Engine.step", LOG)
    assert ours is not upstream
    assert getattr(upstream, attribute)
    assert getattr(ours, attribute) is getattr(upstream, attribute)


def test_the_name_and_the_signature_are_upstreams(package):
    live = package(WITH_EVERYTHING)
    ours, upstream = live.edited("Engine.step", LOG), live.module.Engine.step
    assert (ours.__name__, ours.__qualname__) == (upstream.__name__, upstream.__qualname__) == ("step", "Engine.step")
    assert inspect.signature(ours) == inspect.signature(upstream)


def test_the_module_that_upstream_gives_its_function_is_kept(package):
    live = package(WITH_EVERYTHING)
    live.module.Engine.step.__module__ = "upstream.shown"
    assert live.edited("Engine.step", LOG).__module__ == "upstream.shown"


def test_a_default_changed_on_the_live_function_is_the_one_that_is_used(package):
    live = package(WITH_EVERYTHING)
    live.module.Engine.step.__defaults__ = ("changed",)
    assert live.edited("Engine.step", LOG)(live.module.Engine(), 1)[1] == "changed"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are PEP 695, Python 3.12")
@pytest.mark.parametrize(
    "text",
    [
        "class Engine:\n    log = []\n    def step[T](self, x: T) -> T:\n        return x, T\n",
        "class Engine[T]:\n    log = []\n    def step(self, x: T) -> T:\n        return x, T\n",
        "class Engine[T]:\n    log = []\n    def step[U](self, x: T) -> U:\n        return x, [T, U], lambda: (T, U)\n",
        "class Engine:\n    log = []\n    class In: pass\n    def step[T](self, x: In) -> T:\n        return x, T\n",
    ],
    ids=["function", "class", "both", "annotated with a name of the class"],
)  # fmt: skip
def test_type_parameters_stay_upstreams_own(text, package):
    live = package(text)
    ours, upstream = live.edited("Engine.step", LOG), live.module.Engine.step
    engine = live.module.Engine()
    assert ours.__type_params__ is upstream.__type_params__
    assert repr(ours(engine, 7)[1]) == repr(upstream(engine, 7)[1])
    cells = dict(zip(upstream.__code__.co_freevars, upstream.__closure__, strict=True))
    assert cells
    for name, cell in zip(ours.__code__.co_freevars, ours.__closure__, strict=True):
        assert cell is cells[name]
    assert engine.log == ["ours"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are computed late from Python 3.14 on")
def test_annotations_are_computed_by_upstreams_own_function(package):
    text = "class Engine:\n    log = []\n    def step(self, x: Later) -> int:\n        return x\nclass Later: pass\n"
    live = package(text)
    ours, upstream = live.edited("Engine.step", LOG), live.module.Engine.step
    assert ours.__annotate__ is upstream.__annotate__
    assert ours.__annotations__ == {"x": live.module.Later, "return": int}


# -- the same behaviour -------------------------------------------------------------------------

# Bodies of `step(self, x)`; the class has `self.log`, a private name, a base, and the module a global.
MODULE = """
{future}
import functools

SCALE = 10


class Base:
    def step(self, x):
        return "base", x


class Engine(Base):
    __rate = 3

    def __init__(self):
        self.log = []
        self.__hidden = 5

    def __add(self, x):
        return x + self.__hidden

    def step(self, x):
{body}


class Private_(Engine):
    pass
"""

BODIES = {
    "private names": "return self.__add(x) * self.__rate",
    "a private name made here": "self.__new = x\nreturn self.__new, sorted(vars(self))",
    "a nested function": "def inner(y):\n    return x + y\nreturn inner(2)",
    "a nonlocal": "total = 0\ndef add():\n    nonlocal total\n    total += x\nadd(); add()\nreturn total",
    "a lambda": "return (lambda y, z=x: y * z)(4)",
    "comprehensions": "return [a + b for a in range(x) for b in (a, x)], {a: x for a in 'ab'}, {x}",
    "a generator inside": "def numbers():\n    yield from range(x)\nreturn list(numbers())",
    "a generator expression": "return sum(x * y for y in (1, 2, 3))",
    "a class inside": (
        "class Inner(Base):\n    def step(self, y):\n        return super().step(y + x)\nreturn Inner().step(1)"
    ),
    "its own super": "return super().step(x)",
    "its own class": "return __class__.__name__, super(__class__, self).step(x)",
    "super in a nested function": "def inner():\n    return super(Engine, self).step(x), __class__\nreturn inner()",
    "a global": "global SCALE\nSCALE = SCALE + 1\nSCALE -= 1\nreturn SCALE",
    "the module's names": "return functools.reduce(lambda a, b: a + b, [x, SCALE])",
    "a caught exception": (
        "try:\n    raise KeyError(x)\nexcept KeyError as error:\n    return error.args\nfinally:\n    x = 0"
    ),
    "a context manager": "import contextlib\nwith contextlib.suppress(ValueError):\n    raise ValueError\nreturn x",
    "a walrus": "if (y := x + 1) > 1:\n    return y",
    "a match": "match x:\n    case int(y) if y > 1:\n        return y\n    case _:\n        return None",
    "f-strings": "return f'{x!r:>5}' f\"{'nested' if x else ''}\"",
    "a text at column 0": "text = '''\nat column 0\n\\\n'''\nreturn text, x",
    "constants that are nearly equal": "return [0.0, -0.0, 1, True, 1.0, 0, False, None, ..., b'', '']",
    "a set of constants": "return x in {1, 2.0, 'a', None, (1, 2)}",
    "a docstring": "'What it does.'\nreturn x",
    "nothing at all": "pass",
}


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["plain", "future"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_rebuilt_function_does_what_upstreams_does_and_ours(body, future, package):
    # Not with textwrap.indent: it would move the text at column 0.
    lines, inside = [], False
    for line in body.splitlines():
        lines.append(line if inside else " " * 8 + line)
        inside ^= line.count("'''") % 2 == 1
    live = package(MODULE.replace("{future}", future).replace("{body}", "\n".join(lines)))
    ours = live.edited("Engine.step", LOG)
    for x in (0, 3):
        one, other = live.module.Private_(), live.module.Private_()
        expected = live.module.Engine.step(one, x)
        assert repr(ours(other, x)) == repr(expected)
        assert (one.log, other.log) == ([], ["ours"])


def test_private_names_in_a_deltas_text_are_those_of_upstreams_class(package):
    live = package(MODULE.replace("{future}", "").replace("{body}", "        return x"))
    engine = live.module.Engine()
    ours = live.edited("Engine.step", Prologue("self.log.append(self.__add(self.__rate))"))
    assert ours(engine, 1) == 1
    assert engine.log == [8]


def test_postponed_annotations_of_a_nested_function_stay_postponed(package):
    live = package(
        """
        from __future__ import annotations
        class Engine:
            log = []
            def step(self):
                def inner(x: Nowhere): pass
                return inner
        """
    )
    inner = live.edited("Engine.step", LOG)(types.SimpleNamespace(log=[]))
    assert inner.__annotations__ == {"x": "Nowhere"}


def test_a_class_inside_a_class_is_reached(package):
    live = package(
        """
        LOG = []
        class Outer:
            class Engine:
                rate = 2
                def step(self, x=rate):
                    return x, __class__
            class Other:
                def step(self, x=9):
                    return x
        """
    )
    ours = live.edited("Outer.Engine.step", Prologue("LOG.append(x)"))
    assert ours(live.module.Outer.Engine()) == (2, live.module.Outer.Engine)
    assert live.module.LOG == [2]


def test_a_function_of_the_module_can_be_a_target(package):
    live = package("LOG = []\ndef run(x, y=2):\n    return x * y\n")
    ours = live.edited("run", Prologue("LOG.append(x)"))
    assert (ours(3), live.module.LOG) == (6, [3])
    assert live.module.run(4) == 8
    assert live.module.LOG == [3]


def test_the_edits_of_all_kinds_run_where_they_are_put(package):
    live = package(
        """
        class Engine:
            log = []
            def step(self, x):
                for n in range(x):
                    if n == 3: break
                    assert n < 2
                return n
        """
    )
    engine = live.module.Engine()
    deltas = (
        live.delta("Engine.step", InsertBefore("self.log.append(('before', n))"),
                   InsertAfter("self.log.append(('after', n))"), anchor="if n == 3: break", name="made.around"),
        live.delta("Engine.step", Replace("if n >= 2:\n    break"), anchor="assert n < 2", name="made.instead"),
        live.delta("Engine.step", Prologue("self.log.append('first')"), name="made.first"),
    )  # fmt: skip
    ours = live.build(*deltas).functions[f"{live.name}:Engine.step"]
    assert ours(engine, 9) == 2
    pairs = [(word, n) for n in range(3) for word in ("before", "after")]
    assert engine.log == ["first", *pairs]


# -- super and the runtime class -----------------------------------------------------------------

SUPER = """
    class Root:
        def __init__(self, *args, **keywords):
            self.args, self.keywords, self.enabled = args, keywords, False

        def step(self, x):
            return ["root", x]


    class Engine(Root):
        def step(self, x):
            return ["engine", x]


    class Capturing(Root):
        def step(self, x):
            return ["capturing", *super().step(x)]

        def named(self, x):
            return __class__, x
"""

DISABLED = Prologue("if not self.enabled:\n    return ['disabled', *super().step($$$PARAMETERS)]")


def ours_of(upstream):
    class Ours(upstream):
        made_here = True

    return Ours


def test_super_in_a_delta_means_the_runtime_class(package):
    live = package(SUPER)
    built = live.build(live.delta("Engine.step", DISABLED), runtime=live.runtime(ours_of))
    ours = built.classes[f"{live.name}:Engine"]
    below = type("Below", (ours,), {"step": lambda self, x: ["below", *super(below, self).step(x)]})
    assert ours().step(1) == ["disabled", "engine", 1]
    assert below().step(1) == ["below", "disabled", "engine", 1]
    enabled = ours()
    enabled.enabled = True
    assert enabled.step(1) == ["engine", 1]


def test_super_in_a_delta_means_upstreams_class_where_there_is_no_runtime_class(package):
    live = package(SUPER)
    assert live.edited("Engine.step", DISABLED)(live.module.Engine(), 1) == ["disabled", "root", 1]


def test_upstreams_own_super_goes_on_to_mean_upstreams_class(package):
    """On the runtime class it would run upstream's method twice."""
    live = package(SUPER)
    delta = live.delta("Capturing.step", Prologue("print(end='')"))
    built = live.build(delta, runtime=live.runtime(ours_of, "Capturing"))
    ours = built.classes[f"{live.name}:Capturing"]
    assert ours().step(1) == ["capturing", "root", 1]
    assert vars(ours)["step"].__closure__[0] is live.module.Capturing.step.__closure__[0]


@pytest.mark.parametrize("method", ["step", "named"])
def test_a_delta_with_super_is_refused_where_upstream_captures_the_class(method, package):
    live = package(SUPER)
    with pytest.raises(PatchError) as error:
        live.edited(f"Capturing.{method}", Prologue(f"if self.enabled:\n    return super().{method}($$$PARAMETERS)"))
    assert codes(error) == ["BP304"]


def test_the_runtime_class_extends_upstreams_and_passes_any_arguments_to_it(package):
    live = package(SUPER)
    built = live.build(live.delta("Engine.step", DISABLED), runtime=live.runtime(ours_of))
    ours = built.classes[f"{live.name}:Engine"]
    assert ours.__bases__[0] is live.module.Engine
    assert ours.made_here
    made = ours(1, "two", three=3)
    assert (made.args, made.keywords) == ((1, "two"), {"three": 3})
    assert vars(ours)["step"] is built.functions[f"{live.name}:Engine.step"]
    assert vars(ours)["step"].__qualname__ == f"{ours.__qualname__}.step"
    assert built.originals[f"{live.name}:Engine.step"] is vars(live.module.Engine)["step"]


@pytest.mark.parametrize(
    "make",
    [lambda upstream: type("Ours", (), {}), lambda upstream: type("Ours", (object,), {}),
     lambda upstream: type("Ours", (type("Between", (upstream,), {}),), {}),
     lambda upstream: type("Ours", (type("Mixin", (), {}), upstream), {})],
    ids=["no base", "object", "a class between", "a mixin first"],
)  # fmt: skip
def test_a_runtime_class_with_another_first_base_is_refused(make, package):
    live = package(SUPER)
    with pytest.raises(PatchError) as error:
        live.build(live.delta("Engine.step", DISABLED), runtime=live.runtime(make))
    assert codes(error) == ["BP002"]


def test_methods_of_another_class_do_not_go_on_the_runtime_class(package):
    live = package(SUPER)
    deltas = live.delta("Engine.step", DISABLED), live.delta("Root.step", Prologue("print(end='')"), name="made.root")
    built = live.build(*deltas, runtime=live.runtime(ours_of))
    ours = built.classes[f"{live.name}:Engine"]
    assert vars(ours)["step"] is built.functions[f"{live.name}:Engine.step"]
    assert built.functions[f"{live.name}:Root.step"].__qualname__ == "Root.step"


EXPORTS = """
    LIMIT = 4
    def size(of): return len(of)

    class Root:
        kind = "root"

    class Engine(Root):
        kind = "engine"
        def __init__(self):
            self.enabled, self.running, self.__waiting, self.cap = True, [1, 2], [3], 7

        def step(self):
            if size(self.running) + len(self.__waiting) == self.cap: return LIMIT
            return super().kind
"""
EXPORTED = {"count": "$COUNT", "limit": "self.$CAP", "allowed": "LIMIT", "upstreams": "super().kind"}


def test_exports_are_methods_that_read_upstreams_live_globals(package, monkeypatch):
    live = package(EXPORTS)
    delta = live.delta("Engine.step", InsertBefore("print()"), anchor="if $COUNT == self.$CAP: $_", exports=EXPORTED)
    ours = live.build(delta, runtime=live.runtime(ours_of)).classes[f"{live.name}:Engine"]
    engine = ours()
    assert [engine.count(), engine.limit(), engine.allowed(), engine.upstreams()] == [3, 7, 4, "engine"]
    monkeypatch.setattr(live.module, "LIMIT", 5)
    monkeypatch.setattr(live.module, "size", lambda of: 100)
    assert [engine.count(), engine.allowed()] == [101, 5]
    assert ours.count.__globals__ is vars(live.module)
    assert "size(self.running) + len(self.__waiting)" in inspect.getsource(ours.count)


def test_an_export_gives_what_super_means_on_the_runtime_class_even_further_down(package):
    live = package(EXPORTS)
    delta = live.delta("Engine.step", InsertBefore("print()"), anchor="if $COUNT == self.$CAP: $_", exports=EXPORTED)
    ours = live.build(delta, runtime=live.runtime(ours_of)).classes[f"{live.name}:Engine"]
    assert type("Below", (ours,), {"kind": "below"})().upstreams() == "engine"


# -- added parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "calls"),
    [
        ("self", [((), {}, "None"), (("a",), {}, "a"), ((), {"extra": "b"}, "b")]),
        ("self, x", [((1,), {}, "None"), ((1, "a"), {}, "a"), ((1,), {"extra": "b"}, "b"), ((), {"x": 1}, "None")]),
        ("self, x=1", [((), {}, "None"), ((1, "a"), {}, "a")]),
        ("self, x, /", [((1,), {}, "None"), ((1, "a"), {}, "a"), ((1,), {"extra": "b"}, "b")]),
        ("self, *more", [((), {}, "None"), (("a", 2), {}, "a"), ((), {"extra": "b"}, "b")]),
        ("self, *, key=0", [((), {"key": 3}, "None"), (("a",), {}, "a"), ((), {"extra": "b"}, "b")]),
        ("self, x, *more, key=0, **rest", [((1,), {}, "None"), ((1, "a", 3), {"key": 2, "z": 1}, "a")]),
    ],
)
def test_an_added_parameter_has_its_default_and_can_be_given_either_way(signature, calls, package):
    live = package(f"class Engine:\n    def step({signature}):\n        return locals()\n")
    ours = live.edited("Engine.step", AddParameter("extra", "None"))
    for args, keywords, expected in calls:
        assert str(ours(object(), *args, **keywords)["extra"]) == expected
    assert live.module.Engine.step.__defaults__ != ours.__defaults__


@pytest.mark.parametrize("default", ["None", "-1", "'text'", "(1, 2.0)", "False"])
def test_the_default_of_an_added_parameter_is_the_literal(default, package):
    live = package("class Engine:\n    def step(self, x=3):\n        return x\n")
    assert live.edited("Engine.step", AddParameter("extra", default)).__defaults__ == (3, ast.literal_eval(default))


def test_two_added_parameters_stand_in_their_order(package):
    live = package("class Engine:\n    def step(self, x):\n        return locals()\n")
    deltas = (
        live.delta("Engine.step", AddParameter("one", "1"), name="made.one"),
        live.delta("Engine.step", AddParameter("two", "2"), name="made.two", after=("made.one",)),
    )
    ours = live.build(*deltas).functions[f"{live.name}:Engine.step"]
    assert str(inspect.signature(ours)) == "(self, x, one=1, two=2)"


# -- call through -------------------------------------------------------------------------------

THROUGH = """
    class Engine:
        def __init__(self):
            self.log, self.__hidden = [], "hidden"

        def note(self, *what):
            self.log.append(what)

        def step({signature}):
            self.log.append("upstream")
            {body}
"""

SIGNATURES = [
    ("self", (), {}),
    ("self, x", (1,), {}),
    ("self, x", (), {"x": 1}),
    ("self, x=1", (), {}),
    ("self, x, /, y", (1, 2), {}),
    ("self, x, /, y=2", (1,), {"y": 5}),
    ("self, /", (), {}),
    ("self, *more", (1, 2, 3), {}),
    ("self, x, *more, key, other=4", (1, 2), {"key": 3}),
    ("self, *, key=1", (), {"key": 2}),
    ("self, **rest", (), {"a": 1, "self_": 2}),
    ("self, x, /, **rest", (1,), {"x": 2}),
    ("self, x, /, y=2, *more, key=3, other, **rest", (1, 2, 3), {"other": 4, "z": 5}),
    ("self, x: 'int' = 1, *more: int, key: 'str' = 's', **rest: int", (), {"key": "t"}),
]


@pytest.mark.parametrize(("signature", "args", "keywords"), SIGNATURES)
def test_a_call_through_takes_and_passes_on_whatever_upstream_takes(signature, args, keywords, package):
    live = package(THROUGH.format(signature=signature, body="return locals()"))
    one, other = live.module.Engine(), live.module.Engine()
    upstream = live.module.Engine.step
    ours = live.edited("Engine.step", CallThrough("self.note('ours')"))
    expected, got = upstream(one, *args, **keywords), ours(other, *args, **keywords)
    expected.pop("self"), got.pop("self")
    assert got == expected
    assert other.log == ["upstream", ("ours",)]
    assert inspect.signature(ours) == inspect.signature(upstream)
    assert ours.__defaults__ is upstream.__defaults__
    assert ours.__kwdefaults__ is upstream.__kwdefaults__
    assert (ours.__name__, ours.__qualname__, ours.__module__) == ("step", "Engine.step", live.name)


@pytest.mark.parametrize(("signature", "args", "keywords"), SIGNATURES)
def test_a_call_through_refuses_the_arguments_that_upstream_refuses(signature, args, keywords, package):
    live = package(THROUGH.format(signature=signature, body="return locals()"))
    ours = live.edited("Engine.step", CallThrough("self.note('ours')"))
    for wrong_args, wrong_keywords in [((*args, 1, 2, 3, 4), keywords), (args, {**keywords, "nobody": 1}), ((), {})]:
        try:
            inspect.signature(live.module.Engine.step).bind(None, *wrong_args, **wrong_keywords)
        except TypeError:
            engine = live.module.Engine()
            with pytest.raises(TypeError):
                ours(engine, *wrong_args, **wrong_keywords)
            assert engine.log == []


@pytest.mark.parametrize(
    "value", ["None", "0", "False", "''", "[]", "object()", "NotImplemented", "(x for x in ())", "self"]
)
def test_upstreams_result_is_returned_as_the_same_object(value, package):
    live = package(THROUGH.format(signature="self", body=f"self.made = {value}; return self.made"))
    engine = live.module.Engine()
    assert live.edited("Engine.step", CallThrough("self.note('ours')"))(engine) is engine.made
    assert engine.log == ["upstream", ("ours",)]


RETURNS = """if x == 0: return "early"
            for n in range(x):
                if n == 2: return "in the loop"
            try:
                if x == 1: return "in try"
            finally:
                self.log.append("finally")"""


@pytest.mark.parametrize(("x", "expected"), [(0, "early"), (5, "in the loop"), (1, "in try"), (2, None)])
def test_ours_runs_once_on_every_return_path(x, expected, package):
    live = package(THROUGH.format(signature="self, x", body=RETURNS))
    engine = live.module.Engine()
    assert live.edited("Engine.step", CallThrough("self.note('ours')"))(engine, x) == expected
    assert [entry for entry in engine.log if entry != "finally"] == ["upstream", ("ours",)]


@pytest.mark.parametrize(
    "error", ["ValueError('x')", "KeyboardInterrupt", "SystemExit(3)", "GeneratorExit", "StopIteration"]
)
def test_ours_does_not_run_when_upstream_raises(error, package):
    live = package(THROUGH.format(signature="self", body=f"raise {error}"))
    engine = live.module.Engine()
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - which one is the parameter
        live.edited("Engine.step", CallThrough("self.note('ours')"))(engine)
    assert raised.type.__name__ == error.partition("(")[0]
    assert engine.log == ["upstream"]


def test_what_ours_raises_is_not_swallowed(package):
    live = package(THROUGH.format(signature="self", body="return 1"))
    with pytest.raises(ZeroDivisionError):
        live.edited("Engine.step", CallThrough("self.note(1 / 0)"))(live.module.Engine())


def test_several_call_throughs_run_in_their_order_after_one_call_of_upstream(package):
    live = package(THROUGH.format(signature="self", body="return 1"))
    engine = live.module.Engine()
    deltas = (
        live.delta("Engine.step", CallThrough("self.note('second')"), name="made.second", after=("made.first",)),
        live.delta("Engine.step", CallThrough("self.note('first')"), name="made.first"),
    )
    assert live.build(*deltas).functions[f"{live.name}:Engine.step"](engine) == 1
    assert engine.log == ["upstream", ("first",), ("second",)]


def test_ours_may_read_what_upstream_returned_and_not_before_it_did(package):
    live = package(THROUGH.format(signature="self, x", body="return x"))
    engine = live.module.Engine()
    assert live.edited("Engine.step", CallThrough("self.note(balance_result)"))(engine, 7) == 7
    assert engine.log == ["upstream", (7,)]
    with pytest.raises(PatchError, match="BP302"):
        live.edited("Engine.step", CallThrough("self.note(balance_result)", first=True))


def test_ours_may_come_first_and_what_it_raises_keeps_upstream_from_being_called(package):
    live = package(THROUGH.format(signature="self, x", body="return x"))
    engine = live.module.Engine()
    deltas = (
        live.delta("Engine.step", CallThrough("self.note('after')"), name="made.after"),
        live.delta("Engine.step", CallThrough("self.note('before', 1 / x)", first=True), name="made.before",
                   after=("made.after",)),
    )  # fmt: skip
    ours = live.build(*deltas).functions[f"{live.name}:Engine.step"]
    assert ours(engine, 1) == 1
    assert engine.log == [("before", 1.0), "upstream", ("after",)]
    engine.log.clear()
    with pytest.raises(ZeroDivisionError):
        ours(engine, 0)
    assert engine.log == []


def test_private_names_and_super_in_a_call_through_are_those_of_a_method(package):
    live = package(THROUGH.format(signature="self", body="return 1"))
    engine = live.module.Engine()
    live.edited("Engine.step", CallThrough("self.note(self.__hidden, super().__self_class__)"))(engine)
    assert engine.log == ["upstream", ("hidden", live.module.Engine)]


def test_a_call_through_on_a_function_of_the_module(package):
    live = package("LOG = []\ndef run(x, *, y=2):\n    LOG.append('upstream')\n    return x * y\n")
    ours = live.edited("run", CallThrough("LOG.append(x)"))
    assert ours(3, y=5) == 15
    assert live.module.LOG == ["upstream", 3]


def test_a_call_through_calls_the_function_as_the_other_deltas_made_it(package):
    live = package(THROUGH.format(signature="self, x", body="return x"))
    engine = live.module.Engine()
    deltas = (
        live.delta("Engine.step", AddParameter("extra", "'default'"), Prologue("self.note(extra)"), name="made.inside"),
        live.delta("Engine.step", CallThrough("self.note('ours')"), name="made.around"),
    )
    ours = live.build(*deltas).functions[f"{live.name}:Engine.step"]
    assert ours(engine, 1) == ours(engine, x=2, extra="given") - 1 == 1
    assert engine.log == [("default",), "upstream", ("ours",), ("given",), "upstream", ("ours",)]
    assert str(inspect.signature(ours)) == "(self, x, extra='default')"


def test_a_call_through_calls_upstreams_own_function_whatever_else_is_rewritten_in_the_module(package):
    live = package(SUPER)
    built = live.build(
        live.delta("Engine.step", DISABLED), live.delta("Root.step", CallThrough("self.args"), name="made.through")
    )
    through = built.functions[f"{live.name}:Root.step"]
    assert [cell.cell_contents for cell in through.__closure__] == [live.module.Root.step]


def test_the_text_of_a_call_through_says_which_delta_each_line_is_of(package):
    live = package(THROUGH.format(signature="self", body="return 1"))
    deltas = (
        live.delta("Engine.step", CallThrough("if self.log:\n    self.note(1)"), name="made.one"),
        live.delta("Engine.step", CallThrough("self.note(2)"), name="made.two", after=("made.one",)),
    )
    plan = make_plan(live.lane, live.feature(*deltas))
    target = plan.target(f"{live.name}:Engine.step")
    text = through_text(target, plan.steps[target.name])
    marks = [line.partition("  # bp: ")[2] for line in text.splitlines() if "# bp:" in line]
    assert marks == ["made.one", "made.one", "made.one", "made.one", "made.two", "made.one"]


# -- nothing is changed --------------------------------------------------------------------------


def snapshot(live):
    """Every object that hangs on the module, its classes and their functions, by identity."""
    module = live.module
    found = {name: id(value) for name, value in vars(module).items()}
    for kind in [value for value in vars(module).values() if isinstance(value, type)]:
        found |= {f"{kind.__name__}.{name}": id(value) for name, value in vars(kind).items()}
        found[f"{kind.__name__} bases"] = kind.__bases__
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                names = ("__code__", "__defaults__", "__kwdefaults__", "__dict__", "__closure__", "__globals__")
                found |= {f"{kind.__name__}.{name}.{part}": id(getattr(value, part)) for part in names}
                found[f"{kind.__name__}.{name}.contents"] = dict(vars(value))
    return found


def test_building_changes_nothing_that_is_live(package):
    live = package(SUPER)
    _ = [vars(kind)["step"].__dict__ for kind in (live.module.Root, live.module.Engine)]
    before, code = snapshot(live), live.module.Engine.step.__code__
    live.build(
        live.delta("Engine.step", DISABLED, AddParameter("extra", "1")),
        live.delta("Root.step", CallThrough("self.args"), name="made.through"),
        runtime=live.runtime(ours_of),
    )
    assert snapshot(live) == before
    assert live.module.Engine.step.__code__ is code
    assert live.module.Engine().step(1) == ["engine", 1]


def test_a_refused_build_changes_nothing_and_shows_nothing(package):
    import linecache

    live = package(SUPER)
    _ = live.module.Engine.step.__dict__
    before, shown = snapshot(live), set(linecache.cache)
    with pytest.raises(PatchError):
        live.build(live.delta("Engine.step", DISABLED), live.delta("Root.nothing", LOG, name="made.other"))
    assert snapshot(live) == before
    assert set(linecache.cache) == shown


def test_building_twice_gives_the_same_code_and_a_class_of_its_own(package):
    live = package(SUPER)
    one, other = (live.build(live.delta("Engine.step", DISABLED), runtime=live.runtime(ours_of)) for _ in range(2))
    name = f"{live.name}:Engine"
    assert one.functions[f"{name}.step"].__code__ == other.functions[f"{name}.step"].__code__
    assert one.classes[name] is not other.classes[name]
    for built in (one, other):
        assert built.classes[name]().step(1) == ["disabled", "engine", 1]
        assert built.originals[f"{name}.step"] is live.module.Engine.step


# -- refusals -----------------------------------------------------------------------------------

TWO = """
    class Engine:
        def __init__(self):
            self.log = []

        def one(self):
            return 1

        def two(self):
            return 2

        def loop(self):
            while True:
                self.one()
"""


def replace(live, name, value=lambda self: 0):
    setattr(live.module.Engine, name, value)


def test_every_failure_is_named_at_once(package):
    live = package(TWO)
    replace(live, "one")
    replace(live, "two", 3)
    deltas = (
        live.delta("Engine.one", LOG, name="made.one"),
        live.delta("Engine.two", Prologue("self.nowhere()"), name="made.two"),
        live.delta("Engine.gone", LOG, name="made.gone"),
        live.delta("Engine.loop", InsertBefore("print()"), anchor="if $_: break", name="made.loop"),
    )
    broken = Sets("the log is set", f"{live.name}:Engine.loop", "log")
    with pytest.raises(PatchError) as error:
        live.build(*deltas, invariants=(broken,))
    assert sorted(codes(error)) == ["BP101", "BP104", "BP207", "BP303", "BP603", "BP604"]


def test_a_failure_that_two_invariants_share_is_named_once(package):
    live = package(TWO)
    invariants = tuple(Sets(name, f"{live.name}:Engine.gone", "log") for name in ("one", "other"))
    with pytest.raises(PatchError) as error:
        live.build(live.delta("Engine.one", LOG), invariants=invariants)
    assert codes(error) == ["BP104"]


@pytest.mark.parametrize(
    ("qualname", "remove"),
    [
        ("Engine.one", lambda module: delattr(module.Engine, "one")),
        ("Engine.one", lambda module: delattr(module, "Engine")),
        ("Engine.one", lambda module: setattr(module, "Engine", type("Engine", (module.Engine,), {}))),
        ("Engine.one", lambda module: setattr(module.Engine, "one", lambda self: 1)),
    ],
    ids=["method", "class", "class replaced by a subclass", "method replaced"],
)
def test_a_target_that_is_not_in_the_live_module_is_refused(qualname, remove, package):
    live = package(TWO)
    remove(live.module)
    with pytest.raises(PatchError) as error:
        live.edited(qualname, LOG)
    assert codes(error) == ["BP603"]
    assert "one" in str(error.value)


@pytest.mark.parametrize("line", ["import nobody_has_this", "{}['nobody_has_this']"])
def test_a_module_that_cannot_be_imported_is_refused(line, package):
    live = package(f"{line}\nclass Engine:\n    log = []\n    def one(self):\n        return 1\n")
    with pytest.raises(PatchError) as error:
        live.edited("Engine.one", LOG)
    assert codes(error) == ["BP604"]
    assert "nobody_has_this" in str(error.value)


def test_a_file_that_was_edited_after_its_import_is_refused(package):
    live = package(TWO)
    assert live.module.Engine().one() == 1
    live.file.write_text(live.file.read_text().replace("return 1", "return 11"))
    with pytest.raises(PatchError) as error:
        live.edited("Engine.one", LOG)
    assert codes(error) == ["BP601"]
    assert str(live.file) in str(error.value)


def test_a_replaced_loop_that_an_invariant_speaks_of_is_refused(package):
    live = package(TWO)
    hook = CalledOnce("one is called once", f"{live.name}:Engine.loop", "self.one()", "if $_: continue")
    delta = live.delta("Engine.one", LOG)
    assert live.build(delta, invariants=(hook,)).functions
    replace(live, "loop")
    with pytest.raises(PatchError) as error:
        live.build(delta, invariants=(hook,))
    assert codes(error) == ["BP603"]
    assert "Engine.loop" in str(error.value)


def test_the_loop_is_proven_through_upstreams_own_decorator(package):
    guarded = "    def guarded(function):\n        def run(self): return function(self)\n        return run\n"
    live = package(guarded + TWO.replace("def loop", "@guarded\n        def loop"))
    hook = CalledOnce("one is called once", f"{live.name}:Engine.loop", "self.one()", "if $_: continue")
    assert live.build(live.delta("Engine.one", LOG), invariants=(hook,)).functions


def test_a_wrapper_around_a_loop_that_an_invariant_speaks_of_does_no_harm(package):
    live = package(TWO)
    hook = CalledOnce("one is called once", f"{live.name}:Engine.loop", "self.one()", "if $_: continue")
    loop = live.module.Engine.loop

    @functools.wraps(loop)
    def through(self):
        return loop(self)

    replace(live, "loop", through)
    assert live.build(live.delta("Engine.one", LOG), invariants=(hook,)).functions


# -- how Python was started ----------------------------------------------------------------------

SCRIPT = """
import os, sys
sys.path.insert(0, os.environ["PACKAGES"])
from pathlib import Path
from balance_patcher.build import build
from balance_patcher.delta import CallThrough, Delta, Prologue, Variant
from balance_patcher.feature import Feature
from balance_patcher.source import DirSource, Lane

root = Path(os.environ["PACKAGES"])
def delta(name, target, edit):
    return Delta(name, "started.engine:" + target, "why", "upstream", "when", (Variant("only", None, (edit,)),))
feature = Feature("made", "a test", (
    delta("made.step", "Engine.step", Prologue("self.log.append('ours')")),
    delta("made.other", "Engine.other", CallThrough("self.log.append('through')")),
))
built = build(feature, Lane("live", DirSource("dir", root)))
import started.engine as engine
step, other = built.functions["started.engine:Engine.step"], built.functions["started.engine:Engine.other"]
subject = engine.Engine()
try:
    step(subject, -1)
    failed = False
except AssertionError:
    failed = True
print(step(subject, 3), other(subject), subject.log, step.__doc__, failed, __debug__)
positions = getattr(engine.Engine.step.__code__, "co_positions", None)
print(all(p[2] is None for p in positions()) if positions else None, engine.__cached__)
"""

STARTED = '''
"""The module."""
class Engine:
    """The class."""
    log: list = []

    def step(self, x):
        """What it does."""
        assert x > 0, "positive"
        if __debug__:
            x += 1
        def inner():
            "inner"
            return inner.__doc__
        return x, inner()

    def other(self):
        """Other."""
        return [n for n in (1, 2)]
'''


def start(tmp_path, *options, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    environment |= {"PYTHONPATH": str(ROOT), "PACKAGES": str(tmp_path), **variables}
    done = subprocess.run(
        [sys.executable, *options], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def started(tmp_path):
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "__init__.py").write_text("")
    (tmp_path / "started" / "engine.py").write_text(STARTED)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "(4, 'inner') [1, 2] ['ours', 'ours', 'through'] What it does. True True"),
        (("-O",), "(3, 'inner') [1, 2] ['ours', 'ours', 'through'] What it does. False False"),
        (("-OO",), "(3, None) [1, 2] ['ours', 'ours', 'through'] None False False"),
    ],
)
def test_the_rebuilt_code_follows_the_running_optimize_level(options, expected, started):
    for _ in range(2):  # compiled, then read from the .pyc
        assert start(started, *options, "-c", SCRIPT)[0] == expected


@pytest.mark.skipif(sys.version_info < (3, 11), reason="columns are kept from Python 3.11 on")
@pytest.mark.parametrize("how", ["option", "variable"])
@pytest.mark.parametrize("optimize", [(), ("-O",), ("-OO",)])
def test_bytecode_without_columns_is_proven_by_a_python_that_has_them(how, optimize, started):
    options, variables = (("-X", "no_debug_ranges"), {}) if how == "option" else ((), {"PYTHONNODEBUGRANGES": "1"})
    start(started, *options, *optimize, "-m", "compileall", "-q", str(started / "started"), **variables)
    without, cached = start(started, *optimize, "-c", SCRIPT)[1].split()
    assert without == "True"
    assert Path(cached).exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="columns are kept from Python 3.11 on")
def test_bytecode_with_columns_is_proven_by_a_python_that_drops_them(started):
    start(started, "-m", "compileall", "-q", str(started / "started"))
    assert start(started, "-X", "no_debug_ranges", "-c", SCRIPT)[0].startswith("(4, 'inner')")


TRACERS = {
    "settrace": "sys.settrace(lambda *a: None)",
    "settrace, lines and opcodes": (
        "def t(frame, event, arg):\n    frame.f_trace_opcodes = True\n    return t\nsys.settrace(t)"
    ),
    "setprofile": "sys.setprofile(lambda *a: None)",
    "monitoring": (
        "m = sys.monitoring; m.use_tool_id(m.COVERAGE_ID, 'cov')\n"
        "for e in (m.events.LINE, m.events.PY_START, m.events.INSTRUCTION):\n"
        "    m.register_callback(m.COVERAGE_ID, e, lambda *a: None)\n"
        "m.set_events(m.COVERAGE_ID, m.events.LINE | m.events.PY_START | m.events.INSTRUCTION)"
    ),
    "a hot function": "pass",
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_instrumented_and_specialised_code_is_still_upstreams(tracer, started):
    """A tracer, a coverage tool, and the interpreter itself write into the code that runs."""
    if tracer == "monitoring" and sys.version_info < (3, 12):
        pytest.skip("sys.monitoring is Python 3.12's")
    heat = "import started.engine\nfor _ in range(3000):\n    started.engine.Engine().step(1)\n"
    head, body = SCRIPT.split("from pathlib", 1)
    script = f"{head}{TRACERS[tracer]}\n{heat}from pathlib{body}"
    assert start(started, "-c", script)[0].startswith("(4, 'inner')")


def test_a_rebuilt_function_gets_as_fast_as_upstreams(package):
    """It is a plain function on plain globals: the interpreter specialises it like any other."""
    live = package("SCALE = 2\nclass Engine:\n    log = []\n    def step(self, x):\n        return x * SCALE\n")
    ours = live.edited("Engine.step", Prologue("x"))
    assert type(ours) is types.FunctionType
    assert ours.__globals__ is vars(live.module)
    assert [i.opname for i in dis.get_instructions(ours)][-1].startswith("RETURN")
