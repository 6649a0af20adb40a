"""A headless Chromium for the tests of the drift report's page: ``python -m tools.chromium``.

Where a browser is on PATH nothing is done. Else, on a Debian machine, its packages are fetched with apt and unpacked
into the cache folder that git ignores: no root is needed, nothing is installed, and only what the machine lacks is
fetched. Where that cannot be done it is said in one line, and the tests that need a browser are skipped by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "chromium"
NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
PACKAGE = "chromium-headless-shell"
_TIME = 600  # seconds for one command of apt's


class MissingError(Exception):
    """There is no browser, and none can be had; the text says why."""


def browser() -> Path | None:
    """The one on PATH, or the one that was fetched."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return Path(found)
    fetched = FOLDER / "run"
    return fetched if fetched.is_file() else None


def fetch(folder: Path = FOLDER) -> Path:
    """Unpack Debian's browser into a folder, and return the program that starts it.

    Raises:
        MissingError: If this is no Debian machine, or its packages cannot be reached.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise MissingError("apt-get and dpkg-deb are not here")
    state = folder / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    settings = [
        f"Dir::State::Lists={state}/lists", f"Dir::Cache={state}", f"Dir::Cache::Archives={state}/archives",
        "Debug::NoLocking=1", "APT::Sandbox::User=", "Acquire::Retries=3",
    ]  # fmt: skip
    apt = ["apt-get", "-qq", *(word for setting in settings for word in ("-o", setting))]
    _run([*apt, "update"])
    _run([*apt, "install", "--yes", "--no-install-recommends", "--download-only", PACKAGE])
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    for package in sorted((state / "archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(root)])
    program = next(iter(sorted(root.glob(f"usr/lib/chromium*/{PACKAGE}"))), root / "usr/bin" / PACKAGE)
    if not program.is_file():
        raise MissingError(f"{PACKAGE} is not in what was fetched")
    shutil.rmtree(state)
    return _starter(folder, root, program)


def _starter(folder: Path, root: Path, program: Path) -> Path:
    """A script that starts the program with its own libraries; written last, so that it is there only when all is."""
    # Some packages keep theirs in a folder of their own, which their other libraries know by its installed place.
    libraries = ":".join(sorted({str(path.parent) for path in root.glob("usr/lib/*-linux-gnu*/**/*.so*")}))
    starter = folder / "run"
    starter.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "{program}" "$@"\n',
        encoding="utf-8",
    )
    starter.chmod(0o755)
    try:
        _run([str(starter), "--version"])
    except MissingError:
        starter.unlink()
        raise
    return starter


def _run(command: list[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"{command[0]}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise MissingError(f"{command[0]}: {last}")


def main() -> None:
    """Say where the browser is; exits 0 either way, because without one the tests that need it are skipped."""
    found = browser()
    if found is None:
        print("fetching Chromium for the tests of the drift report's page", file=sys.stderr)
        try:
            found = fetch()
        except MissingError as error:
            print(f"no Chromium, so the page is not looked at in a browser: {error}", file=sys.stderr)
            return
    print(found)


if __name__ == "__main__":
    main()
