"""The file of a run's timeline, in Chrome's trace-event format, which https://ui.perfetto.dev opens.

The format is JSON: an object whose list `traceEvents` holds events. Complete events (`"ph": "X"`) have a start `ts` and
a duration `dur` in microseconds. Metadata events (`"ph": "M"`) name the processes and threads. Perfetto needs events of
one thread to be disjoint or nested, so events that overlap otherwise get further threads, which are rows of the
timeline.

The format's description: "Trace Event Format", https://perfetto.dev/docs/getting-started/other-formats.
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
_GZIP = 31  # zlib's number for a gzip file with the largest window
_CLOSING = b"\n]}\n"
_LAST = 1_000_000  # above the number of each thread
_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


def next_path(folder: Path) -> Path:
    """Return the path of the next trace of a run: `trace.json.gz`, or `trace.2.json.gz` and so on in a resumed run."""
    path, number = folder / TRACE, 1
    while path.exists():
        number += 1
        path = folder / f"trace.{number}.json.gz"
    return path


class TraceFile:
    """Writes events to a gzip file, which is complete after each call of `write`.

    Each call writes compressed events and the end of the file: the closing bracket and gzip's check sum. The next call
    replaces the end of the file. So a killed run leaves a valid gzip file with valid JSON.

    Args:
        path: path of the file, which must not exist.
        start_ns: wall-clock time that is 0 in the file, in nanoseconds since 1970. Perfetto computes times in floating
            point, which has too few digits for microseconds since 1970.
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
        """Add the events of several processes."""
        lines = [line for one in recorded for line in self._lines(one)]
        if lines:
            self._append(("\n" if self.first else ",\n") + _encode(lines)[1:-1])  # without the brackets of the list
            self.first = False

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)

    def _append(self, text: str) -> None:
        """Replace the end of the file by compressed text and a new end, in one system call."""
        body = self.compressor.compress(text.encode()) + self.compressor.flush(zlib.Z_SYNC_FLUSH)
        ending = self.compressor.copy()
        data = body + ending.compress(_CLOSING) + ending.flush()
        os.pwrite(self.file, data, self.length)
        self.length += len(body)
        os.ftruncate(self.file, self.length + len(data) - len(body))

    def _lines(self, recorded: Recorded) -> Iterator[dict[str, Any]]:
        """Yield the metadata and events of a process, in the order of the starts, an outer event before inner ones."""
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
    """A process in the file, with the rows of its timeline.

    The file numbers the processes itself, because processes of two machines may have the same pid.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.threads: list[str] = []  # name of each thread; a thread's number in the file is its index plus 1
        self.rows: dict[str, list[_Row]] = {}  # by track, for events that may be nested
        self.free: dict[str, list[tuple[int, int]]] = {}  # by track, for other events: heap of (end, thread)

    def introduce(self, recorded: Recorded) -> Iterator[dict[str, Any]]:
        """Yield metadata with the name of the process and its place among the processes."""
        name = f"{recorded.process} (pid {recorded.pid}, {recorded.host})"
        for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": self.number})):
            yield {"name": kind, "ph": "M", "pid": self.number, "tid": 0, "args": args}

    def name_thread(self, thread: int, *, last: bool) -> Iterator[dict[str, Any]]:
        """Yield metadata with the name of a thread and its place in the process, below the others if `last` is true."""
        for kind, args in (
            ("thread_name", {"name": self.threads[thread - 1]}),
            ("thread_sort_index", {"sort_index": thread + (_LAST if last else 0)}),
        ):
            yield {"name": kind, "ph": "M", "pid": self.number, "tid": thread, "args": args}

    def thread_of(self, event: Event) -> tuple[int, bool]:
        """Return the thread on which an event is drawn, and whether the thread is new.

        The thread belongs to the event's track, and its events end before this event or contain it.
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
        """Return the thread of the event's track that has been free for the longest time, and whether it is new."""
        heap = self.free.setdefault(event.track, [])
        if heap and heap[0][0] <= event.start_ns:
            thread = heap[0][1]
            heapq.heapreplace(heap, (event.end_ns, thread))
            return thread, False
        thread = self._new_thread(event.track, len(heap))
        heapq.heappush(heap, (event.end_ns, thread))
        return thread, True

    def _new_thread(self, track: str, others: int) -> int:
        """Return a new thread of a track that has `others` threads already."""
        self.threads.append(f"{track} {others + 1}" if others else track)
        return len(self.threads)


@dataclass
class _Row:
    """A row of the timeline, on which events are disjoint or nested.

    Attributes:
        thread: number of the row's thread in the file.
        start_ns: start of the latest event.
        ends: ends of the latest event and of the events that contain it, the outermost event first.
    """

    thread: int
    start_ns: int
    ends: list[int]

    def take(self, event: Event) -> bool:
        """Add an event that starts after, or inside, the row's latest event. Return whether the event was added."""
        if event.start_ns < self.start_ns:
            return False
        around = [end for end in self.ends if end > event.start_ns]
        if around and not (event.nests and event.end_ns <= around[-1]):
            return False
        self.start_ns, self.ends = event.start_ns, [*around, event.end_ns]
        return True
