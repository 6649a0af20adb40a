"""The patch that upstream could take: on every known release, and what the tool refuses.

The sources are vLLM's own, read when the tests run. What becomes of the gate there is in tests/test_seam.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.deltas.balance_seam import NAME
from balance_patcher.errors import CATALOGUE, PatchError
from balance_patcher.source import Lane
from tests.conftest import RELEASES, ROOT
from tests.seams import CALL, MARK, SCHEDULER, lane_of, through_the_seam
from tools import upstream_seam
from tools.upstream_seam import TESTS, message, patch_of, seam_of

Copy = Callable[[str], Path]
each_release = pytest.mark.parametrize("version", RELEASES)
on_two = pytest.mark.parametrize("version", ["0.23.0", "0.33.0"])


def git(folder: Path, *words: str, **keywords: object) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", "-c", "core.autocrlf=false"]
    done = subprocess.run(  # type: ignore[call-overload]
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True, **keywords
    )
    return str(done.stdout)


@pytest.fixture
def checkout(release_copy: Copy) -> Copy:
    """A release's files as a git repository of its own."""

    def get(version: str) -> Path:
        folder = release_copy(version)
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", version)
        return folder

    return get


# -- on every release ------------------------------------------------------------------------


@each_release
def test_the_patch_applies_and_the_gate_goes_through_the_seam(version: str, checkout: Copy, tmp_path: Path) -> None:
    folder = checkout(version)
    before = (folder / SCHEDULER).read_bytes()
    counted = int(version.split(".")[1]) >= 25
    seam = seam_of(lane_of(folder))
    file = tmp_path / "seam.patch"
    file.write_bytes(patch_of(seam))
    git(folder, "apply", "--check", str(file))
    git(folder, "apply", str(file))
    assert git(folder, "status", "--porcelain").split() == ["M", str(SCHEDULER)]
    after = (folder / SCHEDULER).read_bytes()
    assert after.decode() == seam.text
    # The hashes of the patch are git's, so `git apply --3way` finds what it was made from.
    hashes = git(folder, "rev-parse", f"HEAD:{SCHEDULER}").strip(), git(folder, "hash-object", str(SCHEDULER)).strip()
    assert f"\nindex {'..'.join(hashes)} 100644\n" in file.read_text("utf-8")
    numbers = git(folder, "diff", "--numstat").split()[:2]
    assert numbers == (["12", "4"] if counted else ["9", "1"])
    assert f"1 file changed, {numbers[0]} insertions(+), {numbers[1]} deletions(-)" in file.read_text("utf-8")
    assert through_the_seam(folder)["balance.empty-queue-guard"] == (
        "absorbed" if int(version.split(".")[1]) > 30 else "applied"
    )
    git(folder, "apply", "-R", str(file))
    assert (folder / SCHEDULER).read_bytes() == before


@each_release
def test_the_function_is_upstreams_with_the_comparison_in_another_place(
    version: str, seamed: Copy, release_dir: Copy
) -> None:
    """Another route than the tool's own proof: the counted name and the call are both put in by their values."""
    trees = [ast.parse((folder / SCHEDULER).read_text("utf-8")) for folder in (release_dir(version), seamed(version))]
    before, after = (next(n for n in tree.body if getattr(n, "name", "") == "Scheduler") for tree in trees)
    (method,) = (node for node in after.body if getattr(node, "name", "") == NAME)  # type: ignore[attr-defined]
    after.body.remove(method)  # type: ignore[attr-defined]
    *moved, returned = method.body[1:]
    loop = [node for node in ast.walk(before) if isinstance(node, ast.While) and NAME not in ast.unparse(node)]
    if moved:
        (assign,) = moved
        (suite,) = [n.body for n in loop if any(ast.dump(s) == ast.dump(assign) for s in n.body)]
        del suite[next(at for at, s in enumerate(suite) if ast.dump(s) == ast.dump(assign))]
    text, call = ast.unparse(after), ast.unparse(before)
    assert text.count(CALL) == 1
    assert text.replace(CALL, ast.unparse(returned.value)) == call
    trees[0].body.remove(before)
    trees[1].body.remove(after)
    assert ast.dump(trees[0]) == ast.dump(trees[1])


