"""Somebody's verbatim copy of one of upstream's functions, beside that function wherever it is.

What a copy costs is seen in two figures. How far it has drifted: in how many lines and places it is not what upstream
has, once formatting, comments and docstrings are left out, so that another line length is no drift. And which of its
calls no longer fit what they call, which is what ends a process.

The lines that a copy has on purpose count too: only its owner knows which those are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from balance_patcher.delta import TARGET
from balance_patcher.errors import Failure, PatchError, refuse
from balance_patcher.feature import Feature
from balance_patcher.importing import imported
from balance_patcher.source import DirSource, Lane, ModuleText, Source, module_text, open_source
from balance_patcher.targets import FunctionNode, find_target

from .columns import Column, NotingLane, same_reads
from .copied import Copy, CopyCell
from .fitting import Misfits, misfits
from .guarded import cases
from .lineage import Where
from .model import Report
from .plain import drift, plain_lines, unified

_FORMS = ("pypi", "wheel", "dir", "git")
_NEXT = "write FILE:Class.method, or FILE:Class.method=module:Class.method where the text does not say what it copies"


@dataclass(frozen=True)
class Held:
    """One function of somebody's that began as a copy.

    Attributes:
        file: As it was named.
        text: The module that holds it.
        qualname: What it is called there.
        node: Its definition.
        owner: Its class.
        named: The target that was given with it; empty where it is to be found.
        own: Where the modules of its package are read, if it has one.
    """

    file: str
    text: ModuleText
    qualname: str
    node: FunctionNode
    owner: ast.ClassDef | None
    named: str = ""
    own: Lane | None = None

    @cached_property
    def lines(self) -> list[str]:
        return plain_lines(self.node)


def held(spec: str) -> Held:
    """The copy that ``FILE:Class.method[=TARGET]`` names; FILE is a path, or a member of a source, ``SOURCE:PATH``.

    Raises:
        PatchError: BP930, if it is not written so or is not there; BP5xx, if the file cannot be read.
    """
    place, target = _split(spec)
    file, _, qualname = place.rpartition(":")
    if not file or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", qualname):
        raise refuse("BP930", f"`{spec}` names no copy", next=_NEXT)
    if target and not TARGET.fullmatch(target):
        raise refuse("BP930", f"`{target}` is no target", next=_NEXT)
    text, own = _read(file, spec)
    return held_in(file, text, qualname, target, own)


def _split(spec: str) -> tuple[str, str]:
    """The copy and the target behind its ``=``; the ``==`` of a version is none."""
    found = re.search(r"(?<!=)=(?=[A-Za-z_][\w.]*:[\w.]+$)", spec)
    return (spec[: found.start()], spec[found.end() :]) if found else (spec, "")


def _read(file: str, spec: str) -> tuple[ModuleText, Lane]:
    """The module, and the package around it."""
    form, _, rest = file.partition(":")
    opened: Source
    if form in _FORMS and ":" in rest:
        name, _, path = file.rpartition(":")
        opened, inner = open_source(name), path
    else:
        place = Path(file).expanduser().absolute()
        root = next((folder for folder in place.parents if not (folder / "__init__.py").is_file()), place.parent)
        opened, inner, path = DirSource(f"dir:{root}", root), place.relative_to(root).as_posix(), str(place)
    data = opened.read(inner)
    if data is None:
        raise refuse("BP930", f"{file} is not there", ("copy", spec), next=_NEXT)
    module = inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return module_text(module, path, file, data), Lane("own", opened)


def held_in(file: str, text: ModuleText, qualname: str, named: str = "", own: Lane | None = None) -> Held:
    """A copy in a module's text.

    Raises:
        PatchError: BP930, if it is not there exactly once; BP508.
    """
    lane = _One(text)
    found = find_target(lane, f"{text.module}:{qualname}")
    if isinstance(found, Failure):
        raise refuse(
            "BP930", f"{qualname} is not in {file}", ("why", found.what), *found.fields[1:],
            next=_NEXT, file=file, line=found.line,
        )  # fmt: skip
    return Held(file, text, qualname, found.node, found.owner, named, own)


class _One(Lane):
    """A lane of one module, in which the package's own search can look."""

    def __init__(self, text: ModuleText) -> None:
        super().__init__("copy", DirSource(text.display, Path()))
        self._modules = {text.module: text}

    def _read(self, name: str) -> ModuleText | None:  # noqa: ARG002 - there is nothing else
        return None

    def require_vllm(self) -> None:
        """It is no vLLM, and need not be one."""


def target_of(one: Held, features: Iterable[Feature] = ()) -> str:
    """What a copy is a copy of: what was named with it, what a feature declares, or its base's method of that name.

    Raises:
        PatchError: BP931, if none of these says so.
    """
    if one.named:
        return one.named
    declared = {
        target
        for feature in features
        if feature.stand_in is not None and one.text.path.endswith(f"{feature.stand_in.module.replace('.', '/')}.py")
        for name, target in feature.stand_in.copies.items()
        if name == one.qualname
    }
    if len(declared) == 1:
        return min(declared)
    names = _imports(one.text)
    for base in one.owner.bases if one.owner is not None else ():
        origin = names.get(ast.unparse(base), "")
        if origin.startswith("vllm.") and ":" in origin:
            return f"{origin}.{one.node.name}"
        holder, _, name = ast.unparse(base).rpartition(".")
        if names.get(holder, "").startswith("vllm.") and ":" not in names[holder]:
            return f"{names[holder]}:{name}.{one.node.name}"
    known = {target for feature in features for target in feature.targets if target.rpartition(".")[2] == one.node.name}
    if len(known) == 1:
        return min(known)
    raise refuse(
        "BP931", f"{one.qualname} in {one.file}: its class has no base of vLLM's", next=_NEXT,
        file=one.file, line=one.node.lineno,
    )  # fmt: skip


