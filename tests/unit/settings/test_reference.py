"""The documentation of the config keys is generated from the schema and is up to date."""

import re
from pathlib import Path

import pytest
import yaml

from rltrain.settings.compose import compose
from rltrain.settings.config_groups import config_dir
from rltrain.settings.key import declared_keys
from rltrain.settings.overrides import OPTIONAL
from rltrain.settings.reference import WIDTH, commented, outdated, page, values_of
from rltrain.settings.schema import Config
from rltrain.settings.typed import keys

ROOT = Path(__file__).parents[3]
DECLARED = {one.path: one for one in declared_keys(Config)}
COMPLETE = ("train", "algorithm/grpo", "model/builtin", "data/median", "data/sort", "reward/median", "reward/sort")
COMPLETE = [
    f"{name}.yaml" for name in (*COMPLETE, "rollout/vllm", "placement/local", "profile/demo", "profile/instruct")
]
INSIDE = re.compile(
    rf"({'|'.join(map(re.escape, OPTIONAL))})\."
    r"|reward\.\w+\[\]\.|rollout\.tools\[\]\.|algorithm\.distillation\.teachers\[\]\."
)


def rows():
    """Return the cells of each table row on the reference page, without the header rows."""
    lines = [line for line in page().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "key" and not set(row[0]) <= {"-"}]


def row_of(key):
    (row,) = (row for row in rows() if row[0] == f"`{key}`")
    return row[1:]


def test_the_page_and_the_yaml_comments_are_up_to_date():
    assert outdated() == {}, "run: python -m rltrain.settings.reference"


def test_the_page_is_the_one_that_the_guides_link_to():
    assert (ROOT / "docs/settings.md").read_text() == page()


def test_the_page_has_every_key_once_and_no_empty_cell():
    found = rows()
    assert [row for row in found if len(row) != 5 or not all(row)] == []
    names = [row[0].strip("`") for row in found]
    inside = [path.rpartition(".")[2] for path in DECLARED if INSIDE.match(path)]
    assert sorted(names) == sorted([*keys(Config), *inside])


@pytest.mark.parametrize(
    ("key", "default", "values", "resume"),
    [
        ("trainer.total_steps", "`120`", "whole number >= 1", "may change"),
        ("trainer.hang_timeout_s", "`300.0`", "number >= 10, in seconds", "may change"),
        ("trainer.checkpoint_dir", "`${trainer.output_dir}/checkpoints`", "text", "may change"),
        ("trainer.keep_best", "`null`", "text, or `null`", "may change"),
        ("actor.lr", "`0.0004`", "number > 0", "must stay the same"),
        ("actor.lr_schedule", "`linear`", "`constant`, `linear`, `cosine`", "must stay the same"),
        ("algorithm.loss", "`{}`", "mapping", "must stay the same"),
        (
            "algorithm.correction.level",
            "`auto`",
            "`token`, `sequence`, `geometric`, `auto` or `null`",
            "must stay the same",
        ),
        ("algorithm.reward_normalization.mean_level", "`null`", "`batch`, `group`, or `null`", "must stay the same"),
        ("model.lora", "`null`", "mapping, or `null`", "must stay the same"),
        ("rank", "required", "whole number >= 1", "must stay the same"),
        ("targets", "`[all-linear]`", "list of names", "must stay the same"),
        ("reward.functions", "`[rltrain.rewards.final_answer:final_answer]`", "list of entries", "must stay the same"),
        ("rollout.vllm.gpu_memory_utilization", "`0.5`", "number in (0, 1]", "may change"),
        ("placement.threads_per_worker", "`null`", "whole number >= 1, or `null`", "may change"),
        ("verbose", "`false`", "`true` or `false`", "may change"),
    ],
)
def test_a_row_tells_default_values_meaning_and_resume_rule(key, default, values, resume):
    shown_default, shown_values, _, shown_resume = row_of(key)
    assert (shown_default, shown_values, shown_resume) == (default, values, resume)


def test_a_row_tells_the_meaning_that_the_schema_declares():
    assert row_of("trainer.max_staleness")[2] == (
        "Maximum staleness of an answer that is trained on. Staleness is the number of weight versions between the "
        "weights that generated the answer and the current weights. 0: synchronous training."
    )


def test_what_applies_where_an_entry_leaves_a_key_out_is_what_compose_fills_in():
    files = ["reward.functions=[a.b:c]", "reward.models=[path/to/judge]", "model.lora={rank: 4}", "data.difficulty={}"]
    files += ["algorithm=distill", "algorithm.distillation.teachers=[path/to/expert]"]
    config = compose(files)[0]
    (function,), (model,) = config.reward.functions, config.reward.models
    (teacher,) = config.algorithm.distillation.teachers
    for prefix, entry in (
        ("reward.functions[]", function),
        ("reward.models[]", model),
        ("algorithm.distillation.teachers[]", teacher),
        ("model.lora", config.model.lora),
        ("data.difficulty", config.data.difficulty),
    ):
        for path, one in DECLARED.items():
            told = one.key.if_left_out.partition(";")[0]
            if path.startswith(f"{prefix}.") and told.startswith("`"):
                assert getattr(entry, path.rpartition(".")[2]) == yaml.safe_load(told.strip("`")), path
    assert (function.name, model.name, teacher.name, config.model.lora.alpha) == ("c", "judge", "expert", 8)


