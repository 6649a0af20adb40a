"""How long things take on a real vLLM; read the ratios in the table, not the times.

``make bench`` runs this in each lane. Every group has upstream's own work as one of its rows, so
a ratio compares two things that were measured in one run on one machine.
"""

import ast
from itertools import count
from pathlib import Path

import harness
import pytest
from vllm.v1.core.sched import scheduler as upstream_module

from balance_patcher.build import build

ROUNDS = 100
RANKS = 64


@pytest.mark.benchmark(group="install")
def test_parse_and_compile_the_module_once(benchmark):
    text = Path(upstream_module.__file__).read_text(encoding="utf-8")
    benchmark.pedantic(lambda: (ast.parse(text), compile(text, "scheduler", "exec")), rounds=20, warmup_rounds=2)


@pytest.mark.benchmark(group="install")
def test_build_the_balance_feature(benchmark):
    benchmark.pedantic(build, args=("balance",), rounds=20, warmup_rounds=2)


def made(kind, balance_class, shape):
    """A scheduler of one kind, with all counts below the cap."""
    if kind == "upstream":
        return harness.new_scheduler(harness.upstream_scheduler(), shape)
    if kind == "ours, off":
        return harness.new_scheduler(balance_class, shape)
    scheduler = harness.new_scheduler(balance_class, shape, harness.enabled_config(shape))
    harness.set_counts(scheduler, [1] * shape.ranks)
    return scheduler


def answer(scheduler, output):
    """Give a step its tokens, as a model would."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    tokens = [[7] if not scheduler.requests[name].is_prefill_chunk else [] for name in ids]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(req_ids=ids, req_id_to_index={n: i for i, n in enumerate(ids)}, sampled_token_ids=tokens),
    )


KINDS = ("upstream", "ours, off", "ours, on")


@pytest.mark.benchmark(group=f"schedule(): 64 decoding requests, {RANKS} ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step(benchmark, balance_class, kind):
    shape = harness.Shape(seqs=128, tokens=4096, blocks=6000, ranks=RANKS, log_stats=False)
    scheduler = made(kind, balance_class, shape)
    for at in range(64):
        scheduler.add_request(harness.new_request(str(at), 8, 200))
    answer(scheduler, scheduler.schedule())
    last = []

    def before():
        if last:
            answer(scheduler, last.pop())

    benchmark.pedantic(lambda: last.append(scheduler.schedule()), setup=before, rounds=ROUNDS, warmup_rounds=10)
    assert len(scheduler.running) == 64


@pytest.mark.benchmark(group=f"schedule(): 128 admissions, {RANKS} ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_many_admissions(benchmark, balance_class, kind):
    from vllm.v1.request import RequestStatus

    shape = harness.Shape(seqs=256, tokens=8192, blocks=6000, ranks=RANKS, prefix_caching=False, log_stats=False)
    scheduler = made(kind, balance_class, shape)
    numbers = count()

    def before():
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        for _ in range(128):
            scheduler.add_request(harness.new_request(str(next(numbers)), 8, 4))

    benchmark.pedantic(scheduler.schedule, setup=before, rounds=60, warmup_rounds=5)
    assert len(scheduler.running) == 128
