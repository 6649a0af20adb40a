"""Elastic scaling under balance: what ranks that join run is known before the others gather with them.

A part of the balance feature. The old ranks write what they run where the new ones look for it, when they are
asked to scale; and they refuse new ones that do not fit at the last point where the old group is still the one
that is used. Upstream has had two such points: from 0.27.1 the switch is committed by a call of its own, before
that the engine cores that join report that they are ready for their weights.
"""

from __future__ import annotations

from balance_patcher.delta import CallThrough, Delta, Variant
from balance_patcher.feature import Example, Refusal

CORE = "vllm.v1.engine.core:DPEngineCoreProc"

ASKED = Delta(
    name="balance.scaling",
    target=f"{CORE}.reinitialize_distributed",
    why="Ranks that join have to know what the group runs before they load weights.",
    upstream="vllm/v1/engine/core.py, elastic expert parallelism",
    remove_when="balance scheduling is an option of vLLM itself, and its start-up handshake compares it",
    variants=(
        Variant(
            "told",
            edits=(
                CallThrough(
                    """
                    if getattr(self.scheduler, "_balance_enabled", False):
                        self.scheduler.balance_scales(self, reconfig_request)
                    """,
                    first=True,
                ),
            ),
        ),
    ),
)

COMMITTED = Delta(
    name="balance.scaling-commit",
    target=f"{CORE}.commit_prepared_elastic_ep",
    why="A rank that joins and does not gather would stop all of them; here the old group can still go on.",
    upstream="vllm/v1/engine/core.py, the commit of a prepared scaling, from 0.27.1",
    remove_when="with balance.scaling",
    unless_missing="until 0.26 scaling has no commit; balance.scaling-ready stands there",
    variants=(
        Variant(
            "before the commit",
            edits=(
                CallThrough(
                    """
                    if getattr(self.scheduler, "_balance_enabled", False):
                        self.scheduler.balance_admits()
                    """,
                    first=True,
                ),
            ),
        ),
    ),
)

READY = Delta(
    name="balance.scaling-ready",
    target=f"{CORE}.eep_handle_engine_core_notification",
    why="As balance.scaling-commit: engine cores that join report before the old ones give them weights.",
    upstream="vllm/v1/engine/core.py, the notifications of a scaling, until 0.26",
    remove_when="the oldest supported vLLM is 0.27.1",
    unless_missing="from 0.27.1 a scaling is committed; balance.scaling-commit stands there",
    variants=(
        Variant(
            "before the weights",
            edits=(
                CallThrough(
                    """
                    if getattr(self.scheduler, "_balance_enabled", False) and "WEIGHTS_INIT" in str(notification_type):
                        self.scheduler.balance_admits()
                    """,
                    first=True,
                ),
            ),
        ),
    ),
)

SCALING = (ASKED, COMMITTED, READY)


# -- what it does to a function, and what it refuses -----------------------------------------

_BEFORE = """
class DPEngineCoreProc:
    def __init__(self):
        self.scheduler = None

    def {signature}:
        return self.go()
"""

_AFTER = """
def upstream(balance_patcher_upstream):
    class DPEngineCoreProc:
        def {signature}:
            if getattr(self.scheduler, "_balance_enabled", False){more}:
                self.scheduler.{call}
            balance_result = balance_patcher_upstream({passed})
            return balance_result
    return DPEngineCoreProc
"""

_ASK, _COMMIT = "reinitialize_distributed(self, reconfig_request)", "commit_prepared_elastic_ep(self)"
_READY = "eep_handle_engine_core_notification(self, notification_type)"

EXAMPLES = (
    Example(
        "balance.scaling",
        before=_BEFORE.format(signature=_ASK),
        after=_AFTER.format(
            signature=_ASK, more="", call="balance_scales(self, reconfig_request)", passed="self, reconfig_request"
        ),
    ),
    Example(
        "balance.scaling-commit",
        before=_BEFORE.format(signature=_COMMIT),
        after=_AFTER.format(signature=_COMMIT, more="", call="balance_admits()", passed="self"),
    ),
    Example(
        "balance.scaling-ready",
        before=_BEFORE.format(signature=_READY),
        after=_AFTER.format(
            signature=_READY,
            more=' and "WEIGHTS_INIT" in str(notification_type)',
            call="balance_admits()",
            passed="self, notification_type",
        ),
    ),
)

REFUSES = (
    Refusal("balance.scaling", _BEFORE.format(signature=_ASK.replace("reconfig_", "")), "BP302"),
    Refusal("balance.scaling", "class DPEngineCoreProc:\n    pass\n", "BP104"),
    Refusal("balance.scaling-commit", _BEFORE.format(signature=_COMMIT).replace(".scheduler", ".plan"), "BP303"),
    Refusal("balance.scaling-commit", f"class DPEngineCoreProc:\n    {_COMMIT.partition('(')[0]} = None\n", "BP104"),
    Refusal("balance.scaling-ready", _BEFORE.format(signature=_READY.replace("_type", "")), "BP302"),
)
