"""Result files of a run.

The files are metrics, evaluations, ledger and alarms as JSON lines, rollouts as parquet, and TensorBoard events.

The ledger has one line per step with these keys:

- `used`: uids of the prompt groups that were trained on.
- `dropped`: uids of the prompt groups that were discarded.
- `failed`: (uid, sample) of the answers whose reward failed.

Each uid occurs exactly once in the whole ledger, either in `used` or in `dropped`.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.base.secret_values import redacted
from rltrain.base.storage import FileStart
from rltrain.batch.data_proto import DataProto

METRICS, EVALUATIONS, LEDGER, ALARMS = "metrics.jsonl", "evaluations.jsonl", "ledger.jsonl", "alarms.jsonl"
CURVES = ("step", "reward/mean", "rollout/length_mean")  # kept in memory for all steps
_OF_STEP = re.compile(r"(?:step|failed)_(\d+)\.parquet")


class Display(Protocol):
    """Interface of a display that shows a run to the user."""

    def step(self, step: int, metrics: dict[str, float], batch: DataProto) -> None:
        """Show the metrics and a sample of a training step. Called after each step."""

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of an evaluation. Called after each evaluation."""

    def warning(self, text: str) -> None:
        """Show a one-line warning."""


class Tracker:
    """Writes the results of a run to disk as they arrive.

    Args:
        output_dir: output folder of the run; must exist.
        display: display that also shows the results.
        components: names of the reward components.
    """

    def __init__(self, output_dir: Path, display: Display, components: Sequence[str]) -> None:
        self.output_dir, self.display, self.components = output_dir, display, list(components)
        self.history: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        (output_dir / "rollouts").mkdir(exist_ok=True)
        self._open(None)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.files = {
            name: (self.output_dir / name).open("a", encoding="utf-8")
            for name in (METRICS, EVALUATIONS, LEDGER, ALARMS)
        }
        self.tensorboard = SummaryWriter(str(self.output_dir / "tensorboard"), purge_step=purge_step)

    def restore(self, step: int, kept: Mapping[str, bytes]) -> list[dict[str, float]]:
        """Restore all files to their contents after `step`.

        Args:
            step: last training step whose results are kept.
            kept: contents, after `step`, of the files that `state` names; {} for the start of a run.

        Returns:
            Metrics of all steps up to `step`.
        """
        self._close()
        for name in self.files:
            partial = self.output_dir / f"{name}.partial"
            partial.write_bytes(kept.get(name, b""))
            os.replace(partial, self.output_dir / name)
        for file in (self.output_dir / "rollouts").iterdir():
            if (found := _OF_STEP.fullmatch(file.name)) and int(found[1]) > step:
                file.unlink()
        steps, self.evaluations = (rows_of(kept.get(name, b"")) for name in (METRICS, EVALUATIONS))
        whole = any((self.output_dir / "tensorboard").glob("events.*"))
        self._open(step + 1 if whole else None)
        if not whole:  # the run began in another folder, so this one lacks the earlier events
            for row in (*steps, *self.evaluations):
                self._write_scalars(row)
        self.history = [*steps[:1], *map(_curves, steps[1:-1]), *steps[1:][-1:]]
        return steps

    def state(self) -> dict[str, FileStart]:
        """Return the files that a checkpoint copies, up to their current size, by name."""
        paths = {name: self.output_dir / name for name in self.files}
        return {name: FileStart(path, path.stat().st_size) for name, path in paths.items()}

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return all metrics that are known for the weights after `step`."""
        rows = [row for kept in (self.history, self.evaluations) for row in kept[-1:] if row["step"] == step]
        return {name: value for row in rows for name, value in row.items()}

    def names(self) -> set[str]:
        """Return the names of all metrics of the last step and of the last evaluation."""
        return {name for kept in (self.history, self.evaluations) for row in kept[-1:] for name in row}

    def evaluated(self, step: int) -> bool:
        """Return whether the last evaluation was of the weights after `step`."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == step

    def log_step(self, step: int, metrics: dict[str, float], batch: DataProto) -> None:
        """Record and show a training step: its metrics, all its samples and its line in the ledger."""
        self._write_samples(f"step_{step:06d}", batch)
        self._write_line(LEDGER, ledger_line(step, batch))
        self._write(METRICS, self.history, step, metrics)
        self.display.step(step, metrics, batch)

    def log_failed(self, step: int, batch: DataProto) -> Path:
        """Write the samples of a step that could not be trained on, and return the path of the file."""
        return self._write_samples(f"failed_{step:06d}", batch)

    def save_batch(self, step: int, batch: DataProto) -> str:
        """Save the whole batch of a step in the folder `failed`, to be read with `DataProto.load`.

        Returns:
            The path of the file, or the reason why the batch could not be saved.
        """
        path = self.output_dir / "failed" / f"step_{step:06d}.pt"
        try:
            path.parent.mkdir(exist_ok=True)
            batch.save(path)
        except (OSError, RuntimeError, TypeError) as error:  # full disk, or a column that JSON cannot hold
            return f"could not be kept ({' '.join(str(error).split())})"
        return str(path)

    def warn(self, text: str) -> None:
        """Show a warning to the user immediately."""
        self.display.warning(text)

    def log_alarm(self, step: int, text: str) -> None:
        """Show an alarm to the user and record it. The text must name the step."""
        self.warn(text)
        self._write_line(ALARMS, {"step": step, "alarm": redacted(text)})

    def _write_samples(self, name: str, batch: DataProto) -> Path:
        path = self.output_dir / "rollouts" / f"{name}.parquet"
        pq.write_table(sample_table(batch, self.components), path)
        return path

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Record and show an evaluation of the weights after `step` steps."""
        self._write(EVALUATIONS, self.evaluations, step, metrics)
        self.display.evaluation(step, metrics)

    def _write(self, file: str, kept: list[dict[str, float]], step: int, metrics: dict[str, float]) -> None:
        if file == METRICS and len(kept) > 1:  # only the first and the last row keep all metrics
            kept[-1] = _curves(kept[-1])
        kept.append({"step": step, **metrics})
        # JSON has no NaN and no infinity: parsers other than Python's would reject the line.
        line = {name: value if math.isfinite(value) else None for name, value in kept[-1].items()}
        self._write_line(file, line)
        self._write_scalars(kept[-1])

    def _write_line(self, file: str, line: Mapping[str, Any]) -> None:
        self.files[file].write(json.dumps(line) + "\n")
        self.files[file].flush()

    def _write_scalars(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                self.tensorboard.add_scalar(name, value, row["step"])

    def _close(self) -> None:
        for file in self.files.values():
            file.close()
        self.tensorboard.close()

    def close(self) -> Path | None:
        """Close the files and draw the learning curve. Returns the path of its image, or None if there was no step."""
        self._close()
        if not self.history:
            return None
        path = self.output_dir / "learning_curve.png"
        draw_learning_curve(self.history, self.evaluations, path)
        return path


def _curves(row: Mapping[str, float]) -> dict[str, float]:
    return {name: row[name] for name in CURVES if name in row}


def rows_of(lines: bytes) -> list[dict[str, float]]:
    """Parse metrics from JSON lines; null becomes NaN, which JSON cannot represent."""
    rows = (json.loads(line) for line in lines.splitlines())
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def ledger_line(step: int, batch: DataProto) -> dict[str, Any]:
    """Return the ledger line of a step: the prompt groups used and dropped, and the answers whose reward failed."""
    uids = batch.batch["uid"].tolist()
    failed = [[uids[row], row - uids.index(uids[row])] for row in batch.batch["failed"].nonzero()[:, 0].tolist()]
    return {
        "step": step,
        "used": list(dict.fromkeys(uids)),
        "dropped": batch.meta_info.get("dropped", []),
        "failed": failed,
    }


def sample_table(batch: DataProto, components: Sequence[str]) -> pa.Table:
    """Return a table with one row per sample of a batch.

    The columns include texts, token ids, log-probs, scores, advantages and finish reasons. `reward_components` has the
    score of each component by name; it is null if the component does not apply or the sample failed.
    """
    objects = batch.non_tensor_batch
    offsets = batch.offsets("responses")
    columns = {
        "uid": batch.batch["uid"].tolist(),
        "prompt": objects["prompt_text"].tolist(),
        "response": objects["response_text"].tolist(),
        "score": batch.batch["scores"].tolist(),
        "valid": batch.batch["valid"].tolist(),
        "finish_reason": objects["finish_reason"].tolist(),
        "reward_error": objects["reward_error"].tolist(),
        "reward_components": [
            {name: None if math.isnan(score) else score for name, score in zip(components, row, strict=True)}
            for row in batch.batch["reward_components"].tolist()
        ],
    }
    names = {"responses": "response_ids"}
    for name in ("responses", "response_mask", "rollout_log_probs", "policy_version", "advantages"):
        if name in batch:
            values = pa.ListArray.from_arrays(offsets.int().numpy(), batch.values(name).numpy())
            columns[names.get(name, name)] = values
    columns["prompt_ids"] = pa.ListArray.from_arrays(
        batch.offsets("prompts").int().numpy(), batch.values("prompts").numpy()
    )
    return pa.table(columns)


def draw_learning_curve(history: list[dict[str, float]], evaluations: list[dict[str, float]], path: Path) -> None:
    """Draw the training reward, the evaluation rewards and the answer length over the steps as a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = [row["step"] for row in history]
    figure, reward = plt.subplots(figsize=(8, 4.5), layout="constrained")
    reward.plot(steps, [row["reward/mean"] for row in history], ".-", color="tab:blue", label="training reward")
    for kind, marker in (("sampled", "o"), ("greedy", "s")):
        points = [(row["step"], row[f"eval/{kind}_reward"]) for row in evaluations if f"eval/{kind}_reward" in row]
        if points:
            reward.plot(
                *zip(*points, strict=True),
                marker,
                color="tab:green",
                alpha=0.8,
                label=f"held-out, {kind}",
                markerfacecolor="none" if kind == "greedy" else "tab:green",
            )
    reward.set_xlabel("step")
    reward.xaxis.set_major_locator(MaxNLocator(integer=True))
    reward.set_ylabel("reward", color="tab:blue")
    reward.grid(alpha=0.3)
    length = reward.twinx()
    length.plot(steps, [row["rollout/length_mean"] for row in history], color="tab:orange", label="answer length")
    length.set_ylabel("answer length, tokens", color="tab:orange")
    lines = [*reward.get_legend_handles_labels()[0], *length.get_legend_handles_labels()[0]]
    reward.legend(lines, [str(line.get_label()) for line in lines], loc="center right", frameon=False)
    reward.set_title("Reward and answer length")
    figure.savefig(path, dpi=120)
    plt.close(figure)
