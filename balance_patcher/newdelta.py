"""``new-delta``: from the line that an author points at to a file that ``verify`` accepts.

The line is counted in the text of one lane: of the file itself, where it is one on disk that stands in a tree of
vLLM's, and else of the first lane. What is written was checked on every lane before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .check import check_feature
from .delta import TARGET, Anchor
from .errors import Failure, PatchError, refuse
from .loading import feature_of_text
from .pointing import check_file, checkout_of, counterpart, read_at, statement_at
from .proposal import Place, propose
from .render import head
from .skeleton import Skeleton
from .source import Lane, LaneSpec, Source, open_source
from .targets import Target, find_target

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
        PatchError: BP007 for a wrong name; BP104–BP110, if the target is not on a lane; BP403 and BP801–BP805, if
            no anchor can be proposed; what the checks of the finished file refuse; BP5xx, if a lane cannot be read.
    """
    if not TARGET.fullmatch(target):
        raise refuse("BP007", f"`{target}` is no target", next="write it as module:Qual.name")
    if not _NAME.fullmatch(name):
        raise refuse("BP007", f"`{name}` is no name", next="write --name FEATURE or --name FEATURE.WHAT")
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
        raise PatchError(failure.with_fields(("lane", lane.name)))
    assert isinstance(found, Target)  # noqa: S101 - a failure was raised
    return found
