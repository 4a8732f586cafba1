"""Measures the driver's part of a training step at the size of a large cluster: 512 ranks and 65,536 sequences.

The ranks are simulated as in `tests.benchmarks.driver`: they compute nothing, and their arguments and results are
pickled and copied as Ray would do. Each measurement runs in a process of its own, so that its peak memory is that of
one step. The peak memory includes the simulated object store, which in a run is shared memory.

The rows for 8,192 tokens and for 4,096 ranks are not measured. They are computed from two measurements, because the
driver's work is proportional to the number of tokens and, at a fixed number of tokens, to the number of ranks.

    python -m tests.benchmarks.scale
"""

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch

from rltrain.settings.compose import compose
from tests.benchmarks.driver import SAMPLES, PickledProcess, measured, pickled, rollouts
from tests.benchmarks.row import Row
from tests.memory.peaks import forget_peak, peak

COMMAND = "python -m tests.benchmarks.scale"
SEQUENCES, MINIBATCHES = 65_536, 16
FEW_RANKS, RANKS, MOST_RANKS = 128, 512, 4_096
SHORT, LONG, LONGEST = 256, 1_024, 8_192  # Mean response lengths in tokens.
SPREAD = 2.0  # The longest answer of a batch is SPREAD squared times as long as the shortest answer.


@dataclass(frozen=True)
class Cost:
    """What the driver needs for one step.

    Attributes:
        seconds: CPU seconds.
        peak: bytes of memory at the peak of the step, with the simulated object store, without Python and libraries.
        sent: bytes that the driver sends to the ranks.
    """

    seconds: float
    peak: float
    sent: float

    def beyond(self, other: "Cost", factor: float) -> "Cost":
        """Return the cost on the line through this cost and `other`, at `factor` times their difference beyond it."""
        pairs = ((self.seconds, other.seconds), (self.peak, other.peak), (self.sent, other.sent))
        return Cost(*(there + factor * (there - here) for here, there in pairs))

    def __str__(self) -> str:
        return f"{self.peak / 1e9:.1f} GB of memory, {self.sent / 1e9:.2f} GB sent"


def cost_here(ranks: int, length: int) -> Cost:
    """Measure one step in this process.

    Args:
        ranks: number of simulated ranks.
        length: mean length of the answers in tokens.
    """
    torch.set_num_threads(1)
    prompts = SEQUENCES // SAMPLES
    config, _ = compose(
        ["algorithm=grpo", f"trainer.prompts_per_step={prompts}", f"rollout.samples_per_prompt={SAMPLES}",
         f"trainer.prompts_per_minibatch={prompts // MINIBATCHES}",
         f"rollout.max_response_length={int(length * SPREAD)}"]
    )  # fmt: skip
    forget_peak()
    start = peak()
    # The mean of a log-uniform distribution from s / x to s x is about 1.08 s at x = 2.
    batch = rollouts(prompts, int(length / SPREAD / 1.08), int(length * SPREAD / 1.08))
    processes = pickled(ranks)
    forget_peak()
    times = asyncio.run(measured(processes, batch, config, rounds=1))
    sent = sum(role.process.received for role in processes if isinstance(role.process, PickledProcess))
    return Cost(times["all"], peak() - start, sent / 2)  # `measured` makes two steps.


def cost(ranks: int, length: int) -> Cost:
    """Measure one step in a process of its own. See `cost_here`."""
    command = [sys.executable, "-m", "tests.benchmarks.scale", str(ranks), str(length)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Cost(**found)


def run() -> list[Row]:
    """Measure three steps, and compute the costs at sizes that do not fit on one machine."""
    short, long, few = cost(RANKS, SHORT), cost(RANKS, LONG), cost(FEW_RANKS, SHORT)
    longest = short.beyond(long, (LONGEST - LONG) / (LONG - SHORT))
    most = few.beyond(short, (MOST_RANKS - RANKS) / (RANKS - FEW_RANKS))
    measurements = [
        (FEW_RANKS, SHORT, few, "measured"),
        (RANKS, SHORT, short, "measured"),
        (RANKS, LONG, long, "measured"),
        (RANKS, LONGEST, longest, f"computed from {SHORT:,} and {LONG:,} tokens"),
        (MOST_RANKS, SHORT, most, f"computed from {FEW_RANKS:,} and {RANKS:,} ranks"),
    ]
    return [
        Row(f"driver in a step: {ranks:,} ranks, {SEQUENCES:,} answers of {length:,} tokens", found.seconds,
            "s of CPU time", "", f"{found.seconds:.1f} s", str(found), f"{how}; simulated ranks, GRPO with reference "
            f"log-probs, {MINIBATCHES} mini-batches", COMMAND)
        for ranks, length, found, how in measurements
    ]  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.stdout.write(json.dumps(vars(cost_here(*map(int, sys.argv[1:])))) + "\n")
    else:
        for row in run():
            sys.stdout.write(f"{row}\n")
