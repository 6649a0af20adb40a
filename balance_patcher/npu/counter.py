"""Counts what makes the host wait for a device, in the process and thread where it is entered.

Two things do: reading device memory from the host (``aten::_local_scalar_dense``, which is ``item()``, and a copy to
the CPU), seen by a dispatch mode, below every Python and C++ caller; and waiting in so many words (``synchronize`` of a
device, a stream or an event), seen by wrappers. Runs inside vLLM, on the standard library and what vLLM has loaded.

A counter that does not count would be a pass for everybody. So it is shown one of each on the very device
first (:func:`self_test`), and says what it saw.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

#: What is counted, by the name that a person reads.
READ, COPY, WAIT = "scalar read", "copy to the CPU", "synchronize"
KINDS = (READ, COPY, WAIT)

#: Classes of ``torch.<device>`` that can be waited for, as the module itself can.
_WAITING = ("Stream", "Event")


class Counts:
    """How often each kind was seen, by the place where the step was then.

    Attributes:
        device: What counts as a device: ``npu``, ``cuda``, or ``cpu`` where the counter itself is tried.
        place: Where the step is: ``""``, ``schedule`` or ``gather``.
        open: Whether anything is counted.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.place = ""
        self.open = False
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str, tensor: Any = None, to: Any = None) -> None:
        """Count, if it concerns the device: a read of a tensor there, or a copy from there ``to`` the CPU."""
        if not self.open or (tensor is not None and tensor.device.type != self.device):
            return
        if kind == COPY and (to is None or to.type != "cpu" or self.device == "cpu"):
            return
        with self._lock:  # a worker's output thread counts too
            self._seen[self.place, kind] += 1

    def taken(self) -> dict[str, dict[str, int]]:
        """What was seen since the last call, by place and kind."""
        with self._lock:
            seen, self._seen = self._seen, Counter()
        found: dict[str, dict[str, int]] = {}
        for (place, kind), count in seen.items():
            found.setdefault(place, {})[kind] = count
        return found

    def at(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, during which the step is at a place; an inner place is its own."""

        @functools.wraps(function)
        def placed(*args: Any, **kwargs: Any) -> Any:
            before, self.place = self.place, place
            try:
                return function(*args, **kwargs)
            finally:
                self.place = before

        return placed


def mode(counts: Counts) -> Any:
    """A dispatch mode that counts reads and copies of device memory, for the thread that enters it.

    A copy that does not block is none: whoever needs it waits for it, and that is counted.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    reads = _reads(aten)

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if counts.open:
                if function in reads and reads[function](args, kwargs):
                    counts.add(READ, args[0])
                elif function is aten._to_copy.default and not kwargs.get("non_blocking"):  # noqa: SLF001 - its name
                    counts.add(COPY, args[0], kwargs.get("device"))
                elif function is aten.copy_.default and not (args[2:] and args[2]) and not kwargs.get("non_blocking"):
                    counts.add(COPY, args[1], args[0].device)
            return function(*args, **kwargs)

    return Mode()


def _reads(aten: Any) -> dict[Any, Callable[[Any, Any], bool]]:
    """What reads device memory from the host, and with which arguments it does.

    A value that Python gets is one; a result whose size depends on the values is another.
    """
    import torch

    def always(_args: Any, _kwargs: Any) -> bool:
        return True

    def by_mask(args: Any, kwargs: Any) -> bool:
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)

    def without_size(_args: Any, kwargs: Any) -> bool:
        return kwargs.get("output_size") is None

    named = {
        "_local_scalar_dense.default": always, "nonzero.default": always, "masked_select.default": always,
        "_unique2.default": always, "unique_consecutive.default": always, "unique_dim.default": always,
        "equal.default": always, "is_nonzero.default": always, "bincount.default": always,
        "repeat_interleave.Tensor": without_size, "index.Tensor": by_mask, "index_put.default": by_mask,
        "index_put_.default": by_mask, "_index_put_impl_.default": by_mask,
    }  # fmt: skip
    found: dict[Any, Callable[[Any, Any], bool]] = {}
    for name, when in named.items():
        packet, _, overload = name.partition(".")
        function = getattr(getattr(aten, packet, None), overload, None)
        if function is not None:
            found[function] = when
    return found


def wrap_waits(counts: Counts) -> list[str]:
    """Count calls of what waits for the device, in every thread; the names of what was wrapped.

    Where the counter is tried on the CPU, these are ``torch.cpu``'s, which wait for nothing.
    """
    import torch

    module = getattr(torch, counts.device, None)
    found: list[str] = []
    if module is None:
        return found
    for owner in (module, *(getattr(module, name, None) for name in _WAITING)):
        function = getattr(owner, "synchronize", None)
        if function is None:
            continue
        where = f"{getattr(owner, '__name__', owner)}.synchronize"
        if hasattr(function, "balance_counts"):  # a process is asked more than once
            function.balance_counts.append(counts)
            found.append(where)
            continue
        heard = [counts]

        def counted(*args: Any, _function: Any = function, _heard: Any = heard, **kwargs: Any) -> Any:
            for one in _heard:
                one.add(WAIT)
            return _function(*args, **kwargs)

        counted.balance_counts = heard  # type: ignore[attr-defined]
        try:
            owner.synchronize = functools.wraps(function)(counted)
        except (AttributeError, TypeError):  # a class in C that takes no attributes
            continue
        found.append(where)
    return found


def self_test(counts: Counts) -> dict[str, int]:
    """What the counter sees of one read, one copy and one wait on the device; it should be one of each.

    Where it is tried on the CPU there is no copy to the CPU, so none is asked for.
    """
    import torch

    counts.taken()
    before, counts.open = counts.open, True
    try:
        with mode(counts):
            one = torch.ones(1, device=counts.device)
            one.item()
            if counts.device != "cpu":
                one.to("cpu")
            getattr(torch, counts.device).synchronize()
    finally:
        counts.open = before
    seen: Counter[str] = Counter()
    for kinds in counts.taken().values():
        seen.update(kinds)
    return dict(seen)


def passes(seen: dict[str, int], device: str) -> bool:
    """Whether a self-test saw everything that it did.

    A copy may wait in the device's own code, and is then seen as more than one: what matters is that none is missed.
    """
    wanted = (READ, WAIT) if device == "cpu" else KINDS
    return all(seen.get(kind, 0) >= 1 for kind in wanted)
