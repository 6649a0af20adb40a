"""What of a host's module is accounted for: read statement by statement, on made-up modules."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.coverage import BEHIND, UNCOVERED, Coverage, read_module
from balance_patcher.delta import Level
from balance_patcher.errors import PatchError
from balance_patcher.source import DirSource, Lane, module_text
from balance_patcher.standin import STALE, STAND_IN, Cover, StandIn

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
    Cover("OurPump.__init__", "super().__init__($$$_)", STAND_IN),
    Cover("OurPump.__init__", "self.wanted = wanted", "toy.stop"),
    Cover("OurPump.run", "if self.wanted: break", "toy.stop", inside=(Level("loop", "while $_"),)),
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Coverage]:
    def get(host: str, *more: Cover, upstream: str = UPSTREAM, covers: tuple[Cover, ...] = COVERS) -> Coverage:
        for name, text in (("vllm/toy.py", upstream), ("vllm/__init__.py", "")):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        stand_in = StandIn(
            "host", "host.pump", lambda *_: None, copies={"OurPump.run": "vllm.toy:Pump.run"},
            imports=("os", "vllm", "host.core"), covers=(*more, *covers),
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
    assert all(finding.file == "/site/host/pump.py" and finding.line > 0 for finding in found.uncovered)


def test_a_declared_addition_in_another_place_is_not_covered(read: Callable[..., Coverage]) -> None:
    gate = "            if self.wanted:\n                break\n"
    moved = "        if self.wanted:\n            break\n"
    found = read(HOST.replace(gate, "").replace("        while", f"{moved}        while"))
    assert lines(found, UNCOVERED) == ["if self.wanted"]


def test_two_statements_in_another_order_are_not_covered(read: Callable[..., Coverage]) -> None:
    found = read(HOST.replace("self.stop()\n                raise", "raise\n                self.stop()"))
    assert len(found.uncovered) == 1


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
    found = read(changed, Cover("OurPump.run", "self.steps > 3", STALE))
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
    ],
    ids=["bad pattern", "two statements", "no place", "nobody", "no target", "no cover"],
)
def test_a_wrong_declaration_is_an_error_where_it_stands(make: Callable[[], object]) -> None:
    with pytest.raises(PatchError, match=r"BP00[12]"):
        make()
