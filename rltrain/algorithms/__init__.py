"""Reinforcement-learning algorithms as pure functions on tensors: a library of its own, which imports only torch.

Importing it fills the registries; `registry` states what every registered function promises.
"""

from rltrain.algorithms import advantages as _advantages
from rltrain.algorithms import policy_losses as _policy_losses
from rltrain.algorithms.aggregation import aggregate_loss
from rltrain.algorithms.correction import rollout_correction
from rltrain.algorithms.kl import AdaptiveKLController, FixedKLController, apply_kl_in_reward, kl_estimate
from rltrain.algorithms.normalization import combine_rewards, normalize_advantages, normalize_rewards
from rltrain.algorithms.registry import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TOKEN_SELECTORS,
    check_knobs,
    columns_of,
    knobs_of,
)
from rltrain.algorithms.value_loss import value_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "TOKEN_SELECTORS",
    "AdaptiveKLController",
    "FixedKLController",
    "aggregate_loss",
    "apply_kl_in_reward",
    "check_knobs",
    "columns_of",
    "combine_rewards",
    "kl_estimate",
    "knobs_of",
    "normalize_advantages",
    "normalize_rewards",
    "rollout_correction",
    "value_loss",
]

del _advantages, _policy_losses  # imported for what they register
