"""The examples that declarations bring along, run: each becomes what it says, each refusal is refused by its id.

Those of this repository are tests. Of a file that stands elsewhere, and of another package, ``verify`` runs them.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

from .build import compile_plan
from .delta import Delta
from .errors import Failure, PatchError
from .feature import Example, Feature, Refusal
from .plan import make_plan
from .source import Lane

_MARK = re.compile(r"  # bp: [\w.-]+$", re.MULTILINE)


@dataclass
class _Text:
    """A source that holds one module, and is a vLLM."""

    path: str
    text: str
    spec: str = "example"

    def read(self, path: str) -> bytes | None:
        return self.text.encode() if path == self.path else b"" if path == "vllm/__init__.py" else None

    def display(self, path: str) -> str:
        return path

    def commit(self) -> str | None:
        return None


def module_of(feature: Feature) -> ModuleType | None:
    """The module that declares a feature, if it was imported."""
    loaded = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    declared = ((module, vars(module).get("FEATURE")) for module in loaded)
    return next((m for m, found in declared if isinstance(found, Feature) and found.deltas is feature.deltas), None)


def becomes(feature: Feature, example: Example | Refusal) -> str:
    """What a delta makes of an example's module, all other deltas left out, without the marks.

    Raises:
        PatchError: Why it is refused.
    """
    delta = _delta(feature, example)
    adds = tuple(addition for addition in feature.adds if addition.module == delta.module)
    alone = replace(feature, deltas=(delta,), invariants=(), adds=adds)
    source = _Text(delta.module.replace(".", "/") + ".py", example.before)
    _, compiled = compile_plan(make_plan(Lane("example", source), alone))
    return "\n".join(_MARK.sub("", item.text).strip() for item in compiled)


def _delta(feature: Feature, example: Example | Refusal) -> Delta:
    return next(delta for delta in feature.deltas if delta.name == example.delta)


def check_examples(feature: Feature) -> tuple[Failure, ...]:
    """Which of a feature's ``EXAMPLES`` and ``REFUSES`` do not hold (BP808)."""
    module = module_of(feature)
    return tuple(_wrong(feature, vars(module))) if module is not None else ()


def _wrong(feature: Feature, names: dict[str, object]) -> Iterator[Failure]:
    for kind, label in ((Example, "EXAMPLES"), (Refusal, "REFUSES")):
        found = names.get(label, ())
        for at, item in enumerate(found if isinstance(found, (list, tuple)) else (found,), 1):
            if not isinstance(item, kind):
                what, row = f"it is {type(item).__name__}, and no {kind.__name__}", ("found", repr(item)[:80])
            elif all(item.delta != delta.name for delta in feature.deltas):
                names_ = ", ".join(delta.name for delta in feature.deltas)
                what, row = f"there is no delta {item.delta!r}", ("deltas", names_)
            else:
                said = _why_not(feature, item)
                if said is None:
                    continue
                what, row = said
            yield Failure(
                "BP808", f"{label}, item {at}: {what}", f"mend it, or the delta, in {feature.declared}", (row,)
            )


def _why_not(feature: Feature, item: Example | Refusal) -> tuple[str, tuple[str, str]] | None:
    try:
        text = becomes(feature, item)
    except PatchError as error:
        codes = [failure.code for failure in error.failures]
        if isinstance(item, Refusal) and codes == [item.code]:
            return None
        wanted = f"{item.code} is declared" if isinstance(item, Refusal) else "no refusal is declared"
        return f"{item.delta} is refused with {', '.join(codes)}, and {wanted}", ("refusal", str(error))
    if isinstance(item, Refusal):
        return f"{item.delta} can be placed, and {item.code} is declared", ("becomes", text)
    if text == item.after.strip():
        return None
    rows = difflib.unified_diff(item.after.strip().splitlines(), text.splitlines(), "", "", n=0, lineterm="")
    return f"{item.delta} makes something else of it", (
        "- example",
        "\n".join(["+ what the delta makes", *list(rows)[3:]]),
    )
