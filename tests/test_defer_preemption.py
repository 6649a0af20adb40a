"""The defer-aware retry on the sources of the releases: what it makes of upstream's loop, and what it refuses."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.build import compile_plan
from balance_patcher.errors import PatchError
from balance_patcher.invariants import check_invariants
from balance_patcher.plan import make_plan
from balance_patcher.registry import find_feature
from balance_patcher.source import DirSource, Lane
from balance_patcher.targets import Target, find_target

FILE = "vllm/v1/core/sched/scheduler.py"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
FLAG = "self._defer_preemption"
APPLIED = ("0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0")
# What 0.30 added besides, in the same loop: another change, and left alone.
PENDING = "self.connector is not None and self.connector.has_pending_block_frees()"

Releases = Callable[[str], Path]


def lane_of(folder: Path) -> Lane:
    return Lane(folder.name, DirSource(f"dir:{folder}", folder))


def function(folder: Path, name: str) -> ast.FunctionDef:
    found = find_target(lane_of(folder), f"{SCHEDULER}.{name}")
    assert isinstance(found, Target)
    assert isinstance(found.node, ast.FunctionDef)
    return found.node


def rewritten(folder: Path) -> ast.FunctionDef:
    """``schedule`` with the feature in it."""
    rewrites, _ = compile_plan(make_plan(lane_of(folder), find_feature("defer_preemption")))
    node = rewrites["vllm.v1.core.sched.scheduler"].targets[f"{SCHEDULER}.schedule"].node
    assert isinstance(node, ast.FunctionDef)
    return node


class Fold(ast.NodeTransformer):
    """A function in which an attribute's truth is known, and a statement with a given test is not there."""

    def __init__(self, truth: dict[str, bool], without: str = "") -> None:
        self.truth, self.without = truth, without

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        self.generic_visit(node)
        test = ast.unparse(node.test)
        if test == self.without:
            return None
        bare = test.removeprefix("not ")
        if bare not in self.truth:
            return node
        return node.body if self.truth[bare] == (bare == test) else node.orelse


def loop(schedule: ast.FunctionDef, *, on: bool | None = None, without: str = "") -> str:
    """The retry loop as a text that says everything but positions, the flag folded in."""
    folded = ast.parse(ast.unparse(schedule))
    if on is not None or without:
        folded = Fold({} if on is None else {FLAG: on}, without).visit(folded)
    (found,) = [node for node in ast.walk(folded) if isinstance(node, ast.While) and ast.unparse(node.test) == "True"]
    return ast.dump(found)


@pytest.mark.parametrize("version", ["0.28.0", "0.29.0"])
def test_with_the_feature_on_the_loop_is_that_of_030_but_for_pending_frees(version: str, release_dir: Releases) -> None:
    later = function(release_dir("0.30.0"), "schedule")
    assert loop(later) != loop(later, without=PENDING)
    ours = rewritten(release_dir(version))
    assert loop(ours, on=True) == loop(later, without=PENDING)
    assert FLAG in ast.unparse(ours)


@pytest.mark.parametrize("version", APPLIED)
def test_with_the_feature_off_the_loop_is_upstreams(version: str, release_dir: Releases) -> None:
    upstream = function(release_dir(version), "schedule")
    assert loop(rewritten(release_dir(version)), on=False) == loop(upstream)
    assert loop(rewritten(release_dir(version)), on=True) != loop(upstream)


