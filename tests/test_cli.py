"""The command line: exit status, reports and what `show` shows; in process where that is enough."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from typer.testing import CliRunner

from balance_patcher import cli
from balance_patcher.build import compile_plan
from balance_patcher.errors import Failure
from balance_patcher.extras import command_for
from balance_patcher.plan import make_plan
from balance_patcher.registry import find_feature
from balance_patcher.source import open_source
from tests.conftest import ROOT
from tests.serving import PackageIndex, isolate, wheel

Releases = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
FORMATS = ("text", "json", "github", "markdown", "junit")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def spawn(*arguments: str, code: str | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    start = ["-c", code] if code else ["-m", "balance_patcher"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def good(release_dir: Releases) -> str:
    return f"dir:{release_dir('0.32.0')}"


@pytest.fixture(scope="module")
def release(release_dir: Releases) -> str:
    return f"dir:{release_dir('0.23.0')}"


@pytest.fixture(scope="module")
def broken(release_dir: Releases, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("broken")
    for path in ("vllm/v1/core/sched/scheduler.py", "vllm/v1/engine/core.py", "vllm/_version.py"):
        text = (release_dir("0.32.0") / path).read_text("utf-8")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace("_has_global_unfinished_reqs", "_any_unfinished"), "utf-8")
    return f"dir:{folder}"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"dir:{tmp_path_factory.mktemp('empty')}"


# -- exit status -----------------------------------------------------------------------------


def test_all_hold_is_0(good: str, capsys: Capture) -> None:
    assert run("verify", good) == 0
    assert "All deltas hold on 1 lane." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lanes", "code"),
    [
        ("good", 0),
        ("broken", 1),
        ("empty", 3),
        ("good release", 0),
        ("good empty", 3),
        ("empty good", 3),
        ("good broken", 1),
        ("empty broken good", 1),
        ("broken empty", 1),
        ("nonsense", 2),
        ("good nonsense", 2),
        ("empty nonsense", 2),
        ("broken empty nonsense good", 2),
    ],
)
def test_of_several_lanes_2_wins_then_1_then_3(
    lanes: str, code: int, request: pytest.FixtureRequest, capsys: Capture
) -> None:
    known = {name: request.getfixturevalue(name) for name in ("good", "release", "broken", "empty")}
    assert run("verify", *(f"{name}={known.get(name, 'nonsense')}" for name in lanes.split())) == code
    out = capsys.readouterr().out
    assert all(name in out for name in lanes.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--nope"],
        ["verify", "--format", "yaml"],
        ["verify", "--feature", "nope", "dir:."],
        ["verify", "--report", "yaml:x", "dir:."],
        ["verify", "--report", "json", "dir:."],
        ["verify", "--report", "json:", "dir:."],
        ["verify", "a=dir:.", "a=dir:/"],
        ["verify", "dir:.", "dir:."],
        ["verify", "pypi:vllm"],
        ["verify", "git:/x"],
        ["verify", "dir:", "--expect", "v1"],
        ["verify", "dir:.", "dir:/", "--expect", "v1"],
        ["nope"],
        [],
        ["show"],
        ["show", "nope"],
        ["show", "a:b"],
        ["show", "balance", "--diff", "--map", "--lane", "dir:."],
        ["show", "balance", "--lane", "nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments: Sequence[str], capsys: Capture) -> None:
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert (told.out + told.err).strip()


def test_typers_own_runner_sees_the_same(good: str) -> None:
    done = CliRunner().invoke(cli.app, ["verify", good, "--format", "json"])
    assert (done.exit_code, json.loads(done.output)["exit_code"]) == (0, 0)
    assert CliRunner().invoke(cli.app, ["verify", "--help"]).exit_code == 0


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("x"), RecursionError(), MemoryError()])
def test_what_nobody_foresaw_on_a_lane_is_3_and_hides_no_other(
    error: Exception, good: str, broken: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    whole = cli.check_lane

    def check(spec, *rest, **options):
        if spec.name == "odd":
            raise error
        return whole(spec, *rest, **options)

    monkeypatch.setattr(cli, "check_lane", check)
    assert run("verify", f"odd={good}", f"good={good}") == 3
    assert "odd: BP599" in capsys.readouterr().out
    assert run("verify", f"odd={good}", f"bad={broken}") == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), KeyboardInterrupt(), BrokenPipeError(32, "gone"), EOFError(), OSError(5, "io")]
)
@pytest.mark.parametrize("where", ["_check_all", "features", "print_report"])
def test_what_nobody_foresaw_elsewhere_is_3(
    error: BaseException, where: str, good: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, where, fail)
    assert run("verify", good) == 3


def test_lanes_are_read_side_by_side_and_looked_at_one_after_the_other(
    good: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[bool]] = {"fetch": set(), "check_lane": set()}

    def watched(name: str) -> Callable[..., object]:
        whole = getattr(cli, name)

        def watch(*arguments, **options):
            seen[name].add(threading.current_thread() is threading.main_thread())
            return whole(*arguments, **options)

        return watch

    for name in seen:
        monkeypatch.setattr(cli, name, watched(name))
    assert run("verify", f"a={good}", f"b={release}") == 0
    # CPython 3.11's parser fails in threads: "AST constructor recursion depth mismatch"
    assert seen == {"fetch": {False}, "check_lane": {True}}


def test_a_lane_is_looked_at_while_those_behind_it_are_being_read(
    good: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, collecting = threading.Event(), []
    read, look = cli.fetch, cli.check_lane

    def fetch(spec, chosen):
        assert spec.name == "a" or looked.wait(60)
        return read(spec, chosen)

    def check_lane(*arguments, **options):
        looked.set()
        collecting.append(gc.isenabled())
        return look(*arguments, **options)

    monkeypatch.setattr(cli, "fetch", fetch)
    monkeypatch.setattr(cli, "check_lane", check_lane)
    assert run("verify", f"a={good}", f"b={release}") == 0
    # What is left of a lane has no cycles; looking for some in its trees takes as long as half of the rest.
    assert collecting == [False, False]
    assert gc.isenabled()


def test_a_renderer_that_cannot_be_imported_is_done_without(good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("module 'ast' has no attribute 'Num'")

    monkeypatch.setattr(cli, "prefer_astor", fail)
    assert run("verify", good) == 0


def test_strict_makes_an_absorbed_delta_a_failure(good: str, release: str, capsys: Capture) -> None:
    assert run("verify", "--strict", release) == 0
    assert run("verify", "--strict", good) == 1
    out = capsys.readouterr().out
    assert "BP121 absorbed upstream" in out
    assert re.search(r"^  declared +deltas/balance\.py:\d+$", out, re.MULTILINE)


def test_a_feature_can_be_chosen(good: str, capsys: Capture) -> None:
    assert run("verify", good, "--feature", "balance", "--feature", "balance", "--format", "json") == 0
    (lane,) = json.loads(capsys.readouterr().out)["lanes"]
    assert [feature["name"] for feature in lane["features"]] == ["balance"]


# -- could not check -------------------------------------------------------------------------


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    isolate(monkeypatch, tmp_path)
    return monkeypatch


def refused(capsys: Capture, lane: str) -> str:
    assert run("verify", f"lane={lane}") == 3
    return capsys.readouterr().out


def test_an_index_that_cannot_be_reached_is_3(isolated: pytest.MonkeyPatch, capsys: Capture) -> None:
    isolated.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    assert "lane: BP501 package index cannot be reached" in refused(capsys, "pypi:vllm==0.32.0")


def test_a_version_that_the_index_does_not_have_is_3(isolated: pytest.MonkeyPatch, capsys: Capture) -> None:
    with PackageIndex() as index:
        index.files["vllm-0.1.0-py3-none-any.whl"] = wheel({"vllm/__init__.py": b"x = 1\n"})
        isolated.setenv("PIP_INDEX_URL", index.url())
        assert "lane: BP502 version not found" in refused(capsys, "pypi:vllm==0.32.0")


def test_a_wheel_that_is_cut_short_is_3(isolated: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    data = wheel({"vllm/__init__.py": b"x = 1\n" * 1000})
    name = "vllm-0.32.0-py3-none-any.whl"
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    assert "lane: BP504 archive is damaged" in refused(capsys, f"wheel:{tmp_path / name}")
    with PackageIndex() as index:
        index.files[name] = data[: len(data) // 2]
        isolated.setenv("PIP_INDEX_URL", index.url())
        assert "lane: BP504 archive is damaged" in refused(capsys, "pypi:vllm==0.32.0")


def test_a_git_ref_that_is_not_there_is_3_and_ends_with_the_fetch(
    isolated: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    repo = tmp_path / "repo"
    for words in (
        ["init", "-q", str(repo)],
        ["-C", str(repo), "remote", "add", "origin", "https://example.invalid/vllm"],
    ):
        subprocess.run(["git", *words], check=True)
    out = refused(capsys, f"git:{repo}@v0.99.0")
    assert "lane: BP506 git ref not found" in out
    assert re.search(rf"^  next +git -C {re.escape(str(repo))} fetch .*origin tag v0\.99\.0$", out, re.MULTILINE)
    assert "BP507" in refused(capsys, f"git:{tmp_path}@v0.99.0")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("vllm/v1/engine/core.py", b"def (:\n"),
        ("vllm/v1/core/sched/scheduler.py", b"# coding: no-such\n"),
        ("vllm/v1/core/sched/scheduler.py", b"x = '\xff'\n"),
        ("vllm/_version.py", b"version = (\n"),
        ("vllm/v1/core/sched/scheduler.py", b"x = 1\0\n"),
    ],
)
def test_a_source_that_cannot_be_parsed_is_3(path: str, text: bytes, release_copy: Releases, capsys: Capture) -> None:
    folder = release_copy("0.32.0")
    (folder / path).write_bytes(text)
    out = refused(capsys, f"dir:{folder}")
    assert "lane: BP508 source cannot be parsed" in out
    assert "<unknown>" not in out
    assert "or the file is damaged" in out
    assert Path(path).name in out


def test_a_folder_without_vllm_is_3(empty: str, tmp_path: Path, capsys: Capture) -> None:
    assert "lane: BP503 not a vLLM source" in refused(capsys, empty)
    assert "lane: BP514" in refused(capsys, f"dir:{tmp_path / 'nowhere'}")
    assert "lane: BP514" in refused(capsys, f"wheel:{tmp_path / 'nowhere.whl'}")


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM is here")
def test_nothing_installed_is_3(capsys: Capture) -> None:
    assert "lane: BP512 vLLM is not installed" in refused(capsys, "installed")


# -- reports ---------------------------------------------------------------------------------


def test_json_has_every_key_that_was_promised(good: str, release: str, capsys: Capture) -> None:
    assert run("verify", f"release={release}", f"main={good}", "--format", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert {"schema": result["schema"], "exit_code": result["exit_code"]} == {"schema": 1, "exit_code": 0}
    versions = {lane["name"]: lane["vllm_version"] for lane in result["lanes"]}
    assert versions == {"release": "0.23.0", "main": "0.32.0"}
    for lane in result["lanes"]:
        assert {"name", "source", "vllm_version", "commit", "pin", "status", "features"} <= set(lane)
        assert (lane["status"], lane["pin"]) == ("ok", None)
        for feature in lane["features"]:
            assert {"name", "status", "deltas", "invariants"} <= set(feature)
            for delta in feature["deltas"]:
                assert {"name", "target", "status", "variant", "file", "line", "matches", "detail"} <= set(delta)
            for invariant in feature["invariants"]:
                assert set(invariant) == {"name", "status", "detail"}


def test_each_format_can_be_written_to_a_file_besides(good: str, broken: str, tmp_path: Path, capsys: Capture) -> None:
    files = {kind: tmp_path / "deep" / f"report.{kind}" for kind in FORMATS}
    options = [word for kind, file in files.items() for word in ("--report", f"{kind}:{file}")]
    assert run("verify", f"main={good}", f"bad={broken}", "--format", "github", *options) == 1
    out = capsys.readouterr().out
    texts = {kind: file.read_text("utf-8") for kind, file in files.items()}
    assert texts["github"] == out
    assert out.startswith("::notice title=main::")
    assert "\n::error file=deltas/balance.py,line=" in out
    assert json.loads(texts["json"])["exit_code"] == 1
    assert texts["markdown"].startswith("**Broken: bad (1 of 2 lanes).**")
    assert [suite.get("name") for suite in Xml.fromstring(texts["junit"])] == ["main", "bad"]  # noqa: S314 - our own text
    assert texts["text"].rstrip().endswith("Broken: bad (1 of 2 lanes).")
    assert "\x1b[" not in texts["text"]


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_tells_of_the_failure_and_exits_1(kind: str, broken: str, capsys: Capture) -> None:
    assert run("verify", f"bad={broken}", "--format", kind) == 1
    out = capsys.readouterr().out
    assert "BP104" in out
    assert "find what it was renamed to" in out


def test_a_report_that_cannot_be_written_does_not_hide_the_result(
    good: str, broken: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("")
    assert run("verify", good, "--report", f"json:{tmp_path}/file/x") == 3
    told = capsys.readouterr()
    assert "All deltas hold" in told.out
    assert "BP515 file cannot be written: " in told.err
    assert run("verify", broken, "--report", f"json:{tmp_path}/file/x") == 1


def test_a_finding_is_told_on_a_terminal_that_knows_no_arrows(release_copy: Releases) -> None:
    folder = release_copy("0.32.0")
    file = folder / "vllm/v1/core/sched/scheduler.py"
    file.write_text(file.read_text().replace(">= self.max_num_active_reqs", "> self.max_num_active_reqs"))
    code = "import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
    code += "from balance_patcher.cli import main; main()"
    done = spawn("verify", f"dir:{folder}", code=code)
    assert (done.returncode, done.stderr) == (1, "")
    assert "BP112" in done.stdout
    assert "\\u2192" in done.stdout


# -- which lanes -----------------------------------------------------------------------------


def project(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(textwrap.dedent(text))
    return folder


def lanes_of(capsys: Capture) -> list[tuple[str, str]]:
    run("verify", "--format", "json")
    return [(lane["name"], lane["source"]) for lane in json.loads(capsys.readouterr().out)["lanes"]]


def test_lanes_come_from_the_nearest_pyproject_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str, capsys: Capture
) -> None:
    project(tmp_path, '[tool.balance_patcher.lanes]\nfar = "dir:far"\n')
    near = project(
        tmp_path / "a", f'[tool.balance_patcher.lanes]\nrelative = "dir:../x"\nabsolute = "{good}"\ngit = "git:r@v1"\n'
    )
    inner = near / "b" / "c"
    inner.mkdir(parents=True)
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(inner)
    assert lanes_of(capsys) == [("relative", f"dir:{near}/../x"), ("absolute", good), ("git", f"git:{near}/r@v1")]


def test_a_relative_lane_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release_copy: Releases
) -> None:
    folder = release_copy("0.32.0")
    project(tmp_path, f'[tool.balance_patcher.lanes]\nmain = "dir:{folder.name}"\n')
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert run("verify") == 0


def test_without_lanes_the_installed_one_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    project(tmp_path, "[project]\nname = 'x'\n")
    monkeypatch.chdir(tmp_path)
    assert lanes_of(capsys) == [("installed", "installed")]


@pytest.mark.parametrize(
    "text",
    [
        "[tool",
        "[tool.balance_patcher]\nlanes = 1\n",
        "[tool.balance_patcher]\nlanes = []\n",
        "[tool.balance_patcher.lanes]\na = 1\n",
        "tool = 1\n",
    ],
)
def test_a_pyproject_that_cannot_be_read_is_not_green(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(project(tmp_path, text))
    assert run("verify") in (2, 3)
    assert "pyproject.toml" in capsys.readouterr().err


def test_a_pyproject_that_is_no_text_is_not_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "pyproject.toml").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    assert run("verify") in (2, 3)


def test_the_repository_declares_both_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "tests")
    specs = {spec.name: spec.spec for spec in cli.declared_lanes(Path.cwd())}
    assert specs == {"release": "pypi:vllm==0.23.0", "main": "pypi:vllm==0.32.0"}


def test_a_lane_named_on_the_command_line_needs_no_pyproject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str
) -> None:
    monkeypatch.chdir(project(tmp_path, "[tool"))
    assert run("verify", f"main={good}") == 0
    assert run("show", "balance", "--lane", good) == 0


def said(capsys: Capture, *arguments: str) -> str:
    assert run(*arguments) == 2
    told = capsys.readouterr()
    return told.out + told.err


def test_declared_names_are_lanes_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str, capsys: Capture
) -> None:
    monkeypatch.chdir(project(tmp_path, f'[tool.balance_patcher.lanes]\nrelease = "dir:x"\nmain = "{good}"\n'))
    assert run("verify", "main", "--format", "json") == 0
    (lane,) = json.loads(capsys.readouterr().out)["lanes"]
    assert (lane["name"], lane["source"]) == ("main", good)
    for command in (("verify", "mian"), ("show", "balance", "--lane", "mian")):
        text = said(capsys, *command)
        assert "BP004" in text
        assert "declared  release, main" in text
        assert "pypi:DIST==VERSION" in text
        assert "did you mean `main`?" in text
    assert "did you mean `installed`?" in said(capsys, "verify", "instaled")


@pytest.mark.parametrize(
    ("lane", "hint"),
    [
        ("pypi:vllm", "==VERSION is missing"),
        ("git:r", "@REF is missing"),
        ("dir:", "nothing stands after `dir`"),
        ("x=git", "a colon and more are missing"),
        ("x=instaled", "did you mean `installed`?"),
        ("pipy:vllm==1.0", "did you mean `pypi:vllm==1.0`?"),
        ("x=zzz:y", "none of the five forms"),
    ],
)
def test_a_source_that_is_none_says_what_it_lacks(lane: str, hint: str, capsys: Capture) -> None:
    assert hint in said(capsys, "verify", lane)


def test_wrong_usage_is_not_called_a_bad_lane(good: str, capsys: Capture) -> None:
    for words in (
        ("verify", "--report", "yaml:x", good),
        ("verify", good, "x=" + good, "--expect", "v1"),
        ("show", "balance", "--diff", "--map"),
    ):
        assert "BP007 wrong usage: " in said(capsys, *words)


def test_the_package_itself_is_not_a_source(release_dir: Releases, capsys: Capture) -> None:
    folder = release_dir("0.32.0")
    assert run("verify", f"dir:{folder}/vllm") == 3
    assert f"did you mean dir:{folder}?" in capsys.readouterr().out


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM is here")
@pytest.mark.parametrize("text", ["[tool.balance_patcher]\n", "[tool.balance_patcher.lanes]\n"])
def test_a_pyproject_that_declares_no_lane_says_so(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(project(tmp_path, text))
    assert run("verify") == 3
    err = capsys.readouterr().err
    assert f"no lanes declared in {tmp_path / 'pyproject.toml'}" in err
    assert "installed, " not in err
    text = said(capsys, "verify", "main")
    assert "declared  none" in text


def test_a_delta_whose_names_fail_is_not_shown_as_applied(release_copy: Releases, capsys: Capture) -> None:
    folder = release_copy("0.32.0")
    file = folder / "vllm/v1/engine/core.py"
    file.write_text(re.sub(r"\bself\.dp_group\b", "self.group", file.read_text()))
    assert run("verify", f"dir:{folder}", "--format", "json") == 1
    (lane,) = json.loads(capsys.readouterr().out)["lanes"]
    statuses = {delta["name"]: delta["status"] for delta in lane["features"][0]["deltas"]}
    assert statuses["balance.gather"] == "failed"
    assert statuses["balance.admission-gate"] == "applied"
    assert run("verify", f"dir:{folder}") == 1
    out = capsys.readouterr().out
    assert re.search(r"^  balance\.gather +failed ", out, re.MULTILINE)
    assert "(3 not checked)" in out


def test_a_broken_declaration_is_said_beside_the_lanes(
    good: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    broken = Failure("BP002", "deltas/x.py cannot be imported", "mend the declaration")
    monkeypatch.setattr(cli, "broken", lambda: (broken,))
    assert run("verify", f"good={good}") == 2
    out = capsys.readouterr().out
    assert "good  vLLM 0.32.0" in out
    assert f"deltas: {broken}" in out
    assert "Wrong usage: deltas. All else holds on 1 lane." in out
    assert run("verify", good, "--feature", "balance") == 0


def test_help_says_what_the_exit_status_means(capsys: Capture) -> None:
    assert run("verify", "--help") == 0
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    assert "python -m balance_patcher verify" in text
    assert "Exit status: 0 all hold; 1 something cannot be placed" in text
    assert text.count("several times") == 2
    assert run("--version") == 0
    assert capsys.readouterr().out == "balance_patcher 0.1.0\n"


# -- a process of its own --------------------------------------------------------------------

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError("blocked", name=name)

sys.meta_path.insert(0, Blocked())
from balance_patcher.__main__ import run
try:
    run()
finally:
    assert not {names!r} & set(sys.modules)
"""


