"""Prints the findings about a run: in frames on a terminal, and as plain lines of text in a file or pipe."""

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rltrain.base.errors import one_line
from rltrain.monitoring.doctor.history import Finding
from rltrain.monitoring.report.run_files import RunFiles

LONGEST = 1000  # A printed line about a finding has at most 1000 characters.


def show(run: RunFiles, findings: Sequence[Finding], console: Console) -> None:
    """Print the findings about a run, or one line that says that no problem was found."""
    for note in run.notes:
        _print(console, f"{run.folder}: note: {note}")
    if not findings:
        _print(console, f"{run.folder}: {nothing_found(run)}", "green")
        return
    count = f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"
    _print(console, f"{run.folder}: {count} in {_steps(run)}", "bold")
    for number, finding in enumerate(findings, 1):
        title = f"{number}. {finding.name}, from step {finding.step}"
        if console.is_terminal:
            console.print(Panel(_grid(finding), title=Text(title), title_align="left", border_style="red"))
        else:
            for line in [title, *(f"   {label}: {text}" for label, text in _parts(finding))]:
                _print(console, line)


def nothing_found(run: RunFiles) -> str:
    """Return the line to print for a run without findings."""
    if not run.steps:
        return (
            "no cause found: no training step has ended, so there is nothing to judge; if the run stopped, the last "
            "line that it printed says why"
        )
    return f"no cause found: no rule of the doctor found a problem in the run's {_steps(run)}"


def _steps(run: RunFiles) -> str:
    return f"{len(run.steps)} step{'' if len(run.steps) == 1 else 's'}"


def _parts(finding: Finding) -> list[tuple[str, str]]:
    """Return a pair (label, text) for each line that is printed about a finding."""
    return [
        *(("evidence", text) for text in finding.evidence),
        *(("brings with it", text) for text in finding.effects),
        *(("likely cause", text) for text in finding.causes),
        *(("change", text) for text in finding.changes),
    ]


def _grid(finding: Finding) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    before = ""
    for label, text in _parts(finding):
        grid.add_row(Text(label if label != before else ""), Text(one_line(text, LONGEST)))
        before = label
    return grid


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(one_line(text, LONGEST).rstrip(), style=style), soft_wrap=True)
