"""Measures how much slow tools reduce the speed of generation while 1,000 conversations run at the same time.

Each conversation has eight turns. The model writes answers of 64 tokens on average, and a tool, an environment or an
agent program takes one second between two answers. The baseline is the same program without the second of waiting. The
program and its baseline are whole runs with Ray, vLLM and one environment worker.

The model's weights are set by hand: each token of an answer is a random letter, or the end token with probability 1/64.

    python -m tests.benchmarks.slow_tools
"""

import json
import math
import os
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from pyarrow import Table

from tests.benchmarks.row import Row
from tests.chat_model import chat_config, chat_tokenizer

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, TURNS, MEAN_TOKENS, STEPS = 125, 8, 8, 64, 3
WARM_UP = 1  # Number of training steps at the start of a run that the figures do not include.
MOST_DRIVER_MS, LEAST_SPEED = 2.0, 0.9
PROGRAMS = '''
"""Programs whose replies take WAIT_S seconds. The tool and the environment block a thread, and the agent does not."""

import asyncio
import os
import time

from rltrain.environments.tool_calls import ParsedAction, ToolCall

WAIT_S = float(os.environ["WAIT_S"])


class Slow:
    def step(self, text):
        time.sleep(WAIT_S)
        return "go on", 0.0, False


def wait() -> str:
    """Wait for a moment."""
    time.sleep(WAIT_S)
    return "go on"


def call_in_each_answer(text):
    return ParsedAction(text, [ToolCall("wait", {}, "abcdefghi")])


async def agent(base_url, api_key, messages):
    from openai import APIStatusError, AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=300) as client:
        for turn in range(8):
            response = await client.chat.completions.create(model="policy", messages=messages)
            await asyncio.sleep(WAIT_S)
            messages += [response.choices[0].message, {"role": "user", "content": "go on"}]
    return 0.0
'''
KINDS = {
    "a function as a tool": ["rollout.tools=[{file}:wait]", "rollout.tool_format={file}:call_in_each_answer"],
    "an environment class": ["rollout.environment={file}:Slow"],
    "an agent program": ["rollout.agent={file}:agent"],
}


def save_model(folder: Path) -> None:
    """Save a model whose output distribution does not depend on its input."""
    import torch
    from transformers import Qwen2ForCausalLM

    tokenizer = chat_tokenizer()
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(folder)
    config = chat_config(
        tokenizer, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    logits = torch.full((len(tokenizer),), -40.0)
    logits[[ord(letter) for letter in string.ascii_lowercase]] = 0.0
    logits[tokenizer.eos_token_id] = math.log(len(string.ascii_lowercase) / (MEAN_TOKENS - 1))
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)  # The final norm maps a vector of ones to a vector of ones.
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(logits[:, None] / config.hidden_size)
    model.save_pretrained(folder)


@dataclass
class Measured:
    """Figures of one run.

    Attributes:
        speed: Sampled tokens per second of the phase `generate`.
        turns: Mean number of turns of a conversation.
        driver_s: CPU time of the driver's process per turn, in seconds, including all other work of the driver in a
            training step.
    """

    speed: float
    turns: float
    driver_s: float


def question(number: int) -> str:
    """Return the text of a prompt."""
    return f"question {number}: " + "a word or two " * 10


