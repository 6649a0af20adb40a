"""What Linux tells of a process, also of one that cannot speak for itself: read from ``/proc``, nothing is sent to it.

Elsewhere there is no ``/proc``, and of every process nothing is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

#: What the letter of a state means for somebody who waits for an answer.
STATES = {
    "R": "runs",
    "S": "sleeps until something happens",
    "D": "waits in the kernel and cannot be interrupted",
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended, and its parent has not asked for its status (a zombie)",
    "X": "has ended",
    "I": "is idle in the kernel",
}
STOPPED, ENDED = frozenset("Tt"), frozenset("ZX")
_UNKNOWN = "is in a state that is not known here"


@dataclass(frozen=True)
class Process:
    """A process as ``/proc/PID/stat`` has it.

    Attributes:
        pid: Its number, as this process sees it.
        name: At most 15 characters of its name.
        state: One letter of :data:`STATES`.
        parent: The number of its parent.
        started: Clock ticks from the start of the machine to its own: with the number, it names one process for good.
    """

    pid: int
    name: str
    state: str
    parent: int
    started: int

    @property
    def stands(self) -> str:
        """Its state in words, with the letter and, where it may be read, the place in the kernel that it waits at."""
        place = waits_at(self.pid)
        return f"{STATES.get(self.state, _UNKNOWN)}; state {self.state}{f', wchan {place}' if place else ''}"


def process(pid: int | str) -> Process | None:
    """One process, ``"self"`` for this one; ``None`` where there is none, or it is hidden from us."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        # The name stands in parentheses and may hold anything, parentheses too.
        head, _, tail = text.rpartition(")")
        number, _, name = head.partition(" (")
        fields = tail.split()
        return Process(int(number), name, fields[0], int(fields[1]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def waits_at(pid: int) -> str:
    """The function of the kernel in which its main thread waits; empty if it does not, or that may not be read."""
    try:
        place = (PROC / str(pid) / "wchan").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return "" if place in ("", "0") else place


def inner_pid(pid: int) -> int:
    """What the process itself takes for its number: in a container it counts anew."""
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return pid
    found = re.search(r"^NSpid:.*?(\d+)\s*$", text, re.MULTILINE)
    return int(found[1]) if found else pid


def below(pid: int) -> list[Process]:
    """Its children, their children and so on, as far as they can be seen; the nearest first."""
    by_parent: dict[int, list[Process]] = {}
    for entry in PROC.glob("[0-9]*"):
        one = process(entry.name)
        if one is not None:
            by_parent.setdefault(one.parent, []).append(one)
    found: list[Process] = []
    generation = [pid]
    while generation:
        children = sorted((one for parent in generation for one in by_parent.pop(parent, [])), key=lambda one: one.pid)
        found += children
        generation = [one.pid for one in children]
    return found


def abstract_names(pid: int | str) -> set[str]:
    """The names of the abstract sockets in the network namespace of a process; of none, if that may not be read."""
    try:
        text = (PROC / str(pid) / "net" / "unix").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    # The eighth column is the name; an abstract one begins with @.
    rows = (line.split(maxsplit=7) for line in text.splitlines()[1:])
    return {row[7][1:] for row in rows if len(row) > 7 and row[7].startswith("@")}  # noqa: PLR2004 - as above


def owner(pid: int) -> int | None:
    """The user whose process it is; ``None`` where that is not known."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return None
