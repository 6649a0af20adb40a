"""Copies: vllm-ascend's own, out of its wheels, beside 18 releases; and small ones for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from balance_patcher.errors import PatchError
from balance_patcher.registry import features, find_feature
from balance_patcher.source import Lane, module_text, open_source
from tests.conftest import RELEASES
from tests.drift.examples import GREEN
from tools.drift import cli
from tools.drift.columns import Column
from tools.drift.copied import Copy, CopyCell
from tools.drift.copies import Held, cell_of, copies_in, copy_of, held, held_in, target_of, with_copies
from tools.drift.plain import drift, plain_lines
from tools.drift.releases import release_columns, released

SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
FILE = "vllm_ascend/patch/platform/patch_balance_schedule.py"
Make = Callable[[Mapping[str, str]], Lane]


def released_copy(version: str) -> Held:
    return held(f"pypi:vllm-ascend=={version}:{FILE}:BalanceScheduler.schedule")


@pytest.fixture(scope="module")
def places() -> dict[str, Lane]:
    return {version: Lane(version, open_source(f"pypi:vllm=={version}")) for version in RELEASES}


@pytest.fixture(scope="module")
def compared(places: dict[str, Lane]) -> dict[str, Copy]:
    """Each released copy beside all 18 releases."""
    found = {}
    for version in ("0.23.0", "0.24.0rc1", "0.25.1rc1", "0.26.0rc1"):
        one = released_copy(version)
        found[version] = copy_of(one, target_of(one, [find_feature("balance")]), list(places.items()))
    return found


def at(copy: Copy, ref: str) -> CopyCell:
    return next(cell for cell in copy.cells if cell.ref == ref)


# -- vllm-ascend's copies --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "base"),
    [("0.23.0", "0.22.1"), ("0.24.0rc1", "0.24.0"), ("0.25.1rc1", "0.24.0"), ("0.26.0rc1", "0.26.0")],
)
def test_the_nearest_release_of_each_copy_and_no_release_that_cannot_be_read(
    compared: dict[str, Copy], version: str, base: str
) -> None:
    copy = compared[version]
    assert (copy.target, copy.base) == (SCHEDULE, base)
    assert {cell.status for cell in copy.cells} <= {"drifted", "misfit"}
    assert [cell.ref for cell in copy.cells] == list(RELEASES)


def test_drift_from_the_nearest_release_is_small_and_grows_with_each_release_after_it(
    compared: dict[str, Copy],
) -> None:
    copy = compared["0.24.0rc1"]
    assert (at(copy, "0.24.0").added, at(copy, "0.24.0").removed, at(copy, "0.24.0").hunks) == (6, 1, 3)
    later = RELEASES[RELEASES.index("0.24.0") :]
    lines = [at(copy, version).added + at(copy, version).removed for version in later]
    assert lines == sorted(lines)
    assert lines[-1] > 400


def test_the_first_release_on_which_a_copy_unpacks_too_few(compared: dict[str, Copy]) -> None:
    """Case 1: the shape of what get_computed_blocks returns."""
    misfits = {
        ref.ref: [(call.line, call.why) for call in ref.calls if call.callee.endswith(".get_computed_blocks")]
        for ref in compared["0.24.0rc1"].cells
    }
    assert [ref for ref in RELEASES if misfits[ref]] == list(RELEASES[RELEASES.index("0.26.0") :])
    assert misfits["0.26.0"] == [(465, "it returns a tuple of 3, and is unpacked into 2")]


def test_the_helper_that_lost_an_argument(compared: dict[str, Copy]) -> None:
    """Case 1, the other half: the copy made for 0.25.1 passes one argument more than 0.26.0 takes."""
    cells = {cell.ref: [call.callee for call in cell.calls] for cell in compared["0.25.1rc1"].cells}
    name = "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split"
    assert [ref for ref in RELEASES if name in cells[ref]] == [
        *RELEASES[: RELEASES.index("0.24.0")],
        *RELEASES[RELEASES.index("0.26.0") :],
    ]
    (call,) = [one for one in at(compared["0.25.1rc1"], "0.26.0").calls if one.callee == name]
    assert (call.line, call.why) == (592, "too many positional arguments")
    assert call.signature.startswith("_mamba_block_aligned_split(self, request, num_new_tokens, ")


def test_a_method_that_is_nowhere_is_said(compared: dict[str, Copy]) -> None:
    (call,) = [one for one in at(compared["0.26.0rc1"], "0.31.0").calls if "_select_waiting" in one.callee]
    assert call.why == "Scheduler has no `_select_waiting_queue_for_scheduling`"
    assert not at(compared["0.26.0rc1"], "0.30.0").calls


def test_every_copy_fits_the_release_that_it_was_made_for(compared: dict[str, Copy]) -> None:
    made_for = {"0.23.0": "0.23.0", "0.24.0rc1": "0.24.0", "0.25.1rc1": "0.25.1", "0.26.0rc1": "0.26.0"}
    assert {version: at(compared[version], ref).calls for version, ref in made_for.items()} == dict.fromkeys(
        made_for, ()
    )


def test_a_disabled_path_that_asks_for_its_own_release_only(compared: dict[str, Copy]) -> None:
    """Case 3: the oldest copy forwards an argument to whatever is not 0.23.0, and what is older does not take it."""
    misfits = {cell.ref: [(call.line, call.call) for call in cell.calls] for cell in compared["0.23.0"].cells}
    call = (111, "super().schedule(throttle_prefills)")
    older = RELEASES[: RELEASES.index("0.23.0")]
    assert [ref for ref in RELEASES if call in misfits[ref]] == list(older)
    assert all(misfits[ref] == [call] for ref in older)


def test_the_readme_says_what_the_newest_copy_that_is_taken_over_costs(compared: dict[str, Copy]) -> None:
    readme = " ".join((Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8").split())
    copy = compared["0.25.1rc1"]
    cell = at(copy, "0.25.1")
    assert f"The copy is most like vLLM {copy.base}." in readme
    assert f"it differs in {cell.added + cell.removed} lines and every call fits" in readme
    assert [call.callee.rpartition(".")[2] for call in at(copy, "0.26.0").calls] == [
        "get_computed_blocks",
        "_mamba_block_aligned_split",
    ]
    assert (len(at(copy, "0.33.0").calls), "on 0.33.0 six calls do not fit" in readme) == (6, True)


def test_the_difference_is_against_the_last_release_and_goes_both_ways(compared: dict[str, Copy]) -> None:
    copy = compared["0.25.1rc1"]
    lines = copy.diff.splitlines()
    assert lines[0] == "--- vllm/v1/core/sched/scheduler.py  0.33.0, formatted alike"
    cell = at(copy, "0.33.0")
    assert sum(line.startswith("+") for line in lines[2:]) == cell.added
    assert sum(line.startswith("-") for line in lines[2:]) == cell.removed


def test_upstreams_own_function_is_equal_to_itself_only(places: dict[str, Lane]) -> None:
    text = places["0.30.0"].module("vllm.v1.core.sched.scheduler")
    assert text is not None
    one = held_in("scheduler.py", text, "Scheduler.schedule")
    cells = [cell_of(one, SCHEDULE, version, places[version]) for version in ("0.29.0", "0.30.0")]
    assert [cell.status for cell in cells] == ["misfit" if cells[0].calls else "drifted", "equal"]


# -- one kind of call each -------------------------------------------------------------------

UPSTREAM = '''
from vllm.helpers import Store, choose, Thing

class Base:
    def close(self, wait=False): ...

class Planner(Base):
    def __init__(self, given: "Store | None"):
        self.store = Store(3)
        self.given = given
        self.hook = print

    def plan(self, now):
        """What it does."""
        return now

    def split(self, a, b, *, c=1):
        return a, b

    @staticmethod
    def plain(a): ...

    @property
    def queue(self): ...
'''
HELPERS = """
class Store:
    def __init__(self, size): ...
    def take(self, n) -> tuple[int, str, bool]: ...
    @classmethod
    def make(cls, size): ...

