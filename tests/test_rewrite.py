"""Splicing: where inserted lines land in every shape of text, what is refused, and proofs that can fail.

In the expected texts ``#+`` stands for the marker of the one delta that is used.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import balance_patcher.rewrite as module
from balance_patcher import splice
from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Level,
    Prologue,
    Replace,
    Variant,
)
from balance_patcher.errors import PatchError
from balance_patcher.feature import Feature
from balance_patcher.plan import Plan, make_plan
from balance_patcher.rewrite import Rewrite, rewrite, take_out
from balance_patcher.source import Lane
from balance_patcher.splice import Splice

STOP = Anchor("stop()")
INSERT = "new()"


class Memory:
    """A source that holds one module, ``m``."""

    spec = "memory"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, path: str) -> bytes | None:
        return self.data if path == "m.py" else None

    def display(self, path: str) -> str:
        return path

    def commit(self) -> str | None:
        return None


def delta(*edits: Edit, name: str = "t.d", target: str = "m:f", anchor: Anchor | None = STOP, **more: Any) -> Delta:
    return Delta(name, target, "w", "u", "r", (Variant("v", anchor, edits),), **more)


def plan_of(text: str | bytes, *deltas: Delta) -> Plan:
    data = text if isinstance(text, bytes) else text.encode()
    return make_plan(Lane("memory", Memory(data)), Feature("t", "s", deltas))


def spliced(text: str | bytes, *deltas: Delta) -> Rewrite:
    """The rewritten module, after the proofs of the package and those of :func:`prove`."""
    plan = plan_of(text, *deltas)
    if plan.all_failures:
        raise PatchError(*plan.all_failures)
    result = rewrite(plan)["m"]
    prove(result, {d.name for d in deltas})
    return result


def prove(result: Rewrite, names: set[str]) -> None:
    """What holds of every rewrite, found out without the package's own proofs."""
    old, new = result.original, replace(result.original, text=result.text)
    assert take_out(result) == old.text
    assert len(result.line_map) == len(new.lines)
    upstream = [line for line, _ in result.line_map if line is not None]
    assert upstream == sorted(set(upstream))
    added = False
    for (line, owner), text in zip(result.line_map, new.lines, strict=True):
        added |= owner is not None
        marked = [name for name in names if text.rstrip("\r\n").endswith(f"  # bp: {name}")]
        if line is None:
            assert marked == [owner] or (not marked and text.lstrip().startswith("#"))
        elif not any(not splice.whole for splice in result.splices):
            assert not marked
            assert text.rstrip("\r\n") == old.lines[line - 1].rstrip("\r\n")
    if all(splice.whole and splice.start == splice.end for splice in result.splices):
        assert added
        assert upstream == list(range(1, len(old.lines) + 1))


def refused(text: str, *deltas: Delta) -> list[str]:
    with pytest.raises(PatchError) as caught:
        spliced(text, *deltas)
    return [failure.code for failure in caught.value.failures]


