"""A reminder speaks while its engine lives, and holds neither the engine nor the process."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from balance_patcher.reminder import INTERVAL, remind

PATIENCE = 30


class Engine:
    """Something that can be referred to weakly."""


def spoken(times, engine, interval=0.001):
    """Wait until it has been said some times."""
    heard, enough = [], threading.Event()

    def tell():
        heard.append(len(heard))
        if len(heard) >= times:
            enough.set()

    over = remind(engine, tell, interval)
    assert enough.wait(PATIENCE)
    return over, heard


def silent(heard):
    """Whether nothing more is said, after what may be under way."""
    time.sleep(0.05)
    before = len(heard)
    time.sleep(0.1)
    return len(heard) == before


def test_it_is_said_again_and_again():
    engine = Engine()
    over, heard = spoken(3, engine)
    over.set()
    assert heard[:3] == [0, 1, 2]


def test_every_ten_minutes_unless_told_otherwise(monkeypatch):
    waited = []

    class Over:
        def wait(self, seconds):
            waited.append(seconds)
            return True

        def set(self):
            pass

    monkeypatch.setattr("balance_patcher.reminder.threading", SimpleNamespace(Event=Over, Thread=Direct))
    engine = Engine()
    remind(engine, lambda: None)
    assert waited == [INTERVAL] == [600.0]


class Direct:
    """A thread that runs where it is started."""

    def __init__(self, target, **_):
        self.target = target

    def start(self):
        self.target()


def test_it_ends_with_the_engine():
    engine = Engine()
    over, heard = spoken(1, engine)
    del engine
    gc.collect()
    assert over.is_set()
    assert silent(heard)


@pytest.mark.parametrize("interval", ["600", "0.01"])
def test_it_keeps_no_process_alive(interval):
    code = (
        "from balance_patcher.reminder import remind\nclass Engine: pass\nengine = Engine()\n"
        f"remind(engine, lambda: None, {interval})\nprint('done')"
    )
    root = Path(__file__).resolve().parent.parent
    ended = subprocess.run(  # it says itself how it ended
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=PATIENCE, cwd=root
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
