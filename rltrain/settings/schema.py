"""The names, types and rules of all config keys.

The fields of the config dataclasses have no default values, because the YAML files under `config/` hold the defaults.
The function `rltrain.settings.typed.parse` converts the YAML values into the config dataclasses once, at the start.
After the values have been converted, the program uses only the typed config. The keys under `algorithm` and `reward`
are defined in `rltrain.settings.algorithm_config` and `rltrain.settings.reward_config`. Rules that depend on files,
registries or the number of CPU cores are checked in `rltrain.run.checks`.
"""

import re
from typing import Literal

from rltrain.settings.algorithm_config import AlgorithmConfig
from rltrain.settings.key import key, section
from rltrain.settings.reward_config import RewardConfig
from rltrain.settings.typed import require

REWARD_MODEL = "reward_model"  # prefix of the role name of a reward model; the name of the reward model follows
ALL_LINEAR = "all-linear"  # value of `model.lora.targets` that stands for every linear layer except the last
# lower limit of timeouts for hung processes, which are polled once a second and report progress once per micro-batch
SHORTEST_HANG_S = 10.0


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@section
class TrainerConfig:
    """Settings for the length of the run, batch sizes, output, checkpoints, failure limits and evaluation."""

    total_steps: int = key("Number of training steps in the run.", at_least=1, changeable=True)
    total_epochs: float | None = key(
        "Length of the run as a number of passes through the training prompts, in place of total_steps. null: "
        "total_steps decides.",
        above=0,
        changeable=True,
    )
    prompts_per_step: int = key(
        "Number of prompts in one training step. Each prompt gets rollout.samples_per_prompt answers.", at_least=1
    )
    prompts_per_minibatch: int = key(
        "Number of prompts whose answers form one mini-batch, which is one optimizer step. Must divide "
        "prompts_per_step.",
        at_least=1,
    )
    epochs_per_step: int = key(
        "Number of times that one training step goes through its answers to update the model.", at_least=1
    )
    max_staleness: int = key(
        "Maximum number of weight versions by which an answer may lag behind when it is trained on. "
        "0: synchronous training.",
        at_least=0,
    )
    seed: int = key(
        "Seed of all random choices, such as the order of the prompts and the sampling of answers.",
        at_least=0,
    )
    output_dir: str = key("Folder for everything that the run writes.", changeable=True)
    resume: str = key(
        "Where the run begins. never: a new run. auto: the newest checkpoint of the run in output_dir, or a new run if "
        "there is none. A path: that checkpoint.",
        values="`never`, `auto`, or the path of a checkpoint",
        changeable=True,
    )
    save_every: int = key(
        "Number of steps between two checkpoints. 0: one checkpoint when the run ends.", at_least=0, changeable=True
    )
    checkpoint_dir: str = key("Folder for checkpoints. Any path that fsspec supports.", changeable=True)
    keep_checkpoints: int = key(
        "Number of newest checkpoints to keep. 0: keep all checkpoints.", at_least=0, changeable=True
    )
    keep_best: str | None = key(
        "Name of a metric, such as eval/sampled_accuracy. The run also keeps the checkpoint with the highest value of "
        "this metric. null: no such checkpoint.",
        changeable=True,
    )
    max_restarts: int = key(
        "Maximum number of restarts of the training ranks in one run. The ranks restart from the last checkpoint when "
        "one of them dies.",
        at_least=0,
        changeable=True,
    )
    hang_timeout_s: float = key(
        "Time without progress after which a worker counts as dead.",
        unit="seconds",
        at_least=SHORTEST_HANG_S,
        refusal="{name} must be {rule}, got {value}: a slow micro-batch would count as a hang, and use up the restarts",
        changeable=True,
    )
    max_skipped_updates: int = key(
        "Maximum number of consecutive updates that may be skipped because their loss or gradient is not finite. The "
        "run stops if there are more.",
        at_least=0,
        changeable=True,
    )
    eval_every: int = key(
        "Number of steps between two evaluations. 0: evaluate only before and after training.",
        at_least=0,
        changeable=True,
    )
    eval_samples: int = key(
        "Number of sampled answers to each prompt of an evaluation. Above 1, evaluations also measure pass@k.",
        at_least=1,
        changeable=True,
    )
    sample_every: int = key(
        "Number of steps between two sample answers in the terminal, and between two tables of samples in trackers. "
        "0: show no samples.",
        at_least=0,
        changeable=True,
    )
    trackers: list[str] = key(
        "Places that metrics are sent to, besides metrics.jsonl.",
        values="list of `tensorboard`, `wandb`, `mlflow`, `trackio`, or classes as `package.module:Class` or "
        "`file.py:Class`",
        changeable=True,
    )
    trace: bool = key(
        "Write a timeline of all processes to trace.json.gz, which https://ui.perfetto.dev opens.", changeable=True
    )
    deterministic: bool = key("Give the same answers in every run with the same seed. This costs some speed.")

    def __post_init__(self) -> None:
        require(
            self.prompts_per_step % self.prompts_per_minibatch == 0,
            f"prompts_per_step={self.prompts_per_step} is not a multiple of trainer.prompts_per_minibatch="
            f"{self.prompts_per_minibatch}: every mini-batch holds the same number of prompts; try "
            f"trainer.prompts_per_minibatch={_largest_divisor(self.prompts_per_step, self.prompts_per_minibatch)}",
        )
        require(
            not (self.deterministic and self.max_staleness),
            f"max_staleness={self.max_staleness} with deterministic=true: it depends on timing when the weights "
            "change during an answer; use max_staleness=0",
        )
        for name, value, hint in (
            ("resume", self.resume, "never, auto, or the folder of a checkpoint"),
            ("checkpoint_dir", self.checkpoint_dir, "a folder"),
            ("keep_best", self.keep_best, "a metric, or null"),
        ):
            require(value is None or bool(value.strip()), f"{name} is empty; give {hint}")


