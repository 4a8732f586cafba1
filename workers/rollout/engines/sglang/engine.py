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

from rltrain.base.errors import ConfigError, SyncError, described
from rltrain.data.model_weights import check_weights, skeleton
from rltrain.settings.schema import Config
from rltrain.settings.typed import require
from workers.cluster.progress import tick
from workers.models.checkpoint_form import in_checkpoint_form
from workers.rollout.engines.sglang import VERSION, gpu_share, shards
from workers.rollout.messages import Completion, Request
from workers.sync.adapters import Adapters
from workers.sync.buckets import Bucket, tensors_of, verify
from workers.sync.memory import Reader

STEP_S = 0.05  # Longest time in seconds for which `step` waits for an answer.
STREAMED = 32  # Number of tokens after which SGLang reports on an unfinished answer.
FLUSH_S = 60.0  # Longest time in seconds for which SGLang waits until it is idle and can empty its caches.
# SGLang refuses prompts of almost `context_length` tokens, and shortens answers that would come close to it. With this
# number of further tokens, it does neither.
FURTHER_TOKENS = 7
WEIGHTS, CACHE = "weights", "kv_cache"  # SGLang's names of the memory that a sleeping engine releases.


def engine_arguments(config: Config, path: str) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine` for a config."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": path,
        "trust_remote_code": False,
        "dtype": config.model.dtype,
        "skip_tokenizer_init": True,
        "context_length": rollout.max_prompt_length + rollout.max_response_length + FURTHER_TOKENS,
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
    """Return SGLang's sampling parameters for a request.

    SGLang itself adds the end tokens of the model's config. It reads the seed of a request only in its deterministic
    mode, so the seed is left out, and answers cannot be repeated.
    """
    return {
        "temperature": request.temperature,
        "max_new_tokens": request.max_tokens,
        "stop_token_ids": list(stop_ids),
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
        self.source, self.asleep, self.updating = skeleton(path), set[str](), False
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
        last = None
        async for output in outputs:
            tick()  # The engine makes progress.
            last = output
        reason = None if last is None else last["meta_info"]["finish_reason"]
        # `abort` cancels the tasks of requests, so an answer that SGLang itself aborts is an error.
        if last is None or reason is None or reason["type"] == "abort":
            raise RuntimeError(f"SGLang did not finish the answer to request {request.key}: {reason}")
        return completion_of(last, request, self.version)

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
        if self.updating:  # The last weight sync failed, so SGLang's weight update is still open.
            self._require(self.engine.end_weight_update(), "end the last weight update")
        self._require(self.engine.begin_weight_update(), "begin a weight update")
        self.updating = True

    def _require(self, result: tuple[bool, str], what: str) -> None:
        good, why = result
        if not good:
            raise SyncError(f"SGLang could not {what} ({why})")

    def load_bucket(self, bucket: Bucket) -> None:
        """Load the weights of one bucket. Raise SyncError if the bytes of the bucket were corrupted in transfer."""
        data = self.reader.data(bucket)
        verify(bucket, data)
        if bucket.scale is not None:
            self.adapters.take(bucket, data)
        else:
            self._load(in_checkpoint_form(self.source, dict(tensors_of(bucket, data))).items())

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # The tensors are copied, because the memory of a bucket is used again for the next bucket.
        own = [(name, tensor.to(device, copy=True)) for name, tensor in tensors]
        result = self.engine.update_weights_from_tensor(own, flush_cache=False)
        self._require(result, f"load {len(own)} tensors, the first of which is '{own[0][0]}'")

    def finish_load(self, version: int) -> None:
        """Make the engine use the new weights, and drop the keys and values of the old weights."""
        self.reader.close()
        if self.adapters.parts:
            # A sleeping engine loses all its weights, so the weights without an adapter are loaded again too.
            for tensor in self.adapters.merged(everything=self.sleeps):
                self._load([tensor])
        self._require(self.engine.end_weight_update(), "end the weight update")
        self.updating = False
        self._wake(CACHE)
        self._flush()
        self.version = version

    def _flush(self) -> None:
        """Wait until SGLang is idle, and then empty its cache of keys and values."""
        result = self.loop.run_until_complete(self.engine.tokenizer_manager.flush_cache(timeout_s=FLUSH_S))
        if not result.success:
            raise SyncError(f"SGLang did not become idle within {FLUSH_S:g} s, so its caches could not be emptied")

    def sleep(self) -> bool:
        """Release weights and caches until the next weight sync, if the training ranks use the same GPU."""
        if self.sleeps:
            assert not self.busy, "an engine with unfinished answers must not sleep"
            self._flush()
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
    """Return the SGLang engine for a config.

    Raises:
        ConfigError: The model's weights are incomplete, SGLang has another version or does not start, or weight syncs
            of the model are not supported.
    """
    where = f"model.path={path}"
    check_weights(path, where)
    found = sglang.__version__
    require(found == VERSION, f"rollout.engine=sglang: the engine needs SGLang {VERSION}, and {found} is installed")
    require(
        getattr(skeleton(path).config.get_text_config(), "q_lora_rank", None) is None,
        f"{where}: SGLang joins matrices of this model (q_lora_rank) only if they arrive together, which a weight sync "
        "does not promise; use rollout=vllm",
    )
    try:
        return SGLangEngine(config, path, stop_ids)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: SGLang does not start ({described(error, 300)}); use rollout=vllm") from error