def _imports(text: ModuleText) -> Mapping[str, str]:
    package = text.module.rpartition(".")[0]
    imports = (node for node in ast.walk(text.tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return {name: origin for node in imports for name, origin in imported(node, package)}


def copies_in(host: Path, features: Iterable[Feature]) -> tuple[Held, ...]:
    """The copies that features declare in the module that they stand in for, in a checkout of that module's project.

    One that has none any more needs no report of them.

    Raises:
        PatchError: BP508, if the module cannot be parsed.
    """
    declared = [feature.stand_in for feature in features if feature.stand_in is not None and feature.stand_in.copies]
    found = []
    for stand_in in declared:
        file = host / f"{stand_in.module.replace('.', '/')}.py"
        if not file.is_file():
            continue
        text, own = _read(str(file), str(file))
        for qualname, target in stand_in.copies.items():
            if not isinstance(find_target(_One(text), f"{text.module}:{qualname}"), Failure):
                found.append(held_in(str(file), text, qualname, target, own))
    return tuple(found)


# -- one place, and all of them --------------------------------------------------------------


def copy_of(one: Held, target: str, places: Sequence[tuple[str, Lane]]) -> Copy:
    """A copy beside each place of a report.

    Args:
        one: The copy.
        target: What it is a copy of, ``module:Qual.name``.
        places: The columns by name, the oldest first, each with the vLLM that stands there.
    """
    cells = tuple(_cells(one, target, places))
    told = [cell for cell in cells if cell.status not in {"gone", "unreadable"}]
    # Of several that are as near, the newest: up to there it was kept in step.
    base = min(reversed(told), key=lambda cell: cell.added + cell.removed, default=None)
    diff = ""
    for (name, lane), cell in zip(reversed(places), reversed(cells), strict=True):
        if cell in told:
            diff = _diff(one, target, name, lane)
            break
    return Copy(one.file, one.node.lineno, one.qualname, target, cells, base.ref if base else None, diff)


def with_copies(report: Report, ones: Sequence[Held], columns: Sequence[Column], features: Iterable[Feature]) -> Report:
    """The report with each copy beside each column.

    Raises:
        PatchError: BP931.
    """
    known = tuple(features)
    places = [(column.ref.name, column.lane()) for column in columns]
    return replace(report, copies=tuple(copy_of(one, target_of(one, known), places) for one in ones))


def _cells(one: Held, target: str, places: Sequence[tuple[str, Lane]]) -> Iterator[CopyCell]:
    """A cell for each place; where all that was read for one before is the same text, it is that one again."""
    seen: list[tuple[tuple[str, ...], dict[str, str | None], CopyCell]] = []
    for name, lane in places:
        place = lane.place if isinstance(lane, NotingLane) else None
        asked = cases(one.text.tree, _version(lane)) if place is not None else ()
        known = next(
            (cell for case, reads, cell in reversed(seen)
             if place is not None and case == asked and same_reads(place, reads)), None,
        )  # fmt: skip
        cell = replace(known, ref=name) if known is not None else cell_of(one, target, name, lane)
        if known is None and isinstance(lane, NotingLane) and cell.status != "unreadable":
            seen.append((asked, dict(lane.reads), cell))
        yield cell


def _version(lane: Lane) -> str | None:
    try:
        return lane.version
    except PatchError:
        return None


def cell_of(one: Held, target: str, ref: str, lane: Lane) -> CopyCell:
    """A copy beside upstream's function at one place."""
    try:
        found = find_target(lane, target)
        if isinstance(found, Failure):
            return CopyCell(ref, "gone", why=found.headline)
        added, removed, hunks = drift(plain_lines(found.node), one.lines)
        bad = misfits(Where(one.text, one.node, one.owner, found, lane, one.own), _version(lane))
    except PatchError as error:
        return CopyCell(ref, "unreadable", why=error.failures[0].headline)
    status = "misfit" if bad.calls else "drifted" if hunks else "equal"
    return CopyCell(ref, status, added, removed, hunks, bad.calls, _unjudged(bad))


def _unjudged(bad: Misfits) -> str:
    """Which calls are made on some versions only, and would not fit; empty where there are none."""
    if not bad.guarded:
        return ""
    lines = sorted({call.line for call in bad.guarded})
    where = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
    return f"not judged: {where}, where the copy asks for vLLM's version, which is not known here"


def _diff(one: Held, target: str, name: str, lane: Lane) -> str:
    found = find_target(lane, target)
    if isinstance(found, Failure):
        return ""
    before = f"{found.text.path}  {name}, formatted alike"
    return "".join(f"{line}\n" for line in unified(plain_lines(found.node), one.lines, before, one.file))
