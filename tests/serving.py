"""A package index on the loopback for tests: it can be busy, rude, or gone."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
import threading
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from balance_patcher import indexconfig

#: Incompressible, so that a wheel has the size that a test wants.
FILLER = os.urandom(1 << 20)


def isolate(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Hide what this machine has configured for pip, uv, requests and git."""
    for name in list(os.environ):
        if re.match(r"(?i)(UV|PIP|SSL|REQUESTS|CURL|XDG|GIT)_|NETRC|VIRTUAL_ENV|\w+_proxy$", name):
            monkeypatch.delenv(name)
    monkeypatch.delenv("BALANCE_PATCHER_CACHE", raising=False)
    for folder in ("home", "etc", "prefix"):
        (home / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home / "home"))
    monkeypatch.setattr(indexconfig, "ETC", home / "etc")
    monkeypatch.setattr(sys, "prefix", str(home / "prefix"))


def wheel(members: Mapping[str, bytes], filler: int = 0) -> bytes:
    """The bytes of a wheel, with some MiB of noise after its members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        for number in range(filler):
            archive.writestr(f"vllm/filler{number}.so", FILLER)
    return file.getvalue()


class PackageIndex:
    """A server for one distribution.

    Attributes:
        files: File name to content.
        ranges: Whether a request for a part is answered with it.
        json: Whether the page is a PEP 691 one; otherwise it is a PEP 503 one.
        login: ``user:password`` that every request needs.
        busy: How many requests get a 503 first.
        drops: How many answers with content break off in the middle.
        hints: File name to the attributes that the page claims of it.
        extra: Bytes that are sent after each part, beyond what its header declares.
        skew: How far beside the wanted part an answer begins.
        encoding: A Content-Encoding that is claimed of each file.
        log: ``(path, Range header)`` of each request, in order.
        sent: Bytes of content that were sent.
    """

    def __init__(self, dist: str = "vllm") -> None:
        self.dist = dist
        self.files: dict[str, bytes] = {}
        self.hints: dict[str, dict[str, object]] = {}
        self.ranges, self.json = True, False
        self.login: str | None = None
        self.encoding: str | None = None
        self.extra = b""
        self.skew = 0
        self.gone = False
        self.busy = self.drops = self.sent = 0
        self.log: list[tuple[str, str | None]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> PackageIndex:  # noqa: PYI034 - Self is not in 3.10
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # a client that goes away is no news
        self._server.handle_error = lambda *_args: None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        # connections that are kept alive outlive the server
        self.gone = True
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def url(self, login: str = "") -> str:
        return f"http://{login + '@' if login else ''}127.0.0.1:{self._server.server_port}/simple/"

    def asked(self, ending: str) -> int:
        return sum(path.endswith(ending) for path, _ in self.log)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        if self.gone:
            request.close_connection = True
            return None
        with self._lock:
            self.log.append((request.path, wanted))
            busy, self.busy = self.busy > 0, max(0, self.busy - 1)
        token = base64.b64encode((self.login or "").encode()).decode()
        if busy:
            return self._send(request, 503, b"busy")
        if self.login and request.headers.get("Authorization") != f"Basic {token}":
            return self._send(request, 401, b"who are you?")
        if request.path == f"/simple/{self.dist}/":
            return self._page(request)
        data = self.files.get(request.path.removeprefix("/files/"))
        if data is None:
            return self._send(request, 404, b"")
        part = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted or "")
        if not part or not self.ranges:
            return self._send(request, 200, data)
        if part[1]:
            first, last = int(part[1]) + self.skew, min(int(part[2] or len(data)), len(data) - 1)
        else:
            first, last = max(0, len(data) - int(part[2])), len(data) - 1
        where = {"Content-Encoding": self.encoding} if self.encoding else {}
        where |= {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return self._send(request, 206, data[first : last + 1] + self.extra, where)

    def _page(self, request: BaseHTTPRequestHandler) -> None:
        if self.json:
            files = [
                {"filename": name, "url": f"/files/{name}", "hashes": {}, **self.hints.get(name, {})}
                for name in self.files
            ]
            page = {"meta": {"api-version": "1.0"}, "name": self.dist, "files": files}
            kind = "application/vnd.pypi.simple.v1+json"
            return self._send(request, 200, json.dumps(page).encode(), {"Content-Type": kind})
        links = "".join(f'<a href="../../files/{name}">{name}</a>' for name in self.files)
        html = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        return self._send(request, 200, html, {"Content-Type": "text/html"})

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        with self._lock:
            drop = self.drops > 0 and request.path.startswith("/files/")
            self.drops -= drop
        if drop:
            data = data[: len(data) // 2]
            request.close_connection = True
        self.sent += len(data)
        request.wfile.write(data)
