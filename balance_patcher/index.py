"""Asking the configured package indexes for one wheel of one exact version.

A project page is fetched once per process, however many versions are asked for from however many
threads. "The index says that there is no such version" and "the index could not be asked" are
kept apart all the way: the second is never reported as the first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from .errors import PatchError, refuse
from .extras import require
from .indexconfig import Configuration, Index, configured, indexes, redact
from .web import UnreachableError, Web

__all__ = ["Candidate", "Finder", "Index", "find_wheel", "finder", "indexes"]


@dataclass(frozen=True)
class Candidate:
    """One file that an index or a folder offers.

    Attributes:
        filename: Its name, never with a slash.
        location: Its address, possibly a ``file:`` one.
        version: Its PEP 440 version, as written in the file name.
        size: Bytes, where the index says so.
        sha256: Hex digest, where the index says so.
        wheel: Whether it is a wheel; otherwise it is a source archive.
    """

    filename: str
    location: str
    version: str
    size: int | None = None
    sha256: str | None = None
    wheel: bool = True

    @property
    def path(self) -> Path | None:
        """The file on this machine, if it is one."""
        return _local(self.location)


class Finder:
    """Finds wheels with one configuration. Share one per process: see :func:`finder`."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.web = Web(configuration)
        self._lock = threading.Lock()
        self._pages: dict[tuple[str, str], Future[list[Candidate]]] = {}

    def find(self, dist: str, version: str) -> Candidate:
        """The wheel of exactly that version.

        Raises:
            PatchError: BP501, BP502; BP004, if the version is not a PEP 440 one.
        """
        wanted = parse_version(version)
        parse = require("packaging.version").Version
        offered: list[Candidate] = []
        silent: list[tuple[str, str]] = []
        for place, is_index in self._places():
            try:
                found = self._page(place, dist, is_index=is_index)
            except UnreachableError as error:
                silent.append((redact(place), str(error)))
                continue
            offered += found
            wheels = [one for one in found if one.wheel and parse(one.version) == wanted]
            if wheels:
                return best_wheel(wheels)
        if silent:
            raise _unreachable(dist, version, silent)
        raise _not_found(dist, version, offered, self.configuration)

    def versions(self, dist: str) -> list[str]:
        """Every version that there is a wheel of, the oldest first.

        Raises:
            PatchError: BP501, if a place cannot be asked: what it has would be missing without a word; BP502, if
                there is none.
        """
        offered: list[Candidate] = []
        for place, is_index in self._places():
            try:
                offered += self._page(place, dist, is_index=is_index)
            except UnreachableError as error:
                raise _unreachable(dist, "any version", [(redact(place), str(error))]) from error
        if not any(one.wheel for one in offered):
            raise _not_found(dist, "0", offered, self.configuration)
        return sorted({one.version for one in offered if one.wheel}, key=parse_version)

    def _places(self) -> Iterable[tuple[str, bool]]:
        yield from ((link, False) for link in self.configuration.find_links)
        yield from ((index.url, True) for index in self.configuration.indexes)

    def _page(self, place: str, dist: str, *, is_index: bool) -> list[Candidate]:
        """What one place offers of a distribution; a failure is remembered as well."""
        name = require("packaging.utils").canonicalize_name(dist)
        with self._lock:
            page = self._pages.get((place, name))
            mine = page is None
            if page is None:
                page = self._pages[place, name] = Future()
        if mine:
            try:
                page.set_result(self._fetch(place, name, is_index=is_index))
            except BaseException as error:  # noqa: BLE001 - other threads wait for this outcome
                page.set_exception(error)
        return page.result()

    def _fetch(self, place: str, name: str, *, is_index: bool) -> list[Candidate]:
        path = _local(place)
        if path is not None:
            return _from_disk(path, name, is_index=is_index)
        url = f"{place.rstrip('/')}/{name}/" if is_index else place
        simple = require("pypi_simple")
        response = self.web.get(url, headers={"Accept": simple.ACCEPT_JSON_PREFERRED})
        status = response.status_code
        if status in (404, 410) and is_index:
            return []
        if status in (401, 403, 407):
            raise UnreachableError(f"it wants other credentials (HTTP {status})")
        if status != HTTPStatus.OK:
            raise UnreachableError(f"HTTP {status}")
        try:
            page = simple.ProjectPage.from_response(response, name)
        except (ValueError, KeyError, TypeError, simple.UnsupportedRepoVersionError) as error:
            cause = f"its answer is not a package page ({type(error).__name__})"
            raise UnreachableError(cause) from error
        return _candidates(page, name)


def finder() -> Finder:
    """The one finder of this process for the configuration that is in force now.

    Raises:
        PatchError: BP005, BP513.
    """
    configuration = configured()
    with _FINDERS_LOCK:
        return _FINDERS.setdefault(configuration, Finder(configuration))


_FINDERS: dict[Configuration, Finder] = {}
_FINDERS_LOCK = threading.Lock()


def find_wheel(dist: str, version: str) -> Candidate:
    """The wheel of exactly that version from the configured indexes.

    ``0.23`` is ``0.23.0``; a post-release or a local version (``0.23.0+cpu``) is another version.
    A wheel for manylinux on x86-64 is preferred, then the highest build number. A yanked one
    counts: the version is pinned. Source archives do not.

    Raises:
        PatchError: BP501, if a place could not be asked and no other has it; BP502, if all were
            asked and none has it.
    """
    return finder().find(dist, version)


