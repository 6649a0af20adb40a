"""Write the file of a new delta: an anchor, an edit that does no harm, and an example of both, all to be replaced.

The text is as ``ruff format`` leaves it, and ``verify`` accepts it as it is. The example is made of the pattern alone
and holds no line of upstream's.
"""

from __future__ import annotations

import keyword
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .build import compile_plan
from .delta import Anchor, Delta, InsertAfter, InsertBefore, Level, Variant
from .errors import PatchError
from .feature import Feature
from .holes import Hole, fill, scan
from .plan import make_plan
from .proposal import Proposal
from .source import Lane
from .targets import Target, short

_LINE = 120
_ANY = "some"


@dataclass(frozen=True)
class Skeleton:
    """What goes into the file of a new delta.

    Attributes:
        name: ``FEATURE.WHAT``.
        target: The upstream function.
        proposal: Where in it.
    """

    name: str
    target: Target
    proposal: Proposal

    @property
    def feature(self) -> str:
        return self.name.partition(".")[0]

    @property
    def statement(self) -> str:
        """A statement that does nothing to anybody, under a name that no lane has."""
        words = {word for place in self.proposal.places for word in re.findall(r"\w+", place.target.text.text)}
        stem = "todo_" + re.sub(r"\W", "_", self.feature)
        return next(f"{name} = True" for name in _names(stem) if name not in words)

    def text(self) -> str:
        """The whole file."""
        edit = "InsertAfter" if self.proposal.behind else "InsertBefore"
        level = ", Level" if self.proposal.anchor.inside else ""
        example = self.example()
        return f'''\
"""TODO: what this changes in vLLM, and why."""

from balance_patcher.delta import Anchor, Delta, {edit}{level}, Variant
from balance_patcher.feature import {"Example, Feature, Refusal" if example else "Feature"}

DELTA = Delta(
    name="{self.name}",
    target="{self.target.name}",
    why="TODO: what goes wrong without it.",
    upstream="{self.target.text.path}, {self.target.qualname}",
    remove_when="TODO: what upstream has to do so that it can go.",
    variants=(
        Variant(
            "TODO: the shape that it is for",
{textwrap.indent(self._anchor(), " " * 12)}
            # TODO: what is to run there.
{textwrap.indent(self._edits(edit), " " * 12)}
        ),
    ),
)

{_call("FEATURE = Feature", f'"{self.feature}"', '"TODO: what it does, in one sentence."', "deltas=(DELTA,)")}
{self._examples(example)}'''

    def _edits(self, edit: str) -> str:
        line = f'edits=({edit}("{self.statement}"),),'
        return line if len(line) + 12 <= _LINE else f'edits=(\n    {edit}("{self.statement}"),\n),'

    def _anchor(self) -> str:
        anchor = self.proposal.anchor
        lines = [*self._comments(), "Anchor(", *textwrap.indent(literal(anchor.pattern), "    ").split("\n")]
        lines[-1] += ","
        if anchor.inside:
            lines += [f"    {line}" for line in _levels(anchor.inside)]
        if anchor.allow:
            items = [f'"{name}": {_texts(texts)}' for name, texts in anchor.allow.items()]
            line = f"    allow={{{', '.join(items)}}},"
            fits = len(line) + 12 <= _LINE
            lines += [line] if fits else ["    allow={", *(f"        {item}," for item in items), "    },"]
        return "\n".join([*lines, "),"])

    def _comments(self) -> Iterator[str]:
        places = [f"{place.where} of {place.lane}" for place in self.proposal.places]
        yield from _comment(f"Found exactly once: {', '.join(places)}.")
        for name, texts in self.proposal.differs.items():
            lanes: dict[str, list[str]] = {text: [] for text in texts}
            for text, place in zip(texts, self.proposal.places, strict=True):
                lanes[text].append(place.lane)
            if len(lanes) > 1:
                each = [f"`{_one_line(text)}` on {' and '.join(names)}" for text, names in lanes.items()]
                yield from _comment(f"{name}: {', '.join(each)}.")

    def _examples(self, example: tuple[str, str] | None) -> str:
        if example is None:
            return ""
        method = self.target.node.name
        before, after = example
        return f"""
BEFORE = {_block(before)}

AFTER = {_block(after)}

GONE = BEFORE.replace("def {method}(", "def gone(")

{_one("EXAMPLES", "Example", f'"{self.name}"', "before=BEFORE", "after=AFTER")}
{_one("REFUSES", "Refusal", f'"{self.name}"', "before=GONE", 'code="BP104"')}
"""

    def example(self) -> tuple[str, str] | None:
        """A module of our own that the anchor is found in, and what becomes of it; ``None`` if none can be written."""
        edit = InsertAfter if self.proposal.behind else InsertBefore
        variant = Variant("example", self.proposal.anchor, edits=(edit(self.statement),))
        delta = Delta(self.name, self.target.name, "-", "-", "-", (variant,))
        feature = Feature(self.feature, "-", deltas=(delta,))
        for looped in (False, True):
            before = written(self.proposal.anchor, self.target, looped=looped)
            try:
                compile(before, "example", "exec", dont_inherit=True)
                lane = Lane("example", _File(self.target.text.path, before))
                _, compiled = compile_plan(make_plan(lane, feature))
            except (SyntaxError, PatchError):
                continue
            return before, compiled[0].text.replace(f"  # bp: {self.name}", "")
        return None


