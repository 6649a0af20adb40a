"""Write the seam that upstream could have for its admission stop, as a patch that is ready to propose.

``python tools/upstream_seam.py --repo ../vllm > seam.patch``, or ``--lane pypi:vllm==0.33.0``. The WAITING loop of
``Scheduler.schedule()`` ends at a comparison of its own. The patch moves that comparison, with what it counts and the
comments that explain it, into one method that a subclass may override. Nothing else changes, and that is proven: with
the method's body put back in the place of the call, the tree is upstream's.

Where the patch is applied, ``deltas/balance_seam.py`` overrides the method, and nothing is put into ``schedule``.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from balance_patcher.anchors import find_anchor
from balance_patcher.bound import suites_of
from balance_patcher.build import compile_plan
from balance_patcher.delta import Anchor, Replace, Variant
from balance_patcher.deltas.balance import ADMISSION_GATE, SCHEDULE, SCHEDULER, WAITING_LOOP
from balance_patcher.deltas.balance_seam import ASKED, NAME
from balance_patcher.errors import Outcome, PatchError, refuse
from balance_patcher.feature import Feature, Pure, RuntimeClass
from balance_patcher.invariants import check_invariants
from balance_patcher.lanes import lane_named
from balance_patcher.lines import comments_of, offset, physical_lines
from balance_patcher.matching import Mismatch, same
from balance_patcher.outputs import write as put
from balance_patcher.pattern import compile_pattern
from balance_patcher.plan import Placement, make_plan
from balance_patcher.render import head
from balance_patcher.source import Lane, LaneSpec, ModuleText, open_source
from balance_patcher.targets import Target, own_nodes, short

_ASKS = f"if self.{NAME}():\n    break"


def _moved(variant: Variant) -> Variant:
    """A shape of the gate's own anchor, with the call in the place of the stop."""
    if variant.status != "applied":
        return variant
    counted, cap = variant.exports["_balance_count"], variant.exports["_balance_cap"]
    return replace(variant, edits=(Replace(_ASKS),), exports={NAME: f"{counted} <$OP> {cap}"})


#: Where the gate of deltas/balance.py stands, the seam goes.
STOP = replace(
    ADMISSION_GATE,
    name="upstream.seam",
    why="A scheduler plugin can end admission by a rule of its own without a copy of schedule().",
    remove_when="upstream has the method",
    after=(),
    variants=tuple(map(_moved, ADMISSION_GATE.variants)),
)

# Nothing is built from it; the method that the loop asks is brought by the same change.
FEATURE = Feature(
    "upstream",
    "The change that upstream is asked for.",
    (STOP,),
    runtime=RuntimeClass("Scheduler", base=SCHEDULER, make=lambda upstream: upstream, provides=frozenset({NAME})),
    invariants=(Pure("what is counted is only read", delta=STOP.name, hole="VALUE"),),
)

#: Upstream's tests that exercise the stop, and what each drives it with.
TESTS = {
    "tests/v1/core/test_scheduler.py": "admission up to the cap",
    "tests/v1/core/test_async_scheduler.py": "the asynchronous scheduler, which inherits it",
    "tests/v1/core/test_priority_scheduler_random.py": "both policies, with preemption",
    "tests/v1/streaming_input/test_scheduler_streaming.py": "sessions that pause and go on",
}


@dataclass(frozen=True)
class Seam:
    """The change, on one lane.

    Attributes:
        before: Upstream's module.
        text: The module with the seam.
        line: Where the stop stands in upstream's.
        compared: What it compares, as upstream writes it.
        counted: What is compared, where a local name stands for it.
        tests: The tests to name.
    """

    before: ModuleText
    text: str
    line: int
    compared: str
    counted: str
    tests: tuple[str, ...]


def seam_of(lane: Lane) -> Seam:
    """Upstream's module of a lane with the stop in a method of its own.

    Raises:
        PatchError: Why it cannot be written: BP101 and its like where the stop is not found, BP111 where the method
            is there already, BP114 where what it counts is used further on; BP5xx, if the lane cannot be read.
    """
    plan = make_plan(lane, FEATURE)
    rewrites, _ = compile_plan(plan)
    failures = [failure for finding in check_invariants(plan, rewrites) for failure in finding.failures]
    if failures:
        raise PatchError(*failures)
    placement = plan.placement(STOP.name)
    target = placement.target
    assert target is not None  # noqa: S101 - it was placed there
    if placement.status == "absorbed":
        raise refuse(
            "BP111", f"{lane.source.spec} has the seam already; there is nothing to write",
            ("target", f"{target.name}   ({short(target.text.display)}:{placement.line})"),
            next="python -m balance_patcher verify says what becomes of the gate there",
        )  # fmt: skip
    (stop,) = placement.steps[0].statements
    assert isinstance(stop, ast.If)  # noqa: S101 - the anchor is one
    statements: list[ast.stmt] = [stop]
    if "COUNT" in placement.bound:
        _, _, suite, at = target.places[id(stop)]
        statements.insert(0, suite[at - 1])
        _refuse_second_reader(target, placement, statements)
    (result,) = rewrites.values()
    text = _with_method(target, result.targets[SCHEDULE], statements)
    _prove(target, text)
    held = tuple(path for path in TESTS if lane.source.read(path) is not None)
    counted = _segment(target.text, statements[0].value) if len(statements) > 1 else ""  # type: ignore[attr-defined]
    return Seam(target.text, text, stop.lineno, _segment(target.text, stop.test), counted, held or tuple(TESTS))


