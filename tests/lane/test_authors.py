"""The guide for authors on this lane's real vLLM: the same steps, and what is written runs in a real scheduler."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import installation
from balance_patcher.anchors import find_anchor
from balance_patcher.delta import Anchor, Level
from balance_patcher.errors import PatchError
from balance_patcher.loading import feature_of_file
from balance_patcher.pointing import statement_at
from balance_patcher.proposal import propose
from balance_patcher.registry import find_feature
from balance_patcher.source import InstalledSource, Lane
from balance_patcher.targets import find_target
from tests.authors import FILE, block, commands, edit

ROOT = Path(__file__).resolve().parents[2]
NAME = "say_preempted"
SCHEDULE = f"{harness.TARGET}.schedule"


def line():
    """The line of the ``break`` that the guide points at, in this vLLM."""
    target = find_target(Lane("installed", InstalledSource()), SCHEDULE)
    anchor = Anchor("break", inside=(Level("if", "if preempted_req == request"),))
    (match,) = find_anchor(target, anchor)[0]
    return match.node.lineno


def call(folder, command):
    """One command of the guide, for this vLLM instead of the releases that it names."""
    words = [word.replace("scheduler.py:505", f"scheduler.py:{line()}") for word in command[1:]]
    words = ["here" if word == "main" else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The author's folder after the fifth step."""
    folder = tmp_path_factory.mktemp("author")
    table, *_ = block("1.", "toml").splitlines()
    (folder / "pyproject.toml").write_text(f'{table}\nhere = "installed"\n')
    for command in (commands("2.")[0], *commands("3.")):
        call(folder, command)
    edit(folder, "4.")
    for section in ("4.", "5."):
        for command in commands(section):
            done = call(folder, command)
    added = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert added == block("5.", "text").splitlines()
    return folder


@pytest.fixture
def logged(monkeypatch):
    """What upstream's module logs."""
    found = []
    module = sys.modules[harness.upstream_scheduler().__module__]
    told = {name: lambda *_, **__: None for name in ("debug", "warning", "warning_once", "error", "info_once")}
    told["info"] = lambda text, *arguments: found.append(text % arguments)
    monkeypatch.setattr(module, "logger", SimpleNamespace(**told))
    return found


# Room for three blocks of 16 tokens, and a prompt of five.
SHAPE = harness.Shape(tokens=16, blocks=4, reserve_full=False)
SAID = ["no blocks for big"]


def scheduler_of(class_, extra=None):
    scheduler = harness.new_scheduler(class_, SHAPE, harness.vllm_config(SHAPE, extra))
    scheduler.add_request(harness.new_request("big", 80, 1))
    return scheduler


def until_it_is_given_up(scheduler):
    """Steps of a prompt that does not fit; the last one preempts the request for itself."""
    computed = [sum(scheduler.schedule().num_scheduled_tokens.values()) for _ in range(4)]
    assert computed == [16, 16, 16, 0]


def test_it_runs_and_is_taken_out_again(written, logged, monkeypatch):
    monkeypatch.chdir(written)
    upstream = harness.upstream_scheduler()
    before = vars(upstream)["schedule"]
    scheduler = scheduler_of(upstream)
    names = {}
    try:
        exec(block("6.", "python", 0), names)  # noqa: S102 - the guide is ours
        assert vars(upstream)["schedule"] is not before
        until_it_is_given_up(scheduler)
        assert logged == SAID
        exec(block("6.", "python", 1), names)  # noqa: S102
    finally:
        installation.uninstall(NAME)
    assert vars(upstream)["schedule"] is before
    until_it_is_given_up(scheduler_of(upstream))
    assert logged == SAID


@pytest.fixture(scope="module")
def shared(written):
    edit(written, "7.")
    call(written, commands("7.")[1])
    return feature_of_file(written / FILE)


@pytest.mark.parametrize(("extra", "said"), [({NAME: True}, SAID), ({}, [])])
def test_with_a_flag_it_runs_where_it_is_asked_for(extra, said, shared, logged):
    try:
        installation.install(shared)
        module = sys.modules[harness.upstream_scheduler().__module__]
        assert module.Scheduler.__name__ == "TalkingScheduler"
        scheduler = scheduler_of(module.Scheduler, extra)
        until_it_is_given_up(scheduler)
        assert logged == said
    finally:
        installation.uninstall(NAME)


@pytest.mark.parametrize("parts", [(NAME, "prefill_preemption"), ("balance", NAME)])
def test_it_shares_schedule_with_others(parts, shared, logged):
    features = [shared if name == NAME else find_feature(name) for name in parts]
    try:
        installation.install_together(features)
        module = sys.modules[harness.upstream_scheduler().__module__]
        scheduler = scheduler_of(module.Scheduler, {NAME: True})
        until_it_is_given_up(scheduler)
        assert logged == SAID
    finally:
        for name in parts:
            installation.uninstall(name)


def test_every_fourth_statement_of_the_installed_schedule_has_an_anchor_or_is_said_twice():
    target = find_target(Lane("installed", InstalledSource()), SCHEDULE)
    statements = [suite[at] for _, _, suite, at in target.places.values()][::4]
    refused = []
    for statement in statements:
        try:
            pointed = statement_at("installed", target, statement.lineno)
            (match,) = propose([pointed.place]).matches
            assert statement in match.statements
        except PatchError as error:
            refused += [failure.code for failure in error.failures]
    assert len(refused) <= len(statements) // 20
    assert set(refused) <= {"BP403", "BP805"}
