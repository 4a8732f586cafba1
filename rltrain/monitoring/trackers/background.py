"""Calls a sink in a separate thread, so that a slow or failing service neither delays nor ends the run."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

from rltrain.base.errors import described
from rltrain.monitoring.sinks import Metrics, Sink, TableRows, TakesConfig, TakesSamples

# The queue of a sink holds at most 1000 calls. A training step adds one call to the queue, or up to three calls if the
# step logs samples and an evaluation.
MAX_WAITING = 1000
CLOSE_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)
_Call = Callable[[], None]


@runtime_checkable
class GivesUp(Protocol):
    """Optional interface of a sink whose library may keep the run's process from exiting."""

    def give_up(self) -> None:
        """Make the library that the sink uses, such as wandb, stop sending data.

        `BackgroundSink` calls `give_up` in the main thread if the sink's method `close` takes too long.
        """


class BackgroundSink:
    """Sink that forwards each method call to a wrapped sink.

    A separate thread executes the calls of the wrapped sink, in the order in which the run called `BackgroundSink`.

    Only the method `close` of `BackgroundSink` waits for the wrapped sink. None of the methods of `BackgroundSink`
    raises an exception. If a call of the wrapped sink raises an exception, later calls of the wrapped sink are still
    made. If `restore` fails, the tracking service (such as wandb) has no open run, so `BackgroundSink` forwards no
    metrics or samples until the next `restore`.

    Args:
        name: name of the wrapped sink in the text of alarms.
        sink: the wrapped sink, to which the calls are forwarded. All methods of `sink` except `give_up` are called in
            a separate thread.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self.sink = name, sink
        # Each entry of the queue is a pair (call, whether the call is skipped if the last `restore` failed).
        self._calls: SimpleQueue[tuple[_Call, bool] | None] = SimpleQueue()
        self._alarms: SimpleQueue[str] = SimpleQueue()
        # `_has_run` is True if the last call of `restore` succeeded; only the thread `_thread` uses `_has_run`.
        self._has_run = False
        self._failed = self._full = False
        self._ends_by: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Pass the config of the run to the wrapped sink, if the sink implements `TakesConfig`."""
        if isinstance(self.sink, TakesConfig):
            self._calls.put((partial(self.sink.log_config, config), False))

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Pass the metrics of a training step to the wrapped sink."""
        self._put(partial(self.sink.log_step, step, dict(metrics)))

    def log_eval(self, step: int, metrics: Metrics) -> None:
        """Pass the metrics of an evaluation to the wrapped sink."""
        self._put(partial(self.sink.log_eval, step, dict(metrics)))

    def log_samples(self, step: int, rows: TableRows) -> None:
        """Pass samples of a training step to the wrapped sink, if the sink implements `TakesSamples`."""
        if isinstance(self.sink, TakesSamples):
            self._put(partial(self.sink.log_samples, step, rows))

    def restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        """Make the wrapped sink discard the metrics and samples of all training steps after `step`.

        A call of `restore` is never dropped, however many earlier calls are still waiting.
        """
        rows = [dict(row) for row in steps], [dict(row) for row in evaluations]
        self._calls.put((partial(self._restore, step, *rows), False))

    def _restore(self, step: int, steps: Sequence[Metrics], evaluations: Sequence[Metrics]) -> None:
        self._has_run = False
        self.sink.restore(step, steps, evaluations)
        self._has_run = True

    def finish(self) -> None:
        """Make the wrapped sink close after it has executed all waiting calls.

        `finish` returns immediately, without waiting for the wrapped sink.
        """
        if self._ends_by is None:
            self._ends_by = time.monotonic() + CLOSE_TIMEOUT_S
            self._calls.put(None)

    def close(self) -> None:
        """Close the sink.

        Wait until the wrapped sink is closed, or until 30 seconds have passed since the call of `finish`.
        """
        self.finish()
        assert self._ends_by is not None, "`finish` must set `_ends_by`"
        self._thread.join(max(0.0, self._ends_by - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._calls.qsize()
            if isinstance(self.sink, GivesUp):
                self.sink.give_up()
            self._alarms.put(
                f"trainer.trackers: {self.name} did not finish within {CLOSE_TIMEOUT_S:.0f} s, and {waiting} of its "
                "calls are still waiting; the run ends without waiting any longer, and metrics.jsonl has all metrics"
            )

    def alarms(self) -> list[str]:
        """Return the alarms that were raised since the last call of `alarms`.

        An alarm is raised for the first exception of a sink, for its first dropped call, and if `close` times out.
        """
        return [self._alarms.get() for _ in range(self._alarms.qsize())]

    def _put(self, call: _Call) -> None:
        if self._calls.qsize() < MAX_WAITING:
            self._calls.put((call, True))
        elif not self._full:
            self._full = True
            self._alarms.put(
                f"trainer.trackers: {self.name} is slower than the run: {MAX_WAITING} calls are waiting, and further "
                f"calls are left out until {self.name} catches up; metrics.jsonl has all metrics"
            )

    def _work(self) -> None:
        while (waiting := self._calls.get()) is not None:
            call, needs_run = waiting
            if self._has_run or not needs_run:
                self._try(call)
        if self._has_run:
            self._try(self.sink.close)

    def _try(self, call: _Call) -> None:
        try:
            call()
        except BaseException as error:  # An uncaught SystemExit would end the sink's thread.
            logger.debug("%s failed", self.name, exc_info=True)
            if not self._failed:
                self._failed = True
                self._alarms.put(
                    f"trainer.trackers: {self.name} failed and lacks some data of the run ({described(error)}); the "
                    "run continues, and metrics.jsonl has all metrics"
                )
