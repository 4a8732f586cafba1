"""Tests of which checkpoint `trainer.resume` selects, and of which configs may resume from the checkpoint."""

import dataclasses
import json
import pickle
import shutil

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from rltrain.base.errors import ConfigError
from rltrain.data.prompts import Prompt
from rltrain.run.resume import beginning, require_usable
from rltrain.run.source_fingerprints import sources
from rltrain.settings.compose import compose, to_yaml
from rltrain.settings.schema import Config
from rltrain.trajectories.token_rewards import with_all_knobs
from tests.unit.run.test_checkpoints import Ranks, made, save


def config(tmp_path, *overrides) -> Config:
    return with_all_knobs(compose([f"trainer.output_dir={tmp_path}", *overrides])[0])


async def saved(tmp_path, *overrides, steps=(2,)):
    """Write a run's output folder with checkpoints of the given steps."""
    checkpoints = made(tmp_path)
    checkpoints.config = to_yaml(config(tmp_path, *overrides))
    for step in steps:
        await save(checkpoints, step, ranks=Ranks())
    (tmp_path / "config.yaml").write_text(checkpoints.config)


def refusal(tmp_path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        beginning(config(tmp_path, *overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_auto_starts_anew_where_there_is_no_run_and_says_so(tmp_path):
    found = beginning(config(tmp_path / "new", "trainer.resume=auto"))
    assert found.checkpoint is None
    assert found.said == (f"trainer.resume=auto: {tmp_path / 'new'} holds no run yet, so a new run starts",)


async def test_auto_takes_the_newest_good_one(tmp_path):
    await saved(tmp_path, steps=(2, 4))
    found = beginning(config(tmp_path, "trainer.resume=auto"))
    assert (found.checkpoint.step, found.over) == (4, False)
    assert found.said == (f"the run continues after step 4, from the checkpoint {tmp_path}/checkpoints/step_4",)
    (tmp_path / "checkpoints/step_4/driver.json").write_text("{}")
    assert beginning(config(tmp_path, "trainer.resume=auto")).checkpoint.step == 2


def test_auto_starts_again_with_the_same_config_where_there_is_no_checkpoint_yet(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(config(tmp_path)))
    (tmp_path / "metrics.jsonl").write_text("")
    found = beginning(config(tmp_path, "trainer.resume=auto"))
    assert (found.checkpoint, len(found.said)) == (None, 1)
    assert "has no checkpoint yet; the run starts again" in found.said[0]
    assert "actor.lr=1.0: the checkpoint has 0.0004" in refusal(tmp_path, "trainer.resume=auto", "actor.lr=1")
    (tmp_path / "config.yaml").unlink()
    assert "holds metrics.jsonl and no config.yaml" in refusal(tmp_path, "trainer.resume=auto")


async def test_auto_refuses_to_start_anew_where_all_checkpoints_are_damaged(tmp_path):
    await saved(tmp_path)
    (tmp_path / "checkpoints/step_2/model/config.json").unlink()
    assert "holds 1 checkpoints, all of them damaged" in refusal(tmp_path, "trainer.resume=auto")


async def test_a_finished_run_has_nothing_to_do(tmp_path):
    await saved(tmp_path, "trainer.total_steps=2")
    shutil.copytree(tmp_path / "checkpoints/step_2/model", tmp_path / "model")
    found = beginning(config(tmp_path, "trainer.resume=auto", "trainer.total_steps=2"))
    assert found.over
    assert found.said[0].startswith(f"nothing to do: {tmp_path}/checkpoints/step_2 is the checkpoint of step 2")


async def test_a_run_whose_model_is_that_of_an_earlier_step_is_not_finished(tmp_path):
    await saved(tmp_path, "trainer.total_steps=2")
    shutil.copytree(tmp_path / "checkpoints/step_2/model", tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"another")
    assert not beginning(config(tmp_path, "trainer.resume=auto", "trainer.total_steps=1")).over


async def test_a_run_may_be_moved_and_named_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    one = config("runs/one", "trainer.resume=auto")
    assert one.trainer.checkpoint_dir == "runs/one/checkpoints"
    checkpoints = made(tmp_path / "runs/one")
    checkpoints.config = to_yaml(one)
    await save(checkpoints, 2, ranks=Ranks())
    (tmp_path / "runs/one/config.yaml").write_text(checkpoints.config)
    monkeypatch.chdir(tmp_path / "runs")
    assert beginning(config("one", "trainer.resume=auto")).checkpoint.step == 2
    (tmp_path / "runs/one").rename(tmp_path / "two")
    assert beginning(config(tmp_path / "two", "trainer.resume=auto")).checkpoint.step == 2


BOMB = "k0: &k0 {a: 1}\n" + "".join(f"k{n}: &k{n} {{a: *k{n - 1}, b: *k{n - 1}}}\n" for n in range(1, 60))


@pytest.mark.parametrize("content", ["a: &a {b: *a}", "a: &a [*a]", BOMB])
def test_a_config_that_refers_to_its_own_parts_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    refusal(tmp_path, "trainer.resume=auto")


@pytest.mark.parametrize(
    "line", [b"[1]", b'{"step": 1}', b'{"step": "x", "reward/mean": 0.5, "rollout/length_mean": 3.0}']
)
async def test_metrics_that_are_none_are_refused_before_any_worker_starts(tmp_path, line):
    await saved(tmp_path)
    own, found = config(tmp_path), beginning(config(tmp_path, "trainer.resume=auto")).checkpoint
    write_index(found)
    bad = dataclasses.replace(found, state=GOOD, history={"metrics.jsonl": line})
    prompts = Prompts([Prompt(n, "p", [1], {}) for n in range(3)])
    with pytest.raises(ConfigError, match="its state cannot be used to resume a run"):
        require_usable(own, bad, prompts)
    require_usable(own, dataclasses.replace(bad, history={}), prompts)
    shutil.rmtree(found.folder.path("state"))
    with pytest.raises(ConfigError, match="state/actor"):
        require_usable(own, dataclasses.replace(bad, history={}), prompts)


async def test_more_steps_go_on_and_say_that_the_schedule_is_another(tmp_path):
    await saved(tmp_path, "trainer.total_steps=2")
    (tmp_path / "model").mkdir()
    found = beginning(config(tmp_path, "trainer.resume=auto", "trainer.total_steps=9"))
    assert not found.over
    assert "trainer.total_steps=9, while the checkpoint has 2: actor.lr_schedule=linear now ends at" in found.said[1]


@pytest.mark.parametrize(
    "override",
    ["actor.lr=1e-3", "trainer.seed=1", "rollout.temperature=0.5", "trainer.prompts_per_step=128", "algorithm=ppo",
     "model.lora={rank:4}", "algorithm.loss.clip_ratio_high=0.3", "trainer.max_staleness=1", "data=sort",
     "trainer.deterministic=true", "reward.functions=[{path:rltrain.rewards:exact_match,weight:0.5}]"],
)  # fmt: skip
async def test_what_decides_the_future_must_be_equal(tmp_path, override):
    await saved(tmp_path)
    said = refusal(tmp_path, "trainer.resume=auto", override)
    assert "the checkpoint has" in said
    assert "start a new run with the checkpoint's model as model.path" in said


async def test_a_correction_that_follows_from_the_staleness_is_not_what_is_complained_about(tmp_path):
    await saved(tmp_path, "trainer.max_staleness=2")
    fresh = refusal(tmp_path, "trainer.resume=auto")
    assert fresh.startswith("trainer.max_staleness=0: the checkpoint has 2, and another value")
    own = refusal(tmp_path, "trainer.resume=auto", "trainer.max_staleness=2", "algorithm.correction.level=null")
    assert own.startswith("algorithm.correction.level=null: the checkpoint has token, and another value")
    assert beginning(config(tmp_path, "trainer.resume=auto", "trainer.max_staleness=2")).checkpoint.step == 2


async def test_both_values_are_named(tmp_path):
    await saved(tmp_path)
    assert refusal(tmp_path, "trainer.resume=auto", "model.lora={rank:4}").startswith("model.lora")
    assert refusal(tmp_path, "trainer.resume=auto", "trainer.seed=5").startswith(
        "trainer.seed=5: the checkpoint has 0,"
    )


@pytest.mark.parametrize(
    "overrides",
    [["placement.actor_ranks=2", "placement=colocated", "verbose=true"],
     ["trainer.save_every=7", "trainer.keep_best=x", "trainer.eval_every=2"],
     ["actor.max_tokens_per_microbatch=4096", "model.activation_checkpointing=true"], ["data.val=null"],
     ["reward.timeout_s=1", "rollout.max_concurrent_sequences=3", "rollout.vllm.kv_cache_mb=32"]],
)  # fmt: skip
async def test_what_does_not_may_differ(tmp_path, overrides):
    await saved(tmp_path)
    assert beginning(config(tmp_path, "trainer.resume=auto", *overrides)).checkpoint.step == 2


async def test_never_refuses_a_folder_of_checkpoints_that_lies_elsewhere(tmp_path):
    await saved(tmp_path / "old")
    said = refusal(tmp_path / "new", f"trainer.checkpoint_dir={tmp_path}/old/checkpoints")
    assert "holds checkpoints of another run (step_2)" in said


@pytest.mark.parametrize("named", ["old/checkpoints/step_2", "old/checkpoints", "old"])
async def test_a_path_may_name_a_checkpoint_a_folder_of_them_or_a_run_and_goes_on_in_a_new_folder(tmp_path, named):
    await saved(tmp_path / "old")
    found = beginning(config(tmp_path / "new", f"trainer.resume={tmp_path}/{named}"))
    assert found.checkpoint.step == 2


async def test_a_path_that_is_no_checkpoint_or_a_damaged_one_is_refused(tmp_path):
    await saved(tmp_path / "old", steps=(2, 4))
    assert "holds no manifest.json" in refusal(tmp_path / "new", f"trainer.resume={tmp_path}/nowhere")
    (tmp_path / "old/checkpoints/step_4/driver.json").write_text("{}")
    said = refusal(tmp_path / "new", f"trainer.resume={tmp_path}/old/checkpoints/step_4")
    assert "driver.json has 2 bytes instead of" in said


async def test_a_path_into_this_run_must_be_its_newest(tmp_path):
    await saved(tmp_path, steps=(2, 4))
    assert beginning(config(tmp_path, f"trainer.resume={tmp_path}/checkpoints/step_4")).checkpoint.step == 4
    said = refusal(tmp_path, f"trainer.resume={tmp_path}/checkpoints/step_2")
    assert "also holds newer checkpoints (step_4)" in said


async def test_a_path_never_writes_over_another_run(tmp_path):
    await saved(tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    said = refusal(tmp_path / "new", f"trainer.resume={tmp_path}/old")
    assert "holds metrics.jsonl of a run other than the resumed run" in said
    shutil.copytree(tmp_path / "old/checkpoints", tmp_path / "third/checkpoints")
    assert "holds checkpoints of another run" in refusal(tmp_path / "third", f"trainer.resume={tmp_path}/old")


async def test_auto_never_mixes_two_runs(tmp_path):
    await saved(tmp_path / "a")
    await saved(tmp_path / "b")
    said = refusal(tmp_path / "a", "trainer.resume=auto", f"trainer.checkpoint_dir={tmp_path}/b/checkpoints")
    assert f"the run in {tmp_path}/a has its checkpoints in" in said


class Prompts(list):
    def fingerprint(self):
        return 7


GOOD = {
    "step": 2, "incarnation": 2, "engine_checked": True, "kl_controller": {"kl_coef": 0.0},
    "entropy_controller": {"value": 0.0}, "sources": {"data.train=builtin:median": 7},
    "collector": {
        "order": {"size": 3, "seed": 0, "shuffle": True, "drawn": 128}, "step": None,
        "groups": {
            "next_uid": 128, "used": 127, "dropped": 0,
            "groups": [{
                "uid": 127, "shipped": 2, "results": [],
                "trajectories": [{
                    "uid": 127, "sample": 0, "stop_reason": "", "messages": [], "reward": None, "error": "",
                    "turns": [{"action_ids": [1], "log_probs": [-1.0], "versions": [2], "finish_reason": "stop",
                               "text": "a", "reward": None}],
                }],
            }],
        },
    },
}  # fmt: skip


def leaves(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [leaf for key, child in inner for leaf in leaves(child, (*path, key))]


def changed(path, value):
    state = json.loads(json.dumps(GOOD))
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


def write_index(checkpoint, role="actor"):
    """Write the index file that training ranks store next to their tensors."""
    checkpoint.folder.write(f"state/{role}/.metadata", pickle.dumps(Metadata({}, None, {})))


def usable(tmp_path, state, *words, fingerprint=7):
    checkpoint = beginning(config(tmp_path, "trainer.resume=auto", *words)).checkpoint
    write_index(checkpoint)
    prompts = Prompts([Prompt(n, "p", [1], {}) for n in range(3)])
    prompts.fingerprint = lambda: fingerprint
    return require_usable(config(tmp_path, *words), dataclasses.replace(checkpoint, state=state), prompts)


@pytest.mark.parametrize("every", [0, 2])
async def test_the_state_of_a_reference_is_needed_only_if_the_reference_is_updated(tmp_path, every):
    words = ["algorithm.kl_loss.kl_loss_coef=0.1", f"algorithm.reference.refresh_every={every}"]
    await saved(tmp_path, *words)
    if every:
        with pytest.raises(ConfigError, match=r"its state cannot be used .*state/reference/\.metadata: cannot be read"):
            usable(tmp_path, GOOD, *words)
    await saved(tmp_path, *words)
    if every:
        checkpoint = beginning(config(tmp_path, "trainer.resume=auto", *words)).checkpoint
        write_index(checkpoint, "reference")
    assert usable(tmp_path, GOOD, *words) == []


async def test_only_the_function_that_ended_the_run_may_be_repaired(tmp_path):
    rewards, sums = tmp_path / "rewards.py", tmp_path / "sums.py"
    for file in (rewards, sums):
        file.write_text("def own(**_): return 1")
    words = [f"reward.functions=['{rewards}:own']", f"reward.aggregation={sums}:own"]
    await saved(tmp_path / "run", *words)
    kept = sources(config(tmp_path / "run", *words), Prompts())
    ended = GOOD | {"sources": kept, "repairable": f"reward.aggregation: {sums}:own"}
    assert usable(tmp_path / "run", ended, *words) == []
    sums.write_text("def own(**_): return 2")
    await saved(tmp_path / "run", *words)
    (said,) = usable(tmp_path / "run", ended, *words)
    assert said == f"reward.aggregation: {sums}:own: has been repaired since its error ended the run after step 2"
    await saved(tmp_path / "run", *words)
    with pytest.raises(ConfigError, match=r"sums.py:own: has changed since"):
        usable(tmp_path / "run", ended | {"repairable": None}, *words)
    rewards.write_text("def own(**_): return 2")
    await saved(tmp_path / "run", *words)
    with pytest.raises(ConfigError, match=r"rewards.py:own: has changed since"):
        usable(tmp_path / "run", ended, *words)


async def test_other_prompts_under_the_same_name_are_refused(tmp_path):
    await saved(tmp_path)
    usable(tmp_path, GOOD)
    await saved(tmp_path)
    with pytest.raises(ConfigError, match=r"^data.train=builtin:median: has changed since"):
        usable(tmp_path, GOOD, fingerprint=8)
    for value, said in (({}, "has changed since"), (None, "its state cannot be used to resume a run")):
        await saved(tmp_path)
        with pytest.raises(ConfigError, match=said):
            usable(tmp_path, changed(("sources",), value))


async def test_a_state_that_no_run_could_go_on_from_is_refused_in_one_line_or_harmless(tmp_path):
    await saved(tmp_path)
    own, checkpoint = config(tmp_path), beginning(config(tmp_path, "trainer.resume=auto")).checkpoint
    write_index(checkpoint)
    prompts, said = Prompts([Prompt(n, "p", [1], {}) for n in range(3)]), []
    paths = [path for path in leaves(GOOD) if path[-1] not in ("text", "finish_reason") and path[0] != "sources"]
    for path in paths:
        for value in (None, "x", [], {}, {"a": 1}, [[]]):
            try:
                require_usable(own, dataclasses.replace(checkpoint, state=changed(path, value)), prompts)
            except ConfigError as error:
                said.append(str(error))
    assert len(said) > 3 * len(paths)
    assert [text for text in said if "\n" in text or "its state cannot be used to resume a run" not in text] == []


@pytest.mark.parametrize("content", ["", "- 1", "a: [", "\x00", "!!python/object/apply:os.system ['true']"])
def test_a_config_that_is_none_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    refusal(tmp_path, "trainer.resume=auto")


async def test_the_order_of_keys_and_the_way_a_number_is_written_make_no_difference(tmp_path):
    await saved(tmp_path)
    plain = dataclasses.asdict(config(tmp_path))
    # The file is read as YAML, and JSON is also valid YAML.
    (tmp_path / "config.yaml").write_text(json.dumps(plain, sort_keys=True))
    assert beginning(config(tmp_path, "trainer.resume=auto")).checkpoint.step == 2


@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize("name", ["step_9/weights.bin", "step_5"])
def test_a_step_that_no_run_has_written_is_refused_and_not_removed(tmp_path, resume, name):
    (tmp_path / "kept" / name).parent.mkdir(parents=True)
    (tmp_path / "kept" / name).write_text("another tool's")
    said = refusal(tmp_path / "run", f"trainer.checkpoint_dir={tmp_path}/kept", f"trainer.resume={resume}")
    assert f"holds {name.partition('/')[0]}, which no run has written ({name.rpartition('/')[2]})" in said


async def test_a_path_goes_on_where_it_lies_only_with_its_own_output_folder(tmp_path):
    await saved(tmp_path / "a")
    await saved(tmp_path / "b", "trainer.seed=5")
    words = [f"trainer.checkpoint_dir={tmp_path}/a/checkpoints", f"trainer.resume={tmp_path}/a/checkpoints/step_2"]
    assert "trainer.seed=0: the checkpoint has 5" in refusal(tmp_path / "b", *words)
    (tmp_path / "b/config.yaml").unlink()
    said = refusal(tmp_path / "b", *words)
    assert "b holds checkpoints and no config.yaml, so there is no run to continue" in said
    assert beginning(config(tmp_path / "a", *words)).checkpoint.step == 2
    assert beginning(config(tmp_path / "new", *words)).checkpoint.step == 2


async def test_auto_does_not_begin_again_where_a_model_shows_that_checkpoints_are_gone(tmp_path):
    await saved(tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "model").mkdir()
    assert "holds the model of a checkpoint" in refusal(tmp_path, "trainer.resume=auto")


async def test_a_number_that_is_none_is_the_same_number(tmp_path):
    functions = "reward.functions=[{path: a.b:c, kwargs: {x: .nan}}]"
    await saved(tmp_path, functions)
    assert beginning(config(tmp_path, "trainer.resume=auto", functions)).checkpoint.step == 2
