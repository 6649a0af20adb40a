"""Features that other distributions bring, through the entry-point group ``balance_patcher.features``.

    [project.entry-points."balance_patcher.features"]
    step_tally = "bp_example.tally"

The entry point has the feature's name and leads to the module that declares it (its ``FEATURE``), or to the
:class:`~balance_patcher.feature.Feature` itself. They are looked for once a process, and only when somebody asks
for a feature that is not one of ours; of those that are found, only what is asked for is imported.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import Failure, PatchError
from .feature import Feature

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

GROUP = "balance_patcher.features"


@dataclass(frozen=True)
class Offer:
    """One entry point of the group.

    Attributes:
        name: What the feature is called.
        value: ``module`` or ``module:attribute``.
        distribution: Name and version of the distribution that brings it.
        place: The folder where that is installed.
        point: The entry point, to load it; ``None`` where the distribution's entry points cannot be read.
        failure: What is wrong with it already.
    """

    name: str
    value: str
    distribution: str
    place: str
    point: EntryPoint | None = None
    failure: Failure | None = None

    def broken(self, why: str, declared: str = "") -> Failure:
        """Why it cannot be used, for a person who has to find out whose it is (BP002)."""
        return Failure(
            "BP002", f"feature {self.name!r} of {self.distribution} cannot be used: {why}",
            f"mend or uninstall {self.distribution.partition(' ')[0]}; nothing of it was patched",
            (*self.rows, *([("declared", declared)] if declared else [])),
        )  # fmt: skip

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        return (
            ("distribution", f"{self.distribution} in {self.place}"),
            ("entry point", f"{self.name} = {self.value}"),
        )


@lru_cache(maxsize=1)
def offers() -> tuple[Offer, ...]:
    """What the distributions of this Python bring, by name; nothing is imported for it.

    Two that bring one name cannot both be meant, and nobody can say which is: neither can be used.
    """
    # A folder that stands twice on the path has each distribution twice.
    found = sorted(dict.fromkeys(_found()), key=lambda offer: (offer.name, offer.distribution))
    many = Counter(offer.name for offer in found)
    return tuple(offer if many[offer.name] == 1 else _double(offer, found) for offer in found)


def _found() -> Iterator[Offer]:
    from importlib import metadata

    for distribution in metadata.distributions():
        try:
            # Reading this one small file is a tenth of what parsing all of its metadata costs.
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            first = metadata.distribution(distribution.metadata["Name"])
            shadowed = first.locate_file("") != distribution.locate_file("")
        except Exception:  # noqa: BLE001, S112 - somebody's damaged folder is not what was asked about
            continue
        if not shadowed:
            yield from _of(distribution)


def _of(distribution: Distribution) -> Iterator[Offer]:
    told, place = f"{distribution.metadata['Name']} {distribution.version}", str(distribution.locate_file(""))
    try:
        points = [point for point in distribution.entry_points if point.group == GROUP]
    except Exception as error:  # noqa: BLE001 - whatever a wrong file makes of itself
        unread = Offer("?", "entry_points.txt", told, place)
        yield replace(unread, failure=unread.broken(f"{type(error).__name__}: {error}"))
        return
    for point in points:
        yield Offer(point.name, point.value, told, place, point)


def _double(offer: Offer, found: list[Offer]) -> Offer:
    others = [other.distribution for other in found if other.name == offer.name and other is not offer]
    return replace(offer, failure=offer.broken(f"{' and '.join(others)} brings one of that name too"))


@cache
def load(offer: Offer) -> Feature:
    """Import what an entry point leads to.

    Raises:
        PatchError: BP001 and BP002, with the distribution, if it does not lead to a sound declaration.
    """
    if offer.failure is not None or offer.point is None:
        raise PatchError(offer.failure or offer.broken("its entry point cannot be read"))
    try:
        found = offer.point.load()
    except PatchError as error:
        raise PatchError(*(failure.with_fields(*offer.rows) for failure in error.failures)) from error
    except (Exception, SystemExit) as error:
        raise PatchError(offer.broken(f"{type(error).__name__}: {error}", _line(error))) from error
    feature = getattr(found, "FEATURE", None) if isinstance(found, ModuleType) else found
    if not isinstance(feature, Feature):
        raise PatchError(offer.broken(f"{offer.value} is no feature and has no FEATURE"))
    if feature.name != offer.name:
        raise PatchError(offer.broken(f"it is called {feature.name!r} there", feature.declared))
    if feature.stand_in is not None:
        why = "it stands in for another project's module, which only a feature of balance_patcher itself can"
        raise PatchError(offer.broken(why, feature.declared))
    return replace(feature, distribution=offer.distribution)


def _line(error: BaseException) -> str:
    """The line at which an import failed: the last one that is not the import system's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
