"""The gate where upstream has a seam for its admission stop: an override of one method.

A part of the balance feature. The plan for upstream is that the WAITING loop asks a method of the scheduler whether
it admits on; ``tools/upstream_seam.py`` writes that change. Where it is in, nothing is put into ``schedule``: what its
own stop compares is read in the method, and ours calls it and then applies the leader's rule.
"""

from __future__ import annotations

from balance_patcher.delta import Anchor, Delta, Override, Variant
from balance_patcher.feature import Example, Refusal

NAME = "_should_stop_admitting_waiting"
SEAM = f"vllm.v1.core.sched.scheduler:Scheduler.{NAME}"

#: The stop of a WAITING loop that has the seam.
ASKED = f"if self.{NAME}(): break"

COMPARED = {"CAP": ("max_num_running_reqs", "max_num_active_reqs"), "OP": ("==", ">=")}

# It is asked once for each request that could be admitted. The counts change only in the gather, so in one step the
# leader's rule always gives the same answer.
GATE = Override(
    f"""
    if super().{NAME}():
        return True
    return self._balance_enabled and max(t.item() for t in self.balance_queue) <$OP> self.$CAP
    """
)

OVERRIDE = Delta(
    name="balance.admission-seam",
    target=SEAM,
    why="The gate itself, where upstream asks a method whether it admits on: its own stop first, then the leader's.",
    upstream="the method that the WAITING loop asks; tools/upstream_seam.py writes it, and no release has it yet",
    remove_when="upstream has the gate itself",
    unless_missing="upstream's stop stands in the loop itself; balance.admission-gate stands beside it",
    variants=(
        Variant(
            "running requests",
            Anchor("return len(self.running) <$OP> self.$CAP", allow=COMPARED),
            edits=(GATE,),
            exports={"_balance_count": "len(self.running)", "_balance_cap": "self.$CAP"},
        ),
        Variant(
            "counted",
            Anchor(
                """
                $COUNT = $VALUE
                return $COUNT <$OP> self.$CAP
                """,
                allow=COMPARED,
            ),
            edits=(GATE,),
            exports={"_balance_count": "$VALUE", "_balance_cap": "self.$CAP"},
            note="as from 0.25: paused streaming sessions are counted too",
        ),
    ),
)


# -- what it does to a method, and what it refuses -------------------------------------------

_BEFORE = f'''
class Scheduler:
    def __init__(self):
        self.max_num_running_reqs, self.max_num_active_reqs = 8, 6
        self.running, self.parked = [], 0

    def {NAME}(self) -> bool:
        """Whether the loop ends."""
        return len(self.running) == self.max_num_running_reqs
'''
_COUNTED = _BEFORE.replace(
    "return len(self.running) ==", "held = len(self.running) + self.parked\n        return held >="
).replace("= self.max_num_running_reqs", "= self.max_num_active_reqs")

_AFTER = f"""
def upstream(balance_patcher_upstream):
    class Scheduler:
        def {NAME}(self):
            if super().{NAME}():
                return True
            return self._balance_enabled and max(t.item() for t in self.balance_queue) == self.max_num_running_reqs
    return Scheduler
"""

EXAMPLES = (
    Example(OVERRIDE.name, before=_BEFORE, after=_AFTER),
    Example(
        OVERRIDE.name,
        before=_COUNTED,
        after=_AFTER.replace("== self.max_num_running_reqs", ">= self.max_num_active_reqs"),
    ),
)

REFUSES = (
    Refusal(OVERRIDE.name, _BEFORE.replace("class Scheduler", "class Scheduler:\n    pass\n\nclass Base"), "BP104"),
    Refusal(OVERRIDE.name, _BEFORE.replace(f"{NAME}(self)", f"{NAME}(self, request=None)"), "BP120"),
    Refusal(OVERRIDE.name, _BEFORE.replace("        return", "        self.asked = True\n        return"), "BP114"),
    Refusal(
        OVERRIDE.name, _BEFORE.replace("return len(self.running)", "return self.full or len(self.running)"), "BP101"
    ),
    Refusal(OVERRIDE.name, _BEFORE.replace(" == ", " > "), "BP112"),
    Refusal(OVERRIDE.name, _BEFORE.replace("max_num_running_reqs", "limit"), "BP101"),
    Refusal(OVERRIDE.name, _BEFORE.replace("    def _", "    @property\n    def _"), "BP107"),
    Refusal(OVERRIDE.name, _COUNTED.replace("self.parked\n", "parked\n"), "BP302"),
    Refusal(OVERRIDE.name, _COUNTED.replace("held = ", "self.held = held = "), "BP101"),
)
