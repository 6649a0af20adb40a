"""Lets a wave begin with all of its requests there, on every rank, so that what it does is settled by them alone.

A file of a rank says how many requests it is to have. Its engine core takes so many from its queue before it goes
on, whatever came first: the first of them, or the word that another rank has begun.
"""

from pathlib import Path


def hold(engine, folder):
    from vllm.v1.engine import EngineCoreRequestType

    file, handle = Path(folder) / f"burst-{engine.dp_rank}", engine._handle_client_request

    def _handle_client_request(kind, request):
        handle(kind, request)
        if file.exists():
            missing = int(file.read_text()) - (kind == EngineCoreRequestType.ADD)
            while missing:
                kind, request = engine.input_queue.get()
                handle(kind, request)
                missing -= kind == EngineCoreRequestType.ADD
            file.unlink()

    engine._handle_client_request = _handle_client_request
