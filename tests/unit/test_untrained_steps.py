"""Tests of steps without trained tokens, and of reports on skipped updates.

A step without trained tokens does not change controllers and does not compare the engine with the actor.
"""

import pytest
from test_trainer import FakeCollector, answered, trainer

from rltrain.base.errors import LogProbError, NumericsError

ENTROPY = [
    "algorithm.entropy_target=0.5",
    "algorithm.entropy_coef=0.01",
    "algorithm.entropy_coef_step=0.004",
    "algorithm.entropy_coef_max=0.1",
]


class SomeUntrained(FakeCollector):
    """A fake collector whose batches have no trained token at the given versions of the weights."""

    def __init__(self, *versions):
        super().__init__([])
        self.untrained = versions

    async def answers(self, version):
        batch = answered(version)
        mask = batch.values("response_mask") & (version not in self.untrained)
        return batch.with_values("responses", response_mask=mask)


async def test_a_step_that_trained_nothing_does_not_move_the_entropy_coefficient():
    made, _ = trainer(*ENTROPY, collector=SomeUntrained(1))
    made.actor.entropies = [0.4, 0.0, 0.4]
    shown = [(await made.train_step())[0]["actor/entropy_coef"] for _ in range(4)]
    assert shown == pytest.approx([0.01, 0.014, 0.014, 0.018])


async def test_a_step_whose_answers_were_all_cut_and_masked_does_not_move_it_either():
    class AllCut(FakeCollector):
        async def answers(self, version):
            batch = answered(version)
            batch.non_tensor_batch["finish_reason"][:] = "length"
            return batch

    made, _ = trainer(*ENTROPY, "algorithm.mask_truncated=true", collector=AllCut([]))
    assert [(await made.train_step())[0]["actor/entropy_coef"] for _ in range(2)] == [0.01, 0.01]


async def test_a_step_whose_tokens_were_all_rejected_still_has_an_entropy_to_steer_by():
    reject = ["algorithm.rejection.kl_estimator=abs", "algorithm.rejection.upper=0.1", "rollout.max_log_prob_gap=1"]
    made, _ = trainer(*ENTROPY, *reject, old=-1.25)
    made.actor.entropies = [0.4, 0.4]
    assert [(await made.train_step())[0]["actor/entropy_coef"] for _ in range(2)] == pytest.approx([0.01, 0.014])


@pytest.mark.parametrize("settings", [["trainer.prompts_per_minibatch=2"], [], ["algorithm.old_log_probs=rollout"]])
async def test_E1_the_engine_is_checked_in_the_first_step_that_has_trained_tokens(settings):
    made, log = trainer(*settings, "rollout.max_log_prob_gap=0.4", old=-1.5, collector=SomeUntrained(0, 1))
    await made.train_step()
    await made.train_step()
    with pytest.raises(LogProbError, match=r"disagree by 0\.5 nats"):
        await made.train_step()
    assert log.count("actor compute_log_probs 1111") == 3
    assert log.count("actor update 1111") == 2


async def test_once_checked_the_engine_is_not_asked_about_again():
    made, log = trainer("trainer.prompts_per_minibatch=2", collector=SomeUntrained(0))
    for _ in range(4):
        await made.train_step()
    assert log.count("actor compute_log_probs 1111") == 2


def skipping(made, count, **metrics):
    """Make the fake actor report `count` skipped updates, and make the fake tracker record alarms."""

    async def update(*_):
        return {"loss": 0.5, "skipped_updates": count, **metrics}

    made.actor.update = update
    made.tracker.told = []
    made.tracker.log_alarm = lambda step, text: made.tracker.told.append((step, text))
    made.tracker.save_batch = lambda step, batch: f"/run/failed/{step} of {len(batch)}"
    return made


async def test_skipped_updates_are_told_in_one_line_with_the_batch_and_the_run_goes_on():
    made, log = trainer("trainer.prompts_per_minibatch=1")
    metrics = (await skipping(made, 1.0).train_step())[0]
    assert metrics["actor/skipped_updates"] == 1
    assert made.tracker.told == [
        (
            1,
            "step 1: 1 of 2 actor updates skipped, as their loss or gradient is not finite: look at rewards, "
            "advantages and log-probs of the step's batch (/run/failed/1 of 4), and lower actor.lr or the loss's clip "
            "ranges",
        )
    ]
    assert log[-1] == "load actor as 1, checked: True"


async def test_a_step_whose_updates_were_all_skipped_does_not_move_the_entropy_coefficient():
    made, _ = trainer(*ENTROPY)
    skipping(made, 2.0, entropy=float("nan"))
    assert [(await made.train_step())[0]["actor/entropy_coef"] for _ in range(2)] == [0.01, 0.01]


async def test_too_many_skipped_updates_end_the_run_with_the_batch_kept():
    made, _ = trainer()

    async def update(*_):
        raise NumericsError("4 updates in a row")

    skipping(made, 0).actor.update = update
    with pytest.raises(NumericsError, match=r"^4 updates in a row; file with the step's batch: /run/failed/1 of 4$"):
        await made.train_step()
