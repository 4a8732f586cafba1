"""Reinforcement-learning algorithms as pure functions on tensors, in a package that imports only torch.

Importing the package `rltrain.algorithms` registers all algorithms by name. The module `rltrain.algorithms.registry`
states the contract that every registered function follows.
"""

from rltrain.algorithms import advantages as _advantages
from rltrain.algorithms import policy_losses as _policy_losses
from rltrain.algorithms.advantages.returns import returns_to_go
from rltrain.algorithms.advantages.turns import turn_returns_to_go
from rltrain.algorithms.aggregation import aggregate_loss
from rltrain.algorithms.controllers import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedEntropyController,
    FixedKLController,
)
from rltrain.algorithms.correction import (
    effective_sample_size,
    rollout_correction,
    rollout_diagnostics,
    rollout_rejection,
)
from rltrain.algorithms.correction_statistics import CorrectionStatistics, correction_statistics
from rltrain.algorithms.distillation import distilled_advantages, sampled_teacher_kl
from rltrain.algorithms.draws import uniform_draws
from rltrain.algorithms.full_kl import full_kl
from rltrain.algorithms.kl import apply_kl_in_reward, kl_estimate
from rltrain.algorithms.normalization import combine_rewards, normalize_advantages, normalize_rewards
from rltrain.algorithms.positive_nll import positive_nll
from rltrain.algorithms.registry import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TOKEN_SELECTORS,
    check_knobs,
    columns_of,
    knobs_of,
    loss_functions,
    own_knobs,
    required_columns,
)
from rltrain.algorithms.shaping import group_length_reward, overlong_penalty, shape_scores, suppress_truncated
from rltrain.algorithms.supervised_loss import supervised_loss
from rltrain.algorithms.value_loss import value_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "TOKEN_SELECTORS",
    "AdaptiveEntropyController",
    "AdaptiveKLController",
    "CorrectionStatistics",
    "FixedEntropyController",
    "FixedKLController",
    "aggregate_loss",
    "apply_kl_in_reward",
    "check_knobs",
    "columns_of",
    "combine_rewards",
    "correction_statistics",
    "distilled_advantages",
    "effective_sample_size",
    "full_kl",
    "group_length_reward",
    "kl_estimate",
    "knobs_of",
    "loss_functions",
    "normalize_advantages",
    "normalize_rewards",
    "overlong_penalty",
    "own_knobs",
    "positive_nll",
    "required_columns",
    "returns_to_go",
    "rollout_correction",
    "rollout_diagnostics",
    "rollout_rejection",
    "sampled_teacher_kl",
    "shape_scores",
    "supervised_loss",
    "suppress_truncated",
    "turn_returns_to_go",
    "uniform_draws",
    "value_loss",
]

del _advantages, _policy_losses  # importing the packages `advantages` and `policy_losses` registers their functions