def choose(one, other): ...

class Thing:
    pass

from vllm.others import handed

if Thing:
    def both(a): ...
else:
    def both(a, b): ...

def over(a): ...
over = print(over)
"""
OTHERS = {
    "vllm/others.py": "def handed(a): ...\ndef behind(a, b): ...\ndef _hidden(): ...\n",
    "vllm/stars.py": "from vllm.others import *\nfrom elsewhere import *\n",
}
CALLS = {
    "self.split(1, 2)": "",
    "self.split(1)": "missing a required argument: 'b'",
    "self.split(1, 2, 3)": "too many positional arguments",
    "self.split(1, 2, d=3)": "got an unexpected keyword argument 'd'",
    "self.split(*now)": "",
    "self.split(**now)": "",
    "self.plain(1)": "",
    "self.plain(1, 2)": "too many positional arguments",
    "self.close(True)": "",
    "self.close(True, 1)": "too many positional arguments",
    "self.gone(1)": "Planner has no `gone`",
    "self.hook(1, 2, 3)": "",
    "self.queue(1, 2, 3)": "",
    "self.ours(1, 2, 3)": "",
    "super().plan(1, 2)": "too many positional arguments",
    "self.store.take(1)": "",
    "self.store.take()": "missing a required argument: 'n'",
    "self.store.gone()": "Store has no `gone`",
    "self.store.brought(1)": "",
    "self.given.take()": "missing a required argument: 'n'",
    "self.unknown.take()": "",
    "now.take()": "",
    "choose(1)": "missing a required argument: 'other'",
    "Store()": "missing a required argument: 'size'",
    "Store.make(1, 2)": "too many positional arguments",
    "Store.take(now, 1)": "",
    "Thing(1)": "",
    "missing(1)": "vllm.helpers has no `missing`",
    "elsewhere(1, 2)": "",
    "self.kept(1)": "",
    "self.written(1)": "",
    "behind(1)": "missing a required argument: 'b'",
    "handed()": "missing a required argument: 'a'",
    "neither(1)": "",
    "both(1, 2)": "",
    "over(1, 2)": "",
}
COPY = """
from elsewhere import elsewhere
from vllm.helpers import Store, Thing, both, choose, handed, missing, over
from vllm.stars import behind, neither
from vllm.up import Planner

