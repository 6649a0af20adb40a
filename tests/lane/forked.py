"""Processes that are forked from one which has imported vLLM for all of them."""

import multiprocessing
import os
import sys
from unittest import mock


def process(target, *given):
    """Start a process that calls ``target(*given, pipe)``; it, and our end of the pipe.

    There is one server that forks in a run of the tests, whoever starts it first.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    ours, theirs = context.Pipe()
    started = context.Process(target=target, args=(*given, theirs), daemon=True)
    # Python hands its own path on to that server, which does not look there for what it imports first.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        started.start()
    theirs.close()
    return started, ours
