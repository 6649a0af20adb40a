"""A report as JSON, workflow commands, Markdown and JUnit XML: functions from a report to text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import groupby
from xml.etree import ElementTree as Xml

from .annotating import command
from .errors import Failure, Outcome
from .report import CallReport, DeltaReport, FeatureReport, InvariantReport, LaneReport, Report, footer, names, place


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
            declared = dict(failure.fields).get("declared") or f"{failure.file or ''}:{failure.line or ''}"
            lines.append(command("error", declared, f"{failure.code} {failure.title} ({lane.name})", str(failure)))
        if lane.outcome is Outcome.HOLDS:
            lines.append(command("notice", "", lane.name, _summary(lane)))
        elif not lane.all_failures:
            lines.append(command("error", "", lane.name, _summary(lane)))
    return "\n".join(lines)


def _summary(lane: LaneReport) -> str:
    parts = [
        f"{feature.name}: " + ", ".join(f"{d.name} {d.status}" for d in feature.deltas) for feature in lane.features
    ]
    if lane.pin:
        parts.append(f"pin {lane.pin.wanted} {lane.pin.status}, {lane.pin.detail}")
    return f"vLLM {lane.vllm_version or 'unknown'} is {lane.status}. " + "; ".join(parts)


def as_markdown(report: Report) -> str:
    """For a pull request: the verdict, one table, a line for each feature and pin, every failure."""
    rows, below = [], []
    for lane in report.lanes:
        for feature in lane.features:
            for delta in feature.deltas:
                cells = [lane.name, lane.vllm_version or "?", delta.name, delta.status, delta.variant or ""]
                cells += [place(delta), str(delta.matches)]
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            below += ["", f"{lane.name}: {feature.name} {feature.status}, {', '.join(footer(feature))}."]
        if lane.pin:
            below += ["", f"{lane.name}: pin {lane.pin.wanted} {lane.pin.status}, {lane.pin.detail}."]
        for failure in lane.all_failures:
            below += ["", f"{lane.name}:", "", "```", str(failure), "```"]
    head = ["| lane | vLLM | delta | status | variant | where | matches |", "| --- " * 7 + "|"]
    return "\n".join([f"**{report.verdict}**", *(["", *head, *rows] if rows else []), *below])


def as_junit(report: Report) -> str:
    """One suite a lane, one case a delta, invariant and call shape; a finding stands on its own case, once."""
    root = Xml.Element("testsuites", name="balance_patcher verify")
    for lane in report.lanes:
        suite = Xml.SubElement(root, "testsuite", name=_clean(lane.name))
        cases = list(_cases(lane))
        if lane.outcome is not Outcome.HOLDS and not any(kind in ("failure", "error") for _, kind, _ in cases):
            cases.append(("anything", "error", "not everything was checked"))
        for name, kind, text in cases:
            case = Xml.SubElement(suite, "testcase", classname=_clean(lane.name), name=_clean(name))
            if kind:
                found = Xml.SubElement(case, kind, message=_clean(text.partition("\n")[0]))
                found.text = _clean(text) if kind != "skipped" else None
        suite.set("tests", str(len(cases)))
        for kind, counted in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(counted, str(sum(found == kind for _, found, _ in cases)))
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True)


def _clean(text: str) -> str:
    """A text without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _cases(lane: LaneReport) -> Iterator[tuple[str, str, str]]:
    """Name, kind of element and text of each case."""
    left = list(lane.all_failures)
    for feature in lane.features:
        for delta in feature.deltas:
            yield from _case(
                delta.name, delta, [f for f in feature.failures if names(f, delta.name, delta.declared)], left
            )
        for item in feature.invariants:
            told = [f for f in feature.failures if dict(f.fields).get("invariant") == item.name]
            yield from _case(item.name, item, told, left)
        for call in feature.calls:
            told = [f for f in feature.failures if f.code == "BP120" and f.what.startswith(f"`{call.call}`: ")]
            yield from _case(call.call, call, told, left)
        if feature.live and feature.reversible is None:
            continue
        clean, why = {
            True: ("", ""),
            False: ("failure", "taking the deltas out again does not give upstream's text back"),
            None: ("skipped", "the feature could not be rewritten, so there was nothing to take out"),
        }[feature.reversible]
        yield f"{feature.name} takes out clean", clean, why
    for name, group in groupby(sorted(left, key=_headed), _headed):
        yield from _numbered(name, list(group))


def _case(
    name: str, item: DeltaReport | InvariantReport | CallReport, told: list[Failure], left: list[Failure]
) -> Iterator[tuple[str, str, str]]:
    """The cases of one item; what is told here is taken from what is left to tell."""
    own = [failure for failure in told if failure in left]
    for failure in own:
        left.remove(failure)
    if own:
        yield from _numbered(name, own)
    elif told:
        yield name, "skipped", f"{told[0].headline} (told above)"
    else:
        kind = {"failed": "failure", "broken": "failure", "unknown": "skipped"}.get(item.status, "")
        yield name, kind, item.detail or item.status


def _numbered(name: str, failures: list[Failure]) -> Iterator[tuple[str, str, str]]:
    """One case a finding, under names that do not depend on what it says."""
    for at, failure in enumerate(failures, 1):
        kind = "error" if failure.outcome is Outcome.UNKNOWN else "failure"
        yield name if at == 1 else f"{name} ({at})", kind, str(failure)


def _headed(failure: Failure) -> str:
    return f"{failure.code} {failure.title}"


#: The renderings that need nothing but the report.
RENDERINGS: dict[str, Callable[[Report], str]] = {
    "json": as_json, "github": as_github, "markdown": as_markdown, "junit": as_junit,
}  # fmt: skip
