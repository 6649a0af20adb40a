"""The bench runs on this lane: real schedulers, a real installation, real ranks; a few rounds of each."""

import io

import harness
import pytest
from rich.console import Console
from vllm.v1.request import RequestStatus

from balance_patcher.installation import uninstall
from tools.measuring import gathering, installing, scheduling, table
from tools.measuring.results import Results
from tools.measuring.stages import REST, Stages

FACTS = {"cpu": "x", "cores": 2, "python": "3", "commit": "0" * 40, "changed": False, "load before": 0.0, "lanes": {}}


@pytest.fixture(autouse=True)
def clean():
    yield
    uninstall("balance")


def quiet(_):
    pass


@pytest.fixture
def few(monkeypatch):
    """Few rounds of few steps."""
    for module, name, value in (
        (scheduling, "RANKS", (64,)), (scheduling, "ADMISSIONS", (1, 128)), (scheduling, "ROUNDS", 3),
        (scheduling, "LIVES", 1), (scheduling, "OF_TARGET", 2),
        (gathering, "RANKS", (2,)), (gathering, "ROUNDS", 50), (gathering, "WARM_UP", 10),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def test_every_part_gives_rows_that_can_be_printed_and_written(few):
    rows = [
        *scheduling.measure("here", quiet),
        *gathering.measure("here", quiet),
        *installing.rows("here", "balance", [installing.install_once(1, ["balance"])]),
    ]
    assert all(one.value is not None and one.low <= one.value <= one.high for one in rows)
    limits = [one.limit for one in rows if one.limit is not None]
    assert limits == [64, 1.01, 1.02, 64, 1.15, 40.0]
    assert [one.value for one in rows if one.what.endswith("counts read")] == [64, 64]
    results = Results(FACTS, rows)
    assert Results.of(results.text()).rows == rows
    out = io.StringIO()
    table.show(results, Console(file=out, width=150))
    assert "balance, fresh process" in out.getvalue()
    assert "64 ranks, 128 admissions: on / upstream" in out.getvalue()


def test_every_stage_is_found_and_takes_time():
    """A function that was renamed would be counted with its caller, and nobody would see it."""
    from balance_patcher.installation import install

    with Stages() as stages:
        install("balance")
    assert stages.missing == []
    assert {name for name, took in stages.times.items() if took <= 0} == {REST}


def test_the_naive_gate_reads_the_counts_at_each_turn_of_the_loop(balance_class):
    naive = scheduling._classes()[scheduling.NAIVE]
    shape = harness.Shape(seqs=8, tokens=256, ranks=3)

    class Counted(list):
        reads = 0

        def __iter__(self):
            Counted.reads += 1
            return super().__iter__()

    reads = {}
    for class_ in (balance_class, naive):
        scheduler = harness.new_scheduler(class_, shape, harness.enabled_config(shape))
        scheduler.balance_queue = Counted(scheduler.balance_queue)
        Counted.reads = 0
        for number in range(5):
            scheduler.add_request(harness.new_request(str(number), 8, 4))
        scheduler.schedule()
        assert len(scheduler.running) == 5
        reads[class_] = Counted.reads
        # Both are gates: with a rank at its cap neither admits.
        harness.set_counts(scheduler, [0, harness.admission_cap(scheduler), 0])
        scheduler.add_request(harness.new_request("late", 8, 4))
        scheduler.schedule()
        assert len(scheduler.running) == 5
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    assert reads == {balance_class: 1, naive: 5}
