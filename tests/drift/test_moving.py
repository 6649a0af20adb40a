"""A module that is not where it was, in the directories of two wheels: found without reading every file of them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.drift import moving
from tools.drift.columns import NotingLane, ReleasePlace
from tools.drift.moving import moved_to

TARGET = "vllm.engine.core:Core.step"
CORE = "class Core:\n    def step(self):\n        return self.one() + self.two()\n"
SAME = {"vllm/__init__.py": "", "vllm/old.py": "class Core:\n    def step(self): ...\n", "vllm/data.json": "{}"}


def lane(folder: Path, name: str, files: Mapping[str, str]) -> NotingLane:
    """A wheel with some files."""
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**SAME, **files}.items():
            wheel.writestr(file, text)
    return NotingLane(ReleasePlace(f"wheel:{path}", name))


#: What the new wheel has besides, and where the target is then.
CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "moved": ({"vllm/loops/busy.py": CORE}, ["vllm.loops.busy:Core.step"]),
    "moved into a package": ({"vllm/busy/__init__.py": CORE}, ["vllm.busy:Core.step"]),
    "moved, and another like it": (
        {"vllm/busy.py": CORE, "vllm/like.py": f"# like it\n{CORE}"}, ["vllm.busy:Core.step"],
    ),
    "moved and changed": ({"vllm/busy.py": f"# changed\n{CORE}"}, ["vllm.busy:Core.step"]),
    "in a file that was there": ({"vllm/old.py": f"# more\n{CORE}"}, ["vllm.old:Core.step"]),
    "twice": ({"vllm/a.py": CORE, "vllm/b.py": CORE}, ["vllm.a:Core.step", "vllm.b:Core.step"]),
    "nowhere": ({"vllm/busy.py": "class Core:\n    def run(self): ...\n"}, []),
    "only its words": ({"vllm/busy.py": "# Core.step was here\n"}, []),
    "in a file that does not parse": ({"vllm/busy.py": f"{CORE}\ndef (:\n"}, []),
    "in another package": ({"other/busy.py": CORE}, []),
    "in no Python": ({"vllm/busy.pyi": CORE}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_where_a_module_is_now(tmp_path: Path, case: str) -> None:
    files, wanted = CASES[case]
    good = lane(tmp_path, "good", {"vllm/engine/core.py": CORE})
    assert moved_to(TARGET, good, lane(tmp_path, "bad", files)) == wanted


def test_where_more_changed_than_can_be_read_only_what_came_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(moving, "_MOST", 1)
    good = lane(tmp_path, "good", {"vllm/engine/core.py": CORE, "vllm/busy.py": ""})
    changed = {"vllm/old.py": "# other\n", "vllm/busy.py": f"# changed\n{CORE}"}
    assert moved_to(TARGET, good, lane(tmp_path, "there", changed)) == []
    came = {"vllm/old.py": "# other\n", "vllm/came.py": f"# changed\n{CORE}", "vllm/busy.py": ""}
    assert moved_to(TARGET, good, lane(tmp_path, "came", came)) == ["vllm.came:Core.step"]


def test_a_wheel_that_cannot_be_read_moves_nothing(tmp_path: Path) -> None:
    good = lane(tmp_path, "good", {"vllm/engine/core.py": CORE})
    (tmp_path / "bad.whl").write_bytes(b"no zip")
    assert moved_to(TARGET, good, NotingLane(ReleasePlace(f"wheel:{tmp_path}/bad.whl", "bad"))) == []
