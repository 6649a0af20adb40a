"""One engine core among the ranks of its data-parallel group: do all of them run what this one runs?"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from . import joining
from .agreement import Agreed, Statement, agree, part
from .bindings import Installation
from .digests import declaration_digest
from .errors import PatchError
from .feature import Feature

# By identity: an engine core need not be hashable.
_MET: list[tuple[weakref.ref[Any], str, Agreed]] = []


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


def tell(feature: Feature, engine: Any, vllm_config: Any, why: str) -> None:
    """Tell the other ranks why this one does not run a feature that it is asked for; nobody is waited for."""
    with contextlib.suppress(PatchError):  # there is no way to tell them
        _exchange(feature, engine, vllm_config, {}, why)


def leave(features: Collection[str], engine: Any, vllm_config: Any, *, stops: bool) -> None:
    """Let the other ranks come to the same end, when this one has told why it goes without some features.

    Args:
        features: Their names.
        engine: The engine core.
        vllm_config: Its configuration.
        stops: Whether it will end now. The others are waited for then: it may hold the store.
    """
    if joining.joins():
        return
    store, size = getattr(engine, "dp_store", None), vllm_config.parallel_config.data_parallel_size
    for known, name, said in _MET:
        if known() is engine and name in features and _refused(said):
            part(store, said, size, name, patience=None if stops else 0)


def peers(engine: Any, feature: str) -> joining.Peers:
    """The ranks of an engine's group, for what happens to that later."""
    return joining.Peers(feature, agreed(engine, feature))


def agreed(engine: Any, feature: str) -> Agreed:
    """What the ranks of an engine's group said when they agreed; nobody said anything where they need not."""
    return _last(feature, lambda known: known is engine)


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
    return _last(feature, lambda known: known is not None)


def _last(feature: str, wanted: Callable[[Any], bool]) -> Agreed:
    found = [said for known, name, said in _MET if wanted(known()) and name == feature and not _refused(said)]
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
    mine = Statement(rank, said, failure)
    if joining.joins():
        store = joining.connect(parallel.data_parallel_master_ip, getattr(parallel, "_coord_store_port", 0))
        agreed = joining.join(store, mine, size, feature.name)
    else:
        agreed = agree(store, mine, size, feature.name)
    _MET[:] = [known for known in _MET if known[0]() is not None]
    _MET.append((weakref.ref(engine), feature.name, agreed))
    return agreed


def _refused(said: Agreed) -> bool:
    return bool(said.failures or (said.mine is not None and said.mine.failure))
