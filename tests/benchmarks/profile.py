"""Profile training steps in one process with cProfile, to find the largest costs in CPU seconds of one thread.

python -m tests.benchmarks.profile        # prints the rows, and the profiled functions on stderr
"""

import cProfile
import pstats
import sys
import time
from typing import Any

from tests.benchmarks.inside import WARM_UP, watched_run
from tests.benchmarks.row import Row

STEPS = WARM_UP + 6
# Each entry is (category, marks). The category of a function is the first one with a mark that occurs in the function's
# "file:name".
COSTS = (
    ("backward pass", ("run_backward",)),
    ("matrix products of forward passes", ("_nn.linear", "onednn_mm")),
    ("attention kernels", ("scaled_dot_product_attention",)),
    ("optimizer and gradient clipping", ("torch/optim", "clip_grad", "_foreach", "_fused_adamw")),
    ("sharding (FSDP, DTensor)", ("_fully_shard", "torch/distributed")),
    ("jagged tensors and batches", ("torch/nested", "tensordict", "rltrain/batch", "_nested_")),
    ("metrics and sample files", ("tensorboard", "pyarrow", "rltrain/monitoring", "json/")),
    ("generation's bookkeeping", ("workers/rollout",)),
    ("rewards", ("workers/reward", "rltrain/rewards")),
    ("the model's Python", ("transformers/", "torch/nn/modules")),
)


Function = tuple[str, int, str]
DEPTH = 8  # Maximum number of caller levels that are searched if a function has no category of its own.


def shares(function: Function, stats: dict[Function, Any], depth: int = DEPTH) -> dict[str, float]:
    """Return the shares of a profiled function's time by cost category.

    The time of a function without a category is divided among its callers' categories.
    """
    text = f"{function[0]}:{function[2]}"
    if own := next((name for name, marks in COSTS if any(mark in text for mark in marks)), None):
        return {own: 1.0}
    callers = stats[function][4] if function in stats else {}
    whole = sum(seconds for _, _, seconds, _ in callers.values())
    if not depth or not whole:
        return {"all else": 1.0}
    found = dict[str, float]()
    for caller, (_, _, seconds, _) in callers.items():
        for name, share in shares(caller, stats, depth - 1).items() if seconds > whole / 20 else ():
            found[name] = found.get(name, 0.0) + share * seconds / whole
    return found


def run() -> list[Row]:
    """Return the three cost categories with the largest shares of a training step's time."""
    profiler = cProfile.Profile(time.process_time)
    watched_run(STEPS, around=(profiler.enable, profiler.disable))
    stats: Any = pstats.Stats(profiler, stream=sys.stderr)
    costs = dict[str, float]()
    for function, (_, _, own, _, _) in stats.stats.items():
        for name, share in shares(function, stats.stats).items():
            costs[name] = costs.get(name, 0.0) + share * own
    whole = sum(costs.values())
    stats.sort_stats("tottime").print_stats(25)
    ranked = sorted(costs.items(), key=lambda item: -item[1])
    others = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in ranked[3:])
    return [
        Row(
            name=f"profile: cost {number + 1} of a step", ratio=seconds / whole, unit="of the step's CPU time",
            target="", ours=f"{name}: {seconds / (STEPS - WARM_UP):.3f} s per step",
            theirs=f"{whole / (STEPS - WARM_UP):.3f} s, the whole step, profiler included",
            notes=f"then: {others}" if number == 2 else "", command="make bench ARGS=profile",
        )
        for number, (name, seconds) in enumerate(ranked[:3])
    ]  # fmt: skip


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
