"""What the engine cores of a drive write down while it runs, as its driver reads it."""

import json
import os
from pathlib import Path


def folder():
    return Path(os.environ["ENGINE_PROBE"])


def records():
    """The file of each rank, the lower one first: a line on its process, then one a gather."""
    return sorted(folder().glob("rank-*.jsonl"))


def gathered():
    """How often each rank has gathered."""
    return [file.read_bytes().count(b"\n") - 1 for file in records()]


def busy():
    """Of each rank, whether requests ran there when it gathered last."""
    return [json.loads(file.read_text().splitlines()[-1]).get("running", 0) > 0 for file in records()]


def pids():
    """The process of each rank's engine core."""
    return [json.loads(file.read_text().partition("\n")[0])["pid"] for file in records()]
