"""Metrics of each evaluation set: reward, accuracy, pass@k and answer length, for sampled and for greedy answers."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from rltrain.batch.data_proto import DataProto
from rltrain.monitoring.step_metrics import sample_metrics

# Sampled answers are generated at the run's temperature. Greedy answers consist of the most likely token at each
# position.
KINDS = ("sampled", "greedy")
_LENGTH = re.compile(r"eval/(?:(?P<name>[^/]+)/)?sampled_length")


def prefix_of(name: str, kind: str) -> str:
    """Return the metric prefix of an evaluation set's sampled or greedy answers, such as `eval/aime/greedy`.

    Args:
        name: name of the evaluation set in `data.val_sets`; "" for the evaluation set of `data.val`.
        kind: kind of the answers, "sampled" or "greedy".
    """
    return f"eval/{name}/{kind}" if name else f"eval/{kind}"


def evaluated_sets(metrics: Iterable[str]) -> list[str]:
    """Return the names of the evaluation sets that occur in the given metric names.

    The evaluation set of the config key `data.val` has the name "".
    """
    found = (_LENGTH.fullmatch(metric) for metric in metrics)
    return [match["name"] or "" for match in found if match]


def evaluation_metrics(batch: DataProto, components: Sequence[str], prefix: str) -> dict[str, float]:
    """Compute the metrics of the answers to the prompts of one evaluation set.

    The metrics accuracy and pass@k are computed only if a reward function decides which answers are correct. A run
    without rewards has no reward metrics.

    Args:
        batch: answers with scores; the answers to one prompt have the same `uid`.
        components: names of the reward functions and reward models; empty in a run without rewards.
        prefix: common prefix of the metric names, from `prefix_of`.
    """
    samples = sample_metrics(batch, components)
    names = {"reward/accuracy": "accuracy", "rollout/length_mean": "length"}
    if components:
        names = {"reward/mean": "reward", "reward/failed_fraction": "failed_fraction"} | names
    names |= {f"reward/{component}/mean": f"reward/{component}" for component in components}
    metrics = {f"{prefix}_{own}": samples[name] for name, own in names.items() if name in samples}
    for k, value in _pass_at_each_k(batch):
        metrics[f"{prefix}_pass_at_{k}"] = value
    return metrics


def _pass_at_each_k(batch: DataProto) -> Iterator[tuple[int, float]]:
    """Yield (k, pass@k) for k = 2, 4, 8, ... and for k equal to the largest number of answers to one prompt.

    For each k, pass@k is averaged over the prompts with at least k answers. Answers that are neither correct nor wrong,
    such as answers whose reward function failed, are ignored in pass@k.
    """
    successes, uid = batch.batch["successes"], batch.batch["uid"]
    decided = batch.batch["valid"] & ~successes.isnan()
    groups = [successes[decided & (uid == one)] for one in uid.unique()]
    most = max((len(group) for group in groups), default=0)
    for k in sorted({2**power for power in range(1, most.bit_length())} | {most}):
        enough = [group for group in groups if len(group) >= k > 1]
        if enough:
            yield k, sum(pass_at_k(group, k) for group in enough) / len(enough)


def pass_at_k(successes: Tensor, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k answers to a prompt is correct.

    For n answers to a prompt, of which c are correct, the estimate of pass@k is 1 - C(n - c, k) / C(n, k), where C is
    the binomial coefficient (arXiv 2107.03374, equation 1).

    Args:
        successes: tensor (n,) with one value for each of the n >= k answers to a prompt: 1 for a correct answer, and 0
            for a wrong answer.
        k: number of answers that pass@k draws from the n answers to a prompt.
    """
    count, correct = len(successes), int(successes.sum())
    return 1 - math.comb(count - correct, k) / math.comb(count, k)
