import itertools
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rltrain.base.errors import ConfigError
from rltrain.run.checks import check
from rltrain.settings import config_groups
from rltrain.settings.algorithm_config import CorrectionConfig
from rltrain.settings.command_line import EXAMPLES, Args, parse_args, usage
from rltrain.settings.compose import choices_of, compose, profile_defaults, to_yaml
from rltrain.settings.config_groups import choices, config_dir, group_names
from rltrain.settings.schema import Config, LoRAConfig
from rltrain.settings.typed import keys
from rltrain.tasks import TASKS
from rltrain.trajectories.token_rewards import with_all_knobs
from tests.presets import NEEDED, preset


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def leaves(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_without_overrides_the_embedded_default_comes_out():
    config, _ = compose([])
    assert (config.trainer.total_steps, config.sequences_per_step, config.optimizer_steps) == (120, 512, 480)
    assert (config.algorithm.advantage_estimator, config.rollout.engine) == ("grpo", "vllm")
    assert (config.model.path, config.model.dtype, config.data.train) == ("builtin", "float32", "builtin:median")
    assert (config.actor.lr, config.actor.lr_schedule) == (4e-4, "linear")
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", config.trainer.output_dir)


def test_the_resolved_yaml_holds_every_key_and_nothing_else():
    _, text = compose([])
    assert sorted(leaves(yaml.safe_load(text))) == sorted(keys(Config))


def test_composing_twice_gives_equal_configs():
    fixed = ["trainer.output_dir=x"]
    assert compose(fixed) == compose(fixed)


@pytest.mark.parametrize(
    "text",
    [
        "{question} Think.", "{question}", "a,b", "a=b", "'quoted'", '"', "[x", "{{", "${trainer.seed} ${", "1e3",
        "true", "~", " two  spaces ", r"\boxed{{}} \\ \x", "\t", "é 🙂", "x: y # z", "@", "$", "\n", "-",
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["prompt", "system_prompt", "sft_response"])
def test_free_text_is_taken_as_it_is_typed_and_config_yaml_holds_it(key, text):
    config, resolved = compose([f"data.{key}={text}"])
    assert getattr(config.data, key) == text
    assert yaml.safe_load(resolved)["data"][key] == text


def test_a_typed_backslash_n_is_a_line_break_unless_another_backslash_is_before_it():
    assert compose([r"data.prompt={q}\nA:"])[0].data.prompt == "{q}\nA:"
    assert compose([r"data.prompt={q} \\neq 0"])[0].data.prompt == r"{q} \neq 0"
    assert compose(["data.prompt=a", "+data.prompt=b"])[0].data.prompt == "b"
    assert compose(["data.prompt=a", "data.prompt=null"])[0].data.prompt is None


def test_free_text_that_cannot_be_used_is_refused():
    assert refusal("data.prompt=") == "data.prompt is empty; write some text, or null"
    assert refusal("data.system_prompt=\ud800") == (
        "data.system_prompt='\\ud800' is not valid Unicode; write it in UTF-8"
    )
    assert refusal("data.chat=never", "data.system_prompt=x").startswith(
        "data.chat=never with data.system_prompt: a sys"
    )
    assert refusal("~data.prompt") == "'~data.prompt': a key can be set, not removed; write data.prompt=VALUE"
    assert "holds a key, token or password" in refusal("data.system_prompt=hf_" + "a1B2" * 9)


@pytest.mark.parametrize("choice", [f"{group}={choice}" for group in group_names() for choice in choices(group)])
def test_every_choice_of_every_group_composes(choice):
    needed = NEEDED.get(choice.removeprefix("algorithm="), [])
    compose([choice, "rollout=hf"] if choice == "placement=inprocess" else [choice, *needed])


def values_of(values, prefix=""):
    """Return a flat mapping from dotted keys to values, where an empty mapping counts as a value."""
    found = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        found |= values_of(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found


def algorithm_values(name):
    _, text = compose(preset(name))
    values = values_of(yaml.safe_load(text)["algorithm"])
    return values | ({"distillation.teachers": []} if name in NEEDED else {})


WHITENED = {"advantage_normalization.mean_level": "batch", "advantage_normalization.std_level": "batch"}
WHOLE_ANSWER = {"loss_agg_mode": "seq-mean-token-sum"}
EACH_ANSWER = {"loss_agg_mode": "seq-mean-token-mean"}
# clip_ratio_c=inf turns off the dual clip, or the truncation if the loss is dppo
NO_CAP = {"loss.clip_ratio_c": math.inf}
DR_GRPO = {"advantage.norm_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm", **NO_CAP}
CLIP_HIGHER = {"loss.clip_ratio_high": 0.28, **NO_CAP}
DAPO = {**CLIP_HIGHER, "dynamic_sampling": 10, "reward_shaping.overlong_buffer": 3}
PRESETS = {
    "aspo": {"loss_mode": "aspo", "kl_loss.kl_loss_coef": 0.001},
    "ce_gppo": {"loss_mode": "ce_gppo"},
    "cispo": {"loss_mode": "cispo"},
    "clip_cov": {"loss_mode": "clip_cov", "loss.clip_ratio_low": 1.0, "loss.clip_ratio_high": 1.0},
    "dapo": DAPO,
    "decoupled_ppo": {
        "advantage_estimator": "reinforce", **NO_CAP, **WHITENED, "correction.level": "token",
        "correction.mode": "mask", "correction.upper": 5.0,
    },
    "distill": {
        "loss_mode": "reinforce", **EACH_ANSWER, "distillation.mode": "loss", "distillation.kl": "full",
        "distillation.outcome_coef": 0.0,
    },
    "dppo_kl": {**DR_GRPO, "loss_mode": "dppo_kl", "old_log_probs": "rollout"},
    "dppo_tv": {**DR_GRPO, "loss_mode": "dppo_tv", "old_log_probs": "rollout"},
    "dr_grpo": DR_GRPO,
    "dro": {"advantage.norm_by_std": False, "loss_mode": "dro"},
    "gdpo": {"advantage_estimator": "gdpo", **NO_CAP},
    "gigpo": {
        "advantage_estimator": "gigpo", "advantage.gamma": 0.95, "advantage.step_weight": 1.0, **NO_CAP,
        "kl_loss.kl_loss_coef": 0.01,
    },
    "gmpo": {"loss_mode": "geo_mean", **EACH_ANSWER},
    "gpg": {"advantage_estimator": "gpg", "loss_mode": "gpg"},
    "grpo": {},
    "grpo_passk": {"advantage_estimator": "grpo_passk", **NO_CAP},
    "grpo_s": {
        "advantage_estimator": "grpo_s", "advantage.beta_1": 1.0, "advantage.beta_2": 0.1, "loss_mode": "mean_ratio",
        **EACH_ANSWER,
    },
    "gspo": {"loss_mode": "gspo", **EACH_ANSWER},
    "gtpo": {
        "advantage_estimator": "gtpo", "advantage.alpha_1": 1.0, "advantage.alpha_2": 0.1, **CLIP_HIGHER,
    },
    "icepop": {**EACH_ANSWER, **NO_CAP, "correction.level": "token", "correction.mode": "mask",
               "correction.lower": 0.5, "correction.upper": 5.0},
    "kl_cov": {"loss_mode": "kl_cov"},
    "m2po": {"loss_mode": "m2po", "correction.level": "token", "correction.upper": 1000.0},
    "maxrl": {"advantage_estimator": "maxrl", **WHOLE_ANSWER, **NO_CAP},
    "mopd": {
        "loss_mode": "reinforce", **EACH_ANSWER, "correction.level": "token", "correction.mode": "mask",
        "correction.lower": 0.5, "correction.upper": 5.0, "distillation.mode": "reward",
    },
    "opo": {"advantage_estimator": "opo", **WHOLE_ANSWER, **NO_CAP},
    "otb": {"advantage_estimator": "optimal_token_baseline", **NO_CAP},
    "ppo": {"advantage_estimator": "gae", "advantage.gamma": 1.0, "advantage.lam": 0.95, **NO_CAP, **WHITENED},
    "reinforce": {"advantage_estimator": "reinforce", "loss_mode": "reinforce", **WHOLE_ANSWER},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", **NO_CAP, "kl_in_reward.kl_coef": 0.001},
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline", **NO_CAP, "kl_loss.kl_loss_coef": 1e-5,
        "kl_loss.kl_estimator": "k2",
    },
    "remax": {"advantage_estimator": "remax", **WHOLE_ANSWER, **NO_CAP, "kl_in_reward.kl_coef": 0.05},
    "rloo": {"advantage_estimator": "rloo", **WHOLE_ANSWER, **NO_CAP, "kl_in_reward.kl_coef": 0.03},
    "sapo": {"loss_mode": "sapo", **EACH_ANSWER},
    "sequence_masking": {
        "advantage.norm_by_std": False, **EACH_ANSWER, **NO_CAP, "rejection.kl_estimator": "k1",
        "rejection.upper": 0.5, "rejection.only_negative": True,
    },
    "skywork_or1": {**NO_CAP, "dynamic_sampling": 1, "entropy_target": 0.2},
    "tis": {**NO_CAP, "correction.level": "token", "correction.upper": 2.0},
    "top_entropy": {"loss_mode": "top_entropy", **DAPO},
    "topr": {
        "advantage_estimator": "reinforce", "loss_mode": "topr", **EACH_ANSWER, "old_log_probs": "rollout",
        "reward_shaping.bias": -0.5, "reward_shaping.scale": 2.0,
    },
    "turn_ppo": {
        "advantage_estimator": "turn_gae", "advantage.gamma": 1.0, "advantage.lam": 0.95, **NO_CAP, **WHITENED,
    },
    "turn_rloo": {"advantage_estimator": "turn_rloo", "advantage.gamma": 1.0, **WHOLE_ANSWER, **NO_CAP},
    "vapo": {
        "advantage_estimator": "length_adaptive_gae", "advantage.gamma": 1.0, "advantage.alpha": 0.05,
        "advantage.lam_critic": 1.0, **CLIP_HIGHER, **WHITENED, "positive_nll_coef": 0.1,
    },
    "vespo": {"loss_mode": "vespo", "old_log_probs": "rollout"},
    "w_reinforce": {
        "advantage_estimator": "w_reinforce", "advantage.positive_weight": 0.1, "advantage.negative_weight": 1.0,
        **NO_CAP,
    },
}  # fmt: skip


def test_every_preset_is_spelt_out_here():
    assert sorted(PRESETS) == choices("algorithm")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_changes_what_its_method_is_about_and_nothing_else(name):
    grpo, chosen = algorithm_values("grpo"), algorithm_values(name)
    assert {key: value for key, value in chosen.items() if grpo.get(key) != value} == PRESETS[name]


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"grpo"}))
def test_a_preset_starts_from_grpo_and_states_only_what_differs(name):
    stated = yaml.safe_load((config_dir() / "algorithm" / f"{name}.yaml").read_text())
    assert stated.pop("defaults") == ["grpo", "_self_"]
    if "overlong_buffer" in stated.get("reward_shaping", {}):
        assert stated["reward_shaping"]["overlong_buffer"] == "auto"
        stated["reward_shaping"]["overlong_buffer"] = 3  # the overlong buffer covers 3 of the demo's 16 response tokens
    assert values_of(stated) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_dual_clip_is_on_in_grpo_and_where_the_authors_program_has_it(name):
    knobs = with_all_knobs(compose(preset(name))[0]).algorithm.loss
    own = {"grpo": (3.0,), "aspo": (3.0,), "ce_gppo": (10.0,)}
    assert knobs.get("clip_ratio_c") in own.get(name, (None, math.inf))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_passes_every_check_before_a_run(name, tmp_path):
    check(compose(preset(name, "rollout=hf", f"trainer.output_dir={tmp_path / 'run'}"))[0])


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_file_of_a_run_can_be_given_to_another_run(name, tmp_path):
    written = with_all_knobs(compose(preset(name, "rollout=hf", "trainer.output_dir=run"))[0])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(written))
    assert with_all_knobs(compose([], [str(file)])[0]) == written


