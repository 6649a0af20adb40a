"""One data-parallel rank in a process of its own: upstream's whole engine core, without workers and sockets.

``DPEngineCoreProc`` is upstream's and runs its own constructor and busy loop, with balance decided, agreed on and
installed as in any engine core. Two things are stood in for. The workers: an executor that answers at once. The
sockets: a pipe to the test, which plays the client and the coordinator.

A module apart, so that a process that is started imports it by a plain name under every import mode.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import harness
import torch

MODEL_LEN = 2048
BLOCKS = 4 * MODEL_LEN // harness.BLOCK
#: What upstream's old ranks wait for before they switch: their workers have prepared themselves.
PREPARED = "balance_patcher_test/prepared"


@dataclass(frozen=True)
class Launch:
    """How a rank is started.

    Attributes:
        rank: Its number.
        ranks: How many there are.
        store: The port of the coordination store, on loopback.
        joins: It is launched by a scale-up, beside ranks that run already.
        balance: Balance scheduling is on.
        seqs: Its cap.
        tolerant: Upstream's fault tolerance is on.
        pace: Seconds that a step of the model takes.
    """

    rank: int
    ranks: int
    store: int
    joins: bool = False
    balance: bool = True
    seqs: int = 2
    tolerant: bool = False
    pace: float = 0.0

    def config(self):
        harness.MODEL_LEN = MODEL_LEN
        shape = harness.Shape(seqs=self.seqs, ranks=self.ranks, rank=self.rank, tokens=256)
        config = harness.enabled_config(shape) if self.balance else harness.vllm_config(shape)
        # Set on the finished object: vLLM starts such ranks through Ray only.
        parallel = config.parallel_config
        parallel.data_parallel_rank_local = self.rank
        parallel.data_parallel_master_ip = "127.0.0.1"
        parallel.cpu_distributed_timeout_seconds = 120
        parallel._coord_store_port = self.store
        parallel.enable_elastic_ep = True
        if self.tolerant:
            parallel.enable_fault_tolerance = True
            parallel.fault_tolerance_config.engine_recovery_timeout_sec = 120
        return config


@dataclass
class Orders:
    """What the test wants of a rank besides requests, and what was written down for it.

    Attributes:
        notes: ``("step", …)`` for each call of ``schedule``, ``("gather", …)`` for each gather, in order.
        faults: From which step on the next use of a part of the hardware fails, by its name.
        pace: Seconds that a step of the model takes.
        at: Says in which step the rank is.
    """

    pace: float
    notes: list = field(default_factory=list)
    faults: dict = field(default_factory=dict)
    at: Callable[[], int] = lambda: 0

    def work(self, part):
        """One step of the hardware; it takes its time and may fail."""
        time.sleep(self.pace)
        if self.at() >= self.faults.get(part, float("inf")):
            del self.faults[part]
            raise RuntimeError(f"a fault in the {part}, as ordered")


def hardware(orders):
    """An executor class that has no workers and answers for them."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import ModelRunnerOutput

    spec = FullAttentionSpec(harness.BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    answers = {
        "get_kv_cache_spec": {"layer": spec},
        "get_supported_kv_cache_layouts": ["NHD"],
        "determine_available_memory": spec.page_size_bytes * BLOCKS,
        "compile_or_warm_up_model": SimpleNamespace(language_model=0.0, encoder=0.0),
    }

    class Hardware(Executor):
        max_concurrent_batches = 1
        scheduler = None

        def _init_executor(self):
            pass

        def check_health(self):
            pass

        def collective_rpc(self, method, *_, args=(), **__):
            if method == "execute_dummy_batch":
                orders.work("dummy")
            return [PREPARED if args[:1] == ("start_async",) else answers.get(method)]

        def execute_model(self, scheduler_output, **_):
            orders.work("model")
            names = list(scheduler_output.num_scheduled_tokens)
            whole = [not self.scheduler.requests[name].is_prefill_chunk for name in names]
            answer = Future()
            answer.set_result(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: at for at, name in enumerate(names)},
                    sampled_token_ids=[[7] if sampled else [] for sampled in whole],
                )
            )
            return answer

    return Hardware


class Pipe:
    """The end of a pipe on which several threads speak."""

    def __init__(self, pipe):
        self._pipe, self._speaks = pipe, threading.Lock()
        self.recv = pipe.recv

    def tell(self, kind, value):
        with self._speaks, contextlib.suppress(OSError):
            self._pipe.send((kind, value))


