"""What a person sees of rewritten code: tracebacks, sources, the debugger, and the way back to upstream.

One script is run in every Python that this machine has, with nothing but its standard library.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from balance_patcher.build import show

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: Those that have to be looked at; a later one is welcome.
SUPPORTED = VERSIONS[:4]

UPSTREAM = '''
"""Upstream's module. ÄÖÜ: columns count bytes, lines do not care."""
from __future__ import annotations

import contextlib
\f
# A form feed stands above: it ends no line.
LIMIT = 3


class Engine:
    """Upstream's class."""

    def __init__(self):
        self.running = []
        self.flag = None
        self.group = None

    def step(self, request, *, fail=None):
        """What a step does."""
        # Upstream's own comment.
        note = """
at column 0: \x0c \x1c \x85 \u2028
"""
        while True:
            # The stop.
            if len(self.running) >= LIMIT:
                break
            self.running.append(request)
        if fail:
            raise fail(note, len(self.running))
        return len(self.running)

    def hook(self, value, *more):
        """Upstream's hook."""
        if value is None:
            raise LookupError("upstream's line")
        return value


class Below(Engine):
    pass
'''

SCRIPT = '''
import bdb, inspect, io, json, linecache, os, pdb, sys, traceback, warnings

known = set(sys.modules)
warnings.simplefilter("error")
from pathlib import Path

from balance_patcher.build import build
from balance_patcher.delta import (
    AddParameter, Anchor, CallThrough, Delta, InsertAfter, InsertBefore, Level, Prologue, Variant,
)
from balance_patcher.feature import CalledOnce, Feature, RuntimeClass
from balance_patcher.source import DirSource, Lane

root = Path(os.environ["PACKAGES"])
sys.path.insert(0, str(root))
SEEN = "<balance_patcher seen.engine>"
THROUGH = "<balance_patcher seen.engine:Engine.hook>"


def delta(name, target, *edits, anchor=None, after=(), exports=None):
    variant = Variant("only", anchor, edits, exports or {})
    return Delta(name, "seen.engine:" + target, "why", "upstream", "when", (variant,), after=after)


def ours(upstream):
    class Ours(upstream):
        pass

    return Ours


stop = Anchor("if $COUNT >= LIMIT: break", inside=(Level("loop", "while $_"),))
feature = Feature(
    "seen",
    "a test",
    (
        delta("seen.parameter", "Engine.step", AddParameter("extra", "None"), Prologue("if extra == 1:\\n    return super().step(request)")),
        delta("seen.gate", "Engine.step", InsertBefore("frozen = self.flag is not None and self.flag.item()", at="loop"),
              InsertAfter("if frozen:\\n    break"), anchor=stop, exports={"count": "$COUNT"}),
        delta("seen.gather", "Engine.hook", CallThrough("self.group.gather()")),
    ),
    RuntimeClass("Ours", "seen.engine:Engine", ours),
)
built = build(feature, Lane("live", DirSource("dir", root)))
known_after = set(sys.modules) - known
import seen.engine as engine

Ours = built.classes["seen.engine:Engine"]
step = built.functions["seen.engine:Engine.step"]
hook = built.functions["seen.engine:Engine.hook"]
upstream = root.joinpath("seen", "engine.py").read_text(encoding="utf-8").split("\\n")
rewritten = built.rewrites["seen.engine"]
lines = linecache.getlines(SEEN)
found = {}


def number(text, where=lines):
    """The only line that has a text, counted from 1."""
    numbers = [at for at, line in enumerate(where, 1) if text in line]
    assert len(numbers) == 1, (text, numbers)
    return numbers[0]


def last_frame(call):
    try:
        call()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        printed = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return frame.filename, frame.lineno, frame.line, frame.name, printed
    raise AssertionError("nothing was raised")


def expect(what, condition, *detail):
    found[what] = bool(condition)
    if not condition:
        print(what, *detail, file=sys.stderr)


class Flag:
    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


