"""One engine core among the ranks of its data-parallel group: do all of them run what this one runs?"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from . import joining
from .agreement import Agreed, Statement, agree
from .bindings import Installation
from .digests import declaration_digest
from .errors import Failure, PatchError
from .feature import Feature

# By identity: an engine core need not be hashable.
_AGREED: list[tuple[weakref.ref[Any], str, Agreed]] = []
_logger = logging.getLogger("vllm.balance_patcher")


class DisagreementError(PatchError):
    """The ranks do not fit together; each of them has been told."""


def meet(feature: Feature, installation: Installation, engine: Any, vllm_config: Any) -> None:
    """Tell the other ranks what runs here, before weights load, and hear what runs there.

    Args:
        feature: What this engine has on.
        installation: Where it is bound.
        engine: The engine core; its data-parallel group and store exist.
        vllm_config: Its configuration.

    Raises:
        DisagreementError: BP704 to BP706, with every rank that does not fit.
        PatchError: BP707, if this rank joins a group that runs, and that cannot be asked.
    """
    agreed = _exchange(feature, engine, vllm_config, _facts(feature, installation, vllm_config), "")
    if agreed.failures:
        raise DisagreementError(*agreed.failures)
    for failure in joining.unfit(agreed, feature.name):
        _logger.error("the group that this rank joins will refuse it: %s", failure)
    if agreed.mine is not None:
        _AGREED[:] = [known for known in _AGREED if known[0]() is not None]
        _AGREED.append((weakref.ref(engine), feature.name, agreed))


def tell(feature: Feature, engine: Any, vllm_config: Any, failures: tuple[Failure, ...]) -> None:
    """Tell the other ranks that this one cannot run a feature, so that they do not wait for it."""
    with contextlib.suppress(PatchError):  # there is no way to tell them
        _exchange(feature, engine, vllm_config, {}, failures[0].headline)


def peers(engine: Any, feature: str) -> joining.Peers:
    """The ranks of an engine's group, for what happens to that later."""
    return joining.Peers(feature, agreed(engine, feature))


def agreed(engine: Any, feature: str) -> Agreed:
    """What the ranks of an engine's group said when they agreed; nobody said anything where they need not."""
    found = [said for known, name, said in _AGREED if known() is engine and name == feature]
    return found[-1] if found else Agreed()


def _facts(feature: Feature, installation: Installation, vllm_config: Any) -> dict[str, object]:
    """What has to be the same on all ranks of a group, by name."""
    parts = installation.feature.parts or (installation.feature,)
    plan = installation.built.plan
    exports: dict[str, str] = {}
    for placement in plan.placements:
        exports |= placement.exports
    shared = feature.enabling.shared if feature.enabling is not None else None
    return {
        "vLLM": plan.lane.version,
        "balance_patcher": vars(sys.modules[__package__])["__version__"],
        "features on one function": sorted(part.name for part in parts),
        "digest of the deltas": declaration_digest(feature.deltas),
        "digest of what runs": installation.digest,
        "data_parallel_size": vllm_config.parallel_config.data_parallel_size,
        "BALANCE_PATCHER_ON_FAILURE": os.environ.get("BALANCE_PATCHER_ON_FAILURE", "stop").strip().lower() or "stop",
        **(shared(vllm_config, exports) if shared is not None else {}),
    }


def latest(feature: str) -> Agreed:
    """What was agreed on last in this process, for an engine that is still there."""
    found = [said for known, name, said in _AGREED if known() is not None and name == feature]
    return found[-1] if found else Agreed()


def must_agree(feature: Feature) -> bool:
    """Whether the ranks of a group must run a feature alike."""
    return feature.enabling is not None and feature.enabling.shared is not None


def _exchange(feature: Feature, engine: Any, vllm_config: Any, said: Mapping[str, object], failure: str) -> Agreed:
    parallel = vllm_config.parallel_config
    store, size = getattr(engine, "dp_store", None), parallel.data_parallel_size
    if store is None or size <= 1 or not must_agree(feature):
        return Agreed()
    rank = getattr(engine, "dp_rank", parallel.data_parallel_rank)
    if joining.joins():
        store = joining.connect(parallel.data_parallel_master_ip, getattr(parallel, "_coord_store_port", 0))
        return joining.join(store, Statement(rank, said, failure), size, feature.name)
    return agree(store, Statement(rank, said, failure), size, feature.name)
