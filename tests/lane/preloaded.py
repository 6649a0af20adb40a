"""What every rank imports and looks up: done once, in the process that the ranks are forked from."""

import harness
import vllm.distributed.elastic_ep.elastic_state
import vllm.v1.engine.core
import vllm.v1.executor.abstract
import vllm.v1.structured_output  # noqa: F401

harness.vllm_config(harness.Shape())  # vLLM looks the model up in a process of its own
