"""Splice planned edits into a module's text, and prove what came of it.

The whole module's text is edited, never a dedented function: multi-line strings, comments, line
ends and everything outside the function stay as they are, byte for byte. Inserted lines carry a
marker that names their delta. Two independent routes must agree: the edited text, parsed, and
the edits made on the tree.
"""

from __future__ import annotations

import ast
import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .alone import first_line, span
from .delta import APART, AddParameter, InsertAfter, InsertBefore, Prologue, Replace
from .errors import Failure, PatchError, refuse
from .lines import physical_lines, starts
from .matching import same
from .outline import function_alone
from .plan import Plan, Step, in_order
from .source import Lane, ModuleText
from .splice import MARK, MARKED, Splice, splices_of
from .targets import Target, docstring_length, find_target


@dataclass(frozen=True)
class Rewrite:
    """A module with its edits in.

    Attributes:
        original: The module as upstream has it.
        text: The text that would run, without byte order mark.
        splices: What was changed, in the original's character offsets, sorted.
        targets: The rewritten functions, found again in the new text.
    """

    original: ModuleText
    text: str
    splices: tuple[Splice, ...]
    targets: dict[str, Target] = field(default_factory=dict)

    @property
    def filename(self) -> str:
        """What tracebacks call it; the brackets make ``inspect`` look into ``linecache``."""
        return f"<balance_patcher {self.original.module}>"

    @cached_property
    def new(self) -> ModuleText:
        """The text as a module."""
        original = self.original
        return ModuleText(original.module, original.path, self.filename, self.text, piecemeal=original.piecemeal)

    @property
    def line_map(self) -> list[tuple[int | None, str | None]]:
        """For each line of the new text: upstream's line, counted from 1, or the delta that put it in."""
        lines = physical_lines(self.text)
        origins: list[tuple[int | None, str | None]] = []
        before = self.original.starts
        for start, line in zip(starts(lines), lines, strict=True):
            shift, inserted = 0, None
            for splice in self.splices:
                begin = splice.start + shift
                if start < begin:
                    break
                if splice.whole and start < begin + len(splice.text):
                    inserted = splice
                    break
                shift += len(splice.text) - (splice.end - splice.start)
            if inserted is not None:
                marked = MARKED.match(line.rstrip("\r\n"))
                origins.append((None, marked["delta"] if marked else inserted.delta))
            else:
                origins.append((bisect.bisect_right(before, start - shift), None))
        return origins


def rewrite(plan: Plan) -> dict[str, Rewrite]:
    """The rewritten modules of a plan, by module name; a function of its own rewrites nothing.

    Raises:
        PatchError: BP401–BP404. Nothing is half done: there is a result for all or for none.
    """
    splices = _splices(plan)
    return {module: _assemble(plan, module, made) for module, made in splices.items() if made}


def spliced(plan: Plan) -> dict[str, Rewrite]:
    """The same without their proofs, and without their functions: not to be run."""
    return {module: _spliced(plan, module, made) for module, made in _splices(plan).items() if made}


def function_in(plan: Plan, name: str, result: Rewrite) -> Target | None:
    """A function that a plan edits, as it is in such a text; ``None`` where its lines alone do not say what it is."""
    if name not in result.targets:
        found = _alone(plan.target(name), {step.delta.name for step in plan.steps[name]}, result)
        result.targets.update({name: found} if found is not None else {})
    return result.targets.get(name)


def _splices(plan: Plan) -> dict[str, list[Splice]]:
    failures: list[Failure] = []
    splices: dict[str, list[Splice]] = {}
    for name, steps in plan.steps.items():
        target = plan.target(name)
        made = splices.setdefault(target.text.module, [])
        ends: dict[tuple[int, int], int] = {}
        for step in in_order(steps):
            try:
                made += _in_turn(target, step, splices_of(target, step, steps), ends)
            except PatchError as error:
                failures += error.failures
    if failures:
        raise PatchError(*failures)
    return splices


def _assemble(plan: Plan, module: str, splices: list[Splice]) -> Rewrite:
    result = _spliced(plan, module, splices)
    _prove(plan, result)
    return result


def _spliced(plan: Plan, module: str, splices: list[Splice]) -> Rewrite:
    original = plan.lane.module(module)
    assert original is not None, module  # noqa: S101 - its target was found there
    # Stable: declared order at one point.
    ordered = sorted(splices, key=lambda splice: (splice.start, splice.end, -splice.depth))
    parts, at = [], 0
    for splice in ordered:
        parts += [original.text[at : splice.start], splice.text]
        at = splice.end
    text = "".join([*parts, original.text[at:]])
    return Rewrite(original, text, tuple(ordered))


