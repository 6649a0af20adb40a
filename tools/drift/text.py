"""The report for a person at a terminal, as plain text."""

from __future__ import annotations

from .model import Report


def as_text(report: Report) -> str:
    """The verdict first, then what is behind it."""
    return "\n".join(report.verdicts)
