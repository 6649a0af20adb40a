"""Prove that a lane *is* the vLLM that somebody pinned.

vllm-ascend pins one released tag and one commit of main in two small files. A lane that is not
the pinned one, or that cannot be shown to be, must never come out green.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from .errors import Failure, PatchError, refuse
from .source import DirSource, Lane

#: Sources that hold a release as the package index has it.
_INDEX = ("pypi:", "installed")

#: The files of vllm-ascend, by the lane that each pins.
PIN_FILES = {"release": "vllm-release-tag.commit", "main": "vllm-main-verified.commit"}

_SHA = re.compile(r"[0-9a-f]{7,40}")
_TOO_SHORT = re.compile(r"[0-9a-f]{1,6}")
_SHORTEST = 7  # digits, as git abbreviates
_DIRTY = re.compile(r"\+.*\bd20\d{6}\b|\bdirty\b")  # as setuptools-scm marks a build from changed files
_CHANGED = "files of vllm/ differ from the commit that is checked out"


@dataclass(frozen=True)
class Pin:
    """What a lane must be, and whether it is.

    ``status`` is ``proven``, ``different`` or ``unproven``; ``detail`` says by what, ``next`` what would prove it.
    """

    wanted: str
    status: str
    detail: str
    next: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"wanted": self.wanted, "status": self.status, "detail": self.detail}


def read_pins(folder: Path) -> dict[str, str]:
    """The pinned ref of each lane name, white space stripped.

    Raises:
        PatchError: BP514 for a file that is missing, empty or holds more than one word.
    """
    below = folder / ".github"  # where vllm-ascend keeps them
    there = all((below / name).is_file() for name in PIN_FILES.values())
    follow = f"did you mean {below}?" if there else "give the folder of vllm-ascend that holds both pin files: .github"
    if folder.is_file():
        raise refuse("BP514", f"{folder} is a file", next=f"give the folder, not the file: {folder.parent}")
    if not folder.is_dir():
        raise refuse("BP514", f"{folder} is no folder", next=follow)
    pins = {}
    for lane, name in PIN_FILES.items():
        file = folder / name
        try:
            text = file.read_text("utf-8").strip()
        except OSError as error:
            why = "it is missing" if isinstance(error, FileNotFoundError) else error.strerror
            raise refuse("BP514", f"{file}: {why}", next=follow) from error
        except UnicodeDecodeError as error:
            raise refuse("BP514", f"{file}: not a text in UTF-8", next=follow) from error
        if len(text.split()) != 1:
            raise refuse(
                "BP514", f"{file} holds {text!r}, not one ref", next="put one tag or commit into it", file=str(file)
            )
        pins[lane] = text
    return pins


def missing_lane(name: str, wanted: str) -> Failure:
    """The failure for a pin that no lane answers to (BP511)."""
    return Failure(
        "BP511", f"{wanted} is pinned for lane {name!r}, and no such lane was given",
        next=f"add {name}=SOURCE to the command or to [tool.balance_patcher.lanes]",
    )  # fmt: skip


def prove_pin(lane: Lane, wanted: str) -> Pin:
    """Whether a lane is a tag or commit: by the git object, the commit in ``_version.py``, or the version."""
    if _SHA.fullmatch(wanted):
        return _by_commit(lane, wanted)
    by_git = _by_git(lane, wanted)
    if _TOO_SHORT.fullmatch(wanted) and (by_git is None or by_git.status == "unproven"):
        return Pin(wanted, "unproven", f"a commit needs at least {_SHORTEST} digits", "give more digits, or a tag")
    return by_git or _by_version(lane, wanted)


def pin_failure(lane: Lane, pin: Pin) -> Failure | None:
    """The failure that a pin stands for, if it is not proven (BP509, BP510)."""
    if pin.status == "proven":
        return None
    different = pin.status == "different"
    follow = f"point the lane at {pin.wanted}" if different else "use a lane that proves it: git:REPO@REF, tag fetched"
    spec = lane.source.spec
    return Failure(
        "BP510" if different else "BP509", pin.detail if spec == lane.name else f"{spec}: {pin.detail}",
        fields=(("pinned", pin.wanted), ("version", lane.version or "unknown"), ("commit", lane.commit or "unknown")),
        next=pin.next or follow,
    )  # fmt: skip


def _by_commit(lane: Lane, wanted: str) -> Pin:
    repository = _repository(lane)
    # What `_version.py` says of a work tree was true when it was built, not of the files that are there now.
    commit = lane.source.commit() if repository is not None else lane.commit
    if commit is None:
        why = _CHANGED if repository is not None else "this source does not say which commit it is"
        return Pin(wanted, "unproven", why)
    if repository is None and _DIRTY.search(lane.version or ""):
        return Pin(wanted, "unproven", f"{lane.version} was built from changed files")
    length = min(len(commit), len(wanted))
    if length >= _SHORTEST and commit[:length] == wanted[:length]:
        return Pin(wanted, "proven", f"commit {commit}")
    return Pin(wanted, "different", f"it is commit {commit}")


def _repository(lane: Lane) -> Path | None:
    repo: Path | None = getattr(lane.source, "repo_path", None)
    if repo is None and isinstance(lane.source, DirSource) and (lane.source.root / ".git").exists():
        repo = lane.source.root
    return repo


def _by_git(lane: Lane, wanted: str) -> Pin | None:
    """Compare git objects where the lane comes from a repository; ``None`` where it does not."""
    repo = _repository(lane)
    if repo is None:
        return None
    from .gitrepo import peeled

    commit = lane.source.commit()
    if commit is None:
        return Pin(wanted, "unproven", _CHANGED)
    try:
        tagged = peeled(repo, wanted)
    except PatchError:
        tagged = None
    if tagged is None:
        fetch = f"git -C {shlex.quote(str(repo))} fetch --depth 1 origin tag {shlex.quote(wanted)}"
        return Pin(wanted, "unproven", f"{wanted} is not in {repo}", fetch)
    if tagged == commit:
        return Pin(wanted, "proven", f"git object {commit}")
    return Pin(wanted, "different", f"{wanted} is {tagged[:12]}, the lane is {commit[:12]}")


def _by_version(lane: Lane, wanted: str) -> Pin:
    from .extras import require

    version = require("packaging.version")
    try:
        pinned = version.Version(wanted.removeprefix("v"))
    except version.InvalidVersion:
        return Pin(wanted, "unproven", f"{wanted} is neither a release nor a commit, and the source is no repository")
    if lane.version is None:
        return Pin(wanted, "unproven", "this source does not say which version it is")
    try:
        found = version.Version(lane.version)
    except version.InvalidVersion:
        return Pin(wanted, "unproven", f"{lane.version} is no version")
    if found == pinned:
        if not lane.source.spec.startswith(_INDEX):
            return Pin(wanted, "unproven", f"it calls itself {lane.version}, and so would a changed copy")
        return Pin(wanted, "proven", f"release {lane.version}")
    if found.public == pinned.public:
        return Pin(wanted, "unproven", f"{lane.version} is a build of {pinned}, not the release itself")
    return Pin(wanted, "different", f"it is version {lane.version}")
