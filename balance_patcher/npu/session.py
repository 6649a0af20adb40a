"""One run of the check: an engine with balance off, then one with it on, one after the other on the same devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from balance_patcher.errors import Outcome, PatchError, refuse

from .block import block
from .engines import Engine, engines
from .figures import Judged, Seen, Verdict, judge, seen
from .plugin import CONTROL, COUNT

DEVICES = ("npu", "cuda", "cpu")
#: Requests of a burst: a rank is at its cap for most of it.
REQUESTS = 24


def run_check(model: str, device: str, tell: Callable[[str], None]) -> tuple[str, Outcome]:
    """Count in both engines; the Markdown block, and how the command ends.

    Args:
        model: What to load, with dummy weights; empty for a tiny mixture of experts that is written here.
        device: One of :data:`DEVICES`.
        tell: Is told what is done now.

    Raises:
        PatchError: BP512, if there is no vLLM; BP961, if an engine fails or hangs.
    """
    if importlib.util.find_spec("vllm") is None:
        raise refuse("BP512", "vLLM is not installed in this Python", next="run it with the Python that serves")
    found: dict[str, Seen] = {}
    versions: dict[str, str] = {}
    with engines() as start:
        for mode in ("off", "on"):
            tell(f"balance {mode}: starting two engine cores on {device}")
            engine = start(mode, model, device)
            engine.start()
            count(engine, tell)
            found[mode], versions = seen(engine.written()), engine.versions
            tell(f"balance {mode}: ending them")
            engine.end()
            engine.wait(Engine.gone, 60, "ending")
    judged = judge(found["off"], found["on"])
    return block(found["off"], found["on"], versions, device, judged), outcome(judged, device)


def count(engine: Engine, tell: Callable[[str], None]) -> None:
    """The phases of one engine: warm up, count, control, and then at its own pace."""
    phases = [("warming up", ""), ("counting", COUNT), *([("control", CONTROL)] if engine.mode == "on" else [])]
    for title, phase in [*phases, ("timing gathers", "")]:
        tell(f"balance {engine.mode}: {title}")
        engine.burst(REQUESTS, full=True, phase=phase)
    engine.burst(2, full=True)  # what is still to be written down is written when the next steps come


def outcome(judged: Judged, device: str) -> Outcome:
    """On the CPU there is no device to wait for: whatever was counted there, it could not be checked."""
    if judged.verdict is Verdict.ADDED:
        return Outcome.BROKEN
    return Outcome.HOLDS if judged.verdict is Verdict.NONE_ADDED and device != "cpu" else Outcome.UNKNOWN


def detected() -> str:
    """The device of this machine: an NPU if torch_npu finds one, else CUDA, else the CPU."""
    if importlib.util.find_spec("torch") is None:
        raise PatchError(
            refuse("BP512", "torch is not installed", next="run it with the Python that serves").failures[0]
        )
    import torch

    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401 - it puts torch.npu in place

        if torch.npu.is_available():
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"
