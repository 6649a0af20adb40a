"""Patterns: what each hole binds, what is compared and how, and what is refused at definition."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

from balance_patcher.errors import PatchError
from balance_patcher.holes import scan
from balance_patcher.matching import Bound, Mismatch, render_bound, same
from balance_patcher.pattern import compile_pattern
from balance_patcher.template import Template


def candidate(pattern: str, text: str) -> Any:
    """What a pattern is matched against: the text as one node of the pattern's kind, or a run of statements."""
    body = ast.parse(text).body
    kind = compile_pattern(pattern).kind
    if kind == "statements":
        return body
    assert len(body) == 1
    return body[0].value if kind == "expression" and isinstance(body[0], ast.Expr) else body[0]


def match(pattern: str, text: str, **allow: tuple[str, ...]) -> dict[str, str] | Mismatch:
    """What the holes are bound to, as text; or the first difference."""
    found = compile_pattern(pattern).match(candidate(pattern, text), {}, allow)
    return found if isinstance(found, Mismatch) else {name: render_bound(value) for name, value in found.items()}


# -- holes -----------------------------------------------------------------------------------

BINDS = [
    # one node: an expression
    ("f($A)", "f(x + 1)", {"A": "x + 1"}),
    ("$F(1)", "a.b(1)", {"F": "a.b"}),
    ("$A + $B", "x + y * z", {"A": "x", "B": "y * z"}),
    ("x[$I]", "x[1:2]", {"I": "1:2"}),
    ("f($A)", "f(*rest)", {"A": "*rest"}),
    ("return $V", "return None", {"V": "None"}),
    ("x = $V", "x = [i for i in y]", {"V": "[i for i in y]"}),
    # one node: a statement, alone on its line
    ("if a:\n    $S", "if a:\n    x = 1", {"S": "x = 1"}),
    ("if a: $S", "if a: f()", {"S": "f()"}),
    ("if a:\n    $S\n    return", "if a:\n    with b: pass\n    return", {"S": "with b:\n    pass"}),
    # one node: an identifier, a keyword's name, an attribute
    ("def $F(): pass", "def run(): pass", {"F": "run"}),
    ("def f($A, *, $B=1): pass", "def f(x, *, y=1): pass", {"A": "x", "B": "y"}),
    ("f($K=1)", "f(size=1)", {"K": "size"}),
    ("f(**$D)", "f(**more)", {"D": "more"}),
    ("self.$CAP", "self.limit", {"CAP": "limit"}),
    ("class $C($B): pass", "class A(b.C): pass", {"C": "A", "B": "b.C"}),
    ("import $M", "import a.b", {"M": "a.b"}),
    ("from $M import $N", "from a.b import c", {"M": "a.b", "N": "c"}),
    ("global $G, y", "global x, y", {"G": "x"}),
    (
        "try:\n    $_\nexcept $E as $N:\n    $_",
        "try:\n    f()\nexcept OSError as e:\n    g()",
        {"E": "OSError", "N": "e"},
    ),
    # not kept
    ("f($_, $_)", "f(1, 2)", {}),
    ("self.$_", "self.x", {}),
    # a list among statements
    ("if a:\n    $$$S", "if a:\n    x()\n    y = 1", {"S": "x(), y = 1"}),
    ("if a:\n    x()\n    $$$S\n    z()", "if a:\n    x()\n    z()", {"S": ""}),
    ("if a:\n    $$$S\n    z()\n    $$$T", "if a:\n    x()\n    z()\n    z()", {"S": "x()", "T": "z()"}),
    ("while $_:\n    $$$_", "while a:\n    b()\n    c()", {}),
    # a list among call arguments, keyword arguments with it
    ("f($$$A)", "f()", {"A": ""}),
    ("f($$$A)", "f(1, *b, c=2, **d)", {"A": "1, *b, c=2, **d"}),
    ("f(1, $$$A)", "f(1, k=2)", {"A": "k=2"}),
    ("f($A, $$$_)", "f(1, 2, 3)", {"A": "1"}),
    ("f($$$A, k=$K)", "f(1, 2, k=3)", {"A": "1, 2", "K": "3"}),
    ("[$$$A, z]", "[x, y, z]", {"A": "x, y"}),
    # an operator
    ("$COUNT <$OP> self.$CAP", "len(x) >= self.cap", {"COUNT": "len(x)", "OP": ">=", "CAP": "cap"}),
    ("a <$_> b", "a != b", {}),
    ("$A <$OP> None", "a is not None", {"A": "a", "OP": "is not"}),
    ("a <$OP> $B", "a not in b", {"B": "b", "OP": "not in"}),
    ("a <$P> $B <$Q> c", "a < b <= c", {"P": "<", "B": "b", "Q": "<="}),
    ("a < $B <$Q> c", "a < b == c", {"B": "b", "Q": "=="}),
    ("a <$P> b < c", "a in b < c", {"P": "in"}),
    ("a < $X >= b", "a < 1 >= b", {"X": "1"}),
    ("not a <$OP> b", "not a is b", {"OP": "is"}),
    ("f(a<$OP>b)", "f(a < b)", {"OP": "<"}),
    # twice the same
    ("$A + $A", "x.y + x.y", {"A": "x.y"}),
    ("$A = $A + 1", "n = n + 1", {"A": "n"}),  # stored here, loaded there
    ("self.$N = $N", "self.a = a", {"N": "a"}),  # an attribute's name here, a name there
    ("a <$OP> b and c <$OP> d", "a < b and c < d", {"OP": "<"}),
    ("f($$$A) + g($$$A)", "f(1, k=2) + g(1, k=2)", {"A": "1, k=2"}),
    # parentheses, quotes and comments do not exist
    ("x = ($A)", "x = (  # why\n    1\n)", {"A": "1"}),
    ("x = 'a'", 'x = "a"', {}),
    # a hole as the text of a dollar: not in strings, not in comments
    ("f('$A', $B)  # $C", "f('$A', 1)", {"B": "1"}),
    ('f("""\n$A\n""")', "f('\\n$A\\n')", {}),
    ("f(r'\\'' '$A')", "f(r'\\'' '$A')", {}),
    ("return'$A'", "return '$A'", {}),
    ('f"${x}"', "f'${x}'", {}),
    ('f"{{$A}}" + $B', "f'{{$A}}' + b", {"B": "b"}),
    ('f"{ {1: 2}}$A" + $B', "f'{ {1: 2}}$A' + b", {"B": "b"}),
    ('f"{x}}}$A" + $B', "f'{x}}}$A' + b", {"B": "b"}),
]


