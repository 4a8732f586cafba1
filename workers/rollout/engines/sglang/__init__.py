"""Rollout engine with the library SGLang, for GPUs. It was written from the source of SGLang 0.5.23.

The engine has not been run with SGLang yet. Its tests use a stand-in for SGLang.
"""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rltrain.settings.engine_description import EngineDescription, Setting
from rltrain.settings.typed import require

if TYPE_CHECKING:
    from rltrain.settings.schema import Config, RolloutConfig

VERSION = "0.5.23"
GPU_SHARE = 0.5  # Default of the option `gpu_share`.
# Arguments of `sglang.Engine` that only the engine itself may set.
OWNED = (
    *("model_path", "trust_remote_code", "dtype", "skip_tokenizer_init", "context_length", "max_running_requests"),
    *("tp_size", "mem_fraction_static", "enable_memory_saver", "stream_interval", "incremental_streaming_output"),
    *("tokenizer_worker_num", "dp_size"),
)


def installed() -> bool:
    """Return whether SGLang can be imported."""
    return importlib.util.find_spec("sglang") is not None


def check(config: "Config") -> None:
    """Check that SGLang is installed, and that the run has no settings that this engine does not support.

    Raises ConfigError if not.
    """
    rollout = config.rollout
    start = "rollout.engine=sglang"
    require(
        installed(),
        f"{start}: SGLang is not installed; install sglang=={VERSION} in an environment without vLLM, or use "
        "rollout=vllm",
    )
    require(
        not rollout.verify_sync,
        f"{start} with rollout.verify_sync=true: the engine cannot check that SGLang computes with new weights; use "
        "rollout=sglang, which sets rollout.verify_sync=false, or use rollout=vllm",
    )
    require(
        not rollout.is_restricted,
        f"{start} with {rollout.restriction}: SGLang returns log-probs of the distribution before tokens are left out; "
        "leave the setting out, or use rollout=vllm",
    )
    require(not rollout.stop, f"{start} with rollout.stop: stop strings are not supported; use rollout=vllm")
    require(
        config.trainer.max_staleness == 0,
        f"{start} with trainer.max_staleness={config.trainer.max_staleness}: answers cannot continue after a weight "
        "sync; use trainer.max_staleness=0, or rollout=vllm",
    )
    require(not config.trainer.deterministic, f"{start} with trainer.deterministic=true: use rollout=hf")
    shards(rollout)
    gpu_share(rollout)
    arguments = rollout.engine_options.get("arguments", {})
    key = "rollout.engine_options.arguments"
    require(isinstance(arguments, Mapping), f"{key}={arguments}: must be a mapping from names to values")
    owned = [name for name in arguments if name in OWNED]
    require(not owned, f"{key}.{next(iter(owned), '')}: the engine sets this argument itself; leave it out")


def shards(rollout: "RolloutConfig") -> int:
    """Return the number of GPUs over which SGLang divides the model. Raise ConfigError if it is not a number."""
    value = rollout.engine_options.get("shards", 1)
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(good, f"rollout.engine_options.shards={value}: must be a whole number of at least 1")
    return int(value)


def gpu_share(rollout: "RolloutConfig") -> Setting:
    """Return the share of free GPU memory that SGLang reserves. Raise ConfigError if it is not a number."""
    value = rollout.engine_options.get("gpu_share", GPU_SHARE)
    good = isinstance(value, int | float) and 0 < value < 1
    require(good, f"rollout.engine_options.gpu_share={value}: must be a number between 0 and 1")
    return Setting("rollout.engine_options.gpu_share", float(value))


DESCRIPTION = EngineDescription(
    title="SGLang",
    make="workers.rollout.engines.sglang.engine:make",
    packages=("sglang",),
    # SGLang counts further tokens for each request, so its limit must be above the model's number of positions.
    environment={"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    options={
        "shards": "Number of GPUs over which the model is divided (tensor parallelism).",
        "gpu_share": "Share of the GPU memory that is free at the start, for weights and caches; 0.5 by default.",
        "arguments": "Further arguments of sglang.Engine, as a mapping.",
    },
    check=check,
    own_process="SGLang ends all child processes of its process when it stops",
    shards=shards,
    shards_key="rollout.engine_options.shards",
    library_bytes=1200 << 20,
    gpu_share=gpu_share,
)
