"""Tests of the house rules that every file of the project must follow."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("rltrain", "workers") for path in (ROOT / folder).rglob("*.py"))
PYTHON = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
BINARY = (".png", ".pyc", ".coverage")
MAX_FUNCTION_LINES = 60

# Each forked child process starts with torch imported, but without any module of the project.
IMPORT_EACH_FIRST = """
import contextlib, importlib, json, os, sys, traceback
def ours(name):
    return name.split(".")[0] in ("rltrain", "workers")
names = json.loads(sys.argv[1])
told, tell = os.pipe()
if not os.fork():  # what they import of others, which is imported once and for all
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    os.write(tell, json.dumps([name for name in sys.modules if not ours(name)]).encode())
    os._exit(0)
os.close(tell)
for name in json.loads(open(told, "rb").read()):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
failed = []
for name in names:
    assert not [loaded for loaded in sys.modules if ours(loaded)]
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(json.dumps(failed))
"""


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def fresh(code, *arguments):
    """Run code in a new Python interpreter, and return the last line of its output and its standard error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1], done.stderr


def functions_of(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length_of(function):
    """Return the number of lines of a function from its signature to its end, without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def texts():
    """Return the text of each text file in the project, keyed by the path relative to the project root."""
    folders = ["rltrain", "workers", "config", "tests", "docs", "docker", "examples", ".ci"]
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    files = [path for path in (*inside, *ROOT.iterdir()) if path.is_file() and not path.name.endswith(BINARY)]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def test_the_top_level_folders_are_those_of_the_design():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("this is not a git checkout")
    folders = {name.split("/")[0] for name in tracked.stdout.splitlines() if "/" in name}
    assert folders == {".ci", "rltrain", "workers", "config", "tests", "docker", "examples", "docs"}


def test_no_file_has_marks_of_a_merge_conflict():
    marks = tuple(f"{sign * 7} " for sign in "<>")
    assert [path for path, text in texts().items() if any(line.startswith(marks) for line in text.splitlines())] == []


@pytest.mark.slow
def test_each_module_can_be_the_first_that_a_process_imports():
    names = [name_of(path) for path in SOURCES]
    for library in ("vllm", "sglang"):
        if importlib.util.find_spec(library) is None:
            names = [name for name in names if not name.startswith(f"workers.rollout.engines.{library}.")]
    failed, errors = fresh(IMPORT_EACH_FIRST, json.dumps(names))
    assert json.loads(failed) == [], errors


def test_the_algorithms_import_neither_engines_nor_configs():
    heavy = ["ray", "vllm", "transformers", "hydra", "omegaconf", "tensordict"]
    loaded, _ = fresh(f"import sys, rltrain.algorithms; print([name for name in {heavy} if name in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize("package", ["rltrain", "workers"])
def test_a_top_package_imports_nothing(package):
    body = ast.parse((ROOT / package / "__init__.py").read_text()).body
    assert all(isinstance(node, ast.Expr) for node in body)  # the docstring


def test_no_function_is_over_60_lines_without_its_docstring():
    sizes = {f"{name_of(path)}.{f.name}": length_of(f) for path in PYTHON for f in functions_of(path)}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def test_the_training_step_is_at_most_60_lines_with_its_docstring():
    (step,) = (f for f in functions_of(ROOT / "rltrain" / "trainer.py") if f.name == "train_step")
    assert step.end_lineno - step.lineno + 1 <= MAX_FUNCTION_LINES


def test_every_module_has_its_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    folders = next(contract for contract in contracts if contract["name"].startswith("folders import one way"))
    placed = re.findall(r"[\w.]+", " ".join(folders["layers"]))
    top = [path for path in (ROOT / "rltrain").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert sorted(placed) == sorted({"workers", *(name_of(path) for path in top)} - {"rltrain"})


def test_no_comment_or_message_names_an_invariant_by_a_code_that_only_another_document_explains():
    named = r"(?i:invariants?)\s+[A-Z](?:\d|\b)"
    # `bare` matches a code (a letter and a number) in brackets, and a comment that is a code or begins with a code.
    bare = r"# [A-H]\d{1,2}(?=[:,.]|$)|\([A-H]\d{1,2}\)"
    code = re.compile(f"{named}|{bare}", re.MULTILINE)
    assert {path: code.search(text)[0] for path, text in texts().items() if code.search(text)} == {}


def test_no_file_names_a_path_of_somebodys_machine():
    own = re.compile("/(?:" + "|".join(["home", "Users", "root", "work"]) + r")/\w")
    assert {path: own.search(text)[0] for path, text in texts().items() if own.search(text)} == {}


def test_the_wheel_holds_the_code_the_config_and_the_files_of_the_report(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    there = {str(path.relative_to(ROOT)) for path in SOURCES}
    there |= {f"rltrain/{path.relative_to(ROOT)}" for path in (ROOT / "config").rglob("*.*")}
    there |= {f"rltrain/monitoring/report/page.{kind}" for kind in ("html", "css", "js")}
    assert {name for name in names if ".dist-info/" not in name} == there
