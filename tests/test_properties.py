"""What must hold for any function and any insertion, tried on the standard library's own modules.

The statements are chosen directly, past the anchors: this is about splicing, not about matching.
The choices come from a fixed seed, so that a run in CI is the same as the one before.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sysconfig
import textwrap
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_patcher.delta import (
    AddParameter,
    Anchor,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Prologue,
    Replace,
    Variant,
)
from balance_patcher.errors import PatchError
from balance_patcher.feature import Feature
from balance_patcher.matching import Mismatch
from balance_patcher.pattern import compile_pattern
from balance_patcher.plan import Placement, Plan, Step
from balance_patcher.rewrite import Rewrite, _assemble, rewrite, take_out
from balance_patcher.source import Lane
from balance_patcher.targets import Target, definitions, docstring_length, find_target

#: Modules that every Python from 3.10 to 3.13 has as source.
MODULES = (
    "abc ast base64 bdb bisect calendar cmd codecs collections configparser contextlib copy csv dataclasses dis "
    "enum filecmp fileinput fnmatch fractions ftplib functools gettext glob gzip heapq inspect ipaddress json.decoder "
    "locale netrc numbers pprint queue quopri random sched shlex shutil statistics string textwrap tempfile "
    "threading timeit tokenize traceback types uuid weakref xml.dom.minidom zipfile"
).split()  # fmt: skip
ENDS = ("\n", "\r\n", "\r")
NEW = "bp_new"

HERE = settings(
    deadline=None, derandomize=True, database=None, max_examples=60, suppress_health_check=list(HealthCheck)
)  # fmt: skip


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


@cache
def lane_of(name: str, end: str = "\n", *, last: bool = True) -> Lane:
    """A module of the standard library as the only module of a lane, with other line ends."""
    stem = Path(sysconfig.get_path("stdlib"), *name.split("."))
    file = next(file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file())
    text = file.read_bytes().decode("utf-8")
    text = re.sub("\r\n|\r|\n", end, text if last else text.rstrip())
    return Lane(name, Memory(text.encode()))


@cache
def targets_of(lane: Lane) -> tuple[Target, ...]:
    """Every function of the module that can be a target."""
    text = lane.module("m")
    assert text is not None
    names: list[str] = []

    def collect(scope: ast.AST, prefix: str) -> None:
        for node in definitions(scope):
            name = prefix + node.name  # type: ignore[attr-defined]
            if isinstance(node, ast.ClassDef):
                collect(node, f"{name}.")
            else:
                names.append(name)

    collect(text.tree, "")
    found = [find_target(lane, f"m:{name}") for name in dict.fromkeys(names)]
    return tuple(target for target in found if isinstance(target, Target) and target.unusable is None)


@st.composite
def some_target(draw: st.DrawFn, ends: Sequence[str] = ENDS) -> tuple[Lane, Target]:
    lane = lane_of(draw(st.sampled_from(MODULES)), draw(st.sampled_from(ends)), last=draw(st.booleans()))
    targets = targets_of(lane)
    # Often the last one: what ends with the file has rules of its own.
    return lane, draw(st.sampled_from(targets) | st.just(targets[-1]))


def block(statements: list[str]) -> str:
    return textwrap.indent("\n".join(statements), "    ")


SIMPLE = st.sampled_from(
    [
        f"{NEW}()",
        "x = 'é # no comment'",
        "# a comment\nf(a, *b, c=1)",
        "x: int = 1",
        "del a",
        "f(\n    1,\n\n)",
        "return",
        "x = f'{y!r}'",
    ]
)
STATEMENT = st.recursive(
    SIMPLE,
    lambda inner: st.builds(
        lambda head, body: f"{head}:\n{block(body)}",
        st.sampled_from(["if a", "while a > 1", "for a in b", "with a as b", "def g(a, *, b=1)", "class C(B)"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)


def stands_in_a_function(text: str) -> bool:
    """Whether it is what an edit may be: a class with a ``return`` in it is refused where it is declared."""
    try:
        compile(f"def f():\n{block([text])}", "text", "exec")
    except SyntaxError:
        return False
    return True


TEXT = st.lists(STATEMENT, min_size=1, max_size=3).map("\n".join).filter(stands_in_a_function)


def plan_of(lane: Lane, target: Target, edits: Sequence[tuple[Edit, tuple[ast.stmt, ...]]]) -> Plan:
    """A plan that has each edit at the given statements."""
    declared: tuple[Edit, ...] = tuple(edit for edit, _ in edits) or (Prologue(f"{NEW}()"),)
    variant = Variant("v", Anchor("f()"), declared)
    delta = Delta("t.d", target.name, "w", "u", "r", (variant,))
    steps = tuple(Step(delta, edit, getattr(edit, "text", ""), statements) for edit, statements in edits)
    steps = tuple(
        Step(delta, edit, f"{edit.name}={edit.default}", ()) if isinstance(edit, AddParameter) else step
        for step, (edit, _) in zip(steps, edits, strict=True)
    )
    return Plan(Feature("t", "s", (delta,)), lane, [Placement(delta, "applied", variant, target, steps=steps)])


def plain(target: Target, statement: ast.stmt) -> bool:
    """Whether a statement has its lines for itself and is no ``elif``: nothing may refuse it then."""
    lines = target.text.lines
    first = lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    last = lines[(statement.end_lineno or 0) - 1].encode()[statement.end_col_offset :].decode()
    above = lines[statement.lineno - 2].rstrip("\r\n")
    alone = not first.strip() and not above.endswith("\\") and (not last.strip() or last.strip().startswith("#"))
    return alone and not lines[statement.lineno - 1].lstrip().startswith("elif")


def check_inserted(result: Rewrite) -> None:
    """Without the marked lines the text is upstream's, and the line map says so."""
    original, lines = result.original, type(result.original)("", "", "", result.text).lines
    kept = [line for line in lines if not line.rstrip("\r\n").endswith("  # bp: t.d")]
    text = "".join(kept)
    if not original.text.endswith(("\r", "\n")):
        text = text.rstrip("\r\n")
    assert text == original.text
    assert take_out(result) == original.text
    assert ast.dump(ast.parse(text)) == ast.dump(original.tree)
    assert [line for line, _ in result.line_map if line] == list(range(1, len(original.lines) + 1))
    assert [owner for _, owner in result.line_map if owner] == ["t.d"] * (len(lines) - len(kept))


