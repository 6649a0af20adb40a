"""What the gate does, as an API server shows it: read over HTTP, and compared with what the engine cores did."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import cluster
import launches
import metrics
import pytest
from launches import CAP

pytestmark = pytest.mark.timeout(900)

#: Seconds from one line of vLLM's periodic log to the next.
INTERVAL = 1.0


@dataclass
class Server:
    """A server that runs, with balance on in two ranks.

    Attributes:
        url: Its address.
        pids: The processes of the engine cores, by rank.
        pages: What ``/metrics`` said ``before`` the first request, at rest ``after`` some, and ``later``.
        steps: For each rank, what its probe had written down when the second page was read.
    """

    url: str
    launched: cluster.Launched
    log: Callable[[], str]
    page: Callable[[], str]
    pids: list[int] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)
    steps: list[list[dict]] = field(default_factory=list)

    def soon(self, holds: Callable[[str], bool], patience: float = 60) -> str:
        """A page of which something holds; the last one where it never does."""
        until = time.monotonic() + patience
        while not holds(page := self.page()) and time.monotonic() < until:
            time.sleep(0.1)
        return page


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server with two ranks; both were full while requests waited, and have come to rest."""
    folder = tmp_path_factory.mktemp("sight")
    (command,) = launches.old_server()
    told = {**command.environment, "VLLM_LOG_STATS_INTERVAL": str(INTERVAL)}
    with cluster.Cluster(folder, [replace(command, environment=told)]) as running:
        assert running.ready(), running.logs()[0][-4000:]
        url = f"http://{launches.HOST}:{running.ports[0]}"
        made = Server(url, running.launched, lambda: running.logs()[0], lambda: running.page(running.ports[0]))
        made.pages["before"] = made.soon(lambda page: len(metrics.plain(page).get("enabled", ())) == launches.RANKS)
        for _ in range(2):
            running.ask(cluster.BURST)
            running.rest()
        _, made.steps = cluster.recorded(folder)
        counted = {str(rank): len(steps) for rank, steps in enumerate(made.steps)}
        made.pages["after"] = made.soon(lambda page: metrics.plain(page).get("gather_seconds_count") == counted)
        made.pids = [json.loads(file.read_text().partition("\n")[0])["pid"] for file in sorted(folder.glob("rank-*"))]
        time.sleep(2 * INTERVAL)
        made.pages["later"] = made.soon(lambda _: logged(made.log()) == sum(counted.values()))
        yield made
    assert not running.launched.left


def logged(log: str) -> int:
    """The steps that the lines in vLLM's periodic log speak of, together."""
    told = [line.partition("balance: on in 2 engines; frozen ")[2] for line in log.splitlines()]
    return sum(int(line.partition(" of ")[2].partition(" steps")[0]) for line in told if line)


RANKS = [str(rank) for rank in range(launches.RANKS)]


class TestMetrics:
    def test_before_the_first_request_balance_is_said_to_be_on(self, server):
        shown = metrics.plain(server.pages["before"])
        assert shown["enabled"] == dict.fromkeys(RANKS, 1.0)
        assert shown["frozen_steps_total"] == dict.fromkeys(RANKS, 0.0)
        assert shown["stalls_total"] == dict.fromkeys(RANKS, 0.0)

    def test_what_runs_is_said_of_each_engine(self, server):
        about = metrics.about(server.pages["before"])
        (line, _) = [line for line in server.log().splitlines() if "balance: ON" in line]
        assert sorted(about) == RANKS
        for said in about.values():
            assert set(said) == {"digest", "patcher", "cap", "source", "reason"}
            assert f"digest={said['digest']}" in line
            assert said["cap"] == str(CAP)
            assert said["source"] == "additional_config.enable_balance_scheduling"
            assert said["patcher"]
            assert said["reason"] == ""

    def test_all_requests_were_answered(self, server):
        assert all(asked == got > 0 for asked, got in server.launched.answers)
        assert len(server.launched.answers) == 2 * len(cluster.BURST)

    def test_each_gather_is_counted_once(self, server):
        counted = metrics.plain(server.pages["after"])["gather_seconds_count"]
        assert counted == {str(rank): len(steps) for rank, steps in enumerate(server.steps)}
        assert min(counted.values()) > 30

    def test_the_frozen_steps_are_those_of_the_engine_cores(self, server):
        counted = metrics.plain(server.pages["after"])["frozen_steps_total"]
        assert counted == {str(rank): metrics.frozen(steps, CAP) for rank, steps in enumerate(server.steps)}
        assert sum(counted.values()) > 0

    def test_the_seconds_are_those_of_the_frozen_steps(self, server):
        shown = metrics.plain(server.pages["after"])
        for rank in RANKS:
            steps, seconds = shown["frozen_steps_total"][rank], shown["frozen_seconds_total"][rank]
            assert (steps > 0) == (seconds > 0)
            assert seconds < cluster.START

    def test_at_rest_nothing_waits_and_nothing_grows(self, server):
        after, later = metrics.plain(server.pages["after"]), metrics.plain(server.pages["later"])
        assert after["requests_waiting_while_frozen"] == dict.fromkeys(RANKS, 0.0)
        assert after == later

    def test_they_carry_the_labels_of_vllms_own(self, server):
        page = server.pages["after"]
        own = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
        ours = [line for line in page.splitlines() if line.startswith("vllm:balance_enabled{")]
        labels = [sorted(line.partition("{")[2].rpartition("}")[0] for line in lines) for lines in (own, ours)]
        assert labels[0] == labels[1]
        assert len(labels[0]) == launches.RANKS


class TestLog:
    def test_the_periodic_log_has_one_line_of_all_engines(self, server):
        gathers = metrics.plain(server.pages["after"])["gather_seconds_count"]
        assert logged(server.log()) == sum(gathers.values()) > 0

    def test_nothing_went_wrong_with_showing_it(self, server):
        assert not [line for line in server.log().splitlines() if "measure" in line and "cannot" in line]
