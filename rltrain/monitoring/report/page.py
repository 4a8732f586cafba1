"""Writes the page of a report: a single HTML file that contains all data, CSS and JavaScript."""

import html
import os
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from rltrain.base.secret_values import redacted
from rltrain.monitoring.report.charts import charts, descriptions
from rltrain.monitoring.report.config_differences import Command, between, differences
from rltrain.monitoring.report.run_files import RunFiles, read_run
from rltrain.monitoring.report.samples import encode_samples, number, packed, to_json

REPORT = "report.html"
MAX_BYTES = 19_800_000  # maximum size of a report page in bytes


def write_report(
    folders: Sequence[Path], output: Path, *, defaults: Command | None = None, max_bytes: int = MAX_BYTES
) -> list[str]:
    """Write the report of one or several runs to an HTML file.

    The HTML file is replaced atomically, so a reader never sees an incomplete page.

    Args:
        folders: output folders of the runs.
        output: path of the HTML file.
        defaults: command and preset config that are used for a run that did not record its command.
        max_bytes: maximum size of the HTML file in bytes. The space for samples is divided equally among the runs. If
            the samples of a run do not fit into the space of the run, the HTML file omits some samples of the run, and
            states how many samples it shows.

    Returns:
        A list with one message for each file, table or line that could not be read.

    Raises:
        ConfigError: a folder is not the output folder of a run.
        OSError: the HTML file cannot be written.
    """
    runs = [read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    text = page(runs, defaults, max_bytes)
    partial = output.with_name(f"{output.name}.partial")
    partial.write_text(text, "utf-8", "replace")
    os.replace(partial, output)
    return [f"{run.folder}: {note}" for run in runs for note in run.notes]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a short, unique name for each folder.

    By default, the name of a folder is the last component of its path. If two folders have the same last component, the
    names of parent folders are prepended to all names.
    """
    parts = [folder.resolve().parts for folder in folders]
    deepest = max(map(len, parts), default=1)
    for depth in range(1, deepest + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{one[-1]} ({place})" for place, one in enumerate(parts, 1)]


def page(runs: Sequence[RunFiles], defaults: Command | None, max_bytes: int) -> str:
    """Return the HTML text of the report about the given runs; `write_report` describes the arguments."""
    names = sorted({name for run in runs for row in (*run.steps, *run.evaluations) for name in row} - {"step"})
    data: dict[str, Any] = {
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "charts": charts(names),
        "descriptions": descriptions(names),
        "between": between([run.config for run in runs]),
        "runs": [_described(run, defaults) for run in runs],
    }
    rest = _filled("", {"data": packed(to_json(data))})
    encoded = [encode_samples(run, (max_bytes - len(rest)) // len(runs)) for run in runs]
    for run, shown, samples in zip(runs, data["runs"], encoded, strict=True):
        shown["notes"] = [redacted(note) for note in run.notes]
        shown["samples"] = {**samples.index, "vocabulary": samples.vocabulary, **samples.counts}
    blocks = {"data": packed(to_json(data))}
    for place, samples in enumerate(encoded):
        blocks |= {f"chunk-{place}-{number}": chunk for number, chunk in enumerate(samples.chunks)}
    return _filled(", ".join(run.name for run in runs), blocks)


def _described(run: RunFiles, defaults: Command | None) -> dict[str, Any]:
    """Return all data about one run that the report page shows, except for the samples."""
    command = run.command or defaults
    return {
        "name": run.name,
        "steps": columns(run.steps),
        "evaluations": columns(run.evaluations),
        "alarms": [{"step": row["step"], "alarm": redacted(str(row["alarm"]))} for row in run.alarms],
        "config": run.config_text,
        "command": redacted(shlex.join(run.command.arguments)) if run.command else None,
        "presets": redacted(" ".join(command.presets)) if command else None,
        "differences": differences(run.config, command.values) if command and command.values else None,
    }


def columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Convert rows of metrics to one list of values per metric, with None for missing, NaN and infinite values."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [number(row.get(name)) for row in rows] for name in names}


def _filled(title: str, blocks: dict[str, str]) -> str:
    """Insert the title, the CSS, the JavaScript program and the data into the HTML template of the page.

    The data needs no HTML escaping, because base64 text contains no special characters of HTML.
    """
    whole, style, program = (_file(f"page.{kind}") for kind in ("html", "css", "js"))
    head, body = whole.split("<!-- data -->")
    head = head.replace("<!-- title -->", html.escape(redacted(title)))
    head = head.replace("/* style */", style)
    body = body.replace("/* program */", program)
    return "".join([head, *_blocks(blocks.items()), body])


def _blocks(blocks: Iterable[tuple[str, str]]) -> Iterable[str]:
    return (f'<script type="application/gzip;base64" id="{name}">{text}</script>\n' for name, text in blocks)


def _file(name: str) -> str:
    return resources.files("rltrain.monitoring.report").joinpath(name).read_text("utf-8")
