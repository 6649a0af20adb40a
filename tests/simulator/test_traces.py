"""Traces: alike for one seed, what was written is read, and a bad line is refused by its number."""

import pytest

from balance_patcher.errors import PatchError
from tools.simulator import traces
from tools.simulator.traces import Arrival, Load

HEADER = "arrival,prompt,output\n"


def refused(tmp_path, text, longest=100):
    file = tmp_path / "trace.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(PatchError) as caught:
        traces.read(file, longest)
    return [(failure.code, failure.line) for failure in caught.value.failures]


def test_one_seed_is_one_trace_and_another_is_another():
    load = Load(200, 10.0, seed=3)
    assert traces.made(load) == traces.made(load)
    assert traces.made(load) != traces.made(Load(200, 10.0, seed=4))


def test_a_trace_of_which_some_ranks_are_known_is_read_as_it_was_written(tmp_path):
    trace = [Arrival(0.0, 3, 4, 1), Arrival(0.5, 3, 4), Arrival(1.0, 3, 4, 0)]
    traces.write(tmp_path / "trace.csv", trace)
    assert traces.read(tmp_path / "trace.csv", 100, ranks=2) == trace


@pytest.mark.parametrize("burst", [1, 16])
def test_rate_and_lengths_are_as_asked_for(burst):
    trace = traces.made(Load(8000, 50.0, prompt=300, output=100, burst=burst, seed=2))
    assert [one.at for one in trace] == sorted(one.at for one in trace)
    assert 8000 / trace[-1].at == pytest.approx(50, rel=0.15)
    assert sum(one.prompt for one in trace) / 8000 == pytest.approx(300, rel=0.05)
    assert sum(one.output for one in trace) / 8000 == pytest.approx(100, rel=0.05)
    assert len({one.at for one in trace}) == 8000 / burst


def test_without_spread_all_are_alike_and_none_is_longer_than_the_model_takes():
    assert {one[1:3] for one in traces.made(Load(50, 1.0, 7, 5, spread=0))} == {(7, 5)}
    trace = traces.made(Load(2000, 1.0, prompt=100, output=100, spread=2, longest=150))
    assert max(one.prompt + one.output for one in trace) == 150
    assert min(min(one[1:3]) for one in trace) >= 1


def test_what_was_written_is_read(tmp_path):
    trace = traces.made(Load(50, 3.0))
    traces.write(tmp_path / "trace.csv", trace)
    assert traces.read(tmp_path / "trace.csv", 8192) == trace


def test_other_columns_and_spaces_are_passed_over(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("who, output, arrival, prompt\nann, 3, 0.5, 7\n", encoding="utf-8")
    assert traces.read(file, 10) == [Arrival(0.5, 7, 3)]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("0,5,5\n1,-5,5\n", 3),
        ("0,5,0\n", 2),
        ("0,5,5\n2,5,5\n1,5,5\n", 4),
        ("-1,5,5\n", 2),
        ("nan,5,5\n", 2),
        ("inf,5,5\n", 2),
        ("0,5,5\n0,60,41\n", 3),
        ("0,x,5\n", 2),
        ("0,5.5,5\n", 2),
        ("0,5\n", 2),
        ("", 1),
    ],
    ids="negative zero unsorted before nan endless long word fraction short empty".split(),
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, rows, line):
    assert refused(tmp_path, HEADER + rows) == [("BP950", line)]


def test_several_bad_lines_are_all_told_up_to_some(tmp_path):
    assert refused(tmp_path, HEADER + "0,-1,1\n0,1,1\n" + "0,0,1\n" * 9) == [
        ("BP950", line) for line in (2, 4, 5, 6, 7)
    ]


def test_missing_columns_are_named(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival,length\n0,1\n", encoding="utf-8")
    with pytest.raises(PatchError, match="no column prompt, output"):
        traces.read(file, 10)
    assert refused(tmp_path, "") == [("BP950", 1)]


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(PatchError, match="BP514"):
        traces.read(tmp_path / "none.csv", 10)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PatchError, match="BP514"):
        traces.read(tmp_path / "binary.csv", 10)