# -- one edit --------------------------------------------------------------------------------


def _in_turn(target: Target, step: Step, made: list[Splice], ends: dict[tuple[int, int], int]) -> list[Splice]:
    """Move an insertion down to where an earlier one at the same point stands: comments lie between."""
    if not isinstance(step.edit, (InsertBefore, InsertAfter, Prologue)):
        return made
    suite, at, _ = _gap(target, step)
    start = ends[id(suite), at] = max(made[0].start, ends.get((id(suite), at), 0))
    return [replace(made[0], start=start, end=start)]


# -- proofs ----------------------------------------------------------------------------------


def _prove(plan: Plan, result: Rewrite) -> None:
    """Unchanged outside the targets, trees equal to the edited trees, and reversible (else BP404)."""
    module = result.original.module
    for name in plan.steps:
        if name.partition(":")[0] == module:
            # What stands outside of it is upstream's, which is proven below: it need not be parsed a second time.
            alone = function_in(plan, name, result)
            result.targets[name] = alone or _in_whole(plan.target(name), name, result)
    for name, found in result.targets.items():
        if not _equals_edited(plan, name, found):
            raise _unproven(result, f"the tree of {name} is not the edited tree")
    _prove_outside(result, [(plan.target(name), target) for name, target in result.targets.items()])
    if take_out(result) != result.original.text:
        raise _unproven(result, "taking the deltas out does not give upstream's text back")
    _prove_spliced(plan, result)


def _alone(target: Target, edits: set[str], result: Rewrite) -> Target | None:
    """A function that deltas rewrote, of its own lines; ``None`` where they alone do not say what it is."""
    first, last = span(target.text, target.node)
    ends = [*target.text.starts, len(target.text.text)]
    # What is put in at its end may stand behind comments that belong to an inner suite.
    end = max([ends[last], *(splice.start for splice in result.splices if splice.delta in edits)])
    begin, end = _moved(result, ends[first - 1]), _moved(result, end)
    new = result.new
    number = len(physical_lines(result.text[:begin])) + 1
    node = function_alone(physical_lines(result.text[begin:end]), target.qualname, number)
    return None if node is None else Target(new, target.qualname, node, target.owner)


def _moved(result: Rewrite, at: int) -> int:
    """Where the start of one of upstream's lines is in the new text, behind what was put in there."""
    return at + sum(len(s.text) - (s.end - s.start) for s in result.splices if s.start <= at)


def _in_whole(target: Target, name: str, result: Rewrite) -> Target:
    """A rewritten function as it is found in the whole new text."""
    try:
        _ = result.new.tree
    except PatchError as error:
        raise _unproven(result, f"it does not parse: {error.failures[0].what}") from error
    found = find_target(_OneModule(result.new), name)
    if not isinstance(found, Target):
        raise _unproven(result, f"{name} is not found in it")
    # Somebody else's function may stand outside of the class that it is bound to.
    return found if found.owner else replace(found, owner=target.owner)


def _prove_spliced(plan: Plan, result: Rewrite) -> None:
    """Whole lines go in between whole lines, and only a replacement takes lines away."""
    module = result.original.module
    edits = [step.edit for name, steps in plan.steps.items() if name.partition(":")[0] == module for step in steps]
    replacing = sum(isinstance(edit, Replace) for edit in edits)
    ends = {*result.original.starts, len(result.original.text)}
    torn = any(splice.whole and not {splice.start, splice.end} <= ends for splice in result.splices)
    if torn or replacing != sum(splice.end > splice.start for splice in result.splices):
        raise _unproven(result, "a line is torn or taken away")
    if not any(isinstance(edit, (Replace, AddParameter)) for edit in edits):
        lines = result.new.lines
        left = "".join(line for line in lines if MARK not in line or not MARKED.match(line.rstrip("\r\n")))
        # Behind a last line that has no end of its own, an insertion gives it one.
        if result.original.text not in (left, *(left.removesuffix(end) for end in ("\n", "\r\n", "\r"))):
            raise _unproven(result, "what is left without the marked lines is not upstream's text")


