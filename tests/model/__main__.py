"""``make model``: the shortest deadlock of each misplaced gather, then every model of the shipped one."""

from __future__ import annotations

import sys
import time

from tests.model.matrix import EVENTS, LESSONS, REQUESTS, name
from tests.model.search import explore
from tests.model.setup import IN_SCHEDULE, IN_STEP, SCHEDULING, Setup
from tests.model.story import story, title
from tests.model.verdict import complaints

#: One is enough in ``schedule``, where the way of scheduling makes no difference.
TOLD = [
    Setup(placement, "told", scheduling, requests=1)
    for placement, scheduling in ((IN_SCHEDULE, SCHEDULING[0]), (IN_STEP, SCHEDULING[0]), (IN_STEP, SCHEDULING[1]))
]


def main() -> int:
    started, states, failed = time.monotonic(), 0, 0
    for result in map(explore, LESSONS):
        if result.setup in TOLD:
            print("\n".join([title(result), *story(result), ""]))
        failed += not result.stuck
    print("The gather after the sync:")
    for setup in [*REQUESTS, *EVENTS]:
        result = explore(setup)
        wrong = complaints(result)
        said = "; ".join(wrong) or (f"{len(result.stuck)} deadlocks, all upstream's own" if result.doomed else "none")
        print(f"  {result.states:7} states  {name(setup)}: {said}", flush=True)
        states += result.states
        failed += bool(wrong)
    print(f"{states} states in {time.monotonic() - started:.0f} s" + (f"; {failed} models failed" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