def test_it_runs_where_neither_torch_nor_vllm_can_be_imported(good: str, release: str) -> None:
    code = BLOCKED.format(names={"torch", "vllm", "torch_npu", "vllm_ascend"})
    done = spawn("verify", f"release={release}", f"main={good}", code=code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "All deltas hold on 2 lanes." in done.stdout
    done = spawn("show", "balance", "--lane", good, "--diff", code=code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    done = spawn("verify", code=BLOCKED.format(names={missing}))
    assert done.returncode == 3
    assert done.stdout == ""
    assert "BP513" in done.stderr
    assert command_for("cli") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_of_one_lane_is_3(isolated: pytest.MonkeyPatch) -> None:
    done = spawn("verify", "pypi:vllm==0.32.0", code=BLOCKED.format(names={"requests"}))
    assert done.returncode == 3
    assert command_for("cli") in done.stdout


@pytest.mark.parametrize("fixture", ["good", "broken", "empty"])
def test_the_module_can_be_run(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    done = spawn("verify", request.getfixturevalue(fixture), cwd=tmp_path)
    assert (done.returncode, done.stderr) == ({"good": 0, "broken": 1, "empty": 3}[fixture], "")


def test_a_reader_that_goes_away_is_no_finding(good: str) -> None:
    command = [sys.executable, "-m", "balance_patcher", "verify", good, "--format", "json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
        assert started.stdout is not None
        started.stdout.close()
        assert started.wait(60) not in (0, 1, 2)


# -- show ------------------------------------------------------------------------------------

SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
HOOK = "vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs"


def shown(capsys: Capture, *arguments: str) -> str:
    assert run("show", *arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("version", ["0.23.0", "0.33.0"])
def test_a_diff_is_short_and_keeps_every_comment(version: str, release_dir: Releases, capsys: Capture) -> None:
    lane = f"dir:{release_dir(version)}"
    diff = shown(capsys, "balance", "--lane", lane, "--diff").splitlines()
    added = [line for line in diff if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in diff if line.startswith("-") and not line.startswith("---")]
    assert 0 < len(added) <= 40
    assert len(removed) <= 3
    spliced = added[: next(at for at, line in enumerate(added) if line.startswith("+def upstream("))]
    assert all("# bp: balance." in line or "def schedule(" in line for line in spliced)
    assert not any("#" in line for line in removed)

    from balance_patcher.source import Lane

    plan = make_plan(Lane("x", open_source(lane)), find_feature("balance"))
    rewrites, _ = compile_plan(plan)
    for result in rewrites.values():
        before, after = comments(result.original.text), comments(result.text)
        assert [comment for comment in after if "# bp: " not in comment] == before


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def test_the_text_that_would_run_is_shown(good: str, capsys: Capture) -> None:
    text = shown(capsys, "balance", "--lane", good)
    assert "    def schedule(self, throttle_prefills: bool = False)" in text
    assert "if balance_flag:  # bp: balance.admission-gate" in text
    assert "self.scheduler.balance_gather(self.dp_group)  # bp: balance.gather" in text


def test_a_target_shows_itself_alone(good: str, capsys: Capture) -> None:
    schedule = shown(capsys, SCHEDULE, "--lane", good)
    assert "def schedule(" in schedule
    assert "balance_gather" not in schedule
    hook = shown(capsys, HOOK, "--lane", good)
    assert "balance_gather" in hook
    assert "def schedule(" not in hook
    assert "+++ b/<balance_patcher" in shown(capsys, HOOK, "--lane", good, "--diff")


def test_a_target_is_shown_as_it_runs_whoever_edits_it(good: str, capsys: Capture) -> None:
    text = shown(capsys, SCHEDULE, "--lane", good)
    assert "if not self._balance_enabled and not self._disable_preemption:  # bp: balance+prefill" in text
    assert "if self._disable_preemption:  # bp: prefill_preemption.keep-running" in text
    marked = [line.split("  +", 1) for line in shown(capsys, SCHEDULE, "--lane", good, "--diff").splitlines()]
    added = [(names.strip(), *line) for names, *line in marked if line and names.strip()]
    assert {"balance", "prefill_preemption"} < {names for names, _ in added}
    assert all(line.partition("# bp: ")[2].rpartition(".")[0] == names for names, line in added)


def test_what_a_lane_leaves_nothing_to_do_is_not_shown_in_it(good: str, release_dir: Releases, capsys: Capture) -> None:
    assert "defer_preemption" not in shown(capsys, SCHEDULE, "--lane", good)
    fenced = shown(capsys, SCHEDULE, "--lane", f"dir:{release_dir('0.29.0')}")
    assert "if not self._request_blocks_can_be_freed(preempted_req):  # bp: defer_preemption.retry" in fenced
    assert "  # bp: balance+defer_preemption+prefill_preemption.disabled-path" in fenced


def test_the_line_map_leads_back(good: str, release_dir: Releases, capsys: Capture) -> None:
    text = shown(capsys, SCHEDULE, "--lane", good)
    upstream = (release_dir("0.32.0") / "vllm/v1/core/sched/scheduler.py").read_text("utf-8").splitlines()
    name, head, *rows = shown(capsys, SCHEDULE, "--lane", good, "--map").splitlines()
    assert (name, "scheduler.py" in head) == (f"# {SCHEDULE}", True)
    lines = iter(text.splitlines())
    for row in rows:
        ours, origin = row.split(maxsplit=1)
        if origin.startswith("+ "):
            assert ours.isdigit()
            assert next(lines).endswith(f"# bp: {origin[2:]}")
        else:
            first, last = ends(origin)
            assert ends(ours)[1] - ends(ours)[0] == last - first
            for at in range(first, last + 1):
                line = next(lines)
                assert line == upstream[at - 1] or (at == first and "def schedule" in line)
    assert list(lines) == []
    assert len(rows) < 20


DASH = "\N{EN DASH}"


def ends(text: str) -> tuple[int, int]:
    first, _, last = text.partition(DASH)
    return int(first), int(last or first)


def test_a_target_that_is_called_through_has_no_line_map(good: str, capsys: Capture) -> None:
    assert shown(capsys, HOOK, "--lane", good, "--map") == f"# {HOOK}\na function of its own; no line map\n"


def test_several_texts_are_told_apart(good: str, capsys: Capture) -> None:
    text = shown(capsys, "balance", "--lane", good)
    assert text.startswith(f"# {SCHEDULE}\n    def schedule(")
    assert f"\n\n# {HOOK}\ndef upstream(" in text
    assert not shown(capsys, HOOK, "--lane", good).startswith("#")


def test_a_lane_is_shown_by_its_declared_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: str, release: str, capsys: Capture
) -> None:
    monkeypatch.chdir(project(tmp_path, f'[tool.balance_patcher.lanes]\nrelease = "{release}"\nmain = "{good}"\n'))
    assert run("show", SCHEDULE) == 0
    told = capsys.readouterr()
    assert "def schedule(self, throttle_prefills=False)" in told.out
    assert told.err == f"lane release ({release}); --lane takes main too\n"
    assert "max_num_active_reqs" in shown(capsys, SCHEDULE, "--lane", "main")


def test_what_cannot_be_placed_is_not_shown(broken: str, empty: str, capsys: Capture) -> None:
    assert run("show", "balance", "--lane", broken) == 1
    told = capsys.readouterr()
    assert (told.out, "BP104" in told.err) == ("", True)
    assert run("show", "balance", "--lane", empty) == 3
