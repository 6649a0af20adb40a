"""The gate where upstream has the seam: through an override of its method; a seam of another shape is refused by name.

The sources are vLLM's own, with the patch of tools/upstream_seam.py in them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.build import compile_plan
from balance_patcher.check import check_lane
from balance_patcher.compose import at_work, compose
from balance_patcher.deltas.balance_seam import NAME, SEAM
from balance_patcher.errors import Outcome
from balance_patcher.plan import make_plan
from balance_patcher.registry import features, find_feature
from balance_patcher.report import LaneReport
from balance_patcher.source import LaneSpec
from tests.conftest import RELEASES
from tests.seams import CALL, MARK, SCHEDULER, lane_of, through_the_seam

Copy = Callable[[str], Path]
each_release = pytest.mark.parametrize("version", RELEASES)
on_two = pytest.mark.parametrize("version", ["0.23.0", "0.33.0"])  # the running requests are compared; counted


@each_release
def test_what_was_bound_in_the_method_runs_in_the_override(version: str, seamed: Copy) -> None:
    minor = int(version.split(".")[1])
    plan = make_plan(lane_of(seamed(version)), find_feature("balance"))
    exports = plan.placement("balance.admission-seam").exports
    cap = "max_num_active_reqs" if minor > 30 else "max_num_running_reqs"
    counted = "(len(self.running) + self.num_waiting_for_streaming_input)" if minor >= 25 else "len(self.running)"
    assert exports == {"_balance_count": counted, "_balance_cap": f"self.{cap}"}
    assert plan.placement("balance.admission-gate").exports == {}
    (override,) = [item for item in compile_plan(plan)[1] if item.target == SEAM]
    assert override.through
    counts = "max(t.item() for t in self.balance_queue)"
    assert f"{counts} {'>=' if minor >= 25 else '=='} self.{cap}  # bp: balance.admission-seam" in override.text
    assert not any("balance_flag" in step.text for steps in plan.steps.values() for step in steps)


# -- a seam of another shape -----------------------------------------------------------------


def checked(folder: Path) -> LaneReport:
    return check_lane(LaneSpec("mutant", f"dir:{folder}"), [find_feature("balance")])[0]


def once(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def comparison(text: str) -> str:
    """What the method returns."""
    (found,) = re.findall(r"^        return (\S+ (?:==|>=) self\.max_num_\w+)$", text, re.MULTILINE)
    return str(found)


def returning(new: str) -> Callable[[str], str]:
    return lambda text: once(text, f"return {comparison(text)}", f"return {new.format(comparison(text))}  {MARK}")


def defined(new: str) -> Callable[[str], str]:
    return lambda text: once(text, f"    def {NAME}(self) -> bool:", new)


def beside(new: str) -> Callable[[str], str]:
    """More in the class, above the method."""
    return defined(textwrap.indent(new, "    ") + f"\n\n    def {NAME}(self) -> bool:")


def first(new: str) -> Callable[[str], str]:
    """More in the method, behind its docstring."""
    docstring = 'earlier.\n        """\n'
    more = textwrap.indent(new.format(MARK), " " * 8) + "\n"
    return lambda text: once(text, docstring, docstring + more)


def asked(new: str) -> Callable[[str], str]:
    """Other lines in the place of the `if` that asks."""

    def edit(text: str) -> str:
        (found,) = re.findall(rf"^( +)if {re.escape(CALL)}:\n +break\n", text, re.MULTILINE)
        lines = textwrap.indent(textwrap.dedent(new).strip("\n"), found)
        return once(text, f"{found}if {CALL}:\n{found}    break\n", lines + "\n")

    return edit


def asked_before_the_loop(text: str) -> str:
    (loop,) = re.findall(rf"^( +while [^\n]*:\n)(?=(?:(?! while )[^\0])*?{re.escape(CALL)})", text, re.MULTILINE)[-1:]
    indent = loop[: len(loop) - len(loop.lstrip())]
    return once(asked("if full: break")(text), loop, f"{indent}full = {CALL}  {MARK}\n{loop}")


def asked_after_the_admission(text: str) -> str:
    text = asked("pass")(text)
    (admits,) = re.findall(r"^ +self\.running\.append\(request\)\n", text, re.MULTILINE)
    indent = admits[: len(admits) - len(admits.lstrip())]
    return once(text, admits, f"{admits}{indent}if {CALL}:\n{indent}    break\n")


INLINE = "if len(self.running) == self.max_num_running_reqs:\n    break"
AT_THE_END = f"\n\nclass Other:\n    def {NAME}(self):\n        return True\n"

