"""How much is read from any source, and for which vLLM somebody has looked at what is read."""

from __future__ import annotations

#: The largest file that is read from any source, in bytes.
SIZE_LIMIT = 8 * 1024 * 1024

#: The oldest and the newest vLLM that somebody has looked at.
KNOWN = ("0.18", "0.33")
