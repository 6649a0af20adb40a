"""``new-delta``: the file that is written is sound, on made-up modules and on released sources."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from balance_patcher import cli
from balance_patcher.anchors import find_anchor
from balance_patcher.check import check_feature
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.loading import feature_of_text
from balance_patcher.pointing import counterpart, statement_at
from balance_patcher.proposal import Proposal, propose
from balance_patcher.skeleton import Skeleton, literal
from balance_patcher.source import DirSource, Lane
from balance_patcher.targets import Target, find_target
from tests.conftest import RELEASES, ROOT

Releases = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
TARGET = "vllm.pump:Pump.run"

OLD = '''\
class Pump:
    def run(self):
        """Runs."""
        while self.on:
            if len(self.level) == self.cap:
                break
            self.step()
        if self.on: self.stop()
        self.stop()
        self.stop()
        self.stop()
        self.stop()
        self.stop()

    def stop(self):
        self.on = False
'''
NEW = OLD.replace("len(self.level) == self.cap", "self.count >= self.top").replace(
    "class Pump", "import os\n\nclass Pump"
)


@pytest.fixture
def lanes(tmp_path: Path) -> tuple[str, ...]:
    """Options that name two lanes."""
    for name, text in (("old", OLD), ("new", NEW)):
        (tmp_path / name / "vllm").mkdir(parents=True)
        (tmp_path / name / "vllm/__init__.py").write_text("")
        (tmp_path / name / "vllm/pump.py").write_text(text)
    return ("--lane", f"old=dir:{tmp_path / 'old'}", "--lane", f"new=dir:{tmp_path / 'new'}")


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def ruff(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", "format", "--diff", "--config", ROOT / "pyproject.toml", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# -- the command -------------------------------------------------------------------------------


def test_what_is_written_is_accepted_at_once(lanes: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "toy.py"
    assert run("new-delta", TARGET, "--at", "pump.py:5", *lanes, "--output", file) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "old: pump.py:5  `if len(self.level) == self.cap:`",
        "new: pump.py:7  `if self.count >= self.top:`",
        "anchor: `if $LEFT <$OP> self.$ATTR`",
        f"{file} is written; next: python -m balance_patcher verify --deltas {file}",
    ]
    assert run("verify", "--deltas", file, *lanes[1::2]) == 0
    assert "All deltas hold on 2 lanes." in capsys.readouterr().out
    assert run("show", "toy", "--deltas", file, "--lane", lanes[1], "--diff") == 0
    added = [line for line in capsys.readouterr().out.splitlines() if line.startswith("+ ")]
    assert added == ["+            todo_toy = True  # bp: toy.run"]
    assert run("show", TARGET, "--deltas", file, "--lane", lanes[3]) == 0
    assert "todo_toy = True" in capsys.readouterr().out


def test_without_a_file_it_goes_to_standard_output(lanes: tuple[str, ...], capsys: Capture) -> None:
    assert run("new-delta", TARGET, "--at", "vllm/pump.py:5", *lanes) == 0
    text = capsys.readouterr().out
    feature = feature_of_text(text, Path("my_feature.py"))
    assert (feature.name, feature.deltas[0].name, feature.deltas[0].target) == ("my_feature", "my_feature.run", TARGET)
    assert "# ATTR: `cap` on old, `top` on new.\n" in text
    assert 'allow={"OP": ("==", ">=")},' in text


@pytest.mark.parametrize(
    ("name", "delta"), [("valve", "valve.run"), ("valve.early-stop", "valve.early-stop"), (None, "toy.run")]
)
def test_the_name_is_as_asked_else_as_the_file(
    name: str | None, delta: str, lanes: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "toy.py"
    assert run("new-delta", TARGET, "--at", "pump.py:7", *lanes, "-o", file, *(["--name", name] if name else [])) == 0
    assert feature_of_text(file.read_text(), file).deltas[0].name == delta


def test_a_line_of_a_file_on_disk_is_counted_there(lanes: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    assert run("new-delta", TARGET, "--at", f"{tmp_path}/new/vllm/pump.py:7", *lanes) == 0
    assert capsys.readouterr().err.startswith("new: pump.py:7  `if self.count >= self.top:`\nold: pump.py:5")


def test_a_tree_that_is_no_lane_becomes_one(lanes: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine/vllm/pump.py"
    file.parent.mkdir(parents=True)
    file.write_text("\n\n" + NEW.replace("self.top", "self.most"))
    assert run("new-delta", TARGET, "--at", f"{file}:9", *lanes) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"dir:{tmp_path}/mine: pump.py:9  `if self.count >= self.most:`\nold: pump.py:5")
    assert "`most` on dir:" in said.out


def test_a_line_inside_an_expression_is_said(lanes: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    for name in ("old", "new"):
        file = tmp_path / name / "vllm/pump.py"
        file.write_text(file.read_text().replace("self.step()", "self.step(\n                1\n            )"))
    assert run("new-delta", TARGET, "--at", "pump.py:8", *lanes) == 0
    assert capsys.readouterr().err.startswith("line 8 is inside the statement that begins on line 7\nold: pump.py:7")


def test_without_lanes_it_takes_the_declared_ones(
    lanes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    declared = '[tool.balance_patcher.lanes]\nfirst = "dir:new"\nsecond = "dir:old"\n'
    (tmp_path / "pyproject.toml").write_text(declared)
    monkeypatch.chdir(tmp_path)
    assert run("new-delta", TARGET, "--at", "pump.py:7") == 0
    assert capsys.readouterr().err.startswith("first: pump.py:7")
    assert run("new-delta", TARGET, "--at", "pump.py:5", "--lane", "second") == 0
    assert capsys.readouterr().err.startswith("second: pump.py:5")


REFUSED = {
    "no such line": (["--at", "pump.py:99"], 2, "BP801"),
    "no such file": (["--at", "valve.py:5"], 2, "BP801"),
    "no such file on disk": (["--at", "/nowhere/vllm/pump.py:5"], 2, "BP801"),
    "no line": (["--at", "pump.py"], 2, "BP801"),
    "a line of another method": (["--at", "pump.py:16"], 2, "BP802"),
    "the docstring": (["--at", "pump.py:3"], 2, "BP803"),
    "a suite on its header's line": (["--at", "pump.py:8"], 0, ""),
    "no name of its own": (["--at", "pump.py:11"], 1, "BP805"),
    "a file's name that is none": (["--at", "pump.py:5", "--output", "no-name.py"], 2, "BP007"),
    "no name at all": (["--at", "pump.py:5", "--name", "no name"], 2, "BP007"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_its_id(name: str, lanes: tuple[str, ...], capsys: Capture) -> None:
    options, code, failure = REFUSED[name]
    assert run("new-delta", TARGET, *options, *lanes) == code
    assert capsys.readouterr().err.startswith(failure)


@pytest.mark.parametrize(
    ("target", "code", "failure"),
    [
        ("vllm.pump:Pump.walk", 1, "BP104"),
        ("vllm.pump:Valve.run", 1, "BP105"),
        ("vllm.valve:Pump.run", 1, "BP110"),
        ("vllm.pump", 2, "BP007"),
    ],
)
def test_a_target_that_is_not_there_is_refused(
    target: str, code: int, failure: str, lanes: tuple[str, ...], capsys: Capture
) -> None:
    assert run("new-delta", target, "--at", "pump.py:5", *lanes) == code
    assert capsys.readouterr().err.startswith(failure)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("vllm.pump:Pump", "Pump is a class; write vllm.pump:Pump.METHOD, such as run, stop"),
        ("vllm.pump:Pump.rum", "did you mean `vllm.pump:Pump.run`?"),
        ("vllm.pump:run", "did you mean `vllm.pump:Pump.run`?"),
        ("vllm.pump.Pump.run", "did you mean `vllm.pump:Pump.run`?"),
        ("vllm.pump:Pump.nothing", "look for its name in "),
        ("vllm.pumps:Pump.run", "check the module's name; of it, vllm is there"),
    ],
)
def test_what_an_author_meant_is_said(target: str, said: str, lanes: tuple[str, ...], capsys: Capture) -> None:
    assert run("new-delta", target, "--at", "pump.py:5", *lanes) in (1, 2)
    assert f"  next      {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "code", "follow"),
    [
        ("    def run", "    @once\n    def run", "BP107", "stands under no decorator"),
        ("    def run", "    async def run", "BP108", "is no `async def`"),
        ("            self.step()", "            yield self.step()", "BP109", "does not yield"),
    ],
)
def test_what_kind_of_function_a_target_is_is_said(
    old: str, new: str, code: str, follow: str, lanes: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    for name in ("old", "new"):
        file = tmp_path / name / "vllm/pump.py"
        file.write_text(file.read_text().replace(old, new, 1))
    assert run("new-delta", TARGET, "--at", "pump.py:7", *lanes) == 1
    said = capsys.readouterr().err
    assert said.startswith(code)
    assert f"a delta edits a plain function and nothing else; choose one that {follow}" in said


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("keep-blocks", "BP007", "write --name keep_blocks\n"),
        ("keep.so many", "BP007", "write --name keep.so-many\n"),
        ("9", "BP007", "write --name FEATURE or --name FEATURE.WHAT\n"),
        ("balance.more", "BP807", "give it another one: --name balance_2, or another name of the file\n"),
    ],
)
def test_a_name_that_cannot_be_is_told_as_one_that_can(
    name: str, code: str, said: str, lanes: tuple[str, ...], capsys: Capture
) -> None:
    assert run("new-delta", TARGET, "--at", "pump.py:5", "--name", name, *lanes) == 2
    told = capsys.readouterr().err
    assert told.startswith(code)
    assert told.endswith(said)


def test_the_folder_of_a_file_that_is_written_is_made(lanes: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "a/b/toy.py"
    assert run("new-delta", TARGET, "--at", "pump.py:5", "--output", str(file), *lanes) == 0
    assert file.is_file()


def test_a_lane_without_the_target_is_named(lanes: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "new/vllm/pump.py").write_text(NEW.replace("def run", "def go"))
    assert run("new-delta", TARGET, "--at", "pump.py:5", *lanes) == 1
    assert "  lane      new\n" in capsys.readouterr().err


def test_a_lane_with_nothing_like_it_is_named_with_what_is_nearest(
    lanes: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "new/vllm/pump.py").write_text(NEW.replace("self.step()", "pass"))
    assert run("new-delta", TARGET, "--at", "pump.py:7", *lanes) == 1
    said = capsys.readouterr().err
    assert said.startswith("BP804 lane has nothing like it: Pump.run on lane new has no statement like `self.step()`")
    assert "  nearest   pump.py:10  `self.stop()`" in said


def test_what_an_edit_cannot_stand_beside_is_refused(lanes: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    for name in ("old", "new"):
        file = tmp_path / name / "vllm/pump.py"
        file.write_text(file.read_text().replace("            self.step()", "            self.step(); self.go()"))
    assert run("new-delta", TARGET, "--at", "pump.py:7", *lanes) == 1
    said = capsys.readouterr().err
    assert said.count("BP402") == 2
    assert "  lane        old\n" in said or "  lane      old\n" in said


def test_a_file_that_is_there_is_left_alone(lanes: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "toy.py"
    file.write_text("mine\n")
    assert run("new-delta", TARGET, "--at", "pump.py:5", *lanes, "-o", file) == 2
    assert capsys.readouterr().err.startswith("BP806")
    assert file.read_text() == "mine\n"


def test_a_name_that_upstream_has_is_not_taken(lanes: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("old", "new"):
        file = tmp_path / name / "vllm/pump.py"
        file.write_text("todo_toy = 1\n" + file.read_text())
    assert run("new-delta", TARGET, "--at", "pump.py:6", *lanes, "-o", tmp_path / "toy.py") == 0
    assert 'InsertBefore("todo_toy_2 = True")' in (tmp_path / "toy.py").read_text()


# -- a delta file from anywhere ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1\n", "BP002 bad declaration: {file} declares no FEATURE"),
        ("import no_such_module\n", "BP002 bad declaration: {file} cannot be imported: ModuleNotFoundError"),
        ("def f(:\n", "BP002 bad declaration: {file} cannot be imported: SyntaxError"),
        ("from balance_patcher.delta import Anchor\nAnchor('$A')\n", "BP001 bad pattern: only holes"),
    ],
)
def test_a_file_that_declares_no_feature_is_refused(
    text: str, what: str, tmp_path: Path, capsys: Capture, lanes: tuple[str, ...]
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    assert run("verify", "--deltas", file, lanes[1]) == 2
    assert capsys.readouterr().err.startswith(what.format(file=file))


def test_a_file_that_is_not_there_is_3(tmp_path: Path, capsys: Capture, lanes: tuple[str, ...]) -> None:
    assert run("verify", "--deltas", tmp_path / "none.py", lanes[1]) == 3
    assert capsys.readouterr().err.startswith("BP514")


def test_two_files_of_one_name_are_refused(tmp_path: Path, capsys: Capture, lanes: tuple[str, ...]) -> None:
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in files:
        assert run("new-delta", TARGET, "--at", "pump.py:5", *lanes, "-o", file, "--name", "toy") == 0
    assert run("verify", "--deltas", files[0], "--deltas", files[1], lanes[1]) == 2
    assert "two of the files declare 'toy'" in capsys.readouterr().err


def test_a_declared_feature_can_be_looked_at_beside_it(release_dir: Releases, tmp_path: Path, capsys: Capture) -> None:
    lane = f"dir:{release_dir('0.23.0')}"
    file = tmp_path / "toy.py"
    assert run("new-delta", SCHEDULE, "--at", "scheduler.py:567", "--lane", lane, "-o", file) == 0
    assert run("verify", "--deltas", file, lane) == 0
    assert "balance." not in capsys.readouterr().out
    assert run("verify", "--deltas", file, "--feature", "balance", lane) == 1
    assert "BP122" in capsys.readouterr().out  # it has no early return of its own, and balance has one


# -- as ruff leaves it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["a", "f('x')", 'f("x")', "f('\"')", "f('\\n')", "a\nb", 'if a:\n    f("""x""")', "f('\"', \"'\")", "\\"],
)
def test_a_literal_is_the_text(text: str) -> None:
    value = ast.literal_eval(literal(text))
    assert value.strip("\n") == text


@pytest.mark.parametrize("length", [10, 45, 70])
def test_a_long_name_is_written_as_ruff_would(length: int, tmp_path: Path, lanes: tuple[str, ...]) -> None:
    file = tmp_path / "toy.py"
    name = f"{'n' * length}.{'w' * length}"
    assert run("new-delta", TARGET, "--at", "pump.py:6", *lanes, "-o", file, "--name", name) == 0
    assert ruff(file).stdout == ""


# -- released sources ----------------------------------------------------------------------------


def target_of(folder: Path, name: str = SCHEDULE) -> Target:
    found = find_target(Lane(folder.name, DirSource("dir", folder)), name)
    assert isinstance(found, Target)
    return found


def every_statement(targets: list[Target], lanes: list[str]) -> Iterator[tuple[int, Proposal | str]]:
    """For each statement of the first target, by line, what is proposed, or the id of the refusal."""
    for _, _, suite, at in targets[0].places.values():
        statement = suite[at]
        try:
            pointed = statement_at(lanes[0], targets[0], statement.lineno)
            assert pointed.place.statement is statement
            pairs = zip(lanes[1:], targets[1:], strict=True)
            yield statement.lineno, propose([pointed.place, *(counterpart(pointed.place, *pair) for pair in pairs)])
        except PatchError as error:
            (failure,) = error.failures
            yield statement.lineno, failure.code


@pytest.fixture(scope="module")
def schedules(release_dir: Releases) -> list[Target]:
    return [target_of(release_dir(version)) for version in ("0.23.0", "0.32.0")]


@pytest.fixture(scope="module")
def every(schedules: list[Target]) -> dict[int, Proposal | str]:
    return dict(every_statement(schedules, ["release", "main"]))


def test_every_statement_of_schedule_is_found_once_on_both_lanes_or_refused(
    every: dict[int, Proposal | str], schedules: list[Target]
) -> None:
    proposals = {line: found for line, found in every.items() if isinstance(found, Proposal)}
    for line, proposal in proposals.items():
        assert proposal.places[0].statement.lineno == line
        for place, target in zip(proposal.places, schedules, strict=True):
            (match,) = find_anchor(target, proposal.anchor)[0]
            assert match.statements[-1 if proposal.behind else 0] is place.statement
    refused = [found for found in every.values() if isinstance(found, str)]
    # What is gone or could be several there, what is said several times, and an `elif`.
    assert {code: refused.count(code) for code in set(refused)} == {"BP804": 57, "BP805": 1, "BP403": 1}
    assert len(proposals) == 188


def test_on_one_lane_every_statement_has_an_anchor(schedules: list[Target]) -> None:
    refused = [found for _, found in every_statement(schedules[:1], ["release"]) if isinstance(found, str)]
    assert refused == ["BP403"]


@pytest.mark.parametrize("line", [1027, 1095, 1096, 1219])
def test_what_differs_only_in_an_else_around_it_is_refused(line: int, schedules: list[Target]) -> None:
    with pytest.raises(PatchError, match=rf"scheduler\.py:{line}, and scheduler\.py:\d+\n"):
        propose([statement_at("main", schedules[1], line).place])


def test_every_tenth_skeleton_is_sound_and_as_ruff_leaves_it(
    every: dict[int, Proposal | str], schedules: list[Target], tmp_path: Path
) -> None:
    lanes = [Lane(name, DirSource("dir", _root(target))) for name, target in zip("ab", schedules, strict=True)]
    chosen = [(line, found) for line, found in every.items() if isinstance(found, Proposal)][::10]
    for line, proposal in chosen:
        file = tmp_path / f"line_{line}.py"
        file.write_text(Skeleton(f"line_{line}.x", schedules[0], proposal).text())
        feature = feature_of_text(file.read_text(), file)
        assert "EXAMPLES = " in file.read_text()
        for lane in lanes:
            report = check_feature(lane, feature)
            assert (report.outcome, report.failures) == (Outcome.HOLDS, [])
            assert [delta.status for delta in report.deltas] == ["applied"]
    done = ruff(*sorted(tmp_path.glob("line_*.py")))
    assert (done.returncode, done.stdout) == (0, "")


def _root(target: Target) -> Path:
    return Path(target.text.display.removesuffix(target.text.path))


def test_one_anchor_is_found_for_upstreams_own_stop_on_every_release(release_dir: Releases) -> None:
    from tests.test_releases import ROWS

    stops = {row.version: row.stop for row in ROWS}
    targets = {version: target_of(release_dir(version)) for version in RELEASES}
    first = statement_at("0.23.0", targets["0.23.0"], stops["0.23.0"]).place
    places = [first, *(counterpart(first, version, targets[version]) for version in RELEASES if version != "0.23.0")]
    assert {place.lane: place.statement.lineno for place in places} == stops
    proposal = propose(places)
    assert str(proposal.anchor) == "`if $LEFT <$OP> self.$ATTR: break`"
    assert set(proposal.differs["OP"]) == {"==", ">="}


def test_the_command_is_quick(release_dir: Releases, tmp_path: Path) -> None:
    """Less than three seconds of this process's own work; the clock of a busy machine says nothing."""
    lanes = [
        f"--lane={name}=dir:{release_dir(version)}" for name, version in (("release", "0.23.0"), ("main", "0.32.0"))
    ]
    command = [sys.executable, "-m", "balance_patcher", "new-delta", SCHEDULE, "--at", "scheduler.py:787", *lanes]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = os.times()
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 3
