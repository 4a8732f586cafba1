"""The plan of a run, which is shown before the run starts: batches, algorithm, processes, memory and output."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rltrain.data.builtin_models import is_builtin
from rltrain.settings.algorithm_config import AlgorithmConfig, CorrectionConfig, NormalizationConfig
from rltrain.settings.distillation_config import REFERENCE
from rltrain.settings.sampling_config import ReuseConfig
from rltrain.settings.schema import ALL_LINEAR, Config, DataConfig, PlacementConfig, RolloutConfig, TrainerConfig

# Maximum width of the plan's panel, and width of the panel's borders and labels, both in terminal columns.
_WIDEST, _FRAME = 100, 15


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a run that the plan shows but the config does not contain.

    Attributes:
        path: directory of the model.
        parameters: number of model parameters; None if this number cannot be read from the model files.
        adapters: number of adapter parameters; None if the whole model is trained.
        train_prompts: number of training prompts; None before the training data is loaded.
        supervised: text that names the source of the supervised answers, and says how many prompts have such an
            answer; "" if the run has no supervised loss.
        val_prompts: dict that maps the name of each evaluation set to the set's number of prompts; "" is the name of
            the set of `data.val`.
        data: one-line description of the source of the training prompts, and of how the rows of this source became
            prompts; "" before the data is loaded.
        val_data: dict that maps the name of each evaluation set to a one-line description of the source of the set's
            prompts, and of how the rows of this source became prompts.
        own_splits: whether the source of the prompts has different rows for training and for evaluation.
        needs_critic: whether the advantage estimator needs the values of a critic.
        devices: description of the devices that ranks and engines run on, such as "2 CPU cores".
        memory: the memory plan in one line.
        teachers: dict that maps the name of each teacher that is a separate model on the training ranks to the number
            of the teacher's parameters.
        signatures: dict that maps the name of each reward function with the signature of TRL, verl or OpenRLHF to the
            name of that library.
        uses_ratio: whether the gradient of the loss depends on the old log-probs.
        aggregations: values of `algorithm.loss_agg_mode` for which the loss is defined; () means all values.
        alpha: the parameter alpha of the advantage estimator length_adaptive_gae; None for other estimators.
        defaults: dict that maps config keys to the values that come from the profile (a set of default settings); keys
            that the user has set are left out.
    """

    path: str
    parameters: int | None = None
    adapters: int | None = None
    train_prompts: int | None = None
    supervised: str = ""
    val_prompts: Mapping[str, int] = field(default_factory=dict)
    data: str = ""
    val_data: Mapping[str, str] = field(default_factory=dict)
    own_splits: bool = False
    needs_critic: bool = False
    devices: str = ""
    memory: str = ""
    teachers: Mapping[str, int | None] = field(default_factory=dict)
    signatures: Mapping[str, str] = field(default_factory=dict)
    uses_ratio: bool = True
    aggregations: tuple[str, ...] = ()
    alpha: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


def plan_rows(config: Config, facts: Facts) -> list[tuple[str, str]]:
    """Return a (label, text) pair for every line of the plan."""
    return [
        ("step", batch_line(config)),
        ("run", _run(config, facts)),
        *([("data", _data(facts))] if facts.data and not config.data.train.startswith("builtin:") else []),
        *([("rewards", _signatures(facts))] if facts.signatures else []),
        ("algorithm", _algorithm(config)),
        *([("reuse", _reuse(config.trainer, config.trainer.reuse))] if config.trainer.reuse else []),
        *([("supervised", _supervised(config, facts))] if config.algorithm.sft_coef else []),
        *([("teachers", _teachers(config, facts))] if config.algorithm.distillation.teachers else []),
        *([("off-policy", _off_policy(config, facts))] if config.trainer.max_staleness else []),
        *([("note", _aggregation(config.algorithm, facts))] if _is_other_aggregation(config.algorithm, facts) else []),
        *([("note", _short_answers(config.rollout))] if _lambda_is_zero(config.rollout, facts) else []),
        ("model", _model(config, facts)),
        *([("defaults", _defaults(facts))] if facts.defaults else []),
        ("answers", _answers(config)),
        *([("turns", _turns(config.rollout))] if config.rollout.has_environment else []),
        *([("sampling", _sampling(config.rollout))] if config.rollout.is_restricted else []),
        ("processes", _processes(config, facts)),
        ("memory", facts.memory),
        ("output", config.trainer.output_dir),
    ]


