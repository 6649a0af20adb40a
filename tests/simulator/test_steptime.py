"""The step-time model: a fit finds what made the steps, is never negative, and refuses what tells nothing."""

import random

import pytest

from balance_patcher.errors import PatchError
from tools.simulator import steptime
from tools.simulator.steptime import StepTime

HEADER = "prefill_tokens,decode_batch,seconds\n"


def measured(tmp_path, rows):
    file = tmp_path / "steps.csv"
    file.write_text(HEADER + "".join(f"{a},{b},{c!r}\n" for a, b, c in rows), encoding="utf-8")
    return file


def steps(model, count=200, noise=0.0):
    pick = random.Random(5)
    for _ in range(count):
        prefill, decode = pick.choice([0, 0, pick.randrange(4000)]), pick.randrange(64)
        yield prefill, decode, model.of(prefill, decode) * (1 + pick.uniform(-noise, noise))


def test_a_fit_finds_the_model_that_made_the_steps(tmp_path):
    model = StepTime(0.013, 7e-5, 3e-4)
    found = steptime.fit(measured(tmp_path, steps(model)))
    assert (found.model.base, found.model.prefill, found.model.decode) == pytest.approx((0.013, 7e-5, 3e-4), rel=1e-6)
    assert found.explained == pytest.approx(1)
    assert found.error < 1e-9


def test_noise_moves_it_a_little_and_is_told(tmp_path):
    found = steptime.fit(measured(tmp_path, steps(StepTime(0.013, 7e-5, 3e-4), 2000, 0.1)))
    assert (found.model.base, found.model.prefill, found.model.decode) == pytest.approx((0.013, 7e-5, 3e-4), rel=0.1)
    assert 0.9 < found.explained < 1
    assert found.error > 1e-4


def test_no_part_comes_out_negative(tmp_path):
    rows = [(p, d, 0.05 + 1e-5 * p - 1e-4 * d) for p, d, _ in steps(StepTime())]
    model = steptime.fit(measured(tmp_path, rows)).model
    assert model.decode == 0
    assert model.base > 0
    assert model.prefill > 0


@pytest.mark.parametrize(
    "rows", [[], [(1, 2, 0.1)], [(100, 4, 0.1)] * 50, [(p, p, 0.1 + p / 1000) for p in range(50)]],
    ids=["none", "one", "all alike", "both counts alike"],
)  # fmt: skip
def test_steps_that_do_not_tell_the_parts_from_each_other_are_refused(tmp_path, rows):
    with pytest.raises(PatchError, match="BP951"):
        steptime.fit(measured(tmp_path, rows))


@pytest.mark.parametrize("row", [(-1, 2, 0.1), (1, -2, 0.1), (1, 2, 0), (1, 2, float("nan")), (1, 2, "x")])
def test_a_bad_line_is_refused_by_its_number(tmp_path, row):
    with pytest.raises(PatchError) as caught:
        steptime.fit(measured(tmp_path, [(1, 2, 0.1), row]))
    assert [(failure.code, failure.line) for failure in caught.value.failures] == [("BP951", 3)]


def test_a_written_model_is_taken_and_a_wrong_one_refused():
    assert steptime.given("") == StepTime()
    assert steptime.given("base=0.5, decode=1e-3") == StepTime(base=0.5, decode=1e-3)
    for text in ("base", "base=x", "speed=1", "prefill=-1", "base=0", "decode=inf"):
        with pytest.raises(PatchError, match="BP007"):
            steptime.given(text)