def _prove_outside(result: Rewrite, targets: Sequence[tuple[Target, Target]]) -> None:
    """Lines before, between and after the rewritten functions are upstream's."""
    old, new = result.original.lines, result.new.lines
    done_old = done_new = 0
    for before, after in sorted(targets, key=lambda pair: pair[0].node.lineno):
        gap_old = old[done_old : first_line(before.text, before.node) - 1]
        gap_new = new[done_new : first_line(after.text, after.node) - 1]
        if not _ends_with(gap_old, gap_new):
            raise _unproven(result, f"text before {before.qualname} changed")
        done_old, done_new = before.node.end_lineno or 0, after.node.end_lineno or 0
    if not _ends_with(old[done_old:], new[done_new:]):
        raise _unproven(result, "text after the last function changed")


def _ends_with(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether two stretches are equal; comments at the end of a function are in it once something follows them."""
    more = len(old) - len(new)
    return more >= 0 and list(old[more:]) == list(new) and all(line.lstrip().startswith("#") for line in old[:more])


class _OneModule(Lane):
    """A lane that holds a single module, the rewritten one."""

    def __init__(self, text: ModuleText) -> None:
        self.name = text.display
        self._modules = {text.module: text}


def _equals_edited(plan: Plan, name: str, found: Target) -> bool:
    """Whether a parsed function equals upstream's tree with the edits made on it; that tree is put back."""
    target = plan.target(name)
    suites: dict[int, tuple[list[ast.stmt], list[tuple[int, int, Sequence[ast.stmt]]]]] = {}
    arguments = target.node.args
    positional, defaults = list(arguments.args), list(arguments.defaults)
    for step in in_order(plan.steps[name]):
        if isinstance(step.edit, AddParameter):
            arguments.args.append(ast.arg(step.edit.name))
            arguments.defaults.append(ast.parse(step.edit.default, mode="eval").body)
        elif not isinstance(step.edit, APART):
            suite, at, end = _gap(target, step)
            suites.setdefault(id(suite), (suite, []))[1].append((at, end, ast.parse(step.text).body))
    before = [(suite, list(suite)) for suite, _ in suites.values()]
    try:
        for suite, edits in suites.values():
            for at, end, statements in _merge(edits):
                suite[at:end] = statements
        return same(target.node, found.node)
    finally:
        arguments.args[:], arguments.defaults[:] = positional, defaults
        for suite, statements in before:
            suite[:] = statements


def _merge(edits: Sequence[tuple[int, int, Sequence[ast.stmt]]]) -> list[tuple[int, int, list[ast.stmt]]]:
    """Edits of one suite from its end to its start; those at one point joined in their order."""
    joined: dict[tuple[int, int], list[ast.stmt]] = {}
    for at, end, statements in edits:
        joined.setdefault((at, end), []).extend(statements)
    return [(at, end, joined[at, end]) for at, end in sorted(joined, reverse=True)]


def _gap(target: Target, step: Step) -> tuple[list[ast.stmt], int, int]:
    """The suite that a step edits, and the range of statements that it replaces."""
    if isinstance(step.edit, Prologue):
        at = docstring_length(target.node)
        return target.node.body, at, at
    _, _, suite, at = target.places[id(step.statements[0])]
    if isinstance(step.edit, Replace):
        return suite, at, at + len(step.statements)
    at += len(step.statements) if isinstance(step.edit, InsertAfter) else 0
    return suite, at, at


def take_out(result: Rewrite) -> str:
    """Upstream's text again: marked lines dropped, replaced statements and parameters put back.

    What is dropped is read from the new text, so a line that lost its mark is noticed.
    """
    text, shift, parts, at = result.text, 0, [], 0
    for splice in result.splices:
        begin = splice.start + shift
        stop = begin + len(splice.text)
        parts.append(text[at:begin])
        ours = text[begin:stop] == splice.text
        if splice.whole:
            kept = splice.end > splice.start  # a replacement keeps upstream's comments, which have no mark
            lines = [line for line in text[begin:stop].splitlines() if line.strip()]
            ours = ours and all(MARKED.match(line) or (kept and line.lstrip().startswith("#")) for line in lines)
        parts.append(result.original.text[splice.start : splice.end] if ours else text[begin:stop])
        at, shift = stop, shift + len(splice.text) - (splice.end - splice.start)
    return "".join([*parts, text[at:]])


def _unproven(result: Rewrite, why: str) -> PatchError:
    return refuse(
        "BP404", f"{result.original.module}: {why}; nothing was patched.", ("file", result.original.display),
        next="report this with the source file", file=result.original.display,
    )  # fmt: skip
