"""The other side of the ranks of ``ranks.py``: plays upstream's client and coordinator for them."""

import contextlib
import itertools
import threading
import time
from datetime import timedelta

import forked
import harness
import ranks
from ranks import Launch

#: Seconds that anything may take: a bound on a loaded machine, no measure of what it takes.
SECONDS = 300
#: What ranks that join say, up to 0.26: they want their group, and their weights.
GROUP, WEIGHTS = "NEW_CORE_ENGINES_INIT_READY", "NEW_CORE_ENGINES_WEIGHTS_INIT_READY"
#: What upstream calls a rank that is to end.
SHUTDOWN = -2


def until(condition, what):
    """Wait until a condition holds; fails with what was waited for."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {SECONDS} s"
        time.sleep(0.02)


class Rank:
    """One rank's process, and what it said."""

    def __init__(self, front, launch):
        self.launch, self._front = launch, front
        self._process, self._pipe = forked.process(ranks.main, launch)
        self._said, self._outputs = {}, []
        self._heard = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._hear(*self._pipe.recv())
        with self._heard:
            self._said.setdefault("ended", "without a word")
            self._heard.notify_all()

    def _hear(self, kind, value):
        with self._heard:
            if kind == "output":
                self._outputs.append(value)
            else:
                self._said[kind] = value
            self._heard.notify_all()
        self._front.hear(self, kind, value)

    def _until(self, found, what):
        """What is found in what was said, once it is; fails if the rank ends before that."""
        with self._heard:
            self._heard.wait_for(lambda: found() is not None or "ended" in self._said, SECONDS)
            value = found()
        name = f"rank {self.launch.rank}"
        assert value is not None, f"{name}: no {what}; {self._said.get('ended', f'{name} runs')}"
        return value

    def _ask(self, kind):
        self._said.pop(kind, None)
        self.send(kind)
        return self._until(lambda: self._said.get(kind), kind)

    def send(self, *what):
        with contextlib.suppress(OSError):
            self._pipe.send(what)

    def ready(self):
        """Wait until its engine core has been built."""
        self._until(lambda: self._said.get("ready"), "engine core")

    def ended(self):
        """Wait for its end, and say what it ended with."""
        return self._until(lambda: self._said.get("ended"), "end")

    def result(self, call):
        """Wait for the answer to a call: its result, and why it failed."""
        answer = self._until(lambda: next((o for o in self._outputs if o["call"] == call), None), f"answer to {call}")
        return answer["result"], answer["failure"]

    def finished(self, names):
        """Wait until requests are finished; why each did."""

        def found():
            done = {name: why for output in list(self._outputs) for name, why in output["finished"].items()}
            return {name: done[name] for name in names} if done.keys() >= set(names) else None

        return self._until(found, f"end of {names}")

    def status(self):
        """What upstream's fault tolerance last said of this rank."""
        results = [output["result"] for output in list(self._outputs)]
        said = [result["status"] for result in results if isinstance(result, dict) and "status" in result]
        return said[-1] if said else "healthy"

    def state(self):
        """The queue, the size of the group, whether no scaling is under way, and the last step."""
        return self._ask("state")

    def notes(self):
        """The gathers and steps so far, in their order."""
        return self._ask("notes")

    def kill(self):
        self._process.kill()
        self._process.join()