def _largest_divisor(total: int, at_most: int) -> int:
    return next(n for n in range(min(total, at_most), 0, -1) if total % n == 0)


@section
class LoRAConfig:
    """Settings of low-rank adapters (LoRA, arXiv 2106.09685).

    A layer with an adapter uses the weight W + alpha / rank * B A. The matrix W is frozen, and training changes the
    matrices A and B.
    """

    given_whole = True  # the user sets the section as one key, whose value is a mapping

    rank: int = key("Rank of the two matrices A and B of an adapter.", if_left_out="required", at_least=1)
    alpha: float = key(
        "Scale of the adapters: the product of the two matrices is multiplied by alpha / rank.",
        if_left_out="twice the rank",
        above=0,
        refusal="{name} must be {rule}, got {value:g}: adapters with a scale of 0 have no effect",
    )
    targets: list[str] = key(
        "Last parts of the names of the linear layers that get an adapter, such as q_proj. all-linear: every linear "
        "layer except the last.",
        if_left_out=f"`[{ALL_LINEAR}]`",
    )

    def __post_init__(self) -> None:
        targets, hint = self.targets, f"name layers, as in [q_proj,v_proj], or {ALL_LINEAR}"
        require(bool(targets) and all(targets), f"targets={targets}: names no layer; {hint}")
        require(len(set(targets)) == len(targets), f"targets={targets}: names one twice; {hint}")
        require(
            ALL_LINEAR not in targets or len(targets) == 1,
            f"targets={targets}: {ALL_LINEAR} already includes every other layer; {hint} alone",
        )


@section
class ModelConfig:
    """Settings of the model that is trained.

    `dtype` applies to the engine and to the trainer's matrix products. The trainer's master weights always have dtype
    float32.
    """

    path: str = key(
        "Causal language model in Hugging Face format: a directory, or a name on the hub, to which the run adds the "
        "commit. builtin: the tiny model of the built-in task in data.train.",
        values="`builtin`, the path of a directory, or `ORG/NAME` with an optional `@REVISION`",
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "Number format of the engine and of the trainer's matrix products. Master weights are always float32."
    )
    activation_checkpointing: bool = key(
        "Keep one activation per layer and recompute the others in the backward pass: less memory, more time.",
        changeable=True,
    )
    cpu_offload: bool = key(
        "Keep parameters and optimizer state in CPU memory while they are not in use. Only for GPUs.", changeable=True
    )
    compile: bool = key(
        "Compile each layer with torch.compile. The first steps become slower and the others faster. Only for GPUs.",
        changeable=True,
    )
    lora: LoRAConfig | None = key(
        "Low-rank adapters to train instead of the weights, such as {rank: 16}. null: train all weights.",
    )


