"""A running server's gate, as its metrics tell it: read over real HTTP, in texts that prometheus_client has made."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from balance_patcher import cli, terminal_served
from balance_patcher import exposition as ours
from balance_patcher.errors import PatchError
from balance_patcher.exposition import Exposition, Sample, metrics_url, read
from balance_patcher.served import Gather, Served, change, judgement, served

LABELS = ["model_name", "engine"]
BUCKETS = (0.001, 0.002, 0.01)


class Metrics:
    """What a server with vLLM and us in it exposes, in prometheus_client's own objects and with its own text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge: Callable[..., Gauge] = lambda name, *more: Gauge(name, "…", [*LABELS, *more], registry=self.registry)  # noqa: E731
        self.enabled, self.held = gauge("vllm:balance_enabled"), gauge("vllm:balance_requests_waiting_while_frozen")
        self.running, self.waiting = gauge("vllm:num_requests_running"), gauge("vllm:num_requests_waiting")
        self.info = gauge("vllm:balance_info", "digest", "patcher", "cap", "source", "reason")
        self.started = Gauge("process_start_time_seconds", "…", registry=self.registry)
        count: Callable[..., Counter] = lambda name: Counter(name, "…", LABELS, registry=self.registry)  # noqa: E731
        self.steps, self.seconds = count("vllm:balance_frozen_steps"), count("vllm:balance_frozen_seconds")
        self.stalls = count("vllm:balance_stalls")
        self.gather = Histogram("vllm:balance_gather_seconds", "…", LABELS, registry=self.registry, buckets=BUCKETS)

    def engine(
        self, number: int, *, model: str = "tiny", enabled: int = 1, digest: str = "21f1e23a58ed", cap: int = 4,
        running: int = 3, waiting: int = 0, held: int = 0, reason: str = "asked for",
    ) -> None:  # fmt: skip
        labels = model, str(number)
        self.enabled.labels(*labels).set(enabled)
        self.info.labels(*labels, digest, "0.1.0", str(cap), "additional_config.key", reason).set(1)
        self.running.labels(*labels).set(running)
        self.waiting.labels(*labels).set(waiting)
        if enabled:
            self.held.labels(*labels).set(held)
            self.steps.labels(*labels)
            self.seconds.labels(*labels)
            self.stalls.labels(*labels)
            self.gather.labels(*labels)

    def stepped(
        self, number: int, steps: int = 8, frozen: int = 0, seconds: float = 0.0005, model: str = "tiny"
    ) -> None:
        labels = model, str(number)
        for _ in range(steps):
            self.gather.labels(*labels).observe(seconds)
        self.steps.labels(*labels).inc(frozen)
        self.seconds.labels(*labels).inc(frozen * 0.5)

    @property
    def text(self) -> bytes:
        return exposition.generate_latest(self.registry)


