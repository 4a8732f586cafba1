"""The child process in which reward functions run.

`workers.reward.guard` starts the child process and communicates with it through a socket.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from rltrain.base import trace
from rltrain.base.process_limits import limit_memory
from workers.cluster import process_tree
from workers.reward.messages import SampleScores
from workers.reward.terminal import FirstLines, stand_in
from workers.reward.worker import RewardWorker

READY = "ready"


@dataclass(frozen=True)
class Traced:
    """The child process's answer to a scoring call in a run that records a timeline.

    Attributes:
        results: Results of the scoring call.
        events: Timeline events that the child process recorded during the call.
    """

    results: list[SampleScores]
    events: list[trace.Event]


def serve(descriptor: int, parent: int) -> None:
    """Load the reward functions and answer scoring calls until the guard closes the socket.

    When the reward functions are loaded, the child process sends READY. If a reward function cannot be loaded, the
    child process sends the error message instead of READY, and `serve` returns.

    Args:
        descriptor: File descriptor of the socket that connects this process with its guard process. The first message
            on the socket is a tuple of the reward functions, the options of `RewardWorker` and the memory limit in MB.
        parent: Process id (pid) of the process that started the child. The child process is killed when its parent
            process ends.
    """
    process_tree.end_with_parent(parent)
    trace.start_from(os.environ)
    # SIGINT gets its default action, so that Ctrl-C raises no KeyboardInterrupt in this process. While SIGINT has its
    # default action, a KeyboardInterrupt in this process can come only from the code of a reward function.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    process_tree.adopt_orphans()
    connection, own, printed = Connection(descriptor), os.getpid(), stand_in()
    functions, options, memory_mb = connection.recv()
    try:
        worker = RewardWorker(functions, **options)
    except Exception as error:
        connection.send(str(error))
        return
    # `_clean_up` does not kill the processes that were started while the reward functions were imported.
    helpers = process_tree.descendants(own)
    limit_memory(memory_mb)
    # The lines that were printed while the reward functions were imported are deleted, because the driver imports the
    # same reward functions and has already shown the same lines.
    printed.forget()
    connection.send(READY)
    while True:
        try:
            requests, limits, stepwise = connection.recv()
        except EOFError:
            return
        report = _reporter(connection, own, printed) if stepwise else None
        results, recorded = _answer(worker, requests, limits | {"report": report}, own), trace.take()
        results = [_with_lines(result, printed) for result in results]
        connection.send(results if recorded is None else Traced(results, recorded.events))
        if process_tree.has_children():
            _clean_up(own, helpers)


def _with_lines(result: SampleScores, printed: FirstLines) -> SampleScores:
    """Return `result` with `printed` set to the first lines that the reward functions have printed in this process."""
    lines = printed.lines()
    return replace(result, printed=lines) if lines else result


def _reporter(connection: Connection, own: int, printed: FirstLines) -> Callable[[SampleScores], None]:
    """Return a callback that sends each result to the guard at once, so that the guard sees the call's progress."""

    def report(result: SampleScores) -> None:
        if os.getpid() != own:  # This process is a fork made by a reward function, so it must send no results.
            os._exit(1)
        connection.send(_with_lines(result, printed))

    return report


def _answer(worker: RewardWorker, requests: Sequence[Any], limits: dict[str, Any], own: int) -> list[Any]:
    try:
        return worker.score(requests, **limits)
    finally:
        if os.getpid() != own:  # This process is a fork made by a reward function, so it must not return to `serve`.
            os._exit(1)


def _clean_up(own: int, helpers: Sequence[int]) -> None:
    """Kill all descendants of this process that reward functions have left running, except the pids in `helpers`."""
    if not process_tree.descendants(own, spare=helpers):
        return
    process_tree.end_descendants(own, spare=helpers)
    until = time.monotonic() + 1.0
    while process_tree.descendants(own, spare=helpers) and time.monotonic() < until:
        process_tree.reap(helpers)
        time.sleep(0.001)
