"""What features measure, as a server shows it: Prometheus metrics beside vLLM's own, and a line in its periodic log.

vLLM's manager of stat loggers gets one more, where its configuration asks for a feature that measures something, and
otherwise none: the plugin group for stat loggers would switch statistics on where an operator has switched them off.
The metrics are made when an engine core is heard for the first time. By then vLLM's own are there, which take
everything away that is named like them; and of an engine that has not spoken nothing is claimed. Each statistics
object goes to one server and holds what was added since the last one, so several servers count nothing twice.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .byname import asked_by_name
from .carried import Told, complain, read, receive
from .measures import ABOUT, Figures, Measures, Timed
from .registry import features, of_others
from .wanted import who_asks

#: Where several servers keep them together, a gauge is what was set last, as with vLLM's own.
GAUGE = "mostrecent"
#: The figures of every feature.
OWN = {
    "enabled": "Whether {} is on in the engine core: 1, or 0 where it was asked for and is off.",
    "info": "What runs as {} in the engine core, or why it is off.",
}
#: Of an engine core without us, or without what is measured.
SILENT: Told = {
    "on": False,
    "about": {"reason": "the engine core tells nothing of it: balance_patcher is not active there"},
}
_logger = logging.getLogger("vllm.balance_patcher")


def built(made: Any, arguments: Mapping[str, Any]) -> None:
    """A server has made a client of its engine cores, or the manager of its stat loggers: let it show what it hears.

    Nobody is stopped by what goes wrong here.

    Args:
        made: The client or the manager.
        arguments: What its constructor was given, by name.
    """
    try:
        config = arguments["vllm_config"]
        asked = measured(config)
        if not asked:
            return
        if hasattr(made, "stat_loggers"):
            made.stat_loggers.append(stat_logger(asked, made.stat_loggers, config, quiet=_quiet(arguments)))
        else:
            receive(made)
    except Exception as error:  # noqa: BLE001 - as it says
        complain("what the features measure cannot be shown", error)


def measured(vllm_config: Any) -> dict[str, Measures]:
    """What is measured by the features that are asked for, by their names."""
    others, _ = of_others(asked_by_name(vllm_config))
    known = [(feature, feature.measures) for feature in (*features(), *others) if feature.measures is not None]
    return {feature.name: measures for feature, measures in known if who_asks(feature, vllm_config) is not None}


def _quiet(arguments: Mapping[str, Any]) -> bool:
    """Whether vLLM leaves its own periodic lines out: of several servers each knows a part only."""
    return arguments.get("client_count", 1) > 1 or not arguments.get("enable_default_loggers", True)


def given(upstream: Any, made: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor by their names, with those that were left out."""
    try:
        bound = inspect.signature(upstream).bind(made, *args, **kwargs)
    except TypeError:  # somebody's own, who does not say what it takes
        return dict(kwargs)
    bound.apply_defaults()
    return bound.arguments


def stat_logger(asked: Mapping[str, Measures], beside: Sequence[Any], vllm_config: Any, *, quiet: bool) -> Any:
    """A stat logger of vLLM's that shows what features measure.

    Args:
        asked: What is measured, by feature.
        beside: The other loggers of the manager; the classes of the metrics are taken from the one for Prometheus.
        vllm_config: The configuration.
        quiet: Without a line in the periodic log.
    """
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    prometheus = next((one for one in beside if hasattr(one, "_gauge_cls")), None)
    model = vllm_config.model_config.served_model_name
    shown = [Shown(feature, measures, prometheus, model) for feature, measures in asked.items()]

    class FeatureStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
        """Takes what the statistics carry."""

        def __init__(self) -> None:
            self.shown = shown

        def record(self, scheduler_stats: Any, *_: Any, engine_idx: int = 0, **__: Any) -> None:
            if scheduler_stats is None:
                return
            try:
                told = read(scheduler_stats)
                for one in shown:
                    one.hear(engine_idx, told.get(one.feature))
            except Exception as error:  # noqa: BLE001 - the figures must not stop the server
                complain("what the features measure cannot be shown", error)

        def log(self) -> None:
            try:
                for line in () if quiet else (one.line() for one in shown):
                    if line:
                        _logger.info("%s", line)
            except Exception as error:  # noqa: BLE001 - as above
                complain("what the features measure cannot be shown", error)

        def log_engine_initialized(self) -> None:
            pass

    return FeatureStatLogger()


