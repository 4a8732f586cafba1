"""Maps option names of other trainers to rltrain's config keys for the same settings.

If a user writes an option name of another trainer, the error message names rltrain's key for the same setting. The
command `python -m rltrain.settings.reference` writes a table of all option names into
`docs/coming-from-other-trainers.md`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """The names of one setting in rltrain and in other trainers.

    If another trainer has several options for the setting, their names are separated by spaces.

    Attributes:
        key: rltrain's config key for the setting.
        trl: names of the setting in TRL's GRPOConfig; "" if TRL has no such setting.
        verl: names of the setting in verl; "" if verl has no such setting.
        openrlhf: names of the setting's flags in OpenRLHF, without the leading dashes; "" if OpenRLHF has no such flag.
        hint: how rltrain's key differs in meaning or unit from the options of TRL, verl and OpenRLHF; "" if there is no
            difference.
    """

    key: str
    trl: str = ""
    verl: str = ""
    openrlhf: str = ""
    hint: str = ""

    @property
    def note(self) -> str:
        """The text of `hint` in brackets, to be put at the end of an error message; "" if there is no hint."""
        return f" ({self.hint})" if self.hint else ""

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the setting in all other trainers."""
        return (*self.trl.split(), *self.verl.split(), *self.openrlhf.split())

    def matches(self, option: str) -> bool:
        """Return whether another trainer has an option called `option`, or a verl option that ends in `.option`."""
        return option in self.others or any(name.endswith(f".{option}") for name in self.verl.split())


