"""What a real browser makes of the page: it is looked at, clicked, and read with keys, at several sizes and colours.

Needs Chromium: the one on PATH, or the one that ``python -m tools.chromium`` has fetched. Without it these are skipped.
No picture is compared with a stored one, which another font would break: a picture is asked what has to be seen in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from tests.drift.browser import Browser, Picture, chromium
from tests.drift.examples import EXAMPLE, GREEN
from tests.drift.test_page import PAYLOAD, poisoned, with_plain_places
from tools.drift.matrix import DeltaCell
from tools.drift.page import as_html

DESK, PHONE, SMALL = (1280, 900), (390, 844), (320, 640)
BAD = "#gate.stop--2222222222"

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium: `python -m tools.chromium` fetches it"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    assert program is not None
    made = Browser(program, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of pages: the example, with one of each status; nothing wrong; hostile text; many columns."""
    folder = tmp_path_factory.mktemp("pages")
    every = replace(EXAMPLE, cells=tuple(
        replace(cell, deltas=(replace(cell.deltas[0], status="not-applicable"), *cell.deltas[1:]))
        if (cell.feature, cell.ref) == ("retry", "v1.0.0") else cell
        for cell in EXAMPLE.cells
    ))  # fmt: skip
    refs = tuple(replace(GREEN.refs[0], name=f"{number}.0.0") for number in range(40))
    wide = replace(
        GREEN, refs=refs, cells=tuple(replace(cell, ref=ref.name) for ref in refs for cell in GREEN.cells[:2])
    )
    reports = {"example": every, "green": GREEN, "hostile": with_plain_places(poisoned(EXAMPLE)), "wide": wide}
    found = {}
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(as_html(report), encoding="utf-8")
        found[name] = f"file://{folder}/{name}.html"
    return found


@pytest.fixture
def desk(browser: Browser) -> Browser:
    browser.look(*DESK)
    return browser


# -- it is whole by itself -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["example", "green", "hostile", "wide"])
def test_it_asks_for_nothing_and_complains_of_nothing(desk: Browser, pages: dict[str, str], name: str) -> None:
    desk.open(pages[name] + (BAD if name != "wide" else ""))
    time.sleep(0.2)
    desk.run("1")
    asked = [e["params"]["request"]["url"] for e in desk.events if e["method"] == "Network.requestWillBeSent"]
    assert {url.partition("#")[0] for url in asked} == {pages[name]}
    bad = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Page.javascriptDialogOpening")
    assert [event for event in desk.events if event["method"] in bad] == []


def test_hostile_text_is_text(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["hostile"] + BAD)
    assert desk.run("document.querySelectorAll('img, b > b, article script').length") == 0
    shown = desk.run("document.querySelector('article:target .lead').textContent")
    assert PAYLOAD.replace("`", "") in shown.replace("`", "")


def test_without_scripts_it_is_the_same_page(desk: Browser, pages: dict[str, str]) -> None:
    wanted = ("article:target", "article:target .diff", ".grid .cell a", ".row.delta")
    desk.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        desk.send("Page.navigate", url=pages["example"] + BAD)
        end = time.monotonic() + 30
        while not all(_height(desk, selector) > 10 for selector in wanted):
            assert time.monotonic() < end, [(selector, _height(desk, selector)) for selector in wanted]
            time.sleep(0.05)
        assert _height(desk, "article:not(:target)") == 0
        assert _height(desk, ".toggle") == 0
    finally:
        desk.send("Emulation.setScriptExecutionDisabled", value=False)


def _height(browser: Browser, selector: str) -> float:
    """How high an element is on the page; 0 where it is not seen, or the page is just being loaded."""
    try:
        root = browser.send("DOM.getDocument")["root"]["nodeId"]
        node = browser.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        return float(browser.send("DOM.getBoxModel", nodeId=node)["model"]["height"])
    except RuntimeError:
        return 0.0


# -- it can be read --------------------------------------------------------------------------

