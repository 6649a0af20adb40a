"""Splice planned edits into a module's text, and prove what came of it.

The whole module's text is edited, never a dedented function: multi-line strings, comments, line
ends and everything outside the function stay as they are, byte for byte. Inserted lines carry a
marker that names their delta. Two independent routes must agree: the edited text, parsed, and
the edits made on the tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .delta import AddParameter, CallThrough, InsertAfter, InsertBefore, Prologue, Replace
from .errors import PatchError, refuse
from .pattern import same
from .plan import Plan, Step, Target, docstring_length, find_target, in_order
from .render import head
from .source import Lane, ModuleText

MARK = "  # bp: "
_MARKED = re.compile(r".*  # bp: (?P<delta>[\w.-]+)$")


@dataclass(frozen=True)
class Splice:
    """One change of the text: characters ``start`` to ``end`` become ``text``.

    ``delta`` made it; ``whole`` says that it is made of whole lines.
    """

    start: int
    end: int
    text: str
    delta: str
    whole: bool = True


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
        starts = _line_starts(self.text)
        origins: list[tuple[int | None, str | None]] = []
        before = _line_starts(self.original.text)
        for start in starts:
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
                line = self.text[start:].splitlines()[0] if self.text[start:] else ""
                marked = _MARKED.match(line)
                origins.append((None, marked["delta"] if marked else inserted.delta))
            else:
                origins.append((_line_of(before, start - shift), None))
        return origins


def rewrite(plan: Plan) -> dict[str, Rewrite]:
    """The rewritten modules of a plan, by module name; a call-through rewrites nothing.

    Raises:
        PatchError: BP401–BP404. Nothing is half done: there is a result for all or for none.
    """
    failures = []
    splices: dict[str, list[Splice]] = {}
    for name, steps in plan.steps.items():
        target = plan.target(name)
        for step in in_order(steps):
            try:
                made = _splice(target, step)
            except PatchError as error:
                failures += error.failures
                continue
            splices.setdefault(target.text.module, []).extend(made)
    if failures:
        raise PatchError(*failures)
    return {module: _assemble(plan, module, made) for module, made in splices.items() if made}


def _assemble(plan: Plan, module: str, splices: list[Splice]) -> Rewrite:
    original = plan.lane.module(module)
    assert original is not None, module  # noqa: S101 - its target was found there
    ordered = sorted(splices, key=lambda splice: (splice.start, splice.end))  # stable: declared order at one point
    parts, at = [], 0
    for splice in ordered:
        parts += [original.text[at : splice.start], splice.text]
        at = splice.end
    text = "".join([*parts, original.text[at:]])
    result = Rewrite(original, text, tuple(ordered))
    _prove(plan, result)
    return result


# -- one edit --------------------------------------------------------------------------------


def _splice(target: Target, step: Step) -> list[Splice]:
    edit = step.edit
    if isinstance(edit, CallThrough):
        return []
    if isinstance(edit, AddParameter):
        return [_parameter(target, step)]
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
    first = _first_line(statement)
    floor = _floor(target, statement)
    while first - 1 > floor and lines[first - 2].lstrip(" \t\f").startswith("#"):
        first -= 1
    start = _line_starts(target.text.text)[first - 1]
    text = _marked(step, indent, _line_end(target, first))
    return Splice(start, start, text, step.delta.name)


def _after(target: Target, step: Step, statement: ast.stmt) -> Splice:
    indent = _indent(target, step, statement)
    last = _logical_end(target, step, statement)
    lines = target.text.lines
    while isinstance(statement, _COMPOUND) and last < len(lines) and _deeper_comment(lines[last], indent):
        last += 1
    text = _marked(step, indent, _line_end(target, last))
    if last == len(lines) and not lines[-1].endswith(("\n", "\r")):
        end = _line_end(target, last)
        return Splice(len(target.text.text), len(target.text.text), end + text[: -len(end)], step.delta.name)
    start = sum(map(len, lines[:last]))
    return Splice(start, start, text, step.delta.name)


_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef, ast.AsyncFor, ast.AsyncWith)


def _deeper_comment(line: str, indent: str) -> bool:
    bare = line.lstrip(" \t\f")
    return bare.startswith("#") and len(line) - len(bare) > len(indent)


def _replace(target: Target, step: Step) -> Splice:
    lines = target.text.lines
    first, last = step.statements[0], step.statements[-1]
    indent = _indent(target, step, first)
    end = _logical_end(target, step, last)
    begin = _first_line(first)
    start = sum(map(len, lines[: begin - 1]))
    stop = sum(map(len, lines[:end]))
    kept = "".join(f"{indent}{comment}{_line_end(target, begin)}" for comment in _comments("".join(lines[begin - 1 : end])))
    text = kept + _marked(step, indent, _line_end(target, begin))
    if end == len(lines) and not lines[-1].endswith(("\n", "\r")):
        text = text[: -len(_line_end(target, begin))]
    return Splice(start, stop, text, step.delta.name)


def _comments(text: str) -> list[str]:
    """The comments of a few lines of source, strings left alone."""
    found, at = [], 0
    quote = re.compile(r"'''|\"\"\"|'|\"")
    while at < len(text):
        if text[at] == "#":
            end = re.compile(r"[\r\n]|$").search(text, at)
            stop = end.start() if end else len(text)
            found.append(text[at:stop].rstrip())
            at = stop
        elif match := quote.match(text, at):
            at = match.end()
            while at < len(text) and not text.startswith(match.group(), at):
                at += 2 if text[at] == "\\" else 1
            at += len(match.group())
        else:
            at += 1
    return found


def _parameter(target: Target, step: Step) -> Splice:
    arguments = target.node.args
    text = target.text.text
    positional = [*arguments.posonlyargs, *arguments.args]
    nodes: list[ast.expr | ast.arg] = [*positional[-1:], *(arguments.defaults[-1:] if positional else [])]
    if nodes:
        last = max(nodes, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
        at = _offset(target.text, last.end_lineno or 0, last.end_col_offset or 0)
        if arguments.posonlyargs and not arguments.args:
            at = text.index("/", at) + 1
        return Splice(at, at, f", {step.text}", step.delta.name, whole=False)
    at = text.index("(", _offset(target.text, target.node.lineno, target.node.col_offset)) + 1
    more = any((arguments.vararg, arguments.kwonlyargs, arguments.kwarg))
    return Splice(at, at, step.text + (", " if more else ""), step.delta.name, whole=False)


def _marked(step: Step, indent: str, end: str) -> str:
    lines = step.text.splitlines()
    return "".join(f"{indent}{line}{MARK}{step.delta.name}{end}" if line.strip() else end for line in lines)


# -- lines -----------------------------------------------------------------------------------


def _line_starts(text: str) -> list[int]:
    starts = [0] if text else []
    for match in re.finditer(r"\r\n|\n|\r", text):
        if match.end() < len(text):
            starts.append(match.end())
    return starts


def _line_of(starts: list[int], offset: int) -> int:
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if starts[middle] <= offset:
            low = middle + 1
        else:
            high = middle
    return low


def _offset(text: ModuleText, line: int, column: int) -> int:
    """The character offset of a node's position, whose column counts UTF-8 bytes."""
    before = text.lines[line - 1].encode("utf-8", "surrogatepass")[:column]
    return sum(map(len, text.lines[: line - 1])) + len(before.decode("utf-8", "surrogatepass"))


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _line_end(target: Target, line: int) -> str:
    for text in (target.text.lines[line - 1], target.text.lines[0]):
        match = re.search(r"(\r\n|\n|\r)$", text)
        if match:
            return match.group()
    return "\n"


