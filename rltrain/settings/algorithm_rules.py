"""Checks that the settings under `algorithm` fit the selected advantage estimator and the selected loss.

The checks of the algorithm settings run before any worker starts.

The registries in `rltrain.algorithms` tell which parameters under `algorithm.loss` a loss takes, and which parameters
under `algorithm.advantage` an estimator takes. The parameter values are tested by calling the selected loss and
estimator once on a tiny batch. This module imports torch only inside functions, so that most config errors are reported
without waiting for torch.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.rewards.loading import builtin_path
from rltrain.settings.algorithm_config import FULL_KL, AlgorithmConfig
from rltrain.settings.schema import Config
from rltrain.settings.typed import require

# Maps the names of presets, and names that other trainers use, to rltrain's names of losses and estimators. If a user
# selects a loss or an estimator by a name that is a key of ALIASES, the error message suggests rltrain's name.
ALIASES = {
    "ppo": "vanilla",
    "ppo_clip": "vanilla",
    "grpo": "vanilla",
    "dapo": "vanilla",
    "dr_grpo": "grpo",
    "gmpo": "geo_mean",
    "otb": "optimal_token_baseline",
    "reinforce++": "reinforce_plus_plus",
}


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Return whether the selected advantage estimator reads the critic's values."""
    return "values" in _columns(algorithm)


def check_algorithm(config: Config) -> None:
    """Check the algorithm settings, and raise an error if a setting is invalid or has no effect.

    Raises:
        ConfigError: the name of a loss or estimator is not registered, a parameter does not exist or is out of range,
            or a setting has no effect. The error message is one line that names the wrong value, the violated rule and
            a way to fix the setting.
    """
    from rltrain.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, loss_functions

    algorithm = config.algorithm
    _check_name(ADVANTAGE_ESTIMATORS, "advantage_estimator", algorithm.advantage_estimator)
    _check_name(POLICY_LOSSES, "loss_mode", algorithm.loss_mode)
    _check_has_rewards(config)
    estimator = ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)
    weights = {"weights": [c.weight for c in config.reward.components]} if _has_knob(estimator, "weights") else {}
    _check_knobs("advantage", algorithm.advantage_estimator, [estimator], weights | algorithm.advantage, config)
    losses = loss_functions(algorithm.loss_mode)
    _check_knobs("loss", algorithm.loss_mode, list(losses), algorithm.loss, config)
    _check_columns(algorithm)
    _check_engine_log_probs(config)
    _check_quantization(config)
    if needs_critic(algorithm):
        config.require_budget("critic")
    _check_kl(algorithm)
    _check_reference(config)
    _check_rejection(algorithm)
    _check_groups(config)
    _check_turns(config)
    _check_distillation(config)
    _check_rewards_act(config)
    _check_bootstrap(algorithm)
    _check_supervised(config)
    _check_warmup(config)
    _check_positive_examples(config)


def _check_has_rewards(config: Config) -> None:
    """Raise ConfigError if the run has neither reward functions nor reward models, but uses rewards.

    A run uses rewards to train the policy, unless the policy learns from teachers alone. `data.difficulty` and
    `trainer.reuse` use rewards to choose prompts and groups, and some advantage estimators read the score of each
    reward function.
    """
    algorithm = config.algorithm
    users = {
        "training": not algorithm.distillation.alone,
        "data.difficulty": config.data.difficulty is not None,
        "trainer.reuse": config.trainer.reuse is not None,
        f"algorithm.advantage_estimator={algorithm.advantage_estimator}": "reward_components" in _columns(algorithm),
    }
    user = next((name for name, uses in users.items() if uses), None)
    if config.reward.components or user is None:
        return
    with_environment = config.rollout.environment or config.rollout.agent
    names = [*["environment_reward"] * bool(with_environment), "exact_match", "numeric_match"]
    raise ConfigError(
        f"data.train={config.data.train} without a reward: reward.functions and reward.models are empty, but {user} "
        f"needs scores of the answers; set {', '.join(f'reward.functions=[{name}]' for name in names)}, or a function "
        "of your own, as in reward.functions=[my_reward.py:score]"
    )


