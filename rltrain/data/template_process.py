"""The process that compiles and renders chat templates for `rltrain.data.chat_templates`, within resource limits.

A chat template is a program that comes with a model directory. Jinja's sandbox denies a chat template access to files
and processes. Inside the sandbox, a template can still loop endlessly or build huge strings, even at compile time, when
Jinja folds constants. If a template exceeds the resource limits, only the rendering process ends, and not its parent
process.

The parent process sends rendering requests to the rendering process. A rendering request is a pickle of the tuple
(template, variables, pickles of chats). The answer to a rendering request is the JSON array [texts, error]. In the JSON
array that answers a rendering request, `error` is the template's error message for the first chat that cannot be
rendered, or null if all chats were rendered.
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

# The first n chats of a rendering request may together use at most chat_seconds + (n - 1) * MEAN_SECONDS seconds of
# processor time.
MEAN_SECONDS = 0.02
OUT_OF_MEMORY = 77  # Exit status of a rendering process that runs out of memory.


def main(descriptor: int, progress: int, chat_seconds: int, memory_mb: int) -> None:
    """Answer rendering requests until the parent process closes the connection.

    Args:
        descriptor: file descriptor of the socket to the parent process.
        progress: descriptor of a file whose first byte holds the index of the chat that is being rendered.
        chat_seconds: limit on the processor time for one chat, in seconds.
        memory_mb: limit on the memory that this process allocates after it has imported its libraries, in MB.
    """
    connection = Connection(descriptor)
    begun = mmap.mmap(progress, 1)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            # transformers is imported before the memory limit is set, so that the library's own memory does not count
            # towards the limit.
            import transformers.utils.chat_template_utils  # noqa: F401

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
        # A template can raise any exception; the parent process gets the exception's message.
        except Exception as error:
            return texts, str(error)[:1000]
        texts += rendered[0]
    return texts, None


def _limit_processor_time(seconds: float) -> None:
    """Limit the total processor time of this process.

    The limit `seconds` is rounded up to whole seconds. When the process has used `seconds` seconds of processor time,
    the kernel kills the process with SIGXCPU.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