@pytest.mark.parametrize(("folder", "found"), [("run/checkpoints", "new/checkpoints"), ("s3://b/c", "s3://b/c")])
def test_a_run_with_the_config_file_of_another_run_does_not_use_its_checkpoint_folder(tmp_path, folder, found):
    (tmp_path / "config.yaml").write_text(compose(["trainer.output_dir=run", f"trainer.checkpoint_dir={folder}"])[1])
    assert compose(["trainer.output_dir=new"], [str(tmp_path / "config.yaml")])[0].trainer.checkpoint_dir == found
    assert compose([], [str(tmp_path / "config.yaml")])[0].trainer.checkpoint_dir == folder


@pytest.mark.parametrize("name", choices("algorithm"))
def test_an_algorithm_opens_with_its_paper(name):
    lines = (config_dir() / "algorithm" / f"{name}.yaml").read_text().splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
    assert 2 <= len(head) <= 4
    assert re.match(r"# .*(arXiv:\d{4}\.\d{5}|https://\S+)", head[0])


def test_every_yaml_file_says_what_it_is():
    for file in config_dir().rglob("*.yaml"):
        assert file.read_text().startswith("# "), f"{file} does not begin with a comment"


OFF = CorrectionConfig(
    level=None, mode="truncate", lower=None, upper=None, batch_normalize=False, normalize="all"
)  # fmt: skip
TIS = replace(OFF, level="token", upper=2.0)


