"""What is remembered: by the texts that were read, whole lines only, and made anew when the code changes."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.drift.index import ANSWERING, Index

TEXTS = {"a.py": "1" * 40, "b.py": None}


def test_an_answer_belongs_to_the_texts_that_were_read(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.keep("it", TEXTS, {"status": "applied"})
    index.close()
    again = Index(tmp_path)
    assert again.find("it", TEXTS.get) == {"status": "applied"}
    assert again.find("other", TEXTS.get) is None
    assert again.find("it", {**TEXTS, "a.py": "2" * 40}.get) is None
    assert again.find("it", {**TEXTS, "b.py": "2" * 40}.get) is None
    # What was not read does not matter.
    assert again.find("it", {**TEXTS, "c.py": "3" * 40}.get) == {"status": "applied"}


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.keep("it", TEXTS, 1)
    index.close()
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text("utf-8") + '["half", {"a.py"', "utf-8")
    again = Index(tmp_path)
    again.keep("next", TEXTS, 2)
    again.close()
    last = Index(tmp_path)
    assert (last.find("it", TEXTS.get), last.find("next", TEXTS.get)) == (1, 2)
    assert last.find("half", TEXTS.get) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b"failed", b"applied"),
        lambda line: b'{"a": 1}\n',
        lambda line: b'["it", [], 1]\n',
        lambda line: line.partition(b" ")[2],
        lambda line: line[:-9] + b"\n",
        lambda line: b"\xff\x00" + line,
        lambda line: b"",
    ],
)
def test_a_line_that_was_damaged_is_left_out_and_no_other(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    index = Index(tmp_path)
    index.keep("it", TEXTS, {"status": "failed"})
    index.keep("next", TEXTS, 2)
    index.close()
    (file,) = tmp_path.iterdir()
    first, second = file.read_bytes().splitlines(keepends=True)
    assert damage(first) != first
    file.write_bytes(damage(first) + second)
    again = Index(tmp_path)
    assert (again.find("it", TEXTS.get), again.find("next", TEXTS.get)) == (None, 2)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    index = Index(tmp_path / "file")
    assert index.trouble == ""
    index.keep("it", TEXTS, 1)
    assert index.find("it", TEXTS.get) == 1
    assert index.trouble.startswith(f"{tmp_path}/file: ")


def test_a_disk_that_is_full_ends_the_keeping_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    index, opened = Index(tmp_path), []
    monkeypatch.setattr(index, "_open", lambda path: opened.append(path) or Full())
    for name in ("it", "next"):
        index.keep(name, TEXTS, 1)
        assert index.find(name, TEXTS.get) == 1
    index.close()
    assert index.trouble == f"{tmp_path}: No space left on device"
    assert len(opened) == 1


def test_every_module_that_an_answer_depends_on_is_named() -> None:
    folder = ROOT / "tools" / "drift"
    waiting, found = ["looks"], set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        tree = ast.parse((folder / f"{name}.py").read_text("utf-8"))
        waiting += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    assert found == set(ANSWERING)
