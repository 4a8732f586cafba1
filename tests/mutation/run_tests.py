"""Run the tests of rltrain/algorithms on a copy in which one module is mutated.

    python tests/mutation/run_tests.py ORIGINAL

`ORIGINAL` is the folder of the unchanged algorithms. The test files that mention a name of the mutated module run
first, because they kill most mutants within seconds. If these tests pass, all tests run. The exit status is that
of pytest.
"""

import ast
import subprocess
import sys
from pathlib import Path

TESTS = Path("tests/unit/algorithms")
# Tests of speed are left out, because they do not depend on the mutation.
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "not times_as_fast and not slower_than"]


def mutated(original: Path, copy: Path) -> list[Path]:
    """Return the modules of `copy` whose text differs from the module of the same name in `original`."""
    modules = sorted(copy.rglob("*.py"))
    return [module for module in modules if module.read_text() != (original / module.relative_to(copy)).read_text()]


def names_in(module: Path) -> set[str]:
    """Return the names of the module and of its top-level functions and classes."""
    tree = ast.parse(module.read_text())
    return {module.stem} | {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def likely_tests(modules: list[Path]) -> list[str]:
    """Return the test files that mention a public name of one of the modules."""
    names = {name for module in modules for name in names_in(module) if not name.startswith("_")}
    files = sorted(TESTS.rglob("test_*.py"))
    return [str(file) for file in files if any(name in file.read_text() for name in names)]


def main() -> int:
    """Run the tests that mention the mutated module, and then, if these tests pass, all tests."""
    likely = likely_tests(mutated(Path(sys.argv[1]), Path("rltrain/algorithms")))
    for paths in filter(None, (likely, [str(TESTS)])):
        if status := subprocess.run([sys.executable, *PYTEST, *paths]).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
