"""Worker of one rollout replica: an engine, and the thread that runs the engine's generation steps."""

import importlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rltrain.base import trace
from rltrain.settings.schema import Config
from workers.rollout.messages import Completion, Request
from workers.rollout.stop_strings import text_before
from workers.rollout.turn_server import turn_server
from workers.rollout.turns import TurnFormat, TurnRequest, TurnResult
from workers.sync.buckets import Bucket
from workers.sync.device_memory import own_gpu
from workers.sync.process_group import GroupPlan, receive_buckets
from workers.sync.receiver import Loads, Receiver

# After the first finished answer, `poll` waits for further answers if the engine is busy. The longest time for which
# `poll` waits for further answers is LINGER_SHARE times the time since the last `submit`, limited to the range from
# LINGER_S to LONGEST_LINGER_S seconds.
LINGER_S, LONGEST_LINGER_S, LINGER_SHARE = 0.02, 0.1, 0.02
ENGINE_TRACK = "engine"  # Name of the timeline's row for the work of the engine's thread.
T = TypeVar("T")


class Engine(Loads, Protocol):
    """Interface through which a rollout worker uses its engine.

    The rollout worker calls all methods of its engine from one thread.
    """

    busy: bool

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""

    def step(self) -> list[Completion]:
        """Advance generation by one step, and return the answers that are now finished."""

    def abort(self) -> None:
        """Drop all unfinished requests of the engine."""

    def sleep(self) -> bool:
        """Release the device memory of weights and caches until the next weight sync.

        Returns:
            Whether the engine has released its device memory.
        """

    def close(self) -> None:
        """Free the engine's resources and end its processes."""


