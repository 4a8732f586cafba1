"""Writes a run's timeline to a file in Chrome's trace-event format, which https://ui.perfetto.dev can open.

The trace file contains a JSON object whose list `traceEvents` holds the events. In the trace-event format, `"ph": "X"`
marks an event with a start time `ts` and a duration `dur`, both in microseconds (a "complete event"). `"ph": "M"` marks
a metadata event, which gives the name of a process or a thread. Perfetto draws each thread as one row of the timeline,
and requires that any two events of a thread are disjoint or nested. If two events of a process overlap and neither
event contains the other, the writer puts the two events on different threads.

The trace-event format is described in the document "Trace Event Format"; see
https://perfetto.dev/docs/getting-started/other-formats.
"""

import heapq
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.base.trace import Event, Recorded

TRACE = "trace.json.gz"
_GZIP = 31  # The value 31 of zlib's argument `wbits` selects the gzip format and the largest window.
_CLOSING = b"\n]}\n"
_LAST = 1_000_000  # Threads that are drawn below all others get the thread number plus 1,000,000 as sort index.
_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


def next_path(folder: Path) -> Path:
    """Return the path of the next trace file of a run; no file with that path exists yet.

    The first trace file of a run is `trace.json.gz`. Each time the run is resumed, a new trace file gets the next
    number, as in `trace.2.json.gz` and `trace.3.json.gz`.
    """
    path, number = folder / TRACE, 1
    while path.exists():
        number += 1
        path = folder / f"trace.{number}.json.gz"
    return path


class TraceFile:
    """Writer of timeline events to a gzip file that is complete and valid after each call of `write`.

    Each call of `write` appends compressed events, the closing brackets of the JSON text, and the checksum of the gzip
    format. The next call of `write` overwrites the closing brackets and the checksum. Even if the run is killed, the
    trace file is a valid gzip file that contains valid JSON.

    Args:
        path: path of the trace file; no file with that path may exist yet.
        start_ns: wall-clock time in nanoseconds since 1970 that is subtracted from all times in the file. Times since
            1970 would lose precision, because Perfetto reads times as floating-point microseconds.
    """

    def __init__(self, path: Path, start_ns: int) -> None:
        self.path, self.start_ns = path, start_ns
        self.compressor = zlib.compressobj(wbits=_GZIP)
        self.processes: dict[tuple[str, int, str], _Process] = {}
        self.length, self.first = 0, True
        self.file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        head = {"displayTimeUnit": "ms", "otherData": {"start_ns": str(start_ns)}}
        self._append(json.dumps(head)[:-1] + ', "traceEvents": [')

    def write(self, recorded: Iterable[Recorded]) -> None:
        """Write the events of several processes to the trace file."""
        lines = [line for one in recorded for line in self._lines(one)]
        if lines:
            # The slice [1:-1] removes the brackets of the JSON list.
            self._append(("\n" if self.first else ",\n") + _encode(lines)[1:-1])
            self.first = False

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)

    def _append(self, text: str) -> None:
        """Overwrite the end of the trace file with compressed text, new closing brackets and a new checksum."""
        body = self.compressor.compress(text.encode()) + self.compressor.flush(zlib.Z_SYNC_FLUSH)
        ending = self.compressor.copy()
        data = body + ending.compress(_CLOSING) + ending.flush()
        os.pwrite(self.file, data, self.length)
        self.length += len(body)
        os.ftruncate(self.file, self.length + len(data) - len(body))

    def _lines(self, recorded: Recorded) -> Iterator[dict[str, Any]]:
        """Yield the metadata and the events of a process.

        The events are sorted by start time, and an event precedes all events that are nested in it.
        """
        key = recorded.process, recorded.pid, recorded.host
        if key not in self.processes:
            self.processes[key] = _Process(len(self.processes) + 1)
            yield from self.processes[key].introduce(recorded)
        process = self.processes[key]
        for event in sorted(recorded.events, key=lambda one: (one.start_ns, -one.duration_ns)):
            thread, new = process.thread_of(event)
            if new:
                yield from process.name_thread(thread, last=not event.nests)
            yield {
                "name": event.name,
                "cat": event.track,
                "ph": "X",
                "ts": (event.start_ns - self.start_ns) / 1000,
                "dur": event.duration_ns / 1000,
                "pid": process.number,
                "tid": thread,
                "args": event.args,
            }
        if recorded.lost:
            at = {"ts": (recorded.events[-1].end_ns - self.start_ns) / 1000, "pid": process.number, "tid": 0}
            yield {"name": f"{recorded.lost} events lost", "ph": "i", "s": "p", **at}


