"""A rank that says nothing is named after a minute, as everybody has it: real engines, with no clock of the tests'.

test_disagreement.py has started them, where it has run: until now they had nothing to do.
"""

import cluster
import pytest
from disagreements import REAL, SLACK, between, came_to_nothing, in_the_meantime

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = in_the_meantime(tmp_path_factory).result()
    cluster.STARTED["refused: internal, off, in the meantime"] = run.launched
    return run


@pytest.mark.launch("one lane")
class TestTheRealPatience:
    def test_it_is_named_after_a_minute(self, run):
        (off,) = run.told(1, "balance: OFF because the configuration does not ask for it")
        (named, *_) = run.told(0, f"BP705 rank is silent: rank 1 of 2: it said nothing for {REAL} s")
        assert REAL - 10 < between(off, named) < REAL + SLACK  # they need not have begun in the same second

    def test_it_comes_to_nothing(self, run):
        came_to_nothing(run)
