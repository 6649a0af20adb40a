"""Splice planned edits into a module's text, and prove what came of it.

The whole module's text is edited, never a dedented function: multi-line strings, comments, line
ends and everything outside the function stay as they are, byte for byte. Inserted lines carry a
marker that names their delta. Two independent routes must agree: the edited text, parsed, and
the edits made on the tree.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .delta import AddParameter, CallThrough, InsertAfter, InsertBefore, Prologue, Replace
from .errors import Failure, PatchError, refuse
from .pattern import _string_end, same
from .plan import Plan, Step, in_order
from .render import head
from .source import Lane, ModuleText
from .targets import Target, docstring_length, find_target

MARK = "  # bp: "
_MARKED = re.compile(r".*  # bp: (?P<delta>[\w.-]+)$")


@dataclass(frozen=True)
class Splice:
    """One change of the text: characters ``start`` to ``end`` become ``text``.

    ``delta`` made it; ``whole`` says that it is made of whole lines; ``depth`` is how deep its suite
    stands: where the end of an inner suite is the end of an outer one too, the inner comes first.
    """

    start: int
    end: int
    text: str
    delta: str
    whole: bool = True
    depth: int = 0


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

    @property
    def line_map(self) -> list[tuple[int | None, str | None]]:
        """For each line of the new text: upstream's line, counted from 1, or the delta that put it in."""
        lines = _lines(self.text)
        origins: list[tuple[int | None, str | None]] = []
        before = _starts(self.original.lines)
        for start, line in zip(_starts(lines), lines, strict=True):
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
                marked = _MARKED.match(line.rstrip("\r\n"))
                origins.append((None, marked["delta"] if marked else inserted.delta))
            else:
                origins.append((bisect.bisect_right(before, start - shift), None))
        return origins


def rewrite(plan: Plan) -> dict[str, Rewrite]:
    """The rewritten modules of a plan, by module name; a call-through rewrites nothing.

    Raises:
        PatchError: BP401–BP404. Nothing is half done: there is a result for all or for none.
    """
    failures: list[Failure] = []
    splices: dict[str, list[Splice]] = {}
    for name, steps in plan.steps.items():
        target = plan.target(name)
        made = splices.setdefault(target.text.module, [])
        ends: dict[tuple[int, int], int] = {}
        for step in in_order(steps):
            try:
                made += _in_turn(target, step, _splice(target, step, steps), ends)
            except PatchError as error:
                failures += error.failures
    if failures:
        raise PatchError(*failures)
    return {module: _assemble(plan, module, made) for module, made in splices.items() if made}


def _assemble(plan: Plan, module: str, splices: list[Splice]) -> Rewrite:
    original = plan.lane.module(module)
    assert original is not None, module  # noqa: S101 - its target was found there
    # Stable: declared order at one point.
    ordered = sorted(splices, key=lambda splice: (splice.start, splice.end, -splice.depth))
    parts, at = [], 0
    for splice in ordered:
        parts += [original.text[at : splice.start], splice.text]
        at = splice.end
    text = "".join([*parts, original.text[at:]])
    result = Rewrite(original, text, tuple(ordered))
    _prove(plan, result)
    return result


# -- one edit --------------------------------------------------------------------------------


def _in_turn(target: Target, step: Step, made: list[Splice], ends: dict[tuple[int, int], int]) -> list[Splice]:
    """Move an insertion down to where an earlier one at the same point stands: comments lie between."""
    if not isinstance(step.edit, (InsertBefore, InsertAfter, Prologue)):
        return made
    suite, at, _ = _gap(target, step)
    start = ends[id(suite), at] = max(made[0].start, ends.get((id(suite), at), 0))
    return [replace(made[0], start=start, end=start)]


def _splice(target: Target, step: Step, steps: Sequence[Step]) -> list[Splice]:
    edit = step.edit
    if isinstance(edit, CallThrough):
        return []
    if isinstance(edit, AddParameter):
        return [_parameter(target, step, [other for other in in_order(steps) if isinstance(other.edit, AddParameter)])]
    if isinstance(edit, Prologue):
        body, at = target.node.body, docstring_length(target.node)
        if at < len(body):
            return [_before(target, step, body[at])]
        return [_after(target, step, body[-1])]
    if isinstance(edit, InsertBefore):
        return [_before(target, step, step.statements[0])]
    if isinstance(edit, InsertAfter):
        return [_after(target, step, step.statements[-1])]
    return [_replace(target, step)]