def plan_lines(config: Config, facts: Facts) -> list[str]:
    """Return the plan as aligned lines of text, for a log or a file."""
    return [f"{label:<10} {text}" for label, text in plan_rows(config, facts)]


def show_plan(console: Console, config: Config, facts: Facts) -> None:
    """Print the plan: framed and wrapped on a terminal, otherwise as one long line per entry."""
    if not console.is_terminal:
        for line in plan_lines(config, facts):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    width = min(console.width, _WIDEST)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in plan_rows(config, facts):
        table.add_row(label, Text(_broken(text, width - _FRAME)))
    console.print(Panel(table, title="[bold]plan[/bold]", title_align="left", border_style="dim", width=width))


def _signatures(facts: Facts) -> str:
    """Return a text that names the reward functions with the signature of TRL, verl or OpenRLHF."""
    return "; ".join(
        f"reward function {name}: called with {trainer}'s signature" for name, trainer in facts.signatures.items()
    )


def _defaults(facts: Facts) -> str:
    """Describe the settings that the user has not set and that therefore come from the profile."""
    shown = {key: value for key, value in facts.defaults.items() if facts.needs_critic or not key.startswith("critic.")}
    return f"from the profile: {', '.join(f'{key}={value}' for key, value in shown.items())}"


def batch_line(config: Config) -> str:
    """Return a line with the batch sizes of a training step and the resulting number of optimizer steps."""
    trainer, minibatches = config.trainer, config.trainer.prompts_per_step // config.trainer.prompts_per_minibatch
    return (
        f"{_count(trainer.prompts_per_step, 'prompt')} x {_count(config.rollout.samples_per_prompt, 'sample')} = "
        f"{_count(config.sequences_per_step, 'sequence')} -> {_count(trainer.epochs_per_step, 'epoch')} x "
        f"{_count(minibatches, 'mini-batch')} = {_count(config.optimizer_steps_per_step, 'optimizer step')}; "
        f"micro-batches <= {config.actor.max_tokens_per_microbatch:,} tokens"
    )


def _run(config: Config, facts: Facts) -> str:
    trainer = config.trainer
    parts = [
        f"{_count(trainer.total_steps, 'step')}{_epochs(trainer)}, {_optimizer_steps(config)}",
        f"seed {trainer.seed}",
        f"{config.data.train}: {_sampling_of_prompts(config.data, facts)}",
        _evaluation(config, facts),
    ]
    return "; ".join(parts)


def _sampling_of_prompts(data: DataConfig, facts: Facts) -> str:
    """Describe the order in which the training prompts are used."""
    prompts = f"{facts.train_prompts:,} prompts" if facts.train_prompts else "prompts"
    if (pools := data.difficulty) is None:
        return f"{'shuffled passes' if data.shuffle else 'passes in order'} of {prompts}"
    return (
        f"{prompts} in pools by difficulty, and each step samples {pools.normal_fraction:.0%} normal, "
        f"{pools.unseen_fraction:.0%} unseen, {pools.hard_fraction:.0%} hard (success rate <= "
        f"{pools.hard_threshold:g}) and {pools.easy_fraction:.0%} easy (success rate >= {pools.easy_threshold:g})"
    )


def _reuse(trainer: TrainerConfig, reuse: ReuseConfig) -> str:
    """Describe which prompt groups from earlier training steps are used again in a training step."""
    of_steps = "the last step" if reuse.steps == 1 else f"the last {reuse.steps} steps"
    return (
        f"up to {reuse.groups} of the {_count(trainer.prompts_per_step, 'prompt group')} of a step are repeated from "
        f"{of_steps}; only groups whose answers have different outcomes are repeated"
    )


def _optimizer_steps(config: Config) -> str:
    warmup = config.critic.warmup_steps
    if not warmup:
        return _count(config.optimizer_steps, "optimizer step")
    return (
        f"the first {warmup:,} steps train only the critic; {_count(config.optimizer_steps, 'optimizer step')} of the "
        f"critic, {config.actor_optimizer_steps:,} of the actor"
    )


def _epochs(trainer: TrainerConfig) -> str:
    return "" if trainer.total_epochs is None else f" (trainer.total_epochs={trainer.total_epochs:g})"


def _data(facts: Facts) -> str:
    """Describe where the training and evaluation prompts come from, and how the rows of the data became prompts."""
    others = {name: said for name, said in facts.val_data.items() if said != facts.data}
    return "; ".join([facts.data, *(f"evaluation{' ' * bool(name)}{name}: {said}" for name, said in others.items())])


