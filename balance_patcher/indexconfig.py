"""Where packages come from on this machine: what pip and uv are configured with.

A command that checks a pinned vLLM must ask the same package index as the install would, or it
passes here and fails behind a company mirror. So nothing is configured twice: the environment and
the configuration files of pip and uv are read, at the places and in the precedence that each
documents. Where both say something, the environment goes before files, and in each of the two
pip and uv are asked in the order that :func:`configured` shows.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from .errors import PatchError, refuse
from .extras import require

#: The system's configuration folder.
ETC = Path("/etc")

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)=(?P<url>.+)", re.DOTALL)
_USERINFO = re.compile(r"//[^/\s@]*@")


@dataclass(frozen=True)
class Index:
    """One package index.

    Attributes:
        url: Its address without credentials: ``https:``, ``http:`` or ``file:``.
        username: What to log in with, if it is configured.
        password: Never shown, not even in a ``repr``.
    """

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Configuration:
    """All places to look in, in order.

    Attributes:
        indexes: Package indexes; the first that has the version is taken.
        find_links: Folders, files and pages of plain links; looked at before the indexes.
        cert: A bundle of certificate authorities, or ``None`` for the default.
        proxy: A proxy that pip is told to use; otherwise the usual variables count.
    """

    indexes: tuple[Index, ...]
    find_links: tuple[str, ...] = field(default=(), repr=False)
    cert: str | None = None
    proxy: str | None = field(default=None, repr=False)


def redact(text: str) -> str:
    """The text with the credentials of every address in it struck out."""
    return _USERINFO.sub("//***@", text)


def configured() -> Configuration:
    """What pip and uv would use here and now.

    Raises:
        PatchError: BP005, if a configuration file cannot be parsed; BP513, if the default index is
            needed and the ``cli`` extra is not installed.
    """
    pip, uv = _Pip(), _Uv()
    extra = [*uv.env("UV_INDEX"), *uv.env("UV_EXTRA_INDEX_URL"), *uv.extra]
    default = [
        *uv.env("UV_DEFAULT_INDEX"),
        *uv.env("UV_INDEX_URL"),
        *map(_index, pip.values("index-url")),
        *uv.default,
    ]
    if pip.flag("no-index") or _true(os.environ.get("UV_NO_INDEX")):
        indexes: list[Index] = []
    else:
        if not default:
            default = [Index(require("pypi_simple").PYPI_SIMPLE_ENDPOINT)]
        indexes = [*extra, default[0], *map(_index, pip.values("extra-index-url"))]
    links = [*os.environ.get("UV_FIND_LINKS", "").split(","), *pip.values("find-links"), *uv.links]
    cert = next(iter(pip.values("cert")), None)
    if cert is None and not os.environ.get("REQUESTS_CA_BUNDLE"):
        cert = os.environ.get("SSL_CERT_FILE") or None
    return Configuration(
        indexes=tuple(dict.fromkeys(indexes)),
        find_links=tuple(dict.fromkeys(link.strip() for link in links if link.strip())),
        cert=cert,
        proxy=next(iter(pip.values("proxy")), None),
    )


def indexes() -> list[Index]:
    """The package indexes in use, the most preferred first."""
    return list(configured().indexes)


class _Pip:
    """pip's settings: one value a key, from the environment or else from the files."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], str] = {}
        for path in self._paths():
            parser = configparser.RawConfigParser()
            try:
                parser.read(path, encoding="utf-8")
            except (configparser.Error, UnicodeDecodeError) as error:
                raise _bad_file(path, error) from error
            for section in parser.sections():
                for key, value in parser.items(section):
                    # pip accepts both spellings: index_url and index-url
                    self._files[section, key.replace("_", "-").removeprefix("--")] = value

    @staticmethod
    def _paths() -> Iterator[Path]:
        """pip's files, the least important first: each overrides those before it."""
        named = os.environ.get("PIP_CONFIG_FILE")
        if named == os.devnull:
            return
        if named:
            yield Path(named)
        xdg = os.environ.get("XDG_CONFIG_DIRS") or str(ETC / "xdg")
        for folder in xdg.split(os.pathsep):
            yield Path(folder, "pip", "pip.conf")
        yield ETC / "pip.conf"
        # pip leaves the user's files out when another one is named
        if not (named and Path(named).exists()):
            yield Path.home() / ".pip" / "pip.conf"
            yield _config_home() / "pip" / "pip.conf"
        yield Path(os.environ.get("VIRTUAL_ENV") or sys.prefix, "pip.conf")

    def values(self, key: str) -> list[str]:
        """The words of one setting; an empty setting counts as none, as in pip."""
        texts = [os.environ.get("PIP_" + key.upper().replace("-", "_"))]
        texts += [self._files.get((section, key)) for section in ("download", "install", "global")]
        return next((text.split() for text in texts if text and text.strip()), [])

    def flag(self, key: str) -> bool:
        return any(_true(word) for word in self.values(key))


