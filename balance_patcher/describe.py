"""What is declared, in words: for a person, or as the block that vllm-ascend's patch ledger wants for each patch.

The ledger is the comment at the top of ``vllm_ascend/patch/__init__.py``. It asks four things of every patch: why,
how, which upstream change it relates to, and when it goes. A delta declares just these, so the block is written from
the declarations, and cannot say something else than what is done.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence

from .delta import (
    PARAMETERS,
    AddParameter,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Override,
    Prologue,
    Replace,
    Variant,
    edit_text,
)
from .feature import Feature
from .pattern import compile_pattern
from .template import Template

_WIDTH = 104  # of the text in the ledger, whose lines have up to 120
_PULL = "https://github.com/vllm-project/vllm/pull/"
_NUMBERED = re.compile(r"(?<!vllm-ascend )\bPR (\d{4,})|\bvllm#(\d{4,})")
_HOST = "vllm_ascend.patch."

_WHERE = {InsertBefore: "before", InsertAfter: "after", Replace: "in place of"}


def as_text(features: Sequence[Feature]) -> str:
    """Each feature with its deltas, for a person."""
    return "\n".join(line.rstrip() for feature in features for line in _told(feature)).rstrip("\n")


def as_ascend_patch_doc(features: Sequence[Feature], first: int = 1) -> str:
    """A block for each feature, numbered from ``first``; it goes into the ledger as it is."""
    lines = [line for number, feature in enumerate(features, first) for line in _block(number, feature)]
    return "\n".join(f"# {line}".rstrip() for line in lines[:-1])


# -- for a person ----------------------------------------------------------------------------


def _told(feature: Feature) -> Iterator[str]:
    yield from (feature.name, *_wrapped(feature.summary, "  "))
    asked = _asked(feature)
    if asked:
        yield from _wrapped(asked, "  ")
    for name, why in feature.needs.items():
        yield from _wrapped(f"Needs {name}: {why}.", "  ")
    for name, why in feature.conflicts.items():
        yield from _wrapped(f"Not together with {name}: {why}.", "  ")
    for delta in feature.deltas:
        yield from ("", f"  {delta.name}   {delta.declared}", f"    {delta.target}")
        for label, text in (("why", delta.why), ("upstream", delta.upstream), ("remove when", delta.remove_when)):
            first, *rest = _wrapped(text, " " * 18)
            yield from (f"    {label:<14}{first.lstrip()}", *rest)
        label = "how"
        for line in _how(delta):
            yield f"    {label:<14}{line}"
            label = ""
    yield ""


# -- for the ledger --------------------------------------------------------------------------


def _block(number: int, feature: Feature) -> Iterator[str]:
    yield f"** {number}. File: {_file(feature)}**"
    yield "~" * 53
    asked = _asked(feature)
    for at, delta in enumerate(feature.deltas, 1):
        yield f"  {at}. `{delta.target.replace(':', '.')}`"
        yield from _section("Why", delta.why)
        yield "   How:"
        if asked and at == 1:
            yield from _wrapped(asked, " " * 6)
        how = list(_how(delta))
        yield from (f"      {line}" for line in how)
        yield from _wrapped(_in_words("\n".join(how)), " " * 6)
        yield from _section("Related PR (if no, explain why)", _related(delta))
        when = delta.remove_when if delta.remove_when.startswith("with ") else f"when {delta.remove_when}"
        yield from _section("Future Plan", f"Remove this patch {when}.")
        yield ""


def _section(label: str, text: str) -> Iterator[str]:
    yield f"   {label}:"
    yield from _wrapped(text, " " * 6)


def _file(feature: Feature) -> str:
    """The module of vllm-ascend's that the feature stands in for, as the ledger names it; else ours."""
    if feature.stand_in is not None and feature.stand_in.module.startswith(_HOST):
        return f"{feature.stand_in.module.removeprefix(_HOST).replace('.', '/')}.py"
    return f"{feature.distribution or 'balance_patcher'}, {feature.declared.partition(':')[0]}"


def _asked(feature: Feature) -> str:
    example = dict(feature.enabling.example) if feature.enabling is not None else {}
    return f"Set --additional-config '{json.dumps(example)}'." if example else ""


def _related(delta: Delta) -> str:
    """The upstream change; a number is written as an address, and without one upstream's own code is the reason."""
    numbers = [one or other for one, other in _NUMBERED.findall(delta.upstream)]
    if numbers:
        return " ".join([*(f"{_PULL}{number}" for number in numbers), f"({delta.upstream})"])
    return f"No, there is no change to wait for. It edits {delta.upstream}."


# -- how -------------------------------------------------------------------------------------


def _how(delta: Delta) -> Iterator[str]:
    """Each edit once, with every place that it may go to."""
    places: dict[Edit, list[str]] = {}
    for variant in delta.variants:
        for edit in variant.edits:
            place = _place(edit, variant)
            if place not in places.setdefault(edit, []):
                places[edit].append(place)
    for edit, known in places.items():
        if isinstance(edit, AddParameter):
            yield f"Add the parameter `{edit.name}={edit.default}`, where upstream has none of that name."
            continue
        lead = " or ".join(known)
        yield from _wrapped(f"{_verb(edit)}{' ' if lead else ''}{lead}:", "")
        for line in Template(edit_text(edit)).text.splitlines():
            code, indent = line.lstrip(), " " * (4 + len(line) - len(line.lstrip()))
            first, *rest = _wrapped(code, indent)
            yield from (first, *(f"        {more}" for more in rest))


def _in_words(text: str) -> str:
    """What the holes in a text stand for; empty where it has none."""
    found = list(dict.fromkeys(re.findall(r"<\$\w+>|\$\$\$\w+|\$\w+", text)))
    said = {
        "upstream's own parameters": [hole for hole in found if hole == f"$$${PARAMETERS}"],
        "the comparison that upstream makes there": [hole for hole in found if hole.startswith("<")],
        "anything": [hole for hole in found if hole.endswith("$_")],
    }
    rest = [hole for hole in found if not any(hole in holes for holes in said.values())]
    said["what upstream has in that place"] = rest
    parts = [
        f"{', '.join(f'`{hole}`' for hole in holes)} {_stands(holes)} {what}" for what, holes in said.items() if holes
    ]
    return f"Here {'; '.join(parts)}." if parts else ""


def _stands(holes: list[str]) -> str:
    return "stands for" if len(holes) == 1 else "stand for"


def _verb(edit: Edit) -> str:
    if isinstance(edit, Prologue):
        return "Put first in the function"
    if isinstance(edit, CallThrough):
        return "Before upstream's function is called" if edit.first else "Call upstream's function, and then"
    if isinstance(edit, Override):
        return "Override the method with"
    return "Put"


def _place(edit: Edit, variant: Variant) -> str:
    if not isinstance(edit, (InsertBefore, InsertAfter, Replace)) or variant.anchor is None:
        return ""
    levels = {level.name: level.pattern for level in variant.anchor.inside}
    pattern = compile_pattern(levels.get(edit.at, variant.anchor.pattern))
    return f"{_WHERE[type(edit)]} `{pattern}`"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