def _evaluation(config: Config, facts: Facts) -> str:
    if not config.data.evaluations:
        return "no evaluation (data.val=null)"
    every = config.trainer.eval_every
    when = f"before, after and every {_count(every, 'step')}" if every else "before and after"
    sets = [_evaluation_set(name, source, config, facts) for name, (_, source) in config.data.evaluations.items()]
    answers = f", {config.trainer.eval_samples} sampled answers each" if config.trainer.eval_samples > 1 else ""
    return f"evaluated {when} on {' and '.join(sets)}{answers}"


def is_training_data(config: Config, source: str, *, own_splits: bool) -> bool:
    """Return whether the prompts of an evaluation set are prompts that the run trains on.

    Args:
        config: the config of the run.
        source: source of the evaluation set.
        own_splits: whether the source of the prompts has different rows for training and for evaluation.
    """
    return source == config.data.train and not (own_splits or source.startswith("builtin:"))


def _evaluation_set(name: str, source: str, config: Config, facts: Facts) -> str:
    count = f"{facts.val_prompts[name]:,}" if name in facts.val_prompts else f"at most {config.data.val_size:,}"
    same = is_training_data(config, source, own_splits=facts.own_splits)
    which = "prompts of the training data (set data.val=FILE for held-out prompts)" if same else "held-out prompts"
    return f"{count} {which if not name else f'prompts of {name}'}"


def _algorithm(config: Config) -> str:
    algorithm = config.algorithm
    parts = [
        f"{algorithm.advantage_estimator} advantages{_knobs(algorithm.advantage)}",
        f"{algorithm.loss_mode} loss{_knobs(algorithm.loss)}, {algorithm.loss_agg_mode}",
        _kl(config),
        *_switched_on(algorithm),
    ]
    return "; ".join([*parts, _optimizer(config)])


def _optimizer(config: Config) -> str:
    actor, steps = config.actor, config.actor_optimizer_steps
    text = f"AdamW, lr {actor.lr:g} {actor.lr_schedule}"
    if not actor.lr_warmup_steps:
        return text
    short = f", but the run has only {steps:,}" if steps <= actor.lr_warmup_steps else ""
    return f"{text} after a warm-up of {_count(actor.lr_warmup_steps, 'optimizer step')}{short}"


def _supervised(config: Config, facts: Facts) -> str:
    """Describe the supervised loss and the answers that it trains on."""
    answers = facts.supervised or f"data.sft_response={config.data.sft_response}"
    return f"cross-entropy of supervised answers, coefficient {config.algorithm.sft_coef:g}; {answers}"


def _teachers(config: Config, facts: Facts) -> str:
    """Describe the teachers, how a teacher is chosen for a row, and how the policy learns from the teachers."""
    distillation = config.algorithm.distillation
    reference = "the reference model" if config.algorithm.refreshes_reference else "the starting weights"
    parts = []
    for teacher in distillation.teachers:
        size = facts.teachers.get(teacher.name)
        kind = "endpoint" if teacher.is_endpoint else f"{_size(size)} parameters" if size else ""
        own = "with a teacher-specific prompt template" if teacher.prompt_template is not None else ""
        said = ", ".join(part for part in (kind, own) if part)
        path = reference if teacher.path == REFERENCE else teacher.path
        parts.append(f"{teacher.name} = {path}{f' ({said})' if said else ''}")
    kl = "exact reverse KL" if distillation.full else "reverse KL of sampled tokens"
    how = f"{kl} in the {'advantages' if distillation.in_reward else 'loss'}, coefficient {distillation.coef:g}"
    column = "" if distillation.teacher_column is None else f"; column {distillation.teacher_column} names the teacher"
    rewards = f"the advantages from rewards are multiplied by {distillation.outcome_coef:g}"
    return f"{', '.join(parts)}{column}; {how}; {_measured(config) if distillation.alone else rewards}"


def _measured(config: Config) -> str:
    """Describe the rewards of a run whose policy learns from teachers alone."""
    if not config.reward.components:
        return "without rewards"
    return f"rewards are only measured ({', '.join(config.reward.names)})"