class Shown:
    """The metrics of one feature in one server.

    Args:
        feature: Its name.
        measures: What it measures.
        prometheus: vLLM's own logger for Prometheus, of which the classes are; without one there are no metrics.
        model: The model's name, as vLLM's own metrics have it.
    """

    def __init__(self, feature: str, measures: Measures, prometheus: Any, model: str) -> None:
        self.feature, self.measures, self._model = feature, measures, model
        self._metrics = Metrics(feature, measures, prometheus) if prometheus is not None else None
        self._heard: dict[int, Mapping[str, Any]] = {}  # what each engine said of itself last
        self._since: dict[int, dict[str, Any]] = {}  # of those that are on, their figures since the last line

    def hear(self, engine: int, told: Told | None) -> None:
        """An engine core has sent statistics, with this in them."""
        if told is None:
            if engine in self._heard:
                return
            told = SILENT
        about = {"on": bool(told.get("on")), **told.get("about", {})}
        figures = told.get("figures", {})
        if self._metrics is not None:
            before = self._heard.get(engine)
            labels = (self._model, str(engine))
            if before != about:
                self._metrics.say(labels, before, about)
            if about["on"]:
                self._metrics.add(labels, figures)
        self._heard[engine] = about
        if about["on"]:
            self._add(self._since.setdefault(engine, {}), figures)
        else:
            self._since.pop(engine, None)

    def line(self) -> str:
        """The line for the log since the last one; empty where the feature is on nowhere, or nothing was done."""
        since, shown = self._since, [metric.name for metric in self.measures.metrics if metric.kind == "gauge"]
        self._since = {engine: {name: of[name] for name in shown if name in of} for engine, of in since.items()}
        line = self.measures.line(since) if since else ""
        return f"{self.feature}: {line}" if line else ""

    def _add(self, since: dict[str, Any], figures: Figures) -> None:
        for metric in self.measures.metrics:
            if metric.name in figures:
                value, before = figures[metric.name], since.get(metric.name)
                if metric.kind == "histogram":
                    since[metric.name] = (before or Timed()).more(value)
                else:
                    since[metric.name] = value + (before or 0) if metric.kind == "counter" else value


class Metrics:
    """The metrics of one feature; each is made when an engine core is heard for the first time."""

    def __init__(self, name: str, measures: Measures, prometheus: Any) -> None:
        self._name, self._measures, self._of = name, measures, prometheus
        self._about = (*ABOUT[:2], *measures.labels, *ABOUT[2:])
        self._made: dict[str, Any] = {}
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}

    def say(self, labels: tuple[str, str], before: Mapping[str, Any] | None, about: Mapping[str, Any]) -> None:
        """An engine says something of itself, and has perhaps said something else before."""
        self._one("enabled", labels).set(int(about["on"]))
        if before is not None:
            self._one("info", (*labels, *self._words(before))).set(0)
        self._one("info", (*labels, *self._words(about))).set(1)
        for metric in self._measures.metrics if about["on"] else ():
            self._one(metric.name, labels)  # there from now on, at zero

    def add(self, labels: tuple[str, str], figures: Figures) -> None:
        for metric in self._measures.metrics:
            value = figures.get(metric.name)
            if value is None:
                continue
            series = self._one(metric.name, labels)
            if metric.kind == "histogram":
                for each in value:
                    series.observe(each)
            elif metric.kind == "gauge":
                series.set(value)
            elif value:
                series.inc(value)

    def _words(self, about: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(about.get(label, "")) for label in self._about)

    def _one(self, name: str, labels: tuple[str, ...]) -> Any:
        """The series of a metric with these values of its labels."""
        series = self._series.get((name, labels))
        if series is None:
            if name not in self._made:
                self._made[name] = self._make(name)
            series = self._series[name, labels] = self._made[name].labels(*labels)
        return series

    def _make(self, name: str) -> Any:
        declared = {metric.name: metric for metric in self._measures.metrics}.get(name)
        told: dict[str, Any] = {
            "documentation": declared.help if declared is not None else OWN[name].format(self._name),
            "labelnames": ["model_name", "engine", *(self._about if name == "info" else ())],
        }
        # The classes are vLLM's own choice: those of Ray's metrics where these are used.
        if declared is not None and declared.kind == "histogram":
            made, told["buckets"] = self._of._histogram_cls, declared.buckets  # noqa: SLF001
        elif declared is not None and declared.kind == "counter":
            made = self._of._counter_cls  # noqa: SLF001
        else:
            made, told["multiprocess_mode"] = self._of._gauge_cls, GAUGE  # noqa: SLF001
        return made(name=f"vllm:{self._name}_{name}", **told)
