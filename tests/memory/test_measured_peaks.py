"""The memory plan of a training rank, compared with the measured peaks of a process that runs the rank's phases."""

import json
import os
import subprocess
import sys

import pytest

from rltrain.run.memory.facts import model_facts
from rltrain.run.memory.parts import total
from rltrain.run.memory.plan import TOLERANCE
from rltrain.run.memory.training import roles_of, training_ranks
from rltrain.settings.compose import compose

# Each model is random. The models differ in size, in the share of the vocabulary, in heads, and in the norms of heads.
MODELS = {
    "24M": (
        "LlamaConfig",
        {"vocab_size": 32000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False},
        ["actor.max_tokens_per_microbatch=1024", "rollout.samples_per_prompt=4"],
    ),
    "52M": (
        "Qwen3Config",
        {"vocab_size": 8192, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 10,
         "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64, "tie_word_embeddings": True},
        ["actor.max_tokens_per_microbatch=512", "rollout.samples_per_prompt=2"],
    ),
    "135M": (
        "LlamaConfig",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        ["actor.max_tokens_per_microbatch=512", "rollout.samples_per_prompt=2",
         "model.activation_checkpointing=true"],
    ),
}  # fmt: skip
DENSE = (
    "LlamaConfig",
    {
        "vocab_size": 16384,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "tie_word_embeddings": False,
    },
    ["actor.max_tokens_per_microbatch=1024", "rollout.samples_per_prompt=4"],
)
MIXTURE = (
    "Qwen3MoeConfig",
    {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 384,
     "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 8, "num_attention_heads": 8,
     "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False},
    ["actor.max_tokens_per_microbatch=1024", "rollout.samples_per_prompt=4"],
)  # fmt: skip
# Ways in which two ranks divide a model or its rows.
LAYOUTS = {
    "shards": (DENSE, []),
    "shards of a mixture": (MIXTURE, []),
    "tensor": (DENSE, ["placement.tensor_ranks=2"]),
    "sequence": (DENSE, ["placement.sequence_ranks=2"]),
    "context": (DENSE, ["placement.context_ranks=2"]),
    "experts": (MIXTURE, ["placement.expert_ranks=2"]),
}
CONFIG = [
    "profile=demo", "rollout=hf", "rollout.max_prompt_length=32",
    "rollout.max_response_length=224", "trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=2",
]  # fmt: skip
FULL = os.environ.get("RLTRAIN_MEMORY_TEST") == "full"
CHOSEN = list(MODELS) if FULL else ["24M"]


def saved(kind, sizes, folder):
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, eos_token_id=1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measured(path, overrides, ranks=1):
    """Return the largest measured peak of each phase among all ranks."""

    def start(rank, address):
        command = [sys.executable, "-m", "tests.memory.peaks", path, str(rank), str(ranks), address, *overrides]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    processes, address = [start(0, "")], None
    while ranks > 1 and address is None:
        line = processes[0].stdout.readline()
        assert line, "rank 0 ended before it wrote its address"
        address = json.loads(line).get("address") if line.startswith("{") else None
    processes += [start(rank, address) for rank in range(1, ranks)]
    found: dict[str, int] = {}
    for process in processes:
        lines = process.communicate()[0].splitlines()
        assert process.returncode == 0
        for line in (json.loads(line) for line in lines if line.startswith("{")):
            found[line["phase"]] = max(line["peak"], found.get(line["phase"], 0))
    return found


def ratios(path, overrides, ranks=1):
    """Return the ratio of the planned to the measured peak of each phase."""
    peaks = measured(path, overrides, ranks)
    base = peaks.pop("base")
    config = compose([f"model.path={path}", *overrides])[0]
    facts = model_facts(config, on_gpu=False)
    roles = roles_of(config, facts.shape, {}, adapters=None, needs_critic=False)
    (rank,) = training_ranks(config, roles, facts.limits, on_gpu=False, base=base)
    return {phase: round(total(rank.host[phase]) / size, 3) for phase, size in peaks.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CHOSEN)
def test_planned_peaks_are_within_the_tolerance_of_measured_peaks(name, tmp_path):
    kind, sizes, overrides = MODELS[name]
    saved(kind, sizes, tmp_path)
    found = ratios(str(tmp_path), [*CONFIG, "placement=inprocess", *overrides])
    assert all(abs(ratio - 1) <= TOLERANCE for ratio in found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not FULL, reason="make memory-test measures all layouts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_peaks_of_ranks_that_divide_a_model_are_within_the_tolerance(name, tmp_path):
    (kind, sizes, overrides), layout = LAYOUTS[name]
    saved(kind, sizes, tmp_path)
    found = ratios(str(tmp_path), [*CONFIG, "placement.actor_ranks=2", *overrides, *layout], ranks=2)
    found.pop("sync")  # the measuring program writes no shared file here, but the plan counts one
    assert all(abs(ratio - 1) <= TOLERANCE for ratio in found.values()), found
