"""The commits between two refs of a repository, as a line, and which of them touch given files.

Upstream squashes what it merges, so its first parents are its history; ``every`` takes the commits of merged branches
too. A history that ends in between, as in a shallow clone, is refused: what is missing there could be the first bad
commit.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from balance_patcher.errors import PatchError, refuse
from balance_patcher.gitrepo import git_errors, opened_repo, resolve, told

from .columns import Column, GitPlace
from .matrix import Commit, Ref

_PULL = re.compile(r"\(#(\d+)\)\s*$")
_RELEASE = re.compile(r"v(\d+(?:\.\d+)+(?:(?:a|b|rc|\.post)\d+)?)")
_FORMAT = "%H%x00%P%x00%aI%x00%an%x00%s"
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, marks of direction, halves of pairs, and what ends a line
_AT_ONCE = 200  # paths on one command line


@dataclass(frozen=True)
class Ends:
    """What is compared.

    Attributes:
        since: The commit of the first ref, with its ``since_name``.
        until: The commit of the last ref, with its ``until_name``.
        fork: Where the two have parted, if the first is no ancestor of the last.
    """

    since: str
    since_name: str
    until: str
    until_name: str
    fork: str | None = None

    @property
    def base(self) -> str:
        """The commit behind which the line begins."""
        return self.fork or self.since


@final
class History:
    """One repository's line of commits; use it in a ``with``.

    Args:
        repo: A working tree, a linked worktree or a bare repository.
        every: Commits of merged branches too.
    """

    def __init__(self, repo: Path, *, every: bool = False) -> None:
        self.path = repo
        self.every = every
        self._stack = ExitStack()
        self._git: Any = None

    def __enter__(self) -> History:
        self._git = self._stack.enter_context(opened_repo(self.path)).git
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ends(self, since: str, until: str) -> Ends:
        """Both refs, resolved.

        Raises:
            PatchError: BP506, if one is not there; BP920, if no history joins them; BP921, if the first comes later.
        """
        first, last = resolve(self.path, since), resolve(self.path, until)
        if first == last:
            return Ends(first, _called(since), last, _called(until))
        fork = self._run("merge-base", first, last, fails=True)
        fork = fork.split("\n", 1)[0]
        if fork == last:
            raise refuse(
                "BP921", f"{until} is an ancestor of {since}", ("repository", str(self.path)),
                next=f"write --since {until} --until {since}",
            )  # fmt: skip
        if not fork:
            raise self._no_way(since, until)
        ends = Ends(first, _called(since), last, _called(until), None if fork == first else fork)
        self._need_whole(ends)
        return ends

    def count(self, ends: Ends) -> int:
        """How many commits there are behind the base."""
        return int(self._run("rev-list", "--count", *self._line, f"{ends.base}..{ends.until}") or 0)

    def touching(self, ends: Ends, paths: Sequence[str]) -> list[Commit]:
        """The commits that touch one of some files, the oldest first."""
        found: dict[str, Commit] = {}
        for at in range(0, len(paths), _AT_ONCE):
            some = [f":(literal){path}" for path in paths[at : at + _AT_ONCE]]
            for commit in self._log(f"{ends.base}..{ends.until}", "--", *some):
                found[commit.hash] = commit
        if len(paths) <= _AT_ONCE:
            return list(found.values())
        order = self._run("rev-list", "--reverse", "--topo-order", *self._line, f"{ends.base}..{ends.until}").split()
        return [found[name] for name in order if name in found]

    def commit(self, name: str) -> Commit:
        """One commit by its hash."""
        return self._log("--max-count=1", name)[0]

    def tags(self) -> dict[str, str]:
        """The name of a tag by the commit that it leads to; of several tags the first one that looks like a release."""
        rows = self._run("for-each-ref", "--format=%(objectname) %(*objectname) %(refname:strip=2)", "refs/tags")
        found: dict[str, str] = {}
        for row in filter(None, rows.split("\n")):
            direct, peeled, name = row.split(" ", 2)
            if not found.get(peeled or direct, "").startswith("v"):
                found[peeled or direct] = name
        return found

    def line(self, ends: Ends) -> list[str]:
        """The hashes of all commits behind the base, the oldest first."""
        return self._run("rev-list", "--reverse", "--topo-order", *self._line, f"{ends.base}..{ends.until}").split()

    def parents(self, ends: Ends) -> dict[str, tuple[str, ...]]:
        """The parents of every commit behind the base; of first parents only that one."""
        text = self._run("rev-list", "--parents", *self._line, f"{ends.base}..{ends.until}")
        rows = (row.split() for row in text.split("\n") if row)
        return {row[0]: tuple(row[1:] if self.every else row[1:2]) for row in rows}

    def column(self, commit: Commit, name: str, kind: str, *, tag: str = "", judged: bool = False) -> Column:
        """A column; of a commit with the ``tag`` of a release the version is known."""
        ref = Ref(name, kind, judged, commit, _version(tag))
        return Column(ref, GitPlace(self.path, commit.hash, f"git:{self.path}@{name}"))

    @property
    def _line(self) -> tuple[str, ...]:
        return ("--full-history",) if self.every else ("--first-parent",)

    def _log(self, *words: str) -> list[Commit]:
        own = self._line if "--" in words else ()
        text = self._run("log", "--reverse", "--topo-order", "--no-show-signature", f"--format={_FORMAT}", *own, *words)
        return [_commit(row) for row in text.split("\n") if row]

    def _need_whole(self, ends: Ends) -> None:
        if self._run("rev-parse", "--is-shallow-repository") != "true":
            return
        # A commit at the edge of a shallow clone has parents that are not there.
        edges = set((Path(self._run("rev-parse", "--git-common-dir", absolute=True)) / "shallow").read_text().split())
        if edges.intersection(self.line(ends)):
            raise self._no_way(ends.since_name, ends.until_name)

    def _no_way(self, since: str, until: str) -> PatchError:
        shallow = self._run("rev-parse", "--is-shallow-repository") == "true"
        why = (
            "this is a shallow clone, and its history ends in between" if shallow else "they have no ancestor in common"
        )
        follow = f"git -C {self.path} fetch --unshallow" if shallow else "name two refs of one history"
        return refuse(
            "BP920", f"no history leads from {since} to {until}: {why}", ("repository", str(self.path)), next=follow
        )

    def _run(self, command: str, *words: str, fails: bool = False, absolute: bool = False) -> str:
        """What git answers; with ``fails``, nothing where it fails."""
        try:
            found = str(getattr(self._git, command.replace("-", "_"))(*words, strip_newline_in_stdout=True))
        except git_errors() as error:
            if fails:
                return ""
            raise refuse(
                "BP514", f"git {command} fails in {self.path}: {told(error)}",
                next=f"git -C {self.path} fsck --connectivity-only",
            ) from error  # fmt: skip
        return str((self.path / found).absolute()) if absolute else found


def _commit(row: str) -> Commit:
    name, parents, date, author, subject = row.split("\0", 4)
    author, subject = _harmless(author), _harmless(subject)
    pull = _PULL.search(subject)
    return Commit(name, subject, author, date, tuple(parents.split()), int(pull[1]) if pull else None)


def _harmless(text: str) -> str:
    """What anybody may write into a commit, without what moves a terminal's cursor or turns the direction of a line."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(one) in _UNSEEN else one for one in text)


def _version(tag: str) -> str | None:
    """The release that a tag names, ``v0.32.0`` or ``v0.33.0rc1``."""
    found = _RELEASE.fullmatch(tag)
    return found[1] if found else None


def _called(ref: str) -> str:
    """A ref as a person calls it: of a whole hash, such as a pin, ten digits."""
    return ref[:10] if re.fullmatch(r"[0-9a-f]{40}", ref) else ref