def core(pipe):
    """Upstream's ``DPEngineCoreProc`` with a pipe for sockets."""
    from vllm.v1.engine.utils import EngineZmqAddresses

    class Core(harness.dp_engine_core()):
        @contextlib.contextmanager
        def _perform_handshakes(self, *_, **__):
            yield EngineZmqAddresses(["in"], ["out"], "coordinator in", "coordinator out")

        def process_input_sockets(self, *args, **_):
            args[-1].set()

        def process_output_sockets(self, *_, **__):
            while True:
                client, outputs = self.output_queue.get()
                pipe.tell("output", plain(client, outputs))

        def _eep_send_engine_core_notification(self, notification_type, vllm_config=None):
            pipe.tell("notified", notification_type.value)

    return Core


def plain(client, outputs):
    """What the test needs of an output, as plain values."""
    utility = outputs.utility_output
    return {
        "client": client,
        "start": outputs.start_wave,
        "complete": outputs.wave_complete,
        "finished": {o.request_id: str(o.finish_reason) for o in outputs.outputs if o.finish_reason is not None},
        "call": utility.call_id if utility else None,
        "result": utility.result.result if utility and utility.result else None,
        "failure": utility.failure_message if utility else None,
    }


def counts(engine):
    return [tensor.item() for tensor in getattr(engine.scheduler, "balance_queue", ())]


def watch(engine, orders):
    """Write down every step that is scheduled, with what its gate looks at, and every gather."""
    scheduler, groups, numbers = engine.scheduler, [], itertools.count()
    schedule, gather = scheduler.schedule, scheduler.balance_gather

    def group():
        """The number of the group that the engine has; the first has 0."""
        if not groups or groups[-1] is not engine.dp_group:
            groups.append(engine.dp_group)
        return len(groups) - 1

    def scheduled(*args, **kwargs):
        step = {"group": group(), "size": engine.dp_group.size(), "counter": engine.step_counter}
        step |= {"queue": counts(engine), "waiting": len(scheduler.waiting), "number": next(numbers)}
        output = schedule(*args, **kwargs)
        orders.notes.append(("step", {**step, "admitted": len(output.scheduled_new_reqs)}))
        return output

    def gathered(dp_group):
        gather(dp_group)
        orders.notes.append(("gather", {"group": group(), "counts": counts(engine)}))

    scheduler.schedule, scheduler.balance_gather = scheduled, gathered


def main(launch, connection):
    """A rank, from its start to its end, of which the test is told."""
    pipe = Pipe(connection)
    os.environ["BALANCE_PATCHER"] = "auto"
    if launch.joins:
        os.environ["VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"] = "1"
    try:
        run(launch, pipe)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
        pipe.tell("ended", f"{type(error).__name__}: {error}")
    finally:
        connection.close()
        os._exit(0)  # threads that wait for ranks which are gone are not waited for


def run(launch, pipe):
    import vllm.plugins

    from balance_patcher import plugin

    vllm.plugins.load_general_plugins = lambda: None
    plugin.arm()
    orders = Orders(launch.pace)
    engine = core(pipe)(launch.config(), True, "handshake", hardware(orders), True)
    engine.model_executor.scheduler = engine.scheduler
    orders.at = lambda: engine.step_counter
    if launch.balance:
        watch(engine, orders)
    threading.Thread(target=obey, args=(engine, pipe, orders), daemon=True).start()
    pipe.tell("ready", os.getpid())
    engine.run_busy_loop()


def obey(engine, pipe, orders):
    """Do what the test says; what a client sends goes into upstream's own queue."""
    from vllm.v1.engine import EngineCoreRequestType

    def put(kind, what):
        engine.input_queue.put((EngineCoreRequestType[kind], what))

    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, *rest = pipe.recv()
            if kind == "add":
                names, output, wave = rest
                for name in names:
                    put("ADD", (harness.new_request(name, 8, output), wave))
            elif kind == "abort":
                engine.aborts_queue.put(rest[0])
                put("ABORT", rest[0])
            elif kind == "wave":
                put("START_DP_WAVE", rest[0])
            elif kind == "call":
                call, method, arguments = rest
                put("UTILITY", (0, call, method, arguments))
            elif kind == "recover":
                # Upstream's input thread does this itself: the busy loop has stopped.
                command = {"instruction": "retry", "params": {}, "request_id": "one"}
                threading.Thread(target=engine.ft_sentinel.handle_command, args=(0, rest[0], command)).start()
            elif kind == "fault":
                orders.faults[rest[0]] = rest[1]
            elif kind == "timeout":
                engine.vllm_config.parallel_config.cpu_distributed_timeout_seconds = rest[0]
            elif kind == "patience":
                from balance_patcher import agreement

                agreement.PATIENCE = rest[0]
            elif kind == "state":
                step = next((value for what, value in reversed(orders.notes) if what == "step"), None)
                pipe.tell("state", (counts(engine), engine.dp_group.size(), engine.eep_scaling_state is None, step))
            elif kind == "notes":
                pipe.tell("notes", list(orders.notes))
    os._exit(0)  # the test is gone
