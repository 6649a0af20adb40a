"""Everything that calls or builds upstream's scheduler can call and build ours the same way."""

import functools
import inspect

import harness
import pytest
from harness import Shape

SHAPE = Shape(ranks=2)
CALLS = {
    "schedule()": ((), {}),
    "schedule(False)": ((False,), {}),
    "schedule(True)": ((True,), {}),
    "schedule(throttle_prefills=False)": ((), {"throttle_prefills": False}),
    "schedule(throttle_prefills=True)": ((), {"throttle_prefills": True}),
}


def config(enabled):
    return harness.vllm_config(SHAPE, {"enable_balance_scheduling": enabled})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("enabled", [False, True], ids=["disabled", "enabled"])
def test_schedule_can_be_called_as(call, enabled, balance_class):
    arguments, keywords = CALLS[call]
    scheduler = harness.new_scheduler(balance_class, SHAPE, config(enabled))
    scheduler.add_request(harness.new_request("r0", 10, 3))
    assert scheduler.schedule(*arguments, **keywords).num_scheduled_tokens == {"r0": 10}


@pytest.mark.parametrize("call", CALLS)
def test_an_asynchronous_scheduler_can_be_called_as(call, balance_async_class):
    arguments, keywords = CALLS[call]
    scheduler = harness.new_scheduler(balance_async_class, SHAPE, config(True))
    scheduler.add_request(harness.new_request("r0", 10, 3))
    assert scheduler.schedule(*arguments, **keywords).num_scheduled_tokens == {"r0": 10}


@pytest.mark.parametrize("enabled", [False, True], ids=["disabled", "enabled"])
def test_a_throttled_step_defers_prefills_where_upstream_does(enabled, balance_class):
    """``throttle_prefills`` reaches upstream's code on both paths, and is not needed where it has none."""
    scheduler = harness.new_scheduler(balance_class, SHAPE, config(enabled))
    scheduler.add_request(harness.new_request("r0", 10, 9))
    scheduler.schedule()
    scheduler.add_request(harness.new_request("r1", 10, 9))
    admitted = [new.req_id for new in scheduler.schedule(throttle_prefills=True).scheduled_new_reqs]
    assert admitted == ([] if harness.takes_throttle() else ["r1"])


def test_schedule_shows_upstreams_signature_where_upstream_has_the_throttle(balance_class):
    ours = inspect.signature(balance_class.schedule)
    theirs = inspect.signature(harness.upstream_scheduler().schedule)
    if harness.takes_throttle():
        assert ours == theirs
    else:
        assert [*ours.parameters] == [*theirs.parameters, "throttle_prefills"]
        assert ours.parameters["throttle_prefills"].default is False


def test_the_first_base_is_upstreams_class(balance_class):
    assert balance_class.__bases__[0] is harness.upstream_scheduler()


def test_the_class_is_named_balance_scheduler(balance_class):
    assert balance_class.__name__ == "BalanceScheduler"


def test_building_changes_nothing_in_vllm(balance_class):
    import vllm.v1.core.sched.async_scheduler as asynchronous
    import vllm.v1.core.sched.scheduler as module

    assert module.Scheduler is harness.upstream_scheduler()
    assert module.Scheduler is not balance_class
    assert asynchronous.AsyncScheduler.__bases__ == (module.Scheduler,)
    assert module.Scheduler.schedule.__code__.co_filename == module.__file__


def test_an_asynchronous_scheduler_resolves_ours_between_its_own_and_upstreams(balance_class, balance_async_class):
    order = balance_async_class.__mro__[1:4]
    assert order == (harness.async_scheduler(), balance_class, harness.upstream_scheduler())
    assert balance_async_class.schedule is balance_class.schedule
    assert balance_async_class._update_after_schedule is harness.async_scheduler()._update_after_schedule


def test_the_constructor_shows_upstreams_names_and_defaults(balance_class):
    def shown(class_):
        parameters = inspect.signature(class_.__init__).parameters.values()
        return [(parameter.name, parameter.default, parameter.kind) for parameter in parameters]

    assert shown(balance_class) == shown(harness.upstream_scheduler())


def constructor_values():
    """A value for every parameter of this lane's constructor; the default where it has one."""
    wanted = harness.scheduler_arguments(config(True), SHAPE)
    values = {}
    for name, parameter in inspect.signature(harness.upstream_scheduler().__init__).parameters.items():
        if name != "self":
            values[name] = wanted.get(name, parameter.default)
            assert values[name] is not inspect.Parameter.empty, f"no value for constructor parameter {name}"
    return {**values, "include_finished_set": True}


@pytest.mark.parametrize("positional", [0, 1, 4, None], ids=["by name", "first", "first four", "all"])
def test_constructor_arguments_pass_through(positional, balance_class, monkeypatch):
    values = constructor_values()
    names = list(values)
    count = len(names) if positional is None else positional
    received = {}
    theirs = harness.upstream_scheduler()
    genuine, signature = theirs.__init__, inspect.signature(theirs.__init__)

    @functools.wraps(genuine)
    def recording(self, *arguments, **keywords):
        received.update(signature.bind(self, *arguments, **keywords).arguments)
        return genuine(self, *arguments, **keywords)

    monkeypatch.setattr(theirs, "__init__", recording)
    scheduler = balance_class(*(values[n] for n in names[:count]), **{n: values[n] for n in names[count:]})
    assert received.pop("self") is scheduler
    assert list(received) == names
    assert all(received[name] is values[name] for name in names)
    assert scheduler.finished_req_ids_dict == {}


@pytest.mark.parametrize("keeps_signature", [True, False], ids=["with functools.wraps", "bare"])
def test_a_constructor_that_others_have_wrapped_is_called_through(keeps_signature, balance_class, monkeypatch):
    theirs = harness.upstream_scheduler()
    genuine, called = theirs.__init__, []

    def wrapper(self, *arguments, **keywords):
        called.append(self)
        genuine(self, *arguments, **keywords)

    monkeypatch.setattr(theirs, "__init__", functools.wraps(genuine)(wrapper) if keeps_signature else wrapper)
    scheduler = harness.new_scheduler(balance_class, SHAPE, config(True))
    assert called == [scheduler]
    assert scheduler._balance_enabled is True


def test_an_unknown_constructor_argument_is_refused_as_upstream_does(balance_class):
    with pytest.raises(TypeError, match="no_such_argument"):
        balance_class(**harness.scheduler_arguments(config(True), SHAPE), no_such_argument=1)