@pytest.mark.parametrize(("pattern", "text", "bound"), BINDS)
def test_binds(pattern: str, text: str, bound: dict[str, str]) -> None:
    assert match(pattern, text) == bound


DIFFERS = [
    ("$A + $A", "x + y", "right", "the same as $A before", "y"),
    ("a <$OP> b and c <$OP> d", "a < b and c > d", "values[1].ops[0]", "the same as $OP before", ">"),
    ("f($$$A) + g($$$A)", "f(1) + g(2)", "right.args", "the same as $A before", "2"),
    ("self.$N = $N", "self.a = b", "value", "the same as $N before", "b"),
    ("a <$OP> b", "a < b < c", "ops[1]", "nothing", "<"),
    ("f($A)", "f()", "args[0]", "`__bp_one_A`", "nothing"),
    ("f($A)", "f(k=1)", "args[0]", "`__bp_one_A`", "nothing"),
    ("f($A, $$$_)", "f(k=1)", "args[0]", "a positional argument", "keyword"),
    ("f($$$A, k=1)", "f(1, k=2)", "keywords[0].value.value", "1", "2"),
    ("f($$$A)", "g()", "func.id", "`f`", "`g`"),
    ("if a:\n    $S", "if a:\n    x()\n    y()", "body[1]", "nothing", "Expr"),
    ("if a: break", "if a: break\nelse: pass", "orelse[0]", "nothing", "Pass"),
    ("if $A == self.cap: break", "if n == self.top: break", "test.comparators[0].attr", "`cap`", "`top`"),
    ("if $A == self.cap: break", "if n > self.cap: break", "test.ops[0]", "==", ">"),
    ("if $A <$OP> self.cap: break", "if self.full(): break", "test", "Compare", "Call"),
    ("if $A: break", "if a: return", "body[0]", "Break", "Return"),
    ("if $A: break", "while a: break", "", "If", "While"),
    ("return $V", "return", "value", "`__bp_one_V`", "nothing"),
    ("return", "return 1", "value", "None", "1"),
    ("x = 1", "x = y", "value", "1", "`y`"),
    ("x: int", "x: int = 1", "value", "None", "1"),
    ("async with $_", "with a: pass", "", "AsyncWith", "With"),
    ("def $F(): pass", "async def f(): pass", "", "FunctionDef", "AsyncFunctionDef"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "text", "path", "wanted", "found"), DIFFERS)
