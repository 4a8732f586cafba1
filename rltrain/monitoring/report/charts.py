"""Decides which charts a report page shows, in which order, and which metrics share a chart."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rltrain.monitoring.catalogue import METRICS

# Each entry of CHARTS has the title and the metrics of a main chart. A `*` in a metric name of CHARTS matches any text
# without a slash, and each matching metric gets a separate chart. Each metric that no entry of CHARTS matches, except
# the `timing/` metrics, gets a separate chart below the main charts.
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean",)),
    ("", ("reward/*/mean",)),
    ("accuracy", ("eval/greedy_accuracy", "eval/sampled_accuracy", "reward/accuracy")),
    ("reward of evaluations", ("eval/greedy_reward", "eval/sampled_reward")),
    ("answer length", ("rollout/length_mean", "eval/sampled_length", "eval/greedy_length")),
    ("truncated answers", ("rollout/truncated_fraction",)),
    ("KL", ("actor/ref_kl", "reward/kl", "actor/ppo_kl")),
    ("KL to the teachers", ("actor/teacher_kl",)),
    ("", ("actor/teacher_kl/*",)),
    ("entropy", ("rollout/entropy", "actor/entropy")),
    ("clip fraction", ("actor/clip_fraction", "actor/clip_fraction_c", "actor/weight_clip_fraction")),
    ("groups without a signal", ("reward/zero_spread_fraction", "reward/same_outcome_fraction")),
    ("engine gap", ("rollout/log_prob_gap", "actor/engine_gap")),
    ("staleness", ("rollout/staleness_mean", "rollout/staleness_max")),
    ("gradient norm", ("actor/grad_norm", "actor/grad_norm_max")),
    ("learning rate", ("actor/lr", "critic/lr")),
    ("critic", ("critic/explained_variance",)),
    ("speed", ("perf/tokens_per_s",)),
)
PHASES = "timing/"


def charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Divide the metrics in `names` among the charts of a report page.

    A chart is a dict with the title, the names of the metrics, and a flag that is true for a main chart.
    """
    left = dict.fromkeys(name for name in names if name != "step" and not name.startswith(PHASES))
    found = []
    for title, patterns in CHARTS:
        for chosen in _matches(patterns, left):
            found.append({"title": title or chosen[0], "metrics": chosen, "main": True})
            for name in chosen:
                left.pop(name)
    return [*found, *({"title": name, "metrics": [name], "main": False} for name in sorted(left))]


def _matches(patterns: Sequence[str], names: Iterable[str]) -> list[list[str]]:
    """Return the metric names of each chart that one entry of `CHARTS` defines.

    An entry of `CHARTS` with a `*` gives one chart for each matching metric. An entry of `CHARTS` without a `*`
    gives a single chart with all metrics of the entry.
    """
    if "*" in patterns[0]:
        return [[name] for name in names if re.fullmatch(patterns[0].replace("*", r"[^/]+"), name)]
    there = set(names)
    chosen = [name for name in patterns if name in there]
    return [chosen] if chosen else []


def descriptions(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return a dict that maps each metric name to the metric's name, meaning, unit and healthy values in the catalogue.

    Metric names that the catalogue does not contain are left out.
    """
    found = {name: next((metric for metric in METRICS if metric.matches(name)), None) for name in names}
    return {name: {**asdict(metric), "name": name} for name, metric in found.items() if metric is not None}
