"""Encodes the samples of a run in the compact form that the page of a report reads.

Each table of samples is encoded as one *chunk*: a JSON header, followed by the values of all tokens of the table,
column by column. A chunk is compressed and written as base64 text. The page decompresses a chunk only when the chunk's
samples are shown or searched.

Each real number x, such as a log-prob or an advantage, is stored as the 16-bit integer round(k asinh(x / s)) with two
constants k and s. A stored number x has a resolution of about s / k if x is near 0, and of about |x| / k if |x| is much
larger than s. In the formula round(k asinh(x / s)), a smaller constant k makes the report page smaller and the stored
numbers less exact.
"""

import gzip
import io
import json
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.base.errors import described
from rltrain.base.secret_values import redacted
from rltrain.data.prompt_images import decoded
from rltrain.data.stored_samples import SampleFile
from rltrain.monitoring.report.run_files import RunFiles

# A real number x is stored as round(k asinh(x / s)) with s = 0.001, so the resolution of numbers near 0 is s / k.
SMALLEST = 1e-3
# The page of a report stores a floating-point number x as the integer round(k asinh(x / s)) with two constants k and s.
# The relative rounding error of x in round(k asinh(x / s)) is at most about 1 / (2 k), so a larger k makes the stored
# number more exact. BYTES_OF_NUMBER maps each value of k that the report can use to the compressed size of one stored
# number in bytes. The sizes in BYTES_OF_NUMBER were measured on the log-probs of training runs.
BYTES_OF_NUMBER = {1500: 1.75, 400: 1.6, 200: 1.45, 80: 1.35, 25: 1.1}
BYTES_OF_ID = 1.3
BYTES_OF_SAMPLE = 40
# If the estimated size of a run's samples exceeds the size limit of the page, about 300,000 tokens are encoded as a
# trial. The trial encoding yields a ratio of actual size to estimated size, which corrects the size estimate for all
# samples.
PROBED_TOKENS = 300_000
# Longest side of an image on the report page, in pixels. Files of at most THUMBNAIL_BYTES bytes are kept unchanged.
THUMBNAIL, THUMBNAIL_BYTES = 192, 8192
MISSING = -(1 << 15)  # The 16-bit integer -32768 stands for NaN and for infinity.
# Each response token has one of three states: observed (tool output), sampled but not trained on, or trained on.
OBSERVED, SAMPLED, TRAINED = 0, 1, 2
# An observation token has `policy_version` -1. The constant NOT_SAMPLED is not imported from rltrain.batch.trajectory,
# because that module imports torch.
NOT_SAMPLED = -1
_COLUMNS = (
    *("uid", "prompt", "response", "score", "valid", "finish_reason", "reward_error", "reward_components"),
    *("response_ids", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs", "entropies"),
    *("policy_version", "advantages", "prompt_ids", "turns", "contexts", "tool_calls", "stop_reason", "images"),
)
_NEEDED = {"uid", "prompt", "response", "response_ids"}
_UNFINISHED_CHARACTER = re.compile(r"\\x[89a-f][0-9a-f]")


@dataclass
class Vocabulary:
    """The tokens that occur on the page of a report, numbered so that frequent tokens have small numbers.

    Attributes:
        ids: list of the tokenizer's token ids; the page uses the index of a token id in the list as the token's number.
    """

    ids: list[int] = field(default_factory=list)
    _numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """Return, for each token id in `ids` (N,), the number that stands for the token in the report page.

        Token ids that are not yet in the vocabulary of the page are added to the vocabulary first.
        """
        found, counts = np.unique(ids, return_counts=True)
        if len(found) and found[-1] >= len(self._numbers):
            grown = np.full(int(found[-1]) + 1, -1, np.int64)
            grown[: len(self._numbers)] = self._numbers
            self._numbers = grown
        new = self._numbers[found] < 0
        added = found[new][np.argsort(-counts[new], kind="stable")]
        self._numbers[added] = len(self.ids) + np.arange(len(added))
        self.ids += added.tolist()
        numbers: np.ndarray = self._numbers[ids]
        return numbers


@dataclass
class EncodedSamples:
    """The samples of a run, encoded so that the JavaScript code in the page of a report can decode them.

    Attributes:
        chunks: the chunks, which are encoded tables of samples, as base64 text.
        index: columns with the score, the length and other facts of each sample; the report page reads the columns in
            `index` without decompressing a chunk.
        vocabulary: ids and texts of the tokens on the page, and the numbers by which the page refers to the special
            tokens.
        shown: number of samples on the page.
        total: number of samples in all readable tables of the run.
        rounding: largest relative rounding error of a stored real number.
    """

    chunks: list[str] = field(default_factory=list)
    index: dict[str, Any] = field(default_factory=dict)
    vocabulary: dict[str, Any] = field(default_factory=dict)
    shown: int = 0
    total: int = 0
    rounding: float = 0.0

    @property
    def counts(self) -> dict[str, float]:
        """Numbers of samples on the page and in the run, and the largest relative rounding error of a stored number."""
        return {"shown": self.shown, "total": self.total, "rounding": self.rounding}


@dataclass(frozen=True)
class Size:
    """The size of a table of samples, read from the metadata of the table's Parquet file."""

    rows: int
    tokens: int
    numbers: int  # Number of the table's columns that hold log-probs or entropies.


def encode_samples(run: RunFiles, budget: int) -> EncodedSamples:
    """Read and encode the samples of a run.

    If the samples of the run exceed the size limit even if numbers are stored less exactly, the same share of the
    prompt groups is left out in each step. If the size limit allows fewer than one in 8 prompt groups of each step,
    some steps are left out completely.

    Args:
        run: files of the run. For each table of samples that cannot be read, a note is added to `run.notes`.
        budget: size limit of the encoded samples in bytes of base64 text.
    """
    sizes, k, share = _sizes(run), max(BYTES_OF_NUMBER), 1.0
    if _estimate(sizes, k) > budget:
        off = _probe(run, sizes)
        k = next((k for k in BYTES_OF_NUMBER if off * _estimate(sizes, k) <= budget), min(BYTES_OF_NUMBER))
        share = min(1.0, budget / (off * _estimate(sizes, k)))
    while True:
        notes = list(run.notes)
        found = _encoded(run, sizes, share, k)
        size = _bytes_of(found)
        if size <= budget or found.shown <= 1:
            return found
        run.notes[:] = notes
        share *= 0.95 * budget / size


def _bytes_of(samples: EncodedSamples) -> int:
    return sum(map(len, samples.chunks)) + len(packed(to_json([samples.index, samples.vocabulary])))


def _probe(run: RunFiles, sizes: dict[SampleFile, Size]) -> float:
    """Encode a few tables of samples, and return the ratio of their encoded size to their estimated size."""
    files = list(sizes)
    few = {files[place]: sizes[files[place]] for place in {0, len(files) // 2, len(files) - 1}}
    tokens, notes, k = sum(size.tokens for size in few.values()), list(run.notes), min(BYTES_OF_NUMBER)
    share = min(1.0, PROBED_TOKENS / max(1, tokens))
    found = _encoded(run, few, share, k)
    run.notes[:] = notes
    whole = _estimate(few, k) * found.shown / max(1, found.total)
    return _bytes_of(found) / whole if whole else 1.0


def _sizes(run: RunFiles) -> dict[SampleFile, Size]:
    """Return the size of each table of samples that can be read."""
    sizes = {}
    for file in run.samples:
        try:
            sizes[file] = _size(file)
        except Exception as error:  # Reading a damaged Parquet file may raise any exception.
            run.notes.append(_left_out(file, error))
    return sizes


def _left_out(file: SampleFile, error: Exception) -> str:
    return f"rollouts/{file.path.name}: cannot be read, so its samples are left out ({described(error, 120)})"


def _size(file: SampleFile) -> Size:
    metadata = pq.read_metadata(file.path)
    names = set(metadata.schema.to_arrow_schema().names)
    if missing := _NEEDED - names:
        raise ValueError(f"the table lacks the columns {', '.join(sorted(missing))}")
    tokens = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        tokens += sum(one.num_values for one in columns if one.path_in_schema.startswith("response_ids."))
    numbers = len(names & {"rollout_log_probs", "old_log_probs", "ref_log_probs", "entropies"})
    return Size(metadata.num_rows, tokens, numbers)


def _estimate(sizes: dict[SampleFile, Size], k: int) -> float:
    """Estimate the size of the encoded tables of samples, in bytes of base64 text."""
    of_token = [BYTES_OF_ID + BYTES_OF_NUMBER[k] * size.numbers for size in sizes.values()]
    pairs = zip(sizes.values(), of_token, strict=True)
    return sum(size.rows * BYTES_OF_SAMPLE + size.tokens * one for size, one in pairs) * 4 / 3


def _encoded(run: RunFiles, sizes: dict[SampleFile, Size], share: float, k: int) -> EncodedSamples:
    vocabulary, found = Vocabulary(), EncodedSamples(total=sum(size.rows for size in sizes.values()), rounding=0.5 / k)
    texts = run.token_texts
    rows: list[dict[str, Any]] = []
    files = [file for file in run.samples if file in sizes]
    for file, groups in _chosen(files, share):
        try:
            chunk = Chunk(file, _read(file, groups), texts, run.special_ids)
            found.chunks.append(chunk.encode(vocabulary, k))
        except Exception as error:  # Reading a damaged Parquet file may raise any exception.
            run.notes.append(_left_out(file, error))
            continue
        rows.append(chunk.summary())
    found.shown = sum(len(row["uid"]) for row in rows)
    found.index = {"chunks": rows}
    found.vocabulary = {
        "ids": vocabulary.ids,
        "texts": [texts[one] if one < len(texts) else f"<id {one}>" for one in vocabulary.ids],
        "special": [number for number, one in enumerate(vocabulary.ids) if one in run.special_ids],
    }
    return found


def _chosen(files: Sequence[SampleFile], share: float) -> Iterator[tuple[SampleFile, float]]:
    """Yield a pair (sample file, share of the file's prompt groups to show) for each sample file that the page shows.

    The sample files of the first and the last step are always included.
    """
    # If the page can show fewer than one in 8 prompt groups of each sample file, it omits some sample files completely.
    groups = 8
    count = len(files) if share * groups >= 1 else max(2, round(len(files) * share * groups))
    if count >= len(files):
        yield from ((file, share) for file in files)
        return
    places = np.unique(np.linspace(0, len(files) - 1, count).round().astype(int))
    yield from ((files[place], share * len(files) / len(places)) for place in places.tolist())


def _read(file: SampleFile, share: float) -> pa.Table:
    """Read the first prompt groups of a table of samples, with all samples of each group.

    `share` is the share of the table's prompt groups to read; at least one prompt group is read.
    """
    schema = pq.read_schema(file.path)
    table = pq.read_table(file.path, columns=[name for name in _COLUMNS if name in schema.names])
    uids = table["uid"].to_numpy()
    groups = list(dict.fromkeys(uids.tolist()))
    kept = groups[: max(1, math.floor(len(groups) * share + 1e-9))]
    return table if len(kept) == len(groups) else table.filter(pa.array(np.isin(uids, kept)))


class Chunk:
    """The samples of one table, which the method `encode` converts to one chunk of the report page.

    Args:
        file: the Parquet file that contains the samples.
        table: the samples in `file` that the page shows, one row per sample.
        texts: list of the text of each token, indexed by the token's id.
        special_ids: ids of the special tokens.
    """

    def __init__(self, file: SampleFile, table: pa.Table, texts: Sequence[str], special_ids: set[int]) -> None:
        self.file, self.texts, self.special_ids = file, texts, special_ids
        self.secret = _rows_with_secrets(table)
        self.table = table.combine_chunks()
        self.offsets, ids = self._tokens("response_ids")
        self.ids = ids.astype(np.int64)

    def _tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets (B + 1,) and the concatenated values (N,) of a column of lists.

        If the prompt or response of a row contains a secret, the column's list for that row is replaced by an empty
        list.
        """
        array = self.table[name].combine_chunks()
        array = array if isinstance(array, pa.ListArray) else array.cast(pa.list_(array.type.value_type))
        lengths = np.diff(array.offsets.to_numpy())
        kept = np.repeat(~self.secret, lengths)
        lengths = np.where(self.secret, 0, lengths)
        values = array.flatten().to_numpy(zero_copy_only=False)[kept]
        return np.concatenate([[0], np.cumsum(lengths)]), values

    def _column(self, name: str) -> np.ndarray | None:
        if name not in self.table.column_names:
            return None
        offsets, values = self._tokens(name)
        if not np.array_equal(offsets, self.offsets):
            raise ValueError(f"the columns {name} and response_ids have lists of different lengths")
        return values

    def encode(self, vocabulary: Vocabulary, k: int) -> str:
        """Encode a table of samples as one chunk of the report page, and return the chunk as base64 text."""
        planes: list[bytes] = []
        layout: list[tuple[str, int, int]] = []

        def add(name: str, values: np.ndarray, width: int) -> None:
            layout.append((name, len(values), width))
            little = values.astype("<i4").view(np.uint8).reshape(-1, 4)
            planes.extend(little[:, place].tobytes() for place in range(width))

        prompts, rows_of_prompts = self._prompts()
        prompt_ids = np.concatenate([np.zeros(0, np.int64), *(np.asarray(p["ids"], np.int64) for p in prompts)])
        add("tokens", vocabulary.numbers(self.ids), 3)
        add("prompt_tokens", vocabulary.numbers(prompt_ids), 3)
        version = self._column("policy_version")
        add("state", self._states(version), 1)
        if version is not None:
            add("version", version + 1, 3)
        for name, values in self._numbers().items():
            add(name, codes(values, k), 2)
        header = {
            "layout": layout,
            "lengths": np.diff(self.offsets).tolist(),
            "prompts": [{"text": p["text"], "length": len(p["ids"])} | _images_of(p) for p in prompts],
            "prompt": rows_of_prompts,
            "responses": self._responses(),
            "scale": [SMALLEST, k],
        }
        text = to_json(header)
        return packed(len(text).to_bytes(4, "little") + text + b"".join(planes))

    def _states(self, version: np.ndarray | None) -> np.ndarray:
        trained = self._column("response_mask")
        trained = np.ones(len(self.ids), bool) if trained is None else trained.astype(bool)
        sampled = trained if version is None else version != NOT_SAMPLED
        return np.where(trained, TRAINED, np.where(sampled, SAMPLED, OBSERVED))

    def _numbers(self) -> dict[str, np.ndarray]:
        """Return a dict that maps the names of the columns of real numbers, such as `advantage`, to their values.

        Two columns of log-prob differences replace the log-probs of the actor and of the reference model. The column
        `log_ratio` is the actor's log-prob minus the engine's log-prob. The column `kl` is the actor's log-prob minus
        the reference model's log-prob, or, where the actor's is missing, the engine's log-prob minus the reference
        model's. The encoding of real numbers is finest near 0, so small log-prob differences are
        stored more exactly than log-probs.
        """
        rollout, old, ref = (self._column(f"{name}_log_probs") for name in ("rollout", "old", "ref"))
        found = {"advantage": self._column("advantages"), "log_prob": rollout, "entropy": self._column("entropies")}
        if rollout is not None and old is not None:
            found["log_ratio"] = old - rollout
        # Where the table lacks log-probs of the actor, the engine's log-probs are used as the log-probs of the policy.
        policy = old
        if rollout is not None:
            policy = rollout if old is None else np.where(np.isnan(old), rollout, old)
        if policy is not None and ref is not None:
            found["kl"] = policy - ref
        return {name: values for name, values in found.items() if values is not None}

    def _prompts(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return a list of the distinct prompts, and for each row the index of the row's prompt in that list."""
        texts = self.table["prompt"].to_pylist()
        keys = list(zip(self.table["uid"].to_pylist(), texts, strict=True))
        ids = self.table["prompt_ids"].to_pylist() if "prompt_ids" in self.table.column_names else [[]] * len(keys)
        images = self.table["images"] if "images" in self.table.column_names else None
        numbers: dict[tuple[int, str], int] = {}
        prompts: list[dict[str, Any]] = []
        for row, key in enumerate(keys):
            if key not in numbers:
                numbers[key] = len(prompts)
                hidden = self.secret[row]
                text = redacted(texts[row]) if hidden else texts[row]
                shown = [] if hidden or images is None else [thumbnail(one["bytes"]) for one in images[row].as_py()]
                prompts.append({"text": text, "ids": [] if hidden else ids[row], "images": shown})
        return prompts, [numbers[key] for key in keys]

    def _responses(self) -> list[str | None]:
        """Return the text of each response, or None for a response whose text equals the joined texts of its tokens."""
        found: list[str | None] = []
        for row, text in enumerate(self.table["response"].to_pylist()):
            ids = self.ids[self.offsets[row] : self.offsets[row + 1]].tolist()
            found.append(None if text == self._joined(ids) else redacted(text) if self.secret[row] else text)
        return found

    def _joined(self, ids: Sequence[int]) -> str | None:
        """Join the texts of the given tokens without special tokens, as the JavaScript of the report page does.

        Return None if the text of a token is unknown, or if the joined text contains an incomplete character.
        """
        if any(one >= len(self.texts) for one in ids):
            return None
        text = "".join(self.texts[one] for one in ids if one not in self.special_ids)
        return None if _UNFINISHED_CHARACTER.search(text) else text

    def summary(self) -> dict[str, Any]:
        """Return the columns that the page needs in order to filter and sort the samples."""
        table, count = self.table, self.table.num_rows
        names = set(table.column_names)

        def column(name: str, default: Any) -> list[Any]:
            return table[name].to_pylist() if name in names else [default] * count

        components = [row or {} for row in column("reward_components", {})]
        parts = list(dict.fromkeys(name for row in components for name in row))
        errors = [redacted(error) if error else "" for error in column("reward_error", "")]
        return {
            "step": self.file.step,
            "failed": self.file.failed,
            "uid": table["uid"].to_pylist(),
            "score": [number(score) for score in column("score", math.nan)],
            "valid": [int(bool(valid)) for valid in column("valid", True)],
            # For a conversation, the page shows the stop reason, because the stop reason is more specific than the
            # finish reason "stop" or "length".
            "finish": column("stop_reason" if "stop_reason" in names else "finish_reason", ""),
            "conversation": {name: column(name, 0) for name in ("turns", "contexts", "tool_calls") if name in names},
            "errors": {row: error for row, error in enumerate(errors) if error},
            "components": {name: [number(row.get(name)) for row in components] for name in parts},
            "length": np.diff(self.offsets).tolist(),
            "hidden": np.flatnonzero(self.secret).tolist(),
        }


def _images_of(prompt: Mapping[str, Any]) -> dict[str, list[str]]:
    return {"images": prompt["images"]} if prompt["images"] else {}


def thumbnail(file: bytes) -> str:
    """Return a small copy of an image as a `data:` URI. No side of the copy is longer than `THUMBNAIL` pixels.

    An image that is small enough, and whose file is short, is kept as it is.
    """
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        kind = Image.MIME.get(image.format or "", "")
        if max(image.size) <= THUMBNAIL and len(file) <= THUMBNAIL_BYTES and kind in ("image/png", "image/jpeg"):
            return f"data:{kind};base64,{b64encode(file).decode('ascii')}"
    small = decoded(file)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, format="JPEG", quality=75)
    return f"data:image/jpeg;base64,{b64encode(buffer.getvalue()).decode('ascii')}"


def _rows_with_secrets(table: pa.Table) -> np.ndarray:
    """Return a bool array (B,) that is True for each row whose prompt or response contains a secret."""
    pairs = zip(table["prompt"].to_pylist(), table["response"].to_pylist(), strict=True)
    texts = [f"{prompt}\n{response}" for prompt, response in pairs]
    together = "\n".join(texts)
    if redacted(together) == together:
        return np.zeros(len(texts), bool)
    return np.array([redacted(text) != text for text in texts], bool)


def codes(values: np.ndarray, k: int) -> np.ndarray:
    """Encode an array (N,) of real numbers x as an array (N,) of 16-bit integers round(k asinh(x / SMALLEST))."""
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    largest = np.sinh((-MISSING - 1) / k) * SMALLEST if k > 100 else np.inf
    clipped = np.clip(np.where(finite, values, 0), -largest, largest)
    return np.where(finite, np.rint(k * np.arcsinh(clipped / SMALLEST)), MISSING).astype(np.int64)


def number(value: Any) -> float | int | None:
    """Return a number rounded to six significant digits, for JSON; None if the value is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def to_json(data: Any) -> bytes:
    """Encode data as the bytes of a JSON text.

    A lone surrogate character, which UTF-8 cannot encode, becomes a question mark.
    """
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def packed(data: bytes) -> str:
    """Compress bytes, and return the result as base64 text."""
    return b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")