def body(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def marked(text: str, name: str = "t.d") -> str:
    return body(text).replace("#+", f"# bp: {name}")


# -- where an insertion stands ---------------------------------------------------------------

BEFORE_AND_AFTER: dict[str, tuple[str, Edit, str]] = {
    "before": (
        """
        def f():
            a()
            stop()
            b()
        """,
        InsertBefore(INSERT),
        """
        def f():
            a()
            new()  #+
            stop()
            b()
        """,
    ),
    "after": (
        """
        def f():
            stop()
            b()
        """,
        InsertAfter(INSERT),
        """
        def f():
            stop()
            new()  #+
            b()
        """,
    ),
    "several statements, with a suite and a blank line": (
        """
        def f():
            if a:
                stop()
        """,
        InsertAfter("if b:\n    c()\n\nd()"),
        """
        def f():
            if a:
                stop()
                if b:  #+
                    c()  #+
                d()  #+
        """,
    ),
    "above the comments attached to the anchor": (
        """
        def f():
            a()

            # one
            # two
            stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            a()

            new()  #+
            # one
            # two
            stop()
        """,
    ),
    "comments at another indentation are attached too": (
        """
        def f():
            a()
        # outer
                # inner
            stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            a()
            new()  #+
        # outer
                # inner
            stop()
        """,
    ),
    "a deeper comment belongs to the suite above": (
        """
        def f():
            if a:
                b()
                # of the suite
            # of the stop
            stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            if a:
                b()
                # of the suite
            new()  #+
            # of the stop
            stop()
        """,
    ),
    "a comment after a blank line is not attached": (
        """
        def f():
            # far

            stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            # far

            new()  #+
            stop()
        """,
    ),
    "a string that looks like a comment is none": (
        """
        def f():
            a = '''
        # text
        #'''
            stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            a = '''
        # text
        #'''
            new()  #+
            stop()
        """,
    ),
    "a header over several lines that ends like a comment": (
        """
        def f():
            if a(
                1
            ) == '''
        #''':
                # attached
                stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            if a(
                1
            ) == '''
        #''':
                new()  #+
                # attached
                stop()
        """,
    ),
    "after a comment on the anchor's line": (
        """
        def f():
            stop()  # why
            # of b
            b()
        """,
        InsertAfter(INSERT),
        """
        def f():
            stop()  # why
            new()  #+
            # of b
            b()
        """,
    ),
    "a deeper comment below a simple statement belongs to what follows": (
        """
        def f():
            stop()
                # deeper
            b()
        """,
        InsertAfter(INSERT),
        """
        def f():
            stop()
            new()  #+
                # deeper
            b()
        """,
    ),
    "an anchor over several lines": (
        """
        def f():
            stop(
                # nothing
            )
            b()
        """,
        InsertAfter(INSERT),
        """
        def f():
            stop(
                # nothing
            )
            new()  #+
            b()
        """,
    ),
    "an anchor in parentheses": (
        """
        def f():
            (
                stop()
            )
        """,
        InsertAfter(INSERT),
        """
        def f():
            (
                stop()
            )
            new()  #+
        """,
    ),
    "a backslash within the anchor": (
        """
        def f():
            stop \\
                ()
            b()
        """,
        InsertAfter(INSERT),
        """
        def f():
            stop \\
                ()
            new()  #+
            b()
        """,
    ),
    "a backslash behind the anchor": (
        "def f():\n    stop() \\\n\n    b()\n",
        InsertAfter(INSERT),
        "def f():\n    stop() \\\n\n    new()  #+\n    b()\n",
    ),
    "a comment that ends in a backslash joins nothing": (
        """
        def f():
            a()  # 'this' \\
            stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            a()  # 'this' \\
            new()  #+
            stop()
        """,
    ),
    "after the last statement of a suite": (
        """
        def f():
            if a:
                stop()
            else:
                b()
        """,
        InsertAfter(INSERT),
        """
        def f():
            if a:
                stop()
                new()  #+
            else:
                b()
        """,
    ),
    "first in an else": (
        """
        def f():
            if a:
                b()
            else:
                # attached
                stop()
        """,
        InsertBefore(INSERT),
        """
        def f():
            if a:
                b()
            else:
                new()  #+
                # attached
                stop()
        """,
    ),
    "in a handler": (
        """
        def f():
            try:
                a()
            except E:
                # attached
                stop()
            finally:
                b()
        """,
        InsertBefore(INSERT),
        """
        def f():
            try:
                a()
            except E:
                new()  #+
                # attached
                stop()
            finally:
                b()
        """,
    ),
    "in a case": (
        """
        def f():
            match a:
                case 1:
                    stop()
                case _:
                    pass
        """,
        InsertAfter(INSERT),
        """
        def f():
            match a:
                case 1:
                    stop()
                    new()  #+
                case _:
                    pass
        """,
    ),
    "beside a nested function with decorators": (
        """
        def f():
            stop()
            @one
            @two(
                1
            )
            def g():
                return 1
        """,
        InsertAfter(INSERT),
        """
        def f():
            stop()
            new()  #+
            @one
            @two(
                1
            )
            def g():
                return 1
        """,
    ),
    "in a loop with strings at column 0": (
        '''
        def f():
            while a:
                b("""
        text
        \t""")
                stop()
                c = """
        more"""
        ''',
        InsertAfter(INSERT),
        '''
        def f():
            while a:
                b("""
        text
        \t""")
                stop()
                new()  #+
                c = """
        more"""
        ''',
    ),
    "beside an anchor that ends in such a string": (
        '''
        def f():
            a()
            stop() + """
        text
        # no comment
        """  # a comment
            b()
        ''',
        InsertAfter(INSERT),
        '''
        def f():
            a()
            stop() + """
        text
        # no comment
        """  # a comment
            new()  #+
            b()
        ''',
    ),
    "inside a class inside an if": (
        """
        if True:
            class f:
                pass
            def f():
                stop()
        x = '''
          text'''
        """,
        InsertBefore(INSERT),
        """
        if True:
            class f:
                pass
            def f():
                new()  #+
                stop()
        x = '''
          text'''
        """,
    ),
}


@pytest.mark.parametrize(("before", "edit", "after"), BEFORE_AND_AFTER.values(), ids=BEFORE_AND_AFTER)
def test_inserts(before: str, edit: Edit, after: str) -> None:
    before = body(before)
    anchor = STOP if "stop() +" not in before else Anchor("stop() + $_")
    assert spliced(before, delta(edit, anchor=anchor)).text == marked(after)


LEVELS = Anchor("if $A: break", inside=(Level("outer", "if $_"), Level("loop", "while $_")))
NEST = """
def f():
    a()
    # of the if
    if b:
        # of the loop
        while c:
            if d: break  # stop
            # of e
            e()
            # last in the loop
        # last in the if
    # of g
    g()
"""


@pytest.mark.parametrize(
    ("edit", "line", "indent"),
    [
        (InsertBefore(INSERT, at="outer"), "    # of the if", 4),
        (InsertBefore(INSERT, at="loop"), "        # of the loop", 8),
        (InsertBefore(INSERT), "            if d: break  # stop", 12),
        (InsertAfter(INSERT), "            # of e", 12),
        (InsertAfter(INSERT, at="loop"), "        # last in the if", 8),
        (InsertAfter(INSERT, at="outer"), "    # of g", 4),
    ],
)
def test_inserts_at_the_anchor_and_at_its_levels(edit: Edit, line: str, indent: int) -> None:
    text = spliced(body(NEST), delta(edit, anchor=LEVELS)).text
    expected = body(NEST).replace(line + "\n", f"{' ' * indent}new()  # bp: t.d\n{line}\n")
    assert text == expected


def test_inner_and_outer_insertions_that_end_at_one_line() -> None:
    edits = [InsertAfter(f"{at}()", at=at) for at in ("outer", "anchor", "loop")]
    text = "def f():\n    if b:\n        while c:\n            if d: break\n    g()\n"
    assert spliced(text, delta(*edits, anchor=LEVELS)).text == (
        "def f():\n    if b:\n        while c:\n            if d: break\n"
        "            anchor()  # bp: t.d\n        loop()  # bp: t.d\n    outer()  # bp: t.d\n    g()\n"
    )


@pytest.mark.parametrize("end", ["", "\n", "  # why", "\n            # last"])
def test_inner_and_outer_insertions_at_the_end_of_the_file(end: str) -> None:
    edits = [InsertAfter(f"{at}()", at=at) for at in ("outer", "anchor", "loop")]
    result = spliced(
        f"def f():\n    if b:\n        while c:\n            if d: break{end}", delta(*edits, anchor=LEVELS)
    )
    assert result.text.endswith("\n") == end.endswith("\n")
    assert [line.split("(")[0].strip() for line in result.text.splitlines() if "bp:" in line] == [
        "anchor",
        "loop",
        "outer",
    ]


def test_a_run_of_statements() -> None:
    anchor = Anchor("a = $V\nif a: break", inside=(Level("loop", "while $_"),))
    text = (
        "def f():\n    while x:\n        # of a\n        a = 1\n\n        # of if\n        if a: break\n        b()\n"
    )
    result = spliced(text, delta(InsertBefore("p()"), InsertAfter("q($V)"), anchor=anchor))
    assert result.text == (
        "def f():\n    while x:\n        p()  # bp: t.d\n        # of a\n        a = 1\n\n        # of if\n"
        "        if a: break\n        q(1)  # bp: t.d\n        b()\n"
    )


def test_an_expression_is_edited_at_its_statement() -> None:
    text = "def f():\n    x = (\n        stop() + 1\n    )\n    while stop2(): pass\n"
    result = spliced(text, delta(InsertBefore("p()"), InsertAfter("q()")))
    assert result.text == (
        "def f():\n    p()  # bp: t.d\n    x = (\n        stop() + 1\n    )\n    q()  # bp: t.d\n"
        "    while stop2(): pass\n"
    )
    result = spliced(text, delta(InsertBefore("p()"), anchor=Anchor("stop2()")))
    assert result.text.endswith("    )\n    p()  # bp: t.d\n    while stop2(): pass\n")


def test_nested_functions_are_not_looked_into_and_stay_as_they_are() -> None:
    text = "def f():\n    def g():\n        stop()\n    @d\n    def h(): stop()\n    stop()\n"
    result = spliced(text, delta(InsertBefore(INSERT)))
    assert result.text == text.removesuffix("    stop()\n") + "    new()  # bp: t.d\n    stop()\n"


@pytest.mark.parametrize(
    "decorator", ["@one", "@(\n        one\n    )", "@one(  # why\n        1)", "# attached\n    @one"]
)
def test_a_decorated_neighbour_as_anchor(decorator: str) -> None:
    text = f"def f():\n    a()\n    {decorator}\n    def g():\n        pass\n    b()\n"
    result = spliced(text, delta(InsertBefore("p()"), InsertAfter("q()"), anchor=Anchor("def g()")))
    assert result.text == (
        f"def f():\n    a()\n    p()  # bp: t.d\n    {decorator}\n    def g():\n        pass\n"
        "    q()  # bp: t.d\n    b()\n"
    )


def test_several_targets_in_one_module() -> None:
    text = body(
        """
        class C:
            def f(self):
                if a:
                    stop()
                    # deeper than what follows

            # of g
            def g(self):
                stop()
        def f(): pass
        """
    )
    result = spliced(
        text,
        delta(InsertBefore("one()"), name="t.g", target="m:C.g"),
        delta(
            InsertAfter("two()", at="if"),
            name="t.f",
            target="m:C.f",
            anchor=Anchor("stop()", inside=(Level("if", "if $_"),)),
        ),
    )
    assert result.text == (
        text.replace("what follows\n", "what follows\n        two()  # bp: t.f\n").replace(
            "g(self):\n", "g(self):\n        one()  # bp: t.g\n"
        )
    )
    assert set(result.targets) == {"m:C.f", "m:C.g"}
    assert [owner for _, owner in result.line_map if owner] == ["t.f", "t.g"]


def test_a_call_through_rewrites_nothing() -> None:
    assert rewrite(plan_of("def f(): pass\n", delta(CallThrough("g()"), anchor=None))) == {}


# -- the first statement ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f():\n    a()\n", "def f():\n    new()  #+\n    a()\n"),
        ("def f():\n    # of a\n    a()\n", "def f():\n    new()  #+\n    # of a\n    a()\n"),
        ('def f():\n    """Doc."""\n    a()\n', 'def f():\n    """Doc."""\n    new()  #+\n    a()\n'),
        (
            'def f():\n    """Doc.\n# x\n#"""\n\n    # of a\n    a()\n',
            'def f():\n    """Doc.\n# x\n#"""\n\n    new()  #+\n    # of a\n    a()\n',
        ),
        ('def f():\n    """Doc."""\n', 'def f():\n    """Doc."""\n    new()  #+\n'),
        ('def f():\n    """Doc."""', 'def f():\n    """Doc."""\n    new()  #+'),
        ('def f():\n    """Doc."""  # why\n\nx = 1\n', 'def f():\n    """Doc."""  # why\n    new()  #+\n\nx = 1\n'),
        ("def f():\n    f'no doc'\n", "def f():\n    new()  #+\n    f'no doc'\n"),
        (
            "def f(\n    a,\n    # of b\n    b=1,\n) -> None:\n    # of c\n    c()\n",
            "def f(\n    a,\n    # of b\n    b=1,\n) -> None:\n    new()  #+\n    # of c\n    c()\n",
        ),
        ("def f():\n    @d\n    def g(): pass\n", "def f():\n    new()  #+\n    @d\n    def g(): pass\n"),
        ("def f():\n    if a: b()\n", "def f():\n    new()  #+\n    if a: b()\n"),
    ],
)  # fmt: skip
def test_a_prologue_stands_first_and_after_the_docstring(before: str, after: str) -> None:
    assert spliced(before, delta(Prologue(INSERT), anchor=None)).text == marked(after)


