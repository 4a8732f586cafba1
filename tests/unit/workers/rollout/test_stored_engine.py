"""Tests of the engine that returns the stored answers of an earlier run."""

import dataclasses

import pytest

from rltrain.base.errors import ConfigError
from rltrain.data.prompt_images import PromptImages
from rltrain.data.stored_samples import stored_groups
from tests.image_models import picture
from tests.made_runs import batch, made_run, with_pictures
from workers.rollout.engines.stored.engine import StoredEngine
from workers.rollout.messages import Request


@pytest.fixture
def folder(tmp_path):
    """Return the output folder of a run of two steps, with two prompt groups of two answers each."""
    first = batch(("1", "22", "333", "4444"), uids=[0, 0, 1, 1])
    second = batch(("5", "66", "777", "8888"), uids=[2, 2, 3, 3])
    return made_run(tmp_path / "run", [first, second])


def request(uid, sample, prompt=None, max_tokens=8) -> Request:
    prompt_ids = list(map(ord, prompt or f"{uid}="))
    return Request((uid, sample), prompt_ids, temperature=1.0, max_tokens=max_tokens, seed=0)


def answers(engine, *requests):
    engine.add(requests)
    assert engine.busy
    found = engine.step()
    assert not engine.busy
    return found


def test_each_request_gets_the_tokens_log_probs_and_versions_of_its_own_answer(folder):
    engine = StoredEngine(folder)
    third, first = answers(engine, request(3, 1), request(0, 0))  # the answers are in two tables, and in another order
    assert (third.key, first.key) == ((3, 1), (0, 0))
    assert list(third.token_ids[:-1]) == list(map(ord, "8888"))
    assert list(first.token_ids[:-1]) == [ord("1")]
    assert list(first.log_probs) == [-1 / 8, -2 / 8]
    assert set(first.versions + third.versions) == {70_003}
    assert first.finish_reason == "stop"


def test_a_repeated_step_has_its_trained_samples_and_a_step_that_only_failed_has_its_own(folder):
    table = (folder / "rollouts" / "step_000002.parquet").read_bytes()
    (folder / "rollouts" / "failed_000001.parquet").write_bytes(table)
    found = stored_groups(folder)
    assert {uid: group.path.name for uid, group in found.items()} == {
        0: "step_000001.parquet",
        1: "step_000001.parquet",
        2: "failed_000001.parquet",
        3: "failed_000001.parquet",
    }
    assert [(found[uid].first, found[uid].size) for uid in (0, 1, 2, 3)] == [(0, 2), (2, 2), (0, 2), (2, 2)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (request(4, 0), "the stored run has no sample 0 of prompt group 4"),
        (request(0, 2), "the stored run has no sample 2 of prompt group 0"),
        (request(-1, 0), "the stored run has no sample 0 of prompt group -1"),
        (request(1, 0, "0="), "prompt group 1 has another prompt in the stored run"),
        (
            request(1, 1, max_tokens=4),
            "a stored answer has 5 tokens, but rollout.max_response_length is 4; raise the setting to its value in the "
            "stored run",
        ),
    ],
)
def test_a_request_without_its_answer_is_refused_in_one_line(folder, bad, said):
    with pytest.raises(ConfigError) as error:
        answers(StoredEngine(folder), bad)
    assert str(error.value).startswith(f"rollout.run={folder}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_table_is_named(folder):
    (folder / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 and no table")
    with pytest.raises(ConfigError, match=r"step_000002\.parquet: cannot be read \(.*\); copy the run's folder again"):
        StoredEngine(folder)


def test_an_answer_to_a_prompt_with_another_image_is_refused(tmp_path):
    """The token ids of two prompts can be the same although they show different images."""
    made = with_pictures(batch(("1", "2"), uids=[0, 1]), [[picture(1)], []])
    engine = StoredEngine(made_run(tmp_path / "run", [made]))
    same = dataclasses.replace(request(0, 0), images=PromptImages(((1, picture(1)),), [48], [1, 0]))
    other = dataclasses.replace(same, images=PromptImages(((2, picture(2)),), [48], [2, 0]))
    assert [len(answer.token_ids) for answer in answers(engine, same, request(1, 0))] == [2, 2]
    for wrong in (other, request(0, 0)):
        with pytest.raises(ConfigError, match="prompt group 0 has another prompt in the stored run"):
            answers(engine, wrong)
