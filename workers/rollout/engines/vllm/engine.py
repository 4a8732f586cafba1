"""Rollout engines that use vLLM: in this process on a CPU, or through AsyncLLM for GPUs and tensor parallelism.

The engines need vLLM 0.32 or 0.33. vLLM 0.32 and 0.33 have the weight-transfer calls that the engines use, and report
which version of the weights sampled each token.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import queue
import threading
import time
from array import array
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from vllm import CompletionOutput, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from rltrain.base.errors import ConfigError, SyncError, WorkerLost, one_line
from rltrain.batch.token_arrays import INT16, float_array, int_array
from rltrain.data.image_models import takes_images
from rltrain.data.model_weights import check_weights
from rltrain.data.prompt_images import decoded
from rltrain.settings.schema import Config, LoRAConfig, RolloutConfig
from workers.cluster import leftovers
from workers.cluster.progress import announced, tick
from workers.rollout.engines.vllm import adapters
from workers.rollout.engines.vllm.worker import BACKEND
from workers.rollout.messages import Completion, Request
from workers.rollout.stop_strings import StopStrings, stop_strings
from workers.sync.buckets import Bucket
from workers.sync.memory import readable_elsewhere

T = TypeVar("T")
# Each request has its own sampling parameters, which are never modified, so vLLM does not need to copy them. The option
# `skip_clone`, which only some versions of vLLM have, avoids a copy of the sampling parameters.
OWN: dict[str, Any] = {"skip_clone": True} if "skip_clone" in SamplingParams.__struct_fields__ else {}
GPU_PREFILL_TOKENS = 8192  # Maximum tokens per engine step on a GPU. vLLM's own default for `AsyncLLM` is 2,048.
CPU_PREFILL_TOKENS = 8192  # Maximum tokens per engine step on a CPU, unless `max_model_len` is larger.
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of the two kinds of memory that a sleeping engine releases.
LOOK_S = 1.0  # Seconds between two checks that the engine's processes are alive, while a call waits.
PROOF_S = 0.5  # Seconds to wait for evidence that a process died, after a vLLM call has failed.
TO_HOST, DROPPED = 1, 2  # vLLM's sleep level 1 moves the weights to the host's memory, and level 2 drops the weights.
CPU_BLOCK = 32  # Tokens per KV block on a CPU. vLLM's default of 128 gives short prompts no prefix-cache hits.


@dataclass(frozen=True)
class EngineOptions:
    """What a vLLM engine does besides the generation of answers.

    Attributes:
        sleep_level: Result of the function `sleep_level`, which says what the engine releases on a GPU when it sleeps.
            If `sleep_level` is 0, the engine never sleeps.
        record_experts: Whether each answer lists the experts that the model's routers chose; only on GPUs.
        adapters: Settings of the adapters of a run with `rollout.vllm.adapters=separate`. None: the model has no
            adapters, or each weight sync merges the adapters into the base weights.
    """

    sleep_level: int = 0
    record_experts: bool = False
    adapters: LoRAConfig | None = None


def engine_arguments(
    config: RolloutConfig, path: str, dtype: str, options: EngineOptions = EngineOptions()
) -> dict[str, Any]:
    """Return the arguments with which vLLM's engine is created for a config.

    The model's own sampling defaults are ignored. vLLM is set to return log-probs of the distribution from which it
    samples.

    Args:
        config: Rollout settings.
        path: Model directory.
        dtype: Data type of the weights, "float32" or "bfloat16".
        options: What the engine does besides the generation of answers.
    """
    assert config.vllm is not None, "the vLLM engine needs the settings `rollout.vllm`"
    arguments: dict[str, Any] = {
        "model": path,
        "trust_remote_code": False,
        "dtype": dtype,
        "load_format": "hf",  # Load the files that transformers reads, not files in Mistral's format.
        "seed": 0,  # The engine's seed has no effect, because each request has its own seed.
        "max_model_len": config.max_prompt_length + config.max_response_length,
        "max_num_seqs": config.max_concurrent_sequences,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # Ignore the model's own generation config.
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "workers.rollout.engines.vllm.worker.WorkerExtension",
        "disable_log_stats": True,
    }
    if takes_images(path):
        arguments["skip_tokenizer_init"] = False  # vLLM's processors of images need the tokenizer.
    if config.quantization is not None:
        arguments["quantization"] = config.quantization
    if options.record_experts:
        arguments["enable_return_routed_experts"] = True
    if options.adapters is not None:
        arguments |= adapters.adapter_arguments(path, options.adapters)
    if torch.cuda.is_available():
        arguments |= {
            "gpu_memory_utilization": config.vllm.gpu_memory_utilization,
            "enable_sleep_mode": options.sleep_level > 0,
            "max_num_batched_tokens": GPU_PREFILL_TOKENS,
        }
        return arguments | config.vllm.arguments
    cache = config.vllm.kv_cache_mb << 20
    # If a prompt is processed in chunks, vLLM rewinds the request's random generator, which is impossible on a CPU.
    arguments["enable_chunked_prefill"] = False
    arguments["max_num_batched_tokens"] = max(arguments["max_model_len"], CPU_PREFILL_TOKENS)
    arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK, "kv_cache_memory_bytes": cache}
    return arguments | config.vllm.arguments


def sampling_params(request: Request, stop_ids: Sequence[int], config: RolloutConfig) -> SamplingParams:
    """Return vLLM's sampling parameters for one request.

    vLLM ignores top-p and top-k if the temperature is 0.

    If the run has stop strings, vLLM is set to return each token as soon as the token is sampled, so that the answer's
    text can be searched for stop strings.
    """
    return SamplingParams(
        temperature=request.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=0.0,
        seed=request.seed,
        max_tokens=request.max_tokens,
        logprobs=0,
        detokenize=False,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA if config.stop else RequestOutputKind.FINAL_ONLY,
        **OWN,
    )


def completion_of(output: RequestOutput, request: Request, *, record_experts: bool = False) -> Completion:
    """Convert a finished vLLM output to a `Completion`. Tokens sampled before the first weight sync have version 0.

    Raises:
        ConfigError: `record_experts` is True, but vLLM did not return the experts of each token. Or the prompt shows
            images, and vLLM's tokens of the images are not those on which the policy is trained.
    """
    check_image_tokens(output, request)
    answer = output.outputs[0]
    versions, reason = _versions(answer, len(answer.token_ids)), answer.finish_reason or "abort"
    experts = _experts(output) if record_experts and reason != "abort" else ()
    return Completion(request.key, answer.token_ids, _log_probs(answer), reason, versions, experts=experts)


def check_image_tokens(output: RequestOutput, request: Request) -> None:
    """Raise ConfigError if vLLM has put other tokens into a prompt for its images than the model's processor does."""
    if request.images is not None and list(output.prompt_token_ids or ()) != list(request.prompt_ids):
        raise ConfigError(
            f"rollout=vllm: vLLM made {len(output.prompt_token_ids or ())} tokens of a prompt with images, but the "
            f"model's processor makes {len(request.prompt_ids)}, or other ones; use rollout=hf"
        )


