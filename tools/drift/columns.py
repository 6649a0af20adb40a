"""The places that are compared: commits of a repository, or released versions, each of them a lane like any other.

A text is parsed once in a process, by its id, whatever commits have it. What a lane reads is noted: an answer that was
found on a lane is that of every other one that has the same texts at those paths.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from balance_patcher.errors import PatchError
from balance_patcher.source import Lane, ModuleText, Source, module_text, open_source

from .matrix import Ref
from .objects import blob_id, objects_of

#: Stands for the id of what could not be read; it is no id.
UNTOLD = "?"
PACKAGE = "vllm"
_KEPT = 48  # parsed modules; a large one has some ten megabytes of nodes


class Place(Protocol):
    """Where a column's texts come from; it can be sent to another process.

    ``name`` is what a refusal calls it.
    """

    @property
    def name(self) -> str: ...

    def blob(self, path: str) -> str | None:
        """The id of the file at a path; ``None`` if there is none.

        Raises:
            PatchError: BP5xx, if it cannot be told.
        """

    def read(self, blob: str, path: str) -> bytes:
        """The bytes of a file.

        Raises:
            PatchError: BP5xx.
        """

    def files(self) -> Mapping[str, str]:
        """Every file of the package, with something that is another one where its bytes are.

        Raises:
            PatchError: BP5xx.
        """


@dataclass(frozen=True)
class GitPlace:
    """One commit of a repository."""

    repo: Path
    commit: str
    name: str

    def blob(self, path: str) -> str | None:
        return objects_of(self.repo).file(self.commit, path)

    def read(self, blob: str, path: str) -> bytes:
        return objects_of(self.repo).text(blob, path)

    def files(self) -> Mapping[str, str]:
        return objects_of(self.repo).files(self.commit, PACKAGE)


@dataclass(frozen=True)
class ReleasePlace:
    """One released version, or anything else that ``verify`` takes as a lane."""

    spec: str
    name: str

    def blob(self, path: str) -> str | None:
        data = source_of(self.spec).read(path)
        return None if data is None else blob_id(data)

    def read(self, blob: str, path: str) -> bytes:  # noqa: ARG002 - the path says it
        data = source_of(self.spec).read(path)
        return b"" if data is None else data

    def files(self) -> Mapping[str, str]:
        """What a wheel's directory has; of a source that has none, nothing."""
        index: Mapping[str, str] = getattr(source_of(self.spec), "index", dict)()
        return {path: told for path, told in index.items() if path.startswith(f"{PACKAGE}/")}


@lru_cache(maxsize=64)
def source_of(spec: str) -> Source:
    """The one reader of this process for a source."""
    return open_source(spec)


@dataclass(frozen=True)
class Column:
    """One ref with its place."""

    ref: Ref
    place: Place

    def lane(self) -> NotingLane:
        return NotingLane(self.place, self.ref.version)


class NotingLane(Lane):
    """A lane that shares what it parses with all others, and notes what it reads.

    Attributes:
        reads: The id of each path that was asked for; ``None`` for one that is not there.
        unreadable: Why a module that is there could not be read, by its name.
    """

    def __init__(self, place: Place, version: str | None = None) -> None:
        self.place = place
        self._told = version
        self.reads: dict[str, str | None] = {}
        self.unreadable: dict[str, str] = {}
        super().__init__(place.name, _Noting(self))

    def blob(self, path: str) -> str | None:
        if path not in self.reads:
            # Where that cannot be told, no other place is like this one: nothing that is found here may be kept.
            self.reads[path] = UNTOLD
            self.reads[path] = self.place.blob(path)
        return self.reads[path]

    @property
    def version(self) -> str | None:
        """vLLM's version, as the column has it; a tag of a history says what no file there does."""
        return self._told or super().version

    def text(self, blob: str, path: str) -> bytes:
        try:
            return self.place.read(blob, path)
        except PatchError as error:
            if error.failures[0].code != "BP505":  # that one is so wherever the text is
                self.reads[path] = UNTOLD
            raise

    def _read(self, name: str) -> ModuleText | None:
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            blob = self.blob(path)
            if blob is not None:
                return parsed(self.text, blob, name, path)
        return None


class _Noting:
    """The source of a noting lane."""

    def __init__(self, lane: NotingLane) -> None:
        self._lane = lane
        self.spec = lane.place.name

    def read(self, path: str) -> bytes | None:
        blob = self._lane.blob(path)
        return None if blob is None else self._lane.text(blob, path)

    def display(self, path: str) -> str:
        return path

    def commit(self) -> str | None:
        return getattr(self._lane.place, "commit", None)


_texts: OrderedDict[tuple[str, str], ModuleText] = OrderedDict()


def parsed(read: Callable[[str, str], bytes], blob: str, module: str, path: str) -> ModuleText:
    """A module by the id of its text; the same object for the same id and path, as long as it is kept.

    Raises:
        PatchError: BP508, if its encoding is damaged; its tree is parsed when it is asked for.
    """
    key = blob, path
    if key in _texts:
        _texts.move_to_end(key)
        return _texts[key]
    text = _texts[key] = module_text(module, path, path, read(blob, path))
    if len(_texts) > _KEPT:
        _texts.popitem(last=False)
    return text


def same_reads(place: Place, reads: Mapping[str, str | None]) -> bool:
    """Whether a place has the same texts at some paths; what was untold once is the same nowhere."""
    return all(place.blob(path) == blob for path, blob in reads.items())
