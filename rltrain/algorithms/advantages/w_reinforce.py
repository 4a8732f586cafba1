"""Advantages from correctness alone: positive (PSR) or negative (NSR) sample reinforcement, and W-REINFORCE."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import counted_rows, known_successes, spread
from rltrain.algorithms.ratio import as_float
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("w_reinforce", statistics="none")
def w_reinforce(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    valid: Tensor,
    successes: Tensor,
    *,
    positive_weight: float = 0.1,
    negative_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute A_t = positive_weight for a correct answer, -negative_weight for a wrong answer; arXiv 2506.01347.

    The defaults of `positive_weight` and `negative_weight` are those of W-REINFORCE. With `positive_weight` 0, the
    policy learns only from wrong answers, which is negative sample reinforcement (NSR). With `negative_weight` 0, the
    policy learns only from correct answers, which is positive sample reinforcement (PSR). `w_reinforce` subtracts no
    baseline, so the advantages of a row do not depend on other rows.

    `successes` is 1 for a correct answer, 0 for a wrong one, and NaN if no reward function decides whether the answer
    is correct. A row that is not `valid`, or whose entry in `successes` is NaN, gets an advantage of 0. `w_reinforce`
    does not read `token_level_rewards`, so reward shaping and KL penalties in the reward have no effect.

    token_level_rewards and response_mask are (B, T); valid and successes are (B,). The advantages are (B, T) and 0 in
    masked slots. The returns equal the advantages.

    Raises:
        ValueError: if a weight is negative or not finite, if both weights are 0, or if `successes` is NaN for all valid
            rows.
    """
    for name, weight in (("positive_weight", positive_weight), ("negative_weight", negative_weight)):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}={weight} must be finite and >= 0; use 0 to ignore the answers with this weight")
    if positive_weight == negative_weight == 0:
        raise ValueError("positive_weight=0 with negative_weight=0: nothing is learnt; set at least one above 0")
    decided = known_successes(successes, counted_rows(response_mask, valid))
    correct = decided & (successes > 0)
    advantages = as_float(token_level_rewards.detach()).new_zeros(len(successes))
    advantages = advantages.masked_fill(correct, positive_weight).masked_fill(decided & ~correct, -negative_weight)
    return spread(advantages, response_mask)