@pytest.mark.parametrize(
    ("parameters", "passed"),
    [
        ("self", ""),
        ("self, a, b=1", "a, b"),
        ("self, a, /, b", "a, b"),
        ("self, *args, k, j=1, **more", "*args, k=k, j=j, **more"),
        ("self, /, a: int = 1, *, k", "a, k=k"),
    ],
)
def test_a_prologue_forwards_the_targets_own_parameters(parameters: str, passed: str) -> None:
    text = f"class C:\n    def f({parameters}):\n        a()\n"
    result = spliced(text, delta(Prologue("super().f($$$PARAMETERS)"), target="m:C.f", anchor=None))
    assert f"super().f({passed})  # bp" in result.text


# -- a parameter -----------------------------------------------------------------------------

HEADERS = {
    "no parameters": ("()", "(more=False)"),
    "no parameters, a comment": ("(  # (none)\n)", "(more=False  # (none)\n)"),
    "self only": ("(self)", "(self, more=False)"),
    "a trailing comma": ("(self, a,)", "(self, a, more=False,)"),
    "a default": ("(a, b=1)", "(a, b=1, more=False)"),
    "a default in parentheses": ("(a, b=(1))", "(a, b=(1), more=False)"),
    "in more parentheses": ("(b=( (1)\n ) )", "(b=( (1)\n ), more=False )"),
    "a tuple": ("(b=(1, 2))", "(b=(1, 2), more=False)"),
    "in parentheses, comments between": (
        "(b=(1  # ) one\n), # ), two\n)",
        "(b=(1  # ) one\n), more=False, # ), two\n)",
    ),
    "in parentheses, more behind": ("(b=(1), *, c)", "(b=(1), more=False, *, c)"),
    "a string with a parenthesis": ("(b=(')'))", "(b=(')'), more=False)"),
    "annotations": ("(a: int, b: 'x' = 1) -> None", "(a: int, b: 'x' = 1, more=False) -> None"),
    "an annotation in parentheses": ("(a: (int)) -> (None)", "(a: (int), more=False) -> (None)"),
    "an annotation with colons": ("(a: x[1:2] = {1: 2})", "(a: x[1:2] = {1: 2}, more=False)"),
    "*args": ("(self, *args)", "(self, more=False, *args)"),
    "*args only": ("(*args)", "(more=False, *args)"),
    "keyword-only": ("(self, *, a)", "(self, more=False, *, a)"),
    "keyword-only first": ("(*, a)", "(more=False, *, a)"),
    "keyword-only with default": ("(self, b=1, *, a=(2))", "(self, b=1, more=False, *, a=(2))"),
    "**kw": ("(self, **kw)", "(self, more=False, **kw)"),
    "**kw only": ("(**kw)", "(more=False, **kw)"),
    "positional-only": ("(self, a, /)", "(self, a, /, more=False)"),
    "positional-only with default": ("(self, a=(1), /, *, b)", "(self, a=(1), /, more=False, *, b)"),
    "positional-only and a slash in a comment": ("(a,  # in/out\n /)", "(a,  # in/out\n /, more=False)"),
    "positional-only and another": ("(a, /, b)", "(a, /, b, more=False)"),
    "over several lines": (
        "(\n    self,\n    a: int = 1,  # why\n)",
        "(\n    self,\n    a: int = 1, more=False,  # why\n)",
    ),
    "over several lines, no comma": ("(\n    self,\n    a  # why\n)", "(\n    self,\n    a, more=False  # why\n)"),
    "not ASCII": ("(é, ü='ä')", "(é, ü='ä', more=False)"),
    "a lambda": ("(a=lambda x, y: (x), *, b)", "(a=lambda x, y: (x), more=False, *, b)"),
}


