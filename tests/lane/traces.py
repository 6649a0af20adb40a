"""Seeded traces, and two schedulers driven through one of them in step.

A trace says what comes from outside: requests, aborts, pauses, the counts of the other ranks. What
the model and the workers answer is a function of the seed, the request and its position, never of
the clock or of the scheduler's class. So two schedulers that decide alike see the same trace, and
the first decision that differs is found in the step in which it was made.
"""

import contextlib
import zlib
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random

import harness
from harness import BLOCK, Shape

STEPS = 32
RUNNING_FREE, RUNNING_PAUSED_NEW, RUNNING_PAUSED_ALL = "UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"


# -- what a trace is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """One request. ``grammar`` is the step in which its grammar is ready; ``chunks`` are later inputs."""

    id: str
    prompt: tuple
    output: int
    priority: int = 0
    lora: int = 0
    grammar: int | None = None
    resumable: bool = False
    load: str = "none"
    send: bool = False
    image: tuple | None = None


@dataclass(frozen=True)
class Chunk:
    """The next input of a streaming session; the last one ends it."""

    id: str
    prompt: tuple
    output: int
    last: bool


@dataclass
class Step:
    """What happens before one call of ``schedule``. ``others`` are the counts of the other ranks."""

    arrivals: list = field(default_factory=list)
    chunks: list = field(default_factory=list)
    aborts: list = field(default_factory=list)
    others: list = field(default_factory=list)
    pause: str | None = None
    throttle: bool = False
    preempt_all: bool = False


@dataclass(frozen=True)
class Trace:
    """A shape and what happens in each step."""

    seed: int
    shape: Shape
    steps: list


def trace(seed):
    """The trace for ``seed``. Which features it mixes is decided by the seed alone."""
    pick = Random(seed)
    chance = lambda share: pick.random() < share  # noqa: E731

    ranks = pick.choice([2, 2, 3, 4])
    seqs = pick.choice([2, 3, 4, 5])
    asynchronous = chance(0.35)
    # Upstream's sessions do not survive drafts beyond their end, nor steps in flight, on every lane.
    sessions = chance(0.4) and not asynchronous
    connector = chance(0.4)
    window = not connector and chance(0.25)
    shape = Shape(
        seqs=seqs,
        active=seqs - 1 if harness.supports_active_cap() and chance(0.3) else None,
        tokens=pick.choice([24, 48, 64, 128]),
        blocks=pick.choice([9, 11, 14, 60]) * (2 if window else 1),
        ranks=ranks,
        rank=pick.randrange(ranks),
        policy=pick.choice(["fcfs", "priority"]),
        prefix_caching=chance(0.8),
        reserve_full=chance(0.5),
        long_prefill=pick.choice([0, 0, 20]),
        spec_tokens=0 if sessions else pick.choice([0, 1, 3]),
        max_loras=1 if chance(0.3) else 0,
        connector=connector,
        load_failure=pick.choice(["recompute", "recompute", "fail"]),
        asynchronous=asynchronous,
        encoder=chance(0.2),
        window=window,
        zeroing=chance(0.2),
        v2_runner=chance(0.2),
        log_stats=chance(0.5),
    )
    grammars = chance(0.35)
    pauses = chance(0.4)
    throttles = chance(0.5)
    steps = [Step() for _ in range(STEPS)]

    prefixes = [[3 + (7 * family + i) % 500 for i in range(90)] for family in range(3)]
    for number in range(pick.randint(9, 18)):
        shared = pick.choice(prefixes)[: pick.choice([0, 16, 32, 40])]
        prompt = tuple(shared) + tuple(pick.randrange(3, 503) for _ in range(pick.randint(2, 40)))
        at = pick.choice([0, 0, 1, 2, pick.randrange(STEPS - 4)])
        resumable = sessions and chance(0.5)
        image = None
        if shape.encoder and not resumable and chance(0.5):
            length = pick.randint(1, min(12, len(prompt) - 1))
            image = (pick.randrange(len(prompt) - length), length)
        arrival = Arrival(
            id=f"r{number}",
            prompt=prompt,
            output=pick.choice([1, 2, 3] if resumable else [1, 3, 6, 10, 20]),
            priority=pick.choice([0, 0, 1, 2]),
            lora=pick.choice([0, 1, 2, 3]) if shape.max_loras else 0,
            grammar=at + pick.choice([0, 2, 4, 9]) if grammars and not resumable and chance(0.5) else None,
            resumable=resumable,
            load=pick.choice(["none", "async", "async", "sync", "undecided"]) if shape.connector else "none",
            send=shape.connector and chance(0.2),
            image=image,
        )
        steps[at].arrivals.append(arrival)
        if resumable:
            for turn in range(turns := pick.randint(1, 3)):
                at = min(STEPS - 1, at + pick.randint(2, 10))
                text = tuple(pick.randrange(3, 503) for _ in range(pick.randint(1, 20)))
                steps[at].chunks.append(Chunk(arrival.id, text, pick.choice([1, 3, 6]), last=turn == turns - 1))
        if chance(0.15):
            steps[min(STEPS - 1, at + pick.randint(0, 10))].aborts.append(arrival.id)

    mood, pause_ends = "below", None
    for number, step in enumerate(steps):
        if chance(0.4):
            mood = pick.choice(["idle", "below", "below", "near", "near", "leader", "leader", "all"])
        step.others = _others(pick, mood, shape.cap, ranks - 1)
        step.throttle = throttles and chance(0.6)
        # Upstream refuses a reset while a load is on its way or a paused session holds blocks.
        step.preempt_all = chance(0.02) and not shape.connector and not sessions
        if number == pause_ends:
            step.pause = RUNNING_FREE
        elif pauses and chance(0.12):
            step.pause = pick.choice([RUNNING_PAUSED_NEW, RUNNING_PAUSED_ALL])
            pause_ends = number + pick.randint(1, 4)
    return Trace(seed, shape, steps)


