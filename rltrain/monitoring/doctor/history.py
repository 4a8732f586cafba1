"""What the rules of the doctor read and return: the history of a run, and findings."""

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

ENOUGH_STEPS = 3  # number of steps with a condition below which the condition may be chance
SOLVED_ACCURACY = 0.95  # share of correct answers from which a task counts as solved

Points = list[tuple[int, float]]  # (step, value) of a metric, in the order of the steps; only finite values


@dataclass
class Finding:
    """One thing that went wrong in a run.

    Attributes:
        step: the training step at which it began.
        evidence: what the files say, with numbers and steps; one clause for each fact.
        causes: likely causes, the most likely first.
        changes: what to change, with the names of the keys.
        name: name of the rule that found it; `diagnose` fills it in.
        effects: names and steps of other findings that this one explains; `diagnose` fills it in.
    """

    step: int
    evidence: list[str]
    causes: list[str]
    changes: list[str]
    name: str = ""
    effects: list[str] = field(default_factory=list)


class History:
    """The history of a run as the rules read it.

    Args:
        run: contents of the files of the run.
    """

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.steps = [int(row["step"]) for row in run.steps]
        self.first_step = self.steps[0] if self.steps else 0

    def points(self, name: str) -> Points:
        """Return the finite values of a metric of training steps, with their steps."""
        return _points(self.run.steps, name)

    def evaluated(self, name: str) -> Points:
        """Return the finite values of a metric of evaluations, with the numbers of training steps before them."""
        return _points(self.run.evaluations, name)

    def names(self) -> list[str]:
        """Return the names of all metrics, of training steps and of evaluations."""
        return list(dict.fromkeys(name for row in (*self.run.steps, *self.run.evaluations) for name in row))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a config key such as `actor.lr`, or `default` if the config does not have the key."""
        return _nested(self.run.config, key, default)

    def number(self, key: str, default: float) -> float:
        """Return the value of a config key if it is a number, else `default`."""
        value = self.setting(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    def preset(self, key: str) -> Any:
        """Return the value that the presets of the run's command give to a key, or None if it is unknown."""
        return _nested(self.run.command.values, key, None) if self.run.command else None

    @cached_property
    def reward_parts(self) -> list[Mapping[str, Any]]:
        """The reward functions and models of the config; only entries that have a name."""
        parts = [*(self.setting("reward.functions") or []), *(self.setting("reward.models") or [])]
        return [part for part in parts if isinstance(part, Mapping) and isinstance(part.get("name"), str)]

    def rows(self, file: SampleFile, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of a table of samples, with only the given columns; [] if the table cannot be read."""
        try:
            found: list[dict[str, Any]] = pq.read_table(file.path, columns=list(columns)).to_pylist()
        except Exception as error:  # the reader may raise any exception on a damaged file
            self.run.notes.append(f"rollouts/{file.path.name}: cannot be read ({described(error, 120)})")
            return []
        return found

    @cached_property
    def solved(self) -> bool:
        """Whether the reward rose until hardly any answer was left to improve.

        Without `reward/accuracy`, the standard deviation of the scores must have fallen below a tenth of its start.
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
    """Return the mean of values."""
    return sum(value for _, value in points) / len(points)


def start_mean(points: Points) -> float:
    """Return the mean of the first three values, which stand for the policy before training."""
    return mean(points[:START_STEPS])


def last_mean(points: Points) -> float:
    """Return the mean of the last five values, or of all values if there are fewer."""
    return mean(points[-WINDOW_STEPS:])


def windows(points: Points) -> Points:
    """Return (last step, mean) of each five consecutive values."""
    ends = range(WINDOW_STEPS, len(points) + 1)
    return [(points[end - 1][0], mean(points[end - WINDOW_STEPS : end])) for end in ends]


def final_streak(points: Points, holds: Callable[[float], bool], steps: int = PERSISTENT_STEPS) -> Points:
    """Return the last values for which a condition holds without a gap; [] if they are fewer than `steps`."""
    count = 0
    while count < len(points) and holds(points[-1 - count][1]):
        count += 1
    return points[len(points) - count :] if count >= steps else []


def shown(value: float) -> str:
    """Return a number with three significant digits, as people write it."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text else text


def fell(name: str, points: Points, unit: str = "") -> str:
    """Return a clause that says how a metric changed from its first to its last value, such as "x fell from 1 to 0"."""
    (_, before), (step, after) = points[0], points[-1]
    verb = "stayed at" if before == after else "fell from" if after < before else "rose from"
    change = shown(after) if before == after else f"{shown(before)} to {shown(after)}"
    return f"{name} {verb} {change}{unit and ' '}{unit} by step {step}"