def _columns(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    from rltrain.algorithms import ADVANTAGE_ESTIMATORS, columns_of

    return columns_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator))


def _has_knob(function: Callable[..., Any], name: str) -> bool:
    from rltrain.algorithms import knobs_of

    return name in knobs_of(function)


def _check_name(registry: Any, key: str, name: str, *others: str) -> None:
    names = (*registry.names(), *others)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        near = [ALIASES[name]] if ALIASES.get(name) in names else near
        hint = f"the nearest is '{near[0]}', and all names are" if near else "use one of"
        raise ConfigError(f"algorithm.{key}={name}: unknown {registry.kind}; {hint} {', '.join(names)}")


def _check_knobs(
    section: str, name: str, functions: list[Callable[..., Any]], knobs: Mapping[str, Any], config: Config
) -> None:
    """Raise ConfigError if a parameter of a loss or an advantage estimator is unknown or has an unsuitable value.

    `functions` contains the Python functions that compute the loss or the advantages, and `knobs` maps the names of
    the configured parameters to their values. A parameter is unknown if no function in `functions` has a parameter
    with this name. The values are tested by calling each function once on a tiny batch of two answers.
    """
    from rltrain.algorithms import check_knobs, columns_of, own_knobs

    try:
        check_knobs(name, functions, knobs)
        for function in functions:
            columns = [_tiny_column(column, len(config.reward.components)) for column in columns_of(function)]
            function(*columns, **own_knobs(function, knobs))
    except ValueError as error:
        raise ConfigError(f"algorithm.{section}.{' '.join(str(error).split())}") from None
    # A loss or estimator raises ArithmeticError, RuntimeError or TypeError if, for example, a number is too large for a
    # tensor.
    except (ArithmeticError, RuntimeError, TypeError) as error:
        shown = ", ".join(f"{key}={value}" for key, value in knobs.items())[:200]
        raise ConfigError(
            f"algorithm.{section}: '{name}' raises an error with the parameters {shown} ({error})"
        ) from None


def _tiny_column(name: str, components: int) -> Any:
    """Return the batch column `name` for a test of a loss or an estimator.

    The batch for the test has one prompt group: two answers with two tokens each.
    """
    import torch

    from rltrain.batch.column_families import COLUMNS

    if name in ("response_mask", "selected"):
        return torch.ones(2, 2, dtype=torch.bool)
    if name == "uid":
        return torch.zeros(2, dtype=torch.int64)
    if name in ("turn_index", "turn_states"):
        return torch.zeros(2, 2, dtype=torch.int64)
    if name == "reward_components":
        return torch.zeros(2, components)
    # In COLUMNS, the family "row" marks a batch column that holds one value per answer. COLUMNS does not contain
    # `log_probs`, because `log_probs` is no batch column: the update computes the log-probs itself.
    if name in COLUMNS and COLUMNS[name][0] == "row":
        return torch.ones(2, dtype=torch.bool) if name == "valid" else torch.zeros(2)
    return torch.zeros(2, 2)


