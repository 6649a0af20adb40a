"""Start vLLM's engine cores as vLLM starts them, up to where the model would be loaded; a process of its own.

``python -m balance_patcher.live_engine SETTINGS`` makes a real configuration of a tiny mixture-of-experts
model (no weights, no network) on two data-parallel ranks, and hands it to the client that vLLM's servers
use. Its engine cores are real processes: they load the plugins, shake hands, set up their data-parallel
group and pass ``EngineCore.__init__``. There, in the executor's place, :mod:`balance_patcher.probe` writes
down what it sees, and the engine ends. What comes after that (workers, weights, the scheduler object, the
busy loop) does not run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

#: A made-up model of vLLM's smallest mixture-of-experts kind; only its configuration exists.
TINY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def main(text: str) -> None:
    """Start the engine cores of each run, one run after the other, and wait until they have ended.

    Args:
        text: JSON: ``start_method``, and ``runs``: by folder for the reports, an ``additional_config``.
    """
    # Every process that vLLM spawns runs this module again: it stays light until it is asked.
    from .probe import FOLDER

    settings = json.loads(text)
    for folder, additional_config in settings["runs"].items():
        os.environ[FOLDER] = folder
        asyncio.run(_start(Path(folder), additional_config, settings["start_method"]))


async def _start(folder: Path, additional_config: dict[str, Any], start_method: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.core_client import EngineCoreClient

    from .probe import RANKS, Probe

    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_MOE), encoding="utf-8")
    arguments = AsyncEngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        data_parallel_size=RANKS,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        dtype="bfloat16",
        additional_config=additional_config,
    )
    config = arguments.create_engine_config()
    # Only now: a platform may have set it while the configuration was made, as the CPU's does.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method
    try:
        EngineCoreClient.make_async_mp_client(config, Probe, log_stats=False)
    except Exception as error:  # noqa: BLE001 - the engine cores end before they are up; what they wrote is what counts
        sys.stderr.write(f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1])