def _off_policy(config: Config, facts: Facts) -> str:
    """Describe how training corrects for stale answers, that is, answers that an older policy sampled."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    stale = f"answers up to {_count(config.trainer.max_staleness, 'weight version')} old"
    uncorrected = correction.level is None and algorithm.rejection.kl_estimator is None
    if uncorrected and algorithm.distillation.alone and algorithm.distillation.in_loss:
        return (
            f"{stale} have no importance weights; the policy is matched to the teachers on the tokens of these answers"
        )
    if correction.level is not None:
        return f"{stale} have {_weights(correction)}"
    if algorithm.old_log_probs == "rollout" and facts.uses_ratio:
        return (
            f"{stale} are corrected by the importance ratio of the {algorithm.loss_mode} loss (actor probability / "
            "engine probability)"
        )
    if algorithm.rejection.kl_estimator is not None:
        return (
            f"{stale} are dropped where algorithm.rejection finds them too far from the engine's policy, and are "
            "otherwise not corrected"
        )
    back = " with old_log_probs=actor" if algorithm.old_log_probs == "rollout" else ""
    return f"{stale} are trained on without correction; algorithm.correction.level=auto{back} corrects them"


def _is_other_aggregation(algorithm: AlgorithmConfig, facts: Facts) -> bool:
    return bool(facts.aggregations) and algorithm.loss_agg_mode not in facts.aggregations


def _aggregation(algorithm: AlgorithmConfig, facts: Facts) -> str:
    """Return a warning that the loss is not defined for the configured value of `algorithm.loss_agg_mode`."""
    return (
        f"the {algorithm.loss_mode} loss is defined for algorithm.loss_agg_mode={' or '.join(facts.aggregations)}; "
        f"with {algorithm.loss_agg_mode}, the weight of an answer in the loss is proportional to its length"
    )


def _lambda_is_zero(rollout: RolloutConfig, facts: Facts) -> bool:
    """Return whether lambda, which is 1 - 1 / (alpha * length) in length_adaptive_gae, is 0 for all answers."""
    return facts.alpha is not None and facts.alpha * rollout.max_response_length <= 1


def _short_answers(rollout: RolloutConfig) -> str:
    longest = rollout.max_response_length
    return (
        f"answers have at most {longest:,} tokens, so lambda is 0 in all answers, and the advantage of a token is its "
        f"one-step TD error; set algorithm.advantage.alpha above {1 / longest:.3g} for a lambda above 0"
    )


def _switched_on(algorithm: AlgorithmConfig) -> list[str]:
    """Return descriptions of the features that are off by default and that the config turns on."""
    shaping, target = algorithm.reward_shaping, algorithm.entropy_target
    correction, rejection = algorithm.correction, algorithm.rejection
    changes = [("+", shaping.bias), ("x", "" if shaping.scale == 1 else shaping.scale), ("clip ", shaping.clip)]
    shaped = ", ".join(f"{sign}{value:g}" for sign, value in changes if value)
    rejected = {"token": "tokens", "sequence": "answers", "max": "answers with a token"}[rejection.level]
    said = {
        f"scores {shaped}": bool(shaped),
        f"length penalty over the last {shaping.overlong_buffer} tokens": shaping.overlong_buffer > 0,
        f"length reward within a group, weight {shaping.group_length_weight:g}": shaping.group_length_weight > 0,
        f"scores normalised ({_levels(algorithm.reward_normalization)})": algorithm.reward_normalization.on,
        f"advantages normalised ({_levels(algorithm.advantage_normalization)})": algorithm.advantage_normalization.on,
        f"advantages limited to +-{algorithm.advantage_clip or 0:g}": algorithm.advantage_clip is not None,
        "a truncated answer scores no more than an answer whose rewards are 0": algorithm.suppress_truncated,
        "truncated answers left out of all statistics": algorithm.exclude_truncated,
        "truncated answers not trained on": algorithm.mask_truncated,
        "the critic's value of the last state is added to the reward of truncated answers": (
            algorithm.bootstrap_truncated
        ),
        "prompt groups whose answers all have the same outcome are left out": algorithm.dynamic_sampling == 1,
        "prompt groups whose answers all have the same outcome are replaced (a step generates at most "
        f"{algorithm.dynamic_sampling} batches of prompts)": algorithm.dynamic_sampling > 1,
        f"entropy bonus {algorithm.entropy_coef:g}": algorithm.entropy_coef > 0 and target is None,
        f"entropy bonus towards a target of {target or 0:g} nats; its coefficient starts at {algorithm.entropy_coef:g} "
        f"and is at most {algorithm.entropy_coef_max:g}": target is not None,
        f"squared log-ratio to the engine's policy, coefficient {algorithm.squared_log_ratio_coef:g}": (
            algorithm.squared_log_ratio_coef > 0
        ),
        f"NLL of correct answers, coefficient {algorithm.positive_nll_coef:g}": algorithm.positive_nll_coef > 0,
        "the engine's log-probs used as old log-probs": algorithm.old_log_probs == "rollout",
        _weights(correction): correction.level is not None,
        f"rejection of {'negative-advantage ' if rejection.only_negative else ''}{rejected} whose "
        f"{rejection.kl_estimator} estimate of the KL is"
        f"{_bounds(rejection.lower, rejection.upper)}": rejection.kl_estimator is not None,
    }
    return [text for text, on in said.items() if on]


def _weights(correction: CorrectionConfig) -> str:
    dropped = "tokens dropped" if correction.level == "token" else "answers dropped"
    outside = "truncated" if correction.mode == "truncate" else dropped
    bounds = _bounds(correction.lower, correction.upper)
    parts = [f"{correction.level} importance weights (actor probability / engine probability)"]
    parts += [f"{outside}{bounds}"] if bounds else []
    parts += ["each divided by the mean importance weight of the mini-batch"] if correction.batch_normalize else []
    parts += ["the policy loss averaged only over the kept tokens"] if correction.normalize == "kept" else []
    return ", ".join(parts)


def _bounds(lower: float | None, upper: float | None) -> str:
    """Describe the values outside the given bounds, for instance " below 0.5 or above 2"; "" if both are None."""
    parts = [f"{word} {bound:g}" for word, bound in (("below", lower), ("above", upper)) if bound is not None]
    return f" {' or '.join(parts)}" if parts else ""


def _levels(config: NormalizationConfig) -> str:
    mean = f"{config.mean_level} mean" + (" of the others" if config.leave_one_out else "")
    parts = [mean if config.mean_level else "", f"{config.std_level} std" if config.std_level else ""]
    return ", ".join(part for part in parts if part)


def _kl(config: Config) -> str:
    reward, loss, parts = config.algorithm.kl_in_reward, config.algorithm.kl_loss, []
    if reward.kl_coef:
        kind = "with an adaptive coefficient that starts at " if reward.controller == "adaptive" else ""
        parts.append(f"KL in reward {kind}{reward.kl_coef:g} ({reward.kl_estimator})")
    if loss.kl_loss_coef:
        parts.append(f"KL in loss {loss.kl_loss_coef:g} ({loss.kl_estimator})")
    return ", ".join([*parts, *_refresh(config)]) or "no KL"


def _refresh(config: Config) -> list[str]:
    """Return a list with a description of the reference model's updates; [] if the reference model is frozen."""
    reference, total = config.algorithm.reference, config.trainer.total_steps
    if not reference.refresh_every:
        return []
    copied, moved = (
        "the reference model becomes a copy of the actor",
        f"the reference model moves by {reference.refresh_coef:g} of its distance to the actor",
    )
    every = "step" if reference.refresh_every == 1 else _count(reference.refresh_every, "step")
    late = f", which has no effect in a run of {_count(total, 'step')}" if reference.refresh_every >= total else ""
    return [f"{copied if reference.refresh_coef == 1 else moved} every {every}{late}"]