def _indent(target: Target, step: Step, statement: ast.stmt) -> str:
    """The literal indentation of a statement's line; refuses a statement that does not start its line."""
    line = _first_line(statement)
    text = target.text.lines[line - 1]
    column = statement.col_offset if line == statement.lineno else len(text) - len(text.lstrip(" \t\f"))
    before = text.encode("utf-8", "surrogatepass")[:column].decode("utf-8", "surrogatepass")
    if line != statement.lineno:
        before = text[: len(text) - len(text.lstrip(" \t\f"))]
    if not before.strip(" \t\f"):
        parent, name, suite, _ = target.places.get(id(statement), (None, "", [], 0))
        if isinstance(parent, ast.If) and name == "orelse" and isinstance(statement, ast.If) and text.lstrip(" \t\f").startswith("elif"):
            raise _refusal("BP403", target, step, statement)
        return before
    _, _, suite, at = target.places.get(id(statement), (None, "", [], 0))
    joined = at > 0 and (suite[at - 1].end_lineno or 0) >= line
    raise _refusal("BP402" if joined else "BP401", target, step, statement)


def _floor(target: Target, statement: ast.stmt) -> int:
    """The last line that belongs to what stands before a statement."""
    parent, _, suite, at = target.places.get(id(statement), (target.node, "body", target.node.body, 0))
    if at > 0:
        return suite[at - 1].end_lineno or 0
    header = [node for node in ast.walk(parent) if isinstance(node, ast.expr) and (node.end_lineno or 0) < _first_line(statement)]
    return max([getattr(parent, "lineno", 0), *(node.end_lineno or 0 for node in header)])


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
    "BP401": ("stands on its header's line", "put the suite on lines of its own upstream, or anchor the whole statement"),
    "BP402": ("shares its line with another statement", "put it on a line of its own upstream, or anchor something else"),
    "BP403": ("is an `elif`", "anchor the whole `if` statement, or the suite inside"),
    "BP404": ("cannot be delimited", "report this with the source"),
}


