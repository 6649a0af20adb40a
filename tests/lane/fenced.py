"""Schedulers whose blocks are fenced, and everything that one of them remembers.

Asynchronous scheduling keeps a step in flight, and a connector that loads into blocks makes vLLM fence those that
such a step may write to: it is upstream that switches the fences on here.
"""

import enum
import functools
import types
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

import harness
import torch
import traces
from harness import Shape

from balance_patcher.build import build
from balance_patcher.compose import compose
from balance_patcher.decided import record
from balance_patcher.registry import find_feature

FEATURES = ("balance", "defer_preemption", "prefill_preemption")
FLAGS = frozenset({"_balance_enabled", "_defer_preemption", "_disable_preemption"})
# Three requests of two blocks each, and not one block more.
SHAPE = Shape(
    seqs=3, tokens=256, blocks=7, prefix_caching=False, reserve_full=False, connector=True, asynchronous=True
)  # fmt: skip
OUTPUT = 6
PROMPT = 31  # one token less than two blocks: the second token that is generated needs a third one


@functools.cache
def patched(names):
    """The scheduler class with these features in it, none of them bound."""
    return build(compose([find_feature(name) for name in names])).classes[harness.TARGET]


def scheduler(names, on, shape):
    """One scheduler of the class with ``names`` in it; those of ``on`` are decided on."""
    config = harness.vllm_config(shape)
    for name in FEATURES:
        record(config, name, active=name in on)
    return harness.new_scheduler(over(patched(tuple(names)), shape), shape, config)


def over(class_, shape):
    """That class, between vLLM's asynchronous scheduler and its plain one where steps are in flight."""
    if not shape.asynchronous:
        return class_
    base = harness.async_scheduler()
    return base if class_ is harness.upstream_scheduler() else type(f"Patched{base.__name__}", (base, class_), {})


class Node:
    """Three requests that run and need a block each; there is none, and a step that writes to theirs is in flight."""

    def __init__(self, subject, shape=SHAPE, counts=None):
        self.scheduler = subject
        # Answers come when they are asked for, however many steps are in flight.
        script = traces.Trace(0, replace(shape, asynchronous=False), [])
        self.world = traces.World(subject, script, traces.ignore_counts)
        self.number = 0
        for number in range(3):
            self.add(f"r{number}", number, PROMPT)
        assert len(self.step().num_scheduled_tokens) == 3
        assert len(self.step().num_scheduled_tokens) == 3
        self.answer()
        if counts is not None:
            harness.set_counts(subject, counts)

    def add(self, name, number, length):
        prompt = range(3 + 40 * number, 3 + 40 * number + length)
        # Of another priority each, and the last is the least important: both policies choose it.
        request = harness.new_request(name, prompt, OUTPUT, arrival=float(number), priority=number)
        self.scheduler.add_request(request)

    def step(self):
        output, _ = self.world.schedule(traces.Step())
        return output

    def answer(self):
        """The model's answer to the oldest step in flight: where it is the last, the fence moves."""
        self.number += 1
        return self.world.answer(self.number)

    def drop(self):
        """Take the newest step back out of flight: it was empty, and no model is asked about it."""
        output, sampled = self.world.in_flight.pop()
        assert not sampled
        assert not output.num_scheduled_tokens

    def run(self, steps):
        """Each output and the tokens that were answered meanwhile, until nobody is left or for that many steps."""
        for _ in range(steps):
            if not self.scheduler.has_requests():
                break
            output = self.step()
            if not output.num_scheduled_tokens:
                self.drop()
            # One step stays in flight while the next one is scheduled, if there is a next one.
            answers = self.answer() if len(self.world.in_flight) > 1 or not output.num_scheduled_tokens else None
            outputs = [out for client in (answers or {}).values() for out in client.outputs]
            yield output, [token for out in outputs for token in out.new_token_ids]

    def fenced(self):
        """Whether the blocks of each running request are fenced, by upstream's own fields."""
        subject = self.scheduler
        return [subject.defer_block_free and r.last_sched_seq > subject.processed_step_seq for r in subject.running]

    @property
    def free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


# -- everything that a scheduler remembers ----------------------------------------------------

LEAVES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, torch.dtype,
    types.GenericAlias, functools.partial,
)  # fmt: skip


def memory(subject):
    """Everything reachable from a scheduler, but its configuration and code: every field of every object, by value.

    Requests and blocks are told by their names wherever they occur, and their fields once each.
    """
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    requests, blocks, others, names = {}, {}, {}, {}

    def told(value):
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, enum.Enum):
            return str(value)
        if isinstance(value, Request):
            if value.request_id not in requests:
                requests[value.request_id] = None
                requests[value.request_id] = fields(value)
            return f"request {value.request_id}"
        if isinstance(value, KVCacheBlock):
            if value.block_id not in blocks:
                blocks[value.block_id] = None
                blocks[value.block_id] = fields(value)
            return f"block {value.block_id}"
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, (list, tuple, deque)):
            return [told(entry) for entry in value]
        if isinstance(value, Mapping):
            return [(told(key), told(entry)) for key, entry in value.items()]
        if isinstance(value, AbstractSet):
            return sorted((told(entry) for entry in value), key=repr)
        if isinstance(value, LEAVES) or type(value).__module__.startswith(("vllm.config", "logging", "_thread")):
            return f"{type(value).__name__} {id(value)}"
        # By the order in which they are come upon: what is made anew for each step has the place of the old one.
        if id(value) not in names:
            name = names[id(value)] = f"{type(value).__name__} {len(names)}"
            others[name] = None
            others[name] = fields(value)
        return names[id(value)]

    def fields(value):
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        found = {name: getattr(value, name) for name in slots if hasattr(value, name) and not name.startswith("__")}
        found |= getattr(value, "__dict__", {})
        return {name: told(entry) for name, entry in found.items()}

    stack = fields(subject)
    return {"scheduler": stack, "requests": requests, "blocks": blocks, "others": others}


def changes(before, after, path=""):
    """The paths of every field in which two memories differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = dict.fromkeys([*before, *after])
        return [p for name in names for p in changes(before.get(name), after.get(name), f"{path}.{name}".lstrip("."))]
    return [] if before == after and type(before) is type(after) else [path]
