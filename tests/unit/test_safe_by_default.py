"""Tests that loaded data never runs as code.

The tests list each use of a function that could run loaded data as code, with the reason why the use is safe.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("rltrain", "workers") for path in (ROOT / folder).rglob("*.py"))
# A use of pickle is safe if the bytes come from a process of the same run, or if the unpickler finds no globals.
PICKLES = {
    # The driver sends its own data to the process that renders chat templates, and gets JSON back.
    ("rltrain/data/chat_templates.py", "pickle.dumps"),
    ("rltrain/data/template_process.py", "pickle.loads"),
    ("rltrain/rewards/code_tests_link.py", "pickle.Pickler"),
    ("rltrain/rewards/code_tests_link.py", "pickle.Unpickler"),
    ("rltrain/rewards/code_tests_link.py", "pickle.UnpicklingError"),
    ("rltrain/batch/serialization.py", "pickle.PickleBuffer"),
    ("workers/rollout/engines/vllm/engine.py", "pickle.dumps"),
    ("workers/models/state_files.py", "pickle.Unpickler"),
    ("workers/models/state_files.py", "pickle.UnpicklingError"),
    ("workers/rollout/engines/vllm/worker.py", "pickle.loads"),
}
# Code may run in the sandbox for programs written by the model, and on import of a user's reward file.
RUNS_CODE = {
    (f"rltrain/rewards/{name}_inside.py", function)
    for name in ("code_tests", "sandbox")
    for function in ("exec", "compile")
}
LOADERS = ("from_pretrained", "from_config")


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Return (source text of the called expression, call node) for every call in a file."""
    return [
        (ast.unparse(node.func), node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def keyword(call: ast.Call, name: str) -> object:
    return next((ast.literal_eval(k.value) for k in call.keywords if k.arg == name), None)


def test_tensors_are_loaded_with_weights_only_and_nowhere_by_numpy_or_yaml_objects():
    found = 0
    for path in SOURCES:
        for name, call in calls(path):
            if name.endswith("torch.load"):
                found += 1
                assert keyword(call, "weights_only") is True, f"{named(path)}:{call.lineno}"
            assert name not in (
                "np.load",
                "numpy.load",
                "yaml.load",
                "yaml.unsafe_load",
                "joblib.load",
                "shelve.open",
            ), path
    assert found


def test_every_use_of_pickle_is_known():
    used = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "cloudpickle", "dill", "marshal"):
                used |= {(named(path), f"{node.module}.{alias.name}") for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
                "pickle",
                "cloudpickle",
                "dill",
                "marshal",
            ):
                used.add((named(path), ast.unparse(node)))
    assert used == PICKLES


def test_no_text_is_evaluated():
    used = {
        (named(path), name) for path in SOURCES for name, _ in calls(path)
        if name in ("eval", "exec", "compile", "os.system", "__import__")
    }  # fmt: skip
    assert used == RUNS_CODE


def test_no_shell_reads_a_command():
    for path in SOURCES:
        for name, call in calls(path):
            assert keyword(call, "shell") is not True if name.startswith("subprocess.") else True, (
                f"{named(path)}: {name}"
            )


def test_a_models_own_code_is_never_run():
    found = 0
    for path in SOURCES:
        for name, call in calls(path):
            # only transformers' Auto classes can load code from a model's folder, so concrete classes need no check
            if name.rpartition(".")[2] in LOADERS and name.startswith(("Auto", "kind.")):
                found += 1
                assert keyword(call, "trust_remote_code") is False, f"{named(path)}:{call.lineno}: {name}"
                assert name.endswith("from_config") or keyword(call, "local_files_only") is True, (
                    f"{named(path)}: {name}"
                )
    assert found >= 6
    assert '"trust_remote_code": False' in (ROOT / "workers/rollout/engines/vllm/engine.py").read_text()


def test_models_are_loaded_in_one_place_which_refuses_weights_that_are_not_whole():
    places = {
        named(path) for path in SOURCES for name, _ in calls(path)
        if name.endswith(".from_pretrained") and name.startswith(("AutoModel", "kind."))
    }  # fmt: skip
    assert places == {"rltrain/data/model_weights.py"}


def test_a_torch_file_that_would_run_code_is_not_loaded(tmp_path):
    import pickle

    import pytest
    import torch

    from rltrain.batch.data_proto import DataProto

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "trapped",)

    torch.save({"tensors": {}, "families": [], "rows": 0, "others": Trap(), "meta": "{}"}, tmp_path / "batch.pt")
    with pytest.raises(pickle.UnpicklingError):
        DataProto.load(tmp_path / "batch.pt")
    assert not (tmp_path / "trapped").exists()
