"""A git repository as a source: files of one commit, read without a checkout.

Only objects are read, so that bare, shallow and partial clones and linked worktrees do as well as
a full one, and nobody's working tree is touched. A ref that is not there is told apart from a
repository that is not there, and both from a file that is not there.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import PatchError, refuse
from .extras import require
from .indexconfig import redact
from .limits import SIZE_LIMIT

_FULL_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", re.IGNORECASE)
_SHORT_HASH = re.compile(r"[0-9a-f]{4,39}", re.IGNORECASE)
_TAG = re.compile(r"v?\d+(?:\.\d+)+[0-9A-Za-z.+-]*")
_SYMLINK, _MODE = 0o120000, 0o170000


class GitSource:
    """``git:REPO@REF``: the tree of one commit.

    Args:
        spec: What the user wrote.
        repo_path: The repository: a working tree, a linked worktree or a bare one.
        ref: A tag, a branch, a hash, or anything else that ``git rev-parse`` takes. It is
            resolved once, at the first read.
    """

    def __init__(self, spec: str, repo_path: Path, ref: str) -> None:
        self.spec = spec
        self.repo_path, self.ref = repo_path, ref
        self._lock = threading.RLock()
        self._commit: str | None = None
        self._read: dict[str, bytes | None] = {}

    def read(self, path: str) -> bytes | None:
        """The blob at exactly that path, or ``None``.

        Raises:
            PatchError: BP507, BP506; BP514, if a symbolic link or a submodule stands there or the
                object is missing in a partial clone; BP505, if it is larger than ``SIZE_LIMIT``.
        """
        with self._lock:
            if path not in self._read:
                commit = self.commit()
                with opened_repo(self.repo_path) as repo:
                    self._read[path] = self._blob(repo, commit, path)
            return self._read[path]

    def display(self, path: str) -> str:
        """The path itself: what stands in the working tree may be another commit."""
        return path

    def commit(self) -> str:
        """The full hash of the commit that the ref leads to.

        Raises:
            PatchError: BP507, BP506.
        """
        with self._lock:
            if self._commit is None:
                self._commit = resolve(self.repo_path, self.ref)
            return self._commit

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _blob(self, repo: Any, commit: str, path: str) -> bytes | None:
        try:
            item = repo.commit(commit).tree
            for name in path.split("/"):
                if item.type != "tree":
                    return None
                # a submodule has a path but, until it is initialised, no name
                item = next((one for one in item if str(one.path).split("/")[-1] == name), None)
                if item is None:
                    return None
                if item.type == "submodule" or item.mode & _MODE == _SYMLINK:
                    kind = "a submodule" if item.type == "submodule" else "a symbolic link"
                    raise self._unreadable(path, f"{item.path} is {kind}", "name a file of vLLM")
            if item.type != "blob":
                return None
            size = item.size
            if size > SIZE_LIMIT:
                raise refuse(
                    "BP505",
                    f"{path} has {size} bytes, and more than {SIZE_LIMIT} are not read.",
                    ("source", redact(self.spec)),
                    next="check that this is a repository of vLLM",
                    file=path,
                )
            data: bytes = item.data_stream.read()
        except git_errors() as error:
            cause = f"its object cannot be read from {self.repo_path} ({told(error)})"
            follow = f"git -C {self.repo_path} fsck --connectivity-only {commit}"
            raise self._unreadable(path, cause, follow) from error
        return data

    def _unreadable(self, path: str, why: str, follow: str) -> PatchError:
        what = f"{path} at {self.ref}: {why}."
        return refuse("BP514", what, ("source", redact(self.spec)), next=follow, file=path)


def resolve(repo: Path, ref: str) -> str:
    """The full hash of the commit that a ref leads to, through annotated tags.

    Raises:
        PatchError: BP507, if it is no repository; BP506, if the ref is not there, is ambiguous or
            starts with a dash.
    """
    with opened_repo(repo) as opened:
        found = _peel(opened, ref)
        if found is None:
            raise _no_ref(opened, repo, ref)
        return found


def peeled(repo: Path, ref: str) -> str | None:
    """As :func:`resolve`, but ``None`` for a ref that is not there: for the proof of a pin.

    Raises:
        PatchError: BP507.
    """
    with opened_repo(repo) as opened:
        return _peel(opened, ref)


def clean_head(root: Path, folder: str) -> str | None:
    """The checked-out commit if the files under a folder are those of it, else ``None``.

    An untracked or ignored ``.py`` file counts as a change too: Python would import it. ``None``
    as well if git cannot tell, or the ``cli`` extra is not installed: then nothing is proven.
    """
    try:
        with opened_repo(root) as repo:
            # a link in the index or a flag "assume unchanged" would hide a change
            hidden = str(repo.git.ls_files("-v", "--", folder)).splitlines()
            if any(not line.startswith("H ") for line in hidden):
                return None
            # a file monitor is a program that the repository's configuration names
            said = repo.git(c="core.fsmonitor=false").status(
                "--porcelain", "--no-renames", "--untracked-files=all", "--ignored", "--", folder
            )
            changes = [line[3:] for line in str(said).splitlines() if not _generated(line)]
            return None if changes or not hidden else _peel(repo, "HEAD")
    except PatchError:
        return None
    except git_errors():
        return None


def _generated(line: str) -> bool:
    """Whether a line of ``git status`` speaks of a file that nobody wrote: ignored, and no text."""
    return line.startswith("!! ") and not line.strip('"').endswith(".py")


@contextmanager
def opened_repo(path: Path) -> Iterator[Any]:
    """The repository at exactly that path, not at one of its parents."""
    if shutil.which("git") is None:
        raise refuse("BP513", "there is no git command on the PATH.", next="install git")
    git = require("git")
    try:
        repo = git.Repo(path, expand_vars=False, search_parent_directories=False)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError) as error:
        there = "is not a git repository" if Path(path).exists() else "is not there"
        raise _no_repository(path, f"{path} {there}.") from error
    environment = {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    if "GIT_DIR" in os.environ:
        # a git hook sets it, and it would win over the folder that we name
        environment["GIT_DIR"] = str(Path(repo.git_dir).absolute())
    try:
        repo.git.update_environment(**environment)
        try:
            repo.git.rev_parse("--git-dir")
        except git.GitCommandError as error:
            raise _no_repository(path, f"git refuses {path}: {told(error)}.") from error
        yield repo
    finally:
        repo.close()


def _peel(repo: Any, ref: str) -> str | None:
    if not ref or ref.startswith("-") or "\0" in ref:
        return None
    try:
        found = repo.git.rev_parse("--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except git_errors():
        return None
    found = str(found).splitlines()[-1] if found else ""
    return found if _FULL_HASH.fullmatch(found) else None


def _no_ref(opened: Any, repo: Path, ref: str) -> PatchError:
    source = ("repository", str(repo))
    if not ref or ref.startswith("-"):
        return refuse(
            "BP506",
            f"'{ref}' is not a ref.",
            source,
            next="write a tag, a branch or a hash, such as git:vllm@v0.32.0",
        )
    commits = _candidates(opened, ref)
    if len(commits) > 1:
        return refuse(
            "BP506",
            f"{ref} is the beginning of {len(commits)} commits.",
            source,
            ("candidates", "\n".join(commits)),
            next="write more digits of the one that is meant",
        )
    git = f"git -C {repo} "
    remotes = [remote.name for remote in opened.remotes]
    remote = "origin" if "origin" in remotes or not remotes else remotes[0]
    shallow = str(opened.git.rev_parse("--is-shallow-repository")) == "true"
    # in a full clone --depth would cut the history that is there
    depth = "--depth 1 " if shallow else ""
    if _TAG.fullmatch(ref):
        command = f"{git}fetch {depth}{remote} tag {ref}"
    elif _FULL_HASH.fullmatch(ref):
        command = f"{git}fetch {depth}{remote} {ref}"
    elif _SHORT_HASH.fullmatch(ref) or re.search(r"[~^:@]", ref):
        # a server hands out neither abbreviations nor expressions
        command = f"{git}fetch {'--unshallow ' if shallow else ''}{remote}"
    else:
        command = f"{git}fetch {depth}{remote} {ref}:{ref}"
    what = f"{ref} is not in {repo}" + (", which is a shallow clone." if shallow else ".")
    if remotes:
        return refuse("BP506", what, source, next=command)
    what = what[:-1] + ", and it has no remote to get it from."
    return refuse("BP506", what, source, next=f"{git}remote add origin URL\n{command}")


def _candidates(opened: Any, ref: str) -> list[str]:
    """The commits that an abbreviated hash may stand for, each with its subject."""
    if not _SHORT_HASH.fullmatch(ref):
        return []
    names = str(opened.git.rev_parse(f"--disambiguate={ref}")).split()
    commits = [name for name in names if str(opened.git.cat_file("-t", name)) == "commit"]
    return [str(opened.git.show("-s", "--format=%H %s", name)) for name in commits]


def _no_repository(path: Path, what: str) -> PatchError:
    return refuse(
        "BP507",
        what,
        next=f"check the path; git -C {path} status says what git thinks of it",
    )


def git_errors() -> tuple[type[Exception], ...]:
    git, gitdb = require("git"), require("gitdb.exc")
    return (git.GitError, gitdb.ODBError, ValueError, OSError)


def told(error: BaseException) -> str:
    """The one line of git's answer that says what is wrong."""
    text = str(getattr(error, "stderr", "") or error).replace("stderr:", "").strip(" '\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith(("fatal:", "error:"))]
    line: str = (fatal or lines or [type(error).__name__])[0]
    return redact(line.removeprefix("fatal: ").rstrip("."))
