"""A released vLLM, changed in one way: what must be refused is, by its own id; what must not matter does not.

The sources are vLLM's own, read when the tests run. Each mutation is found on the syntax tree and
made in the text. It leaves a mark on the line that the refusal has to name as the nearest one.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from balance_patcher.check import check_lane
from balance_patcher.errors import Failure, Outcome
from balance_patcher.registry import find_feature
from balance_patcher.report import LaneReport
from balance_patcher.source import LaneSpec

SCHEDULER = Path("vllm/v1/core/sched/scheduler.py")
CORE = Path("vllm/v1/engine/core.py")
HOOK = "_has_global_unfinished_reqs"
MARK = "# the mutant"
CAPS = ("max_num_running_reqs", "max_num_active_reqs")


class Text:
    """A module's text with a few ways to find and change statements."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def function(self, owner: str, name: str) -> ast.FunctionDef:
        (found,) = (
            item
            for node in self.tree.body
            if isinstance(node, ast.ClassDef) and node.name == owner
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name == name
        )
        return found

    @property
    def schedule(self) -> ast.FunctionDef:
        return self.function("Scheduler", "schedule")

    @property
    def stop(self) -> ast.If:
        """The admission stop: a comparison with the cap whose body is a lone break."""
        (found,) = (
            node
            for node in ast.walk(self.schedule)
            if isinstance(node, ast.If)
            and isinstance(node.test, ast.Compare)
            and getattr(node.test.comparators[0], "attr", "") in CAPS
            and isinstance(node.body[0], ast.Break)
        )
        return found

    def holder(self, of: ast.AST) -> tuple[ast.AST, list[ast.stmt], int]:
        """The parent, suite and index of a statement of ``schedule``."""
        for parent in ast.walk(self.schedule):
            for name in ("body", "orelse"):
                suite = getattr(parent, name, None)
                if isinstance(suite, list) and any(item is of for item in suite):
                    return parent, suite, suite.index(of)
        raise AssertionError(of)

    @property
    def loop(self) -> ast.While:
        parent, _, _ = self.holder(self.stop)
        assert isinstance(parent, ast.While)
        return parent

    @property
    def busy_loop(self) -> ast.While:
        (found,) = (n for n in self.function("DPEngineCoreProc", "run_busy_loop").body if isinstance(n, ast.While))
        return found

    @property
    def hook_call(self) -> ast.Assign:
        (found,) = (n for n in self.busy_loop.body if HOOK in ast.unparse(n) and isinstance(n, ast.Assign))
        return found

    def of(self, node: ast.stmt) -> str:
        """A statement's own lines, dedented."""
        lines = self.text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
        return textwrap.dedent("".join(lines))

    def put(self, node: ast.stmt, text: str, *, end: ast.stmt | None = None) -> str:
        """The module with other lines in a statement's place (up to another statement's end)."""
        lines = self.text.splitlines(keepends=True)
        new = textwrap.indent(textwrap.dedent(text).strip("\n") + "\n", " " * node.col_offset)
        lines[node.lineno - 1 : (end or node).end_lineno] = [new]
        return "".join(lines)

    def before(self, node: ast.stmt, text: str) -> str:
        return self.put(node, textwrap.dedent(text).strip("\n") + "\n" + self.of(node))

    def after(self, node: ast.stmt, text: str) -> str:
        return self.put(node, self.of(node).rstrip("\n") + "\n" + textwrap.dedent(text).strip("\n"))

    def at_header(self, node: ast.stmt, old: str, new: str) -> str:
        """The module with one word of a statement's first line changed, and the line marked."""
        lines = self.text.splitlines(keepends=True)
        line = lines[node.lineno - 1]
        assert old in line, line
        lines[node.lineno - 1] = line.replace(old, new, 1).rstrip("\n") + f"  {MARK}\n"
        return "".join(lines)


Edit = Callable[[Text], str]


@dataclass(frozen=True)
class Mutation:
    """One change of one file, and the id by which it must be refused.

    ``line`` names the line that the nearest candidate must stand on: the mark that the edit leaves
    unless a test says how to find it in the changed text.
    """

    name: str
    file: Path
    edit: Edit
    code: str
    versions: tuple[str, ...] = ("0.23.0", "0.32.0")
    line: Callable[[Text], int] | None = None