SHAPES: dict[str, tuple[Callable[[str], str], str]] = {
    "it takes a parameter": (defined(f"    def {NAME}(self, request=None) -> bool:  {MARK}"), "BP120"),
    "it takes keywords": (defined(f"    def {NAME}(self, **more) -> bool:  {MARK}"), "BP120"),
    "it is asked with an argument": (asked(f"if self.{NAME}(request_queue):  {MARK}\n    break"), "BP101"),
    "it stands in another class": (
        lambda t: defined("    def _other(self) -> bool:")(t) + AT_THE_END, "BP104",
    ),
    "it stands in no class of this module": (defined("    def _should_stop_admitting(self) -> bool:"), "BP104"),
    "it is a property": (defined(f"    @property\n    def {NAME}(self) -> bool:  {MARK}"), "BP107"),
    "it is async": (defined(f"    async def {NAME}(self) -> bool:  {MARK}"), "BP108"),
    "it yields": (returning("(yield {})"), "BP109"),
    "it is defined twice": (beside(f"def {NAME}(self):  {MARK}\n    pass"), "BP106"),
    "it is given another meaning": (
        beside(f"{NAME} = _is_paused = None  {MARK}"), "BP106",
    ),
    "it returns the opposite": (returning("not {}"), "BP101"),
    "it returns a number": (returning("self.max_num_running_reqs - len(self.running)"), "BP101"),
    "it returns more": (returning("{} or self.paused"), "BP101"),
    "it compares otherwise": (lambda t: returning(comparison(t).replace("==", ">").replace(">=", ">"))(t), "BP112"),
    "it compares with another cap": (lambda t: returning(re.sub(r"max_num_\w+", "limit", comparison(t)))(t), "BP101"),
    "it does more": (first("self.asked = True  {0}"), "BP114"),
    "it has a way round": (first("if self.open:  {0}\n    return False"), "BP114"),
    "it is not asked at all": (asked(INLINE), "BP208"),
    "the stop stands in the loop too": (
        asked(f"if {CALL}:\n    break\n{INLINE}"), "BP103",
    ),
    "it is asked twice in the loop": (asked(f"if {CALL}:\n    break\nif {CALL}:  {MARK}\n    break"), "BP102"),
    "it is asked twice, the second time for something else": (
        asked(f"if {CALL}:\n    break\nself.full = {CALL}  {MARK}"), "BP208",
    ),
    "another method asks": (
        beside(f"def has_room(self):\n    return not {CALL}  {MARK}"), "BP208",
    ),
    "another method asks by name": (
        beside(f'def has_room(self):\n    return getattr(self, "{NAME}")()  {MARK}'), "BP208",
    ),
    "the opposite is asked": (asked(f"if not {CALL}:  {MARK}\n    break"), "BP208"),
    "it ends something else": (asked(f"if {CALL}:  {MARK}\n    continue"), "BP208"),
    "it is asked before the loop": (asked_before_the_loop, "BP208"),
    "it is asked after the admission": (asked_after_the_admission, "BP204 BP101"),
}  # fmt: skip


@on_two
@pytest.mark.parametrize("name", SHAPES)
def test_a_seam_of_another_shape_is_refused(name: str, version: str, seamed: Copy) -> None:
    edit, code = SHAPES[name]
    file = seamed(version) / SCHEDULER
    text = edit(file.read_text("utf-8"))
    file.write_text(text, encoding="utf-8")
    report = checked(file.parents[4])
    assert report.outcome is Outcome.BROKEN
    found = [failure for failure in report.all_failures if failure.code in code.split()]
    assert found, [failure.headline for failure in report.all_failures]
    marked = next((at for at, line in enumerate(text.splitlines(), 1) if MARK in line), None)
    if marked is not None:
        # A person is led to the line, to a statement beside it, or to the method that has it.
        method = next(at for at, line in enumerate(text.splitlines(), 1) if f"def {NAME}" in line)
        told = " ".join(str(failure) for failure in found)
        assert re.search(rf"scheduler\.py:({marked - 1}|{marked}|{marked + 1}|{method})\b", told), told


def test_what_is_counted_by_a_call_is_refused(seamed: Copy) -> None:
    file = seamed("0.33.0") / SCHEDULER
    text = once(
        file.read_text("utf-8"),
        "num_running = len(self.running) + self.num_waiting_for_streaming_input",
        "num_running = sum(self.running)",
    )
    file.write_text(text, encoding="utf-8")
    assert {failure.code for failure in checked(file.parents[4]).all_failures} == {"BP206"}


HARMLESS: dict[str, Callable[[str], str]] = {
    "written by ast.unparse": lambda text: ast.unparse(ast.parse(text)) + "\n",
    "no docstring": lambda text: re.sub(rf'(?s)({NAME}\(self\) -> bool:\n)        """.*?"""\n', r"\1", text),
    "a remark of it elsewhere": lambda text: text + f"\n# {NAME} is asked above.\nNOTE = 'see {NAME} there'\n",
    "CRLF": lambda text: text.replace("\n", "\r\n"),
}  # fmt: skip


@on_two
@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_matter_goes_through_the_seam(name: str, version: str, seamed: Copy) -> None:
    file = seamed(version) / SCHEDULER
    text = file.read_text("utf-8")
    changed = HARMLESS[name](text)
    assert changed != text
    file.write_bytes(changed.encode())
    through_the_seam(file.parents[4])


def test_cap_and_operator_follow_the_method(seamed: Copy) -> None:
    file = seamed("0.23.0") / SCHEDULER
    text = file.read_text("utf-8")
    file.write_text(returning("len(self.running) >= self.max_num_running_reqs")(text), encoding="utf-8")
    through_the_seam(file.parents[4])
    _, compiled = compile_plan(make_plan(lane_of(file.parents[4]), find_feature("balance")))
    (override,) = [item for item in compiled if item.target == SEAM]
    assert "self.balance_queue) >= self.max_num_running_reqs" in override.text


@on_two
def test_all_features_share_the_function_beside_the_seam(version: str, seamed: Copy) -> None:
    lane = lane_of(seamed(version))
    together = compose(at_work([feature for feature in features() if feature.runtime is not None], lane))
    _, compiled = compile_plan(make_plan(lane, together))
    assert SEAM in [item.target for item in compiled]


def test_the_command_says_that_the_gate_is_absorbed_by_the_seam(
    seamed: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    from balance_patcher.cli import main

    folder = seamed("0.30.0")
    with pytest.raises(SystemExit) as stop:
        main(["verify", f"seam=dir:{folder}", "--feature", "balance"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert re.search(r"balance\.admission-gate +.*absorbed", out)
    assert re.search(r"balance\.admission-seam +.*applied", out)
    with pytest.raises(SystemExit) as stop:
        main(["show", SEAM, "--lane", f"dir:{folder}"])
    assert stop.value.code == 0
    assert f"if super().{NAME}():  # bp: balance.admission-seam" in capsys.readouterr().out
