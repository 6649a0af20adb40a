"""A copy that asks for vLLM's version: on a release one side of the question runs, at a commit nobody knows which."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from balance_patcher.source import Lane, module_text
from tests.drift.conftest import Repo
from tools.drift.copied import CopyCell
from tools.drift.copies import cell_of, held_in, target_of, with_copies
from tools.drift.guarded import OTHER, cases
from tools.drift.index import Index
from tools.drift.runs import Options, run_git

Make = Callable[[Mapping[str, str]], Lane]

UPSTREAM = """
from vllm.helpers import Store

class Planner:
    def __init__(self):
        self.store = Store()
    def plan(self):
        return 1
    def split(self, a): ...
"""
HELPERS = "class Store:\n    def take(self, n): ...\n"
COPY = """
{head}
from vllm.up import Planner

class Theirs(Planner):
    def plan(self, now=False):
{body}
"""
ASK = "from host.utils import vllm_version_is"
BAD = "super().plan(now)"  # upstream's takes nothing


def beside(
    make: Make, body: str, version: str | None = "1.0", head: str = ASK, bad: str = BAD, **files: str
) -> CopyCell:
    """The cell of a copy with this body, in which ``BAD`` is what does not fit."""
    stamp = {"vllm/_version.py": f"version = {version!r}\n"} if version else {}
    lane = make({"vllm/__init__.py": "", "vllm/up.py": UPSTREAM, "vllm/helpers.py": HELPERS, **stamp, **files})
    source = COPY.format(head=head, body=textwrap.indent(textwrap.dedent(body).replace("BAD", bad), " " * 8))
    one = held_in("theirs.py", module_text("theirs", "theirs.py", "theirs.py", source.encode()), "Theirs.plan")
    return cell_of(one, target_of(one), "here", lane)


#: A body, and on which of 1.0 and 2.0 its bad call is made.
BODIES = {
    "BAD": "1.0 2.0",
    "if vllm_version_is('1.0'):\n    return super().plan()\nreturn BAD": "2.0",
    "if vllm_version_is('1.0'):\n    return BAD\nreturn super().plan()": "1.0",
    "if not vllm_version_is('1.0'):\n    return BAD\nreturn super().plan()": "2.0",
    "if vllm_version_is('1.0'):\n    x = super().plan()\nelse:\n    x = BAD\nreturn x": "2.0",
    "if vllm_version_is('2.0'):\n    x = 1\nelif vllm_version_is('1.0'):\n    x = BAD\nelse:\n    x = 2": "1.0",
    "x = super().plan() if vllm_version_is('1.0') else BAD": "2.0",
    "x = now and vllm_version_is('1.0') and BAD": "1.0",
    "x = vllm_version_is('1.0') or BAD": "2.0",
    "if now and vllm_version_is('1.0'):\n    BAD": "1.0",
    "if now or vllm_version_is('1.0'):\n    BAD": "1.0 2.0",
    "if now or vllm_version_is('1.0'):\n    pass\nelse:\n    BAD": "2.0",
    "if vllm_version_is('1.0') or vllm_version_is('2.0'):\n    BAD": "1.0 2.0",
    "if utils.vllm_version_is('1.0'):\n    BAD": "1.0",
    "if vllm_version_is('1.0.0'):\n    BAD": "1.0",  # the same version
    "if vllm_version_is('1.0'):\n    if now:\n        return 1\n    else:\n        raise ValueError\nBAD": "2.0",
    "if vllm_version_is('1.0'):\n    if now:\n        return 1\nBAD": "1.0 2.0",
    "for x in now:\n    if vllm_version_is('1.0'):\n        continue\n    BAD": "2.0",
    "for x in now:\n    if vllm_version_is('1.0'):\n        break\nBAD": "1.0 2.0",
    "old = vllm_version_is('1.0')\nif old:\n    BAD": "1.0",
    "old = not vllm_version_is('1.0')\nif not old:\n    BAD": "1.0",
    "old = vllm_version_is('1.0')\nold = now\nif old:\n    BAD": "1.0 2.0",  # it is something else by then
    "old = vllm_version_is('1.0')\nif now:\n    old = not vllm_version_is('1.0')\nif old:\n    BAD": "1.0 2.0",
    "if IS_OLD:\n    BAD": "1.0",
    "IS_OLD = now\nif IS_OLD:\n    BAD": "1.0 2.0",  # another name
    "def inner(IS_OLD):\n    if IS_OLD:\n        BAD": "1.0 2.0",
    "def inner():\n    if IS_OLD:\n        BAD": "1.0",
    "if vllm_version_is(now):\n    BAD": "1.0 2.0",  # for which one, the text does not say
    "if version_is('1.0'):\n    BAD": "1.0 2.0",  # another question
}
FLAG = f"{ASK}\nIS_OLD = vllm_version_is('1.0')"


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize(("body", "made"), BODIES.items())
def test_on_a_release_only_the_side_that_runs_there_has_to_fit(
    text_lane: Make, body: str, made: str, version: str
) -> None:
    bad = "self.split()"  # it is bad in a nested function, too
    cell = beside(text_lane, body, version, FLAG, bad)
    assert [call.call for call in cell.calls] == [bad] * (version in made.split())
    assert cell.why == ""


@pytest.mark.parametrize(("body", "made"), BODIES.items())
def test_where_the_version_is_not_known_only_what_is_made_on_each_is_called_a_misfit(
    text_lane: Make, body: str, made: str
) -> None:
    cell = beside(text_lane, body, None, FLAG, "self.split()")
    always = made == "1.0 2.0" and "is('2.0')" not in body  # of a third version the last of these says something else
    assert (cell.status, len(cell.calls)) == (("misfit", 1) if always else ("drifted", 0))
    said = "where the copy asks for vLLM's version, which is not known here"
    assert cell.why.endswith(said) is not always


def test_the_lines_that_are_not_judged_are_named(text_lane: Make) -> None:
    body = "if vllm_version_is('1.0'):\n    return BAD\nreturn BAD"
    assert beside(text_lane, body, None).why == (
        "not judged: lines 8, 9, where the copy asks for vLLM's version, which is not known here"
    )


TWICE = f"""{ASK}
if vllm_version_is('1.0'):
    from vllm.helpers import choose
