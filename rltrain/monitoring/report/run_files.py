"""Reads all files that a report needs from a run's output folder.

If a file of the run is damaged, the report contains a note instead of the file's content, and all other files are still
read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rltrain.base.errors import ConfigError, described, one_line
from rltrain.base.secret_values import redacted
from rltrain.data.stored_samples import SampleFile, sample_files
from rltrain.monitoring.report.config_differences import COMMAND, Command, read_command
from rltrain.monitoring.token_texts import TOKENS, read_token_texts

CONFIG = "config.yaml"


@dataclass
class RunFiles:
    """The contents of the files of one run.

    Attributes:
        folder: output folder of the run.
        name: short name of the run, unique among the runs of the report page.
        steps: metrics of each training step.
        evaluations: metrics of each evaluation.
        alarms: the alarms, as dicts with the keys `step` and `alarm`.
        config_text: the config as YAML text, without secrets.
        config: the config as nested values; {} if the config cannot be read.
        command: the command that started the run; None if the run did not record its command.
        samples: tables of samples in the order of their steps.
        token_texts: list of the text of each token, indexed by the token's id; [] if the texts are unknown.
        special_ids: ids of the special tokens.
        notes: one message for each file, table or line that could not be read.
    """

    folder: Path
    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    command: Command | None = None
    samples: list[SampleFile] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    special_ids: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def read_run(folder: Path, name: str = "", *, texts: bool = True) -> RunFiles:
    """Read the output folder of a run.

    Args:
        folder: output folder of the run.
        name: name of the run; if `name` is "", the run gets the name of the folder.
        texts: if True, read the text of each token, which the HTML report shows, and add a note to the returned
            `RunFiles` if no training step has ended.

    Raises:
        ConfigError: the folder does not exist, or the folder is not the output folder of a run.
    """
    _require_run(folder)
    run = RunFiles(folder, name or folder.resolve().name)
    run.steps = _json_lines(run, "metrics.jsonl")
    run.evaluations = _json_lines(run, "evaluations.jsonl")
    run.alarms = [line for line in _json_lines(run, "alarms.jsonl", needed=False) if "alarm" in line]
    _read_config(run)
    run.command = _command(run)
    run.samples = sample_files(folder)
    if texts:
        _read_token_texts(run)
    if texts and not run.steps:
        run.notes.append("no training step has ended yet, so there are no curves")
    return run


def _require_run(folder: Path) -> None:
    hint = "give the output folder of a run (trainer.output_dir)"
    if not folder.exists():
        raise ConfigError(f"{folder}: no such folder; {hint}")
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; {hint}")
    if not any((folder / name).exists() for name in ("metrics.jsonl", CONFIG)):
        raise ConfigError(
            f"{folder}: holds neither metrics.jsonl nor {CONFIG}, so it is not the output folder of a run; {hint}"
        )


def _text(run: RunFiles, name: str, *, needed: bool = True) -> str | None:
    """Return the text of a file of the run. If the file cannot be read, add a note to `run.notes` and return None."""
    try:
        return (run.folder / name).read_text("utf-8", "replace")
    except FileNotFoundError:
        if needed:
            run.notes.append(f"{name}: is missing")
    except OSError as error:
        run.notes.append(f"{name}: cannot be read ({error.strerror or error})")
    return None


def _json_lines(run: RunFiles, name: str, *, needed: bool = True) -> list[dict[str, Any]]:
    """Return the JSON objects in a file that has one object per line.

    A line that is not a JSON object with the key `step` is left out, and a note about the line is added to `run.notes`.
    """
    found = []
    for number, line in enumerate((_text(run, name, needed=needed) or "").splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
        elif line.strip():
            run.notes.append(f"{name}: line {number} is not a JSON object with a step and is left out")
    return found


def _read_config(run: RunFiles) -> None:
    text = _text(run, CONFIG)
    if text is None:
        return
    run.config_text = redacted(text)
    try:
        values = yaml.safe_load(run.config_text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        run.notes.append(f"{CONFIG}: is not valid YAML ({one_line(' '.join(str(error).split()), 120)})")
        return
    if isinstance(values, Mapping):
        run.config = dict(values)
    else:
        run.notes.append(f"{CONFIG}: holds no config")


def _command(run: RunFiles) -> Command | None:
    text = _text(run, COMMAND, needed=False)
    try:
        return None if text is None else read_command(text)
    except (ValueError, RecursionError) as error:
        run.notes.append(f"{COMMAND}: cannot be read ({one_line(str(error), 120)})")
        return None


def _read_token_texts(run: RunFiles) -> None:
    """Read the text of each token of the vocabulary.

    Runs of older rltrain versions have no file `tokens.parquet`; the token texts of such a run come from the tokenizer
    in the run's model folder.
    """
    path, model = run.folder / TOKENS, run.folder / "model"
    try:
        if path.exists():
            run.token_texts, run.special_ids = read_token_texts(path)
        elif (model / "tokenizer_config.json").exists():
            run.token_texts, run.special_ids = _texts_of_model(model)
        elif run.samples:
            run.notes.append(f"{TOKENS}: is missing, so tokens are shown by their ids")
    # Reading a damaged Parquet file or a damaged tokenizer may raise any exception.
    except Exception as error:
        run.notes.append(f"{TOKENS}: cannot be read, so tokens are shown by their ids ({described(error, 120)})")


def _texts_of_model(model: Path) -> tuple[list[str], set[int]]:
    # The library transformers is imported only when needed, because the import takes seconds.
    from rltrain.data.model_directory import load_tokenizer
    from rltrain.monitoring.token_texts import special_ids, token_texts

    tokenizer = load_tokenizer(str(model))
    return token_texts(tokenizer), special_ids(tokenizer)
