"""One rollout replica: an engine, and the thread that steps it while requests come and answers go."""

import importlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rltrain.schema import Config
from workers.rollout.messages import Completion, Request
from workers.weight_sync import Bucket

ENGINES = {"vllm": "workers.rollout.vllm_engine:make", "hf": "workers.rollout.hf_engine:make"}
T = TypeVar("T")


class Engine(Protocol):
    """What a rollout worker asks of an engine; all calls come from one thread."""

    busy: bool

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""

    def step(self) -> list[Completion]:
        """Advance; returns the answers that finished."""

    def abort(self) -> None:
        """Drop all unfinished requests."""

    def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Take these weights and check them."""

    def settings(self, request: Request) -> dict[str, Any]:
        """The sampling parameters that the engine resolved for a request."""

    def close(self) -> None:
        """Free what the engine holds."""


class RolloutWorker:
    """One replica.

    Threaded, the engine lives in a thread of its own that steps it whenever there is work; other calls run in that
    thread between two steps. Otherwise `poll` steps it.

    Args:
        config: the whole config.
        path: model directory in Hugging Face form.
        stop_ids: the model's end tokens.
        threaded: whether the engine has its own thread.
    """

    def __init__(self, config: Config, path: str, stop_ids: Sequence[int], *, threaded: bool) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.finished: list[Completion] = []
        self.news = threading.Condition()
        self.commands: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self.error: BaseException | None = None
        self.closed = False
        module, _, name = ENGINES[config.rollout.engine].partition(":")

        def build() -> None:
            self.engine: Engine = getattr(importlib.import_module(module), name)(config, path, stop_ids)

        self.thread = threading.Thread(target=self._loop, name="rollout-engine", daemon=True) if threaded else None
        if self.thread is not None:
            self.thread.start()
        self._run(build)

    def submit(self, requests: Sequence[Request]) -> None:
        """Start answering; returns at once."""
        self._run(lambda: self.engine.add(requests))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers finished since the last call, waiting up to `timeout_s` for the first; raises the engine's error."""
        if self.thread is None:
            deadline = time.monotonic() + timeout_s
            while not self.finished and self.engine.busy and time.monotonic() < deadline:
                self._deliver(self.engine.step())
        with self.news:
            self.news.wait_for(lambda: self.finished or self.error, timeout_s if self.thread else 0)
            if self.error:
                raise self.error
            taken, self.finished = self.finished, []
        return taken

    def abort(self) -> None:
        """Drop all unfinished requests and all answers not yet taken."""
        self._run(lambda: self.engine.abort())
        with self.news:
            self.finished = []

    def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Take these weights between two steps. Raises SyncError when they did not arrive (invariant E5)."""
        self._run(lambda: self.engine.load(buckets, version))

    def settings(self, request: Request) -> dict[str, Any]:
        """The sampling parameters that the engine resolved for a request."""
        return self._run(lambda: self.engine.settings(request))

    def close(self) -> None:
        """End the thread and the engine."""
        self._run(lambda: self.engine.close())
        self.closed = True

    def _run(self, function: Callable[[], T]) -> T:
        """Run a function where the engine lives and wait for its result."""
        if self.thread is None:
            return function()
        future: Future[T] = Future()
        self.commands.put((function, future))
        while True:
            try:
                return future.result(timeout=1)
            except TimeoutError:
                if future.done() or not self.thread.is_alive():
                    raise

    def _loop(self) -> None:
        while not self.closed:
            idle = not hasattr(self, "engine") or not self.engine.busy
            self._obey(wait=idle)
            if not idle:
                try:
                    self._deliver(self.engine.step())
                except BaseException as error:
                    with self.news:
                        self.error = error
                        self.news.notify_all()
                    return

    def _obey(self, *, wait: bool) -> None:
        try:
            function, future = self.commands.get(timeout=0.1) if wait else self.commands.get_nowait()
        except queue.Empty:
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    def _deliver(self, completions: list[Completion]) -> None:
        if not completions:
            return
        texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        ready = [Completion(**{**vars(c), "text": text}) for c, text in zip(completions, texts, strict=True)]
        with self.news:
            self.finished.extend(ready)
            self.news.notify_all()
