"""Build against the vLLM that is installed: it is proven, what runs can be seen, and nothing is changed."""

import dataclasses
import functools
import inspect
import linecache
import os
import shutil
import subprocess
import sys
import traceback
import types
from pathlib import Path

import harness
import pytest
from harness import Shape

from balance_patcher.build import build
from balance_patcher.errors import PatchError
from balance_patcher.source import DirSource, Lane

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
HOOK = "vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs"
SEEN = "<balance_patcher vllm.v1.core.sched.scheduler>"


def engine_core():
    from vllm.v1.engine.core import DPEngineCoreProc

    return DPEngineCoreProc


@pytest.fixture(scope="module")
def built():
    return build("balance")


@pytest.fixture
def refused():
    """The failures of building against what is installed; it must be refused."""

    def build_it(lane=None):
        with pytest.raises(PatchError) as error:
            build("balance", lane)
        return error.value

    return build_it


def snapshot():
    """Every object that hangs on the classes that the deltas speak of, and on their functions."""
    found = {}
    classes = [kind for base in (harness.upstream_scheduler(), engine_core()) for kind in base.__mro__[:-1]]
    for kind in [*classes, harness.async_scheduler()]:
        found[kind, "bases"] = kind.__bases__
        for name, value in vars(kind).items():
            found[kind, name] = id(value)
            if isinstance(value, types.FunctionType):
                parts = ("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__")
                found[kind, name, "parts"] = [id(getattr(value, part)) for part in parts]
                found[kind, name, "dict"] = dict(vars(value))
    for module in {sys.modules[kind.__module__] for kind in classes if kind.__module__.startswith("vllm")}:
        found[module] = {name: id(value) for name, value in vars(module).items()}
    return found


# -- the proof ------------------------------------------------------------------------------------


def scaling_state():
    from vllm.distributed.elastic_ep.elastic_state import ElasticEPScalingState

    return ElasticEPScalingState


def edited():
    """What balance edits: the step, the synchronisation, and three points of a scaling."""
    core, state = HOOK.rpartition(".")[0], "vllm.distributed.elastic_ep.elastic_state:ElasticEPScalingState"
    polled = hasattr(scaling_state(), "_execute_async")
    held = "_execute_async" if polled else "_create_standby_groups"
    return {SCHEDULE, HOOK, f"{core}.reinitialize_distributed", f"{state}.progress", f"{state}.{held}"}


def test_what_is_installed_is_proven_and_the_originals_are_the_live_functions(built):
    scheduler, core = harness.upstream_scheduler(), engine_core()
    assert set(built.functions) == edited()
    assert built.originals[SCHEDULE] is vars(scheduler)["schedule"]
    assert built.originals[HOOK] is vars(core)["_has_global_unfinished_reqs"]
    assert built.classes[harness.TARGET].__bases__[0] is scheduler


def test_building_changes_nothing():
    before = snapshot()
    build("balance")
    assert snapshot() == before


def test_the_rebuilt_functions_stand_on_upstreams_own_objects(built):
    for name, function in built.functions.items():
        upstream = built.originals[name]
        assert function is not upstream
        for part in ("__globals__", "__dict__", "__kwdefaults__", "__annotations__", "__doc__"):
            assert getattr(function, part) is getattr(upstream, part), (name, part)
    assert built.functions[HOOK].__defaults__ is built.originals[HOOK].__defaults__


def test_the_constructor_shows_upstreams_parameters(balance_class):
    upstream = inspect.signature(harness.upstream_scheduler().__init__)
    assert inspect.signature(balance_class.__init__) == upstream


# -- sight ----------------------------------------------------------------------------------------


def enabled(class_):
    shape = Shape(seqs=4, ranks=2)
    scheduler = harness.new_scheduler(class_, shape, harness.enabled_config(shape))
    scheduler.add_request(harness.new_request("r0", 10, 5))
    return scheduler


def last_frame(call):
    with pytest.raises(LookupError, match="thrown in a test") as error:
        call()
    frames = [frame for frame in traceback.extract_tb(error.value.__traceback__) if frame.filename == SEEN]
    return frames[-1], "".join(traceback.format_exception(error.value))


class Throws:
    def __call__(self, *args, **keywords):
        raise LookupError("thrown in a test")

    item = __call__


