"""Read a run's timeline in tests, using only the trace file."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Drawn:
    """A complete event of a trace, as a trace viewer draws it.

    Times are rounded to whole nanoseconds, as in the trace viewer Perfetto.
    """

    process: str
    row: str
    name: str
    start: int
    end: int
    args: dict

    def inside(self, other: "Drawn") -> bool:
        """Return whether this event lies within the time span of `other`."""
        return other.start <= self.start and self.end <= other.end


def drawn(path: Path) -> list[Drawn]:
    """Read all complete events (phase X) of a trace file, sorted by start time.

    Each returned event contains the name of its process and the name of its row in the timeline.

    The function fails if an event lacks a named process or a named row, or has a phase other than M and X.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    meta = [event for event in events if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in meta if event["name"] == "process_name"}
    rows = {(one["pid"], one["tid"]): one["args"]["name"] for one in meta if one["name"] == "thread_name"}
    assert {event["ph"] for event in events} <= {"M", "X"}
    found = []
    for one in events:
        if one["ph"] == "X":
            start = round(one["ts"] * 1000)
            process, row = processes[one["pid"]], rows[one["pid"], one["tid"]]
            found.append(Drawn(process, row, one["name"], start, start + round(one["dur"] * 1000), one["args"]))
    return sorted(found, key=lambda event: (event.start, -event.end))


def by_row(events: list[Drawn]) -> dict[tuple[str, str], list[Drawn]]:
    """Return the events grouped by (process, row)."""
    found = defaultdict(list)
    for event in events:
        found[event.process, event.row].append(event)
    return found


def require_nested(events: list[Drawn]) -> None:
    """Fail if two events of one row overlap only in part, because Perfetto cannot draw partial overlaps."""
    for row, own in by_row(events).items():
        outer: list[Drawn] = []
        for event in own:
            while outer and outer[-1].end <= event.start:
                outer.pop()
            assert not outer or event.inside(outer[-1]), (row, outer[-1], event)
            outer.append(event)
