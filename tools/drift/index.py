"""What was found before, kept in a folder that git ignores, so that a run goes on where the last one stopped.

Nothing in it speaks of a ref: an answer belongs to the texts that were read for it, and to the declarations and the
code that gave it. It grows by whole lines, so a run that is interrupted loses the line that it was writing. A line that
is not what was written, by the digest before it, is as if it were not there: no report is green by a damaged file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from balance_patcher.digests import declaration_digest
from balance_patcher.feature import Feature

_ROOT = Path(__file__).resolve().parents[2]
FOLDER = _ROOT / ".cache" / "drift"

#: The modules beside this one that an answer depends on; a report is made of answers, and is not kept.
ANSWERING = ("looks", "callees", "lookup", "types_of", "shapes", "columns", "objects", "matrix", "decoding")
_KEPT = 3  # files of other states of the code


class Index:
    """Answers by what they are about and by what was read for them.

    Args:
        folder: Where it is kept; ``None`` keeps it in memory only.

    Attributes:
        trouble: Why nothing can be kept there, once that has shown. It is no failure of a report.
    """

    def __init__(self, folder: Path | None = FOLDER) -> None:
        self._known: dict[str, Any] = {}
        self._paths: dict[str, list[tuple[str, ...]]] = {}
        self._file: IO[str] | None = None
        self.trouble = ""
        self.path = folder / f"{code_digest()}.jsonl" if folder is not None else None
        if self.path is not None:
            self._load(self.path)

    def find(self, about: str, blob: Callable[[str], str | None]) -> Any | None:
        """What is known of a thing at a place that has these texts; ``None`` if nothing is.

        Args:
            about: The thing; it names everything that an answer depends on besides the texts.
            blob: The id of the text at a path.
        """
        for paths in self._paths.get(about, ()):
            found = self._known.get(_key(about, {path: blob(path) for path in paths}))
            if found is not None:
                return found
        return None

    def keep(self, about: str, reads: Mapping[str, str | None], answer: Any) -> None:
        """Remember an answer, and write it down at once."""
        self._put(about, dict(reads), answer)
        if self.path is None or self.trouble:
            return
        text = json.dumps([about, dict(reads), answer], ensure_ascii=False)
        try:
            self._file = self._file or self._open(self.path)
            self._file.write(f"{digest([text])} {text}\n")
            self._file.flush()
        except OSError as error:
            self.trouble = f"{self.path.parent}: {error.strerror or error}"
            self.close()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was not written was told
                self._file.close()
            self._file = None

    def _put(self, about: str, reads: dict[str, str | None], answer: Any) -> None:
        paths = tuple(sorted(reads))
        known = self._paths.setdefault(about, [])
        if paths not in known:
            known.append(paths)
        self._known[_key(about, reads)] = answer

    def _load(self, path: Path) -> None:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    said, _, text = line.rstrip("\n").partition(" ")
                    if said == digest([text]):  # else a run was interrupted while it wrote this, or it was damaged
                        self._put(*json.loads(text))
        except OSError:
            return

    @staticmethod
    def _open(path: Path) -> IO[str]:
        """The file to go on in.

        Raises:
            OSError: If nothing can be written there.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        old = sorted(path.parent.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
        for file in [one for one in old if one != path][:-_KEPT]:
            file.unlink(missing_ok=True)
        torn = path.is_file() and path.read_bytes()[-1:] not in {b"", b"\n"}
        opened = path.open("a", encoding="utf-8")
        if torn:
            opened.write("\n")
        return opened


def maker_digest() -> str:
    """Over every module here: a proposal is made anew when one of them changes."""
    folder = Path(__file__).parent
    return digest(file.read_text("utf-8") for file in sorted(folder.glob("*.py")))


def digest(texts: Iterable[str]) -> str:
    """Over some texts, in their order."""
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _key(about: str, reads: Mapping[str, str | None]) -> str:
    rows = [about, *(f"{path} {reads[path]}" for path in sorted(reads))]
    return hashlib.sha256("\n".join(rows).encode("utf-8", "surrogatepass")).hexdigest()


def code_digest() -> str:
    """Over this Python and every module that an answer may depend on."""
    digest = hashlib.sha256(f"{sys.version} {sys.flags.optimize}".encode())
    files = [file for folder in ("balance_patcher", "deltas") for file in sorted((_ROOT / folder).rglob("*.py"))]
    files += [Path(__file__).with_name(f"{name}.py") for name in ANSWERING]
    for file in files:
        digest.update(file.relative_to(_ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def about_feature(feature: Feature, file: Path | None) -> str:
    """What a look at a feature depends on besides the texts: its declarations, and the file that makes its class."""
    source = file.read_bytes() if file is not None and file.is_file() else b""
    return f"feature {feature.name} {declaration_digest(feature.deltas)} {hashlib.sha256(source).hexdigest()[:16]}"


def about_calls(target: str) -> str:
    return f"calls {target}"