def test_a_traceback_shows_the_true_upstream_line(balance_class, built, monkeypatch):
    scheduler = enabled(balance_class)
    monkeypatch.setattr(scheduler.kv_cache_manager, "new_step_starts", Throws())
    frame, printed = last_frame(scheduler.schedule)
    assert (frame.line, frame.name) == ("self.kv_cache_manager.new_step_starts()", "schedule")
    assert f'File "{SEEN}", line {frame.lineno}, in schedule' in printed
    upstream, delta = built.rewrites["vllm.v1.core.sched.scheduler"].line_map[frame.lineno - 1]
    assert delta is None
    on_disk = Path(inspect.getsourcefile(harness.upstream_scheduler())).read_text(encoding="utf-8").splitlines()
    assert on_disk[upstream - 1].strip() == frame.line


def test_a_traceback_shows_the_true_inserted_line(balance_class, built):
    scheduler = enabled(balance_class)
    scheduler.balance_queue[0] = Throws()
    frame, printed = last_frame(scheduler.schedule)
    assert frame.line.startswith("balance_flag = self._balance_enabled and max(t.item() for t in self.balance_queue)")
    assert frame.line.endswith("# bp: balance.admission-gate")
    assert frame.line in printed
    assert built.rewrites["vllm.v1.core.sched.scheduler"].line_map[frame.lineno - 1] == (None, "balance.admission-gate")


def test_a_traceback_is_the_same_after_the_cache_was_checked(balance_class):
    scheduler = enabled(balance_class)
    scheduler.balance_queue[0] = Throws()
    linecache.checkcache()
    assert "balance_flag = " in last_frame(scheduler.schedule)[0].line


def test_getsource_shows_the_markers_and_what_vllm_ascend_pins(balance_class):
    source = inspect.getsource(balance_class.schedule)
    marks = [line for line in source.splitlines() if "# bp: balance." in line]
    has_assert = "_select_waiting_queue_for_scheduling" in harness.schedule_names()
    assert len(marks) == 5 + 2 * has_assert
    forwarded = "throttle_prefills" if harness.takes_throttle() else ""
    for text in (
        "if not self._balance_enabled:",
        f"super().schedule({forwarded})",
        "max(t.item() for t in self.balance_queue)",
        "self.max_num_running_reqs",
        "if balance_flag:",
    ):
        assert text in source, text
    assert ("if request_queue is None:" in source) == has_assert
    assert "assert request_queue is not None" not in source


def test_getsource_keeps_every_line_of_upstreams(balance_class):
    ours = inspect.getsource(balance_class.schedule).splitlines()
    upstream = inspect.getsource(harness.upstream_scheduler().schedule).splitlines()
    kept = [line for line in ours if "# bp: " not in line]
    gone = [line for line in upstream if line not in kept]
    assert len(gone) <= 3
    assert not [line for line in gone if line.lstrip().startswith("#")]


def test_the_numbers_of_the_source_are_those_of_the_code(balance_class):
    lines, first = inspect.getsourcelines(balance_class.schedule)
    code = balance_class.schedule.__code__
    assert (code.co_filename, code.co_firstlineno) == (SEEN, first)
    assert max(line for *_, line in code.co_lines() if line) <= first + len(lines)


# -- refusals, on the real classes ----------------------------------------------------------------


def foreign_wrapper(function):
    @functools.wraps(function)
    def around(*args, **keywords):
        return function(*args, **keywords)

    return around


def closed_over(function):
    def around(self, *args, **keywords):
        return function(self, *args, **keywords)

    return around


def foreign(self, *args, **keywords):
    raise NotImplementedError


def target(name):
    return (harness.upstream_scheduler(), "schedule") if name == SCHEDULE else (engine_core(), HOOK.rpartition(".")[2])


@pytest.mark.parametrize("wrap", [foreign_wrapper, closed_over, functools.partial])
@pytest.mark.parametrize("name", [SCHEDULE, HOOK])
def test_a_wrapped_target_is_refused_by_name(name, wrap, refused, monkeypatch):
    owner, attribute = target(name)
    wrapper = wrap(vars(owner)[attribute])
    monkeypatch.setattr(owner, attribute, wrapper)
    (failure,) = refused().failures
    assert failure.code == "BP602"
    assert name in str(failure)
    if isinstance(wrapper, types.FunctionType):
        assert f"around ({__file__}:{wrapper.__code__.co_firstlineno})" in failure.what
    else:
        assert "functools.partial" in failure.what


