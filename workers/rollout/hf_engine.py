"""Generation with transformers alone: for machines without vLLM, for `placement=inprocess`, and for exact reproduction.

A request's tokens depend on its prompt, its seed and the weights only, never on what it shares a batch with, up to the
rounding of batched matrix products; with `deterministic`, a batch is a prompt group, and answers are bitwise the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from rltrain.schema import Config, RolloutConfig
from workers.rollout.messages import Completion, Request
from workers.weight_sync import Bucket, check_outputs, probe_vector, tensors_of


@dataclass
class _Row:
    request: Request
    uniforms: Tensor  # (max_tokens,) float64: this answer's random numbers
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class HFEngine:
    """A batch at a time through a transformers model with a key-value cache.

    Args:
        config: rollout settings.
        path: model directory.
        dtype: of the weights, "float32" or "bfloat16".
        stop_ids: the model's end tokens.
        deterministic: one prompt group is one batch.
    """

    def __init__(
        self, config: RolloutConfig, path: str, dtype: str, stop_ids: Sequence[int], *, deterministic: bool = False
    ) -> None:
        self.config, self.dtype, self.stop_ids, self.deterministic = config, dtype, set(stop_ids), deterministic
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False,
            local_files_only=True,
        ).to(self.device).eval()  # fmt: skip
        self.version = 0
        self.waiting: list[Request] = []
        self.rows: list[_Row] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self.waiting.extend(requests)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.rows)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One token for every row of the running batch, or the start of the next batch; returns what finished."""
        logits = self._decode() if self.rows else self._prefill()
        temperatures = torch.tensor([row.request.temperature for row in self.rows], device=logits.device)
        tokens, log_probs = sample(logits.float(), temperatures, self._uniforms())
        for row, token, log_prob in zip(self.rows, tokens.tolist(), log_probs.tolist(), strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
        return self._retire()

    def _prefill(self) -> Tensor:
        count = self.config.max_concurrent_sequences
        if self.deterministic:
            first = self.waiting[0].key[0]
            count = min(count, sum(request.key[0] == first for request in self.waiting))
        batch, self.waiting = self.waiting[:count], self.waiting[count:]
        self.rows = [_Row(request, _stream(request)) for request in batch]
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + r.prompt_ids for r in batch])
        self.mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in batch])
        self.mask = self.mask.to(self.device)
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(ids.to(self.device), (self.mask.cumsum(1) - 1).clamp(min=0))

    def _decode(self) -> Tensor:
        last = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self.device)
        self.mask = F.pad(self.mask, (0, 1), value=1)
        return self._forward(last, self.mask.sum(1, keepdim=True) - 1)

    def _forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        mask = None if bool(self.mask.all()) else self.mask
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=self.cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        return output.logits[:, -1]

    def _uniforms(self) -> Tensor:
        return torch.stack([row.uniforms[len(row.tokens)] for row in self.rows]).to(self.device)

    def _retire(self) -> list[Completion]:
        reasons = [self._reason(row) for row in self.rows]
        keep = [number for number, reason in enumerate(reasons) if reason is None]
        done = [
            Completion(row.request.key, row.tokens, row.log_probs, reason, [self.version] * len(row.tokens))
            for row, reason in zip(self.rows, reasons, strict=True)
            if reason is not None
        ]
        if done and keep:  # finished rows are not computed further
            index = torch.tensor(keep, device=self.device)
            self.cache.batch_select_indices(index)
            self.mask = self.mask[index]
        self.rows = [self.rows[number] for number in keep]
        return done

    def _reason(self, row: _Row) -> str | None:
        if row.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(row.tokens) == row.request.max_tokens else None

    def abort(self) -> None:
        """Drop all unfinished requests."""
        self.waiting, self.rows = [], []

    @torch.no_grad()
    def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Take these weights and check them; nothing is cached across batches."""
        assert not self.busy, "weights change between steps only: staleness is bounded at ship time"
        parameters = dict(self.model.named_parameters())
        for bucket in buckets:
            for name, tensor in tensors_of(bucket):
                parameters[name].copy_(tensor)
        self.version = version
        outputs = layer_outputs(self.model) if any(bucket.probes for bucket in buckets) else {}
        for bucket in buckets:
            if bucket.probes:
                check_outputs(outputs, bucket.probes, version=version, dtype=bucket.dtype)

    def settings(self, request: Request) -> dict[str, Any]:
        """What this engine samples with (invariant E2)."""
        return {
            "temperature": request.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": request.seed,
            "max_tokens": request.max_tokens, "stop_token_ids": sorted(self.stop_ids),
        }  # fmt: skip

    def close(self) -> None:
        """Nothing to end."""


def _stream(request: Request) -> Tensor:
    generator = torch.Generator().manual_seed(request.seed)
    return torch.rand(request.max_tokens, generator=generator, dtype=torch.float64)


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverting the cumulative distribution of softmax(logits / temperature).

    Args:
        logits: (B, V) float32.
        temperatures: (B,); 0 takes the most likely token, with its log-prob at temperature 1.
        uniforms: (B,) in [0, 1), float64.

    Returns:
        tokens (B,) int64 and log_probs (B,) float32, of the distribution that was sampled from.
    """
    greedy = temperatures == 0
    log_probs = F.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    # Scaled to the sum that was computed, so that rounding never points past the last token.
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.size(-1) - 1))
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def layer_outputs(model: torch.nn.Module) -> dict[str, Tensor]:
    """W v per matrix of the model, through its own linear layers; one-dimensional parameters as they are."""
    outputs = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim == 2:
            vector = probe_vector(parameter.size(1), parameter.dtype).to(parameter)
            outputs[name] = F.linear(vector, parameter).float()
        else:
            outputs[name] = parameter.float()
    return outputs


def make(config: Config, path: str, stop_ids: Sequence[int]) -> HFEngine:
    """The engine for a config."""
    return HFEngine(
        config.rollout, path, config.model.dtype, stop_ids, deterministic=config.trainer.deterministic
    )  # fmt: skip