def _before(target: Target, step: Step, statement: ast.stmt) -> Splice:
    lines = target.text.lines
    indent = _indent(target, step, statement)
    _, _, suite, at = target.places[id(statement)]
    if at + 1 < len(suite) and suite[at + 1].lineno <= (statement.end_lineno or 0):
        raise _refusal("BP402", target, step, statement)
    first = _first_line(target.text, statement)
    floor = _floor(target, statement)
    under = at > 0 and isinstance(suite[at - 1], _COMPOUND)
    while first - 1 > floor and lines[first - 2].lstrip(" \t\f").startswith("#"):
        if under and _deeper_comment(lines[first - 2], indent):
            break  # it belongs to the suite above
        first -= 1
    start = _starts(lines)[first - 1]
    text = _marked(step, indent, _line_end(target, first))
    return Splice(start, start, text, step.delta.name, depth=_depth(target, statement))


def _after(target: Target, step: Step, statement: ast.stmt) -> Splice:
    indent = _indent(target, step, statement)
    last = _logical_end(target, step, statement)
    lines = target.text.lines
    while isinstance(statement, _COMPOUND) and last < len(lines) and _deeper_comment(lines[last], indent):
        last += 1
    text = _marked(step, indent, _line_end(target, last))
    if last == len(lines) and not lines[-1].endswith(("\n", "\r")):
        end = _line_end(target, last)
        text = end + text[: -len(end)]
    start = sum(map(len, lines[:last]))
    return Splice(start, start, text, step.delta.name, depth=_depth(target, statement))


_COMPOUND = (
    ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef,
    ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef, getattr(ast, "TryStar", ast.Try),
)  # fmt: skip


def _depth(target: Target, statement: ast.stmt) -> int:
    return sum(1 for _ in target.ancestors(statement))


def _deeper_comment(line: str, indent: str) -> bool:
    bare = line.lstrip(" \t\f")
    return bare.startswith("#") and len(line) - len(bare) > len(indent)


def _replace(target: Target, step: Step) -> Splice:
    lines = target.text.lines
    first, last = step.statements[0], step.statements[-1]
    indent = _indent(target, step, first)
    end = _logical_end(target, step, last)
    begin = _first_line(target.text, first)
    start = sum(map(len, lines[: begin - 1]))
    stop = sum(map(len, lines[:end]))
    line_end = _line_end(target, begin)
    kept = "".join(f"{indent}{comment}{line_end}" for comment in _comments("".join(lines[begin - 1 : end])))
    text = kept + _marked(step, indent, line_end)
    if end == len(lines) and not lines[-1].endswith(("\n", "\r")):
        text = text[: -len(line_end)]
    return Splice(start, stop, text, step.delta.name)


