import ast
import dataclasses
from pathlib import Path

import pytest

from rltrain.algorithms import (
    knobs_of,
    normalize_advantages,
    normalize_rewards,
    rollout_correction,
    rollout_rejection,
)
from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from rltrain.settings.typed import keys, parse, unknown_key

ROOT = Path(__file__).parents[3]
# Source files that only describe or check the config.
# A config key that is read only by files in TELLERS would have no effect.
TELLERS = {*(ROOT / "rltrain/settings").glob("*.py"), ROOT / "rltrain/run/plan.py", ROOT / "rltrain/run/checks.py"}
# Config sections that are passed whole as keyword arguments to a function.
# Each value is (function, arguments that are not config keys, config keys that are not arguments).
HANDED_WHOLE = {
    "reward_normalization": (normalize_rewards, {"eps", "counted"}, set()),
    "advantage_normalization": (normalize_advantages, {"eps"}, set()),
    # the keys `normalize` and `batch_normalize` select functions that change the weights of `rollout_correction`
    "correction": (rollout_correction, set(), {"normalize", "batch_normalize"}),
    # the key `only_negative` selects a column, and is not an argument of the function
    "rejection": (rollout_rejection, set(), {"only_negative"}),
}


@pytest.fixture(scope="module")
def values():
    config, _ = compose([])
    return dataclasses.asdict(config)