class Front:
    """Client and coordinator of a group of ranks; a context manager that ends every process it has started.

    Args:
        size: How many ranks there are at the start.
        **launch: Passed on to each :class:`ranks.Launch`.

    Attributes:
        ranks: The ranks of the group, in order.
    """

    def __init__(self, size, **launch):
        self._launch, self._calls, self._names = launch, itertools.count(1), itertools.count()
        self._lock, self._notified = threading.RLock(), []
        self._wave, self._running = 0, False
        self._stores = []
        self._new_store()
        self.ranks, self._all = [], []
        self.ranks = [self._start(rank, size) for rank in range(size)]
        for rank in self.ranks:
            rank.ready()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self._all:
            rank.kill()

    def _start(self, rank, size, **more):
        launch = Launch(rank=rank, ranks=size, store=self._stores[-1].port, **{**self._launch, **more})
        started = Rank(self, launch)
        self._all.append(started)
        return started

    # -- what the coordinator does --

    def hear(self, rank, kind, value):
        """Take what a rank says: who starts a wave has the others woken."""
        with self._lock:
            if kind == "notified":
                self._notified.append(value)
            elif kind == "output":
                if value["complete"] is not None:
                    self._wave, self._running = max(self._wave, value["complete"] + 1), False
                if value["start"] is not None and (value["start"] > self._wave or not self._running):
                    self._wave = max(self._wave, value["start"])
                    self._wake(rank)

    def _wake(self, sender):
        self._running = True
        for rank in self.ranks:
            if rank is not sender:
                rank.send("wave", (self._wave, sender.launch.rank))

    def rests(self):
        """The ranks have stopped together without the end of a wave, or were stopped."""
        self._running = False

    def idle(self):
        """Wait until the wave is over."""
        until(lambda: not self._running, "end of the wave")

    # -- what the client does --

    def add(self, at, number, output):
        """Send requests to one rank; their names."""
        names = [f"r{next(self._names)}" for _ in range(number)]
        with self._lock:
            self.ranks[at].send("add", names, output, self._wave)
            if not self._running:
                self._wake(self.ranks[at])
        return names

    def abort(self, at, names):
        self.ranks[at].send("abort", names)

    def _call(self, rank, method, *arguments):
        call = next(self._calls)
        rank.send("call", call, method, arguments)
        return rank, call

    def call(self, method, *arguments, on=None):
        """Call a method on all ranks at once, as the client does, and wait for all answers."""
        calls = [self._call(rank, method, *arguments) for rank in (self.ranks if on is None else on)]
        answers = [rank.result(call) for rank, call in calls]
        assert [failure for _, failure in answers] == [None] * len(answers)

    def recover(self):
        """Tell all ranks to try again, once all have noticed the fault."""
        for rank in self.ranks:
            until(lambda rank=rank: rank.status() == "unhealthy", f"fault on rank {rank.launch.rank}")
        calls = [(rank, next(self._calls)) for rank in self.ranks]
        for rank, call in calls:
            rank.send("recover", call)
        for rank, call in calls:
            assert rank.result(call)[0]["success"]
        self.rests()

    # -- elastic scaling --

    def _new_store(self):
        """A coordination store, as the client makes one for each reconfiguration."""
        from vllm.distributed.utils import create_tcp_store

        store = create_tcp_store("127.0.0.1", 0, is_master=True, world_size=-1, wait_for_workers=False)
        store.set(ranks.PREPARED, b"1")
        self._stores.append(store)  # whoever still looks into an old one finds it

    def _request(self, size, rank=-1):
        from vllm.v1.engine import ReconfigureDistributedRequest

        return ReconfigureDistributedRequest(size, rank, -1, "127.0.0.1", 1, [1, 2, 3], self._stores[-1].port)

    @property
    def _commits(self):
        """Whether a scaling is prepared beside the steps and then committed: from 0.27.1."""
        return hasattr(harness.dp_engine_core(), "commit_prepared_elastic_ep")

    def _prepared(self, of):
        self._stores[-1].wait([f"eep_ready/{rank.launch.rank}" for rank in of], timedelta(seconds=SECONDS))

    def _forward(self, notification):
        until(lambda: notification in self._notified, notification)
        self.call("eep_handle_engine_core_notification", notification)

    def _settled(self, size):
        for rank in self.ranks:
            until(lambda rank=rank: rank.state()[1:3] == (size, True), f"{size} ranks for rank {rank.launch.rank}")

    def _join(self, size, **more):
        self._notified.clear()
        self._new_store()
        self.call("reinitialize_distributed", self._request(size))
        joiners = [self._start(rank, size, joins=True, **more) for rank in range(len(self.ranks), size)]
        if not self._commits:
            self._forward(GROUP)
        return joiners

    def up(self, size, before):
        """Scale up, as the client of this lane does it.

        Args:
            size: The new number of ranks.
            before: Called when all is prepared, right before the ranks switch.
        """
        joiners = self._join(size)
        if self._commits:
            self._prepared([*self.ranks, *joiners])
            before()
            self.call("pause_scheduler", "keep", False)
            self.call("commit_prepared_elastic_ep")
        else:
            until(lambda: WEIGHTS in self._notified, WEIGHTS)
            before()
            self._forward(WEIGHTS)
        for rank in joiners:
            rank.ready()
        with self._lock:
            self.ranks = [*self.ranks, *joiners]
        if self._commits:
            self.call("resume_scheduler")
        self._settled(size)

    def refused(self, size, **more):
        """A scale-up with ranks that do not fit: wait until the old ones have given it up; the new one."""
        (joiner,) = self._join(size, **more)
        self._settled(len(self.ranks))
        return joiner

    def down(self, size):
        """Scale down, as the client of this lane does it."""
        stay, leave = self.ranks[:size], self.ranks[size:]
        self._new_store()
        request, end = self._request(size), self._request(size, SHUTDOWN)
        if self._commits:
            self.call("reinitialize_distributed", request, on=stay)
            self._prepared(stay)
        with self._lock:
            self.ranks = stay
        if self._commits:
            pauses = [self._call(rank, "pause_scheduler", "keep", False) for rank in stay]
            pauses += [self._call(rank, "pause_scheduler", "abort", False) for rank in leave]
            for rank, call in pauses:
                rank.result(call)
        for rank in stay:
            self._call(
                rank, *(["commit_prepared_elastic_ep"] if self._commits else ["reinitialize_distributed", request])
            )
        for rank in leave:
            self._call(rank, "reinitialize_distributed", end)
        for rank in leave:
            assert rank.ended().startswith("SystemExit")
        self._settled(size)
        if self._commits:
            self.call("resume_scheduler")
