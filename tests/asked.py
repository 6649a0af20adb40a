"""A process that can be asked how it stands, for tests: with an engine of which no vLLM is needed, or a false one.

``python asked.py KIND [RANK]`` prints one line when it is ready, and stands there until it is ended or its standard
input is closed.
"""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from balance_patcher import answering, procfs, watchdog  # noqa: E402 - found on the path that is set here


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


class Scheduler:
    def get_request_counts(self) -> tuple[int, int]:
        return 3, 9


class Engine:
    """As much of an engine core as is read."""

    engines_running, step_counter, current_wave = True, 12, 3

    def __init__(self, rank: int = 0, ranks: int = 2) -> None:
        self.dp_rank, self.dp_group, self.scheduler = rank, Group(ranks), Scheduler()


class Said:
    """What a rank has said of itself."""

    def __init__(self, pid: int) -> None:
        self.host, self.pid = socket.gethostname(), pid


def tells(_: object) -> dict[str, object]:
    return {"cap": 4, "counts": [4, 3], "frozen": True}


def active(rank: int = 0, pids: tuple[int, ...] = ()) -> answering.Active:
    peers = {number: Said(pid) for number, pid in enumerate(pids)}
    return answering.Active("balance", f"balance: ON rank {rank}/2", "21f1e23a58ed", tells, peers)


@contextlib.contextmanager
def process(kind: str = "engine", *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """One such process, ready to be asked; ended afterwards."""
    command = [sys.executable, str(Path(__file__)), kind, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline(), "it ended before it was ready"
            yield started
        finally:
            started.kill()


# -- in the process --------------------------------------------------------------------------


def ready(*said: object) -> None:
    sys.stdout.write(" ".join(map(str, said or ("ready",))) + "\n")
    sys.stdout.flush()


def answer_with(data: bytes, pid: int | None = None) -> None:
    """Take a name, one's own or that of another, and answer with something."""
    this = procfs.process(pid if pid is not None else "self")
    assert this is not None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{answering.address(this.pid, this.started)}")
        listener.listen()
        ready()
        connection, _ = listener.accept()
        connection.sendall(data)
        connection.close()
        sys.stdin.read()


def main(kind: str, *arguments: str) -> None:
    rank = int(arguments[0]) if kind == "engine" and arguments else 0
    engine = Engine(rank)
    if kind == "nothing":
        ready()
    elif kind == "raw":
        answer_with(arguments[0].encode().decode("unicode_escape").encode())
    elif kind == "for another":
        answer_with(b"{}\n", int(arguments[0]))
    elif kind == "parent":
        children = [process("engine", rank, os.getpid()) for rank in (1, 0)]
        with contextlib.ExitStack() as stack:
            pids = [stack.enter_context(child).pid for child in children]
            ready(*pids)
            sys.stdin.read()
    elif kind == "zombie":
        child = os.fork()
        if not child:
            os._exit(0)
        while (it := procfs.process(child)) is not None and it.state != "Z":
            time.sleep(0.01)
        ready(child)
    elif kind == "forks":
        answering.begin(engine, [active(0)])
        child = os.fork()
        if not child:
            mine = Engine(1)
            this = procfs.process("self")
            assert this is not None
            before = answering.address(os.getpid(), this.started) in procfs.abstract_names("self")
            answering.begin(mine, [active(1)])
            ready(json.dumps({"child": os.getpid(), "before": before}))
        sys.stdin.read()
        os._exit(0)
    elif kind == "another user":
        answering.begin(engine, [active(rank)])
        os.setegid(65534)
        os.seteuid(65534)
        ready()
    else:
        dog = watchdog.Watchdog("balance", engine, {}, 20)
        if kind == "in the gather":
            dog.enters()
        answering.begin(engine, [active(rank, (4711, *map(int, arguments[1:2])))])
        if kind == "holds the interpreter":
            sys.setswitchinterval(600)
            library = ctypes.PyDLL(None)  # its functions do not give the interpreter up
            library.write(1, b"ready\n", 6)
            library.sleep(600)
        ready()
    if kind != "ends":
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
