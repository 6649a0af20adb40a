"""What a person chose on the command line: which features with their files, and what a pin stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from balance_patcher.errors import PatchError, refuse
from balance_patcher.feature import Feature
from balance_patcher.loading import feature_of_file
from balance_patcher.pins import read_pins
from balance_patcher.registry import broken, delta_modules, find_feature

from .engine import Chosen

_PIN = "pin:"


def choose(names: Sequence[str], files: Sequence[Path], deltas: Sequence[str]) -> list[Chosen]:
    """The features that are looked at; without a choice all of this repository.

    Raises:
        PatchError: BP003, if there is no such feature or delta; BP001, BP002, if a declaration is wrong.
    """
    own = {module.FEATURE.name: Path(str(module.__file__)) for module in delta_modules()}
    loose = {feature.name: (feature, file) for file in files for feature in [feature_of_file(file)]}
    wanted = [*names, *(delta.partition(".")[0] for delta in deltas)]
    found = [Chosen(feature, file.absolute(), loose=True) for feature, file in loose.values()]
    if not files and not wanted:
        if broken():
            raise PatchError(*broken())
        wanted = list(own)
    found += [Chosen(find_feature(name), own.get(name)) for name in dict.fromkeys(wanted) if name not in loose]
    for delta in deltas:
        _need(delta, [one.feature for one in found])
    return found


def _need(delta: str, features: Sequence[Feature]) -> None:
    declared = [one.name for feature in features for one in feature.deltas]
    if delta not in declared:
        raise refuse("BP003", f"there is no delta {delta!r}", next=f"use one of: {', '.join(declared)}")


def pinned(ref: str, vllm_ascend: Path | None) -> str:
    """A ref; of ``pin:main`` the commit that vllm-ascend has written down.

    Raises:
        PatchError: BP007, if there is no such pin, or nobody said where; BP514, if the files cannot be read.
    """
    if not ref.startswith(_PIN):
        return ref
    if vllm_ascend is None:
        raise refuse("BP007", f"{ref} needs --vllm-ascend", next="give the checkout that holds the pin files")
    folder = vllm_ascend / ".github" if (vllm_ascend / ".github").is_dir() else vllm_ascend
    pins = read_pins(folder)
    name = ref.removeprefix(_PIN)
    if name not in pins:
        raise refuse("BP007", f"there is no pin {name!r}", next=f"use one of: {', '.join(_PIN + one for one in pins)}")
    return pins[name]
