"""Measures how much `actor.router_replay` reduces the gap between the engine's and the trainer's log-probs.

Engine and trainer have the same weights. The engine computes in bfloat16 and the trainer in float32, so the two round
differently, as different kernels do. Without replay, the trainer's routers choose their own experts.
"""

import statistics
import sys
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rltrain.batch.data_proto import DataProto
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from rltrain.trajectories.batch_building import batch_of
from rltrain.trajectories.prompt_groups import trajectory_of
from tests.benchmarks.row import Row
from workers.models.packed_forward import PACKED, pack, policy_output
from workers.models.router_replay import replay_routers
from workers.rollout.engines.hf.engine import HFEngine
from workers.rollout.messages import Completion, Request

COMMAND = "make bench ARGS=router_replay"
PROMPTS, SAMPLES, LENGTH, LAYERS, EXPERTS, CHOSEN = 16, 8, 64, 6, 32, 4
FAR = 0.1  # Engine and trainer count as far apart on a token if their log-probs differ by more nats than FAR.


def save_mixture(folder: str, seed: int) -> None:
    """Save a Qwen3-MoE model with random weights, and the tokenizer of the built-in task, in a folder."""
    torch.manual_seed(seed)
    tokenizer = char_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, moe_intermediate_size=64, intermediate_size=128,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answered(folder: str) -> DataProto:
    """Return the answers of an engine in bfloat16, with the experts of each token."""
    config = compose(["rollout=hf"])[0].rollout
    engine = HFEngine(config, folder, "bfloat16", [-1], record_experts=True)
    words = len(char_tokenizer())
    prompts = torch.randint(words, (PROMPTS, 16), generator=torch.Generator().manual_seed(0)).tolist()
    for n, prompt in enumerate(prompts):
        engine.add([Request((n, k), prompt, 1.0, LENGTH, SAMPLES * n + k) for k in range(SAMPLES)])
    found: list[Completion] = []
    while engine.busy:
        found += engine.step()
    return batch_of([trajectory_of(prompts[c.key[0]], c) for c in found], experts=True)


@torch.no_grad()
def gaps(model: PreTrainedModel, batch: DataProto) -> Tensor:
    """Return |trainer's log-prob - engine's log-prob| of each sampled token, in nats."""
    found = policy_output(model, pack(batch), temperature=1.0).log_probs
    return (found - batch.values("rollout_log_probs")).abs()


def described(found: Tensor) -> str:
    """Return a text with the mean gap, the largest gap, and the share of tokens whose gap is above FAR."""
    far = float((found > FAR).float().mean())
    return f"{float(found.mean()):.4f} nats on average, {float(found.max()):.2f} at most, {far:.2%} above {FAR}"


def run() -> list[Row]:
    """Measure the gaps of three random models, and return them as one row of the results table."""
    torch.set_num_threads(1)
    free, replayed = list[Tensor](), list[Tensor]()
    for seed in range(3):
        with TemporaryDirectory() as folder:
            save_mixture(folder, seed)
            batch = answered(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED, dtype=torch.float32).eval()
        replay_routers(model, "model")
        replayed.append(gaps(model, batch))
        free.append(gaps(model, batch.select(["prompts", "responses", "rollout_log_probs"])))
    ratios = [float(a.mean() / b.mean()) for a, b in zip(free, replayed, strict=True)]
    return [
        Row(
            "router replay: log-prob gap of engine and trainer", statistics.median(ratios),
            "times smaller than with the trainer's own choice of experts", "",
            described(torch.cat(replayed)), described(torch.cat(free)),
            f"random Qwen3-MoE models of seeds 0, 1, 2: ratios {', '.join(f'{one:.1f}' for one in ratios)}; {LAYERS} "
            f"layers, {CHOSEN} of {EXPERTS} experts; engine in bfloat16, trainer in float32; "
            f"{PROMPTS * SAMPLES} answers of {LENGTH} tokens each",
            COMMAND,
        )
    ]  # fmt: skip


if __name__ == "__main__":
    for result in run():
        sys.stdout.write(f"{result}\n")