THEMES = ["light", "dark"]
SCREENS = [pytest.param(size, theme, id=f"{size[0]}-{theme}") for size in (DESK, PHONE, SMALL) for theme in THEMES]

# Each visible text with its size, its contrast to what is behind it, and where it is.
TEXTS = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = (css) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
                         return Array.from(canvas.getImageData(0, 0, 1, 1).data); };
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255;
      return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
      if (c[3] === 255) return c; } return rgb('white'); };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = walk.nextNode(); n; n = walk.nextNode()) {
    const e = n.parentElement;
    if (!n.textContent.trim() || e.closest('.hidden, script, style') || !e.checkVisibility()) continue;
    const range = document.createRange(); range.selectNodeContents(n);
    const box = range.getBoundingClientRect();
    if (!box.width) continue;
    const style = getComputedStyle(e), a = light(rgb(style.color)), b = light(behind(e));
    found.push([n.textContent.trim().slice(0, 40), parseFloat(style.fontSize),
                (Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.className + ' in ' + e.parentElement.className]);
  }
  return found;
})()
"""


@pytest.mark.parametrize(("size", "theme"), SCREENS)
@pytest.mark.parametrize("place", ["", BAD, "#copy--TheirPlanner.plan--v1.1.0"])
def test_it_fits_and_every_word_can_be_read(
    browser: Browser, pages: dict[str, str], size: tuple[int, int], theme: str, place: str
) -> None:
    browser.look(*size, dark=theme == "dark", touch=size is not DESK)
    browser.open(pages["example"] + place)
    assert browser.run("document.documentElement.scrollWidth") <= size[0]
    texts = browser.run(TEXTS)
    assert len(texts) > 60
    assert [found for found in texts if found[1] < 11.5] == []
    assert [found for found in texts if found[2] < 4.5] == []


@pytest.mark.parametrize("theme", THEMES)
def test_the_screenshot_has_the_colours_that_are_asked_for(browser: Browser, pages: dict[str, str], theme: str) -> None:
    browser.look(*DESK, dark=theme == "dark")
    browser.open(pages["example"])
    (corner,) = set(browser.picture(0, 0, 1, 1).pixels())
    assert (sum(corner) < 120) is (theme == "dark")
    tones = {status: _tone(browser, status) for status in ("applied", "absorbed", "failed", "unreadable")}
    red, green, blue = range(3)
    assert tones["applied"][green] == max(tones["applied"])
    assert tones["absorbed"][blue] == max(tones["absorbed"])
    assert tones["failed"][red] == max(tones["failed"])
    assert tones["unreadable"][blue] == min(tones["unreadable"])


def _tone(browser: Browser, status: str) -> tuple[int, int, int]:
    """The most colourful pixel of a status' cell."""
    picture = browser.picture(*browser.box(f".row.feature .cell a.{status}"))
    return max(picture.pixels(), key=lambda pixel: max(pixel) - min(pixel))


@pytest.mark.parametrize("theme", THEMES)
def test_without_colour_each_status_still_has_its_shape(browser: Browser, pages: dict[str, str], theme: str) -> None:
    browser.look(*DESK, dark=theme == "dark")
    browser.send("Emulation.setEmulatedVisionDeficiency", type="achromatopsia")
    try:
        browser.open(pages["example"])
        statuses = ("applied", "absorbed", "not-applicable", "failed", "unreadable")
        shapes = {status: _shape(browser, status) for status in statuses}
    finally:
        browser.send("Emulation.setEmulatedVisionDeficiency", type="none")
    for one, other in combinations(statuses, 2):
        different = sum(a != b for a, b in zip(shapes[one], shapes[other], strict=True))
        assert different > len(shapes[one]) * 0.1, (one, other, different)


def _shape(browser: Browser, status: str) -> list[bool]:
    """Which pixels of a glyph are ink: nearer to the strongest than to what is behind."""
    x, y, width, height = browser.box(f".row.delta .cell a.{status} .glyph")
    picture: Picture = browser.picture(x + width / 2 - 8, y + height / 2 - 8, 16, 16)
    grey = [sum(pixel) / 3 for pixel in picture.pixels()]
    behind = grey[0]
    strongest = max(abs(value - behind) for value in grey)
    assert strongest > 60, status
    return [abs(value - behind) > strongest / 2 for value in grey]


