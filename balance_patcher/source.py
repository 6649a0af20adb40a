"""Where the text of vLLM comes from: one small interface, five forms.

A *source* is written ``installed``, ``pypi:DIST==VERSION``, ``wheel:PATH``, ``dir:PATH`` or
``git:REPO@REF``. A source hands out files by their path inside the distribution
(``vllm/v1/engine/core.py``) and says what it is. Nothing here imports or runs what it reads.
"""

from __future__ import annotations

from typing import Protocol

#: The largest file that is read from any source, in bytes.
SIZE_LIMIT = 8 * 1024 * 1024


class Source(Protocol):
    """One place that holds a vLLM.

    ``spec`` is the text that the user wrote.
    """

    spec: str

    def read(self, path: str) -> bytes | None:
        """The bytes of one file, or ``None`` if this source has no such file.

        Args:
            path: A path inside the distribution, with slashes, never absolute, no ``..``.

        Raises:
            PatchError: BP5xx, if the source cannot be read at all.
        """

    def display(self, path: str) -> str:
        """How to name that file to a person (a path they can open, or ``path`` itself)."""

    def commit(self) -> str | None:
        """The full or abbreviated hex commit that this source can prove by itself, if any."""
