"""Reading of a run's timeline in tests, from the file alone."""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Drawn:
    """An event as a viewer draws it. Times are in nanoseconds, as Perfetto rounds them."""

    process: str
    row: str
    name: str
    start: int
    end: int
    args: dict

    def inside(self, other: "Drawn") -> bool:
        """Return whether this event lies inside another one."""
        return other.start <= self.start and self.end <= other.end


def drawn(path: Path) -> list[Drawn]:
    """Read all complete events of a trace, with the names of their processes and rows, in order of start.

    Fails if the format is violated: each event needs a named process and row, and only events with the phases M and X
    may occur.
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
    """Return the events of each row of each process."""
    found = defaultdict(list)
    for event in events:
        found[event.process, event.row].append(event)
    return found


def require_nested(events: list[Drawn]) -> None:
    """Fail if two events of one row overlap and neither lies inside the other, which Perfetto cannot draw."""
    for row, own in by_row(events).items():
        outer: list[Drawn] = []
        for event in own:
            while outer and outer[-1].end <= event.start:
                outer.pop()
            assert not outer or event.inside(outer[-1]), (row, outer[-1], event)
            outer.append(event)
