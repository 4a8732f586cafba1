"""The names, types and rules of every config key.

YAML under `config/` owns the values, so no field here has a default. `parse` turns it into these dataclasses once; past
that point there is no untyped config. Rules that need more (files, registries, cores) live in `rltrain.checks`.
"""

import dataclasses
import difflib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rltrain.errors import ConfigError

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds; the message says value, rule, way out."""
    if not condition:
        raise ConfigError(message)


def _at_least(config: Any, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= minimum, f"{name} must be >= {minimum:g}, got {value}")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long, in which batches, and where the results go."""

    total_steps: int
    prompts_per_step: int
    prompts_per_minibatch: int
    epochs_per_step: int
    max_staleness: int  # in weight versions; 0 is synchronous
    seed: int
    output_dir: str
    resume: str
    save_every: int  # steps between exports of the model; 0: only at the end
    eval_every: int  # steps between evaluations; 0: only before and after
    sample_every: int  # steps between samples shown in the terminal; 0: never
    deterministic: bool

    def __post_init__(self) -> None:
        _at_least(self, 1, "total_steps", "prompts_per_step", "prompts_per_minibatch", "epochs_per_step")
        _at_least(self, 0, "max_staleness", "seed", "save_every", "eval_every", "sample_every")
        require(
            self.prompts_per_step % self.prompts_per_minibatch == 0,
            f"prompts_per_step={self.prompts_per_step} is not a multiple of trainer.prompts_per_minibatch="
            f"{self.prompts_per_minibatch}: every mini-batch holds the same number of prompts; try "
            f"trainer.prompts_per_minibatch={_largest_divisor(self.prompts_per_step, self.prompts_per_minibatch)}",
        )
        require(self.max_staleness == 0, f"max_staleness={self.max_staleness}: training is synchronous only; use 0")
        require(self.resume == "never", f"resume={self.resume}: runs cannot be resumed yet; use trainer.resume=never")


def _largest_divisor(total: int, at_most: int) -> int:
    return next(n for n in range(min(total, at_most), 0, -1) if total % n == 0)


@dataclass(frozen=True, kw_only=True)
class KLInRewardConfig:
    """KL penalty subtracted from the rewards; `kl_coef` 0 with a fixed controller turns it off."""

    kl_coef: float
    kl_estimator: str
    controller: Literal["fixed", "adaptive"]
    target: float  # nats per token that the adaptive controller steers to
    horizon: int  # sequences over which it reacts

    def __post_init__(self) -> None:
        _at_least(self, 0, "kl_coef", "target")
        _at_least(self, 1, "horizon")
        require(
            self.controller == "fixed" or (self.kl_coef > 0 and self.target > 0),
            f"controller=adaptive with kl_coef={self.kl_coef}, target={self.target}: the adaptive controller "
            "multiplies the coefficient, so both must be > 0; set them, or use controller=fixed",
        )


