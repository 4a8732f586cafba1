import gzip
import json
import os
import signal
import subprocess
import sys

import pytest

from rltrain.base.trace import Event, Recorded
from rltrain.monitoring.trace_file import TraceFile, next_path
from tests.traces import by_row, drawn, require_nested

START = 1_700_000_000_123_456_789


def event(name, start, end, *, track="calls", nests=True, **args):
    """Return a trace event that starts and ends at the given times, in nanoseconds after the start of the trace."""
    return Event(track, name, START + start, end - start, args, nests)


def recorded(*events, process="driver", pid=11, host="a", lost=0):
    return Recorded(process, pid, host, list(events), lost)


@pytest.fixture
def file(tmp_path):
    made = TraceFile(tmp_path / "trace.json.gz", START)
    yield made
    made.close()


def raw(file):
    return json.loads(gzip.decompress(file.path.read_bytes()))["traceEvents"]


def test_an_event_is_a_complete_event_in_microseconds_after_the_metadata_that_names_its_process_and_row(file):
    file.write([recorded(event("actor.update", 1_500, 4_000, rows=2))])
    assert raw(file) == [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "driver (pid 11, a)"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "tid": 0, "args": {"sort_index": 1}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "calls"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
        {
            "name": "actor.update", "cat": "calls", "ph": "X", "ts": 1.5, "dur": 2.5, "pid": 1, "tid": 1,
            "args": {"rows": 2},
        },
    ]  # fmt: skip


def test_processes_of_equal_names_or_pids_are_told_apart_and_named_once(file):
    one, two = recorded(event("a", 0, 1), process="rank 0"), recorded(event("b", 0, 1), process="rank 0", pid=12)
    file.write([one, two, recorded(event("c", 0, 1), process="rank 0", host="b")])
    file.write([recorded(event("d", 5, 6), process="rank 0")])
    named = [(one["pid"], one["args"]["name"]) for one in raw(file) if one["name"] == "process_name"]
    assert named == [(1, "rank 0 (pid 11, a)"), (2, "rank 0 (pid 12, a)"), (3, "rank 0 (pid 11, b)")]
    assert {one.name: one.process for one in drawn(file.path)}["d"] == "rank 0 (pid 11, a)"


def test_nested_events_share_a_row_and_the_outer_one_comes_first_although_it_ended_last(file):
    file.write([recorded(event("inner", 0, 5), event("second", 5, 9), event("outer", 0, 10), event("next", 10, 12))])
    assert [one["name"] for one in raw(file) if one["ph"] == "X"] == ["outer", "inner", "second", "next"]
    assert {one["tid"] for one in raw(file) if one["ph"] == "X"} == {1}


def test_events_that_overlap_without_being_nested_get_rows_of_their_own(file):
    file.write([recorded(event("a", 0, 10), event("b", 5, 15), event("c", 12, 14), event("d", 15, 16))])
    rows = {row: [one.name for one in events] for (_, row), events in by_row(drawn(file.path)).items()}
    assert rows == {"calls": ["a", "c", "d"], "calls 2": ["b"]}


def test_requests_at_the_same_time_are_never_drawn_inside_each_other(file):
    requests = [event(name, 0, end, track="requests", nests=False) for name, end in (("a", 10), ("b", 4), ("c", 7))]
    file.write([recorded(*requests, event("d", 4, 6, track="requests", nests=False))])
    rows = {row: [one.name for one in events] for (_, row), events in by_row(drawn(file.path)).items()}
    assert rows == {"requests": ["a"], "requests 2": ["c"], "requests 3": ["b", "d"]}


def test_an_event_that_began_before_events_of_an_earlier_write_gets_another_row(file):
    file.write([recorded(event("outer", 100, 200), event("inner", 120, 160))])
    file.write([recorded(event("whole", 0, 300), event("late", 110, 130), event("after", 200, 210))])
    require_nested(drawn(file.path))
    rows = {row: [one.name for one in events] for (_, row), events in by_row(drawn(file.path)).items()}
    assert rows == {"calls": ["outer", "inner", "after"], "calls 2": ["whole", "late"]}


def test_random_events_in_several_writes_never_overlap_on_a_row(file):
    import random

    source = random.Random(0)
    for part in range(10):
        starts = [source.randrange(part * 50, part * 50 + 200) for _ in range(100)]
        file.write([recorded(*(event("x", start, start + source.randrange(80)) for start in starts))])
    found = drawn(file.path)
    assert len(found) == 1_000
    require_nested(found)


def test_lost_events_are_said_in_the_file(file):
    file.write([recorded(event("a", 0, 1), lost=7)])
    assert raw(file)[-1]["name"] == "7 events lost"


def test_a_resumed_run_writes_another_file(tmp_path):
    for name in ("trace.json.gz", "trace.2.json.gz", "trace.3.json.gz"):
        path = next_path(tmp_path)
        assert path.name == name
        TraceFile(path, START).close()


def test_the_file_is_whole_json_in_one_gzip_member_after_each_write_and_before_the_first(file):
    assert raw(file) == []
    for number in range(5):
        file.write([recorded(*(event(f"event {number}", 10 * number + i, 10 * number + i + 1) for i in range(10)))])
        assert len(drawn(file.path)) == 10 * (number + 1)
        subprocess.run(["gzip", "--test", file.path], check=True)
        assert file.path.read_bytes().count(b"\x1f\x8b\x08") == 1
    file.write([])
    assert len(drawn(file.path)) == 50


def test_a_killed_writer_leaves_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "trace.json.gz"
    code = f"""
import itertools, pathlib
from rltrain.base.trace import Event, Recorded
from rltrain.monitoring.trace_file import TraceFile
file = TraceFile(pathlib.Path({str(path)!r}), 0)
for step in itertools.count():
    events = [Event("steps", f"event {{i}} of step {{step}}", step * 1000 + i, 1, {{}}) for i in range(100)]
    file.write([Recorded("driver", 1, "a", events)])
    print(step, flush=True)
"""
    for after in (1, 20, 57):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for line in writer.stdout:
            if int(line) == after:
                break
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        count = len(drawn(path))
        assert count >= 100 * (after + 1)
        assert count % 100 == 0
