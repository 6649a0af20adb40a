"""Members come out of a wheel whole or not at all, and a far wheel is not fetched for them."""

from __future__ import annotations

import hashlib
import io
import struct
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from balance_patcher.errors import Outcome, PatchError
from balance_patcher.extras import command_for
from balance_patcher.source import SIZE_LIMIT
from balance_patcher.wheel import PypiSource, WheelSource
from tests.serving import PackageIndex, isolate, wheel

pytest.importorskip("remotezip")
pytest.importorskip("pypi_simple")

CORE = "vllm/v1/engine/core.py"
TEXT = b"class EngineCore:\n    pass\n" * 40
NAME = "vllm-1.0-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def server(monkeypatch):
    with PackageIndex() as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url())
        yield running


def far(cache: Path | None = None) -> PypiSource:
    return PypiSource("pypi:vllm==1.0", "vllm", "1.0", cache)


def near(path: Path, data: bytes) -> WheelSource:
    path.write_bytes(data)
    return WheelSource(f"wheel:{path}", path)


def plain(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytearray:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return bytearray(file.getvalue())


def directory(data: bytearray, offset: int, layout: str, value: int) -> bytearray:
    """Change one field of the first entry of the central directory."""
    start = data.index(b"PK\x01\x02")
    struct.pack_into(layout, data, start + offset, value)
    return data


def encrypted() -> bytearray:
    data = plain([(CORE, TEXT)])
    struct.pack_into("<H", data, 6, 1)
    return directory(data, 8, "<H", 1)


def flipped() -> bytearray:
    data = plain([(CORE, TEXT)])
    data[data.index(TEXT)] ^= 1
    return data


def twice() -> bytearray:
    with pytest.warns(UserWarning, match="Duplicate"):
        return plain([(CORE, TEXT), (CORE, b"other")])


def shrunk(size: int) -> bytearray:
    """The directory declares fewer bytes than the member inflates to."""
    return directory(plain([(CORE, b"0" * 100_000)], zipfile.ZIP_DEFLATED), 24, "<L", size)


def bomb() -> bytearray:
    return plain([(CORE, b"0" * (SIZE_LIMIT + 1))], zipfile.ZIP_BZIP2)


@pytest.mark.parametrize("where", ["near", "far", "far without ranges"])
class TestAnyWheel:
    @pytest.fixture
    def source(self, where, server, tmp_path):
        def make(data: bytes) -> WheelSource | PypiSource:
            if where == "near":
                return near(tmp_path / NAME, data)
            server.files[NAME] = bytes(data)
            server.ranges = where == "far"
            return far()

        return make

    def test_a_member_is_read_by_its_exact_path(self, source):
        opened = source(wheel({CORE: TEXT, "vllm/empty.py": b""}))
        assert opened.read(CORE) == TEXT
        assert opened.read("vllm/empty.py") == b""
        assert opened.read("vllm/v1/engine") is None
        assert opened.read("vllm/v1/engine/missing.py") is None
        assert opened.display(CORE) == CORE
        assert opened.commit() is None

    def test_its_directory_tells_one_text_from_another(self, source):
        index = source(wheel({CORE: TEXT, "vllm/same.py": TEXT, "vllm/other.py": TEXT[::-1]})).index()
        assert index[CORE] == index["vllm/same.py"] != index["vllm/other.py"]
        assert "vllm/missing.py" not in index

    def test_it_can_be_read_again_after_it_was_closed(self, source):
        opened = source(wheel({CORE: TEXT, "vllm/b.py": b"b"}))
        assert opened.read(CORE) == TEXT
        opened.close()
        assert opened.read("vllm/b.py") == b"b"
        opened.close()

    @pytest.mark.parametrize(
        ("data", "code", "words"),
        [
            (lambda: b"", "BP504", "not a zip file"),
            (lambda: b"<html>sorry</html>" * 9, "BP504", "not a zip file"),
            (lambda: wheel({CORE: TEXT})[:-30], "BP504", "not a zip file"),
            (lambda: wheel({CORE: TEXT})[200:], "BP504", ""),
            (flipped, "BP504", "CRC"),
            (encrypted, "BP504", "encrypted"),
            (twice, "BP504", "2 members"),
            (lambda: shrunk(10), "BP504", ""),
            (lambda: shrunk(SIZE_LIMIT - 1), "BP504", "are declared"),
            (lambda: shrunk(SIZE_LIMIT + 1), "BP505", "not read"),
            (bomb, "BP504", "compression method"),
            (lambda: wheel({CORE: b"0" * (SIZE_LIMIT + 1)}), "BP505", str(SIZE_LIMIT + 1)),
            (lambda: directory(plain([(CORE, TEXT)]), 42, "<L", 7), "BP504", ""),
        ],
        ids=[
            "empty", "a web page", "end missing", "beginning missing", "bit flipped", "encrypted",
            "twice", "inflates to more", "inflates to less", "declared too large", "bzip2 bomb",
            "too large", "wrong offset",
        ],
    )  # fmt: skip
    def test_a_damaged_one_is_could_not_check(self, source, data, code, words):
        with pytest.raises(PatchError, match=code) as caught:
            source(data()).read(CORE)
        assert caught.value.outcome is Outcome.UNKNOWN
        assert words in str(caught.value)

    def test_the_largest_allowed_member_is_read(self, source):
        assert len(source(wheel({CORE: b"0" * SIZE_LIMIT})).read(CORE) or b"") == SIZE_LIMIT


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "vllm/../../x", "vllm//x"])
def test_a_path_outside_is_refused(path, tmp_path):
    with pytest.raises(ValueError, match="not a path inside"):
        near(tmp_path / NAME, wheel({CORE: TEXT})).read(path)