def _check_columns(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if the estimator or the loss reads a batch column that the run does not have."""
    from rltrain.algorithms import required_columns
    from rltrain.batch.column_families import COLUMNS

    for name in sorted(required_columns(algorithm.advantage_estimator, algorithm.loss_mode) - {"log_probs"}):
        require(
            name in COLUMNS and name != "full_kl" and not name.startswith(("ref_hidden", "teacher")),
            f"algorithm.loss_mode={algorithm.loss_mode}, advantage_estimator={algorithm.advantage_estimator}: one of "
            f"them reads the column '{name}', which does not exist in this run; rltrain/batch/data_proto.py lists all "
            "columns",
        )
        require(
            name != "ref_log_probs" or algorithm.needs_ref_log_probs,
            f"algorithm.loss_mode={algorithm.loss_mode} reads ref_log_probs: without a KL term there is no reference "
            "model; set algorithm.kl_loss.kl_loss_coef",
        )


def _check_engine_log_probs(config: Config) -> None:
    """Raise ConfigError if the engine's log-probs are unsuitable for the estimator or the loss.

    With top-p or top-k sampling, the estimator and the loss must not read the engine's log-probs. If the old log-probs
    are the engine's, a token selector must not compare the old log-probs with the engine's log-probs, because the two
    are equal.
    """
    from rltrain.algorithms import columns_of, loss_functions, required_columns

    algorithm, rollout = config.algorithm, config.rollout
    require(
        not rollout.is_restricted
        or "rollout_log_probs" not in required_columns(algorithm.advantage_estimator, algorithm.loss_mode),
        f"{rollout.restriction} with algorithm.loss_mode={algorithm.loss_mode}, advantage_estimator="
        f"{algorithm.advantage_estimator}: one of the two reads the engine's log-probs, which belong to the restricted "
        "distribution; use rollout.top_p=1 rollout.top_k=0",
    )
    selector = {name for function in loss_functions(algorithm.loss_mode)[1:] for name in columns_of(function)}
    require(
        algorithm.old_log_probs == "actor" or not {"old_log_probs", "rollout_log_probs"} <= selector,
        f"algorithm.old_log_probs={algorithm.old_log_probs} with loss_mode={algorithm.loss_mode}: the loss selects "
        "tokens by the ratio of the actor's to the engine's probability, which would always be 1; use "
        "algorithm.old_log_probs=actor",
    )


def _check_quantization(config: Config) -> None:
    """Raise ConfigError if the loss would train on answers of a quantized engine without a correction.

    A quantized engine samples from another distribution than that of the trained weights.
    """
    from rltrain.algorithms import POLICY_LOSSES

    algorithm, quantization = config.algorithm, config.rollout.quantization
    uses_ratio = POLICY_LOSSES.metadata(algorithm.loss_mode).get("uses_ratio", True)
    require(
        quantization is None
        or algorithm.correction.level is not None
        or algorithm.rejection.kl_estimator is not None
        or (algorithm.old_log_probs == "rollout" and uses_ratio)
        or (algorithm.distillation.in_loss and algorithm.distillation.alone),
        f"rollout.vllm.quantization={quantization} with algorithm.correction.level=null: answers are sampled from the "
        "distribution of the quantized weights, so they need importance weights; use algorithm.correction.level=auto "
        "algorithm.old_log_probs=actor",
    )


def _check_kl(algorithm: AlgorithmConfig) -> None:
    from rltrain.algorithms import KL_ESTIMATORS

    _check_name(KL_ESTIMATORS, "kl_in_reward.kl_estimator", algorithm.kl_in_reward.kl_estimator, FULL_KL)
    _check_name(KL_ESTIMATORS, "kl_loss.kl_estimator", algorithm.kl_loss.kl_estimator, FULL_KL)
    estimator, loss = algorithm.kl_in_reward.kl_estimator, algorithm.kl_loss
    require(
        not estimator.endswith("+"),
        f"algorithm.kl_in_reward.kl_estimator={estimator}: the '+' changes only the gradient of the estimate, and a "
        f"reward has no gradient; use {estimator.rstrip('+')}",
    )
    require(
        loss.kl_loss_coef == 0 or loss.kl_estimator != "k1" or loss.ratio_weighted,
        "algorithm.kl_loss.kl_estimator=k1: the expected gradient of k1 is zero, so k1 only adds noise; use k1+, "
        "k3, or ratio_weighted=true",
    )
    require(
        algorithm.kl_in_reward.kl_coef == 0 or "reward_components" not in _columns(algorithm),
        f"algorithm.kl_in_reward.kl_coef={algorithm.kl_in_reward.kl_coef}: {algorithm.advantage_estimator} reads the "
        "score of each reward function and not the token rewards, which contain the KL penalty; use algorithm.kl_loss",
    )
    require(
        algorithm.kl_in_reward.kl_coef == 0 or "successes" not in _columns(algorithm),
        f"algorithm.kl_in_reward.kl_coef={algorithm.kl_in_reward.kl_coef}: {algorithm.advantage_estimator} reads only "
        "whether an answer is correct and not the token rewards, which contain the KL penalty; use algorithm.kl_loss",
    )


def _check_reference(config: Config) -> None:
    """Raise ConfigError if the reference model cannot be updated during training."""
    algorithm, every = config.algorithm, config.algorithm.reference.refresh_every
    require(
        every == 0 or algorithm.needs_reference,
        f"algorithm.reference.refresh_every={every}: without a KL term there is no reference model to update; set "
        "algorithm.kl_loss.kl_loss_coef or kl_in_reward.kl_coef, or refresh_every=0",
    )
    require(
        every == 0 or config.model.lora is None,
        f"algorithm.reference.refresh_every={every} with model.lora: the reference is the base model without adapters, "
        "and the actor's adapters cannot be merged into it without rounding; use model.lora=null, or refresh_every=0",
    )


def _check_rejection(algorithm: AlgorithmConfig) -> None:
    import torch

    from rltrain.algorithms import rollout_rejection

    if algorithm.rejection.kl_estimator is None:
        return
    settings = dataclasses.asdict(algorithm.rejection)
    settings.pop("only_negative")
    try:
        rollout_rejection(torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2), **settings)
    except ValueError as error:
        raise ConfigError(f"algorithm.rejection.{' '.join(str(error).split())}") from None


def _check_groups(config: Config) -> None:
    """Raise ConfigError if a setting compares answers to the same prompt, although each prompt gets only one answer.

    Raise ConfigError if dynamic sampling is on and the estimator does not compare answers to the same prompt.
    """
    algorithm, samples = config.algorithm, config.rollout.samples_per_prompt
    in_groups = "uid" in _columns(algorithm)
    users = {
        algorithm.advantage_estimator: in_groups and not algorithm.distillation.alone,
        "algorithm.dynamic_sampling": algorithm.dynamic_sampling > 0,
        "trainer.reuse": config.trainer.reuse is not None,
        "algorithm.reward_shaping.group_length_weight": algorithm.reward_shaping.group_length_weight > 0,
        "algorithm.reward_normalization.mean_level=group": algorithm.reward_normalization.mean_level == "group",
        "algorithm.reward_normalization.std_level=group": algorithm.reward_normalization.std_level == "group",
        "reward.aggregation=normalize_then_sum": config.reward.aggregation == "normalize_then_sum",
    }
    # With a critic, group normalisation of advantages is useful even for one answer per prompt, because the tokens of
    # the answer have different advantages.
    if "values" not in _columns(algorithm):
        levels = algorithm.advantage_normalization
        users["algorithm.advantage_normalization.mean_level=group"] = levels.mean_level == "group"
        users["algorithm.advantage_normalization.std_level=group"] = levels.std_level == "group"
    for name, compares in users.items():
        require(
            not compares or samples > 1,
            f"rollout.samples_per_prompt={samples}: {name} compares the answers to one prompt, so all advantages would "
            "be 0; use at least 2",
        )
    require(
        in_groups or not algorithm.dynamic_sampling,
        f"algorithm.dynamic_sampling={algorithm.dynamic_sampling} with {algorithm.advantage_estimator}: this "
        "estimator also learns from groups whose answers all have the same outcome, which dynamic sampling drops; use "
        "algorithm.dynamic_sampling=0",
    )


def _check_turns(config: Config) -> None:
    """Raise ConfigError if the estimator assigns credit to turns, but each answer has only one turn."""
    estimator = config.algorithm.advantage_estimator
    require(
        "turn_index" not in _columns(config.algorithm) or config.rollout.has_environment,
        f"algorithm.advantage_estimator={estimator} gives credit to the turns of a conversation, but each answer of "
        "this run has one turn; set rollout.environment, rollout.tools or rollout.agent, or use another estimator",
    )


def _check_distillation(config: Config) -> None:
    """Raise ConfigError if distillation cannot get the log-probs that it needs, or if distillation makes another
    setting ineffective.
    """
    algorithm, distillation = config.algorithm, config.algorithm.distillation
    for teacher in distillation.teachers:
        require(
            not teacher.is_endpoint or config.rollout.temperature == 1,
            f"rollout.temperature={config.rollout.temperature} with the endpoint {teacher.path}: an endpoint gives "
            "log-probs at temperature 1, but the answers are sampled at another temperature; use "
            "rollout.temperature=1, or set the teacher's path to a directory",
        )
    require(
        not (distillation.mode and algorithm.dynamic_sampling),
        f"algorithm.dynamic_sampling={algorithm.dynamic_sampling} with distillation: a teacher also teaches on groups "
        "whose answers all have the same outcome, which dynamic sampling drops; use algorithm.dynamic_sampling=0",
    )
    if distillation.alone:
        _check_teachers_alone(config)


def _check_teachers_alone(config: Config) -> None:
    """Raise ConfigError if a setting has no effect because the policy learns from teachers alone (`outcome_coef=0`).

    Settings that only change how rewards become advantages have no effect. If the teachers act through the loss
    (`mode=loss`), all advantages are 0. The policy loss then acts only if it has a term without the advantage, such as
    the penalty of `dro`.
    """
    algorithm, distillation = config.algorithm, config.algorithm.distillation
    shaping = algorithm.reward_shaping
    shaped = shaping.bias or shaping.scale != 1 or shaping.clip is not None or shaping.overlong_buffer
    dead = {
        f"algorithm.advantage_estimator={algorithm.advantage_estimator} (needs a critic)": needs_critic(algorithm),
        f"algorithm.advantage={algorithm.advantage}": bool(algorithm.advantage),
        "algorithm.reward_shaping": bool(shaped or shaping.group_length_weight),
        "algorithm.reward_normalization": algorithm.reward_normalization.on,
        "algorithm.advantage_normalization": algorithm.advantage_normalization.on,
        f"algorithm.kl_in_reward.kl_coef={algorithm.kl_in_reward.kl_coef}": algorithm.kl_in_reward.kl_coef > 0,
        "algorithm.suppress_truncated=true": algorithm.suppress_truncated,
        "algorithm.exclude_truncated=true": algorithm.exclude_truncated,
        "reward.aggregation": config.reward.aggregation != "sum",
    }
    if distillation.in_loss:
        dead[f"algorithm.advantage_clip={algorithm.advantage_clip}"] = algorithm.advantage_clip is not None
    only_choice = {"advantage_estimator": "grpo"}
    if distillation.in_loss and not _acts_without_advantages(algorithm):
        only_choice["loss_mode"] = "reinforce"
        if not _kl_reads_old_log_probs(algorithm):
            only_choice["old_log_probs"] = "actor"
        dead |= {
            f"algorithm.loss={algorithm.loss}": bool(algorithm.loss),
            f"algorithm.correction.level={algorithm.correction.level}": algorithm.correction.level is not None,
            f"algorithm.rejection.kl_estimator={algorithm.rejection.kl_estimator}": (
                algorithm.rejection.kl_estimator is not None
            ),
        }
    for name, on in dead.items():
        require(
            not on,
            f"{name} with algorithm.distillation.outcome_coef=0: the policy learns from the teachers alone, so this "
            "setting would have no effect; leave it out, or set algorithm.distillation.outcome_coef above 0",
        )
    for key, choice in only_choice.items():
        require(
            getattr(algorithm, key) == choice,
            f"algorithm.{key}={getattr(algorithm, key)} with algorithm.distillation.outcome_coef=0: the policy learns "
            f"from the teachers alone, so this choice would have no effect; use algorithm.{key}={choice}, or set "
            "algorithm.distillation.outcome_coef above 0",
        )


def _acts_without_advantages(algorithm: AlgorithmConfig) -> bool:
    """Return whether the policy loss has a gradient if all advantages are 0, as a loss with a penalty term has.

    The loss, and its token selector if there is one, are called once on a tiny batch.
    """
    import torch

    from rltrain.algorithms import columns_of, loss_functions, own_knobs

    loss, *selectors = loss_functions(algorithm.loss_mode)
    batch = {name: _tiny_column(name, 1) for function in (loss, *selectors) for name in columns_of(function)}
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]])
    batch |= {"log_probs": log_probs.requires_grad_(), "old_log_probs": log_probs.detach() + 0.1}

    def result_of(function: Callable[..., Any]) -> Any:
        return function(*(batch[name] for name in columns_of(function)), **own_knobs(function, algorithm.loss))

    for selector in selectors:
        batch["selected"] = result_of(selector)
    losses, _ = result_of(loss)
    return bool(torch.autograd.grad(losses.sum(), log_probs)[0].any())


def _kl_reads_old_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Return whether the distillation term or the KL term of the loss is multiplied by the ratio pi / pi_old."""
    kl = algorithm.kl_loss
    weighted = kl.kl_loss_coef > 0 and kl.ratio_weighted and not kl.full
    return weighted or (algorithm.distillation.in_loss and not algorithm.distillation.full)


def _check_rewards_act(config: Config) -> None:
    """Raise ConfigError if a setting that changes scores has no effect on the advantages, or makes the advantages
    wrong.
    """
    algorithm, reward = config.algorithm, config.reward
    columns, estimator = _columns(algorithm), algorithm.advantage_estimator
    gate = next((component.name for component in reward.components if component.gate), None)
    require(
        "reward_components" not in columns or gate is None,
        f"gate=true of reward function '{gate}' with {estimator}: this estimator adds up the scores of the "
        "functions itself, without gates; let the other functions return 0 for answers that fail the gate",
    )
    require(
        "reward_components" not in columns or reward.aggregation == "sum",
        f"reward.aggregation={reward.aggregation} with {estimator}: this estimator adds up the scores of the "
        "functions itself, each normalised in its group; use reward.aggregation=sum",
    )
    require(
        "baseline_rewards" not in columns or reward.aggregation != "normalize_then_sum",
        f"reward.aggregation=normalize_then_sum with {estimator}: the baseline is the score of a single greedy answer, "
        "and normalising a single score gives 0; use reward.aggregation=sum",
    )
    shaping = algorithm.reward_shaping
    changes_scores = shaping.bias or shaping.scale != 1 or shaping.clip is not None or shaping.overlong_buffer
    changes_scores = changes_scores or shaping.group_length_weight
    require(
        "reward_components" not in columns or not (changes_scores or algorithm.reward_normalization.on),
        f"algorithm.reward_shaping or reward_normalization with {estimator}: this estimator reads the score of "
        "each reward function, not the shaped sum of the scores; shape the scores in the functions",
    )
    require(
        "baseline_rewards" not in columns or not shaping.group_length_weight,
        f"algorithm.reward_shaping.group_length_weight={shaping.group_length_weight} with {estimator}: the length "
        "reward compares several answers to a prompt, but the baseline is the score of a single greedy answer; use "
        "algorithm.reward_shaping.overlong_buffer",
    )
    require(
        "baseline_rewards" not in columns or not algorithm.reward_normalization.on,
        f"algorithm.reward_normalization with {estimator}: the baseline (the score of a greedy answer) is not "
        "normalised, so scores and baseline would be on different scales; use algorithm.advantage_normalization",
    )
    require(
        "successes" not in columns or not (changes_scores or algorithm.reward_normalization.on),
        f"algorithm.reward_shaping or reward_normalization with {estimator}: this estimator reads only whether an "
        "answer is correct, so these settings would have no effect; remove them",
    )
    require(
        not _takes_scores_from_zero(estimator) or not _may_fall_below_zero(algorithm),
        f"algorithm.advantage_estimator={estimator} with reward_normalization, a KL penalty, or shaping that "
        "lowers or negates scores: the estimator divides by the mean score of the group, so scores must be >= 0; "
        "turn off the settings that can make scores negative, or use algorithm.kl_loss for a KL term",
    )
    require(
        not algorithm.exclude_truncated or not algorithm.suppress_truncated,
        "algorithm.exclude_truncated=true with suppress_truncated=true: suppress_truncated includes exclude_truncated; "
        "set only one of them",
    )
    statistics = "valid" in columns or algorithm.reward_normalization.on or algorithm.advantage_normalization.on
    require(
        not algorithm.exclude_truncated or statistics,
        f"algorithm.exclude_truncated=true with {estimator} and no normalisation: the run computes no score "
        "statistics, so exclude_truncated has no effect; use suppress_truncated or mask_truncated",
    )


def _takes_scores_from_zero(estimator: str) -> bool:
    """Return whether the estimator is defined only for scores that are at least 0."""
    from rltrain.algorithms import ADVANTAGE_ESTIMATORS

    return bool(ADVANTAGE_ESTIMATORS.metadata(estimator).get("scores_from_zero", False))


def _may_fall_below_zero(algorithm: AlgorithmConfig) -> bool:
    """Return whether shaping, normalisation or the KL penalty can make a nonnegative score negative."""
    shaping = algorithm.reward_shaping
    lowered = shaping.bias < 0 or shaping.scale < 0 or shaping.overlong_buffer > 0 or shaping.group_length_weight > 0
    return lowered or algorithm.reward_normalization.on or algorithm.kl_in_reward.kl_coef > 0


def _check_bootstrap(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if `bootstrap_truncated` is on but cannot work or has no effect, because of other settings.

    With `bootstrap_truncated`, a truncated answer gets an extra reward: gamma times the critic's value of the state in
    which the answer was cut off. The option `bootstrap_truncated` works only if the run has a critic, gamma is above 0,
    and neither `suppress_truncated` nor `mask_truncated` is on.
    """
    if not algorithm.bootstrap_truncated:
        return
    require(
        needs_critic(algorithm),
        f"algorithm.bootstrap_truncated=true with {algorithm.advantage_estimator}: this estimator has no critic to "
        "estimate the missing reward of a truncated answer; use bootstrap_truncated=false, or algorithm=ppo",
    )
    require(
        not algorithm.suppress_truncated,
        "algorithm.bootstrap_truncated=true with suppress_truncated=true: bootstrap_truncated adds an estimate of the "
        "missing reward to a truncated answer, and suppress_truncated lowers its score; set only one of them",
    )
    require(
        not algorithm.mask_truncated,
        "algorithm.bootstrap_truncated=true with mask_truncated=true: no token of a truncated answer is trained on, so "
        "bootstrapping would have no effect; set only one of them",
    )
    require(
        algorithm.advantage.get("gamma", 1.0) > 0,
        "algorithm.bootstrap_truncated=true with algorithm.advantage.gamma=0: the critic's value is multiplied by "
        "gamma, so bootstrapping would have no effect; set gamma above 0, or bootstrap_truncated=false",
    )


def _check_supervised(config: Config) -> None:
    """Raise ConfigError if the supervised loss is on without supervised answers, or if supervised answers are
    configured without the supervised loss.
    """
    coef, response = config.algorithm.sft_coef, config.data.sft_response
    require(
        coef == 0 or response is not None,
        f"algorithm.sft_coef={coef:g} with data.sft_response=null: there are no supervised answers to train on; name "
        "the column that holds them, as in data.sft_response=solution, or set algorithm.sft_coef=0",
    )
    require(
        coef > 0 or response is None,
        f"data.sft_response={response} with algorithm.sft_coef=0: nothing would be learned from supervised answers; "
        "set algorithm.sft_coef above 0, or data.sft_response=null",
    )


def _check_warmup(config: Config) -> None:
    """Raise ConfigError if the config asks for a warm-up of a critic that the run does not have."""
    steps, estimator = config.critic.warmup_steps, config.algorithm.advantage_estimator
    require(
        steps == 0 or needs_critic(config.algorithm),
        f"critic.warmup_steps={steps} with {estimator}: this estimator has no critic to warm up; use "
        "critic.warmup_steps=0, or algorithm=ppo",
    )


def _check_positive_examples(config: Config) -> None:
    """Raise ConfigError if the loss needs correct answers, but no reward function or reward model can declare an answer
    correct.

    User-defined reward functions are accepted, because whether they return `RewardResult.success` is known only after
    their first calls.
    """
    coefficient, reward = config.algorithm.positive_nll_coef, config.reward
    decides = any(component.success is not None for component in reward.components)
    users = any(not builtin_path(function.path).startswith("rltrain.") for function in reward.functions)
    require(
        coefficient == 0 or decides or users,
        f"algorithm.positive_nll_coef={coefficient:g}: no reward function or model decides whether an answer is "
        "correct, so the term would be 0; set `success` for one of them, or use algorithm.positive_nll_coef=0",
    )