def _comments(text: str) -> list[str]:
    """The comments of a few lines of source, strings left alone."""
    found, at = [], 0
    while at < len(text):
        end = _skip(text, at)
        if text[at] == "#":
            found.append(text[at:end].rstrip())
        at = max(end, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    """The end of the string or comment that begins at ``at``; ``at`` itself if none does."""
    if text[at] == "#":
        return min(end for end in (text.find("\n", at), text.find("\r", at), len(text)) if end >= 0)
    quote = next((quote for quote in ("'''", '"""', "'", '"') if text.startswith(quote, at)), None)
    return at if quote is None else _string_end(text, at + len(quote), quote)


def _parameter(target: Target, step: Step, added: Sequence[Step]) -> Splice:
    arguments = target.node.args
    text = target.text.text
    positional = [*arguments.posonlyargs, *arguments.args]
    nodes: list[ast.expr | ast.arg] = [*positional[-1:], *(arguments.defaults[-1:] if positional else [])]
    if nodes:
        last = max(nodes, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
        at = _offset(target.text, last.end_lineno or 0, last.end_col_offset or 0)
        at = _parameter_end(text, at, slash=not arguments.args)
        return Splice(at, at, f", {step.text}", step.delta.name, whole=False)
    at = _open_parenthesis(text, _offset(target.text, target.node.lineno, target.node.col_offset))
    others = any((arguments.vararg, arguments.kwonlyargs, arguments.kwarg))
    before = "" if step is added[0] else ", "
    after = ", " if others and step is added[-1] else ""
    return Splice(at, at, before + step.text + after, step.delta.name, whole=False)


def _parameter_end(text: str, at: int, *, slash: bool) -> int:
    """Where a parameter ends that is read up to ``at``: behind the parentheses of its default, or behind ``/``."""
    ends = [at]  # the last one is behind the parenthesis that closes the header
    while text[at] not in ":-":
        if text[at] == "/" or (text[at] == "," and not slash):
            return at + 1 if text[at] == "/" else ends[-1]
        if text[at] == ")":
            ends.append(at + 1)
        at = max(_skip(text, at), at + 1)
    return ends[-2]


def _open_parenthesis(text: str, at: int) -> int:
    """Behind the parenthesis that opens a header's parameters; type parameters stand before it."""
    depth = 0
    while depth or text[at] != "(":
        depth += (text[at] == "[") - (text[at] == "]")
        at = max(_skip(text, at), at + 1)
    return at + 1


def _marked(step: Step, indent: str, end: str) -> str:
    lines = [line for line in step.text.splitlines() if line.strip()]
    return "".join(f"{indent}{line}{MARK}{step.delta.name}{end}" for line in lines)


# -- lines -----------------------------------------------------------------------------------


def _lines(text: str) -> list[str]:
    return ModuleText("", "", "", text).lines


def _starts(lines: Sequence[str]) -> list[int]:
    """The character offset of each line."""
    return list(itertools.accumulate(map(len, lines[:-1]), initial=0)) if lines else []


def _offset(text: ModuleText, line: int, column: int) -> int:
    """The character offset of a node's position, whose column counts UTF-8 bytes."""
    before = text.lines[line - 1].encode("utf-8", "surrogatepass")[:column]
    return sum(map(len, text.lines[: line - 1])) + len(before.decode("utf-8", "surrogatepass"))


def _first_line(text: ModuleText, statement: ast.stmt) -> int:
    """The line where a statement begins, its decorators with it."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    while decorators and not text.lines[first - 1].lstrip(" \t\f").startswith("@"):
        first -= 1
    return first


def _line_end(target: Target, line: int) -> str:
    for text in (target.text.lines[line - 1], target.text.lines[0]):
        match = re.search(r"(\r\n|\n|\r)$", text)
        if match:
            return match.group()
    return "\n"


def _indent(target: Target, step: Step, statement: ast.stmt) -> str:
    """The literal indentation of a statement's line; refuses a statement that does not start its line."""
    line = _first_line(target.text, statement)
    text = target.text.lines[line - 1]
    before = text[: len(text) - len(text.lstrip(" \t\f"))]
    if line == statement.lineno:
        before = text.encode("utf-8", "surrogatepass")[: statement.col_offset].decode("utf-8", "surrogatepass")
    parent, name, suite, at = target.places[id(statement)]
    if before.strip(" \t\f"):
        joined = at > 0 and (suite[at - 1].end_lineno or 0) >= line
        raise _refusal("BP402" if joined else "BP401", target, step, statement)
    continues = _continues(target, statement)
    if continues is not None:
        code = "BP404" if at and ";" not in continues else "BP402" if at else "BP401"
        raise _refusal(code, target, step, statement)
    other = isinstance(parent, ast.If) and name == "orelse" and isinstance(statement, ast.If)
    if other and text[len(before) :].startswith("elif"):
        raise _refusal("BP403", target, step, statement)
    return before


def _continues(target: Target, statement: ast.stmt) -> str | None:
    """The text before a statement, if a backslash joins the statement's line to it."""
    line = _first_line(target.text, statement)
    above = "".join(target.text.lines[max(_floor(target, statement), 1) - 1 : line - 1])
    if not above.rstrip("\r\n").endswith("\\"):
        return None
    comments = _comments(above)
    return None if comments and above.rstrip().endswith(comments[-1]) else above


def _floor(target: Target, statement: ast.stmt) -> int:
    """The last line that belongs to what stands before a statement."""
    parent, _, suite, at = target.places[id(statement)]
    if at > 0:
        return suite[at - 1].end_lineno or 0
    first = _first_line(target.text, statement)
    ends = [node.end_lineno or 0 for node in ast.walk(parent) if isinstance(node, ast.expr)]
    return max([getattr(parent, "lineno", 0), *(end for end in ends if end < first)])


def _logical_end(target: Target, step: Step, statement: ast.stmt) -> int:
    """The number of the last physical line of a statement's logical line."""
    lines = target.text.lines
    line = statement.end_lineno or statement.lineno
    raw = lines[line - 1].encode("utf-8", "surrogatepass")[statement.end_col_offset or 0 :]
    rest = raw.decode("utf-8", "surrogatepass")
    while True:
        bare = rest.strip()
        if not bare or bare.startswith("#"):
            return line
        if bare.startswith(";"):
            raise _refusal("BP402", target, step, statement)
        if bare == "\\" and line < len(lines):
            line += 1
            rest = lines[line - 1]
            continue
        raise _refusal("BP404", target, step, statement)


_WHY = {
    "BP401": ("stands on its header's line", "anchor the whole statement, or give the suite lines of its own upstream"),
    "BP402": ("shares its line with another statement", "anchor something else, or give it a line of its own upstream"),
    "BP403": ("is an `elif`", "anchor the whole `if` statement, or the suite inside"),
    "BP404": ("cannot be delimited", "report this with the source"),
}


def _refusal(code: str, target: Target, step: Step, statement: ast.stmt) -> PatchError:
    why, next_step = _WHY[code]
    shown = head(statement)
    return refuse(
        code, f"delta {step.delta.name!r}: `{shown}` {why}; nothing was patched.", ("target", target.name),
        ("nearest", f"{target.where(statement)}  `{shown}`"), ("declared", step.delta.declared),
        next=next_step, file=target.text.display, line=statement.lineno,
    )  # fmt: skip


# -- proofs ----------------------------------------------------------------------------------


def _prove(plan: Plan, result: Rewrite) -> None:
    """Unchanged outside the targets, trees equal to the edited trees, and reversible (else BP404)."""
    module = result.original.module
    new = ModuleText(module, result.original.path, result.filename, result.text)
    try:
        _ = new.tree
    except PatchError as error:
        raise _unproven(result, f"it does not parse: {error.failures[0].what}") from error
    for name in plan.steps:
        if name.partition(":")[0] == module:
            found = find_target(_OneModule(new), name)
            if not isinstance(found, Target):
                raise _unproven(result, f"{name} is not found in it")
            result.targets[name] = found
    for name, found in result.targets.items():
        if not _equals_edited(plan, name, found):
            raise _unproven(result, f"the tree of {name} is not the edited tree")
    _prove_outside(result, [(plan.target(name), target) for name, target in result.targets.items()])
    if take_out(result) != result.original.text:
        raise _unproven(result, "taking the deltas out does not give upstream's text back")
    _prove_spliced(plan, result)


def _prove_spliced(plan: Plan, result: Rewrite) -> None:
    """Whole lines go in between whole lines, and only a replacement takes lines away."""
    module = result.original.module
    edits = [step.edit for name, steps in plan.steps.items() if name.partition(":")[0] == module for step in steps]
    replacing = sum(isinstance(edit, Replace) for edit in edits)
    ends = {*_starts(result.original.lines), len(result.original.text)}
    torn = any(splice.whole and not {splice.start, splice.end} <= ends for splice in result.splices)
    if torn or replacing != sum(splice.end > splice.start for splice in result.splices):
        raise _unproven(result, "a line is torn or taken away")
    if not any(isinstance(edit, (Replace, AddParameter)) for edit in edits):
        left = "".join(line for line in _lines(result.text) if not _MARKED.match(line.rstrip("\r\n")))
        # Behind a last line that has no end of its own, an insertion gives it one.
        if result.original.text not in (left, *(left.removesuffix(end) for end in ("\n", "\r\n", "\r"))):
            raise _unproven(result, "what is left without the marked lines is not upstream's text")


def _prove_outside(result: Rewrite, targets: Sequence[tuple[Target, Target]]) -> None:
    """Lines before, between and after the rewritten functions are upstream's."""
    old, new = result.original.lines, _lines(result.text)
    done_old = done_new = 0
    for before, after in sorted(targets, key=lambda pair: pair[0].node.lineno):
        gap_old = old[done_old : _first_line(before.text, before.node) - 1]
        gap_new = new[done_new : _first_line(after.text, after.node) - 1]
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
        elif not isinstance(step.edit, CallThrough):
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
            ours = ours and all(_MARKED.match(line) or (kept and line.lstrip().startswith("#")) for line in lines)
        parts.append(result.original.text[splice.start : splice.end] if ours else text[begin:stop])
        at, shift = stop, shift + len(splice.text) - (splice.end - splice.start)
    return "".join([*parts, text[at:]])


def _unproven(result: Rewrite, why: str) -> PatchError:
    return refuse(
        "BP404", f"{result.original.module}: {why}; nothing was patched.", ("file", result.original.display),
        next="report this with the source file", file=result.original.display,
    )  # fmt: skip