def _others(pick, mood, cap, number):
    if mood == "all":
        return [cap] * number
    below = [0 if mood == "idle" else pick.randrange(cap) for _ in range(number)]
    if mood == "near":
        below = [cap - 1] * number
    if mood == "leader":
        below[pick.randrange(number)] = cap
    return below


# -- one scheduler in a trace -------------------------------------------------------------------


class ToyGrammar:
    """A compiled grammar that accepts every token and, of drafts, the first half."""

    def accept_tokens(self, request_id, tokens):
        return True

    def validate_tokens(self, tokens):
        return list(tokens[: (len(tokens) + 1) // 2])

    def rollback(self, num_tokens):
        pass

    def is_terminated(self):
        return False


def toy_grammar():
    """One that upstream takes for its own kind: some lanes look at that before they use it."""
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    StructuredOutputGrammar.register(ToyGrammar)
    return ToyGrammar()


class World:
    """A scheduler with the model, the workers and the clients that a trace gives it."""

    def __init__(self, scheduler, trace, set_counts):
        self.scheduler = scheduler
        self.trace = trace
        self.set_counts = set_counts
        self.own_count = 0
        self.grammars = {}
        self.in_flight = deque()
        self.loads = {}
        self.sends = {}
        self.seen = Counter()

        # There is no backend to fill a bitmask; what it is asked for is what is compared.
        scheduler.structured_output_manager.grammar_bitmask = lambda requests, ids, drafts: [list(ids), dict(drafts)]

    def mix(self, *parts):
        """A number that depends on the seed and ``parts`` only."""
        return zlib.crc32(repr((self.trace.seed, *parts)).encode())

    # what comes from outside

    def before(self, number, step):
        """Apply what happens before the call of ``schedule`` in step ``number``."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        scheduler = self.scheduler
        for arrival in step.arrivals:
            scheduler.add_request(self._request(arrival, number))
        for chunk in step.chunks:
            # A session that was aborted or has ended takes no more input.
            if chunk.id in scheduler.requests:
                more = harness.new_request(
                    chunk.id, chunk.prompt, chunk.output, arrival=float(number), resumable=not chunk.last
                )
                scheduler.add_request(more)
                self.seen["session inputs"] += 1
        for request_id in step.aborts:
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                self.seen[f"aborts: {request.status.name}"] += 1
                self.seen["aborts"] += 1
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        for at, grammar in self.grammars.items():
            if at <= number:
                for future in grammar:
                    if not future.done():
                        future.set_result(toy_grammar())
        if step.pause is not None:
            scheduler.set_pause_state(PauseState[step.pause])
        if step.preempt_all and not self.in_flight and scheduler.running:
            self.seen["preempted by a cache reset"] += 1
            scheduler.reset_prefix_cache(reset_running_requests=True)
        counts = list(step.others)
        counts.insert(self.trace.shape.rank, self.own_count)
        self.set_counts(scheduler, counts)
        return counts

    def _request(self, arrival, number):
        future = None
        if arrival.grammar is not None:
            future = Future()
            self.grammars.setdefault(arrival.grammar, []).append(future)
        return harness.new_request(
            arrival.id,
            arrival.prompt,
            arrival.output,
            arrival=float(number),
            priority=arrival.priority,
            lora=arrival.lora,
            grammar=future,
            resumable=arrival.resumable,
            transfer={"load": arrival.load, "send": arrival.send} if self.trace.shape.connector else None,
            image=arrival.image,
        )

    # the step itself

    def schedule(self, step):
        """Call ``schedule`` as the engine core would and let the model begin on what it says.

        Returns the ``SchedulerOutput`` and the ``GrammarOutput`` of the step.
        """
        keywords = {"throttle_prefills": True} if step.throttle and harness.takes_throttle() else {}
        output = self.scheduler.schedule(**keywords)
        self.in_flight.append((output, self._sample(output)))
        return output, self.scheduler.get_grammar_bitmask(output)

    def _sample(self, output):
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            tokens = []
            if not request.is_prefill_chunk:
                at = request.num_tokens + request.num_output_placeholders
                drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
                accepted = self.mix("accept", request_id, at) % (len(drafts) + 1)
                tokens = [3 + self.mix("token", request_id, at, i) % 500 for i in range(accepted + 1)]
            sampled[request_id] = tokens
        return sampled

    def answer(self, number):
        """Give the oldest step in flight its answer, once the model may have it.

        With asynchronous scheduling that is one step late, as with upstream's batch queue of two.
        """
        late = 1 if self.trace.shape.asynchronous else 0
        if len(self.in_flight) <= late:
            return None
        output, sampled = self.in_flight.popleft()
        result = self.scheduler.update_from_output(output, self._model_output(number, output, sampled))
        if self.trace.shape.spec_tokens and not late:
            self._draft(sampled)
        self.own_count = harness.admission_count(self.scheduler)
        return result

    def _model_output(self, number, output, sampled):
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        transfers = None
        metadata = output.kv_connector_metadata
        if metadata is not None:
            for request_id, wish, *_ in metadata.loads:
                if wish == "async":
                    self.loads[request_id] = number + self.mix("load", request_id) % 4
            for request_id, _, kept in metadata.finished:
                if kept:
                    self.sends[request_id] = number + self.mix("send", request_id) % 6
            received = {name for name, at in self.loads.items() if at <= number}
            failed = {block for name in sorted(received) for block in self._failed_blocks(name)}
            sent = {name for name, at in self.sends.items() if at <= number}
            for done, waiting in ((received, self.loads), (sent, self.sends)):
                for name in done:
                    del waiting[name]
            self.seen["remote loads finished"] += len(received)
            self.seen["sends finished"] += len(sent)
            if received or sent:
                transfers = KVConnectorOutput(
                    finished_recving=received or None, finished_sending=sent or None, invalid_block_ids=failed
                )
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[list(sampled[name]) for name in ids],
            kv_connector_output=transfers,
        )

    def _failed_blocks(self, request_id):
        """The block of a load that did not arrive whole; mostly none."""
        from vllm.v1.request import RequestStatus

        request = self.scheduler.requests[request_id]
        if self.mix("load fails", request_id) % 4 or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return []
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        self.seen[f"remote loads failed: {self.trace.shape.load_failure}"] += 1
        return [blocks[request.num_computed_tokens // BLOCK - 1]]

    def _draft(self, sampled):
        from vllm.v1.outputs import DraftTokenIds

        ids = [name for name, tokens in sampled.items() if tokens]
        drafts = []
        for name in ids:
            request = self.scheduler.requests.get(name)
            at = request.num_tokens if request is not None else 0
            length = self.mix("drafts", name, at) % (self.trace.shape.spec_tokens + 1)
            drafts.append([3 + self.mix("draft", name, at, i) % 500 for i in range(length)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    # what the trace really did

    def observe(self, counts, step, output, grammar, before):
        """Count what this step exercised. ``before`` is the state it started from."""
        from vllm.v1.request import RequestStatus

        scheduler, seen, shape = self.scheduler, self.seen, self.trace.shape
        running = [request for request in scheduler.running if request.request_id in before["running"]]
        frozen = max(counts) >= shape.cap
        waits = before["waiting"] > 0
        pause = scheduler.pause_state.name
        free = pause == RUNNING_FREE
        preempted = bool(output.preempted_req_ids)
        admitted = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        statuses = Counter(request.status for request in scheduler.requests.values())
        skipped = getattr(scheduler, "deferred_waiting", None)
        skipped = scheduler.skipped_waiting if skipped is None else skipped
        adapters = {r.lora_request.lora_int_id for r in scheduler.running if r.lora_request}

        seen["steps"] += 1
        seen[f"steps: {shape.policy}"] += 1
        seen["admissions"] += admitted
        seen["frozen steps"] += frozen
        seen["frozen steps with waiting requests and room"] += (
            frozen and waits and free and not preempted and before["count"] < shape.cap
        )
        seen["frozen by this rank alone"] += frozen and max(step.others) < shape.cap and before["count"] < shape.cap
        seen["frozen steps that scheduled running requests"] += frozen and bool(output.num_scheduled_tokens)
        seen["steps with a rank one below the cap and admissions"] += max(counts) == shape.cap - 1 and admitted > 0
        seen["empty waiting, frozen"] += frozen and not waits
        seen["empty waiting, not frozen"] += not frozen and not waits
        seen["preemptions"] += len(output.preempted_req_ids or ())
        seen["preemptions: fcfs"] += len(output.preempted_req_ids or ()) if shape.policy == "fcfs" else 0
        seen["preemptions: priority"] += len(output.preempted_req_ids or ()) if shape.policy == "priority" else 0
        seen["preemptions in a frozen step"] += frozen and preempted
        seen["resumed requests"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        seen["speculative tokens"] += sum(len(t) for t in output.scheduled_spec_decode_tokens.values())
        seen["speculative tokens in a frozen step"] += frozen and bool(output.scheduled_spec_decode_tokens)
        seen["encoder inputs"] += len(output.scheduled_encoder_inputs)
        seen["lora skips"] += sum(
            1
            for request in skipped
            if adapters
            and request.lora_request
            and request.lora_request.lora_int_id not in adapters
            and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        )
        seen["prefix cache hits"] += sum(
            1 for new in output.scheduled_new_reqs if new.num_computed_tokens > 0 and not shape.connector
        )
        seen["grammar waits"] += statuses[RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR]
        seen["grammar bitmasks"] += grammar is not None
        seen["blocks to clear"] += len(output.new_block_ids_to_zero or ())
        seen["window groups"] += shape.window and admitted > 0
        seen["structured output steps"] += output.has_structured_output_requests
        seen["remote load waits"] += statuses[RequestStatus.WAITING_FOR_REMOTE_KVS]
        seen["remote loads ready in a frozen step"] += frozen and bool(scheduler.finished_recving_kv_req_ids)
        seen["paused sessions"] += scheduler.num_waiting_for_streaming_input
        seen["paused: new, with waiting requests"] += pause == RUNNING_PAUSED_NEW and waits
        seen["paused: all, with running requests"] += pause == RUNNING_PAUSED_ALL and bool(running)
        seen["paused: new, frozen"] += pause == RUNNING_PAUSED_NEW and frozen
        seen["throttled steps"] += step.throttle and harness.takes_throttle()
        seen["prefills deferred by the throttle"] += (
            step.throttle
            and harness.takes_throttle()
            and pause != RUNNING_PAUSED_ALL
            and any(r.is_prefill_chunk and r.request_id not in output.num_scheduled_tokens for r in running)
        )
        seen["async placeholders"] += shape.asynchronous and any(
            request.num_output_placeholders > 0 for request in scheduler.running
        )
        seen["async frozen steps"] += shape.asynchronous and frozen
        seen["second model runner"] += shape.v2_runner and admitted > 0
        seen["cap below the running limit, frozen"] += shape.cap < shape.seqs and frozen and waits
        metadata = output.kv_connector_metadata
        if metadata is not None:
            seen["connector metadata"] += 1
            seen["remote loads"] += sum(wish == "async" for _, wish, *_ in metadata.loads)
            seen["loads in the step"] += sum(wish == "sync" for _, wish, *_ in metadata.loads)
            seen["undecided connector"] += sum(answer == (None, False) for *_, answer in metadata.asked)


def standing(scheduler):
    """What a coverage counter needs to know of the moment before ``schedule``."""
    return {
        "running": {request.request_id for request in scheduler.running},
        "waiting": scheduler.get_request_counts()[1],
        "count": harness.admission_count(scheduler),
    }


# -- the oracle ---------------------------------------------------------------------------------


def oracle_class(base):
    """Upstream's ``base`` whose own admission cap is lowered, in a frozen step, to what it has.

    The gate admits nobody from WAITING while some rank is at the cap. Upstream admits nobody while
    its own count is at its cap. So for one call of ``schedule`` the cap is set to the count, and
    all code that runs is upstream's.
    """
    cap = harness.cap_attribute()

    class Oracle(base):
        counts = ()

        def schedule(self, *args, **keywords):
            allowed = getattr(self, cap)
            if max(self.counts, default=0) != allowed:
                return super().schedule(*args, **keywords)
            setattr(self, cap, harness.admission_count(self))
            try:
                return super().schedule(*args, **keywords)
            finally:
                setattr(self, cap, allowed)

    return Oracle


def tell_oracle(scheduler, counts):
    """The oracle's side of ``harness.set_counts``."""
    scheduler.counts = tuple(counts)


def ignore_counts(scheduler, counts):
    """For a scheduler that has no counts: upstream's, or ours when disabled."""


# -- two schedulers in step ---------------------------------------------------------------------


def compare(trace, subject, oracle, *, coverage=None, without=frozenset()):
    """Drive two worlds through ``trace``; the first difference as text, or ``None``.

    Compared after every step: the whole ``SchedulerOutput`` and ``GrammarOutput``, the state of the
    scheduler after ``schedule``, what ``update_from_output`` returned, and the state after that.
    ``without`` names attributes of the scheduler that are left out of its state.
    """
    # What both have is upstream's; what only one has was added by its class.
    both = [set(harness.state_names(world.scheduler)) for world in (subject, oracle)]
    names = sorted(set.intersection(*both) - without)
    for number, step in enumerate(trace.steps):
        subject.before(number, step)
        counts = oracle.before(number, step)
        before = standing(oracle.scheduler)
        with _named(trace, number):
            outputs, grammars = zip(*(world.schedule(step) for world in (subject, oracle)), strict=True)
        oracle.observe(counts, step, outputs[1], grammars[1], before)
        # Before the answer, which goes on to change the objects that the output refers to.
        found = _difference("SchedulerOutput", *outputs) or _difference("GrammarOutput", *grammars)
        found = found or _state_difference("schedule", names, subject, oracle)
        if found is None:
            with _named(trace, number):
                answers = [world.answer(number) for world in (subject, oracle)]
            found = _difference("EngineCoreOutputs", *answers)
            found = found or _state_difference("update_from_output", names, subject, oracle)
        if found is not None:
            return f"seed {trace.seed} step {number} counts {counts} {found} in {trace.shape}"
    if coverage is not None:
        coverage.update(oracle.seen)
    return None


@contextlib.contextmanager
def _named(trace, number):
    """Name the seed and the step of what is raised inside."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"seed {trace.seed} step {number} raised {error!r} in {trace.shape}") from error


def _difference(what, subject, oracle):
    found = harness.first_difference(harness.plain(subject), harness.plain(oracle))
    return None if found is None else f"{what} {found} (ours / expected)"


def _state_difference(when, names, subject, oracle):
    found = harness.first_difference(*(harness.state(world.scheduler, names) for world in (subject, oracle)))
    return None if found is None else f"after {when} {found} (ours / expected)"


def against_oracle(seed, class_, async_class, *, coverage=None):
    """The first difference between ``class_``, enabled, and the oracle on the trace of ``seed``."""
    script = trace(seed)
    base = harness.async_scheduler() if script.shape.asynchronous else harness.upstream_scheduler()
    config = harness.enabled_config(script.shape)
    subject = harness.new_scheduler(async_class if script.shape.asynchronous else class_, script.shape, config)
    oracle = harness.new_scheduler(oracle_class(base), script.shape, config)
    worlds = World(subject, script, harness.set_counts), World(oracle, script, tell_oracle)
    return compare(script, *worlds, coverage=coverage)
