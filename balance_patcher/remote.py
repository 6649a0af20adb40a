"""A zip archive on a server: read in parts, or fetched whole where there is no other way.

remotezip turns an archive into byte ranges. What it leaves open is done here: an answer that
breaks off is asked for again, one that is not the part that was asked for is never believed, and
no request may bring more than a bound, whatever the archive says about itself.
"""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
import time
import zipfile
from http import HTTPStatus
from typing import IO, Any

from .extras import require
from .index import Candidate
from .limits import SIZE_LIMIT
from .web import UnreachableError, Web

#: Bytes of a far wheel's end that are fetched first. The directory of vllm 0.18.0 has 222 kB, that
#: of 0.33.0 has 653 kB, so that it comes with one request.
TAIL = 1024 * 1024

#: The most that one request may bring, whatever the archive says about itself.
RANGE_LIMIT = 8 * SIZE_LIMIT

#: The largest wheel that is fetched whole; that of vllm 0.18.0 has 0.43 GB.
DOWNLOAD_LIMIT = 4 * 1024**3

#: How often a connection may drop while an answer is read.
ATTEMPTS = 4

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")

#: What servers answer that do not do ranges, or not the kind that counts from the end.
_NO_RANGES = (200, 400, 405, 416, 501)


class NoRangesError(UnreachableError):
    """The server does not answer a request for a part with that part."""


def open_remote(web: Web, url: str) -> zipfile.ZipFile:
    """The archive behind an address, its directory read.

    Raises:
        NoRangesError: If the server does not do ranges.
        UnreachableError: If it does not answer.
        zipfile.BadZipFile: If it is no archive.
    """
    archive: zipfile.ZipFile = require("remotezip").RemoteZip(
        url, initial_buffer_size=TAIL, session=web, fetcher=_Ranges
    )
    return archive


class _Ranges:
    """Hands remotezip the parts that it asks for: whole, bounded, and again after a drop."""

    def __init__(self, url: str, session: Web, **_unused: object) -> None:
        self._url, self._web = url, session

    def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
        """The part as remotezip's buffer, never streamed: then it can be asked for again."""
        first, last = data_range
        if last is not None:
            last = min(last, first + RANGE_LIMIT - 1)
        wanted = f"bytes={first}" if last is None else f"bytes={first}-{last}"
        cause = "no answer"
        for attempt in range(ATTEMPTS):
            headers = {"Range": wanted, "Accept-Encoding": "identity"}
            with self._web.get(self._url, headers=headers, stream=True) as response:
                start, size = _part(response, first)
                data = bytearray()
                try:
                    for chunk in response.iter_content(1 << 16):
                        data += chunk
                        if len(data) > size:
                            break
                except (require("requests").exceptions.RequestException, OSError) as error:
                    cause = self._web.explain(error)
                else:
                    if len(data) == size:
                        buffer = require("remotezip").PartialBuffer
                        return buffer(io.BytesIO(data), start, size, False)
                    cause = f"{len(data)} of {size} bytes arrived"
            _pause(attempt)
        raise UnreachableError(cause)


def _part(response: Any, first: int) -> tuple[int, int]:
    """Where the part begins that an answer announces, and how many bytes it has."""
    if response.status_code in _NO_RANGES:
        raise NoRangesError(f"HTTP {response.status_code} to a request for a part")
    if response.status_code != HTTPStatus.PARTIAL_CONTENT:
        raise UnreachableError(f"HTTP {response.status_code}")
    said = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if said is None or response.headers.get("Content-Encoding", "identity") != "identity":
        raise NoRangesError("an answer without a plain Content-Range")
    start, size = int(said[1]), int(said[2]) - int(said[1]) + 1
    if size > RANGE_LIMIT or (first >= 0 and start != first):
        raise NoRangesError("another part than the one asked for")
    return start, size


def download(web: Web, wheel: Candidate) -> IO[bytes]:
    """The whole wheel in a nameless temporary file, its digest compared if the index gave one."""
    cause = "no answer"
    for attempt in range(ATTEMPTS):
        file = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this function
        digest = hashlib.sha256()
        response = web.get(wheel.location, headers={"Accept-Encoding": "identity"}, stream=True)
        with response:
            if response.status_code != HTTPStatus.OK:
                file.close()
                raise UnreachableError(f"HTTP {response.status_code}")
            # of an encoded answer the length is not that of the file
            encoded = "Content-Encoding" in response.headers
            length = response.headers.get("Content-Length", "")
            try:
                for chunk in response.iter_content(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
                    if file.tell() > DOWNLOAD_LIMIT:
                        file.close()
                        raise zipfile.BadZipFile(f"it has more than {DOWNLOAD_LIMIT} bytes")
                cause = f"{file.tell()} of {length} bytes arrived"
                whole = encoded or not length.isdecimal() or file.tell() == int(length)
            except require("requests").exceptions.RequestException as error:
                cause, whole = web.explain(error), False
        if whole:
            if wheel.sha256 and digest.hexdigest() != wheel.sha256:
                file.close()
                raise zipfile.BadZipFile("its sha256 is not the one that the index gives")
            return file
        file.close()
        _pause(attempt)
    raise UnreachableError(cause)


def _pause(attempt: int) -> None:
    time.sleep(0.1 * 2**attempt)
