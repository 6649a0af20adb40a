"""What was seen on every lane, in one structure and five renderings.

Each rendering is a function from a :class:`Report` to text. Only the one for a person's terminal
lives with the command line, where ``rich`` is at hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from xml.etree import ElementTree as Xml

from .errors import Failure, Outcome
from .pins import Pin


@dataclass
class DeltaReport:
    """One delta on one lane."""

    name: str
    target: str
    status: str
    variant: str | None
    file: str | None
    line: int | None
    matches: int
    detail: str
    declared: str


@dataclass
class InvariantReport:
    """One invariant on one lane: ``holds``, ``broken`` or ``unknown``."""

    name: str
    status: str
    detail: str


@dataclass
class CallReport:
    """One call shape on one lane: ``holds``, ``broken`` or ``unknown``."""

    call: str
    status: str
    detail: str


@dataclass
class FeatureReport:
    """One feature on one lane.

    Attributes:
        reversible: Whether taking the deltas out again gives upstream's text and tree back; ``None``
            when there was nothing to take out of.
    """

    name: str
    deltas: list[DeltaReport] = field(default_factory=list)
    invariants: list[InvariantReport] = field(default_factory=list)
    calls: list[CallReport] = field(default_factory=list)
    reversible: bool | None = None
    failures: list[Failure] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        statuses = [item.status for item in self.invariants] + [call.status for call in self.calls]
        unknown = "unknown" in statuses or self.reversible is None
        broken = self.reversible is False
        extra = [Outcome.BROKEN] * broken + [Outcome.UNKNOWN] * unknown
        return Outcome.worst([*(failure.outcome for failure in self.failures), *extra])

    @property
    def status(self) -> str:
        """``applied``, ``absorbed``, ``not-applicable``, ``failed`` or ``unknown``."""
        if self.outcome is Outcome.UNKNOWN:
            return "unknown"
        if self.outcome is not Outcome.HOLDS:
            return "failed"
        found = {delta.status for delta in self.deltas}
        return next((status for status in ("applied", "absorbed", "not-applicable") if status in found), "unknown")


@dataclass
class LaneReport:
    """One lane."""

    name: str
    source: str
    vllm_version: str | None = None
    commit: str | None = None
    pin: Pin | None = None
    features: list[FeatureReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def all_failures(self) -> list[Failure]:
        return [*self.failures, *(failure for feature in self.features for failure in feature.failures)]

    @property
    def outcome(self) -> Outcome:
        if not self.features and not self.failures:
            return Outcome.UNKNOWN
        own = [failure.outcome for failure in self.failures]
        return Outcome.worst([*own, *(feature.outcome for feature in self.features)])

    @property
    def status(self) -> str:
        return {Outcome.HOLDS: "ok", Outcome.BROKEN: "failed", Outcome.USAGE: "usage", Outcome.UNKNOWN: "unknown"}[
            self.outcome
        ]


@dataclass
class Report:
    """Every lane of a run."""

    lanes: list[LaneReport]

    @property
    def outcome(self) -> Outcome:
        if not self.lanes:
            return Outcome.UNKNOWN
        return Outcome.worst(lane.outcome for lane in self.lanes)

    @property
    def verdict(self) -> str:
        """One sentence for a person."""
        bad = [lane for lane in self.lanes if lane.outcome is not Outcome.HOLDS]
        if not bad:
            return f"All deltas hold on {_count(len(self.lanes), 'lane')}."
        names = ", ".join(lane.name for lane in bad)
        words = {Outcome.BROKEN: "Broken", Outcome.UNKNOWN: "Could not check", Outcome.USAGE: "Wrong usage"}
        return f"{words[self.outcome]}: {names} ({len(bad)} of {_count(len(self.lanes), 'lane')})."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# -- renderings ------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """The schema of the README, ``schema: 1``."""
    return json.dumps(
        {"schema": 1, "exit_code": int(report.outcome), "lanes": [_lane(lane) for lane in report.lanes]}, indent=2
    )


def _lane(lane: LaneReport) -> dict[str, object]:
    return {
        "name": lane.name,
        "source": lane.source,
        "vllm_version": lane.vllm_version,
        "commit": lane.commit,
        "pin": lane.pin.as_dict() if lane.pin else None,
        "status": lane.status,
        "features": [_feature(feature) for feature in lane.features],
        "failures": [failure.as_dict() for failure in lane.failures],
    }


def _feature(feature: FeatureReport) -> dict[str, object]:
    return {
        "name": feature.name,
        "status": feature.status,
        "deltas": [asdict(delta) for delta in feature.deltas],
        "invariants": [asdict(invariant) for invariant in feature.invariants],
        "calls": [asdict(call) for call in feature.calls],
        "reversible": feature.reversible,
        "failures": [failure.as_dict() for failure in feature.failures],
    }


def as_github(report: Report) -> str:
    """Workflow commands: an error for each failure, on the declaring line where there is one."""
    lines = []
    for lane in report.lanes:
        for failure in lane.all_failures:
            place = dict(failure.fields).get("declared") or f"{failure.file or ''}:{failure.line or ''}"
            file, _, line = place.rpartition(":")
            where = "".join(f"{key}={_escape(value)}," for key, value in (("file", file), ("line", line)) if value)
            title = _escape(f"{failure.code} {failure.title} ({lane.name})")
            lines.append(f"::error {where}title={title}::{_escape(str(failure), data=True)}")
        if lane.outcome is Outcome.HOLDS:
            lines.append(f"::notice title={_escape(lane.name)}::{_escape(_summary(lane), data=True)}")
        elif not lane.all_failures:
            lines.append(f"::error title={_escape(lane.name)}::{_escape(_summary(lane), data=True)}")
    return "\n".join(lines)


def _escape(text: str, *, data: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text if data else text.replace(":", "%3A").replace(",", "%2C")


def _summary(lane: LaneReport) -> str:
    parts = [
        f"{feature.name}: " + ", ".join(f"{d.name} {d.status}" for d in feature.deltas) for feature in lane.features
    ]
    return f"vLLM {lane.vllm_version or 'unknown'} is {lane.status}. " + "; ".join(parts)


def as_markdown(report: Report) -> str:
    """For a pull request: the verdict, one table, every failure."""
    lines = [
        f"**{report.verdict}**",
        "",
        "| lane | vLLM | delta | status | variant | where | matches |",
        "| --- " * 7 + "|",
    ]
    for lane in report.lanes:
        for feature in lane.features:
            for delta in feature.deltas:
                cells = [
                    lane.name,
                    lane.vllm_version or "?",
                    delta.name,
                    delta.status,
                    delta.variant or "",
                    place(delta),
                    str(delta.matches),
                ]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append(f"| {lane.name} | {lane.vllm_version or '?'} | {' · '.join(footer(feature))} |||||")
    for lane in report.lanes:
        if lane.pin:
            lines += ["", f"{lane.name}: pin {lane.pin.wanted} {lane.pin.status}, {lane.pin.detail}."]
        for failure in lane.all_failures:
            lines += ["", "```", str(failure), "```"]
    return "\n".join(lines)


def place(delta: DeltaReport) -> str:
    """``scheduler.py:567``, or nothing."""
    return f"{delta.file.replace(chr(92), '/').rpartition('/')[2]}:{delta.line}" if delta.file and delta.line else ""


def footer(feature: FeatureReport) -> Iterator[str]:
    """How many invariants and call shapes hold, and whether the rewrite is reversible."""
    for name, items in (("invariants", feature.invariants), ("call shapes", feature.calls)):
        if items:
            yield f"{name} {sum(item.status == 'holds' for item in items)}/{len(items)}"
    yield {True: "takes out clean", False: "does not take out clean", None: "not rewritten"}[feature.reversible]


def as_junit(report: Report) -> str:
    """One suite a lane, one case a delta, invariant and call shape; what could not be checked is an error."""
    root = Xml.Element("testsuites", name="balance_patcher verify")
    for lane in report.lanes:
        suite = Xml.SubElement(root, "testsuite", name=_clean(lane.name))
        cases = list(_cases(lane))
        for name, kind, text in cases:
            case = Xml.SubElement(suite, "testcase", classname=_clean(lane.name), name=_clean(name))
            if kind:
                Xml.SubElement(case, kind, message=_clean(text.partition("\n")[0])).text = _clean(text)
        suite.set("tests", str(len(cases)))
        for kind in ("failure", "error"):
            suite.set(f"{kind}s", str(sum(found == kind for _, found, _ in cases)))
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True)


def _clean(text: str) -> str:
    """A text without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _cases(lane: LaneReport) -> Iterator[tuple[str, str, str]]:
    for feature in lane.features:
        for delta in feature.deltas:
            yield delta.name, "failure" if delta.status == "failed" else "", delta.detail or delta.status
        for item in feature.invariants:
            yield item.name, {"broken": "failure", "unknown": "error"}.get(item.status, ""), item.detail or item.status
        for call in feature.calls:
            yield call.call, {"broken": "failure", "unknown": "error"}.get(call.status, ""), call.detail or call.status
        kind = {True: "", False: "failure", None: "error"}[feature.reversible]
        yield f"{feature.name} takes out clean", kind, "taking the deltas out again gives upstream's tree back"
    for failure in lane.all_failures:
        yield failure.headline, "error" if failure.outcome is Outcome.UNKNOWN else "failure", str(failure)


#: The renderings that need nothing but the report.
RENDERINGS: dict[str, Callable[[Report], str]] = {
    "json": as_json, "github": as_github, "markdown": as_markdown, "junit": as_junit,
}  # fmt: skip