@dataclass(frozen=True, kw_only=True)
class KLLossConfig:
    """KL term added to the loss; `kl_loss_coef` 0 turns it off."""

    kl_loss_coef: float
    kl_estimator: str

    def __post_init__(self) -> None:
        _at_least(self, 0, "kl_loss_coef")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is learnt from a batch. `advantage` and `loss` hold the knobs that differ from the function's defaults."""

    advantage_estimator: str
    advantage: dict[str, Any]
    normalize_advantages: bool
    loss_mode: str
    loss: dict[str, Any]
    loss_agg_mode: AggMode
    old_log_probs: Literal["actor", "rollout"]
    entropy_coef: float
    kl_in_reward: KLInRewardConfig
    kl_loss: KLLossConfig

    def __post_init__(self) -> None:
        _at_least(self, 0, "entropy_coef")

    @property
    def needs_reference(self) -> bool:
        """Whether any KL term is on."""
        return self.kl_in_reward.kl_coef > 0 or self.kl_loss.kl_loss_coef > 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model; `dtype` is that of the engine and of the trainer's matrix products (master weights stay float32)."""

    path: str
    dtype: Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule; one step of the schedule is one optimizer step."""

    lr: float
    lr_schedule: Literal["constant", "linear", "cosine"]
    lr_warmup_steps: int
    beta1: float
    beta2: float
    weight_decay: float
    max_grad_norm: float
    max_tokens_per_microbatch: int

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr must be > 0, got {self.lr}")
        require(self.max_grad_norm > 0, f"max_grad_norm must be > 0, got {self.max_grad_norm}")
        _at_least(self, 0, "lr_warmup_steps", "weight_decay")
        _at_least(self, 1, "max_tokens_per_microbatch")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig):
    """The critic's optimizer and its value clipping."""

    clip_range_value: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.clip_range_value > 0, f"clip_range_value must be > 0, got {self.clip_range_value}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from: `builtin:NAME` or a JSONL or parquet file."""

    train: str
    val: str | None
    val_size: int  # prompts used in an evaluation, at most
    shuffle: bool
    overlong_prompts: Literal["refuse", "filter"]

    def __post_init__(self) -> None:
        _at_least(self, 1, "val_size")


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function: `path` is `package.module:function` or `file.py:function`."""

    name: str
    path: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward functions and what happens when they fail."""

    functions: list[RewardFunctionConfig]
    timeout_s: float  # wall-clock seconds for one call
    max_failed_fraction: float  # of a step's samples; above it the run stops

    def __post_init__(self) -> None:
        require(bool(self.functions), "functions is empty: name one, as in reward.functions=[my_reward.py:score]")
        require(self.timeout_s > 0, f"timeout_s must be > 0, got {self.timeout_s}")
        share, names = self.max_failed_fraction, [function.name for function in self.functions]
        require(0 <= share <= 1, f"max_failed_fraction must be in [0, 1], got {share}")
        for name in names:
            require(names.count(name) == 1, f"functions: two are named '{name}'; give each its own name")


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """What only vLLM needs."""

    process: Literal["auto", "inprocess", "async"]  # auto: inprocess on CPU, async on GPUs and for tensor parallelism
    tensor_parallel_size: int
    kv_cache_mb: int  # on CPU
    gpu_memory_utilization: float  # on GPUs

    def __post_init__(self) -> None:
        _at_least(self, 1, "tensor_parallel_size", "kv_cache_mb")
        share = self.gpu_memory_utilization
        require(0 < share <= 1, f"gpu_memory_utilization must be in (0, 1], got {share}")
        require(
            self.process != "inprocess" or self.tensor_parallel_size == 1,
            f"process=inprocess with tensor_parallel_size={self.tensor_parallel_size}: one process holds one shard; "
            "use rollout.vllm.process=async",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are generated."""

    engine: str
    samples_per_prompt: int
    temperature: float
    max_prompt_length: int
    max_response_length: int
    max_concurrent_sequences: int  # in one engine
    max_log_prob_gap: float  # mean |engine - trainer| in nats over the first step's tokens; above it the run stops
    verify_sync: bool
    vllm: VLLMConfig | None

    def __post_init__(self) -> None:
        _at_least(self, 1, "samples_per_prompt", "max_prompt_length", "max_response_length", "max_concurrent_sequences")
        require(self.temperature > 0, f"temperature must be > 0, got {self.temperature}: sampling needs randomness")
        require(self.max_log_prob_gap > 0, f"max_log_prob_gap must be > 0, got {self.max_log_prob_gap}")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which processes there are and where."""

    launcher: Literal["ray", "inprocess"]
    address: str  # of the Ray cluster; `local` starts one for this run
    actor_ranks: int
    rollout_replicas: int
    reward_workers: int
    share_ranks: bool  # actor, reference and critic of a rank live in one process
    threads_per_worker: int | None  # CPU threads of one training rank or engine; null: the cores shared out evenly
    start_timeout_s: float

    def __post_init__(self) -> None:
        _at_least(self, 1, "actor_ranks", "rollout_replicas", "reward_workers")
        threads = self.threads_per_worker
        require(threads is None or threads >= 1, f"threads_per_worker must be >= 1 or null, got {threads}")
        require(self.start_timeout_s > 0, f"start_timeout_s must be > 0, got {self.start_timeout_s}")
        for name in ("actor_ranks", "rollout_replicas", "reward_workers"):
            require(
                self.launcher == "ray" or getattr(self, name) == 1,
                f"{name}={getattr(self, name)} with launcher=inprocess: one process holds one worker of each role; "
                "use placement=local",
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole resolved config."""

    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    actor: OptimizerConfig
    critic: CriticConfig
    placement: PlacementConfig
    verbose: bool

    def __post_init__(self) -> None:
        longest = self.rollout.max_prompt_length + self.rollout.max_response_length
        for role in ("actor", "critic"):
            budget = getattr(self, role).max_tokens_per_microbatch
            require(
                budget >= longest,
                f"{role}.max_tokens_per_microbatch={budget} is below the longest possible row, "
                f"rollout.max_prompt_length + rollout.max_response_length = {longest}; use at least {longest}",
            )
        require(
            self.placement.launcher == "ray" or self.rollout.engine != "vllm",
            "rollout=vllm with placement=inprocess: vLLM changes its process's threads and random state, which "
            "the trainer shares there; use rollout=hf, or placement=local",
        )
        require(
            not self.trainer.deterministic or self.rollout.engine == "hf" or self.placement.rollout_replicas == 1,
            f"trainer.deterministic=true with {self.placement.rollout_replicas} vLLM replicas: which replica answers "
            "depends on timing; use placement.rollout_replicas=1 or rollout=hf",
        )
        kl, sequences = self.algorithm.kl_in_reward, self.sequences_per_step
        require(
            kl.controller == "fixed" or sequences < 5 * kl.horizon,
            f"algorithm.kl_in_reward.horizon={kl.horizon} with controller=adaptive: a step has {sequences} sequences, "
            f"and 5 * horizon must be more, or kl_coef could turn negative; use a horizon above {sequences // 5}",
        )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run; the schedules end at exactly this number."""
        return self.trainer.total_steps * self.optimizer_steps_per_step

    @property
    def optimizer_steps_per_step(self) -> int:
        """Epochs times mini-batches."""
        return self.trainer.epochs_per_step * (self.trainer.prompts_per_step // self.trainer.prompts_per_minibatch)

    @property
    def sequences_per_step(self) -> int:
        """B = P * G."""
        return self.trainer.prompts_per_step * self.rollout.samples_per_prompt


T = TypeVar("T")


def parse(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Turn nested plain values into the dataclass `kind`, refusing unknown keys, missing keys and wrong types.

    Raises:
        ConfigError: naming the key, what it must be, and for an unknown key the nearest known one.
    """
    hints = get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise unknown_key(where + str(key), [where + name for name in hints])
    missing = [where + name for name in hints if name not in values]
    require(not missing, f"{', '.join(missing)}: no value; give one as {missing[0] if missing else ''}=VALUE")
    fields = {name: _value(hint, values[name], where + name) for name, hint in hints.items()}
    try:
        return kind(**fields)
    except ConfigError as error:  # rules name their own field; here it gets the path of its section
        raise ConfigError(where + str(error)) from None


def unknown_key(key: str, known: list[str]) -> ConfigError:
    """The error for a key that does not exist; names the nearest known one."""
    hint = f"; the nearest known key is '{max(known, key=lambda name: _likeness(key, name))}'" if known else ""
    return ConfigError(f"unknown config key '{key}'{hint}")


def _likeness(key: str, name: str) -> float:
    # A key without its section, or in the wrong one, is nearly as good as the whole.
    whole = difflib.SequenceMatcher(None, key, name).ratio()
    last = difflib.SequenceMatcher(None, key.rpartition(".")[2], name.rpartition(".")[2]).ratio()
    return max(whole, 0.9 * last)


def keys(kind: type, prefix: str = "") -> list[str]:
    """The dotted names of every leaf key below the dataclass `kind`, unions with None included."""
    found: list[str] = []
    for name, hint in get_type_hints(kind).items():
        kinds = () if get_origin(hint) is list else (hint, *get_args(hint))
        inner = next((t for t in kinds if isinstance(t, type) and dataclasses.is_dataclass(t)), None)
        found += keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return found


def _value(hint: Any, value: Any, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        absent = value is None and type(None) in args
        return None if absent else _value(next(arg for arg in args if arg is not type(None)), value, key)
    if origin is Literal:
        require(value in args, f"{key}={value}: unknown choice; use one of {', '.join(map(str, args))}")
        return value
    if origin is list:
        require(isinstance(value, list), _wrong_type(key, value, "a list"))
        return [_value(args[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        require(isinstance(value, dict), _wrong_type(key, value, "a mapping such as {}"))
        return dict(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        require(isinstance(value, Mapping), _wrong_type(key, value, "a mapping"))
        return parse(hint, value, f"{key}.")
    good = isinstance(value, (int, float) if hint is float else hint) and (hint is bool or not isinstance(value, bool))
    # Compared as it is: a whole number may be too large for a float. NaN compares as False.
    good = good and (hint is not float or abs(value) <= sys.float_info.max)
    require(good, _wrong_type(key, value, _KINDS.get(hint, hint.__name__)))
    return float(value) if hint is float else value


_KINDS: dict[Any, str] = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}


def _wrong_type(key: str, value: Any, wanted: str) -> str:
    return f"{key}={'null' if value is None else repr(value)}: must be {wanted}"
