"""One data-parallel rank: the busy loop of ``DPEngineCoreProc``, from one place where it waits to the next.

Each method is a stretch of ``vllm/v1/engine/core.py``, and its docstring says which where the name does
not. It ends by calling the next one, or by waiting: then ``then`` names the method that goes on.

Of the step counter is kept what decides something: whether it is 0, is 1, or synchronises. Sleep, shutdown
and elastic scaling are not here.
"""

from __future__ import annotations

import operator

from tests.model.scheduler import Scheduler
from tests.model.setup import (
    AFTER_SYNC,
    BEFORE_GATE,
    BEFORE_SYNC,
    IN_SCHEDULE,
    IN_STEP,
    SKIP_DRAINED,
    SKIP_EARLY,
    SKIP_SYNCED,
)

FIELDS = (
    "number at then kind value running wave counter waiting active finished queue ahead "
    "paused pending ignoring callback woken result frozen gathers gathered mail calls out"
).split()

#: The placements inside the hook. Each step has to gather exactly once.
IN_HOOK = (AFTER_SYNC, BEFORE_SYNC, SKIP_EARLY, SKIP_SYNCED, SKIP_DRAINED)
#: The methods that begin by reading what others have sent.
READS = ("loop", "poll", "drain", "take")

freeze = operator.attrgetter(*FIELDS)


