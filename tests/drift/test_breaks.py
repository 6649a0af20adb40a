"""One break in a commit of its own, among others: found at that very commit, by kind, with a proposal that verifies."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from balance_patcher.errors import Outcome
from tests.conftest import ROOT
from tests.drift.conftest import CORE, SCHEDULER, Repo, changes
from tools.drift.changed import Proposal, Transition
from tools.drift.model import Report
from tools.drift.written import from_json
from tools.drift_report import main

pytestmark = pytest.mark.timeout(1200)

Branch = Callable[[str], Repo]
GATE = "balance.admission-gate"
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
STOP = "if num_running >= self.max_num_running_reqs:"


def comment(text: str) -> Callable[[str], str]:
    return lambda source: f"{source}\n# {text}\n"


def told(
    repo: Repo, change: Callable[[str], str], look, path: str = SCHEDULER, features: str = "balance"
) -> tuple[Report, str]:
    """The report of a history in which one of four commits breaks something, and the hash of that commit."""
    repo.edit(path, comment("before"), "Say something (#1)")
    repo.edit("vllm/v1/request.py", comment("elsewhere"), "Say it elsewhere (#2)")
    bad = repo.edit(path, change, "Change it <all> (#3)")
    repo.edit(path, comment("after"), "Say it again (#4)")
    report = look(repo, "v0.29.0", "HEAD", features)
    return report, bad


def the_one(report: Report, subject: str, bad: str, kind: str) -> Transition:
    """The change of a delta, which needs somebody and has its commit and the proof."""
    (change,) = changes(report, subject)
    assert report.outcome is Outcome.BROKEN
    assert change.action
    assert (change.kind, change.now) == (kind, "failed")
    assert change.first_bad is not None
    assert change.first_bad.commit is not None
    assert (change.first_bad.commit.hash, change.first_bad.commit.pull) == (bad, 3)
    assert change.first_bad.proven
    assert f"({'anchor'} {kind} in {bad[:10]}, vllm#3)" in report.verdicts[0]
    return change


def verifies(proposal: Proposal | None, repo: Repo, refs: tuple[str, ...], tmp_path: Path) -> None:
    """Apply a proposal to a copy of the declarations, and let `verify` judge."""
    assert proposal is not None
    assert proposal.fails_on == ()
    copy = tmp_path / "checkout"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in tracked.split("\0"):
        if name.startswith(("balance_patcher/", "deltas/")) and not (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "balance_patcher" / "deltas").symlink_to("../deltas")
    subprocess.run(["git", "apply", "-"], input=proposal.patch, text=True, cwd=copy, check=True)
    feature = proposal.delta.partition(".")[0]
    lanes = [f"lane{at}=git:{repo.path}@{ref}" for at, ref in enumerate(refs)]
    words = [sys.executable, "-m", "balance_patcher", "verify", "--feature", feature, *lanes]
    done = subprocess.run(words, cwd=copy, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_renamed_attribute(branch: Branch, look, tmp_path: Path) -> None:
    repo = branch("0.29.0")
    report, bad = told(repo, lambda text: text.replace("max_num_running_reqs", "max_live_reqs"), look)
    change = the_one(report, GATE, bad, "changed")
    assert change.difference is not None
    assert (change.difference.path, change.difference.found) == ("test.comparators[0].attr", "max_live_reqs")
    assert change.old is not None
    assert change.new is not None
    assert STOP in "\n".join(change.old.around(0).lines)
    assert "self.max_live_reqs" in "\n".join(change.new.around(0).lines)
    assert '"CAP": ("max_num_running_reqs", "max_live_reqs")' in change.proposal.patch
    verifies(change.proposal, repo, ("v0.29.0", "HEAD"), tmp_path)


def moved(text: str) -> str:
    """The loop that admits stands under a `with`."""
    lines = text.split("\n")
    stop = next(at for at, line in enumerate(lines) if STOP in line)
    first = next(at for at in range(stop, 0, -1) if re.match(r" +while ", lines[at]))
    depth = len(lines[first]) - len(lines[first].lstrip())
    last = first + 1
    while not lines[last].strip() or len(lines[last]) - len(lines[last].lstrip()) > depth:
        last += 1
    inner = [f"    {line}" if line.strip() else line for line in lines[first:last]]
    return "\n".join([*lines[:first], " " * depth + "with self.admission:", *inner, *lines[last:]])


def test_a_moved_loop(branch: Branch, look, tmp_path: Path) -> None:
    repo = branch("0.29.0")
    report, bad = told(repo, moved, look)
    gate = the_one(report, GATE, bad, "moved")
    assert "stands directly in `with self.admission:`" in gate.explanation
    guard = the_one(report, "balance.empty-queue-guard", bad, "moved")
    # One commit moved them, in one loop: that is one thing to look at.
    assert [line for line in report.verdicts if "ACTION" in line] == [report.verdicts[0]]
    assert f", and with it {guard.declared} (balance.empty-queue-guard moved)" in report.verdicts[0]
    for change in (gate, guard):
        assert change.proposal is not None
        assert "runs on every path" in change.proposal.note
        assert change.proposal.fails_on == ()
    # Each is half of what the loop needs; with both of them the feature verifies.
    both = Proposal(**{**vars(gate.proposal), "patch": gate.proposal.patch + guard.proposal.patch.split("\n", 2)[2]})
    verifies(both, repo, ("v0.29.0", "HEAD"), tmp_path)


def test_a_duplicated_check(branch: Branch, look, tmp_path: Path) -> None:
    def twice(text: str) -> str:
        found = re.search(r"( +)if new_blocks is not None:\n(?: +#.*\n)* +break\n", text)
        pad = found[1]
        more = f"\n{pad}self.looked = True\n{pad}if new_blocks is not None:\n{pad}    break\n"
        return text[: found.end()] + more + text[found.end() :]

    repo = branch("0.29.0")
    report, bad = told(repo, twice, look, features="prefill_preemption")
    change = the_one(report, "prefill_preemption.keep-running", bad, "ambiguous")
    assert "found 2 times" in change.explanation
    verifies(change.proposal, repo, ("v0.29.0", "HEAD"), tmp_path)


def test_a_duplicated_stop_that_an_invariant_speaks_of(branch: Branch, look) -> None:
    """An anchor for it can be found; what the invariant says is for a person to change, and that is said."""

    def twice(text: str) -> str:
        found = re.search(rf"( +){re.escape(STOP)}\n(?: +#.*\n)* +break\n", text)
        pad = found[1]
        more = f"\n{pad}self.looked = True\n{pad}{STOP}\n{pad}    break\n"
        return text[: found.end()] + more + text[found.end() :]

    repo = branch("0.29.0")
    report, bad = told(repo, twice, look)
    change = the_one(report, GATE, bad, "ambiguous")
    invariant = "the stop comes before the one admission"
    lines = (ROOT / "deltas/balance.py").read_text("utf-8").split("\n")
    line = next(at for at, text in enumerate(lines, 1) if f'"{invariant}"' in text)
    assert change.proposal is None
    assert f"the invariant `{invariant}` says what has to hold" in change.why_no_proposal
    assert f"then change deltas/balance.py:{line}, or" in change.why_no_proposal


def test_an_attribute_that_inserted_code_uses(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    report, bad = told(repo, lambda text: text.replace("self.dp_group", "self.data_group"), look, CORE)
    change = the_one(report, "balance.gather", bad, "attribute-gone")
    assert change.proposal is not None
    assert (change.proposal.pattern, change.proposal.holds_on[-1]) == ("dp_group → data_group", bad[:10])
    assert change.proposal.fails_on == ("v0.29.0", change.before)
    (sets,) = changes(report, "the data-parallel group is an attribute of the engine core")
    assert (sets.kind, sets.was, sets.now, sets.action) == ("attribute-gone", "holds", "broken", True)
    assert sets.first_bad.commit.hash == bad


def test_an_attribute_that_the_runtime_class_uses(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    report, bad = told(
        repo, lambda text: text.replace("self.vllm_config = vllm_config", "self.config = vllm_config"), look
    )
    (change,) = changes(report, "vllm_config")
    assert (change.kind, change.action, change.first_bad.commit.hash) == ("attribute-gone", True, bad)
    assert "BalanceScheduler uses self.vllm_config" in change.explanation


def test_a_target_that_is_called_otherwise(branch: Branch, look, tmp_path: Path) -> None:
    repo = branch("0.29.0")
    report, bad = told(
        repo, lambda text: text.replace("_has_global_unfinished_reqs", "_anybody_unfinished"), look, CORE
    )
    change = the_one(report, "balance.gather", bad, "target-gone")
    proposal = change.proposal
    assert proposal is not None
    assert proposal.pattern.endswith("→ vllm.v1.engine.core:DPEngineCoreProc._anybody_unfinished")
    assert bad[:10] in proposal.holds_on
    assert "v0.29.0" in proposal.fails_on  # it is called otherwise there
    verifies(replace(proposal, fails_on=()), repo, ("HEAD",), tmp_path)


def away(repo: Repo, path: str, to: str, more: str = "", **others: str) -> str:
    """Commit that a module stands elsewhere, with ``more`` at its end, among other commits; returns the hash."""
    repo.edit(path, comment("before"), "Say something (#1)")
    (repo.path / to).parent.mkdir(parents=True, exist_ok=True)
    repo.git("mv", path, to)
    for file, text in {to: (repo.path / to).read_text("utf-8") + more, **others}.items():
        (repo.path / file).write_text(text, "utf-8")
    bad = repo.commit("Change it <all> (#3)")
    repo.edit("vllm/v1/request.py", comment("after"), "Say it again (#4)")
    return bad


def moved_along(report: Report, module: str) -> list[Proposal]:
    """The proposals for all deltas of a module, which name one other module."""
    gone = [change for change in report.transitions if change.kind == "target-gone" and change.delta is not None]
    assert all(change.action and change.proposal is not None for change in gone), [c.why_no_proposal for c in gone]
    assert {re.split(r" → |:", change.proposal.pattern)[2] for change in gone} == {module}
    return [change.proposal for change in gone]


def verify_all(proposals: list[Proposal], repo: Repo, tmp_path: Path) -> None:
    """Together, the proposals for several files verify."""
    patches = dict.fromkeys(proposal.patch for proposal in proposals)
    verifies(replace(proposals[0], patch="".join(patches), fails_on=()), repo, ("HEAD",), tmp_path)


def test_a_module_that_is_elsewhere(branch: Branch, look, tmp_path: Path) -> None:
    """Its file has the bytes of the old one."""
    repo = branch("0.29.0")
    bad = away(repo, CORE, "vllm/v1/engine/loops/busy.py")
    report = look(repo, "v0.29.0")
    change = the_one(report, "balance.gather", bad, "target-gone")
    assert change.proposal.pattern.endswith(
        ".core:DPEngineCoreProc._has_global_unfinished_reqs → "
        "vllm.v1.engine.loops.busy:DPEngineCoreProc._has_global_unfinished_reqs"
    )
    assert bad[:10] in change.proposal.holds_on
    verify_all(moved_along(report, "vllm.v1.engine.loops.busy"), repo, tmp_path)


def test_a_module_that_is_elsewhere_and_is_not_as_it_was(branch: Branch, look, tmp_path: Path) -> None:
    """No file has the bytes of the old one; of those that came, one has the function as it was."""
    repo = branch("0.29.0")
    decoy = {"vllm/other.py": "class DPEngineCoreProc:\n    def _has_global_unfinished_reqs(self):\n        return 1\n"}
    away(repo, CORE, "vllm/v1/engine/busy.py", "\nMORE = 1\n", **decoy)
    report = look(repo, "v0.29.0")
    verify_all(moved_along(report, "vllm.v1.engine.busy"), repo, tmp_path)


def test_a_module_that_several_files_name(branch: Branch, look) -> None:
    """No file can be changed alone: the place is told, and the files are."""
    repo = branch("0.29.0")
    bad = away(repo, SCHEDULER, "vllm/v1/core/sched/plan.py")
    change = the_one(look(repo, "v0.29.0"), GATE, bad, "target-gone")
    assert change.proposal is None
    assert change.why_no_proposal.startswith(
        "the target is vllm.v1.core.sched.plan:Scheduler.schedule now, and deltas/"
    )
    named = [file.name for file in (ROOT / "deltas").glob("*.py") if SCHEDULE.rpartition(":")[0] in file.read_text()]
    assert len(named) > 1
    assert all(f"deltas/{name}" in change.why_no_proposal for name in named)


def test_a_module_that_is_elsewhere_twice(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    text = (repo.path / CORE).read_text("utf-8")
    bad = away(repo, CORE, "vllm/v1/engine/busy.py", "# moved\n", **{"vllm/other.py": text})
    change = the_one(look(repo, "v0.29.0"), "balance.gather", bad, "target-gone")
    assert change.proposal is None
    name = "DPEngineCoreProc._has_global_unfinished_reqs"
    assert change.why_no_proposal == (
        f"the target may be vllm.other:{name} or vllm.v1.engine.busy:{name} now; a person has to say which"
    )


def test_a_module_that_hands_on_what_is_elsewhere(branch: Branch, look, tmp_path: Path) -> None:
    """The old place still has the names, and no definition of them."""
    repo = branch("0.29.0")
    old = "from vllm.v1.engine.busy import DPEngineCoreProc, EngineCore, EngineCoreProc  # noqa: F401\n"
    away(repo, CORE, "vllm/v1/engine/busy.py", **{CORE: old})
    report = look(repo, "v0.29.0")
    verify_all(moved_along(report, "vllm.v1.engine.busy"), repo, tmp_path)


def test_a_target_that_is_nowhere(branch: Branch, look) -> None:
    def without(text: str) -> str:
        found = re.search(r"    def _has_global_unfinished_reqs\(.*?(?=\n    def |\nclass )", text, re.DOTALL)
        return text[: found.start()] + text[found.end() :]

    repo = branch("0.29.0")
    report, bad = told(repo, without, look, CORE)
    change = the_one(report, "balance.gather", bad, "target-gone")
    assert change.proposal is None
    assert change.why_no_proposal == "the target is not there, and nothing like it; a person has to find it"


def test_an_anchor_that_is_gone(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    gone = re.compile(r" +assert request_queue is not None\n")
    report, bad = told(repo, lambda text: gone.sub("", text), look)
    change = the_one(report, "balance.empty-queue-guard", bad, "gone")
    assert change.proposal is None
    assert change.why_no_proposal


def test_an_invariant_that_broke(branch: Branch, look) -> None:
    def again(text: str) -> str:
        found = re.search(r"( +)self\.engines_running = self\._has_global_unfinished_reqs\(", text)
        return f"{text[: found.start()]}{found[1]}self._has_global_unfinished_reqs(False)\n{text[found.start() :]}"

    repo = branch("0.29.0")
    report, bad = told(repo, again, look, CORE)
    (change,) = changes(report, "the busy loop calls the hook once on every path")
    assert (change.kind, change.action, change.first_bad.commit.hash) == ("invariant-broken", True, bad)
    assert "the invariant `the busy loop calls the hook once on every path` says" in change.why_no_proposal
    assert report.outcome is Outcome.BROKEN


def test_what_was_mended_needs_nobody(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    repo.edit(SCHEDULER, lambda text: text.replace("max_num_running_reqs", "max_live_reqs"), "Rename it")
    repo.edit(SCHEDULER, lambda text: text.replace("max_live_reqs", "max_num_running_reqs"), "Name it as it was")
    report = look(repo, "v0.29.0")
    assert [(change.kind, change.now, change.action) for change in changes(report, GATE)] == [
        ("changed", "failed", False), ("mended", "applied", False)
    ]  # fmt: skip
    assert report.outcome is Outcome.HOLDS


def test_a_helper_that_hands_back_more(branch: Branch, look) -> None:
    head = re.compile(r"(def get_computed_blocks\([^)]*\)[^\n]*:\n)")

    def more(text: str) -> str:
        return head.sub(r"\1        if not request:\n            return None, 0, 0, 0\n", text)

    repo = branch("0.29.0")
    report, bad = told(repo, more, look, "vllm/v1/core/kv_cache_manager.py")
    first = report.callees[0]
    assert first.what == "return"
    assert "a tuple of 4" in first.now
    assert first.first_bad is not None
    assert (first.first_bad.commit.hash, first.first_bad.proven) == (bad, True)
    assert report.outcome is Outcome.HOLDS


def test_a_merged_branch(branch: Branch, look) -> None:
    repo = branch("0.29.0")
    repo.git("checkout", "-q", "-b", "side")
    bad = repo.edit(SCHEDULER, lambda text: text.replace("max_num_running_reqs", "max_live_reqs"), "Rename it (#3)")
    repo.git("checkout", "-q", "work")
    repo.edit("vllm/v1/request.py", comment("elsewhere"), "Say it elsewhere")
    repo.git("merge", "-q", "--no-ff", "-m", "Merge it", "side")
    merge = repo.git("rev-parse", "HEAD")
    for every, wanted in ((False, merge), (True, bad)):
        (change,) = changes(look(repo, "v0.29.0", every=every), GATE)
        assert change.first_bad.commit.hash == wanted
        assert change.first_bad.proven


def test_a_copy_beside_a_history(branch: Branch, tmp_path: Path, capsys) -> None:
    """Somebody's copy of a hook: equal to upstream's, until a commit changes what it copies."""
    repo = branch("0.29.0")
    theirs = tmp_path / "theirs.py"
    theirs.write_text((repo.path / CORE).read_text("utf-8"), "utf-8")

    def more(text: str) -> str:
        return re.sub(
            r"(    def _has_global_unfinished_reqs\([^)]*\)[^\n]*:\n)", r"\1        self.asked = True\n", text
        )

    bad = repo.edit(CORE, more, "Note it (#3)")
    name = "DPEngineCoreProc._has_global_unfinished_reqs"
    words = ["--repo", str(repo.path), "--since", "v0.29.0", "--features", "prefill_preemption", "--no-index"]
    words += ["--copy", f"{theirs}:{name}=vllm.v1.engine.core:{name}", "--processes", "1", "--format", "json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--columns", "tags"])
    assert ended.value.code in {0, None}
    report = from_json(capsys.readouterr().out)
    (copy,) = report.copies
    assert [(cell.ref, cell.status, cell.removed) for cell in copy.cells] == [
        ("v0.29.0", "equal", 0), ("HEAD", "drifted", 1)
    ]  # fmt: skip
    assert report.refs[-1].commit is not None
    assert report.refs[-1].commit.hash == bad
