"""Read what a server exposes for Prometheus: fetched over HTTP, parsed by prometheus_client's own parser.

Nothing is followed and nothing is guessed: another scheme than HTTP, a redirect, an error, a page of HTML or half a
text is told as what it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .errors import PatchError, refuse
from .extras import require
from .indexconfig import redact

#: Seconds to wait for a connection and for the next bytes, and for all of them together.
TIMEOUT, WHOLE = (5.0, 10.0), 30.0
#: The longest text that is read, in bytes.
LONGEST = 64 << 20
#: Without it a server may choose OpenMetrics, or compress.
HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
PATH = "/metrics"
PREFIX = "vllm:"

_SERVED = "give the address of vLLM's API server: http://HOST:PORT or http://HOST:PORT/metrics"


@dataclass(frozen=True)
class Sample:
    """One line of the text: ``name{labels} value``."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Exposition:
    """What was read from a server at one moment.

    Attributes:
        url: Where, without credentials.
        samples: All of them, in order.
        clock: The server's own time when it answered, in seconds; ours, where it told none.
        at: When that was, in seconds of ``time.monotonic()``.
    """

    url: str
    samples: tuple[Sample, ...]
    clock: float
    at: float


def metrics_url(text: str) -> str:
    """The address of a server's metrics, of what a person has written.

    Raises:
        PatchError: BP745, if it is no HTTP address.
    """
    try:
        parts = urlsplit(text.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise refuse("BP745", f"{redact(text)}: {error}", next=_SERVED) from None
    if parts.scheme not in ("http", "https") or not host:
        named = parts.scheme if "://" in text else ""
        what = (
            "it has no host"
            if named in ("http", "https")
            else f"its scheme is {named!r}"
            if named
            else "it has no scheme"
        )
        raise refuse("BP745", f"{redact(text)}: {what}", next=_SERVED)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(PATH) else path + PATH, fragment=""))


def read(url: str) -> Exposition:
    """What the server at an address exposes now.

    Args:
        url: As :func:`metrics_url` gives it.

    Raises:
        PatchError: BP740 to BP743, if that cannot be had.
    """
    requests = require("requests")
    shown = redact(url)
    text, headers, at = "", {}, 0.0
    try:
        with requests.get(url, headers=HEADERS, timeout=TIMEOUT, allow_redirects=False, stream=True) as response:
            _check(response, shown)
            headers, at = response.headers, time.monotonic()
            text = _text(response, shown)
    except (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError) as error:
        raise _half(shown, f"the connection ended in the middle of it ({_cause(error)})") from None
    except (requests.exceptions.RequestException, OSError, ValueError) as error:
        raise refuse(
            "BP740", f"{shown}: {_cause(error)}", next=f"see whether it runs and listens there; {_SERVED}"
        ) from None
    samples = tuple(_samples(text, shown))
    if not any(sample.name.startswith(PREFIX) for sample in samples):
        raise refuse(
            "BP743", f"{shown} has metrics, and none of them is vLLM's",
            next=f"{_SERVED}; a server with --disable-log-stats has none",
        )  # fmt: skip
    return Exposition(shown, samples, _clock(headers.get("Date")), at)


def _check(response: Any, shown: str) -> None:
    status = response.status_code
    if response.is_redirect or HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        where = redact(response.headers.get("Location", "nowhere"))
        raise refuse(
            "BP741", f"{shown} sends on to {where}, and that is not followed",
            next="if you trust that address, give it instead",
        )  # fmt: skip
    if status != HTTPStatus.OK:
        hint = {
            HTTPStatus.UNAUTHORIZED: "give credentials: http://USER:PASSWORD@HOST:PORT",
            HTTPStatus.FORBIDDEN: "ask from where its proxy lets you, or the API server itself",
        }.get(status, _SERVED)
        raise refuse("BP741", f"{shown} answers {status} {response.reason or ''}".rstrip(), next=hint)
    kind = response.headers.get("Content-Type", "text/plain").partition(";")[0].strip().lower()
    if kind not in ("text/plain", "application/openmetrics-text"):
        raise refuse("BP743", f"{shown} answers {kind}, not Prometheus' text", next=_SERVED)
    if kind != "text/plain":
        raise refuse("BP741", f"{shown} answers in OpenMetrics, which it was not asked for", next=_SERVED)


def _text(response: Any, shown: str) -> str:
    until, parts, size = time.monotonic() + WHOLE, [], 0
    for part in response.iter_content(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LONGEST:
            raise refuse("BP742", f"{shown} is longer than {LONGEST >> 20} MiB", next=_SERVED)
        if time.monotonic() > until:
            raise _half(shown, f"it did not come whole within {WHOLE:g} s")
    try:
        text = b"".join(parts).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _half(shown, str(error)) from None
    if text and not text.endswith("\n"):
        raise _half(shown, f"it ends in the middle of a line: {text.rpartition(chr(10))[2][:80]!r}")
    return text


def _samples(text: str, shown: str) -> Iterator[Sample]:
    parser = require("prometheus_client.parser")
    try:
        for family in parser.text_string_to_metric_families(text):
            yield from (Sample(sample.name, dict(sample.labels), float(sample.value)) for sample in family.samples)
    except Exception as error:  # noqa: BLE001 - what it makes of a wrong text is any of many
        raise _half(shown, f"{type(error).__name__}: {error}") from None


def _half(shown: str, why: str) -> PatchError:
    return refuse(
        "BP742", f"{shown}: {why}", next="ask once more; if it stays so, see what stands between here and the server"
    )


def _cause(error: BaseException) -> str:
    """The innermost cause, without addresses of objects or credentials."""
    seen: BaseException = error
    while True:
        inner = [getattr(seen, "reason", None), *seen.args, seen.__context__]
        deeper = next((item for item in inner if isinstance(item, BaseException)), None)
        if deeper is None or deeper is seen:
            break
        seen = deeper
    text = getattr(seen, "strerror", None) or str(seen).rpartition(">: ")[2] or type(seen).__name__
    return redact(" ".join(str(text).split()))


def _clock(date: str | None) -> float:
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(date or "").timestamp()
    return time.time()
