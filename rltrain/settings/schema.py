"""Defines the names, types and rules of all config keys.

The fields of the config dataclasses have no default values, because the YAML files under `config/` define the defaults.
The function `rltrain.settings.typed.parse` converts the YAML values into the config dataclasses once, when the program
starts. After the YAML values have been converted, the program uses only the config dataclasses. The keys under
`algorithm` and `reward` are defined in `rltrain.settings.algorithm_config` and `rltrain.settings.reward_config`. Rules
that depend on files, registries or the number of CPU cores are checked in `rltrain.run.checks`.
"""

import re
from typing import Any, Literal

from rltrain.base.errors import ConfigError
from rltrain.settings.algorithm_config import AlgorithmConfig
from rltrain.settings.engine_description import EngineDescription, engine_description
from rltrain.settings.key import key, section
from rltrain.settings.reward_config import RewardConfig
from rltrain.settings.sampling_config import DifficultyConfig, ReuseConfig
from rltrain.settings.typed import require

WeightTransport = Literal["auto", "shared_memory", "object_store", "process_group", "nccl", "device_handles"]

REWARD_MODEL = "reward_model"  # The role name of a reward model is "reward_model", a space, and the model's name.
ALL_LINEAR = "all-linear"  # Value of `model.lora.targets` that selects every linear layer except the last.
# Smallest valid value of `trainer.hang_timeout_s`, in seconds. With a smaller value, a slow micro-batch would count as
# a hang, because workers report progress only once per micro-batch. The driver reads the workers' progress reports once
# a second.
SHORTEST_HANG_S = 10.0


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@section
class TrainerConfig:
    """Settings for the length of the run, batch sizes, output, checkpoints, failure limits and evaluation."""

    total_steps: int = key("Number of training steps in the run.", at_least=1, changeable=True)
    total_epochs: float | None = key(
        "Number of passes through the training prompts in the run. If total_epochs is a number, total_steps has no "
        "effect. null: total_steps sets the length of the run.",
        above=0,
        changeable=True,
    )
    prompts_per_step: int = key(
        "Number of prompts in one training step. Each prompt gets rollout.samples_per_prompt answers.", at_least=1
    )
    prompts_per_minibatch: int = key(
        "Number of prompts whose answers form one mini-batch. Each mini-batch is used for one optimizer step. "
        "prompts_per_minibatch must divide trainer.prompts_per_step.",
        at_least=1,
    )
    epochs_per_step: int = key(
        "Number of passes that one training step makes over its answers to update the model.", at_least=1
    )
    max_staleness: int = key(
        "Maximum staleness of an answer that is trained on. Staleness is the number of weight versions between the "
        "weights that generated the answer and the current weights. 0: synchronous training.",
        at_least=0,
    )
    reuse: ReuseConfig | None = key(
        "Settings for training again on prompt groups of earlier training steps, such as {groups: 4}. Only groups "
        "whose answers have different outcomes are reused. trainer.reuse needs trainer.max_staleness of at least 1. "
        "null: each prompt group is trained on in only one training step."
    )
    seed: int = key(
        "Seed of all random choices, such as the order of the prompts and the sampling of answers.",
        at_least=0,
    )
    output_dir: str = key("Folder for everything that the run writes.", changeable=True)
    resume: str = key(
        "Starting point of the run. never: start a new run. auto: resume from the newest checkpoint of the run in "
        "trainer.output_dir, or start a new run if no checkpoint exists. A path: resume from the checkpoint at that "
        "path.",
        values="`never`, `auto`, or the path of a checkpoint",
        changeable=True,
    )
    save_every: int = key(
        "Number of training steps between two checkpoints. 0: save only one checkpoint, at the end of the run.",
        at_least=0,
        changeable=True,
    )
    checkpoint_dir: str = key(
        "Folder for checkpoints: any path or URL that the library fsspec supports.", changeable=True
    )
    keep_checkpoints: int = key(
        "Number of checkpoints to keep; older checkpoints are deleted. 0: keep all checkpoints.",
        at_least=0,
        changeable=True,
    )
    keep_best: str | None = key(
        "Name of a metric, such as eval/sampled_accuracy. The run also keeps the checkpoint with the highest value "
        "of the keep_best metric. null: keep no best checkpoint.",
        changeable=True,
    )
    max_restarts: int = key(
        "Maximum number of restarts of the training ranks in one run. If a training rank dies, all training ranks "
        "restart from the latest checkpoint.",
        at_least=0,
        changeable=True,
    )
    hang_timeout_s: float = key(
        "Time without progress after which a worker counts as dead.",
        unit="seconds",
        at_least=SHORTEST_HANG_S,
        refusal="{name} must be {rule}, got {value}: a slow micro-batch would count as a hang and cause restarts",
        changeable=True,
    )
    max_skipped_updates: int = key(
        "Maximum number of consecutive updates that may be skipped because their loss or gradient is not finite. The "
        "run stops if more than max_skipped_updates consecutive updates are skipped.",
        at_least=0,
        changeable=True,
    )
    eval_every: int = key(
        "Number of training steps between two evaluations. 0: evaluate only before and after training.",
        at_least=0,
        changeable=True,
    )
    eval_samples: int = key(
        "Number of sampled answers to each prompt of an evaluation. With more than one answer, evaluations also "
        "measure pass@k.",
        at_least=1,
        changeable=True,
    )
    sample_every: int = key(
        "Number of training steps between two sample answers in the terminal, and between two tables of samples for "
        "trackers. 0: show no samples.",
        at_least=0,
        changeable=True,
    )
    trackers: list[str] = key(
        "Experiment trackers that receive the metrics, which are also written to metrics.jsonl.",
        values="list of `tensorboard`, `wandb`, `mlflow`, `trackio`, or classes as `package.module:Class` or "
        "`file.py:Class`",
        changeable=True,
    )
    trace: bool = key(
        "Write a timeline of all processes to trace.json.gz, which https://ui.perfetto.dev opens.", changeable=True
    )
    deterministic: bool = key(
        "Generate identical answers in every run with the same seed. Deterministic runs are slower."
    )

    def __post_init__(self) -> None:
        require(
            self.prompts_per_step % self.prompts_per_minibatch == 0,
            f"prompts_per_step={self.prompts_per_step} is not a multiple of trainer.prompts_per_minibatch="
            f"{self.prompts_per_minibatch}: every mini-batch holds the same number of prompts; try "
            f"trainer.prompts_per_minibatch={_largest_divisor(self.prompts_per_step, self.prompts_per_minibatch)}",
        )
        self._require_room_for_reuse()
        require(
            not (self.deterministic and self.steps_ahead),
            f"max_staleness={self.max_staleness} with deterministic=true: the moment at which the weights change "
            "during an answer depends on timing; use max_staleness=0"
            + (f", or trainer.reuse.steps={self.max_staleness}" if self.reuse else ""),
        )
        for name, value, hint in (
            ("resume", self.resume, "never, auto, or the folder of a checkpoint"),
            ("checkpoint_dir", self.checkpoint_dir, "a folder"),
            ("keep_best", self.keep_best, "a metric, or null"),
        ):
            require(value is None or bool(value.strip()), f"{name} is empty; give {hint}")

    def _require_room_for_reuse(self) -> None:
        """Raise ConfigError if `reuse.steps` exceeds the staleness bound, or if `reuse.groups` is so large that a
        training step has no new prompt groups.
        """
        if self.reuse is None:
            return
        groups, steps = self.reuse.groups, self.reuse.steps
        require(
            self.max_staleness > 0,
            f"reuse.groups={groups} with max_staleness=0: the answers of a group that is trained on again are at "
            "least one weight version old; use trainer.max_staleness=1 or more, or trainer.reuse=null",
        )
        require(
            steps <= self.max_staleness,
            f"reuse.steps={steps} with max_staleness={self.max_staleness}: the answers of a reused group could be "
            f"staler than max_staleness allows; use at most trainer.reuse.steps={self.max_staleness}",
        )
        require(
            groups < self.prompts_per_step,
            f"reuse.groups={groups} with prompts_per_step={self.prompts_per_step}: a training step also needs new "
            f"prompt groups; use at most trainer.reuse.groups={self.prompts_per_step - 1}",
        )

    @property
    def reused_groups(self) -> int:
        """Maximum number of prompt groups from earlier training steps that one training step reuses.

        `reused_groups` is 0 if `reuse` is None.
        """
        return self.reuse.groups if self.reuse else 0

    @property
    def steps_ahead(self) -> int:
        """Number of training steps by which the engines may run ahead of training.

        With `reuse`, the engines may run only `max_staleness - reuse.steps` steps ahead, because a prompt group can
        become `reuse.steps` weight versions older between its first and its last use.
        """
        return self.max_staleness - (self.reuse.steps if self.reuse else 0)