@section
class OptimizerConfig:
    """Settings of AdamW and its learning-rate schedule, which advances by one at each optimizer step."""

    lr: float = key("Highest learning rate of the schedule.", above=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "Schedule of the learning rate after the warm-up. linear and cosine reach 0 after the last optimizer step."
    )
    lr_warmup_steps: int = key(
        "Number of optimizer steps over which the learning rate rises linearly to lr.", at_least=0
    )
    beta1: float = key("AdamW's decay rate of the mean of gradients.", at_least=0, below=1)
    beta2: float = key("AdamW's decay rate of the mean of squared gradients.", at_least=0, below=1)
    weight_decay: float = key("AdamW's weight decay.", at_least=0)
    max_grad_norm: float = key(
        "Maximum norm of a gradient. A gradient with a larger norm is scaled down to this norm.", above=0
    )
    max_tokens_per_microbatch: int = key(
        "Maximum number of prompt and response tokens in one forward pass. This limits memory and does not change the "
        "results.",
        at_least=1,
        changeable=True,
    )


@section
class CriticConfig(OptimizerConfig):
    """Settings of the critic's optimizer and of the clipping of its values."""

    clip_range_value: float = key(
        "Distance from the old value beyond which the value loss of a token is clipped.", above=0
    )


@section
class DataConfig:
    """Settings for the sources of the prompts, and for how prompts are made of the data.

    The module `rltrain.data.row_sources` lists the kinds of sources.
    """

    train: str = key(
        "Source of the training prompts: a built-in task, a file or folder of data, a data set of the hub, or a Python "
        "function.",
        values="`builtin:NAME`, a path (JSONL, JSON, parquet or CSV), `ORG/NAME[:CONFIGURATION][:SPLIT][@REVISION]`, "
        "or `package.module:function` or `file.py:function`",
    )
    val: str | None = key(
        "Source of the prompts for evaluation. A built-in task has its own prompts for this, which are not trained on. "
        "null: no evaluation.",
        values="as for `data.train`, or `null`",
        changeable=True,
    )
    val_size: int = key(
        "Maximum number of prompts in one evaluation.",
        at_least=1,
        changeable=True,
    )
    val_sets: dict[str, str] = key(
        "More sources of evaluation prompts, each with a name. The metrics of a set are called eval/NAME/...",
        values="mapping of names to sources as for `data.val`",
        changeable=True,
    )
    prompt: str | None = key(
        "How a prompt is made from a row. A name: the value of that column. A text with columns in braces, such as "
        "{question} Think step by step.: that text with the row's values. null: the column prompt, messages, "
        "conversations, question, problem or instruction.",
        values="name of a column, template with `{COLUMN}`, or `null`; used exactly as typed",
        text=True,
    )
    system_prompt: str | None = key(
        "Text of the system message before each prompt. Needs a chat template. null: no system message.",
        values="text, or `null`; used exactly as typed",
        text=True,
    )
    chat: Literal["auto", "always", "never"] = key(
        "Whether text goes through the chat template as a user message. auto: if the tokenizer has a chat template and "
        "the text is not that of a column called prompt. always: all text. never: no text, and chat messages are "
        "refused."
    )
    shuffle: bool = key("Put the prompts into a new random order for every pass through them.")
    overlong_prompts: Literal["refuse", "filter"] = key(
        "Treatment of prompts that are longer than rollout.max_prompt_length. refuse: the run does not start. filter: "
        "the run leaves them out."
    )
    special_tokens: Literal["text", "refuse", "allow"] = key(
        "Treatment of text in the data that spells a control token. text: encode it as plain text. refuse: refuse the "
        "row. allow: encode it as the control token."
    )
    lossy_tokenizer: Literal["refuse", "allow"] = key(
        "Treatment of a tokenizer that loses characters, or spaces between words, in the first 64 prompts. refuse: "
        "the run does not start. allow: the run accepts the loss."
    )

    def __post_init__(self) -> None:
        for name, source in self.val_sets.items():
            require(
                bool(re.fullmatch(r"(?!sampled_|greedy_)[\w.-]+", name)),
                f"val_sets: name {name!r}: names of metrics contain it, so use letters, digits, and the characters . "
                "_ -, and do not begin with sampled_ or greedy_",
            )
            require(isinstance(source, str) and bool(source), f"val_sets.{name}={source}: must be text; name a source")
        for name in ("prompt", "system_prompt"):
            text = getattr(self, name)
            require(text != "", f"{name} is empty; write some text, or null")
            require(text is None or _is_unicode(text), f"{name}={text!a} is not valid Unicode; write it in UTF-8")
        require(
            self.chat != "never" or self.system_prompt is None,
            "chat=never with data.system_prompt: a system message needs the chat template; use data.chat=auto, or "
            "write the text into data.prompt",
        )

    @property
    def evaluations(self) -> dict[str, tuple[str, str]]:
        """The (key, source) pair of each evaluation set, by the name of the set; "" is the name of the set of `val`."""
        main = {"": ("val", self.val)} if self.val is not None else {}
        return main | {name: (f"val_sets.{name}", source) for name, source in self.val_sets.items()}


