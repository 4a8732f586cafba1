"""Measures how much a tool that hangs delays the conversations of other prompt groups.

In each of 25 prompt groups, eight conversations of eight turns run at the same time as all others, and each answer
calls a tool. In one group, the first call of the tool hangs until the time limit of the conversation. In the baseline,
the tool answers all calls at once. Both are whole runs with Ray, vLLM and one environment worker. The compared times
are those from the start of the first conversation to the end of the last conversation of the other groups.

    python -m tests.benchmarks.hanging_tools
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.row import Row
from tests.benchmarks.slow_tools import (
    MEAN_TOKENS,
    ROOT,
    SAMPLES,
    TURNS,
    WARM_UP,
    question,
    steps_after_warm_up,
    train_command,
    write_files,
)

PROMPTS, STEPS, LIMIT_S, MOST = 25, 3, 60, 1.1
PROGRAMS = '''
"""An environment whose tool hangs in the conversations of one prompt, and which records the times of conversations."""

import json
import os
import time

from rltrain.environments.tool_calls import ParsedAction, ToolCall


class Lookup:
    def reset(self, number):
        self.number, self.began = number, time.time()

    def wait(self) -> str:
        """Wait for a moment."""
        if self.number == int(os.environ["HANGING"]):
            time.sleep(3600)
        return "go on"

    def close(self):
        with open(os.environ["TIMES"], "a") as file:
            file.write(json.dumps([self.number, self.began, time.time()]) + "\\n")


def call_in_each_answer(text):
    return ParsedAction(text, [ToolCall("wait", {}, "abcdefghi")])
'''
SETTINGS = [
    "rollout.environment={file}:Lookup", "rollout.tool_format={file}:call_in_each_answer",
    f"rollout.max_turns={TURNS}", f"rollout.trajectory_timeout_s={LIMIT_S}", f"rollout.call_timeout_s={2 * LIMIT_S}",
]  # fmt: skip


def measure(folder: Path, hanging: int) -> float:
    """Do one run, and return the mean seconds that the groups without a hanging tool took in a step.

    In the conversations of the prompt with the number `hanging`, the tool hangs. No prompt has the number -1.
    """
    output, times = folder / f"hanging{hanging}", folder / f"times{hanging}"
    environment = os.environ | {"HANGING": str(hanging), "TIMES": str(times), "OMP_NUM_THREADS": "1"}
    command = train_command(folder, output, *SETTINGS, prompts=PROMPTS, steps=STEPS)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    reasons = [reason for table in steps_after_warm_up(output)[1] for reason in table["stop_reason"].to_pylist()]
    expected = (STEPS - WARM_UP) * SAMPLES if hanging >= 0 else 0
    if reasons.count("deadline") != expected:
        raise RuntimeError(f"{reasons.count('deadline')} conversations reached the time limit, instead of {expected}")
    rows = [json.loads(line) for line in times.read_text().splitlines()]
    others = sorted((began, ended) for number, began, ended in rows if number != 0)
    count = (PROMPTS - 1) * SAMPLES
    steps = [others[start : start + count] for start in range(WARM_UP * count, STEPS * count, count)]
    taken = [max(ended for _, ended in step) - step[0][0] for step in steps]
    return sum(taken) / len(taken)


def run() -> list[Row]:
    """Return one row of results: the time of the other groups with and without a tool that hangs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, PROGRAMS, ({"prompt": question(number), "number": number} for number in range(PROMPTS)))
        hanging, plain = measure(folder, 0), measure(folder, -1)
    return [
        Row(
            "time of the other prompt groups if the tool of one group hangs",
            hanging / plain,
            "of the time without a tool that hangs",
            f"<= {MOST:g}",
            f"{hanging:.1f} s",
            f"{plain:.1f} s",
            f"{PROMPTS} groups of {SAMPLES} conversations of {TURNS} turns, {MEAN_TOKENS} tokens per turn; vLLM; the "
            f"group with the hanging tool takes {LIMIT_S} s (rollout.trajectory_timeout_s)",
            "python -m tests.benchmarks.hanging_tools",
        )
    ]


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
