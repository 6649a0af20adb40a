"""The ways in which vLLM starts the engine cores of a data-parallel model, as commands that a person would type.

A launch is one command or several, each in a session of its own; which rank runs in which command is what makes
the launches differ. Every command is vLLM's own, and nothing in it is installed by hand: our entry points are found
beside vLLM's, as they are where a person has installed both. :class:`Rank` makes one rank unlike the others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from processes import HERE, ROOT, surroundings

#: Another sequence in each process: several runs of these tests may look for ports at once.
PICK = random.Random(os.getpid())
RANKS = 2
CAP = 4
HOST = "127.0.0.1"
MODEL = HERE.parent / "lane" / "tiny_moe"
#: In the engine core's own process: half as many processes as with the platform's default, which would take "uni".
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
#: Where `make test-all` installs Ray, so that only the test that needs it has it.
RAY = Path(sys.prefix) / "ray"
ASKED = {"enable_balance_scheduling": True}

#: What each engine has, wherever it is started: a tiny model and the start that costs least.
ENGINE = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True,
    "max_model_len": 512, "async_scheduling": False, "distributed_executor_backend": EXECUTOR,
}  # fmt: skip
LIGHT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "ENGINE_START": "fork",
}  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """What one rank is started with.

    Attributes:
        balance: Whether its configuration asks for balance.
        cap: The requests that it may run.
        installed: Whether vLLM takes our entry points there.
        environment: More for its environment. A rank that shares its command with others gets it when its process
            is started; what vLLM or we have read in the parent by then is not read again unless it is spawned.
        arguments: More words for its command, where it has one of its own.
    """

    balance: bool = True
    cap: int = CAP
    installed: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()


def _environment(rank: Rank) -> dict[str, str]:
    """What is set for a rank besides. Without our entry points vLLM is told to take those of the tests only.

    To leave their folder out would not do: a checkout from which balance_patcher was installed has them too.
    """
    return {**({} if rank.installed else {"VLLM_PLUGINS": "engine_probe"}), **rank.environment}


@dataclass(frozen=True)
class Command:
    """One command of a launch.

    Attributes:
        words: The command, after the lane's Python.
        environment: What is set for it besides.
        ports: Where it is to be asked over HTTP.
        places: More folders in which Python looks.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    places: tuple[Path, ...] = ()

    def start_environment(self, folder: Path) -> dict[str, str]:
        """The environment in full; ``folder`` is that of the launch, and our entry points are in its ``site``."""
        places = [ROOT, HERE / "site", HERE.parent / "lane", command_site(folder), *self.places, folder / "site"]
        return {**surroundings(places), **LIGHT, "ENGINE_PROBE": str(folder), **self.environment}


def command_site(folder: Path) -> Path:
    """A folder with the metadata of a distribution called vllm: its command asks for it, and the CPU build has none."""
    info = folder / "vllm" / f"vllm-{version('vllm-cpu')}.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return info.parent


def free_ports(count: int) -> list[int]:
    """Adjacent ports that nobody listens on, outside the range from which the kernel gives ports away."""
    while True:
        first = PICK.randrange(12000, 30000)
        ports = list(range(first, first + count))
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind((HOST, port))
        except OSError:
            continue
        return ports


def _words(settings: Mapping[str, object]) -> list[str]:
    """Settings of an engine as words of a command."""
    words = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _settings(rank: Rank) -> dict[str, object]:
    return {**ENGINE, "max_num_seqs": rank.cap, "additional_config": ASKED if rank.balance else {}}


