"""The simulator and real engine cores on the same trace, step for step.

The trace is a closed burst: every request of a wave is there before its first step, on the rank that it is for. Then
how many run on each rank after each step, who is admitted when, and when the gate freezes a rank is settled by the
requests, and by nothing that depends on the machine. So there is no tolerance: not one step may differ.

How long a step takes is another matter, and no part of this: two engine cores share two cores with whoever works there.
The README has figures of an idle machine.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from statistics import mean

import pytest

# Found on the path that conftest.py sets.
from processes import ROOT, surroundings
from settings import ASYNC, CAP, CLOSED, FORK_READS, FORKED, OFF

from tools.simulator import steptime

#: A drive of real engine cores, and what the simulator is asked: its gate, whether it is asynchronous, its cap.
DRIVES = {
    "off": ((OFF, FORK_READS), ("off", False, CAP)),
    "on": ((FORKED, FORK_READS), ("on", False, CAP)),
    "on, asynchronous": ((ASYNC, None), ("on", True, CAP)),
}
#: What a simulator with a mistake in it would be: for the drive with the gate on.
WRONG = {
    "no gate": ("off", False, CAP),
    "ranks that catch up": ("catch-up", False, CAP),
    "one less": ("on", False, CAP - 1),
    "one more": ("on", False, CAP + 1),
    "one step ahead": ("on", True, CAP),
}

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def simulated():
    """The steps of each closed wave, as the simulator says, by what it is asked."""
    asked = [*(one for _, one in DRIVES.values()), *WRONG.values()]
    places = [ROOT, ROOT / "tests" / "engine"]
    command = [sys.executable, str(ROOT / "tests" / "engine" / "simulated.py"), json.dumps(asked)]
    done = subprocess.run(
        command, env=surroundings(places), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def real(engines):
    """The steps of each closed wave, as the engine cores recorded them, by the name of a drive."""

    def get(name):
        run = engines(*DRIVES[name][0])
        assert run.result.get("ok"), run.log[-4000:]
        return [[told(row) for row in wave] for wave in waves_of(run)]

    return get


def waves_of(run):
    """The rows of both ranks for each step of the closed waves, up to the last step with something to do."""
    columns = []
    for rank in range(2):
        with (run.folder / f"steps-{rank}.csv").open(newline="") as file:
            columns.append(list(csv.DictReader(file)))
    rows = list(zip(*columns, strict=True))
    waves = []
    for number in sorted({int(row[0]["wave"]) for row in rows})[-CLOSED["closed"] :]:
        wave = [row for row in rows if int(row[0]["wave"]) == number]
        while told(wave[-1]) == IDLE and told(wave[-2])[0] == [0, 0]:
            wave.pop()  # the ranks go on until they notice together that there is nothing left
        waves.append(wave)
    return waves


IDLE = [[0, 0], 0, 0, 0]


def told(row):
    """What both can say of a step: requests running on each rank at its end, prompt tokens, admitted, frozen ranks."""
    sums = [sum(int(one[name]) for one in row) for name in ("prefill_tokens", "admitted", "frozen")]
    return [[int(one["running"]) for one in row], *sums]


class TestSteps:
    @pytest.mark.parametrize("name", DRIVES)
    def test_not_one_step_differs(self, real, simulated, name):
        for wave, steps in enumerate(real(name)):
            assert simulated[DRIVES[name][1]][wave] == steps, f"wave {wave}"

    @pytest.mark.parametrize("name", WRONG)
    def test_a_simulator_with_a_mistake_in_it_differs_in_every_wave(self, real, simulated, name):
        for wave, steps in enumerate(real("on")):
            assert simulated[WRONG[name]][wave] != steps, f"wave {wave}"

    def test_the_gate_freezes_in_every_wave_and_only_when_it_is_on(self, real):
        assert all(any(frozen for *_, frozen in wave) for name in ("on", "on, asynchronous") for wave in real(name))
        assert not any(frozen for wave in real("off") for *_, frozen in wave)


class TestOrder:
    """What the gate does and what it costs, on both sides: the variants come in the same order."""

    @staticmethod
    def figures(waves):
        """Steps in which somebody prefills, mean step of an admission, steps: over all waves."""
        prefills = sum(prefill > 0 for wave in waves for _, prefill, *_ in wave)
        admitted = [step for wave in waves for step, (_, _, count, _) in enumerate(wave) for _ in range(count)]
        return prefills, mean(admitted), sum(map(len, waves))

    def test_the_gate_spares_steps_with_a_prompt_and_costs_waiting(self, real, simulated):
        for get in (real, lambda name: simulated[DRIVES[name][1]]):
            off, on = self.figures(get("off")), self.figures(get("on"))
            assert on[0] < off[0]
            assert on[1] > off[1]
            assert on[2] >= off[2]


class TestRecorder:
    @pytest.mark.parametrize("name", DRIVES)
    def test_a_fit_takes_what_was_recorded(self, engines, name):
        run = engines(*DRIVES[name][0])
        found = steptime.fit(*(run.folder / f"steps-{rank}.csv" for rank in range(2)))
        computed = [
            sum(prefill + sum(running) > 0 for running, prefill, *_ in map(told, wave)) for wave in waves_of(run)
        ]
        assert found.steps >= sum(computed)
        assert found.model.of(0, 1) > 0