@pytest.mark.parametrize(
    ("replacement", "code"), [(foreign, "BP603"), (lambda self: None, "BP603"), (len, "BP604"), (Throws(), "BP604")]
)
@pytest.mark.parametrize("name", [SCHEDULE, HOOK])
def test_a_replaced_target_is_refused_by_name(name, replacement, code, refused, monkeypatch):
    owner, attribute = target(name)
    monkeypatch.setattr(owner, attribute, replacement)
    (failure,) = refused().failures
    assert failure.code == code
    assert name in str(failure)
    if code == "BP603":
        assert f"({__file__}:{replacement.__code__.co_firstlineno})" in failure.what


def test_every_refused_target_is_named(refused, monkeypatch):
    for name in (SCHEDULE, HOOK):
        monkeypatch.setattr(*target(name), foreign)
    assert [failure.code for failure in refused().failures] == ["BP603", "BP603"]


def test_a_replaced_busy_loop_is_refused_because_it_may_not_call_the_hook(refused, monkeypatch):
    monkeypatch.setattr(engine_core(), "run_busy_loop", foreign)
    (failure,) = refused().failures
    assert failure.code == "BP603"
    assert "DPEngineCoreProc.run_busy_loop" in str(failure)


def test_the_busy_loop_is_proven_through_upstreams_own_decorator_where_it_has_one(built):
    """It is in ``build`` that it is proven; here it is said which lane has the decorator."""
    live = vars(engine_core())["run_busy_loop"]
    decorated = live.__code__.co_name != "run_busy_loop"
    text = inspect.getsource(sys.modules[engine_core().__module__])
    assert decorated == ("@fault_tolerant_wrapper\n    def run_busy_loop" in text)


@pytest.fixture
def copy(tmp_path):
    """The files that are read of the installed vLLM, elsewhere, to be changed under the live import."""
    import vllm

    installed = Path(vllm.__file__).parent
    scaling = "distributed/elastic_ep/elastic_state.py"
    step = ("v1/core/sched/scheduler.py", "v1/core/sched/interface.py", "v1/engine/core.py", "__init__.py")
    for path in (*step, scaling):
        (tmp_path / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / path, tmp_path / "vllm" / path)
    return Lane("copy", DirSource("dir:copy", tmp_path))


def edit(lane, path, old, new):
    file = lane.source.root / path
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_an_unchanged_copy_is_proven(copy):
    """So that the refusals below are for the edit."""
    assert set(build("balance", copy).functions) == edited()


@pytest.mark.parametrize(
    ("path", "old", "new", "name"),
    [
        ("vllm/v1/core/sched/scheduler.py", "class Scheduler(", "# one line more\nclass Scheduler(", SCHEDULE),
        ("vllm/v1/core/sched/scheduler.py", "self.kv_cache_manager.new_step_starts()", "pass", SCHEDULE),
        ("vllm/v1/engine/core.py", "self.step_counter += 1", "self.step_counter += 2", HOOK),
    ],
)
def test_a_text_that_is_not_what_runs_is_refused_by_name(path, old, new, name, copy, refused):
    edit(copy, path, old, new)
    failures = [failure for failure in refused(copy).failures if name in str(failure)]
    assert failures
    assert {failure.code for failure in failures} <= {"BP601", "BP603"}
    function = vars(target(name)[0])[target(name)[1]]
    assert f"({function.__code__.co_filename}:{function.__code__.co_firstlineno})" in str(failures[0])


def test_a_file_edited_under_the_live_import_is_refused_as_such(copy, refused, monkeypatch):
    """The installed file itself is not touched: the copy is made to look like it."""
    import vllm

    display = lambda path: str(Path(vllm.__file__).parent.parent / path)  # noqa: E731
    monkeypatch.setattr(copy.source, "display", display)
    edit(copy, "vllm/v1/core/sched/scheduler.py", "self.kv_cache_manager.new_step_starts()", "pass")
    (failure,) = refused(copy).failures
    assert failure.code == "BP601"
    assert SCHEDULE in str(failure)
    assert "scheduler.py" in failure.what + str(failure)


def test_after_every_refusal_the_real_classes_can_still_be_built(built):
    assert build("balance").originals == built.originals


# -- the gather hook ------------------------------------------------------------------------------


