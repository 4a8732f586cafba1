"""The GPU benchmark runs on a CPU with small shapes, so that the test finds a broken measurement without a GPU."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

pytestmark = pytest.mark.slow


def test_every_measurement_of_the_gpu_benchmark_has_a_result(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--tiny"]
    done = subprocess.run(
        command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [row for row in rows if "failed" in row or "skipped" in row] == []
    assert Counter(row["what"] for row in rows) == {
        "machine": 1, "matmul": 1, "train": 3, "train, lengths 1:16": 1, "sync, sending": 1, "generate": 2, "sync": 1,
        "generate: engine": 1,
    }  # fmt: skip
    assert all(row["tokens_per_s"] > 0 for row in rows if row["what"].startswith(("train", "generate,")))
