"""What a person reads of a running server's gate; and reading it again and again."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from .errors import PatchError
from .exposition import metrics_url, read
from .served import Change, EngineFigures, Gather, Served, change, judgement, served
from .terminal import folded
from .terminal_status import labelled

_MINUTE, _HOUR = 60, 3600


def tell_server(
    url: str, console: Console | None, *, interval: float | None = None, watch: float | None = None
) -> None:
    """Say what the gate of a running server does.

    Args:
        url: The server, or its metrics.
        console: Where it is said; ``None`` for JSON on standard output, one line a reading where it is watched.
        interval: Seconds after which it is read once more, for rates.
        watch: Seconds from one reading to the next, until it is interrupted; one that fails is told and passed over.
            Each says when it was, by the clock of this machine.

    Raises:
        PatchError: BP740 to BP745, if the first reading fails, or the second of two.
    """
    address = metrics_url(url)
    last = served(read(address))
    if interval is not None:
        time.sleep(interval)
        now = served(read(address))
        _tell(now, change(last, now), console)
        return
    _tell(last, None, console, whole=watch is None)
    while watch is not None:
        try:
            time.sleep(watch)
            now = served(read(address))
        except KeyboardInterrupt:
            return
        except PatchError as error:
            sys.stderr.write(f"{error}\n")
            continue
        if console is not None:
            console.print()
        _tell(now, change(last, now), console, whole=False)
        last = now


def _tell(now: Served, added: Change | None, console: Console | None, *, whole: bool = True) -> None:
    if console is None:
        told = {"schema": 1, **now.as_dict(), "change": added.as_dict() if added is not None else None}
        told |= {"judgement": judgement(now, added), "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        sys.stdout.write(json.dumps(told, indent=2 if whole else None, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        return
    width = console.width if console.is_terminal else None
    for number, line in enumerate(_lines(now, added, width)):
        line.rstrip()
        if not number and not whole:
            line.append(time.strftime("  at %H:%M:%S"))
        console.print(line, soft_wrap=True)


def _lines(now: Served, added: Change | None, width: int | None) -> Iterator[Text]:
    up = f"  up for {_span(now.seconds)}" if now.seconds is not None else ""
    yield Text(f"{now.url}{up}", "bold")
    yield from map(Text, folded(judgement(now, added), width))
    for warning in now.warnings:
        yield from (Text(part, "yellow") for part in folded(f"warning: {warning}", width))
    for engine in now.engines:
        yield Text()
        state = {True: ("on", "green"), False: ("OFF", "red")}.get(bool(engine.enabled), ("?", ""))
        model = f" of {engine.model}" if len({one.model for one in now.engines}) > 1 else ""
        yield Text.assemble((f"engine {engine.engine}{model}", "bold"), "  ", state)
        more = added.engines.get(engine.key) if added is not None else None
        yield from labelled(list(_rows(engine, now.seconds)), width)
        if added is not None:
            yield Text(f"  in {added.seconds:.1f} s" if more is not None else "  was started anew", "dim")
            yield from labelled(list(_between(more, added.seconds)), width) if more is not None else ()


def _rows(engine: EngineFigures, up: float | None) -> Iterator[tuple[str, str]]:
    if engine.reason:
        yield "why", engine.reason
    cap = f" of {engine.cap}" if engine.cap is not None else ""
    held = f", {engine.held:g} of them while frozen" if engine.held else ""
    yield "requests", f"running {_number(engine.running)}{cap}, waiting {_number(engine.waiting)}{held}"
    if not engine.enabled:
        return
    yield "frozen", _frozen(engine, up)
    yield from _gather(engine.gather)
    yield "stalls", _number(engine.stalls)
    ids = {"asked for by": engine.source, "digest": engine.digest, "balance_patcher": engine.patcher}
    yield "runs", ", ".join(f"{what} {value}" for what, value in ids.items() if value) or "?"


def _between(added: EngineFigures, seconds: float) -> Iterator[tuple[str, str]]:
    steps = added.gather.count if added.gather is not None else None
    yield "steps", f"{steps / seconds:.1f} a second" if steps is not None and seconds > 0 else "?"
    yield "frozen", _frozen(added, seconds)
    yield from _gather(added.gather)
    if added.stalls:
        yield "stalls", f"{added.stalls:g}"


def _frozen(engine: EngineFigures, up: float | None) -> str:
    steps = engine.gather.count if engine.gather is not None else None
    told = f"in {_number(engine.frozen_steps)} of {_number(steps)} steps"
    told += f" ({100 * engine.frozen_share:.1f} %)" if engine.frozen_share is not None else ""
    if engine.frozen_seconds is None:
        return told
    # The server's clock and the reading's are not the same.
    share = f" ({100 * min(1.0, engine.frozen_seconds / up):.1f} % of the time)" if up and up > 0 else ""
    return f"{told}, for {_span(engine.frozen_seconds)}{share}"


def _gather(gather: Gather | None) -> Iterator[tuple[str, str]]:
    if gather is not None and gather.mean is not None:
        bound = max((bound for bound, _ in gather.buckets if math.isfinite(bound)), default=0.0)
        parts = [f"{name} {_brief(gather.quantile(share), bound)}" for name, share in (("p50", 0.5), ("p99", 0.99))]
        yield "gather", f"mean {_brief(gather.mean, bound)}, {', '.join(parts)} (estimated)"


def _brief(seconds: float | None, bound: float) -> str:
    if seconds is None:
        return "?"
    if math.isinf(seconds):
        return f"over {_brief(bound, bound)}"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _span(seconds: float) -> str:
    if seconds < 2 * _MINUTE:
        return f"{seconds:.1f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}"  # noqa: PLR2004 - as %g has it