def parse_version(version: str) -> Any:
    """The ``packaging`` version.

    Raises:
        PatchError: BP004.
    """
    module = require("packaging.version")
    try:
        return module.Version(version)
    except module.InvalidVersion as error:
        raise refuse(
            "BP004",
            f"'{version}' is not a version.",
            next="write one exact version, such as pypi:vllm==0.23.0",
        ) from error


def best_wheel(wheels: Iterable[Candidate]) -> Candidate:
    """The most fitting of several wheels of one version; there must be at least one."""
    utils = require("packaging.utils")

    def rank(one: Candidate) -> tuple[int, tuple[int, str], str]:
        _, _, build, tags = utils.parse_wheel_filename(one.filename)
        platforms = {tag.platform for tag in tags}
        linux = [platform for platform in platforms if platform.endswith("x86_64")]
        if any(platform.startswith("manylinux") for platform in linux):
            place = 3
        elif any("linux" in platform for platform in linux):
            place = 2
        else:
            place = 1 if "any" in platforms else 0
        return place, build or (-1, ""), one.filename

    return max(wheels, key=rank)


def candidate(filename: str, location: str, name: str, **known: Any) -> Candidate | None:
    """What a file name promises, or ``None`` if it is no file of that distribution."""
    utils = require("packaging.utils")
    if "/" in filename or "\\" in filename:
        return None
    wheel = filename.endswith(".whl")
    parse = utils.parse_wheel_filename if wheel else utils.parse_sdist_filename
    try:
        dist, version = parse(filename)[:2]
    except (utils.InvalidWheelFilename, utils.InvalidSdistFilename):
        return None
    if dist != name:
        return None
    return Candidate(filename, location, str(version), wheel=wheel, **known)


def _candidates(page: Any, name: str) -> list[Candidate]:
    found = [
        candidate(
            # as pip does: the text of a link may be anything
            unquote(urlsplit(package.url).path.rpartition("/")[2]),
            package.url,
            name,
            size=package.size,
            sha256=(package.digests or {}).get("sha256"),
        )
        for package in page.packages
    ]
    return [one for one in found if one is not None]


def _from_disk(path: Path, name: str, *, is_index: bool) -> list[Candidate]:
    """A local index, a folder of files, a page of links, or one file."""
    if not path.exists():
        raise UnreachableError("there is no such file or folder")
    folder = path / name if is_index else path
    page = folder / "index.html" if is_index else folder
    try:
        if page.is_file() and page.suffix in {".html", ".htm"}:
            simple = require("pypi_simple").ProjectPage
            base = page.absolute().as_uri()
            return _candidates(simple.from_html(name, page.read_bytes(), base), name)
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        found = [
            candidate(one.name, one.absolute().as_uri(), name, size=one.stat().st_size)
            for one in files
            if one.is_file()
        ]
    except OSError as error:
        raise UnreachableError(error.strerror or str(error)) from error
    return [one for one in found if one is not None]


def _local(place: str) -> Path | None:
    if place.startswith("file:"):
        return Path(url2pathname(urlsplit(place).path))
    return None if "://" in place else Path(place).expanduser()


def _unreachable(dist: str, version: str, silent: list[tuple[str, str]]) -> PatchError:
    fields = [("index", f"{place}\n{cause}") for place, cause in silent]
    return refuse(
        "BP501",
        f"{dist}=={version} could not be looked up: {silent[0][1]}.",
        *fields,
        next="check the index (PIP_INDEX_URL, UV_DEFAULT_INDEX, pip config list), the proxy "
        "(HTTPS_PROXY), the\ncertificates (PIP_CERT) and the credentials (netrc, keyring); or "
        "download the wheel and use wheel:PATH",
    )


def _not_found(dist: str, version: str, offered: list[Candidate], configuration: Configuration) -> PatchError:
    parse = require("packaging.version").Version
    wanted = parse(version)
    there = sorted({parse(one.version) for one in offered if one.wheel})
    sdists = sorted(one.filename for one in offered if parse(one.version) == wanted)
    asked = [*configuration.find_links, *(index.url for index in configuration.indexes)]
    below = [str(one) for one in there if one < wanted][-3:]
    above = [str(one) for one in there if one > wanted][:3]
    newest = [str(one) for one in there[-3:]]
    fields = [("asked", "\n".join(map(redact, asked)) or "nothing: no index is in use")]
    if there:
        fields.append(("nearest", ", ".join(below + above)))
        fields += [("newest", ", ".join(newest))] if newest != below + above else []
    if sdists:
        what = f"{dist}=={version} has no wheel, only a source archive ({sdists[0]})."
    elif offered:
        what = f"there is no {dist}=={version}."
    else:
        what = f"there is no distribution '{dist}'."
    if sdists:
        follow = "unpack the source archive and use dir:PATH"
    elif there:
        follow = "name one of the versions above, or set PIP_INDEX_URL to the index that has it"
    else:
        follow = "check the name, or set PIP_INDEX_URL to the index that has it (pip config list)"
    return refuse("BP502", what, *fields, next=follow)
