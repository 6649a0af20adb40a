"""Engines in a process of their own, as a program that uses ``vllm.LLM`` makes them; run in a lane's Python.

``python offline.py '[{"environment": {…}, "settings": {…}, "prompts": [3, 1]}, …]'`` makes one ``LLM`` after the
other, lets each answer so many prompts, and prints one line of JSON for each: ``{"answers": [[asked, got], …]}``, or
``{"error": …}`` where it was not made. A name that it was given is in it.
"""

import gc
import json
import os
import sys
import time


def run(engine):
    """One ``LLM``; how long each answer was to be, and how long it is."""
    from vllm import LLM, SamplingParams

    llm, answers = LLM(**engine["settings"]), []
    for count in engine["prompts"]:
        lengths = [5 + 7 * (number % 4) for number in range(count)]
        prompts = [{"prompt_token_ids": [3 + number] * (4 + number)} for number in range(count)]
        wanted = [SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths]
        done = llm.generate(prompts, wanted, use_tqdm=False)
        answers += [(length, len(answer.outputs[0].token_ids)) for length, answer in zip(lengths, done, strict=True)]
    # As vLLM's own example of offline data parallelism does: the engine cores come to rest before they are ended.
    time.sleep(1)
    return answers


def main(engines):
    for engine in engines:
        os.environ.update(engine["environment"])
        told = {"name": engine.get("name", "")}
        try:
            told["answers"] = run(engine)
        except Exception as error:  # noqa: BLE001 - a refusal is what some are made for
            told["error"], told["said"] = type(error).__name__, str(error)
        print(json.dumps(told), flush=True)  # noqa: T201 - who started this reads it
        gc.collect()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
