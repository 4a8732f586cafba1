"""The process in which `rltrain.data.chat_templates` has chat templates compiled and rendered, within limits.

A template is a program from a model directory. Jinja's sandbox keeps it from files and processes, but not from endless
loops or huge strings, neither when it runs nor when Jinja folds its constants. Here the limits end this process alone.

A request is a pickle (template, variables, pickles of chats), and comes from the process that started this one. The
answer is JSON (texts, error): the error is what the template said of the chat after those texts, or null.
"""

import contextlib
import json
import math
import mmap
import os
import pickle
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rltrain.base.process_limits import limit_memory

MEAN_SECONDS = 0.02  # of processor time that the chats of a request may take on average, beyond what one may take
OUT_OF_MEMORY = 77  # exit status


def main(descriptor: int, progress: int, chat_seconds: int, memory_mb: int) -> None:
    """Answer requests until the other side is closed.

    Args:
        descriptor: of the socket.
        progress: of a file whose first byte says which chat of the request is being rendered.
        chat_seconds: processor time that one chat may take.
        memory_mb: how much more than at the start this process may take.
    """
    connection = Connection(descriptor)
    begun = mmap.mmap(progress, 1)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            import transformers.utils.chat_template_utils  # noqa: F401 (its memory is not the template's)

            limit_memory(memory_mb)
            while True:
                template, variables, chats = pickle.loads(connection.recv_bytes())
                answer = _rendered(template, variables, chats, begun, chat_seconds)
                connection.send_bytes(json.dumps(answer).encode())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _rendered(
    template: str, variables: Mapping[str, Any], chats: Sequence[bytes], begun: mmap.mmap, chat_seconds: int
) -> tuple[list[str], str | None]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: list[str] = []
    started = time.process_time()
    for number, chat in enumerate(chats):
        begun[0] = number
        total = started + chat_seconds + number * MEAN_SECONDS
        _limit_processor_time(min(total, time.process_time() + chat_seconds))
        try:
            rendered: Any = render_jinja_template([pickle.loads(chat)], chat_template=template, **variables)
        except MemoryError:
            raise
        except Exception as error:  # templates raise whatever they like
            return texts, str(error)[:1000]
        texts += rendered[0]
    return texts, None


def _limit_processor_time(seconds: float) -> None:
    """Have this process killed (SIGXCPU) when it has used so many seconds, rounded up, since it began."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
