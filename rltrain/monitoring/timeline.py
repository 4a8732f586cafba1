"""Collects the events of all processes of a run, and writes a timeline file that Perfetto can open."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from rltrain.base import trace
from rltrain.base.errors import described
from rltrain.base.trace import Recorded
from rltrain.monitoring.trace_file import TraceFile, next_path

logger = logging.getLogger(__name__)

# DRIVER is the label of the driver process, and STEPS is the name of the driver's main asyncio task.
DRIVER, STEPS = "driver", "steps"


class Timeline:
    """Writer that collects the timeline events of the driver and of the worker processes in one file.

    If the timeline file cannot be written, the recording stops with a warning, and the run continues.

    Args:
        file: the file to which the events are written; None if the run records no timeline.

    Attributes:
        workers: async function that takes the recorded events from the worker processes and returns the events; None
            before the worker processes are started.
    """

    def __init__(self, file: TraceFile | None = None) -> None:
        self.file = file
        self.workers: Callable[[], Awaitable[Sequence[Recorded]]] | None = None

    async def update(self) -> None:
        """Write to the timeline file all events that were recorded since the previous call of `update`."""
        if self.file is not None and trace.on():
            self.write([] if self.workers is None else await self.workers())

    def write(self, recorded: Sequence[Recorded] = ()) -> None:
        """Write the driver's events and the given events of other processes to the timeline file.

        If the run records no timeline, do nothing.
        """
        if self.file is None:
            return
        driver = trace.take()
        try:
            self.file.write([*([driver] if driver else []), *recorded])
        except OSError as error:
            trace.stop()
            logger.warning(
                "trainer.trace=true: recording to %s stops, because the file cannot be written: %s",
                self.file.path,
                described(error),
            )


@contextlib.contextmanager
def timeline(folder: Path, *, wanted: bool) -> Iterator[Timeline]:
    """Record the timeline events of the driver during the `with` block, if `wanted` is true.

    In the timeline, the row "steps" shows the events of the asyncio task that has entered the `with` block. Worker
    processes that are started in the `with` block record events too.

    Args:
        folder: output folder of the run, to which the timeline file is written.
        wanted: whether the run has a timeline (`trainer.trace`).

    Yields:
        The timeline.
    """
    if not wanted:
        yield Timeline()
        return
    if (task := asyncio.current_task()) is not None:
        task.set_name(STEPS)
    file = TraceFile(next_path(folder), time.time_ns())
    trace.start(DRIVER)
    found = Timeline(file)
    try:
        yield found
    finally:
        found.write()
        trace.stop()
        file.close()