def correction_of(*overrides):
    return compose(overrides)[0].algorithm.correction


@pytest.mark.parametrize(
    ("overrides", "correction"),
    [
        ([], TIS),
        (["algorithm.correction.level=auto"], TIS),
        (["algorithm.correction.level=null"], OFF),
        (["algorithm.correction.upper=5"], replace(TIS, upper=5.0)),
        (["algorithm.correction.lower=0.5"], replace(TIS, lower=0.5, upper=None)),
        (["algorithm.correction.mode=mask"], replace(TIS, mode="mask")),
        (["algorithm.correction.level=geometric"], replace(TIS, level="geometric", upper=None)),
        (["algorithm.old_log_probs=rollout"], OFF),
        (["algorithm.rejection.kl_estimator=k1", "algorithm.rejection.upper=0.1"], OFF),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_stale_answers_have_truncated_importance_weights_unless_something_else_is_said(overrides, correction):
    assert correction_of("trainer.max_staleness=1", *overrides) == correction


QUANTIZED = ["model.dtype=bfloat16", "rollout.vllm.quantization=fp8_per_block"]


def test_answers_of_quantized_engines_have_truncated_importance_weights():
    assert correction_of(*QUANTIZED) == TIS
    assert correction_of(*QUANTIZED, "algorithm=icepop") == correction_of("algorithm=icepop")
    assert correction_of(*QUANTIZED, "algorithm.old_log_probs=rollout") == OFF
    assert correction_of("rollout=hf") == OFF
    assert correction_of(*QUANTIZED, "algorithm.rejection.kl_estimator=k1", "algorithm.rejection.upper=0.1") == OFF


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (QUANTIZED[1:], "with model.dtype=float32: vLLM quantizes only bfloat16 weights; use model.dtype=bfloat16"),
        ([*QUANTIZED, "rollout.engine=hf"], "with rollout.engine=hf: only vLLM quantizes weights"),
        ([*QUANTIZED, "rollout.top_p=0.9"], "rollout.top_p=0.9 with rollout.vllm.quantization=fp8_per_block"),
        (
            [*QUANTIZED, "model.lora={rank:4}", "rollout.vllm.adapters=separate"],
            "with rollout.vllm.adapters=separate: adapters beside quantized weights have not been tested",
        ),
        ([QUANTIZED[0], "rollout.vllm.quantization=int3"], "unknown choice; use one of fp8_per_tensor, fp8_per_block"),
        ([QUANTIZED[0], "rollout.vllm.arguments={quantization: fp8}"], "use rollout.vllm.quantization"),
    ],
)
def test_a_run_that_cannot_have_quantized_engines_is_refused(overrides, said):
    assert said in refusal(*overrides)