@on_two
def test_it_is_formatted_as_upstream_formats(version: str, seamed: Copy) -> None:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "88", "--check"]
    file = seamed(version) / SCHEDULER
    assert subprocess.run([*command, str(file)], capture_output=True, check=False).returncode == 0
    file.write_text(file.read_text("utf-8").replace(f"{NAME}(self)", f"{NAME}( self)"), encoding="utf-8")
    assert subprocess.run([*command, str(file)], capture_output=True, check=False).returncode == 1


@on_two
def test_it_goes_in_as_mail_with_its_author(version: str, checkout: Copy, tmp_path: Path) -> None:
    folder = checkout(version)
    seam = seam_of(lane_of(folder))
    file = tmp_path / "seam.patch"
    file.write_bytes(patch_of(seam, "Ada Lovelace <ada@example.org>"))
    git(folder, "am", "-q", "--keep-non-patch", str(file))
    said = git(folder, "log", "-1", "--format=%an <%ae>%n%B").strip().splitlines()
    assert (said[0], said[-1]) == ("Ada Lovelace <ada@example.org>", "Signed-off-by: Ada Lovelace <ada@example.org>")
    assert said[1] == message(seam).splitlines()[0]
    assert all(len(line) <= 72 for line in said)
    assert f"`{seam.compared}`" in " ".join(said)
    assert [path for path in TESTS if path in " ".join(said)] == list(TESTS)


def test_the_tests_that_are_named_are_those_of_the_checkout(release_copy: Copy) -> None:
    folder = release_copy("0.33.0")
    assert seam_of(lane_of(folder)).tests == tuple(TESTS)  # a wheel has none, and says nothing of them
    here, *others = TESTS
    (folder / here).parent.mkdir(parents=True)
    (folder / here).write_text("")
    assert seam_of(lane_of(folder)).tests == (here,)
    assert not any(path in message(seam_of(lane_of(folder))) for path in others)


@pytest.mark.parametrize("end", ["\r\n", "\n"], ids=["CRLF", "LF"])
def test_line_ends_tabs_and_what_stands_beside_the_stop_are_kept(
    end: str, text_lane: Callable[..., Lane], tmp_path: Path
) -> None:
    before = STAND_IN.replace("    ", "\t").replace("\n", end).removesuffix(end)
    lane = text_lane({str(SCHEDULER): before.encode(), "vllm/__init__.py": ""})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    seam = seam_of(lane)
    git(tmp_path, "apply", "--whitespace=nowarn", "-", input=patch_of(seam).decode())
    assert (tmp_path / SCHEDULER).read_bytes() == seam.text.encode()
    assert seam.text.replace(end, "\n").replace("\t", "    ") == STAND_IN_AFTER


def test_a_comment_within_the_comparison_stays_there_and_line_ends_are_those_around_it(
    text_lane: Callable[..., Lane],
) -> None:
    stop = "if (held >= self.max_num_active_reqs):  # full"
    within = "if (held  # so far\n                        >= self.max_num_active_reqs):  # full"
    before = STAND_IN.replace(stop, within)
    assert before != STAND_IN
    first, _, rest = before.partition("\n")
    seam = seam_of(text_lane({str(SCHEDULER): f"{first}\r\n{rest}".encode(), "vllm/__init__.py": ""}))
    assert seam.text.count("# so far") == seam.text.count("# full") == 1
    assert seam.text.count("\r\n") == 1  # one line of upstream's has it


