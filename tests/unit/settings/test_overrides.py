"""Tests of config files that a user writes, and of option names from other trainers."""

import re

import pytest
import yaml

from rltrain.base.errors import ConfigError
from rltrain.settings.command_line import parse_args
from rltrain.settings.compose import compose
from rltrain.settings.other_names import NAMES, name_here
from rltrain.settings.overrides import from_file
from rltrain.settings.schema import Config, LoRAConfig
from rltrain.settings.typed import keys


@pytest.fixture
def own(tmp_path):
    def write(text):
        file = tmp_path / "my.yaml"
        file.write_text(text)
        return str(file)

    return write


def refusal(file, *overrides):
    with pytest.raises(ConfigError) as error:
        compose(overrides, [file])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_sets_groups_and_keys_nested_or_dotted(own):
    file = own("""
        algorithm: dapo
        rollout: hf
        rollout.temperature: 0.7
        trainer:
          total_steps: 7
          output_dir: here/${trainer.seed}
        actor: {lr: 1e-5}
        algorithm.loss.clip_ratio_high: 0.3
        data: {val: null}
    """)
    config = compose([], [file])[0]
    assert (config.algorithm.dynamic_sampling, config.rollout.engine, config.rollout.temperature) == (10, "hf", 0.7)
    assert (config.trainer.total_steps, config.trainer.output_dir, config.actor.lr) == (7, "here/0", 1e-5)
    assert config.algorithm.loss["clip_ratio_high"] == 0.3
    assert config.data.val is None


def test_the_command_line_overrides_a_file_and_a_later_file_an_earlier_one(own, tmp_path):
    first, second = own("algorithm: ppo\ntrainer: {seed: 1, total_steps: 5}"), tmp_path / "second.yaml"
    second.write_text("trainer.seed: 2")
    config = compose(["algorithm=dapo", "trainer.total_steps=6"], [first, str(second)])[0]
    assert (config.trainer.seed, config.trainer.total_steps, config.algorithm.dynamic_sampling) == (2, 6, 10)


def test_choices_may_stand_under_defaults_as_in_hydras_own_files(own):
    config = compose(
        [], [own("defaults:\n  - algorithm: ppo\n  - override placement: inprocess\n  - _self_\nrollout: hf")]
    )[0]
    assert (config.algorithm.advantage_estimator, config.placement.launcher) == ("gae", "inprocess")


def test_a_presets_knobs_go_with_its_function_in_a_file_too(own):
    config = compose([], [own("algorithm: dapo\nalgorithm.loss_mode: gspo")])[0]
    assert config.algorithm.loss == {}


def test_the_config_that_a_run_has_written_gives_the_same_run(own):
    overrides = [
        "algorithm=dapo",
        "model.lora.rank=4",
        "reward.functions=[f.py:a,{path:g.py:b,weight:2}]",
        "rollout=hf",
    ]
    config, text = compose([*overrides, "trainer.output_dir=x"])
    assert compose([], [own(text)]) == (config, text)


def test_a_mapping_replaces_that_of_the_preset_and_adapters_may_be_given_by_key(own):
    assert compose([], [own("algorithm: ppo\nalgorithm.advantage: {lam: 0.5}")])[0].algorithm.advantage == {"lam": 0.5}
    config = compose([], [own("model: {lora: {rank: 2, targets: q_proj}}")])[0]
    assert config.model.lora == LoRAConfig(rank=2, alpha=4, targets=["q_proj"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trainer: {totl_steps: 3}",
            "unknown config key 'trainer.totl_steps'; the nearest known key is 'trainer.total",
        ),
        ("algorithm: grop", "algorithm=grop: unknown choice; the nearest is 'grpo'"),
        (
            "defaults: [{algorithms: ppo}]",
            "defaults: 'algorithms' is not a group; the groups are profile, algorithm, model",
        ),
        ("defaults: ppo", "defaults=ppo: not a list"),
        ("defaults: [ppo]", "defaults: 'ppo' is not a choice"),
        ("trainer: 3", "'trainer: 3': 'trainer' is a section; set its keys one at a time"),
        ("algorithm.loss: 3", "'algorithm.loss: 3': must be a mapping"),
        ("- 1\n- 2", "holds no mapping; write keys and values"),
        ("a: [1", "not a valid YAML file"),
        ("a: 1\na: 2", "not a valid YAML file"),
        ("trainer: {learning_rate: 3}", "rltrain's name for it is 'actor.lr'"),
    ],
)
def test_what_a_file_says_wrongly_is_refused_with_its_name(own, text, message):
    file = own(text)
    assert refusal(file).startswith(f"--config {file}: ")
    assert message in refusal(file)


def test_a_file_that_is_not_there_or_a_folder_or_no_text_is_refused(own, tmp_path):
    assert "no such file; check the path" in refusal(str(tmp_path / "none.yaml"))
    assert "Is a directory" in refusal(str(tmp_path))
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not a valid YAML file" in refusal(str(binary))


def test_an_empty_file_changes_nothing(own):
    assert from_file(own("# nothing yet\n")) == []


