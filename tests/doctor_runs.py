"""Write output folders of fake runs with given metrics, for tests of the doctor."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

STEPS = 20
CONFIG = {
    "actor": {"lr": 4e-4},
    "critic": {"lr": 1e-3},
    "algorithm": {
        "advantage_estimator": "grpo", "old_log_probs": "actor", "correction": {"level": None},
        "rejection": {"kl_estimator": None},
    },
    "data": {"val_size": 400},
    "rollout": {"samples_per_prompt": 8, "max_log_prob_gap": 0.02, "max_response_length": 16, "verify_sync": True},
    "trainer": {"epochs_per_step": 1, "prompts_per_step": 64},
    "reward": {
        "functions": [
            {"name": "right", "weight": 1.0, "outcome": True}, {"name": "length", "weight": 0.1, "outcome": False},
        ],
        "models": [],
    },
}  # fmt: skip


def line(first: float, last: float, steps: int = STEPS) -> list[float]:
    """Return equally spaced values from `first` to `last`, one for each step."""
    return [first + (last - first) * number / (steps - 1) for number in range(steps)]


# Metrics of a run that learns, similar to the numbers of the demo.
HEALTHY = {
    "reward/mean": line(0.3, 0.8), "reward/std": [0.45] * STEPS, "reward/accuracy": line(0.3, 0.8),
    "reward/right/mean": line(0.3, 0.8), "reward/length/mean": [0.0] * STEPS, "reward/failed_fraction": [0.0] * STEPS,
    "reward/unscored_fraction": [0.0] * STEPS, "reward/same_outcome_fraction": line(0.1, 0.6),
    "rollout/entropy": line(0.8, 0.2), "rollout/truncated_fraction": [0.05] * STEPS,
    "rollout/length_mean": line(6, 10), "rollout/log_prob_gap": [1e-3] * STEPS, "rollout/staleness_max": [0.0] * STEPS,
    "rollout/effective_sample_size": [0.98] * STEPS, "rollout/groups_missing": [0.0] * STEPS,
    "actor/ppo_kl": [0.02] * STEPS, "actor/clip_fraction": [0.05] * STEPS, "actor/grad_norm_max": [1.5] * STEPS,
    "actor/skipped_updates": [0.0] * STEPS, "critic/skipped_updates": [0.0] * STEPS, "actor/ref_kl": line(0.0, 0.2),
    "critic/explained_variance": line(0.0, 0.4),
}  # fmt: skip


def run_with(folder: Path, metrics=None, *, config=None, evaluations=(), steps: int = STEPS) -> Path:
    """Write the files of a run, and return its folder.

    The run is healthy except for the given metrics and config keys.

    Args:
        folder: Output folder, which the function makes.
        metrics: Values by the metric's name: a list with a value for each step, or one value for all steps. A metric
            with the value None is left out.
        config: Values by config key, such as `{"actor.lr": 1.0}`.
        evaluations: Objects of `evaluations.jsonl`.
        steps: Number of steps to write, counted from the first step of the healthy run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    columns = HEALTHY | (metrics or {})
    rows = [{"step": number + 1} for number in range(steps)]
    for name, values in columns.items():
        for number, row in enumerate(rows):
            if values is not None:
                row[name] = values[number] if isinstance(values, list) else values
    _write(folder / "metrics.jsonl", rows)
    _write(folder / "evaluations.jsonl", evaluations)
    made = json.loads(json.dumps(CONFIG))
    for key, value in (config or {}).items():
        *groups, last = key.split(".")
        place = made
        for group in groups:
            place = place[group]
        place[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    return folder


def _write(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_samples(folder: Path, name: str, components, errors=None) -> None:
    """Write a table of samples with the given scores by component and the given error for each row."""
    (folder / "rollouts").mkdir(exist_ok=True)
    errors = errors or [""] * len(components)
    pq.write_table(
        pa.table({"reward_components": components, "reward_error": errors}), folder / "rollouts" / f"{name}.parquet"
    )
