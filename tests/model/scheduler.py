"""What a rank's scheduler decides: ``vllm/v1/core/sched``, as far as the protocol asks.

What is simpler here than there, and why nothing is lost:

* At most one request runs on a rank, which is then at its cap; others wait. The protocol only asks
  whether there are unfinished requests, and the gate only whether some rank is at its cap.
* A request takes any number of steps: each output of it may be the last. Whether a waiting request is
  admitted is open as well, for memory or a transfer may be lacking.
"""

from __future__ import annotations


class Scheduler:
    """The half of a ``Rank`` that deals with requests; its state is described there."""

    def has_unfinished(self):
        return self.paused != "all" and bool(self.active or (self.waiting and not self.paused))

    def has_requests(self):
        return bool(self.finished) or self.has_unfinished()

    def has_work(self):
        return self.running or self.has_requests() or bool(self.queue)

    def disown(self):
        """The request is gone; what is in flight for it will be dropped."""
        self.queue = tuple(batch and (batch[0], 0) for batch in self.queue)

    def finish_all(self):
        self.finished = int(bool(self.finished or self.waiting or self.active))
        self.waiting = self.active = 0
        self.disown()

    def schedule(self, net):
        """Whether anything was scheduled. A request whose last token is in flight is not."""
        self.finished = 0
        if self.paused == "all":
            return False
        if self.waiting and not (self.active or self.paused):
            if self.frozen:
                net.note(self, "is frozen and admits nothing")
            elif net.pick(2) == 0:
                self.waiting, self.active = self.waiting - 1, 1
        in_flight = any(batch and batch[1] for batch in self.queue)
        return bool(self.active and (not in_flight or net.pick(2) == 0))

    def update_from_output(self, net):
        if self.active and not (net.setup.flushed and self.syncs(net, self.counter + 1)) and net.pick(2) == 0:
            self.active, self.finished = 0, 1
            self.disown()
            net.note(self, "finishes its request")
