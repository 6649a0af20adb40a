"""How much is read from any source: one number for a folder, an archive and a repository."""

from __future__ import annotations

#: The largest file that is read from any source, in bytes.
SIZE_LIMIT = 8 * 1024 * 1024
