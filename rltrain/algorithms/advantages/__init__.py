"""Advantage estimators: (token_level_rewards, response_mask, columns..., *, knobs) -> (advantages, returns)."""

from rltrain.algorithms.advantages import gae, grpo, rloo

__all__ = ["gae", "grpo", "rloo"]
