"""``describe``: what is declared, and the block for vllm-ascend's patch ledger, held against those in its wheels."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from balance_patcher import cli
from balance_patcher.delta import Anchor, Delta, InsertBefore, Replace, Variant
from balance_patcher.describe import as_ascend_patch_doc, as_text
from balance_patcher.feature import Feature
from balance_patcher.registry import features, find_feature
from balance_patcher.source import open_source

LEDGER = "vllm_ascend/patch/__init__.py"
LABELS = ["Why", "How", "Related PR (if no, explain why)", "Future Plan"]
Items = list[tuple[str, list[str]]]


def blocks(text: str) -> dict[str, Items]:
    """The grammar of the ledger: for each file its items, with the labels of each; other lines are text."""
    found: dict[str, Items] = {}
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if match := re.fullmatch(r"# \*\* \d+\. Files?: ([^*]+)\*\*", line):
            found[match[1]] = []
            assert re.fullmatch(r"# ~+", lines[at + 1])
        elif found and re.match(r"#   \d+\. \S", line):
            found[list(found)[-1]].append((line.partition("`")[2].rstrip("`"), []))
        elif found and (match := re.fullmatch(r"#    (\S[^:\uff1a]*)[:\uff1a]\s*", line)):
            items = found[list(found)[-1]]
            if items:
                items[-1][1].append(match[1])
    return found


@pytest.mark.parametrize("version", ["0.23.0", "0.24.0rc1", "0.25.1rc1"])
def test_the_ledger_of_each_release_is_read_by_the_grammar_that_ours_is_held_against(version: str) -> None:
    data = open_source(f"pypi:vllm-ascend=={version}").read(LEDGER)
    assert data is not None
    theirs = blocks(data.decode())
    assert theirs["platform/patch_balance_schedule.py"][0][1] == LABELS
    complete = [file for file, items in theirs.items() if items and all(labels == LABELS for _, labels in items)]
    assert len(complete) > 20


def test_every_delta_of_ours_has_an_item_with_all_that_is_asked() -> None:
    ours = blocks(as_ascend_patch_doc(features()))
    assert len(ours) == len(features())
    for feature, items in zip(features(), ours.values(), strict=True):
        assert items == [(delta.target.replace(":", "."), LABELS) for delta in feature.deltas]


def test_balance_takes_the_place_of_the_file_that_it_stands_in_for() -> None:
    text = as_ascend_patch_doc([find_feature("balance")], 5)
    assert text.startswith("# ** 5. File: platform/patch_balance_schedule.py**\n# ~~~~~")
    assert """#       Set --additional-config '{"scheduler_config": {"enable_balance_scheduling": true}}'.""" in text
    assert (
        "#               break\n#       Here `<$OP>` stands for the comparison that upstream makes there; `$_`" in text
    )
    assert "in that place.\n#    Related PR (if no, explain why):\n#       No, there is no change to wait" in text


def test_an_upstream_change_is_an_address_and_one_of_vllm_ascend_is_not_taken_for_one() -> None:
    deferred = as_ascend_patch_doc([find_feature("defer_preemption")])
    assert "#       https://github.com/vllm-project/vllm/pull/49675 (vLLM PR 49675, in 0.30.0;" in deferred
    assert "pull/" not in as_ascend_patch_doc([find_feature("prefill_preemption")])


def test_an_edit_that_several_variants_share_is_told_once_with_each_place() -> None:
    edit = InsertBefore("self.x = 1")
    delta = Delta(
        "toy.x", "vllm.toy:f", why="Why.", upstream="vllm#12345", remove_when="it is there",
        variants=(Variant("a", Anchor("one()"), (edit,)), Variant("b", Anchor("two()"), (edit,))),
    )  # fmt: skip
    toy = Feature("toy", "A toy.", (delta,))
    assert as_ascend_patch_doc([toy]).splitlines()[3:] == [
        "#    Why:", "#       Why.",
        "#    How:", "#       Put before `one()` or before `two()`:", "#           self.x = 1",
        "#    Related PR (if no, explain why):", "#       https://github.com/vllm-project/vllm/pull/12345 (vllm#12345)",
        "#    Future Plan:", "#       Remove this patch when it is there.",
    ]  # fmt: skip
    follows = Feature("toy", "A toy.", (replace(delta, remove_when="with toy.y"),))
    assert as_ascend_patch_doc([follows]).endswith("#       Remove this patch with toy.y.")


def test_the_holes_of_an_edit_are_put_in_words() -> None:
    edit = Replace("if $COUNT <$OP> self.$CAP:\n    self.x($$$ARGS)")
    delta = Delta(
        "toy.x", "vllm.toy:f", why="Why.", upstream="vllm#12345", remove_when="it is there",
        variants=(Variant("a", Anchor("if $COUNT <$OP> self.$CAP: self.y($_, $$$ARGS)"), (edit,)),),
    )  # fmt: skip
    text = " ".join(
        line.lstrip("# ") for line in as_ascend_patch_doc([Feature("toy", "A toy.", (delta,))]).splitlines()
    )
    assert (
        "Here `<$OP>` stands for the comparison that upstream makes there; `$_` stands for anything; "
        "`$COUNT`, `$CAP`, `$$$ARGS` stand for what upstream has in that place. Related PR"
    ) in text
    balance = as_ascend_patch_doc([find_feature("balance")])
    assert "Here `$$$PARAMETERS` stands for upstream's own parameters.\n" in balance
    assert "Here" not in as_ascend_patch_doc([Feature("toy", "A toy.", (replace(delta, variants=(
        Variant("a", Anchor("one()"), (InsertBefore("self.x = 1"),)),)),))])  # fmt: skip


def test_every_line_is_a_comment_that_fits_into_their_files() -> None:
    lines = as_ascend_patch_doc(features()).splitlines()
    assert all(line.startswith("#") and len(line) <= 120 and line == line.rstrip() for line in lines)


def test_a_person_reads_why_how_and_when_of_each_delta() -> None:
    text = as_text([find_feature("prefill_preemption")])
    assert "  prefill_preemption.keep-running   deltas/prefill_preemption.py:" in text
    assert re.search(r"^    remove when   preemption can be switched off", text, re.MULTILINE)
    assert (
        "    how           Put after `if $BLOCKS is not None: break`:\n                      if self._disable" in text
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["balance", "--format", "ascend-patch-doc", "--first", "7"], 0, "# ** 7. File: "),
        (["prefill_preemption"], 0, "prefill_preemption\n  No preemption"),
        ([], 0, "balance\n"),
        (["unknown"], 2, "BP003"),
    ],
)
def test_the_command(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["describe", *arguments])
    assert (ended.value.code or 0) == status
    assert said in "".join(capsys.readouterr())