def _largest_divisor(total: int, at_most: int) -> int:
    return next(n for n in range(min(total, at_most), 0, -1) if total % n == 0)


@section
class LoRAConfig:
    """Settings of low-rank adapters (LoRA, arXiv 2106.09685).

    A layer with an adapter uses the weight W + (alpha / rank) * B @ A, where the matrix W is frozen, and the matrices A
    and B are trained.
    """

    given_whole = True  # The function `keys` counts `model.lora` as one key, whose value is a mapping or null.

    rank: int = key("Rank of an adapter's matrices A and B.", if_left_out="required", at_least=1)
    alpha: float = key(
        "Scale of the adapters: the matrix product B @ A is multiplied by alpha / rank.",
        if_left_out="twice the rank",
        above=0,
        refusal="{name} must be {rule}, got {value:g}: adapters with a scale of 0 have no effect",
    )
    targets: list[str] = key(
        "Linear layers that get an adapter, given by the last part of the layer name, such as q_proj. all-linear: "
        "every linear layer except the last.",
        if_left_out=f"`[{ALL_LINEAR}]`",
    )

    def __post_init__(self) -> None:
        targets, hint = self.targets, f"name layers, as in [q_proj,v_proj], or {ALL_LINEAR}"
        require(bool(targets) and all(targets), f"targets={targets}: the list names no layer; {hint}")
        require(len(set(targets)) == len(targets), f"targets={targets}: the list names a layer twice; {hint}")
        require(
            ALL_LINEAR not in targets or len(targets) == 1,
            f"targets={targets}: {ALL_LINEAR} already includes every other layer, so it must be the only entry; {hint}",
        )


@section
class ModelConfig:
    """Settings of the model that is trained.

    `dtype` is the number format of the engine and of the trainer's matrix products. The trainer's master weights always
    have dtype float32.
    """

    path: str = key(
        "Causal language model in Hugging Face format: a directory, or a name on the Hugging Face hub. The run "
        "records the commit of a hub model. builtin: the tiny model of the built-in task in data.train. "
        "builtin-vision: the tiny model of the built-in task with pictures.",
        values="`builtin`, `builtin-vision`, the path of a directory, or `ORG/NAME` with an optional `@REVISION`",
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "Number format of the engine and of the trainer's matrix products. Master weights are always float32."
    )
    activation_checkpointing: bool = key(
        "Keep only one activation per layer, and recompute the other activations in the backward pass. Recomputing "
        "activations saves memory and costs time.",
        changeable=True,
    )
    cpu_offload: bool = key(
        "Keep parameters and optimizer state in CPU memory while they are not in use. Only for training on GPUs: on "
        "CPUs, cpu_offload=true is refused.",
        changeable=True,
    )
    compile: bool = key(
        "Compile each layer with torch.compile. Compilation makes the first training steps slower, and all later "
        "training steps faster. Only for training on GPUs: on CPUs, compile=true is refused.",
        changeable=True,
    )
    lora: LoRAConfig | None = key(
        "Settings of low-rank adapters, such as {rank: 16}. With adapters, only the adapters are trained. null: train "
        "all weights.",
    )


@section
class OptimizerConfig:
    """Settings of the optimizer AdamW and of the learning-rate schedule, which advances at each optimizer step."""

    lr: float = key("Highest learning rate of the schedule.", above=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "Schedule of the learning rate after the warm-up. The schedules linear and cosine reach 0 after the last "
        "optimizer step."
    )
    lr_warmup_steps: int = key(
        "Number of optimizer steps over which the learning rate rises linearly to lr.", at_least=0
    )
    beta1: float = key("AdamW's decay rate for the moving average of gradients.", at_least=0, below=1)
    beta2: float = key("AdamW's decay rate for the moving average of squared gradients.", at_least=0, below=1)
    weight_decay: float = key("Coefficient of AdamW's decoupled weight decay.", at_least=0)
    max_grad_norm: float = key(
        "Maximum norm of a gradient. A gradient with a norm above max_grad_norm is scaled down to max_grad_norm.",
        above=0,
    )
    max_tokens_per_microbatch: int = key(
        "Maximum number of prompt and response tokens in one forward pass. max_tokens_per_microbatch limits memory "
        "use and does not change results. If actor.share_prefixes is true, tokens that rows share count once, and the "
        "attention of a micro-batch may read at most 2 * max_tokens_per_microbatch keys.",
        at_least=1,
        changeable=True,
    )
    offload_optimizer: bool = key(
        "Keep AdamW's moments in CPU memory between the updates, so that an engine on the same GPU has more room for "
        "its KV cache.",
        changeable=True,
    )


@section
class ActorConfig(OptimizerConfig):
    """Settings of the actor: its optimizer, `router_replay`, and `share_prefixes`, which applies to all roles."""

    share_prefixes: bool = key(
        "Compute tokens with which several rows of a micro-batch begin, such as the prompt of a group or the earlier "
        "turns of a conversation, only once. share_prefixes applies to every model on the training ranks, and changes "
        "results only by rounding.",
        changeable=True,
    )
    router_replay: Literal["engine", "actor"] | None = key(
        "Source of the experts with which a mixture-of-experts model computes each token in the actor's update. "
        "engine: the update uses the experts that the engine chose when it sampled the token (R3, arXiv:2510.11370), "
        "which needs answers of one turn, and GPUs with rollout=vllm. actor: the update uses the experts that the "
        "actor chose before the first update of the step (R2, arXiv:2512.01374). null: the actor chooses experts in "
        "the update itself.",
        values="`engine`, `actor` or `null`",
    )
    load_balance_coef: float = key(
        "Coefficient of the load-balancing loss of a mixture of experts, which keeps routers from choosing a few "
        "experts for all tokens. The loss is computed for each sequence (arXiv:2412.19437, eq. 17 to 20). 0: no such "
        "loss.",
        at_least=0,
    )


