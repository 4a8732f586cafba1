"""Write output folders of fake runs with the real tracker from made-up batches, and read their report pages."""

import base64
import gzip
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.images import joined
from rltrain.monitoring.report.config_differences import Command, write_command
from rltrain.monitoring.token_texts import write_token_texts
from rltrain.monitoring.tracking import Tracker
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer

NAN = math.nan
PRESETS = {"actor": {"lr": 0.1}, "trainer": {"seed": 0}}
COMMAND = Command(["algorithm=dapo", "actor.lr=0.5"], ["algorithm=dapo"], PRESETS)
CONFIG = "actor:\n  lr: 0.5\ntrainer:\n  seed: 0\n  output_dir: somewhere\n"


class SilentDisplay:
    def step(self, step, metrics, batch):
        pass

    def evaluation(self, step, metrics):
        pass

    def warning(self, text):
        pass


def batch(responses=("12", "9"), *, uids=None, observed=(), scores=None, errors=None, prompts=None) -> DataProto:
    """Return a batch with one sample for each response.

    Each character is one token, and each response ends with <eos>.

    The set `observed` holds the (row, token) positions of tokens that no policy sampled, such as tool text.
    """
    rows = [[*map(ord, text), EOS_ID] for text in responses]
    uids = list(range(len(rows))) if uids is None else uids
    errors = errors or [""] * len(rows)
    prompts = prompts or [f"{uid}=" for uid in uids]
    scores = torch.tensor(scores or [1.0] * len(rows))
    failed = torch.tensor([bool(error) for error in errors])
    made = DataProto.from_dict(
        {"prompts": jagged([list(map(ord, text)) for text in prompts], torch.int64),
         "responses": jagged(rows, torch.int64), "uid": torch.tensor(uids), "scores": scores, "valid": ~failed,
         "failed": failed, "reward_components": torch.where(failed, NAN, scores)[:, None]},
        {"prompt_text": list(prompts), "response_text": list(responses), "reward_error": errors,
         "finish_reason": ["stop"] * len(rows)},
    )  # fmt: skip
    count = len(made.values("responses"))
    engine = -torch.arange(1, count + 1) / 8
    version = torch.full((count,), 70_003)  # a version number that does not fit into two bytes
    starts = made.offsets("responses").tolist()
    for row, token in observed:
        version[starts[row] + token] = -1
    return made.with_values(
        "responses", rollout_log_probs=engine, old_log_probs=engine + 0.25, ref_log_probs=engine - 0.5,
        policy_version=version, response_mask=version >= 0, advantages=torch.linspace(-1, 1, count),
    )  # fmt: skip


def with_pictures(made: DataProto, files: Sequence[Sequence[bytes]]) -> DataProto:
    """Return a batch whose rows show images, given the files of each row. The first prompt token of a row shows them.

    The number of an image is its place among the distinct files, from 1.
    """
    known = list(dict.fromkeys(file for row in files for file in row))
    numbers = [[known.index(file) + 1 for file in row] for row in files]
    lengths = made.lengths("prompts").tolist()
    shown = [[*row, *[0] * (length - len(row))] for row, length in zip(numbers, lengths, strict=True)]
    stored = [joined(zip(row, own, strict=True)) for row, own in zip(numbers, files, strict=True)]
    columns = {"prompt_images": jagged(shown, torch.int64), "image_files": jagged(stored, torch.uint8)}
    return made.union(DataProto.from_dict(columns))


def metrics(reward=0.5) -> dict[str, float]:
    return {"reward/mean": reward, "reward/right/mean": reward, "rollout/length_mean": 3.0, "timing/generate": 1.0,
            "timing/step": 2.0}  # fmt: skip


EVALUATION = {"eval/sampled_accuracy": 0.25, "eval/greedy_accuracy": 0.5, "eval/sampled_reward": 0.25,
              "eval/greedy_reward": 0.5, "eval/sampled_length": 3.0}  # fmt: skip


def made_run(folder: Path, batches=None, *, tokens=True) -> Path:
    """Write the output folder of a run with one training step for each batch, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    write_command(COMMAND, folder)
    if tokens:
        write_token_texts(char_tokenizer(), folder)
    tracker = Tracker(folder, SilentDisplay(), ["right"])
    tracker.log_eval(0, EVALUATION, {})
    for step, one in enumerate([batch()] if batches is None else batches, 1):
        tracker.log_step(step, metrics(step / 8), one)
    tracker.close()
    return folder


def block(page: str, name: str) -> bytes:
    """Return the data of a named block of a report page."""
    (text,) = re.findall(rf'<script type="application/gzip;base64" id="{name}">([\w+/=]*)</script>', page)
    return gzip.decompress(base64.b64decode(text))


def data_of(page: str) -> dict:
    return json.loads(block(page, "data"))


def chunk_of(page: str, run=0, place=0) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the header and columns of a data chunk, decoded by code that is independent of the page's JavaScript."""
    whole = block(page, f"chunk-{run}-{place}")
    size = int.from_bytes(whole[:4], "little")
    header, at, columns = json.loads(whole[4 : 4 + size]), 4 + size, {}
    smallest, k = header["scale"]
    for name, count, width in header["layout"]:
        planes = np.frombuffer(whole[at : at + count * width], np.uint8).reshape(width, count).astype(np.int64)
        columns[name] = sum(planes[place] << (8 * place) for place in range(width))
        if width == 2:
            codes = columns[name].astype(np.uint16).view(np.int16)
            columns[name] = np.where(codes == -(1 << 15), np.nan, smallest * np.sinh(codes / k))
        at += count * width
    assert at == len(whole)
    return header, columns
