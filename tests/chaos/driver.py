"""Run the trainer with an injected fault, by `python -m tests.chaos.driver JOB.json OVERRIDES...`.

JOB.json contains the injected signal to one process ("strike") or null, the usual duration of each phase, and the path
of a JSON lines file for events. The driver patches the trainer's methods to detect phases. The trainer itself has no
code for injected faults.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rltrain.main import main
from rltrain.monitoring.phase_timer import Timer
from rltrain.run import checks
from rltrain.run.checkpoints import Checkpoints
from rltrain.trainer import Trainer
from tests.chaos.processes import named_processes, victim
from tests.chaos.strikes import START, Strike
from workers import placement
from workers.cluster.liveness import PROCESSES

SHORT_S = 0.02  # With a delay below `SHORT_S`, the signal is sent when the phase begins.


class Watcher:
    """Records the events of a run, and sends the injected signal once."""

    def __init__(self, job: dict[str, Any], output_dir: Path) -> None:
        self.strike = Strike(**job["strike"]) if job["strike"] else None
        self.usual_s: dict[str, float] = job["usual_s"]
        self.file = Path(job["events"])
        self.output_dir, self.step, self.phase = output_dir, 0, START

    def note(self, what: str, **more: Any) -> None:
        """Append an event to the run's file of events."""
        with self.file.open("a") as file:
            file.write(json.dumps({"time": time.time(), "what": what, "step": self.step, **more}) + "\n")

    def enter(self, phase: str) -> None:
        """Record that a phase begins. If the signal belongs to this phase of this step, schedule the signal."""
        self.phase = phase
        self.note("phase begins", phase=phase)
        if self.strike and (self.strike.phase, self.strike.step) == (phase, self.step):
            strike, self.strike = self.strike, None
            delay_s = strike.share * self.usual_s.get(phase, 0.0)
            if delay_s < SHORT_S:
                self.hit(strike)
            else:
                threading.Timer(delay_s, self.hit, [strike]).start()

    def hit(self, strike: Strike) -> None:
        """Send the injected signal to a process of the chosen role."""
        pid = victim(strike.role, self.output_dir)
        if not pid:  # Pid 0 would mean the driver's own process group.
            named = ", ".join(named_processes(self.output_dir)) or "nothing"
            self.note("missed", phase=self.phase, reason=f"role {strike.role} has no process; {PROCESSES} has {named}")
            return
        self.note("strike", phase=self.phase, pid=pid)
        os.kill(pid, getattr(signal, f"SIG{strike.signal}"))


class Noted(logging.Handler):
    """Log handler that records the trainer's log messages as events."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(logging.INFO)
        self.watcher = watcher

    def emit(self, record: logging.LogRecord) -> None:
        """Record a log message as an event."""
        self.watcher.note("said", text=record.getMessage())


def surround(owner: type, name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Patch a coroutine method of a class to call `before(self)` before each call and `after(self)` after each call."""
    original = getattr(owner, name)

    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = await original(self, *args, **kwargs)
        after(self)
        return result

    setattr(owner, name, method)


def install(watcher: Watcher) -> None:
    """Patch the trainer so that `watcher` is notified of phases and steps."""

    def step_begins(trainer: Trainer) -> None:
        watcher.step = trainer.step
        watcher.note("step begins")

    def step_ends(trainer: Trainer) -> None:
        watcher.step = trainer.step
        watcher.note("step ends")

    def evaluation_begins(trainer: Trainer) -> None:
        watcher.step = trainer.step
        watcher.enter("evaluate")

    surround(Trainer, "train_step", step_begins, step_ends)
    surround(Trainer, "evaluate", evaluation_begins, lambda _: None)
    surround(Checkpoints, "start", lambda _: watcher.enter("checkpoint"), lambda _: None)
    timed = Timer.__call__

    @contextlib.contextmanager
    def phase(self: Timer, name: str) -> Iterator[None]:
        watcher.enter(name)
        with timed(self, name):
            yield

    Timer.__call__ = phase  # type: ignore[method-assign]
    for name in ("rltrain", "workers"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(Noted(watcher))


if __name__ == "__main__":
    for module in (checks, placement):
        module.cpu_cores = lambda: 8  # Each role gets its own process, regardless of the number of cores.
    job = json.loads(Path(sys.argv[1]).read_text())
    watcher = Watcher(job, Path(job["output_dir"]))
    install(watcher)
    watcher.note("starts")
    watcher.enter(START)
    sys.exit(main(sys.argv[2:]))