def test_without_stale_answers_auto_is_off_and_bounds_have_nothing_to_bound():
    assert correction_of() == correction_of("algorithm.correction.level=auto") == OFF
    assert "algorithm.correction.lower=None, upper=5.0 with level=null: " in refusal("algorithm.correction.upper=5")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_a_correction_of_its_own_keeps_it_and_the_others_get_one(name):
    stale, fresh = (correction_of(*preset(name, f"trainer.max_staleness={age}")) for age in (3, 0))
    corrected = {"tis", "icepop", "decoupled_ppo", "m2po", "mopd"}
    own = corrected | {"sequence_masking", "dppo_tv", "dppo_kl", "topr", "vespo", "distill"}
    assert stale == (fresh if name in own else TIS)
    assert (fresh == OFF) is (name not in corrected)


def test_the_resolved_yaml_says_what_auto_came_to():
    for age, level in ((0, None), (2, "token")):
        text = compose([f"trainer.max_staleness={age}"])[1]
        assert yaml.safe_load(text)["algorithm"]["correction"]["level"] == level


@pytest.mark.parametrize("age", ["many", "null", "1.5", "true"])
def test_a_staleness_that_is_no_number_is_still_refused_by_its_own_name(age):
    assert refusal(f"trainer.max_staleness={age}").startswith("trainer.max_staleness=")


@pytest.mark.parametrize(("limit", "buffer"), [(16, 3), (1024, 204), (4, 0)])
def test_the_length_penalty_of_dapo_grows_over_the_last_fifth_of_the_limit(limit, buffer):
    config, text = compose(["algorithm=dapo", f"rollout.max_response_length={limit}"])
    assert config.algorithm.reward_shaping.overlong_buffer == buffer
    assert f"overlong_buffer: {buffer}\n" in text


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 0),
        (["algorithm=ppo"], 0),
        (["algorithm=ppo", "critic.warmup_steps=7"], 7),
        (["algorithm=vapo"], 5),
        (["algorithm=vapo", "trainer.total_steps=6"], 3),
        (["algorithm=vapo", "trainer.total_steps=1"], 0),
        (["algorithm=vapo", "critic.warmup_steps=0"], 0),
        (["algorithm=ppo", "algorithm.advantage_estimator=decoupled_gae"], 5),
    ],
)
def test_a_critic_is_warmed_up_if_the_run_asks_for_it_or_the_papers_of_the_estimator_do(overrides, steps):
    config, text = compose(overrides)
    assert config.critic.warmup_steps == yaml.safe_load(text)["critic"]["warmup_steps"] == steps
    assert config.optimizer_steps == 4 * config.trainer.total_steps
    assert config.actor_optimizer_steps == 4 * (config.trainer.total_steps - steps)


def test_a_warm_up_as_long_as_the_run_is_refused():
    assert refusal("algorithm=ppo", "critic.warmup_steps=120") == (
        "critic.warmup_steps=120 with trainer.total_steps=120: the critic's warm-up would fill the whole run, so the "
        "actor would not be trained; use at most 119 warm-up steps, or a longer run"
    )
    assert refusal("algorithm=ppo", "critic.warmup_steps=-1") == "critic.warmup_steps must be >= 0, got -1"
    assert refusal("algorithm=ppo", "critic.warmup_steps=long").startswith(
        "critic.warmup_steps='long': must be a whole"
    )


def test_a_model_of_ones_own_has_the_numbers_for_instruct_models_unless_it_says_otherwise():
    own = compose(["model.path=x"])[0]
    assert (own.profile, own.actor.lr, own.rollout.max_response_length, own.trainer.eval_every) == (
        "instruct",
        1e-6,
        1024,
        20,
    )
    assert compose(["model.path=x", "actor.lr=1e-5"])[0].actor.lr == 1e-5
    demo = compose(["model.path=x", "profile=demo"])[0]
    assert (demo.profile, demo.actor.lr, demo.rollout.max_response_length) == ("demo", 4e-4, 16)
    assert compose(["model.path=builtin"])[0].profile == compose([])[0].profile == "demo"
    assert compose(["profile=instruct"])[0].actor.lr == 1e-6


