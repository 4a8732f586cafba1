"""vLLM behind the engine interface: in this process on a CPU, AsyncLLM for GPUs and tensor parallelism.

Needs vLLM 0.25 to 0.33: the weight-transfer calls used here exist in that range.
"""

import asyncio
import gc
import pickle
import queue
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from rltrain.errors import SyncError
from rltrain.schema import Config, RolloutConfig
from workers.rollout.messages import Completion, Request
from workers.rollout.vllm_worker import BACKEND
from workers.weight_sync import Bucket

T = TypeVar("T")
CPU_PREFILL_TOKENS = 8192  # prompt tokens of one engine step on CPU
CPU_BLOCK = 32  # tokens of a KV block on CPU; vLLM's 128 leaves short prompts without prefix-cache hits


def engine_arguments(config: RolloutConfig, path: str, dtype: str) -> dict[str, Any]:
    """vLLM's arguments for this config: greedy defaults nowhere, log-probs of the distribution that is sampled from."""
    assert config.vllm is not None, "vllm settings are there when the engine is vllm"
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": dtype,
        "seed": 0,  # requests carry their own
        "max_model_len": config.max_prompt_length + config.max_response_length,
        "max_num_seqs": config.max_concurrent_sequences,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # nothing from the model's own generation config
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "workers.rollout.vllm_worker.WorkerExtension",
        "disable_log_stats": True,
    }
    if torch.cuda.is_available():
        return arguments | {"gpu_memory_utilization": config.vllm.gpu_memory_utilization}
    cache = config.vllm.kv_cache_mb << 20
    # A prompt cut in two makes vLLM rewind the random stream of its request, which CPU generators cannot do.
    arguments["enable_chunked_prefill"] = False
    arguments["max_num_batched_tokens"] = max(arguments["max_model_len"], CPU_PREFILL_TOKENS)
    return arguments | {"enforce_eager": True, "block_size": CPU_BLOCK, "kv_cache_memory_bytes": cache}