@pytest.mark.parametrize("name", ["gone.whl", "."])
def test_a_wheel_that_is_not_there_is_could_not_check(name, tmp_path):
    with pytest.raises(PatchError, match="BP514") as caught:
        WheelSource("wheel:x", tmp_path / name).read(CORE)
    assert caught.value.outcome is Outcome.UNKNOWN


def test_nothing_is_fetched_before_the_first_read(server):
    far()
    assert server.log == []


def test_only_the_wanted_members_of_a_far_wheel_are_fetched(server):
    server.files[NAME] = wheel({CORE: TEXT, "vllm/other.py": TEXT}, filler=24)
    source = far()
    assert source.read(CORE) == TEXT
    assert source.read(CORE) == TEXT
    assert source.read("vllm/missing.py") is None
    assert server.sent < len(server.files[NAME]) / 10
    # the directory once, the member once
    assert server.asked(NAME) == 2


def test_the_directory_of_a_far_wheel_comes_without_its_members(server):
    server.files[NAME] = wheel({CORE: TEXT}, filler=24)
    source = far()
    assert CORE in source.index()
    assert CORE in source.index()
    assert server.sent < len(server.files[NAME]) / 10
    assert server.asked(NAME) == 1
    del server.files[NAME]
    with pytest.raises(PatchError, match=r"BP50[12]"):
        far().index()


def test_a_directory_larger_than_the_first_part_is_fetched_whole(server, monkeypatch):
    monkeypatch.setattr("balance_patcher.remote.TAIL", 64)
    server.files[NAME] = wheel({CORE: TEXT, **{f"vllm/{n}.py": b"" for n in range(99)}})
    assert far().read(CORE) == TEXT


def test_a_server_without_ranges_gives_the_whole_wheel_once_and_nothing_is_left(server, monkeypatch, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    files, make = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: files.append(make()) or files[-1])
    server.ranges = False
    server.files[NAME] = wheel({CORE: TEXT, "vllm/b.py": b"b"}, filler=1)
    source = far()
    assert source.read(CORE) == TEXT
    assert source.read("vllm/b.py") == b"b"
    # the refused part, and the whole
    assert server.asked(NAME) == 2
    source.close()
    assert list(scratch.iterdir()) == []
    assert [file.closed for file in files] == [True]


def test_a_whole_wheel_with_another_digest_is_damaged(server):
    server.json, server.ranges = True, False
    server.files[NAME] = wheel({CORE: TEXT})
    right = hashlib.sha256(server.files[NAME]).hexdigest()
    server.hints[NAME] = {"hashes": {"sha256": right[::-1]}}
    with pytest.raises(PatchError, match=r"BP504.*sha256"):
        far().read(CORE)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("trouble", ["busy", "drops"])
def test_a_flaky_server_is_asked_again(server, trouble, ranges):
    server.ranges = ranges
    server.files[NAME] = wheel({CORE: TEXT}, filler=2)
    setattr(server, trouble, 3)
    assert far().read(CORE) == TEXT


def test_a_server_that_keeps_dropping_is_could_not_check(server, monkeypatch):
    monkeypatch.setattr("balance_patcher.remote._pause", lambda attempt: None)
    server.files[NAME] = wheel({CORE: TEXT})
    server.drops = 99
    with pytest.raises(PatchError, match="BP501") as caught:
        far().read(CORE)
    assert NAME in str(caught.value)
    server.drops = 0
    assert far().read(CORE) == TEXT


def test_more_than_the_declared_part_is_not_taken(server, monkeypatch):
    monkeypatch.setattr("balance_patcher.remote._pause", lambda attempt: None)
    server.files[NAME] = wheel({CORE: TEXT})
    server.extra = b"more"
    with pytest.raises(PatchError, match="BP501"):
        far().read(CORE)


