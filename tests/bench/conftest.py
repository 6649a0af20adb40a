"""Benchmarks that run in a lane; they share the harness and the fixtures of ``tests/lane``."""

import runpy
import sys
from pathlib import Path

LANE = Path(__file__).resolve().parent.parent / "lane"
sys.path.insert(0, str(LANE))

globals().update(
    {name: value for name, value in runpy.run_path(str(LANE / "conftest.py")).items() if name == "balance_class"}
)
