"""Tests that docs/invariants.md lists the properties that tests are named after, and their test files."""

from tests.invariants import PAGE, ROOT, files_by_code, filled_in, listed


def test_the_page_of_invariants_has_each_code_and_its_test_files():
    page = PAGE.read_text("utf-8")
    rows = listed(page)
    assert files_by_code().keys() <= rows.keys()
    assert filled_in(page) == page, "run python -m tests.invariants"
    assert all(files and all((ROOT / "tests" / f"{file}.py").is_file() for file in files) for files in rows.values())
