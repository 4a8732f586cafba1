"""The names, types and rules of all config keys.

The YAML files under `config/` hold the default values, so the fields here have none. `rltrain.settings.typed.parse`
converts the YAML values into these dataclasses once. No untyped config exists after that. The keys under `algorithm`
and `reward` are defined in `rltrain.settings.algorithm_config` and `rltrain.settings.reward_config`. Rules that need
files, registries or the number of cores are in `rltrain.run.checks`.
"""

from dataclasses import dataclass
from typing import Literal

from rltrain.settings.algorithm_config import AlgorithmConfig
from rltrain.settings.reward_config import RewardConfig
from rltrain.settings.typed import at_least, require

REWARD_MODEL = "reward_model"  # start of a training rank's role; the name of the reward model follows
ALL_LINEAR = "all-linear"  # LoRA target that stands for every linear layer except the last
SHORTEST_HANG_S = 10.0  # processes are polled once a second, and report progress once per micro-batch


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Length of the run, batch sizes, output, checkpoints, failure limits and evaluation."""

    total_steps: int
    prompts_per_step: int
    prompts_per_minibatch: int
    epochs_per_step: int
    max_staleness: int  # weight versions that an answer may lag behind when it is trained on; 0: synchronous training
    seed: int
    output_dir: str
    resume: str  # never, auto (the newest checkpoint of this run, if there is one), or the path of a checkpoint
    save_every: int  # steps between checkpoints; 0: only at the end
    checkpoint_dir: str  # any path that fsspec supports
    keep_checkpoints: int  # number of newest checkpoints to keep; 0: all
    keep_best: str | None  # name of a metric; the checkpoint with its highest value is also kept
    max_restarts: int  # maximum number of restarts of the training ranks in one run
    hang_timeout_s: float  # seconds without progress after which a worker counts as dead
    max_skipped_updates: int  # maximum number of consecutive updates skipped for a non-finite loss or gradient
    eval_every: int  # steps between evaluations; 0: only before and after training
    sample_every: int  # steps between samples shown in the terminal; 0: never
    deterministic: bool

    def __post_init__(self) -> None:
        at_least(self, 1, "total_steps", "prompts_per_step", "prompts_per_minibatch", "epochs_per_step")
        at_least(self, 0, "max_staleness", "seed", "save_every", "eval_every", "sample_every", "keep_checkpoints")
        at_least(self, 0, "max_restarts", "max_skipped_updates")
        require(
            self.hang_timeout_s >= SHORTEST_HANG_S,
            f"hang_timeout_s must be >= {SHORTEST_HANG_S:g}, got {self.hang_timeout_s}: a slow micro-batch would "
            "count as a hang, and use up the restarts",
        )
        require(
            self.prompts_per_step % self.prompts_per_minibatch == 0,
            f"prompts_per_step={self.prompts_per_step} is not a multiple of trainer.prompts_per_minibatch="
            f"{self.prompts_per_minibatch}: every mini-batch holds the same number of prompts; try "
            f"trainer.prompts_per_minibatch={_largest_divisor(self.prompts_per_step, self.prompts_per_minibatch)}",
        )
        require(
            not (self.deterministic and self.max_staleness),
            f"max_staleness={self.max_staleness}: when weights change under an answer is a matter of timing; use 0 "
            "with deterministic=true",
        )
        for name, value, hint in (
            ("resume", self.resume, "never, auto, or the folder of a checkpoint"),
            ("checkpoint_dir", self.checkpoint_dir, "a folder"),
            ("keep_best", self.keep_best, "a metric, or null"),
        ):
            require(value is None or bool(value.strip()), f"{name} is empty; give {hint}")


def _largest_divisor(total: int, at_most: int) -> int:
    return next(n for n in range(min(total, at_most), 0, -1) if total % n == 0)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters, arXiv 2106.09685. A target layer uses W + alpha / rank * B A. W is frozen, A and B train."""

    given_whole = True  # the user sets one key, whose value is a mapping

    rank: int
    alpha: float
    targets: list[str]  # last parts of the names of linear layers, or only all-linear

    def __post_init__(self) -> None:
        at_least(self, 1, "rank")
        require(self.alpha > 0, f"alpha must be > 0, got {self.alpha:g}: adapters that weigh nothing learn nothing")
        targets, hint = self.targets, f"name layers, as in [q_proj,v_proj], or {ALL_LINEAR}"
        require(bool(targets) and all(targets), f"targets={targets}: names no layer; {hint}")
        require(len(set(targets)) == len(targets), f"targets={targets}: names one twice; {hint}")
        require(
            ALL_LINEAR not in targets or len(targets) == 1,
            f"targets={targets}: {ALL_LINEAR} has all of them already; {hint} alone",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model. `dtype` applies to the engine and to the trainer's matrix products. Master weights stay float32."""

    path: str
    dtype: Literal["float32", "bfloat16"]
    activation_checkpointing: bool
    cpu_offload: bool
    compile: bool
    lora: LoRAConfig | None  # null: no adapters, all weights are trained


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of AdamW and its learning-rate schedule, which advances by one at each optimizer step."""

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
        at_least(self, 0, "lr_warmup_steps", "weight_decay")
        at_least(self, 1, "max_tokens_per_microbatch")
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
    """Sources and treatment of the prompts. A source is `builtin:NAME`, or a JSONL, JSON or parquet file."""

    train: str
    val: str | None
    val_size: int  # maximum number of prompts in one evaluation
    shuffle: bool
    overlong_prompts: Literal["refuse", "filter"]
    special_tokens: Literal["text", "refuse", "allow"]  # treatment of text that spells a control token
    lossy_tokenizer: Literal["refuse", "allow"]  # treatment of a tokenizer that loses a part of the first prompts

    def __post_init__(self) -> None:
        at_least(self, 1, "val_size")


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """Settings that only vLLM uses."""

    process: Literal["auto", "inprocess", "async"]  # auto: inprocess on CPU, async on GPUs and for tensor parallelism
    tensor_parallel_size: int
    kv_cache_mb: int  # used only on CPU
    gpu_memory_utilization: float  # used only on GPUs

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor_parallel_size", "kv_cache_mb")
        share = self.gpu_memory_utilization
        require(0 < share <= 1, f"gpu_memory_utilization must be in (0, 1], got {share}")
        require(
            self.process != "inprocess" or self.tensor_parallel_size == 1,
            f"process=inprocess with tensor_parallel_size={self.tensor_parallel_size}: one process holds one shard; "
            "use rollout.vllm.process=async",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings for the generation of answers."""

    engine: str
    samples_per_prompt: int
    temperature: float
    max_prompt_length: int
    max_response_length: int
    max_concurrent_sequences: int  # per engine
    max_log_prob_gap: float  # limit on the mean |engine - trainer| in nats over the tokens of the first step
    verify_sync: bool
    vllm: VLLMConfig | None

    def __post_init__(self) -> None:
        at_least(self, 1, "samples_per_prompt", "max_prompt_length", "max_response_length", "max_concurrent_sequences")
        require(self.temperature > 0, f"temperature must be > 0, got {self.temperature}: sampling needs randomness")
        require(self.max_log_prob_gap > 0, f"max_log_prob_gap must be > 0, got {self.max_log_prob_gap}")

    @property
    def shards(self) -> int:
        """Number of processes, or GPUs, over which one engine is sharded."""
        return self.vllm.tensor_parallel_size if self.engine == "vllm" and self.vllm else 1


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """The number of processes of each kind, and where they run."""

    launcher: Literal["ray", "inprocess"]
    address: str  # address of the Ray cluster; `local` starts a cluster for this run
    actor_ranks: int
    shard_ranks: int | None  # number of ranks over which one copy of a model is sharded; null: all ranks
    sequence_ranks: int  # number of ranks that divide the tokens of one pack among them
    rollout_replicas: int
    reward_workers: int
    reward_spares: int  # number of extra processes that a reward worker may start while a call takes long
    share_ranks: bool  # whether the actor, the reference and the critic of a rank share one process
    threads_per_worker: int | None  # CPU threads of a rank, an engine or the single process; null: cores / workers
    start_timeout_s: float

    def __post_init__(self) -> None:
        at_least(self, 1, "actor_ranks", "rollout_replicas", "reward_workers")
        at_least(self, 0, "reward_spares")
        require(
            self.shard_ranks is None or (self.shard_ranks >= 1 and self.actor_ranks % self.shard_ranks == 0),
            f"shard_ranks={self.shard_ranks} does not divide actor_ranks={self.actor_ranks}: every copy of a model is "
            "sharded over as many ranks; use a divisor, or null for one copy over all",
        )
        require(
            self.sequence_ranks >= 1 and self.actor_ranks % self.sequence_ranks == 0,
            f"sequence_ranks={self.sequence_ranks} does not divide actor_ranks={self.actor_ranks}: ranks share out the "
            "tokens of a pack in groups of equal size; use a divisor, or 1",
        )
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
    """The complete resolved config."""

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
        self.require_budget("actor")
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
        buffer, limit = self.algorithm.reward_shaping.overlong_buffer, self.rollout.max_response_length
        require(
            buffer <= limit,
            f"algorithm.reward_shaping.overlong_buffer={buffer} is above rollout.max_response_length={limit}: the "
            f"penalty grows over the last tokens before that limit; use at most {limit} (DAPO's: a fifth), or 0",
        )
        kl, sequences = self.algorithm.kl_in_reward, self.sequences_per_step
        require(
            kl.controller == "fixed" or sequences < 5 * kl.horizon,
            f"algorithm.kl_in_reward.horizon={kl.horizon} with controller=adaptive: a step has {sequences} sequences, "
            f"and 5 * horizon must be more, or kl_coef could turn negative; use a horizon above {sequences // 5}",
        )

    def require_budget(self, role: str) -> None:
        """Raise ConfigError if the longest possible row does not fit in a micro-batch of the role.

        Args:
            role: `actor` or `critic`.
        """
        longest = self.rollout.max_prompt_length + self.rollout.max_response_length
        ranks, budget = self.placement.sequence_ranks, getattr(self, role).max_tokens_per_microbatch
        shared, least = f", which {ranks} ranks share" if ranks > 1 else "", -(-longest // ranks)
        require(
            budget * ranks >= longest,
            f"{role}.max_tokens_per_microbatch={budget} is below the longest possible row, "
            f"rollout.max_prompt_length + rollout.max_response_length = {longest}{shared}; use at least {least}",
        )

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps in the whole run. The learning-rate schedules end at exactly this number."""
        return self.trainer.total_steps * self.optimizer_steps_per_step

    @property
    def optimizer_steps_per_step(self) -> int:
        """Number of optimizer steps in one training step: epochs times mini-batches per epoch."""
        return self.trainer.epochs_per_step * self.minibatches_per_epoch

    @property
    def minibatches_per_epoch(self) -> int:
        """Number of mini-batches, and thus of optimizer steps, in one pass over the groups of a training step."""
        return self.trainer.prompts_per_step // self.trainer.prompts_per_minibatch

    def roles(self, *, needs_critic: bool) -> list[str]:
        """Return the roles of the training ranks.

        Args:
            needs_critic: whether the advantage estimator reads the critic's values.
        """
        models = [f"{REWARD_MODEL} {model.name}" for model in self.reward.models]
        return ["actor", *["reference"] * self.algorithm.needs_reference, *["critic"] * needs_critic, *models]

    @property
    def takes_turns(self) -> bool:
        """Whether engines and training ranks share devices and take turns, so that the waiting side needs no memory."""
        placement = self.placement
        return placement.launcher == "ray" and placement.share_ranks and not self.trainer.max_staleness

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences in one training step, B = P * G: prompts times samples per prompt."""
        return self.trainer.prompts_per_step * self.rollout.samples_per_prompt
