"""Figures cross from an engine core to the server with the statistics that vLLM itself sends there.

The two are different processes, often on different machines, and what is not a field of the statistics' class is lost
between them. So the object that a scheduler has made becomes one of a subclass with one more field, and the client's
decoder is given a message that knows it. Only objects are changed, never a class of vLLM's: a server that does not
know the field skips it, and from an engine core without us there is ``None``. Whatever goes wrong is said once, and
the statistics go their way as upstream made them.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, get_args

#: The field. A plain dictionary, by feature, that may be read on any version of either side.
FIELD = "balance_patcher"
#: What a feature tells: whether it is on, what is said of it, and its figures.
Told = dict[str, Any]

_MAKE, _STATS = "make_stats", "scheduler_stats"
_logger = logging.getLogger("vllm.balance_patcher")
_complained: set[str] = set()


def complain(what: str, error: Exception) -> None:
    """Say once in this process that something cannot be shown; nobody is stopped by it."""
    if what not in _complained:
        _complained.add(what)
        _logger.warning("%s: %s: %s", what, type(error).__name__, error)


# -- in the engine core ----------------------------------------------------------------------


def carry(engine: Any, feature: str, tell: Callable[[], Told]) -> None:
    """Let all statistics of an engine core carry what a feature tells, from now on.

    Its scheduler gets a ``make_stats`` of its own in front of that of its class, whichever that is by then.

    Args:
        engine: The engine core; its scheduler is not kept alive.
        feature: The feature's name.
        tell: Is called whenever statistics are made.
    """
    scheduler = getattr(engine, "scheduler", None)
    if not callable(getattr(scheduler, _MAKE, None)):
        return
    own = vars(scheduler).get(_MAKE)
    tellers = getattr(own, "tellers", None)
    if tellers is None:
        tellers = {}
        setattr(scheduler, _MAKE, _telling(scheduler, own, tellers))
    tellers[feature] = tell


def _telling(scheduler: Any, own: Any, tellers: Mapping[str, Callable[[], Told]]) -> Any:
    held = weakref.ref(scheduler)

    def make_stats(*args: Any, **kwargs: Any) -> Any:
        it = held()
        stats = (own or partial(getattr(type(it), _MAKE), it))(*args, **kwargs)
        if stats is not None:  # they are switched off
            try:
                attach(stats, {feature: tell() for feature, tell in tellers.items()})
            except Exception as error:  # noqa: BLE001 - figures must not stop an engine
                complain("what the features measure cannot be sent to the server", error)
        return stats

    make_stats.tellers = tellers  # type: ignore[attr-defined]
    return make_stats


def attach(stats: Any, told: Mapping[str, Told]) -> None:
    """Make statistics carry something: the same object, of a class that has the field."""
    kind: Any = type(stats)
    stats.__class__ = extended(kind)
    setattr(stats, FIELD, told)


def send(engine: Any) -> None:
    """Send statistics that no step sends: of an engine that has no request there are none otherwise.

    They go where upstream sends those of a step without an answer.
    """
    try:
        queue: Any = getattr(engine, "output_queue", None)
        stats = engine.scheduler.make_stats() if queue is not None else None
        if getattr(stats, FIELD, None) is not None:
            from vllm.v1.engine import EngineCoreOutputs

            queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))
    except Exception as error:  # noqa: BLE001 - as above
        complain("what the features measure cannot be sent to the server", error)


# -- in the server ---------------------------------------------------------------------------


def read(stats: Any) -> Mapping[str, Told]:
    """What statistics carry, by feature; empty where they carry nothing."""
    told = getattr(stats, FIELD, None)
    return told if isinstance(told, dict) else {}


def receive(client: Any) -> None:
    """Let an engine core's client read what its statistics carry.

    Raises:
        TypeError: If the messages are not what is known of them; then it reads them as before.
    """
    import msgspec

    decoder = client.decoder
    inner = decoder.decoder
    message = extended_message(inner.type)
    decoder.decoder = msgspec.msgpack.Decoder(message, ext_hook=inner.ext_hook, dec_hook=inner.dec_hook)


@lru_cache(maxsize=8)
def extended(cls: type) -> type:
    """The class of some statistics with the field.

    Raises:
        TypeError: If it is not a dataclass.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__module__}.{cls.__qualname__} is no dataclass")
    if any(field.name == FIELD for field in dataclasses.fields(cls)):
        return cls
    # Whatever stands in it: what cannot be decoded would end the server.
    made = dataclasses.make_dataclass(cls.__name__, [(FIELD, Any, None)], bases=(cls,))
    made.__module__ = __name__
    return made


@lru_cache(maxsize=8)
def extended_message(message: Any) -> Any:
    """A message that holds such statistics.

    Raises:
        TypeError: If it has no place for them, or would not be laid out as before.
    """
    import msgspec

    types = {field.name: field.type for field in msgspec.structs.fields(message)}
    found = [one for one in get_args(types.get(_STATS)) if dataclasses.is_dataclass(one)]
    if len(found) != 1:
        raise TypeError(f"{message.__qualname__} has no {_STATS}")
    kept = message.__struct_config__
    made = msgspec.defstruct(
        message.__name__, [(_STATS, extended(found[0]) | None, None)], bases=(message,), module=__name__,  # type: ignore[arg-type]
        array_like=kept.array_like, omit_defaults=kept.omit_defaults, gc=kept.gc,
    )  # fmt: skip
    if made.__struct_fields__ != message.__struct_fields__:
        raise TypeError(f"{message.__qualname__} cannot be extended: its fields would stand in another order")
    return made