def test_the_keys_inside_of_entries_say_what_applies_without_them_and_no_other_keys_do():
    assert {path for path, one in DECLARED.items() if bool(one.key.if_left_out) != bool(INSIDE.match(path))} == set()


def test_a_key_with_a_description_of_its_values_does_not_declare_bounds_that_it_would_hide():
    assert [one.path for one in DECLARED.values() if one.key.values and one.key.bounds] == []


def test_values_with_a_unit_name_it():
    assert values_of(DECLARED["algorithm.rejection.upper"]) == "number >= 0, or `null`, in nats per token"


BARE = """\
# Two replicas.
# They are small.
actor_ranks: 2
shard_ranks: null  # an old comment, #2
# an old comment above

launcher: ray
other: 3  # not a key of the schema
# of the other one
another: [1]
"""
GENERATED = """\
# Two replicas.
# They are small.

actor_ranks: 2  # Number of processes that train the actor together.
# Number of ranks over which one copy of a model is sharded. If placement.actor_ranks is larger than shard_ranks, each
# group of shard_ranks ranks holds one copy. shard_ranks must divide placement.actor_ranks. null: one copy is sharded
# over all ranks.
shard_ranks: null

# Way in which workers are run. ray: Ray starts a process for each worker. inprocess: all workers are objects in one
# process, for debugging.
launcher: ray
other: 3  # not a key of the schema
# of the other one
another: [1]
"""


def test_comments_of_keys_are_replaced_and_the_head_and_all_other_comments_stay():
    assert commented(BARE, "placement.") == GENERATED
    assert commented(GENERATED, "placement.") == GENERATED


def test_the_keys_of_sections_and_of_the_entries_of_a_list_get_comments_too():
    text = "# Head.\n\nvllm:\n  kv_cache_mb: 1\nengine: vllm\n"
    assert commented(text, "rollout.").splitlines()[2:] == [
        "vllm:  # Settings that only the engine vLLM uses. null: the run uses another engine.",
        "  kv_cache_mb: 1  # Size of one engine's KV cache on CPUs. On GPUs, kv_cache_mb has no effect. Unit: MB.",
        "# Inference engine that generates the answers. vllm: the library vLLM. hf: the library "
        "transformers. sglang: the library",
        "# SGLang, with which no run has been made yet. stored: no generation, but the stored "
        "answers of an earlier run. Any",
        "# other engine is named by the Python package that contains it, such as my_package.my_engine.",
        "engine: vllm",
    ]
    entries = "# Head.\n\nmodels:\n  - name: a\n    weight: 1.0\n  - name: b\nmemory_mb: 1\n"
    assert [line.partition("  # ")[2] for line in commented(entries, "reward.").splitlines()[2:]] == [
        "List of reward models, each given as a mapping or only by its path.",
        "Name of the reward model in metrics and messages.",
        "Factor by which the reward model's score is multiplied in the weighted sum of all scores.",
        "Name of the reward model in metrics and messages.",
        "Maximum memory that a reward process may allocate after its start. Unit: MB.",
    ]


def test_a_file_that_builds_on_another_choice_keeps_its_comments():
    text = "# A preset.\ndefaults:\n  - grpo\n  - _self_\n\nloss_mode: gspo  # its own reason\n"
    assert commented(text, "algorithm.") == text


def test_a_list_of_groups_is_not_another_choice_of_the_same_group():
    text = "# All.\n\ndefaults:\n  - data: sort  # kept\n  - _self_\n\nverbose: true\n"
    assert commented(text) == text.replace("true", "true  # Show the log messages and warnings of libraries.")


@pytest.mark.parametrize("name", COMPLETE)
def test_the_comments_of_a_complete_file_are_generated_and_its_lines_fit(name):
    text = (config_dir() / name).read_text()
    assert max(map(len, text.splitlines())) <= WIDTH
    group = "" if name == "train.yaml" or name.startswith("profile/") else f"{name.partition('/')[0]}."
    # `start` is the end of the hand-written text
    start = text.index("\n\ntrainer:" if name == "train.yaml" else "\n\n")
    bare = text[:start] + re.sub(r"(?m)^ *# .*\n|  # .*$", "", text[start:])
    assert bare != text
    assert commented(bare, group) == text


def test_the_complete_files_are_those_that_build_on_no_other_choice():
    found = {
        str(file.relative_to(config_dir()))
        for file in config_dir().rglob("*.yaml")
        if "  - _self_" not in file.read_text() or file.name == "train.yaml"
    }
    assert found == set(COMPLETE)