def test_another_part_is_not_taken(server):
    server.files[NAME] = wheel({CORE: TEXT}, filler=2)
    server.skew = 1
    with pytest.raises(PatchError, match=r"BP501.*another part"):
        far().read(CORE)


def test_what_was_read_stays(server):
    server.files[NAME] = wheel({CORE: TEXT})
    source = far()
    assert source.read(CORE) == TEXT
    assert source.read("vllm/gap.py") is None
    source.close()
    server.stop()
    assert source.read(CORE) == TEXT
    assert source.read("vllm/gap.py") is None


def test_an_encoded_part_is_no_part(server):
    server.files[NAME] = wheel({CORE: TEXT})
    server.encoding = "x-odd"
    assert far().read(CORE) == TEXT
    assert [wanted for path, wanted in server.log if path.endswith(NAME)][-1] is None


def test_a_wheel_without_end_is_not_fetched_whole(server, monkeypatch):
    monkeypatch.setattr("balance_patcher.remote.DOWNLOAD_LIMIT", 1000)
    server.ranges = False
    server.files[NAME] = wheel({CORE: TEXT}, filler=1)
    with pytest.raises(PatchError, match=r"BP504.*more than 1000"):
        far().read(CORE)


@pytest.mark.parametrize("module", ["remotezip", "requests", "pypi_simple", "packaging.version"])
def test_without_the_extra_a_far_wheel_is_refused_and_a_near_one_read(module, server, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    server.files[NAME] = wheel({CORE: TEXT})
    with pytest.raises(PatchError, match="BP513") as caught:
        far().read(CORE)
    assert caught.value.failures[0].next == command_for("cli")
    assert near(tmp_path / NAME, server.files[NAME]).read(CORE) == TEXT


def test_a_file_that_the_index_names_and_the_server_lacks_is_could_not_check(server):
    server.files[NAME] = wheel({CORE: TEXT})
    source = far()
    assert source.read(CORE) == TEXT
    source.close()
    del server.files[NAME]
    with pytest.raises(PatchError, match=r"BP501.*HTTP 404"):
        source.read("vllm/b.py")


def test_credentials_of_the_index_open_its_files_and_are_never_shown(server, monkeypatch):
    server.login = "me:topsecret"
    server.files[NAME] = wheel({CORE: TEXT})
    monkeypatch.setenv("PIP_INDEX_URL", server.url("me:topsecret"))
    source = far()
    assert source.read(CORE) == TEXT
    source.close()
    server.login = "me:changed"
    with pytest.raises(PatchError, match="HTTP 401") as caught:
        source.read("vllm/b.py")
    assert "topsecret" not in str(caught.value)


def test_threads_share_one_source(server):
    members = {f"vllm/m{number}.py": str(number).encode() for number in range(20)}
    server.files[NAME] = wheel(members)
    source = far()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.read, members)) == list(members.values())


class TestCache:
    @pytest.fixture(params=["argument", "variable"])
    def folder(self, request, monkeypatch, tmp_path):
        if request.param == "variable":
            monkeypatch.setenv("BALANCE_PATCHER_CACHE", str(tmp_path / "kept"))
            return None
        return tmp_path / "kept"

    def test_members_and_gaps_are_read_back_with_the_server_gone(self, folder, server, tmp_path):
        server.files[NAME] = wheel({CORE: TEXT, "vllm/other.py": b""})
        first = far(folder)
        assert first.display(CORE) == CORE
        assert first.read(CORE) == TEXT
        assert first.read("vllm/gap.py") is None
        server.stop()
        again = far(folder)
        assert again.read(CORE) == TEXT
        assert again.read("vllm/gap.py") is None
        assert again.display(CORE) == str(tmp_path / "kept" / NAME / CORE)
        assert (tmp_path / "kept" / NAME / CORE).read_bytes() == TEXT

    def test_another_version_is_not_read_from_it(self, folder, server):
        server.files[NAME] = wheel({CORE: TEXT})
        server.files[NAME.replace("1.0", "1.1")] = wheel({CORE: b"newer"})
        assert far(folder).read(CORE) == TEXT
        assert PypiSource("pypi:vllm==1.1", "vllm", "1.1", folder).read(CORE) == b"newer"

    def test_nothing_half_written_is_left(self, folder, server, tmp_path):
        server.files[NAME] = wheel({CORE: TEXT})
        far(folder).read(CORE)
        files = [path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()]
        assert files == ["core.py"]


def test_a_cache_that_cannot_be_written_is_no_error(server, tmp_path):
    server.files[NAME] = wheel({CORE: TEXT})
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert far(blocked).read(CORE) == TEXT


def test_nothing_is_kept_unless_asked_for(server, tmp_path):
    server.files[NAME] = wheel({CORE: TEXT})
    before = sorted(tmp_path.rglob("*"))
    far().read(CORE)
    assert sorted(tmp_path.rglob("*")) == before