def test_names_the_first_difference(pattern: str, text: str, path: str, wanted: str, found: str) -> None:
    assert match(pattern, text) == Mismatch(path, wanted, found)


def test_a_difference_reads_as_a_sentence() -> None:
    assert str(match("if $A <$OP> self.cap: break", "if self.full(): break")) == "differs at test: Compare → Call"
    assert str(match("if $A: break", "while a: break")) == "differs at the node itself: If → While"


def test_an_unknown_operator_in_a_pattern_has_a_name() -> None:
    assert match("a <$OP> b <$Q> c", "a < b") == Mismatch("ops[1]", "any operator", "nothing")


# -- constants, context ----------------------------------------------------------------------

CONSTANTS = ["1", "1.0", "True", "0", "0.0", "-0.0", "False", "None", "...", "''", "b''", "'1'", "1j", "'None'"]


@pytest.mark.parametrize("one", CONSTANTS)
@pytest.mark.parametrize("other", CONSTANTS)
def test_constants_compare_by_type_and_value(one: str, other: str) -> None:
    matched = not isinstance(match(f"x = {one}", f"x = {other}"), Mismatch)
    assert matched == (one == other)


@pytest.mark.parametrize(("one", "other"), [("u'a'", "'a'"), ("0x10", "16"), ("1_000", "1000"), ("'a' 'b'", "'ab'")])
def test_the_spelling_of_a_constant_does_not_count(one: str, other: str) -> None:
    assert match(f"f({one})", f"f({other})") == {}


def test_the_context_of_a_name_does_not_count() -> None:
    assert match("$A.x", "a.x") == {"A": "a"}
    stored = ast.parse("a.x = 1").body[0].targets[0]  # type: ignore[attr-defined]
    assert not isinstance(compile_pattern("a.x").match(stored), Mismatch)


# -- headers ---------------------------------------------------------------------------------

HEADERS = [
    ("while $_", "while a:\n    b()\nelse:\n    c()", {}),
    ("while $_:", "while a: b()", {}),
    ("if $A", "if a.b: c()\nelse: d()", {"A": "a.b"}),
    ("for $X in $Y", "for x in y: z()", {"X": "x", "Y": "y"}),
    ("with $A", "with a: b()", {"A": "a"}),
    ("with $A as $B, c", "with a as b, c: d()", {"A": "a", "B": "b"}),
    ("def $F($A)", "@wraps\ndef f(x):\n    return x", {"F": "f", "A": "x"}),
    ("class $C", "class A:\n    x = 1", {"C": "A"}),
    ("try", "try: a()\nexcept E: b()\nelse: c()\nfinally: d()", {}),
    ("try:", "try: a()\nfinally: d()", {}),
    ("async for $X in $Y", "async for x in y: z()", {"X": "x", "Y": "y"}),
    ("async with $A as b", "async with a as b: c()", {"A": "a"}),
    ("async def $F()", "async def f(): await g()", {"F": "f"}),
    ("if (\n    $A\n    and b\n)", "if a and b: c()", {"A": "a"}),
]


