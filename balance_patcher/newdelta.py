"""``new-delta``: from the line that an author points at to a file that ``verify`` accepts.

The line is counted in the text of one lane: of the file itself, where it is one on disk that stands in a tree of
vLLM's, and else of the first lane. What is written was checked on every lane before.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from .bound import definitions
from .check import check_feature
from .delta import TARGET, Anchor
from .errors import Failure, PatchError, refuse
from .loading import feature_of_text
from .pointing import check_file, checkout_of, counterpart, read_at, statement_at
from .proposal import Place, propose
from .registry import all_features
from .relations import declared
from .render import head
from .skeleton import Skeleton
from .source import Lane, LaneSpec, Source, open_source
from .targets import Function, Target, find_target

#: Why a function cannot be a target, as its opposite.
_KINDS = {
    "BP107": "stands under no decorator: one that it calls, or that calls it",
    "BP108": "is no `async def`: one that it calls, or that calls it",
    "BP109": "does not yield: one that it calls, or that uses what it yields",
}
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_][\w-]*)?")


@dataclass(frozen=True)
class NewDelta:
    """What came of it.

    Attributes:
        text: The file.
        said: What a person is told: where the statement is, and what stands for it.
    """

    text: str
    said: tuple[str, ...]


def new_delta(target: str, at: str, specs: Sequence[LaneSpec], name: str, file: Path) -> NewDelta:
    """The text of a delta file for the statement at a line.

    Args:
        target: ``module:Qual.name``.
        at: ``FILE:LINE``.
        specs: The lanes that it has to hold on.
        name: ``FEATURE``, or ``FEATURE.WHAT``.
        file: What it is to be called; nothing is written.

    Raises:
        PatchError: BP007 for a wrong name, BP807 for one that is taken; BP104–BP110, if the target is not on a lane;
            BP403 and BP801–BP805, if no anchor can be proposed; what the checks of the finished file refuse; BP5xx,
            if a lane cannot be read.
    """
    if not TARGET.fullmatch(target):
        raise refuse("BP007", f"`{target}` is no target", next=_as_target(target))
    _check_name(name)
    place, line = read_at(at)
    module = target.partition(":")[0]
    lanes = _opened(specs, place, module)
    targets = [_target(lane, target) for lane in lanes]
    first = lanes[0]
    check_file(place, first, targets[0].text)
    pointed = statement_at(first.name, targets[0], line)
    others = [counterpart(pointed.place, lane.name, found) for lane, found in zip(lanes[1:], targets[1:], strict=True)]
    proposal = propose([pointed.place, *others])
    full = name if "." in name else f"{name}.{targets[0].node.name.strip('_').replace('_', '-') or 'delta'}"
    text = Skeleton(full, targets[0], proposal).text()
    feature = feature_of_text(text, file)
    failures = [
        failure.with_fields(("lane", lane.name)) for lane in lanes for failure in check_feature(lane, feature).failures
    ]
    if failures:
        raise PatchError(*failures)
    return NewDelta(text, (*filter(None, [pointed.said]), *_told(proposal.anchor, [pointed.place, *others])))


def _as_target(written: str) -> str:
    """How to write a target; with the colon where it belongs, if only that is wrong."""
    parts = re.split(r"[.:]+", written)
    at = next((at for at, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    meant = f"{'.'.join(parts[:at])}:{'.'.join(parts[at:])}"
    return f"did you mean `{meant}`?" if TARGET.fullmatch(meant) else "write it as module:Qual.name"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        feature, dot, what = name.partition(".")
        feature, what = (re.sub(r"\W", "_", feature).lstrip("0123456789"), re.sub(r"[^\w-]", "-", what))
        meant = f"{feature}{dot and what and '.'}{what}"
        told = "a feature's name has letters, digits and underscores; after a dot, what it does may have hyphens too"
        raise refuse(
            "BP007", f"`{name}` is no name: {told}",
            next=f"write --name {meant}" if _NAME.fullmatch(meant) else "write --name FEATURE or --name FEATURE.WHAT",
        )  # fmt: skip
    feature = name.partition(".")[0]
    taken = next((other for other in all_features() if other.name == feature), None)
    if taken is not None:
        raise refuse(
            "BP807", f"there is a feature {feature!r} already", ("declared", declared(taken)),
            next=f"give it another one: --name {feature}_2, or another name of the file",
        )  # fmt: skip


def _told(anchor: Anchor, places: Sequence[Place]) -> list[str]:
    rows = [f"{place.lane}: {place.where}  `{head(place.statement)}`" for place in places]
    return [*rows, f"anchor: {anchor}"]


def _opened(specs: Sequence[LaneSpec], file: str, module: str) -> list[Lane]:
    """The lanes, the one whose text is pointed into first; a file on disk that no lane reads is a lane of its own."""

    def opened(spec: LaneSpec) -> Source:
        source = open_source(spec.spec)
        source.read(module.replace(".", "/") + ".py")  # what is far away is read side by side
        return source

    with ThreadPoolExecutor(max_workers=min(8, max(1, len(specs)))) as pool:
        lanes = [Lane(spec.name, source) for spec, source in zip(specs, pool.map(opened, specs), strict=True)]
    checkout = checkout_of(file, module)
    if checkout is None:
        return lanes
    path = Path(file).expanduser().resolve()
    for lane in lanes:
        text = lane.module(module)
        if text is not None and Path(text.display).is_file() and Path(text.display).resolve() == path:
            return [lane, *(other for other in lanes if other is not lane)]
    return [Lane(checkout.spec, checkout), *lanes]


def _target(lane: Lane, name: str) -> Target:
    found = find_target(lane, name)
    failure = found if isinstance(found, Failure) else found.unusable
    if failure is not None:
        raise PatchError(replace(failure.with_fields(("lane", lane.name)), next=_instead(lane, name, failure)))
    assert isinstance(found, Target)  # noqa: S101 - a failure was raised
    return found


def _instead(lane: Lane, name: str, failure: Failure) -> str:
    """What an author does whose target cannot be one: nothing is declared yet that could be changed."""
    module, _, qualname = name.partition(":")
    if failure.code in _KINDS:
        return f"a delta edits a plain function and nothing else; choose one that {_KINDS[failure.code]}"
    text = lane.module(module)
    if text is None:
        there = next(whole for whole in _wholes(module) if whole == "vllm" or lane.module(whole) is not None)
        return f"check the module's name; of it, {there} is there"
    owners = {node.name: node for node in ast.walk(text.tree) if isinstance(node, ast.ClassDef)}
    methods = {owner: [n.name for n in definitions(node) if isinstance(n, Function)] for owner, node in owners.items()}
    if qualname in owners:
        some = [name for name in methods[qualname] if not name.startswith("_")][:5]
        return f"{qualname} is a class; write {module}:{qualname}.METHOD, such as {', '.join(some) or '__init__'}"
    owner, _, last = qualname.rpartition(".")
    elsewhere = [f"{other}.{last}" for other, names in methods.items() if last in names]
    functions = [node.name for node in definitions(text.tree) if isinstance(node, Function)]
    own = methods.get(owner, []) if owner else functions
    near = [f"{owner}.{other}".lstrip(".") for other in difflib.get_close_matches(last, own, 1)]
    meant = next(iter([*near, *elsewhere]), None)
    return f"did you mean `{module}:{meant}`?" if meant else f"look for its name in {text.display}"


def _wholes(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:size]) for size in range(len(parts) - 1, 0, -1))
