"""Where the text of vLLM comes from: one small interface, five forms.

A *source* is written ``installed``, ``pypi:DIST==VERSION``, ``wheel:PATH``, ``dir:PATH`` or
``git:REPO@REF``. A source hands out files by their path inside the distribution
(``vllm/v1/engine/core.py``) and says what it is. Nothing here imports or runs what it reads.
"""

from __future__ import annotations

import ast
import bisect
import difflib
import importlib.util
import io
import itertools
import os
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from .bound import DEFINITIONS, begins_at, definitions, stored, walk, words_at
from .errors import PatchError, refuse
from .limits import SIZE_LIMIT
from .outline import Outline, outline_of

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_LANE = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)=(?!=)(?P<spec>.+)")
_PYPI = re.compile(r"(?P<dist>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)")
REMOTE_FORMS = "pypi:DIST==VERSION, wheel:PATH, dir:PATH or git:REPO@REF"
FORMS = f"installed, {REMOTE_FORMS}"
_TOP = ("__init__", "version", "_version")  # of vLLM's package, one of them is in every source
_LACKS = {"pypi": "==VERSION is missing", "git": "@REF is missing"}


class Source(Protocol):
    """One place that holds a vLLM.

    ``spec`` is the text that the user wrote.
    """

    spec: str

    def read(self, path: str) -> bytes | None:
        """The bytes of one file, or ``None`` if this source has no such file.

        Args:
            path: A path inside the distribution, with slashes, never absolute, no ``..``.

        Raises:
            PatchError: BP5xx, if the source cannot be read at all.
        """

    def display(self, path: str) -> str:
        """How to name that file to a person (a path they can open, or ``path`` itself)."""

    def commit(self) -> str | None:
        """The full or abbreviated hex commit that this source can prove by itself, if any."""


@dataclass
class DirSource:
    """A tree on disk: a checkout, an unpacked wheel, a ``site-packages``."""

    spec: str
    root: Path

    def read(self, path: str) -> bytes | None:
        file = self.root / path
        try:
            if not file.is_file():
                if os.path.lexists(file):
                    raise refuse("BP514", f"{file} is no file", next="check what stands there")
                return None
            size = file.stat().st_size
            if size > SIZE_LIMIT:
                raise refuse(
                    "BP505", f"{file} has {size} bytes", ("limit", f"{SIZE_LIMIT} bytes"),
                    next="check that this is the file you mean",
                )  # fmt: skip
            return file.read_bytes()
        except OSError as error:
            raise refuse("BP514", f"{file}: {error.strerror}", next="check the path and its rights") from error

    def display(self, path: str) -> str:
        return str(self.root / path)

    def commit(self) -> str | None:
        """The checked-out commit, if this is a git work tree whose ``vllm`` files are unchanged."""
        if not (self.root / ".git").exists():
            return None
        from .gitrepo import clean_head

        return clean_head(self.root, "vllm")


class InstalledSource(DirSource):
    """The vLLM that this Python would import; it is found, not imported."""

    def __init__(self) -> None:
        try:
            spec = importlib.util.find_spec("vllm")
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise refuse(
                "BP512", "this Python has no package `vllm`",
                next="run it with the Python that has vLLM, or name another lane: " + REMOTE_FORMS,
            )  # fmt: skip
        super().__init__("installed", Path(next(iter(spec.submodule_search_locations))).parent)


def open_source(spec: str) -> Source:
    """The source that a text names.

    Raises:
        PatchError: BP004 for a text of none of the five forms; BP5xx when it cannot be opened.
    """
    form, _, rest = spec.partition(":")
    if spec == "installed":
        return InstalledSource()
    if form == "pypi" and (match := _PYPI.fullmatch(rest)):
        from .wheel import PypiSource

        return PypiSource(spec, match["dist"], match["version"])
    if form == "wheel" and rest:
        from .wheel import WheelSource

        return WheelSource(spec, Path(rest).expanduser())
    if form == "dir" and rest:
        root = Path(rest).expanduser()
        if not root.is_dir():
            raise refuse("BP514", f"{root} is no folder", next="give the folder that holds `vllm/`")
        inside = any((root / f"{name}.py").is_file() for name in _TOP)
        if inside and not (root / "vllm").is_dir() and root.resolve().name == "vllm":
            outer = root.parent if root.name == "vllm" else root.resolve().parent
            raise refuse("BP503", f"{spec} is the package itself", next=f"did you mean dir:{outer}?")
        return DirSource(spec, root)
    if form == "git" and "@" in rest:
        from .gitrepo import GitSource

        repo, _, ref = rest.rpartition("@")
        return GitSource(spec, Path(repo).expanduser(), ref)
    raise refuse("BP004", f"`{spec}` is no source: {_lack(form, rest, spec)}", next=f"write {FORMS}")


