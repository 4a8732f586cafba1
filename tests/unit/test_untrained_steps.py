"""A step that trains nothing moves no controller and checks no engine."""

import pytest
from test_trainer import FakeCollector, samples, trainer

from rltrain.errors import LogProbError

ENTROPY = ["algorithm.entropy_target=0.5", "algorithm.entropy_coef=0.01", "algorithm.entropy_coef_step=0.004"]


class SomeUntrained(FakeCollector):
    """The steps of these versions have no trained token."""

    def __init__(self, *versions):
        super().__init__([])
        self.untrained = versions

    def answers(self, version):
        batch = samples(version)
        mask = batch.values("response_mask") & (version not in self.untrained)
        return batch.with_values("responses", response_mask=mask)


def test_a_step_that_trained_nothing_does_not_move_the_entropy_coefficient():
    made, _ = trainer(*ENTROPY, collector=SomeUntrained(1))
    made.actor.entropies = [0.4, 0.0, 0.4]
    shown = [made.train_step()[0]["actor/entropy_coef"] for _ in range(4)]
    assert shown == pytest.approx([0.01, 0.014, 0.014, 0.018])


def test_a_step_whose_tokens_were_all_rejected_does_not_move_it_either():
    reject = ["algorithm.rejection.kl_estimator=abs", "algorithm.rejection.upper=0.1", "rollout.max_log_prob_gap=1"]
    made, _ = trainer(*ENTROPY, *reject, old=-1.25)
    assert [made.train_step()[0]["actor/entropy_coef"] for _ in range(2)] == [0.01, 0.01]


@pytest.mark.parametrize("settings", [["trainer.prompts_per_minibatch=2"], [], ["algorithm.old_log_probs=rollout"]])
def test_E1_the_engine_is_checked_in_the_first_step_that_has_trained_tokens(settings):
    made, log = trainer(*settings, "rollout.max_log_prob_gap=0.4", old=-1.5, collector=SomeUntrained(0, 1))
    made.train_step()
    made.train_step()
    with pytest.raises(LogProbError, match=r"disagree by 0\.5 nats"):
        made.train_step()
    assert log.count("actor compute_log_probs 1111") == 3
    assert log.count("actor update 1111") == 2


def test_once_checked_the_engine_is_not_asked_about_again():
    made, log = trainer("trainer.prompts_per_minibatch=2", collector=SomeUntrained(0))
    for _ in range(4):
        made.train_step()
    assert log.count("actor compute_log_probs 1111") == 2
