"""Elastic scaling under balance: what ranks that join run is known before the others work with them.

A part of the balance feature. The old ranks write what they run where the new ones look for it, when they are
asked to scale up. They wait where the group with the new ranks exists and nothing else has been touched, and go on
when all have said that they run the same. If one does not, the scaling ends there: the old group goes on.
"""

from __future__ import annotations

from balance_patcher.delta import Anchor, CallThrough, Delta, InsertAfter, Prologue, Variant
from balance_patcher.feature import Example, Refusal

CORE = "vllm.v1.engine.core:DPEngineCoreProc"
STATE = "vllm.distributed.elastic_ep.elastic_state:ElasticEPScalingState"
# A rank that joins makes progress before it has a scheduler.
ON = 'getattr(getattr(self.engine_core, "scheduler", None), "_balance_enabled", False)'

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

# From 0.27.1 the preparation is polled, once a turn of the busy loop: "not yet" is an answer of upstream's own.
HELD = Delta(
    name="balance.scaling-held",
    target=f"{STATE}._execute_async",
    why="A rank that joins and does not gather would stop all of them; until it has spoken, no worker is prepared.",
    upstream="vllm/distributed/elastic_ep/elastic_state.py, the asynchronous preparation, from 0.27.1",
    remove_when="with balance.scaling",
    unless_missing="until 0.26 workers are prepared in the busy loop itself; balance.scaling-standby stands there",
    variants=(
        Variant(
            "not yet",
            edits=(
                Prologue(
                    f"""
                    if {ON} and not self.engine_core.scheduler.balance_fits():
                        return False
                    """
                ),
            ),
        ),
    ),
)

# Until 0.26 it is one blocking call; the next statement waits for the start of the new ranks anyway.
STANDBY = Delta(
    name="balance.scaling-standby",
    target=f"{STATE}._create_standby_groups",
    why="As balance.scaling-held: the new group exists, and the workers have not been told.",
    upstream="vllm/distributed/elastic_ep/elastic_state.py, until 0.26 in the busy loop, until 0.28 by _execute_async",
    remove_when="the oldest supported vLLM is 0.27.1",
    unless_missing="from 0.29 workers are prepared elsewhere; balance.scaling-held stands there",
    variants=(
        Variant(
            "in the busy loop",
            Anchor("self.new_dp_group, self.new_dp_store = $_"),
            edits=(
                InsertAfter(
                    f"""
                    if {ON} and not self.engine_core.scheduler.balance_fits(wait=True):
                        return
                    """
                ),
            ),
        ),
        Variant(
            "polled",
            Anchor("if not self._execute_async($$$_): return False"),
            status="not-applicable",
            note="0.27.1 and 0.28: what it calls is held by balance.scaling-held",
        ),
    ),
)

# What it ends with is what upstream's busy loop takes for the end of a scaling: it drops the state and goes on.
GIVEN_UP = Delta(
    name="balance.scaling-given-up",
    target=f"{STATE}.progress",
    why="A scaling whose new ranks do not fit must not stay: the next one would be refused, or the loop would spin.",
    upstream="vllm/distributed/elastic_ep/elastic_state.py, the same text on all releases",
    remove_when="with balance.scaling",
    variants=(
        Variant(
            "complete",
            edits=(
                Prologue(
                    f"""
                    if {ON} and self.engine_core.scheduler.balance_gives_up():
                        self.state = type(self.state).COMPLETE
                        return True
                    """
                ),
            ),
        ),
    ),
)

SCALING = (ASKED, HELD, STANDBY, GIVEN_UP)


# -- what it does to a function, and what it refuses -----------------------------------------

_CORE_BEFORE = """
class DPEngineCoreProc:
    def __init__(self):
        self.scheduler = None

    def reinitialize_distributed(self, {parameter}):
        return self.go()
"""

_STATE = """
class ElasticEPScalingState:
    def __init__(self, engine):
        self.engine_core, self.model_executor, self.state = engine, None, None
        self.new_dp_group = self.new_dp_store = None

    def {signature}:
{body}
"""


def _state(signature: str, body: str) -> str:
    return _STATE.format(signature=signature, body="\n".join(f"        {line}" for line in body.splitlines()))


_STANDBY = """\
self.new_dp_group, self.new_dp_store = self.group()
{more}self.model_executor.collective_rpc("standby")
self.tell()"""

EXAMPLES = (
    Example(
        "balance.scaling",
        before=_CORE_BEFORE.format(parameter="reconfig_request"),
        after="""
def upstream(balance_patcher_upstream):
    class DPEngineCoreProc:
        def reinitialize_distributed(self, reconfig_request):
            if getattr(self.scheduler, "_balance_enabled", False):
                self.scheduler.balance_scales(self, reconfig_request)
            balance_result = balance_patcher_upstream(self, reconfig_request)
            return balance_result
    return DPEngineCoreProc
""",
    ),
    Example(
        "balance.scaling-held",
        before=_state("_execute_async(self, method, *args)", "return self.run(method)"),
        after=_state(
            "_execute_async(self, method, *args)",
            f"if {ON} and not self.engine_core.scheduler.balance_fits():\n    return False\nreturn self.run(method)",
        ),
    ),
    Example(
        "balance.scaling-standby",
        before=_state("_create_standby_groups(self)", _STANDBY.format(more="")),
        after=_state(
            "_create_standby_groups(self)",
            _STANDBY.format(more=f"if {ON} and not self.engine_core.scheduler.balance_fits(wait=True):\n    return\n"),
        ),
    ),
    Example(
        "balance.scaling-given-up",
        before=_state("progress(self)", "return self.next()"),
        after=_state(
            "progress(self)",
            f"if {ON} and self.engine_core.scheduler.balance_gives_up():\n"
            "    self.state = type(self.state).COMPLETE\n    return True\nreturn self.next()",
        ),
    ),
)

REFUSES = (
    Refusal("balance.scaling", _CORE_BEFORE.format(parameter="request"), "BP302"),
    Refusal("balance.scaling", "class DPEngineCoreProc:\n    pass\n", "BP104"),
    Refusal(
        "balance.scaling-held",
        _state("async _execute_async(self)", "return 1").replace("def async", "async def"),
        "BP108",
    ),
    Refusal("balance.scaling-held", "class ElasticEPScalingState:\n    _execute_async = None\n", "BP104"),
    Refusal("balance.scaling-standby", _state("_create_standby_groups(self)", "self.tell()"), "BP101"),
    Refusal("balance.scaling-given-up", "class ElasticEPScalingState:\n    pass\n", "BP104"),
    Refusal("balance.scaling-given-up", _state("progress(self)", "yield 1"), "BP109"),
)