class Rank(Scheduler):
    """The state of one rank.

    Attributes:
        at: ``input``, blocked on the empty input queue; ``forward``, in a forward pass; ``group``, in a
            collective on ``dp_group``, with its ``kind`` and ``value``; ``ready`` to go on; or ``failed``.
        running: ``engines_running``. ``woken``: whether it was false when this step began.
        waiting, active: Requests not admitted, and admitted. ``finished``: whether the scheduler still has
            to tell the worker of finished ones, for which ``has_requests`` is true too.
        queue: Batches in flight, oldest first: the number of the forward pass and whether its request is
            still there, or None for a batch with nothing in it.
        ahead: How many forward passes it has begun that another rank has not.
        paused, pending, ignoring, callback: A pause: the scheduler's state, ``pending_pause``,
            ``ignore_start_dp_wave``, and whether somebody waits for the engine to become idle.
        frozen: What the gate reads from ``balance_queue``: whether any rank was at its cap.
        gathers: How many gathers it has left that another rank has not. ``gathered``: those of this step.
        mail, calls: Sent to it and not yet read, by the front-end and by the coordinator.
        out: Sent by it and not yet read by the coordinator.
    """

    def __init__(self, values):
        self.__dict__.update(zip(FIELDS, values))  # noqa: B905 - half of the search's time is spent here

    @classmethod
    def idle(cls, number, generation):
        """As it is after start-up."""
        rank = cls([0] * len(FIELDS))
        rank.number, rank.paused, rank.result = number, "", None
        rank.queue = rank.mail = rank.calls = rank.out = ()
        rank.mark(generation)
        rank.wait("input", "take")
        return freeze(rank)

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self, at, then, kind="", value=None):
        self.at, self.then, self.kind, self.value = at, then, kind, value

    def go_on(self, net):
        getattr(self, self.then)(net)

    def begin_forward(self, net, what):
        net.note(self, f"begins a {what}")
        self.ahead += 1
        return self.ahead

    def gather(self, then):
        """``balance_gather``: one ``all_gather`` of the counts."""
        self.wait("group", "leave_gather", "gather", (then, self.active))

    def leave_gather(self, net):
        then, self.frozen = self.value
        self.gathers += 1
        self.gathered += net.setup.placement in IN_HOOK
        self.wait("ready", then)
        self.go_on(net)

    # -- the input queue -------------------------------------------------------------------------

    def top(self):
        """The loop starts over. Others may react to what was sent before the queue is read: see Cluster."""
        self.wait("ready", "loop")

    def loop(self, net):
        """``run_busy_loop``."""
        self.mark(net.setup.generation)
        self.poll(net)

    def mark(self, generation):
        """``was_running``, for the rank that makes use of it."""
        self.woken = int(generation == "told" and self.number == 0 and not self.running)

    def poll(self, net):
        """``_process_input_queue``: wait while there is no work."""
        if self.has_work():
            return self.drain(net)
        if self.callback:
            self.callback = 0
            net.answer()
        return self.wait("input", "take")

    def take(self, net):
        self.handle(net, net.receive(self), "poll")

    def drain(self, net):
        """Then read what else has arrived. Any message may still be on its way."""
        if (self.mail or self.calls) and net.pick(2) == 1:
            return self.handle(net, net.receive(self), "drain")
        return self.process_engine_step(net)

    def handle(self, net, message, then):
        """``_handle_client_request``."""
        what, *rest = message
        sent = len(self.out)
        self.wait("ready", then)
        getattr(self, what)(net, *rest)
        if self.at == "ready" and len(self.out) == sent:
            self.go_on(net)

    def add(self, net, wave):
        """``add_request``. An idle engine starts a wave for a stale request, or from 0.33 for any."""
        net.note(self, f"takes a request of wave {wave}")
        self.waiting += 1
        stale, self.wave = wave < self.wave, max(wave, self.wave)
        if not self.running and not self.paused and (stale or net.setup.generation == "engines"):
            self.running = 1
            net.tell(self, "started", self.wave)

    def abort(self, net):
        net.note(self, "aborts what it has")
        self.finish_all()

    def start(self, net, wave, excluded):
        """``START_DP_WAVE``."""
        if self.ignoring or excluded or wave < self.wave:
            return net.note(self, f"ignores the start of wave {wave}")
        self.wave, self.running = wave, 1
        return net.note(self, f"is told to start wave {wave}")

    def pause(self, net, mode):
        """``pause_scheduler`` and ``_pause_complete``: kick the ranks to their next sync."""
        net.note(self, f"is told to pause ({mode})")
        if mode == "abort":
            self.finish_all()
        self.paused = "all" if mode == "keep" else "new"
        self.pending = self.running = self.callback = 1

    def resume(self, net):
        """``resume_scheduler``, which has a collective of its own on ``dp_group``."""
        if self.pending or self.running:
            net.error = f"rank {self.number} does not resume: its pause is still in flight"
        self.paused, self.ignoring = "", 0
        self.wait("group", "resumed", "resume", (self.then, self.has_unfinished()))

    def resumed(self, net):
        then, unfinished = self.value
        self.running = int(unfinished)
        net.answer()
        self.wait("ready", then)

    def forget(self):
        """Drop the starts that will be ignored whenever they are read: a wave only grows, and twice is once."""
        kept = ()
        for call in self.calls:
            _, wave, excluded = call
            if not excluded and wave >= self.wave and call not in kept[-1:]:
                kept += (call,)
        self.calls = kept

    # -- the engine step -------------------------------------------------------------------------

    def process_engine_step(self, net):
        if not (self.running or self.has_unfinished()):
            why = "as a batch is in flight" if self.queue else "to tell its worker which request has finished"
            net.note(self, f"steps once more, {why}")
        if net.setup.placement == IN_STEP:
            return self.gather("step")
        return self.step(net)

    def step(self, net):
        """``step``, or ``step_with_batch_queue``."""
        if self.has_requests():
            return self.gather("plan") if net.setup.placement == IN_SCHEDULE else self.plan(net)
        return self.await_batch(net, "took_batch") if self.queue else self.stepped(net)

    def plan(self, net):
        if not self.schedule(net):
            return self.enqueue(net, None) if net.setup.asynchronous else self.stepped(net)
        batch = self.begin_forward(net, "forward pass")
        if net.setup.scheduling == "asynchronous":
            return self.enqueue(net, (batch, 1))
        return self.wait("forward", "ran" if net.setup.asynchronous else "took_output", value=batch)

    def ran(self, net):
        self.enqueue(net, (0, 1))

    def enqueue(self, net, batch):
        """Filling the queue goes before taking an output."""
        self.queue += (batch,)
        if len(self.queue) < 2 and (batch or self.has_requests()):
            return self.executed(net) if batch else self.stepped(net)
        return self.await_batch(net, "took_batch_and_ran" if batch else "took_batch")

    def await_batch(self, net, then):
        if self.queue[0] and self.queue[0][0]:
            return self.wait("forward", then, value=self.queue[0][0])
        return getattr(self, then)(net)

    def take_batch(self, net):
        batch, *rest = self.queue
        self.queue = tuple(rest)
        if batch and batch[1]:
            self.update_from_output(net)

    def took_batch(self, net):
        self.take_batch(net)
        self.stepped(net)

    def took_batch_and_ran(self, net):
        self.take_batch(net)
        self.executed(net)

    def took_output(self, net):
        self.update_from_output(net)
        self.executed(net)

    # -- the second half of run_busy_loop --------------------------------------------------------

    def executed(self, net):
        return self.gather("hook") if net.setup.placement == BEFORE_GATE else self.hook(net)

    def stepped(self, net):
        return self.gather("gate") if net.setup.placement == BEFORE_GATE else self.gate(net)

    def gate(self, net):
        """Nothing was executed: the idle gate, else a dummy batch."""
        if not self.has_unfinished() and not self.running and net.setup.broken != "gate":
            return self.top()
        if net.setup.broken == "dummy":
            return self.hook(net)
        return self.wait("forward", "hook", value=self.begin_forward(net, "dummy batch"))

    def hook(self, net):
        """``_has_global_unfinished_reqs``, to ``close``."""
        if net.setup.placement == BEFORE_SYNC:
            return self.gather("count")
        return self.count(net)

    def count(self, net):
        self.counter += 1
        if self.counter > net.setup.every + 1:
            self.counter -= net.setup.every
        if not self.syncs(net, self.counter):
            return self.close(net, 1, skip=SKIP_EARLY)
        if net.setup.broken == "sync":
            return self.close(net, int(self.has_unfinished()), skip=SKIP_SYNCED)
        return self.wait("group", "synced", "sync", (self.has_unfinished(), self.pending))

    @staticmethod
    def syncs(net, counter):
        return counter % net.setup.every == 0 or (counter == 1 and net.setup.generation != "eager")

    def synced(self, net):
        """``ParallelConfig.sync_dp_state``."""
        unfinished, pausing = self.value
        if pausing == net.setup.ranks:
            self.ignoring, self.pending = 1, 0
        go_on = unfinished or pausing % net.setup.ranks != 0 or net.setup.broken == "end"
        self.close(net, int(go_on), skip=SKIP_SYNCED)

    def close(self, net, result, skip):
        """The hook returns. Here stands the gather that is shipped."""
        self.result = result
        self.wait("ready", "hooked")
        placement = net.setup.placement
        if placement in {AFTER_SYNC, SKIP_EARLY, SKIP_SYNCED} - {skip} or (
            placement == SKIP_DRAINED and self.has_unfinished()
        ):
            return self.gather("hooked")
        return self.hooked(net)

    def hooked(self, net):
        """The end of ``run_busy_loop``'s body."""
        self.running, self.result = self.result, None
        if net.setup.placement in IN_HOOK and self.gathered != 1:
            net.miscount = f"rank {self.number} gathers {self.gathered} times in a step"
        self.gathered = 0
        if not self.running:
            net.note(self, f"ends wave {self.wave}")
            if self.number == 0:
                net.tell(self, "complete", self.wave)
            self.wave, self.counter = self.wave + 1, 0
        elif self.woken and not self.pending:
            net.tell(self, "started", self.wave)
        self.woken = 0
        self.top()

    # -- EngineCoreSentinel ----------------------------------------------------------------------

    def fail(self, net):
        """``on_fault``. After a gather that has failed all counts are zero."""
        net.note(self, f"raises in its {self.kind or 'forward pass'}")
        if self.kind == "gather":
            self.frozen = 0
        self.finish_all()
        self.queue, self.result, self.woken, self.gathered = (), None, 0, 0
        self.wait("failed", "loop")

    def recover(self):
        """``retry`` with ``_reinit_dp_group``: new groups, and a step counter of zero."""
        self.counter = self.ahead = self.gathers = 0
        self.top()
