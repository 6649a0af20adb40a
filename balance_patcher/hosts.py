"""Look at the release of a host project: what of the module that a feature stands in for is accounted for.

This is what ``verify --vllm-ascend`` shows for each lane. Nothing is imported: both the host's module and
the vLLM beside it are text, from any kind of source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .coverage import BEHIND, Coverage, Finding, read_module
from .errors import Failure, Outcome, PatchError, refuse
from .feature import Feature
from .source import Lane, LaneSpec, open_source
from .standin import STALE, StandIn

_SHOWN = 6  # lines of one kind; a copy that is behind upstream is behind in many


@dataclass
class HostReport:
    """What was found on one lane.

    Attributes:
        lane: The lane's name and source.
        host: The host's source, as it was written.
        module: The module that a feature stands in for.
        feature: That feature's name.
        version: The lane's vLLM.
        coverage: What the module holds; ``None`` if it could not be read.
        failures: Why not.
    """

    lane: LaneSpec
    host: str
    module: str
    feature: str
    version: str | None = None
    coverage: Coverage | None = None
    failures: list[Failure] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        """Broken where something is not covered: there the host's own copy would run."""
        found = [failure.outcome for failure in self.failures]
        if self.coverage is not None:
            found += [failure.outcome for failure in self.coverage.failures]
            found += [Outcome.BROKEN] if self.coverage.uncovered else []
        return Outcome.worst(found)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; every finding by who answers for it."""
        coverage = self.coverage
        groups: dict[str, list[dict[str, Any]]] = {}
        for finding in coverage.findings if coverage else ():
            groups.setdefault(finding.by, []).append(
                {"file": finding.file, "line": finding.line, "place": finding.place, "text": finding.text}
                | ({"why": finding.why} if finding.why else {})
            )
        failures = [*self.failures, *(coverage.failures if coverage else ())]
        return {
            "lane": self.lane.name,
            "source": self.lane.spec,
            "vllm": self.version,
            "host": self.host,
            "module": self.module,
            "feature": self.feature,
            "covered": coverage.covered if coverage else None,
            "outcome": self.outcome.name.lower(),
            "findings": groups,
            "failures": [failure.as_dict() for failure in failures],
        }


def host_source(text: str) -> str:
    """A source as a person may write it: any form, or the path of a wheel or of a folder.

    Raises:
        PatchError: BP004, if it is neither.
    """
    if text.partition(":")[0] in {"pypi", "wheel", "dir", "git"}:
        return text
    path = Path(text).expanduser()
    if path.suffix == ".whl":
        return f"wheel:{path}"
    if path.is_dir():
        return f"dir:{path}"
    raise refuse(
        "BP004", f"`{text}` is no source, no wheel and no folder",
        next="name a checkout, a wheel, pypi:vllm-ascend==VERSION or git:REPO@REF",
    )  # fmt: skip


def check_hosts(host: str, specs: Sequence[LaneSpec], features: Iterable[Feature]) -> list[HostReport]:
    """What the host's release holds, beside the vLLM of each lane.

    Args:
        host: The host's source, as a person wrote it.
        specs: The lanes.
        features: Those that may stand in for one of its modules.

    Raises:
        PatchError: BP003, if none of the features stands in for anything; BP004, BP5xx, if the host cannot be read.
    """
    declared = [(feature, feature.stand_in) for feature in features if feature.stand_in is not None]
    if not declared:
        raise refuse("BP003", "no feature stands in for a module", next="name one that does, or leave --feature out")
    spec = host_source(host)
    source = Lane("host", open_source(spec))
    reports: list[HostReport] = []
    for feature, stand_in in declared:
        text = source.module(stand_in.module)
        if text is None:
            raise refuse(
                "BP110", f"{stand_in.module} is not in {spec}", ("source", spec),
                next=f"name a release of {stand_in.owner} that has it; one without it needs no stand-in",
            )  # fmt: skip
        reports += [_check(lane, spec, feature, stand_in, text) for lane in specs]
    return reports


def _check(lane: LaneSpec, host: str, feature: Feature, stand_in: StandIn, text: Any) -> HostReport:
    report = HostReport(lane, host, stand_in.module, feature.name)
    try:
        opened = Lane(lane.name, open_source(lane.spec))
        report.coverage = read_module(stand_in, text, opened)
        report.version = opened.version
    except PatchError as error:
        report.failures += error.failures
    return report


def worst(reports: Iterable[HostReport]) -> Outcome:
    """The outcome of all."""
    return Outcome.worst(report.outcome for report in reports)


def as_json(reports: Iterable[HostReport]) -> str:
    return json.dumps({"schema": 1, "hosts": [report.as_dict() for report in reports]}, indent=2)


def as_lines(reports: Iterable[HostReport]) -> str:
    """The reports for a person: what covers what, where it is behind, and every line that is not covered."""
    lines: list[str] = []
    for report in reports:
        lines += [f"{report.module}  of {report.host}", f"  lane {report.lane.name}  vLLM {report.version or '?'}"]
        lines += [f"  {line}" for failure in report.failures for line in str(failure).splitlines()]
        if report.coverage is not None:
            lines += [f"    {line}" for line in _told(report.coverage, report.feature)]
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def _told(coverage: Coverage, feature: str) -> Iterable[str]:
    for by, findings in coverage.by().items():
        places = ", ".join(dict.fromkeys(finding.where.rpartition(":")[2] for finding in findings))
        yield f"{by:<34} covers {len(findings)}, at lines {places}"
    older = [finding for finding in coverage.behind if finding.by == STALE]
    lacking = [finding for finding in coverage.behind if finding.by == BEHIND]
    for title, found in (("an older wording of upstream's", older), ("upstream has, and it has not", lacking)):
        if found:
            yield f"{title}: {len(found)}"
            yield from _few(found)
    for failure in coverage.failures:
        yield from str(failure).splitlines()
    if coverage.uncovered:
        left = ", ".join(dict.fromkeys([feature, *coverage.features()]))
        yield f"not covered: {len(coverage.uncovered)}; its own copy runs, and left to it: {left}"
        yield from (f"  {finding}{'   ' + finding.why if finding.why else ''}" for finding in coverage.uncovered)
    elif not coverage.failures:
        yield f"everything is covered: {feature} stands in for it"


def _few(findings: Sequence[Finding]) -> Iterable[str]:
    yield from (f"  {finding}" for finding in findings[:_SHOWN])
    if len(findings) > _SHOWN:
        yield f"  and {len(findings) - _SHOWN} more; --format json has them all"
