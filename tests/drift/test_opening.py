"""Where a pattern is opened, and where that cannot be done: no hole is made of what has no text of its own."""

from __future__ import annotations

import ast

from balance_patcher.delta import Anchor
from tools.drift.opening import opened_anchor


def test_a_renamed_attribute_is_one_text_more() -> None:
    made = opened_anchor(
        Anchor("if n == self.cap: break"), ast.parse("while 1:\n if n == self.most: break").body[0].body[0]
    )  # type: ignore[attr-defined]
    assert made is not None
    assert "cap" in str(made[0].allow)


def test_a_comparison_with_an_operator_that_is_a_hole_is_not_opened_as_a_whole() -> None:
    statement = ast.parse("while 1:\n if not queue or full(n): break").body[0].body[0]  # type: ignore[attr-defined]
    assert opened_anchor(Anchor("if not queue or n <$OP> cap: break", allow={"OP": ("<=", "<")}), statement) is None