@pytest.mark.parametrize(("pattern", "text", "bound"), HEADERS)
def test_a_header_matches_whatever_its_suites_hold(pattern: str, text: str, bound: dict[str, str]) -> None:
    assert compile_pattern(pattern).kind == "header"
    assert match(pattern, text) == bound


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("while a", "while b: pass"),
        ("with $A", "with a as b: pass"),
        ("def f($A)", "def f(a, b): pass"),
        ("if $_", "while a: pass"),
    ],
)
def test_a_header_is_compared(pattern: str, text: str) -> None:
    assert isinstance(match(pattern, text), Mismatch)


def test_only_the_header_itself_is_open() -> None:
    assert isinstance(match("if a:\n    while b: pass", "if a:\n    while b: x()"), Mismatch)


# -- runs of statements ----------------------------------------------------------------------


def test_a_run_of_statements_matches_a_run_of_the_same_length() -> None:
    pattern = "$C = $V\nif $C <$OP> self.$CAP: break"
    text = "n = len(a)\nif n >= self.cap: break"
    assert match(pattern, text) == {"C": "n", "V": "len(a)", "OP": ">=", "CAP": "cap"}
    assert match(pattern, text + "\nf()") == Mismatch("statements[2]", "nothing", "Expr")
    assert match(pattern, "n = len(a)") == Mismatch("statements[1]", "If", "nothing")
    assert match(pattern, "n = len(a)\nif m >= self.cap: break") == Mismatch(
        "statements[1].test.left", "the same as $C before", "m"
    )


def test_a_list_hole_among_statements_of_a_run() -> None:
    assert match("a()\n$$$S\nb()", "a()\nx = 1\ny = 2\nb()") == {"S": "x = 1, y = 2"}


def test_one_node_is_not_a_run() -> None:
    found = compile_pattern("if a: break").match(ast.parse("if a: break\nf()").body)
    assert found == Mismatch("", "one node", "2 nodes")


def test_what_is_bound_already_must_be_equal() -> None:
    pattern, node = compile_pattern("f($A)"), candidate("f($A)", "f(x)")
    known: dict[str, Bound] = {"A": ast.Name("x")}
    assert not isinstance(pattern.match(node, known), Mismatch)
    assert isinstance(pattern.match(node, {"A": ast.Name("y")}), Mismatch)
    assert list(known) == ["A"], "the caller's bindings are left alone"


# -- allowed texts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("n >= self.a", {"N": "n", "OP": ">=", "CAP": "a"}),
        ("n == self.b", {"N": "n", "OP": "==", "CAP": "b"}),
        ("n < self.a", Mismatch("ops[0]", ">= or ==", "<")),
        ("n >= self.c", Mismatch("comparators[0].attr", "a or b", "c")),
    ],
)
def test_a_hole_can_be_limited_to_some_texts(text: str, result: object) -> None:
    assert match("$N <$OP> self.$CAP", text, OP=(">=", "=="), CAP=("a", "b")) == result


# -- what is refused at definition -----------------------------------------------------------

