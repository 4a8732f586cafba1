import importlib.util
import sys

import pytest

from rltrain.base.errors import ConfigError
from rltrain.monitoring.sinks import JsonLines, TensorBoard
from rltrain.monitoring.trackers import loading
from rltrain.monitoring.trackers.background import BackgroundSink
from rltrain.monitoring.trackers.loading import check_trackers, make_sinks
from rltrain.monitoring.trackers.run_ids import RunIds
from rltrain.run.checks import check
from rltrain.settings.compose import compose

MINE = """
class Mine:
    def __init__(self, output_dir):
        self.output_dir = output_dir
    def log_step(self, step, metrics): ...
    def log_eval(self, step, metrics): ...
    def restore(self, step, steps, evaluations): ...
    def close(self): ...

class Half:
    def __init__(self, output_dir): ...
    def log_step(self, step, metrics): ...
    def close(self): ...

class Demanding(Mine):
    def __init__(self, output_dir, url): ...

def function(): ...
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_sink.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*names):
    with pytest.raises(ConfigError) as caught:
        check_trackers(names)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_class_of_a_file_is_made_with_the_output_folder_and_runs_in_a_thread(mine):
    names = ["tensorboard", "my_sink.py:Mine"]
    check_trackers(names)
    sinks = make_sinks(mine, names)
    assert [type(sink) for sink in sinks] == [JsonLines, TensorBoard, BackgroundSink]
    assert (type(sinks[2].sink).__name__, sinks[2].sink.output_dir) == ("Mine", mine)
    for sink in sinks:
        sink.close()


def test_without_trackers_there_is_the_jsonl_file_alone(tmp_path):
    check_trackers([])
    (sink,) = make_sinks(tmp_path, [])
    assert isinstance(sink, JsonLines)
    sink.close()


def test_the_default_is_tensorboard_and_a_resumed_run_may_change_it():
    assert compose([])[0].trainer.trackers == ["tensorboard"]
    from rltrain.run.resume import CHANGEABLE

    assert "trainer.trackers" in CHANGEABLE


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["wadnb"], "trainer.trackers=[wadnb]: not one of tensorboard, wandb, mlflow, trackio; did you mean wandb?"),
        (["x"], "trainer.trackers=[x]: not one of tensorboard, wandb, mlflow, trackio; name your own class "
                "as package.module:Class or file.py:Class"),
        (["tensorboard", "tensorboard"],
         "trainer.trackers=[tensorboard,tensorboard]: tensorboard appears more than once; list each tracker once"),
        (["my_sink.py:Half"], "trainer.trackers=[my_sink.py:Half]: the class lacks log_eval, restore; a tracker must "
                              "have the methods log_step, log_eval, restore, close"),
        (["my_sink.py:Mein"], "trainer.trackers 'my_sink.py:Mein': my_sink.py has no class 'Mein'; the nearest is "
                              "'Mine'; its classes are Mine, Half, Demanding"),
        (["my_sink.py:function"], "trainer.trackers=[my_sink.py:function]: is not a class; name a class with the "
                                  "methods log_step, log_eval, restore, close"),
        (["my_sink.py:Demanding"], "trainer.trackers=[my_sink.py:Demanding]: cannot be created with the output "
                                   "folder as its only argument (missing a required argument: 'url'); define "
                                   "__init__(self, output_dir)"),
    ],
)  # fmt: skip
def test_what_is_no_tracker_is_refused_in_one_line(mine, names, message):
    assert refusal(*names) == message


@pytest.mark.parametrize("path", ["my_sink.py:Other", "absent.py:Mine", "no_such_package_at_all:Mine"])
def test_a_class_that_is_not_there_is_refused_by_the_key(mine, path):
    assert refusal(path).startswith(f"trainer.trackers '{path}'")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda module: None if module == name else real(module))
    assert refusal(name) == (
        f"trainer.trackers=[{name}]: the package {name} is not installed; run pip install rltrain[{name}]"
    )


def test_a_package_that_does_not_import_is_refused_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio/__init__.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    assert refusal("trackio") == (
        "trainer.trackers=[trackio]: the package trackio cannot be imported (ModuleNotFoundError: No module named "
        "'a_part_that_is_missing'); run pip install rltrain[trackio]"
    )


def test_a_run_checks_its_trackers_before_it_starts(tmp_path):
    config, _ = compose([f"trainer.output_dir={tmp_path / 'new'}", "trainer.trackers=[tensorbord]"])
    with pytest.raises(ConfigError, match="did you mean tensorboard"):
        check(config)
    assert not (tmp_path / "new").exists()


def test_the_ids_of_runs_are_kept_for_each_tracker(tmp_path):
    first, second = RunIds(tmp_path, "wandb"), RunIds(tmp_path, "mlflow")
    assert first.read() is None
    first.write("a")
    second.write("b")
    first.write("c")
    assert [RunIds(tmp_path, name).read() for name in ("wandb", "mlflow", "trackio")] == ["c", "b", None]
    assert [path.name for path in tmp_path.iterdir()] == ["trackers.json"]
