import time

import pytest
import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.monitoring.phase_timer import Timer


def test_the_timer_adds_up_each_phase_and_counts_tokens_a_second():
    responses = jagged([[1], [1, 2, 3], [1, 2], [1, 2]], torch.int64)
    made = DataProto.from_dict({"prompts": jagged([[1]] * 4, torch.int64), "responses": responses})
    timer = Timer()
    for _ in range(2):
        with timer("a"):
            time.sleep(0.02)
    with timer("b"):
        pass
    metrics = timer.metrics(made)
    assert set(metrics) == {"timing/a", "timing/b", "timing/step", "perf/tokens_per_s"}
    assert 0.04 <= metrics["timing/a"] <= metrics["timing/step"]
    assert metrics["timing/b"] < 0.01
    assert metrics["perf/tokens_per_s"] * metrics["timing/step"] == pytest.approx(8 + 4)
