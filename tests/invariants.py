"""Fills in the test files of the tables in docs/invariants.md: `python -m tests.invariants`.

The names of tests carry the codes of the properties that they hold, as in `test_T7_...`. A row whose code is in no
test's name keeps its files.
"""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "invariants.md"
_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.*) \| (.*) \|$", re.MULTILINE)


def files_by_code() -> dict[str, list[str]]:
    """Map each code of a property, such as A1, to the files whose tests have the code in their names.

    A file is given as its path in `tests/` without the ending `.py`.
    """
    found = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for code in re.findall(r"def test_([A-Z]\d+)_", path.read_text("utf-8")):
            found[code].add(str(path.relative_to(ROOT / "tests").with_suffix("")))
    return {code: sorted(files) for code, files in found.items()}


def listed(page: str) -> dict[str, list[str]]:
    """Map the code of each row of the page to the row's test files."""
    return {code: re.findall(r"`([^`]+)`", files) for code, _, files in _ROW.findall(page)}


def filled_in(page: str) -> str:
    """Return the page with the current test files in each row."""
    found = files_by_code()

    def row(match: re.Match[str]) -> str:
        code, text, files = match.groups()
        named = ", ".join(f"`{file}`" for file in found.get(code, ()))
        return f"| {code} | {text} | {named or files} |"

    return _ROW.sub(row, page)


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text("utf-8")), "utf-8")
