"""Fixtures that compare policy losses with results computed by hand, and with a slow oracle on a whole batch."""

import pytest
import torch

from rltrain.algorithms import POLICY_LOSSES, aggregate_loss


def evaluate(name, log_probs, old, advantages, mask, selected, **knobs):
    """Return the losses, the gradient of their sum with respect to log pi, and the metrics as numbers."""
    log_probs = log_probs.clone().requires_grad_()
    columns = [log_probs, old, advantages, mask, *([] if selected is None else [selected])]
    losses, metrics = POLICY_LOSSES.get(name)(*columns, **knobs)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    return losses.detach(), gradient, {key: value.item() for key, value in metrics.items()}


@pytest.fixture
def by_hand():
    def run(name, ratios, advantages, mask=None, *, selected=None, old_probability=0.1, **knobs):
        ratios, advantages = (torch.tensor(values, dtype=torch.float64) for values in (ratios, advantages))
        old = torch.full_like(ratios, old_probability).log()
        mask = torch.ones_like(ratios) if mask is None else torch.tensor(mask)
        selected = None if selected is None else torch.tensor(selected)
        return evaluate(name, old + ratios.log(), old, advantages, mask, selected, **knobs)

    return run


@pytest.fixture
def against(make_batch):
    """Compare the losses and the gradient of a batch with those of `oracle`, one token at a time.

    The oracle gets log pi, log pi_old and the advantage A of one token, and whether the token is selected. The argument
    `row` lists the pairs (log-ratio, advantage) of all trained tokens of the token's row. The oracle returns the loss,
    the gradient and the name of the branch that applies to the token. The fixture returns the names of all branches.
    """

    def run(name, oracle, *, selected=False, spread=1.0, length=16, **knobs):
        batch = make_batch(spread=spread, length=length)
        mask, chosen = batch["response_mask"], batch["selected"] if selected else None
        columns = [batch[c] for c in ("log_probs", "old_log_probs", "advantages")]
        losses, gradient, _ = evaluate(name, *columns, mask, chosen, **knobs)
        branches = set()
        for i, t in mask.nonzero().tolist():
            new, old, a = (column[i, t].item() for column in columns)
            row = [(x - y).item() for x, y in zip(columns[0][i][mask[i]], columns[1][i][mask[i]], strict=True)]
            advantages = columns[2][i][mask[i]].tolist()
            token = {"new": new, "old": old, "a": a, "selected": bool(batch["selected"][i, t])}
            loss, slope, branch = oracle(**token, row=list(zip(row, advantages, strict=True)))
            branches.add(branch)
            assert losses[i, t].item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
            assert gradient[i, t].item() == pytest.approx(slope, rel=1e-9, abs=0)
        assert (losses[~mask] == 0).all()
        assert (gradient[~mask] == 0).all()
        return branches

    return run


@pytest.fixture
def gradcheck(make_batch):
    def run(name, *, selected=False, **knobs):
        batch = make_batch(spread=1.0)
        rest = [batch[c] for c in ("old_log_probs", "advantages", "response_mask", *(["selected"] if selected else []))]
        function = POLICY_LOSSES.get(name)
        return torch.autograd.gradcheck(lambda x: function(x, *rest, **knobs)[0], batch["log_probs"].requires_grad_())

    return run


@pytest.fixture
def as_sequence_objective(make_batch):
    """Compare the value and the gradient of a loss with those of a sequence objective from a paper.

    Advantages are equal within a row, and the loss is aggregated with seq-mean-token-mean. The function `objective`
    gets log pi, log pi_old, the advantage of each row, the mask, and the lower and the upper clip range.
    """

    def run(name, objective, low, high):
        batch = make_batch(spread=0.5)
        mask, old, per_row = batch["response_mask"], batch["old_log_probs"], batch["advantages"][:, 0]
        token_side, sequence_side = (batch["log_probs"].clone().requires_grad_() for _ in range(2))
        function, advantages = POLICY_LOSSES.get(name), per_row[:, None].expand_as(old)
        losses, metrics = function(token_side, old, advantages, mask, clip_ratio_low=low, clip_ratio_high=high)
        token_loss = aggregate_loss(losses, mask, "seq-mean-token-mean")
        sequence_loss = objective(sequence_side, old, per_row, mask, low, high)
        (token_gradient,) = torch.autograd.grad(token_loss, token_side)
        (gradient,) = torch.autograd.grad(sequence_loss, sequence_side)
        assert token_loss.item() == pytest.approx(sequence_loss.item(), rel=1e-12)
        assert torch.allclose(token_gradient, gradient, rtol=1e-10, atol=1e-14)
        assert metrics["clip_fraction"].item() == ((gradient == 0) & mask).sum()
        assert 0 < metrics["clip_fraction"].item() < mask.sum()

    return run