def test_that_mail_wants_to_be_told_of_cr_lf_is_said(
    release_copy: Copy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, output = release_copy("0.23.0"), tmp_path / "a folder/that is new/seam.patch"
    assert run("--repo", str(folder), "--output", str(output)) == 0
    assert "--keep-cr" not in capfd.readouterr().err
    assert output.is_file()
    (folder / SCHEDULER).write_bytes((folder / SCHEDULER).read_bytes().replace(b"\n", b"\r\n"))
    assert run("--repo", str(folder)) == 0
    assert "`git am` wants --keep-cr" in capfd.readouterr().err


STAND_IN = """
class Scheduler:
    def __init__(self):
        self.running, self.parked, self.max_num_active_reqs = [], 0, 8

    def schedule(self):
        held = 1
        if held:
            while self.open:
                self.look(1)

                # An older remark.

                # Those who park
                # hold a place.
                held = (  # all of them
                    len(self.running)
                    + self.parked
                )
                if (held >= self.max_num_active_reqs):  # full
                    break  # here
                self.running.append(1)
"""

STAND_IN_AFTER = f'''
class Scheduler:
    def __init__(self):
        self.running, self.parked, self.max_num_active_reqs = [], 0, 8

    def schedule(self):
        held = 1
        if held:
            while self.open:
                self.look(1)

                # An older remark.

                if {CALL}:
                    break
                self.running.append(1)

    def {NAME}(self) -> bool:
        """Whether admission from the waiting queues ends in this step.

        Asked before each request that could be admitted; a subclass may end it
        earlier.
        """
        # Those who park
        # hold a place.
        held = (  # all of them
            len(self.running)
            + self.parked
        )
        # full
        # here
        return held >= self.max_num_active_reqs
'''


# -- what the tool refuses -------------------------------------------------------------------

COUNT = STAND_IN[STAND_IN.index("held = (  # all") : STAND_IN.index("                if (held")]
STOP = "if (held >= self.max_num_active_reqs):  # full\n                    break  # here\n"
ADMIT = "self.running.append(1)"
STOP_LINES = 6  # what is anchored are several statements: a person is led to one of them


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (STOP, f"if self._full():  {MARK}\n                    break\n", "BP101"),
        ("held >= self", f"{MARK}\n                    held > self", "BP112"),
        ("break  # here", f"continue  {MARK}", "BP113"),
        (ADMIT, f"self.running.append(held)  {MARK}", "BP114"),
        ("self.look(1)", f"self.look(held)  {MARK}", "BP114"),
        ("held = 1", f"def late(): return held  {MARK}\n        held = 1", "BP114"),
        (f"{ADMIT}\n", f"{ADMIT}\n        return held  {MARK}\n", "BP114"),
        ("self.parked\n", f"held  {MARK}\n", "BP302"),
        ("self.parked\n", f"sum(self.parked)  {MARK}\n", "BP206"),
        ("    def schedule", f"    def {NAME}(self): ...  {MARK}\n\n    def schedule", "BP301"),
        (f"{COUNT}                {STOP}", f"if {CALL}:  {MARK}\n                    break\n", "BP111"),
        ("held = (  # all", f"self.held = held = (  {MARK}\n                    # all", "BP117"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_refused(old: str, new: str, code: str, text_lane: Callable[..., Lane]) -> None:
    assert STAND_IN.count(old) == 1
    text = STAND_IN.replace(old, new)
    if code == "BP111":
        text += f"\n    def {NAME}(self):\n        return True\n"
    with pytest.raises(PatchError) as caught:
        seam_of(text_lane({str(SCHEDULER): text, "vllm/__init__.py": ""}))
    assert [failure.code for failure in caught.value.failures] == [code]
    told = str(caught.value)
    assert "deltas/balance.py:" in told or code in ("BP206", "BP111")
    line = next(at for at, content in enumerate(text.splitlines(), 1) if MARK in content)
    assert abs(int(re.findall(r"scheduler\.py:(\d+)", told)[-1]) - line) <= STOP_LINES, told


def test_an_attribute_that_the_stop_counts_in_may_be_read_by_anybody(text_lane: Callable[..., Lane]) -> None:
    text = STAND_IN.replace("held = (", "self.held = (").replace("(held >= ", "(self.held >= ")
    with pytest.raises(PatchError, match=r"BP114 .*`self.held = .*` counts for more than the stop"):
        seam_of(text_lane({str(SCHEDULER): text, "vllm/__init__.py": ""}))


# -- the command -----------------------------------------------------------------------------


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        upstream_seam.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@on_two
def test_the_command_writes_the_patch(
    version: str, release_dir: Copy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, file = release_dir(version), tmp_path / "seam.patch"
    assert run("--repo", str(folder)) == 0
    shown = capfd.readouterr()
    assert shown.out.encode() == patch_of(seam_of(lane_of(folder)))
    assert re.match(rf"{re.escape(str(folder))}: scheduler\.py:\d+  `.* self\.max_num_", shown.err)
    assert run("--lane", f"x=dir:{folder}", "--output", str(file)) == 0
    again = capfd.readouterr()
    assert (again.out, again.err.partition(":")[0]) == ("", "x")
    assert file.read_text("utf-8") == shown.out


def test_it_runs_as_a_script(release_dir: Copy) -> None:
    command = [sys.executable, str(ROOT / "tools/upstream_seam.py"), "--repo", str(release_dir("0.23.0"))]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout.count(b"diff --git")) == (0, 1), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], "BP007", "give one of them"),
        (["--repo", "{folder}", "--lane", "installed"], "BP007", "give one of them"),
        (["--repo", "{folder}/nothing"], "BP514", "nothing is no folder"),
        (["--repo", "{empty}"], "BP503", "has no package `vllm`"),
        (["--repo", "{folder}/vllm"], "BP503", "did you mean dir:{folder}"),
        (["--lane", "pipy:vllm==1"], "BP004", "did you mean `pypi:vllm==1`?"),
        (["--lane", "git:{empty}@main"], "BP507", "is not a git repository"),
        (["--repo", "{folder}", "--author", "Ada"], "BP007", "is not NAME <EMAIL>"),
        (["--repo", "{folder}", "--output", "{empty}"], "BP515", "Is a directory"),
    ],
)
def test_wrong_usage_is_told_apart(
    arguments: list[str], code: str, said: str, release_copy: Copy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = {"folder": release_copy("0.23.0"), "empty": tmp_path / "empty"}
    places["empty"].mkdir()
    assert run(*(word.format(**places) for word in arguments)) == int(CATALOGUE[code][1])
    told = capfd.readouterr()
    assert told.err.startswith(code)
    assert said.format(**places) in told.err
    assert told.out == ""


def test_a_stop_of_another_shape_names_what_comes_nearest(
    release_copy: Copy, capfd: pytest.CaptureFixture[str]
) -> None:
    file = release_copy("0.33.0") / SCHEDULER
    text = file.read_text("utf-8")
    stop = "if num_running >= self.max_num_active_reqs:"
    assert text.count(stop) == 1
    file.write_text(text.replace(stop, "if self._at_capacity(num_running):"), encoding="utf-8")
    assert run("--repo", str(file.parents[4])) == 1
    told = capfd.readouterr().err
    assert told.startswith("BP101 anchor not found: delta 'upstream.seam' cannot be placed")
    assert "`if self._at_capacity(num_running): break`" in told
    assert f"scheduler.py:{text[: text.index(stop)].count(chr(10)) + 1}" in told


def test_what_nobody_foresaw_is_no_finding(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(upstream_seam, "seam_of", lambda _: 1 / 0)
    assert run("--repo", str(ROOT)) == 3
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_method_that_says_something_else_fails_its_proof(release_dir: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    made = upstream_seam._method
    monkeypatch.setattr(upstream_seam, "_method", lambda *a: [line.replace(" >= ", " > ") for line in made(*a)])
    with pytest.raises(PatchError, match="BP404"):
        seam_of(lane_of(release_dir("0.33.0")))
