"""A history of vLLM made of its releases, one commit and tag each, and short histories that go on from one of them.

The sources are read when a test asks for them, as lanes are, and kept where the other tests keep theirs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from balance_patcher.source import open_source
from tests.conftest import RELEASES
from tools.drift.changed import Transition
from tools.drift.choice import choose
from tools.drift.index import Index
from tools.drift.model import Report
from tools.drift.runs import Options, run_git

#: The releases of the history: 0.23.0 to 0.33.0.
TOLD = RELEASES[RELEASES.index("0.23.0") :]

#: What the features read there, and where the functions are that their targets call.
FILES = tuple(
    f"vllm/{path}.py"
    for path in """
    __init__ config/__init__ config/ec_manager_config config/model config/parallel config/vllm
    distributed/aux_output_connector/connector distributed/ec_transfer/ec_connector/base
    distributed/ec_transfer/ec_connector/factory distributed/elastic_ep/elastic_state distributed/eplb/async_worker
    distributed/eplb/eplb_communicator distributed/eplb/eplb_state distributed/eplb/eplb_utils
    distributed/eplb/policy/__init__ distributed/eplb/rebalance_execute distributed/kv_transfer/kv_connector/base
    distributed/kv_transfer/kv_connector/factory distributed/parallel_state distributed/utils
    model_executor/models/interfaces platforms/__init__ utils/gpu_sync_debug v1/core/encoder_cache_manager
    v1/core/kv_cache_coordinator v1/core/kv_cache_manager v1/core/kv_cache_utils v1/core/sched/interface
    v1/core/sched/output v1/core/sched/request_queue v1/core/sched/scheduler v1/engine/core v1/executor/abstract
    v1/metrics/stats v1/request v1/utils
    """.split()
)

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
CORE = "vllm/v1/engine/core.py"

_IDENTITY = ("-c", "user.name=A. Person", "-c", "user.email=person@example.org", "-c", "commit.gpgsign=false")
_SETTINGS = ("-c", "core.autocrlf=false", "-c", "gc.auto=0", "-c", "init.defaultBranch=main")


@dataclass
class Repo:
    """A repository that a test writes to."""

    path: Path
    made: int = field(default=0)

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *_IDENTITY, *_SETTINGS, *words], cwd=self.path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, subject: str) -> str:
        """Commit what is there; returns the hash."""
        self.made += 1
        date = f"2026-03-01T00:00:{self.made % 60:02}+00:00"
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", subject, "--date", date)
        return self.git("rev-parse", "HEAD")

    def edit(self, path: str, change: Callable[[str], str], subject: str) -> str:
        """Change a file, which has to change, and commit it."""
        file = self.path / path
        before = file.read_text("utf-8")
        after = change(before)
        assert after != before, "the text to change is not there"
        file.write_text(after, "utf-8")
        return self.commit(subject)


def read_releases() -> dict[str, dict[str, bytes]]:
    """The files of every release of the history; releases are read side by side."""

    def one(version: str) -> dict[str, bytes]:
        source = open_source(f"pypi:vllm=={version}")
        found = {path: source.read(path) for path in FILES}
        return {path: data for path, data in found.items() if data is not None}

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(TOLD, pool.map(one, TOLD), strict=True))


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """The history; not to be written to."""
    repo = Repo(tmp_path_factory.mktemp("upstream"))
    repo.git("init", "-q")
    for number, (version, files) in enumerate(read_releases().items(), 1):
        for path in FILES:
            file = repo.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if path in files:
                file.write_bytes(files[path])
            else:
                file.unlink(missing_ok=True)
        repo.commit(f"Release {version} (#{number})")
        repo.git("tag", f"v{version}")
    return repo


@pytest.fixture
def branch(upstream: Repo, tmp_path: Path) -> Callable[[str], Repo]:
    """A repository of its own that goes on from a release."""

    def make(version: str) -> Repo:
        folder = tmp_path / f"from-{version}"
        repo = Repo(folder)
        subprocess.run(["git", "clone", "-q", "--shared", str(upstream.path), str(folder)], check=True)
        repo.git("checkout", "-q", "-B", "work", f"v{version}")
        return repo

    return make


@pytest.fixture(scope="session")
def index() -> Index:
    """What is known, shared by all tests: equal texts are looked at once."""
    return Index(None)


Look = Callable[..., Report]


@pytest.fixture(scope="session")
def look(index: Index) -> Look:
    """The report of a repository, looked at in this process."""

    def make(repo: Repo, since: str, until: str = "HEAD", features: str = "balance", **options: object) -> Report:
        chosen = choose(features.split(), [], [])
        settings = Options(processes=1, **options)  # type: ignore[arg-type]
        return run_git(repo.path, since, until, chosen, index, settings).report

    return make


@pytest.fixture(scope="session")
def releases(upstream: Repo, look: Look) -> Report:
    """The report of the whole history."""
    return look(upstream, "v0.23.0", "v0.33.0", "balance defer_preemption")


def changes(report: Report, subject: str) -> list[Transition]:
    """What changed for a delta, or for an invariant."""
    return [change for change in report.transitions if change.subject == subject]
