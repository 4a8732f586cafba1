"""Policy losses: (log_probs, old_log_probs, advantages, response_mask, ..., *, knobs) -> (token_losses, metrics)."""

from rltrain.algorithms.policy_losses import gspo, vanilla

__all__ = ["gspo", "vanilla"]
