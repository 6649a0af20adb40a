"""Files come from the commit that was named, whatever the kind of clone and its working tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from balance_patcher.errors import Outcome, PatchError
from balance_patcher.gitrepo import GitSource, clean_head, peeled, resolve
from balance_patcher.source import SIZE_LIMIT
from tests.serving import isolate

pytest.importorskip("git")
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git command")

CORE = "vllm/v1/core.py"
OLD, NEW = b"old\r\n", b"new\n"


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
        monkeypatch.setenv(f"GIT_{who}_DATE", "2026-01-01T00:00:00Z")


def git(folder: Path, *words: str, stdin: bytes | None = None) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], input=stdin, capture_output=True, check=True)
    return done.stdout.decode().strip()


def commit(repo: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        path = repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "change")
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path):
    """Two commits: v0.1.0 (light tag), then v0.2.0 (annotated tag) on main."""
    path = tmp_path / "repo"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    git(path, "config", "core.autocrlf", "false")
    commit(path, {CORE: OLD, "vllm/gone.py": b""})
    git(path, "tag", "v0.1.0")
    git(path, "rm", "-q", "vllm/gone.py")
    commit(path, {CORE: NEW})
    git(path, "tag", "-a", "v0.2.0", "-m", "release")
    return path


def clone(repo: Path, name: str, *options: str) -> Path:
    target = repo.parent / name
    git(repo.parent, "clone", "-q", *options, repo.as_uri(), str(target))
    return target


def source(repo: Path, ref: str) -> GitSource:
    return GitSource(f"git:{repo}@{ref}", repo, ref)


def refusal(repo: Path, ref: str) -> PatchError:
    with pytest.raises(PatchError) as caught:
        source(repo, ref).read(CORE)
    assert caught.value.outcome is Outcome.UNKNOWN
    return caught.value


@pytest.mark.parametrize(
    ("ref", "text"),
    [("v0.1.0", OLD), ("v0.2.0", NEW), ("main", NEW), ("HEAD~1", OLD), ("main^0", NEW)],
)
def test_the_bytes_are_those_of_the_named_commit(ref, text, repo):
    (repo / CORE).write_bytes(b"edited in the working tree")
    opened = source(repo, ref)
    assert opened.read(CORE) == text
    assert opened.commit() == git(repo, "rev-parse", f"{ref}^{{commit}}")
    assert opened.display(CORE) == CORE
    opened.close()


@pytest.mark.parametrize("digits", [40, 12])
def test_a_hash_is_a_ref(digits, repo):
    full = git(repo, "rev-parse", "v0.1.0")
    assert resolve(repo, full[:digits]) == full
    assert source(repo, full[:digits].upper()).read(CORE) == OLD


def test_an_annotated_tag_is_peeled(repo):
    commit_hash = git(repo, "rev-parse", "main")
    assert git(repo, "rev-parse", "v0.2.0") != commit_hash
    assert peeled(repo, "v0.2.0") == resolve(repo, "v0.2.0") == commit_hash


@pytest.mark.parametrize("path", ["vllm/missing.py", "vllm/v1", "vllm", CORE + "/x", "vllm/gone.py", "VLLM/v1/core.py"])
def test_a_path_without_a_file_is_none(path, repo):
    assert source(repo, "v0.2.0").read(path) is None


def test_what_was_read_is_kept(repo):
    opened = source(repo, "v0.1.0")
    assert opened.read(CORE) == OLD
    shutil.rmtree(repo)
    assert opened.read(CORE) == OLD


@pytest.mark.parametrize(
    ("options", "ref"),
    [
        (["--bare"], "v0.1.0"),
        (["--depth", "1", "--branch", "v0.1.0"], "v0.1.0"),
        (["--filter=blob:none", "--no-checkout"], "v0.1.0"),
        (["--filter=tree:0", "--no-checkout"], "v0.1.0"),
        (["--no-checkout"], "v0.1.0"),
    ],
    ids=["bare", "shallow", "blobless", "treeless", "no checkout"],
)
def test_every_kind_of_clone_will_do(options, ref, repo):
    git(repo, "config", "uploadpack.allowFilter", "true")
    git(repo, "config", "uploadpack.allowAnySHA1InWant", "true")
    assert source(clone(repo, "clone", *options), ref).read(CORE) == OLD


def test_a_linked_worktree_will_do(repo, tmp_path):
    git(repo, "worktree", "add", "-q", str(tmp_path / "tree"), "v0.1.0")
    assert source(tmp_path / "tree", "HEAD").read(CORE) == OLD


def test_an_object_that_a_partial_clone_cannot_get_is_could_not_check(repo):
    git(repo, "config", "uploadpack.allowFilter", "true")
    partial = clone(repo, "clone", "--filter=blob:none", "--no-checkout")
    shutil.rmtree(repo)
    assert "BP514" in str(refusal(partial, "v0.1.0"))


@pytest.mark.parametrize("where", ["folder", "gone", "inside"])
def test_no_repository_is_could_not_check(where, repo, tmp_path):
    path = {"folder": tmp_path / "home", "gone": tmp_path / "x", "inside": repo / "vllm"}[where]
    assert "BP507" in str(refusal(path, "main"))
    with pytest.raises(PatchError, match="BP507"):
        peeled(path, "main")


@pytest.mark.parametrize(
    ("options", "ref", "command"),
    [
        (["--depth", "1"], "v0.1.0", "fetch --depth 1 origin tag v0.1.0"),
        (["--depth", "1"], "a" * 40, f"fetch --depth 1 origin {'a' * 40}"),
        (["--depth", "1"], "topic", "fetch --depth 1 origin topic:topic"),
        (["--depth", "1"], "HEAD~1", "fetch --unshallow origin"),
        ([], "v9.9.9rc1", "fetch origin tag v9.9.9rc1"),
        ([], "a" * 40, f"fetch origin {'a' * 40}"),
        ([], "topic", "fetch origin topic:topic"),
        ([], "abcdef0", "fetch origin"),
        (["--origin", "up"], "v9.9.9", "fetch up tag v9.9.9"),
    ],
)
def test_a_missing_ref_ends_with_the_command_that_gets_it(options, ref, command, repo):
    cloned = clone(repo, "clone", *options)
    error = refusal(cloned, ref)
    assert error.failures[0].code == "BP506"
    assert error.failures[0].next == f"git -C {cloned} {command}"
    assert str(error).endswith(command)
    assert peeled(cloned, ref) is None


@pytest.mark.parametrize("ref", ["v0.1.0", "topic", "hash"])
def test_that_command_works(ref, repo):
    git(repo, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(repo, "branch", "topic", "v0.1.0")
    ref = git(repo, "rev-parse", "v0.1.0") if ref == "hash" else ref
    cloned = clone(repo, "clone", "--depth", "1")
    words = refusal(cloned, ref).failures[0].next.split()
    subprocess.run(words, check=True, capture_output=True)
    assert source(cloned, ref).read(CORE) == OLD


def test_without_the_extra_or_git_it_is_refused(repo, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "git", None)
        assert "BP513" in str(refusal(repo, "main"))
        assert clean_head(repo, "vllm") is None
    monkeypatch.setenv("PATH", "")
    assert refusal(repo, "main").failures[0].next == "install git"


def test_a_missing_ref_without_a_remote_says_so(repo):
    error = refusal(repo, "v9.9.9")
    assert "no remote" in str(error)
    assert error.failures[0].next == (f"git -C {repo} remote add origin URL\ngit -C {repo} fetch origin tag v9.9.9")


@pytest.mark.parametrize("ref", ["--all", "-v0.1.0", "", "v0.1.0:vllm", "main..v0.1.0"])
def test_what_is_no_ref_to_a_commit_is_refused(ref, repo):
    assert "BP506" in str(refusal(repo, ref))


def test_an_ambiguous_hash_names_the_commits(repo):
    lines = []
    for number in range(900):
        text = f"c{number}"
        lines.append(f"commit refs/heads/many\ncommitter a <a@b> {number} +0000\ndata {len(text)}\n{text}\n")
    git(repo, "fast-import", "--quiet", stdin="".join(lines).encode())
    hashes = git(repo, "rev-list", "many").split()
    short = [name[:4] for name in hashes]
    prefix = next(one for one in short if short.count(one) > 1)
    error = refusal(repo, prefix)
    assert "BP506" in str(error)
    assert all(name in str(error) for name in hashes if name.startswith(prefix))
    assert "more digits" in error.failures[0].next


def test_a_file_over_the_limit_is_refused_unread(repo):
    commit(repo, {"vllm/big.py": b"0" * (SIZE_LIMIT + 1), "vllm/full.py": b"0" * SIZE_LIMIT})
    assert len(source(repo, "main").read("vllm/full.py") or b"") == SIZE_LIMIT
    with pytest.raises(PatchError, match="BP505"):
        source(repo, "main").read("vllm/big.py")


@pytest.mark.parametrize("path", ["vllm/link.py", "vllm/folder/core.py"])
def test_a_symbolic_link_is_refused(path, repo):
    (repo / "vllm/link.py").symlink_to("v1/core.py")
    (repo / "vllm/folder").symlink_to("v1")
    commit(repo, {})
    with pytest.raises(PatchError, match=r"BP514.*symbolic link"):
        source(repo, "main").read(path)


@pytest.mark.parametrize("path", ["vllm/sub", "vllm/sub/core.py"])
def test_a_submodule_is_refused(path, repo):
    head = git(repo, "rev-parse", "HEAD")
    git(repo, "update-index", "--add", "--cacheinfo", f"160000,{head},vllm/sub")
    git(repo, "commit", "-q", "-m", "sub")
    with pytest.raises(PatchError, match=r"BP514.*submodule"):
        source(repo, "main").read(path)


def test_the_repository_of_a_running_git_hook_is_not_taken_for_ours(repo, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert source(repo, "v0.1.0").read(CORE) == OLD


def test_a_replaced_object_is_not_taken_for_the_commit(repo):
    git(repo, "replace", git(repo, "rev-parse", f"v0.1.0:{CORE}"), git(repo, "rev-parse", f"main:{CORE}"))
    assert source(repo, "v0.1.0").read(CORE) == OLD


def test_a_clean_checkout_proves_its_commit(repo):
    assert clean_head(repo, "vllm") == git(repo, "rev-parse", "HEAD")
    (repo / "README").write_text("elsewhere")
    (repo / ".gitignore").write_text("*.so\nlocal.py\n")
    (repo / "vllm/_C.so").write_text("built")
    assert clean_head(repo, "vllm") == git(repo, "rev-parse", "HEAD")


@pytest.mark.parametrize("change", ["edit", "stage", "delete", "add", "ignored", "assumed", "none"])
def test_a_changed_checkout_proves_nothing(change, repo):
    file = repo / CORE
    (repo / ".gitignore").write_text("local.py\n")
    if change == "edit":
        file.write_bytes(b"x")
    elif change == "stage":
        file.write_bytes(b"x")
        git(repo, "add", CORE)
    elif change == "delete":
        file.unlink()
    elif change == "add":
        (repo / "vllm/extra.py").write_text("")
    elif change == "ignored":
        (repo / "vllm/local.py").write_text("")
    elif change == "assumed":
        git(repo, "update-index", "--assume-unchanged", CORE)
        file.write_bytes(b"x")
    folder = "elsewhere" if change == "none" else "vllm"
    assert clean_head(repo, folder) is None


def test_a_folder_that_is_no_repository_proves_nothing(tmp_path):
    assert clean_head(tmp_path, "vllm") is None