def _experts(output: RequestOutput) -> "array[int]":
    """Return the experts that a model's routers chose, in the form of `Completion.experts`."""
    answer = output.outputs[0]
    found = () if answer.routed_experts is None else answer.routed_experts
    tokens = len(output.prompt_token_ids or ()) + len(answer.token_ids) - 1
    if len(found) != tokens:
        raise ConfigError(
            f"actor.router_replay=engine: vLLM returned experts for {len(found)} tokens, but the prompt and the answer "
            f"without its last token have {tokens}; use actor.router_replay=actor or null"
        )
    return array(INT16, np.ascontiguousarray(found, dtype=np.int16).tobytes())


def _log_probs(answer: CompletionOutput) -> "array[float]":
    steps: Sequence[Any] = answer.logprobs or []
    return float_array(step[token].logprob for token, step in zip(answer.token_ids, steps, strict=True))


def _versions(answer: CompletionOutput, count: int) -> "array[int]":
    """Return the version of the weights that sampled each of the first `count` tokens of an answer."""
    versions = int_array([0]) * count
    for span in answer.weight_versions or []:
        if span.version.isdecimal():
            end = min(span.end, count)
            versions[span.start : end] = int_array([int(span.version)]) * (end - span.start)
    return versions


class Growing:
    """An unfinished answer to which tokens are added one by one, until its text contains a stop string.

    Args:
        key: Key of the answer's request.
        strings: Object that searches for the stop strings of the run.

    Attributes:
        ended: Whether the text of the answer contains a stop string. If `ended` is True, tokens that vLLM samples later
            are not added to the answer.
    """

    def __init__(self, key: tuple[int, ...], strings: StopStrings) -> None:
        self.key, self.strings, self.ended = key, strings, False
        self.ids, self.log_probs, self.versions = int_array(()), float_array(()), int_array(())

    def add(self, answer: CompletionOutput, version: int) -> bool:
        """Add the new tokens of vLLM's output `answer`, which were sampled with the weights of version `version`.

        Returns:
            True if one of the added tokens completes the answer's first stop string; False otherwise.
        """
        if self.ended:
            return False
        for token, log_prob in zip(answer.token_ids, _log_probs(answer), strict=True):
            self.ids.append(token)
            self.log_probs.append(log_prob)
            self.versions.append(version)
            if self.strings.end(self.ids):
                self.ended = True
                break
        return self.ended

    def completion(self, answer: CompletionOutput) -> Completion:
        """Return the finished answer; `answer` is vLLM's last output for the request."""
        reason = "stop" if self.ended else answer.finish_reason or "abort"
        return Completion(self.key, self.ids, self.log_probs, reason, self.versions)