# -- the stop --------------------------------------------------------------------------------


def stop_with(test: Callable[[ast.Compare], str] | None = None, body: str = "break", tail: str = "") -> Edit:
    def edit(text: Text) -> str:
        compare = text.stop.test
        assert isinstance(compare, ast.Compare)
        shown = test(compare) if test else ast.unparse(compare)
        suite = textwrap.indent(body, "    ")
        return text.put(text.stop, f"if {shown}:  {MARK}\n{suite}\n{tail}")

    return edit


def compared(operator: str, cap: str = "{cap}") -> Callable[[ast.Compare], str]:
    def text(compare: ast.Compare) -> str:
        return f"{ast.unparse(compare.left)} {operator} {cap.format(cap=ast.unparse(compare.comparators[0]))}"

    return text


def same_operator(cap: str) -> Callable[[ast.Compare], str]:
    def text(compare: ast.Compare) -> str:
        return compared({ast.Eq: "==", ast.GtE: ">="}[type(compare.ops[0])], cap)(compare)  # type: ignore[index]

    return text


def loop_into_function(text: Text) -> str:
    body = textwrap.indent(marked_stop(text, text.loop), "    ")
    return text.put(text.loop, f"def admit():\n{body}\nadmit()")


def loop_into_method(text: Text) -> str:
    moved = textwrap.indent(marked_stop(text, text.loop), "    ")
    without = Text(text.put(text.loop, "self._admit_waiting()"))
    return without.after(without.schedule, f"\ndef _admit_waiting(self):\n{moved}")


def marked_stop(text: Text, around: ast.stmt) -> str:
    lines = text.text.splitlines(keepends=True)
    lines[text.stop.lineno - 1] = lines[text.stop.lineno - 1].rstrip("\n") + f"  {MARK}\n"
    return textwrap.dedent("".join(lines[around.lineno - 1 : around.end_lineno]))


def counted_by(value: str) -> Edit:
    """What is assigned to the count before the stop."""

    def edit(text: Text) -> str:
        _, suite, at = text.holder(text.stop)
        assign = suite[at - 1]
        assert isinstance(assign, ast.Assign)
        return text.put(assign, f"{ast.unparse(assign.targets[0])} = {value}  {MARK}")

    return edit


def queue_chosen_otherwise(text: Text) -> str:
    _, suite, at = text.holder(text.stop)
    select, check = suite[at + 1], suite[at + 2]
    assert isinstance(select, ast.Assign)
    assert isinstance(check, ast.Assert)
    changed = text.put(select, "request_queue = self.waiting or self.skipped_waiting")
    return changed.replace(text.of(check).strip(), text.of(check).strip() + f"  {MARK}")


STOP = (
    Mutation("cap check renamed", SCHEDULER, stop_with(same_operator("self.max_num_admitted_reqs")), "BP101"),
    Mutation("cap minus one", SCHEDULER, stop_with(same_operator("{cap} - 1")), "BP101"),
    Mutation("cap through a helper", SCHEDULER, stop_with(lambda _: "self._at_capacity()"), "BP101"),
    Mutation(
        "cap check twice",
        SCHEDULER,
        lambda t: t.after(t.stop, f"if {ast.unparse(t.stop.test)}:  {MARK}\n    break"),
        "BP102",
    ),
    Mutation("greater than", SCHEDULER, stop_with(compared(">")), "BP112"),
    Mutation("not equal", SCHEDULER, stop_with(compared("!=")), "BP112"),
    Mutation("continue for break", SCHEDULER, stop_with(body="continue"), "BP113"),
    Mutation("return for break", SCHEDULER, stop_with(body="return"), "BP113"),
    Mutation("an effect before the break", SCHEDULER, stop_with(body="self.stopped = True\nbreak"), "BP114"),
    Mutation("an effect after the break", SCHEDULER, stop_with(body="break\nself.stopped = True"), "BP114"),
    Mutation("an else", SCHEDULER, stop_with(tail="else:\n    self.stopped = False"), "BP115"),
    Mutation("loop into a nested function", SCHEDULER, loop_into_function, "BP116"),
    Mutation("loop into a method", SCHEDULER, loop_into_method, "BP116"),
    Mutation(
        "stop in a try",
        SCHEDULER,
        lambda t: t.put(t.stop, f"try:\n    if {ast.unparse(t.stop.test)}:  {MARK}\n        break\nfinally:\n    pass"),
        "BP117",
    ),
    Mutation(
        "loop no longer in an if",
        SCHEDULER,
        lambda t: t.put(t.loop, "for _ in range(1):\n" + textwrap.indent(marked_stop(t, t.loop), "    ")),
        "BP117",
    ),
    Mutation("assert kept but select call gone", SCHEDULER, queue_chosen_otherwise, "BP117", ("0.23.0",)),
    Mutation(
        "count from a method",
        SCHEDULER,
        counted_by("self.get_num_unfinished_requests()"),
        "BP206",
        ("0.27.1", "0.32.0"),
    ),
    Mutation(
        "count with a walrus", SCHEDULER, counted_by("(self_count := len(self.running))"), "BP206", ("0.27.1", "0.32.0")
    ),
    Mutation(
        "count from a pop",
        SCHEDULER,
        counted_by("len(self.running) + self.running.pop().num_tokens"),
        "BP206",
        ("0.27.1", "0.32.0"),
    ),
)