@section
class CriticConfig(OptimizerConfig):
    """Settings of the critic: optimizer, clipping of the value loss, and warm-up."""

    clip_range_value: float = key(
        "Clip range of the value loss. In the loss, the critic's new value of a token is clipped to within "
        "clip_range_value of the token's value before the update.",
        above=0,
    )
    warmup_steps: int = key(
        "Number of training steps at the start of the run in which only the critic is trained, on Monte-Carlo "
        "returns, while the actor stays unchanged (value pretraining, VC-PPO, arXiv:2503.01491). The warm-up steps "
        "are part of trainer.total_steps. auto: for the estimators decoupled_gae and length_adaptive_gae, 5 or half "
        "of trainer.total_steps, whichever is smaller; for other estimators, 0.",
        values="whole number >= 0, or `auto`",
    )

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, f"warmup_steps must be >= 0, got {self.warmup_steps}")


@section
class DataConfig:
    """Settings for the sources of prompts, and for the conversion of data rows into prompts.

    The module `rltrain.data.row_sources` lists the kinds of data sources.
    """

    train: str = key(
        "Source of the training prompts: a built-in task, a file or folder of data, a data set of the Hugging Face "
        "hub, or a Python function.",
        values="`builtin:NAME`, a path (JSONL, JSON, parquet or CSV), `ORG/NAME[:CONFIGURATION][:SPLIT][@REVISION]`, "
        "or `package.module:function` or `file.py:function`",
    )
    val: str | None = key(
        "Source of the prompts for evaluation. The built-in tasks have separate evaluation prompts, which are not "
        "trained on. null: evaluations use only the sources in data.val_sets.",
        values="the same forms as `data.train`, or `null`",
        changeable=True,
    )
    val_size: int = key(
        "Maximum number of prompts in one evaluation.",
        at_least=1,
        changeable=True,
    )
    val_sets: dict[str, str] = key(
        "Additional named sources of evaluation prompts. The metrics of the source called NAME begin with eval/NAME/.",
        values="mapping from names to sources in the same forms as `data.val`",
        changeable=True,
    )
    prompt: str | None = key(
        "How a row of data becomes a prompt. Name of a column: the column's value is the prompt. Template with "
        "columns in braces, such as `{question} Think step by step.`: the row's values are inserted into the "
        "template. null: use the column prompt, messages, conversations, question, problem or instruction.",
        values="name of a column, template with `{COLUMN}`, or `null`; used exactly as typed",
        text=True,
    )
    system_prompt: str | None = key(
        "Text of the system message before each prompt. A system message needs a chat template. null: no system "
        "message.",
        values="text, or `null`; used exactly as typed",
        text=True,
    )
    images: str | None = key(
        "Column with the images of a row's prompt, for models that take images. null: the column images or image, if "
        "the data has one, and the images in chat messages.",
        values="name of a column, or `null`; used exactly as typed",
        text=True,
    )
    chat: Literal["auto", "always", "never"] = key(
        "Whether a text prompt is put into the chat template as a user message. auto: yes, if the tokenizer has a "
        "chat template and the text is not from a column called prompt. always: yes. never: no, and chat messages are "
        "refused."
    )
    sft_response: str | None = key(
        "Supervised answers in the training data, for the supervised loss (algorithm.sft_coef). Name of a column "
        "with answers, or template with columns in braces, such as `{solution} #### {answer}`. A row without a value "
        "in one of the columns has no supervised answer. null: no supervised answers.",
        values="name of a column, template with `{COLUMN}`, or `null`; used exactly as typed",
        text=True,
    )
    shuffle: bool = key("Put the training prompts into a new random order for every pass through the data.")
    difficulty: DifficultyConfig | None = key(
        "Sample the training prompts from pools by difficulty: unseen, easy, normal and hard prompts. {} selects the "
        "default values of all keys. null: every pass through the data uses each prompt once."
    )
    overlong_prompts: Literal["refuse", "filter"] = key(
        "Treatment of prompts that are longer than rollout.max_prompt_length, and of supervised answers that are "
        "longer than rollout.max_response_length. refuse: the run does not start. filter: the run leaves out prompts "
        "and supervised answers that are too long."
    )
    special_tokens: Literal["text", "refuse", "allow"] = key(
        "Treatment of data that contains the name of a control token as text. text: encode the name as plain text. "
        "refuse: refuse the row. allow: encode the name as the control token."
    )
    lossy_tokenizer: Literal["refuse", "allow"] = key(
        "Treatment of a tokenizer whose encoding of the first 64 prompts loses characters, or spaces between words. "
        "refuse: the run does not start. allow: the run accepts the loss of characters."
    )

    def __post_init__(self) -> None:
        require(
            self.shuffle or self.difficulty is None,
            "shuffle=false with data.difficulty: prompts are sampled from pools, so their order in the data cannot be "
            "kept; use data.shuffle=true, or data.difficulty=null",
        )
        for name, source in self.val_sets.items():
            require(
                bool(re.fullmatch(r"(?!sampled_|greedy_)[\w.-]+", name)),
                f"val_sets: name {name!r}: the name is part of metric names, so use letters, digits, and the "
                "characters . _ -, and do not begin with sampled_ or greedy_",
            )
            require(
                isinstance(source, str) and bool(source),
                f"val_sets.{name}={source}: a source must be text that is not empty; name a source of prompts",
            )
        for name in ("prompt", "system_prompt", "sft_response"):
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
        """A mapping from the name of each evaluation set to its config key and data source. The evaluation set that the
        key `data.val` defines has the name "".
        """
        main = {"": ("val", self.val)} if self.val is not None else {}
        return main | {name: (f"val_sets.{name}", source) for name, source in self.val_sets.items()}


# Engine arguments of vLLM that a user must not set, because rltrain sets them. `ENGINE_ARGUMENTS` maps each
# forbidden engine argument to the end of an error message, which says what the user must set instead.
ENGINE_ARGUMENTS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "a model whose code is part of transformers",
    "load_format": "a model in the format of transformers",
    "seed": "trainer.seed",
    "max_model_len": "rollout.max_prompt_length and rollout.max_response_length",
    "max_num_seqs": "rollout.max_concurrent_sequences",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_mb",
    "logprobs_mode": "rltrain's setting, because training compares the engine's log-probs with the actor's",
    "generation_config": "rollout.temperature, rollout.top_p and rollout.top_k",
    "skip_tokenizer_init": "rltrain's own tokenizer, because the engine gets and returns only token ids",
    "weight_transfer_config": "rltrain's weight sync, which sends the trained weights to the engines",
    "worker_extension_cls": "rltrain's weight sync, which sends the trained weights to the engines",
    "distributed_executor_backend": "rollout.vllm.process",
    "quantization": "rollout.vllm.quantization",
    "quantization_config": "rollout.vllm.quantization",
    "enable_sleep_mode": "placement.share_ranks",
    "enable_lora": "model.lora and rollout.vllm.adapters",
    "max_loras": "model.lora and rollout.vllm.adapters",
    "max_lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.targets",
    "lora_dtype": "model.dtype",
    "fully_sharded_loras": "rltrain's checks of adapters, which need unsharded matrices",
}