def loads(tree):
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def properties():
    """Return a mapping from the name of each config property to the attribute names that the property reads."""
    trees = [ast.parse((ROOT / "rltrain/settings" / file).read_text()) for file in ("schema.py", "algorithm_config.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name: loads(f) for f in functions if any(getattr(d, "id", "") == "property" for d in f.decorator_list)}


def attributes_read():
    """Return every name that the program reads as an attribute, directly or through a config property.

    Source files that only describe or check the config are left out.
    """
    files = [file for folder in ("rltrain", "workers") for file in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(file.read_text()) for file in files if file not in TELLERS]
    read, known = {name for tree in trees for name in loads(tree)}, properties()
    while more := {name for found in read & known.keys() for name in known[found]} - read:
        read |= more
    return read


def test_every_key_is_read_by_the_program():
    read, whole = attributes_read(), tuple(f"algorithm.{section}." for section in HANDED_WHOLE)
    unread = {key for key in keys(Config) if key.rpartition(".")[2] not in read and not key.startswith(whole)}
    assert unread == set()


@pytest.mark.parametrize("section", HANDED_WHOLE)
def test_a_section_that_is_handed_over_whole_has_the_names_that_its_function_takes(values, section):
    function, own, other = HANDED_WHOLE[section]
    assert set(values["algorithm"][section]) - other == set(knobs_of(function)) - own
    assert section in attributes_read()


def test_no_field_has_a_default_because_yaml_owns_the_values(values):
    def walk(config_class):
        for field in dataclasses.fields(config_class):
            assert field.default is dataclasses.MISSING, field.name
            assert field.default_factory is dataclasses.MISSING, field.name
            if dataclasses.is_dataclass(field.type):
                walk(field.type)

    walk(Config)


def test_parsing_what_was_parsed_gives_the_same_config(values):
    assert dataclasses.asdict(parse(Config, values)) == values


def changed(values, key, value):
    section, _, name = key.rpartition(".")
    if not section:
        return values | {name: value}
    head, _, rest = section.partition(".")
    return values | {head: changed(values[head], f"{rest}.{name}" if rest else name, value)}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.total_steps", "3", "trainer.total_steps='3': must be a whole number"),
        ("trainer.total_steps", 3.0, "trainer.total_steps=3.0: must be a whole number"),
        ("trainer.total_steps", True, "trainer.total_steps=True: must be a whole number"),
        ("trainer.total_steps", None, "trainer.total_steps=null: must be a whole number"),
        ("trainer.total_steps", 2**63, "trainer.total_steps=9223372036854775808: must be a whole number below 2^63"),
        ("rollout.top_k", 10**400, "000: must be a whole number below 2^63"),
        ("trainer.total_steps", 0, "trainer.total_steps must be >= 1, got 0"),
        ("trainer.resume", " ", "trainer.resume is empty; give never, auto, or the folder of a checkpoint"),
        ("trainer.checkpoint_dir", "", "trainer.checkpoint_dir is empty; give a folder"),
        ("trainer.keep_best", "", "trainer.keep_best is empty; give a metric, or null"),
        ("actor.lr", float("nan"), "actor.lr=nan: must be a finite number"),
        ("actor.lr", float("inf"), "actor.lr=inf: must be a finite number"),
        ("actor.lr", True, "actor.lr=True: must be a finite number"),
        ("rollout.temperature", 10**400, "000: must be a finite number"),
        ("critic.clip_range_value", 0, "critic.clip_range_value must be > 0, got 0.0"),
        ("critic.beta1", 1, "critic.beta1 must be in [0, 1), got 1.0"),
        ("actor.lr", 0, "actor.lr must be > 0, got 0.0"),
        ("verbose", 1, "verbose=1: must be true or false"),
        ("model.path", 7, "model.path=7: must be text"),
        ("model.dtype", "float16", "model.dtype=float16: unknown choice; use one of float32, bfloat16"),
        ("reward.functions", "x:y", "reward.functions='x:y': must be a list"),
        ("algorithm.loss", [], "algorithm.loss=[]: must be a mapping"),
        ("rollout.temperature", 0, "rollout.temperature must be > 0, got 0.0"),
        ("rollout.top_p", 0, "rollout.top_p must be in (0, 1], got 0.0"),
        ("rollout.top_k", -1, "rollout.top_k must be >= 0, got -1: 0 turns top-k sampling off"),
        ("rollout.stop", [""], "rollout.stop=['']: '' is empty or not valid Unicode"),
        ("rollout.environment", 3, "rollout.environment=3: must be text"),
        ("rollout.tools", "x", "rollout.tools='x': must be a list"),
        ("rollout.max_turns", 0, "rollout.max_turns must be >= 1, got 0"),
        ("rollout.call_timeout_s", 0, "rollout.call_timeout_s must be > 0, got 0.0"),
        ("rollout.stop", [3], "rollout.stop[0]=3: must be text"),
        ("actor.max_tokens_per_microbatch", 31, "=31 is below the longest possible row, rollout.max_prompt_length"),
        ("rollout.vllm.gpu_memory_utilization", 1.5, "must be in (0, 1], got 1.5"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_with_its_key(values, key, value, message):
    with pytest.raises(ConfigError) as error:
        parse(Config, changed(values, key, value))
    assert message in str(error.value)
    assert str(error.value).startswith(key)


def test_a_reward_weight_must_be_finite(values):
    function = values["reward"]["functions"][0] | {"weight": float("-inf")}
    with pytest.raises(ConfigError, match=r"^reward.functions\[0\].weight=-inf: must be a finite number$"):
        parse(Config, changed(values, "reward.functions", [function]))


@pytest.mark.parametrize("weights", [[0.0], [0.0, -0.0]])
def test_rewards_that_all_weigh_nothing_are_refused(values, weights):
    functions = [values["reward"]["functions"][0] | {"name": f"f{n}", "weight": w} for n, w in enumerate(weights)]
    with pytest.raises(
        ConfigError,
        match=r"^reward.functions, models: all weights are 0, so nothing is learnt; set at least one weight$",
    ):
        parse(Config, changed(values, "reward.functions", functions))
    functions[0]["weight"] = -1.0
    parse(Config, changed(values, "reward.functions", functions))


def test_a_length_penalty_longer_than_the_answers_is_refused(values):
    limit, key = values["rollout"]["max_response_length"], "algorithm.reward_shaping.overlong_buffer"
    parse(Config, changed(values, key, limit))
    with pytest.raises(ConfigError) as error:
        parse(Config, changed(values, key, limit + 1))
    assert str(error.value) == (
        f"{key}={limit + 1} is above rollout.max_response_length={limit}: the length penalty grows over the last "
        f"overlong_buffer tokens before that limit; use at most {limit} (DAPO uses a fifth of the limit), or 0"
    )


def test_a_horizon_that_a_step_outruns_is_refused_with_the_adaptive_controller_only(values):
    kl = values["algorithm"]["kl_in_reward"] | {"kl_coef": 0.1, "horizon": 102}
    sequences = parse(Config, values).sequences_per_step
    assert sequences == 512
    parse(Config, changed(values, "algorithm.kl_in_reward", kl))
    with pytest.raises(ConfigError, match=r"^algorithm.kl_in_reward.horizon=102 .* 512 sequences.* above 102$"):
        parse(Config, changed(values, "algorithm.kl_in_reward", kl | {"controller": "adaptive"}))
    parse(Config, changed(values, "algorithm.kl_in_reward", kl | {"controller": "adaptive", "horizon": 103}))


def test_a_whole_number_will_do_for_a_number(values):
    lr = parse(Config, changed(values, "actor.lr", 1)).actor.lr
    assert (lr, type(lr)) == (1.0, float)


def test_batches_that_do_not_divide_are_refused_with_sizes_that_do(values):
    with pytest.raises(ConfigError, match=r"60 is not a multiple .*=16.* try trainer.prompts_per_minibatch=15$"):
        parse(Config, changed(values, "trainer.prompts_per_step", 60))


def test_a_missing_key_is_named_with_the_way_to_set_it(values):
    without = {name: value for name, value in values["model"].items() if name != "dtype"}
    with pytest.raises(ConfigError, match=r"^model.dtype: a value is required; write model.dtype=VALUE$"):
        parse(Config, values | {"model": without})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.totl_steps", "trainer.total_steps"),
        ("total_steps", "trainer.total_steps"),
        ("actor.total_steps", "trainer.total_steps"),
        ("rollout.samples", "rollout.samples_per_prompt"),
        ("trainer.steps", "trainer.total_steps"),
        ("algorithm.kl_coef", "algorithm.kl_in_reward.kl_coef"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key, nearest):
    assert str(unknown_key(key, keys(Config))) == f"unknown config key '{key}'; the nearest known key is '{nearest}'"


@pytest.mark.parametrize("key", ["num_gpus", "foo", "optimizer", "wandb"])
def test_a_key_that_no_known_key_resembles_gets_no_suggestion(key):
    assert str(unknown_key(key, keys(Config))) == f"unknown config key '{key}'; --cfg prints all keys"


def test_an_unknown_key_inside_a_section_is_refused_too(values):
    with pytest.raises(ConfigError, match=r"^unknown config key 'model.dtyp'; the nearest known key is 'model.dtype'$"):
        parse(Config, changed(values, "model.dtyp", "float32"))


def test_a_run_that_shall_be_reproduced_is_synchronous():
    assert compose(["trainer.max_staleness=3"])[0].trainer.max_staleness == 3
    assert compose(["rollout=hf", "trainer.deterministic=true"])[0].trainer.deterministic
    with pytest.raises(ConfigError, match=r"max_staleness=1 with deterministic=true: .* use max_staleness=0"):
        compose(["rollout=hf", "trainer.deterministic=true", "trainer.max_staleness=1"])


def test_a_kept_kv_cache_needs_staleness_and_importance_weights():
    kept = "rollout.keep_kv_cache=true"
    assert compose([kept, "trainer.max_staleness=1"])[0].rollout.keep_kv_cache is True
    with pytest.raises(ConfigError, match=r"keep_kv_cache=true with trainer.max_staleness=0: all answers are fini"):
        compose([kept])
    reused = ["trainer.max_staleness=1", "trainer.reuse.groups=1", "trainer.reuse.steps=1"]
    with pytest.raises(ConfigError, match=r"with trainer.max_staleness=1 and trainer.reuse.steps=1: all answers are f"):
        compose([kept, *reused])
    with pytest.raises(ConfigError, match=r"keep_kv_cache=true with algorithm.correction.level=null: .*level=token"):
        compose([kept, "trainer.max_staleness=1", "algorithm.correction.level=null"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement=inprocess", "rollout=hf", "rollout.weight_transport=process_group"], "process of the training r"),
        (["rollout.weight_transport=device_handles", "model.lora={rank: 4}"], "checks of only one rank's rows"),
        (
            ["rollout.weight_transport=device_handles", "placement=disaggregated", "placement.rollout_replicas=1-2"],
            "shares no GPU with a train",
        ),
        (["rollout.weight_transport=nccl", "placement=colocated"], "each process needs a separate GPU"),
        (["rollout.weight_transport=nccl", "placement=disaggregated", "model.cpu_offload=true"], "in GPU memory"),
        (["model.cpu_offload=true", "critic.offload_optimizer=true"], "use critic.offload_optimizer=false"),
    ],
)
def test_weights_and_moments_that_cannot_be_where_they_should_be_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(overrides)


# Tests of top-p and top-k


@pytest.mark.parametrize(
    ("overrides", "user", "way"),
    [
        (["trainer.max_staleness=1"], "trainer.max_staleness=1", "trainer.max_staleness=0"),
        (
            ["trainer.max_staleness=1", "algorithm.correction.level=null"],
            "trainer.max_staleness=1",
            "trainer.max_staleness=0",
        ),
        (["algorithm.old_log_probs=rollout"], "algorithm.old_log_probs=rollout", "algorithm.old_log_probs=actor"),
        *(
            (
                ["algorithm.correction.upper=2", f"algorithm.correction.level={level}"],
                f"algorithm.correction.level={level}",
                "algorithm.correction.level=null",
            )
            for level in ("token", "sequence", "geometric")
        ),
        (
            ["algorithm.rejection.kl_estimator=k3", "algorithm.rejection.upper=1"],
            "algorithm.rejection.kl_estimator=k3",
            "algorithm.rejection.kl_estimator=null",
        ),
        (
            ["algorithm.squared_log_ratio_coef=0.001"],
            "algorithm.squared_log_ratio_coef=0.001",
            "algorithm.squared_log_ratio_coef=0",
        ),
    ],
)
def test_what_needs_the_engines_log_probs_is_refused_with_top_p_or_top_k(overrides, user, way):
    for restriction in (["rollout.top_p=0.9", "rollout.top_k=5"], ["rollout.top_p=0.9"], ["rollout.top_k=5"]):
        with pytest.raises(ConfigError) as error:
            compose([*overrides, *restriction])
        assert str(error.value) == (
            f"{', '.join(restriction)} with {user}: {user.partition('=')[0]} needs log-probs of the trained "
            "distribution, but the engine gives those of the restricted distribution; use rollout.top_p=1 "
            f"rollout.top_k=0, or {way}"
        )
    compose(overrides)


def test_top_p_and_top_k_are_allowed_where_nothing_needs_the_engines_log_probs_and_auto_corrects_nothing():
    config = compose(["rollout.top_p=0.9", "rollout.top_k=5"])[0]
    assert config.rollout.is_restricted
    assert config.algorithm.correction.level is None
    assert not compose([])[0].rollout.is_restricted


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["shard_ranks=0"], "shard_ranks=0 is no positive divisor of actor_ranks=4"),
        (["shard_ranks=3"], "shard_ranks=3 is no positive divisor of actor_ranks=4"),
        (["sequence_ranks=0"], "sequence_ranks=0 is below 1"),
        (["expert_ranks=0"], "expert_ranks=0 is below 1"),
        (["context_ranks=3"], "context_ranks=3: 3 ranks process each packed sequence together"),
        (["tensor_ranks=3"], "tensor_ranks=3: 3 ranks process each packed sequence together"),
        (
            ["sequence_ranks=2", "context_ranks=2", "tensor_ranks=2"],
            r"sequence_ranks=2 \* context_ranks=2 \* tensor_ranks=2: 8 ranks process .* no divisor of actor_ranks=4",
        ),
        (["expert_ranks=3"], "expert_ranks=3 .* tensor_ranks=1 = 3 is no divisor of the 4 ranks .* raise actor_ranks"),
        (["shard_ranks=2", "expert_ranks=4"], "is no divisor of the 2 ranks .* raise shard_ranks"),
    ],
    ids=str,
)
def test_ranks_that_divide_rows_or_layers_must_divide_the_actors_ranks(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(["placement.actor_ranks=4", *(f"placement.{one}" for one in overrides)])


def test_the_ranks_that_process_a_packed_row_together_are_a_product():
    divided = ["placement.sequence_ranks=2", "placement.context_ranks=2", "placement.tensor_ranks=2"]
    placement = compose(["placement.actor_ranks=16", *divided])[0].placement
    assert (placement.token_ranks, placement.ranks_per_pack) == (4, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora={rank:4}", "placement.tensor_ranks=2 with model.lora"),
        ("model.compile=true", "placement.tensor_ranks=2 and placement.expert_ranks=1 with model.compile=true"),
    ],
)
def test_ranks_cannot_divide_layers_with_adapters_or_compiled_layers(override, message):
    with pytest.raises(ConfigError, match=message):
        compose(["placement.actor_ranks=2", "placement.tensor_ranks=2", override])