# -- the targets -----------------------------------------------------------------------------


def decorated(text: Text) -> str:
    return text.put(text.schedule, "@traced\n" + text.of(text.schedule).replace("\n", f"  {MARK}\n", 1))


def twice(text: Text) -> str:
    return text.after(text.schedule, f"\ndef schedule(self):  {MARK}\n    return None")


def rebound(text: Text) -> str:
    return text.after(text.schedule, f"\nschedule = traced(schedule)  {MARK}")


def line_of_class(owner: str) -> Callable[[Text], int]:
    return lambda text: next(n.lineno for n in text.tree.body if isinstance(n, ast.ClassDef) and n.name == owner)


TARGETS = (
    Mutation("schedule renamed", SCHEDULER, lambda t: t.at_header(t.schedule, "schedule", "schedule_step"), "BP104"),
    Mutation(
        "hook renamed", CORE, lambda t: t.at_header(t.function("DPEngineCoreProc", HOOK), HOOK, HOOK + "_now"), "BP104"
    ),
    Mutation(
        "class renamed",
        SCHEDULER,
        lambda t: re.sub(r"^class Scheduler\b", "class CoreScheduler", t.text, flags=re.MULTILINE),
        "BP105",
        line=line_of_class("CoreScheduler"),
    ),
    Mutation(
        "engine class renamed",
        CORE,
        lambda t: re.sub(r"\bDPEngineCoreProc\b", "DataParallelEngineCoreProc", t.text),
        "BP105",
        line=line_of_class("DataParallelEngineCoreProc"),
    ),
    Mutation("schedule defined twice", SCHEDULER, twice, "BP106"),
    Mutation("schedule assigned anew", SCHEDULER, rebound, "BP106"),
    Mutation("schedule decorated", SCHEDULER, decorated, "BP107"),
    Mutation("schedule async", SCHEDULER, lambda t: t.at_header(t.schedule, "def", "async def"), "BP108"),
    Mutation(
        "schedule a generator",
        SCHEDULER,
        lambda t: Text(t.at_header(t.schedule, "def", "def")).before(t.schedule.body[-1], "yield"),
        "BP109",
    ),
)


# -- names -----------------------------------------------------------------------------------

NAMES = (
    Mutation(
        "our local is used", SCHEDULER, lambda t: t.before(t.schedule.body[0], f"balance_flag = False  {MARK}"), "BP301"
    ),
    Mutation(
        "our local is a parameter",
        SCHEDULER,
        lambda t: t.at_header(t.schedule, "(self", "(self, balance_flag=None"),
        "BP301",
    ),
    Mutation(
        "our local is used in a nested function",
        SCHEDULER,
        lambda t: t.before(t.schedule.body[0], f"def told():\n    balance_flag = 1  {MARK}\n    return balance_flag"),
        "BP301",
    ),
    Mutation(
        "our local is a global",
        SCHEDULER,
        lambda t: t.before(
            next(n for n in t.tree.body if isinstance(n, ast.ClassDef)), f"balance_flag = None  {MARK}\n"
        ),
        "BP301",
    ),
    Mutation(
        "the cap is set nowhere",
        SCHEDULER,
        lambda t: re.sub(r"(self\.max_num_active)_reqs = \(", rf"\1_slots = (  {MARK}", t.text),
        "BP303",
        ("0.32.0",),
    ),
)


