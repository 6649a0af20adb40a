"""Released versions as columns, where there is no git: each is read by ranges, as ``verify`` reads a lane."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from balance_patcher.errors import PatchError, refuse
from balance_patcher.index import finder, parse_version

from .columns import Column, ReleasePlace, source_of
from .matrix import Ref

DISTRIBUTION = "vllm"
_AT_ONCE = 8  # connections


def released(text: str) -> list[str]:
    """The versions of ``FIRST..LAST``, or of a list with commas, the oldest first.

    Raises:
        PatchError: BP922, if it is neither; BP501, if the index cannot be asked; BP502 for a version that is not there.
    """
    first, dots, last = text.partition("..")
    if not dots:
        versions = [one.strip() for one in text.split(",") if one.strip()]
        if not versions:
            raise _bad(text, "it names no version")
        return sorted(dict.fromkeys(versions), key=_order)
    if not first or not last:
        raise _bad(text, "both ends are needed")
    low, high = _order(first), _order(last)
    if low > high:
        raise refuse("BP921", f"{last} is older than {first}", next=f"write --releases {last}..{first}")
    known = finder().versions(DISTRIBUTION)
    for end in (first, last):  # the refusal of a version that is not there names the near ones
        if all(_order(one) != _order(end) for one in known):
            finder().find(DISTRIBUTION, end)
    between = [one for one in known if low <= _order(one) <= high]
    final = [one for one in between if not parse_version(one).is_prerelease or _order(one) in {low, high}]
    return sorted(final, key=_order)


def range_of(since: str, until: str | None) -> str:
    """The releases from one on, as :func:`released` takes them: to another one, or to the newest final one.

    Raises:
        PatchError: BP007, if a ref is no release, which needs a repository; BP501, BP502 as there.
    """
    first, last = _release(since), _release(until) if until else ""
    if not last:
        known = sorted(finder().versions(DISTRIBUTION), key=_order)
        last = next((one for one in reversed(known) if not parse_version(one).is_prerelease), first)
    return f"{first}..{last}" if _order(first) != _order(last) else first


def _release(ref: str) -> str:
    version = ref.removeprefix("v")
    try:
        parse_version(version)
    except PatchError as error:
        raise refuse(
            "BP007", f"{ref} is no release, and needs --repo", next="give --repo PATH, or a release"
        ) from error
    return version


def _order(version: str) -> Any:
    return parse_version(version)


def _bad(text: str, why: str) -> PatchError:
    return refuse("BP922", f"`{text}` is no range of releases: {why}", next="write it as --releases 0.32.0..0.33.0")


def release_columns(versions: Sequence[str]) -> list[Column]:
    """One judged column for each version."""
    return [
        Column(
            Ref(version, "release", judged=True, version=version),
            ReleasePlace(f"pypi:{DISTRIBUTION}=={version}", version),
        )
        for version in versions
    ]


def fetch(columns: Sequence[Column], paths: Sequence[str]) -> None:
    """Read some files of all columns side by side, so that nobody waits for the network one after the other.

    What cannot be read is not told here: the look at it says so.
    """

    def one(column: Column) -> None:
        if isinstance(column.place, ReleasePlace):
            try:
                for path in paths:
                    source_of(column.place.spec).read(path)
            except PatchError:
                return

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        list(pool.map(one, columns))
