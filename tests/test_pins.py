"""A pinned lane is green only where it is proven to be what was pinned; everything else exits 3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.cli import main
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.pins import pin_failure, prove_pin, read_pins
from balance_patcher.source import DirSource, InstalledSource, Lane, open_source

RELEASE, MAIN = "0.23.0", "0.32.0"
FULL = "5df63a720f6b1d0b3c8c2c3e1f2a4b5c6d7e8f90"
STAMP = "__version__ = version = {version!r}\n__commit_id__ = commit_id = {commit!r}\n"


def git(folder: Path, *arguments: str) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    done = subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def committed(folder: Path, message: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory, release_dir: Callable[[str], Path]) -> Path:
    """A repository with both lanes' sources: one commit each, the first with an annotated and a lightweight tag."""
    folder = tmp_path_factory.mktemp("upstream")
    git(folder, "init", "-q", "-b", "main")
    (folder / ".gitignore").write_text("vllm/_version.py\n")
    for version in (RELEASE, MAIN):
        shutil.copytree(release_dir(version), folder, dirs_exist_ok=True)
        committed(folder, version)
        git(folder, "tag", f"v{version}")
        git(folder, "tag", "-a", f"annotated-{version}", "-m", version)
    return folder


@pytest.fixture
def pins(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(release: str, main: str) -> Path:
        folder = tmp_path / "pins"
        folder.mkdir(exist_ok=True)
        (folder / "vllm-release-tag.commit").write_text(release)
        (folder / "vllm-main-verified.commit").write_text(main)
        return folder

    return write


def verify(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def verified(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, dict[str, object]], list[str]]:
    """The exit status, the pins by lane, and the ids of all failures."""
    code = verify("--format", "json", *arguments)
    result = json.loads(capsys.readouterr().out)
    assert result["exit_code"] == code
    lanes = {lane["name"]: lane["pin"] for lane in result["lanes"]}
    return code, lanes, [failure["code"] for lane in result["lanes"] for failure in lane["failures"]]


def stamped(folder: Path, commit: str | None, version: str = MAIN) -> Lane:
    (folder / "vllm").mkdir(parents=True, exist_ok=True)
    (folder / "vllm" / "__init__.py").write_text("version = 1\n")
    (folder / "vllm" / "_version.py").write_text(STAMP.format(version=version, commit=commit))
    return Lane("main", DirSource(f"dir:{folder}", folder))


# -- the pin files ---------------------------------------------------------------------------


def test_white_space_around_a_pin_does_not_count(pins: Callable[[str, str], Path]) -> None:
    assert read_pins(pins("v0.23.0 \n\n", f"\t{FULL}\r\n")) == {"release": "v0.23.0", "main": FULL}


@pytest.mark.parametrize("text", ["", " \n", "v0.23.0 v0.24.0", "v0.23.0\nv0.24.0\n"])
def test_a_pin_file_that_does_not_hold_one_word_is_refused(
    text: str, pins: Callable[[str, str], Path], upstream: Path
) -> None:
    folder = pins("v0.23.0", text)
    with pytest.raises(PatchError) as caught:
        read_pins(folder)
    assert [failure.code for failure in caught.value.failures] == ["BP514"]
    assert verify(f"release=git:{upstream}@v{RELEASE}", f"main=git:{upstream}@v{MAIN}", "--pins", str(folder)) == 3


def test_a_pin_file_that_is_missing_or_no_text_is_refused(pins: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = pins("v0.23.0", "x")
    (folder / "vllm-main-verified.commit").write_bytes(b"\xff\xfe")
    for place in (folder, tmp_path / "nowhere"):
        with pytest.raises(PatchError) as caught:
            read_pins(place)
        assert [failure.code for failure in caught.value.failures] == ["BP514"]
        assert caught.value.outcome is Outcome.UNKNOWN


def refused(place: Path) -> str:
    with pytest.raises(PatchError) as caught:
        read_pins(place)
    return str(caught.value)


def test_a_folder_of_pins_that_is_none_is_told_from_one_without_them(
    pins: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = pins("v0.23.0", "x")
    file = folder / "vllm-main-verified.commit"
    said = refused(file)
    assert f"give the folder, not the file: {folder}" in said
    file.unlink()
    said = refused(folder)
    assert f"{file}: it is missing" in said
    assert "Errno" not in said
    assert said.count(str(file)) == 1
    assert "is no folder" in refused(tmp_path / "nowhere")


def test_the_folder_above_the_pins_leads_to_them(pins: Callable[[str, str], Path], tmp_path: Path) -> None:
    pins("v0.23.0", "x").rename(tmp_path / ".github")
    assert f"did you mean {tmp_path / '.github'}?" in refused(tmp_path)


# -- through the command line ----------------------------------------------------------------


@pytest.mark.parametrize("tag", ["v{}", "annotated-{}"])
def test_lanes_are_proven_by_their_git_objects(
    tag: str, upstream: Path, pins: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    head = git(upstream, "rev-parse", "HEAD")
    folder = pins(tag.format(RELEASE) + "  \n", head + "\n")
    lanes = (f"release=git:{upstream}@{tag.format(RELEASE)}", f"main=git:{upstream}@main")
    code, found, codes = verified(capsys, *lanes, "--pins", str(folder))
    assert (code, codes) == (0, [])
    assert [found[name]["status"] for name in ("release", "main")] == ["proven", "proven"]
    assert found["main"] == {"wanted": head, "status": "proven", "detail": f"commit {head}"}


def test_a_lane_that_is_another_commit_is_different(
    upstream: Path, pins: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = (f"release=git:{upstream}@v{MAIN}", f"main=git:{upstream}@v{MAIN}")
    for pinned in (f"v{RELEASE}", git(upstream, "rev-parse", f"v{RELEASE}^{{commit}}")):
        code, found, codes = verified(capsys, *lanes, "--pins", str(pins(pinned, f"v{MAIN}")))
        assert (code, codes) == (3, ["BP510"])
        assert (found["release"]["status"], found["main"]["status"]) == ("different", "proven")


def test_a_pinned_lane_that_is_missing_is_said(
    upstream: Path, pins: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, codes = verified(capsys, f"release=git:{upstream}@v{RELEASE}", "--pins", str(pins(f"v{RELEASE}", FULL)))
    assert (code, codes) == (3, ["BP511"])
    code, _, codes = verified(capsys, f"git:{upstream}@v{RELEASE}", "--pins", str(pins(f"v{RELEASE}", FULL)))
    assert (code, codes) == (3, ["BP511", "BP511"])


def test_a_lane_that_cannot_be_opened_is_not_green(
    upstream: Path, pins: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = (f"release=git:{upstream}@v{RELEASE}", f"main=git:{upstream}@v9.9.9")
    code, found, codes = verified(capsys, *lanes, "--pins", str(pins(f"v{RELEASE}", "v9.9.9")))
    assert (code, codes, found["main"]) == (3, ["BP506"], None)


def test_a_broken_delta_on_an_unproven_lane_is_broken(
    release_copy: Callable[[str], Path],
    upstream: Path,
    pins: Callable[[str, str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = release_copy(MAIN)
    file = folder / "vllm/v1/engine/core.py"
    file.write_text(file.read_text().replace("_has_global_unfinished_reqs", "_any_unfinished"))
    lanes = (f"release=git:{upstream}@v{RELEASE}", f"main=dir:{folder}")
    code, _, codes = verified(capsys, *lanes, "--pins", str(pins(f"v{RELEASE}", "0" * 40)))
    assert (code, codes) == (1, ["BP510"])


def test_expect_speaks_of_one_lane(
    upstream: Path, capsys: pytest.CaptureFixture[str], pins: Callable[[str, str], Path]
) -> None:
    lane = f"git:{upstream}@v{MAIN}"
    code, found, _ = verified(capsys, lane, "--expect", f"v{MAIN}")
    assert (code, found[lane]["status"]) == (0, "proven")
    code, _, codes = verified(capsys, lane, "--expect", f"v{RELEASE}")
    assert (code, codes) == (3, ["BP510"])
    assert verify(lane, f"old=git:{upstream}@v{RELEASE}", "--expect", f"v{MAIN}") == 2
    assert verify(lane, "--expect", f"v{MAIN}", "--pins", str(pins("a", "b"))) == 2


def test_a_release_from_the_index_is_proven_by_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = verified(capsys, f"pypi:vllm=={RELEASE}", "--expect", f"v{RELEASE}")
    assert (code, found[f"pypi:vllm=={RELEASE}"]) == (
        0,
        {"wanted": f"v{RELEASE}", "status": "proven", "detail": f"release {RELEASE}"},
    )
    code, _, codes = verified(capsys, f"pypi:vllm=={RELEASE}", "--expect", f"v{MAIN}")
    assert (code, codes) == (3, ["BP510"])


# -- commits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stamp", "pinned"),
    [("g" + FULL[:9], FULL), ("g" + FULL[:9], FULL[:7]), (FULL, FULL), (FULL, FULL[:12]), ("g" + FULL, FULL)],
)
def test_a_commit_is_proven_by_the_stamp_of_the_build(stamp: str, pinned: str, tmp_path: Path) -> None:
    lane = stamped(tmp_path, stamp)
    pin = prove_pin(lane, pinned)
    assert (pin.status, pin_failure(lane, pin)) == ("proven", None)


@pytest.mark.parametrize(
    ("stamp", "version", "status", "code"),
    [
        ("g" + "0" * 9, MAIN, "different", "BP510"),
        ("g" + FULL[:8] + "1", MAIN, "different", "BP510"),
        ("g" + FULL[:4], MAIN, "different", "BP510"),
        (None, MAIN, "unproven", "BP509"),
        ("g" + FULL[:9], "0.32.1.dev3+g5df63a720.d20260101", "unproven", "BP509"),
    ],
)
def test_another_stamp_or_none_proves_nothing(
    stamp: str | None, version: str, status: str, code: str, tmp_path: Path
) -> None:
    lane = stamped(tmp_path, stamp, version)
    pin = prove_pin(lane, FULL)
    failure = pin_failure(lane, pin)
    assert failure is not None
    assert (pin.status, failure.code, failure.outcome) == (status, code, Outcome.UNKNOWN)
    assert failure.next


def test_the_stamp_of_an_installed_vllm_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped(tmp_path, "g" + FULL[:9])
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lane = Lane("main", InstalledSource())
    assert prove_pin(lane, FULL).status == "proven"
    assert prove_pin(lane, f"v{MAIN}").status == "proven"
    assert prove_pin(lane, f"v{RELEASE}").status == "different"


@pytest.mark.parametrize("short", ["5df63a", "a", "12"])
def test_a_commit_of_too_few_digits_is_said_to_be_that(short: str, tmp_path: Path, upstream: Path) -> None:
    for lane in (stamped(tmp_path, "g" + FULL[:9]), Lane("main", open_source(f"git:{upstream}@v{MAIN}"))):
        pin = prove_pin(lane, short)
        assert (pin.status, pin.detail) == ("unproven", "a commit needs at least 7 digits")


def test_a_lane_is_named_once(tmp_path: Path) -> None:
    lane = stamped(tmp_path, None)
    for name, said in (("main", f"dir:{tmp_path}: "), (f"dir:{tmp_path}", "")):
        lane.name = name
        failure = pin_failure(lane, prove_pin(lane, FULL))
        assert failure is not None
        assert failure.what == f"{said}this source does not say which commit it is"


# -- versions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "pinned", "status"),
    [
        ("0.23.0", "v0.23.0", "proven"),
        ("0.23.0", "0.23.0", "proven"),
        ("0.23.0", "v0.23", "proven"),
        ("0.23.0+cpu", "v0.23.0", "unproven"),
        ("0.23.1", "v0.23.0", "different"),
        ("0.23.0rc1", "v0.23.0", "different"),
        ("0.23.1.dev4+gabcdef012", "v0.23.0", "different"),
        ("dev", "v0.23.0", "unproven"),
        (None, "v0.23.0", "unproven"),
        ("0.23.0", "main", "unproven"),
        ("0.23.0", "releases/v0.23.0", "unproven"),
    ],
)
def test_a_version_proves_a_release_and_nothing_else(
    version: str | None, pinned: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = stamped(tmp_path, None, version or "")
    if version is None:
        (tmp_path / "vllm" / "_version.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert prove_pin(Lane("release", InstalledSource()), pinned).status == status
    assert lane.version == version


def test_a_folder_does_not_prove_a_release_by_what_it_says_of_itself(tmp_path: Path) -> None:
    lane = stamped(tmp_path, None, RELEASE)
    pin = prove_pin(lane, f"v{RELEASE}")
    assert (pin.status, pin.detail) == ("unproven", f"it calls itself {RELEASE}, and so would a changed copy")


# -- work trees ------------------------------------------------------------------------------


@pytest.fixture
def checkout(upstream: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    git(tmp_path, "clone", "-q", str(upstream), str(folder))
    return folder


def test_a_clean_checkout_is_proven_by_its_head(checkout: Path) -> None:
    lane = Lane("main", open_source(f"dir:{checkout}"))
    head = git(checkout, "rev-parse", "HEAD")
    assert prove_pin(lane, f"v{MAIN}").detail == f"git object {head}"
    assert [prove_pin(lane, wanted).status for wanted in (head, head[:9], f"v{RELEASE}")] == [
        "proven",
        "proven",
        "different",
    ]


@pytest.mark.parametrize("stamp", [False, True], ids=["no stamp", "stamp of the clean build"])
def test_a_changed_checkout_is_proven_by_nothing(stamp: object, checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    if stamp:
        (checkout / "vllm/_version.py").write_text(STAMP.format(version=MAIN, commit="g" + head[:9]))
    with (checkout / "vllm/v1/core/sched/scheduler.py").open("a") as file:
        file.write("# changed\n")
    lane = Lane("main", open_source(f"dir:{checkout}"))
    for wanted in (head, head[:9], f"v{MAIN}"):
        pin = prove_pin(lane, wanted)
        failure = pin_failure(lane, pin)
        assert (pin.status, failure and failure.code) == ("unproven", "BP509")
        assert pin.detail == "files of vllm/ differ from the commit that is checked out"


def test_a_stale_stamp_does_not_speak_for_a_checkout(checkout: Path) -> None:
    (checkout / "vllm/_version.py").write_text(STAMP.format(version=MAIN, commit="g" + FULL[:9]))
    lane = Lane("main", open_source(f"dir:{checkout}"))
    assert prove_pin(lane, FULL).status != "proven"


def test_a_shallow_clone_without_the_tag_says_what_to_fetch(upstream: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", "--no-tags", f"file://{upstream}", str(folder))
    lane = Lane("main", open_source(f"git:{folder}@HEAD"))
    pin = prove_pin(lane, f"v{MAIN}")
    assert (pin.status, pin.detail) == ("unproven", f"v{MAIN} is not in {folder}")
    failure = pin_failure(lane, pin)
    assert failure is not None
    assert failure.next == f"git -C {folder} fetch --depth 1 origin tag v{MAIN}"
    assert str(failure).count(f"git:{folder}") == 1
    head = git(folder, "rev-parse", "HEAD")
    assert prove_pin(lane, head).status == "proven"
