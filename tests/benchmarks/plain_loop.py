"""Compares rltrain with a minimal implementation of GRPO in a single process.

The minimal implementation ("plain loop") generates with transformers' `generate` and trains on padded rows.

python -m tests.benchmarks.plain_loop            # prints the comparison
python -m tests.benchmarks.plain_loop JOB.json   # runs only the plain loop, on a job that `job.write_job` has written
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.rewards.final_answer import final_answer
from tests.benchmarks.job import Job, best, describe, in_turn, median_of, program_side
from tests.benchmarks.row import Row

# LOW and HIGH clip the probability ratio, and DUAL is the dual-clip bound for negative advantages.
LOW, HIGH, DUAL = 0.8, 1.2, 3.0


def answers(model: Any, prompts: Tensor, limit: int, samples: int) -> Tensor:
    """Sample answers to each of P prompts, and return the answers (B, T), padded with 0 after the end token.

    Args:
        model: Model to sample from.
        prompts: Token ids of the prompts, (P, 8).
        limit: Maximum number of tokens of an answer.
        samples: Number of answers to each prompt. The answers to a prompt are consecutive rows of the result.
    """
    ids = prompts.repeat_interleave(samples, 0)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=limit, pad_token_id=0,
    )  # fmt: skip
    return out[:, ids.size(1) :]


def log_probs(model: Any, prompts: Tensor, responses: Tensor) -> Tensor:
    """Return the log-probs (B, T) of the answer tokens.

    No attention mask is needed, because padding is on the right and causal attention sees only earlier tokens.
    """
    ids = torch.cat([prompts, responses], 1)[:, :-1]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=responses.size(1)).logits
    return -F.cross_entropy(logits.transpose(1, 2), responses, reduction="none")


def loss_of(now: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return PPO's clipped loss with dual clipping, averaged over the answer tokens of the mini-batch."""
    ratio = (now - old).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(LOW, HIGH))
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * DUAL), losses)
    return (losses * mask).sum() / mask.sum()


def main(path: str) -> None:
    """Train with the plain loop on the job that the JSON file `path` describes."""
    job = json.loads(Path(path).read_text())
    torch.manual_seed(job["seed"])
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    total = job["steps"] * job["minibatches"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / total)
    count, samples = job["prompts_per_step"], job["samples_per_prompt"]
    for step in range(job["steps"]):
        chosen = rows[step * count : (step + 1) * count]
        ids = tokenizer([row["prompt"] for row in chosen], return_tensors="pt").input_ids
        with torch.no_grad():
            responses = answers(model, ids, job["max_response_length"], samples)
            prompts = ids.repeat_interleave(samples, 0)
            ends = (responses == job["stop_id"]).int()
            mask = (ends.cumsum(1) - ends == 0).float()  # The mask is 1 up to and including the end token.
            old = log_probs(model, prompts, responses)
        scores = torch.tensor([
            final_answer(row["prompt"], text, answer=row["answer"], finish_reason="stop" if end else "length")
            for row, text, end in zip(
                [row for row in chosen for _ in range(samples)],
                tokenizer.batch_decode(responses, skip_special_tokens=True), ends.any(1).tolist(), strict=True,
            )
        ])  # fmt: skip
        groups = scores.view(count, samples)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        shuffled = torch.randperm(count).repeat_interleave(samples) * samples + torch.arange(samples).repeat(count)
        for part in shuffled.chunk(job["minibatches"]):
            loss_of(
                log_probs(model, prompts[part], responses[part]), old[part], advantages[part], mask[part]
            ).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        line = {"step": step + 1, "reward/mean": float(scores.mean()), "rollout/length_mean": float(mask.sum(1).mean())}
        with Path(job["progress"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def run() -> list[Row]:
    """Compare the seconds per training step of rltrain with those of the plain loop."""
    from rltrain.tasks import TASKS
    from rltrain.tasks.tiny_model import cached_start
    from tests.benchmarks.trl import ROUNDS, STEPS, our_sides, seconds_of

    job = Job(str(cached_start(TASKS["median"])), STEPS)
    plain = [
        program_side(f"plain loop {n} threads", sys.executable, "tests.benchmarks.plain_loop", threads=n)
        for n in (1, 2)
    ]
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as folder:
        side, trials = best(our_sides(), job, Path(folder) / "ours")
        other, their_trials = best(plain, job, Path(folder) / "plain")
        ours, theirs = in_turn([side, other], job, Path(folder), rounds=ROUNDS)
    a, b = (median_of(runs, lambda run: run.step_s(job.warm_up)) for runs in (ours, theirs))
    row = Row(
        name="time per step against a plain loop, median", ratio=b / a, unit="times less time per step", target="",
        ours=f"{a:.3f} s, {ours[0].side}", theirs=f"{b:.3f} s, {theirs[0].side}",
        notes=f"{describe(ours)}; {describe(theirs)}; trials, s per step: {seconds_of(trials | their_trials)}",
        command="make bench ARGS=plain_loop",
        extra={"ours_s": a, "theirs_s": b},
    )  # fmt: skip
    return [row]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        for row in run():
            sys.stdout.write(f"{row}\n")
