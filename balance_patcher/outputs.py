"""One rule for a file that a person names: its folder is made, and what cannot be written is said (BP515)."""

from __future__ import annotations

from pathlib import Path

from .errors import refuse


def write(file: Path, data: bytes | str) -> None:
    """Write a file, as UTF-8 where it is text.

    Raises:
        PatchError: BP515, if it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise refuse("BP515", f"{file}: {error.strerror}", next="check the path and its rights") from error
