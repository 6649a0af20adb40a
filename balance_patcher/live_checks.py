"""What engine cores wrote down, line by line against what the text and the declarations give.

The code that must run is compiled here, from the installed vLLM's text, in a process that imports no vLLM.
"""

from __future__ import annotations

import base64
import marshal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from .bound import begins_at
from .build import compile_plan
from .compose import compose
from .environment import entry_points, would_arm
from .errors import Failure, PatchError
from .feature import Feature
from .plan import Plan, make_plan
from .probe import RANKS
from .proof import compile_text, find_code, same_code
from .registry import find_feature
from .report import FeatureReport, InvariantReport
from .source import Lane


@dataclass
class Run:
    """One pair of engine cores.

    Attributes:
        name: ``off``, or the feature that is asked for.
        additional_config: What they are started with.
        reports: What each rank wrote down.
        ended: How it ended, if not as it should.
        log: The last lines of what all its processes printed.
    """

    name: str
    additional_config: Mapping[str, Any]
    reports: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    log: str = ""


@dataclass
class _Lines:
    """The lines of one feature in one run."""

    report: FeatureReport

    def holds(self, name: str, detail: str) -> None:
        self.report.invariants.append(InvariantReport(name, "holds", detail))

    def broken(self, name: str, failure: Failure) -> None:
        self.report.invariants.append(InvariantReport(name, "broken", failure.headline))
        self.report.failures.append(failure.with_fields(("invariant", name)))

    def unknown(self, name: str, failure: Failure) -> None:
        self.report.invariants.append(InvariantReport(name, "unknown", failure.headline))
        self.report.failures.append(failure.with_fields(("invariant", name)))


def compare(feature: Feature, run: Run, lane: Lane, start_method: str) -> FeatureReport:
    """One feature in one run: a line for each thing that must hold, and a failure for each that does not."""
    lines = _Lines(FeatureReport(feature.name, live=True))
    on = run.name == feature.name
    refused = [failure for report in run.reports for failure in _refusals(report, feature.name)]
    if refused:
        for failure in dict.fromkeys(refused):
            lines.broken("nothing stands against the feature", failure)
        return lines.report
    reached = sorted((report for report in run.reports if report["reached"]), key=lambda report: str(report["rank"]))
    if len(reached) != RANKS:
        lines.unknown("the engine cores start", _not_reached(run, len(reached)))
        return lines.report
    _started(lines, reached, start_method)
    if not _decided(lines, feature, reached, on=on):
        return lines.report
    _read_back(lines, feature, reached, on=on)
    _runs(lines, feature, reached, lane, on=on)
    if on:
        _agree(lines, feature, reached)
        _taken_out(lines, feature, reached)
    return lines.report


def _refusals(report: dict[str, Any], name: str) -> Iterator[Failure]:
    """What stood against a feature in an engine core that asked for it."""
    if report["reached"]:
        made = next(f for f in report["status"]["features"] if f["name"] == name)["decisions"]
    else:
        made = [decision for engine in report["decisions"] for decision in engine if decision["feature"] == name]
    for decision in made:
        for told in decision["failures"]:
            fields = tuple(told["fields"].items())
            yield Failure(told["code"], told["what"], told["next"], fields, told["file"], told["line"])


def _not_reached(run: Run, reached: int) -> Failure:
    why = f"; {run.ended}" if run.ended else ""
    return Failure(
        "BP516", f"{reached} of {RANKS} engine cores came to their executor{why}",
        "read the log; nothing was checked in them", (("log", run.log),),
    )  # fmt: skip


def _started(lines: _Lines, reached: Sequence[dict[str, Any]], start_method: str) -> None:
    methods = {report["start_method"] for report in reached}
    kinds = ", ".join(sorted({report["engine"] for report in reached}))
    name = "the engine cores start"
    if methods == {start_method}:
        lines.holds(name, f"{_ranks([report['rank'] for report in reached])} {kinds}, by {start_method}")
    else:
        what = f"they were started by {', '.join(sorted(methods))}, not by {start_method}"
        lines.unknown(name, Failure("BP516", what, "ask for the start method that this platform uses"))


