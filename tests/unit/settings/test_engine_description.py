"""Tests of the descriptions of rollout engines."""

import os
import subprocess
import sys

import pytest

from rltrain.settings.compose import compose
from rltrain.settings.engine_description import (
    EngineDescription,
    Setting,
    engine_description,
    engine_folder,
    engine_names,
)

OWN = ["hf", "sglang", "stored", "vllm"]


def test_rltrains_own_engines_are_the_packages_of_one_folder():
    assert engine_names() == OWN
    assert [engine_description(name).title for name in OWN] == ["transformers", "SGLang", "stored answers", "vLLM"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "there is no package workers.rollout.engines.nothing"),
        ("no_such.engine", "there is no package no_such.engine"),
        ("json.decoder", "json.decoder has no DESCRIPTION"),
        ("../vllm", "'../vllm' is not the name of a Python package"),
        ("", "'' is not the name of a Python package"),
    ],
)
def test_an_unknown_engine_is_refused_with_the_reason(name, reason):
    with pytest.raises(LookupError, match=reason.replace(".", r"\.")):
        engine_description(name)


def test_an_error_inside_the_package_of_an_engine_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_engines").mkdir()
    (tmp_path / "broken_engines" / "one.py").write_text("import a_library_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match=r"broken_engines.one does not import: ModuleNotFoundError: .*a_library_that"):
        engine_description("broken_engines.one")


def test_an_installed_command_finds_an_engine_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "nearby_engines").mkdir()
    (tmp_path / "nearby_engines" / "one.py").write_text(
        "from rltrain.settings.engine_description import EngineDescription\n"
        "DESCRIPTION = EngineDescription(title='near', make='nearby_engines.one:make')\n"
    )
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)
    assert engine_description("nearby_engines.one").title == "near"
    assert engine_folder("nearby_engines.one") == tmp_path / "nearby_engines" / "one.py"


def test_descriptions_are_read_without_the_libraries_of_the_engines():
    program = (
        "import sys; from rltrain.settings.engine_description import *; "
        "[engine_description(name) for name in engine_names()]; "
        "print([name for name in ('torch', 'vllm', 'ray', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_an_engine_is_described_by_its_settings():
    rollout = compose(["rollout.vllm.tensor_parallel_size=2", "rollout.vllm.kv_cache_mb=4096"])[0].rollout
    assert (rollout.shards, rollout.devices) == (2, 2)
    assert str(rollout.description.cache_mb(rollout)) == "rollout.vllm.kv_cache_mb=4096"
    assert str(rollout.description.gpu_share(rollout)) == "rollout.vllm.gpu_memory_utilization=0.5"
    assert not rollout.description.separate_adapters(rollout)
    separate = compose(["rollout.vllm.adapters=separate"])[0].rollout
    assert separate.description.separate_adapters(separate)
    plain = compose(["rollout=hf"])[0].rollout
    assert (plain.shards, plain.devices, plain.description.cache_mb) == (1, 1, None)


def test_a_setting_is_printed_as_on_the_command_line():
    assert str(Setting("a.b", 12345678)) == "a.b=12345678"
    assert str(Setting("a.b", 0.25)) == "a.b=0.25"


def test_an_engine_needs_no_more_than_a_title_and_a_function_that_makes_it():
    config = compose(["rollout=hf"])[0]
    rollout = config.rollout
    plain = EngineDescription(title="plain", make="somewhere:make")
    plain.check(config)
    assert plain.shards(rollout) == 1
    assert not plain.separate_adapters(rollout)