else:
    from vllm.others import choose
"""
BOTH = {"vllm/helpers.py": f"{HELPERS}def choose(): ...\n", "vllm/others.py": "def choose(a): ...\n"}


@pytest.mark.parametrize(
    ("version", "call", "why"),
    [
        ("1.0", "choose()", ""),
        ("1.0", "choose(1)", "too many positional arguments"),
        ("2.0", "choose(1)", ""),
        ("2.0", "choose()", "missing a required argument: 'a'"),
        (None, "choose()", None),
        (None, "choose(1)", None),
    ],
)
def test_an_import_is_that_of_the_version(text_lane: Make, version: str | None, call: str, why: str | None) -> None:
    cell = beside(text_lane, call, version, TWICE, **BOTH)
    assert [found.why for found in cell.calls] == ([why] if why else [])
    assert bool(cell.why) is (why is None)


METHOD = """
from host.utils import vllm_version_is
from vllm.up import Planner

class Theirs(Planner):
    def plan(self):
        self.split()
    if vllm_version_is("1.0"):
        def split(self): ...
"""


@pytest.mark.parametrize(("version", "bad"), [("1.0", 0), ("2.0", 1)])
def test_a_method_that_the_copys_class_has_on_one_version_only(text_lane: Make, version: str, bad: int) -> None:
    one = held_in("theirs.py", module_text("theirs", "theirs.py", "theirs.py", METHOD.encode()), "Theirs.plan")
    files = {"vllm/up.py": UPSTREAM, "vllm/helpers.py": HELPERS, "vllm/_version.py": f"version = {version!r}\n"}
    assert len(cell_of(one, target_of(one), "here", text_lane(files)).calls) == bad


def test_the_versions_that_a_text_may_run_on() -> None:
    tree = module_text("m", "m.py", "m.py", f"{ASK}\nx = vllm_version_is('1.0'), vllm_version_is('2.0')".encode()).tree
    assert cases(tree, "1.5") == ("1.5",)
    assert cases(tree, None) == ("1.0", "2.0", OTHER)
    assert cases(module_text("m", "m.py", "m.py", b"x = 1").tree, "1.5") == (OTHER,)


@pytest.fixture
def history(tmp_path: Path) -> Repo:
    """1.0 with its tag, a commit behind it that changes nothing here, and 2.0."""
    repo = Repo(tmp_path / "vllm")
    repo.path.mkdir()
    repo.git("init", "-q")
    for name, text in {"__init__": "", "up": UPSTREAM, "helpers": HELPERS}.items():
        (repo.path / "vllm").mkdir(exist_ok=True)
        (repo.path / "vllm" / f"{name}.py").write_text(text)
    repo.commit("One")
    repo.git("tag", "v1.0")
    repo.commit("Between")
    repo.git("tag", "nightly")
    repo.commit("Two")
    repo.git("tag", "v2.0")
    return repo


def test_in_a_history_a_tag_says_the_version_and_a_commit_does_not(history: Repo, index: Index) -> None:
    run = run_git(history.path, "v1.0", "v2.0", [], index, Options(processes=1))
    assert [(ref.name, ref.version) for ref in run.report.refs] == [("v1.0", "1.0"), ("nightly", None), ("v2.0", "2.0")]
    body = "if vllm_version_is('1.0'):\n            return super().plan()\n        return super().plan(now)"
    source = COPY.format(head=ASK, body=f"        {body}")
    one = held_in("theirs.py", module_text("theirs", "theirs.py", "theirs.py", source.encode()), "Theirs.plan")
    (copy,) = with_copies(run.report, [one], run.columns, []).copies
    assert [(cell.ref, cell.status, bool(cell.why)) for cell in copy.cells] == [
        ("v1.0", "drifted", False), ("nightly", "drifted", True), ("v2.0", "misfit", False)
    ]  # fmt: skip