class TheirStore(Store):
    def brought(self, one): ...

class Theirs(Planner):
    written = print
    def ours(self):
        self.kept = print
    def plan(self, now):
        {}
        return now
"""


def beside(make: Make, body: str, **files: str) -> CopyCell:
    lane = make({"vllm/__init__.py": "", "vllm/up.py": UPSTREAM, "vllm/helpers.py": HELPERS, **OTHERS, **files})
    text = module_text("theirs", "theirs.py", "theirs.py", COPY.format(body).encode())
    one = held_in("theirs.py", text, "Theirs.plan")
    return cell_of(one, target_of(one), "here", lane)


@pytest.mark.parametrize(("call", "why"), CALLS.items())
def test_whether_a_call_fits(text_lane: Make, call: str, why: str) -> None:
    cell = beside(text_lane, call)
    assert [found.why for found in cell.calls] == ([why] if why else [])
    assert cell.status == ("misfit" if why else "drifted")


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("a, b = self.store.take(1)", "it returns a tuple of 3, and is unpacked into 2"),
        ("a, b, c = self.store.take(1)", ""),
        ("a, *b = self.store.take(1)", ""),
        ("a, b, c = self.split(1, 2)", "it returns a tuple of 2, and is unpacked into 3"),
        ("a, b, c = self.plan(1)", ""),
    ],
)
def test_whether_what_comes_back_is_taken_apart_as_it_comes(text_lane: Make, statement: str, why: str) -> None:
    assert [found.why for found in beside(text_lane, statement).calls] == ([why] if why else [])


def test_formatting_comments_and_the_docstring_are_no_drift(text_lane: Make) -> None:
    assert beside(text_lane, "# a remark\n        'another docstring'").status == "equal"


def test_a_function_that_is_gone_and_a_file_that_does_not_parse(text_lane: Make) -> None:
    gone = beside(text_lane, "pass", **{"vllm/up.py": "class Planner: pass"})
    assert (gone.status, gone.calls) == ("gone", ())
    assert gone.why.startswith("BP104")
    dark = beside(text_lane, "pass", **{"vllm/up.py": "def broken(:"})
    assert dark.status == "unreadable"
    assert dark.why.startswith("BP508")


def test_one_argument_more_in_a_long_call_is_one_line_more() -> None:
    arguments = [f"argument_number_{number}=self.value_number_{number}" for number in range(6)]

    def lines(count: int) -> list[str]:
        text = f"def f(self):\n    if x:\n        y = self.call({', '.join(arguments[:count])})"
        text = module_text("m", "m.py", "m.py", text.encode())
        return plain_lines(held_in("m.py", text, "f").node)

    assert drift(lines(5), lines(6)) == (1, 0, 1)
    assert lines(6)[2:4] == ["        y = self.call(", "            argument_number_0=self.value_number_0,"]


BASE = """
from vllm.up import Planner

class Between(Planner):
    def split(self, a): ...
    def plan(self, now, more): ...
"""
BELOW = """
from {module} import Between

class Theirs(Between):
    def plan(self, now):
        self.split(1)
        super().plan(1, 2)
        self.close(1, 2)
        return self.gone()
