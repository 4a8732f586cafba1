"""Print a table of finished runs: `python examples/compare_runs.py outputs/*/`."""

import json
import sys
from pathlib import Path

COLUMNS = ("reward/mean", "rollout/length_mean", "eval/sampled_accuracy", "eval/greedy_accuracy")


def row(run: Path) -> list[str]:
    """Return the run's name, and the first and last value of each column."""
    files = [run / "metrics.jsonl", run / "evaluations.jsonl"]
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    values = [[record[column] for record in records if column in record] for column in COLUMNS]
    return [run.name, *(f"{kept[0]:.3g} -> {kept[-1]:.3g}" if kept else "-" for kept in values)]


def main(runs: list[str]) -> None:
    """Print the table of the runs in the given folders."""
    for cells in [["run", *COLUMNS], *(row(Path(run)) for run in runs)]:
        print("".join(f"{cell:<24}" for cell in cells).rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