@section
class VLLMConfig:
    """Settings that only vLLM uses."""

    process: Literal["auto", "inprocess", "async"] = key(
        "Form of vLLM's engine core: in the worker's process (inprocess) or in a process of its own (async). auto: "
        "inprocess on CPUs, async on GPUs and for tensor parallelism."
    )
    tensor_parallel_size: int = key("Number of shards of one engine, each on a device of its own.", at_least=1)
    kv_cache_mb: int = key("Size of an engine's KV cache. Only for CPUs.", unit="MB", at_least=1)
    gpu_memory_utilization: float = key(
        "Fraction of a GPU's memory that an engine may use for weights, activations and KV cache. Only for GPUs.",
        above=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        require(
            self.process != "inprocess" or self.tensor_parallel_size == 1,
            f"process=inprocess with tensor_parallel_size={self.tensor_parallel_size}: one process holds one shard; "
            "use rollout.vllm.process=async",
        )


@section
class RolloutConfig:
    """Settings for the generation of answers."""

    engine: str = key(
        "Source of the answers. vllm: vLLM. hf: transformers. stored: the answers of an earlier run.",
        values="`vllm`, `hf` or `stored`",
    )
    run: str | None = key(
        "Output folder of the earlier run whose stored answers are used. Only for rollout=stored. null: another engine."
    )
    samples_per_prompt: int = key("Number of answers to each prompt. These answers form a group.", at_least=1)
    temperature: float = key(
        "Temperature of the distribution from which answers are sampled. The same distribution is trained.",
        above=0,
        refusal="{name} must be {rule}, got {value}: sampling needs randomness",
    )
    top_p: float = key(
        "Sample each token only from the smallest set of most likely tokens whose probabilities sum to at least this "
        "share. The loss still uses the whole distribution. 1: all tokens.",
        above=0,
        at_most=1,
    )
    top_k: int = key(
        "Sample each token only from this number of most likely tokens. The loss still uses the whole distribution. "
        "0: all tokens.",
        at_least=0,
        refusal="{name} must be {rule}, got {value}: 0 turns it off",
    )
    stop: list[str] = key(
        "Strings that end an answer. An answer ends with the token that completes one of them in its text. All sampled "
        "tokens are trained, and reward functions get the text before the string.",
        values="list of texts, or one text",
    )
    max_prompt_length: int = key("Maximum number of tokens in a prompt.", at_least=1)
    max_response_length: int = key("Maximum number of tokens in an answer, including the end token.", at_least=1)
    max_concurrent_sequences: int = key(
        "Maximum number of answers that one engine generates at a time.", at_least=1, changeable=True
    )
    max_log_prob_gap: float = key(
        "Maximum mean distance between the engine's and the actor's log-probs in the first step. The run stops if the "
        "distance is larger.",
        unit="nats per token",
        above=0,
        changeable=True,
    )
    verify_sync: bool = key(
        "Check after each weight sync that the engines compute with the trainer's weights.", changeable=True
    )
    vllm: VLLMConfig | None = key("Settings that only vLLM uses. null: another engine.", changeable=True)

    def __post_init__(self) -> None:
        require(
            self.run is None or self.engine == "stored",
            f"run={self.run} with rollout.engine={self.engine}: only the engine `stored` reads the answers of a run; "
            "use rollout=stored, or leave rollout.run out",
        )
        for text in self.stop:
            require(
                text != "" and _is_unicode(text),
                f"stop={self.stop!a}: {text!a} is empty or not valid Unicode, so no answer could be searched for it; "
                "leave it out",
            )

    @property
    def is_restricted(self) -> bool:
        """Whether top-p or top-k restricts sampling to a part of the policy's distribution.

        If sampling is restricted, the engine's log-probs belong to the restricted distribution and differ from the
        trainer's log-probs.
        """
        return self.top_p < 1 or self.top_k > 0

    @property
    def restriction(self) -> str:
        """The settings that restrict sampling, such as `rollout.top_p=0.9`; "" if sampling is not restricted."""
        parts = [f"rollout.top_p={self.top_p:g}"] * (self.top_p < 1) + [f"rollout.top_k={self.top_k}"] * (
            self.top_k > 0
        )
        return ", ".join(parts)

    @property
    def devices(self) -> int:
        """Number of devices that one inference engine occupies."""
        return 0 if self.engine == "stored" else self.shards

    @property
    def shards(self) -> int:
        """Number of processes (or GPUs) over which one inference engine is sharded."""
        return self.vllm.tensor_parallel_size if self.engine == "vllm" and self.vllm else 1


@section
class PlacementConfig:
    """Settings for the number of processes of each kind, and for where they run."""

    launcher: Literal["ray", "inprocess"] = key(
        "Form of the workers. ray: processes that Ray starts. inprocess: objects in one process, for debugging."
    )
    address: str = key(
        "Address of the Ray cluster. local: start Ray on this machine for the run. auto: join the running cluster.",
        values="`local`, `auto` or `HOST:PORT`",
    )
    actor_ranks: int = key("Number of processes that train the actor together.", at_least=1)
    shard_ranks: int | None = key(
        "Number of ranks over which one copy of a model is sharded; further ranks hold further copies. Must divide "
        "actor_ranks. null: all ranks.",
        values="whole number >= 1, or `null`",
    )
    sequence_ranks: int = key(
        "Number of ranks that share the tokens of one pack, for long answers. Must divide actor_ranks.",
        values="whole number >= 1",
    )
    rollout_replicas: int = key("Number of engines that generate answers.", at_least=1)
    reward_workers: int = key("Number of processes that run reward functions.", at_least=1)
    reward_spares: int = key(
        "Number of extra processes that each reward worker may start while a call takes longer than a tenth of "
        "reward.timeout_s.",
        at_least=0,
    )
    share_ranks: bool = key("Run the actor, the reference and the critic of a rank in one process.")
    threads_per_worker: int | None = key(
        "Number of CPU threads of each rank and engine, or of the single process. null: divide the cores evenly.",
        at_least=1,
    )
    start_timeout_s: float = key("Time limit for a process to start and to load its model.", unit="seconds", above=0)

    def __post_init__(self) -> None:
        require(
            self.shard_ranks is None or (self.shard_ranks >= 1 and self.actor_ranks % self.shard_ranks == 0),
            f"shard_ranks={self.shard_ranks} does not divide actor_ranks={self.actor_ranks}: every copy of a model "
            "needs the same number of ranks; use a divisor, or null for one copy over all ranks",
        )
        require(
            self.sequence_ranks >= 1 and self.actor_ranks % self.sequence_ranks == 0,
            f"sequence_ranks={self.sequence_ranks} does not divide actor_ranks={self.actor_ranks}: ranks share the "
            "tokens of a pack in groups of equal size; use a divisor, or 1",
        )
        for name in ("actor_ranks", "rollout_replicas", "reward_workers"):
            require(
                self.launcher == "ray" or getattr(self, name) == 1,
                f"{name}={getattr(self, name)} with launcher=inprocess: one process holds one worker of each role; "
                "use placement=local",
            )


@section
class Config:
    """The complete config, with all references resolved."""

    profile: Literal["demo", "instruct"] = key(
        "Set of defaults for learning rate, lengths, batch sizes and evaluation. demo: for the built-in tiny model. "
        "instruct: for an instruct model; the default if model.path is given.",
        changeable=True,
    )
    trainer: TrainerConfig = key("Length of the run, batch sizes, output, checkpoints, failure limits and evaluation.")
    algorithm: AlgorithmConfig = key("What is learned from a batch: advantages, policy loss, KL terms and corrections.")
    model: ModelConfig = key("The model that is trained.")
    data: DataConfig = key("Sources of the prompts, and their treatment.")
    reward: RewardConfig = key("How answers are scored.")
    rollout: RolloutConfig = key("Generation of the answers.")
    actor: OptimizerConfig = key("Optimizer of the actor: AdamW and its learning-rate schedule.")
    critic: CriticConfig = key("Optimizer of the critic, which exists only if the advantage estimator uses values.")
    placement: PlacementConfig = key("Number of processes of each kind, and where they run.", changeable=True)
    verbose: bool = key("Show the log messages and warnings of libraries.", changeable=True)

    def __post_init__(self) -> None:
        self.require_budget("actor")
        require(
            self.placement.launcher == "ray" or self.rollout.engine != "vllm",
            "rollout=vllm with placement=inprocess: vLLM changes its process's threads and random state, which the "
            "trainer shares in this case; use rollout=hf, or placement=local",
        )
        require(
            not self.trainer.deterministic or self.rollout.engine != "vllm" or self.placement.rollout_replicas == 1,
            f"trainer.deterministic=true with {self.placement.rollout_replicas} vLLM replicas: which replica answers "
            "depends on timing; use placement.rollout_replicas=1 or rollout=hf",
        )
        self._require_whole_distribution()
        buffer, limit = self.algorithm.reward_shaping.overlong_buffer, self.rollout.max_response_length
        require(
            buffer <= limit,
            f"algorithm.reward_shaping.overlong_buffer={buffer} is above rollout.max_response_length={limit}: the "
            f"penalty grows over the last tokens before that limit; use at most {limit} (DAPO uses a fifth), or 0",
        )
        kl, sequences = self.algorithm.kl_in_reward, self.sequences_per_step
        require(
            kl.controller == "fixed" or sequences < 5 * kl.horizon,
            f"algorithm.kl_in_reward.horizon={kl.horizon} with controller=adaptive: a step has {sequences} sequences, "
            f"and 5 * horizon must be larger, or kl_coef could turn negative; use a horizon above {sequences // 5}",
        )

    def _require_whole_distribution(self) -> None:
        """Raise ConfigError if top-p or top-k is on and a setting needs the engine's log-probs.

        With top-p or top-k, the engine's log-probs are renormalized over the tokens that can be sampled, so they are
        not log-probs of the distribution that is trained.
        """
        algorithm, correction = self.algorithm, self.algorithm.correction.level
        rejection, squares = algorithm.rejection.kl_estimator, algorithm.squared_log_ratio_coef
        for name, value, used, way in (
            ("trainer.max_staleness", self.trainer.max_staleness, self.trainer.max_staleness > 0, "0"),
            ("algorithm.old_log_probs", algorithm.old_log_probs, algorithm.old_log_probs == "rollout", "actor"),
            ("algorithm.correction.level", correction, correction is not None, "null"),
            ("algorithm.rejection.kl_estimator", rejection, rejection is not None, "null"),
            ("algorithm.squared_log_ratio_coef", squares, squares > 0, "0"),
        ):
            require(
                not (used and self.rollout.is_restricted),
                f"{self.rollout.restriction} with {name}={value}: it needs the engine's log-probs under the trained "
                "distribution, and the engine's are those of the restricted one; use rollout.top_p=1 rollout.top_k=0, "
                f"or {name}={way}",
            )

    def require_budget(self, role: str) -> None:
        """Raise ConfigError if the longest possible row (prompt and answer) does not fit in a micro-batch of a role.

        Args:
            role: the role whose micro-batch size is checked, `actor` or `critic`.
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
        """Total number of optimizer steps in the run.

        The learning-rate schedules end exactly at the last optimizer step.
        """
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
        """Return the roles of the training ranks, such as `actor` and `critic`.

        Args:
            needs_critic: whether the advantage estimator reads a critic's values, so that the run needs a critic.
        """
        models = [f"{REWARD_MODEL} {model.name}" for model in self.reward.models]
        return ["actor", *["reference"] * self.algorithm.needs_reference, *["critic"] * needs_critic, *models]

    @property
    def takes_turns(self) -> bool:
        """Whether inference engines and training ranks share devices and take turns, so that the side that waits frees
        its memory.
        """
        placement = self.placement
        return placement.launcher == "ray" and placement.share_ranks and not self.trainer.max_staleness

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences in one training step, B = P * G: prompts times samples per prompt."""
        return self.trainer.prompts_per_step * self.rollout.samples_per_prompt