class Server:
    """A real HTTP server. What it answers is set before it is asked."""

    def __init__(self) -> None:
        self.text, self.status, self.headers = b"", 200, {"Content-Type": exposition.CONTENT_TYPE_LATEST}
        self.cut, self.date = 0, ""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.then: Callable[[], None] = lambda: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, dict(self.headers)))
                self.send_response(outer.status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                if outer.cut:
                    self.send_header("Content-Length", str(len(outer.text) + outer.cut))
                self.end_headers()
                self.wfile.write(outer.text)
                outer.then()

            def date_time_string(self, timestamp: float | None = None) -> str:
                return outer.date or super().date_time_string(timestamp)  # type: ignore[arg-type]

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "*")
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def metrics(server: Server) -> Metrics:
    """Those of two engines with the gate on."""
    made = Metrics()
    made.engine(0)
    made.engine(1)
    server.text = made.text
    return made


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["status", "--url", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def shown(metrics: Metrics, server: Server) -> Served:
    server.text = metrics.text
    return served(read(metrics_url(server.url)))


# -- what is said of it ----------------------------------------------------------------------


class TestTheText:
    def test_tells_each_engine(self, server: Server, metrics: Metrics, capsys: Any) -> None:
        metrics.engine(0, running=4, reason="asked for by additional_config")
        metrics.engine(1, running=3, waiting=9, held=9)
        metrics.stepped(0, 10)
        metrics.stepped(1, 10, frozen=3)
        metrics.started.set(time.time() - 300)
        server.text = metrics.text
        code, out, err = run(capsys, server.url)
        assert (code, err) == (0, "")
        head, *lines = out.splitlines()
        assert head == f"{server.url}/metrics  up for 5 min"
        assert lines == [
            f"{HELD.format('often', '30.0 %')}; it does so now: engine 0 is at the cap, and 9 requests wait for that.",
            "",
            "engine 0  on",
            "  why       asked for by additional_config",
            "  requests  running 4 of 4, waiting 0",
            "  frozen    in 0 of 10 steps (0.0 %), for 0.0 s (0.0 % of the time)",
            "  gather    mean 0.5 ms, p50 0.5 ms, p99 0.99 ms (estimated)",
            "  stalls    0",
            "  runs      asked for by additional_config.key, digest 21f1e23a58ed, balance_patcher 0.1.0",
            "",
            "engine 1  on",
            "  why       asked for",
            "  requests  running 3 of 4, waiting 9, 9 of them while frozen",
            "  frozen    in 3 of 10 steps (30.0 %), for 1.5 s (0.5 % of the time)",
            "  gather    mean 0.5 ms, p50 0.5 ms, p99 0.99 ms (estimated)",
            "  stalls    0",
            "  runs      asked for by additional_config.key, digest 21f1e23a58ed, balance_patcher 0.1.0",
        ]

    def test_tells_why_it_is_off(self, server: Server, capsys: Any) -> None:
        metrics = Metrics()
        metrics.engine(0, enabled=0, reason="BP101 anchor not found")
        server.text = metrics.text
        code, out, _ = run(capsys, server.url)
        assert code == 0
        said, _, engine, why, *_ = out.splitlines()[1:]
        assert said == "Balance is asked for and off, so ranks admit as upstream's do: BP101 anchor not found."
        assert engine == "engine 0  OFF"
        assert why.split(maxsplit=1) == ["why", "BP101 anchor not found"]
        assert "frozen" not in out

    def test_of_several_models_each_engine_is_named_with_its_own(self, server: Server, capsys: Any) -> None:
        metrics = Metrics()
        metrics.engine(0, model="one", digest="a")
        metrics.engine(0, model="two", digest="b")
        server.text = metrics.text
        _, out, _ = run(capsys, server.url)
        assert re.findall(r"^engine .*", out, re.MULTILINE) == ["engine 0 of one  on", "engine 0 of two  on"]
        assert "warning" not in out


class TestJson:
    def test_has_the_figures(self, server: Server, metrics: Metrics, capsys: Any) -> None:
        metrics.stepped(1, 7, frozen=2)
        metrics.stepped(1, 1, seconds=5)
        server.text = metrics.text
        code, out, _ = run(capsys, server.url, "--format", "json")
        told = json.loads(out)
        assert code == 0
        assert (told["schema"], told["url"], told["change"], told["warnings"]) == (1, f"{server.url}/metrics", None, [])
        one = told["engines"][1]
        assert (one["engine"], one["enabled"], one["cap"], one["running"]) == ("1", True, 4, 3)
        assert (one["frozen_steps"], one["frozen_seconds"], one["frozen_share"]) == (2, 1, 0.25)
        # Above the last bound nothing is known, and JSON has no infinity.
        assert (one["gather"]["count"], one["gather"]["p99"]) == (8, None)
        assert one["gather"]["p50"] == pytest.approx(0.001 * 4 / 7)
        assert told["judgement"].startswith("The gate held requests back often since the start")


class TestTwoReadings:
    def test_tell_what_happened_in_between(self, server: Server, metrics: Metrics, capsys: Any) -> None:
        metrics.stepped(0, 100, frozen=90)

        def goes_on() -> None:
            metrics.stepped(0, 10, frozen=1, seconds=0.0015)
            server.text = metrics.text

        server.text, server.then = metrics.text, goes_on
        code, out, _ = run(capsys, server.url, "--interval", "0.2")
        assert code == 0
        assert re.search(
            r"held requests back often in these 0 s, in up to 10.0 % of the steps of an engine; nothing", out
        )
        lines = out.splitlines()
        at = next(number for number, line in enumerate(lines) if re.fullmatch(r"  in \d\.\d s", line))
        assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["steps", "frozen", "gather"]
        assert lines[at + 2].startswith("  frozen  in 1 of 10 steps (10.0 %), for 0.5 s (")
        assert lines[at + 3] == "  gather  mean 1.5 ms, p50 1.5 ms, p99 1.99 ms (estimated)"

    def test_an_engine_that_was_started_anew_has_no_rates(self, server: Server, metrics: Metrics) -> None:
        metrics.stepped(0, 100)
        metrics.stepped(1, 5)
        before = shown(metrics, server)
        anew = Metrics()
        for number in (0, 1, 2):
            anew.engine(number)
        anew.stepped(0, 3)
        anew.stepped(1, 6)
        added = change(before, shown(anew, server))
        found = {engine: one and one.gather and one.gather.count for (_, engine), one in added.engines.items()}
        assert found == {"0": None, "1": 1, "2": None}
        assert added.seconds > 0

    def test_where_all_were_nothing_is_told_of_the_time_between(self, server: Server, metrics: Metrics) -> None:
        metrics.stepped(0, 100)
        before = shown(metrics, server)
        anew = Metrics()
        anew.engine(0)
        now = shown(anew, server)
        assert judgement(now, change(before, now)).startswith("The engines were started anew in between")


class TestWatching:
    def test_goes_on_until_it_is_interrupted_also_past_a_failure(
        self, server: Server, metrics: Metrics, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        naps: list[float] = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            server.status = 503 if len(naps) == 2 else 200
            if len(naps) == 4:
                raise KeyboardInterrupt

        monkeypatch.setattr(terminal_served.time, "sleep", nap)
        code, out, err = run(capsys, server.url, "--watch", "7", "--format", "json")
        assert code == 0
        assert naps == [7.0] * 4
        told = [json.loads(line) for line in out.splitlines()]
        assert [one["change"] is not None for one in told] == [False, True, True]
        assert err.count("BP741") == 1

    def test_each_says_when_it_was(
        self, server: Server, metrics: Metrics, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def nap(_: float) -> None:
            naps.append(None)
            if len(naps) == 2:
                raise KeyboardInterrupt

        clock = time.time()
        for arguments in (("--watch", "7"), ("--watch", "7", "--format", "json")):
            naps: list[None] = []
            monkeypatch.setattr(terminal_served.time, "sleep", nap)
            code, out, _ = run(capsys, server.url, *arguments)
            assert code == 0
            if "json" in arguments:
                times = [json.loads(line)["at"] for line in out.splitlines()]
                read = [datetime.strptime(at, "%Y-%m-%dT%H:%M:%S%z").timestamp() for at in times]
                assert all(clock - 1 <= at <= time.time() for at in read)
            else:
                times = [line.rpartition("  at ")[2] for line in out.splitlines() if line.startswith(server.url)]
                assert all(re.fullmatch(r"\d\d:\d\d:\d\d", at) for at in times)
            assert len(times) == 2

    def test_a_first_reading_that_fails_ends_it(self, server: Server, capsys: Any) -> None:
        server.status = 503
        assert run(capsys, server.url, "--watch", "7")[0] == 3


# -- what it makes of the figures ------------------------------------------------------------


def judged(server: Server, share: float, *, held: int = 0, running: int = 3) -> str:
    metrics = Metrics()
    metrics.engine(0, running=running)
    metrics.engine(1, held=held, waiting=held)
    metrics.stepped(0, 100)
    metrics.stepped(1, 100, frozen=int(100 * share))
    return judgement(shown(metrics, server))


IS_ON = "The gate is on and held nothing back since the start"
HELD = "The gate held requests back {} since the start, in up to {} of the steps of an engine"
FULL = "nothing waits for it now; some rank is full most of the time: more ranks or a higher cap would make room."


@pytest.mark.parametrize(
    ("share", "more", "said"),
    [
        (0.0, {}, f"{IS_ON}: no rank with room had requests waiting while another was at its cap."),
        (
            0.0,
            {"held": 2, "running": 4},
            "The gate has begun to hold requests back: engine 0 is at the cap, and 2 requests wait for that.",
        ),
        (0.05, {}, f"{HELD.format('now and then', '5.0 %')}; nothing waits for it now."),
        (0.3, {}, f"{HELD.format('often', '30.0 %')}; nothing waits for it now."),
        (0.3, {"held": 2}, f"{HELD.format('often', '30.0 %')}; it does so now: 2 requests wait for that."),
        (0.6, {}, f"{HELD.format('most of the time', '60.0 %')}; {FULL}"),
    ],
)
def test_one_sentence_says_what_the_gate_does(server: Server, share: float, more: dict[str, int], said: str) -> None:
    assert judged(server, share, **more) == said


def test_before_the_first_step_it_says_that(server: Server, metrics: Metrics) -> None:
    assert judgement(shown(metrics, server)) == "The gate is on, and no step was made since the start."


def test_between_two_readings_without_a_step_it_says_that_a_rank_may_hang(server: Server, metrics: Metrics) -> None:
    metrics.stepped(0, 100)
    before = shown(metrics, server)
    said = "No step was made in these 0 s although 6 requests run: a rank may hang, and `status --pid` with the "
    now = shown(metrics, server)
    assert judgement(now, change(before, now)).startswith(said)
    metrics.engine(0, running=0)
    metrics.engine(1, running=0)
    now = shown(metrics, server)
    assert judgement(now, change(before, now)) == "The gate is on, and no step was made in these 0 s."


@pytest.mark.parametrize(
    ("change_it", "said"),
    [
        (
            lambda m: m.engine(1, digest="other"),
            "the engines have different digests: engine 0: 21f1e23a58ed, engine 1: o",
        ),
        (lambda m: m.engine(1, cap=8), "the engines have different caps: engine 0: 4, engine 1: 8"),
        (lambda m: m.engine(1, enabled=0), "the gate is on in some engines and off in others"),
        (lambda m: m.stalls.labels("tiny", "1").inc(2), "engine 1: 2 times a step waited so long that the log"),
    ],
    ids=["digests", "caps", "on and off", "stalls"],
)
def test_what_should_not_be_is_a_warning(server: Server, change_it: Callable[[Metrics], None], said: str) -> None:
    metrics = Metrics()
    metrics.engine(0)
    if "different" not in said and "some" not in said:
        metrics.engine(1)
    change_it(metrics)
    (warning,) = shown(metrics, server).warnings
    assert warning.startswith(said)


def test_an_engine_that_is_on_and_tells_no_figures_is_a_warning() -> None:
    labels = {"model_name": "m", "engine": "0"}
    told = served(Exposition("u", (Sample("vllm:balance_enabled", labels, 1.0),), 0.0, 0.0))
    assert told.warnings == ["engine 0 has the gate on and tells no figures of it"]
    assert told.seconds is None


def test_several_processes_figures_are_one_engines() -> None:
    """With several API servers a process may have a line of its own for each counter."""
    both = [{"model_name": "m", "engine": "0", "pid": pid} for pid in ("1", "2")]
    lines = [
        ("vllm:balance_enabled", 1.0),
        ("vllm:balance_frozen_steps_total", 2.0),
        ("vllm:num_requests_running", 3.0),
    ]
    lines += [("vllm:balance_gather_seconds_count", 4.0), ("vllm:balance_gather_seconds_sum", 0.5)]
    samples = [Sample(name, labels, value) for labels in both for name, value in lines]
    samples += [Sample("vllm:balance_gather_seconds_bucket", {**labels, "le": "+Inf"}, 4.0) for labels in both]
    (engine,) = served(Exposition("u", tuple(samples), 0.0, 0.0)).engines
    assert (engine.frozen_steps, engine.running) == (4, 3)
    assert engine.gather is not None
    assert (engine.gather.count, engine.gather.seconds, engine.gather.buckets) == (8, 1.0, ((float("inf"), 8.0),))


class TestQuantiles:
    GATHER = Gather(10, 0.1, ((0.001, 2.0), (0.002, 2.0), (0.01, 9.0), (float("inf"), 10.0)))

    @pytest.mark.parametrize(
        ("share", "seconds"),
        [(0.1, 0.0005), (0.2, 0.001), (0.5, 0.002 + 0.008 * 3 / 7), (0.9, 0.01), (0.99, float("inf"))],
    )
    def test_are_linear_within_a_bucket(self, share: float, seconds: float) -> None:
        assert self.GATHER.quantile(share) == pytest.approx(seconds)

    def test_there_are_none_of_nothing(self) -> None:
        assert Gather().quantile(0.5) is None
        assert Gather().mean is None

    def test_above_the_last_bound_only_that_is_told(self, server: Server, metrics: Metrics, capsys: Any) -> None:
        metrics.stepped(0, 1, seconds=5)
        server.text = metrics.text
        assert "gather    mean 5 s, p50 over 10 ms, p99 over 10 ms (estimated)" in run(capsys, server.url)[1]


# -- the address, and what answers there -----------------------------------------------------


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("https://h/metrics", "https://h/metrics"),
        (" http://h/metrics/ ", "http://h/metrics"),
        ("http://h/below/this", "http://h/below/this/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://h/metrics#part", "http://h/metrics"),
    ],
)
def test_the_servers_address_is_enough(written: str, url: str) -> None:
    assert metrics_url(written) == url


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("file:///etc/passwd", "its scheme is 'file'"),
        ("ftp://h/metrics", "its scheme is 'ftp'"),
        ("localhost:8000", "it has no scheme"),
        ("/metrics", "it has no scheme"),
        ("http://", "it has no host"),
        ("http://h:port", "Port could not be cast"),
        ("http://[::1", "Invalid IPv6 URL"),
    ],
)
def test_another_address_is_wrong_usage(capsys: Any, written: str, why: str) -> None:
    code, out, err = run(capsys, written)
    assert (code, out) == (2, "")
    assert err.startswith(f"BP745 bad address: {written}: {why}")