class RolloutWorker:
    """Worker that runs the engine of one rollout replica.

    A threaded engine has its own thread, which runs generation steps whenever the engine has unfinished requests. All
    calls to a threaded engine run in the engine's thread, between two generation steps. An engine without its own
    thread generates answers only during `poll`.

    Args:
        config: The run's whole config.
        path: Model directory in Hugging Face format.
        stop_ids: Ids of the model's end tokens.
        threaded: Whether the engine has its own thread.
        turn_format: Format of the turns of trajectories; None if the run has no environment.

    Attributes:
        records_events: Always True, so that the caller of a method of `RolloutWorker` records no timeline event for the
            call. `RolloutWorker` itself records its calls as timeline events. The recorded events do not include the
            time in which a call waits for the engine's thread.
    """

    records_events = True

    def __init__(
        self,
        config: Config,
        path: str,
        stop_ids: Sequence[int],
        *,
        threaded: bool,
        turn_format: TurnFormat | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        self.stops = config.rollout.stop
        self.turns = None if turn_format is None else turn_server(self.tokenizer, turn_format, stop_ids)
        self.finished: list[Completion] = []
        self.receiver = Receiver()
        self.news = threading.Condition()
        self.commands: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self.error: BaseException | None = None
        self.closed, self.aborts, self.began = False, 0, 0.0
        self.submitted: dict[tuple[int, ...], int] = {}  # Arrival time of each unfinished request.
        module, _, name = config.rollout.description.make.partition(":")

        def build() -> None:
            self.engine: Engine = getattr(importlib.import_module(module), name)(config, path, stop_ids)

        self.thread = threading.Thread(target=self._loop, name="rollout-engine", daemon=True) if threaded else None
        if self.thread is not None:
            self.thread.start()
        self._run("build", build)

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests to the engine's queue, without waiting for the answers.

        If the last weight sync failed, the engine generates no answers until another weight sync succeeds.
        """
        assert not self.receiver.asleep, "a sleeping engine must not get requests"
        self.began = time.monotonic()
        if trace.on():
            self.submitted |= dict.fromkeys((request.key for request in requests), time.time_ns())
        self._run("queue requests", lambda: self.engine.add(requests))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return the answers that finished since the previous call of `poll`.

        Wait up to `timeout_s` seconds for the first answer. If a threaded engine still has unfinished requests after
        the first answer, `poll` waits briefly for further answers and returns all answers together. The wait for
        further answers ends as soon as the engine has no unfinished requests.

        Raises:
            SyncError: The last weight sync failed.
            BaseException: A generation step has failed, and the engine's error is raised.
        """
        if self.thread is None:
            deadline = time.monotonic() + timeout_s
            while not self.finished and self.receiver.whole and self.engine.busy and time.monotonic() < deadline:
                self._step()
        with self.news:
            self.receiver.require()
            aborts = self.aborts
            patience = timeout_s if self.thread else 0
            self.news.wait_for(lambda: self.finished or self.error or self.aborts != aborts, patience)
            if self.finished:  # Waiting for further answers reduces the number of messages to the driver.
                linger = min(self._linger_s(), patience)
                self.news.wait_for(lambda: self.error or self.aborts != aborts or not self._has_work(), linger)
            if self.error:
                raise self.error
            taken, self.finished = self.finished, []
        return taken

    def submit_turns(self, client: str, requests: Sequence[TurnRequest]) -> None:
        """Queue turns of trajectories for an environment process, without waiting for the results."""
        assert self.turns is not None, "turns can be sampled only in a run with environments"
        added, ended = self.turns.begin(client, requests)
        if added:
            self.submit(added)
        with self.news:
            self.turns.store(client, ended)
            self.news.notify_all()

    def poll_turns(self, client: str, timeout_s: float) -> list[TurnResult]:
        """Return the finished turns of an environment process, and wait up to `timeout_s` seconds for the first turn.

        Raises:
            SyncError: The last weight sync failed.
            BaseException: A generation step has failed, and the engine's error is raised.
        """
        turns = self.turns
        assert turns is not None, "turns can be sampled only in a run with environments"
        if self.thread is None:
            deadline = time.monotonic() + timeout_s
            while not turns.has(client) and self.receiver.whole and self.engine.busy and time.monotonic() < deadline:
                self._step()
        with self.news:
            aborts, patience = self.aborts, timeout_s if self.thread else 0
            self.news.wait_for(lambda: turns.has(client) or self.error or self.aborts != aborts, patience)
            if self.error:
                raise self.error
            return turns.take(client)

    def _linger_s(self) -> float:
        return max(LINGER_S, min(LONGEST_LINGER_S, LINGER_SHARE * (time.monotonic() - self.began)))

    def abort(self) -> None:
        """Drop all unfinished requests and all answers that `poll` has not returned yet."""
        self._run("abort", lambda: self.engine.abort())
        self.submitted.clear()
        with self.news:
            self.finished, self.aborts = [], self.aborts + 1
            if self.turns is not None:
                self.turns.abort()
            # A call of `poll` that waits in another thread must return, because the answers were dropped.
            self.news.notify_all()

    def sleep(self) -> bool:
        """Release the engine's device memory until the next weight sync.

        Return whether the engine has released its memory. An engine on a CPU never releases its memory.
        """
        return self._run("sleep", lambda: self.receiver.sleep(self.engine))

    def start_load(self, sync: str, version: int) -> str | None:
        """Stop generating answers until `finish_load` ends the weight sync.

        Returns:
            The result of `memory.whereabouts()` in this process. If the result is not None and the same as in the
            actor's process, the two processes can map each other's shared files into memory.
        """
        return self._run("start loading weights", lambda: self.receiver.start(self.engine, sync, version))

    def load_bucket(self, sync: str, before: None, *parts: Bucket) -> None:
        """Load one bucket of weights. Raise SyncError if the bytes of the bucket were corrupted in transfer.

        Args:
            sync: Name of the weight sync.
            before: Result of the `load_bucket` call for the previous bucket; None for the first bucket. `before` is
                not read. Ray runs a call of `load_bucket` only after the previous call has returned its result, so
                the engine loads the buckets in order.
            parts: The parts of the bucket, one from each rank that takes part in writing the bucket.
        """
        self._run("load weights", lambda: self.receiver.bucket(self.engine, sync, parts))

    def gpu(self) -> str | None:
        """Return the identifier of the engine's first GPU (see `device_memory.own_gpu`), or None without a GPU."""
        return own_gpu()

    def receive_all(self, sync: str, plan: GroupPlan, engine: int) -> None:
        """Receive each bucket of weights through a process group, and load it.

        Args:
            sync: Name of the weight sync.
            plan: Description of the process group through which the weights are sent.
            engine: Index of this engine among the engines of the process group, from 0.
        """

        def load(bucket: Bucket) -> None:
            self._run("load weights", lambda: self.receiver.bucket(self.engine, sync, (bucket,)))

        receive_buckets(plan, engine, load)

    def finish_load(self, sync: str, before: None) -> None:
        """End a weight sync and resume generation, or raise SyncError if the engine does not use the loaded weights."""
        self._run("finish loading weights", lambda: self.receiver.finish(self.engine, sync))

    def give_up_load(self, sync: str, reason: str) -> None:
        """Mark a weight sync as failed. The engine generates no answers until another weight sync succeeds."""
        self._run("give up loading weights", lambda: self.receiver.give_up(sync, reason))

    def close(self) -> None:
        """End the engine, its thread, and the process that renders the messages of conversations."""
        if self.turns is not None:
            self.turns.renderer.close()
        self._run("close", lambda: self.engine.close())
        self.closed = True

    def _run(self, name: str, function: Callable[[], T]) -> T:
        """Run `function` in the engine's thread, and return the result of `function`.

        If the engine has no thread of its own, `function` runs in the calling thread.

        `_run` records the call of `function` as a timeline event with the name `name`.
        """

        def recorded() -> T:
            with trace.span(name, ENGINE_TRACK):
                return function()

        if self.thread is None:
            return recorded()
        future: Future[T] = Future()
        self.commands.put((recorded, future))
        while True:
            try:
                return future.result(timeout=1)
            except TimeoutError:
                # If the future is done after a TimeoutError, either `function` itself raised this error, or `function`
                # ended just after the wait timed out. The method `result` of a finished future returns the result of
                # `function` or raises its error.
                if future.done():
                    return future.result()
                if not self.thread.is_alive():
                    raise self.error or RuntimeError("the engine's thread has ended") from None

    def _loop(self) -> None:
        while not self.closed:
            self._obey(wait=not self._has_work())
            # The loop checks again whether there is work, because `_obey` may have started a weight sync, during which
            # no generation step may run.
            if self._has_work():
                try:
                    self._step()
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

    def _step(self) -> None:
        """Advance the engine's generation by one step.

        Consecutive generation steps are recorded as a single timeline event.
        """
        with trace.span("generate", ENGINE_TRACK, merged=True, steps=1):
            completions = self.engine.step()
        self._deliver(completions)

    def _deliver(self, completions: list[Completion]) -> None:
        if not completions:
            return
        self._record(completions)
        if self.turns is not None:
            with self.news:
                self.turns.deliver(completions)
                self.news.notify_all()
            return
        texts = self.tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        texts = [text_before(text, self.stops) for text in texts]
        ready = [Completion(**{**vars(c), "text": text}) for c, text in zip(completions, texts, strict=True)]
        with self.news:
            self.finished.extend(ready)
            self.news.notify_all()

    def _record(self, completions: list[Completion]) -> None:
        """Record one timeline event for each finished answer, from the arrival of its request to its last token."""
        for one in completions:
            if (start_ns := self.submitted.pop(one.key, None)) is not None:
                details = {"uid": one.key[0], "sample": one.key[1], "tokens": len(one.token_ids)}
                trace.add("answer", "requests", start_ns, **details, finish_reason=one.finish_reason)
