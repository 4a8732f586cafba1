"""Run benchmark modules, and write their results to results.json and README.md.

The command is `python -m tests.benchmarks [NAME ...]`. If no name is given, all benchmarks run except for the GPU
benchmarks. A benchmark is a module of tests/benchmarks with `def run() -> list[Row]`. Each benchmark runs in its own
process, so that no benchmark inherits the threads, environment or memory of another benchmark. If a benchmark fails,
its result is a row with the reason for the failure, and the remaining benchmarks still run.
"""

import argparse
import ast
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.row import Row
from tests.benchmarks.table import machine, merge, write_table

HERE = Path(__file__).parent
GPU = "gpu"  # Name prefix of the benchmarks that need a GPU and run only on request.
RUN_ONE = """
import dataclasses, importlib, json, sys
rows = importlib.import_module(f"tests.benchmarks.{sys.argv[1]}").run()
open(sys.argv[2], "w").write(json.dumps([dataclasses.asdict(row) for row in rows]))
"""


def names() -> list[str]:
    """Return the names of the modules in tests/benchmarks that define `run`, without importing the modules."""
    found = []
    for path in sorted(HERE.glob("*.py")):
        defined = (node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
        if path.stem != "__main__" and "run" in defined:
            found.append(path.stem)
    return found


def run_one(name: str, folder: Path) -> list[Row]:
    """Run one benchmark module and return its rows, or a single row with the error message if the module fails."""
    path = folder / f".{name}.rows.json"
    command = [sys.executable, "-c", RUN_ONE, name, str(path)]
    try:
        done = subprocess.run(command, cwd=HERE.parents[1], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return [Row(**row) for row in json.loads(path.read_text())]
        sys.stderr.write(done.stderr)
        said = done.stderr.strip().splitlines()
        return [failed(name, said[-1] if said else f"exit status {done.returncode}")]
    finally:
        path.unlink(missing_ok=True)


def failed(name: str, why: str) -> Row:
    """Return the row of a benchmark that failed, where `why` is the error message."""
    return Row(
        name=name, ratio=math.nan, unit="", target="", ours="failed", theirs="", notes=why[:300],
        command=f"make bench ARGS={name}",
    )  # fmt: skip


def main() -> int:
    """Run the requested benchmarks, and return 1 if any benchmark failed, else 0."""
    known = names()
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}")
    parser.add_argument("--gpu", action="store_true", help="run the GPU benchmarks instead of all others")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and README.md")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(known)):
        parser.error(f"{', '.join(unknown)}: no such benchmark; the benchmarks are {', '.join(known)}")
    chosen = arguments.names or [name for name in known if name.startswith(GPU) == arguments.gpu]
    if not chosen:
        parser.error(f"no GPU benchmark was found: the name of its module must begin with {GPU}")
    status = 0
    for number, name in enumerate(chosen):
        sys.stderr.write(f"[{number + 1}/{len(chosen)}] {name}\n")
        where, rows = machine(), run_one(name, arguments.out)
        status |= any(row.ours == "failed" for row in rows)
        for row in rows:
            sys.stdout.write(f"{json.dumps(dataclasses.asdict(row))}\n")
        write_table(arguments.out / "README.md", merge(arguments.out / "results.json", name, rows, where))
    return status


if __name__ == "__main__":
    sys.exit(main())
