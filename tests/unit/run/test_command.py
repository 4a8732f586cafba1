import json
import logging

import yaml

from rltrain.monitoring.report.config_differences import COMMAND, differences, read_command
from rltrain.run.command import command_of, describe
from rltrain.settings.command_line import Args
from rltrain.settings.compose import compose, to_yaml
from rltrain.tasks.tokenizer import char_tokenizer
from rltrain.trajectories.token_rewards import with_all_knobs


def test_the_presets_of_a_command_are_its_choices_of_groups():
    command = command_of(["algorithm=dapo", "actor.lr=0.5", "rollout=hf"])
    assert command.presets == ["algorithm=dapo", "rollout=hf"]
    assert command.values["algorithm"]["loss"]["clip_ratio_high"] == 0.28
    assert command.values["rollout"]["engine"] == "hf"
    assert command.values["actor"]["lr"] == 4e-4


def test_what_differs_from_the_presets_is_what_the_command_set(tmp_path):
    overrides = ["algorithm=dapo", "algorithm.loss.clip_ratio_low=0.1", "actor.lr=0.5", "trainer.output_dir=runs"]
    describe(tmp_path, Args("run", overrides), char_tokenizer())
    command = read_command((tmp_path / COMMAND).read_text())
    config = yaml.safe_load(to_yaml(with_all_knobs(compose(overrides)[0])))
    assert command.arguments == overrides
    assert differences(config, command.values) == [
        ("actor.lr", "0.0004", "0.5"), ("algorithm.loss.clip_ratio_low", "0.2", "0.1"),
    ]  # fmt: skip


def test_a_key_among_the_arguments_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "abcdefgh-secret")
    describe(tmp_path, Args("run", ["reward.functions=[abcdefgh-secret]"]), char_tokenizer())
    assert json.loads((tmp_path / COMMAND).read_text())["arguments"] == ["reward.functions=[[hidden]]"]


def test_a_tokenizer_that_fails_is_a_warning(tmp_path, caplog):
    class Broken:
        def convert_ids_to_tokens(self, ids):
            raise RuntimeError("no vocabulary")

        def __len__(self):
            return 3

    with caplog.at_level(logging.WARNING):
        describe(tmp_path, Args("run", []), Broken())
    assert "no vocabulary" in caplog.text
    assert (tmp_path / COMMAND).exists()
