"""Settings of drives that several test modules look at: the engines that they start are started once."""

# Several times as fast to start as spawn, and so the way for everything that the start method does not matter to.
FORK = {"ENGINE_START": "fork"}
#: The counter of the NPU check runs with them, on the CPU's memory: the engines are as they are anyway.
FORK_READS = {**FORK, "ENGINE_READS": "count"}
#: Closed bursts, at the end of a drive: what the simulator is held against. The same requests in each.
CLOSED = {"closed": 4}
FORKED = {"bursts": 15, "seed": 7, **CLOSED}
OFF = {"bursts": 3, "seed": 0, "balance": False, **CLOSED}
ENDS = 34  # more than the steps from one synchronisation of the ranks to the next (32 on one lane, 16 on the other)
ASYNC = {"ends": ENDS, "bursts": 20, "seed": 5, "asynchronous": True, **CLOSED}
CAP = 4