def test_the_values_that_the_profile_gave_are_those_that_nobody_has_set(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("model: {path: x}\ntrainer.total_steps: 3")
    found = profile_defaults(["actor.lr=1e-5"], [str(file)])
    assert found["rollout.max_response_length"] == 1024
    assert not {"actor.lr", "trainer.total_steps"} & found.keys()
    assert profile_defaults([])["rollout.max_response_length"] == 16


@pytest.mark.parametrize("task", [TASKS["lookup"], TASKS["higher_lower"]], ids=lambda task: task.name)
def test_a_task_with_several_turns_comes_with_its_environment_and_profile(task):
    config, _ = compose([f"data={task.name}"])
    assert (config.data.train, config.profile) == (f"builtin:{task.name}", "conversation")
    assert (config.rollout.environment, config.rollout.max_turns) == (task.environment, task.max_turns)
    assert config.rollout.max_prompt_length >= task.max_prompt_length
    assert config.rollout.max_response_length >= task.max_response_length
    assert [function.path for function in config.reward.functions] == [task.reward]
    own, _ = compose([f"data={task.name}", "model.path=x"])
    assert (own.rollout.environment, own.profile) == (task.environment, "instruct")


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        (["data=lookup"], "conversation"),
        (["data=higher_lower"], "conversation"),
        (["data=lookup", "model.path=x"], "instruct"),
        (["data=lookup", "profile=demo"], "demo"),
        (["data=sort"], None),
        (["data=lookup", "data=median"], None),
    ],
)
def test_the_profile_follows_the_model_and_the_task_unless_one_is_chosen(words, profile):
    chosen = dict(choice.split("=") for choice in choices_of(words))
    assert chosen.get("profile") == profile


MEDIAN, SORT = (TASKS[name].reward for name in ("median", "sort"))


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        ([], [MEDIAN]),
        (["data=sort"], [SORT]),
        (["data=sort", "model.path=x"], [SORT]),
        (["data=sort", "data.train=builtin:sort"], [SORT]),
        (["data.train=my.jsonl"], []),
        (["data=sort", "data.train=openai/gsm8k:main", "model.path=x"], []),
        (["data.train=rows.py:rows", "reward.timeout_s=5"], []),
        (["data.train=my.jsonl", "reward.models=[rm]"], []),
        (["data.train=my.jsonl", "reward=median"], [MEDIAN]),
        (["reward.functions=[exact_match]", "data.train=my.jsonl"], ["exact_match"]),
        (["data.train=my.jsonl", "data.train=builtin:median"], [MEDIAN]),
    ],
)
def test_the_reward_of_a_built_in_task_is_the_default_only_for_the_data_of_built_in_tasks(words, paths):
    assert [function.path for function in compose(words)[0].reward.functions] == paths


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("data: {train: my.jsonl}", []),
        ("data.train: my.jsonl\nreward: sort", [SORT]),
        ("defaults: [{reward: median}]\ndata: {train: my.jsonl}", [MEDIAN]),
        ("data: {train: my.jsonl}\nreward: {functions: [numeric_match]}", ["numeric_match"]),
    ],
)
def test_a_config_file_chooses_data_and_reward_like_the_command_line(tmp_path, text, paths):
    (tmp_path / "my.yaml").write_text(text)
    config, resolved = compose(["model.path=x"], [f"{tmp_path}/my.yaml"])
    assert [function.path for function in config.reward.functions] == paths
    (tmp_path / "config.yaml").write_text(resolved)  # The file that a run writes gives the same reward.
    assert compose([], [f"{tmp_path}/config.yaml"])[0].reward == config.reward


@pytest.mark.parametrize(
    ("text", "words", "engine", "vllm_process"),
    [
        ("rollout: {engine: vllm, temperature: 0.7, vllm: {process: async}}", ["rollout=hf"], "hf", None),
        ("rollout: {engine: hf, temperature: 0.7, vllm: null}", ["rollout=vllm"], "vllm", "auto"),
        ("rollout: {temperature: 0.7, vllm: {process: async}}", ["rollout=vllm"], "vllm", "async"),
        ("rollout: {engine: hf, temperature: 0.7, vllm: null}", [], "hf", None),
        ("rollout: {engine: vllm, temperature: 0.7}", ["rollout.engine=hf"], "hf", "auto"),
    ],
)
def test_a_choice_of_the_command_line_is_not_undone_by_a_config_file(tmp_path, text, words, engine, vllm_process):
    (tmp_path / "my.yaml").write_text(text)
    config = compose(words, [str(tmp_path / "my.yaml")])[0]
    assert config.rollout.engine == engine
    assert config.rollout.temperature == 0.7
    assert (config.rollout.vllm and config.rollout.vllm.process) == vllm_process


def test_a_choice_of_an_engine_drops_the_options_of_the_engine_of_a_config_file(tmp_path):
    (tmp_path / "my.yaml").write_text("rollout: {engine: mine.fast, engine_options: {speed: 2}, temperature: 0.7}")
    config = compose(["rollout=hf"], [str(tmp_path / "my.yaml")])[0]
    assert (config.rollout.engine, config.rollout.engine_options, config.rollout.temperature) == ("hf", {}, 0.7)


@pytest.mark.parametrize("group", ["model", "data", "reward", "rollout", "placement"])
def test_each_choice_can_be_made_for_the_config_file_of_another_run(tmp_path, group):
    file = tmp_path / "config.yaml"
    for choice in choices(group):
        same = ["rollout=hf"] if choice == "inprocess" else []
        file.write_text(compose([*same, "trainer.seed=7"])[1])
        found, expected = compose([f"{group}={choice}"], [str(file)])[0], compose([*same, f"{group}={choice}"])[0]
        assert getattr(found, group) == getattr(expected, group)
        assert found.trainer.seed == 7


def test_an_algorithm_is_not_mixed_with_that_of_a_config_file(tmp_path):
    (tmp_path / "config.yaml").write_text(compose(["algorithm=dapo"])[1])
    with pytest.raises(ConfigError, match=r"algorithm=ppo: .* the settings of two algorithms cannot be mixed"):
        compose(["algorithm=ppo"], [str(tmp_path / "config.yaml")])