BAD = [
    ("", "nothing to match"),
    ("   \n", "nothing to match"),
    ("# only a comment", "nothing to match"),
    ("$A", "only holes"),
    ("$_\n$$$B", "only holes"),
    ("$$$_", "only holes"),
    ("if $A ==", "not Python"),
    ("f(", "not Python"),
    ("x = 'open", "not Python"),
    ("else: $_", "a loose `else:` header"),
    ("elif $A: break", "a loose `elif` header"),
    ("except $E: pass", "a loose `except` header"),
    ("finally:\n    f()", "a loose `finally:` header"),
    ("case $A: pass", "a loose `case` header"),
    ("case ($A, 1)", "a loose `case` header"),
    ("x = 1\nelse: pass", "not Python"),
    ("f($lower)", "`$lower)` is no hole"),
    ("f($1)", "`$1)` is no hole"),
    ("f($)", "`$)` is no hole"),
    ("f($Name)", "`$Name)` is no hole"),
    ("f($$A)", "`$$A)` is no hole"),
    ("f($_x)", "`$_x)` is no hole"),
    ("f(a$A)", "`$A)` is no hole"),
    ("f($A$B)", "is no hole"),
    ("f($$$Rest)", "is no hole"),
    ("f(<$op>)", "is no hole"),
    ("x = $$$A", "a list hole where one node stands"),
    ("$$$F(x)", "a list hole where one node stands"),
    ("f(k=$$$A)", "a list hole where one node stands"),
    ("f(*$$$A)", "a list hole where one node stands"),
    ("a + $$$A", "a list hole where one node stands"),
    ("with $$$A", "a list hole where one node stands"),
    ("$$$A <$OP> b", "a list hole where one node stands"),
    ("self.$$$A", "a list hole in place of an identifier"),
    ("f($$$A=1)", "a list hole in place of an identifier"),
    ("global $$$A", "a list hole in place of an identifier"),
    ("def $$$F(): pass", "a list hole in place of an identifier"),
    ("def f($$$A): pass", "a list hole among parameters"),
    ("def f(self, $$$A)", "a list hole among parameters"),
    ("def f(*, $$$A): pass", "a list hole among parameters"),
    ("def f(*$$$A): pass", "a list hole in place of an identifier"),
    ("def f($$$A, /): pass", "a list hole in place of an identifier"),
    ("f(<$OP>)", "not Python"),
    ("a <$OP>", "not Python"),
    ("a <$OP>= b", "`<$OP>=` is no hole"),
    ("<$OP> a", "not Python"),
    ("a <<$OP> b", "an operator hole outside a comparison"),
    ("a <$OP>> b", "an operator hole outside a comparison"),
    ("__bp_one_A + 1", "the reserved prefix `__bp_`"),
    ("f('__bp_')", "the reserved prefix `__bp_`"),
    ('f"{$A}"', "a hole inside an f-string"),
    ("rf'{x!r:{$A}}' + b", "a hole inside an f-string"),
    ("F'''{\n$A}'''", "a hole inside an f-string"),
    ("f'{ {1: 2}[$A] }'", "a hole inside an f-string"),
    ("f(f'a' f'{$A}')", "a hole inside an f-string"),
    ("import a.$M", "a hole inside a dotted name"),
    ("from $M.b import c", "a hole inside a dotted name"),
    ("def f()\nx = 1", "not Python"),
    ("if a\nif b", "not Python"),
]


@pytest.mark.parametrize(("text", "why"), BAD)
def test_a_bad_pattern_is_refused_at_definition(text: str, why: str) -> None:
    with pytest.raises(PatchError) as caught:
        compile_pattern(text)
    (failure,) = caught.value.failures
    assert failure.code == "BP001"
    assert why in failure.what
    assert failure.next


@pytest.mark.skipif(sys.version_info < (3, 12), reason="one kind of quote within an f-string is new in 3.12")
@pytest.mark.parametrize("text", ["""f"{x["$A"]}" + y""", """f"{"$A"}" + y""", """f"{f"{$A}"}" + y"""])
def test_a_hole_in_a_nested_string_is_refused(text: str) -> None:
    with pytest.raises(PatchError, match="BP001 bad pattern: a hole inside"):
        compile_pattern(text)


@pytest.mark.parametrize("text", ["case.run($A)", "case = $A", "case[$A]", "case in $A", "case is $A", "finally_($A)"])
def test_a_soft_keyword_is_a_name_too(text: str) -> None:
    assert compile_pattern(text).holes == {"A"}


def test_a_hole_is_one_whole_word() -> None:
    assert [(hole.kind, hole.name) for hole in scan("$A1.$_ <$OP> $$$REST_2")] == [
        ("one", "A1"), ("one", "_"), ("op", "OP"), ("list", "REST_2"),
    ]  # fmt: skip


def test_the_names_that_a_pattern_binds() -> None:
    pattern = compile_pattern("if $A <$OP> self.$CAP: $_; f($$$REST)")
    assert pattern.holes == {"A", "OP", "CAP", "REST"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("f($A)", "expression"),
        ("x = $A", "statement"),
        ("while $_", "header"),
        ("f($A)\ng()", "statements"),
        ("if $A: pass", "statement"),
    ],
)
def test_the_kind_of_a_pattern(text: str, kind: str) -> None:
    assert compile_pattern(text).kind == kind


def test_a_pattern_is_dedented_and_shown_on_one_line() -> None:
    assert str(compile_pattern("\n    if $A:\n        break\n    ")) == "if $A: break"