def _knobs(knobs: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {value}" for name, value in knobs.items())
    return f" ({shown})" if shown else ""


def _model(config: Config, facts: Facts) -> str:
    size = f"; {_size(facts.parameters)} parameters" if facts.parameters else ""
    name = "built-in tiny model" if is_builtin(config.model.path) else facts.path
    return f"{name}{size}; {config.model.dtype}{_adapters(config, facts)}"


def _adapters(config: Config, facts: Facts) -> str:
    lora = config.model.lora
    if lora is None:
        return ""
    layers = "all linear layers" if lora.targets == [ALL_LINEAR] else ", ".join(lora.targets)
    size = f": {_size(facts.adapters)} parameters" if facts.adapters else ""
    return f"; training changes only adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {layers}{size}"


def _size(parameters: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if parameters >= u), (1.0, ""))
    return f"{parameters / unit:.3g}{name}"


def _answers(config: Config) -> str:
    rollout = config.rollout
    engine = rollout.description.title if rollout.description.generates else f"answers of {rollout.run}"
    engine += f" with {rollout.quantization} weights" if rollout.quantization else ""
    scored = f"scored by {', '.join(config.reward.names)}" if config.reward.components else "not scored"
    ends = f" or up to {' or '.join(map(repr, rollout.stop))}" if rollout.stop else ""
    return (
        f"{engine}, temperature {rollout.temperature:g}; prompts <= {rollout.max_prompt_length:,} tokens, answers <= "
        f"{rollout.max_response_length:,}{ends}; {scored}"
    )