def check_all(when):
    # an upstream line
    filename, lineno, line, name, printed = last_frame(lambda: Ours().step(1, fail=KeyError))
    raising = "raise fail(note, len(self.running))"
    expect(when + "an upstream line in a traceback", (filename, line, name) == (SEEN, raising, "step"), filename, line)
    expect(when + "its number", lineno == number(raising), lineno)
    expect(when + "it is printed", f'File "{SEEN}", line {lineno}, in step\\n    {raising}\\n' in printed, printed)
    back, by = rewritten.line_map[lineno - 1]
    expect(when + "its way back", by is None and upstream[back - 1].strip() == raising, back, by)

    # an inserted line
    subject = Ours()
    subject.flag = object()
    filename, lineno, line, name, printed = last_frame(lambda: subject.step(1))
    inserted = "frozen = self.flag is not None and self.flag.item()  # bp: seen.gate"
    expect(when + "an inserted line in a traceback", (filename, line, name) == (SEEN, inserted, "step"), filename, line)
    expect(when + "its number too", lineno == number(inserted), lineno)
    expect(when + "it is printed too", inserted in printed, printed)
    expect(when + "whose line it is", rewritten.line_map[lineno - 1] == (None, "seen.gate"), rewritten.line_map[lineno - 1])

    # the call-through: upstream's part in upstream's own file, ours in ours
    filename, lineno, line, name, printed = last_frame(lambda: Ours().hook(None))
    expect(when + "upstream's part of a hook", filename == engine.__file__ and line == 'raise LookupError("upstream\\'s line")', filename)
    expect(when + "the call to it", "balance_result = super().hook(value, *more)  # bp: seen.gather" in printed, printed)
    filename, lineno, line, name, printed = last_frame(lambda: Ours().hook(1))
    expect(when + "our part of a hook", (filename, line, name) == (THROUGH, "self.group.gather()  # bp: seen.gather", "hook"), filename, line)

    # an exported method
    filename, lineno, line, name, printed = last_frame(lambda: Ours.count(None))
    expect(when + "an exported method", filename.startswith("<balance_patcher ") and "return" in line and "len(self.running)" in line, line)

    # sources
    source = inspect.getsource(step)
    marks = [text for text in source.splitlines() if "# bp: " in text]
    expect(when + "getsource shows the markers", len(marks) == 5 and sum("seen.gate" in m for m in marks) == 3, marks)
    expect(when + "getsource shows upstream's comments", "# Upstream's own comment." in source and "# The stop." in source)
    expect(when + "getsource shows all of it", source.rstrip().endswith("return len(self.running)") and "at column 0" in source, source)
    block, first = inspect.getsourcelines(step)
    expect(when + "getsourcelines", first == step.__code__.co_firstlineno == number("def step(") and block == lines[first - 1 : first - 1 + len(block)], first)
    expect(when + "each line of it", all(lines[n - 1].strip() for *_, n in step.__code__.co_lines() if n), None)
    expect(when + "getsourcefile", inspect.getsourcefile(step) == inspect.getfile(step) == SEEN, inspect.getsourcefile(step))
    through, first = inspect.getsourcelines(hook)
    expect(when + "a hook's source", "self.group.gather()  # bp: seen.gather" in "".join(through) and through[0].strip().startswith("def hook("), through)
    expect(when + "upstream's own source", "# bp: " not in inspect.getsource(engine.Engine.step) and "def step(self, request, *, fail=None):" in inspect.getsource(engine.Engine.step))


check_all("")
linecache.checkcache()
check_all("after checkcache: ")
linecache.checkcache(SEEN)
check_all("after checkcache of the name: ")

# a frame on the stack, as a debugger sees it
class Frames:
    def item(self):
        frame = sys._getframe(1)
        info = inspect.getframeinfo(frame, context=3)
        expect("a frame's context", info.filename == SEEN and "self.flag.item()" in info.code_context[info.index], info)
        debugger = pdb.Pdb(stdout=(out := io.StringIO()), nosigint=True, readrc=False)
        debugger.reset()
        debugger.curframe = frame
        debugger.curframe_locals = frame.f_locals
        debugger.curindex = 0
        debugger.stack = [(frame, frame.f_lineno)]
        debugger.do_list(str(frame.f_lineno))
        listing = out.getvalue()
        expect("pdb lists it", f"{frame.f_lineno}" in listing and "frozen = self.flag is not None" in listing and "while True:" in listing, listing)
        debugger.lineno = None
        debugger.do_longlist("")
        expect("pdb lists the function", "def step(" in out.getvalue()[len(listing):] and "# bp: seen.parameter" in out.getvalue(), out.getvalue())
        expect("pdb has no end of it", "***" not in out.getvalue(), out.getvalue())
        return False

subject = Ours()
subject.flag = Frames()
subject.step(1)


# a breakpoint by file and line, hit while it runs
class Stops(bdb.Bdb):
    hits = []

    def user_line(self, frame):
        if self.break_here(frame):
            self.hits.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        self.set_continue()


stops = Stops()
wrong = stops.set_break(SEEN, number("if frozen:"))
subject = Ours()
stops.runcall(subject.step, 1)
stops.clear_all_breaks()
expect("a breakpoint is taken", wrong is None, wrong)
expect("a breakpoint is hit", (SEEN, number("if frozen:"), "step") in stops.hits, stops.hits)

# every line has a way back
mapped = rewritten.line_map
expect("one entry a line", len(mapped) == len(lines) == rewritten.text.count("\\n"), len(mapped), len(lines))
back = [(at, line) for at, (line, delta) in enumerate(mapped, 1) if delta is None]
expect("upstream's lines in order, none left out", [line for _, line in back] == list(range(1, len(upstream))), back)
same = [at for at, line in back if lines[at - 1].rstrip("\\n") != upstream[line - 1]]
expect("they have upstream's text, but for the signature", [lines[at - 1].strip() for at in same] == ["def step(self, request, extra=None, *, fail=None):"], same)
expect("the others have a mark", all(("# bp: " + delta) in lines[at] for at, (line, delta) in enumerate(mapped) if delta))

standard = set(sys.stdlib_module_names) | {"balance_patcher", "seen", "__main__", "__mp_main__"}
foreign = sorted({name.partition(".")[0] for name in known_after} - standard)
print(json.dumps({"found": found, "foreign": foreign, "version": list(sys.version_info[:3]),
                  "ours": sorted(name for name in known_after if name.startswith("balance_patcher"))}))
'''  # noqa: E501


# -- Pythons ------------------------------------------------------------------------------------


def _version(python: str | Path) -> str | None:
    """``3.12``, if that is what the program is and if it really runs; a shim may only print what is missing."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def python_of(version: str) -> str | None:
    """A Python of that version on this machine: this one, on PATH, pyenv's, or uv's."""
    candidates: list[str | Path | None] = [sys.executable, shutil.which(f"python{version}")]
    candidates += sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    uv = shutil.which("uv")
    if uv:
        done = subprocess.run(
            [uv, "python", "find", "--offline", version], capture_output=True, text=True, timeout=60, check=False
        )
        candidates.append(done.stdout.strip() if done.returncode == 0 else None)
    return next((str(python) for python in candidates if python and _version(python) == version), None)


@pytest.fixture(scope="module", params=VERSIONS)
def report(request, tmp_path_factory):
    """What the script found in one Python."""
    version = request.param
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine (looked at PATH, ~/.pyenv/versions and uv)")
    root = tmp_path_factory.mktemp(f"seen-{version}")
    (root / "seen").mkdir()
    (root / "seen" / "__init__.py").write_text("")
    (root / "seen" / "engine.py").write_text(UPSTREAM, encoding="utf-8")
    script = root / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    # No site-packages: the standard library and this checkout are all there is.
    environment |= {"PYTHONPATH": str(ROOT), "PACKAGES": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-S", "-s", str(script)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr, "wanted": version}


def test_it_ran_in_the_python_that_was_asked_for(report):
    assert "{}.{}".format(*report["version"]) == report["wanted"]


def test_everything_that_a_person_looks_at_shows_what_runs(report):
    assert len(report["found"]) > 50
    assert [what for what, held in report["found"].items() if not held] == [], report["stderr"]


def test_building_imports_only_the_standard_library(report):
    assert report["foreign"] == []


def test_building_imports_no_module_of_the_command_line(report):
    """What an engine process pays for is the install path alone."""
    parts = {name.partition(".")[2] for name in report["ours"]}
    assert {"build", "source", "plan", "rewrite", "names", "invariants", "proof"} <= parts
    assert parts.isdisjoint({"cli", "report", "check", "pins", "index", "wheel", "gitrepo", "web", "__main__"})


def test_the_python_that_runs_the_tests_is_found():
    version = "{}.{}".format(*sys.version_info)
    if version in VERSIONS:
        assert _version(python_of(version)) == version


# -- the text under a name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["a = 1\nb = 2\n", "a = 1\r\nb = 2\r\n", "a = 1\rb = 2\r", "a = 1\nb = 2", "a = 1\r\nb = 2",
     "a = 1  # \x0c \x0b \x1c \x1d \x85 \u2028\nb = 2\n", "\x0c\na = 1\n\x0c\nb = 2\n"],
    ids=["lf", "crlf", "cr", "no end", "crlf, no end", "what ends no line", "form feeds"],
)  # fmt: skip
def test_the_lines_shown_are_the_lines_that_the_compiler_counts(text):
    import ast
    import linecache

    name = "<balance_patcher of a test>"
    show(name, text)
    try:
        where = next(node.lineno for node in ast.parse(text).body if node.targets[0].id == "b")
        assert linecache.getline(name, where) == "b = 2\n"
        assert linecache.getline(name, where + 1) == ""
        linecache.checkcache()
        assert linecache.getline(name, where) == "b = 2\n"
    finally:
        del linecache.cache[name]
