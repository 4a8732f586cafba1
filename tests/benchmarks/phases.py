"""Compares the CPU time of each phase of a training step with a lower limit, on the built-in task with one thread.

The lower limits are measured without rltrain. The lower limit of the actor's passes is the time that a plain
transformers model takes for the same number of tokens. All rows have the mean length, without padding. The lower
limit of generation is the time of transformers' `generate`, or of vLLM's own loop, for the same prompts. No lower limit
is measured for the driver's own work. All times are CPU seconds, because other programs on the machine hardly affect
CPU seconds.

    python -m tests.benchmarks.phases
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.inside import Watched, watched_run
from tests.benchmarks.row import Row

COMMAND = "make bench ARGS=phases"
STEPS, ROUNDS = 13, 7
DRIVER = "driver"


def cpu_s(*functions: Callable[[], Any], rounds: int = ROUNDS) -> list[float]:
    """Call all functions alternately, and return the median CPU seconds of each function after a warm-up round."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, own in zip(functions, seconds, strict=True):
            start = time.process_time()
            function()
            own.append(time.process_time() - start)
    return [statistics.median(own[1:]) for own in seconds]


def bare_passes(model: Any, counts: list[int], length: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions of a plain model: a forward pass over all mini-batches, and an update with each mini-batch.

    Args:
        model: Model that transformers has loaded.
        counts: Number of tokens in each mini-batch.
        length: Number of tokens in each row.
    """
    import torch

    batches = [torch.randint(1, 128, (max(1, count // length), length)) for count in counts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=length // 2).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -(length // 2) :].flatten())

    def forward() -> None:
        with torch.no_grad():
            for ids in batches:
                loss(ids)

    def update() -> None:
        for ids in batches:
            loss(ids).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return forward, update


def row(name: str, ours: float, limit: float, of: str, notes: str) -> Row:
    """Return the row that compares the CPU seconds of a phase with the lower limit of the phase."""
    return Row(
        name=f"phase: {name}", ratio=limit / ours, unit="of the highest possible speed", target="",
        ours=f"{ours:.3f} CPU s", theirs=f"{limit:.3f} CPU s, {of}", notes=notes, command=COMMAND,
        extra={"ours_s": ours, "limit_s": limit},
    )  # fmt: skip


def start_model() -> tuple[str, Any]:
    """Return the directory of the initial model, and the model as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    from rltrain.tasks import TASKS
    from rltrain.tasks.tiny_model import cached_start

    path = str(cached_start(TASKS["median"]))
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def actor_rows(watched: Watched, model: Any) -> list[Row]:
    """Compare the phases `old_log_probs` and `update_actor` with their limits."""
    batch, minibatches = watched.given["actor.update"][:2]
    tokens = (batch.lengths("prompts") + batch.lengths("responses") - 1).tolist()
    counts = [sum(tokens[row] for rows in one.microbatches for row in rows) for one in minibatches]
    forward, update = cpu_s(*bare_passes(model, counts, round(sum(tokens) / len(tokens))))
    notes = f"{sum(counts)} tokens in {len(counts)} mini-batches"
    return [
        row("old_log_probs", watched.median("actor.compute_log_probs"), forward, "a bare forward", notes),
        row("update_actor", watched.median("actor.update"), update, "bare forward, backward and AdamW", notes),
    ]


def generation_row(watched: Watched, model: Any) -> Row:
    """Compare generation by the transformers engine with transformers' own method `generate`."""
    import torch

    prompts = watched.given["actor.update"][0].padded("prompts")

    def generate() -> None:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=16, pad_token_id=0
        )

    (limit,) = cpu_s(generate)
    ours = watched.median("rollout.submit", "rollout.poll")
    notes = f"{len(prompts)} answers; the limit uses the initial model, whose answers are a third shorter"
    return row("generate, transformers engine", ours, limit, "transformers' generate", notes)


def vllm_row(path: str) -> Row:
    """Compare generation by the vLLM rollout worker with vLLM's own loop, for the same requests and parameters."""
    from rltrain.data.prompts import Prompt
    from rltrain.settings.compose import compose
    from rltrain.tasks import TASKS
    from rltrain.trajectories.prompt_groups import PromptGroups, requests_of
    from workers.rollout.engines.vllm.engine import sampling_params
    from workers.rollout.worker import RolloutWorker

    config, _ = compose([])
    worker = RolloutWorker(config, path, [3], threaded=False)
    engine: Any = worker.engine
    prompts = [
        Prompt(n, text["prompt"], list(text["prompt"].encode()), {})
        for n, text in enumerate(TASKS["median"].prompts("train", 0, 64))
    ]
    groups = PromptGroups(samples_per_prompt=8, prompts_per_step=64, max_staleness=0, steps=1)
    groups.add(prompts)
    requests = [r for g in groups.ship(0) for r in requests_of(g, temperature=1.0, max_tokens=16, seed=0)]

    def ours() -> None:
        worker.submit(requests)
        left = len(requests)
        while left:
            left -= len(worker.poll(1.0))

    def bare() -> None:
        for number, request in enumerate(requests):
            engine.engine.add_request(
                str(number), {"prompt_token_ids": request.prompt_ids}, sampling_params(request, [3], config.rollout)
            )
        while engine.engine.has_unfinished_requests():
            engine.engine.step()

    a, b = cpu_s(ours, bare)
    return row("generate, vLLM", a, b, "vLLM's own loop", f"{len(requests)} answers of the initial model")


def driver_row(watched: Watched) -> Row:
    """Measure the driver's own work in a step, such as batches, advantages, plans, metrics and files."""
    step = watched.median("step")
    calls = {name for seconds in watched.seconds for name in seconds} - {"step", "log"}
    own, log = step - watched.median(*calls), watched.median("log")
    return Row(
        name="phase: the driver's own work", ratio=own / step, unit="of a step's CPU time", target="",
        ours=f"{own:.3f} CPU s", theirs=f"{step:.3f} CPU s, the whole step",
        notes=f"includes {log:.3f} s of writing metrics and samples, and the rewards, which run in the driver here",
        command=COMMAND, extra={"ours_s": own, "step_s": step, "log_s": log},
    )  # fmt: skip


def run() -> list[Row]:
    """Measure all phases of a step, without generation by vLLM if vLLM is not installed, and return their rows."""
    watched = watched_run(STEPS)
    path, model = start_model()
    rows = [generation_row(watched, model), *actor_rows(watched, model), driver_row(watched)]
    with contextlib.suppress(ImportError):
        rows.insert(1, vllm_row(path))
    return rows


if __name__ == "__main__":
    for found in run():
        sys.stdout.write(f"{found}\n")