def _turns(rollout: RolloutConfig) -> str:
    """Describe the environment, the tools or the agent program of the run, and the limits of a conversation."""
    tools = [tool.name for tool in rollout.tools]
    partners = [partner for partner in (rollout.environment, rollout.agent) if partner]
    partners += [f"the tools {', '.join(tools)}"] if tools else []
    turn = f" of <= {rollout.max_turn_length:,} tokens" if rollout.max_turn_length else ""
    limits = f"<= {rollout.max_turns} turns{turn} per conversation, messages <= {rollout.max_message_length:,} tokens"
    times = f"time limits {rollout.call_timeout_s:g} s per call, {rollout.trajectory_timeout_s:g} s per conversation"
    return f"with {' and '.join(partners)}; {limits}; {times}"


def _sampling(rollout: RolloutConfig) -> str:
    """Describe how top-p and top-k sampling change the log-probs of the engine."""
    return (
        f"{rollout.restriction}: the engine samples from a truncated distribution and returns the log-probs of that "
        "distribution, so training does not use the engine's log-probs for corrections and does not compare them with "
        "the actor's log-probs"
    )


def _processes(config: Config, facts: Facts) -> str:
    placement, devices = config.placement, f"{facts.devices}{_staleness(config)}"
    roles = config.roles(needs_critic=facts.needs_critic)
    if placement.launcher == "inprocess":
        return f"one process without Ray, for {', '.join(roles)}, engine and rewards; {devices}"
    if placement.share_ranks:
        training = f"{_count(placement.actor_ranks, 'training rank')} ({', '.join(roles)})"
    else:
        training = f"{_count(placement.actor_ranks, 'rank')} each for {', '.join(roles)}"
    training += _divided(placement)
    shards = config.rollout.shards
    engines = _count(placement.rollout_replicas, "engine") + (f" of {shards} shards" if shards > 1 else "")
    if placement.most_replicas > placement.rollout_replicas:
        engines += f" (up to {placement.most_replicas} engines if the cluster has free devices)"
    where = "Ray on this machine" if placement.address == "local" else f"Ray cluster {placement.address}"
    rewards = _count(placement.reward_workers, "reward worker")
    return f"{training} + {engines} + {rewards}; {where}, {devices}{_transport(config)}"


def _divided(placement: PlacementConfig) -> str:
    """Describe how ranks divide rows, matrices and experts. The text is empty if each rank computes whole rows."""
    parts = {
        "the tokens of a row": placement.token_ranks,
        "the matrices of layers": placement.tensor_ranks,
        "the experts": placement.expert_ranks,
    }
    texts = [f"{count} ranks share {what}" for what, count in parts.items() if count > 1]
    return f", where {', '.join(texts)}" if texts else ""


def _transport(config: Config) -> str:
    """Describe how weights travel from the ranks to the engines.

    Return "" for the default transport in a run whose ranks and engines are all on this machine.
    """
    if config.rollout.weight_transport == "auto":
        between = "; weights are sent through shared memory on one machine, or a process group between machines"
        return "" if config.placement.address == "local" else between
    names = {
        "shared_memory": "through shared memory",
        "object_store": "through Ray's object store",
        "process_group": "through a process group",
        "nccl": "from GPU to GPU (NCCL)",
        "device_handles": "through memory of ranks that the engines map (device handles)",
    }
    return f"; weights are sent {names[config.rollout.weight_transport]}"


def _staleness(config: Config) -> str:
    if not config.trainer.steps_ahead:
        return ""
    versions = _count(config.trainer.steps_ahead, "weight version")
    if config.placement.launcher == "inprocess":
        return (
            f"; answers may be {versions} old; in a run with one process, stale answers save no time, and the policy "
            "learns better with trainer.max_staleness=0"
        )
    return f"; engines generate answers while ranks train, with weights that are at most {versions} old"


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural}"


def _broken(text: str, width: int) -> str:
    """Insert line breaks after `;` or before `->` where a line would exceed `width` columns.

    The terminal wraps a line that is longer than `width` and has no `;` or `->`.
    """
    lines = [""]
    for part in re.split(r"(?<=; )|(?=-> )", text):
        if len((lines[-1] + part).rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)