def _serve(rank: Rank, *words: object, ports: Sequence[int] = (), environment: Mapping[str, str] = {}) -> Command:
    """``vllm serve``, as the installed command runs it."""
    given = [*map(str, words), *(["--port", str(ports[0])] if ports else [])]
    told = ("-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), "--served-model-name", "tiny", "--host", HOST)
    return Command(
        (*told, *_words(_settings(rank)), *given, *rank.arguments),
        {**environment, **_environment(rank)}, tuple(ports),
    )  # fmt: skip


def _apart(each: Mapping[int, Rank]) -> dict[str, str]:
    """How ranks of one command are told what is different for them: the probe does it where they are started."""
    told = {
        number: {
            "environment": _environment(rank),
            "max_num_seqs": rank.cap, "additional_config": ASKED if rank.balance else {},
        }
        for number, rank in each.items()
    }  # fmt: skip
    if any(rank.arguments for rank in each.values()):
        raise ValueError("ranks that share a command cannot have arguments of their own")
    forked = [number for number, rank in each.items() if _environment(rank)]
    return {"ENGINE_RANKS": json.dumps(told), **({"ENGINE_START": "spawn"} if forked else {})} if told else {}


# -- the launches: each gives the commands that start all ranks; `each` holds the ranks that are unlike the others --


def old_server(each: Mapping[int, Rank] = {}) -> list[Command]:
    """The module that serves, without the command around it: one server that sends to all ranks."""
    (port,) = free_ports(1)
    served = _serve(Rank(), "--data-parallel-size", RANKS, ports=[port], environment=_apart(each))
    words = tuple(word for word in served.words[2:] if word not in ("serve", str(MODEL)))
    words = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), *words)
    return [Command(words, served.environment, served.ports)]


def internal(each: Mapping[int, Rank] = {}, servers: int = 1) -> list[Command]:
    """Some servers, each of which sends to all ranks."""
    (port,) = free_ports(1)
    words = ("--data-parallel-size", RANKS, "--api-server-count", servers)
    return [_serve(Rank(), *words, ports=[port], environment=_apart(each))]


def unasked() -> list[Command]:
    """One server that sends to all ranks, and nobody asks for balance."""
    (port,) = free_ports(1)
    return [_serve(Rank(balance=False), "--data-parallel-size", RANKS, ports=[port])]


def headless(each: Mapping[int, Rank] = {}) -> list[Command]:
    """Two nodes: the first has the server and rank 0, the second rank 1 and no server."""
    port, rpc = free_ports(2)
    both = (
        "--data-parallel-size", RANKS, "--data-parallel-size-local", 1, "--data-parallel-address", HOST,
        "--data-parallel-rpc-port", rpc,
    )  # fmt: skip
    return [
        _serve(each.get(0, Rank()), *both, "--api-server-count", 1, ports=[port]),
        _serve(each.get(1, Rank()), *both, "--headless", "--data-parallel-start-rank", 1),
    ]


def external(each: Mapping[int, Rank] = {}) -> list[Command]:
    """An external balancer: one command a rank, each with a server of its own."""
    *ports, rpc = free_ports(RANKS + 1)
    both = ("--data-parallel-size", RANKS, "--data-parallel-address", HOST, "--data-parallel-rpc-port", rpc)
    return [
        _serve(each.get(rank, Rank()), *both, "--data-parallel-rank", rank, ports=[port])
        for rank, port in enumerate(ports)
    ]


def supervised(each: Mapping[int, Rank] = {}) -> list[Command]:
    """An external balancer with one command: it starts a server for each rank, at a port of its own."""
    first, second, above = free_ports(3)
    words = (
        "--data-parallel-size", RANKS, "--data-parallel-size-local", RANKS, "--data-parallel-multi-port-external-lb",
        "--data-parallel-supervisor-port", above,
    )  # fmt: skip
    return [_serve(Rank(), *words, ports=[first, second], environment=_apart(each))]