@dataclasses.dataclass
class Scheduler:
    """Stands in for the scheduler of an engine core."""

    gathered: list = dataclasses.field(default_factory=list)
    _balance_enabled: bool = True
    rested: bool = False

    def balance_gather(self, group):
        self.gathered.append(group)

    def balance_rest(self):
        assert self.gathered
        self.rested = True


class Engine:
    """A stand-in for the engine core: whatever upstream's hook reads of it is there."""

    def __init__(self, step_counter):
        self.scheduler = Scheduler()
        self.dp_group = object()
        self.step_counter = step_counter
        self.dp_sync_interval = 32
        self.pending_pause = False
        self.ignore_start_dp_wave = False


@pytest.fixture
def sync(monkeypatch):
    """Stands in for the collective of upstream's own synchronisation; its answer is set by the test."""
    from vllm.config import ParallelConfig

    state = types.SimpleNamespace(answer=None, calls=0)

    def one(*args, **keywords):
        state.calls += 1
        if isinstance(state.answer, BaseException):
            raise state.answer
        return state.answer

    def both(*args, **keywords):
        return one(), False

    monkeypatch.setattr(ParallelConfig, "has_unfinished_dp", staticmethod(one), raising=False)
    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(both), raising=False)
    return state


@pytest.mark.parametrize(
    "answer", [True, False, None, 0, [], object()], ids=["true", "false", "none", "zero", "list", "object"]
)
def test_the_hook_returns_upstreams_own_result_and_gathers_once(answer, built, sync):
    sync.answer = answer
    engine = Engine(31)  # upstream synchronises in every 32nd step
    assert built.functions[HOOK](engine, True) is answer
    assert (sync.calls, engine.step_counter) == (1, 32)
    assert engine.scheduler.gathered == [engine.dp_group]
    assert engine.scheduler.rested == (not answer)


def test_the_hook_gathers_once_on_the_path_without_a_synchronisation(built, sync):
    engine = Engine(3)
    assert built.functions[HOOK](engine, False) is True
    assert (sync.calls, engine.step_counter) == (0, 4)
    assert engine.scheduler.gathered == [engine.dp_group]


def test_the_hook_takes_the_group_from_the_engine_each_time(built, sync):
    engine = Engine(1)  # no synchronisation in this step, on any lane
    groups = []
    for _ in range(3):
        engine.dp_group = object()
        groups.append(engine.dp_group)
        built.functions[HOOK](engine, True)
    assert engine.scheduler.gathered == groups


def test_the_hook_does_not_gather_when_the_synchronisation_fails(built, sync):
    sync.answer = RuntimeError("connection closed by peer")
    engine = Engine(31)
    with pytest.raises(RuntimeError, match="connection closed"):
        built.functions[HOOK](engine, True)
    assert engine.scheduler.gathered == []


def test_the_hook_does_exactly_what_upstreams_does_to_the_engine(built, sync):
    sync.answer = True
    for counter in range(70):
        ours, theirs = Engine(counter), Engine(counter)
        assert built.functions[HOOK](ours, True) is built.originals[HOOK](theirs, True)
        left = [{k: v for k, v in vars(e).items() if k not in ("scheduler", "dp_group")} for e in (ours, theirs)]
        assert left[0] == left[1]
        assert (len(ours.scheduler.gathered), len(theirs.scheduler.gathered)) == (1, 0)


@pytest.mark.parametrize("scheduler", [Scheduler(_balance_enabled=False), object()], ids=["off", "somebody else's"])
def test_the_hook_gathers_nothing_in_an_engine_that_is_off(built, scheduler):
    engine = Engine(1)  # no synchronisation in this step, on any lane
    engine.scheduler = scheduler
    assert built.functions[HOOK](engine, True) is True
    assert getattr(scheduler, "gathered", []) == []


def test_the_hook_has_upstreams_signature(built):
    assert inspect.signature(built.functions[HOOK]) == inspect.signature(built.originals[HOOK])
    source = inspect.getsource(built.functions[HOOK])
    assert "self.scheduler.balance_gather(self.dp_group)  # bp: balance.gather" in source


# -- python -O ------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_it_is_built_and_proven_with_asserts_removed():
    code = (
        "from balance_patcher.build import build\n"
        "built = build('balance')\n"
        "assert False, 'asserts are on'\n"
        "print(sorted(built.functions))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, env=environment, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(sorted(edited()))