# -- the engine core -------------------------------------------------------------------------


def hook_put(text: str) -> Edit:
    """Other lines in place of the hook's call; ``$`` stands for the call, and the line after ``!`` is marked."""

    def edit(module: Text) -> str:
        call = ast.unparse(module.hook_call)
        lines = text.replace("$", call).splitlines()
        return module.put(
            module.hook_call, "\n".join(f"{line.replace('!', '')}  {MARK}" if "!" in line else line for line in lines)
        )

    return edit


def group_after_engine(text: Text) -> str:
    init = text.function("EngineCoreProc", "__init__")
    group = next(n for n in ast.walk(init) if isinstance(n, ast.Expr) and "_init_data_parallel" in ast.unparse(n))
    engine = next(
        n for n in ast.walk(init) if isinstance(n, ast.Expr) and ast.unparse(n).startswith("super().__init__")
    )
    assert group.end_lineno is not None
    assert group.end_lineno < engine.lineno
    return text.put(group, f"{ast.unparse(engine)}  {MARK}\n{ast.unparse(group)}", end=engine)


def line_of_function(owner: str, name: str) -> Callable[[Text], int]:
    return lambda text: text.function(owner, name).lineno


ENGINE = (
    Mutation("hook in one branch", CORE, hook_put("if executed:\n    !$"), "BP201"),
    Mutation(
        "hook behind an and",
        CORE,
        hook_put("self.engines_running = !executed and self._has_global_unfinished_reqs(True)"),
        "BP201",
    ),
    Mutation("hook in an assert", CORE, hook_put("!assert self._has_global_unfinished_reqs(True)"), "BP201"),
    Mutation(
        "hook not called", CORE, hook_put("!self.engines_running = self._has_global_unfinished_requests(True)"), "BP201"
    ),
    Mutation(
        "an early continue", CORE, lambda t: t.before(t.hook_call, f"if self.sleeping:\n    continue  {MARK}"), "BP201"
    ),
    Mutation("an early break", CORE, lambda t: t.before(t.hook_call, f"if self.sleeping:\n    break  {MARK}"), "BP201"),
    Mutation(
        "a continue in the else of a loop",
        CORE,
        lambda t: t.before(t.hook_call, f"for _ in self.peers:\n    pass\nelse:\n    continue  {MARK}"),
        "BP201",
    ),
    Mutation("hook called twice", CORE, hook_put("$\n!$"), "BP202"),
    Mutation("hook called again on a path", CORE, hook_put("$\nif executed:\n    !$"), "BP202"),
    Mutation(
        "hook called in a helper too",
        CORE,
        lambda t: t.before(t.function("DPEngineCoreProc", HOOK).body[-1], f"self.{HOOK}(True)  {MARK}"),
        "BP202",
    ),
    Mutation("hook in a try", CORE, hook_put("try:\n    !$\nexcept RuntimeError:\n    pass"), "BP203"),
    Mutation("hook in a for", CORE, hook_put("for _ in range(1):\n    !$"), "BP203"),
    Mutation("hook in a while", CORE, hook_put("while self.busy:\n    !$"), "BP203"),
    Mutation("hook under suppress", CORE, hook_put("with contextlib.suppress(RuntimeError):\n    !$"), "BP203"),
    Mutation(
        "busy loop in a try",
        CORE,
        lambda t: t.put(t.busy_loop, "try:\n" + textwrap.indent(t.of(t.busy_loop), "    ") + "finally:\n    pass"),
        "BP203",
        line=line_of_function("DPEngineCoreProc", "run_busy_loop"),
    ),
    Mutation("group set after the scheduler", CORE, group_after_engine, "BP204"),
    Mutation(
        "group renamed",
        CORE,
        lambda t: re.sub(r"\bdp_group\b", "dp_process_group", t.text),
        "BP207",
        line=line_of_function("DPEngineCoreProc", "_init_data_parallel"),
    ),
    Mutation(
        "scheduler renamed",
        CORE,
        lambda t: re.sub(r"\bself\.scheduler\b", "self.core_scheduler", t.text),
        "BP207",
        line=line_of_function("EngineCore", "__init__"),
    ),
)

