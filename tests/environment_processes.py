"""A process that runs an environment worker without Ray, with scripted turns. This module does not import Ray."""

import threading

from rltrain.environments.tool_calls import ParsedAction, ToolCall
from workers.environments.worker import EnvironmentWorker
from workers.rollout.turns import TurnResult

READY = 0  # Number of the first message of a process, which has built its environment worker.


class Turns:
    """A rollout worker whose first action is a call of the tool `work(uid)`, and whose second action is an answer."""

    def __init__(self):
        self.finished = []

    def submit_turns(self, client, requests):
        """Store the results of the requested turns until the next poll."""
        for one in requests:
            uid, _, turn = one.key
            action = ParsedAction("", [ToolCall("work", {"uid": uid}, "c0")]) if turn == 0 else ParsedAction("done")
            self.finished.append(
                TurnResult(one.key, [1], [50, 99], [-0.5, -0.25], [0, 0], "stop", "text", action, serial=one.serial)
            )

    def poll_turns(self, client, timeout_s):
        """Return the results of the turns that were submitted since the last poll."""
        finished, self.finished = self.finished, []
        return finished


def serve(connection, name, source, limits, journal):
    """Build an environment worker, and run each received call in a thread of its own.

    A received call is a tuple (number, method, arguments), and the answer is a tuple (number, result).
    """
    worker, sending = EnvironmentWorker(name, source, limits, journal, threaded=True), threading.Lock()
    connection.send((READY, None))

    def answer(number, method, arguments):
        result = getattr(worker, method)(*arguments)
        with sending:
            connection.send((number, result))

    while True:
        threading.Thread(target=answer, args=connection.recv(), daemon=True).start()