class _Uv:
    """uv's settings from its files; lists of a more important file come first, as in uv."""

    def __init__(self) -> None:
        self.default: list[Index] = []
        self.extra: list[Index] = []
        self.links: list[str] = []
        for path in self._paths():
            tables = self._load(path)
            for table in tables:
                self._take(table, path.parent)

    @staticmethod
    def _paths() -> Iterator[Path]:
        if _true(os.environ.get("UV_NO_CONFIG")):
            return
        named = os.environ.get("UV_CONFIG_FILE")
        if named:
            yield Path(named)
            return
        yield _config_home() / "uv" / "uv.toml"
        folders = (os.environ.get("XDG_CONFIG_DIRS") or str(ETC / "xdg")).split(os.pathsep)
        system = [Path(folder, "uv", "uv.toml") for folder in folders] + [ETC / "uv" / "uv.toml"]
        # of several system files uv reads the first only
        yield from [path for path in system if path.is_file()][:1]

    @staticmethod
    def _load(path: Path) -> list[dict[str, Any]]:
        try:
            text = path.read_text("utf-8")
        except OSError:
            return []
        except UnicodeDecodeError as error:
            raise _bad_file(path, error) from error
        toml = require("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            data = toml.loads(text)
        except toml.TOMLDecodeError as error:
            raise _bad_file(path, error) from error
        return [table for table in (data, data.get("pip")) if isinstance(table, dict)]

    def _take(self, table: dict[str, Any], folder: Path) -> None:
        for entry in _list(table.get("index"), dict):
            url = entry.get("url")
            # an explicit index serves only packages that a project pins to it
            if isinstance(url, str) and not entry.get("explicit"):
                index = _index(url, str(entry.get("name") or ""), folder)
                (self.default if entry.get("default") is True else self.extra).append(index)
        self.extra += [_index(url, "", folder) for url in _list(table.get("extra-index-url"), str)]
        if isinstance(table.get("index-url"), str):
            self.default.append(_index(table["index-url"], "", folder))
        for link in _list(table.get("find-links"), str):
            self.links.append(link if "://" in link else str(folder / Path(link).expanduser()))

    @staticmethod
    def env(variable: str) -> list[Index]:
        """The indexes that one of uv's variables lists, as ``URL`` or ``NAME=URL``."""
        found = []
        for word in os.environ.get(variable, "").split():
            named = _NAMED.fullmatch(word)
            found.append(_index(named["url"], named["name"]) if named else _index(word))
        return found


def _index(text: str, name: str = "", folder: Path | None = None) -> Index:
    """The index that a person wrote, its credentials taken out of the address."""
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text):
        path = Path(folder or Path(), Path(text).expanduser())
        text = path.absolute().as_uri()
    parts = urlsplit(text)
    username, password = parts.username, parts.password
    if name:
        key = "UV_INDEX_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()
        username = os.environ.get(key + "_USERNAME") or username
        password = os.environ.get(key + "_PASSWORD") or password
    host = parts.netloc.rpartition("@")[2]
    return Index(
        urlunsplit((parts.scheme, host, parts.path, parts.query, "")),
        unquote(username) if username else None,
        unquote(password) if password else None,
    )


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _list(value: object, kind: type) -> list[Any]:
    return [item for item in value if isinstance(item, kind)] if isinstance(value, list) else []


def _true(text: str | None) -> bool:
    return (text or "").strip().lower() in {"1", "true", "t", "yes", "y", "on"}


def _bad_file(path: Path, error: Exception) -> PatchError:
    # the parser's message may quote the line, and with it a password
    where = re.search(r"line:?\s+(\d+)", str(error))
    line = int(where[1]) if where else None
    return refuse(
        "BP005",
        f"{path} cannot be parsed ({type(error).__name__}).",
        next=f"mend {path}" + (f" near line {line}" if line else ""),
        file=str(path),
        line=line,
    )
