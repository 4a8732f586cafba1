"""Measures how much an environment slows down the generation of single answers.

The environment ends each conversation after the first answer, so the answers are those of a run without an environment:
the prompts, the random numbers and the tokens are the same. Both are whole runs with Ray and vLLM. Because the model is
tiny, the ratio shows the cost of an environment at its largest.

    python -m tests.benchmarks.single_turns
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.row import Row
from tests.benchmarks.slow_tools import (
    MEAN_TOKENS,
    PROMPTS,
    ROOT,
    SAMPLES,
    question,
    speed_of,
    steps_after_warm_up,
    train_command,
    write_files,
)

STEPS = 6
PROGRAMS = '''
"""An environment that ends each conversation after the first answer."""


class Once:
    def step(self, text):
        return "", None, True
'''


def measure(folder: Path, name: str, *settings: str) -> tuple[float, list[list[int]]]:
    """Do one run, and return the sampled tokens per second, and the token ids of all answers in ascending order."""
    output = folder / name
    command = train_command(folder, output, *settings, steps=STEPS)
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    tables = steps_after_warm_up(output)[1]
    return speed_of(output), sorted(ids for table in tables for ids in table["response_ids"].to_pylist())


def run() -> list[Row]:
    """Return one row of results: the speed of generation with an environment and without."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # rltrain puts the text of a column called "question" into the chat template, also without an environment.
        write_files(folder, PROGRAMS, ({"question": question(number)} for number in range(PROMPTS)))
        plain, answers = measure(folder, "plain")
        conversing, others = measure(folder, "environment", "rollout.environment={file}:Once")
    if answers != others:
        raise RuntimeError("the answers to the environment are not those of the run without an environment")
    added_ms = 1000 * MEAN_TOKENS * (1 / conversing - 1 / plain)
    return [
        Row(
            "speed of generation of single answers with an environment",
            conversing / plain,
            "of the tokens/s without an environment",
            "",
            f"{conversing:,.0f} tokens/s",
            f"{plain:,.0f} tokens/s",
            f"{PROMPTS * SAMPLES:,} answers of {MEAN_TOKENS} tokens in a step, the same tokens in both runs; vLLM; "
            f"whole generation phases, with their start and end; the environment adds {added_ms:.1f} ms per answer",
            "python -m tests.benchmarks.single_turns",
        )
    ]


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