@pytest.mark.parametrize("version", APPLIED)
def test_before_028_it_chooses_and_looks_as_030_does_and_goes_on_as_upstream(
    version: str, release_dir: Releases
) -> None:
    def statements(schedule: ast.FunctionDef, **how: object) -> list[str]:
        folded = Fold({FLAG: True} if how else {}, PENDING).visit(ast.parse(ast.unparse(schedule)))
        (found,) = [n for n in ast.walk(folded) if isinstance(n, ast.While) and ast.unparse(n.test) == "True"]
        return [ast.unparse(statement) for statement in found.body]

    upstream = statements(function(release_dir(version), "schedule"))
    later = statements(function(release_dir("0.30.0"), "schedule"))
    ours = statements(rewritten(release_dir(version)), on=True)
    # allocate, its success, then the choice and the look.
    assert ours[:4] == later[:4]
    choice, removal, rest = later[2].splitlines()[1].strip(), ours[4], ours[5:]
    assert choice.startswith("preempted_req = max(")
    header, *body = removal.splitlines()
    assert "\n".join([header, f"    {choice}", *body]) == upstream[2]
    assert rest == upstream[3:]


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_the_predicate_is_that_of_upstream(version: str, release_dir: Releases) -> None:
    (theirs,) = function(release_dir(version), "_request_blocks_can_be_freed").body
    made = find_feature("defer_preemption").runtime.make(type("Upstream", (), {}))
    for fences in (False, True):
        for last in range(3):
            scheduler = made.__new__(made)
            scheduler.defer_block_free, scheduler.processed_step_seq = fences, 1
            request = type("Request", (), {"last_sched_seq": last})()
            names = {"self": scheduler, "request": request}
            want = eval(compile(ast.Expression(theirs.value), "theirs", "eval"), names)  # noqa: S307 - upstream's own
            assert scheduler._request_blocks_can_be_freed(request) is want


# -- refusals, on the real text ---------------------------------------------------------------

ASK = "if not self._request_blocks_can_be_freed(preempted_req):\n                        break\n"
NAMED = "def _request_blocks_can_be_freed(self, request"


def change(text: str, old: str, new: str, count: int = 1) -> str:
    assert text.count(old) == count, (old, text.count(old))
    return text.replace(old, new)


def predicate_for(text: str) -> str:
    """The release with a predicate and without the guard."""
    return change(
        text, "    def _free_request_blocks(self",
        "    def _request_blocks_can_be_freed(self, request):\n        return not self.defer_block_free or (\n"
        "            request.last_sched_seq <= self.processed_step_seq\n        )\n\n"
        "    def _free_request_blocks(self",
    )  # fmt: skip


def guard_for(text: str) -> str:
    """The release with a guard and without the predicate."""
    choice = text[text.index("preempted_req = max(") :]
    choice = choice[: choice.index(")\n                        ", choice.index("arrival_time")) + 2]
    head = "                    if self.policy == SchedulingPolicy.PRIORITY:\n"
    looks = (
        f"{head}                        {choice}                    else:\n"
        f"                        preempted_req = self.running[-1]\n                    {ASK}{head}"
    )
    return change(text, head + "                        " + choice, looks)


MUTANTS = {
    "the predicate without the guard, on 0.29": ("0.29.0", predicate_for, "BP125"),
    "the guard without the predicate, on 0.29": ("0.29.0", guard_for, "BP125"),
    "the predicate without the guard, on 0.30": ("0.30.0", lambda t: change(t, ASK, ""), "BP101"),
    "the guard without the predicate, on 0.30": (
        "0.30.0", lambda t: change(t, NAMED, "def _can_be_freed(self, request"), "BP125",
    ),
    "a predicate that asks something else, on 0.30": (
        "0.30.0", lambda t: change(t, "return not self.defer_block_free", "return self.defer_block_free"), "BP125",
    ),
    "a guard that asks of somebody else, on 0.30": (
        "0.30.0",
        lambda t: change(t, "_request_blocks_can_be_freed(preempted_req)", "_request_blocks_can_be_freed(request)", 1),
        "BP101",
    ),
    "the victim is the first of the running, on 0.30": (
        "0.30.0", lambda t: change(t, "preempted_req = self.running[-1]", "preempted_req = self.running[0]"), "BP101",
    ),
    "the victim is the first of the running, on 0.29": (
        "0.29.0", lambda t: change(t, "preempted_req = self.running.pop()", "preempted_req = self.running.pop(0)"),
        "BP117",
    ),
    "another rule for fences, on 0.29": (
        "0.29.0",
        lambda t: change(t, "request.last_sched_seq <= self.processed", "request.last_sched_seq < self.processed"),
        "BP125",
    ),
    "preempted requests are not fenced, on 0.29": (
        "0.29.0",
        lambda t: t[: (at := t.index("def _preempt_request"))]
        + t[at:].replace("self._free_request_blocks(request)", "self.kv_cache_manager.free(request)", 1),
        "BP125",
    ),
    "fences that nobody knows, on 0.23": (
        "0.23.0", lambda t: change(t, "        self.connector = None\n", "        self.defer_block_free = True\n"),
        "BP125",
    ),
    "the loop has another head, on 0.29": ("0.29.0", lambda t: change(t, "while True:", "while attempts:"), "BP117"),
    "the choice is another one, on 0.29": (
        "0.29.0", lambda t: change(t, "preempted_req = max(", "preempted_req = self.pick("), "BP114",
    ),
}  # fmt: skip