@pytest.mark.parametrize(("before", "after"), HEADERS.values(), ids=HEADERS)
def test_adds_a_parameter(before: str, after: str) -> None:
    text = "x = 1\ndef f{}:\n    a()\n"
    result = spliced(text.format(before), delta(AddParameter("more", "False"), anchor=None))
    assert result.text == text.format(after)
    assert [line for line, _ in result.line_map] == list(range(1, text.format(before).count("\n") + 1))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are new in 3.12")
def test_adds_a_parameter_behind_type_parameters() -> None:
    result = spliced("def f[T: (int, str)]() -> T:\n    a()\n", delta(AddParameter("more", "False"), anchor=None))
    assert result.text == "def f[T: (int, str)](more=False) -> T:\n    a()\n"


@pytest.mark.parametrize(("before", "after"), [("", "a=1, b=2"), ("*c", "a=1, b=2, *c"), ("c", "c, a=1, b=2")])
def test_adds_two_parameters(before: str, after: str) -> None:
    text = "def f({}):\n    g()\n"
    result = spliced(text.format(before), delta(AddParameter("a", "1"), AddParameter("b", "2"), anchor=None))
    assert result.text == text.format(after)


@pytest.mark.parametrize("parameters", ["self, more=True", "more, /", "*, more", "more: bool = False, **kw"])
def test_a_parameter_that_is_there_is_not_added(parameters: str) -> None:
    text = f"def f({parameters}):\n    a()\n"
    result = spliced(text, delta(AddParameter("more", "False"), Prologue(INSERT), anchor=None))
    assert result.text == f"def f({parameters}):\n    new()  # bp: t.d\n    a()\n"


def test_adding_only_what_is_there_is_an_edit_that_changes_nothing() -> None:
    assert refused("def f(more): pass\n", delta(AddParameter("more", "False"), anchor=None)) == ["BP111"]


def test_a_header_and_a_body_can_be_edited_at_once() -> None:
    text = "def f(self): # why\n    stop()\n"
    result = spliced(text, delta(AddParameter("a", "1"), Prologue("p(a)"), InsertAfter("q()")))
    assert result.text == "def f(self, a=1): # why\n    p(a)  # bp: t.d\n    stop()\n    q()  # bp: t.d\n"
    assert result.line_map == [(1, None), (None, "t.d"), (2, None), (None, "t.d")]


# -- replacing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f():\n    stop()\n    b()\n", "def f():\n    new()  #+\n    b()\n"),
        (
            "def f():\n    # lead\n    stop()  # trail\n    # of b\n    b()\n",
            "def f():\n    # lead\n    # trail\n    new()  #+\n    # of b\n    b()\n",
        ),
        ("def f():\n    stop()", "def f():\n    new()  #+"),
        ("def f():\n    stop()  # '", "def f():\n    # '\n    new()  #+"),
        ("def f():\n    (stop())\nx = 1\n", "def f():\n    new()  #+\nx = 1\n"),
        ("def f():\n    stop() \\\n\n    b()\n", "def f():\n    new()  #+\n    b()\n"),
    ],
)  # fmt: skip
def test_replaces_and_keeps_comments(before: str, after: str) -> None:
    assert spliced(before, delta(Replace(INSERT))).text == marked(after)


