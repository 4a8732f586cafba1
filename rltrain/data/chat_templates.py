"""Chat templates rendered in a process of their own: one that never ends, or eats memory, is an error message."""

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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rltrain.data.template_process import OUT_OF_MEMORY

_CHATS, _BYTES = 256, 1 << 23  # of one request, at most
_SILENCE_S = 240.0  # of real time without an answer; the start of the process is in it
_TRIES = 3  # processes that are lost before no further one is started
_FIX = "use text prompts, or another template (chat_template in the tokenizer's files)"


class TemplateError(ValueError):
    """A chat template has no text for a chat; the message goes on from "the chat template".

    Attributes:
        chat: which of the chats that were to be rendered.
    """

    def __init__(self, message: str, chat: int = 0) -> None:
        super().__init__(message)
        self.chat = chat


class ChatTemplates:
    """Renders chats with tokenizers' templates, as `apply_chat_template` does, within limits of time and memory.

    The process starts with the first chat and ends with `close`, or with this object.

    Args:
        chat_seconds: processor time that one chat may take.
        memory_mb: memory that rendering may take beyond what the process starts with.
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
        """End the process, if there is one; the next chat starts another."""
        if self._process is not None:
            self._end()
        self._process = None

    def render(self, tokenizer: Any, chats: Sequence[Any], *, add_generation_prompt: bool) -> Iterator[str]:
        """Yield the text of each chat, in order.

        Args:
            tokenizer: a Hugging Face tokenizer; its template and its special tokens are used.
            chats: lists of messages, each a dict with `role` and `content`.
            add_generation_prompt: whether the text ends with what opens an answer.

        Raises:
            TemplateError: at the first chat that has no text.
        """
        done = 0
        for pickles in _requests(chats):
            try:
                template = tokenizer.get_chat_template()
            except Exception as error:  # several templates, and no default
                raise TemplateError(f"cannot be chosen ({_words(error)}); {_FIX}") from None
            variables = {**tokenizer.special_tokens_map, "add_generation_prompt": add_generation_prompt}
            texts, refusal = self._answer(pickle.dumps((template, variables, pickles)), done)
            yield from texts
            done += len(texts)
            if refusal is not None:
                raise TemplateError(f"refuses these messages ({_words(refusal)}); change them or the template", done)

    def _answer(self, request: bytes, done: int) -> tuple[list[str], str | None]:
        """Have the process answer a request, before which so many chats were rendered."""
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
            raise TemplateError(f"has ended {_TRIES} processes that rendered it; {_FIX}")
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
                start_new_session=True,  # Ctrl-C is for the process that started it
            )
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _ended, self._process, self._connection)

    def _why_lost(self, silent: bool) -> str:
        """End the process, which does not answer, and say why."""
        assert self._process is not None
        process, self._lost = self._process, self._lost + 1
        if not silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        self.close()
        status = process.returncode
        if status == -signal.SIGXCPU:
            return f"takes more than {self._seconds} s of processor time for these messages; {_FIX}"
        if status == OUT_OF_MEMORY:
            return f"takes more than {self._memory_mb} MB of memory for these messages; {_FIX}"
        what = f"said nothing for {_SILENCE_S:g} s" if silent else f"ended with status {status}"
        return f"cannot be rendered for these messages (its process {what}); {_FIX}"


def _ended(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def _requests(chats: Sequence[Any]) -> Iterator[list[bytes]]:
    """Yield the chats as pickles, so many at a time as are rendered in one go."""
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
