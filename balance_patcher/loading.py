"""The feature of a file that stands somewhere else than in ``deltas/``: where an author tries it out."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .errors import PatchError, refuse
from .feature import Feature
from .registry import find_feature


def feature_of_file(file: Path | str) -> Feature:
    """The ``FEATURE`` of a file; the file is run.

    Raises:
        PatchError: BP007, if it is no path; BP514, if it cannot be read; BP001, BP002, if it declares no feature, or
            a wrong one.
    """
    if not isinstance(file, (str, Path)):
        raise refuse(
            "BP007", f"feature_of_file() takes the path of a file, not {type(file).__name__}",
            next='call it as feature_of_file("my_feature.py")',
        )  # fmt: skip
    file = Path(file)
    try:
        text = file.read_text("utf-8-sig")  # a byte order mark is no part of the text
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise refuse("BP514", f"{file}: {why}", next="give --deltas a Python file that declares a FEATURE") from error
    return feature_of_text(text, file)


def feature_of_text(text: str, file: Path) -> Feature:
    """The same of a text that stands in no file yet.

    Raises:
        PatchError: BP001, BP002.
    """
    name, place = f"balance_patcher_deltas_{file.stem}", str(file.absolute())
    module = ModuleType(name)
    module.__file__ = str(file)
    spec = importlib.util.spec_from_loader(name, loader=None)
    module.__spec__ = spec
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(text, place, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - as an import would
    except PatchError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        raise refuse(
            "BP002", f"{file} cannot be imported: {type(error).__name__}: {error}",
            ("declared", f"{file}:{line or 1}"), next="mend the declaration; nothing was patched",
        ) from error  # fmt: skip
    feature = getattr(module, "FEATURE", None)
    if not isinstance(feature, Feature):
        raise refuse("BP002", f"{file} declares no FEATURE", next="write FEATURE = Feature(…) at the end of it")
    return feature


def chosen_features(files: Sequence[Path], names: Sequence[str] = ()) -> list[Feature]:
    """The features of these files, and the declared ones of these names beside them.

    Raises:
        PatchError: BP002, if two are called the same; what the files are refused for; BP003 for an unknown name.
    """
    found: dict[str, Feature] = {}
    for feature in map(feature_of_file, files):
        if feature.name in found:
            raise refuse("BP002", f"two of the files declare {feature.name!r}", next="give one of them another name")
        found[feature.name] = feature
    return [*found.values(), *(find_feature(name) for name in dict.fromkeys(names) if name not in found)]