def test_comments_inside_a_replaced_statement_are_kept_above() -> None:
    text = (
        "def f():\n    if a:  # one\n        # two\n        b('# no')\n        c('''\n# no''')  # three\n    # after\n"
    )
    result = spliced(text, delta(Replace("if $A:\n    new()"), anchor=Anchor("if $A")))
    assert result.text == (
        "def f():\n    # one\n    # two\n    # three\n    if a:  # bp: t.d\n        new()  # bp: t.d\n    # after\n"
    )


def test_a_level_can_be_replaced() -> None:
    anchor = Anchor("return", inside=(Level("loop", "while $A"),))
    text = "def f():\n    while a:\n        return\n    b()\n"
    result = spliced(text, delta(Replace("g($A)", at="loop"), anchor=anchor))
    assert result.text == "def f():\n    g(a)  # bp: t.d\n    b()\n"


def test_a_run_can_be_replaced() -> None:
    anchor = Anchor("a = $A\nstop()")
    text = "def f():\n    a = 1  # one\n\n    # two\n    stop()\n    b()\n"
    assert spliced(text, delta(Replace("new($A)"), anchor=anchor)).text == (
        "def f():\n    # one\n    # two\n    new(1)  # bp: t.d\n    b()\n"
    )


def test_upstream_lines_after_a_replacement_keep_their_numbers() -> None:
    result = spliced("def f():\n    stop(\n    )\n    b()\nx = 1\n", delta(Replace("p()\nq()\nr()")))
    assert result.line_map == [(1, None), (None, "t.d"), (None, "t.d"), (None, "t.d"), (4, None), (5, None)]


def test_replacing_by_the_same_is_refused() -> None:
    assert refused("def f():\n    stop()\n", delta(Replace("stop( )"))) == ["BP111"]


def test_replacing_a_part_of_a_statement_is_refused() -> None:
    assert refused("def f():\n    x = stop()\n", delta(Replace(INSERT))) == ["BP117"]


# -- the shapes of text ----------------------------------------------------------------------

SHAPED = "def f():{e}    é = '§'{e}    if a:  # ö{e}    \t# of stop{e}    \tstop(){e}    \tb(){e}"


# A cookie is looked for in lines that end in "\n"; what has one on a lone "\r" is BP508, in `source`.
ENCODINGS = [(end, encoding) for end in ("\n", "\r\n", "\r") for encoding in ("utf-8", "utf-8-sig")]
ENCODINGS += [(end, encoding) for end in ("\n", "\r\n") for encoding in ("latin-1", "cp1252", "iso-8859-15")]


@pytest.mark.parametrize(("end", "encoding"), ENCODINGS)
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_encodings_and_byte_order_marks(end: str, encoding: str, *, last: bool) -> None:
    cookie = "" if encoding.startswith("utf") else f"# -*- coding: {encoding} -*-{end}"
    text = cookie + SHAPED.replace("§", "ß").format(e=end)
    text = text if last else text.removesuffix(end)
    edits = (InsertBefore("p()"), InsertAfter("q()"))
    result = spliced(text.encode(encoding), delta(*edits), delta(InsertAfter("r()"), name="t.b", anchor=Anchor("b()")))
    expected = text.replace("    \t# of", f"    \tp()  # bp: t.d{end}    \t# of")
    expected = expected.replace(f"stop(){end}", f"stop(){end}    \tq()  # bp: t.d{end}")
    expected = expected.removesuffix(end) + f"{end}    \tr()  # bp: t.b{end if last else ''}"
    assert result.text == expected
    assert result.original.encoded(take_out(result)) == text.encode(encoding)
    assert result.original.encoded(result.text).startswith(b"\xef\xbb\xbf") == (encoding == "utf-8-sig")


def test_mixed_line_ends_follow_the_neighbour() -> None:
    text = b"def f():\r    a()\r\n    stop()\r    b()\n    c()"
    result = spliced(
        text,
        delta(InsertBefore("p()"), InsertAfter("q()")),
        delta(InsertAfter("r()"), name="t.c", anchor=Anchor("c()")),
    )
    assert result.text.encode() == (
        b"def f():\r    a()\r\n    p()  # bp: t.d\r    stop()\r    q()  # bp: t.d\r    b()\n    c()\r    r()  # bp: t.c"
    )


@pytest.mark.parametrize("indent", ["\f    ", "   \f    ", "\t", " \t ", " ", "\t\f\t"])
def test_indentation_is_copied_as_it_is(indent: str) -> None:
    text = "def f():\n{0}a()\n\f\n{0}stop()\n{0}b()\n"
    result = spliced(text.format(indent), delta(InsertBefore("p()"), InsertAfter("if q:\n    r()")))
    after = "def f():\n{0}a()\n\f\n{0}p()  # bp: t.d\n{0}stop()\n{0}if q:  # bp: t.d\n{0}    r()  # bp: t.d\n{0}b()\n"
    assert result.text == after.format(indent)