def test_a_range_of_replicas_is_the_minimum_and_the_maximum():
    cluster = ("placement=disaggregated", "placement.address=10.0.0.1:6379")
    config = compose([*cluster, "placement.rollout_replicas=2-4"])[0].placement
    assert (config.rollout_replicas, config.max_rollout_replicas, config.most_replicas) == (2, 4, 4)
    config = compose([*cluster, "placement.rollout_replicas=3"])[0].placement
    assert (config.rollout_replicas, config.max_rollout_replicas, config.most_replicas) == (3, None, 3)
    for overrides, said in (
        ([*cluster, "placement.rollout_replicas=4-2"], "max_rollout_replicas=2 is below rollout_replicas=4"),
        ([*cluster, "placement.rollout_replicas=0-2"], "rollout_replicas must be >= 1, got 0"),
        (["placement.rollout_replicas=1-2"], "max_rollout_replicas=2 with a run on this machine"),
        (["placement=colocated", cluster[1], "placement.rollout_replicas=1-2"], "there are no devices for additional"),
        ([*cluster, "placement.rollout_replicas=two"], "rollout_replicas"),
        ([*cluster, "placement.rollout_replicas=2-4", "placement.max_rollout_replicas=3"], "give only one of them"),
    ):
        with pytest.raises(ConfigError, match=said):
            compose(overrides)