def _refusal(code: str, target: Target, step: Step, statement: ast.stmt) -> PatchError:
    why, next_step = _WHY[code]
    shown = head(statement)
    return refuse(
        code, f"delta {step.delta.name!r}: `{shown}` {why}; nothing was patched.",
        ("target", target.name), ("nearest", f"{target.where(statement)}  `{shown}`"), ("declared", step.delta.declared),
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


def _prove_outside(result: Rewrite, targets: Sequence[tuple[Target, Target]]) -> None:
    """Lines before, between and after the rewritten functions are upstream's."""
    old, new = result.original.lines, ModuleText("", "", "", result.text).lines
    done_old = done_new = 0
    for before, after in sorted(targets, key=lambda pair: pair[0].node.lineno):
        if old[done_old : _first_line(before.node) - 1] != new[done_new : _first_line(after.node) - 1]:
            raise _unproven(result, f"text before {before.qualname} changed")
        done_old, done_new = before.node.end_lineno or 0, after.node.end_lineno or 0
    tail = new[done_new:]
    if tail and old[-len(tail) :] != tail:
        raise _unproven(result, "text after the last function changed")


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

    The marks are read from the new text, so a line that lost its mark is noticed.
    """
    text, shift, parts, at = result.text, 0, [], 0
    for splice in result.splices:
        begin = splice.start + shift
        stop = begin + len(splice.text)
        parts.append(text[at:begin])
        old = result.original.text[splice.start : splice.end]
        unmarked = [
            line for line in splice.text.splitlines()
            if line.strip() and not _MARKED.match(line) and not line.lstrip().startswith("#")
        ]  # fmt: skip
        if splice.whole and unmarked:
            parts.append(text[begin:stop])
        else:
            parts.append(old)
        at, shift = stop, shift + len(splice.text) - (splice.end - splice.start)
    return "".join([*parts, text[at:]])


def _unproven(result: Rewrite, why: str) -> PatchError:
    return refuse(
        "BP404", f"{result.original.module}: {why}; nothing was patched.", ("file", result.original.display),
        next="report this with the source file", file=result.original.display,
    )  # fmt: skip
