"""How a report can be written: by name, a function that gets a :class:`~tools.drift.model.Report` and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from .annotations import as_github
from .markdown import as_markdown
from .model import Report
from .page import as_html
from .text import as_text
from .written import to_json

FORMATS: dict[str, Callable[[Report], str]] = {
    "text": as_text,
    "json": to_json,
    "markdown": as_markdown,
    "github": as_github,
    "html": as_html,
}
