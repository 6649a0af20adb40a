"""The page as text: whole, escaped, and nothing that needs the network. What a browser makes of it: test_looks."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from balance_patcher.errors import Failure
from tests.drift.examples import EXAMPLE, GREEN
from tools.drift.changed import Snippet
from tools.drift.model import Report
from tools.drift.page import as_html
from tools.drift.sides import beside, of_patch

VOID = {"meta", "link", "br", "hr", "img", "input", "col", "wbr"}
PAYLOAD = "</script></style><img src=x onerror=alert(1)><b>'\"&{{ 7*7 }}`"


class Page(HTMLParser):
    """A strict look at a page: every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(as_html(EXAMPLE))


def test_it_is_well_formed_and_each_id_is_there_once(page: Page) -> None:
    assert page.wrong == []
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []


def test_every_cell_leads_to_an_explanation_of_its_own(page: Page) -> None:
    articles = {attributes["id"] for attributes in page.all("article")}
    cells = [a["href"] for a in page.all("a") if a.get("aria-label")]
    assert len(cells) == len(set(cells)) == len(articles)
    assert {href.removeprefix("#") for href in cells if href} == articles
    deltas = sum(len(feature.deltas) + 1 for feature in EXAMPLE.features)
    assert len(cells) == (deltas + len(EXAMPLE.copies)) * len(EXAMPLE.shown)


def test_every_address_within_the_page_is_there(page: Page) -> None:
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    inner = {a["href"] for a in page.all("a") if (a["href"] or "").startswith("#")}
    inner |= {use["href"] for use in page.all("use")}
    named = [value for _, a in page.tags for value in [a.get("aria-labelledby")] if value]
    assert {href.removeprefix("#") for href in inner if href} | set(named) <= ids


def test_nothing_in_it_is_loaded(page: Page) -> None:
    assert not [tag for tag, a in page.tags if tag in {"link", "img", "iframe", "object", "embed", "base", "form"}]
    assert not [a for _, a in page.tags if {"src", "srcset", "style", "action"} & a.keys()]
    assert not [name for _, a in page.tags for name in a if name.startswith("on")]
    text = as_html(EXAMPLE)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_its_policy_allows_its_own_script_and_style_and_nothing_else() -> None:
    text = as_html(EXAMPLE)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy or f"{tag}-src 'sha256-{digest}'" in policy


def poisoned(value: Any, name: str = "") -> Any:
    """The report with something hostile in every text that is not looked up by it."""
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: poisoned(getattr(value, field.name), field.name) for field in fields(value)}
        return replace(value, **changed)
    if isinstance(value, tuple):
        return tuple(poisoned(item, name) for item in value)
    kept = {"status", "kind", "was", "now", "ref", "feature", "delta", "code", "mode", "parent_status", "what"}
    if isinstance(value, str) and name not in kept and not (name == "name" and value in NAMES):
        return f"{value}{PAYLOAD}"
    return value


NAMES = {
    *(ref.name for ref in EXAMPLE.refs), *(feature.name for feature in EXAMPLE.features),
    *(delta.name for feature in EXAMPLE.features for delta in feature.deltas),
}  # fmt: skip


def with_plain_places(report: Report) -> Report:
    """Places are looked up by name: they are left as they are, and told apart from what is only shown."""
    changes = tuple(
        replace(one, before=plain.before, after=plain.after)
        for one, plain in zip(report.transitions, EXAMPLE.transitions, strict=True)
    )
    callees = tuple(
        replace(one, before=plain.before, after=plain.after)
        for one, plain in zip(report.callees, EXAMPLE.callees, strict=True)
    )
    return replace(report, transitions=changes, callees=callees)


def test_every_text_of_a_report_is_escaped(page: Page) -> None:
    report = with_plain_places(poisoned(EXAMPLE))
    text = as_html(report)
    hostile = Page(text)
    assert hostile.wrong == []
    assert Counter(tag for tag, _ in hostile.tags)["img"] == 0
    for tag in ("script", "style", "b"):
        assert Counter(name for name, _ in hostile.tags)[tag] == Counter(name for name, _ in page.tags)[tag]
    assert not [name for _, a in hostile.tags for name in a if name.startswith("on")]
    assert "{{ 7*7 }}" in "".join(hostile.words)
    assert len([word for word in hostile.words if "onerror=alert(1)" in word]) > 80


