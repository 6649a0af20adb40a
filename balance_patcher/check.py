"""Look at one lane: place, rewrite, compile and question every feature, and report what was seen.

This is what ``verify`` calls for each lane. It needs neither torch nor vLLM, and it turns every
refusal into a finding; only what nobody foresaw is raised.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from .build import check_whole, compile_plan
from .compose import compose, overlapping
from .delta import AddParameter, Prologue
from .errors import Failure, PatchError
from .feature import CallShape, Feature
from .invariants import check_invariants
from .limits import KNOWN
from .matching import render_bound
from .plan import Placement, Plan, make_plan
from .relations import compatible
from .report import CallReport, DeltaReport, FeatureReport, InvariantReport, LaneReport, names
from .rewrite import Rewrite, take_out
from .source import Lane, LaneSpec, Source, open_source
from .targets import Target, find_target
from .through import signature_of

_SHORT = 70  # a bound text that is longer says nothing in a table


def fetch(spec: LaneSpec, features: Sequence[Feature]) -> Source:
    """Open a lane's source and read what the check will read first; nothing is parsed, so threads may do it.

    Raises:
        PatchError: BP004, BP5xx.
    """
    source = open_source(spec.spec)
    modules = dict.fromkeys(target.partition(":")[0] for feature in features for target in feature.targets)
    modules |= dict.fromkeys(addition.module for feature in features for addition in feature.adds)
    for module in ("vllm._version", *modules):
        stem = module.replace(".", "/")
        if source.read(f"{stem}.py") is None:
            source.read(f"{stem}/__init__.py")
    return source


def check_lane(
    spec: LaneSpec, features: Sequence[Feature], *, strict: bool = False, source: Source | None = None
) -> tuple[LaneReport, Lane | None]:
    """Everything that ``verify`` says of one lane, and the lane itself if it could be opened.

    Args:
        spec: The lane.
        features: What to look for.
        strict: An absorbed delta is a failure too.
        source: The lane's source, if it was opened already.
    """
    report = LaneReport(spec.name, spec.spec)
    try:
        lane = Lane(spec.name, source or open_source(spec.spec))
    except PatchError as error:
        report.failures += error.failures
        return report, None
    sound = []
    for feature in features:
        try:
            report.features.append(check_feature(lane, feature, strict=strict))
            # One that does nothing here has nothing to share.
            sound += [feature] if report.features[-1].status == "applied" else []
        except PatchError as error:
            report.failures += error.failures
    for group in overlapping(sound):
        for together in compatible(group):
            report.failures += [failure for failure in _together(lane, together) if failure not in report.failures]
    try:
        report.vllm_version, report.commit = lane.version, lane.commit
    except PatchError as error:
        report.failures += [failure for failure in error.failures if failure not in report.failures]
    for feature_report in report.features:
        row = _beyond(report.vllm_version)
        feature_report.failures = [failure.with_fields(*row) for failure in feature_report.failures]
    return report, lane


def _beyond(version: str | None) -> tuple[tuple[str, str], ...]:
    """What is to be said with every finding on a release that nobody has looked at."""
    release = re.match(r"(\d+)\.(\d+)\.\d", version or "")
    if release is None:
        return ()
    at = int(release[1]), int(release[2])
    first, last = (tuple(map(int, known.split("."))) for known in KNOWN)
    return () if first <= at <= last else (("vLLM", f"{version}; known are {KNOWN[0]} to {KNOWN[1]}"),)


def check_feature(lane: Lane, feature: Feature, *, strict: bool = False) -> FeatureReport:
    """Every delta, invariant and call shape of one feature on one lane.

    Raises:
        PatchError: BP5xx, if the lane cannot be read.
    """
    plan = make_plan(lane, feature)
    report = FeatureReport(feature.name)
    report.failures += plan.all_failures
    rewrites: dict[str, Rewrite] | None = None
    if not report.failures:
        try:
            rewrites, compiled = compile_plan(plan)
            check_whole(rewrites, compiled)
            report.reversible = all(_reversible(result) for result in rewrites.values())
        except PatchError as error:
            report.failures += error.failures
    for placement in plan.placements:
        report.deltas.append(_delta(placement, report.failures if rewrites is None else []))
    if strict:
        report.failures += [_absorbed(p) for p in plan.placements if p.status == "absorbed"]
    for finding in check_invariants(plan, rewrites):
        report.invariants.append(InvariantReport(finding.name, finding.status, finding.detail))
        report.failures += [failure for failure in finding.failures if failure not in report.failures]
    # Where there is nothing to patch, nothing of ours is called.
    shapes = feature.call_shapes if any(p.status != "not-applicable" for p in plan.placements) else ()
    for shape in shapes:
        called, failure = _call(lane, plan, shape, rewrites)
        report.calls.append(called)
        report.failures += [failure] if failure else []
    report.failures = list(dict.fromkeys(report.failures))
    return report


def _together(lane: Lane, group: Sequence[Feature]) -> Sequence[Failure]:
    """Why features that edit a function in common, each sound by itself, cannot share it."""
    if len(group) == 1:
        return ()
    try:
        plan = make_plan(lane, compose(group))
        rewrites, compiled = compile_plan(plan)
        check_whole(rewrites, compiled)
        failures = tuple(failure for finding in check_invariants(plan, rewrites) for failure in finding.failures)
    except PatchError as error:
        failures = error.failures
    names = " and ".join(repr(feature.name) for feature in group)
    return [failure.with_fields(("together", names)) for failure in failures]


def _reversible(result: Rewrite) -> bool:
    """Whether the text without its deltas is upstream's, and so its tree too."""
    return take_out(result) == result.original.text