"""


@pytest.mark.parametrize(
    ("module", "calls"), [("theirs.between", ["self.close(1, 2)", "self.gone()"]), ("elsewhere.between", [])]
)
def test_a_class_of_theirs_between_the_copy_and_upstreams(
    text_lane: Make, tmp_path: Path, module: str, calls: list[str]
) -> None:
    """What it has is theirs; one that cannot be read may have anything."""
    lane = text_lane({"vllm/__init__.py": "", "vllm/up.py": UPSTREAM, "vllm/helpers.py": HELPERS, **OTHERS})
    package = tmp_path / "site" / "theirs"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "between": BASE, "copy": BELOW.format(module=module)}.items():
        (package / f"{name}.py").write_text(text)
    target = "vllm.up:Planner.plan"
    for file in (f"{package}/copy.py", f"dir:{tmp_path}/site:theirs/copy.py"):
        cell = cell_of(held(f"{file}:Theirs.plan={target}"), target, "here", lane)
        assert [call.call for call in cell.calls] == calls


def test_a_module_that_is_called_into_and_does_not_parse(text_lane: Make) -> None:
    """It might be what does not fit: that is not green."""
    cell = beside(text_lane, "choose(1)", **{"vllm/helpers.py": "def choose(:"})
    assert cell.status == "unreadable"
    assert cell.why.startswith("BP508")


# -- which copy is meant ---------------------------------------------------------------------


def test_a_copy_on_disk_with_its_target_named(tmp_path: Path) -> None:
    (tmp_path / "patch.py").write_text("def mine(self): ...\n")
    one = held(f"{tmp_path}/patch.py:mine={SCHEDULE}")
    assert (target_of(one), one.node.name) == (SCHEDULE, "mine")


def test_a_base_behind_a_module_is_found() -> None:
    text = "import vllm.v1.up as up\nclass T(up.Planner):\n    def plan(self): ...\n"
    assert target_of(held_in("t.py", module_text("t", "t.py", "t.py", text.encode()), "T.plan")) == (
        "vllm.v1.up:Planner.plan"
    )


@pytest.mark.parametrize("spec", ["patch.py", "patch.py:", ":T.plan", "patch.py:T plan", "patch.py:T.plan"])
def test_what_names_no_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PatchError) as caught:
        held(spec)
    assert [failure.code for failure in caught.value.failures] == ["BP930"]


def test_a_copy_that_is_not_in_its_file_is_refused_with_what_comes_near(tmp_path: Path) -> None:
    (tmp_path / "patch.py").write_text("class T:\n    def plan(self): ...\n")
    with pytest.raises(PatchError) as caught:
        held(f"{tmp_path}/patch.py:T.plam")
    assert "`plan`" in str(caught.value)


def test_a_copy_of_nobody_knows_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "patch.py").write_text("class T:\n    def plan(self): ...\n")
    with pytest.raises(PatchError) as caught:
        target_of(held(f"{tmp_path}/patch.py:T.plan"), [find_feature("balance")])
    assert [failure.code for failure in caught.value.failures] == ["BP931"]


# -- in a report -----------------------------------------------------------------------------


def checkout(tmp_path: Path) -> Path:
    """A checkout of vllm-ascend with its module, out of the wheel."""
    data = open_source("pypi:vllm-ascend==0.25.1rc1").read(FILE)
    assert data is not None
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_bytes(data)
    return tmp_path


def test_a_checkout_of_vllm_ascend_has_the_copies_that_are_declared(tmp_path: Path) -> None:
    found = copies_in(checkout(tmp_path), features())
    assert ("BalanceScheduler.schedule", SCHEDULE) in [(one.qualname, one.named) for one in found]
    (tmp_path / FILE).unlink()
    assert copies_in(tmp_path, features()) == ()


def test_each_column_of_a_report_has_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.drift import copies

    columns = release_columns(released("0.24.0,0.26.0"))
    twice = [columns[0], Column(replace(columns[0].ref, name="again"), columns[0].place), columns[1]]
    ones = [one for one in copies_in(checkout(tmp_path), features()) if one.qualname.endswith(".schedule")]
    compared, real = [], copies.cell_of
    monkeypatch.setattr(copies, "cell_of", lambda *args: compared.append(args[2]) or real(*args))
    (copy,) = with_copies(GREEN, ones, twice, features()).copies
    assert [(cell.ref, cell.status) for cell in copy.cells] == [
        (columns[0].ref.name, "drifted"),
        ("again", "drifted"),
        (columns[1].ref.name, "misfit"),
    ]
    assert compared == [columns[0].ref.name, columns[1].ref.name]  # the same texts are compared once


@pytest.mark.parametrize(("refs", "status"), [("0.24.0,0.25.1", 0), ("0.25.1,0.26.0", 1)])
def test_the_command_ends_with_1_where_a_call_does_not_fit(
    capsys: pytest.CaptureFixture[str], refs: str, status: int
) -> None:
    spec = f"pypi:vllm-ascend==0.24.0rc1:{FILE}:BalanceScheduler.schedule"
    arguments = ["--releases", refs, "--features", "prefill_preemption", "--copy", spec, "--no-index"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--processes", "1", "--format", "markdown"])
    assert (ended.value.code or 0) == status
    assert ("ACTION: edit " in capsys.readouterr().out) is bool(status)


def test_a_copy_that_is_not_there_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--releases", "0.24.0,0.25.1", "--copy", "nowhere.py:T.plan"])
    assert ended.value.code == 2
    assert "BP930 no such copy" in capsys.readouterr().err