def prompt_of(request: Request, loads: int, config: RolloutConfig) -> Any:
    """Return vLLM's form of a request's prompt.

    With `rollout.keep_kv_cache`, the KV cache contains keys and values of earlier weights. The cache salt keeps vLLM
    from using keys and values of earlier weights for a new request. The cache salt is the number of weight syncs of the
    engine. The version of the weights cannot serve as cache salt, because versions repeat if a run goes back to a
    checkpoint.
    """
    salt = {"cache_salt": str(loads)} if config.keep_kv_cache else {}
    if request.images is None:
        return {"prompt_token_ids": request.prompt_ids, **salt}
    pictures = [decoded(file) for _, file in request.images.files]
    ids = list(request.images.short_ids)  # vLLM itself replaces the placeholder of each image.
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}, **salt}


def policy(loads: int, options: EngineOptions) -> LoRARequest | None:
    """Return the adapter with which vLLM answers a new request, or None to answer with the model's weights alone.

    None is returned if the run has no separate adapters (`rollout.vllm.adapters`), or if no weight sync has ended yet.

    Args:
        loads: Number of weight syncs of the engine.
        options: Options of the engine.
    """
    return adapters.POLICY if options.adapters is not None and loads else None


class InProcessVLLM:
    """Rollout engine that runs vLLM in the current process.

    On a CPU, `InProcessVLLM` starts faster and spends less time on communication between processes than `AsyncVLLM`.

    Args:
        config: Rollout settings.
        path: Model directory.
        dtype: Data type of the weights, "float32" or "bfloat16".
        stop_ids: Ids of the model's end tokens.
        options: What the engine does besides the generation of answers.
    """

    def __init__(
        self,
        config: RolloutConfig,
        path: str,
        dtype: str,
        stop_ids: Sequence[int],
        options: EngineOptions = EngineOptions(),
    ) -> None:
        gc.collect()
        gc.freeze()
        arguments = engine_arguments(config, path, dtype, options)
        arguments["distributed_executor_backend"] = "uni"
        self.options, self.asleep = options, set[str]()
        self.sleep_level = options.sleep_level if torch.cuda.is_available() else 0
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)
        self.engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        if config.quantization is not None:
            check_quantization(self.engine.collective_rpc("rltrain_quantization_problem"))
        self.config, self.stop_ids, self.version, self.loads = config, list(stop_ids), 0, 0
        self.strings = stop_strings(config.stop, path)
        self.requests: dict[str, Request] = {}  # Unfinished requests by vLLM's request id.
        self.growing: dict[str, Growing] = {}  # Unfinished answers by vLLM's request id, if the run has stop strings.

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        for request in requests:
            name = _name(request)
            prompt = prompt_of(request, self.loads, self.config)
            self.requests[name] = request
            if self.strings is not None:
                self.growing[name] = Growing(request.key, self.strings)
            params, lora = sampling_params(request, self.stop_ids, self.config), policy(self.loads, self.options)
            self.engine.add_request(name, prompt, params, lora_request=lora)

    @property
    def busy(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self.requests)

    def step(self) -> list[Completion]:
        """Sample one token for every running request, and return the answers that are now finished."""
        found = self.engine.step()
        outputs = [output for output in found if isinstance(output, RequestOutput)]
        assert len(outputs) == len(found), "every request to vLLM must ask for generated text"
        tick()
        if self.strings is not None:
            return self._searched(outputs)
        return [
            completion_of(output, self.requests.pop(output.request_id), record_experts=self.options.record_experts)
            for output in outputs
            if output.finished
        ]

    def _searched(self, outputs: Sequence[RequestOutput]) -> list[Completion]:
        """Add the new tokens of vLLM's outputs to the unfinished answers, and return the answers that are now finished.

        Requests whose answers now contain a stop string are aborted in vLLM.
        """
        done, ended = [], []
        for output in outputs:
            name, answer = output.request_id, output.outputs[0]
            if self.growing[name].add(answer, self.version) and not output.finished:
                ended.append(name)
            if self.growing[name].ended or output.finished:
                check_image_tokens(output, self.requests.pop(name))
                done.append(self.growing.pop(name).completion(answer))
        self.engine.abort_request(ended)
        return done

    def abort(self) -> None:
        """Drop all unfinished requests of the engine."""
        self.engine.abort_request(list(self.requests))
        self.requests.clear()
        self.growing.clear()

    def sleep(self) -> bool:
        """Release weights and caches until the next weight sync. Return False if the engine cannot sleep."""
        if self.sleep_level:
            assert not self.busy, "an engine with unfinished answers must not sleep"
            self.engine.sleep(level=self.sleep_level)
            self.asleep = {WEIGHTS, CACHE}
        return self.sleep_level > 0

    def _wake(self, what: str) -> None:
        if what in self.asleep:
            self.engine.wake_up([what])
            self.asleep.remove(what)

    def start_load(self) -> None:
        """Prepare the engine to receive new weights.

        If the engine sleeps, `start_load` allocates the memory of the weights again. `finish_load` allocates the memory
        of the KV cache again.
        """
        self._wake(WEIGHTS)
        self.engine.collective_rpc("rltrain_reset")
        self.engine.collective_rpc("start_weight_update")

    def load_bucket(self, bucket: Bucket) -> None:
        """Load the tensors of a bucket of weights.

        Raises SyncError if the received bytes differ from the bytes that the sender wrote.
        """
        self.engine.collective_rpc("update_weights", kwargs={"update_info": {"bucket": bucket}})

    def finish_load(self, version: int) -> None:
        """Make the engine use the new weights, check the weights, and drop all keys and values of the old weights.

        Even the keys and values of unfinished answers are dropped; vLLM recomputes the dropped keys and values when
        generation continues. With `rollout.keep_kv_cache`, no keys and values are dropped, but requests that arrive
        after the weight sync use only keys and values of the new weights.
        """
        self.engine.collective_rpc("finish_weight_update")
        if self.options.adapters is not None:
            self.engine.collective_rpc("rltrain_adapt")
        if not self.config.keep_kv_cache:
            self.engine.reset_prefix_cache(reset_running_requests=True)
        self.engine.reset_encoder_cache()  # It holds features of images, which the old weights have computed.
        self.engine.collective_rpc("rltrain_check")
        self._wake(CACHE)
        self.engine.set_weight_version(str(version))
        self.version, self.loads = version, self.loads + 1

    def close(self) -> None:
        """End the engine."""
        self.engine.engine_core.shutdown()


