"""What of a host's module is accounted for: read statement by statement, on made-up modules."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from balance_patcher.coverage import BEHIND, UNCOVERED, Coverage, read_module
from balance_patcher.covering import Covers
from balance_patcher.delta import Level
from balance_patcher.errors import PatchError
from balance_patcher.importing import Origins, imported
from balance_patcher.source import DirSource, Lane, module_text
from balance_patcher.standin import STALE, STAND_IN, Cover, StandIn
from balance_patcher.targets import Target

UPSTREAM = """
class Pump:
    def run(self):
        self.steps += 1
        while self.level:
            if self.level >= self.cap:
                break
            try:
                self.push(1, force=True)
            except OSError:
                self.stop()
                raise
            finally:
                self.note()
        return self.level
"""

HOST = """
import os
from vllm.toy import Pump

class OurPump(Pump):
    def __init__(self, wanted):
        super().__init__()
        self.wanted = wanted

    def run(self):
        self.steps += 1
        while self.level:
            if self.level >= self.cap:
                break
            if self.wanted:
                break
            try:
                self.push(1, force=True)
            except OSError:
                self.stop()
                raise
            finally:
                self.note()
        return self.level

vllm.toy.Pump = OurPump
"""

COVERS = (
    Cover("", "class OurPump(Pump)", STAND_IN),
    Cover("", "vllm.toy.Pump = OurPump", STAND_IN),
    Cover("OurPump.__init__", "super().__init__()", STAND_IN),
    Cover("OurPump.__init__", "self.wanted = wanted", "toy.stop"),
    Cover("OurPump.run", "if self.wanted: break", "toy.stop", inside=(Level("loop", "while $_"),)),
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Coverage]:
    def get(
        host: str, *more: Cover, upstream: str = UPSTREAM, covers: tuple[Cover, ...] = COVERS, **rules: Any
    ) -> Coverage:
        for name, text in (("vllm/toy.py", upstream), ("vllm/__init__.py", "")):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        stand_in = StandIn(
            "host", "host.pump", lambda *_: None, copies={"OurPump.run": "vllm.toy:Pump.run"},
            imports={"os": "os"}, signatures={"OurPump.__init__": ("self, wanted",)}, covers=(*more, *covers), **rules,
        )  # fmt: skip
        text = module_text("host.pump", "host/pump.py", "/site/host/pump.py", textwrap.dedent(host).encode())
        return read_module(stand_in, text, Lane("upstream", DirSource("dir", tmp_path)))

    return get


def lines(found: Coverage, by: str) -> list[str]:
    return [finding.text for finding in found.findings if finding.by == by]


def test_a_copy_with_the_declared_additions_is_covered(read: Callable[..., Coverage]) -> None:
    found = read(HOST)
    assert found.covered
    assert {name: [finding.text for finding in each] for name, each in found.by().items()} == {
        STAND_IN: ["class OurPump(Pump)", "super().__init__()", "vllm.toy.Pump = OurPump"],
        "toy.stop": ["self.wanted = wanted", "if self.wanted"],
    }
    assert found.features() == ("toy",)
    assert found.behind == ()


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    # ruff: noqa: E501 - one change a line
    [
        ("import os\n", "import os\nimport socket\n", "import socket"),
        ("import os\n", "import os\nfrom host.other import x\n", "from host.other import x"),
        ("import os\n", "import os\nfrom .other import x\n", "from .other import x"),
        ("vllm.toy.Pump = OurPump", "vllm.toy.Pump = OurPump\nos.nice(1)", "os.nice(1)"),
        ("class OurPump(Pump)", "class OurPump(Other)", "class OurPump(Other)"),
        ("class OurPump", "@once\nclass OurPump", "class OurPump(Pump)"),
        ("vllm.toy.Pump =", "def helper():\n    pass\n\nvllm.toy.Pump =", "def helper"),
        ("    def run", "    limit = 3\n\n    def run", "limit = 3"),
        ("    def run", "    @once\n    def run", "once"),
        ("self.wanted = wanted", "self.wanted = not wanted", "self.wanted = not wanted"),
        ("        return self.level", "        self.level += 1\n        return self.level", "self.level += 1"),
        ("if self.wanted:\n                break", "if self.wanted:\n                self.drain()\n                break", "if self.wanted"),
        ("                self.stop()\n", "                self.stop()\n                self.stop()\n", "self.stop()"),
        ("            except OSError:", "            except KeyError:\n                pass\n            except OSError:", "except KeyError"),
        ("force=True", "force=False", "self.push(1, force=False)"),
        ("while self.level:", "while self.level > 0:", "while self.level > 0"),
        ("            finally:\n", "            else:\n                self.done()\n            finally:\n", "self.done()"),
    ],
)  # fmt: skip
def test_anything_else_is_not_covered(read: Callable[..., Coverage], old: str, new: str, wanted: str) -> None:
    assert HOST.count(old) == 1
    found = read(HOST.replace(old, new))
    assert not found.covered
    assert wanted in lines(found, UNCOVERED)
    places = {(finding.file, finding.line > 0) for finding in found.uncovered if finding.text == wanted}
    assert places == {("/site/host/pump.py", True)}


def test_a_declared_addition_in_another_place_is_not_covered(read: Callable[..., Coverage]) -> None:
    gate = "            if self.wanted:\n                break\n"
    moved = "        if self.wanted:\n            break\n"
    found = read(HOST.replace(gate, "").replace("        while", f"{moved}        while"))
    assert lines(found, UNCOVERED) == ["if self.wanted"]


def test_two_statements_in_another_order_are_not_covered(read: Callable[..., Coverage]) -> None:
    found = read(HOST.replace("self.stop()\n                raise", "raise\n                self.stop()"))
    assert not found.covered


def test_what_only_upstream_has_is_behind_and_does_no_harm(read: Callable[..., Coverage]) -> None:
    found = read(HOST.replace("        self.steps += 1\n", "", 1))
    assert found.covered
    assert [(finding.text, finding.by) for finding in found.behind] == [("self.steps += 1", BEHIND)]
    assert found.behind[0].where == "toy.py:4"


def test_an_older_header_is_paired_with_upstreams_and_its_suite_compared(read: Callable[..., Coverage]) -> None:
    older = Cover("OurPump.run", "if self.level == self.cap", STALE)
    changed = HOST.replace("self.level >= self.cap:", "self.level == self.cap:")
    assert read(changed, older).covered
    assert not read(changed.replace("self.cap:\n", "self.cap:\n                self.spill()\n"), older).covered


def test_a_call_with_fewer_keywords_is_behind_and_with_more_is_not_covered(read: Callable[..., Coverage]) -> None:
    assert read(HOST.replace("(1, force=True)", "(1)")).covered
    assert not read(HOST.replace("(1, force=True)", "(1, force=True, hard=True)")).covered


def test_a_keyword_in_an_older_wording_needs_a_cover(read: Callable[..., Coverage]) -> None:
    changed = HOST.replace("force=True", "force=self.steps > 3")
    assert not read(changed).covered
    found = read(changed, covers=(*COVERS, Cover("OurPump.run", "self.steps > 3", STALE)))
    assert found.covered
    assert lines(found, STALE) == ["self.steps > 3"]


def test_an_expression_does_not_cover_the_statement_around_it(read: Callable[..., Coverage]) -> None:
    found = read(
        HOST.replace("if self.wanted:", "if self.wanted and self.send():"), Cover("OurPump.run", "self.send()", "toy")
    )
    assert not found.covered


def test_a_copied_function_that_is_gone_upstream_is_a_failure(read: Callable[..., Coverage]) -> None:
    found = read(HOST, upstream=UPSTREAM.replace("def run", "def go"))
    assert not found.covered
    assert [failure.code for failure in found.failures] == ["BP104"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("def run(self)", "async def run(self)", "it is async"),
        ("def run(self)", "def run(self, hard=False)", "its parameters are (self, hard=False); known are (self)"),
        ("def run(self)", "def run(this)", "its parameters are (this); known are (self)"),
        ("def run(self)", "def run(self: patch())", "something runs in its annotation `patch()`"),
        ("def run(self)", "def run(self, *more: patch())", "something runs in its annotation `patch()`"),
        ("def run(self)", "def run(self, **more: patch())", "something runs in its annotation `patch()`"),
        ("def run(self):", "def run(self) -> (x := 1):", "something runs in its annotation `(x := 1)`"),
        (
            "(self, wanted)",
            "(self, wanted=find())",
            "its parameters are (self, wanted=find()); known are (self, wanted)",
        ),
        ("(self, wanted)", "(self, *wanted)", "its parameters are (self, *wanted); known are (self, wanted)"),
    ],
)
def test_a_signature_is_upstreams_or_declared(read: Callable[..., Coverage], old: str, new: str, why: str) -> None:
    assert HOST.count(old) == 1
    (finding,) = read(HOST.replace(old, new)).uncovered
    assert finding.why == why


def test_annotations_that_run_nothing_do_no_harm(read: Callable[..., Coverage]) -> None:
    assert read(
        HOST.replace("(self, wanted)", '(self: "OurPump", wanted: list[os.Path | None] = ...) -> None')
    ).uncovered
    assert read(HOST.replace("(self, wanted)", '(self: "OurPump", wanted: list[os.Path | None]) -> None')).covered


@pytest.mark.parametrize(
    "line",
    [
        "import os as nt", "import socket as os", "from os import *", "import os.path", "from vllm.toy import Pump as os",
        "from vllm.other import Pump", "from vllm.toy import Motor", "from . import os", "import vllm.toy",
    ],
)  # fmt: skip
def test_a_name_is_what_is_declared_or_what_it_is_upstream(read: Callable[..., Coverage], line: str) -> None:
    (finding,) = read(HOST.replace("import os\n", f"import os\n{line}\n")).uncovered
    assert finding.why.startswith("neither declared nor upstream's: ")


@pytest.mark.parametrize(
    ("upstream", "line"),
    [
        ("from a.b import C", "from a.b import C"),
        ("import a.b as c", "import a.b as c"),
        ("from .near import C", "from vllm.near import C"),
        ("if x:\n    from a import C\nelse:\n    from b import C", "from b import C"),
        ("try:\n    import a\nexcept ImportError:\n    import b as a", "import a"),
        ("LIMIT = 3", "from vllm.toy import LIMIT"),
    ],
)
def test_what_upstreams_module_imports_or_defines_may_be_imported(
    read: Callable[..., Coverage], upstream: str, line: str
) -> None:
    changed = HOST.replace("import os\n", f"import os\n{line}\n")
    assert not read(changed).covered
    assert read(changed, upstream=f"{upstream}\n{UPSTREAM}").covered


def test_a_name_that_upstreams_modules_do_not_agree_on_has_to_be_declared(
    text_lane: Callable[..., Lane],
) -> None:
    lane = text_lane({
        "vllm/__init__.py": "", "vllm/one.py": "from a import C, D\nfrom x import *\n",
        "vllm/two.py": "from a import C\nfrom b import D\n",
    })  # fmt: skip
    copies = {"run": "vllm.one:run", "go": "vllm.two:go"}
    origins = Origins(StandIn("host", "host.pump", lambda *_: None, copies=copies), lane)
    told = {
        text: origins.strange(ast.parse(text).body[0], "host")
        for text in ("from a import C", "from a import D", "from b import D", "from x import *", "import x")
    }
    assert told == {
        "from a import C": [], "from a import D": ["D = a:D"], "from b import D": ["D = b:D"],
        "from x import *": ["* = x:*"], "import x": ["x = x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a.b, c.d as e", {"a": "a.b", "e": "c.d"}),
        ("from . import x", {"x": "one.two:x"}),
        ("from .y import x as z", {"z": "one.two.y:x"}),
        ("from .. import x", {"x": "one:x"}),
        ("from ..y import x", {"x": "one.y:x"}),
        ("x = 1", {}),
    ],
)
def test_what_an_import_binds(text: str, names: dict[str, str]) -> None:
    assert dict(imported(ast.parse(text).body[0], "one.two")) == names


def test_a_hole_stands_for_nothing_that_runs(read: Callable[..., Coverage]) -> None:
    covers = tuple(Cover(c.place, c.pattern.replace("= wanted", "= $WHAT"), c.by, inside=c.inside) for c in COVERS)
    for value in ("wanted", "wanted.one", "3", "'text'"):
        assert read(HOST.replace("= wanted\n", f"= {value}\n"), covers=covers).covered
    for value in ("find()", "wanted[0]", "(x := wanted)", "find().one", "lambda: 1", "[find()]", "f'{wanted}'"):
        (finding,) = read(HOST.replace("= wanted\n", f"= {value}\n"), covers=covers).uncovered
        assert finding.why == "$WHAT stands for a name, an attribute or a constant"


def test_a_list_hole_stands_for_several_of_those(read: Callable[..., Coverage]) -> None:
    more = Cover("OurPump.__init__", "note($$$WORDS)", STAND_IN)
    for words in ("", "wanted, 1", "os.name"):
        assert read(HOST.replace("= wanted\n", f"= wanted\n        note({words})\n"), covers=(*COVERS, more)).covered
    for words in ("wanted, find()", "hard=find()", "*wanted"):
        text = HOST.replace("= wanted\n", f"= wanted\n        note({words})\n")
        assert not read(text, covers=(*COVERS, more)).covered


def test_a_cover_is_used_once_and_in_its_order(read: Callable[..., Coverage]) -> None:
    first = "        super().__init__()\n"
    then = "        self.wanted = wanted\n"
    assert read(HOST).covered
    for text in (f"{then}{first}", f"{first}{then}{then}", f"{first}{then}{first}"):
        (finding,) = read(HOST.replace(f"{first}{then}", text)).uncovered
        assert finding.why == "it is known, but not a second time, and not after what stands before it here"
    assert read(HOST.replace(then, f"{then}{then}"), covers=(*COVERS, COVERS[3])).covered


def test_several_are_used_together_or_none() -> None:
    text = module_text("host.pump", "pump.py", "pump.py", b"def run():\n    a\n    b\n    c\n")
    (function,) = text.tree.body
    assert isinstance(function, ast.FunctionDef)
    covers = Covers(Target(text, "run", function, None), [Cover("run", name, STALE) for name in "ab"])
    a, b, c = function.body
    assert covers.use_all([a, c]) is None
    assert [cover.pattern for cover in covers.use_all([a, b]) or ()] == ["a", "b"]


def test_a_cover_stands_beside_what_it_says(read: Callable[..., Coverage]) -> None:
    gate = "            if self.wanted:\n                break\n"
    stop = "            if self.level >= self.cap:\n                break\n"
    beside = Cover("OurPump.run", "if self.wanted: break", "toy.stop", after="if self.level >= self.cap: break")
    covers = (*COVERS[:4], beside)
    assert read(HOST, covers=covers).covered
    (finding,) = read(HOST.replace(f"{stop}{gate}", f"{gate}{stop}"), covers=covers).uncovered
    assert finding.why == "the statement before it must be `if self.level >= self.cap: break` and is nothing"


def test_a_second_definition_is_not_covered(read: Callable[..., Coverage]) -> None:
    again = "    def __init__(self, wanted):\n        super().__init__()\n\n    def run"
    (finding,) = read(HOST.replace("    def run", again)).uncovered
    assert finding.why == "it is defined a second time"


@pytest.mark.parametrize(
    ("old", "text"),
    [
        ("            if self.level >= self.cap:\n                break\n", "if self.level >= self.cap"),
        ("                raise\n", "raise"),
        ("        return self.level\n", "return self.level"),
    ],
)
def test_what_decides_what_runs_is_only_missed_where_that_is_declared(
    read: Callable[..., Coverage], old: str, text: str
) -> None:
    changed = HOST.replace(old, "")
    (finding,) = read(changed).uncovered
    assert (finding.text, finding.why) == (text, "upstream has it, and it decides what runs")
    assert finding.where.startswith("toy.py:")
    found = read(changed, lacks={"OurPump.run": ((text,),)})
    assert found.covered
    assert [finding.text for finding in found.behind] == [text]


def test_a_copy_that_has_one_of_a_group_is_not_that_old(read: Callable[..., Coverage]) -> None:
    changed = HOST.replace("                raise\n", "")
    assert not read(changed, lacks={"OurPump.run": (("raise", "self.steps += 1"),)}).covered
    changed = changed.replace("        self.steps += 1\n", "", 1)
    assert read(changed, lacks={"OurPump.run": (("raise", "self.steps += 1"),)}).covered


def test_what_is_declared_as_missing_is_missing_once(read: Callable[..., Coverage]) -> None:
    twice = UPSTREAM.replace(
        "                raise\n", "                raise\n            except KeyError:\n                raise\n"
    )
    changed = HOST.replace(
        "                raise\n", "                pass\n            except KeyError:\n                pass\n"
    )
    (finding,) = read(changed, upstream=twice, lacks={"OurPump.run": (("raise",),)}).uncovered
    assert finding.text == "raise"


def test_a_branch_that_it_lacks_is_not_covered(read: Callable[..., Coverage]) -> None:
    (finding,) = read(HOST.replace("            finally:\n                self.note()\n", "")).uncovered
    assert finding.why == "upstream's `finally` is not there"
    more = UPSTREAM.replace(
        "        return self.level",
        "        if self.x:\n            self.a()\n        else:\n            self.b()\n        return self.level",
    )
    less = HOST.replace(
        "        return self.level", "        if self.x:\n            self.a()\n        return self.level"
    )
    (finding,) = read(less, upstream=more).uncovered
    assert finding.why == "upstream's `else` is not there"


def test_an_except_clause_that_it_lacks_is_not_covered(read: Callable[..., Coverage]) -> None:
    more = UPSTREAM.replace(
        "            except OSError:", "            except KeyError:\n                pass\n            except OSError:"
    )
    (finding,) = read(HOST, upstream=more).uncovered
    assert finding.text == "except KeyError"


def test_an_older_wording_stands_for_the_statement_like_it(read: Callable[..., Coverage]) -> None:
    older = Cover("OurPump.run", "if self.level == self.cap: break", STALE)
    stop = "            if self.level >= self.cap:\n                break\n"
    assert read(HOST.replace(stop, stop.replace(">=", "==")), older).covered
    assert not read(HOST.replace(stop, ""), older).covered


NEEDING = (
    *COVERS[:2],
    Cover("OurPump.__init__", "super().__init__()", STAND_IN, role="the call of upstream's"),
    Cover("OurPump.__init__", "self.wanted = wanted", "toy.stop", role="the switch"),
    Cover("OurPump.__init__", "self.wanted = bool(wanted)", "toy.stop", role="the switch"),
    COVERS[4],
)  # fmt: skip
NEEDS = {"OurPump": ("the switch",), "OurPump.__init__": ("the call of upstream's",), "OurPump.go": ("the switch",)}


def test_what_a_place_needs_has_to_be_there_in_one_wording(read: Callable[..., Coverage]) -> None:
    assert read(HOST, covers=NEEDING, needs=NEEDS).covered
    assert read(HOST.replace("= wanted\n", "= bool(wanted)\n"), covers=NEEDING, needs=NEEDS).covered
    (finding,) = read(HOST.replace("self.wanted = wanted", "pass"), covers=NEEDING, needs=NEEDS).uncovered
    assert (finding.text, finding.why) == ("self.wanted = wanted", "the switch is not there")
    assert finding.line == 5
    (finding,) = read(HOST.replace("super().__init__()", "pass"), covers=NEEDING, needs=NEEDS).uncovered
    assert finding.why == "the call of upstream's is not there"


def test_what_is_missing_is_told_once_all_that_is_there_is_known(read: Callable[..., Coverage]) -> None:
    (finding,) = read(HOST.replace("self.wanted = wanted", "find()"), covers=NEEDING, needs=NEEDS).uncovered
    assert finding.text == "find()"


def test_a_place_that_it_has_not_needs_nothing(read: Callable[..., Coverage]) -> None:
    gone = HOST.replace(
        "    def __init__(self, wanted):\n        super().__init__()\n        self.wanted = wanted\n", ""
    )
    assert read(gone, covers=NEEDING, needs={"OurPump.__init__": ("the switch",)}).covered
    assert not read(gone, covers=NEEDING, needs={"OurPump": ("the switch",)}).covered
    assert not read("import os", covers=NEEDING, needs={"": ("the switch",)}).covered


def test_formatting_comments_and_docstrings_do_not_exist(read: Callable[..., Coverage]) -> None:
    text = HOST.replace("def run(self):", 'def run(self):\n        """Ours."""\n        # as upstream')
    assert read(
        text.replace(
            "self.push(1, force=True)",
            "self.push(\n                    1,\n                    force=True,\n                )",
        )
    ).covered


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cover("", "if $", STAND_IN),
        lambda: Cover("", "a = 1\nb = 2", STAND_IN),
        lambda: Cover("a-b", "a = 1", STAND_IN),
        lambda: Cover("", "a = 1", ""),
        lambda: StandIn("host", "host.pump", lambda *_: None, copies={"run": "toy.run"}),
        lambda: StandIn("host", "host.pump", lambda *_: None, covers=(Cover("", "a = 1", STAND_IN), "b")),
        lambda: Cover("", "a = $_", STAND_IN),
        lambda: Cover("", "a($$$_)", STAND_IN),
        lambda: Cover("", "a = 1", STAND_IN, after="a = 1\nb = 2"),
        lambda: StandIn("host", "host.pump", lambda *_: None, imports={"a.b": "a.b"}),
        lambda: StandIn("host", "host.pump", lambda *_: None, imports={"a": "from a"}),
        lambda: StandIn("host", "host.pump", lambda *_: None, signatures={"run": ("self, )(",)}),
        lambda: StandIn("host", "host.pump", lambda *_: None, signatures={"run": "self"}),
        lambda: StandIn("host", "host.pump", lambda *_: None, lacks={"run": (("a = 1",),)}),
        lambda: StandIn("host", "host.pump", lambda *_: None, copies={"run": "a:run"}, lacks={"run": ("a = 1",)}),
        lambda: StandIn("host", "host.pump", lambda *_: None, copies={"run": "a:run"}, lacks={"run": (("if $",),)}),
        lambda: StandIn("host", "host.pump", lambda *_: None, needs={"": ("the gate",)}),
    ],
    ids=[
        "bad pattern",
        "two statements",
        "no place",
        "nobody",
        "no target",
        "no cover",
        "a hole",
        "a list hole",
        "two neighbours",
        "no name",
        "no origin",
        "no parameters",
        "no tuple",
        "no copy",
        "no group",
        "bad group",
        "no role",
    ],
)
def test_a_wrong_declaration_is_an_error_where_it_stands(make: Callable[[], object]) -> None:
    with pytest.raises(PatchError, match=r"BP00[12]"):
        make()
