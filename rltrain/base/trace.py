"""Records the activities of a process and their times, so that the driver can build the timeline of a run.

Each process keeps its recorded events in memory until `take` is called. Event times come from the wall clock of the
process's machine (`time.time_ns`). If the clocks of two machines differ, the timeline shows the events of the two
machines shifted by that difference.

The event recorder of a process is off until `start` is called. While the recorder is off, a call of `span` returns a
shared context manager that does nothing.
"""

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

# The environment variable RLTRAIN_TRACE starts the event recorder of a worker process. The value of RLTRAIN_TRACE is
# the process's label.
VARIABLE = "RLTRAIN_TRACE"
# Timeline track of the method calls that a worker process runs for its roles, such as the actor or the critic.
CALLS = "calls"
OTHER_TASKS = "other tasks"  # Timeline track of asyncio tasks that were not given a name.
# Maximum number of events that a process keeps. If a process records more than `MOST_EVENTS` events, the additional
# events are counted, but not kept.
MOST_EVENTS = 200_000
_MERGE_NS = 5_000_000  # Two events of one track are merged only if the gap between the events is at most 5 ms.
_UNNAMED = re.compile(r"Task-\d+")  # Matches the default name of an asyncio task.
# Matches the step number in a task's name. The step number is removed from the task's name, so that all steps of a run
# share one track.
_OF_STEP = re.compile(r" of step \d+")