def test_a_finger_finds_what_can_be_touched(browser: Browser, pages: dict[str, str]) -> None:
    browser.look(*PHONE, touch=True)
    browser.open(pages["example"])
    small = browser.run(
        "Array.from(document.querySelectorAll('.cell a, .toggle')).map((e) => [e.className,"
        " e.getBoundingClientRect().width, e.getBoundingClientRect().height]).filter((b) => b[1] < 24 || b[2] < 24)"
    )
    assert small == []


@pytest.mark.parametrize("size", [DESK, PHONE])
def test_of_many_columns_the_newest_is_seen_first(
    browser: Browser, pages: dict[str, str], size: tuple[int, int]
) -> None:
    browser.look(*size, touch=size is PHONE)
    browser.open(pages["wide"])
    assert browser.run("document.documentElement.scrollWidth") <= size[0]
    right = browser.run("document.querySelector('.row.feature .cell:last-child').getBoundingClientRect().right")
    assert 0 < right <= size[0]
    name = browser.run("document.querySelector('.row.feature .name').getBoundingClientRect().left")
    assert 0 <= name < 40


# -- it can be used --------------------------------------------------------------------------


def shown(browser: Browser) -> list[str]:
    """The explanations that are seen."""
    found: list[str] = browser.run(
        "Array.from(document.querySelectorAll('article')).filter((e) => e.checkVisibility()).map((e) => e.id)"
    )
    return found


def focused(browser: Browser) -> Any:
    return browser.run("(document.activeElement.getAttribute('href') || document.activeElement.id)")


def test_a_click_on_a_cell_opens_its_explanation_and_no_other(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["example"])
    assert shown(desk) == []
    for target in (BAD, "#gate.guard--v1.1.0"):
        x, y, width, height = desk.box(f".cell a[href={json.dumps(target)}]")
        desk.click(x + width / 2, y + height / 2)
        assert shown(desk) == [target.removeprefix("#")]
        assert desk.run("document.querySelector('[aria-current]').getAttribute('href')") == target
    desk.run("history.back()")
    time.sleep(0.3)
    assert shown(desk) == [BAD.removeprefix("#")]


def test_both_sides_stand_beside_each_other_on_a_desk_and_below_on_a_phone(
    browser: Browser, pages: dict[str, str]
) -> None:
    where = (
        "['old', 'new'].map((side) => { const b = document.querySelector('article:target tr.changed .line.' + side)"
        ".getBoundingClientRect(); return [Math.round(b.x), Math.round(b.y)]; })"
    )
    browser.look(*DESK)
    browser.open(pages["example"] + BAD)
    (old_x, old_y), (new_x, new_y) = browser.run(where)
    assert old_y == new_y
    assert new_x > old_x + 300
    browser.look(*PHONE, touch=True)
    browser.open(pages["example"] + BAD)
    (old_x, old_y), (new_x, new_y) = browser.run(where)
    assert old_x == new_x
    assert new_y > old_y
    same = "document.querySelectorAll('article:target tr.equal .line.old')[0].checkVisibility()"
    assert browser.run(same) is False
    line = "document.querySelector('article:target tr.changed .line.new').getBoundingClientRect().width"
    assert browser.run(line) > 200


def test_keys_are_enough(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["example"])
    start = _tab_to_grid(desk)
    assert start == "#gate--2222222222"  # the first that needs an edit
    desk.press("ArrowDown", 40)
    assert focused(desk) == BAD
    desk.press("ArrowRight", 39)
    desk.press("ArrowRight", 39)
    desk.press("ArrowLeft", 37)
    assert focused(desk) == "#gate.stop--v1.1.0"
    desk.press("Home", 36)
    assert focused(desk) == "#gate.stop--v1.0.0"
    desk.press("End", 35)
    desk.press("ArrowRight", 39)
    assert focused(desk) == "#gate.stop--main"
    desk.press("Enter", 13, "\r")
    assert (shown(desk), focused(desk)) == (["gate.stop--main"], "gate.stop--main")
    desk.press("Escape", 27)
    assert (shown(desk), focused(desk)) == ([], "#gate.stop--main")
    desk.press("ArrowUp", 38)
    desk.press(" ", 32, " ")
    assert shown(desk) == ["gate--main"]


