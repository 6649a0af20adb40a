"""A wheel as a source: single files read out of it, near or far.

A vLLM wheel has some 300 MB, and a check wants two of its files. So a far wheel is read by byte
ranges: its directory first, then only the members that are asked for. Only where a server does
not do ranges is the whole wheel fetched, into a file that is gone afterwards.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import PatchError, refuse
from .extras import require
from .index import Candidate, Finder, best_wheel, candidate, finder, parse_version
from .indexconfig import redact
from .limits import SIZE_LIMIT
from .remote import NoRangesError, download, open_remote
from .web import UnreachableError

#: Names the folder where members of far wheels are kept, if there shall be one.
CACHE_VARIABLE = "BALANCE_PATCHER_CACHE"

_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OverflowError,
    UnicodeError,
    ValueError,
)


class _ZipSource:
    """What the two sources have in common: an archive opened late, and members read once."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._lock = threading.RLock()
        self._read: dict[str, bytes | None] = {}
        self._archive: zipfile.ZipFile | None = None
        self._members: dict[str, list[zipfile.ZipInfo]] = {}

    def read(self, path: str) -> bytes | None:
        """One member by its exact path, or ``None`` if the wheel has none of that name.

        Raises:
            PatchError: BP504, if the archive is damaged, the member is encrypted or there are two
                of that name; BP505, if it is larger than ``SIZE_LIMIT``; BP501 or BP514, if the
                wheel cannot be reached.
        """
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or str(parts) != path:
            raise ValueError(f"{path!r} is not a path inside a distribution")
        with self._lock:
            if path not in self._read:
                self._read[path] = self._fetch(path)
            return self._read[path]

    def display(self, path: str) -> str:
        """The path itself: a member of an archive cannot be opened by name."""
        return path

    def commit(self) -> str | None:
        """``None``: a wheel does not prove a commit by itself."""
        return None

    def index(self) -> dict[str, str]:
        """Every member's name with its checksum and size, which the archive's directory has.

        Raises:
            PatchError: BP504, BP501 or BP514, as for a member.
        """
        with self._lock, self._readable("the directory"):
            self._opened()
            return {name: f"{infos[0].CRC:08x}-{infos[0].file_size}" for name, infos in self._members.items()}

    def close(self) -> None:
        """Let the archive go. What was read stays; another read opens it again."""
        with self._lock:
            if self._archive is not None:
                self._archive.close()
            self._archive, self._members = None, {}

    def _open(self) -> zipfile.ZipFile:
        raise NotImplementedError

    def _name(self) -> str:
        raise NotImplementedError

    def _fetch(self, path: str) -> bytes | None:
        with self._readable(path):
            return self._member(self._opened(), path)

    def _opened(self) -> zipfile.ZipFile:
        if self._archive is None:
            self._archive = self._open()
            for info in self._archive.infolist():
                self._members.setdefault(info.filename, []).append(info)
        return self._archive

    @contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """Whatever keeps an archive from being read, as a refusal; the next read opens it anew."""
        try:
            yield
        except _DAMAGED as error:
            self.close()
            text = str(error) or type(error).__name__
            raise self._damaged(f"{text[:1].lower()}{text[1:].rstrip('.')}", path) from error
        except UnreachableError as error:
            self.close()
            raise self._unreachable(str(error)) from error
        except OSError as error:
            self.close()
            raise _no_file(self._name(), self.spec, error) from error

    def _member(self, archive: zipfile.ZipFile, path: str) -> bytes | None:
        infos = self._members.get(path, [])
        if not infos:
            return None
        info = infos[0]
        if len(infos) > 1:
            raise self._damaged(f"it holds {len(infos)} members of this name", path)
        if info.flag_bits & 0x1:
            raise self._damaged("the member is encrypted", path)
        # the other methods inflate without a bound; no wheel builder uses them
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise self._damaged(f"unknown compression method {info.compress_type}", path)
        size = max(info.file_size, info.compress_size)
        if size > SIZE_LIMIT:
            raise self._too_large(size, path)
        with archive.open(info) as stream:
            data = stream.read(SIZE_LIMIT + 1)
        if len(data) != info.file_size:
            raise self._damaged(f"{info.file_size} bytes are declared, {len(data)} are there", path)
        return data

    def _damaged(self, why: str, path: str) -> PatchError:
        return refuse(
            "BP504",
            f"{self._name()} cannot be trusted: {why}.",
            ("source", redact(self.spec)),
            ("member", path),
            next="get the wheel again and compare its sha256 with the index; "
            f"python -m zipfile -t {self._name()} shows what is broken",
            file=path,
        )

    def _too_large(self, size: int, path: str) -> PatchError:
        return refuse(
            "BP505",
            f"{path} has {size} bytes, and more than {SIZE_LIMIT} are not read.",
            ("source", redact(self.spec)),
            next="check that this is a wheel of vLLM",
            file=path,
        )

    def _unreachable(self, cause: str) -> PatchError:
        return refuse(
            "BP501",
            f"{self._name()} cannot be read: {cause}.",
            ("source", redact(self.spec)),
            next="try again; or download the wheel and use wheel:PATH",
        )