def doubled(text: str) -> str:
    """A second loop like the first, after it."""
    lines = text.splitlines(keepends=True)
    (start,) = [at for at, line in enumerate(lines) if line.strip() == "while True:"]
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = next(
        at for at in range(start + 1, len(lines)) if lines[at].strip() and not lines[at].startswith(" " * (indent + 1))
    )
    return "".join([*lines[:end], *lines[start:end], *lines[end:]])


MUTANTS["a second loop, on 0.29"] = ("0.29.0", doubled, "BP102")


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_neither_shape_is_refused_and_named(name: str, release_copy: Releases) -> None:
    version, mutate, code = MUTANTS[name]
    folder = release_copy(version)
    file = folder / FILE
    before = file.read_text("utf-8")
    after = mutate(before)
    ast.parse(after)
    assert after != before
    file.write_text(after, "utf-8")
    plan = make_plan(lane_of(folder), find_feature("defer_preemption"))
    assert plan.idle is None
    with pytest.raises(PatchError) as caught:
        compile_plan(plan)
    retry = plan.placement("defer_preemption.retry")
    assert retry.status == "failed"
    assert [failure.code for failure in retry.failures] == [code]
    assert {failure.code for failure in caught.value.failures} == {code}


def test_what_stands_alone_is_named_with_its_line(release_copy: Releases) -> None:
    folder = release_copy("0.29.0")
    text = predicate_for((folder / FILE).read_text("utf-8"))
    (folder / FILE).write_text(text, "utf-8")
    line = text[: text.index("def _request_blocks_can_be_freed")].count("\n") + 1
    (failure,) = (
        make_plan(lane_of(folder), find_feature("defer_preemption")).placement("defer_preemption.retry").failures
    )
    said = [value for label, value in failure.fields if label == "but"]
    assert f"Scheduler._request_blocks_can_be_freed is there: scheduler.py:{line}" in said
    assert any(value.startswith("Scheduler.defer_block_free is there: ") for value in said)


# -- what must hold besides -------------------------------------------------------------------

BROKEN = {
    "choosing a victim does something": (
        lambda t: change(t, "(r.priority, r.arrival_time)", "(r.priority, self.has_finished_requests())"), "BP206",
    ),
    "without blocks it is scheduled all the same": (
        lambda t: t.replace("if new_blocks is None:", "if not self.running:", 1),
        "BP204",
    ),
    "the scheduler does not keep its configuration": (
        lambda t: change(t, "        self.vllm_config = vllm_config\n", "        self.config = vllm_config\n"), "BP207",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_it_rests_on_is_looked_at(name: str, release_copy: Releases) -> None:
    mutate, code = BROKEN[name]
    folder = release_copy("0.29.0")
    plan = make_plan(lane_of(folder), find_feature("defer_preemption"))
    assert [finding.status for finding in check_invariants(plan, compile_plan(plan)[0])] == ["holds"] * 3
    text = mutate((folder / FILE).read_text("utf-8"))
    ast.parse(text)
    (folder / FILE).write_text(text, "utf-8")
    plan = make_plan(lane_of(folder), find_feature("defer_preemption"))
    found = [failure.code for finding in check_invariants(plan, compile_plan(plan)[0]) for failure in finding.failures]
    assert found == [code]
