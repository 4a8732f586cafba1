"""The process that reward functions run in: started by `workers.reward.guard`, which it talks to through a socket."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rltrain.base.process_limits import limit_memory
from workers.cluster import process_tree
from workers.reward.messages import RewardResult
from workers.reward.worker import RewardWorker

READY = "ready"


def serve(descriptor: int, parent: int) -> None:
    """Load the functions, say READY or what is wrong, and answer calls until the other side is closed.

    Args:
        descriptor: of the socket. The first message is (functions, options of `RewardWorker`, memory_mb).
        parent: the process that started this one; this one ends with it.
    """
    process_tree.end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that a KeyboardInterrupt is a function's own
    process_tree.adopt_orphans()
    connection, own = Connection(descriptor), os.getpid()
    functions, options, memory_mb = connection.recv()
    try:
        worker = RewardWorker(functions, **options)
    except Exception as error:
        connection.send(str(error))
        return
    helpers = process_tree.descendants(own)  # what the import of a function's file started stays
    limit_memory(memory_mb)
    connection.send(READY)
    while True:
        try:
            requests, limits, stepwise = connection.recv()
        except EOFError:
            return
        report = _reporter(connection, own) if stepwise else None
        connection.send(_answer(worker, requests, limits | {"report": report}, own))
        if process_tree.has_children():
            _clean_up(own, helpers)


def _reporter(connection: Connection, own: int) -> Callable[[RewardResult], None]:
    """Sends results to the guard as they come, so that it knows which call is under way."""

    def report(result: RewardResult) -> None:
        if os.getpid() != own:  # as in `_answer`
            os._exit(1)
        connection.send(result)

    return report


def _answer(worker: RewardWorker, requests: Sequence[Any], limits: dict[str, Any], own: int) -> list[Any]:
    try:
        return worker.score(requests, **limits)
    finally:
        if os.getpid() != own:  # a function forked, and both halves returned
            os._exit(1)


def _clean_up(own: int, helpers: Sequence[int]) -> None:
    """End what calls have left behind; what they started ends with them."""
    if not process_tree.descendants(own, spare=helpers):
        return
    process_tree.end_descendants(own, spare=helpers)
    until = time.monotonic() + 1.0
    while process_tree.descendants(own, spare=helpers) and time.monotonic() < until:
        process_tree.reap(helpers)
        time.sleep(0.001)
