"""Rollout engine that generates with the transformers library instead of vLLM.

The transformers engine is for machines without vLLM, for `placement=inprocess`, and for bitwise reproducible runs. The
tokens of an answer depend only on the prompt, the request's seed and the weights. Other requests in the same batch can
change the tokens of an answer only through rounding in batched matrix products. If `trainer.deterministic` is true,
each batch is one prompt group, and the answers are bitwise reproducible.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rltrain.algorithms.draws import stream_draws
from rltrain.base.errors import ConfigError
from rltrain.data.model_weights import load_whole, policy_class, text_attention
from rltrain.settings.schema import Config, RolloutConfig
from workers.cluster.progress import tick
from workers.models.images import images_shown, show_images
from workers.models.router_replay import ExpertRecorder
from workers.rollout.engines.hf.decoding import GROUPED, Batch, different_prompts, new_batch, new_cache
from workers.rollout.messages import Completion, Request
from workers.rollout.stop_strings import stop_strings
from workers.sync.adapters import Adapters
from workers.sync.buckets import Bucket, tensors_of, verify
from workers.sync.checks import check_outputs, probe_vector
from workers.sync.memory import Reader

# Dropping or adding rows copies the batch's key-value cache, so several rows are dropped or added at a time. When rows
# join a running batch, shorter rows are padded, and the padding costs computation. SLACK is the maximum share of
# finished rows in a batch. The finished rows are dropped from the batch when their share exceeds SLACK, and whenever a
# request joins the batch.
SLACK = 0.1
# If the running batch has too few free places for all waiting requests, no request joins the batch until at least the
# fraction JOIN of the batch's places is free.
JOIN = 0.5


class HFEngine:
    """Engine that generates in batches with a transformers model and a key-value cache.

    If `deterministic` is False, waiting requests join the batch when the batch has free places for all waiting
    requests, or when at least the fraction `JOIN` of the batch's places is free.

    Args:
        config: Rollout settings.
        path: Model directory.
        dtype: Data type of the weights, "float32" or "bfloat16".
        stop_ids: Ids of the model's end tokens.
        deterministic: Whether each batch consists of one prompt group, so that answers are bitwise reproducible.
        record_experts: Whether each answer lists the experts that the model's routers chose.

    Raises:
        ConfigError: The attention implementation of the model cannot be replaced, or `record_experts` is True and the
            model has no router of a known kind.
    """

    def __init__(
        self,
        config: RolloutConfig,
        path: str,
        dtype: str,
        stop_ids: Sequence[int],
        *,
        deterministic: bool = False,
        record_experts: bool = False,
    ) -> None:
        self.config, self.dtype, self.stop_ids, self.deterministic = config, dtype, set(stop_ids), deterministic
        self.path, self.device = path, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = _load(path, getattr(torch, dtype)).eval()
        cast(nn.Module, self.model).to(self.device)
        show_images(self.model, path)
        self.recorder = ExpertRecorder(self.model, f"model.path={path}") if record_experts else None
        self.version = 0
        self.stops = torch.tensor(sorted(self.stop_ids), device=self.device)
        self.strings, self.filters = stop_strings(config.stop, path), distribution_filters(config)
        self.waiting: list[Request] = []
        self.batch: Batch | None = None
        self.stale = False  # True if the batch's KV cache comes from old weights and must be recomputed.

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self.waiting.extend(requests)

    @property
    def busy(self) -> bool:
        """Return whether the engine has an unfinished request."""
        return bool(self.waiting or self.batch)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample one token for every running answer, and return the answers that are now finished.

        Before tokens are sampled, waiting requests join the batch if the batch has enough free places.
        """
        tick()
        batch, logits = self.batch, []
        requests = self._admitted()
        if batch:
            live = batch.live.nonzero()[:, 0]
            if len(live) < (1 if requests else 1 - SLACK) * len(batch.requests):
                batch.take(live)
            logits.append(self._again(batch) if self.stale else self._forward(batch, batch.width - 1))
        self.stale = False
        if requests:
            new, first = self._prefill(requests)
            logits.append(first)
            if batch:
                batch.join(new)
            else:
                batch = new
        assert batch, "a generation step needs a running or waiting request"
        draws = stream_draws(batch.rows[:, 3], batch.width - batch.rows[:, 1])
        sampled = sample(torch.cat(logits).float(), batch.temperatures, draws, self.filters)
        batch.append(*sampled, self.version)
        done = batch.finish(self.stops, self.strings)
        self.batch = batch if not done or bool(batch.live.any()) else None
        return done

    def _admitted(self) -> list[Request]:
        """Return all requests that can start now, and remove them from the queue.

        If the batch has free places for all waiting requests, all waiting requests start. If the batch has fewer free
        places than waiting requests, no request starts until the fraction `JOIN` of the batch's places is free. If
        `deterministic` is true, the next prompt group starts when all running answers are finished. If `deterministic`
        is true and the run has an environment, each batch has only one request, because the turns of a prompt group do
        not arrive together.
        """
        if not self.waiting:
            return []
        running = int(self.batch.live.sum()) if self.batch else 0
        count = self.config.max_concurrent_sequences - running
        if self.deterministic and running:
            return []
        if self.deterministic and self.config.has_environment:
            count = 1
        elif self.deterministic:
            first = self.waiting[0].key[0]
            count = min(count, sum(request.key[0] == first for request in self.waiting))
        elif count < min(len(self.waiting), self.config.max_concurrent_sequences * JOIN):
            return []
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def _prefill(self, requests: Sequence[Request]) -> tuple[Batch, Tensor]:
        """Run the model once on each distinct prompt of new requests.

        Returns:
            A batch that contains the given requests, and the logits (B, V) of the first token of each request's answer.
        """
        prompts, which = different_prompts(requests)
        computed, batch, index = new_batch(prompts, self.device), new_batch(requests, self.device), torch.tensor(which)
        logits = self._forward(computed, 0)
        batch.cache = computed.cache
        batch.cache.batch_select_indices(index.to(self.device))
        batch.experts = None if computed.experts is None else computed.experts[index]
        return batch, logits[index]

    def _again(self, batch: Batch) -> Tensor:
        """Recompute a batch's key-value cache from its tokens, and return the logits (B, V) of the next tokens."""
        batch.cache = new_cache()
        return self._forward(batch, 0)

    def _forward(self, batch: Batch, first: int) -> Tensor:
        """Run the model on the token columns from index `first` on, which are not in the key-value cache yet.

        Return the logits (B, V) of the next token of each row.
        """
        with images_shown(self.model, *batch.images(first)):
            output = self.model(
                input_ids=batch.ids[:, first:],
                attention_mask=batch.mask(first),
                position_ids=batch.positions(first),
                past_key_values=batch.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        if self.recorder is not None:
            batch.record_experts(first, self.recorder.take())
        logits: Tensor = output.logits[:, -1]
        return logits

    def abort(self) -> None:
        """Drop all unfinished requests of the engine."""
        self.waiting, self.batch = [], None

    def start_load(self) -> None:
        """Prepare the engine to receive new weights."""
        self.reader, self.probes, self.adapters = Reader(), dict[str, np.ndarray](), Adapters(self.path)

    @torch.no_grad()
    def load_bucket(self, bucket: Bucket) -> None:
        """Load the weights of one bucket, which is the unit in which a weight sync transfers weights.

        Raises SyncError if the received bytes differ from the bytes that the sender wrote.
        """
        data = self.reader.data(bucket)
        verify(bucket, data)
        self.probes |= bucket.probes()
        if bucket.scale is not None:
            self.adapters.take(bucket, data)
        else:
            self._copy(tensors_of(bucket, data))

    def _copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors:
            parameters[name].copy_(tensor)

    @torch.no_grad()
    def finish_load(self, version: int) -> None:
        """Make the engine use the weights of all loaded buckets.

        If the buckets contain probes, check that the engine's weights match the trainer's weights. Answers that are
        unfinished when the weights change continue with a recomputed KV cache. If `rollout.keep_kv_cache` is true, the
        unfinished answers continue with their old KV cache instead.
        """
        self.reader.close()
        self._copy(self.adapters.merged())
        self.version, self.stale = version, not self.config.keep_kv_cache
        if self.probes:
            check_outputs(layer_outputs(self.model), self.probes, version=version, dtype=self.dtype)

    def sleep(self) -> bool:
        """Return False, because the transformers engine never releases its weights.

        The transformers engine is for machines on which no other process needs the memory that the weights occupy.
        """
        return False

    def close(self) -> None:
        """Do nothing, because the transformers engine has no processes or threads to end."""


def distribution_filters(config: RolloutConfig) -> list[LogitsProcessor]:
    """Return logits processors that restrict sampling to the most likely tokens, first by top-k and then by top-p."""
    top_k = [TopKLogitsWarper(config.top_k)] if config.top_k else []
    return top_k + ([TopPLogitsWarper(config.top_p)] if config.top_p < 1 else [])


def sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, filters: Sequence[LogitsProcessor] = ()
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution of softmax(logits / temperature).

    Args:
        logits: (B, V) float32 logits of the next tokens.
        temperatures: (B,) sampling temperatures. In a row with temperature 0, the most likely token is selected, and
            the log-prob of this token is computed at temperature 1.
        uniforms: (B,) float64 random numbers, uniformly distributed in [0, 1).
        filters: Logits processors that exclude tokens from sampling by setting their logits to minus infinity. The
            logits processors are applied to logits that are already divided by the temperature. No logits processor is
            applied to rows with temperature 0.

    Returns:
        The sampled tokens (B,) int64, and their log-probs (B,) float32 under the distribution from which the tokens
        were sampled.
    """
    greedy = temperatures == 0
    scaled = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    kept = scaled
    for keep in filters:
        # The first argument of a logits processor is the token ids, which top-k and top-p ignore.
        kept = keep(cast(torch.LongTensor, None), cast(torch.FloatTensor, kept))
    probabilities = torch.where(greedy[:, None], scaled, kept).softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # Because of rounding, the probabilities of a row may sum to slightly less than 1. A random number above this sum
    # would select a token id beyond the vocabulary, so each random number is multiplied by the sum of its row's
    # probabilities.
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.size(-1) - 1))
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def layer_outputs(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the product W v in float32 for each matrix W of the model, where v is the fixed random probe vector of W.

    For a parameter that is a stack of matrices, the products of all matrices are concatenated. Parameters with fewer
    than two dimensions are returned unchanged, except for the conversion to float32.
    """
    outputs = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim >= 2:
            vector = probe_vector(parameter.size(-1), parameter.dtype).to(parameter)
            outputs[name] = F.linear(vector, parameter.flatten(0, -2)).float()
        else:
            outputs[name] = parameter.float()
    return outputs


def make(config: Config, path: str, stop_ids: Sequence[int]) -> HFEngine:
    """Return the transformers engine for a config."""
    return HFEngine(
        config.rollout,
        path,
        config.model.dtype,
        stop_ids,
        deterministic=config.trainer.deterministic,
        record_experts=config.actor.router_replay == "engine",
    )


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    where = f"model.path={path}"
    model: PreTrainedModel = load_whole(policy_class(path), path, where, dtype=dtype, attn_implementation="eager")
    if not (model._supports_sdpa or model._supports_attention_backend):
        raise ConfigError(
            f"{where}: does not load for rollout=hf ({type(model).__name__} implements its own attention, which cannot "
            "be replaced); use a model of another architecture"
        )
    model.set_attn_implementation(text_attention(model.config, GROUPED))
    return model