def _decided(lines: _Lines, feature: Feature, reached: Sequence[dict[str, Any]], *, on: bool) -> bool:
    name = "each of them decided once"
    if feature.distribution and not on:
        return _left_alone(lines, feature, reached)
    states = [_state(report, feature.name) for report in reached]
    missing = [report["rank"] for report, state in zip(reached, states, strict=True) if not state["decisions"]]
    if missing:
        lines.broken(name, _not_installed(feature, missing, reached))
        return False
    wrong = [state["decisions"] for state in states if [made["active"] for made in state["decisions"]] != [on]]
    if wrong:
        told = "; ".join(made["reason"] for made in wrong[0])
        want = "ON" if on else "OFF"
        what = f"feature {feature.name!r} is not decided {want} once: {told}"
        lines.broken(name, Failure("BP609", what, "compare the reason with the configuration that is asked for"))
        return False
    lines.holds(name, states[0]["decisions"][0]["reason"].partition("\n")[0])
    return True


def _left_alone(lines: _Lines, feature: Feature, reached: Sequence[dict[str, Any]]) -> bool:
    """What another distribution brings and nobody asks for by name is not even decided on."""
    name = "nobody decides on what nobody asks for"
    made = [decision["reason"] for report in reached for decision in _state(report, feature.name)["decisions"]]
    if made:
        lines.broken(name, Failure("BP609", made[0], "find out who asks for it"))
    else:
        lines.holds(name, f"{_ranks([report['rank'] for report in reached])} {feature.distribution}")
    return not made


def _not_installed(feature: Feature, ranks: Sequence[Any], reached: Sequence[dict[str, Any]]) -> Failure:
    """The plugin did not reach an engine core: nothing was decided there, so nothing is patched."""
    points = entry_points()
    _, why = would_arm(points)
    told = "\n".join(f"{p.group}: {p.name} = {p.value}" for p in points) or "none is found"
    status = reached[0]["status"]
    plugins = next(switch for switch in status["switches"] if switch["name"] == "VLLM_PLUGINS")
    return Failure(
        "BP608", f"feature {feature.name!r} is not in rank {', '.join(map(str, ranks))}: nobody was asked there",
        "install balance_patcher into the Python that runs vLLM, and let VLLM_PLUGINS name it where that is set",
        (
            ("reason", why),
            ("entry points", told),
            ("VLLM_PLUGINS", plugins["value"] if plugins["value"] is not None else "not set"),
            ("engine core", status["armed"]["how"]),
        ),
    )  # fmt: skip


def _stands_in(report: dict[str, Any], feature: Feature) -> bool:
    """Whether its classes are bound whatever is decided, because it stands in for a host's module."""
    ours = any(done["ours"] for done in report["status"]["takeovers"])
    return ours and report["parts"][feature.name] is not None


