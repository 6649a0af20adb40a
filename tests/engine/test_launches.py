"""Each way in which vLLM starts the engine cores of a data-parallel model, with balance on and nothing by hand.

What make test has no time for runs with ``--launches rest``: see conftest.py.
"""

import tempfile

import cluster
import launches
import metrics
import pytest

from balance_patcher.errors import PatchError

OURS = ("<balance_patcher vllm.v1.core.sched.scheduler>", "<balance_patcher vllm.v1.engine.core:")
#: What is logged first when weights are loaded, on each lane.
LOADING = "Starting to load model"
#: Prompts for each rank, of each call of `generate`: more than the cap beside fewer, and one beside many.
UNEVEN = [[3, 1], [11, 7]]

pytestmark = pytest.mark.timeout(900)


def with_ray(folder):
    """Ray keeps sockets below a folder, whose path must be short, and leaves its logs there."""
    with tempfile.TemporaryDirectory(prefix="r") as place:
        return cluster.served(folder, launches.ray(place))


#: Name, when make test runs it, and how.
EVERY = {
    "one server": ("one lane", lambda folder: cluster.served(folder, launches.old_server())),
    "two servers": ("one lane", lambda folder: cluster.served(folder, launches.internal(servers=2))),
    "headless node": ("each lane", lambda folder: cluster.served(folder, launches.headless())),
    "external balancer": ("one lane", lambda folder: cluster.served(folder, launches.external())),
    "offline": ("one lane", lambda folder: cluster.ran(folder, launches.offline(UNEVEN))),
    "headless node, spawned": ("rest", lambda folder: cluster.served(folder, launches.spawned(launches.headless()))),
    "supervisor": ("rest", lambda folder: cluster.served(folder, launches.supervised())),
    "hybrid balancer": ("rest", lambda folder: cluster.served(folder, launches.hybrid())),
    "ray": ("rest", with_ray),
}


def ways(*names):
    """Parameters of the fixture ``run``; a module-wide fixture keeps the tests of one start together."""
    return [pytest.param(name, marks=pytest.mark.launch(EVERY[name][0])) for name in names or EVERY]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Start in one of the ways, once."""

    def start(name):
        if name == "ray" and not launches.ray_found():
            pytest.skip("ray is not there: install it beside the lane, as `make test-all` does")
        if name not in cluster.STARTED:
            cluster.STARTED[name] = EVERY[name][1](tmp_path_factory.mktemp("launch"))
        return cluster.STARTED[name]

    return start


@pytest.fixture(scope="module", params=ways())
def run(request, started):
    return started(request.param)


@pytest.fixture(scope="module", params=ways(*(name for name in EVERY if name != "offline")))
def served(request, started):
    return started(request.param)


@pytest.fixture(scope="module", params=ways("two servers"))
def two_servers(request, started):
    return started(request.param)


@pytest.fixture(scope="module", params=ways("offline"))
def offline(request, started):
    return started(request.param)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two processes whose engine cores have no busy loop: what was refused, and what ran."""
    run = cluster.ran(tmp_path_factory.mktemp("launch"), launches.without_a_loop())
    cluster.STARTED["no busy loop"] = run
    return run


class TestEachWay:
    def test_every_request_is_answered(self, run):
        assert run.ready, run.log[-4000:]
        assert len(run.answers) >= sum(map(sum, UNEVEN))
        assert all(asked == got > 0 for asked, got in run.answers), run.answers

    def test_the_ranks_gather_equally_often_and_see_the_same_counts(self, run):
        first, *others = run.steps
        assert others
        assert set(run.gathers) == {len(first)}
        assert len(first) > 30
        assert all([s["counts"] for s in steps] == [s["counts"] for s in first] for steps in others)
        assert all(len(step["counts"]) == len(run.steps) for step in first)

    def test_each_rank_has_run_requests(self, run):
        assert run.steps
        assert all(any(step["running"] for step in steps) for steps in run.steps)

    def test_ours_runs_in_the_engine_cores(self, run):
        assert len(run.facts) == len(run.steps) >= launches.RANKS
        for fact in run.facts:
            assert fact["schedule file"] == OURS[0]
            assert fact["hook file"].startswith(OURS[1])
            assert fact["enabled"] is True

    def test_each_rank_says_in_one_line_that_it_is_on(self, run):
        size = len(run.steps)
        assert size >= launches.RANKS
        lines = run.lines("balance: ON")
        assert sorted(line.partition("ON rank ")[2][:3] for line in lines) == [f"{n}/{size}" for n in range(size)]
        assert all(f" cap={launches.CAP} " in line for line in lines)

    def test_nothing_is_left_running(self, run):
        assert not run.left


class TestFigures:
    """What the servers show together, however many there are and wherever the engine cores stand."""

    def test_each_gather_is_counted_once(self, served):
        # Several servers of one command keep their figures together, and each shows all of them.
        pages = served.pages if len(served.codes) == len(served.pages) > 1 else served.pages[:1]
        counted = [metrics.plain(page)["gather_seconds_count"] for page in pages]
        assert {rank: count for of in counted for rank, count in of.items()} == {
            str(rank): count for rank, count in enumerate(served.gathers)
        }
        assert sum(map(len, counted)) == len(served.gathers)

    def test_the_frozen_steps_are_those_of_the_engine_cores(self, served):
        counted = {k: v for page in served.pages for k, v in metrics.plain(page)["frozen_steps_total"].items()}
        assert counted == {str(rank): metrics.frozen(steps, launches.CAP) for rank, steps in enumerate(served.steps)}

    def test_each_engine_says_that_balance_is_on(self, served):
        enabled = {k: v for page in served.pages for k, v in metrics.plain(page)["enabled"].items()}
        assert enabled == {str(rank): 1.0 for rank in range(len(served.steps))}


