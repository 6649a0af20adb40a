"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from balance_patcher.build import compile_plan
from balance_patcher.coverage import read_module
from balance_patcher.errors import PatchError
from balance_patcher.plan import make_plan
from balance_patcher.registry import find_feature
from balance_patcher.source import Lane, module_text

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_whole_delta_file_does_what_its_example_says(text_lane: Callable[..., Lane]) -> None:
    (text,) = [block for block in blocks("python") if "FEATURE =" in block]
    toy: dict[str, object] = {"__name__": "toy"}
    exec(text, toy)  # noqa: S102 - the README is ours

    def planned(before: str) -> str:
        plan = make_plan(text_lane({"vllm/toy.py": before, "vllm/__init__.py": ""}), toy["FEATURE"])
        _, compiled = compile_plan(plan)
        return re.sub(r"  # bp: toy.stop$", "", compiled[0].text, flags=re.MULTILINE)

    (example,) = toy["EXAMPLES"]
    assert planned(example.before) == example.after
    (refusal,) = toy["REFUSES"]
    try:
        planned(refusal.before)
    except PatchError as error:
        codes = [failure.code for failure in error.failures]
    assert codes == [refusal.code]


def test_the_table_of_balance_has_a_row_for_each_of_its_deltas() -> None:
    section = README.partition("## The balance feature\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(balance\.[\w-]+)` \|", section, re.MULTILINE)
    assert rows == [delta.name for delta in find_feature("balance").deltas]


def test_the_failure_that_is_shown_is_the_one_that_is_given(release_copy: Callable[[str], Path]) -> None:
    from balance_patcher.source import DirSource

    folder = release_copy("0.23.0")
    file = folder / "vllm/v1/core/sched/scheduler.py"
    stop = "if len(self.running) == self.max_num_running_reqs:"
    text = file.read_text(encoding="utf-8")
    assert text.count(stop) == 1
    file.write_text(text.replace(stop, "if len(self.running) == self.run_cap:"), encoding="utf-8")
    plan = make_plan(Lane("copy", DirSource("dir", folder)), find_feature("balance"))
    (shown,) = [block for block in blocks("text") if block.startswith("BP101")]
    assert str(plan.placement("balance.admission-gate").failures[0]) == shown.strip()


def integration() -> str:
    """The file that vllm-ascend could have instead of its copy."""
    (text,) = [block for block in blocks("python") if "stand_in(__name__)" in block]
    return text


def test_the_integration_has_at_most_twenty_lines_and_is_covered_itself(text_lane: Callable[..., Lane]) -> None:
    feature = find_feature("balance")
    assert feature.stand_in is not None
    assert len(integration().splitlines()) <= 20
    text = module_text(feature.stand_in.module, "x", "patch_balance_schedule.py", integration().encode())
    assert read_module(feature.stand_in, text, text_lane({"vllm/__init__.py": ""})).covered


def test_the_two_commands_of_the_set_up_are_there() -> None:
    (commands,) = [block for block in blocks("console") if "make verify" in block]
    lines = [line.split("#")[0].split() for line in commands.splitlines()]
    assert lines == [["$", "make", "verify"], ["$", "make", "test"]]


def test_the_launch_paths_are_those_that_status_shows() -> None:
    (table,) = re.findall(r"\| way \| balance \| \|\n\| --- \| --- \| --- \|\n((?:\|.*\n)+)", README)
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]
    assert rows == [(path.name, path.standing, path.note) for path in find_feature("balance").launches]


def test_what_shows_a_launch_path_is_there() -> None:
    root = Path(__file__).resolve().parent.parent
    for path in find_feature("balance").launches:
        file, _, name = path.test.partition("::")
        assert not path.test or f"class {name}" in (root / file).read_text(encoding="utf-8"), path


def test_the_commands_of_upstreams_seam_do_what_is_said(release_dir: Callable[[str], Path], tmp_path: Path) -> None:
    (block,) = [block for block in blocks("console") if "upstream_seam" in block]
    commands = [line.removeprefix("$ ") for line in block.splitlines()]
    root, checkout = Path(__file__).resolve().parent.parent, tmp_path / "balance_patcher"
    checkout.mkdir()
    (checkout / "tools").symlink_to(root / "tools")
    shutil.copytree(release_dir("0.33.0"), tmp_path / "vllm")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "vllm", check=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(root)}
    said = [
        subprocess.run(
            ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, check=True
        )
        for command in commands
    ]
    assert "scheduler.py:1073" in said[0].stderr
    assert re.search(r"balance\.admission-gate +.*absorbed", said[2].stdout)
    assert "All deltas hold on 1 lane." in said[2].stdout