@section
class VLLMConfig:
    """Settings that only the inference engine vLLM uses."""

    process: Literal["auto", "inprocess", "async"] = key(
        "Process in which vLLM's engine core runs. inprocess: the worker's process. async: a separate process. auto: "
        "inprocess on CPUs; async on GPUs and for tensor parallelism."
    )
    tensor_parallel_size: int = key(
        "Number of shards into which the model of one engine is split. Each shard of the model runs on a separate "
        "device.",
        at_least=1,
    )
    kv_cache_mb: int = key(
        "Size of one engine's KV cache on CPUs. On GPUs, kv_cache_mb has no effect.", unit="MB", at_least=1
    )
    gpu_memory_utilization: float = key(
        "Fraction of a GPU's memory that an engine may use for weights, activations and KV cache. On CPUs, "
        "gpu_memory_utilization has no effect.",
        above=0,
        at_most=1,
    )
    adapters: Literal["merged", "separate"] = key(
        "How the engine applies the adapters of model.lora. merged: each weight sync reads the base weights from the "
        "model's files and merges the adapters into them. separate: vLLM applies the adapters beside the base weights, "
        "so that a weight sync replaces only the adapters."
    )
    quantization: (
        Literal["fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only"] | None
    ) = key(
        "Format to which vLLM quantizes the weights of its linear layers and experts at each weight sync. Training "
        "keeps the unquantized weights. int8_per_channel_weight_only quantizes only experts. With quantized weights, "
        "most runs need a higher rollout.max_log_prob_gap. fp8_per_block has been run on CPUs. The other formats have "
        "not been run, and no format has been run on a GPU. null: vLLM does not quantize the weights."
    )
    arguments: dict[str, Any] = key(
        "Further engine arguments of vLLM, such as max_num_batched_tokens. An fp8 KV cache (kv_cache_dtype) has not "
        "been run with rltrain.",
        values="mapping from vLLM's names of engine arguments to values",
    )

    def __post_init__(self) -> None:
        for name in self.arguments:
            require(
                name not in ENGINE_ARGUMENTS,
                f"arguments.{name}: rltrain sets this engine argument itself; use {ENGINE_ARGUMENTS.get(name, '')}",
            )
        require(
            self.process != "inprocess" or self.tensor_parallel_size == 1,
            f"process=inprocess with tensor_parallel_size={self.tensor_parallel_size}: one process can hold only one "
            "shard; use rollout.vllm.process=async",
        )


@section
class ToolConfig:
    """A tool that the model can call: a Python function, or all tools of an MCP server."""

    path: str | None = key(
        "Python function, given by its module or file and its name.",
        values="`package.module:function` or `file.py:function`",
        if_left_out="`null`",
    )
    mcp: str | None = key(
        "MCP server (Model Context Protocol): its URL, or the command that starts it. The model can call all tools "
        "of the MCP server.",
        if_left_out="`null`",
    )

    def __post_init__(self) -> None:
        require(
            (self.path is None) != (self.mcp is None),
            f"path={self.path}, mcp={self.mcp}: a tool is either a function or an MCP server; set one of the two",
        )
        require(self.mcp != "", "mcp='': must be a URL or a command")

    @property
    def name(self) -> str:
        """Name of the function, or address of the MCP server."""
        return self.path.rpartition(":")[2] if self.path is not None else str(self.mcp)


