"""A target that upstream calls otherwise now, or keeps in another module: which one, and the declarations with it.

The whole file is changed, because invariants and calls speak of the target as well. Who asked for it checks the whole
feature, and not the delta alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

from balance_patcher.bound import definitions
from balance_patcher.delta import Delta
from balance_patcher.errors import Failure
from balance_patcher.feature import Feature
from balance_patcher.source import Lane, ModuleText
from balance_patcher.targets import Function, FunctionNode, Target, find_target

from .columns import NotingLane
from .lookup import Defined, lookup
from .moving import moved_to
from .patching import CannotPatchError, Patched, loaded, made

#: A changed file, the changed feature if that is declared in the same file, and the new target.
Retargeted = tuple[Patched, Feature | None, str]

_LIKE = 0.7  # how like the old function a new one must be
_MOST = 3  # of those, how many are tried


def retargets(path: Path, delta: Delta, good: Lane, bad: Lane) -> Iterator[Retargeted]:
    """The changed file for each likely new place of a target, the likeliest first, with the place.

    Raises:
        CannotPatchError: If it is in another module, and the text does not say in which of several, or more files
            than the one have to be changed.
    """
    old = find_target(good, delta.target)
    if isinstance(old, Failure):
        return
    text = bad.module(delta.module)
    if text is None:
        yield from _with_its_module(path, delta, old, good, bad)
        return
    outer = old.qualname.rpartition(".")[0]
    home = lookup(bad, text, outer.partition(".")[0] or old.qualname)
    if isinstance(home, Defined) and home.text.module != text.module:
        moved = f"{home.text.module}:{old.qualname}"
        if not isinstance(find_target(bad, moved), Failure):
            yield from _changed(path, delta, moved)
    known = {name for name, _ in _functions(old.text)}
    body = _body(old.node)
    likely = []
    for name, node in _functions(text):
        if name not in known:
            alike = SequenceMatcher(None, body, _body(node), autojunk=False).ratio()
            likely.append((alike + (name.rpartition(".")[0] == outer) / 10, name))
    for alike, name in sorted(likely, reverse=True)[:_MOST]:
        if alike >= _LIKE:
            yield from _changed(path, delta, f"{delta.module}:{name}")


def _with_its_module(path: Path, delta: Delta, old: Target, good: Lane, bad: Lane) -> Iterator[Retargeted]:
    """The changed file where the whole module is not there any more, and the function is in another one."""
    if not isinstance(good, NotingLane) or not isinstance(bad, NotingLane):
        return
    body = _body(old.node)
    likely = []
    for target in moved_to(delta.target, good, bad):
        found = find_target(bad, target)
        if (
            isinstance(found, Target)
            and SequenceMatcher(None, body, _body(found.node), autojunk=False).ratio() >= _LIKE
        ):
            likely.append(target)
    if len(likely) > 1:
        raise CannotPatchError(f"the target may be {' or '.join(sorted(likely))} now; a person has to say which")
    for target in likely:
        changed = list(_changed(path, delta, target))
        if not changed:
            others = ", ".join(_naming(path.parent, delta.module))
            raise CannotPatchError(
                f"the target is {target} now, and {path.parent.name}/{path.name} cannot be changed alone: "
                f"change the module in all files that name it ({others})"
            )
        yield from changed


def _naming(folder: Path, module: str) -> list[str]:
    """The declarations beside one that name a module."""
    name = _whole(module)
    files = sorted(file for file in folder.glob("*.py") if name.search(file.read_text("utf-8")))
    return [f"{folder.name}/{file.name}" for file in files]


def _whole(module: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.]){re.escape(module)}(?![\w.])")


def _functions(text: ModuleText) -> Iterator[tuple[str, FunctionNode]]:
    for node in definitions(text.tree):
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{one.name}", one) for one in definitions(node) if isinstance(one, Function))


def _body(node: FunctionNode) -> list[str]:
    return [line for statement in node.body for line in ast.unparse(statement).split("\n")]


def _changed(path: Path, delta: Delta, target: str) -> Iterator[Retargeted]:
    """The file with each part of the target's name that is another one put in the place of the old part."""
    before = text = path.read_text("utf-8")
    module, _, qualname = target.partition(":")
    text = _whole(delta.module).sub(module, text)
    for was, now in zip(delta.target.partition(":")[2].split("."), qualname.split("."), strict=False):
        # A name that is a plain word, too, is another one only where it is written as somebody's attribute.
        edge = r"(?<!\w)" if "_" in was or not was.islower() else r"(?<=[\w)}]\.)"
        text = re.sub(rf"{edge}{re.escape(was)}(?!\w)", now, text) if was != now else text
    try:
        done = made(path, before, text, delta.name)
        features = [value for value in vars(loaded(path, text)).values() if isinstance(value, Feature)]
    except CannotPatchError:
        return
    feature = next((one for one in features if any(each.name == delta.name for each in one.deltas)), None)
    if done.delta.target == target:
        yield done, feature, target