def test_the_length_of_a_run_is_typed_in_steps_or_in_epochs(tmp_path):
    (tmp_path / "config.yaml").write_text(compose(["trainer.total_epochs=2"])[1])
    files = [str(tmp_path / "config.yaml")]
    assert compose([], files)[0].trainer.total_epochs == 2
    steps = compose(["trainer.total_steps=5"], files)[0].trainer
    assert (steps.total_steps, steps.total_epochs) == (5, None)
    assert compose(["trainer.total_steps=5", "trainer.total_epochs=null"], files)[0].trainer.total_steps == 5
    with pytest.raises(ConfigError, match=r"trainer.total_steps=5 with trainer.total_epochs=3: both set the length"):
        compose(["trainer.total_steps=5", "trainer.total_epochs=3"], files)


def test_a_file_may_set_keys_of_the_algorithm_that_the_command_line_chooses(tmp_path):
    (tmp_path / "my.yaml").write_text("algorithm: {entropy_coef: 0.01}")
    assert compose(["algorithm=ppo"], [str(tmp_path / "my.yaml")])[0].algorithm.entropy_coef == 0.01


def test_a_reward_that_follows_from_the_data_is_among_the_choices_of_a_command():
    assert choices_of(["data.train=my.jsonl", "model.path=x"]) == ["profile=instruct", "reward=none"]
    assert choices_of(["data.train=my.jsonl", "reward=sort"]) == ["reward=sort"]


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        ("length_penalty", False),
        ("overlong_penalty", False),
        ("repetition_penalty", False),
        ("rltrain.rewards.length:length_penalty", False),
        ("rltrain.rewards.length.length_penalty", False),
        ("my.py:length_penalty", True),
        ("exact_match", True),
        ("{path: length_penalty, outcome: true}", True),
        ("{path: my.py:form, outcome: false}", False),
    ],
)
def test_every_function_scores_the_outcome_except_rltrains_penalties_and_those_that_say_so(function, outcome):
    config, _ = compose([f"reward.functions=[exact_answer,{function}]", "reward.models=[rm]"])
    assert [component.outcome for component in config.reward.components] == [True, outcome, True]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            "[length_penalty]",
            "reward.functions, models: no function or model with a nonzero weight has outcome=true, so nothing",
        ),
        (
            "[{path: exact_answer, weight: 0.0},length_penalty]",
            "reward.functions, models: no function or model with a nonzero weight has outc",
        ),
        (
            "[exact_answer,{path: regex_format, gate: true, outcome: false}]",
            "reward.functions, models: 'regex_format' has gate=true and outcome=false: a gate decides whether the "
            "other",
        ),
    ],
)
def test_a_reward_without_an_outcome_is_refused(functions, message):
    assert refusal(f"reward.functions={functions}").startswith(message)


def test_a_reward_function_is_a_path_and_takes_its_name_from_it():
    config, _ = compose(["reward.functions=[my.py:score,{path:pkg.rewards:length,weight:-0.5},pkg.short]"])
    assert [(f.name, f.path, f.weight) for f in config.reward.functions] == [
        ("score", "my.py:score", 1.0),
        ("length", "pkg.rewards:length", -0.5),
        ("short", "pkg.short", 1.0),
    ]


@pytest.mark.parametrize("value", ["my.py:score", "[3]", "[{name:score}]", "[{path:3}]", "[[my.py:score]]", "null"])
def test_what_names_no_reward_function_is_refused(value):
    message = refusal(f"reward.functions={value}")
    assert message.startswith("reward.functions")
    assert "file.py:function" in message or "[my_reward.py:score]" in message


def test_adapters_have_a_rank_and_by_default_all_linear_layers_and_alpha_twice_the_rank():
    assert compose([])[0].model.lora is None
    assert compose(["model.lora={rank:8}"])[0].model.lora == LoRAConfig(rank=8, alpha=16.0, targets=["all-linear"])
    given, text = compose(["model.lora={rank:8}", "model.lora={rank:2,alpha:1,targets:[q_proj,v_proj]}"])
    assert given.model.lora == LoRAConfig(rank=2, alpha=1.0, targets=["q_proj", "v_proj"])
    assert yaml.safe_load(text)["model"]["lora"] == {"rank": 2, "alpha": 1.0, "targets": ["q_proj", "v_proj"]}
    assert compose(["model.lora={rank:2,targets:down_proj}"])[0].model.lora.targets == ["down_proj"]
    assert compose(["model.lora={rank:8}", "model.lora=null"])[0].model.lora is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("8", "model.lora=8: must be null, or a mapping with a rank, as in model.lora={rank:16}"),
        ("{alpha:8}", "model.lora={'alpha': 8}: must be null, or a mapping with a rank"),
        ("{rank:0}", "model.lora.rank must be >= 1, got 0"),
        ("{rank:1.5}", "model.lora.rank=1.5: must be a whole number"),
        ("{rank:true}", "model.lora.rank=True: must be a whole number"),
        ("{rank:null}", "model.lora.rank=null: must be a whole number"),
        ("{rank:8,alpha:0}", "model.lora.alpha must be > 0, got 0: "),
        ("{rank:8,alpha:null}", "model.lora.alpha=null: must be a finite number"),
        (
            "{rank:8,targets:[]}",
            "model.lora.targets=[]: the list names no layer; name layers, as in [q_proj,v_proj], or",
        ),
        ("{rank:8,targets:null}", "model.lora.targets=null: must be a list"),
        ("{rank:8,targets:[q_proj,3]}", "model.lora.targets[1]=3: must be text"),
        ("{rank:8,targets:[q,q]}", "model.lora.targets=['q', 'q']: the list names a layer twice"),
        ("{rank:8,targets:[q,all-linear]}", "all-linear already includes every other layer"),
        ("{rank:8,dropout:0.1}", "unknown config key 'model.lora.dropout'; the nearest known key is 'model.lora."),
    ],
)
def test_adapters_that_cannot_be_are_refused_in_one_line(value, message):
    assert refusal(f"model.lora={value}").startswith(message) or message in refusal(f"model.lora={value}")