class TestWhatAnswers:
    @pytest.fixture
    def told(self, server: Server, capsys: Any) -> Callable[[], str]:
        """What is said on standard error, where nothing could be told."""

        def ask() -> str:
            code, out, err = run(capsys, server.url)
            assert (code, out) == (3, "")
            return err

        return ask

    def test_nobody(self, server: Server, told: Callable[[], str]) -> None:
        server.stop()
        assert told().startswith(f"BP740 server cannot be reached: {server.url}/metrics: Connection refused\n")

    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_a_redirect_is_not_followed(self, server: Server, told: Callable[[], str], status: int) -> None:
        server.status, server.headers = status, {"Location": "file:///etc/passwd"}
        assert "/metrics sends on to file:///etc/passwd, and that is not followed" in told()
        assert len(server.asked) == 1

    @pytest.mark.parametrize(
        ("status", "next_"), [(404, "give the address"), (401, "USER:PASSWORD"), (503, "give the")]
    )
    def test_an_error(self, server: Server, told: Callable[[], str], status: int, next_: str) -> None:
        server.status = status
        said = told()
        assert said.startswith(f"BP741 server answers something else: {server.url}/metrics answers {status} ")
        assert next_ in said

    def test_a_page(self, server: Server, told: Callable[[], str]) -> None:
        server.text, server.headers = b"<html>", {"Content-Type": "text/html; charset=utf-8"}
        assert told().startswith(f"BP743 not a vLLM server: {server.url}/metrics answers text/html")

    def test_another_format_than_was_asked_for(self, server: Server, metrics: Metrics, told: Callable[[], str]) -> None:
        server.headers = {"Content-Type": "application/openmetrics-text; version=1.0.0"}
        assert "BP741" in told()
        assert server.asked[0][1]["Accept"].startswith("text/plain")

    def test_another_server_that_has_metrics(self, server: Server, told: Callable[[], str]) -> None:
        server.text = b"# TYPE go_threads gauge\ngo_threads 12.0\n"
        assert told().startswith(
            f"BP743 not a vLLM server: {server.url}/metrics has metrics, and none of them is vLLM's"
        )

    def test_a_vllm_without_us(self, server: Server, told: Callable[[], str]) -> None:
        metrics = Metrics()
        metrics.running.labels("tiny", "0").set(3)
        server.text = metrics.text
        said = told()
        assert said.startswith("BP744 server has no balance metrics: ")
        assert "balance was never asked for in this server, or balance_patcher is not armed there" in said

    def test_half_of_what_it_announces(self, server: Server, metrics: Metrics, told: Callable[[], str]) -> None:
        server.cut = 100
        assert told().startswith(
            f"BP742 metrics cannot be read: {server.url}/metrics: the connection ended in the middle"
        )

    def test_half_a_line(self, server: Server, metrics: Metrics, told: Callable[[], str]) -> None:
        server.text = server.text[:-20]
        assert "it ends in the middle of a line: 'vllm:balance_gather_" in told()

    @pytest.mark.parametrize("text", [b'vllm:num_requests_running{engine="0" 3\n', b"vllm:x three\n", b"\xff\xfe\n"])
    def test_what_is_no_such_text(self, server: Server, told: Callable[[], str], text: bytes) -> None:
        server.text = text
        assert told().startswith("BP742 metrics cannot be read: ")

    def test_more_than_anybody_would_read(self, server: Server, metrics: Metrics, told: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(ours, "LONGEST", 1000)
        assert "is longer than 0 MiB" in told()

    def test_one_that_takes_for_ever(self, server: Server, metrics: Metrics, told: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(ours, "WHOLE", -1.0)
        assert "it did not come whole within" in told()

    def test_one_that_says_nothing(self, server: Server, metrics: Metrics, told: Any, monkeypatch: Any) -> None:
        over = threading.Event()
        monkeypatch.setattr(ours, "TIMEOUT", (5.0, 0.1))
        server.text, server.cut, server.then = b"", 10, lambda: over.wait(30) and None
        said = told()
        over.set()
        assert re.match(r"BP74[02] .*timed out", said)

    def test_a_password_is_not_shown(self, server: Server, capsys: Any) -> None:
        server.status = 401
        _, _, err = run(capsys, server.url.replace("//", "//me:secret@"))
        assert "secret" not in err
        assert server.asked[0][1]["Authorization"].startswith("Basic ")


def test_the_servers_own_clock_says_how_long_it_runs(server: Server, metrics: Metrics) -> None:
    metrics.started.set(1_000_000_000)
    server.date = "Sun, 09 Sep 2001 01:47:40 GMT"
    assert shown(metrics, server).seconds == 60
    server.date = "yesterday"
    assert shown(metrics, server).seconds == pytest.approx(time.time() - 1e9, abs=60)


def test_a_refusal_is_an_error_of_ours(server: Server) -> None:
    server.text = b""
    with pytest.raises(PatchError, match="BP743"):
        read(metrics_url(server.url))