def _tab_to_grid(browser: Browser) -> str:
    """Tab until a cell has the focus."""
    for _ in range(8):
        browser.press("Tab", 9)
        if browser.run("document.activeElement.closest('.cell') !== null"):
            return str(focused(browser))
    raise AssertionError("the Tab key does not come to the matrix")


def test_the_matrix_is_one_stop_of_the_tab_key(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["example"])
    stops = desk.run(
        "Array.from(document.querySelectorAll('.grid'))"
        ".map((grid) => grid.querySelectorAll('.cell a[tabindex=\"0\"]').length)"
    )
    assert stops == [1, 1]


def test_the_focus_can_be_seen(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["example"])
    _tab_to_grid(desk)
    style = "getComputedStyle(document.activeElement)"
    assert desk.run(f"{style}.outlineStyle") == "solid"
    assert desk.run(f"parseFloat({style}.outlineWidth)") >= 2


def test_a_feature_in_which_nothing_happened_is_folded_and_opens(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["green"])
    rows = "Array.from(document.querySelectorAll('.row.delta')).filter((e) => e.checkVisibility()).length"
    assert desk.run(rows) == 0
    x, y, width, height = desk.box(".toggle")
    desk.click(x + width / 2, y + height / 2)
    assert desk.run(rows) == 2
    assert desk.run("document.querySelector('.toggle').getAttribute('aria-expanded')") == "true"
    desk.open(pages["green"] + "#retry.wait--1.0.0")
    assert desk.run(rows) == 1  # an address of a cell in it unfolds it


def test_a_screen_reader_has_a_table_whose_cells_say_all(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["example"])
    nodes = desk.send("Accessibility.getFullAXTree")["nodes"]
    said = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    roles = [role for role, _ in said]
    assert roles.count("table") == 2
    assert {"columnheader", "rowheader", "cell", "main", "heading"} <= set(roles)
    links = [name for role, name in said if role == "link"]
    assert "gate.stop at 2222222222: failed; changed here: changed; an edit is needed" in links
    assert "TheirPlanner.plan at v1.1.0: a call does not fit, 5 lines differ" in links
    assert all(name.strip() for role, name in said if role in {"link", "button", "heading", "table"})


def test_a_patch_is_copied_as_it_is(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["example"] + BAD)
    proposal = EXAMPLE.transitions[0].proposal
    assert proposal is not None
    assert desk.run("document.querySelector('article:target .patch pre').textContent") == proposal.patch
    desk.run("document.addEventListener('copy', () => { window.taken = String(getSelection()); })")
    x, y, width, height = desk.box("article:target .patch button.copy")
    desk.click(x + width / 2, y + height / 2)
    time.sleep(0.3)
    assert desk.run("document.querySelector('article:target .patch button.copy').textContent") == "Copied"


def test_on_paper_what_changed_is_printed(desk: Browser, pages: dict[str, str]) -> None:
    desk.open(pages["example"])
    desk.send("Emulation.setEmulatedMedia", media="print")
    try:
        told = {change.delta or change.feature for change in EXAMPLE.transitions}
        assert {name.partition("--")[0] for name in shown(desk)} >= told
    finally:
        desk.send("Emulation.setEmulatedMedia", media="")


def test_a_status_that_nobody_foresaw_is_no_empty_cell() -> None:
    cell = replace(GREEN.cells[0], deltas=(DeltaCell("gate.stop", "applied"),))
    text = as_html(replace(GREEN, cells=(cell, *GREEN.cells[1:])))
    assert "gate.guard at 1.0.0: unreadable" in text