MUTATIONS = (*STOP, *TARGETS, *NAMES, *ENGINE)
#: What a mutation breaks besides, and is said as well. From 0.31 what stands in for the guard is
#: recognised by the statements around the stop, so a change there is no longer recognised either.
ALSO = {
    "group renamed": {"BP303"},
    "scheduler renamed": {"BP303"},
    "cap check twice": {"BP101"},
    "stop in a try": {"BP101"},
}


def checked(folder: Path) -> LaneReport:
    report, _ = check_lane(LaneSpec("mutant", f"dir:{folder}"), [find_feature("balance")])
    return report


def mutated(folder: Path, file: Path, edit: Edit) -> Text:
    path = folder / file
    text = Text(path.read_text("utf-8"))
    changed = edit(text)
    assert changed != text.text, "the mutation changes nothing"
    path.write_text(changed, "utf-8")
    return Text(changed)


def rows(failure: Failure, name: str) -> list[str]:
    return [value for label, value in failure.fields if label == name]


CASES = [pytest.param(m, v, id=f"{m.name}-{v}") for m in MUTATIONS for v in m.versions]


@pytest.mark.parametrize(("mutation", "version"), CASES)
def test_a_mutation_is_refused_by_its_own_id(
    mutation: Mutation, version: str, release_copy: Callable[[str], Path]
) -> None:
    folder = release_copy(version)
    text = mutated(folder, mutation.file, mutation.edit)
    report = checked(folder)
    assert report.outcome is Outcome.BROKEN, report.all_failures
    codes = {failure.code for failure in report.all_failures}
    assert mutation.code in codes
    assert codes - ALSO.get(mutation.name, set()) == {mutation.code}
    line = (
        mutation.line(text)
        if mutation.line
        else next(at for at, content in enumerate(text.text.splitlines(), 1) if MARK in content)
    )
    failure = next(failure for failure in report.all_failures if failure.code == mutation.code)
    assert f"{mutation.file.name}:{line} " in " ".join(rows(failure, "nearest")) + " "
    assert failure.next
    assert rows(failure, "declared") or failure.code.startswith("BP2")
    assert all(re.fullmatch(r"deltas/balance\.py:\d+", row) for row in rows(failure, "declared"))
    assert all(feature.status == "failed" for feature in report.features)


# -- ways around the gate and the hook -------------------------------------------------------


def admission(text: Text) -> ast.stmt:
    (found,) = [
        node
        for node in ast.walk(text.schedule)
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("self.running.append(")
    ]
    return found


def stop_behind_admission(text: Text) -> str:
    stop = textwrap.dedent(text.of(text.stop))
    without = Text(text.put(text.stop, "pass"))
    return without.after(admission(without), stop)


def admits_in_else(text: Text) -> str:
    return text.after(text.loop, "else:\n    self.running.append(self.waiting.pop_request())")


def loop_of(text: Text) -> ast.stmt:
    (loop,) = [s for s in text.function("DPEngineCoreProc", "run_busy_loop").body if isinstance(s, ast.While)]
    return loop


def step_of(text: Text) -> ast.stmt:
    return next(s for s in loop_of(text).body if "self._process_engine_step()" in ast.unparse(s))  # type: ignore[attr-defined]


def subclass_with_a_hook(text: Text) -> str:
    return text.text + f"\n\nclass Own(DPEngineCoreProc):\n    def {HOOK}(self, local):\n        return local\n"


