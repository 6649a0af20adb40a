"""Answer who asks this process how its engines stand, also while its main thread hangs in a collective.

A daemon thread waits at a socket for that: a collective gives the interpreter up while it waits, so the thread runs
when nothing else does. The socket is one of Linux's abstract ones: nothing is on disk, and its name is gone with the
process. The name holds the process's number and its start, so that a number that is given out anew is not taken for
the old one. Who may connect is whoever the process belongs to, and root. Whoever connects gets one line of JSON and
is hung up on; nothing is read from him, so he can neither hold the thread up nor change anything.

What is told is read from the live objects without a lock, so that no step ever waits for it. It costs a step nothing:
the thread sleeps until it is asked.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import procfs, watchdog
from .errors import refuse

VARIABLE = "BALANCE_PATCHER_ANSWER"
#: The version of what is answered; another one is not read.
PROTOCOL = 1
#: Seconds that somebody has to take an answer.
PATIENCE = 2.0
#: Seconds until it is tried again to take a connection, where that has failed for want of something.
PAUSE = 1.0
#: As Linux gives a peer's process, user and group.
CREDENTIALS = struct.Struct("3i")

_logger = logging.getLogger("vllm.balance_patcher")


def answers() -> bool:
    """Whether an engine's process is to answer.

    Raises:
        PatchError: BP006, if the environment variable is neither ``on`` nor ``off``.
    """
    text = os.environ.get(VARIABLE, "").strip().lower() or "on"
    if text not in ("on", "off"):
        raise refuse("BP006", f"{VARIABLE}={text}", next="set it to on or off")
    return text == "on"


def address(pid: int, started: int) -> str:
    """The name of a process's socket, without the zero byte that makes it an abstract one.

    Args:
        pid: The process's number as it sees it itself.
        started: When it started, in clock ticks.
    """
    return f"balance_patcher/{pid}/{started}"


def can_be_asked() -> bool:
    """Whether there are abstract sockets here."""
    return sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


@dataclass(frozen=True)
class Active:
    """A feature that runs in an engine.

    Attributes:
        feature: Its name.
        line: What the log says of it.
        digest: Over the texts that run.
        tells: What it tells of an engine, by name; gets the engine.
        ranks: What each rank said of itself when they agreed, by its number: where it runs.
    """

    feature: str
    line: str
    digest: str
    tells: Callable[[Any], Mapping[str, object]] | None = None
    ranks: Mapping[int, Any] = field(default_factory=dict)


class Answerer:
    """Answers for the engines of one process, from the first that begins until the last one is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: list[tuple[Callable[[], Any], Sequence[Active]]] = []
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def begin(self, engine: Any, active: Sequence[Active]) -> None:
        """Answer for one more engine; it is not kept alive."""
        with self._lock:
            self._engines = [known for known in self._engines if known[0]() is not None]
            self._engines.append((weakref.ref(engine), tuple(active)))
            weakref.finalize(engine, self._gone).atexit = False
            if self._listener is None:
                self._listener = _listen()
                self._thread = threading.Thread(
                    target=self._run, args=(self._listener,), name="balance_patcher answerer", daemon=True
                )
                self._thread.start()

    def close(self, patience: float = 0.0) -> None:
        """Answer no more.

        Args:
            patience: Seconds to wait for the answer that is being given.
        """
        listener, thread = self._listener, self._thread
        self._listener = self._thread = None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection; closing alone would not
            listener.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience)

    def forked(self) -> None:
        """In a child: the socket is the parent's, and the thread is not here."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _gone(self) -> None:
        # Wherever the garbage collector happens to run: a lock could be held by this very thread.
        if all(known() is None for known, _ in self._engines):
            self.close()

    def _run(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is listener:  # too many open files, for example
                    time.sleep(PAUSE)
                continue
            try:
                with connection:
                    connection.settimeout(PATIENCE)
                    connection.sendall(json.dumps(self._answer(connection), default=str).encode() + b"\n")
            except Exception:  # the next one may fare better
                _logger.debug("a question could not be answered", exc_info=True)

    def _answer(self, connection: socket.socket) -> dict[str, object]:
        _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user not in (0, os.geteuid()):
            return {"protocol": PROTOCOL, "refused": f"it belongs to user {os.geteuid()}, and user {user} asks"}
        return self.told()

    def told(self) -> dict[str, object]:
        """What is answered; nothing in it can fail as a whole."""
        engines = [(known(), active) for known, active in self._engines]
        return {
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "balance_patcher": getattr(sys.modules.get(__package__), "__version__", None),
            "vllm": getattr(sys.modules.get("vllm"), "__version__", None),
            "python": ".".join(map(str, sys.version_info[:3])),
            "engines": [_told(engine, active) for engine, active in engines if engine is not None],
        }


def _told(engine: Any, active: Sequence[Active]) -> dict[str, object]:
    errors: list[str] = []

    def read(what: str, how: Callable[[], object]) -> object:
        try:
            return json.loads(json.dumps(how(), default=str))
        except Exception as error:  # noqa: BLE001 - the objects are in use, and may be in any state
            errors.append(f"{what}: {type(error).__name__}: {error}")
            return None

    counts = read("requests", lambda: engine.scheduler.get_request_counts())  # noqa: PLW0108 - it may not be there
    running, waiting = counts if isinstance(counts, list) and len(counts) == 2 else (None, None)  # noqa: PLR2004
    group = getattr(engine, "dp_group", None)
    return {
        "rank": getattr(engine, "dp_rank", None),
        "ranks": read("group", group.size) if group is not None else None,
        "step": getattr(engine, "step_counter", None),
        "wave": getattr(engine, "current_wave", None),
        "engines_running": getattr(engine, "engines_running", None),
        "running": running,
        "waiting": waiting,
        "features": {
            one.feature: {
                "line": one.line,
                "digest": one.digest,
                "ranks": {
                    str(rank): {"host": getattr(said, "host", None), "pid": getattr(said, "pid", None)}
                    for rank, said in one.ranks.items()
                },
                "tells": read(one.feature, lambda one=one: dict(one.tells(engine)) if one.tells is not None else {}),  # type: ignore[misc]
                "watchdog": read("watchdog", lambda one=one: watchdog.told(engine, one.feature)),  # type: ignore[misc]
            }
            for one in active
        },
        "errors": errors,
    }


def _listen() -> socket.socket:
    this = procfs.process("self")
    if this is None:
        raise OSError("/proc/self/stat cannot be read")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, f"\0{address(os.getpid(), this.started)}")
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, name: str) -> None:
    """Take the name; the thread of the engine before this one may have it for a moment longer."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
        time.sleep(0.01)


class _Here:
    """The answerer of this process; a child that is forked has one of its own, with no engine yet."""

    answerer = Answerer()
    prepared = False

    @classmethod
    def forked(cls) -> None:
        cls.answerer.forked()
        cls.answerer = Answerer()

    @classmethod
    def end(cls) -> None:
        cls.answerer.close(PATIENCE)


def begin(engine: Any, active: Sequence[Active]) -> None:
    """Answer for an engine that has been built and has something on, until it is gone; never raises.

    Args:
        engine: The engine core.
        active: What runs in it; without any, nothing is answered.
    """
    try:
        if not active or not can_be_asked() or not answers():
            return
        if not _Here.prepared:
            _Here.prepared = True
            os.register_at_fork(after_in_child=_Here.forked)
            atexit.register(_Here.end)
        _Here.answerer.begin(engine, active)
    except Exception as error:  # noqa: BLE001 - an engine is not to fail because it could not be asked
        _logger.warning("`status --pid %d` will not be answered: %s: %s", os.getpid(), type(error).__name__, error)