NAMES = (
    Name("model.path", "model_name_or_path", "actor_rollout_ref.model.path", "pretrain"),
    Name("data.train", "dataset_name", "data.train_files", "prompt_data"),
    Name("data.val", "eval_dataset", "data.val_files", "eval_dataset"),
    Name("data.prompt", "", "data.prompt_key", "input_key"),
    Name("data.shuffle", "shuffle_dataset"),
    Name("data.chat", openrlhf="apply_chat_template", hint="data.chat is auto, always or never"),
    Name(
        "data.sft_response",
        "",
        "data.response_key",
        hint="data.sft_response is used only by the supervised loss, which algorithm.sft_coef turns on",
    ),
    Name(
        "reward.functions",
        "reward_funcs reward_weights",
        "custom_reward_function.path",
        "remote_rm_url",
        "reward.functions takes a list of functions, each with an optional weight",
    ),
    Name("reward.models", "", "reward_model.model.path", "reward_pretrain", "reward.models takes a list of models"),
    Name("actor.lr", "learning_rate", "actor_rollout_ref.actor.optim.lr", "actor_learning_rate"),
    Name("actor.lr_schedule", "lr_scheduler_type", "actor_rollout_ref.actor.optim.lr_scheduler_type", "lr_scheduler"),
    Name(
        "actor.lr_warmup_steps",
        "warmup_steps warmup_ratio",
        "actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        "lr_warmup_ratio",
        "actor.lr_warmup_steps is a number of optimizer steps",
    ),
    Name("actor.weight_decay", "weight_decay", "actor_rollout_ref.actor.optim.weight_decay", "l2"),
    Name("actor.max_grad_norm", "max_grad_norm", "actor_rollout_ref.actor.grad_clip", "max_norm"),
    Name("actor.beta1", "adam_beta1", "", "adam_betas"),
    Name("actor.beta2", "adam_beta2"),
    Name(
        "actor.max_tokens_per_microbatch",
        "per_device_train_batch_size",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "micro_train_batch_size",
        "max_tokens_per_microbatch is a number of tokens; it limits memory use and does not change results",
    ),
    Name("critic.lr", "", "critic.optim.lr", "critic_learning_rate"),
    Name("critic.clip_range_value", "cliprange_value", "critic.cliprange_value", "value_clip"),
    Name(
        "trainer.prompts_per_step",
        "generation_batch_size",
        "data.train_batch_size",
        "rollout_batch_size",
        "prompts_per_step counts prompts, not answers",
    ),
    Name(
        "trainer.prompts_per_minibatch",
        "gradient_accumulation_steps",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "train_batch_size",
        "prompts_per_minibatch is the number of prompts in one optimizer step",
    ),
    Name("trainer.epochs_per_step", "num_iterations", "actor_rollout_ref.actor.ppo_epochs", "max_epochs"),
    Name("trainer.total_steps", "max_steps", "trainer.total_training_steps"),
    Name("trainer.total_epochs", "num_train_epochs", "trainer.total_epochs", "num_episodes"),
    Name("trainer.seed", "seed", "data.seed", "seed"),
    Name("trainer.eval_every", "eval_steps", "trainer.test_freq", "eval_steps"),
    Name("trainer.save_every", "save_steps", "trainer.save_freq", "save_steps"),
    Name(
        "trainer.resume",
        "resume_from_checkpoint",
        "trainer.resume_mode",
        "load_checkpoint",
        "trainer.resume is 'never', 'auto' or a path",
    ),
    Name("trainer.output_dir", "output_dir", "trainer.default_local_dir", "save_path"),
    Name(
        "trainer.trackers",
        "report_to",
        "trainer.logger",
        "use_wandb use_tensorboard",
        "trainer.trackers takes a list, as in [tensorboard,wandb]",
    ),
    Name(
        "trainer.sample_every",
        "logging_steps log_completions",
        "trainer.log_val_generations",
        "logging_steps",
        "metrics are written after every step; sample_every is the number of steps between two sample answers",
    ),
    Name("trainer.keep_checkpoints", "save_total_limit", "trainer.max_actor_ckpt_to_keep", "max_ckpt_num"),
    Name("rollout.samples_per_prompt", "num_generations", "actor_rollout_ref.rollout.n", "n_samples_per_prompt"),
    Name("rollout.temperature", "temperature", "actor_rollout_ref.rollout.temperature", "temperature"),
    Name("rollout.engine", "use_vllm", hint="rollout=vllm or rollout=hf selects the engine and its settings"),
    Name("rollout.top_p", "top_p", "actor_rollout_ref.rollout.top_p", "top_p"),
    Name(
        "rollout.top_k",
        "top_k",
        "actor_rollout_ref.rollout.top_k",
        hint="rollout.top_k=0, not -1, turns top-k sampling off",
    ),
    Name(
        "rollout.stop",
        "generation_kwargs",
        hint="rollout.stop takes only stop strings; rltrain has other keys for top_p and top_k",
    ),
    Name("rollout.max_prompt_length", "max_prompt_length", "data.max_prompt_length", "prompt_max_len"),
    Name("rollout.max_response_length", "max_completion_length", "data.max_response_length", "generate_max_len"),
    Name(
        "rollout.vllm.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
    ),
    Name(
        "rollout.vllm.tensor_parallel_size",
        "vllm_tensor_parallel_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
    ),
    Name(
        "rollout.vllm.quantization",
        "",
        "actor_rollout_ref.rollout.quantization",
        hint="rollout.vllm.quantization takes vLLM's names of formats, such as fp8_per_block",
    ),
    Name("placement.rollout_replicas", "", "", "vllm_num_engines"),
    Name(
        "placement.actor_ranks",
        "",
        "trainer.n_gpus_per_node",
        "actor_num_gpus_per_node",
        "placement.actor_ranks is the number of ranks on all nodes together, not per node",
    ),
    Name("placement.sequence_ranks", "", "actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
    Name("placement.context_ranks", "", "actor_rollout_ref.actor.megatron.context_parallel_size", "ring_attn_size"),
    Name(
        "placement.tensor_ranks",
        "",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "ds_tensor_parallel_size",
    ),
    Name("placement.expert_ranks", "", "actor_rollout_ref.actor.megatron.expert_model_parallel_size"),
    Name(
        "algorithm.kl_loss.kl_loss_coef",
        "beta",
        "actor_rollout_ref.actor.kl_loss_coef",
        "init_kl_coef",
        "coefficient of the KL term in the loss; the key of the KL penalty in the reward is "
        "algorithm.kl_in_reward.kl_coef",
    ),
    Name(
        "algorithm.kl_in_reward.kl_coef",
        "kl_coef",
        "algorithm.kl_ctrl.kl_coef",
        "kl_coef",
        "coefficient of the KL penalty in the reward; the key of the KL term in the loss is "
        "algorithm.kl_loss.kl_loss_coef",
    ),
    Name("algorithm.kl_loss.kl_estimator", "", "actor_rollout_ref.actor.kl_loss_type", "kl_estimator"),
    Name(
        "algorithm.reference.refresh_every",
        "ref_model_sync_steps",
        hint="refresh_every is a number of training steps; with 0, the reference model is not updated",
    ),
    Name("algorithm.reference.refresh_coef", "ref_model_mixup_alpha"),
    Name("algorithm.entropy_coef", "entropy_coef", "actor_rollout_ref.actor.entropy_coeff", "entropy_loss_coef"),
    Name(
        "algorithm.sft_coef",
        openrlhf="ptx_coef",
        hint="rltrain takes supervised answers from the training data (data.sft_response), not from a second data set",
    ),
    Name("algorithm.advantage_estimator", "", "algorithm.adv_estimator", "advantage_estimator"),
    Name("algorithm.loss_mode", "", "actor_rollout_ref.actor.policy_loss.loss_mode", "policy_loss_type"),
    Name(
        "algorithm.loss_agg_mode",
        "loss_type",
        "actor_rollout_ref.actor.loss_agg_mode",
        hint="a preset such as algorithm=dapo sets this key",
    ),
    Name(
        "algorithm.loss.clip_ratio_low",
        "epsilon",
        "actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio",
        "eps_clip",
    ),
    Name(
        "algorithm.loss.clip_ratio_high",
        "epsilon_high",
        "actor_rollout_ref.actor.clip_ratio_high",
        "eps_clip_low_high",
    ),
    Name("algorithm.loss.clip_ratio_c", "delta", "actor_rollout_ref.actor.clip_ratio_c", "dual_clip"),
    Name(
        "algorithm.advantage.gamma",
        "gamma",
        "algorithm.gamma",
        "gamma",
        "gamma is a parameter of estimators such as gae",
    ),
    Name("algorithm.advantage.lam", "lam", "algorithm.lam", "lambd", "lam is a parameter of estimators such as gae"),
    Name(
        "algorithm.advantage.norm_by_std",
        "scale_rewards",
        "algorithm.norm_adv_by_std_in_grpo",
        hint="norm_by_std is a parameter of the estimator grpo",
    ),
    Name("algorithm.mask_truncated", "mask_truncated_completions"),
    Name(
        "algorithm.dynamic_sampling",
        "",
        "algorithm.filter_groups.enable",
        "dynamic_filtering",
        "dynamic_sampling is the maximum number of batches that one step generates; 0 turns dynamic sampling off",
    ),
    Name("algorithm.correction.level", "", "algorithm.rollout_correction.rollout_is"),
    Name(
        "algorithm.correction.upper",
        "vllm_importance_sampling_cap",
        "algorithm.rollout_correction.rollout_is_threshold",
        "vllm_is_truncated_threshold",
    ),
    Name("algorithm.correction.batch_normalize", "", "algorithm.rollout_correction.rollout_is_batch_normalize"),
    Name("trainer.max_staleness", "", "async_training.staleness_threshold", "async_queue_size"),
    Name(
        "model.dtype",
        "dtype torch_dtype bf16 fp16",
        "actor_rollout_ref.rollout.dtype",
        "param_dtype bf16",
        "model.dtype is float32 or bfloat16",
    ),
    Name("model.compile", "torch_compile", "actor_rollout_ref.actor.use_torch_compile"),
    Name(
        "model.activation_checkpointing",
        "gradient_checkpointing",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
    ),
    Name("model.lora.rank", "lora_r", "actor_rollout_ref.model.lora_rank", "lora_rank"),
    Name("model.lora.alpha", "lora_alpha", "actor_rollout_ref.model.lora_alpha", "lora_alpha"),
    Name("model.lora.targets", "lora_target_modules", "actor_rollout_ref.model.target_modules", "target_modules"),
)


def name_here(key: str) -> Name | None:
    """Return the entry of `NAMES` for the option that another trainer calls `key`, or None if the option is unknown.

    An option matches by its whole name or by the last parts of its name: `rollout.n` matches verl's
    `actor_rollout_ref.rollout.n`. If no option matches the whole `key`, only the last part of `key` is compared, so
    that `algorithm.beta` matches TRL's option `beta`.
    """
    last = key.rpartition(".")[2]
    return next((name for option in (key, last) for name in NAMES if name.matches(option)), None)
