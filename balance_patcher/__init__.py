"""Patch vLLM at run time from declared deltas; see the README."""

__version__ = "0.1.0"