def test_one_key_of_the_adapters_turns_them_on():
    assert compose(["model.lora.rank=16"])[0].model.lora == LoRAConfig(rank=16, alpha=32, targets=["all-linear"])
    lora = compose(["model.lora.rank=16", "model.lora.targets=[q_proj]", "model.lora.alpha=4"])[0].model.lora
    assert lora == LoRAConfig(rank=16, alpha=4, targets=["q_proj"])
    assert compose(["model.lora={rank:8,alpha:3}", "model.lora.rank=4"])[0].model.lora.alpha == 3
    assert "the nearest known key is 'model.lora.rank'" in refusal("model.lora.ranks=8")
    assert "must be null, or a mapping with a rank" in refusal("model.lora.alpha=8")


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_knob_is_set_like_any_key(plus):
    config, _ = compose([f"{plus}algorithm.loss.clip_ratio_high=0.28"])
    assert config.algorithm.loss == {"clip_ratio_high": 0.28}


def test_a_mapping_of_knobs_replaces_that_of_the_chosen_file():
    assert compose(["algorithm=ppo", "algorithm.advantage={lam:0.5}"])[0].algorithm.advantage == {"lam": 0.5}
    assert compose(["algorithm=dapo", "algorithm.loss={}"])[0].algorithm.loss == {}


@pytest.mark.parametrize(("overrides", "loss", "advantage"), [
    (["algorithm=dapo", "algorithm.loss_mode=gspo"], {}, {}),
    (["algorithm=ppo", "algorithm.loss.delta_low=0.2", "algorithm.loss_mode=dppo_tv"], {"delta_low": 0.2},
     {"gamma": 1.0, "lam": 0.95}),
    (["algorithm=ppo", "algorithm.loss_mode=vanilla"], {"clip_ratio_c": math.inf}, {"gamma": 1.0, "lam": 0.95}),
    (["algorithm=ppo", "algorithm.advantage_estimator=grpo"], {"clip_ratio_c": math.inf}, {}),
])  # fmt: skip
def test_a_presets_knobs_go_with_its_function_and_those_of_the_command_line_stay(overrides, loss, advantage):
    algorithm = compose(overrides)[0].algorithm
    assert (algorithm.loss, algorithm.advantage) == (loss, advantage)


def test_one_knob_of_the_chosen_file_can_be_changed_or_removed():
    assert compose(["algorithm=ppo", "algorithm.advantage.lam=0.5"])[0].algorithm.advantage == {
        "gamma": 1.0,
        "lam": 0.5,
    }
    assert compose(["algorithm=ppo", "~algorithm.advantage.lam"])[0].algorithm.advantage == {"gamma": 1.0}


def test_values_with_spaces_and_quoted_values_arrive_as_they_are():
    assert compose(["model.path=/a b/c"])[0].model.path == "/a b/c"
    assert compose(['model.path="/a=b,c(d)"'])[0].model.path == "/a=b,c(d)"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.totl_steps=3",
            "unknown config key 'trainer.totl_steps'; the nearest known key is 'trainer.total_steps'",
        ),
        (
            "+trainer.totl_steps=3",
            "unknown config key 'trainer.totl_steps'; the nearest known key is 'trainer.total_steps'",
        ),
        ("++new.seed=1", "unknown config key 'new.seed'; rltrain's name for it is 'trainer.seed'"),
        ("~trainer.sed", "unknown config key 'trainer.sed'; the nearest known key is 'trainer.seed'"),
        ("algoritm=ppo", "unknown config key 'algoritm'; the nearest known key is 'algorithm'"),
        ("~trainer.seed", "'~trainer.seed': a key can be set, not removed; write trainer.seed=VALUE"),
        ("~algorithm", "'~algorithm': a key can be set, not removed; write algorithm=VALUE"),
        (
            "algorithm=grop",
            f"algorithm=grop: unknown choice; the nearest is 'grpo', and all choices are {', '.join(PRESETS)}",
        ),
        (
            "rollout=slang",
            "rollout=slang: unknown choice; the nearest is 'sglang', and all choices are hf, sglang, stored, vllm",
        ),
        ("rollout=null", "rollout=None: unknown choice; its choices are hf, sglang, stored, vllm"),
        ("algorithm=[ppo,grpo]", "unknown choice"),
        ("trainer={seed:3}", "'trainer' is a section; set its keys one at a time, as trainer.KEY=VALUE"),
        ("algorithm.loss=3", "must be a mapping, as in algorithm.loss={name:value}"),
        ("~algorithm.loss.clip", "the key 'algorithm.loss.clip' does not exist; see --help"),
        (
            "hydra.job.chdir=true",
            "'hydra.job.chdir=true': Hydra's settings apply only to a sweep; leave the argument out,",
        ),
        ("hydra/launcher=basic", "Hydra's settings apply only to a sweep"),
        ("algorithm@x=ppo", "'@' is not supported; write GROUP=CHOICE or KEY=VALUE"),
        ("trainer.seed=1,2", "several values, but a run takes one"),
        ("trainer.seed", "'trainer.seed': settings are written KEY=VALUE; see --help"),
        ("=3", "'=3': no key before the '='"),
        ("trainer.seed=[", "cannot read the value; close each bracket"),
        ("trainer.output_dir=/a=b", """as in 'trainer.output_dir="/a=b"'"""),
        ("trainer.seed=${foo}", "trainer.seed: Interpolation key 'foo' not found; write a plain value"),
        ("trainer.seed=${foo:1}", "trainer.seed: Unsupported interpolation type foo; write a plain value"),
        ("trainer.seed=${oc.env:NOT_SET}", "Environment variable 'NOT_SET' not found"),
        ("trainer.seed=???", "trainer.seed: Missing mandatory value"),
        ("trainer.total_steps=many", "trainer.total_steps='many': must be a whole number"),
    ],
)
def test_a_bad_override_is_refused_in_one_line_that_says_what_would_do(override, message):
    assert message in refusal(override)


