"""The counts of the ranks: tensors for the collective and for whoever looks, plain memory for the gate.

The gate reads one count a rank in every step. A tensor's own ``item()`` touches four objects in four places; after
a step of the model none of them is in the processor's cache, and with 64 ranks that was 5 % of a ``schedule()`` with 128
admissions. So each count says where its number lies, and reads it there. It never goes through torch's dispatcher:
a read of it cannot wait for any device.
"""

from __future__ import annotations

import functools
from array import array
from typing import Any


def zero_counts(ranks: int) -> list[Any]:
    """One count a rank, each an int tensor of shape ``(1,)`` on the CPU; they share one block of memory.

    Args:
        ranks: How many.
    """
    import torch

    memory = array("i", [0]) * ranks
    counts = [part.as_subclass(_count()) for part in torch.frombuffer(memory, dtype=torch.int).split(1)]
    for at, count in enumerate(counts):
        count.memory, count.at = memory, at
    return counts


@functools.cache
def _count() -> Any:
    """The class of a count; torch is imported only where there are any."""
    import torch

    class Count(torch.Tensor):  # type: ignore[misc]
        """A tensor that knows its memory. What is written to it in place is what ``item()`` reads."""

        __slots__ = ("at", "memory")
        # Every other operation is a tensor's, at its pace, and gives plain tensors.
        __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - torch's documented way

        def item(self) -> int:
            number: int = self.memory[self.at]
            return number

        def __deepcopy__(self, memo: object) -> torch.Tensor:
            return self.clone()

        def __reduce_ex__(self, protocol: Any) -> Any:  # the class itself has no name by which it is found again
            return self.clone().__reduce_ex__(protocol)

    return Count
