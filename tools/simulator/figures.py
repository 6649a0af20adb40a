"""What a simulation says, in a line of figures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from balance_patcher.demo.figures import mean, percentile

from .events import Run


@dataclass(frozen=True)
class Figures:
    """One line of the summary; seconds, unless it says otherwise.

    Attributes:
        throughput: Output tokens a second, from the first request to the last token.
        ttft_50: Time from sending to the first token: percentiles.
        tpot_50: Time from each token to the next, the mean of a request: percentiles over requests.
        imbalance: How many more requests the fullest rank runs than the emptiest: the mean over time.
        frozen_steps: Steps in which the gate stopped a rank that had room and requests waiting.
        frozen_share: Their share of the time.
        prefill_share: The share of the time in which all ranks waited for somebody's prompt.
        at_cap_share: The share of the time in which some rank was at its cap.
        cpu: Seconds of the simulating process.
        memory: Its largest size, in MB.
        vllm: The version of vLLM whose schedulers these were.
    """

    ranks: int
    gate: str
    requests: int
    output_tokens: int
    seconds: float
    throughput: float
    ttft_mean: float
    ttft_50: float
    ttft_90: float
    ttft_99: float
    tpot_mean: float
    tpot_50: float
    tpot_90: float
    tpot_99: float
    imbalance: float
    steps: int
    frozen_steps: int
    frozen_share: float
    prefill_share: float
    at_cap_share: float
    preemptions: int
    calls: int
    cpu: float
    memory: int
    vllm: str


NAMES = tuple(one.name for one in fields(Figures))


def figures(gate: str, run: Run, memory: int, vllm: str) -> Figures:
    """The figures of one simulation.

    Args:
        gate: How ranks admitted.
        run: What happened.
        memory: The largest size of the process, in MB.
        vllm: The version of vLLM.
    """
    first = [got - sent for got, sent in zip(run.first, run.sent, strict=True)]
    rows = zip(run.finish, run.first, run.tokens, strict=True)
    token = [(last - got) / (tokens - 1) for last, got, tokens in rows if tokens > 1]
    length = max(run.finish) - run.sent[0]
    busy = sum(run.seconds)

    def share(column: Sequence[bool]) -> float:
        return sum(itertools.compress(run.seconds, column)) / busy

    apart = [max(counts) - min(counts) for counts in map(run.counts, range(len(run.end)))]
    return Figures(
        ranks=run.ranks,
        gate=gate,
        requests=len(run.rank),
        output_tokens=sum(run.tokens),
        seconds=length,
        throughput=sum(run.tokens) / length,
        ttft_mean=mean(first),
        ttft_50=percentile(first, 0.5),
        ttft_90=percentile(first, 0.9),
        ttft_99=percentile(first, 0.99),
        tpot_mean=mean(token),
        tpot_50=percentile(token, 0.5),
        tpot_90=percentile(token, 0.9),
        tpot_99=percentile(token, 0.99),
        imbalance=sum(x * seconds for x, seconds in zip(apart, run.seconds, strict=True)) / busy,
        steps=len(run.end),
        frozen_steps=sum(count > 0 for count in run.frozen),
        frozen_share=share([count > 0 for count in run.frozen]),
        prefill_share=share([count > 0 for count in run.prefill]),
        at_cap_share=share([count >= run.cap for count in run.leader]),
        preemptions=sum(run.preempted),
        calls=run.calls,
        cpu=run.cpu,
        memory=memory,
        vllm=vllm,
    )