AROUND: tuple[tuple[str, Path, Edit, str], ...] = (
    # From 0.31 the empty-queue guard wants the stop where it was, and says so first.
    ("the stop behind the admission", SCHEDULER, stop_behind_admission, "BP204 BP101"),
    ("a second admission", SCHEDULER, admits_in_else, "BP204"),
    ("another loop first", CORE, lambda t: t.before(loop_of(t), "if self.fast:\n    return self._fast()"), "BP203"),
    ("two steps a turn", CORE, lambda t: t.after(step_of(t), "self._process_engine_step()"), "BP204"),
    ("a subclass with a hook of its own", CORE, subclass_with_a_hook, "BP203"),
    ("another max", SCHEDULER, lambda t: t.before(t.loop, "max = min"), "BP301"),
    ("another len", SCHEDULER, lambda t: t.text + "\nlen = id\n", "BP301"),
    ("upstream has the queue", SCHEDULER, lambda t: t.before(t.loop, "self.balance_queue = []"), "BP301"),
    (
        "upstream has the count",
        SCHEDULER,
        lambda t: t.after(t.schedule, "\ndef _balance_count(self):\n    return 0"),
        "BP301",
    ),
)


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0"])
@pytest.mark.parametrize(("name", "file", "edit", "code"), AROUND, ids=[row[0] for row in AROUND])
def test_a_way_around_the_gate_or_the_hook_is_not_green(
    name: str, file: Path, edit: Edit, code: str, version: str, release_copy: Callable[[str], Path]
) -> None:
    folder = release_copy(version)
    mutated(folder, file, edit)
    report = checked(folder)
    assert report.outcome is Outcome.BROKEN
    assert {failure.code for failure in report.all_failures} & set(code.split()), name


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/nowhere")], ids=["folder", "dangling"])
def test_what_is_no_file_could_not_be_checked(
    make: Callable[[Path], None], release_copy: Callable[[str], Path]
) -> None:
    folder = release_copy("0.32.0")
    (folder / SCHEDULER).unlink()
    make(folder / SCHEDULER)
    report = checked(folder)
    assert report.outcome is Outcome.UNKNOWN
    assert [failure.code for failure in report.all_failures] == ["BP514"]


# -- what does not matter --------------------------------------------------------------------


def black_like(text: str) -> str:
    """Every call of the function broken over lines, as a formatter with a short line would."""
    module = Text(text)
    lines = text.splitlines(keepends=True)
    stop = module.stop
    assert isinstance(stop.test, ast.Compare)
    left, right = ast.unparse(stop.test.left), ast.unparse(stop.test.comparators[0])
    sign = {ast.Eq: "==", ast.GtE: ">="}[type(stop.test.ops[0])]  # type: ignore[index]
    pad = " " * stop.col_offset
    new = f"{pad}if (\n{pad}    {left}\n{pad}    {sign} {right}\n{pad}):\n{pad}    break\n"
    lines[stop.lineno - 1 : stop.end_lineno] = [new]
    return "".join(lines)


def comments_everywhere(text: str) -> str:
    """A comment above, and at the end of, each line on which a statement of the module begins."""
    lines = text.splitlines()
    for node in sorted((n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)), key=lambda n: -n.lineno):
        line = lines[node.lineno - 1]
        if not line[: node.col_offset].strip():
            lines.insert(node.lineno - 1, " " * node.col_offset + "# why, indeed: if a: break")
    return "\n".join(lines) + "\n"


def no_comments(text: str) -> str:
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip(" ") + lines[row - 1][token.end[1] :]
    return "".join(lines)


