"""Data-parallel ranks that decide, each in a process of its own: upstream's engine core until its weights would load.

The group is upstream's (``DPEngineCoreProc._init_data_parallel``: gloo, and a store that rank 0 holds), and then
``decide`` runs on that engine core. A process takes one case after the other, each in another group.

A module apart, so that the processes import it by a plain name under every import mode.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from unittest import mock

import forked
import harness

ASKED = {"enable_balance_scheduling": True}
BOARD = "balance", "start"
#: Seconds until a test gives a rank up: longer than any of them may take.
BOUND = 250


@dataclass(frozen=True)
class Rank:
    """What one rank of a case is like.

    Attributes:
        asks: Its ``additional_config``.
        seqs: The requests that it may run.
        active: The requests that it admits, where this vLLM tells the two apart.
        environment: More for its environment.
        patience: How long a rank that says nothing is waited for.
        late: Whether its own plugins take long, after which it decides: until the other rank has "given up", or the
            store is "lost".
        twists: What happens to it besides, by the names of functions below.
    """

    asks: dict | None = field(default_factory=lambda: ASKED)
    seqs: int = 4
    active: int | None = None
    environment: dict = field(default_factory=dict)
    patience: float = 60.0
    late: str = ""
    twists: tuple = ()


@dataclass
class Found:
    """What came of it on one rank.

    Attributes:
        pid: Its process.
        seconds: How long ``decide`` took.
        codes: Of each failure that it raised with, the id.
        whats: The sentences of these.
        fields: Their labelled lines.
        active: The features that are on, by decision.
        lines: What our logger said, with the level.
        spoke: Whether the rank has written a statement.
        names: What the ranks are called that it agreed with.
        facts: What it said of itself.
        scheduler: The classes of the scheduler that the engine core would build.
        hook: The file of the code that the engine core would call.
        confirmed: What came of looking at the engine that was built, where one was.
    """

    pid: int = 0
    seconds: float = 0.0
    codes: list = field(default_factory=list)
    whats: list = field(default_factory=list)
    fields: list = field(default_factory=list)
    active: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    spoke: bool = False
    names: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    scheduler: list = field(default_factory=list)
    hook: str = ""
    confirmed: str = ""


# -- in a rank's process ------------------------------------------------------------------------


#: The engine core of the last case: it may hold the store, and the other ranks need not be done.
LAST = []


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def main(pipe):
    """Take one case after the other, until there is none."""
    os.environ["BALANCE_PATCHER"] = "auto"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with contextlib.suppress(EOFError, OSError):
        while True:
            given = pipe.recv()
            try:
                pipe.send(case(*given))
            except Exception:  # noqa: BLE001 - the test shows it
                pipe.send(traceback.format_exc())
                return


def case(rank, number, size, port):
    import vllm.logger  # noqa: F401 - it takes away the handlers that are there

    from balance_patcher import agreement, ranks
    from balance_patcher.board import Board
    from balance_patcher.installation import uninstall

    lines = Lines()
    logger = logging.getLogger("vllm.balance_patcher")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(lines)
    found = Found(os.getpid())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, rank.environment))
            stack.enter_context(mock.patch.object(agreement, "PATIENCE", rank.patience))
            stack.enter_context(
                mock.patch("vllm.plugins.load_general_plugins", side_effect=lambda: plugins(rank.late, number))
            )
            for twist in rank.twists:
                stack.enter_context(globals()[twist]())
            engine, config = grouped(rank, number, size, port)
            LAST[:] = [engine]
            decide(engine, config, found)
            said, _ = Board(engine.dp_store, *BOARD, answer=agreement.ANSWER).read([f"says/{number}"], 0)
            found.spoke = bool(said)
            agreed = ranks.agreed(engine, "balance")
            found.names = {rank: str(said) for rank, said in agreed.ranks.items()}
            found.facts = dict(agreed.mine.facts) if agreed.mine is not None else {}
            if any(twist.startswith("confirms") for twist in rank.twists) and not found.codes:
                confirm(engine, config, rank, found)
    finally:
        logger.removeHandler(lines)
        for name in ("balance", "prefill_preemption"):
            uninstall(name)
    found.lines = lines.lines
    return found


def plugins(late, number):
    """What vLLM runs before anything is decided: it takes as long as it is to."""
    from balance_patcher import agreement
    from balance_patcher.board import Board

    board = Board(LAST[0].dp_store, *BOARD, answer=agreement.ANSWER)
    until = time.monotonic() + BOUND
    while late and time.monotonic() < until:
        found, gone = board.read([f"finds/{1 - number}"], 0)
        if (late == "given up" and found) or (late == "lost" and gone):
            return
        time.sleep(0.05)


def grouped(rank, number, size, port):
    """Upstream's engine core when its data-parallel group has just been made, and its configuration."""
    config = harness.vllm_config(shape(rank, number, size), rank.asks)
    parallel = config.parallel_config
    parallel.data_parallel_rank_local = number
    parallel.data_parallel_master_ip = "127.0.0.1"
    parallel._coord_store_port = port
    engine = harness.dp_engine_core().__new__(harness.dp_engine_core())
    engine._init_data_parallel(config)
    return engine, config