def test_a_key_of_a_section_that_the_chosen_group_lacks_is_explained():
    message = refusal("rollout=hf", "rollout.vllm.kv_cache_mb=64")
    assert message == (
        "rollout.vllm.kv_cache_mb: rollout.vllm is null in the chosen YAML files; leave the setting out, or "
        "change GROUP=CHOICE"
    )


def test_overrides_do_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose(["algorithm=rloo"])[0].algorithm.advantage_estimator == "rloo"


def test_an_installed_package_reads_the_yaml_inside_it(tmp_path, monkeypatch):
    package = tmp_path / "rltrain"
    shutil.copytree(config_dir(), package / "config")
    monkeypatch.setattr(config_groups, "__file__", str(package / "settings/config_groups.py"))
    assert config_dir() == package / "config"
    assert compose([])[0].trainer.total_steps == 120


def test_flags_and_overrides_are_told_apart():
    assert parse_args([]) == Args("run", [])
    assert parse_args(["a=1", "b=2"]) == Args("run", ["a=1", "b=2"])
    assert parse_args(["a=1", "--cfg", "job", "b=2"]) == Args("config", ["a=1", "b=2"])
    assert parse_args(["--cfg"]) == Args("config", [])
    assert parse_args(["--cfg=job", "a=1"]) == Args("config", ["a=1"])
    assert parse_args(["--cfg", "-h"]) == parse_args(["--help", "--cfg"]) == Args("help", [])

    assert parse_args(["--plan", "a=1"]) == Args("plan", ["a=1"])
    assert parse_args(["-m", "a=1,2"]) == parse_args(["a=1,2", "--multirun"]) == Args("sweep", ["a=1,2"])
    assert parse_args(["--config", "x.yaml", "a=1", "--config=y.yaml"]) == Args("run", ["a=1"], ["x.yaml", "y.yaml"])


@pytest.mark.parametrize("flag", ["--config-dir=x", "--cfg=hydra", "-", "-x"])
def test_other_flags_are_refused_with_those_that_exist(flag):
    with pytest.raises(ConfigError, match=rf"^unknown flag '{flag}': the flags are --help, --cfg, .*KEY=VALUE$"):
        parse_args([flag])


@pytest.mark.parametrize("flag", ["--plan", "--cfg", "--check"])
def test_a_sweep_is_not_combined_with_an_action_that_trains_nothing(flag):
    with pytest.raises(ConfigError, match=rf"^--multirun with {flag}: a sweep trains its runs; "):
        parse_args(["-m", "trainer.seed=1,2", flag])


@pytest.mark.parametrize("words", [["--config"], ["--config="], ["--config", "--plan"]])
def test_a_config_flag_without_a_file_is_refused(words):
    with pytest.raises(ConfigError, match=r"^--config: no file; write --config FILE\.yaml$"):
        parse_args(words)


def test_the_help_names_every_group_and_choice_and_fits_a_terminal():
    text = usage()
    for group in group_names():
        assert f"{group} {', '.join(choices(group))}" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_every_example_of_the_help_composes():
    for overrides, _ in EXAMPLES:
        compose(overrides.split())


def test_yaml_names_no_path_of_one_machine():
    assert not [file for file in Path(config_dir()).rglob("*.yaml") if re.search(r": /\w", file.read_text())]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.agent=a.py:run", "rollout.environment=b.py:Game"], "an agent program brings its own tools"),
        (["rollout.agent=a.py:run", "rollout.tools=[t.py:f]"], "an agent program brings its own tools"),
        (['rollout.agent=""'], "agent='': must be the path of a function or a command"),
        (["rollout.agent=a.py:run", "rollout=stored", "rollout.run=x"], "cannot reply to the messages of a new"),
        (["rollout.agent=a.py:run", "rollout.stop=x"], "conversations do not support stop strings"),
    ],
)
def test_an_agent_program_is_refused_beside_what_it_excludes(overrides, said):
    assert said in refusal(*overrides)
