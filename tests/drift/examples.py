"""A report of a history that never was, with one of everything: what renderings are tested with."""

from __future__ import annotations

from balance_patcher.errors import Failure
from tools.drift.changed import Absorbed, CalleeChange, Difference, FirstBad, Proposal, Snippet, Transition
from tools.drift.copied import BadCall, Copy, CopyCell
from tools.drift.matrix import Cell, Commit, DeltaCell, DeltaInfo, FeatureInfo, Ref
from tools.drift.model import Counts, Report

TARGET = "vllm.made.up:Planner.plan"
FILE = "vllm/made/up.py"


def commit(number: int, subject: str, pull: int | None = None) -> Commit:
    digits = f"{number:x}" * 40
    subject = f"{subject} (#{pull})" if pull else subject
    return Commit(
        digits[:40], subject, "A. Person", f"2026-0{number}-01T12:00:00+00:00", (f"{number - 1:x}" * 40,), pull
    )


START = commit(1, "Begin")
RENAME = commit(2, "Rename <the> limit & more", 4242)
CALLEE = commit(3, "Return three things", 4343)
DOUBLE = commit(4, "Look twice")
BROKEN = commit(5, "Half a file")
END = commit(6, "End", 4646)

REFS = (
    Ref("v1.0.0", "since", judged=False, commit=START, version="1.0.0"),
    Ref(RENAME.short, "commit", judged=False, commit=RENAME),
    Ref("v1.1.0", "tag", judged=False, commit=CALLEE, version="1.1.0"),
    Ref(DOUBLE.short, "commit", judged=False, commit=DOUBLE),
    Ref(BROKEN.short, "commit", judged=False, commit=BROKEN),
    Ref("main", "until", judged=True, commit=END),
)

GATE = DeltaInfo(
    "gate.stop", TARGET, "deltas/gate.py:12", "It has to stop.", "vllm/made/up.py, the stop", "upstream stops by itself"
)
GUARD = DeltaInfo("gate.guard", TARGET, "deltas/gate.py:30", "A guard.", "the assert", "the oldest vLLM is 1.1.0")
RETRY = DeltaInfo("retry.wait", TARGET, "deltas/retry.py:9", "It has to wait.", "vllm#4141", "vllm#4141 has landed")

FEATURES = (
    FeatureInfo("gate", "Stops early.", "deltas/gate.py:12", (GATE, GUARD)),
    FeatureInfo("retry", "Waits before it tries again.", "deltas/retry.py:9", (RETRY,)),
)

REFUSAL = Failure(
    "BP101",
    "delta 'gate.stop' cannot be placed; nothing was patched.",
    "compare with upstream and add a variant to deltas/gate.py:12",
    (
        ("target", f"{TARGET}   (up.py:20)"),
        ("anchor", "`if $N == self.limit: break`   need 1, found 0"),
        (
            "nearest",
            "up.py:24  `if count == self.bound: break`  differs at test.comparators[0].attr: `limit` → `bound`",
        ),
        ("declared", "deltas/gate.py:12"),
    ),
    file=FILE,
    line=24,
)
UNREADABLE = Failure("BP508", f"{FILE}:3: invalid syntax", "use a Python that this vLLM supports", file=FILE, line=3)


def _gate(ref: str, stop: str, guard: str, *failures: Failure) -> Cell:
    status = "failed" if failures else "applied"
    line = 24 if stop == "applied" else None
    return Cell(
        "gate", ref, status,
        (
            DeltaCell("gate.stop", stop, "plain" if line else None, FILE, line, "N count, OP =="),
            DeltaCell("gate.guard", guard, "assert" if guard == "applied" else "break", FILE, 30),
        ),
        failures,
    )  # fmt: skip


def _retry(ref: str, status: str = "applied") -> Cell:
    return Cell("retry", ref, status, (DeltaCell("retry.wait", status, "plain", FILE, 50),))


def _dark(feature: FeatureInfo) -> Cell:
    deltas = tuple(DeltaCell(delta.name, "unreadable") for delta in feature.deltas)
    return Cell(feature.name, BROKEN.short, "unreadable", deltas, (UNREADABLE,))


