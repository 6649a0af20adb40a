"""A headless Chromium, driven over its debugging pipe: no driver, no library, nothing that listens on a port.

The pipe is a pair of file descriptors, 3 and 4, on which messages end in a zero byte. What is asked is answered by its
number; what happens besides (a request, a line on the console) is kept in :attr:`Browser.events`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import struct
import subprocess
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.chromium import browser

PATIENCE = 60  # seconds for one answer; a loaded machine is slow to start a browser


def chromium() -> str | None:
    """The browser on PATH, or the one that ``tools/chromium.py`` put into the cache folder."""
    found = browser()
    return None if found is None else str(found)


@dataclass
class Picture:
    """A screenshot's pixels, row by row; each is red, green and blue."""

    width: int
    height: int
    rows: list[bytes]

    def at(self, x: float, y: float) -> tuple[int, int, int]:
        start = 3 * int(x)
        red, green, blue = self.rows[int(y)][start : start + 3]
        return red, green, blue

    def pixels(self) -> list[tuple[int, int, int]]:
        return [self.at(x, y) for y in range(self.height) for x in range(self.width)]


class Browser:
    """One browser with one page."""

    def __init__(self, program: str, profile: Path) -> None:
        down, self._write = os.pipe()
        self._read, up = os.pipe()

        def hand_over() -> None:
            os.dup2(down, 13)
            os.dup2(up, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._log = (profile / "log").open("wb")
        self._process = subprocess.Popen(
            [
                program, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
                "--disable-component-update", "--font-render-hinting=none", f"--user-data-dir={profile}", "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, close_fds=False, preexec_fn=hand_over,  # noqa: PLW1509
        )  # fmt: skip
        os.close(down)
        os.close(up)
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
                self.send(f"{domain}.enable")
        except RuntimeError as error:
            self.close()
            raise RuntimeError(f"{error}: {(profile / 'log').read_text(errors='replace')[-500:]}") from None

    def close(self) -> None:
        """End it, by its own command first."""
        try:
            self._session = None
            self.send("Browser.close")
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired, RuntimeError):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._write)
            os.close(self._read)
            self._log.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return dict(found["result"])
            self.events.append(found)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise RuntimeError(f"the browser says nothing for {PATIENCE} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._left += part
        line, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(line))

    # -- what a test does

    def look(self, width: int, height: int, *, dark: bool = False, touch: bool = False, **media: str) -> None:
        """Be a screen of this size."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        features = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce", **media}
        self.send(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )

    def open(self, url: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.events.clear()
        self.send("Page.navigate", url=url)
        end = time.monotonic() + PATIENCE
        while (
            self.run("document.readyState + ' ' + location.href.split('#')[0]") != f"complete {url.partition('#')[0]}"
        ):
            if time.monotonic() > end:
                raise RuntimeError(f"{url} is not loaded")
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "it threw"))
        return answer["result"].get("value")

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """A key, down and up."""
        common: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")

    def png(self, *box: float) -> bytes:
        """What is seen; or only x, y, width and height of it, as they are in the window."""
        clip = {}
        if box:
            scrolled = self.run("[scrollX, scrollY]")
            x, y, width, height = box
            clip = {"clip": {"x": x + scrolled[0], "y": y + scrolled[1], "width": width, "height": height, "scale": 1}}
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", **clip)["data"])

    def picture(self, *box: float) -> Picture:
        return decoded(self.png(*box))

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Where an element is in the window, scrolled to if need be."""
        x, y, width, height = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        return x, y, width, height


def decoded(png: bytes) -> Picture:
    """The pixels of a PNG as a browser writes it: eight bits a channel, not interlaced."""
    at, data, width, height, channels = 8, b"", 0, 0, 0
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            channels = {2: 3, 6: 4}[colour]
            if depth != 8 or interlaced:
                raise ValueError("not a PNG that a browser writes")
        elif kind == b"IDAT":
            data += body
        at += length + 12
    raw, stride = zlib.decompress(data), width * channels
    rows: list[bytes] = []
    before = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        line = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, channels)
        rows.append(bytes(line) if channels == 3 else bytes(b for i, b in enumerate(line) if i % 4 != 3))
        before = line
    return Picture(width, height, rows)


def _unfiltered(kind: int, line: bytearray, before: bytearray, step: int) -> bytearray:
    for at in range(len(line)):
        left = line[at - step] if at >= step else 0
        up, corner = before[at], before[at - step] if at >= step else 0
        if kind == 1:
            line[at] = (line[at] + left) & 255
        elif kind == 2:
            line[at] = (line[at] + up) & 255
        elif kind == 3:
            line[at] = (line[at] + (left + up) // 2) & 255
        elif kind == 4:
            guess = left + up - corner
            near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))
            line[at] = (line[at] + near[2]) & 255
    return line