def _lack(form: str, rest: str, spec: str) -> str:
    """What keeps a text from being a source."""
    if not rest and form in ("pypi", "wheel", "dir", "git"):
        return f"nothing stands after `{form}`" + ("" if ":" in spec else "; a colon and more are missing")
    if form in _LACKS:
        return _LACKS[form]
    near = difflib.get_close_matches(form, ["installed", "pypi", "wheel", "dir", "git"], 1, 0.5)
    if not near:
        return "it has none of the five forms"
    return f"did you mean `{near[0]}{':' + rest if near[0] != 'installed' and rest else ''}`?"


@dataclass(frozen=True)
class LaneSpec:
    """A lane as it is written: ``NAME=SOURCE``, or a source that is its own name."""

    name: str
    spec: str

    @classmethod
    def parse(cls, text: str) -> LaneSpec:
        match = _LANE.fullmatch(text)
        return cls(match["name"], match["spec"]) if match else cls(text, text)


@dataclass(frozen=True)
class ModuleText:
    """One module of a source, as text; line ends are kept as they are.

    Attributes:
        module: Its dotted name.
        path: Its path inside the distribution.
        display: How to name the file to a person.
        text: The decoded text, without a byte order mark.
        encoding: What it was decoded with.
        bom: Whether the file starts with a byte order mark.
        piecemeal: Whether its functions are parsed when somebody looks into them, see :mod:`.outline`.
    """

    module: str
    path: str
    display: str
    text: str
    encoding: str = "utf-8"
    bom: bool = False
    piecemeal: bool = False

    @cached_property
    def _outline(self) -> Outline | None:
        return outline_of(self.text, self.starts) if self.piecemeal else None

    @property
    def outline(self) -> ast.Module:
        """The syntax tree in which functions may have no bodies; :meth:`fill` gives them theirs.

        Raises:
            PatchError: BP508, as below.
        """
        return self._outline.tree if self._outline is not None else self.tree

    def fill(self, *nodes: ast.AST) -> None:
        """Complete functions of the outline.

        Raises:
            PatchError: BP508, as below.
        """
        outline = self._outline
        if outline is not None and not all(outline.fill(node, self.lines) for node in nodes):
            _ = self.tree

    def parts_with(self, name: str) -> Iterator[ast.AST]:
        """The functions and statements of the module, and of its classes, on whose lines a name stands; complete."""
        lines = self.lines_with(name)
        for outer in self.outline.body:
            if isinstance(outer, ast.ClassDef):
                yield from (*outer.decorator_list, *outer.bases, *outer.keywords)
            for node in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
                first, last = begins_at(node), node.end_lineno or node.lineno
                at = bisect.bisect_left(lines, first)
                if at < len(lines) and lines[at] <= last:
                    gaps = self._outline.gaps.values() if self._outline is not None else ()
                    self.fill(*[gap.node for gap in gaps if first <= gap.first <= last])
                    yield node

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, all of it. Where there is an outline, it is that, completed: a node stays the same object.

        Raises:
            PatchError: BP508, if this Python cannot parse it.
        """
        whole = self._parsed()
        if self._outline is not None and self._outline.fill_from(whole):
            return self._outline.tree
        return whole

    def _parsed(self) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise refuse(
                "BP508", f"{self.display}:{line or '?'}: {getattr(error, 'msg', None) or error}",
                next="use a Python that this vLLM supports (see its `Requires-Python`), or the file is damaged",
                file=self.display, line=line,
            ) from error  # fmt: skip

    def mentions(self, word: str) -> bool:
        """Whether a word stands anywhere in the text, comments and texts included."""
        return any(True for _ in words_at(self.text, word))

    def lines_with(self, name: str) -> list[int]:
        """The numbers of the lines that hold a name, also as a part of another."""
        if name not in self._known_lines:
            self._known_lines[name] = [bisect.bisect_right(self.starts, at) for at in self._places(name)]
        return self._known_lines[name]

    @cached_property
    def _known_lines(self) -> dict[str, list[int]]:
        return {}

    def _places(self, name: str) -> Iterator[int]:
        """Where a name begins, also as a part of another."""
        at = self.text.find(name)
        while at >= 0:
            yield at
            at = self.text.find(name, at + 1)

    @cached_property
    def starts(self) -> list[int]:
        """The character offset of each line."""
        return list(itertools.accumulate(map(len, self.lines[:-1]), initial=0)) if self.lines else []

    @cached_property
    def outer(self) -> frozenset[str]:
        """The names of the classes and functions at its top, and of what those classes define."""
        tops = [node for node in self.outline.body if isinstance(node, DEFINITIONS)]
        inner = [node for top in tops if isinstance(top, ast.ClassDef) for node in definitions(top)]
        return frozenset(node.name for node in [*tops, *inner])  # type: ignore[attr-defined]

    @cached_property
    def defined(self) -> frozenset[str]:
        """The names of all classes and functions in it, at any depth."""
        return frozenset(node.name for node in walk(self.tree) if isinstance(node, DEFINITIONS))

    @cached_property
    def members(self) -> dict[int, Any]:
        """By the identity of a class of its tree, what it defines and its methods: of those asked for."""
        return {}

    @cached_property
    def sets(self) -> dict[int, frozenset[str]]:
        """By the identity of a function of its tree, the attributes that it sets on ``self``: those asked for."""
        return {}

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names that the module itself binds."""
        return frozenset(stored(self.outline))

    @cached_property
    def lines(self) -> list[str]:
        """The physical lines with their ends: LF, CR LF or CR ends a line, nothing else does."""
        lines = self.text.splitlines(keepends=True)
        # Other characters that Python's own texts end a line at would make it more of them.
        if len(lines) == self.text.count("\n") + (self.text != "" and not self.text.endswith("\n")):
            return lines
        return _LINE.findall(self.text)

    def encoded(self, text: str) -> bytes:
        """Another text in this file's encoding and with its byte order mark."""
        return (b"\xef\xbb\xbf" if self.bom else b"") + text.encode(self.encoding)


