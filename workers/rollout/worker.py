"""One rollout replica: an engine, and the thread that steps it while requests come and answers go."""

import importlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rltrain.base.poll_interval import pause
from rltrain.settings.schema import Config
from workers.rollout.messages import Completion, Request
from workers.sync.buckets import Bucket
from workers.sync.receiver import Loads, Receiver

ENGINES = {"vllm": "workers.rollout.vllm_engine:make", "hf": "workers.rollout.hf_engine:make"}
# An engine that goes on working is given at least so long to finish more answers before some are handed over.
LINGER_S = 0.02
T = TypeVar("T")


class Engine(Loads, Protocol):
    """What a rollout worker asks of an engine; all calls come from one thread."""

    busy: bool

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""

    def step(self) -> list[Completion]:
        """Advance; returns the answers that finished."""

    def abort(self) -> None:
        """Drop all unfinished requests."""

    def sleep(self) -> bool:
        """Give up the device's memory, weights and caches, until weights are loaded; False where it keeps them."""

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

        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        self.finished: list[Completion] = []
        self.receiver = Receiver()
        self.news = threading.Condition()
        self.commands: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self.error: BaseException | None = None
        self.closed, self.aborts, self.began = False, 0, 0.0
        module, _, name = ENGINES[config.rollout.engine].partition(":")

        def build() -> None:
            self.engine: Engine = getattr(importlib.import_module(module), name)(config, path, stop_ids)

        self.thread = threading.Thread(target=self._loop, name="rollout-engine", daemon=True) if threaded else None
        if self.thread is not None:
            self.thread.start()
        self._run(build)

    def submit(self, requests: Sequence[Request]) -> None:
        """Start answering, after a sync that failed once another succeeds; returns at once."""
        assert not self.receiver.asleep, "an engine that sleeps was asked for answers"
        self.began = time.monotonic()
        self._run(lambda: self.engine.add(requests))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Answers finished since the last call, waiting up to `timeout_s` for the first; raises the engine's error.

        While a threaded engine has more to do, those of a while come together; its last ones come at once.
        """
        if self.thread is None:
            deadline = time.monotonic() + timeout_s
            while not self.finished and self.receiver.whole and self.engine.busy and time.monotonic() < deadline:
                self._deliver(self.engine.step())
        with self.news:
            self.receiver.require()
            aborts = self.aborts
            patience = timeout_s if self.thread else 0
            self.news.wait_for(lambda: self.finished or self.error or self.aborts != aborts, patience)
            if self.finished:  # more may come: each poll costs the driver a message
                linger = min(pause(self.began, LINGER_S), patience)
                self.news.wait_for(lambda: self.error or self.aborts != aborts or not self._has_work(), linger)
            if self.error:
                raise self.error
            taken, self.finished = self.finished, []
        return taken

    def abort(self) -> None:
        """Drop all unfinished requests and all answers not yet taken."""
        self._run(lambda: self.engine.abort())
        with self.news:
            self.finished, self.aborts = [], self.aborts + 1
            self.news.notify_all()  # a poll that waits has nothing to wait for

    def sleep(self) -> bool:
        """Give up the device's memory until the next weight sync, if the engine does that; returns whether it did."""
        return self._run(lambda: self.receiver.sleep(self.engine))

    def start_load(self, sync: str, version: int) -> str | None:
        """Stop generating until `finish_load` of this weight sync; returns `memory.whereabouts` of this process."""
        return self._run(lambda: self.receiver.start(self.engine, sync, version))

    def load_bucket(self, sync: str, _before: None, *parts: Bucket) -> None:
        """Take some weights, after those `_before`. Raises SyncError when they did not arrive."""
        self._run(lambda: self.receiver.bucket(self.engine, sync, parts))

    def finish_load(self, sync: str, _before: None) -> None:
        """Generate with the new weights. Raises SyncError unless the engine computes with them."""
        self._run(lambda: self.receiver.finish(self.engine, sync))

    def give_up_load(self, sync: str, reason: str) -> None:
        """The rest of this sync does not come: nothing is generated until another one succeeds."""
        self._run(lambda: self.receiver.give_up(sync, reason))

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
                if future.done():  # in this very moment; or this is the function's own
                    return future.result()
                if not self.thread.is_alive():
                    raise self.error or RuntimeError("the engine's thread has ended") from None

    def _loop(self) -> None:
        while not self.closed:
            self._obey(wait=not self._has_work())
            if self._has_work():  # asked again: what was obeyed may have begun a weight sync
                try:
                    self._deliver(self.engine.step())
                except BaseException as error:
                    with self.news:
                        self.error = error
                        self.news.notify_all()
                    return

    def _has_work(self) -> bool:
        return hasattr(self, "engine") and self.receiver.whole and self.engine.busy

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