def _refuse_second_reader(target: Target, placement: Placement, statements: Sequence[ast.stmt]) -> None:
    """What the stop counts goes into the method with it, so nothing further on may read it."""
    count = placement.bound["COUNT"]
    reader: ast.AST | None = statements[0]  # what is no plain name may be read from anywhere
    if isinstance(count, ast.Name):
        own = {id(node) for statement in statements for node in ast.walk(statement)}
        loop = next(parent for parent, _ in target.ancestors(statements[0]) if isinstance(parent, ast.While))
        own |= {id(node) for node in own_nodes(target.node) if getattr(node, "lineno", loop.lineno) < loop.lineno}
        names = (node for node in ast.walk(target.node) if isinstance(node, ast.Name) and id(node) not in own)
        reader = next((node for node in names if node.id == count.id and isinstance(node.ctx, ast.Load)), None)
    if reader is None:
        return
    line = getattr(reader, "lineno", 0)
    raise refuse(
        "BP114", f"`{head(statements[0])}` counts for more than the stop",
        ("target", target.name), ("nearest", f"{target.where(reader)}  `{target.text.lines[line - 1].strip()}`"),
        ("declared", STOP.declared), next="write this change by hand: what is counted has another reader",
        file=target.text.display, line=line,
    )  # fmt: skip


# -- the text --------------------------------------------------------------------------------


def _with_method(target: Target, ours: Target, statements: Sequence[ast.stmt]) -> str:
    """The rewritten module without its marks, and with the method behind the function that asks it.

    Args:
        target: The function in upstream's text.
        ours: The same in the rewritten text, where the call stands.
        statements: What the call stands for.
    """
    lines = [re.sub(rf"  # bp: {re.escape(STOP.name)}(?=[\r\n]*$)", "", line) for line in ours.text.lines]
    ((match,), _) = find_anchor(ours, Anchor(ASKED, inside=WAITING_LOOP))
    (asks,) = match.statements
    at = asks.lineno - 1
    _, _, suite, place = ours.places[id(asks)]
    # The count, and the comments that explain the comparison, go with it.
    first = _comments_above(lines, suite[place - 1].lineno - 1 if len(statements) > 1 else at)
    end = (ours.node.end_lineno or 0) - (at - first)
    del lines[first:at]
    if not lines[end - 1].endswith(("\n", "\r")):
        lines[end - 1] += _end(lines[first])
    return "".join([*lines[:end], *_method(target, statements), *lines[end:]])


def _method(target: Target, statements: Sequence[ast.stmt]) -> list[str]:
    lines, stop = target.text.lines, statements[-1]
    assert isinstance(stop, ast.If)  # noqa: S101 - the anchor is one
    outer, inner, old = (_indent(lines, node) for node in (target.node, target.node.body[0], statements[0]))
    first = statements[0].lineno - 1
    moved = [line.removeprefix(old).rstrip() for line in lines[_comments_above(lines, first) : stop.lineno - 1]]
    compared = _segment(target.text, stop.test)
    within = comments_of(compared)  # they stay where they are
    for comment in comments_of("".join(lines[stop.lineno - 1 : stop.end_lineno])):
        if comment in within:
            within.remove(comment)
        else:
            moved.append(comment)
    body = [
        '"""Whether admission from the waiting queues ends in this step.',
        "",
        "Asked before each request that could be admitted; a subclass may end it",
        "earlier.",
        '"""',
        *moved,
        f"return ({compared})" if len(physical_lines(compared)) > 1 else f"return {compared}",
    ]
    text = ["", f"{outer}def {NAME}(self) -> bool:", *(f"{inner}{line}".rstrip() for line in body)]
    return [line + _end(lines[stop.lineno - 1]) for line in text]


def _comments_above(lines: Sequence[str], at: int) -> int:
    """The index of the first of the comments that stand directly above a line, indented as it is."""
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    first = at
    while first and lines[first - 1].startswith(f"{indent}#"):
        first -= 1
    return first


