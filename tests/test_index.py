"""Which index is asked, with which credentials, and what is said when it has no answer."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from balance_patcher import web
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.extras import command_for, require
from balance_patcher.index import find_wheel, indexes
from balance_patcher.indexconfig import configured
from tests.serving import PackageIndex, isolate

pypi_simple = pytest.importorskip("pypi_simple")
pytest.importorskip("requests")

WHEEL = "vllm-{}-cp38-abi3-manylinux_2_28_x86_64.whl"
UV_TOML = 'index-url = "http://uv-user/"\n[[index]]\nname = "a"\nurl = "http://uv-a/"\n'


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture
def server():
    with PackageIndex() as running:
        yield running


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/simple/"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def pip(**values: str) -> str:
    lines = [f"{key.replace('_', '-')} = {value}" for key, value in values.items()]
    return "\n".join(["[global]", *lines, ""])


DEFAULT = pypi_simple.PYPI_SIMPLE_ENDPOINT
ETC, XDG, USER = "etc/pip.conf", "etc/xdg/pip/pip.conf", "home/.config/pip/pip.conf"
LEGACY, SITE, UV = "home/.pip/pip.conf", "prefix/pip.conf", "home/.config/uv/uv.toml"


@pytest.mark.parametrize(
    ("env", "files", "expected"),
    [
        pytest.param({}, {}, [DEFAULT], id="nothing"),
        pytest.param({"PIP_INDEX_URL": "http://a/"}, {}, ["http://a/"], id="pip env"),
        pytest.param({"PIP_INDEX_URL": " "}, {}, [DEFAULT], id="an empty one is none"),
        pytest.param({}, {XDG: pip(index_url="http://x/")}, ["http://x/"], id="xdg"),
        pytest.param(
            {}, {XDG: pip(index_url="http://x/"), ETC: pip(index_url="http://e/")},
            ["http://e/"], id="etc over xdg",
        ),
        pytest.param(
            {}, {ETC: pip(index_url="http://e/"), LEGACY: pip(index_url="http://l/")},
            ["http://l/"], id="legacy user file over etc",
        ),
        pytest.param(
            {}, {LEGACY: pip(index_url="http://l/"), USER: pip(index_url="http://u/")},
            ["http://u/"], id="user over legacy",
        ),
        pytest.param(
            {}, {USER: pip(index_url="http://u/"), SITE: pip(index_url="http://s/")},
            ["http://s/"], id="site over user",
        ),
        pytest.param(
            {"PIP_INDEX_URL": "http://a/"}, {SITE: pip(index_url="http://s/")},
            ["http://a/"], id="pip env over files",
        ),
        pytest.param(
            {}, {USER: "[install]\nindex_url = http://i/\n", SITE: pip(index_url="http://s/")},
            ["http://i/"], id="install section over global, underscores allowed",
        ),
        pytest.param(
            {"PIP_EXTRA_INDEX_URL": "http://b/"}, {USER: pip(extra_index_url="http://c/")},
            [DEFAULT, "http://b/"], id="an explicit extra replaces the file's",
        ),
        pytest.param(
            {}, {USER: pip(extra_index_url="\n  file:///opt/a\n  file:///opt/b")},
            [DEFAULT, "file:///opt/a", "file:///opt/b"], id="several lines",
        ),
        pytest.param(
            {"PIP_CONFIG_FILE": "{root}/named"},
            {"named": pip(index_url="http://n/"), USER: pip(index_url="http://u/")},
            ["http://n/"], id="a named file stands for the user's",
        ),
        pytest.param(
            {"PIP_CONFIG_FILE": os.devnull}, {ETC: pip(index_url="http://e/")},
            [DEFAULT], id="no files wanted",
        ),
        pytest.param(
            {"XDG_CONFIG_HOME": "{root}/x"}, {"x/pip/pip.conf": pip(index_url="http://x/")},
            ["http://x/"], id="XDG_CONFIG_HOME",
        ),
        pytest.param(
            {"VIRTUAL_ENV": "{root}/v"}, {"v/pip.conf": pip(index_url="http://v/")},
            ["http://v/"], id="VIRTUAL_ENV",
        ),
        pytest.param({"PIP_NO_INDEX": "1"}, {ETC: pip(index_url="http://e/")}, [], id="no index"),
        pytest.param(
            {"UV_DEFAULT_INDEX": "http://d/", "UV_INDEX_URL": "http://i/", "PIP_INDEX_URL": "http://p/"},
            {}, ["http://d/"], id="uv default over uv index over pip",
        ),
        pytest.param(
            {"UV_INDEX_URL": "http://i/", "PIP_INDEX_URL": "http://p/"},
            {UV: UV_TOML}, ["http://uv-a/", "http://i/"], id="uv env over pip env",
        ),
        pytest.param(
            {"UV_INDEX": "mine=http://m/ http://n/", "UV_EXTRA_INDEX_URL": "http://o/"},
            {}, ["http://m/", "http://n/", "http://o/", DEFAULT], id="uv extras go first",
        ),
        pytest.param({}, {UV: UV_TOML}, ["http://uv-a/", "http://uv-user/"], id="uv.toml"),
        pytest.param(
            {"PIP_INDEX_URL": "http://p/"}, {UV: UV_TOML},
            ["http://uv-a/", "http://p/"], id="env over uv.toml",
        ),
        pytest.param(
            {"UV_CONFIG_FILE": "{root}/u.toml"},
            {"u.toml": '[[index]]\nurl = "http://d/"\ndefault = true\n', UV: UV_TOML},
            ["http://d/"], id="a named uv.toml stands for the others",
        ),
        pytest.param({"UV_NO_CONFIG": "1"}, {UV: UV_TOML}, [DEFAULT], id="no uv files wanted"),
        pytest.param(
            {}, {"etc/uv/uv.toml": '[[index]]\nurl = "http://e/"\nexplicit = true\n'},
            [DEFAULT], id="an explicit uv index is for others",
        ),
        pytest.param(
            {}, {"etc/uv/uv.toml": '[pip]\nextra-index-url = ["http://e/"]\n'},
            ["http://e/", DEFAULT], id="system uv.toml, pip table",
        ),
    ],
)  # fmt: skip
def test_the_index_is_the_one_that_pip_and_uv_would_use(env, files, expected, monkeypatch, tmp_path):
    write(tmp_path, files)
    for name, value in env.items():
        monkeypatch.setenv(name, value.format(root=tmp_path))
    assert [index.url for index in indexes()] == expected


def test_find_links_and_certificates_come_from_both(monkeypatch, tmp_path):
    write(tmp_path, {USER: pip(find_links="/a /b", cert="/c.pem"), UV: 'find-links = ["links"]\n'})
    monkeypatch.setenv("UV_FIND_LINKS", "/u, /v")
    found = configured()
    assert found.find_links == ("/u", "/v", "/a", "/b", str(tmp_path / "home/.config/uv/links"))
    assert found.cert == "/c.pem"
    monkeypatch.setenv("PIP_FIND_LINKS", "/e")
    monkeypatch.setenv("PIP_CERT", "/d.pem")
    assert configured().find_links[2] == "/e"
    assert configured().cert == "/d.pem"


@pytest.mark.parametrize(
    ("name", "text"), [(USER, "no section\nurl=http://me:secret@h/\n"), (UV, "index-url = secret")]
)
def test_a_configuration_file_that_cannot_be_parsed_is_named_without_its_text(name, text, tmp_path):
    write(tmp_path, {name: text})
    with pytest.raises(PatchError, match="BP005") as caught:
        indexes()
    assert str(tmp_path / name) in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("json", [False, True])
def test_a_wheel_for_x86_64_with_the_highest_build_is_taken(json, server, monkeypatch):
    server.json = json
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    for name in (
        "vllm-0.23.0-1-cp38-abi3-manylinux_2_28_x86_64.whl",
        "vllm-0.23.0-10-cp38-abi3-manylinux_2_28_x86_64.whl",
        "vllm-0.23.0-2-cp38-abi3-manylinux_2_28_x86_64.whl",
        "vllm-0.23.0-11-cp38-abi3-manylinux_2_28_aarch64.whl",
        "vllm-0.23.0-py3-none-any.whl",
        "vllm-0.23.0.post1-cp38-abi3-manylinux_2_28_x86_64.whl",
        "vllm-0.23.0+cpu-cp38-abi3-manylinux_2_28_x86_64.whl",
        "vllm-0.23.0.tar.gz",
        "nonsense.whl",
    ):
        server.files[name] = b""
    assert find_wheel("vLLM", "0.23").filename == "vllm-0.23.0-10-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert find_wheel("vllm", "0.23.0+cpu").filename.startswith("vllm-0.23.0+cpu")


def test_what_the_page_knows_of_a_file_is_kept(server, monkeypatch):
    server.json = True
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    name = WHEEL.format("1.0")
    server.files[name] = b""
    server.hints[name] = {"size": 5, "hashes": {"sha256": "ab"}, "yanked": "broken"}
    found = find_wheel("vllm", "1.0")
    assert (found.size, found.sha256, found.path) == (5, "ab", None)


def test_a_name_with_a_slash_is_no_candidate(server, monkeypatch):
    server.json = True
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    server.files["x"] = b""
    server.hints["x"] = {"url": "/files/vllm-1.0-1%2F..%2Fx-py3-none-any.whl"}
    with pytest.raises(PatchError, match="BP502"):
        find_wheel("vllm", "1.0")


def test_many_versions_from_many_threads_cost_one_page(server, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    versions = [f"0.{minor}.0" for minor in range(18)]
    server.files.update({WHEEL.format(version): b"" for version in versions})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda version: find_wheel("vllm", version), versions))
    assert [one.version for one in found] == versions
    assert server.asked("/simple/vllm/") == 1


def test_an_index_in_a_folder_is_read(monkeypatch, tmp_path):
    name = WHEEL.format("1.0")
    write(tmp_path, {"i/vllm/index.html": f'<a href="../../f/{name}#sha256=ab">x</a>', f"f/{name}": ""})
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "i").as_uri())
    found = find_wheel("vllm", "1.0")
    assert (found.path, found.sha256) == (tmp_path / "f" / name, "ab")
    with pytest.raises(PatchError, match="BP502"):
        find_wheel("other", "1.0")


@pytest.mark.parametrize("place", ["folder", "page", "file", "served page"])
def test_find_links_are_read(place, server, monkeypatch, tmp_path):
    name = WHEEL.format("1.0")
    server.files[name] = b""
    another = name.replace("vllm", "zllm")
    write(tmp_path, {f"links/{name}": "", f"links/{another}": ""})
    write(tmp_path, {"page.html": f'<a href="links/{name}">w</a><a href="links/{another}">w</a>'})
    links = {
        "folder": str(tmp_path / "links"),
        "page": str(tmp_path / "page.html"),
        "file": (tmp_path / "links" / name).as_uri(),
        "served page": server.url() + "vllm/",
    }
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    monkeypatch.setenv("PIP_FIND_LINKS", links[place])
    assert find_wheel("vllm", "1.0").filename == name


def test_credentials_of_a_page_of_links_are_never_shown(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    monkeypatch.setenv("PIP_FIND_LINKS", closed_port().replace("//", "//me:topsecret@"))
    with pytest.raises(PatchError, match="BP501") as caught:
        find_wheel("vllm", "1.0")
    assert "topsecret" not in str(caught.value) + repr(configured())


def test_a_busy_server_is_asked_again(server, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    server.files[WHEEL.format("1.0")] = b""
    server.busy = 2
    assert find_wheel("vllm", "1.0").version == "1.0"
    assert server.asked("/simple/vllm/") == 3


@pytest.mark.parametrize("way", ["url", "netrc", "uv"])
def test_credentials_are_used_wherever_they_are_configured(way, server, monkeypatch, tmp_path):
    server.login = "me:p@ss/w"
    server.files[WHEEL.format("1.0")] = b""
    monkeypatch.setenv("PIP_INDEX_URL", server.url("me:p%40ss%2Fw" if way == "url" else ""))
    if way == "netrc":
        netrc = tmp_path / "home" / ".netrc"
        netrc.write_text("machine 127.0.0.1 login me password p@ss/w\n")
        netrc.chmod(0o600)
    if way == "uv":
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"my-index={server.url()}")
        monkeypatch.setenv("UV_INDEX_MY_INDEX_USERNAME", "me")
        monkeypatch.setenv("UV_INDEX_MY_INDEX_PASSWORD", "p@ss/w")
    assert find_wheel("vllm", "1.0").version == "1.0"


def test_the_keyring_is_asked_when_the_index_wants_credentials(server, monkeypatch):
    class Keyring:
        username, password = "me", "ringed"

        def get_credential(self, service: str, user: str | None) -> Keyring | None:
            return self if service.startswith("127.0.0.1") else None

    monkeypatch.setitem(__import__("sys").modules, "keyring", Keyring())
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    server.login = "me:ringed"
    server.files[WHEEL.format("1.0")] = b""
    assert find_wheel("vllm", "1.0").version == "1.0"


def test_credentials_go_to_no_other_host(server, monkeypatch):
    with PackageIndex() as other:
        other.login = "me:secret"
        monkeypatch.setenv("PIP_INDEX_URL", server.url("me:secret"))
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", other.url())
        with pytest.raises(PatchError, match="HTTP 401"):
            find_wheel("vllm", "1.0")


def test_wrong_credentials_are_could_not_check_and_are_never_shown(server, monkeypatch):
    server.login = "me:right"
    monkeypatch.setenv("PIP_INDEX_URL", server.url("me:topsecret"))
    with pytest.raises(PatchError, match="BP501") as caught:
        find_wheel("vllm", "1.0")
    assert caught.value.outcome is Outcome.UNKNOWN
    assert "HTTP 401" in str(caught.value)
    assert server.url() in str(caught.value)
    assert "topsecret" not in str(caught.value) + repr(configured())


def test_an_unreachable_index_is_could_not_check(monkeypatch):
    url = closed_port()
    monkeypatch.setenv("PIP_INDEX_URL", url.replace("//", "//me:topsecret@"))
    with pytest.raises(PatchError, match="BP501") as caught:
        find_wheel("vllm", "1.0")
    assert caught.value.outcome is Outcome.UNKNOWN
    assert url in str(caught.value)
    assert "refused" in str(caught.value)
    assert "PIP_INDEX_URL" in caught.value.failures[0].next
    assert "topsecret" not in str(caught.value)


def test_a_name_that_does_not_resolve_is_could_not_check(monkeypatch):
    def no_address(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    with pytest.raises(PatchError, match="BP501") as caught:
        find_wheel("vllm", "1.0")
    assert "Name or service not known" in str(caught.value)
    assert "object at" not in str(caught.value)


def test_an_answer_that_is_no_package_page_is_could_not_check(server, monkeypatch):
    server.files["vllm-1.0.whl"] = b""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", server.url().replace("simple/", "files/nothing"))
    with pytest.raises(PatchError, match="BP501"):
        find_wheel("vllm", "1.0")


def test_one_unreachable_index_does_no_harm_if_another_has_the_version(server, monkeypatch):
    server.files[WHEEL.format("1.0")] = b""
    monkeypatch.setenv("PIP_INDEX_URL", closed_port())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", server.url())
    assert find_wheel("vllm", "1.0").version == "1.0"
    with pytest.raises(PatchError, match="BP501"):
        find_wheel("vllm", "2.0")


def test_a_local_index_that_is_gone_is_could_not_check(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "gone").as_uri())
    with pytest.raises(PatchError, match="BP501"):
        find_wheel("vllm", "1.0")


def test_a_missing_version_names_its_neighbours(server, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", server.url("me:topsecret"))
    for version in ("0.1.0", "0.9.0", "0.10.0", "0.11.0", "0.13.0", "0.20.0"):
        server.files[WHEEL.format(version)] = b""
    with pytest.raises(PatchError, match="BP502") as caught:
        find_wheel("vllm", "0.12.0")
    fields = dict(caught.value.failures[0].fields)
    assert fields["nearest"] == "0.9.0, 0.10.0, 0.11.0, 0.13.0, 0.20.0"
    assert fields["newest"] == "0.11.0, 0.13.0, 0.20.0"
    assert fields["asked"] == server.url()
    assert "topsecret" not in str(caught.value)


def test_a_version_with_only_a_source_archive_says_so(server, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    server.files["vllm-1.0.tar.gz"] = b""
    with pytest.raises(PatchError, match=r"BP502.*only a source archive"):
        find_wheel("vllm", "1.0")


def test_an_unknown_distribution_says_so(server, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    with pytest.raises(PatchError, match=r"BP502.*no distribution 'vlm'"):
        find_wheel("vlm", "1.0")


def test_text_that_is_no_version_is_wrong_usage(monkeypatch):
    with pytest.raises(PatchError, match="BP004") as caught:
        find_wheel("vllm", "newest")
    assert caught.value.outcome is Outcome.USAGE


def test_a_long_wait_that_a_server_asks_for_is_cut_short():
    answer = SimpleNamespace(headers={"Retry-After": "3600"})
    assert web._retries().get_retry_after(answer) == web.LONGEST_WAIT


def test_a_missing_package_names_the_extra():
    with pytest.raises(PatchError, match="BP513") as caught:
        require("no_such_module_here")
    assert caught.value.failures[0].next == command_for("cli")
