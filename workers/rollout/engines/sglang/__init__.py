"""Rollout engine with the library SGLang, for GPUs. It was written for SGLang 0.5.23 and has not been run.

The tests use a stand-in with SGLang's interface, because SGLang needs a GPU.
"""

import importlib.util
from typing import TYPE_CHECKING

from rltrain.settings.engine_description import EngineDescription, Setting
from rltrain.settings.typed import require

if TYPE_CHECKING:
    from rltrain.settings.schema import Config, RolloutConfig

GPU_SHARE = 0.5  # Share of a GPU's memory that SGLang reserves by default.


def installed() -> bool:
    """Return whether SGLang can be imported."""
    return importlib.util.find_spec("sglang") is not None


def check(config: "Config") -> None:
    """Check that SGLang is installed, and that the run has no settings that this engine does not support.

    Raises ConfigError if not.
    """
    rollout = config.rollout
    require(installed(), "rollout.engine=sglang: SGLang is not installed; install sglang, or use rollout=vllm")
    start = "rollout.engine=sglang"
    require(
        not rollout.verify_sync,
        f"{start} with rollout.verify_sync=true: SGLang cannot prove that it uses new weights; set "
        "rollout.verify_sync=false to train without the proof, or use rollout=vllm",
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
    share = gpu_share(rollout).value
    require(0 < share < 1, f"rollout.engine_options.gpu_share={share}: must be between 0 and 1")


def shards(rollout: "RolloutConfig") -> int:
    """Return the number of GPUs over which SGLang divides the model."""
    return int(rollout.engine_options.get("shards", 1))


def gpu_share(rollout: "RolloutConfig") -> Setting:
    """Return the share of a GPU's memory that SGLang reserves for weights and caches."""
    return Setting("rollout.engine_options.gpu_share", float(rollout.engine_options.get("gpu_share", GPU_SHARE)))


DESCRIPTION = EngineDescription(
    title="SGLang",
    make="workers.rollout.engines.sglang.engine:make",
    packages=("sglang",),
    options={
        "shards": "Number of GPUs over which the model is divided (tensor parallelism).",
        "gpu_share": "Share of a GPU's memory for weights and caches, between 0 and 1.",
        "arguments": "Further arguments of sglang.Engine, as a mapping.",
    },
    check=check,
    own_process="SGLang ends all child processes of its process when it stops",
    shards=shards,
    shards_key="rollout.engine_options.shards",
    library_bytes=1200 << 20,
    gpu_share=gpu_share,
)
