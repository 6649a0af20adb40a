"""A stand-in for a lane's scheduler: first come, first served, whole prompts, and the gate of the contract."""

from collections import deque

from tools.simulator.events import Answered, Work


class StandInRank:
    def __init__(self, cap, gate):
        self.cap, self.gate = cap, gate
        self.queue, self.runs, self.fresh = deque(), {}, []
        self.most = 0

    @property
    def count(self):
        return len(self.runs)

    @property
    def waiting(self):
        return len(self.queue)

    def add(self, number, arrival):
        self.queue.append((number, arrival))

    def step(self):
        decode, prefill, self.fresh = len(self.runs), 0, []
        while self.queue and len(self.runs) < self.cap and not self.gate.shut(self.cap):
            number, arrival = self.queue.popleft()
            prefill += arrival.prompt
            self.runs[number] = [0, arrival.output]
            self.fresh.append(number)
        self.most = max(self.most, len(self.runs))
        return Work(prefill, decode, len(self.fresh), 0)

    def answer(self):
        ended = []
        for number, run in list(self.runs.items()):
            run[0] += 1
            if run[0] == run[1]:
                del self.runs[number]
                ended.append((number, run[0]))
        return Answered(self.fresh, ended)


class StandInGate:
    def __init__(self, *, freezes):
        self.freezes = freezes
        self.counts = [0]
        self.seen = []

    def gathered(self, counts):
        self.counts = list(counts)
        self.seen.append(self.counts)

    def shut(self, cap):
        return self.freezes and max(self.counts) >= cap
