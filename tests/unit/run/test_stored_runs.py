"""Tests of the checks before a run that trains on the stored answers of an earlier run."""

import pytest

from rltrain.base.errors import ConfigError
from rltrain.run.stored_runs import check_stored_run
from rltrain.settings.compose import compose
from tests.made_runs import batch, made_run

ROLLOUT = "rollout:\n  temperature: 1.0\n  top_p: 1.0\n  top_k: 0\n"
SMALL = [
    "rollout=stored", "data.val=null", "trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=2",
    "rollout.samples_per_prompt=2", "trainer.total_steps=2",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    first = batch(("1", "22", "333", "4444"), uids=[0, 0, 1, 1])
    second = batch(("5", "66", "777", "8888"), uids=[2, 2, 3, 3])
    made = made_run(tmp_path / "run", [first, second])
    (made / "config.yaml").write_text(ROLLOUT)
    return made


def refusal(folder, *overrides):
    with pytest.raises(ConfigError) as error:
        check_stored_run(compose([*SMALL, f"rollout.run={folder}", *overrides])[0])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_run_that_stored_all_answers_is_accepted_also_for_fewer_steps_and_samples(folder):
    for fewer in ([], ["trainer.total_steps=1"], ["rollout.samples_per_prompt=1", "algorithm=reinforce"]):
        check_stored_run(compose([*SMALL, f"rollout.run={folder}", *fewer])[0])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.total_steps=3", "has stored 4 prompt groups, and 6 are needed (trainer.total_steps=3 x"),
        ("trainer.total_steps=3", "group 4 is not stored; lower trainer.total_steps"),
        ("rollout.samples_per_prompt=3", "rollout.samples_per_prompt=3: rollout.run="),
        ("rollout.samples_per_prompt=3", "has stored 2 answers to a prompt; use at most 2"),
        ("rollout.temperature=0.5", "sampled its answers with 1.0, and the loss needs the same value; use rollout"),
        ("rollout.top_k=5", "rollout.top_k=5: rollout.run="),
        ("data.val=builtin:median", "a run stores only answers to training prompts"),
        ("data.val_sets={hard: builtin:median}", "a run stores only answers to training prompts"),
        ("algorithm=dapo", "a run does not store the groups that dynamic sampling drops"),
        ("algorithm=remax", "the estimator needs a greedy answer to each prompt"),
        ("data.difficulty={}", "data.difficulty={easy_threshold: 1.0, hard_threshold: 0.0, easy_fraction: 0.1, "),
        ("data.difficulty={}", "sampled its prompts with data.difficulty=null, so answers to some prompts of this "),
    ],
)
def test_a_run_that_lacks_what_is_needed_is_refused_in_one_line(folder, override, said):
    assert said in refusal(folder, override)


def test_groups_that_are_trained_on_again_need_answers_that_are_generated(folder):
    assert refusal(folder, "trainer.max_staleness=1", "trainer.reuse.groups=1") == (
        "rollout=stored with trainer.reuse.groups=1: the number of stored groups that the run needs would depend on "
        "how many groups it trains on again; use trainer.reuse=null"
    )


def test_pools_of_prompts_must_be_those_of_the_stored_run(folder):
    pools = "{easy_threshold: 1.0, hard_threshold: 0.0, easy_fraction: 0.1, hard_fraction: 0.1, unseen_fraction: 0.3}"
    (folder / "config.yaml").write_text(f"{ROLLOUT}data:\n  difficulty: {pools}\n")
    check_stored_run(compose([*SMALL, f"rollout.run={folder}", "data.difficulty={}"])[0])
    said = f"data.difficulty=null: rollout.run={folder} sampled its prompts with data.difficulty={pools}"
    assert said in refusal(folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path, folder):
    assert "holds no tables rollouts/*.parquet" in refusal(tmp_path / "nowhere")
    assert "is also trainer.output_dir" in refusal(folder, f"trainer.output_dir={folder}")
    (folder / "config.yaml").write_text("rollout: 3\n")
    assert "its config.yaml has no section rollout" in refusal(folder)
    (folder / "config.yaml").unlink()
    assert "its config.yaml cannot be read" in refusal(folder)


def test_the_engine_of_stored_answers_needs_a_run_and_no_other_engine_takes_one():
    with pytest.raises(ConfigError, match=r"^rollout=stored without rollout\.run: "):
        check_stored_run(compose(SMALL)[0])
    with pytest.raises(ConfigError, match=r"^rollout\.run=.*/somewhere with rollout\.engine=hf: "):
        compose(["rollout=hf", "rollout.run=somewhere"])


def test_the_folder_is_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose(["rollout=stored", "rollout.run=run"])[0].rollout.run == str(tmp_path / "run")