def _delta(placement: Placement, stopped_by: Sequence[Failure]) -> DeltaReport:
    """One delta's row; ``stopped_by`` is why the feature could not be rewritten."""
    delta, target = placement.delta, placement.target
    own = next((failure for failure in stopped_by if names(failure, delta.name, delta.declared)), None)
    return DeltaReport(
        delta.name,
        delta.target,
        "failed" if own else placement.status,
        placement.variant.name if placement.variant else None,
        target.text.display if target else None,
        placement.line,
        placement.matches,
        own.headline if own and not placement.failures else _detail(placement),
        delta.declared,
    )


def _detail(placement: Placement) -> str:
    if placement.failures:
        return placement.failures[0].headline
    if placement.target is None:
        return placement.why
    if placement.variant and placement.variant.note and placement.status != "applied":
        return placement.variant.note
    parts = [f"{name} {render_bound(value)}" for name, value in placement.bound.items() if _short(value)]
    for step in placement.steps:
        if isinstance(step.edit, AddParameter):
            parts.append(f"adds {step.text}")
        elif isinstance(step.edit, Prologue) and "$$$PARAMETERS" in step.template:
            passed = step.text[step.text.rindex("(") + 1 : step.text.rindex(")")]
            parts.append(f"forwards {passed or 'nothing'}")
    if placement.variant and placement.variant.note and not parts:
        parts.append(placement.variant.note)
    return ", ".join(parts)


def _short(value: object) -> bool:
    return not isinstance(value, tuple) and len(render_bound(value)) <= _SHORT  # type: ignore[arg-type]


def _absorbed(placement: Placement) -> Failure:
    delta = placement.delta
    where = placement.target.text.display if placement.target else None
    return Failure(
        "BP121",
        f"upstream has what delta {delta.name!r} does, and --strict was asked for",
        fields=(("target", delta.target), ("remove when", delta.remove_when), ("declared", delta.declared)),
        next=f"remove the delta once this is the oldest lane: {delta.declared}",
        file=where,
        line=placement.line,
    )


def _call(
    lane: Lane, plan: Plan, shape: CallShape, rewrites: dict[str, Rewrite] | None
) -> tuple[CallReport, Failure | None]:
    name = shape.target.rpartition(":")[2].rpartition(".")[2]
    text = f"{name}({shape.arguments})"
    result = (rewrites or {}).get(shape.target.partition(":")[0])
    target = result.targets.get(shape.target) if result else None
    if target is None:
        found = find_target(lane, shape.target)
        if rewrites is None or isinstance(found, Failure):
            return CallReport(text, "unknown", "the feature could not be placed"), None
        target = found
    call = ast.parse(f"f({shape.arguments})", mode="eval").body
    assert isinstance(call, ast.Call)  # noqa: S101 - it was written as one
    positional = ([None] if target.owner is not None else []) + [None for _ in call.args]
    try:
        signature_of(target).bind(*positional, **{k.arg or "": None for k in call.keywords})
    except TypeError as error:
        return CallReport(text, "broken", str(error)), _does_not_bind(plan, target, text, error)
    return CallReport(text, "holds", ""), None


def _does_not_bind(plan: Plan, target: Target, text: str, error: TypeError) -> Failure:
    return Failure(
        "BP120",
        f"`{text}`: {error}",
        fields=(("feature", plan.feature.name), ("target", f"{target.name}   ({target.where(target.node)})")),
        next="let a delta add the parameter, or change what callers pass",
        file=target.text.display,
        line=target.node.lineno,
    )