def write_files(folder: Path, programs: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Save the model, the users' programs, the reward function and the rows of data of a run."""
    save_model(folder / "model")
    (folder / "programs.py").write_text(programs)
    (folder / "reward.py").write_text("def nothing(response):\n    return len(response) % 2\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_command(folder: Path, output: Path, *settings: str, prompts: int = PROMPTS, steps: int = STEPS) -> list[str]:
    """Return the command of a run with the files in `folder`, which generates all answers of a step at the same time.

    In `settings`, `{file}` stands for the path of the file with the users' programs.
    """
    return [
        sys.executable, "-m", "rltrain.main", *[setting.format(file=folder / "programs.py") for setting in settings],
        f"model.path={folder}/model", f"data.train={folder}/rows.jsonl", "data.val=null", "actor.lr=1e-9",
        f"reward.functions=[{folder}/reward.py:nothing]", "rollout.max_prompt_length=400",
        "rollout.max_response_length=3000", f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_concurrent_sequences={prompts * SAMPLES}", f"trainer.prompts_per_step={prompts}",
        f"trainer.prompts_per_minibatch={prompts}", f"trainer.total_steps={steps}",
        "actor.max_tokens_per_microbatch=32768", f"trainer.output_dir={output}", "rollout.vllm.kv_cache_mb=1024",
        "trainer.save_every=0",
    ]  # fmt: skip


def steps_after_warm_up(output: Path) -> tuple[list[dict[str, Any]], list[Table]]:
    """Return the metrics and the samples of each step of a run after the warm-up."""
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    tables = [pq.read_table(file) for file in sorted((output / "rollouts").glob("*.parquet"))]
    return steps[WARM_UP:], tables[WARM_UP:]


def speed_of(output: Path) -> float:
    """Return the number of sampled tokens per second in the phase `generate` of a run's steps after the warm-up."""
    steps, tables = steps_after_warm_up(output)
    tokens = sum(sum(mask) for table in tables for mask in table["response_mask"].to_pylist())
    return float(tokens / sum(step["timing/generate"] for step in steps))


def measure(kind: str, wait_s: float, folder: Path) -> Measured:
    """Do one run, and measure the steps after the warm-up."""
    output = folder / f"{kind.split()[1]}-{wait_s:g}"
    command = train_command(folder, output, *KINDS[kind], f"rollout.max_turns={TURNS}")
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"WAIT_S": str(wait_s), "OMP_NUM_THREADS": "1"})
    driver, spent, metrics = psutil.Process(process.pid), list[float](), output / "metrics.jsonl"
    while process.poll() is None:
        try:
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if done > len(spent):
                times = driver.cpu_times()
                spent.append(times.user + times.system)
        except psutil.Error:
            break
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    if process.wait():
        raise RuntimeError(f"the run with {kind} ended with exit status {process.returncode}")
    _, tables = steps_after_warm_up(output)
    turns = sum(sum(table["turns"].to_pylist()) for table in tables)
    rows = sum(table.num_rows for table in tables)
    return Measured(speed_of(output), turns / rows, (spent[-1] - spent[WARM_UP - 1]) / turns)


def run() -> list[Row]:
    """Return two rows for each way to write a slow tool: the speed of generation, and the driver's work for a turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, PROGRAMS, ({"prompt": question(number)} for number in range(PROMPTS)))
        found = {kind: (measure(kind, 1.0, folder), measure(kind, 0.0, folder)) for kind in KINDS}
    rows = []
    command = "python -m tests.benchmarks.slow_tools"
    for kind, (slow, fast) in found.items():
        sizes = f"{PROMPTS * SAMPLES:,} conversations of {slow.turns:.1f} turns, {MEAN_TOKENS} tokens per turn; vLLM"
        target = "" if kind == "an agent program" else f">= {LEAST_SPEED:g}"
        rows.append(
            Row(
                f"speed of generation with a second of waiting in each turn, {kind}",
                slow.speed / fast.speed,
                "of the tokens/s without waiting",
                target,
                f"{slow.speed:,.0f} tokens/s",
                f"{fast.speed:,.0f} tokens/s",
                f"{sizes}; whole generation phases, with their start and end",
                command,
            )
        )
        rows.append(
            Row(
                f"CPU time of the driver per turn, {kind}",
                fast.driver_s * 1000 / MOST_DRIVER_MS,
                "of the limit",
                "<= 1",
                f"{fast.driver_s * 1000:.2f} ms",
                f"limit {MOST_DRIVER_MS:g} ms",
                f"{sizes}; CPU time of the driver in whole training steps, divided by the number of turns",
                command,
            )
        )
    return rows


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
