"""The naive sampler: it runs the whole row through a transformers model for each token."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM

from rltrain.settings.schema import Config
from workers.rollout.messages import Completion, Request
from workers.sync.buckets import Bucket, tensors_of, verify
from workers.sync.memory import Reader


@dataclass
class Row:
    """A request, and the part of its answer that has been sampled so far."""

    request: Request
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class NaiveSampler:
    """Samples up to `at_once` answers at a time."""

    def __init__(self, path: str, stop_ids: Sequence[int], at_once: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.stop_ids, self.at_once, self.version = stop_ids, at_once, 0
        self.rows: list[Row] = []

    @property
    def busy(self) -> bool:
        return bool(self.rows)

    def add(self, requests: Sequence[Request]) -> None:
        self.rows += [Row(request, torch.Generator().manual_seed(request.seed)) for request in requests]

    def step(self) -> list[Completion]:
        return [done for row in self.rows[: self.at_once] if (done := self._advanced(row)) is not None]

    @torch.no_grad()
    def _advanced(self, row: Row) -> Completion | None:
        request = row.request
        logits = self.model(torch.tensor([[*request.prompt_ids, *row.tokens]])).logits[0, -1]
        log_probs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        greedy = request.temperature == 0
        token = int(logits.argmax() if greedy else torch.multinomial(log_probs.exp(), 1, generator=row.generator))
        row.tokens.append(token)
        row.log_probs.append(float(log_probs[token]))
        row.versions.append(self.version)
        ended = token in self.stop_ids
        if not ended and len(row.tokens) < request.max_tokens:
            return None
        self.rows.remove(row)
        return Completion(request.key, row.tokens, row.log_probs, "stop" if ended else "length", row.versions)

    def abort(self) -> None:
        self.rows = []

    def start_load(self) -> None:
        self.reader = Reader()

    @torch.no_grad()
    def load_bucket(self, bucket: Bucket) -> None:
        data = self.reader.data(bucket)
        verify(bucket, data)
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors_of(bucket, data):
            parameters[name].copy_(tensor)

    def finish_load(self, version: int) -> None:
        self.reader.close()
        self.version = version

    def sleep(self) -> bool:
        return False

    def close(self) -> None:
        pass


def make(config: Config, path: str, stop_ids: Sequence[int]) -> NaiveSampler:
    assert os.environ["NAIVE_SAMPLER"] == "1", "the process lacks the environment variables of the description"
    return NaiveSampler(path, stop_ids, config.rollout.engine_options["answers_at_once"])