@pytest.mark.parametrize("name", MODULES)
def test_a_rewrite_without_edits_is_the_identity(name: str) -> None:
    lane = lane_of(name)
    plan = plan_of(lane, targets_of(lane)[0], ())
    assert rewrite(plan) == {}
    result = _assemble(plan, "m", [])
    assert result.text == result.original.text == take_out(result)
    assert result.line_map == [(line, None) for line in range(1, len(result.original.lines) + 1)]


@given(some_target(), st.data())
@HERE
def test_insertions_can_be_taken_out_again(chosen: tuple[Lane, Target], data: st.DataObject) -> None:
    lane, target = chosen
    statements = [suite[at] for _, _, suite, at in target.places.values()]
    usable = [statement for statement in statements if plain(target, statement)]
    if not usable:
        return
    edits: list[tuple[Edit, tuple[ast.stmt, ...]]] = []
    for statement in data.draw(st.lists(st.sampled_from(usable), min_size=1, max_size=4)):
        kind = data.draw(st.sampled_from([InsertBefore, InsertAfter]))
        edits.append((kind(data.draw(TEXT)), (statement,)))
    check_inserted(rewrite(plan_of(lane, target, edits))["m"])


@given(some_target(), st.data())
@HERE
def test_any_statement_is_edited_and_proven_or_refused_by_its_id(
    chosen: tuple[Lane, Target], data: st.DataObject
) -> None:
    lane, target = chosen
    _, _, suite, at = data.draw(st.sampled_from(list(target.places.values())))
    edit = data.draw(st.sampled_from([InsertBefore, InsertAfter, Prologue]))(data.draw(TEXT))
    statement = suite[at]
    if isinstance(edit, Prologue):
        statement = target.node.body[min(docstring_length(target.node), len(target.node.body) - 1)]
    plan = plan_of(lane, target, [(edit, (statement,))])
    if plain(target, statement):
        check_inserted(rewrite(plan)["m"])
        return
    with contextlib.suppress(PatchError):  # a trailing `;` leaves room above
        check_inserted(rewrite(plan)["m"])
        return
    with pytest.raises(PatchError, match=r"BP40[123]"):
        rewrite(plan)


@given(chosen=some_target(), twice=st.booleans())
@HERE
def test_a_parameter_can_be_added_and_taken_out_again(chosen: tuple[Lane, Target], *, twice: bool) -> None:
    lane, target = chosen
    edits: list[tuple[Edit, tuple[ast.stmt, ...]]] = [(AddParameter("bp_one", "None"), ())]
    edits += [(AddParameter("bp_two", "(1, 'a')"), ())] if twice else []
    result = rewrite(plan_of(lane, target, edits))["m"]
    assert take_out(result) == result.original.text
    arguments = result.targets[target.name].node.args
    assert [a.arg for a in arguments.args if a.arg.startswith("bp_")] == ["bp_one", "bp_two"][: 1 + twice]
    assert [line for line, _ in result.line_map] == list(range(1, len(result.original.lines) + 1))


@given(some_target(ends=["\n"]), st.data())
@HERE
def test_a_replacement_keeps_every_comment(chosen: tuple[Lane, Target], data: st.DataObject) -> None:
    lane, target = chosen
    usable = [(suite, at) for _, _, suite, at in target.places.values() if plain(target, suite[at])]
    if not usable:
        return
    suite, at = data.draw(st.sampled_from(usable))
    result = rewrite(plan_of(lane, target, [(Replace(f"{NEW}()\n{NEW}()"), (suite[at],))]))["m"]
    assert result.text.count(NEW) == 2
    assert take_out(result) == result.original.text
    assert comments(result.text) == comments(result.original.text)


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string.rstrip() for token in tokens if token.type == tokenize.COMMENT and token.string != "# bp: t.d"]


@given(some_target(ends=["\n"]), st.data())
@HERE
def test_a_statement_as_its_own_pattern_matches_it(chosen: tuple[Lane, Target], data: st.DataObject) -> None:
    _, target = chosen
    _, _, suite, at = data.draw(st.sampled_from(list(target.places.values())))
    statement = suite[at]
    pattern = compile_pattern(ast.unparse(statement))
    assert pattern.match(statement.value if isinstance(statement, ast.Expr) else statement) == {}
    others = [suite[at] for _, _, suite, at in target.places.values()]
    equal = [ast.dump(other) for other in others if not isinstance(pattern.match(other), Mismatch)]
    assert set(equal) <= {ast.dump(statement)}