class _Process:
    """A process in the trace file, with the timeline rows (threads) on which the events of the process are drawn.

    The trace file numbers the processes instead of using pids, because processes on two machines may have the same pid.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        # Names of the threads of the process. `threads` has the name of thread number n at index n - 1.
        self.threads: list[str] = []
        # For events that may be nested, `rows` maps the name of a track (a group of events) to the timeline rows that
        # show the events of the track.
        self.rows: dict[str, list[_Row]] = {}
        # Events that must not be nested are drawn on several parallel lines of a track, which the file format calls
        # threads. `free` maps the name of a track to a heap of the track's threads. The heap has one pair for each
        # thread: the end time of the thread's latest event, and the thread number.
        self.free: dict[str, list[tuple[int, int]]] = {}

    def introduce(self, recorded: Recorded) -> Iterator[dict[str, Any]]:
        """Yield two metadata events: one with the process's name, and one with its position among the processes."""
        name = f"{recorded.process} (pid {recorded.pid}, {recorded.host})"
        for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": self.number})):
            yield {"name": kind, "ph": "M", "pid": self.number, "tid": 0, "args": args}

    def name_thread(self, thread: int, *, last: bool) -> Iterator[dict[str, Any]]:
        """Yield two metadata events: one with the name of a thread, and one with its position among the threads.

        If `last` is true, the thread is drawn below all threads for which `last` is false.
        """
        for kind, args in (
            ("thread_name", {"name": self.threads[thread - 1]}),
            ("thread_sort_index", {"sort_index": thread + (_LAST if last else 0)}),
        ):
            yield {"name": kind, "ph": "M", "pid": self.number, "tid": thread, "args": args}

    def thread_of(self, event: Event) -> tuple[int, bool]:
        """Choose the timeline row (thread) for an event, and return the thread number and whether the thread is new.

        In a Perfetto timeline, a thread is one row of events. A new event can be drawn on a row if each earlier event
        of the row either ends before the new event starts or contains the new event. An event that cannot be drawn on
        any existing row of its track gets a new row.
        """
        if not event.nests:
            return self._free_thread(event)
        rows = self.rows.setdefault(event.track, [])
        for row in rows:
            if row.take(event):
                return row.thread, False
        thread = self._new_thread(event.track, len(rows))
        rows.append(_Row(thread, event.start_ns, [event.end_ns]))
        return thread, True

    def _free_thread(self, event: Event) -> tuple[int, bool]:
        """Return the number of the thread for an event that must not be nested, and whether the thread is new.

        Among the threads of a track, the thread whose latest event ended first is chosen. If every thread of the track
        has an event that ends after `event` starts, a new thread is created for `event`.
        """
        heap = self.free.setdefault(event.track, [])
        if heap and heap[0][0] <= event.start_ns:
            thread = heap[0][1]
            heapq.heapreplace(heap, (event.end_ns, thread))
            return thread, False
        thread = self._new_thread(event.track, len(heap))
        heapq.heappush(heap, (event.end_ns, thread))
        return thread, True

    def _new_thread(self, track: str, others: int) -> int:
        """Create a thread for a track that already has `others` threads, and return the new thread's number."""
        self.threads.append(f"{track} {others + 1}" if others else track)
        return len(self.threads)


@dataclass
class _Row:
    """A row of the timeline, in which any two events are disjoint or nested.

    Attributes:
        thread: number that identifies this timeline row as a thread in the trace file.
        start_ns: start time of the latest event on this timeline row, in nanoseconds.
        ends: end times of the latest event on this timeline row and of the events that the latest event is nested in.
            In `ends`, the end time of the outermost event is first, and the end time of the latest event is last.
    """

    thread: int
    start_ns: int
    ends: list[int]

    def take(self, event: Event) -> bool:
        """Add an event unless it would partly overlap an event of the row, and return whether the event was added.

        An event that starts before the row's latest event is never added.
        """
        if event.start_ns < self.start_ns:
            return False
        around = [end for end in self.ends if end > event.start_ns]
        if around and not (event.nests and event.end_ns <= around[-1]):
            return False
        self.start_ns, self.ends = event.start_ns, [*around, event.end_ns]
        return True
