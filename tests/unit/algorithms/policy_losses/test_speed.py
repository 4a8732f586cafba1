"""No loss takes more than three times as long as the vanilla loss, forward and backward."""

import time

import torch

from rltrain.algorithms import POLICY_LOSSES, columns_of

ROWS, LENGTH, ROUNDS = 64, 4096, 5


def cpu_seconds(function, columns):
    log_probs = columns[0].clone().requires_grad_()
    start = time.process_time()
    losses, _ = function(log_probs, *columns[1:])
    losses.sum().backward()
    return time.process_time() - start


def test_no_loss_is_slower_than_three_times_vanilla():
    generator = torch.Generator().manual_seed(0)
    old, noise, advantages, draws = (torch.randn(ROWS, LENGTH, generator=generator) for _ in range(4))
    batch = {
        "log_probs": -old.abs() + 0.3 * noise,
        "old_log_probs": -old.abs(),
        "advantages": advantages,
        "response_mask": torch.rand(ROWS, LENGTH, generator=generator) < 0.8,
        "selected": draws > 1,
    }
    functions = {name: POLICY_LOSSES.get(name) for name in POLICY_LOSSES.names()}
    columns = {name: [batch[column] for column in columns_of(f)] for name, f in functions.items()}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):  # the losses take turns, so that a busy moment of the machine slows down all losses
        for name, function in functions.items():
            best[name] = min(best[name], cpu_seconds(function, columns[name]))
    slow = {name: seconds / best["vanilla"] for name, seconds in best.items() if seconds > 3 * best["vanilla"]}
    assert not slow
