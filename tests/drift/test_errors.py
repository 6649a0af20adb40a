"""What keeps a report from being made, or a ref from being read: told with a reason, never a traceback, never green."""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.errors import Outcome
from tests.drift.conftest import SCHEDULER, Repo, changes
from tools.drift import cli, work
from tools.drift.index import Index
from tools.drift_report import main

pytestmark = pytest.mark.timeout(1200)

Branch = Callable[[str], Repo]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit status of the command, and what it said."""
    with pytest.raises(SystemExit) as stop:
        main([*words, "--processes", "1", "--no-index"])
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return int(stop.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        ("--since nowhere", 3, "BP506"),
        ("--since v0.23.0 --until nowhere", 3, "BP506"),
        ("--since -x", 3, "BP506"),
        ("--since v0.31.0..v0.32.0", 2, "BP007"),
        ("--since v0.31.0 --until v0.30.0", 2, "BP921"),
        ("--since v0.32.0 --features nothing", 2, "BP003"),
        ("--since v0.32.0 --delta balance.nothing", 2, "BP003"),
        ("--since pin:main", 2, "BP007"),
        ("", 2, "BP007"),
        ("--since v0.32.0 --releases 0.32.0", 2, "BP007"),
    ],
)
def test_what_is_asked_for_wrongly(upstream: Repo, capsys, words: str, status: int, code: str) -> None:
    found, out, err = run(capsys, "--repo", str(upstream.path), *words.split())
    assert (found, out) == (status, "")
    assert err.startswith(f"{code} ")
    assert "\n  next " in err


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [("0.33.0..0.32.0", 2, "BP921"), ("0.32.0..", 2, "BP922"), (",", 2, "BP922"), ("x..y", 2, "BP004")],
)
def test_a_range_that_is_none(capsys, text: str, status: int, code: str) -> None:
    found, _, err = run(capsys, "--releases", text)
    assert found == status
    assert err.startswith(f"{code} ")


def test_a_folder_that_is_no_repository(tmp_path: Path, capsys) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        found, _, err = run(capsys, "--repo", str(folder), "--since", "v1")
        assert found == 3
        assert err.startswith("BP507 ")


def test_a_shallow_clone(upstream: Repo, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "shallow"
    address = upstream.path.as_uri()
    subprocess.run(["git", "clone", "-q", "--depth", "2", address, str(folder)], check=True, capture_output=True)
    subprocess.run(["git", "fetch", "-q", "--depth", "1", "origin", "tag", "v0.23.0"], cwd=folder, check=True)
    found, _, err = run(capsys, "--repo", str(folder), "--since", "v0.23.0")
    assert found == 3
    assert err.startswith("BP920 ")
    assert "fetch --unshallow" in err
    # What is there can be looked at.
    found, out, _ = run(capsys, "--repo", str(folder), "--since", "HEAD~1", "--features", "defer_preemption")
    assert (found, out.split("\n")[0]) == (0, "defer_preemption: 2/2 apply on HEAD~1..HEAD, no edit needed")


def test_a_text_that_does_not_parse(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    bad = repo.edit(SCHEDULER, lambda text: text + "\ndef (:\n", "Half a file (#9)")
    repo.edit(SCHEDULER, lambda text: text.replace("\ndef (:\n", "\n# whole\n"), "All of it")
    report = look(repo, "v0.29.0")
    assert [cell.status for cell in report.row("balance")] == ["applied", "unreadable", "applied"]
    (change,) = changes(report, SCHEDULER)
    assert (change.kind, change.first_bad.commit.hash) == ("unreadable", bad)
    assert "invalid syntax" in change.explanation
    assert report.outcome is Outcome.UNKNOWN
    assert report.verdicts[0] == f"balance: could not be looked at in {bad[:10]}"

    last = look(repo, "v0.29.0", bad)
    assert last.outcome is Outcome.UNKNOWN


def test_two_in_a_row_that_do_not_parse(branch: Branch, look) -> None:
    """Another reason is told as another change; the same one, some lines further down, is not."""
    repo = branch("0.29.0")
    first = repo.edit(SCHEDULER, lambda text: text + "\ndef (:\n", "Half a file (#9)")
    repo.edit(SCHEDULER, lambda text: "\n" + text, "Still half a file")
    other = repo.edit(SCHEDULER, lambda text: text.replace("\ndef (:\n", "\nx = 'no end\n"), "Another half")
    repo.edit(SCHEDULER, lambda text: text.replace("\nx = 'no end\n", "\n"), "All of it")
    report = look(repo, "v0.29.0")
    found = changes(report, SCHEDULER)
    assert [(change.before, change.after, change.first_bad.commit.hash) for change in found] == [
        ("v0.29.0", first[:10], first), (found[1].before, other[:10], other)
    ]  # fmt: skip
    assert (found[0].was, found[1].was) == ("applied", "unreadable")
    assert [re.sub(r".*: ", "", change.explanation) for change in found] == [
        "invalid syntax", "unterminated string literal (detected at line " + found[1].explanation.rpartition(" ")[2]
    ]  # fmt: skip
    assert report.outcome is Outcome.UNKNOWN


def test_nothing_between_the_ends(branch: Branch, capsys) -> None:
    """It is not green by an oversight: it says that there was nothing to look at, and why."""
    repo = branch("0.29.0")
    words = ("--repo", str(repo.path), "--since", "v0.29.0", "--features", "defer_preemption")
    found, out, _ = run(capsys, *words)
    assert (found, out.split("\n")[1]) == (0, "the range is empty: no commit lies between its ends")
    (repo.path / "docs.md").write_text("more")
    repo.commit("Say it in the documentation")
    found, out, _ = run(capsys, *words)
    assert found == 0
    assert out.split("\n")[1] == "nothing can have changed: 1 commit, none of which touches what is read"


def test_an_index_that_cannot_be_written(branch: Branch, tmp_path: Path, capsys) -> None:
    """One warning, and the report is what it is."""
    repo = branch("0.29.0")
    (tmp_path / "index").write_text("no folder")
    words = ["--repo", str(repo.path), "--since", "v0.29.0", "--features", "defer_preemption", "--processes", "1"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--index", str(tmp_path / "index")])
    said = capsys.readouterr()
    assert stop.value.code in {0, None}
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"warning: nothing is kept for the next run, because that cannot be written: {tmp_path}")


@pytest.mark.parametrize("watched", [True, False])
def test_who_watches_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch, *, watched: bool) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: watched)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with cli._progress() as tell:
        tell(3, 60)
    assert ("3/60" in screen.getvalue()) is watched
    assert watched or not screen.getvalue()


def test_a_switch_takes_no_value(capsys) -> None:
    found, out, _ = run(capsys, "--help")
    assert found == 0
    assert "<bool>" not in out
    assert "unpacked wheel" in " ".join(out.replace("│", " ").split())


def test_a_callee_that_does_not_parse(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    repo.edit("vllm/v1/core/kv_cache_manager.py", lambda text: text + "\ndef (:\n", "Half a file")
    report = look(repo, "v0.29.0")
    assert [cell.status for cell in report.row("balance")] == ["applied", "applied"]
    assert report.outcome is Outcome.UNKNOWN
    assert "kv_cache_manager.py" in report.failures[0].what
    assert not [change for change in report.callees if "kv_cache_manager" in change.callee]


def test_a_file_that_is_missing(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    repo.git("rm", "-q", SCHEDULER)
    bad = repo.commit("Move it away (#9)")
    report = look(repo, "v0.29.0")
    (change,) = changes(report, "balance.admission-gate")
    assert (change.kind, change.action, change.first_bad.commit.hash) == ("target-gone", True, bad)
    assert report.outcome is Outcome.BROKEN


def test_a_link_in_its_place(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    (repo.path / SCHEDULER).rename(repo.path / "vllm/elsewhere.py")
    (repo.path / SCHEDULER).symlink_to("../../../elsewhere.py")
    repo.commit("Link it")
    report = look(repo, "v0.29.0")
    assert report.row("balance")[-1].status == "unreadable"
    assert "is a symbolic link" in report.row("balance")[-1].failures[0].what
    assert report.outcome is Outcome.UNKNOWN
    # What could not be read there says nothing of any other place.
    assert look(repo, "v0.29.0", "v0.29.0").outcome is Outcome.HOLDS


def test_a_repository_without_vllm(tmp_path: Path, look) -> None:
    repo = Repo(tmp_path)
    repo.git("init", "-q")
    repo.commit("Nothing")
    assert look(repo, "HEAD").outcome is Outcome.UNKNOWN


def test_what_a_commit_says_does_not_reach_the_terminal(branch: Branch, capsys) -> None:
    repo = branch("0.29.0")
    repo.git("config", "user.name", "\x1b[2JA\u202e. Person\x07")
    repo.edit(SCHEDULER, lambda text: text + "\ndef (:\n", "\x1b[31mred\x1b[0m \r over \x08\x0b\u2028 caf\u00e9 (#9)")
    for format_ in ("text", "json", "markdown", "github", "html"):
        words = ("--repo", str(repo.path), "--since", "v0.29.0", "--features", "defer_preemption", "--format", format_)
        found, out, _ = run(capsys, *words)
        assert found == 3
        assert not set(out) & set("\x1b\r\x07\x08\x0b\u2028\u202e")
    assert "\ufffd[31mred" in out
    assert "caf\u00e9" in out


def test_an_output_that_takes_nothing(upstream: Repo, capsys, monkeypatch) -> None:
    def full(text: str) -> None:
        raise OSError(28, "No space left on device", text[:0])

    monkeypatch.setattr("tools.drift.cli.typer.echo", full)
    words = ("--repo", str(upstream.path), "--since", "v0.33.0", "--features", "defer_preemption")
    found, _, err = run(capsys, *words)
    assert found == 3
    assert err.startswith("BP515 ")


def test_an_interrupted_run_goes_on(branch: Branch, tmp_path: Path, monkeypatch, capsys) -> None:
    repo = branch("0.29.0")
    for number in range(3):
        repo.edit(SCHEDULER, lambda text, n=number: f"{text}\n# {n}\n", f"Say {number}")
    words = ["--repo", str(repo.path), "--since", "v0.29.0", "--features", "defer_preemption", "--processes", "1"]
    words += ["--index", str(tmp_path / "index"), "--format", "json"]
    real, seen = work._look, []

    def some(job):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(job)
        return real(job)

    monkeypatch.setattr(work, "_look", some)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 3
    assert "the next run goes on" in capsys.readouterr().err
    assert len(Index(tmp_path / "index")._known) == 3

    left = []
    monkeypatch.setattr(work, "_look", lambda job: left.append(job) or real(job))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    again = {(job[1].about, job[2]) for job in left} & {(job[1].about, job[2]) for job in seen}
    assert not again
