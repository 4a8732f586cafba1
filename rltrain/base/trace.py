"""Recorder of what this process does and when, from which the driver makes the timeline of a run.

Each process keeps its own events in memory until `take` is called. The times are the wall-clock time of the process's
machine (`time.time_ns`), so events of several machines are as far apart as the clocks of the machines.

The recorder is off until `start` is called. A span then costs one function call, which returns a shared object.
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

VARIABLE = "RLTRAIN_TRACE"  # environment variable that starts the recorder of a worker process; its value is the label
CALLS = "calls"  # track of the calls of the roles of a training rank
OTHER_TASKS = "other tasks"  # track of asyncio tasks that have no name of their own
MOST_EVENTS = 200_000  # events that a process keeps; further events are only counted
_MERGE_NS = 5_000_000  # two events of equal names are merged if at most 5 ms are between them
_UNNAMED = re.compile(r"Task-\d+")  # name that asyncio gives to a task
_OF_STEP = re.compile(r" of step \d+")  # left out of the names of tracks, so that a run has one track for all steps


class Event(NamedTuple):
    """Something that a process did.

    Attributes:
        track: name of the row of the timeline on which the event is drawn.
        name: text on the event.
        start_ns: wall-clock time of the start, in nanoseconds since 1970.
        duration_ns: duration in nanoseconds.
        args: details that the viewer shows when the event is selected, as plain JSON values.
        nests: whether the event may be drawn inside another event of its track. If false, the event gets a row on
            which nothing else happens at the same time.
    """

    track: str
    name: str
    start_ns: int
    duration_ns: int
    args: dict[str, Any]
    nests: bool = True

    @property
    def end_ns(self) -> int:
        """Return the wall-clock time of the end, in nanoseconds since 1970."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Recorded:
    """Events of one process.

    Attributes:
        process: label of the process, such as "training rank 0".
        pid: process id on its machine.
        host: name of the machine.
        events: the events, in the order in which they ended.
        lost: number of events that were dropped because the process kept too many.
    """

    process: str
    pid: int
    host: str
    events: list[Event] = field(default_factory=list)
    lost: int = 0


class _Recorder:
    """Keeps the events of this process. Any thread may add events."""

    def __init__(self, process: str) -> None:
        self.process, self.pid, self.host = process, os.getpid(), socket.gethostname()
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.events: list[Event] = []
        self.latest: dict[str, int] = {}  # by track: index of the latest event, if the next one may extend it
        self.lost = 0

    def add(self, event: Event, *, merged: bool = False) -> None:
        """Add an event. If `merged` is true, it extends the track's latest event if that one adjoins the event."""
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
    """Return whether two events have the same name, and the second one starts when the first one ends."""
    return last.name == event.name and 0 <= event.start_ns - last.end_ns <= _MERGE_NS


class _Span:
    """Context manager that adds an event for the time of its `with` block, also if the block raises an exception."""

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
    """Start to record the events of this process, under the given label of the process."""
    global _recorder
    _recorder = _Recorder(process)


def stop() -> None:
    """Stop recording, and forget all events that `take` has not returned."""
    global _recorder
    _recorder = None


def on() -> bool:
    """Return whether this process records events."""
    return _recorder is not None


def environment(process: str) -> dict[str, str]:
    """Return the environment variables that make a new process record its events if this process does so."""
    return {VARIABLE: process} if _recorder is not None else {}


def start_from(variables: "dict[str, str] | os._Environ[str]") -> None:
    """Start to record the events of this process if the environment variables of `environment` say so."""
    if label := variables.get(VARIABLE):
        start(label)


def span(name: str, track: str = "", *, merged: bool = False, **args: Any) -> "_Span | contextlib.nullcontext[None]":
    """Return a context manager that records the time of its `with` block. It does nothing unless the recorder is on.

    Args:
        name: text on the event.
        track: row of the timeline. The default is the name of the current asyncio task.
        merged: whether an event that directly follows an event of the same name extends that event, so that thousands
            of short steps become one event. The values of `args` are added up.
        args: details of the event, as plain JSON values; numbers if `merged` is true.
    """
    if _recorder is None:
        return _NOTHING
    return _Span(_recorder, name, track, merged, args)


def add(name: str, track: str, start_ns: int, **args: Any) -> None:
    """Record an event that ends now and has begun at `start_ns`, on a row where nothing else happens meanwhile.

    Args:
        name: text on the event.
        track: name of the rows of the timeline.
        start_ns: wall-clock time of the start, in nanoseconds since 1970.
        args: details of the event, as plain JSON values.
    """
    if _recorder is not None:
        _recorder.add(Event(track, name, start_ns, max(0, time.time_ns() - start_ns), args, nests=False))


def adopt(events: Iterable[Event]) -> None:
    """Record events of a child process as events of this process."""
    if _recorder is not None:
        for event in events:
            _recorder.add(event)


def take() -> Recorded | None:
    """Return and forget the events of this process, or return None if the recorder is off."""
    return _recorder.take() if _recorder is not None else None


def _task() -> str:
    """Return the name of the current asyncio task, or of the thread if no asyncio task is running.

    The number of the step is left out of the name.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    if task is None:
        return threading.current_thread().name
    return OTHER_TASKS if _UNNAMED.fullmatch(task.get_name()) else _OF_STEP.sub("", task.get_name())
