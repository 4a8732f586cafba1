"""Data types of the doctor: the history of a run, which the rules read, and the findings, which the rules report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

import pyarrow.parquet as pq

from rltrain.base.errors import described
from rltrain.data.stored_samples import SampleFile
from rltrain.monitoring.alarms import PERSISTENT_STEPS, START_STEPS, WINDOW_STEPS
from rltrain.monitoring.report.run_files import RunFiles

# Several rules of the doctor report a finding only if their condition holds in at least 3 steps, because a condition
# may hold by chance in one or two steps.
ENOUGH_STEPS = 3
SOLVED_ACCURACY = 0.95  # A task counts as solved if at least 95% of the answers are correct.

Points = list[
    tuple[int, float]
]  # Pairs (step, value) of one metric, sorted by step; infinite and NaN values are left out.


@dataclass
class Finding:
    """A problem that a rule has found in a run.

    Attributes:
        step: training step at which the problem began.
        evidence: facts from the run's files that show the problem, one string for each fact.
        causes: likely causes of the problem, the most likely cause first.
        changes: recommended changes to the config or the data of the run.
        name: name of the rule that found the problem; set by `diagnose`.
        effects: name and first step of each finding that is an effect of this finding; set by `diagnose`.
    """

    step: int
    evidence: list[str]
    causes: list[str]
    changes: list[str]
    name: str = ""
    effects: list[str] = field(default_factory=list)


class History:
    """The metrics, config and samples of a run, in the form that the doctor's rules read.

    Args:
        run: the contents of the files in the run's output folder.
    """

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.steps = [int(row["step"]) for row in run.steps]
        self.first_step = self.steps[0] if self.steps else 0

    def points(self, name: str) -> Points:
        """Return the pairs (step, value) of a metric of training steps, without NaN and infinite values."""
        return _points(self.run.steps, name)

    def evaluated(self, name: str) -> Points:
        """Return the pairs (step, value) of an evaluation metric, without NaN and infinite values.

        The step of an evaluation is the number of training steps before the evaluation.
        """
        return _points(self.run.evaluations, name)

    def names(self) -> list[str]:
        """Return the names of all metrics of training steps and evaluations."""
        return list(dict.fromkeys(name for row in (*self.run.steps, *self.run.evaluations) for name in row))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a config key such as `actor.lr`, or `default` if the config lacks the key."""
        return _nested(self.run.config, key, default)

    def number(self, key: str, default: float) -> float:
        """Return the value of a config key as a float, or `default` if the value is missing or not a number."""
        value = self.setting(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def preset(self, key: str) -> Any:
        """Return the value that the run's presets give to a config key, or None if the value is unknown."""
        return _nested(self.run.command.values, key, None) if self.run.command else None

    @cached_property
    def reward_parts(self) -> list[Mapping[str, Any]]:
        """The config entries of all reward functions and reward models that have a name."""
        parts = [*(self.setting("reward.functions") or []), *(self.setting("reward.models") or [])]
        return [part for part in parts if isinstance(part, Mapping) and isinstance(part.get("name"), str)]

    def rows(self, file: SampleFile, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return the given columns of all rows of a Parquet file of samples; [] if the file cannot be read."""
        try:
            found: list[dict[str, Any]] = pq.read_table(file.path, columns=list(columns)).to_pylist()
        except Exception as error:  # The library pyarrow may raise any exception for a damaged file.
            self.run.notes.append(f"rollouts/{file.path.name}: cannot be read ({described(error, 120)})")
            return []
        return found

    @cached_property
    def solved(self) -> bool:
        """Whether the task is solved, judged by the rewards of the run.

        If the run has the metric `reward/accuracy`, its task counts as solved if the mean reward has risen and at least
        95% of the answers of the last 5 steps are correct. If the run does not have `reward/accuracy`, its task counts
        as solved if the mean reward has risen and the standard deviation of the scores has fallen below a tenth of its
        first value.
        """
        rewards, accuracy, spread = (self.points(f"reward/{name}") for name in ("mean", "accuracy", "std"))
        if not rewards or last_mean(rewards) <= rewards[0][1]:
            return False
        if accuracy:
            return last_mean(accuracy) >= SOLVED_ACCURACY
        return bool(spread) and last_mean(spread) < 0.1 * spread[0][1]


def _nested(values: Any, key: str, default: Any) -> Any:
    for word in key.split("."):
        if not isinstance(values, Mapping) or word not in values:
            return default
        values = values[word]
    return values


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
    found = [(int(row["step"]), row.get(name)) for row in rows]
    return [
        (step, float(value))
        for step, value in found
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    ]


def mean(points: Points) -> float:
    """Return the mean of the values of all pairs (step, value) in `points`."""
    return sum(value for _, value in points) / len(points)


def start_mean(points: Points) -> float:
    """Return the mean of a metric's first three values, as an estimate of the metric before training."""
    return mean(points[:START_STEPS])


def last_mean(points: Points) -> float:
    """Return the mean of a metric's last five values, or of all values if the metric has fewer than five."""
    return mean(points[-WINDOW_STEPS:])


def windows(points: Points) -> Points:
    """Return the moving average of a metric: one pair (last step, mean) for each window of five consecutive values."""
    ends = range(WINDOW_STEPS, len(points) + 1)
    return [(points[end - 1][0], mean(points[end - WINDOW_STEPS : end])) for end in ends]


def final_streak(points: Points, holds: Callable[[float], bool], steps: int = PERSISTENT_STEPS) -> Points:
    """Return the longest sequence of pairs at the end of `points` whose values all fulfil the condition `holds`.

    Return [] if fewer than `steps` values at the end of `points` fulfil the condition `holds`.
    """
    count = 0
    while count < len(points) and holds(points[-1 - count][1]):
        count += 1
    return points[len(points) - count :] if count >= steps else []


def shown(value: float) -> str:
    """Format a number with three significant digits; a large number is written without an exponent."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text else text


def fell(name: str, points: Points, unit: str = "") -> str:
    """Describe the change from a metric's first value to its last value, as in "x fell from 1 to 0 by step 9"."""
    (_, before), (step, after) = points[0], points[-1]
    verb = "stayed at" if before == after else "fell from" if after < before else "rose from"
    change = shown(after) if before == after else f"{shown(before)} to {shown(after)}"
    return f"{name} {verb} {change}{unit and ' '}{unit} by step {step}"