def sampling_params(request: Request, stop_ids: Sequence[int]) -> SamplingParams:
    """The parameters of one request; everything that could filter the distribution is off."""
    return SamplingParams(
        temperature=request.temperature, top_p=1.0, top_k=0, min_p=0.0, seed=request.seed,
        max_tokens=request.max_tokens,
        logprobs=0, detokenize=False, stop_token_ids=list(stop_ids), ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def completion_of(output: RequestOutput, key: tuple[int, int], version: int) -> Completion:
    """A finished answer in our terms."""
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    log_probs = [step[token].logprob for token, step in zip(ids, answer.logprobs or [], strict=True)]
    return Completion(key, ids, log_probs, answer.finish_reason or "abort", [version] * len(ids))


class InProcessVLLM:
    """vLLM's engine in this very process: the fastest to start and to talk to on a CPU.

    Args:
        config: rollout settings.
        path: model directory.
        dtype: of the weights, "float32" or "bfloat16".
        stop_ids: the model's end tokens.
    """

    def __init__(self, config: RolloutConfig, path: str, dtype: str, stop_ids: Sequence[int]) -> None:
        gc.collect()
        gc.freeze()
        arguments = engine_arguments(config, path, dtype) | {"distributed_executor_backend": "uni"}
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)
        self.engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self.stop_ids, self.version = list(stop_ids), 0
        self.keys: dict[str, tuple[int, int]] = {}

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        for request in requests:
            name = _name(request)
            prompt = {"prompt_token_ids": request.prompt_ids}
            self.keys[name] = request.key
            self.engine.add_request(name, prompt, sampling_params(request, self.stop_ids))

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.keys)

    def step(self) -> list[Completion]:
        """One token for every running request; returns those that finished."""
        done = [output for output in self.engine.step() if output.finished]
        return [completion_of(output, self.keys.pop(output.request_id), self.version) for output in done]

    def abort(self) -> None:
        """Drop all unfinished requests."""
        self.engine.abort_request(list(self.keys))
        self.keys.clear()

    def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Take these weights, check them, and forget what was cached with the old ones."""
        assert not self.busy, "weights change between steps only: staleness is bounded at ship time"
        self.engine.collective_rpc("start_weight_update")
        for bucket in buckets:
            self.engine.collective_rpc("update_weights", kwargs={"update_info": {"bucket": bucket}})
        self.engine.collective_rpc("finish_weight_update")
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.engine.collective_rpc("rltrain_check")
        self.version = version

    def settings(self, request: Request) -> dict[str, Any]:
        """What the engine resolved for this request, after all its defaults (invariant E2)."""
        return resolved_settings(self.engine.input_processor, sampling_params(request, self.stop_ids), request)

    def close(self) -> None:
        """End the engine."""
        self.engine.engine_core.shutdown()


class AsyncVLLM:
    """AsyncLLM, whose engine core and tensor-parallel workers are processes of their own: for GPUs and large models.

    Arguments as of `InProcessVLLM`. Answers arrive on an event loop in a thread; `step` hands them over.
    """

    def __init__(self, config: RolloutConfig, path: str, dtype: str, stop_ids: Sequence[int]) -> None:
        self.stop_ids, self.version = list(stop_ids), 0
        self.keys: dict[str, tuple[int, int]] = {}
        self.answers: queue.Queue[Completion | BaseException] = queue.Queue()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vllm-events", daemon=True).start()
        self.engine: AsyncLLM = self._run(self._start(AsyncEngineArgs(**engine_arguments(config, path, dtype))))
        self._run(self.engine.init_weight_transfer_engine(WeightTransferInitRequest()))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    async def _start(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        return AsyncLLM.from_engine_args(arguments)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        for request in requests:
            self.keys[_name(request)] = request.key
            asyncio.run_coroutine_threadsafe(self._answer(request), self.loop)

    async def _answer(self, request: Request) -> None:
        prompt: Any = {"prompt_token_ids": request.prompt_ids}
        try:
            async for output in self.engine.generate(prompt, sampling_params(request, self.stop_ids), _name(request)):
                if output.finished:
                    self.answers.put(completion_of(output, request.key, self.version))
        except Exception as error:
            self.answers.put(error)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.keys)

    def step(self) -> list[Completion]:
        """Answers that have finished, waiting briefly for the first. Raises what the engine raised."""
        found: list[Completion] = []
        try:
            item = self.answers.get(timeout=0.05)
            while True:
                if isinstance(item, BaseException):
                    raise item
                if self.keys.pop(f"{item.key[0]}-{item.key[1]}", None):
                    found.append(item)
                item = self.answers.get_nowait()
        except queue.Empty:
            return found

    def abort(self) -> None:
        """Drop all unfinished requests."""
        self._run(self.engine.abort(list(self.keys)))
        self.keys.clear()

    def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Take these weights, check them, and forget what was cached with the old ones."""
        assert not self.busy, "weights change between steps only: staleness is bounded at ship time"
        try:
            self._run(self._load(buckets))
        except Exception as error:  # from another process: its text is all that is left of its type
            raise (SyncError(str(error)) if "weight sync" in str(error) else error) from None
        self.version = version

    async def _load(self, buckets: Sequence[Bucket]) -> None:
        await self.engine.start_weight_update()
        for bucket in buckets:
            with shared_file(bucket) as path:
                await self.engine.update_weights(WeightTransferUpdateRequest({"shared": path}))
        await self.engine.finish_weight_update()
        await self.engine.reset_prefix_cache(reset_running_requests=True)
        await self.engine.collective_rpc("rltrain_check")

    def settings(self, request: Request) -> dict[str, Any]:
        """What the engine resolved for this request, after all its defaults (invariant E2)."""
        return resolved_settings(self.engine.input_processor, sampling_params(request, self.stop_ids), request)

    def close(self) -> None:
        """End the engine's processes."""
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


@contextmanager
def shared_file(bucket: Bucket) -> Iterator[str]:
    """The bucket as a file in shared memory, readable by this user only, for as long as the block runs."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.NamedTemporaryFile(prefix="rltrain-weights-", dir=folder) as file:
        pickle.dump(bucket, file, protocol=5)
        file.flush()
        yield file.name


def resolved_settings(processor: Any, params: SamplingParams, request: Request) -> dict[str, Any]:
    """The sampling parameters after vLLM's own processing of a request."""
    prompt = {"prompt_token_ids": request.prompt_ids}
    resolved = processor.process_inputs("settings", prompt, params, supported_tasks=("generate",)).params
    return {name: getattr(resolved, name) for name in resolved.__struct_fields__}


def _name(request: Request) -> str:
    return f"{request.key[0]}-{request.key[1]}"


def make(config: Config, path: str, stop_ids: Sequence[int]) -> InProcessVLLM | AsyncVLLM:
    """The engine for a config: in this process on a CPU, AsyncLLM for GPUs and tensor parallelism."""
    assert config.rollout.vllm is not None, "vllm settings are there when the engine is vllm"
    process = config.rollout.vllm.process
    if process == "auto":
        alone = config.rollout.vllm.tensor_parallel_size == 1 and not torch.cuda.is_available()
        process = "inprocess" if alone else "async"
    kind = InProcessVLLM if process == "inprocess" else AsyncVLLM
    return kind(config.rollout, path, config.model.dtype, stop_ids)
