"""Paused streaming sessions: what upstream's stop counts is what the gather sends.

A declared deviation from the verbatim copy, which counts ``len(running)`` on every release.
"""

import harness
import traces
from harness import Shape

SHAPE = Shape(seqs=2, ranks=2, tokens=256)
TRACE = traces.Trace(0, SHAPE, [])


def step(scheduler, counts=(0, 0)):
    harness.set_counts(scheduler, counts)
    world = traces.World(scheduler, TRACE, traces.ignore_counts)
    output, _ = world.schedule(traces.Step())
    world.answer(0)
    return output


def with_paused_sessions(class_, number):
    """An enabled scheduler whose ``number`` streaming sessions wait for input."""
    scheduler = harness.new_scheduler(class_, SHAPE, harness.enabled_config(SHAPE))
    for name in range(number):
        scheduler.add_request(harness.new_request(f"s{name}", 10, 1, resumable=True))
    step(scheduler)
    assert scheduler.num_waiting_for_streaming_input == number
    assert scheduler.running == []
    return scheduler


def test_the_count_is_what_upstreams_stop_counts(balance_class):
    scheduler = with_paused_sessions(balance_class, 1)
    scheduler.add_request(harness.new_request("r0", 10, 9))
    step(scheduler)
    assert len(scheduler.running) == 1
    assert scheduler._balance_count() == (2 if harness.counts_paused_sessions() else 1)


def test_a_rank_full_of_paused_sessions_is_at_the_cap_where_upstream_says_so(balance_class):
    scheduler = with_paused_sessions(balance_class, SHAPE.cap)
    scheduler.add_request(harness.new_request("r0", 10, 9))
    full = scheduler._balance_count() == SHAPE.cap
    assert full is harness.counts_paused_sessions()
    # Upstream's own stop agrees, with no rank at the cap: it admits exactly where the count says so.
    assert bool(step(scheduler).scheduled_new_reqs) is not full


def test_a_session_that_gets_input_is_resumed_unless_frozen(balance_class):
    scheduler = with_paused_sessions(balance_class, 1)
    scheduler.add_request(harness.new_request("s0", 5, 3, resumable=True))
    assert scheduler.num_waiting_for_streaming_input == 0
    assert step(scheduler, (0, SHAPE.cap)).total_num_scheduled_tokens == 0
    assert list(step(scheduler, (0, 0)).num_scheduled_tokens) == ["s0"]


def test_without_paused_sessions_the_count_is_the_number_running(balance_class):
    scheduler = harness.new_scheduler(balance_class, SHAPE, harness.enabled_config(SHAPE))
    for number in range(3):
        assert scheduler._balance_count() == len(scheduler.running) == min(number, SHAPE.cap)
        scheduler.add_request(harness.new_request(f"r{number}", 10, 9))
        step(scheduler)