def _indent(lines: Sequence[str], statement: ast.stmt) -> str:
    line = lines[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _end(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :] or "\n"


def _segment(text: ModuleText, node: ast.expr) -> str:
    """An expression as its text has it."""
    start = offset(text, node.lineno, node.col_offset)
    return text.text[start : offset(text, node.end_lineno or 0, node.end_col_offset or 0)]


def _prove(target: Target, text: str) -> None:
    """With the method's body in the place of the call again, the module's tree is upstream's (else BP404)."""
    tree = ModuleText(target.text.module, "", target.text.display, text).tree
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == target.owner.name)  # type: ignore[union-attr]
    (method,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == NAME)
    owner.body.remove(method)
    *moved, returned = method.body[1:]
    asks, put_back = compile_pattern(ASKED), 0
    for node in list(ast.walk(owner)):
        for _, suite in suites_of(node):
            for statement in [one for one in suite if not isinstance(asks.match(one, {}, {}), Mismatch)]:
                assert isinstance(statement, ast.If)  # noqa: S101 - the pattern is one
                assert isinstance(returned, ast.Return)  # noqa: S101 - it was written so
                assert returned.value is not None  # noqa: S101 - as above
                statement.test = returned.value
                suite[(at := suite.index(statement)) : at] = moved
                put_back += 1
    if put_back != 1 or not same(tree, target.text.tree):
        raise refuse(
            "BP404", f"{target.text.module}: the method in the place of its call is not upstream's function",
            ("file", target.text.display), next="report this with the source file", file=target.text.display,
        )  # fmt: skip


# -- the patch -------------------------------------------------------------------------------


def patch_of(seam: Seam, author: str = "") -> bytes:
    """The change as git writes it for mail: `git apply` takes it, and with an author `git am` too."""
    path = seam.before.path
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (seam.before.text, seam.text))
    hunks = list(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))
    added, removed = (sum(line.startswith(sign) for line in hunks[2:]) for sign in "+-")
    diff = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in hunks)
    blobs = (_blob(seam.before.encoded(text)) for text in (seam.before.text, seam.text))
    mail = [
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n",
        f"From: {author}\n" if author else "",
        f"Subject: [PATCH] {message(seam)}",
        f"\nSigned-off-by: {author}\n" if author else "",
        f"---\n {path} | {added + removed} {'+' * added}{'-' * removed}\n",
        f" 1 file changed, {added} insertions(+), {removed} deletions(-)\n\n",
        f"diff --git a/{path} b/{path}\nindex {'..'.join(blobs)} 100644\n",
    ]
    return "".join(mail).encode() + diff.encode(seam.before.encoding)


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


def message(seam: Seam) -> str:
    """The subject and the text of the commit."""
    counted = f", where the left side is `{seam.counted}` and has no other reader in the loop" if seam.counted else ""
    why = (
        "The WAITING loop of Scheduler.schedule() ends at a comparison in the loop itself. A scheduler that has to "
        "stop earlier, such as one that keeps data-parallel ranks in step, can only do so with a copy of the whole "
        "method."
    )
    what = (
        f"Move that comparison into a method, {NAME}(): `{seam.compared}`{counted}. It is asked where the comparison "
        "stood, once for each request that could be admitted."
    )
    same_tests = "No functional change. The tests that exercise it stay as they are:"
    text = "\n\n".join(textwrap.fill(part, 72, break_long_words=False) for part in (why, what, same_tests))
    tests = "".join(f"  {path}\n    {TESTS[path]}\n" for path in seam.tests)
    return f"[Core] Let a subclass decide when the scheduler stops admitting\n\n{text}\n\n{tests}"


# -- the command -----------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def write(
    repo: Annotated[Path | None, typer.Option(metavar="PATH", help="A checkout of vLLM.")] = None,
    lane: Annotated[
        str | None, typer.Option(metavar="LANE", help="A source, or the name of a declared lane, instead.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there; else to standard output.")
    ] = None,
    author: Annotated[
        str, typer.Option(metavar="NAME <EMAIL>", help="Who proposes it and signs it off; `git am` wants one.")
    ] = "",
) -> None:
    """Write the admission seam for a vLLM as a patch, to be applied with `git apply` or `git am`."""
    if (repo is None) == (lane is None):
        raise refuse("BP007", "--repo and --lane say which vLLM is meant", next="give one of them")
    if author and not re.fullmatch(r"[^<>\n]+ <[^<>\s]+@[^<>\s]+>", author):
        raise refuse("BP007", f"`--author {author}` is not NAME <EMAIL>", next="write it as git does")
    spec = LaneSpec(str(repo), f"dir:{repo}") if lane is None else lane_named(lane, Path.cwd())
    opened = Lane(spec.name, open_source(spec.spec))
    seam = seam_of(opened)
    patch = patch_of(seam, author)
    if output is None:
        typer.echo(patch, nl=False)
    else:
        put(output, patch)
    place = f"{short(seam.before.display)}:{seam.line}"
    typer.echo(f"{spec.name}: {place}  `{seam.compared}`  is asked of {NAME}()", err=True)
    if "\r\n" in seam.before.text:
        typer.echo("its lines end in CR LF: `git am` wants --keep-cr for it; `git apply` takes it as it is", err=True)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Write it and exit: 0 written, 1 this vLLM has no such stop, 2 wrong usage, 3 it could not be read."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="upstream_seam")
    except PatchError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(int(error.outcome))
    except Exception:  # noqa: BLE001 - an uncaught error must not look like a finding
        traceback.print_exc()
        sys.exit(int(Outcome.UNKNOWN))
    sys.exit(0)


if __name__ == "__main__":
    main()
