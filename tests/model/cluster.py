"""All ranks, their process groups, the coordinator and a front-end: one state, and what may happen next.

A move takes one process from where it waits to where it waits next, as one step. That loses nothing. In a
move a process first reads what others have sent and then sends itself, and a message may be on its way for any
time; so whatever another process does in between might as well be done before or after (Lipton's reduction).
For that a rank stops at the top of its loop, and after a request has made it send, before it reads again.
"""

from __future__ import annotations

from tests.model.rank import READS, Rank, freeze

MODES = ("keep", "wait", "abort")


class Cluster:
    """A state, thawed for one move.

    Attributes:
        words: What the front-end has told the coordinator (``FIRST_REQ``), not yet read.
        news: What the coordinator has published, not yet read: its wave, and whether the engines run.
        view: What the front-end believes of the two, and whether it has itself asked for a wave since.
        wave, running: What the coordinator believes.
        left: How many requests, aborts, pauses and faults may still come.
        phase: Of a pause: "", "pausing", "paused" or "resuming". ``answers``: how many ranks have answered.
        torn: Whether a rank has raised: no collective ends until they recover.
        error: What went wrong in the move, so that nothing follows it.
        miscount: The rank that has made a step without its one gather.
        notes: The story of the move.
    """

    def __init__(self, setup, state, script=()):
        self.setup, self.script, self.picked, self.forks = setup, script, 0, []
        self.error, self.miscount, self.notes = "", "", []
        (
            ranks, self.words, self.news, self.view, self.wave, self.running,
            left, self.phase, self.answers, self.torn,
        ) = state  # fmt: skip
        self.ranks = [Rank(rank) for rank in ranks]
        self.left = list(left)

    @staticmethod
    def start(setup):
        ranks = tuple(Rank.idle(number, setup.generation) for number in range(setup.ranks))
        return ranks, (), (), (0, 0, 0), 0, 0, setup.events, "", 0, 0

    def freeze(self):
        if self.left[0] == 0:  # What the front-end believes bears on requests only.
            self.view, self.news = (0, 0, 0), ()
        ranks, words = list(map(freeze, self.ranks)), self.words
        if self.setup.reduced and len(ranks) > 2:
            # Only rank 0 is special, so the others may change their numbers: any order will do that is always the same.
            marks = [(rank[1:], tuple([who == number for who, _ in words])) for number, rank in enumerate(ranks)]
            order = [0, *sorted(range(1, len(ranks)), key=lambda number: hash(marks[number]))]
            words = tuple((order.index(number), wave) for number, wave in words)
            ranks = [(new, *ranks[old][1:]) for new, old in enumerate(order)]
        return (
            tuple(ranks), words, self.news, self.view, self.wave, self.running,
            tuple(self.left), self.phase, self.answers, self.torn,
        )  # fmt: skip

    def pick(self, count):
        """One of so many ways to go on: the first. The others are kept in ``forks``, as scripts to replay."""
        at, self.picked = self.picked, self.picked + 1
        if at == len(self.script):
            self.forks += [(*self.script, other) for other in range(1, count)]
            self.script = (*self.script, 0)
        return self.script[at]

    def note(self, who, text):
        """One sentence of the story; ``who`` is a rank, or has a name."""
        self.notes.append((who if isinstance(who, str) else f"rank {who.number}", text))

    # -- what a rank does to others ----------------------------------------------------------------

    def receive(self, rank):
        """The next message to a rank. The front-end's are in order, and the coordinator's."""
        if rank.mail and (not rank.calls or self.pick(2) == 0):
            message, rank.mail = rank.mail[0], rank.mail[1:]
        else:
            message, rank.calls = rank.calls[0], rank.calls[1:]
        return message

    def tell(self, rank, what, wave):
        rank.out += ((what, wave),)

    def answer(self):
        """A rank has done what it was told: the future of its pause or resume resolves."""
        self.answers += 1
        if self.answers == len(self.ranks):
            self.answers, self.phase = 0, {"pausing": "paused", "resuming": ""}[self.phase]

    # -- collectives -------------------------------------------------------------------------------

    def settle(self):
        """End the forward passes that all ranks have begun, and the collective that all are in.

        A rank cannot leave a collective before all have entered it. So the ranks inside are each at the
        same call, counted on that group, and those calls must be of one kind.
        """
        ranks = self.ranks
        if all([rank.ahead for rank in ranks]):  # noqa: C419 - a list is quicker, here where the time goes
            for rank in ranks:
                rank.ahead -= 1
                rank.queue = tuple(batch and (max(0, batch[0] - 1), batch[1]) for batch in rank.queue)
                if rank.at == "forward":
                    rank.value -= 1
                    if not rank.value:
                        rank.wait("ready", rank.then)
            return self.settle()
        if all([rank.gathers for rank in ranks]):  # noqa: C419
            for rank in ranks:
                rank.gathers -= 1
        inside = [rank for rank in ranks if rank.at == "group"]
        if len({rank.kind for rank in inside}) > 1:
            self.error = " and ".join(f"the {rank.kind} of rank {rank.number}" for rank in inside) + " meet"
        elif len(inside) == len(ranks):
            firsts, seconds = zip(*[rank.value for rank in inside], strict=True)
            for rank in inside:
                value = (any(firsts), sum(seconds)) if rank.kind == "sync" else (rank.value[0], int(any(seconds)))
                rank.wait("ready", rank.then, value=value)
        return None

    # -- the coordinator ---------------------------------------------------------------------------

    def hear_front_end(self):
        (number, wave), self.words = self.words[0], self.words[1:]
        if self.running:
            return
        self.start_wave(self.wave, None if wave < self.wave else number)
        if self.setup.generation == "eager":
            self.running = 1
            self.publish()

    def hear(self, rank):
        (what, wave), rank.out = rank.out[0], rank.out[1:]
        if what == "complete":
            if self.wave <= wave:
                self.wave, self.running = wave + 1, 0
                self.publish()
        elif wave > self.wave or (wave == self.wave and not self.running):
            self.wave, self.running = wave, 1
            self.publish()
            self.start_wave(wave, rank.number)

    def start_wave(self, wave, excluded):
        if self.setup.broken == "start":
            return
        self.note("coordinator", f"starts wave {wave} on all ranks" + ("" if excluded is None else f" but {excluded}"))
        for rank in self.ranks:
            rank.calls += (("start", wave, rank.number == excluded),)

    def publish(self):
        self.news += ((self.wave, self.running),)

    # -- from outside ------------------------------------------------------------------------------

    def request(self, rank):
        """``add_request_async``, after any part of the news was read."""
        self.left[0] -= 1
        read = self.pick(len(self.news) + 1)
        if read:
            self.view, self.news = (*self.news[read - 1], 0), self.news[read:]
        elif self.view[2] and self.pick(2) == 1:  # The coordinator repeats its news now and then.
            self.view = (*self.view[:2], 0)
        wave, running, asked = self.view
        rank.mail += (("add", wave),)
        self.note("front-end", f"sends rank {rank.number} a request of wave {wave}")
        if not (running or asked or self.setup.generation == "engines"):
            self.words += ((rank.number, wave),)
            self.view = (wave, 0, 1)

    def abort(self, rank):
        self.left[1] -= 1
        rank.mail += (("abort",),)
        self.note("front-end", f"aborts what rank {rank.number} has")

    def pause(self):
        self.left[2] -= 1
        self.send_all("pausing", "pause", MODES[self.pick(len(MODES))])

    def resume(self):
        self.send_all("resuming", "resume")

    def send_all(self, phase, *message):
        self.phase = phase
        self.note("front-end", f"tells all ranks to {' '.join(message)}")
        for rank in self.ranks:
            rank.mail += (message,)

    def fault(self, rank):
        self.left[3] -= 1
        self.torn = 1
        rank.fail(self)

    def recover(self):
        self.torn = 0
        self.note("front-end", "tells all ranks to recover")
        for rank in self.ranks:
            rank.recover()

    # -- what may happen ---------------------------------------------------------------------------

    def moves(self):
        """Each as (whether it comes from outside, the method, the number of the rank or None).

        A rank may raise while it waits in a collective, unless that is the one of a resume, where upstream
        answers instead, or a pause is under way. The others raise in the collectives that they wait in then.
        """
        requests, aborts, pauses, faults = self.left
        for number, rank in enumerate(self.ranks):
            if rank.at == "ready" or (rank.at == "input" and (rank.mail or rank.calls)):
                yield False, Rank.go_on, number
            if rank.out:
                yield False, Cluster.hear, number
            if rank.at in ("forward", "group") and not self.phase:
                if self.torn:
                    yield False, Rank.fail, number
                elif faults:
                    yield True, Cluster.fault, number
            if requests:
                yield True, Cluster.request, number
            if aborts:
                yield True, Cluster.abort, number
        if self.words:
            yield False, Cluster.hear_front_end, None
        if self.torn and all(rank.at == "failed" for rank in self.ranks):
            yield False, Cluster.recover, None
        if pauses and not self.phase and not self.torn:
            yield True, Cluster.pause, None
        if self.phase == "paused":
            yield True, Cluster.resume, None

    def make(self, move, number):
        if number is None:
            move(self)
        elif move in (Rank.go_on, Rank.fail):
            move(self.ranks[number], self)
        else:
            move(self, self.ranks[number])
        self.settle()
        self.run_on()
        for rank in self.ranks:
            rank.forget()

    def run_on(self):
        """Do at once what a rank does without reading, for nothing can keep it from it or change what it does.

        In every order of moves such a one can be put first, with the same end. So what can be reached from
        here, and whether rest can, stays as it is. A fault could forestall it: then nothing is done at once.
        """
        while self.setup.reduced and not (self.error or self.torn or self.left[3]):
            for rank in self.ranks:
                if rank.at == "ready" and rank.then not in READS:
                    rank.go_on(self)
                    self.settle()
                    break
            else:
                return

    def uneven(self):
        """Whether one rank has gathered more often than another."""
        return any(rank.gathers for rank in self.ranks)

    def stale(self):
        """Whether a gate is closed by counts that are no longer true, so that the next wave begins frozen."""
        return any(rank.frozen for rank in self.ranks) and not any(rank.active for rank in self.ranks)

    def at_rest(self):
        """All ranks are idle, nothing is on its way, and no request waits, unless for the end of a pause."""
        return (
            self.phase in ("", "paused")
            and not self.words
            and all(rank.at == "input" and not (rank.mail or rank.calls or rank.out) for rank in self.ranks)
            and (self.phase == "paused" or not any(rank.waiting or rank.active for rank in self.ranks))
        )