def tabs(text: str) -> str:
    """Tabs for indentation, strings that go over several lines left alone."""
    inside = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno is not None:
            inside |= set(range(node.lineno + 1, node.end_lineno + 1))

    def retabbed(line: str) -> str:
        bare = line.lstrip(" ")
        return "\t" * ((len(line) - len(bare)) // 4) + " " * ((len(line) - len(bare)) % 4) + bare

    numbered = enumerate(text.splitlines(keepends=True), 1)
    return "".join(line if at in inside else retabbed(line) for at, line in numbered)


def parenthesised(text: str) -> str:
    module = Text(text)
    stop = module.stop
    text = module.put(stop, f"if (({ast.unparse(stop.test)})):\n    break")
    guard = [
        n for n in ast.walk(Text(text).schedule) if isinstance(n, ast.Assert) and "request_queue" in ast.unparse(n.test)
    ]
    if guard and "is not None" in ast.unparse(guard[0].test):
        text = Text(text).put(guard[0], f"assert ({ast.unparse(guard[0].test)})")
    return text


def string_at_column_0(text: str) -> str:
    module = Text(text)
    first = module.loop.body[0]
    lines = 'if a:\n    break\n# a\n"""'
    return module.before(first, 'legend = """\n' + lines).replace(textwrap.indent(lines, " " * first.col_offset), lines)


def renamed(text: str) -> str:
    for old in ("num_running", "token_budget", "preempted_reqs", "request_queue", "scheduled_loras"):
        text = re.sub(rf"\b{old}\b", f"{old}_now", text)
    return text


def keyword_parameter(text: str) -> str:
    module = Text(text)
    header = module.text.splitlines()[module.schedule.lineno - 1]
    return text.replace(header, header.replace(") ->", ", *, budget_scale: float = 1.0) ->"), 1)


def early_work_in_the_loop(text: str) -> str:
    module = Text(text)
    return module.before(module.loop.body[0], "if self.traced:\n    self.trace()")


HARMLESS: dict[str, Callable[[str], str | bytes]] = {
    "written by ast.unparse": lambda text: ast.unparse(ast.parse(text)) + "\n",
    "broken over lines": black_like,
    "comments everywhere": comments_everywhere,
    "no comments": no_comments,
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "latin-1 cookie": lambda text: (
        "# -*- coding: latin-1 -*-\n# caf\xe9\n" + text.encode("ascii", "backslashreplace").decode()
    ).encode("latin-1"),
    "tabs": tabs,
    "form feeds": lambda text: text.replace("\nclass ", "\n\x0cclass "),
    "no newline at the end": lambda text: text.rstrip("\n"),
    "parenthesised": parenthesised,
    "a string at column 0 in the loop": string_at_column_0,
    "unrelated renames": renamed,
    "a new keyword parameter": keyword_parameter,
    "more work in the loop": early_work_in_the_loop,
}


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0"])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_matter_still_applies(name: str, version: str, release_copy: Callable[[str], Path]) -> None:
    folder = release_copy(version)
    file = folder / SCHEDULER
    before = file.read_bytes()
    changed = HARMLESS[name](before.decode())
    file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    assert file.read_bytes() != before
    report = checked(folder)
    assert report.all_failures == []
    assert report.outcome is Outcome.HOLDS
    (feature,) = report.features
    assert feature.reversible is True
    statuses = [delta.status for delta in feature.deltas if ".scaling" not in delta.name]
    guard = "applied" if version == "0.23.0" else "absorbed"
    assert statuses == ["applied", "applied", "not-applicable", guard, "applied"]
    if name == "a new keyword parameter":
        assert "forwards" in feature.deltas[0].detail
        assert "budget_scale=budget_scale" in feature.deltas[0].detail


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0"])
def test_the_busy_loop_may_be_reformatted(version: str, release_copy: Callable[[str], Path]) -> None:
    folder = release_copy(version)
    file = folder / CORE
    file.write_text(ast.unparse(ast.parse(file.read_text("utf-8"))), "utf-8")
    assert checked(folder).outcome is Outcome.HOLDS


# -- through the command line ----------------------------------------------------------------


def run(*arguments: str) -> int:
    from balance_patcher.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    code = stop.value.code
    assert isinstance(code, int)
    return code


def test_the_command_prints_a_refusal_in_full_and_exits_1(
    release_copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = release_copy("0.32.0")
    text = mutated(folder, SCHEDULER, stop_with(body="continue"))
    assert run(f"mutant=dir:{folder}") == 1
    out = capsys.readouterr().out
    assert "mutant: BP113" in out
    assert re.search(rf"^  nearest +scheduler\.py:{marked_line(text)}  `if .*: continue`", out, re.MULTILINE)
    assert re.search(r"^  declared +deltas/balance\.py:\d+$", out, re.MULTILINE)
    assert re.search(r"^  next +\S", out, re.MULTILINE)
    assert "Broken: mutant (1 of 1 lane)." in out


def marked_line(text: Text) -> int:
    return next(at for at, line in enumerate(text.text.splitlines(), 1) if MARK in line)