@pytest.mark.parametrize("char", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_line_ends_end_a_line(char: str) -> None:
    text = f"def f():\n    a = '{char}'  # {char}\n    stop()\n    b = '{char}'\n"
    result = spliced(text, delta(InsertAfter(INSERT)))
    assert result.text == text.replace("stop()\n", "stop()\n    new()  # bp: t.d\n")


def test_the_anchors_column_is_counted_in_bytes() -> None:
    text = "def f():\n    if 'äöü': stop2(); \n    x = ['日本', stop()]  # 語\n"
    result = spliced(text, delta(InsertAfter(INSERT)))
    assert result.text == text + "    new()  # bp: t.d\n"


def test_what_is_bound_is_put_in_as_text() -> None:
    text = "def f():\n    if len(self.run) >= self.cap: break\n"
    anchor = Anchor("if $N <$OP> self.$CAP: break")
    result = spliced(text, delta(InsertBefore("x = max(q) <$OP> self.$CAP - $N"), anchor=anchor))
    assert "    x = max(q) >= self.cap - len(self.run)  # bp: t.d\n" in result.text


# -- what is refused -------------------------------------------------------------------------

ALL_EDITS = [InsertBefore(INSERT), InsertAfter(INSERT), Replace(INSERT)]


@pytest.mark.parametrize("edit", ALL_EDITS, ids=lambda edit: type(edit).__name__)
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("if a: stop()", "BP401"),
        ("if a: stop(); b()", "BP401"),
        ("if a:\n        b()\n    else: stop()", "BP401"),
        ("try: stop()\n    finally: b()", "BP401"),
        ("while a: \\\n        stop()", "BP401"),
        ("with a: stop()", "BP401"),
        ("if (  # c\n        a): \\\n        stop()", "BP401"),
        ("if a: b(); stop()", "BP402"),
        ("a(); stop()", "BP402"),
        ("stop(); a()", "BP402"),
        ("a(); stop(); b()", "BP402"),
        ("'''\n'''; stop()", "BP402"),
        ("a(); \\\n    stop()", "BP402"),
        ("a()\n    \\\n    stop()", "BP404"),
    ],
)
def test_an_anchor_that_shares_its_line_is_refused(edit: Edit, text: str, code: str) -> None:
    source = f"def f():\n    {text}\n    c()\n"
    ast.parse(source)
    assert refused(source, delta(edit)) == [code]


def test_nothing_is_put_behind_a_semicolon() -> None:
    assert refused("def f():\n    stop();\n    b()\n", delta(InsertAfter(INSERT))) == ["BP402"]
    assert spliced("def f():\n    stop();\n    b()\n", delta(InsertBefore(INSERT))).text.count("new") == 1


@pytest.mark.parametrize("edit", ALL_EDITS, ids=lambda edit: type(edit).__name__)
def test_an_elif_is_refused(edit: Edit) -> None:
    anchor = Anchor("if $A: break")
    assert refused("def f():\n    if a:\n        b()\n    elif c:\n        break\n", delta(edit, anchor=anchor)) == [
        "BP403"
    ]
    assert spliced(
        "def f():\n    if a:\n        b()\n    else:\n        if c:\n            break\n", delta(edit, anchor=anchor)
    )


def test_a_name_that_begins_like_elif_is_none() -> None:
    text = "def f():\n    if a:\n        b()\n    else:\n        elif_()\n"
    result = spliced(text, delta(InsertBefore(INSERT), anchor=Anchor("elif_()")))
    assert result.text == text.replace("elif_", "new()  # bp: t.d\n        elif_")


def test_the_condition_of_an_elif_is_refused() -> None:
    assert refused(
        "def f():\n    if a:\n        b()\n    elif stop():\n        c()\n", delta(InsertBefore(INSERT))
    ) == ["BP403"]


@pytest.mark.parametrize("text", ["def f(): a()\n", "def f(): 'doc'\n", "def f(): \\\n    a()\n"])
def test_a_prologue_on_the_headers_line_is_refused(text: str) -> None:
    assert refused(text, delta(Prologue(INSERT), anchor=None)) == ["BP401"]


def test_a_refusal_names_target_place_and_declaration() -> None:
    with pytest.raises(PatchError) as caught:
        spliced("def f():\n    if a: stop()\n", delta(InsertBefore(INSERT)))
    (failure,) = caught.value.failures
    fields = dict(failure.fields)
    assert failure.what == "delta 't.d': `stop()` stands on its header's line; nothing was patched."
    assert (failure.file, failure.line) == ("m.py", 2)
    assert fields["target"] == "m:f"
    assert fields["nearest"] == "m.py:2  `stop()`"
    assert fields["declared"].startswith("tests/test_rewrite.py:")


def test_all_refusals_of_a_plan_are_collected() -> None:
    text = "def f():\n    if a: stop()\ndef g():\n    a(); stop()\n"
    assert refused(text, delta(InsertBefore(INSERT)), delta(InsertBefore(INSERT), name="t.g", target="m:g")) == [
        "BP401",
        "BP402",
    ]


# -- one point, one node ---------------------------------------------------------------------

POINTS = {
    "before one statement": ("stop()", InsertBefore("one()"), "stop()", InsertBefore("two()")),
    "after one statement": ("a()", InsertAfter("one()"), "a()", InsertAfter("two()")),
    "between two statements": ("a()", InsertAfter("one()"), "stop()", InsertBefore("two()")),
    "between two statements, the other way": ("stop()", InsertBefore("one()"), "a()", InsertAfter("two()")),
    "first in the function": ("a()", Prologue("one()"), "a()", InsertBefore("two()")),
    "two prologues": ("a()", Prologue("one()"), "a()", Prologue("two()")),
}  # fmt: skip
TWO = "def f():\n    a()  # a\n\n    # of stop\n    stop()\n"


def pair(point: str, **more: Any) -> tuple[Delta, Delta]:
    anchor_one, one, anchor_two, two = POINTS[point]
    return (
        delta(one, name="t.one", anchor=Anchor(anchor_one)),
        delta(two, name="t.two", anchor=Anchor(anchor_two), **more),
    )


@pytest.mark.parametrize("point", POINTS)
def test_two_insertions_at_one_point_need_an_order(point: str) -> None:
    one, two = pair(point)
    assert refused(TWO, one, two) == ["BP118"]
    assert refused(TWO, two, one) == ["BP118"]


@pytest.mark.parametrize("point", POINTS)
def test_the_declared_order_decides_and_not_the_order_of_declaration(point: str) -> None:
    one, two = pair(point, after=("t.one",))
    text = spliced(TWO, one, two).text
    assert text == spliced(TWO, two, one).text
    assert 0 < text.index("one()") < text.index("two()")


