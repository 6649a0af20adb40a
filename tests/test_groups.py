"""A process group is over when none of its processes lives, the orphaned ones included."""

from __future__ import annotations

import subprocess
import sys

from balance_patcher import groups

# The first process ends at once and leaves one behind that nobody here can wait for.
ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"


def started(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL)


def test_a_group_lives_as_long_as_one_of_its_processes_does() -> None:
    process = started(ORPHAN)
    try:
        assert process.wait(60) == 0
        assert groups.alive(process.pid)
    finally:
        groups.end(process.pid)
    assert not groups.alive(process.pid)


def test_the_first_process_may_still_be_waited_for() -> None:
    process = started("import time; time.sleep(600)")
    groups.end(process.pid)
    assert not groups.alive(process.pid)
    assert process.wait(60) < 0


def test_a_group_that_is_over_is_ended_again() -> None:
    process = started("")
    assert process.wait(60) == 0
    groups.end(process.pid)
    assert not groups.alive(process.pid)