def shape(rank, number, size):
    return harness.Shape(seqs=rank.seqs, active=rank.active, ranks=size, rank=number)


def decide(engine, config, found):
    from balance_patcher import decision
    from balance_patcher.errors import PatchError

    began = time.monotonic()
    try:
        made = decision.decide(engine, config)
        found.active = [each.feature for each in made if each.active]
    except PatchError as error:
        found.codes = [failure.code for failure in error.failures]
        found.whats = [failure.what for failure in error.failures]
        found.fields = [dict(failure.fields) for failure in error.failures]
    found.seconds = time.monotonic() - began
    chosen = config.scheduler_config.get_scheduler_cls()
    found.scheduler = [cls.__name__ for cls in chosen.__mro__]
    found.hook = harness.dp_engine_core()._has_global_unfinished_reqs.__code__.co_filename


def confirm(engine, config, rank, found):
    """Build the scheduler as the engine core does, and look at the engine."""
    from balance_patcher import readback
    from balance_patcher.errors import PatchError

    if "confirms_another_cap" in rank.twists:
        config.scheduler_config.max_num_seqs += 1
    engine.vllm_config = config
    engine.scheduler = harness.new_scheduler(
        config.scheduler_config.get_scheduler_cls(), shape(rank, engine.dp_rank, engine.dp_size), config
    )
    try:
        readback.confirm(engine, config)
        found.confirmed = "confirmed"
    except PatchError as error:
        found.confirmed = str(error)


# -- twists -------------------------------------------------------------------------------------


@contextlib.contextmanager
def confirms():
    """The engine is built, and looked at."""
    yield


@contextlib.contextmanager
def confirms_another_cap():
    """The same, with another cap than was decided on."""
    yield


@contextlib.contextmanager
def declared(features):
    """Other features than those of this repository are decided on."""
    from balance_patcher import decision, wanted

    with (
        mock.patch.object(decision, "features", return_value=features),
        mock.patch.object(wanted, "features", return_value=features),
    ):
        yield


@contextlib.contextmanager
def moved_anchor():
    """The gate is declared for another admission stop than this vLLM has."""
    from balance_patcher import registry

    def changed(variant):
        if variant.status != "applied":
            return variant
        allow = {**variant.anchor.allow, "CAP": ("run_cap",)}
        return replace(variant, anchor=replace(variant.anchor, allow=allow))

    def moved(delta):
        gate = delta.name == "balance.admission-gate"
        return replace(delta, variants=tuple(map(changed, delta.variants))) if gate else delta

    (balance,) = [feature for feature in registry.features() if feature.name == "balance"]
    elsewhere = replace(balance, deltas=tuple(map(moved, balance.deltas)))
    with declared((elsewhere,)):
        yield