def _state(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(feature for feature in report["status"]["features"] if feature["name"] == name)


def _runs(lines: _Lines, feature: Feature, reached: Sequence[dict[str, Any]], lane: Lane, *, on: bool) -> None:
    """For each target: what runs, by code, against what the text and the declarations give here."""
    parts = reached[0]["parts"][feature.name]
    try:
        declared = _declared(lane, compose([find_feature(part) for part in parts])) if parts else {}
        plan = make_plan(lane, feature)
        upstream = _upstream(plan)
    except PatchError as error:
        for failure in error.failures:
            lines.broken("what is declared can be made", failure)
        return
    for target in plan.steps:
        ours = on or (_stands_in(reached[0], feature) and _on_class(feature, target))
        name = f"{target} {'as declared' if ours else 'without ours'}"
        told: dict[str, list[Any]] = {}
        for report in reached:
            found = report["targets"][target]
            at = _position(found, declared.get(target) if ours else upstream.get(target))
            if (at is None) if ours else any(map(_is_ours, found["reached"])):
                lines.broken(name, _other(report["rank"], target, found, ours=ours))
            else:
                told.setdefault(_seen(found, at), []).append(report["rank"])
        if sum(map(len, told.values())) == len(reached):
            lines.holds(name, "; ".join(f"{_ranks(ranks)} {text}" for text, ranks in told.items()))


def _on_class(feature: Feature, target: str) -> bool:
    return feature.runtime is not None and target.rpartition(".")[0] == feature.runtime.base


def _is_ours(item: dict[str, Any]) -> bool:
    return _code(item["code"]).co_filename.startswith("<balance_patcher ")


def _seen(found: dict[str, Any], at: int | None) -> str:
    """What stands there, in words: the wanted function and who wraps it, or somebody else's."""
    origins = [item["origin"] for item in found["reached"]]
    if at is None:
        return f"somebody else's {origins[0] if origins else 'object'}"
    return "".join([origins[at], *(f", wrapped by {origin}" for origin in origins[:at])])


def _position(found: dict[str, Any], want: CodeType | None) -> int | None:
    """How many functions stand around the wanted code in what an engine core reaches; ``None`` if it is not there."""
    codes = [_code(item["code"]) for item in found["reached"]]
    return next((at for at, code in enumerate(codes) if want is not None and same_code(code, want)), None)


def _other(rank: Any, target: str, found: dict[str, Any], *, ours: bool) -> Failure:
    now = " → ".join(item["origin"] for item in found["reached"]) or "nothing that has code"
    want = "what balance_patcher installs" if ours else "nothing of ours, since nothing asks for the feature"
    return Failure(
        "BP609", f"in rank {rank} {found['holder'] or 'nobody'} has {now}",
        "find out who put that there, after balance_patcher or in its place; its file and line stand above",
        (("target", target), ("declared", want)),
    )  # fmt: skip


def _read_back(lines: _Lines, feature: Feature, reached: Sequence[dict[str, Any]], *, on: bool) -> None:
    """The installation as each engine core reads it back, and the class that it would make its scheduler of."""
    stands_in = _stands_in(reached[0], feature)
    name = "what was bound is there" if on else "nothing is bound" if not stands_in else "only its classes are bound"
    for report in reached:
        state = _state(report, feature.name)
        for told in state["failures"]:
            failure = Failure(told["code"], f"in rank {report['rank']}: {told['what']}", told["next"])
            lines.broken(name, failure)
        if state["installed"] is not on or (state["bindings"] and not on and not stands_in):
            what = f"in rank {report['rank']} feature {feature.name!r} is {'not ' if on else ''}installed"
            lines.broken(name, Failure("BP609", what, "report this with the log of the engine core"))
    if not any(line.name == name for line in lines.report.invariants):
        places = [binding["place"] for binding in _state(reached[0], feature.name)["bindings"]]
        lines.holds(name, ", ".join(places) or "classes and methods are as they were found")
    if feature.runtime is not None:
        _scheduler(lines, feature.runtime.name, reached, on=on or stands_in)


def _scheduler(lines: _Lines, ours: str, reached: Sequence[dict[str, Any]], *, on: bool) -> None:
    name = f"the scheduler class {'is' if on else 'is not'} {ours}"
    for report in reached:
        bases = [cls.rpartition(".")[2].rpartition(":")[2] for cls in report["scheduler"]]
        if (ours in bases) is not on:
            what = f"in rank {report['rank']} the scheduler's bases are {' → '.join(bases)}"
            lines.broken(name, Failure("BP609", what, "find out who rebinds the scheduler class"))
            return
    lines.holds(name, " → ".join(cls.rpartition(":")[2] for cls in reached[0]["scheduler"][:3]))


def _ranks(ranks: Sequence[Any]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:"


def _agree(lines: _Lines, feature: Feature, reached: Sequence[dict[str, Any]]) -> None:
    digests = [_state(report, feature.name)["running"] for report in reached]
    name = "the ranks run the same"
    if len(set(digests)) == 1 and digests[0] is not None:
        lines.holds(name, f"digest {digests[0]}")
    else:
        what = f"the digests of their texts are {', '.join(map(str, digests))}"
        lines.broken(name, Failure("BP609", what, "compare what is installed for each rank"))


def _taken_out(lines: _Lines, feature: Feature, reached: Sequence[dict[str, Any]]) -> None:
    told = [report["taken_out"][feature.name] for report in reached]
    if None not in told:
        lines.report.reversible = all(item["clean"] for item in told)
    for item in told:
        for failure in (item or {}).get("failures", []):
            lines.report.failures.append(Failure(failure["code"], failure["what"], failure["next"]))


# -- what must run ---------------------------------------------------------------------------


def _declared(lane: Lane, feature: Feature) -> dict[str, CodeType]:
    _, compiled = compile_plan(make_plan(lane, feature))
    return {item.target: item.code for item in compiled}


def _upstream(plan: Plan) -> dict[str, CodeType | None]:
    targets = {p.target.name: p.target for p in plan.placements if p.target is not None}
    return {
        name: find_code(compile_text(t.text.text, t.text.display), t.qualname, begins_at(t.node))
        for name, t in targets.items()
    }


def _code(text: str) -> CodeType:
    """A code object that a process of this same interpreter wrote down."""
    code: CodeType = marshal.loads(base64.b64decode(text))  # noqa: S302 - it comes from a child of ours
    return code
