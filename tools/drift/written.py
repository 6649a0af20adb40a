"""A report as JSON, and the report that such a text was made of."""

from __future__ import annotations

import dataclasses
import json

from .decoding import decoded
from .model import SCHEMA, Report


def to_json(report: Report) -> str:
    """The report as JSON; :func:`from_json` makes the same report of it."""
    verdict = {"outcome": report.outcome.name.lower(), "verdicts": report.verdicts}
    return json.dumps({**dataclasses.asdict(report), **verdict}, ensure_ascii=False, indent=2)


def from_json(text: str) -> Report:
    """The report that :func:`to_json` wrote.

    Raises:
        ValueError: If it is no such text, or one of another schema.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"this is no drift report of schema {SCHEMA}")
    return decoded(Report, data)