@pytest.mark.parametrize("name", ["<b>'\"&", "a b", "ü/ñ", "--", "…"])
def test_a_ref_of_any_name_has_its_cells(name: str) -> None:
    refs = (replace(GREEN.refs[0], name=name), GREEN.refs[1])
    cells = tuple(replace(cell, ref=name) if cell.ref == "1.0.0" else cell for cell in GREEN.cells)
    found = Page(as_html(replace(GREEN, refs=refs, cells=cells)))
    assert found.wrong == []
    assert {a["id"] for a in found.all("article")} == {
        (a["href"] or "").removeprefix("#") for a in found.all("a") if a.get("aria-label")
    }


def test_a_report_of_nothing_says_so() -> None:
    text = as_html(Report("git", "/x", (), (), ()))
    assert "Nothing was looked at." in text
    assert Page(text).wrong == []


def test_what_could_not_be_checked_stands_in_the_verdict() -> None:
    failure = Failure("BP506", "no ref <nightly>", "fetch it")
    assert "BP506 git ref not found: no ref &lt;nightly&gt;" in as_html(replace(GREEN, failures=(failure,)))


def test_the_mood_is_that_of_the_outcome() -> None:
    assert '<header class="top bad">' in as_html(EXAMPLE)
    assert '<header class="top good">' in as_html(GREEN)
    assert '<header class="top dark">' in as_html(replace(GREEN, cells=()))


# -- side by side ----------------------------------------------------------------------------


def kinds(old: tuple[str, ...], new: tuple[str, ...]) -> list[str]:
    return [pair.kind for pair in beside(Snippet("f", 1, old), Snippet("f", 1, new))]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (("a", "b"), ("a", "b"), ["equal", "equal"]),
        (("a", "same line here", "c"), ("a", "same line there", "c"), ["equal", "changed", "equal"]),
        (("a", "gone"), ("a",), ["equal", "removed"]),
        (("a",), ("a", "came"), ["equal", "added"]),
        (("zzzz",), ("qqqq",), ["removed", "added"]),
        (("value = one",), ("xxxxx", "value = ones"), ["added", "changed"]),
    ],
)
def test_lines_that_belong_together_share_a_row(old: Any, new: Any, expected: list[str]) -> None:
    assert kinds(old, new) == expected


def test_in_a_changed_line_only_what_changed_is_marked() -> None:
    (pair,) = beside(Snippet("f", 7, ("if count == self.limit:",)), Snippet("f", 9, ("if count == self.bound:",)))
    assert pair.old is not None
    assert pair.new is not None
    assert [text for text, changed in pair.old.pieces if changed] == ["limit"]
    assert [text for text, changed in pair.new.pieces if changed] == ["bound"]
    assert (pair.old.number, pair.new.number) == (7, 9)


def test_the_indentation_that_all_lines_share_is_left_out_and_never_marked() -> None:
    old, new = Snippet("f", 1, ("    if a:", "", "        b")), Snippet("f", 1, ("    if a:", "", "            b"))
    pairs = beside(old, new)
    assert pairs[0].new is not None
    assert pairs[0].new.pieces == (("if a:", False),)
    assert not [piece for pair in pairs for side in (pair.old, pair.new) if side for piece, told in side.pieces if told]
    (alone,) = beside(Snippet("f", 5, ("    x",), (5,)), None)
    assert (alone.kind, alone.old) == ("equal", alone.new)


def test_a_patch_has_its_lines_and_its_gaps() -> None:
    patch = "--- a\n+++ b\n@@ -3,2 +3,2 @@\n same\n-one old line\n+one new line\n@@ -20,1 +20,2 @@\n x\n+y\n"
    pairs = of_patch(patch)
    assert [pair.kind for pair in pairs] == ["equal", "changed", "gap", "equal", "added"]
    assert [pair.new.number for pair in pairs if pair.new is not None] == [3, 4, 20, 21]
    assert [pair.old.number for pair in pairs if pair.old is not None] == [3, 4, 20]
