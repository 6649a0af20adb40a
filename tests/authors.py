"""The guide for authors, as steps that can be run: ``deltas/README.md``.

Its console blocks are commands, its ``diff`` blocks edits of the file, its ``text`` blocks what a command says. The
lane tests run the same steps with a real vLLM.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

GUIDE = (Path(__file__).resolve().parent.parent / "deltas" / "README.md").read_text(encoding="utf-8")
FILE = "say_preempted.py"


def blocks(section: str) -> list[tuple[str, str]]:
    """The language and the text of each block of a section, by the beginning of its heading."""
    (text,) = [part for part in re.split(r"^## ", GUIDE, flags=re.MULTILINE) if part.startswith(section)]
    return re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)


def block(section: str, language: str, at: int = 0) -> str:
    """One block of a section: the one so many after the first in that language."""
    return [text for found, text in blocks(section) if found == language][at]


def commands(section: str) -> list[list[str]]:
    """The commands of a section, as words."""
    lines = [line for found, text in blocks(section) if found == "console" for line in text.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [shlex.split(line[2:]) for line in lines]


def edited(text: str, diff: str) -> str:
    """A text with the edits of a ``diff`` block; each run of lines that is taken out is there.

    Where it is there more than once, it is edited everywhere: the example stands before and after.
    """
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.MULTILINE):
        before, after = ("".join(line[1:] for line in part.splitlines(keepends=True)) for part in (old, new))
        assert re.search(rf"^{re.escape(before)}", text, re.MULTILINE), before
        text = re.sub(rf"^{re.escape(before)}", lambda _, after=after: after, text, flags=re.MULTILINE)
    return text


def edit(folder: Path, section: str) -> None:
    """All edits of a section, in the author's folder."""
    file = folder / FILE
    text = file.read_text(encoding="utf-8")
    for language, diff in blocks(section):
        text = edited(text, diff) if language == "diff" else text
    file.write_text(text, encoding="utf-8")