# -- nearest ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "nearest_first"),
    [
        (
            "if $COUNT <$OP> self.$CAP: break",
            ["if n >= self.cap: break", "if n >= cap: break", "if self.full(): break", "if full: return"],
        ),
        ("assert $Q is not None", ["assert q is not None", "assert q is None", "assert q == 1", "assert q"]),
        ("f(1, $A, k=2)", ["f(1, a, k=2)", "f(1, a, k=3)", "f(1)", "g.f()"]),
        ("while $_", ["while a: x()", "if a: x()"]),
    ],
)
def test_similarity_ranks_candidates(pattern: str, nearest_first: list[str]) -> None:
    scores = [compile_pattern(pattern).similarity(candidate(pattern, text)) for text in nearest_first]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)
    assert scores[0] == 1


def test_similarity_knows_what_a_hole_is_limited_to() -> None:
    pattern = compile_pattern("if $N <$OP> self.$CAP: break")
    good, bad = (ast.parse(f"if n {op} self.{cap}: break").body[0] for op, cap in ((">=", "cap"), ("<", "floor")))
    allow = {"OP": (">=",), "CAP": ("cap",)}
    assert pattern.similarity(good, allow) == 1 > pattern.similarity(bad, allow)


# -- equality, and text that is put in -------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (ast.Name("a"), "a", True),
        ("a", ast.Name("a"), True),
        ("a", ast.Name("b"), False),
        ("a", "a", True),
        ((ast.Name("a"),), (ast.Name("a"),), True),
        ((ast.Name("a"),), (), False),
        (ast.Constant(1), ast.Constant(True), False),
        (ast.Eq(), ast.Eq(), True),
        (ast.Eq(), ast.Gt(), False),
        (ast.Name("a"), (ast.Name("a"),), False),
    ],
)
def test_equality_of_bound_values(one: Bound, other: Bound, *, equal: bool) -> None:
    assert same(one, other) is equal


def bound(pattern: str, text: str) -> dict[str, Bound]:
    found = compile_pattern(pattern).match(candidate(pattern, text))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("pattern", "text", "template", "filled"),
    [
        ("f($A)", "f(x + 1)", "$A * 2", "(x + 1) * 2"),
        ("f($A)", "f(x.y)", "$A.z", "x.y.z"),
        ("f($A)", "f(a if b else c)", "g($A)", "g((a if b else c))"),
        ("f($A)", "f(*a)", "g($A)", "g(*a)"),
        ("x[$I]", "x[1:2]", "y[$I]", "y[1:2]"),
        ("a <$OP> self.$CAP", "a is not self.cap", "b <$OP> self.$CAP", "b is not self.cap"),
        ("f($$$A)", "f(1, *b, k=2)", "g($$$A)", "g(1, *b, k=2)"),
        ("f($$$A)", "f()", "g($$$A)", "g()"),
        ("f($A)", "f(1)", "g('$A', $A)  # $A", "g('$A', 1)  # $A"),
        (
            "if $A:\n    $$$S",
            "if a:\n    x()\n    if b: y()",
            "while $A:\n    $$$S",
            "while a:\n    x()\n    if b:\n        y()",
        ),
        ("if a: $S", "if a: x = 1", "$S", "x = 1"),
    ],
)
def test_a_template_is_filled(pattern: str, text: str, template: str, filled: str) -> None:
    assert Template(template).fill(bound(pattern, text)) == filled
    ast.parse(filled)


def test_a_template_names_a_hole_that_is_not_bound() -> None:
    with pytest.raises(PatchError, match=r"BP002 .*`\$B` is used in an edit but no anchor binds it"):
        Template("g($B)").fill(bound("f($A)", "f(1)"))


@pytest.mark.parametrize("template", ["if a: $S", "$S; y = 1", "f($S)"])
def test_statements_are_not_put_within_a_line(template: str) -> None:
    with pytest.raises(PatchError, match=r"BP002 .*bound to statements and stands within a line"):
        Template(template).fill(bound("if a: $S", "if a: x = 1"))