def test_text_of_a_file_stays_as_it_is(own):
    text = "data:\n  prompt: 'a ${b} {question}, =[x'\n  system_prompt: |-\n    Two\n    lines: \\n ${\n"
    data = compose([], [own(text)])[0].data
    assert (data.prompt, data.system_prompt) == ("a ${b} {question}, =[x", "Two\nlines: \\n ${")
    config, written = compose(["model.path=x"], [own(text)])
    assert compose(["trainer.seed=0"], [own(written)])[0].data == config.data


# Tests of option names from other trainers


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("learning_rate", "actor.lr"),
        ("beta", "algorithm.kl_loss.kl_loss_coef"),
        ("algorithm.beta", "algorithm.kl_loss.kl_loss_coef"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("num_generations", "rollout.samples_per_prompt"),
        ("kl_coef", "algorithm.kl_in_reward.kl_coef"),
        ("trainer.learning_rate", "actor.lr"),
        ("max_completion_length", "rollout.max_response_length"),
        ("data.train_batch_size", "trainer.prompts_per_step"),
        ("n_samples_per_prompt", "rollout.samples_per_prompt"),
        ("actor_learning_rate", "actor.lr"),
        ("report_to", "trainer.trackers"),
        ("use_wandb", "trainer.trackers"),
        ("trainer.logger", "trainer.trackers"),
        ("seed", "trainer.seed"),
        ("bf16", "model.dtype"),
        ("num_train_epochs", "trainer.total_epochs"),
        ("per_device_train_batch_size", "actor.max_tokens_per_microbatch"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor.max_tokens_per_microbatch"),
        ("logging_steps", "trainer.sample_every"),
        ("output_dir", "trainer.output_dir"),
        ("temperature", "rollout.temperature"),
    ],
)
def test_the_name_of_another_trainer_is_answered_with_the_name_here(typed, key):
    with pytest.raises(
        ConfigError, match=rf"^unknown config key '{typed}'; rltrain's name for it is '{re.escape(key)}'"
    ):
        compose([f"{typed}=1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning_rate", "1e-6"], "'--learning_rate': rltrain's name for it is 'actor.lr'; settings are written "
         "without dashes, as in actor.lr=1e-6"),
        (["--learning-rate=1e-6"], "'--learning-rate': rltrain's name for it is 'actor.lr'; settings are written "
         "without dashes, as in actor.lr=1e-6"),
        (["--num_generations", "--plan"], "without dashes, as in rollout.samples_per_prompt=VALUE"),
        (["--num_generations", "trainer.seed=1"], "without dashes, as in rollout.samples_per_prompt=VALUE"),
        (["--bf16"], "'--bf16': rltrain's name for it is 'model.dtype' (model.dtype is float32 or bfloat16); settings"),
        (["--beta=0.1"], "is algorithm.kl_in_reward.kl_coef); settings are written without dashes, as in "
         "algorithm.kl_loss.kl_loss_coef=VALUE"),
        (["--report_to", "wandb"], "'--report_to': rltrain's name for it is 'trainer.trackers' (trainer.trackers"),
        (["--seed", "3"], "without dashes, as in trainer.seed=3"),
        (["--trainer.total_steps=5"], "'--trainer.total_steps': rltrain's name for it is 'trainer.total_steps'; "),
        (["--total_steps", "5"], "without dashes, as in trainer.total_steps=5"),
        (["--algorithm", "ppo"], "without dashes, as in algorithm=ppo"),
        (["--lr", "1"], "without dashes, as in actor.lr=1"),
        (["--weights", "1"], "unknown flag '--weights': the flags are --help, "),
    ],
)  # fmt: skip
def test_a_setting_typed_as_a_flag_is_answered_with_the_setting(words, said):
    with pytest.raises(ConfigError) as error:
        parse_args(words)
    assert str(error.value).startswith("unknown flag '--")
    assert said in str(error.value)


def test_a_misspelt_key_of_rltrain_is_not_taken_for_a_name_of_others():
    for key in keys(Config):
        assert name_here(f"{key}s") is None or name_here(f"{key}s").key != key


def test_every_key_of_the_table_exists():
    known = {*keys(Config), *(f"model.lora.{name}" for name in keys(LoRAConfig))}
    for name in NAMES:
        knob = name.key.rpartition(".")[0] in ("algorithm.loss", "algorithm.advantage")
        assert knob or name.key in known, name.key
        assert name.others
    assert len({name.key for name in NAMES}) == len(NAMES)


def test_yaml_of_a_run_is_a_file_without_references():
    assert "${" not in compose(["trainer.output_dir=x"])[1]
    assert yaml.safe_load(compose(["trainer.output_dir=x"])[1])["trainer"]["output_dir"] == "x"


# Tests of settings that are lists of strings


def test_a_line_break_in_a_stop_string_is_typed_with_a_backslash(own):
    assert compose([r'rollout.stop=["\n\n","a\\nb","</a>"]'])[0].rollout.stop == ["\n\n", r"a\nb", "</a>"]
    assert compose([r'rollout.stop="\n"'])[0].rollout.stop == ["\n"]
    assert compose([], [own(r"""rollout.stop: ["\n", 'a\nb']""")])[0].rollout.stop == ["\n", r"a\nb"]
    config, written = compose([r'rollout.stop=["\n#"]'])
    assert compose([], [own(written)])[0].rollout.stop == config.rollout.stop == ["\n#"]