CELLS = (
    _gate("v1.0.0", "applied", "applied"), _retry("v1.0.0"),
    _gate(RENAME.short, "failed", "applied", REFUSAL), _retry(RENAME.short),
    _gate("v1.1.0", "failed", "absorbed", REFUSAL), _retry("v1.1.0"),
    _gate(DOUBLE.short, "failed", "absorbed", REFUSAL), _retry(DOUBLE.short, "absorbed"),
    _dark(FEATURES[0]), _dark(FEATURES[1]),
    _gate("main", "failed", "absorbed", REFUSAL), _retry("main", "absorbed"),
)  # fmt: skip

BEFORE = Snippet(
    FILE, 20,
    ("    def plan(self):", "        while self.waiting:", "            count = len(self.running)",
     "            # full?", "            if count == self.limit:",
     "                break", '            self.say("<b>go</b>")'),
    (24, 25),
)  # fmt: skip
AFTER = Snippet(FILE, 20, (*BEFORE.lines[:4], "            if count == self.bound:", *BEFORE.lines[5:]), (24, 25))

PATCH = """\
--- a/deltas/gate.py
+++ b/deltas/gate.py
@@ -20,3 +20,8 @@
     variants=(
+        Variant(
+            "bound",
+            Anchor("if $N == self.bound: break"),
+            edits=EDITS,
+        ),
         Variant(
             "plain",
"""

TRANSITIONS = (
    Transition(
        kind="changed",
        feature="gate",
        subject="gate.stop",
        delta="gate.stop",
        declared="deltas/gate.py:12",
        target=TARGET,
        before="v1.0.0",
        after=RENAME.short,
        was="applied",
        now="failed",
        action=True,
        explanation="the anchor's statement was changed: `limit` → `bound` at test.comparators[0].attr",
        next="compare the two statements, and add a variant for the new one",
        was_variant="plain",
        difference=Difference("test.comparators[0].attr", "`limit`", "`bound`"),
        first_bad=FirstBad(RENAME.short, RENAME, START.short, "applied", proven=True, tries=3),
        old=BEFORE,
        new=AFTER,
        proposal=Proposal(
            "gate.stop",
            "deltas/gate.py",
            20,
            "if $N == self.bound: break",
            PATCH,
            ("v1.0.0", RENAME.short, "main"),
            (),
            "python -m balance_patcher verify --feature gate git:vllm@main",
        ),
        failure=REFUSAL,
    ),
    Transition(
        kind="absorbed-upstream",
        feature="gate",
        subject="gate.guard",
        delta="gate.guard",
        declared="deltas/gate.py:30",
        target=TARGET,
        before=RENAME.short,
        after="v1.1.0",
        was="applied",
        now="absorbed",
        action=False,
        explanation="upstream has what the delta does: the loop looks for itself",
        next="delete the delta once no older vLLM is supported",
        was_variant="assert",
        now_variant="break",
        first_bad=FirstBad("v1.1.0", CALLEE, RENAME.short, "applied", proven=True, tries=2),
        old=Snippet(FILE, 29, ("    queue = self.pick()", "    assert queue is not None"), (30,)),
        new=Snippet(FILE, 29, ("    queue = self.pick()", "    if queue is None:", "        break"), (30, 31)),
    ),
    Transition(
        kind="absorbed-upstream",
        feature="retry",
        subject="retry.wait",
        delta="retry.wait",
        declared="deltas/retry.py:9",
        target=TARGET,
        before="v1.1.0",
        after=DOUBLE.short,
        was="applied",
        now="absorbed",
        action=False,
        explanation="upstream has what the delta does",
        next="delete the delta once no older vLLM is supported",
        first_bad=FirstBad(DOUBLE.short, DOUBLE, CALLEE.short, "applied", proven=True, tries=1),
    ),
    Transition(
        kind="invariant-broken",
        feature="gate",
        subject="the loop asks once a turn",
        delta=None,
        declared="deltas/gate.py:12",
        target=TARGET,
        before="v1.1.0",
        after=DOUBLE.short,
        was="holds",
        now="broken",
        action=True,
        explanation="`self.ask()` is called more than once on a path",
        next="read upstream's change before anything is applied there",
        first_bad=FirstBad(DOUBLE.short, DOUBLE, CALLEE.short, "holds", proven=False, tries=1),
        why_no_proposal="an invariant has no anchor to propose",
    ),
    Transition(
        kind="unreadable",
        feature="retry",
        subject=FILE,
        delta=None,
        declared="deltas/retry.py:9",
        target=None,
        before=DOUBLE.short,
        after=BROKEN.short,
        was="absorbed",
        now="unreadable",
        action=False,
        explanation=f"{FILE}:3: invalid syntax",
        next="mend what keeps it from being read, and look again",
        failure=UNREADABLE,
    ),
)

