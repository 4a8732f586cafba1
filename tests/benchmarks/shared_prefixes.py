"""Compares packs in which shared tokens occur once with packs in which every row has its own tokens.

The measured passes are those of an update (forward and backward) and of log-probs (forward only), of the whole model or
of its layers alone. The model has the sizes of SmolLM2-135M with random weights. Times are medians of CPU seconds with
one thread, and the two kinds of packs are measured in turn. Before a model is measured, the benchmark checks that both
kinds of packs give the same gradients.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rltrain.batch.contexts import row_tokens
from rltrain.batch.data_proto import DataProto, jagged
from tests.benchmarks.row import Row
from workers.models.packed_forward import PACKED, Pack, pack, policy_output

COMMAND = "python -m tests.benchmarks.shared_prefixes"
SMOLLM2 = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS = 6  # Number of layers of the model, except in the measurements of the whole model.
GROUP, TURNS, TURN, ROUNDS = 8, 10, 64, 5


def random_ids(*shape: int, seed: int) -> list:
    """Return random token ids as nested lists."""
    return torch.randint(SMOLLM2["vocab_size"], shape, generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(prompts: list[list[int]], answers: list[list[int]]) -> DataProto:
    """Return a batch of prompts and answers."""
    return DataProto.from_dict({"prompts": jagged(prompts, torch.int64), "responses": jagged(answers, torch.int64)})


def group(prompt: int, answer: int) -> DataProto:
    """Return a group of answers to one prompt, given the numbers of tokens of prompt and answers."""
    return batch_of([random_ids(prompt, seed=0)] * GROUP, random_ids(GROUP, answer, seed=1))


def turns() -> DataProto:
    """Return a conversation with one row for each turn. A row's prompt is everything before the turn's answer."""
    ids = random_ids(TURNS * TURN, seed=2)
    ends = range(TURN, TURNS * TURN + 1, TURN)
    return batch_of([ids[: end - TURN // 2] for end in ends], [ids[end - TURN // 2 : end] for end in ends])


def strangers(prompt: int, answer: int) -> DataProto:
    """Return rows that share no tokens."""
    return batch_of(random_ids(GROUP, prompt, seed=3), random_ids(GROUP, answer, seed=4))


def made(**sizes: int) -> nn.Module:
    """Return a model with random weights and packed attention."""
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**SMOLLM2 | sizes), attn_implementation=PACKED).eval()


def layers_update(model: nn.Module, packed: Pack) -> None:
    """Run a forward and a backward pass of the layers, without the output head."""
    layers_forward(model, packed).sum().backward()


def layers_forward(model: nn.Module, packed: Pack) -> torch.Tensor:
    """Run a forward pass of the layers, and return the states from which the response tokens are predicted."""
    states = model.model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=None,
        use_cache=False,
        packed=packed,
    ).last_hidden_state
    return states[0, packed.predicting]


def update(model: nn.Module, packed: Pack) -> None:
    """Run a forward and a backward pass of the whole model."""
    policy_output(model, packed, temperature=1.0).log_probs.sum().backward()


@torch.no_grad()
def log_probs(model: nn.Module, packed: Pack) -> None:
    """Run the pass that computes log-probs."""
    policy_output(model, packed, temperature=1.0)


@torch.no_grad()
def layers_log_probs(model: nn.Module, packed: Pack) -> None:
    """Run the layers' part of the pass that computes log-probs."""
    layers_forward(model, packed)


def seconds(model: nn.Module, batch: DataProto, run: Callable[[nn.Module, Pack], None]) -> tuple[float, float]:
    """Return the median CPU seconds of a pass with shared tokens, and without. Making the pack is part of the pass."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for measured in range(ROUNDS + 1):
        for share, times in found.items():
            began = time.process_time()
            run(model, pack(batch, share=share))
            if measured:  # The first round is the warm-up.
                times.append(time.process_time() - began)
            model.zero_grad()
    return statistics.median(found[True]), statistics.median(found[False])


def check_equal(model: nn.Module, batch: DataProto) -> None:
    """Check that both kinds of packs give the same gradients."""
    found = []
    for share in (True, False):
        model.zero_grad()
        update(model, pack(batch, share=share))
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    model.zero_grad()
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max(), "shared and unshared gradients differ"


def row(what: str, times: tuple[float, float], batch: DataProto, target: str, notes: str) -> Row:
    """Return the row of a measurement."""
    every, distinct = int(row_tokens(batch).sum()), pack(batch).input_ids.size(1)
    load = f"float32, 1 torch thread, CPU time, median of {ROUNDS}; load average {os.getloadavg()[0]:.1f}"
    return Row(
        f"shared prefixes: {what}", times[1] / times[0], "times as fast as without sharing", target,
        f"{1e3 * times[0]:,.0f} ms", f"{1e3 * times[1]:,.0f} ms",
        f"{notes}; {every:,} tokens, {distinct:,} distinct, a ratio of {every / distinct:.2f}; {load}", COMMAND,
    )  # fmt: skip


def run() -> list[Row]:
    """Run all measurements, and return their results as rows of the results table."""
    torch.set_num_threads(1)
    small = made(num_hidden_layers=LAYERS)
    answers, conversation, apart = group(128, 32), turns(), strangers(128, 32)
    for batch in (answers, conversation, apart):
        check_equal(small, batch)
    of_layers = f"{LAYERS} layers of SmolLM2-135M's sizes"
    long = f"a group of {GROUP}, prompt of 128 tokens, answers of 32"
    rows = [
        row("layers, update", seconds(small, answers, layers_update), answers, ">= 3", f"{of_layers}; {long}"),
        row("layers, log-probs", seconds(small, answers, layers_log_probs), answers, ">= 3", f"{of_layers}; {long}"),
        row(
            "layers, update, a conversation trained turn by turn", seconds(small, conversation, layers_update),
            conversation, ">= 4", f"{of_layers}; {TURNS} turns of {TURN} tokens",
        ),
        row(
            "nothing to share, update", seconds(small, apart, update), apart, ">= 0.98", f"{of_layers}, with the head"
        ),
    ]  # fmt: skip
    whole, batch = made(), group(45, 10)
    check_equal(whole, batch)
    sizes = f"SmolLM2-135M's sizes, head included; a group of {GROUP}, prompt of 45 tokens, answers of 10"
    return [
        *rows,
        row("whole model, update", seconds(whole, batch, update), batch, ">= 2.5", sizes),
        row("whole model, log-probs", seconds(whole, batch, log_probs), batch, ">= 2.5", sizes),
    ]


if __name__ == "__main__":
    for result in run():
        sys.stdout.write(f"{result}\n")