@section
class RolloutConfig:
    """Settings for the generation of answers."""

    engine: str = key(
        "Inference engine that generates the answers. vllm: the library vLLM. hf: the library transformers. sglang: "
        "the library SGLang, with which no run has been made yet. stored: no generation, but the stored answers of an "
        "earlier run. Any other engine is named by the Python package that contains it, such as my_package.my_engine.",
        values="`vllm`, `hf`, `sglang`, `stored`, or the dotted name of a Python package",
    )
    run: str | None = key(
        "Output folder of the earlier run whose stored answers are used with rollout=stored. null: the run uses "
        "another engine."
    )
    samples_per_prompt: int = key(
        "Number of answers to each prompt. All answers to one prompt form a prompt group.", at_least=1
    )
    temperature: float = key(
        "Temperature of the distribution from which answers are sampled. Training uses the log-probs at the sampling "
        "temperature.",
        above=0,
        refusal="{name} must be {rule}, got {value}: sampling needs randomness",
    )
    top_p: float = key(
        "Sample each token only from the smallest set of most likely tokens whose probabilities sum to at least "
        "top_p. The loss uses the policy's whole distribution, whatever top_p is. 1: tokens are sampled from the whole "
        "vocabulary.",
        above=0,
        at_most=1,
    )
    top_k: int = key(
        "Sample each token only from the top_k most likely tokens. The loss uses the policy's whole distribution, "
        "whatever top_k is. 0: tokens are sampled from the whole vocabulary.",
        at_least=0,
        refusal="{name} must be {rule}, got {value}: 0 turns top-k sampling off",
    )
    stop: list[str] = key(
        "Stop strings. An answer ends with the token that completes a stop string in the answer's text. All sampled "
        "tokens are trained on, and reward functions get the text before the stop string.",
        values="list of texts, or one text",
    )
    environment: str | None = key(
        "Environment class for conversations of several turns with the model, given by its module or file and its "
        "name, as in my_env.py:HigherLower. null: no environment.",
    )
    tools: list[ToolConfig] = key(
        "Tools that the model can call, each given as a mapping or only by the path of a function, as in "
        "my_tools.py:lookup. []: no tools.",
        values="list of tools, or one path",
    )
    agent: str | None = key(
        "Program that talks with the model through an OpenAI-compatible HTTP API: the path of a function, as in "
        "my_agent.py:run, or a command. The run starts the agent program once for each conversation. null: no agent "
        "program.",
    )
    tool_format: str = key(
        "Format in which the model writes tool calls. auto: the format of the model's chat template. A path: the "
        "function at this path finds the tool calls in a text.",
        values="`auto`, `hermes`, `llama3`, `mistral`, `deepseek`, `json` or a path",
    )
    max_turns: int = key("Maximum number of the model's answers in one conversation with an environment.", at_least=1)
    max_turn_length: int | None = key(
        "Maximum number of tokens in one answer of a conversation. null: only rollout.max_response_length applies, "
        "which limits all tokens after the prompt together.",
        at_least=1,
    )
    max_message_length: int = key(
        "Maximum number of tokens in the text of one message from an environment or a tool. A text with more "
        "than max_message_length tokens is cut off.",
        at_least=1,
    )
    call_timeout_s: float = key(
        "Maximum wall-clock time of one call of a tool or of an environment's method.", unit="seconds", above=0
    )
    trajectory_timeout_s: float = key(
        "Wall-clock time after which a conversation with an environment gets no further turn and no further tool call.",
        unit="seconds",
        above=0,
    )
    environment_memory_mb: int = key(
        "Maximum memory that all conversations of an environment process may allocate together.",
        unit="MB",
        at_least=1,
        changeable=True,
    )
    max_prompt_length: int = key("Maximum number of tokens in a prompt.", at_least=1)
    max_response_length: int = key("Maximum number of tokens in an answer, including the end token.", at_least=1)
    max_concurrent_sequences: int = key(
        "Maximum number of answers that one engine generates at a time.", at_least=1, changeable=True
    )
    max_log_prob_gap: float = key(
        "Maximum mean absolute difference between the engine's and the actor's log-probs in the first training step. "
        "The run stops if the log-probs of engine and actor differ by more than max_log_prob_gap on average.",
        unit="nats per token",
        above=0,
        changeable=True,
    )
    verify_sync: bool = key("Check after each weight sync that the engines use the trainer's weights.", changeable=True)
    weight_transport: WeightTransport = key(
        "How weights travel from the training ranks to the engines. shared_memory: a shared file, for ranks and "
        "engines on one machine. process_group: direct connections between the processes (gloo), through which each "
        "machine receives the weights once. object_store: arguments and results of Ray calls. nccl: from GPU to GPU, "
        "for ranks and engines with separate GPUs. device_handles: engines map the GPU memory of the ranks with which "
        "they share a GPU. nccl and device_handles have not been run on a GPU yet. auto: shared_memory if all "
        "processes are on one machine and its /dev/shm has room for two buckets of weights; object_store with "
        "placement=inprocess; otherwise process_group.",
        changeable=True,
    )
    keep_kv_cache: bool = key(
        "Keep the KV cache of unfinished answers when the weights change. With a kept KV cache, tokens that are "
        "sampled with the new weights attend to keys and values of the old weights. keep_kv_cache=true needs "
        "trainer.max_staleness of at least 1 and importance weights (algorithm.correction.level). false: the engine "
        "recomputes the KV cache with the new weights."
    )
    vllm: VLLMConfig | None = key(
        "Settings that only the engine vLLM uses. null: the run uses another engine.", changeable=True
    )
    engine_options: dict[str, Any] = key(
        "Options of the engine, except those of vLLM, which are in rollout.vllm. The engine's description lists the "
        "names of its options.",
        values="mapping from names to values",
        changeable=True,
    )

    def __post_init__(self) -> None:
        try:
            options = self.description.options
        except LookupError as error:
            raise ConfigError(
                f"engine={self.engine}: unknown engine: {error}; use rollout=vllm or rollout=hf, rollout=stored for "
                "the answers of an earlier run, or the dotted name of a Python package that describes an engine"
            ) from None
        for name in self.engine_options:
            require(
                name in options,
                f"engine_options.{name}: the engine {self.description.title} has no such option; "
                f"{self.description.listed_options}",
            )
        require(
            self.run is None or not self.description.generates,
            f"run={self.run} with rollout.engine={self.engine}: only the engine `stored` reads the answers of an "
            "earlier run; use rollout=stored, or leave rollout.run out",
        )
        for text in self.stop:
            require(
                text != "" and _is_unicode(text),
                f"stop={self.stop!a}: {text!a} is empty or not valid Unicode, so it cannot be found in an answer; "
                "leave it out",
            )
        require(
            self.agent is None or (self.environment is None and not self.tools),
            f"agent={self.agent} with rollout.environment or rollout.tools: an agent program brings its own tools; "
            "set only one of them",
        )
        require(self.agent != "", "agent='': must be the path of a function or a command")
        require(
            not self.has_environment or self.description.generates,
            f"an environment, tools or an agent with rollout.engine={self.engine}: stored answers cannot reply to the "
            "messages of a new conversation; use rollout=vllm or rollout=hf",
        )
        require(
            not self.has_environment or not self.stop,
            f"stop={self.stop!r} with an environment, tools or an agent: conversations do not support stop strings; "
            "leave out rollout.stop, and limit the length of answers with rollout.max_turn_length",
        )

    @property
    def has_environment(self) -> bool:
        """Whether the model talks with an environment or a program, or calls tools.

        With an environment, a program or tools, a trajectory can have several turns.
        """
        return self.environment is not None or self.agent is not None or bool(self.tools)

    @property
    def quantization(self) -> str | None:
        """Format to which the engine quantizes its weights, such as "fp8_per_block"; None if it does not."""
        return None if self.vllm is None or self.engine != "vllm" else self.vllm.quantization

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
    def description(self) -> EngineDescription:
        """What rltrain knows about the engine. Raises LookupError if there is no such engine."""
        return engine_description(self.engine)

    @property
    def devices(self) -> int:
        """Number of devices that one inference engine occupies."""
        return self.shards if self.description.generates else 0

    @property
    def shards(self) -> int:
        """Number of processes (or GPUs) over which one inference engine is sharded."""
        return self.description.shards(self)


