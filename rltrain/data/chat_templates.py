"""Rendering of chat templates in a separate process.

The rendering process can be killed, so a template that loops endlessly or uses too much memory causes only an error
message.
"""

import contextlib
import json
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rltrain.data.template_process import OUT_OF_MEMORY

# A rendering request is complete when it holds `_CHATS` chats, or when its pickled chats exceed `_BYTES` bytes.
_CHATS, _BYTES = 256, 1 << 23
# Maximum time, in seconds, that the parent process waits for the answer to a rendering request, including the time in
# which the rendering process starts.
_SILENCE_S = 240.0
_TRIES = 3  # After `_TRIES` rendering processes have died or stopped responding, no further process is started.
_FIX = "use text prompts, or another template (chat_template in the tokenizer's files)"


class TemplateError(ValueError):
    """Raised if a chat cannot be rendered with the chat template.

    The message of a `TemplateError` says why the chat cannot be rendered, and what to change.

    Attributes:
        chat: index of the failed chat in the list of chats to render.
    """

    def __init__(self, message: str, chat: int = 0) -> None:
        super().__init__(message)
        self.chat = chat


class ChatTemplates:
    """Renders chats with a tokenizer's chat template like the method `apply_chat_template` of transformers, but within
    limits on processor time and memory.

    The rendering process starts when the first chat is rendered. The rendering process ends when `close` is called or
    the `ChatTemplates` object is deleted.

    Args:
        chat_seconds: limit on the processor time for one chat, in seconds.
        memory_mb: limit on the memory that the rendering process allocates after its start, in MB.
    """

    def __init__(self, *, chat_seconds: int = 5, memory_mb: int = 1024) -> None:
        self._seconds, self._memory_mb = chat_seconds, memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = 0

    def __enter__(self) -> "ChatTemplates":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the rendering process if one is running. If a chat is rendered after `close`, a new rendering process is
        started.
        """
        if self._process is not None:
            self._end()
        self._process = None

    def render(
        self,
        tokenizer: Any,
        chats: Sequence[Any],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[str]:
        """Yield the rendered text of each chat, in order.

        Args:
            tokenizer: a Hugging Face tokenizer, which provides the template and the special tokens.
            chats: lists of messages, each a dict with `role` and `content`.
            add_generation_prompt: whether to append the text that opens the assistant's answer.
            tools: JSON schemas of the tools that the assistant can call, in the form that `get_json_schema` of
                transformers returns. If tools are given and the tokenizer has a separate template for tools, the
                template for tools is used.

        Raises:
            TemplateError: a chat cannot be rendered. The texts of all chats before the failed chat are yielded before
                the error is raised.
        """
        done, given = 0, [dict(tool) for tool in tools] or None
        for pickles in _requests(chats):
            try:
                template = tokenizer.get_chat_template(tools=given)
            except Exception as error:  # The tokenizer has several templates but no default template.
                raise TemplateError(f"the chat template cannot be chosen ({_words(error)}); {_FIX}") from None
            variables = {
                **tokenizer.special_tokens_map,
                "add_generation_prompt": add_generation_prompt,
                "tools": given,
            }
            texts, refusal = self._answer(pickle.dumps((template, variables, pickles)), done)
            yield from texts
            done += len(texts)
            if refusal is not None:
                raise TemplateError(
                    f"the chat template refuses these messages ({_words(refusal)}); change the messages "
                    "or the template",
                    done,
                )

    def _answer(self, request: bytes, done: int) -> tuple[list[str], str | None]:
        """Send a request to the rendering process, and return the rendered texts and the template's error message.

        The template's error message is None if the template rendered all chats of the request.

        Args:
            request: the pickled request.
            done: number of chats rendered before the request, needed to compute the index of a failed chat.

        Raises:
            TemplateError: the rendering process dies or does not answer in time.
        """
        if self._process is None:
            self._start()
        silent = False
        with contextlib.suppress(EOFError, OSError):
            self._connection.send_bytes(request)
            if self._connection.poll(_SILENCE_S):
                texts, refusal = json.loads(self._connection.recv_bytes())
                return texts, refusal
            silent = True
        raise TemplateError(self._why_lost(silent), done + self._begun[0])

    def _start(self) -> None:
        if self._lost >= _TRIES:
            raise TemplateError(f"the chat template has made {_TRIES} rendering processes fail; {_FIX}")
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as progress:
            progress.truncate(1)
            self._begun = mmap.mmap(progress.fileno(), 1)
            words = [theirs.fileno(), progress.fileno(), self._seconds, self._memory_mb]
            paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rltrain.data.template_process", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=words[:2],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                start_new_session=True,  # Ctrl-C must not send SIGINT to the rendering process.
            )
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _ended, self._process, self._connection)

    def _why_lost(self, silent: bool) -> str:
        """End the rendering process after it failed to answer a request.

        Return an error message that says why the rendering process did not answer, and what the user can do.
        """
        assert self._process is not None
        process, self._lost = self._process, self._lost + 1
        if not silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        self.close()
        status = process.returncode
        if status == -signal.SIGXCPU:
            return f"the chat template takes more than {self._seconds} s of processor time for these messages; {_FIX}"
        if status == OUT_OF_MEMORY:
            return f"the chat template takes more than {self._memory_mb} MB of memory for these messages; {_FIX}"
        what = f"did not answer for {_SILENCE_S:g} s" if silent else f"ended with status {status}"
        return f"the chat template cannot be rendered for these messages (the rendering process {what}); {_FIX}"


def _ended(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def _requests(chats: Sequence[Any]) -> Iterator[list[bytes]]:
    """Group the chats into rendering requests, and yield each request as a list of pickled chats."""
    taken: list[bytes] = []
    size = 0
    for chat in chats:
        taken.append(pickle.dumps(chat))
        size += len(taken[-1])
        if len(taken) == _CHATS or size > _BYTES:
            yield taken
            taken, size = [], 0
    if taken:
        yield taken


def _words(error: object) -> str:
    return " ".join(str(error).split())[:200]
