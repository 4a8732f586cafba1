"""The supervised loss: the cross-entropy of answers that come from the data and not from the policy."""

from torch import Tensor

from rltrain.algorithms.ratio import as_mask, masked


def supervised_loss(log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the cross-entropy of each token of supervised answers (B, T), in nats.

        l_t = -log pi(y_t | x, y_<t)

    x is a prompt, y is the supervised answer to the prompt, and pi is the current policy. The mean of the cross-entropy
    l over all tokens of all supervised answers is the loss of supervised fine-tuning. An update that learns from
    rewards and from supervised answers minimizes L_RL + c * mean(l), where L_RL is the loss of the sampled answers,
    mean(l) is the mean cross-entropy of the supervised answers and c is `algorithm.sft_coef`. PPO-ptx (arXiv 2203.02155
    eq. 2) adds the cross-entropy of text from the pretraining data to the PPO loss. CHORD (arXiv 2508.11408) weights
    the loss L_RL of the sampled answers and the supervised loss mean(l): it minimizes (1 - mu) * L_RL + mu * mean(l),
    which equals (1 - mu) * (L_RL + c * mean(l)) with c = mu / (1 - mu).

    `log_probs` (B, T) are log-probs of the current policy. The gradient of a trained token's cross-entropy with respect
    to the token's log-prob is -1. Masked slots have loss 0 and no gradient, even if a slot holds NaN.
    """
    return -masked(log_probs, as_mask(response_mask))