def module_text(module: str, path: str, display: str, data: bytes) -> ModuleText:
    """Decode a module by its coding cookie.

    Raises:
        PatchError: BP508, if the cookie is unknown or the bytes do not fit it.
    """
    try:
        # `readline` ends a line at `\n` only; the cookie stands in one of the first two lines, however they end.
        first = re.sub(rb"\r\n?", b"\n", data[:8192])
        encoding, _ = tokenize.detect_encoding(io.BytesIO(first).readline)
        bom = encoding == "utf-8-sig"
        encoding = "utf-8" if bom else encoding
        text = data[3 * bom :].decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        why = getattr(error, "msg", None) or error
        follow = "check the file's encoding, or the file is damaged"
        raise refuse("BP508", f"{display}: {why}", next=follow, file=display) from error
    return ModuleText(module, path, display, text, encoding, bom)


class Lane:
    """One vLLM to look at: a name, a source, and the modules read from it so far.

    Where functions of others stand on targets, ``homes`` has for each its name and that target's.

    Args:
        name: What it is called.
        source: Where its text comes from.
        piecemeal: Whether to parse of its modules what is looked into only: much faster, and for an installation, where
            what was read is compared with what runs.
    """

    homes: Mapping[str, str] = {}

    @cached_property
    def found(self) -> dict[str, Any]:
        """What was looked for in it, by ``module:Qual.name``, see :func:`balance_patcher.targets.find_target`."""
        return {}

    def __init__(self, name: str, source: Source, *, piecemeal: bool = False) -> None:
        self.name = name
        self.source = source
        self.piecemeal = piecemeal
        self._modules: dict[str, ModuleText | None] = {}

    def module(self, name: str) -> ModuleText | None:
        """A module's text, or ``None`` if the source has no such module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> ModuleText | None:
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            data = self.source.read(path)
            if data is not None:
                return replace(module_text(name, path, self.source.display(path), data), piecemeal=self.piecemeal)
        return None

    def require_vllm(self) -> None:
        """Refuse a source that holds no vLLM at all (BP503), as opposed to one that lacks a module."""
        if all(self.source.read(f"vllm/{name}.py") is None for name in _TOP):
            raise refuse(
                "BP503", f"{self.source.spec} has no package `vllm`", next="name a source that holds `vllm/` at its top"
            )

    @cached_property
    def _stamp(self) -> dict[str, str]:
        text = self.module("vllm._version")
        found: dict[str, str] = {}
        if text is not None:
            for node in text.tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                    found |= {name: node.value.value for name in names if isinstance(node.value.value, str)}
        return found

    @property
    def version(self) -> str | None:
        """vLLM's version as its ``_version.py`` or the package index has it."""
        return self._stamp.get("version") or getattr(self.source, "version", None)

    @property
    def commit(self) -> str | None:
        """The commit, full or abbreviated, that the git object or ``_version.py`` proves."""
        try:
            proven = self.source.commit()
        except PatchError:
            proven = None
        stamped = self._stamp.get("commit_id") or self._stamp.get("__commit_id__")
        return proven or (stamped.removeprefix("g") if stamped else None)


def installed_lane() -> Lane:
    """The vLLM of this Python, as an installation reads it.

    Raises:
        PatchError: BP512, if there is none.
    """
    return Lane("installed", InstalledSource(), piecemeal=True)


class Overlaid(Lane):
    """A lane in which some modules have another text; and what of others stands where in it."""

    def __init__(self, lane: Lane, texts: Mapping[str, ModuleText], homes: Mapping[str, str]) -> None:
        super().__init__(lane.name, lane.source, piecemeal=lane.piecemeal)
        self._lane, self._texts, self.homes = lane, texts, homes

    def _read(self, name: str) -> ModuleText | None:
        return self._texts.get(name) or self._lane.module(name)
