"""Measurement of the time that each phase of a training step takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rltrain.base import trace
from rltrain.batch.data_proto import DataProto


class Timer:
    """Timer that measures how many seconds each phase of one training step takes.

    Attributes:
        phase: name of the phase that is running; "" between two phases.
    """

    def __init__(self) -> None:
        self.began, self.phase = time.perf_counter(), ""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the duration of the `with` block in seconds, and add the duration to the metric `timing/<phase>`.

        The measured `with` block is recorded as an event of the run's timeline.
        """
        start, self.phase = time.perf_counter(), phase
        with trace.span(phase):
            yield
        self.phase = ""
        key = f"timing/{phase}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start

    def metrics(self, batch: DataProto) -> dict[str, float]:
        """Return the duration in seconds of each phase and of the whole step, and the number of tokens per second.

        The number of tokens per second counts prompt, response and observation tokens, because the workers process all
        of these tokens.
        """
        step = time.perf_counter() - self.began
        tokens = len(batch.values("prompts")) + len(batch.values("responses"))
        return {**self.seconds, "timing/step": step, "perf/tokens_per_s": tokens / step}
