"""Which statement a line means, and which one is the same on another lane."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.counterparts import Counterparts
from balance_patcher.errors import Failure, PatchError
from balance_patcher.pointing import Pointed, check_file, checkout_of, counterpart, read_at, statement_at
from balance_patcher.proposal import Place
from balance_patcher.render import head
from balance_patcher.source import DirSource, Lane
from balance_patcher.statements import header
from balance_patcher.targets import Target, find_target

TEXT = '''\
import os


class Pump:
    def run(self):
        """Runs."""
        self.level = 0

        # a comment
        while self.level < self.cap:
            if self.on:
                self.step(
                    1,
                )
            elif self.off:
                break
            else:
                self.wait()
            with (
                self.lock,
                self.gate as gate,
            ):
                gate.open()
            for x in (1,
                      2): self.push(x)
            a = 1; b = 2

        def inner():
            return 1

        try:
            inner()
        except OSError:
            pass
        return self.level

    def stop(self):
        self.on = False
'''


class Memory:
    """A source that holds one module, ``vllm.pump``."""

    spec = "memory"

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, path: str) -> bytes | None:
        return self.text.encode() if path == "vllm/pump.py" else None

    def display(self, path: str) -> str:
        return f"/site/{path}"

    def commit(self) -> str | None:
        return None


def lane_of(text: str) -> Lane:
    return Lane("one", Memory(text))


def target(text: str = TEXT, name: str = "vllm.pump:Pump.run") -> Target:
    found = find_target(lane_of(text), name)
    assert isinstance(found, Target)
    return found


def line_of(part: str, text: str = TEXT) -> int:
    (line,) = [at for at, content in enumerate(text.splitlines(), 1) if part in content]
    return line


def pointed(part: str) -> Pointed:
    return statement_at("one", target(), line_of(part))


def refused(line: int) -> Failure:
    with pytest.raises(PatchError) as caught:
        statement_at("one", target(), line)
    (failure,) = caught.value.failures
    return failure


@pytest.mark.parametrize(
    ("part", "begins"),
    [
        ("self.level = 0", "self.level = 0"),
        ("while self.level", "while self.level"),
        ("if self.on:", "if self.on:"),
        ("self.step(", "self.step("),
        ("break", "break"),
        ("self.wait()", "self.wait()"),
        ("with (", "with ("),
        ("a = 1; b = 2", "a = 1; b = 2"),
        ("def inner", "def inner"),
        ("return self.level", "return self.level"),
    ],
)
def test_a_line_means_the_statement_that_begins_there(part: str, begins: str) -> None:
    found = pointed(part)
    assert (found.place.statement.lineno, found.said) == (line_of(begins), "")


@pytest.mark.parametrize(("part", "begins"), [("                    1,", "self.step("), ("self.gate as", "with (")])
def test_a_line_inside_a_statement_means_it_and_that_is_said(part: str, begins: str) -> None:
    found, line, first = pointed(part), line_of(part), line_of(begins)
    assert found.place.statement.lineno == first
    assert found.said == f"line {line} is inside the statement that begins on line {first}"


REFUSED = {
    "no such line": (99, "BP801", "has 38 lines, and no line 99", "point at a line from 5 to 35"),
    "line zero": (0, "BP801", "no line 0", "point at a line from 5 to 35"),
    "another method": (38, "BP802", "that is in Pump.stop", "or make the target vllm.pump:Pump.stop"),
    "no function at all": (1, "BP802", "that is in no function", "point at a line from 5 to 35"),
    "the function's header": (5, "BP803", "line 5 is in the header of the function", "point at line 6"),
    "the docstring": (6, "BP803", "line 6 is in the docstring", "declare a Prologue"),
    "an empty line": (8, "BP803", "line 8 is empty", "point at line 7  `self.level = 0` or line 10"),
    "a comment": (9, "BP803", "line 9 has no statement: `# a comment`", "point at line 7"),
    "an else": (17, "BP803", "line 17 has no statement: `else:`", "or line 18  `self.wait()`"),
    "an except": (33, "BP803", "line 33 has no statement: `except OSError:`", "or line 34  `pass`"),
    "an elif": (15, "BP403", "line 15 is in `elif self.off:`", "point at the first `if` of the chain"),
    "a nested function": (29, "BP803", "is in `def inner`, which is no part", "anchors find no nested function"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_with_no_statement_to_anchor_at_is_refused(name: str) -> None:
    line, code, what, follow = REFUSED[name]
    failure = refused(line)
    assert failure.code == code
    assert what in failure.what
    assert follow in failure.next


@pytest.mark.parametrize(("text", "found"), [("a/b.py:12", ("a/b.py", 12)), ("C:/x.py:3", ("C:/x.py", 3))])
def test_a_file_and_a_line_are_read(text: str, found: tuple[str, int]) -> None:
    assert read_at(text) == found


@pytest.mark.parametrize("text", ["", "file.py", "file.py:", "file.py:x", ":3", "file.py:-1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(PatchError, match="BP801"):
        read_at(text)


@pytest.mark.parametrize("file", ["pump.py", "vllm/pump.py"])
def test_the_end_of_the_modules_path_is_enough(file: str) -> None:
    lane = lane_of(TEXT)
    text = lane.module("vllm.pump")
    assert text is not None
    check_file(file, lane, text)


@pytest.mark.parametrize("file", ["valve.py", "other/pump.py", "ump.py"])
def test_a_file_of_another_module_is_refused(file: str) -> None:
    lane = lane_of(TEXT)
    text = lane.module("vllm.pump")
    assert text is not None
    with pytest.raises(PatchError, match=r"BP801 .*vllm\.pump is not in") as caught:
        check_file(file, lane, text)
    assert "pump.py:LINE" in str(caught.value)


def test_a_file_that_is_not_there_is_no_end_of_a_path() -> None:
    lane = lane_of(TEXT)
    text = lane.module("vllm.pump")
    assert text is not None
    for file in ("/nowhere/vllm/pump.py", "/pump.py"):
        with pytest.raises(PatchError, match=rf"BP801 .*there is no file {file}"):
            check_file(file, lane, text)


def test_a_file_on_disk_stands_in_the_tree_that_it_is_of(tmp_path: Path) -> None:
    file = tmp_path / "src/vllm/pump.py"
    file.parent.mkdir(parents=True)
    file.write_text(TEXT)
    found = checkout_of(str(file), "vllm.pump")
    assert found is not None
    assert found.root == tmp_path / "src"
    assert checkout_of(str(file), "vllm.other") is None
    assert checkout_of(str(tmp_path / "none.py"), "vllm.pump") is None
    package = tmp_path / "src/vllm/pump/__init__.py"
    package.parent.mkdir()
    package.write_text(TEXT)
    assert checkout_of(str(package), "vllm.pump") is not None


# -- the same statement on another lane --------------------------------------------------------


def place(body: str) -> Place:
    text = "class Pump:\n    def run(self):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8) + "\n"
    found = target(text)
    line = next((at for at, content in enumerate(text.splitlines(), 1) if content.endswith("# here")), 3)
    statement = next(suite[at] for _, _, suite, at in found.places.values() if suite[at].lineno == line)
    return Place("one", found, statement)


CHANGED = {
    "moved down": ("x = 1  # here\ny = 2", "a = 0\nb = 0\nx = 1  # here\ny = 2"),
    "one of many, by what is around it": (
        "a()\nreturn_()\nb()\nreturn_()  # here\nc()",
        "b()\nreturn_()  # here\nc()\nreturn_()",
    ),
    "changed in place": ("a()\nif len(self.on) == self.cap_on: # x  # here\n    pass\nb()",
                         "a()\nif self.n_on >= self.cap_all:  # here\n    pass\nc()\nb()"),
    "changed, in a suite that was changed": (
        "while self.a.b(1):\n    x = f(self.one)  # here\n    y = 1",
        "x = f(self.one, 2)\nwhile self.a.b(2):\n    z = 1\n    x = f(self.one, 3)  # here\n    y = 1",
    ),
    "before it was": ("a()\nb()\nself.take(one)  # here", "self.take(one)  # here\na()\nb()"),
    "equal, before one that is like it and in its place": (
        "p()\nself.take(one, two)  # here\nq()\nr()",
        "self.take(one, two)  # here\np()\nself.take(one, three)\nq()\nr()",
    ),
    "in the loop that its own became, though another has it too": (
        "while self.run and a:\n    b()\n    self.take(one)  # here\n    c()\nfor x in y:\n    d()",
        "while a > 0:\n    b()\n    self.take(one, two)  # here\n    c()\nfor x in y:\n    d()\n    self.take(one)",
    ),
    "behind a new one that reads alike": (
        "while a:\n    if b:\n        stop()  # here\n    c()",
        "while a:\n    if not d:\n        stop()\n    if b:\n        stop()  # here\n    c()",
    ),
    "one without a name, by what it stands in": (
        "while a:\n    b()\n    if len(self.on) == self.cap_on:\n        break  # here\n    c()",
        "while a:\n    if not q:\n        break\n    if self.n_on >= self.cap_on:\n        break  # here\n    c()",
    ),
    "in an `if` that is new": ("a()\nself.take(one)  # here\nb()", "a()\nif c:\n    self.take(one)  # here\nb()"),
    "with its parent, which stands elsewhere": (
        "if a.b:\n    stop()\nc()\nd()\nif b.c:\n    stop()  # here",
        "if b.c:\n    stop()  # here\nc()\nd()\nif a.b:\n    stop()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_the_same_statement_is_found_on_the_other_lane(name: str) -> None:
    before, after = map(place, CHANGED[name])
    assert counterpart(before, "two", after.target).statement is after.statement


GONE = {
    "another kind": ("x = f(a.b)", "f(a.b)\ny.z()"),
    "the same structure without its names": ("self.a.b(c)", "self_.d.e(f)\ng.h()"),
    "another name in common structure": ("if a.b is not None:\n    c()", "if d.e is not None:\n    f()\ng()"),
}


@pytest.mark.parametrize("name", GONE)
def test_a_lane_with_nothing_like_it_is_refused_with_what_is_nearest(name: str) -> None:
    before, after = map(place, GONE[name])
    with pytest.raises(PatchError, match="BP804") as caught:
        counterpart(before, "two", after.target)
    (failure,) = caught.value.failures
    fields = dict(failure.fields)
    assert fields["one"].startswith("pump.py:3  `")
    assert fields["nearest"].startswith("pump.py:3  `")
    assert "lane two out" in failure.next


#: A statement, what the lane has that is like it, and what it could be there.
DOUBTFUL = {
    "out of its loop": ("while a:\n    b()\n    self.take(one)  # here", "while a:\n    b()\nself.take(one)", None),
    "twice, and nothing tells which": (
        "a()\nself.take(one)  # here\nb()",
        "a()\nself.take(one)\nc()\nself.take(one)\nb()",
        "pump.py:4  `self.take(one)`\npump.py:6  `self.take(one)`",
    ),
    "changed into two": (
        "a()\nself.take(one)  # here\nb()",
        "a()\nself.take(one, 2)\nself.take(one, 3)\nb()",
        "pump.py:4  `self.take(one, 2)`\npump.py:5  `self.take(one, 3)`",
    ),
    "another one became it": (
        "a()\nself.take(one)\nself.take(two)  # here\nb()",
        "a()\nself.take(one, 3)\nb()",
        "pump.py:4  `self.take(one, 3)`",
    ),
    "one without a name, in what is gone": (
        "while a:\n    if self.b:\n        break  # here\n    c()",
        "while a:\n    if d.e:\n        break\n    c()",
        None,
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_could_be_another_one_is_refused(name: str) -> None:
    one, two, could_be = DOUBTFUL[name]
    before, after = place(one), place(two)
    with pytest.raises(PatchError, match="BP804") as caught:
        counterpart(before, "two", after.target)
    (failure,) = caught.value.failures
    assert dict(failure.fields).get("could be") == could_be


LOOPS = {"while req_index": "running", "while (self.waiting": "waiting", "while token_budget": "waiting"}


def loops(target: Target, statement: ast.stmt) -> tuple[str, ...]:
    """The loops around a statement of `schedule`, each under a name that it has on both releases."""
    said = [head(node) for node, _ in target.ancestors(statement) if isinstance(node, (ast.For, ast.While))]
    return tuple(next((name for start, name in LOOPS.items() if text.startswith(start)), text) for text in said)


@pytest.mark.parametrize(("one", "two", "least"), [("0.23.0", "0.33.0", 191), ("0.33.0", "0.23.0", 191)])
def test_no_statement_of_schedule_is_mistaken_for_another(
    one: str, two: str, least: int, release_dir: Callable[[str], Path]
) -> None:
    """All of them; against ``difflib`` over their text, their loops and what those without a name stand in."""
    name = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    folders = [release_dir(version) for version in (one, two)]
    found = [find_target(Lane(str(folder), DirSource("dir", folder)), name) for folder in folders]
    before, after = (item for item in found if isinstance(item, Target))

    def row(target: Target) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        for parent, field, suite, at in target.places.values():
            nameless = isinstance(suite[at], (ast.Break, ast.Continue))
            rows.append((header(suite[at]), loops(target, suite[at]), nameless and (header(parent), field)))
        return rows

    own, others = ([suite[at] for _, _, suite, at in target.places.values()] for target in (before, after))
    same = {}
    blocks = difflib.SequenceMatcher(None, row(before), row(after), autojunk=False).get_matching_blocks()
    for start, there, size in blocks:
        same |= {id(own[start + at]): others[there + at] for at in range(size)}
    beside = Counterparts(before, after)
    proposed = [(statement, made) for statement in own if (made := beside.of(statement).statement) is not None]
    mistaken = [
        f"{statement.lineno} {head(statement)} -> {made.lineno} {head(made)}"
        for statement, made in proposed
        if loops(before, statement) != loops(after, made) or same.get(id(statement), made) is not made
    ]
    assert mistaken == []
    assert len(proposed) == least
    assert len({id(made) for _, made in proposed}) == len(proposed)
