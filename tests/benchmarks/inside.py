"""Runs rltrain in the benchmark's process, and records the CPU seconds and the last arguments of worker calls."""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

# These environment variables must be set before torch is imported. With one thread and one process, the measured CPU
# seconds contain only the work of the run.
for _name, _value in {
    "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)

WARM_UP = 3


@dataclass
class Watched:
    """Measurements of a run of rltrain.

    Attributes:
        seconds: One dict of CPU seconds per training step. The keys are "role.method" for calls of workers, "log" for
            the logging of metrics, and "step" for the whole step.
        given: For each worker method "role.method", the arguments of its last call.
    """

    seconds: list[dict[str, float]] = field(default_factory=list)
    given: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def median(self, *names: str) -> float:
        """Return the median over steps of the named calls' total CPU seconds, without the warm-up steps."""
        return statistics.median(sum(step.get(name, 0.0) for name in names) for step in self.seconds[WARM_UP:])


def watched_run(
    steps: int, *overrides: str, around: tuple[Callable[[], Any], Callable[[], Any]] | None = None
) -> Watched:
    """Call `rltrain.main` in the benchmark's process, and measure each training step.

    The first function of `around` is called after the last warm-up step, and the second after the last step. Raises
    RuntimeError if the run fails.
    """
    from rltrain import main as program
    from rltrain.monitoring.tracking import Tracker
    from workers.cluster.worker_process import Host

    watched, now, began = Watched(), dict[str, float](), time.process_time()
    call, log_step = Host.call, Tracker.log_step

    def timed_call(self: Host, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        name, start = f"{role}.{method}", time.process_time()
        watched.given[name] = args
        try:
            return call(self, role, method, *args, **kwargs)
        finally:
            now[name] = now.get(name, 0.0) + time.process_time() - start

    def timed_log(self: Tracker, *args: Any) -> None:
        nonlocal began
        start = time.process_time()
        log_step(self, *args)
        end = time.process_time()
        watched.seconds.append(now | {"log": end - start, "step": end - began})
        now.clear()
        began = end
        if around is not None and len(watched.seconds) in (WARM_UP, steps):
            around[len(watched.seconds) == steps]()

    with (
        contextlib.redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory(prefix="rltrain-bench-") as folder,
        patch.object(Host, "call", timed_call),
        patch.object(Tracker, "log_step", timed_log),
    ):
        status = program.main([
            "placement=inprocess", "rollout=hf", "data.val=null", "trainer.sample_every=0",
            f"trainer.total_steps={steps}", f"trainer.output_dir={folder}/out", *overrides,
        ])  # fmt: skip
    if status:
        raise RuntimeError(f"the run in this process ended with exit status {status}")
    return watched
