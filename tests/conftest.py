"""What the unit tests share: where released sources are kept, and lanes made of plain text.

The source of vLLM is read from the package index when a test asks for it, and kept in a folder
that git ignores. Nothing here needs torch or vLLM.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from balance_patcher.source import DirSource, Lane, open_source

ROOT = Path(__file__).resolve().parent.parent

#: Every release whose shape is known, oldest first.
RELEASES = tuple(
    "0.18.0 0.19.0 0.20.0 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.1 "
    "0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0".split()
)

#: The files that the balance feature reads.
MEMBERS = (
    "vllm/v1/core/sched/scheduler.py", "vllm/v1/core/sched/interface.py", "vllm/v1/engine/core.py", "vllm/_version.py",
    "vllm/distributed/elastic_ep/elastic_state.py", "vllm/distributed/eplb/eplb_state.py",
    "vllm/distributed/eplb/async_worker.py", "vllm/distributed/eplb/policy/__init__.py",
)  # fmt: skip

os.environ.setdefault("BALANCE_PATCHER_CACHE", str(ROOT / ".cache" / "wheels"))


@pytest.fixture
def text_lane(tmp_path: Path) -> Callable[[Mapping[str, str | bytes]], Lane]:
    """A lane made of the given files, by path inside the distribution."""

    def make(files: Mapping[str, str | bytes]) -> Lane:
        for path, content in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return Lane("text", DirSource(f"dir:{tmp_path}", tmp_path))

    return make


@pytest.fixture(scope="session")
def release_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of one release as a folder; not to be written to."""
    made: dict[str, Path] = {}

    def get(version: str) -> Path:
        if version not in made:
            folder = tmp_path_factory.mktemp(f"vllm-{version}")
            source = open_source(f"pypi:vllm=={version}")
            for path in MEMBERS:
                data = source.read(path)
                if data is not None:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path).write_bytes(data)
            made[version] = folder
        return made[version]

    return get


@pytest.fixture
def release_copy(tmp_path: Path, release_dir: Callable[[str], Path]) -> Callable[[str], Path]:
    """A copy of one release's files, to be changed by the test."""

    def get(version: str) -> Path:
        return Path(shutil.copytree(release_dir(version), tmp_path / f"vllm-{version}"))

    return get


@pytest.fixture(scope="session")
def seam_text(release_dir: Callable[[str], Path]) -> Callable[[str], str]:
    """The scheduler's module of one release with upstream's seam in."""
    made: dict[str, str] = {}

    def get(version: str) -> str:
        if version not in made:
            from tools.upstream_seam import seam_of

            folder = release_dir(version)
            made[version] = seam_of(Lane(version, DirSource(f"dir:{folder}", folder))).text
        return made[version]

    return get


@pytest.fixture
def seamed(release_copy: Callable[[str], Path], seam_text: Callable[[str], str]) -> Callable[[str], Path]:
    """A copy of one release's files with the seam in, to be changed by the test."""

    def get(version: str) -> Path:
        folder = release_copy(version)
        (folder / MEMBERS[0]).write_text(seam_text(version), encoding="utf-8")
        return folder

    return get