@section
class PlacementConfig:
    """Settings for the number of processes of each role, and for where the processes run."""

    launcher: Literal["ray", "inprocess"] = key(
        "Way in which workers are run. ray: Ray starts a process for each worker. inprocess: all workers are objects "
        "in one process, for debugging."
    )
    address: str = key(
        "Address of the Ray cluster. local: start a Ray cluster for the run on the machine that runs the driver. "
        "auto: join the running Ray cluster.",
        values="`local`, `auto` or `HOST:PORT`",
    )
    actor_ranks: int = key("Number of processes that train the actor together.", at_least=1)
    shard_ranks: int | None = key(
        "Number of ranks over which one copy of a model is sharded. If placement.actor_ranks is larger than "
        "shard_ranks, each group of shard_ranks ranks holds one copy. shard_ranks must divide placement.actor_ranks. "
        "null: one copy is sharded over all ranks.",
        values="whole number >= 1, or `null`",
    )
    sequence_ranks: int = key(
        "Number of ranks that share the tokens of one packed sequence, for long answers. sequence_ranks must divide "
        "placement.actor_ranks.",
        values="whole number >= 1",
    )
    context_ranks: int = key(
        "Number of chunks into which a packed sequence is split. Each chunk has sequence_ranks ranks of its own, and "
        "attention gathers the keys and values of all chunks. context_ranks may exceed the number of attention heads. "
        "sequence_ranks * context_ranks must divide placement.actor_ranks.",
        values="whole number >= 1",
    )
    tensor_ranks: int = key(
        "Number of ranks that divide the linear layers of attention and feed-forward parts (tensor parallelism), but "
        "not experts, embeddings and the output head. These ranks process the same rows. sequence_ranks * "
        "context_ranks * tensor_ranks must divide placement.actor_ranks.",
        values="whole number >= 1",
    )
    expert_ranks: int = key(
        "Number of ranks that divide the experts of each layer of a mixture of experts (expert parallelism). "
        "expert_ranks * tensor_ranks must divide placement.shard_ranks, or placement.actor_ranks if shard_ranks is "
        "null.",
        values="whole number >= 1",
    )
    rollout_replicas: int = key(
        "Number of engines that generate answers. The short form MIN-MAX, as in 2-4, also sets max_rollout_replicas.",
        at_least=1,
    )
    max_rollout_replicas: int | None = key(
        "Maximum number of engines. Additional engines above rollout_replicas start when the cluster has free "
        "resources, for example after a machine has joined. The run does not need more than rollout_replicas engines. "
        "null: the maximum is rollout_replicas.",
        values="whole number >= rollout_replicas, or `null`",
    )
    reward_workers: int = key("Number of processes that run reward functions.", at_least=1)
    environment_workers: int = key("Number of processes that run environments and tools.", at_least=1)
    reward_spares: int = key(
        "Maximum number of extra processes of each reward worker. A reward worker starts an extra process when a call "
        "has run for a tenth of reward.timeout_s, so that other calls need not wait for the slow call.",
        at_least=0,
    )
    share_ranks: bool = key("Run the actor, the reference and the critic of a rank in one process.")
    threads_per_worker: int | None = key(
        "Number of CPU threads of each training rank and engine. In a run with a single process, threads_per_worker "
        "applies to the whole process. null: divide the CPU cores evenly.",
        at_least=1,
    )
    start_timeout_s: float = key(
        "Time limit within which a worker process must start and load its model.", unit="seconds", above=0
    )
    env_vars: dict[str, str] = key(
        "Environment variables of all worker processes, such as NCCL_DEBUG.",
        values="mapping from names of environment variables to their values",
    )
    nodes: int | None = key(
        "Number of machines of a planned cluster for which --plan computes the memory plan. nodes has no effect on "
        "training. null: --plan uses the available machines.",
        at_least=1,
    )
    gpus_per_node: int | None = key(
        "Number of GPUs of each machine that placement.nodes describes. null: the machines have no GPUs.",
        at_least=0,
    )
    gpu_memory_gb: float | None = key(
        "Memory of each GPU of the machines that placement.nodes describes. null: the machines have no GPUs.",
        unit="GB",
        above=0,
    )
    node_memory_gb: float | None = key(
        "Memory of each machine that placement.nodes describes. null: unknown, so that the memory plan does not check "
        "whether the run fits in the machine's memory.",
        unit="GB",
        above=0,
    )

    @property
    def token_ranks(self) -> int:
        """Number of ranks that split the tokens of one packed sequence."""
        return self.sequence_ranks * self.context_ranks

    @property
    def ranks_per_pack(self) -> int:
        """Number of ranks that receive the same rows, and together compute each packed sequence of these rows."""
        return self.token_ranks * self.tensor_ranks

    @property
    def on_cluster(self) -> bool:
        """Whether the run joins a running Ray cluster."""
        return self.launcher == "ray" and self.address != "local"

    def __post_init__(self) -> None:
        require(
            self.shard_ranks is None or (self.shard_ranks >= 1 and self.actor_ranks % self.shard_ranks == 0),
            f"shard_ranks={self.shard_ranks} is no positive divisor of actor_ranks={self.actor_ranks}: every copy of "
            "a model needs the same number of ranks; use a divisor, or null for one copy over all ranks",
        )
        self._require_divided_ranks()
        self._require_replicas()
        self._require_whole_nodes()
        for name, value in self.env_vars.items():
            require(
                isinstance(name, str) and bool(name) and not set("=\0") & set(name),
                f"env_vars: {name!r} is not the name of an environment variable; write NAME: VALUE",
            )
            require(
                isinstance(value, str) and "\0" not in value,
                f"env_vars.{name}={value!r}: the value must be text; write {name}: '{value}'",
            )
        for name in ("actor_ranks", "rollout_replicas", "reward_workers"):
            require(
                self.launcher == "ray" or getattr(self, name) == 1,
                f"{name}={getattr(self, name)} with launcher=inprocess: one process can hold only one worker "
                "of each role; use placement=local",
            )

    def _require_divided_ranks(self) -> None:
        """Raise ConfigError if the numbers of ranks for the kinds of parallelism do not fit `actor_ranks`."""
        together = ("sequence_ranks", "context_ranks", "tensor_ranks")
        for name in (*together, "expert_ranks"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} is below 1; use 1 or more")
        product = " * ".join(f"{name}={getattr(self, name)}" for name in together if getattr(self, name) > 1)
        require(
            self.actor_ranks % self.ranks_per_pack == 0,
            f"{product or 'ranks_per_pack=1'}: {self.ranks_per_pack} ranks process each packed sequence together, "
            f"which is no divisor of actor_ranks={self.actor_ranks}; lower one of these keys, or raise actor_ranks",
        )
        copy, divided = self.shard_ranks or self.actor_ranks, self.expert_ranks * self.tensor_ranks
        require(
            copy % divided == 0,
            f"expert_ranks={self.expert_ranks} * tensor_ranks={self.tensor_ranks} = {divided} is no divisor of "
            f"the {copy} ranks that hold one copy of a model; lower one of these keys, or raise "
            f"{'actor_ranks' if self.shard_ranks is None else 'shard_ranks'}",
        )

    def _require_replicas(self) -> None:
        """Raise ConfigError if the maximum number of engines does not fit the other keys."""
        most, replicas = self.max_rollout_replicas, self.rollout_replicas
        require(
            most is None or most >= replicas,
            f"max_rollout_replicas={most} is below rollout_replicas={replicas}; use at least {replicas}, or null",
        )
        require(
            self.most_replicas == replicas or self.on_cluster,
            f"max_rollout_replicas={most} with a run on this machine: additional engines can start only on a running "
            "Ray cluster; use placement=disaggregated, or leave the key out",
        )

    @property
    def most_replicas(self) -> int:
        """Maximum number of engines that the run has at a time."""
        return self.max_rollout_replicas or self.rollout_replicas

    def _require_whole_nodes(self) -> None:
        """Raise ConfigError if the keys that describe a cluster for `--plan` contradict each other."""
        for name in ("gpus_per_node", "gpu_memory_gb", "node_memory_gb"):
            value = getattr(self, name)
            require(
                value is None or self.nodes is not None,
                f"{name}={value} without placement.nodes: the key describes the machines of a planned cluster; set "
                "placement.nodes too, or leave the key out",
            )
        require(
            self.nodes is None or self.on_cluster,
            f"nodes={self.nodes} with a run on this machine: the key describes a cluster for --plan; use "
            "placement=colocated or placement=disaggregated, or leave the key out",
        )
        gpus, memory = self.gpus_per_node or 0, self.gpu_memory_gb
        require(
            (gpus > 0) == (memory is not None),
            f"gpus_per_node={gpus} with gpu_memory_gb={'null' if memory is None else memory}: GPUs and their memory "
            "belong together; set both, as in placement.gpus_per_node=8 placement.gpu_memory_gb=80",
        )


