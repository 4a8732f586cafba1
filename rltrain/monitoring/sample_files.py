"""Writes files of samples: Parquet tables of training steps and evaluations, and whole batches for debugging."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.batch.data_proto import DataProto
from rltrain.batch.images import images_of
from rltrain.data.stored_samples import ROLLOUTS, sample_files

EVALUATED = "evaluations"  # Name of the subfolder of a run's output folder that holds the tables of evaluations.
_EVALUATED = re.compile(r"step_(\d+)_.*\.parquet")
SHOWN = 8  # At most 8 samples of a training step are sent to trackers.
# _OF_TOKENS names the columns of a sample table that have one value per response token. A sample table contains only
# those columns of _OF_TOKENS that the batch of the step contains. The columns `old_log_probs` and `entropies` are
# missing if one optimizer step trains on the whole batch and nothing reads the columns. If the actor has computed
# them only for some rows, the values of the other rows are null.
_OF_TOKENS = (
    "responses",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "entropies",
    "policy_version",
    "advantages",
)
# Type of the column `images`: for each sample, a list of image files.
IMAGES = pa.list_(pa.struct([("bytes", pa.large_binary()), ("path", pa.string())]))
_OF_ACTOR_PASS = ("old_log_probs", "entropies")


class SampleFiles:
    """Writer of the samples of training steps and evaluations to files in the output folder of the run.

    Args:
        output_dir: output folder of the run; must exist. Samples of training steps are written to the subfolder
            `rollouts`, samples of evaluations to `evaluations`, and batches for debugging to `failed`.
        components: names of the reward functions and reward models.
    """

    def __init__(self, output_dir: Path, components: Sequence[str]) -> None:
        self.tables, self.batches, self.components = output_dir / ROLLOUTS, output_dir / "failed", list(components)
        self.evaluated = output_dir / EVALUATED
        self.tables.mkdir(exist_ok=True)

    def write_trained(self, step: int, batch: DataProto) -> Path:
        """Write all samples of a training step to a Parquet table, and return the path of the table's file."""
        return self._write(self.tables / f"step_{step:06d}.parquet", batch)

    def write_failed(self, step: int, batch: DataProto) -> Path:
        """Write the samples of a failed training step to a Parquet table, and return the path of the table's file."""
        return self._write(self.tables / f"failed_{step:06d}.parquet", batch)

    def write_evaluated(self, step: int, batches: Mapping[str, DataProto]) -> None:
        """Write all samples of an evaluation to Parquet tables, one table for each entry of `batches`.

        Args:
            step: number of training steps before the evaluation.
            batches: maps each prefix of metric names, such as `eval/greedy` or `eval/aime/sampled`, to the answers that
                the metrics with the prefix describe.
        """
        self.evaluated.mkdir(exist_ok=True)
        for prefix, batch in batches.items():
            name = prefix.removeprefix("eval/").replace("/", "_")
            self._write(self.evaluated / f"step_{step:06d}_{name}.parquet", batch)

    def _write(self, path: Path, batch: DataProto) -> Path:
        pq.write_table(sample_table(batch, self.components), path)
        return path

    def save_batch(self, step: int, batch: DataProto) -> str:
        """Save the whole batch of a step to a file that `DataProto.load` can read.

        Returns:
            The path of the file with the saved batch, or the reason why the batch could not be saved.
        """
        path = self.batches / f"step_{step:06d}.pt"
        try:
            path.parent.mkdir(exist_ok=True)
            batch.save(path)
        # Saving a batch fails, for example, if the disk is full or if JSON cannot represent the values of a column.
        except (OSError, RuntimeError, TypeError) as error:
            return f"the batch could not be saved ({' '.join(str(error).split())})"
        return str(path)

    def restore(self, step: int) -> None:
        """Remove the sample tables of all training steps and evaluations after `step`.

        The method `restore` does not remove batches that were saved for debugging.
        """
        for path in self.evaluated.glob("*.parquet"):
            if (match := _EVALUATED.fullmatch(path.name)) and int(match[1]) > step:
                path.unlink()
        for file in sample_files(self.tables.parent):
            if file.step > step:
                file.path.unlink()


def sample_table(batch: DataProto, components: Sequence[str]) -> pa.Table:
    """Return a table with one row per sample of a batch.

    The columns of the table include texts, token ids, log-probs, scores, advantages and finish reasons. The column
    `reward_components` maps the name of each reward function and reward model to its score for the sample. The score of
    a reward function is null if the function does not apply to the sample or if the sample's reward failed. In a run
    without rewards, the whole column `reward_components` is null. In a run with an environment, the column `messages`
    holds the conversation as JSON. In a run with an environment, the columns `turns`, `contexts` and `tool_calls` hold
    counts, and the column `stop_reason` holds the reason why the conversation ended. If prompts show images, the column
    `images` holds the images' files in the form of data sets of the Hugging Face hub.
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
            # A run without rewards has null in each row, because Parquet has no mapping without names.
            {name: None if math.isnan(score) else score for name, score in zip(components, row, strict=True)} or None
            for row in batch.batch["reward_components"].tolist()
        ],
    }
    columns |= {name: objects[name].tolist() for name in ("stop_reason", "messages") if name in objects}
    columns |= {name: batch.batch[name].tolist() for name in ("turns", "contexts", "tool_calls") if name in batch}
    names = {"responses": "response_ids"}
    unknown = None
    if "has_old_log_probs" in batch:
        unknown = (~batch.batch["has_old_log_probs"]).repeat_interleave(batch.lengths("responses")).numpy()
    for name in _OF_TOKENS:
        if name in batch:
            values = pa.array(batch.values(name).numpy(), mask=unknown if name in _OF_ACTOR_PASS else None)
            columns[names.get(name, name)] = pa.ListArray.from_arrays(offsets.int().numpy(), values)
    if "image_files" in batch:
        rows = [[{"bytes": file, "path": None} for _, file in row] for row in images_of(batch)]
        columns["images"] = pa.array(rows, IMAGES)
    columns["prompt_ids"] = pa.ListArray.from_arrays(
        batch.offsets("prompts").int().numpy(), batch.values("prompts").numpy()
    )
    return pa.table(columns)


def sample_rows(batch: DataProto, components: Sequence[str]) -> list[dict[str, Any]]:
    """Return a few evenly spaced samples of a batch, as rows of a table that trackers show.

    Args:
        batch: samples of a training step.
        components: names of the reward functions and reward models, whose scores become the columns `reward/NAME`.
    """
    count = min(SHOWN, len(batch))
    chosen = batch[[number * len(batch) // count for number in range(count)]]
    names = ["uid", "prompt", "response", "score", "finish_reason", "reward_error", "reward_components"]
    rows: list[dict[str, Any]] = sample_table(chosen, components).select(names).to_pylist()
    scores = [row.pop("reward_components") or {} for row in rows]
    return [
        row | {f"reward/{name}": of_row.get(name) for name in components}
        for row, of_row in zip(rows, scores, strict=True)
    ]