class Event(NamedTuple):
    """One activity of a process, with its start time and duration.

    Attributes:
        track: name of the timeline row on which the event is drawn.
        name: label of the event in the timeline.
        start_ns: wall-clock time of the event's start, in nanoseconds since 1970.
        duration_ns: duration of the event in nanoseconds.
        args: details that the timeline viewer shows when the event is selected, as plain JSON values.
        nests: whether the event may be drawn inside another event of the track. If `nests` is false, the event is drawn
            on a timeline row on which no other event overlaps the event in time.
    """

    track: str
    name: str
    start_ns: int
    duration_ns: int
    args: dict[str, Any]
    nests: bool = True

    @property
    def end_ns(self) -> int:
        """Return the wall-clock time at which the event ended, in nanoseconds since 1970."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Recorded:
    """All recorded events of one process.

    Attributes:
        process: label of the process, such as "training rank 0".
        pid: operating-system id of the process.
        host: name of the machine on which the process runs.
        events: the recorded events of the process, in the order in which the events ended.
        lost: number of events that were dropped because the process already kept `MOST_EVENTS` events.
    """

    process: str
    pid: int
    host: str
    events: list[Event] = field(default_factory=list)
    lost: int = 0


class _Recorder:
    """Stores the events of this process in memory. Any thread of the process may add events to the recorder."""

    def __init__(self, process: str) -> None:
        self.process, self.pid, self.host = process, os.getpid(), socket.gethostname()
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.events: list[Event] = []
        # Maps a track to the index of its latest event. A track has no entry in `latest` if the latest event of the
        # track must not be merged with later events.
        self.latest: dict[str, int] = {}
        self.lost = 0

    def add(self, event: Event, *, merged: bool = False) -> None:
        """Add an event to the recorder, or merge the event into the latest event of the event's track.

        The new event is merged into the latest event of its track if `merged` is true for both events, both events have
        the same name, and the latest event ends at most 5 ms before the new event starts.
        """
        with self.lock:
            latest = self.latest.pop(event.track, None)
            if merged and latest is not None and _adjoin(last := self.events[latest], event):
                args = {name: last.args[name] + value for name, value in event.args.items()}
                self.events[latest] = last._replace(duration_ns=event.end_ns - last.start_ns, args=args)
            elif len(self.events) < MOST_EVENTS:
                latest = len(self.events)
                self.events.append(event)
            else:
                self.lost += 1
                return
            if merged and latest is not None:
                self.latest[event.track] = latest

    def take(self) -> Recorded:
        with self.lock:
            recorded = Recorded(self.process, self.pid, self.host, self.events, self.lost)
            self.clear()
        return recorded


def _adjoin(last: Event, event: Event) -> bool:
    """Return whether `event` has the same name as `last` and starts at most 5 ms after the end of `last`."""
    return last.name == event.name and 0 <= event.start_ns - last.end_ns <= _MERGE_NS


class _Span:
    """Context manager that records the time of a `with` block as an event, even if the block raises an exception."""

    __slots__ = ("args", "merged", "name", "recorder", "start_ns", "track")

    def __init__(self, recorder: _Recorder, name: str, track: str, merged: bool, args: dict[str, Any]) -> None:
        self.recorder, self.name, self.track, self.merged, self.args = recorder, name, track, merged, args

    def __enter__(self) -> None:
        self.start_ns = time.time_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        duration_ns = max(0, time.time_ns() - self.start_ns)
        args = self.args if kind is None else self.args | {"error": kind.__name__}
        event = Event(self.track or _task(), self.name, self.start_ns, duration_ns, args)
        self.recorder.add(event, merged=self.merged and kind is None)


_recorder: _Recorder | None = None
_NOTHING = contextlib.nullcontext()


def start(process: str) -> None:
    """Start recording the events of this process, with `process` as the label of the process."""
    global _recorder
    _recorder = _Recorder(process)


def stop() -> None:
    """Stop recording, and discard all events that `take` has not returned."""
    global _recorder
    _recorder = None


def on() -> bool:
    """Return whether the event recorder of this process is on."""
    return _recorder is not None


def environment(process: str) -> dict[str, str]:
    """Return the environment variables that start the event recorder of a new process.

    Return {} if this process records no events.
    """
    return {VARIABLE: process} if _recorder is not None else {}


def start_from(variables: "dict[str, str] | os._Environ[str]") -> None:
    """Start the event recorder of this process if the environment variables `variables` contain RLTRAIN_TRACE."""
    if label := variables.get(VARIABLE):
        start(label)


def span(name: str, track: str = "", *, merged: bool = False, **args: Any) -> "_Span | contextlib.nullcontext[None]":
    """Return a context manager that records the time of a `with` block if the event recorder is on.

    Args:
        name: label of the event in the timeline.
        track: name of the timeline row. By default, the track has the name of the current asyncio task.
        merged: whether the event may be merged with an event of the same name that ended at most 5 ms before the start
            of the new event. Merging can replace thousands of short events by one event. When two events are merged,
            each value in the `args` of the merged event is the sum of the values of the two events.
        args: details of the event, as plain JSON values. If `merged` is true, the values in `args` must be numbers.
    """
    if _recorder is None:
        return _NOTHING
    return _Span(_recorder, name, track, merged, args)


def add(name: str, track: str, start_ns: int, **args: Any) -> None:
    """Record an event that lasted from `start_ns` until now.

    The event is drawn on a timeline row on which no other event overlaps the event in time.

    Args:
        name: label of the event in the timeline.
        track: name of the timeline rows; events that overlap in time get separate rows with the same name.
        start_ns: wall-clock time of the event's start, in nanoseconds since 1970.
        args: details of the event, as plain JSON values.
    """
    if _recorder is not None:
        _recorder.add(Event(track, name, start_ns, max(0, time.time_ns() - start_ns), args, nests=False))


def adopt(events: Iterable[Event]) -> None:
    """Record the events of a child process as events of this process."""
    if _recorder is not None:
        for event in events:
            _recorder.add(event)


def take() -> Recorded | None:
    """Return the events of this process and remove them from memory; return None if the event recorder is off."""
    return _recorder.take() if _recorder is not None else None


def _task() -> str:
    """Return the name of the current asyncio task, or of the thread if no asyncio task is running.

    A step number in the name of a task, such as " of step 3", is removed. For a task that was not given a name, return
    "other tasks".
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # `current_task` raises RuntimeError if the calling thread runs no event loop.
        task = None
    if task is None:
        return threading.current_thread().name
    return OTHER_TASKS if _UNNAMED.fullmatch(task.get_name()) else _OF_STEP.sub("", task.get_name())
