"""The reference: a frozen, sharded copy of the start, for KL terms."""

from transformers import AutoModelForCausalLM

from rltrain.protocol import DataProto
from rltrain.schema import Config
from workers.forward import load_model, log_prob_pass
from workers.fsdp import shard


class ReferenceWorker:
    """One rank of the reference model; it never changes.

    Args:
        config: the whole config.
        path: model directory in Hugging Face form.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.config = config
        self.model = shard(load_model(AutoModelForCausalLM, path), dtype=config.model.dtype)
        self.model.eval().requires_grad_(False)

    def compute_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """`ref_log_probs` of these rows, in the order of the micro-batches."""
        return log_prob_pass(self.model, batch, microbatches, "ref_log_probs", self.config.rollout.temperature)
