"""Rollout engine that generates with SGLang, whose scheduler runs in other processes.

The class `sglang.Engine` has an asyncio event loop that runs only during its calls. `SGLangEngine` creates one task for
each request in this loop, and `step` runs the loop until an answer is finished.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import sglang
import torch
from torch import Tensor

from rltrain.base.errors import SyncError
from rltrain.data.model_weights import check_weights, skeleton
from rltrain.settings.schema import Config
from workers.cluster.progress import tick
from workers.models.checkpoint_form import in_checkpoint_form
from workers.rollout.engines.sglang import gpu_share, shards
from workers.rollout.messages import Completion, Request
from workers.sync.adapters import Adapters
from workers.sync.buckets import Bucket, tensors_of, verify
from workers.sync.memory import Reader

STEP_S = 0.05  # Longest time in seconds for which `step` waits for an answer.
STREAMED = 32  # Number of tokens after which SGLang reports on an unfinished answer.
WEIGHTS, CACHE = "weights", "kv_cache"  # SGLang's names of the memory that a sleeping engine releases.


def engine_arguments(config: Config, path: str) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine` for a config."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": path,
        "trust_remote_code": False,
        "dtype": config.model.dtype,
        "random_seed": 0,
        "skip_tokenizer_init": True,
        "context_length": rollout.max_prompt_length + rollout.max_response_length,
        "max_running_requests": rollout.max_concurrent_sequences,
        "tp_size": shards(rollout),
        "mem_fraction_static": gpu_share(rollout).value,
        "enable_memory_saver": config.takes_turns,
        "stream_interval": STREAMED,
        "log_level": "error",
    }
    further: dict[str, Any] = rollout.engine_options.get("arguments", {})
    return arguments | further


def sampling_params(request: Request, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Return SGLang's sampling parameters for a request. SGLang itself adds the end tokens of the model's config."""
    return {
        "temperature": request.temperature,
        "max_new_tokens": request.max_tokens,
        "stop_token_ids": list(stop_ids),
        "sampling_seed": request.seed,
        "skip_special_tokens": False,
    }


def completion_of(output: dict[str, Any], request: Request, version: int) -> Completion:
    """Convert SGLang's last output for a request, whose tokens were sampled with the weights of `version`.

    The list `output_token_logprobs` has one entry (log-prob, token id, text or None) for each sampled token.
    """
    facts = output["meta_info"]
    sampled = facts["output_token_logprobs"]
    return Completion(
        request.key,
        [token for _, token, _ in sampled],
        [log_prob for log_prob, _, _ in sampled],
        facts["finish_reason"]["type"],
        [version] * len(sampled),
    )


class SGLangEngine:
    """Rollout engine that uses `sglang.Engine`. All methods must be called in the thread that created the engine.

    Args:
        config: The run's whole config.
        path: Model directory.
        stop_ids: Ids of the model's end tokens.
    """

    def __init__(self, config: Config, path: str, stop_ids: Sequence[int]) -> None:
        self.engine = sglang.Engine(**engine_arguments(config, path))
        self.loop: asyncio.AbstractEventLoop = self.engine.loop
        self.path, self.stop_ids, self.version, self.sleeps = path, stop_ids, 0, config.takes_turns
        self.source, self.asleep = skeleton(path), set[str]()
        self.tasks: dict[asyncio.Task[Completion], Request] = {}

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        for request in requests:
            self.tasks[self.loop.create_task(self._answer(request))] = request

    async def _answer(self, request: Request) -> Completion:
        outputs = await self.engine.async_generate(
            input_ids=request.prompt_ids,
            sampling_params=sampling_params(request, self.stop_ids),
            return_logprob=True,
            stream=True,
        )
        async for output in outputs:
            tick()  # The engine makes progress.
            if output["meta_info"]["finish_reason"] is not None:
                return completion_of(output, request, self.version)
        raise RuntimeError(f"SGLang ended the answer to request {request.key} without a finish reason")

    @property
    def busy(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self.tasks)

    def step(self) -> list[Completion]:
        """Return the finished answers, after waiting up to `STEP_S` seconds for the first answer."""
        waiting = asyncio.wait(self.tasks, timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self.loop.run_until_complete(waiting)
        for task in done:
            del self.tasks[task]
        return sorted((task.result() for task in done), key=lambda answer: answer.key)

    def abort(self) -> None:
        """Drop all unfinished requests of the engine."""
        self.engine.tokenizer_manager.abort_request(abort_all=True)
        tasks, self.tasks = list(self.tasks), {}
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))

    def start_load(self) -> None:
        """Prepare the engine to receive new weights. If it sleeps, allocate the memory of the weights again."""
        assert not self.busy, "the checks of the config refuse runs whose answers continue after a weight sync"
        self.reader, self.adapters = Reader(), Adapters(self.path)
        self._wake(WEIGHTS)

    def load_bucket(self, bucket: Bucket) -> None:
        """Load the weights of one bucket. Raise SyncError if the bytes of the bucket were corrupted in transfer."""
        data = self.reader.data(bucket)
        verify(bucket, data)
        if bucket.scale is not None:
            self.adapters.take(bucket, data)
        else:
            self._load(in_checkpoint_form(self.source, dict(tensors_of(bucket, data))).items(), bucket.version)

    def _load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for name, tensor in tensors:
            # The tensor is copied, because the memory of a bucket is used again for the next bucket.
            own = tensor.to(device, copy=True)
            loaded, why = self.engine.update_weights_from_tensor([(name, own)], flush_cache=False)
            if not loaded:
                raise SyncError(f"weight sync {version}: SGLang did not load '{name}' ({why})")

    def finish_load(self, version: int) -> None:
        """Make the engine use the new weights, and drop the keys and values of the old weights."""
        self.reader.close()
        if self.adapters.parts:
            # A sleeping engine has dropped all weights, so those without an adapter are loaded again too.
            self._load(self.adapters.merged(everything=self.sleeps), version)
        self._wake(CACHE)
        self.engine.flush_cache()
        self.version = version

    def sleep(self) -> bool:
        """Release weights and caches until the next weight sync, if the training ranks use the same GPU."""
        if self.sleeps:
            assert not self.busy, "an engine with unfinished answers must not sleep"
            self.engine.release_memory_occupation([WEIGHTS, CACHE])
            self.asleep = {WEIGHTS, CACHE}
        return self.sleeps

    def _wake(self, what: str) -> None:
        if what in self.asleep:
            self.engine.resume_memory_occupation([what])
            self.asleep.remove(what)

    def close(self) -> None:
        """End SGLang's processes."""
        self.engine.shutdown()


def make(config: Config, path: str, stop_ids: Sequence[int]) -> SGLangEngine:
    """Return the SGLang engine for a config. Raise ConfigError if the model's weights are incomplete."""
    check_weights(path, f"model.path={path}")
    return SGLangEngine(config, path, stop_ids)