def test_one_delta_edits_at_one_point_in_its_own_order() -> None:
    text = spliced(TWO, delta(InsertBefore("one()"), InsertBefore("two()\nthree()"), InsertBefore("four()"))).text
    assert (
        "\n    one()  # bp: t.d\n    two()  # bp: t.d\n    three()  # bp: t.d\n    four()  # bp: t.d\n    # of stop"
        in text
    )


def test_two_edits_of_a_docstring_only_function() -> None:
    text = 'def f():\n    """Doc."""'
    one = delta(Prologue("one()"), name="t.one", anchor=None)
    two = delta(InsertAfter("two()"), name="t.two", anchor=Anchor('"""Doc."""'), after=("t.one",))
    assert refused(text, one, replace(two, after=())) == ["BP118"]
    assert spliced(text, two, one).text == text + "\n    one()  # bp: t.one\n    two()  # bp: t.two"


def test_insertions_around_one_statement_need_no_order() -> None:
    one, two = delta(InsertBefore("one()"), name="t.one"), delta(InsertAfter("two()"), name="t.two")
    assert spliced(TWO, one, two).text == spliced(TWO, two, one).text


def test_an_insertion_beside_a_replaced_statement_needs_no_order() -> None:
    one = delta(Replace("one()"), name="t.one")
    two = delta(InsertAfter("two()"), name="t.two", anchor=Anchor("a()"))
    text = "def f():\n    a()\n    # of stop\n    stop()\n    b()\n"
    assert (
        spliced(text, one, two).text
        == spliced(text, two, one).text
        == ("def f():\n    a()\n    two()  # bp: t.two\n    # of stop\n    one()  # bp: t.one\n    b()\n")
    )


LOOP = "def f():\n    while a:\n        b()\n        stop()\n    c()\n"


@pytest.mark.parametrize(
    ("one", "anchor_one", "two", "anchor_two"),
    [
        (Replace("one()"), "stop()", InsertBefore("two()"), "stop()"),
        (Replace("one()"), "stop()", InsertAfter("two()"), "stop()"),
        (Replace("one()"), "stop()", Replace("two()"), "stop()"),
        (Replace("one()"), "while $_", InsertBefore("two()"), "stop()"),
        (Replace("one()"), "while $_", InsertAfter("two()"), "b()"),
        (Replace("one()"), "while $_", Replace("two()"), "stop()"),
        (Replace("one()"), "b()\nstop()", InsertBefore("two()"), "stop()"),
    ],
)
def test_what_one_delta_replaces_no_other_may_edit(one: Edit, anchor_one: str, two: Edit, anchor_two: str) -> None:
    first = delta(one, name="t.one", anchor=Anchor(anchor_one))
    second = delta(two, name="t.two", anchor=Anchor(anchor_two), after=("t.one",))
    for deltas in ((first, second), (second, first)):
        plan = plan_of(LOOP, *deltas)
        assert [failure.code for failure in plan.all_failures] == ["BP119"]
        assert "t.one" in plan.all_failures[0].what
        assert "t.two" in plan.all_failures[0].what


def test_one_parameter_is_added_once() -> None:
    one, two = (delta(AddParameter("x", default), name=f"t.{default}", anchor=None) for default in "12")
    assert refused("def f(): pass\n", one, two) == ["BP119"]
    assert refused("def f(): pass\n", one, replace(two, after=("t.1",))) == ["BP119"]


@pytest.mark.parametrize("parameters", ["", "a", "*a"])
def test_two_parameters_need_an_order(parameters: str) -> None:
    text = f"def f({parameters}):\n    g()\n"
    one, two = (delta(AddParameter(name, "1"), name=f"t.{name}", anchor=None) for name in "xy")
    assert refused(text, one, two) == ["BP118"]
    two = replace(two, after=("t.x",))
    assert "x=1, y=1" in spliced(text, two, one).text
    assert spliced(text, two, one).text == spliced(text, one, two).text


# -- proofs that can fail --------------------------------------------------------------------

Patch = pytest.MonkeyPatch
MODULE = "x = 1  # x\ndef f():\n    a()  # a\n    # of stop\n    stop()  # s\n    b()\ny = 2  # y\n"


def changed_splice(change: Callable[[Splice], Splice]) -> Callable[[Patch], None]:
    def patch(monkeypatch: Patch) -> None:
        real = module._in_turn
        monkeypatch.setattr(module, "_in_turn", lambda *args: [change(splice) for splice in real(*args)])

    return patch


def changed_text(old: str, new: str) -> Callable[[Patch], None]:
    def patch(monkeypatch: Patch) -> None:
        real = module.Rewrite

        def make(original: Any, text: str, *args: Any) -> Rewrite:
            assert text.count(old) == 1
            return real(original, text.replace(old, new), *args)

        monkeypatch.setattr(module, "Rewrite", make)

    return patch


def moved(by: int) -> Callable[[Splice], Splice]:
    return lambda splice: replace(splice, start=splice.start + by, end=splice.end + by)


MUTANTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no mark": (lambda m: m.setattr(splice, "MARK", "  # "), "does not give upstream's text back"),
    "the mark of nobody": (lambda m: m.setattr(splice, "MARK", "  #bp: "), "does not give upstream's text back"),
    "a mark is lost": (changed_text("new()  # bp: t.d", "new()  # bp: t d"), "does not give upstream's text back"),
    "one line higher": (changed_splice(moved(-len("    a()  # a\n"))), "is not the edited tree"),
    "one line lower": (changed_splice(moved(len("    # of stop\n    stop()  # s\n"))), "is not the edited tree"),
    "one character lower": (changed_splice(moved(1)), "it does not parse"),
    "at the top": (changed_splice(lambda s: Splice(0, 0, s.text.lstrip(), s.delta)), "is not the edited tree"),
    "other text": (changed_splice(lambda s: replace(s, text=s.text.replace("new", "now"))), "is not the edited tree"),
    "twice": (changed_splice(lambda s: replace(s, text=s.text * 2)), "is not the edited tree"),
    "nothing": (changed_splice(lambda s: replace(s, text="")), "is not the edited tree"),
    "no indentation": (changed_splice(lambda s: replace(s, text=s.text.lstrip())), "it does not parse"),
    "an unmarked comment": (changed_splice(lambda s: replace(s, text="    # more\n" + s.text)), "text back"),
    "a replacement": (changed_splice(lambda s: replace(s, end=s.end + len("    # of stop\n"))), "taken away"),
    "code changes": (changed_text("b()", "c()"), "is not the edited tree"),
    "a constant changes": (changed_text("b()", "b(1)"), "is not the edited tree"),
    "a comment inside changes": (changed_text("# of stop", "# of stop!"), "does not give upstream's text back"),
    "a comment behind changes": (changed_text("# y", "# z"), "text after the last function changed"),
    "code behind changes": (changed_text("y = 2", "y = 3"), "text after the last function changed"),
    "code behind is lost": (changed_text("y = 2  # y\n", ""), "text after the last function changed"),
    "a comment ahead changes": (changed_text("# x", "# z"), "text before f changed"),
    "code ahead changes": (changed_text("x = 1", "x = 2"), "text before f changed"),
    "a line ahead is lost": (changed_text("x = 1  # x\n", ""), "text before f changed"),
    "the function is renamed": (changed_text("def f", "def g"), "m:f is not found in it"),
    "line ends change": (changed_text("b()\n", "b()\r\n"), "does not give upstream's text back"),
    "a space is added": (changed_text("b()\n", "b() \n"), "does not give upstream's text back"),
}  # fmt: skip


@pytest.mark.parametrize(("patch", "why"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_fails_the_proof(patch: Callable[[Patch], None], why: str, monkeypatch: Patch) -> None:
    plan = plan_of(MODULE, delta(InsertBefore(INSERT)))
    assert rewrite(plan)
    patch(monkeypatch)
    with pytest.raises(PatchError, match="BP404") as caught:
        rewrite(plan)
    (failure,) = caught.value.failures
    assert failure.code == "BP404"
    assert why in failure.what


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (AddParameter("n", "1"), lambda s: replace(s, text=s.text.replace("1", "2"))),
        (AddParameter("n", "1"), lambda s: replace(s, text=s.text.replace("n", "m"))),
        (AddParameter("n", "1"), lambda s: replace(s, text="*, " + s.text)),
        (Replace(INSERT), lambda s: replace(s, text=s.text.replace("new", "now"))),
        (Replace(INSERT), lambda s: replace(s, text=s.text.replace("bp: t.d", "new"))),
        (Replace(INSERT), moved(-1)),
        (Prologue(INSERT), moved(len("    a()  # a\n"))),
    ],
)
def test_a_mutant_of_another_edit_fails_the_proof(
    edit: Edit, change: Callable[[Splice], Splice], monkeypatch: Patch
) -> None:
    plan = plan_of(MODULE, delta(edit))
    assert rewrite(plan)
    changed_splice(change)(monkeypatch)
    with pytest.raises(PatchError, match="BP404"):
        rewrite(plan)


def test_a_comment_between_two_targets_is_proven_unchanged(monkeypatch: Patch) -> None:
    text = "def f():\n    if a:\n        stop()\n        # deeper\n# between\ndef g():\n    stop()\n"
    inner = Anchor("stop()", inside=(Level("if", "if $_"),))
    deltas = (delta(InsertAfter("new()", at="if"), anchor=inner), delta(InsertBefore("g()"), name="t.g", target="m:g"))
    assert spliced(text, *deltas).text.count("bp:") == 2
    monkeypatch.setattr(module, "take_out", lambda result: result.original.text)
    monkeypatch.setattr(module, "_prove_spliced", lambda *_: None)
    changed_text("# between", "# Between")(monkeypatch)
    with pytest.raises(PatchError, match=r"BP404 .*text before g changed"):
        rewrite(plan_of(text, *deltas))


WITHOUT_TAKING_OUT = [
    "no mark",
    "a mark is lost",
    "an unmarked comment",
    "a comment inside changes",
    "a space is added",
]


@pytest.mark.parametrize("mutant", WITHOUT_TAKING_OUT)
def test_the_marks_alone_are_enough_to_take_insertions_out(mutant: str, monkeypatch: Patch) -> None:
    plan = plan_of(MODULE, delta(InsertBefore(INSERT)))
    monkeypatch.setattr(module, "take_out", lambda result: result.original.text)
    assert rewrite(plan)
    MUTANTS[mutant][0](monkeypatch)
    with pytest.raises(PatchError, match=r"BP404.*without the marked lines is not upstream's text"):
        rewrite(plan)


def test_the_order_at_one_point_is_proven(monkeypatch: Patch) -> None:
    plan = plan_of(MODULE, delta(InsertBefore("one()"), InsertBefore("two()")))
    real = module._assemble
    monkeypatch.setattr(module, "_assemble", lambda p, m, splices: real(p, m, splices[::-1]))
    with pytest.raises(PatchError, match="is not the edited tree"):
        rewrite(plan)


def test_the_pristine_tree_is_left_as_it_was() -> None:
    plan = plan_of(MODULE, delta(InsertBefore(INSERT), Prologue("p()"), AddParameter("n", "1")))
    before = ast.dump(plan.target("m:f").node)
    result = rewrite(plan)["m"]
    assert ast.dump(plan.target("m:f").node) == before
    assert ast.dump(result.original.tree) == ast.dump(ast.parse(MODULE))


def test_a_rewrite_has_a_name_that_is_no_file() -> None:
    assert spliced(MODULE, delta(InsertBefore(INSERT))).filename == "<balance_patcher m>"
