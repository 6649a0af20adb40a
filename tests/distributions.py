"""Distributions in a folder of their own, as an installer leaves them: the files, and a ``.dist-info``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from balance_patcher.distributions import GROUP

PACKAGES = Path(__file__).parent / "packages"


def put(site: Path, name: str, points: Mapping[str, str], files: Mapping[str, str], version: str = "1.0") -> Path:
    """Make a distribution in a folder.

    Args:
        site: The folder, to be put on the path.
        name: The distribution's name.
        points: Its entry points of our group.
        files: Its files, by path.
        version: Its version.
    """
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    rows = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{rows}")
    return info


def put_example(site: Path) -> Path:
    """The documented example, ``tests/packages/step-tally``."""
    return put_project(site, PACKAGES / "step-tally")


def put_project(site: Path, folder: Path) -> Path:
    """The distribution of a project's folder, as its ``pyproject.toml`` says."""
    import tomllib

    project = tomllib.loads((folder / "pyproject.toml").read_text())
    files = {f"{name}.py": "" for name in project["tool"]["setuptools"]["py-modules"]}
    told = project["project"]
    info = put(site, told["name"], told["entry-points"][GROUP], files, told["version"])
    for name in files:
        shutil.copy(folder / name, site / name)
    return info