class WheelSource(_ZipSource):
    """``wheel:PATH``: a wheel on this machine."""

    def __init__(self, spec: str, path: Path) -> None:
        super().__init__(spec)
        self.path = path

    def _name(self) -> str:
        return str(self.path)

    def _open(self) -> zipfile.ZipFile:
        return _open_file(self.path, self.spec)


class PypiSource(_ZipSource):
    """``pypi:DIST==VERSION``: a wheel from the configured package indexes.

    Args:
        spec: What the user wrote.
        dist: The name of the distribution.
        version: One exact version.
        cache: A folder in which members are kept, so that they are read without the network the
            next time; without it ``BALANCE_PATCHER_CACHE`` counts, and without both nothing is
            kept. A member that is known to be missing is kept as an empty ``NAME.missing``.
    """

    def __init__(self, spec: str, dist: str, version: str, cache: Path | None = None) -> None:
        super().__init__(spec)
        self.dist, self.version = dist, version
        named = os.environ.get(CACHE_VARIABLE)
        self.cache = cache or (Path(named).expanduser() if named else None)
        self._found: Candidate | None = None
        self._release: weakref.finalize[..., Any] | None = None

    def display(self, path: str) -> str:
        """The kept copy, if there is one; otherwise the path itself."""
        folder = self._kept()
        if folder is not None and (folder / path).is_file():
            return str(folder / path)
        return path

    def close(self) -> None:
        with self._lock:
            super().close()
            if self._release is not None:
                self._release()
                self._release = None

    def _name(self) -> str:
        return self._found.filename if self._found else f"{self.dist}=={self.version}"

    def _fetch(self, path: str) -> bytes | None:
        folder = self._kept()
        if folder is not None:
            try:
                if (folder / f"{path}.missing").is_file():
                    return None
                return (folder / path).read_bytes()
            except OSError:
                pass
        data = super()._fetch(path)
        folder = self._kept()
        if folder is not None:
            _keep(folder / (path if data is not None else f"{path}.missing"), data or b"")
        return data

    def _kept(self) -> Path | None:
        """The folder of this wheel in the cache; found without the network if it is there."""
        if self.cache is None:
            return None
        if self._found is not None:
            return self.cache / self._found.filename
        name = require("packaging.utils").canonicalize_name(self.dist)
        version = parse_version(self.version)
        try:
            names = [one.name for one in self.cache.iterdir() if one.is_dir()]
        except OSError:
            return None
        kept = [candidate(one, "", name) for one in names]
        fitting = [one for one in kept if one is not None and one.wheel]
        fitting = [one for one in fitting if parse_version(one.version) == version]
        return self.cache / best_wheel(fitting).filename if fitting else None

    def _open(self) -> zipfile.ZipFile:
        shared: Finder = finder()
        if self._found is None:
            self._found = shared.find(self.dist, self.version)
        path = self._found.path
        if path is not None:
            return _open_file(path, self.spec)
        try:
            return open_remote(shared.web, self._found.location)
        except NoRangesError:
            file = download(shared.web, self._found)
            self._release = weakref.finalize(self, file.close)
            return zipfile.ZipFile(file)
        except require("remotezip").RemoteZipError as error:
            raise zipfile.BadZipFile(str(error)) from error

    def _member(self, archive: zipfile.ZipFile, path: str) -> bytes | None:
        try:
            return super()._member(archive, path)
        except require("remotezip").RemoteZipError as error:
            raise zipfile.BadZipFile(str(error)) from error


def _open_file(path: Path, spec: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except OSError as error:
        raise _no_file(str(path), spec, error) from error


def _no_file(name: str, spec: str, error: OSError) -> PatchError:
    return refuse(
        "BP514",
        f"{name}: {error.strerror or error}.",
        ("source", redact(spec)),
        next="give the path of a wheel that is there and readable: wheel:dist/vllm-….whl",
        file=name,
    )


def _keep(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all. A cache that is full is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
    except OSError:
        pass