@section
class Config:
    """The complete config of a run, with all references such as `${data.train}` resolved."""

    profile: Literal["demo", "conversation", "instruct"] = key(
        "Profile of default values for learning rate, lengths, batch sizes and evaluation. demo: defaults for the "
        "built-in tiny model. conversation: defaults for the built-in tiny model with data=lookup or "
        "data=higher_lower. instruct: defaults for an instruct model. A run that sets model.path uses the profile "
        "instruct unless another profile is chosen.",
        changeable=True,
    )
    trainer: TrainerConfig = key("Length of the run, batch sizes, output, checkpoints, failure limits and evaluation.")
    algorithm: AlgorithmConfig = key("Learning from a batch: advantages, policy loss, KL terms and corrections.")
    model: ModelConfig = key("The model that is trained.")
    data: DataConfig = key("Sources of the prompts, and how rows of data become prompts.")
    reward: RewardConfig = key("How answers are scored.")
    rollout: RolloutConfig = key("Generation of the answers.")
    actor: ActorConfig = key(
        "Optimizer of the actor (AdamW and its learning-rate schedule). share_prefixes applies to all roles."
    )
    critic: CriticConfig = key(
        "Optimizer of the critic, which exists only if the advantage estimator uses the critic's values."
    )
    placement: PlacementConfig = key("Number of processes of each role, and where the processes run.", changeable=True)
    verbose: bool = key("Show the log messages and warnings of libraries.", changeable=True)

    def __post_init__(self) -> None:
        self.require_budget("actor")
        engine = self.rollout.description
        require(
            self.placement.launcher == "ray" or not engine.own_process,
            f"rollout.engine={self.rollout.engine} with placement=inprocess: {engine.own_process}; use rollout=hf, or "
            "placement=local",
        )
        require(
            not self.trainer.deterministic or engine.repeats or self.placement.most_replicas == 1,
            f"trainer.deterministic=true with {self.placement.most_replicas} {engine.title} replicas: which replica "
            "answers a prompt depends on timing; use placement.rollout_replicas=1 or rollout=hf",
        )
        require(
            self.placement.most_replicas == self.placement.rollout_replicas or not self.takes_turns,
            f"placement.max_rollout_replicas={self.placement.max_rollout_replicas} with engines that share devices "
            "with training ranks: there are no devices for additional engines; use placement=disaggregated, or leave "
            "the key out",
        )
        require(
            not self.rollout.has_environment or self.data.special_tokens == "text",
            f"data.special_tokens={self.data.special_tokens} with rollout.environment, rollout.tools or rollout.agent: "
            "the names of control tokens in a conversation are always encoded as text; use data.special_tokens=text",
        )
        self._require_whole_distribution()
        self._require_use_of_kept_cache()
        self._require_quantizable()
        self._require_recorded_experts()
        self._require_plain_layers()
        self._require_transport()
        self._require_one_offload()
        self._require_whole_sequences()
        buffer, limit = self.algorithm.reward_shaping.overlong_buffer, self.rollout.max_response_length
        require(
            buffer <= limit,
            f"algorithm.reward_shaping.overlong_buffer={buffer} is above rollout.max_response_length={limit}: the "
            f"length penalty grows over the last overlong_buffer tokens before that limit; use at most {limit} (DAPO "
            "uses a fifth of the limit), or 0",
        )
        # With `total_epochs`, `total_steps` is known only after the data is loaded, so the check of the actor's steps
        # must wait until then.
        if self.trainer.total_epochs is None:
            self.require_actor_steps()
        kl, sequences = self.algorithm.kl_in_reward, self.sequences_per_step
        require(
            kl.controller == "fixed" or sequences < 5 * kl.horizon,
            f"algorithm.kl_in_reward.horizon={kl.horizon} with controller=adaptive: 5 * horizon must be larger than "
            f"the {sequences} sequences of a training step, or kl_coef could become negative; use a horizon above "
            f"{sequences // 5}",
        )

    def _require_whole_distribution(self) -> None:
        """Raise ConfigError if top-p or top-k sampling is on and another setting needs the engine's log-probs.

        With top-p or top-k sampling, the engine's log-probs are renormalized over the tokens that can be sampled.
        Renormalized log-probs of the engine are not the log-probs of the policy that is trained.
        """
        algorithm, correction = self.algorithm, self.algorithm.correction.level
        rejection, squares = algorithm.rejection.kl_estimator, algorithm.squared_log_ratio_coef
        for name, value, used, way in (
            ("trainer.max_staleness", self.trainer.max_staleness, self.trainer.max_staleness > 0, "0"),
            ("rollout.vllm.quantization", self.rollout.quantization, self.rollout.quantization is not None, "null"),
            ("algorithm.old_log_probs", algorithm.old_log_probs, algorithm.old_log_probs == "rollout", "actor"),
            ("algorithm.correction.level", correction, correction is not None, "null"),
            ("algorithm.rejection.kl_estimator", rejection, rejection is not None, "null"),
            ("algorithm.squared_log_ratio_coef", squares, squares > 0, "0"),
        ):
            require(
                not (used and self.rollout.is_restricted),
                f"{self.rollout.restriction} with {name}={value}: {name} needs log-probs of the trained distribution, "
                "but the engine gives those of the restricted distribution; use rollout.top_p=1 rollout.top_k=0, "
                f"or {name}={way}",
            )

    def _require_use_of_kept_cache(self) -> None:
        """Raise ConfigError if `rollout.keep_kv_cache` has no effect, or is used without importance weights.

        An engine that keeps keys and values of earlier weights combines several weight versions when it samples a
        token. The tokens then come from a distribution that differs from the distribution of every single weight
        version, so the loss needs importance weights.
        """
        keep, correction = self.rollout.keep_kv_cache, self.algorithm.correction.level
        require(
            not keep or self.trainer.steps_ahead > 0,
            f"rollout.keep_kv_cache=true with trainer.max_staleness={self.trainer.max_staleness}"
            + (f" and trainer.reuse.steps={self.trainer.reuse.steps}" if self.trainer.reuse else "")
            + ": all answers are finished before the weights change, so there is no KV cache to keep; use a larger "
            "trainer.max_staleness, or rollout.keep_kv_cache=false",
        )
        require(
            not keep or correction is not None,
            "rollout.keep_kv_cache=true with algorithm.correction.level=null: answers are sampled with keys and values "
            "of several weight versions, so they need importance weights; use algorithm.correction.level=token, or "
            "rollout.keep_kv_cache=false",
        )

    def _require_quantizable(self) -> None:
        """Raise ConfigError if the engine cannot quantize the weights of this run."""
        vllm, engine = self.rollout.vllm, self.rollout.engine
        if vllm is None or vllm.quantization is None:
            return
        start = f"rollout.vllm.quantization={vllm.quantization}"
        require(
            engine == "vllm",
            f"{start} with rollout.engine={engine}: only vLLM quantizes weights; use rollout=vllm, or "
            "rollout.vllm.quantization=null",
        )
        require(
            self.model.dtype == "bfloat16",
            f"{start} with model.dtype={self.model.dtype}: vLLM quantizes only bfloat16 weights; use "
            "model.dtype=bfloat16",
        )
        require(
            self.model.lora is None or vllm.adapters == "merged",
            f"{start} with rollout.vllm.adapters={vllm.adapters}: adapters beside quantized weights have not been "
            "tested; use rollout.vllm.adapters=merged",
        )

    def _require_plain_layers(self) -> None:
        """Raise ConfigError if ranks divide layers that have adapters or are compiled, which is not supported."""
        tensor, experts = self.placement.tensor_ranks, self.placement.expert_ranks
        require(
            tensor == 1 or self.model.lora is None,
            f"placement.tensor_ranks={tensor} with model.lora: the ranks cannot divide matrices that have adapters; "
            "use placement.tensor_ranks=1, or model.lora=null",
        )
        require(
            tensor == experts == 1 or not self.model.compile,
            f"placement.tensor_ranks={tensor} and placement.expert_ranks={experts} with model.compile=true: layers "
            "that ranks divide cannot be compiled; use model.compile=false, or 1 for both keys",
        )

    def _require_one_offload(self) -> None:
        """Raise ConfigError if two settings keep the moments of one optimizer in CPU memory."""
        for name, role in (("actor", self.actor), ("critic", self.critic)):
            require(
                not (self.model.cpu_offload and role.offload_optimizer),
                f"{name}.offload_optimizer=true with model.cpu_offload=true: with CPU offload, the optimizer is always "
                f"in CPU memory; use {name}.offload_optimizer=false",
            )

    def _require_transport(self) -> None:
        """Raise ConfigError if weights cannot travel as `rollout.weight_transport` says."""
        transport = self.rollout.weight_transport
        require(
            self.placement.launcher == "ray" or transport in ("auto", "object_store"),
            f"placement=inprocess with rollout.weight_transport={transport}: the engine is in the process of the "
            "training rank; use rollout.weight_transport=auto",
        )
        require(
            transport != "device_handles" or self.model.lora is None,
            "rollout.weight_transport=device_handles with model.lora: each engine would get the checks of only one "
            "rank's rows of the base weights; use rollout.weight_transport=auto, or model.lora=null",
        )
        require(
            transport != "device_handles" or self.placement.most_replicas == self.placement.rollout_replicas,
            "rollout.weight_transport=device_handles with a range of placement.rollout_replicas: an engine that joins "
            "later shares no GPU with a training rank; use one number of engines, or rollout.weight_transport=auto",
        )
        require(
            transport != "nccl" or not self.placement.share_ranks,
            "rollout.weight_transport=nccl with placement.share_ranks=true: each process needs a separate GPU; use "
            "placement=disaggregated, or rollout.weight_transport=auto",
        )
        require(
            transport != "nccl" or not self.model.cpu_offload,
            "rollout.weight_transport=nccl with model.cpu_offload=true: NCCL sends only weights in GPU memory; use "
            "rollout.weight_transport=auto, or model.cpu_offload=false",
        )

    def _require_recorded_experts(self) -> None:
        """Raise ConfigError if a run would record no experts for `actor.router_replay`, or could not replay them."""
        replay, engine = self.actor.router_replay, self.rollout.description
        of_engine = replay == "engine"
        for used, name, reason, way in (
            (
                of_engine and not engine.records_experts,
                f"rollout.engine={self.rollout.engine}",
                f"{engine.title} have no experts" if not engine.generates else f"{engine.title} records no experts",
                "rollout=hf",
            ),
            (
                of_engine and not engine.records_at_stop and bool(self.rollout.stop),
                f"rollout.engine={self.rollout.engine} and rollout.stop",
                f"{engine.title} returns no experts for an answer that a stop string ends",
                "rollout.stop=[]",
            ),
            (
                of_engine and self.rollout.has_environment,
                "rollout.environment, rollout.tools or rollout.agent",
                "the engine records experts only for answers of one turn",
                "actor.router_replay=actor",
            ),
            (
                replay == "actor" and self.algorithm.old_log_probs == "rollout",
                "algorithm.old_log_probs=rollout",
                "the actor makes no forward pass before the update, so it chooses no experts",
                "algorithm.old_log_probs=actor",
            ),
            (
                replay == "actor" and self.optimizer_steps_per_step == 1,
                "one optimizer step per training step",
                "the only optimizer step uses the weights with which the actor chose the experts, so replay changes "
                "nothing",
                "a smaller trainer.prompts_per_minibatch",
            ),
            (
                replay is not None and self.model.compile,
                "model.compile=true",
                "a compiled layer cannot replay experts",
                "model.compile=false",
            ),
        ):
            require(
                not used, f"actor.router_replay={replay} with {name}: {reason}; use {way}, or actor.router_replay=null"
            )

    def _require_whole_sequences(self) -> None:
        """Raise ConfigError if the load-balancing loss is on but ranks split rows or layers are compiled."""
        coef, ranks = self.actor.load_balance_coef, self.placement.token_ranks
        require(
            coef == 0 or ranks == 1,
            f"actor.load_balance_coef={coef:g} with {ranks} ranks that split the tokens of a row: the loss needs all "
            "tokens of a row on one rank; use placement.sequence_ranks=1 placement.context_ranks=1, or "
            "actor.load_balance_coef=0",
        )
        require(
            coef == 0 or not self.model.compile,
            f"actor.load_balance_coef={coef:g} with model.compile=true: a compiled layer does not give the scores of "
            "its router; use model.compile=false, or actor.load_balance_coef=0",
        )

    def require_actor_steps(self) -> None:
        """Raise ConfigError if the critic's warm-up is as long as the run, so that the actor would not be trained."""
        warmup, total = self.critic.warmup_steps, self.trainer.total_steps
        require(
            warmup < total,
            f"critic.warmup_steps={warmup} with trainer.total_steps={total}: the critic's warm-up would fill the whole "
            f"run, so the actor would not be trained; use at most {total - 1} warm-up steps, or a longer run",
        )

    def require_budget(self, role: str) -> None:
        """Raise ConfigError if the longest possible row (prompt and answer) does not fit in a micro-batch of a role.

        Args:
            role: the role whose micro-batch size is checked, `actor` or `critic`.
        """
        longest = self.rollout.max_prompt_length + self.rollout.max_response_length
        ranks, budget = self.placement.token_ranks, getattr(self, role).max_tokens_per_microbatch
        shared, least = f"; {ranks} ranks share the tokens of each row" if ranks > 1 else "", -(-longest // ranks)
        require(
            budget * ranks >= longest,
            f"{role}.max_tokens_per_microbatch={budget} is below the longest possible row, "
            f"rollout.max_prompt_length + rollout.max_response_length = {longest}{shared}; use at least {least}",
        )

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of the whole run, which is the length of the critic's learning-rate schedule."""
        return self.trainer.total_steps * self.optimizer_steps_per_step

    @property
    def actor_optimizer_steps(self) -> int:
        """Number of optimizer steps of the actor, which is the length of the actor's learning-rate schedule.

        During the critic's warm-up, the actor takes no optimizer steps, and the actor's learning-rate schedule does not
        advance.
        """
        return (self.trainer.total_steps - self.critic.warmup_steps) * self.optimizer_steps_per_step

    @property
    def optimizer_steps_per_step(self) -> int:
        """Number of optimizer steps in one training step: `trainer.epochs_per_step` times the number of mini-batches
        per epoch.
        """
        return self.trainer.epochs_per_step * self.minibatches_per_epoch

    @property
    def minibatches_per_epoch(self) -> int:
        """Number of mini-batches in one pass over the answers of a training step. The trainer takes one optimizer step
        for each mini-batch.
        """
        return self.trainer.prompts_per_step // self.trainer.prompts_per_minibatch

    def roles(self, *, needs_critic: bool) -> list[str]:
        """Return the roles of the training ranks, such as `actor` and `critic`.

        Args:
            needs_critic: whether the advantage estimator reads a critic's values, so that the run needs a critic.
        """
        models = [f"{REWARD_MODEL} {model.name}" for model in self.reward.models]
        models += [teacher.role for teacher in self.algorithm.distillation.models]
        return ["actor", *["reference"] * self.algorithm.needs_reference, *["critic"] * needs_critic, *models]

    @property
    def takes_turns(self) -> bool:
        """Whether inference engines and training ranks share devices and compute alternately.

        If `takes_turns` is True, the engines free their device memory while the training ranks compute, and the
        training ranks free their device memory while the engines compute.
        """
        placement = self.placement
        return placement.launcher == "ray" and placement.share_ranks and not self.trainer.steps_ahead

    @property
    def sequences_per_step(self) -> int:
        """Number B of sequences in one training step.

        The number of sequences is B = P * G, where P is the number of prompts in one training step and G is the number
        of samples per prompt.
        """
        return self.trainer.prompts_per_step * self.rollout.samples_per_prompt
