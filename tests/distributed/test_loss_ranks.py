"""Tests that every loss term has the gradient of the whole batch, however the rows are split over gloo ranks.

Each rank runs the test file as a program. All cases run in one torch.distributed process group, and each failure is
reported with the name of its case.
"""

import importlib.util
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.algorithms import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TOKEN_SELECTORS,
    aggregate_loss,
    columns_of,
    full_kl,
    kl_estimate,
    positive_nll,
    rollout_correction,
    rollout_rejection,
    sampled_teacher_kl,
    supervised_loss,
    value_loss,
)
from rltrain.algorithms.aggregation import LOSS_AGG_MODES
from rltrain.algorithms.ratio import safe_log_ratio

ROOT = Path(__file__).parents[2]
TERMS = (
    *(f"policy:{name}" for name in POLICY_LOSSES.names()),
    *(f"dropped:{name}" for name in POLICY_LOSSES.names()),  # policy losses that drop off-policy tokens
    *(f"kl:{name}" for name in KL_ESTIMATORS.names()),
    *(f"weighted_kl:{name}" for name in KL_ESTIMATORS.names()),
    "entropy",
    "value",
    "supervised",
    "squared_log_ratio",
    "teacher_kl:sampled",
    "teacher_kl:full",
)
SPLITS = {  # for 1, 2 and 3 ranks, several lists with the rows of each rank; row 3 has no trained token
    1: [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    2: [[[0, 1, 2, 3, 4], [5, 6, 7]], [[7, 2, 0, 6, 4, 1, 3, 5], []], [[3], [0, 1, 2, 4, 5, 6, 7]]],
    3: [[[0, 1, 2, 3], [4, 5, 6], [7]], [[6, 1], [], [0, 7, 2, 3, 5, 4]], [[0, 1, 2, 4], [3], [5, 6, 7]]],
}
FEATURES, VOCABULARY, TOLERANCE = 3, 5, 1e-10
# The negative log-likelihood of correct answers is a mean over their tokens, whatever the aggregation mode is.
CASES = [*((term, mode) for term in TERMS for mode in LOSS_AGG_MODES), ("positive_nll", "token-mean")]


def batch_builder():
    """Load tests/unit/algorithms/conftest.py by path, and return its function `build_batch`."""
    path = ROOT / "tests" / "unit" / "algorithms" / "conftest.py"
    spec = importlib.util.spec_from_file_location("algorithms_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_batch


def chosen(logits, responses):
    return logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]


def make_batch():
    """Make a batch with every column that a loss may need, and the weight matrix of a linear model.

    The linear model computes logits from the batch's features.
    """
    batch = batch_builder()(seed=1)
    generator = torch.Generator().manual_seed(2)
    shape = batch["response_mask"].shape
    weight = torch.randn(FEATURES, VOCABULARY, generator=generator, dtype=torch.float64)
    batch["features"] = torch.randn(*shape, FEATURES, generator=generator, dtype=torch.float64)
    batch["responses"] = torch.randint(VOCABULARY, shape, generator=generator)
    logits = batch["features"] @ weight
    batch["old_log_probs"] = chosen(logits + 0.3 * torch.sin(7 * logits), batch["responses"])
    batch["ref_log_probs"] = chosen(logits + 0.5 * torch.cos(5 * logits), batch["responses"])
    batch["rollout_log_probs"] = chosen(logits + 0.6 * torch.sin(3 * logits), batch["responses"])
    batch["teacher_logits"] = logits + 0.4 * torch.sin(9 * logits)
    batch["teacher_log_probs"] = chosen(batch["teacher_logits"], batch["responses"])
    return batch, weight


def token_terms(term, batch, weight):
    """Return the token losses and metrics of one loss term, with logits computed for the rows of `batch`."""
    kind, _, name = term.partition(":")
    logits = batch["features"] @ weight
    batch = {**batch, "log_probs": chosen(logits, batch["responses"])}
    if kind in ("policy", "dropped"):
        loss = POLICY_LOSSES.get(name)
        losses, metrics = loss(*(batch[column] for column in columns_of(loss)))
        return (losses, metrics) if kind == "policy" else without_dropped(losses, metrics, batch)
    if kind == "entropy":
        return (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1), {}
    if kind == "supervised":
        return supervised_loss(batch["log_probs"], batch["response_mask"]), {}
    if kind == "squared_log_ratio":
        return safe_log_ratio(batch["log_probs"], batch["rollout_log_probs"], batch["response_mask"]).square(), {}
    if term == "teacher_kl:sampled":
        columns = ("log_probs", "old_log_probs", "teacher_log_probs", "taught")
        return sampled_teacher_kl(*(batch[column] for column in columns)), {}
    if term == "teacher_kl:full":
        own, teacher = batch["features"].flatten(0, 1), batch["teacher_logits"].flatten(0, 1)
        kl = full_kl(own, weight.T, teacher, torch.eye(VOCABULARY, dtype=torch.float64))
        return torch.where(batch["taught"], kl.view(batch["taught"].shape), 0), {}
    if kind == "value":
        return value_loss(logits.sum(-1), batch["old_values"], batch["returns"], batch["response_mask"])
    old = batch["old_log_probs"] if kind == "weighted_kl" else None
    return kl_estimate(batch["log_probs"], batch["ref_log_probs"], name, old_log_probs=old), {}


def without_dropped(losses, metrics, batch):
    """Apply correction weights to the policy losses of tokens, and zero the losses that correction or rejection drops.

    Returns the token losses, and the metrics of the loss, the correction and the rejection.
    """
    columns = batch["rollout_log_probs"], batch["response_mask"]
    bounds = {"level": "token", "mode": "mask", "lower": 0.4, "upper": 2.5}
    weights, inside, corrected = rollout_correction(batch["old_log_probs"], *columns, **bounds)
    kept, rejected = rollout_rejection(
        batch["log_probs"], *columns, batch["advantages"], kl_estimator="k1", level="sequence", upper=0.1
    )
    metrics = metrics | {f"correction {key}": value for key, value in corrected.items()}
    metrics |= {f"rejection {key}": value for key, value in rejected.items()}
    return torch.where(inside & kept, weights * losses, 0), metrics


def with_selected(term, batch):
    """If the loss has a token selector, add the selector's column, which is computed once for the whole mini-batch."""
    name = term.partition(":")[2]
    if name not in TOKEN_SELECTORS.names():
        return batch
    selector = TOKEN_SELECTORS.get(name)
    return {**batch, "selected": selector(*(batch[column] for column in columns_of(selector)))}


def gradient_and_metrics(term, mode, batch, weight, num_positive_tokens=None, **counts):
    """Return the gradient of the loss with respect to the weights, and the sums of the metrics.

    Losses are divided by the counts, which cover the rows of all ranks.
    """
    weight, mask = weight.clone().requires_grad_(), batch["response_mask"]
    if term == "positive_nll":
        log_probs = chosen(batch["features"] @ weight, batch["responses"])
        loss = positive_nll(log_probs, mask, batch["positive_mask"], num_positive_tokens=num_positive_tokens)
        return torch.autograd.grad(loss, weight)[0], {}
    losses, metrics = token_terms(term, batch, weight)
    loss = aggregate_loss(losses, mask, mode, max_response_length=16, **counts)
    return torch.autograd.grad(loss, weight)[0], metrics


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor


def far_apart(actual, expected):
    return not (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


def failures_of(term, mode, batch, weight, rows, wanted):
    """Compare the sums over all ranks with `wanted`, the result of one process that has all rows.

    Each rank computes the gradient and the metrics of the rank's own `rows`.
    """
    whole, expected = wanted
    part = {name: column[rows] for name, column in batch.items()}
    mask = part["response_mask"]
    counts = {"num_tokens": summed(mask.sum()), "num_sequences": summed(mask.any(-1).sum())}
    counts["num_positive_tokens"] = summed((mask & part["positive_mask"]).sum())
    gradient, metrics = gradient_and_metrics(term, mode, part, weight, **counts)
    names = sorted(expected)
    missing = torch.tensor(torch.nan, dtype=torch.float64)
    sums = torch.stack([missing * 0, *(metrics.get(name, missing).double() for name in names)])
    gradient, sums = summed(gradient), summed(sums)
    found = []
    if not whole.abs().max() > 1e-3:
        found.append("the gradient is too small to compare")
    if far_apart(gradient, whole):
        found.append("gradient")
    if metrics.keys() != expected.keys():
        found.append(f"a rank has the metrics {sorted(metrics)}, and the whole batch has {names}")
    return found + [name for name, value in zip(names, sums[1:], strict=True) if far_apart(value, expected[name])]


def run_rank(rank, ranks, folder):
    """Test every loss term with every split of the rows over ranks, and write the rank's failures to a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    batch, weight = make_batch()
    failed, seen = {}, []
    for term, mode in CASES:
        columns = with_selected(term, batch)
        seen.append(f"{term} {mode}")
        wanted = gradient_and_metrics(term, mode, columns, weight)
        for split in SPLITS[ranks]:
            rows = torch.tensor(split[rank], dtype=torch.int64)
            if found := failures_of(term, mode, columns, weight, rows, wanted):
                failed[f"{term} {mode} {split}"] = found
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps({"failed": failed, "seen": seen}))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SPLITS)
def test_A2_any_split_over_ranks_gives_the_gradient_and_the_metric_sums_of_one_process(ranks, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, __file__, str(rank), str(ranks), str(tmp_path)] for rank in range(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    for rank in range(ranks):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report == {"failed": {}, "seen": [f"{term} {mode}" for term, mode in CASES]}


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
