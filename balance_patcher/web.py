"""One HTTP session for everything that is read from package indexes.

A dropped connection, a busy server or a slow name server is an everyday thing in CI, and must not
look like a missing version: so the patience is in one place, and so is what may be said about a
failure. Credentials are never part of it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .errors import PatchError
from .extras import require
from .indexconfig import Configuration, redact

if TYPE_CHECKING:
    import requests

#: Seconds to wait for a connection, and for the next bytes of an answer.
TIMEOUT = (10, 60)

#: The longest that a server may make us wait before a retry, in seconds.
LONGEST_WAIT = 5.0


#: Connections to one host at a time. Each new one asks the name server, and one that drops a few
#: of many simultaneous questions costs glibc's five seconds a time: so few, and kept alive.
CONNECTIONS = 4

#: A shorter password is not struck out of a message: it would take ordinary letters with it.
SHORTEST_SECRET = 3


class UnreachableError(Exception):
    """A place that could not be asked; the text is the cause, without credentials."""


class Web:
    """One HTTP session for all threads: retries, timeouts, certificates and credentials.

    A dropped connection, 429 and 5xx are tried again with growing pauses; credentials go only to
    the host that they are configured for (netrc is left to requests).
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._lock = threading.Lock()
        self._session: requests.Session | None = None
        self._keyring: dict[str, tuple[str, str] | None] = {}

    def get(self, url: str, *, headers: Mapping[str, str] | None = None, stream: bool = False) -> requests.Response:
        """The answer, whatever its status. A streamed one must be closed: it holds a connection.

        Raises:
            UnreachableError: If there is none.
        """
        exceptions = require("requests").exceptions
        proxy = self._configuration.proxy
        options: dict[str, Any] = {
            "headers": dict(headers or {}),
            "stream": stream,
            "timeout": TIMEOUT,
            # given with each request: REQUESTS_CA_BUNDLE would win over the session's
            "verify": self._configuration.cert,
            "proxies": {"http": proxy, "https": proxy} if proxy else None,
        }
        session, auth = self._open(), self._credentials(url)
        try:
            response = session.get(url, auth=auth, **options)
            if response.status_code == HTTPStatus.UNAUTHORIZED and auth is None:
                asked = self._ask_keyring(url)
                if asked:
                    response.close()
                    response = session.get(url, auth=asked, **options)
        except (exceptions.RequestException, OSError, ValueError) as error:
            raise UnreachableError(self.explain(error)) from error
        return response

    def explain(self, error: BaseException) -> str:
        """The innermost cause of a failed request, without addresses of objects or secrets."""
        seen = error
        while True:
            inner = [getattr(seen, "reason", None), *seen.args]
            deeper = next((item for item in inner if isinstance(item, BaseException)), None)
            if deeper is None or deeper is seen:
                break
            seen = deeper
        text = re.sub(r"<?[\w.]*Connection\w*(\([^)]*\)| object at 0x[0-9a-f]+>): ", "", str(seen))
        for index in self._configuration.indexes:
            if index.password and len(index.password) >= SHORTEST_SECRET:
                text = text.replace(index.password, "***")
        return redact(" ".join(text.split())) or type(seen).__name__

    def _open(self) -> requests.Session:
        with self._lock:
            if self._session is None:
                requests = require("requests")
                adapter = requests.adapters.HTTPAdapter(
                    pool_maxsize=CONNECTIONS, pool_block=True, max_retries=_retries()
                )
                self._session = requests.Session()
                self._session.headers["User-Agent"] = "balance_patcher"
                self._session.mount("https://", adapter)
                self._session.mount("http://", adapter)
            return self._session

    def _credentials(self, url: str) -> tuple[str, str] | None:
        """Those of the index on the same host, the longest common address first."""
        fitting = [
            index
            for index in self._configuration.indexes
            if index.username and urlsplit(index.url)[:2] == urlsplit(url)[:2]
        ]
        fitting.sort(key=lambda index: (url.startswith(index.url), len(index.url)), reverse=True)
        for index in fitting:
            return index.username or "", index.password or ""
        return None

    def _ask_keyring(self, url: str) -> tuple[str, str] | None:
        host = urlsplit(url).netloc
        with self._lock:
            if host not in self._keyring:
                found = None
                try:
                    keyring = require("keyring")
                    for service in (url, host):
                        found = found or keyring.get_credential(service, None)
                except PatchError:
                    pass
                except Exception:  # noqa: BLE001 - a backend may raise anything; then it has none
                    found = None
                self._keyring[host] = (found.username, found.password) if found else None
            return self._keyring[host]


def _retries() -> Any:
    retry: Any = require("urllib3").Retry

    class Patient(retry):  # type: ignore[misc]
        """A server's ``Retry-After`` is honoured, within reason."""

        def get_retry_after(self, response: Any) -> float | None:
            seconds: float | None = super().get_retry_after(response)
            return None if seconds is None else min(seconds, LONGEST_WAIT)

    return Patient(
        total=6,
        connect=2,
        read=3,
        redirect=5,
        status=4,
        backoff_factor=0.2,
        status_forcelist=(429, 500, 502, 503, 504),
        raise_on_status=False,
    )