CALLEES = (
    CalleeChange(
        target=TARGET,
        callee="vllm.made.blocks:Blocks.take",
        what="return",
        rank=1,
        was="a tuple of 2",
        now="a tuple of 3",
        explanation="Blocks.take returns a tuple of 3, and returned a tuple of 2",
        next="look at every copy of Planner.plan: lines 40 and 44 unpack what it returns",
        calls=(40, 44),
        before=RENAME.short,
        after="v1.1.0",
        first_bad=FirstBad("v1.1.0", CALLEE, RENAME.short, "as before", proven=True, tries=1),
        old=Snippet("vllm/made/blocks.py", 7, ("    def take(self, n):", "        return a, b"), (8,)),
        new=Snippet("vllm/made/blocks.py", 7, ("    def take(self, n):", "        return a, b, c"), (8,)),
    ),
    CalleeChange(
        target=TARGET,
        callee="vllm.made.up:Planner.split",
        what="parameters",
        rank=2,
        was="(self, a, b, c)",
        now="(self, a, b)",
        explanation="Planner.split lost the parameter c",
        next="look at every copy of Planner.plan",
        calls=(41,),
        before="v1.1.0",
        after=DOUBLE.short,
    ),
)

ABSORBED = (
    Absorbed("gate", "gate.guard", "v1.1.0", False, "the oldest vLLM is 1.1.0", "deltas/gate.py", ((30, 48), (60, 60))),
    Absorbed(
        "retry",
        "retry.wait",
        DOUBLE.short,
        True,
        "vllm#4141 has landed",
        "deltas/retry.py",
        ((9, 40),),
        "--- a/deltas/retry.py\n+++ b/deltas/retry.py\n@@ -9,1 +8,0 @@\n-DELTA = Delta()\n",
        DOUBLE,
    ),
)

COPIES = (
    Copy(
        "somebody/patch.py",
        100,
        "TheirPlanner.plan",
        TARGET,
        (
            CopyCell("v1.0.0", "equal"),
            CopyCell(RENAME.short, "drifted", 1, 1, 1),
            CopyCell(
                "v1.1.0", "misfit", 2, 3, 2,
                (BadCall(140, "a, b = self.blocks.take(3)", "vllm.made.blocks:Blocks.take", "take(self, n)",
                         "it returns a tuple of 3, and is unpacked into 2"),),
            ),
            CopyCell(DOUBLE.short, "drifted", 4, 3, 2),
            CopyCell(BROKEN.short, "unreadable", why=f"{FILE}:3: invalid syntax"),
            CopyCell("main", "drifted", 5, 3, 3),
        ),
        "v1.0.0",
        "--- upstream\n+++ somebody/patch.py\n@@ -24,1 +124,1 @@\n-if count == self.bound:\n+if count == self.limit:\n",
    ),
)  # fmt: skip

#: One of everything: an edit is needed, a ref cannot be read, a copy does not fit.
EXAMPLE = Report(
    mode="git",
    source="/somewhere/vllm",
    refs=REFS,
    features=FEATURES,
    cells=CELLS,
    transitions=TRANSITIONS,
    callees=CALLEES,
    absorbed=ABSORBED,
    copies=COPIES,
    failures=(),
    notes=("3 calls of Planner.plan were not followed: their receivers have no type that the text says.",),
    counts=Counts(commits=400, relevant=5, blobs=9, judged=10, remembered=2, seconds=1.25),
)

#: Nothing happened.
GREEN = Report(
    mode="releases",
    source="vllm",
    refs=(Ref("1.0.0", "release", judged=True, version="1.0.0"), Ref("1.1.0", "release", judged=True, version="1.1.0")),
    features=FEATURES,
    cells=(
        _gate("1.0.0", "applied", "applied"), _retry("1.0.0"),
        _gate("1.1.0", "applied", "applied"), _retry("1.1.0"),
    ),
    counts=Counts(judged=4, seconds=0.5),
)  # fmt: skip