class Family:
    """Monitor of the processes that an engine has started, which records the process that dies first.

    Attributes:
        lost: Description of the engine's process that died first, or "" while all processes of the engine live.
        dismissed: Whether the engine is being closed, so that its processes are allowed to end. If `dismissed` is True,
            `lost` stays "" when a process ends.
    """

    def __init__(self) -> None:
        self.lost, self.dismissed = "", False
        # Maps the pidfd of each process to the process's name; a pidfd is readable once its process has ended.
        self.members: dict[int, str] = {}
        for process in psutil.Process().children(recursive=True):
            # A process that has already ended is not monitored. No process is monitored if the operating system lacks
            # pidfds.
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                name = " ".join(word for word in process.cmdline() if word)
                # The resource tracker of Python's multiprocessing is not monitored, because it is not a process of
                # the engine.
                if "resource_tracker" not in name:
                    self.members[os.pidfd_open(process.pid)] = f"{one_line(name, 60)} (pid {process.pid})"
        if self.members:
            threading.Thread(target=self._watch, name="vllm-family", daemon=True).start()

    def _watch(self) -> None:
        first = wait(list(self.members))[0]
        assert isinstance(first, int), "`wait` returns at least one of the given file descriptors"
        if not self.dismissed:
            self.lost = f"{self.members[first]} is gone (killed, crashed or out of memory)"
        for descriptor in self.members:
            os.close(descriptor)

    def error(self) -> WorkerLost:
        """Return the WorkerLost error that makes the rollout pool replace this process and its unusable engine."""
        error = WorkerLost(f"lost its engine: {self.lost or 'the core of vLLM ended'}")
        error.process = announced()
        return error

    def reason(self, raised: Exception) -> Exception:
        """Return the error to raise after a failed engine call: WorkerLost if a process has died, otherwise `raised`.

        vLLM raises EngineDeadError only after it has noticed the death of a process. Before vLLM has noticed the death
        of a process, calls of vLLM fail with exceptions other than EngineDeadError.
        """
        deadline = time.monotonic() + PROOF_S
        while not self.lost and time.monotonic() < deadline:
            time.sleep(PROOF_S / 50)
        return self.error() if self.lost or isinstance(raised, EngineDeadError) else raised