class TestStatusOfAServer:
    """What `status --url` says of each, beside what its engine cores have written down."""

    @pytest.fixture
    def engines(self, served):
        return {int(engine.engine): engine for told in served.told for engine in told.engines}

    def test_every_engine_is_on_with_the_cap_and_the_digest_that_its_log_tells(self, served, engines):
        assert sorted(engines) == list(range(len(served.steps)))
        digests = {line.rpartition("digest=")[2].split()[0] for line in served.lines("balance: ON")}
        for engine in engines.values():
            assert (engine.enabled, engine.cap, {engine.digest}) == (True, launches.CAP, digests)

    def test_its_figures_are_those_of_the_engine_cores(self, served, engines):
        for rank, engine in engines.items():
            assert engine.gather.count == served.gathers[rank]
            assert engine.frozen_steps == metrics.frozen(served.steps[rank], launches.CAP)
            assert 0 < engine.gather.quantile(0.5) <= engine.gather.quantile(0.99)
            assert (engine.running, engine.waiting, engine.held) == (0, 0, 0)

    def test_nothing_differs_between_them(self, served):
        assert [line for told in served.told for line in told.warnings if "waited so long" not in line] == []


class TestTwoServers:
    def test_there_are_two(self, two_servers):
        assert two_servers.lines("(ApiServer_0 ")
        assert two_servers.lines("(ApiServer_1 ")


@pytest.fixture(scope="module")
def unasked(tmp_path_factory):
    """A server of which nobody asks balance, though it is installed beside vLLM; and what it showed after a burst."""
    with cluster.Cluster(tmp_path_factory.mktemp("launch"), launches.unasked()) as running:
        if running.ready():
            running.ask(cluster.BURST)
            running.launched.pages = [running.page(port) for port in running.ports]
            running.launched.told = [cluster.figures_of(port) for port in running.ports]
    cluster.STARTED["nobody asks"] = running.launched
    return running.launched


@pytest.mark.launch("one lane")
class TestNobodyAsks:
    def test_every_request_is_answered(self, unasked):
        assert unasked.ready, unasked.log[-4000:]
        assert len(unasked.answers) == len(cluster.BURST)
        assert all(asked == got > 0 for asked, got in unasked.answers), unasked.answers

    def test_vllms_own_metrics_are_there_and_none_of_ours(self, unasked):
        (page,) = unasked.pages
        shown = metrics.read(page, "vllm:num_requests_")
        assert sorted(shown["running"]) == [str(rank) for rank in range(launches.RANKS)]
        assert "balance" not in page

    def test_status_says_that_nobody_has_asked(self, unasked):
        (told,) = unasked.told
        assert isinstance(told, PatchError)
        assert "balance was never asked for in this server" in str(told)

    def test_each_engine_core_says_so_in_one_line(self, unasked):
        lines = unasked.lines("balance:")
        assert len(lines) == launches.RANKS
        assert all("balance: OFF because the configuration does not ask for it" in line for line in lines)

    def test_nothing_is_left_running(self, unasked):
        assert not unasked.left


class TestOffline:
    def test_there_is_no_coordinator(self, offline):
        assert offline.lines("DP Coordinator") == []

    def test_each_rank_has_had_its_own_prompts(self, offline):
        assert [len(told["answers"]) for told in offline.printed()] == [sum(counts) for counts in UNEVEN]

    def test_all_end_by_themselves(self, offline):
        assert offline.codes == [0, 0]

    def test_admission_stops_at_the_cap_while_prompts_wait(self, offline):
        assert any(step["waiting"] and step["running"] == launches.CAP for step in offline.steps[1])


@pytest.mark.launch("one lane")
class TestWithoutABusyLoop:
    """Nothing can be gathered there: several ranks are refused, and a single one has nothing to gather."""

    @pytest.mark.parametrize("way", ["in process", "external launcher"])
    def test_several_ranks_are_refused_with_both_keys(self, alone, way):
        told = [told for told in alone.printed() if told["name"] == f"{way}, two ranks"]
        assert [one["error"] for one in told] == ["ExcludedError"] * 2, alone.log[-4000:]
        for one in told:
            assert one["said"].startswith("BP701 ")
            assert "enable_balance_scheduling with data_parallel_size=2" in one["said"]
            assert way.replace("in process", "in-process client") in one["said"]

    def test_it_is_before_weights(self, alone):
        for log in alone.logs:
            assert log.count("BP701") >= 2
            assert LOADING in log  # of the single rank, which is the last
            assert log.rindex("BP701") < log.index(LOADING)

    @pytest.mark.parametrize("way", ["in process", "external launcher"])
    def test_a_single_rank_runs(self, alone, way):
        (told,) = [told for told in alone.printed() if told["name"] == f"{way}, one rank"]
        assert len(told["answers"]) == 3
        assert all(asked == got for asked, got in told["answers"])

    def test_a_single_rank_warns_once(self, alone):
        for log in alone.logs:
            (warned,) = [line for line in log.splitlines() if "balance: " in line and "WARNING" in line]
            assert "nothing to gather: there is one data-parallel rank" in warned
        assert alone.lines("balance: ON") == []

    def test_nothing_is_left_running(self, alone):
        assert not alone.left
        assert alone.codes == [0, 0]