@contextlib.contextmanager
def own_copy():
    """A host's own copy is left in place, and runs instead of ours."""
    from balance_patcher import decision

    with mock.patch.object(decision, "left_alone", lambda name: f"the host's own {name} runs"):
        yield


@contextlib.contextmanager
def both():
    """A second feature on the same function is asked for; the ranks need not agree on that one."""
    from balance_patcher import registry

    def changed(feature):
        if feature.name != "prefill_preemption":
            return feature
        return replace(feature, enabling=replace(feature.enabling, asked=lambda _: "the test", excluded=lambda *_: ()))

    with declared(tuple(map(changed, registry.features()))):
        yield


@contextlib.contextmanager
def dies_when_it_has_spoken():
    with after_the_statement(lambda: os._exit(1)):
        yield


@contextlib.contextmanager
def stands_still_when_it_has_spoken():
    with after_the_statement(lambda: os.kill(os.getpid(), signal.SIGSTOP)):
        yield


@contextlib.contextmanager
def has_little_patience_with_the_store():
    from balance_patcher import agreement

    with mock.patch.object(agreement, "ANSWER", 1.0):
        yield


@contextlib.contextmanager
def after_the_statement(what):
    from balance_patcher.board import Board

    def stated(self, keys, patience, *, first):
        self.write(*first)
        what()

    with mock.patch.object(Board, "read", stated):
        yield


# -- in the test --------------------------------------------------------------------------------


class Process:
    """A process that takes cases."""

    def __init__(self):
        self.process, self.pipe = forked.process(main)

    def found(self):
        """What came of the case; ``None`` where the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            return self.pipe.recv()
        return None

    def end(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Processes:
    """As many as are needed, kept from one case to the next; those that ended in one are replaced."""

    def __init__(self):
        self._processes = {}

    def decide(self, *ranks, without=()):
        """What each rank of a group finds, in their order; ``None`` for those that are named as being lost."""
        from vllm.distributed.utils import create_tcp_store

        store = create_tcp_store("127.0.0.1", 0, is_master=True, world_size=-1, wait_for_workers=False)
        processes = [self._processes.pop(number, None) or Process() for number, _ in enumerate(ranks)]
        self._processes |= dict(enumerate(processes))
        for number, (process, rank) in enumerate(zip(processes, ranks, strict=True)):
            process.pipe.send((rank, number, len(ranks), store.port))
        found, until = {}, time.monotonic() + BOUND
        waits = {process.pipe: number for number, process in enumerate(processes) if number not in without}
        while waits and all(isinstance(one, Found) for one in found.values()):
            ready = multiprocessing.connection.wait(list(waits), max(0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = waits.pop(pipe)
                found[number] = processes[number].found()
        failed = {number: one for number, one in found.items() if not isinstance(one, Found)}
        for number in {*without, *waits.values(), *failed}:
            self._processes.pop(number).end()
        assert not failed and not waits, f"ranks {sorted(waits.values())} say nothing; failed: {failed}"  # noqa: PT018
        return [found.get(number) for number in range(len(ranks))]

    def end(self):
        for process in self._processes.values():
            process.end()


if __name__ == "__main__":
    # A rank that nobody has forked: what it would say of itself. It meets nobody.
    import json

    from balance_patcher import decision, ranks

    told = {}
    with (
        mock.patch("vllm.plugins.load_general_plugins"),
        mock.patch.object(ranks, "_exchange", side_effect=lambda *given: told.update(given[3]) or ranks.Agreed()),
    ):
        decision.decide(harness.Loop(), harness.vllm_config(shape(Rank(), 0, 2), ASKED))
    sys.stdout.write(json.dumps({"facts": told, "vllm": sys.modules["vllm"].__file__}) + "\n")