def hybrid(each: Mapping[int, Rank] = {}) -> list[Command]:
    """Two nodes with a server and two ranks each; a server sends to its own ranks only. Four ranks in all.

    Each has a quarter of an expert, and the kernel wants 64 rows of it: the experts are twice as large as elsewhere.
    """
    first, second, rpc = free_ports(3)
    both = (
        "--data-parallel-size", 4, "--data-parallel-size-local", 2, "--data-parallel-address", HOST,
        "--data-parallel-rpc-port", rpc, "--data-parallel-hybrid-lb", "--api-server-count", 1,
        "--hf-overrides", json.dumps({"moe_intermediate_size": 128}),
    )  # fmt: skip
    return [
        _serve(Rank(), *both, "--data-parallel-start-rank", start, ports=[port], environment=_apart(each))
        for start, port in ((0, first), (2, second))
    ]


def spawned(commands: Sequence[Command]) -> list[Command]:
    """The same, with vLLM's own way to start processes on the CPU; it takes several times as long."""
    return [replace(command, environment={**command.environment, "ENGINE_START": "spawn"}) for command in commands]


def ray(place: str) -> list[Command]:
    """Ranks that are actors of Ray, which keeps its files in ``place``.

    More processors are claimed than there are: each rank takes two.
    """
    (port,) = free_ports(1)
    words = ("--data-parallel-size", RANKS, "--data-parallel-backend", "ray", "--api-server-count", 1)
    told = {
        "ENGINE_RAY": "1", "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 2 * RANKS}), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": place, "RAY_DEDUP_LOGS": "0",
    }  # fmt: skip
    served = _serve(Rank(), *words, ports=[port], environment=told)
    return [replace(served, places=(RAY,))]


def ray_found() -> bool:
    """Whether Ray is installed in the lane, or beside it."""
    return importlib.util.find_spec("ray") is not None or (RAY / "ray").is_dir()


def offline(counts: Sequence[Sequence[int]], each: Mapping[int, Rank] = {}) -> list[Command]:
    """One process a rank, each with an ``LLM`` of its own and with no coordinator.

    Args:
        counts: For each rank, how many prompts it gets in one call of ``generate`` after the other.
        each: The ranks that are unlike the others.
    """
    place = _meeting_place(len(counts))
    return [
        _python(each.get(rank, Rank()), [{"environment": {**place, "VLLM_DP_RANK": str(rank)}, "prompts": prompts}])
        for rank, prompts in enumerate(counts)
    ]


def _meeting_place(size: int) -> dict[str, str]:
    port = free_ports(10)[0]  # each group that the ranks form takes the next one
    return {"VLLM_DP_SIZE": str(size), "VLLM_DP_MASTER_IP": HOST, "VLLM_DP_MASTER_PORT": str(port)}


def _python(rank: Rank, engines: Sequence[Mapping[str, object]]) -> Command:
    """One process that makes an ``LLM`` after the other: see offline.py."""
    settings = {"model": str(MODEL), **_settings(rank)}
    told = [{**engine, "settings": {**settings, **dict(engine.get("settings", {}))}} for engine in engines]
    words = (str(HERE / "offline.py"), json.dumps(told))
    return Command(words, _environment(rank))


def without_a_loop() -> list[Command]:
    """Two processes whose engine cores have no busy loop: as two ranks in either way, then as a single one."""
    place, torchrun = _meeting_place(RANKS), {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_ports(1)[0])}
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    alone = {**inside, "VLLM_DP_SIZE": "1", "VLLM_DP_RANK": "0"}
    launcher = {"distributed_executor_backend": "external_launcher"}
    single = [
        {"name": "in process, one rank", "environment": alone, "prompts": [3]},
        {
            "name": "external launcher, one rank", "settings": launcher, "prompts": [3],
            "environment": {**alone, **torchrun, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        },
    ]  # fmt: skip
    return [
        _python(
            Rank(),
            [
                {
                    "name": "in process, two ranks", "prompts": [1],
                    "environment": {**inside, **place, "VLLM_DP_RANK": str(rank)},
                },
                {
                    "name": "external launcher, two ranks", "prompts": [1],
                    "settings": {**launcher, "data_parallel_size": RANKS},
                    "environment": {**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
                },
                single[rank],
            ],
        )
        for rank in range(RANKS)
    ]  # fmt: skip
