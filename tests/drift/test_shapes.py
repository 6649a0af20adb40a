"""What a caller relies on, as a table: what was, what is, and what is told."""

from __future__ import annotations

import pytest

from balance_patcher.source import Lane
from tools.drift.callees import calls_of, changes
from tools.drift.drifted import parameters_said

HEAD = """
from vllm.helper import Helper, free

class Owner:
    def __init__(self, config):
        self.helper = Helper(config)
        self.many: list[Helper] = []

    def own(self):
        return 1

    def target(self, given: Helper):
        self.own()
        free(1)
        self.helper.work(1)
        given.work(2)
        for one in self.many:
            one.work(3)
        Helper(1)
        unknown.call()
"""

HELPER = """
class Helper:
    def __init__(self, config): pass
    def work(self, count):
        return count, 1

def free(a, b=2): return a
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return count, 1", "return count, 1, 2", ("return", "a tuple of 2", "a tuple of 3")),
        ("return count, 1", "return None", ("return", "a tuple of 2", "nothing")),
        ("return count, 1", "yield count", ("return", "a tuple of 2", "a generator")),
        ("def work(self, count)", "def work(self, count, more)", ("parameters", "(count)", "(count, more)")),
        ("def work(self, count)", "def works(self, count)", ("gone", "(count)", "")),
        ("    def work", "    async def work", ("kind", "method", "async method")),
        ("def free(a, b=2)", "def free(a)", ("parameters", "(a, b=2)", "(a)")),
        ("def free(a, b=2): return a", "def free(a, b=2): return -a", ("body", "(a, b=2)", "(a, b=2)")),
        ("def __init__(self, config)", "def __init__(self, config, *m)", ("parameters", "(config)", "(config, *m)")),
        ("def free(a, b=2): return a", 'def free(a: int, b: int = 2):\n    """Say."""\n    return a  # it', None),
    ],
)  # fmt: skip
def test_what_changed(text_lane, old: str, new: str, expected: tuple[str, str, str] | None) -> None:
    def lane(helper: str) -> Lane:
        return text_lane({"vllm/owner.py": HEAD, "vllm/helper.py": helper, "vllm/__init__.py": ""})

    before = calls_of(lane(HELPER), "vllm.owner:Owner.target")
    there = lane(HELPER.replace(old, new))
    found = changes(before, calls_of(there, "vllm.owner:Owner.target"), there)
    assert [(change.what, *change.texts) for change in found] == ([expected] if expected else [])


def test_calls_are_followed_through_attributes_parameters_and_loops(text_lane) -> None:
    lane = text_lane({"vllm/owner.py": HEAD, "vllm/helper.py": HELPER, "vllm/__init__.py": ""})
    found = calls_of(lane, "vllm.owner:Owner.target")
    assert {shape.name.partition(":")[2]: len(lines) for shape, lines in found.callees} == {
        "Owner.own": 1, "free": 1, "Helper.work": 3, "Helper": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("(a, b)", "(a)", "lost the parameter `b`"),
        ("(a)", "(a, b, c)", "gained the parameters `b` and `c`, which must be given"),
        ("(a)", "(a, b, c=f(1, 2))", "gained the parameters `b` and `c`; `b` must be given"),
        ("(a)", "(a, *, b=None)", "gained the parameter `b`, which may be left out"),
        ("(a, b)", "(b, a)", "takes its parameters in another order"),
        ("(a=1)", "(a=2)", "has other defaults"),
        ("(a)", "(b)", "lost the parameter `a` and gained the parameter `b`, which must be given"),
    ],
)
def test_how_parameters_changed(was: str, now: str, said: str) -> None:
    assert parameters_said(was, now) == said