class _File:
    """A source that holds one file."""

    spec = "example"

    def __init__(self, path: str, text: str) -> None:
        self._files = {path: text.encode(), "vllm/__init__.py": b""}

    def read(self, path: str) -> bytes | None:
        return self._files.get(path)

    def display(self, path: str) -> str:
        return short(path)

    def commit(self) -> str | None:
        return None


def written(anchor: Anchor, target: Target, *, looped: bool = False) -> str:
    """A module with one function, which holds the anchor, its holes filled.

    Args:
        anchor: What it holds.
        target: Which function it is.
        looped: It stands in a loop of its own, for a ``break``.
    """
    headers = [_filled(level.pattern, anchor) for level in anchor.inside]
    inner = _filled(anchor.pattern, anchor)
    lines = _suite(inner) if anchor.compiled.kind == "header" else inner.split("\n")
    for header in reversed(headers):
        first, *rest = _suite(header)
        lines = [first, *(f"    {line}" for line in lines), *rest[1:]]
    if looped:
        lines = [f"while {_ANY}:", *(f"    {line}" for line in lines)]
    owners = target.qualname.split(".")[:-1]
    lines = [f"def {target.node.name}({'self' if owners else ''}):", *(f"    {line}" for line in lines)]
    for owner in reversed(owners):
        lines = [f"class {owner}:", *(f"    {line}" for line in lines)]
    return "\n" + "\n".join(lines) + "\n"


def _suite(header: str) -> list[str]:
    """A header with a suite; ``try`` needs a second one."""
    return [f"{header}:", "    pass", *(["finally:", "    pass"] if header == "try" else [])]


def _filled(text: str, anchor: Anchor) -> str:
    def put(hole: Hole) -> str:
        name = hole.name.lower()
        if hole.kind == "op":
            return anchor.allow.get(hole.name, ("==",))[0]
        return _ANY if name == "_" or hole.kind == "list" else name + "_" * keyword.iskeyword(name)

    return fill(text, scan(text), put)


def _names(stem: str) -> Iterator[str]:
    yield stem
    at = 2
    while True:
        yield f"{stem}_{at}"
        at += 1


# -- text as ruff leaves it ----------------------------------------------------------------------


def literal(text: str) -> str:
    """A text as a literal: on one line in the quotes that need fewer escapes, else between triple quotes."""
    escaped = text.replace("\\", "\\\\")
    if "\n" in text:
        return '"""\n' + escaped.replace('"""', '\\"\\"\\"') + '\n"""'
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + escaped.replace(quote, f"\\{quote}") + quote


def _call(name: str, *arguments: str, room: float = _LINE) -> str:
    line = f"{name}({', '.join(arguments)})"
    return line if len(line) <= room else "\n".join([f"{name}(", *(f"    {one}," for one in arguments), ")"])


def _one(name: str, call: str, *arguments: str) -> str:
    """A tuple of one call."""
    line = f"{name} = ({_call(call, *arguments, room=math.inf)},)"
    if len(line) <= _LINE:
        return line
    return f"{name} = (\n{textwrap.indent(_call(call, *arguments, room=_LINE - 5), '    ')},\n)"


def _block(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{escaped}"""'


def _texts(texts: Sequence[str]) -> str:
    return "(" + ", ".join(map(literal, texts)) + ("," if len(texts) == 1 else "") + ")"


def _levels(levels: Sequence[Level]) -> list[str]:
    made = [
        f'Level("{level.name}", {literal(level.pattern)}{"" if level.direct else ", direct=False"})' for level in levels
    ]
    if len(made) == 1:
        line = f"inside=({made[0]},),"
        return [line] if len(line) + 16 <= _LINE else ["inside=(", f"    {made[0]},", "),"]
    return ["inside=(", *(f"    {line}," for line in made), "),"]


def _comment(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, _LINE - 16, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in wrapped]


def _one_line(text: str) -> str:
    return textwrap.shorten(" ".join(text.split()), 80)
