"""A KV connector with every answer a connector may give, and nothing behind it.

What a request gets is written in its ``kv_transfer_params["load"]``:

* ``"none"``: nothing is cached elsewhere;
* ``"sync"``: one block is loaded in the step that schedules the request;
* ``"async"``: one block or more is loaded while the request waits (``WAITING_FOR_REMOTE_KVS``);
* ``"undecided"``: the connector does not know for two questions, then says none.

``kv_transfer_params["send"]`` keeps a finished request's blocks until they are reported as sent.
Every question the scheduler asks is written to ``asked`` and travels in the metadata of the step,
so that two schedulers which ask in a different order differ in what they hand to the workers.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

UNDECIDED_ANSWERS = 2


@dataclass
class ToyMetadata(KVConnectorMetadata):
    """What the workers would be told for one step."""

    loads: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    finished: list = field(default_factory=list)
    scheduled: dict = field(default_factory=dict)


class ToyConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler side of a ``kv_both`` connector; the worker side is ``traces.World``."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        self.questions = {}
        self.plans = {}
        self.loading = set()
        self.step = ToyMetadata()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """Tokens that could be loaded beyond ``num_computed_tokens``, and whether asynchronously."""
        wish = (request.kv_transfer_params or {}).get("load", "none")
        number = self.questions[request.request_id] = self.questions.get(request.request_id, 0) + 1
        room = (request.num_prompt_tokens - 1) // self.block_size * self.block_size - num_computed_tokens
        answer = (0, False)
        if wish == "undecided" and number <= UNDECIDED_ANSWERS:
            answer = (None, False)
        elif wish in ("sync", "async") and room > 0 and not request.num_preemptions:
            answer = (self.block_size if wish == "sync" else room, wish == "async")
        self.step.asked.append((request.request_id, num_computed_tokens, answer))
        return answer

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """Plan the load of ``num_external_tokens`` into the blocks the request just got."""
        if num_external_tokens:
            wish = request.kv_transfer_params["load"]
            blocks = [list(group) for group in blocks.get_block_ids()]
            self.step.loads.append((request.request_id, wish, num_external_tokens, blocks))
            if wish == "async":
                self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output):
        """Hand over what was planned since the last step."""
        metadata, self.step = self.step, ToyMetadata()
        metadata.scheduled = dict(scheduler_output.num_scheduled_tokens)
        return metadata

    def update_connector_output(self, connector_output):
        """Forget the loads which the workers report as done."""
        self.loading.difference_update(connector_output.finished_recving or ())

    def request_finished(self, request, block_ids):
        """Keep the blocks of a request that is to be sent on, unless it was never computed."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        """As ``request_finished``, for every KV cache group."""
        send = bool((request.kv_transfer_params or {}).get("send"))
        keep = send and request.request_id not in self.loading and request.num_output_tokens > 0
        self.step.finished.append((request.request_id, [list(group) for group in block_ids], keep))
        return keep, {"kept": keep}

    def start_load_kv(self, forward_context, **kwargs):
        """Worker side, not used."""

    def wait_for_layer_load(self, layer_name):
        """Worker side, not used."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Worker side, not used."""

    def wait_for_save(self):
        """Worker side, not used."""
