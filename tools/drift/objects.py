"""Git's objects by id, read through two long-lived processes; no checkout, and no process for each file.

A tree is read once however many commits have it. So a path at a commit costs what changed above it, and that a path
is not there is told apart from an object that is not there.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from balance_patcher.errors import PatchError, refuse
from balance_patcher.extras import require
from balance_patcher.gitrepo import git_errors, told
from balance_patcher.limits import SIZE_LIMIT

_KEPT = 64  # texts that are kept; trees are small
_TREE, _FILES = "40000", ("100644", "100755")
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_OPTIONAL_LOCKS": "0"}


@dataclass(frozen=True)
class Entry:
    """One name in a tree."""

    mode: str
    id: str


class Objects:
    """The objects of one repository, for one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repo: Any = require("git").Repo(path, expand_vars=False, search_parent_directories=False)
        self.repo.git.update_environment(**_ENVIRONMENT)
        self._trees: dict[str, dict[str, Entry]] = {}
        self._roots: dict[str, str] = {}
        self._texts: OrderedDict[str, bytes] = OrderedDict()

    def entry(self, commit: str, path: str) -> Entry | None:
        """What stands at a path in a commit.

        Raises:
            PatchError: BP514, if an object is missing.
        """
        at = self._root(commit)
        *folders, name = path.split("/")
        for folder in folders:
            found = self._tree(at, commit).get(folder)
            if found is None or found.mode != _TREE:
                return None
            at = found.id
        return self._tree(at, commit).get(name)

    def file(self, commit: str, path: str) -> str | None:
        """The id of the file at a path; ``None`` if there is no file.

        Raises:
            PatchError: BP514, if a link or a submodule stands there, or an object is missing.
        """
        found = self.entry(commit, path)
        if found is None or found.mode == _TREE:
            return None
        if found.mode not in _FILES:
            kind = "a submodule" if found.mode == "160000" else "a symbolic link"
            raise self._unreadable(f"{path} at {commit[:10]} is {kind}", path)
        return found.id

    def files(self, commit: str, under: str) -> dict[str, str]:
        """The files below a folder, each with its id; links and submodules are none.

        Raises:
            PatchError: BP514, if an object is missing.
        """
        found = self.entry(commit, under)
        return dict(self._below(found.id, under, commit)) if found is not None and found.mode == _TREE else {}

    def _below(self, tree: str, path: str, commit: str) -> Iterator[tuple[str, str]]:
        for name, entry in self._tree(tree, commit).items():
            if entry.mode == _TREE:
                yield from self._below(entry.id, f"{path}/{name}", commit)
            elif entry.mode in _FILES:
                yield f"{path}/{name}", entry.id

    def text(self, blob: str, path: str) -> bytes:
        """The bytes of a file by its id.

        Raises:
            PatchError: BP514, if it is missing; BP505, if it is too large.
        """
        if blob in self._texts:
            self._texts.move_to_end(blob)
            return self._texts[blob]
        data = self._data(blob, path)
        if len(data) > SIZE_LIMIT:
            next_step = "check that this is a repository of vLLM"
            raise refuse(
                "BP505", f"{path} has {len(data)} bytes, and more than {SIZE_LIMIT} are not read", next=next_step
            )
        self._texts[blob] = data
        if len(self._texts) > _KEPT:
            self._texts.popitem(last=False)
        return data

    def close(self) -> None:
        self.repo.close()

    def _root(self, commit: str) -> str:
        if commit not in self._roots:
            head = self._data(commit, commit).split(b"\n", 1)[0]
            self._roots[commit] = head.removeprefix(b"tree ").decode()
        return self._roots[commit]

    def _tree(self, tree: str, commit: str) -> dict[str, Entry]:
        if tree not in self._trees:
            self._trees[tree] = _parsed(self._data(tree, commit), len(tree) // 2)
        return self._trees[tree]

    def _data(self, name: str, path: str) -> bytes:
        try:
            data: bytes = self.repo.git.get_object_data(name)[3]
        except git_errors() as error:
            raise self._unreadable(
                f"the object {name} cannot be read from {self.path} ({told(error)})", path
            ) from error
        return data

    def _unreadable(self, what: str, path: str) -> PatchError:
        return refuse("BP514", what, next=f"git -C {self.path} fsck --connectivity-only", file=path)


def _parsed(data: bytes, width: int) -> dict[str, Entry]:
    """The names in a tree object; ``width`` is that of an id in bytes."""
    found, at = {}, 0
    while at < len(data):
        space, end = data.index(b" ", at), data.index(b"\0", at)
        name = data[space + 1 : end].decode("utf-8", "surrogateescape")
        found[name] = Entry(data[at:space].decode(), data[end + 1 : end + 1 + width].hex())
        at = end + 1 + width
    return found


@lru_cache(maxsize=4)
def objects_of(path: Path) -> Objects:
    """The one reader of this process for a repository."""
    return Objects(path)


def blob_id(data: bytes) -> str:
    """What git would call a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