class AsyncVLLM:
    """Rollout engine for GPUs and large models, which uses vLLM's AsyncLLM with several processes.

    `AsyncVLLM` takes the same arguments as `InProcessVLLM`. An event loop in another thread receives the answers from
    vLLM, and `step` returns the finished answers.
    """

    def __init__(
        self,
        config: RolloutConfig,
        path: str,
        dtype: str,
        stop_ids: Sequence[int],
        options: EngineOptions = EngineOptions(),
    ) -> None:
        self.config, self.stop_ids, self.strings = config, list(stop_ids), stop_strings(config.stop, path)
        self.loads, self.options, self.asleep = 0, options, set[str]()
        self.sleep_level = options.sleep_level if torch.cuda.is_available() else 0
        self.requests: dict[str, Request] = {}  # Unfinished requests by vLLM's request id.
        self.answers: queue.Queue[tuple[str, Completion | Exception]] = queue.Queue()
        self.aborts = 0
        # Pending call whose result shows that vLLM's engine core responds.
        self.pulse: ConcurrentFuture[Any] | None = None
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vllm-events", daemon=True).start()
        arguments = engine_arguments(config, path, dtype, options)
        if config.shards > 1:
            # By default, vLLM starts its processes through Ray if this process uses a bundle of a placement group.
            arguments["distributed_executor_backend"] = "mp"
        self.family: Family | None = None
        self.engine: AsyncLLM = self._run(self._start(AsyncEngineArgs(**arguments)))
        self.family = Family()
        self._run(self.engine.init_weight_transfer_engine(WeightTransferInitRequest()))
        # By now, all processes of vLLM have opened their shared files, so the names of the files can be removed. Some
        # shared files are never removed by vLLM, and none are removed if vLLM's processes are killed.
        pids = [process.pid for process in psutil.Process().children(recursive=True)]
        leftovers.remove(leftovers.shared_files([os.getpid(), *pids]))
        if config.quantization is not None:
            check_quantization(self._run(self.engine.collective_rpc("rltrain_quantization_problem")))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        while True:
            try:
                return future.result(timeout=LOOK_S)
            except TimeoutError:
                # A TimeoutError usually means that the coroutine is still running after LOOK_S seconds. If `future` is
                # done, the TimeoutError has another cause: the coroutine itself raised TimeoutError, or the coroutine
                # ended just after `future.result` had timed out.
                if future.done():
                    return future.result()
                if self.family and self.family.lost:
                    raise self.family.error() from None
            except Exception as error:
                reason = self._reason(error)
                raise reason from (None if reason is error else error)

    def _reason(self, raised: Exception) -> Exception:
        if self.family is None:
            dead = isinstance(raised, EngineDeadError)
            return WorkerLost("did not start: the core of vLLM ended") if dead else raised
        return self.family.reason(raised)

    async def _start(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        return AsyncLLM.from_engine_args(arguments)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        for request in requests:
            name = f"{_name(request)}-{self.aborts}"
            self.requests[name] = request
            asyncio.run_coroutine_threadsafe(self._answer(name, request), self.loop)

    async def _answer(self, name: str, request: Request) -> None:
        params = sampling_params(request, self.stop_ids, self.config)
        growing = None if self.strings is None else Growing(request.key, self.strings)
        try:
            prompt = prompt_of(request, self.loads, self.config)
            lora = policy(self.loads, self.options)
            async for output in self.engine.generate(prompt, params, name, lora_request=lora):
                if growing is not None and growing.add(output.outputs[0], 0) and not output.finished:
                    # After the abort, `generate` still yields a final output, which contains the weight versions.
                    await self.engine.abort(name)
                if output.finished:
                    self.answers.put((name, self._completion(output, request, growing)))
        except Exception as error:
            self.answers.put((name, error))

    def _completion(self, output: RequestOutput, request: Request, growing: Growing | None) -> Completion:
        """Return the finished answer to a request, given vLLM's last output for the request."""
        if growing is None:
            return completion_of(output, request, record_experts=self.options.record_experts)
        check_image_tokens(output, request)
        growing.versions = _versions(output.outputs[0], len(growing.ids))
        return growing.completion(output.outputs[0])

    @property
    def busy(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self.requests)

    def step(self) -> list[Completion]:
        """Return the finished answers, after waiting up to 0.05 s for the first answer.

        If the engine has failed, raise the engine's error.
        """
        found: list[Completion] = []
        if self.family and self.family.lost:
            raise self.family.error()
        if self.pulse is None or self.pulse.done():
            if self.pulse is not None and self.pulse.exception() is None:
                tick()
            self.pulse = asyncio.run_coroutine_threadsafe(self.engine.is_sleeping(), self.loop)
        try:
            name, item = self.answers.get(timeout=0.05)
            while True:
                if isinstance(item, EngineDeadError):
                    raise self._reason(item)
                # vLLM may still return outputs for a request after the method `abort` has dropped the request. The
                # outputs of dropped requests are ignored, because `self.requests` does not contain the ids of dropped
                # requests.
                if self.requests.pop(name, None):
                    if isinstance(item, Exception):
                        raise self._reason(item)
                    found.append(item)
                name, item = self.answers.get_nowait()
        except queue.Empty:
            return found

    def abort(self) -> None:
        """Drop all unfinished requests of the engine."""
        self._run(self.engine.abort(list(self.requests)))
        self.requests.clear()
        self.aborts += 1

    def sleep(self) -> bool:
        """Release weights and caches until the next weight sync. Return False if the engine cannot sleep."""
        if self.sleep_level:
            assert not self.busy, "an engine with unfinished answers must not sleep"
            self._run(self.engine.sleep(level=self.sleep_level))
            self.asleep = {WEIGHTS, CACHE}
        return self.sleep_level > 0

    async def _wake(self, what: str) -> None:
        if what in self.asleep:
            await self.engine.wake_up([what])
            self.asleep.remove(what)

    def start_load(self) -> None:
        """Pause generation, and prepare the engine to receive new weights.

        If the engine sleeps, `start_load` allocates the memory of the weights again. `finish_load` allocates the memory
        of the KV cache again.
        """
        self._run(self._start_load())

    def load_bucket(self, bucket: Bucket) -> None:
        """Load the tensors of a bucket of weights.

        Raises SyncError if the received bytes differ from the bytes that the sender wrote.
        """
        with readable_elsewhere(bucket) as lent:
            pickled = pickle.dumps(lent)  # The bucket `lent` names the memory of the weights, and contains no weights.
            self._run(self._call_workers("update_weights", update_info={"pickled": pickled}))

    def finish_load(self, version: int) -> None:
        """Make the engine use the new weights, check the weights, drop the KV cache, and resume generation.

        Even the keys and values of unfinished answers are dropped; vLLM recomputes the dropped keys and values when
        generation continues. With `rollout.keep_kv_cache`, no keys and values are dropped, but requests that arrive
        after the weight sync use only keys and values of the new weights.
        """
        self._run(self._finish_load(version))
        self.loads += 1

    async def _call_workers(self, method: str, **arguments: Any) -> None:
        """Call a method of vLLM's worker in all processes of the engine.

        Raises SyncError if the method raised SyncError in a process, and RuntimeError for any other exception.
        """
        for raised in await self.engine.collective_rpc("rltrain_call", args=(method, arguments)):
            if raised is not None:
                kind, text = raised
                raise SyncError(text) if kind == SyncError.__name__ else RuntimeError(f"{kind}: {text}")

    async def _start_load(self) -> None:
        await self._wake(WEIGHTS)
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        await self._call_workers("rltrain_reset")
        await self._call_workers("start_weight_update")

    async def _finish_load(self, version: int) -> None:
        await self._call_workers("finish_weight_update")
        await self.engine.update_weight_version(str(version))
        if self.options.adapters is not None:
            await self._call_workers("rltrain_adapt")
        if not self.config.keep_kv_cache:
            await self.engine.reset_prefix_cache(reset_running_requests=True)
        await self.engine.reset_encoder_cache()  # It holds features of images, which the old weights have computed.
        await self._call_workers("rltrain_check")
        await self._wake(CACHE)
        await self.engine.resume_generation()

    def close(self) -> None:
        """End the engine's processes and the event loop that receives answers."""
        if self.family:
            self.family.dismissed = True
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


def sleep_level(config: Config) -> int:
    """Return vLLM's sleep level, which says what the engine releases while the training ranks compute.

    The sleep level is 0 (the engine never sleeps) if the training ranks have their own devices. In a run without
    low-rank adapters (LoRA), a sleeping engine drops its weights, because the weight sync that wakes the engine sends
    every weight. In a run with low-rank adapters, a sleeping engine moves its weights to the host's memory, because the
    weight sync sends only the adapters.
    """
    return 0 if not config.takes_turns else TO_HOST if config.model.lora else DROPPED


def check_quantization(problems: Sequence[str]) -> None:
    """Raise ValueError if a process of vLLM reports that it cannot generate with quantized weights."""
    for problem in filter(None, problems):
        raise ValueError(problem)


def _name(request: Request) -> str:
    return "-".join(map(str, request.key))


def make(config: Config, path: str, stop_ids: Sequence[int]) -> InProcessVLLM | AsyncVLLM:
    """Return the vLLM engine for a config: an engine in this process, or AsyncLLM for GPUs and tensor parallelism.

    Raises:
        ConfigError: The model's weights are incomplete, or vLLM does not start with the model's weights. `make` checks
            that the weights are complete, because vLLM does not report a missing layer. ConfigError is also raised if
            `actor.router_replay` is "engine" and this process has no GPU, if `rollout.vllm.adapters` is "separate" and
            vLLM cannot apply the adapters beside the base weights, or if vLLM cannot quantize the model's weights.
    """
    record = config.actor.router_replay == "engine"
    if record and not torch.cuda.is_available():
        raise ConfigError(
            "actor.router_replay=engine with rollout=vllm: vLLM records the experts of tokens only on GPUs; use "
            "rollout=hf, or actor.router_replay=null"
        )
    check_weights(path, f"model.path={path}")
    assert config.rollout.vllm is not None, "the vLLM engine needs the settings `rollout.vllm`"
    lora = config.model.lora if config.rollout.vllm.adapters == "separate" else None
    if lora is not None:
        adapters.check_adapters(path, config.model.dtype, lora)
    process = config.rollout.vllm.process
    if process == "auto":
        alone = config.rollout.shards == 1 and not torch.cuda.is_available()
        process = "inprocess" if alone else "async"
    kind = InProcessVLLM if process == "inprocess" else AsyncVLLM
    try:
        options = EngineOptions(sleep_level(config), record_experts=record, adapters=lora)
        return kind(config.rollout, path, config.model.dtype, stop_ids, options)
    except (KeyError, ValueError) as error:  # vLLM raises KeyError or ValueError for unknown tensor names.
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        advice = (
            "save the model again with save_pretrained, in case vLLM does not know the names of its tensors"
            if config.rollout.quantization is None
            else "use rollout.vllm.quantization=null"
        )
        raise ConfigError(
            f"model.path={path}: vLLM does not start with this model ({reason}); {advice}, or use rollout=hf"
        ) from error
