"""The language-model loss of correct answers (positive examples), which VAPO adds to the policy loss."""

from torch import Tensor

from rltrain.algorithms.aggregation import aggregate_loss
from rltrain.algorithms.ratio import as_mask


def positive_nll(
    log_probs: Tensor,
    response_mask: Tensor,
    positive_mask: Tensor,
    *,
    num_positive_tokens: int | Tensor | None = None,
) -> Tensor:
    """Compute the mean negative log-likelihood of the tokens of correct answers; VAPO, arXiv 2504.05118 section 4.3.

        L_NLL = - sum_{i in C} sum_t log pi(y_{i,t}) / sum_{i in C} |y_i|

    C is the set of the correct answers of the mini-batch, and |y_i| is the number of trained tokens of answer i. The
    denominator of L_NLL counts only tokens of correct answers, so L_NLL does not become weaker if few answers are
    correct. The loss L_NLL weighs all tokens of the correct answers equally, whatever the aggregation of the policy
    loss is.

    Args:
        log_probs: log-probs of the current policy, (B, T), through which the gradient flows.
        response_mask: True at trained tokens, (B, T).
        positive_mask: True at the tokens of correct answers, (B, T). Tokens outside `response_mask` are ignored.
        num_positive_tokens: number of trained tokens of correct answers in the whole mini-batch, over all micro-batches
            and ranks. If `num_positive_tokens` is None, only the tokens in the arguments of `positive_nll` are counted.

    Returns:
        A 0-dim tensor: the part of the negative log-likelihood loss that comes from the given tokens; exactly 0 if no
        answer is correct.
    """
    counted = as_mask(response_mask) & as_mask(positive_mask)
    return aggregate_loss(-log_probs, counted, "token-mean", num_tokens=num_positive_tokens)
