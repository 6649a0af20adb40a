"""Ask the processes of engine cores how they stand: ``status --pid``, also when no API server answers any more.

A process that does not answer is not the end of it: Linux tells whether it stands still, has ended, or is out of
reach, and that is what is said. Whoever is named need not be an engine's own process: of an API server, or of whatever
else has started engine cores, all that stand below it are asked.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import procfs
from .answering import CREDENTIALS, PROTOCOL, VARIABLE, address, can_be_asked
from .errors import Failure, Outcome, PatchError, refuse
from .procfs import Process

#: Seconds that a process has to answer. Its thread needs the interpreter for a moment, and has it in milliseconds.
PATIENCE = 5.0
#: The longest answer that is read.
LONGEST = 4 << 20

_ENTER = "nsenter --target {pid} --net -- python -m balance_patcher status --pid {pid}"


@dataclass(frozen=True)
class Inquiry:
    """What came of asking.

    Attributes:
        asked: The process that was named.
        answers: What each process answered, as it did.
        failures: Why others did not.
        silent: The numbers of those others, each with its state in a word.
    """

    asked: int
    answers: tuple[dict[str, Any], ...] = ()
    failures: tuple[Failure, ...] = ()
    silent: dict[int, str] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        return Outcome.worst(failure.outcome for failure in self.failures)

    def as_dict(self) -> dict[str, object]:
        """For JSON: the answers as they came, and who did not answer and why."""
        return {
            "schema": 1,
            "asked": self.asked,
            "processes": list(self.answers),
            "silent": {str(pid): word for pid, word in self.silent.items()},
            "failures": [failure.as_dict() for failure in self.failures],
        }


def inquire(pid: int, patience: float | None = None) -> Inquiry:
    """Ask a process, or all engine cores below it.

    Args:
        pid: Its number, as this process sees it.
        patience: Seconds that each has to answer; :data:`PATIENCE` if not given.

    Raises:
        PatchError: BP750, BP751, BP754 or BP758, if there is nobody to be asked.
    """
    if not can_be_asked():
        raise refuse(
            "BP758", "there are no abstract Unix sockets here, so no engine has one",
            next="read the server's metrics: python -m balance_patcher status --url http://HOST:PORT",
        )  # fmt: skip
    found = procfs.process(pid)
    if found is None:
        raise refuse(
            "BP750", f"{pid} is no process here, or is hidden from this user",
            next="give the number that ps shows on this machine, for an engine core or what has started it; "
            "of another user's processes that are hidden, ask as that user or as root",
        )  # fmt: skip
    own = _named(found)
    to_ask = [found] if own else [one for one in procfs.below(pid) if _named(one)]
    if not to_ask:
        raise _nobody(found)
    answers: list[dict[str, Any]] = []
    failures: list[Failure] = []
    silent: dict[int, str] = {}
    for one in to_ask:
        try:
            answers.append(ask(one, PATIENCE if patience is None else patience))
        except PatchError as error:
            failures += error.failures
            silent[one.pid] = error.failures[0].title.removeprefix("process ").removeprefix("is ")
    return Inquiry(pid, tuple(sorted(answers, key=_rank)), tuple(failures), silent)


def _rank(answer: dict[str, Any]) -> tuple[int, int]:
    ranks = [engine.get("rank") for engine in answer.get("engines", ())]
    return min((rank for rank in ranks if isinstance(rank, int)), default=0), answer.get("pid", 0)


def _named(one: Process) -> bool:
    """Whether it has a socket of ours, in its own network namespace."""
    return _address(one) in procfs.abstract_names(one.pid)


def _address(one: Process) -> str:
    return address(procfs.inner_pid(one.pid), one.started)


def _nobody(found: Process) -> PatchError:
    who = f"process {found.pid} ({found.name})"
    if found.state in procfs.ENDED:
        return refuse("BP754", f"{who} {found.stands}", next="see its log for why; start the engine again")
    return refuse(
        "BP751", f"{who} is no engine core with a feature on, or has another version of balance_patcher, "
        "and nothing below it is one",
        ("state", found.stands),
        next=f"name an engine core (vLLM calls it EngineCore), or what has started it; see in its log for a line like "
        f"`balance: ON`, and whether {VARIABLE} is off there",
    )  # fmt: skip


def ask(one: Process, patience: float) -> dict[str, Any]:
    """What one process answers.

    Raises:
        PatchError: BP751 to BP757, if that cannot be had.
    """
    if one.state in procfs.STOPPED:
        raise _stopped(one)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with connection:
        until = time.monotonic() + patience
        try:
            _patiently(until, lambda: connection.connect(f"\0{_address(one)}"), connection)
            peer, user, _ = CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
            text = _patiently(until, lambda: _all(connection, until), connection)
        except (TimeoutError, BlockingIOError):  # the latter, when nobody takes connections and too many wait
            raise _silent(one, patience) from None
        except OSError as error:
            raise _gone(one, error) from None
    # Anybody may take a name. Of a process in a container that we do not see into, Linux tells no number.
    if peer not in (0, one.pid) or user not in (0, os.geteuid(), procfs.owner(one.pid)):
        raise _unread(one, f"process {peer} of user {user} answers in its place")
    return _answer(one, text)


def _patiently(until: float, what: Callable[[], Any], connection: socket.socket) -> Any:
    connection.settimeout(max(0.001, until - time.monotonic()))
    return what()


def _all(connection: socket.socket, until: float) -> bytes:
    parts: list[bytes] = []
    while part := _patiently(until, lambda: connection.recv(1 << 16), connection):
        parts.append(part)
        if sum(map(len, parts)) > LONGEST:
            break
    return b"".join(parts)


def _answer(one: Process, text: bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    if not isinstance(told, dict) or not text.endswith(b"\n"):
        raise _unread(one, f"it is no whole line of JSON: {text[:80]!r}" if text else "nothing came")
    if told.get("protocol") != PROTOCOL:
        raise _unread(one, f"it is of version {told.get('protocol')!r} of the protocol, and this one reads {PROTOCOL}")
    if "refused" in told:
        raise refuse("BP755", f"process {one.pid}: {told['refused']}", next="ask as the user it belongs to, or as root")
    # The numbers that this process sees, beside those that the other does.
    return {**told, "asked": one.pid}


def _unread(one: Process, why: str) -> PatchError:
    return refuse(
        "BP757", f"that of process {one.pid}: {why}",
        next="ask with the balance_patcher that is installed beside that engine",
    )  # fmt: skip


def _stopped(one: Process) -> PatchError:
    return refuse(
        "BP752", f"process {one.pid} ({one.name}) {one.stands}",
        next=f"find out who stopped it; `kill -CONT {one.pid}` lets it go on",
    )  # fmt: skip


def _silent(one: Process, patience: float) -> PatchError:
    now = procfs.process(one.pid)
    if now is None or now.started != one.started or now.state in procfs.ENDED:
        return _ended(one)
    if now.state in procfs.STOPPED:
        return _stopped(now)
    return refuse(
        "BP753", f"process {one.pid} ({one.name}) took no question for {patience:g} s",
        ("state", now.stands),
        next="something in it holds Python's interpreter, or the machine is out of breath; "
        f"`py-spy dump --pid {one.pid}` shows where it is",
    )  # fmt: skip


def _ended(one: Process) -> PatchError:
    return refuse("BP754", f"process {one.pid} ({one.name})", next="see its log for why; start the engine again")


def _gone(one: Process, error: OSError) -> PatchError:
    """Nobody took the connection, although there is, or was, a socket of that name where the process is."""
    now = procfs.process(one.pid)
    if now is None or now.started != one.started or now.state in procfs.ENDED:
        return _ended(one)
    if _address(one) in procfs.abstract_names(one.pid) - procfs.abstract_names("self"):
        return refuse(
            "BP756", f"process {one.pid} ({one.name}) can only be asked from within it, as in its container",
            next=f"ask there, or as root: {_ENTER.format(pid=one.pid)}",
        )  # fmt: skip
    if isinstance(error, PermissionError):
        return refuse("BP755", f"process {one.pid}: {error.strerror}", next="ask as the user it belongs to, or as root")
    return refuse(
        "BP753", f"process {one.pid} ({one.name}): {error.strerror or error}", ("state", now.stands),
        next="ask once more; an engine that has just been built or is being taken down does not answer",
    )  # fmt: skip
