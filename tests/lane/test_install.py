"""Binding on a real vLLM: all or nothing, once, effective in every class, and undone exactly."""

import functools
import gc
import sys

import harness
import pytest

from balance_patcher import installation as module
from balance_patcher import steps
from balance_patcher.errors import PatchError
from balance_patcher.installation import install, installed, stale, uninstall

HOOK = "_has_global_unfinished_reqs"


def places():
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.engine import core

    return scheduler, async_scheduler.AsyncScheduler, core.DPEngineCoreProc


def snapshot():
    """Every object that installing may touch, by identity."""
    scheduler, asynchronous, engine = places()
    return {
        "name": id(scheduler.Scheduler),
        "bases": [id(base) for base in asynchronous.__bases__],
        "scheduler": {name: id(value) for name, value in vars(harness.upstream_scheduler()).items()},
        "asynchronous": {name: id(value) for name, value in vars(asynchronous).items()},
        "engine": {name: id(value) for name, value in vars(engine).items()},
    }


@pytest.fixture(autouse=True)
def clean():
    places()
    before = snapshot()
    yield
    uninstall("balance")
    assert snapshot() == before


def codes(caught):
    return [failure.code for failure in caught.value.failures]


def test_the_scheduler_name_and_the_asynchronous_one_resolve_ours():
    ours = install("balance").built.classes["vllm.v1.core.sched.scheduler:Scheduler"]
    scheduler, asynchronous, engine = places()
    assert scheduler.Scheduler is ours
    assert asynchronous.__mro__[1] is ours
    assert asynchronous.schedule is ours.schedule
    assert vars(engine)[HOOK].__code__.co_filename.startswith("<balance_patcher vllm.v1.engine.core:")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_class_that_the_engine_asks_for_is_ours(asynchronous):
    ours = install("balance").built.classes["vllm.v1.core.sched.scheduler:Scheduler"]
    config = harness.vllm_config(harness.Shape())
    config.scheduler_config.async_scheduling = asynchronous
    chosen = config.scheduler_config.get_scheduler_cls()
    assert ours in chosen.__mro__
    assert chosen.schedule is ours.schedule
    assert ("AsyncScheduler" in [cls.__name__ for cls in chosen.__mro__]) is asynchronous


def test_a_thousand_installs_are_one():
    first = install("balance")
    assert all(install("balance") is first for _ in range(1000))
    scheduler, _, _ = places()
    assert [cls.__name__ for cls in scheduler.Scheduler.__mro__].count("BalanceScheduler") == 1


def test_a_subclass_with_a_schedule_of_its_own_keeps_it():
    class Own(harness.upstream_scheduler()):
        def schedule(self):
            return "own"

    class Plain(harness.upstream_scheduler()):
        pass

    ours = install("balance").built.classes["vllm.v1.core.sched.scheduler:Scheduler"]
    assert Own.__bases__ == Plain.__bases__ == (ours,)
    assert Own.schedule(None) == "own"
    assert Plain.schedule is ours.schedule
    uninstall("balance")
    assert Own.__bases__ == Plain.__bases__ == (harness.upstream_scheduler(),)


def test_names_that_still_mean_upstreams_class_are_listed():
    assert "vllm.v1.core.sched.async_scheduler.Scheduler" in stale(install("balance"))


def test_uninstalling_what_is_not_installed_is_nothing():
    uninstall("balance")
    assert installed("balance") is None


@pytest.mark.parametrize("at", range(4))
def test_a_failure_at_any_step_puts_everything_back(at, monkeypatch):
    before, calls = snapshot(), []

    def failing(real):
        def step(*args):
            calls.append(real)
            if len(calls) > at:
                raise RuntimeError("no")
            return real(*args)

        return step

    for holder, name in ((steps, "_rebase"), (steps, "bind"), (module, "overwritten")):
        monkeypatch.setattr(holder, name, failing(getattr(holder, name)))
    with pytest.raises(RuntimeError, match="no"):
        install("balance")
    assert len(calls) == at + 1
    assert snapshot() == before
    assert installed("balance") is None


def test_a_class_that_cannot_be_rebased_stops_everything_and_is_named():
    class Fixed(type(harness.upstream_scheduler())):
        def __setattr__(cls, name, value):
            if name == "__bases__":
                raise TypeError("these bases are fixed")
            super().__setattr__(name, value)

    stubborn = Fixed("Stubborn", (harness.upstream_scheduler(),), {})
    before = snapshot()
    with pytest.raises(PatchError) as caught:
        install("balance")
    assert codes(caught) == ["BP605"]
    assert "Stubborn" in str(caught.value)
    assert snapshot() == before
    assert installed("balance") is None
    del stubborn, caught
    gc.collect()  # a class that nobody holds is a subclass no more


def test_an_overwritten_method_is_noticed_by_the_next_install_and_named():
    install("balance")
    _, _, engine = places()
    ours = vars(engine)[HOOK]
    setattr(engine, HOOK, lambda self, local: local)
    with pytest.raises(PatchError) as caught:
        install("balance")
    assert codes(caught) == ["BP606"]
    assert __file__ in str(caught.value)
    with pytest.raises(PatchError):
        uninstall("balance")
    setattr(engine, HOOK, ours)


def test_a_rebound_scheduler_name_is_noticed():
    ours = install("balance").built.classes["vllm.v1.core.sched.scheduler:Scheduler"]
    scheduler, _, _ = places()
    scheduler.Scheduler = harness.upstream_scheduler()
    with pytest.raises(PatchError) as caught:
        install("balance")
    assert "BP606" in codes(caught)
    scheduler.Scheduler = ours


def test_what_others_put_on_our_class_is_not_thrown_away():
    ours = install("balance").built.classes["vllm.v1.core.sched.scheduler:Scheduler"]
    ours.theirs = 1
    with pytest.raises(PatchError) as caught:
        uninstall("balance")
    assert codes(caught) == ["BP607"]
    del ours.theirs


def test_two_threads_install_one_thing():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: install("balance"), range(8)))
    assert all(one is found[0] for one in found)


def test_nothing_but_the_standard_library_comes_along():
    install("balance")
    assert not {"typer", "rich", "git", "requests.adapters", "astor"} & set(sys.modules) - LOADED_BY_VLLM


LOADED_BY_VLLM = {"typer", "rich", "git", "requests.adapters"}


def made_by_ray(cls):
    """The class that Ray makes of an actor's: a subclass with a traced copy of each method that is inherited."""

    class Class(cls):
        __ray_actor_class__ = cls

    def copied(method):
        @functools.wraps(method)
        def traced(self, *args, _ray_trace_ctx=None, **kwargs):
            return method(self, *args, **kwargs)

        return traced

    for name in (HOOK, "run_busy_loop"):
        setattr(Class, name, copied(getattr(cls, name)))
    return Class


def test_what_ray_made_of_the_engine_core_runs_ours_too():
    _, _, engine = places()

    class Actor(engine):
        pass

    ray = made_by_ray(Actor)
    before = dict(vars(ray))
    install("balance")
    assert vars(ray)[HOOK] is vars(engine)[HOOK]
    assert vars(ray)["run_busy_loop"] is before["run_busy_loop"]
    uninstall("balance")
    assert dict(vars(ray)) == before


def test_a_method_that_an_actor_has_of_its_own_is_left_to_it():
    _, _, engine = places()

    class Actor(engine):
        def _has_global_unfinished_reqs(self, local_unfinished):
            return local_unfinished

    ray = made_by_ray(Actor)
    before = dict(vars(ray))
    install("balance")
    assert dict(vars(ray)) == before
