"""Tests of trajectories with several contexts.

The same conversations are recorded in two ways: as turns that continue one context, and as turns that each repeat the
whole conversation in a new context. In both recordings, the same tokens stand before each sampled token in its context,
so training must give equal results.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, TOKEN_SELECTORS, aggregate_loss, columns_of
from rltrain.algorithms.aggregation import LOSS_AGG_MODES
from rltrain.batch.contexts import experts_by_row, experts_of
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.settings.compose import compose
from rltrain.trajectories.batch_building import batch_of
from rltrain.trajectories.teachers import several_contexts
from rltrain.trajectories.token_rewards import states_to_value
from workers.models.packed_forward import PACKED, pack, policy_output

TURNS = [  # (observation, action, reward) of the turns of each trajectory; all trajectories are of one group
    [([5, 6, 7], [20, 21], 0.5), ([30], [22, 23, 24], 0.0), ([31, 32], [25], 2.0)],
    [([5, 6, 7], [11], 0.0), ([33, 34, 35], [12, 13], 1.0)],
    [([5, 6, 7], [14, 15, 16], 4.0)],
]
# For each turn in TURNS, a number that identifies the observation before the turn.
STATES = [[1, 2, 3], [1, 4], [1]]


def trajectories(*, repeated: bool) -> list[Trajectory]:
    made = []
    for sample, turns in enumerate(TURNS):
        recorded, before = [], []
        for observed, action, reward in turns:
            numbers = [float(-token) / 10 for token in action]
            seen = before + observed if repeated else observed
            recorded.append(Turn(seen, action, numbers, [0] * len(action), "stop", "t", reward, new_context=repeated))
            before = before + observed + action
        made.append(Trajectory(7, sample, recorded, "done"))
    return made


BATCHES = [batch_of(trajectories(repeated=repeated)) for repeated in (False, True)]


def columns(batch, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the columns that estimators and losses read, with one value per token (B, T) or per row (B,).

    The values at sampled tokens are random but equal for both recordings. Most columns are 9 at all other tokens.
    """
    mask, generator = batch.padded("response_mask"), torch.Generator().manual_seed(seed)
    count, rows = int(mask.sum()), len(batch)

    def at_sampled(values: torch.Tensor, elsewhere: float = 9.0) -> torch.Tensor:
        return torch.full(mask.shape, elsewhere, dtype=values.dtype).masked_scatter(mask, values)

    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "advantages", "teacher_log_probs")
    found = {name: at_sampled(torch.randn(count, generator=generator, dtype=torch.float64) - 2) for name in names}
    states = [state for turns, known in zip(TURNS, STATES, strict=True) for state, (_, action, _) in
              zip(known, turns, strict=True) for _ in action]  # fmt: skip
    return found | {
        "response_mask": mask,
        "entropies": at_sampled(torch.rand(count, generator=generator, dtype=torch.float64)),
        "random_draws": at_sampled(torch.rand(count, generator=generator, dtype=torch.float64)),
        "token_level_rewards": torch.where(mask, batch.padded("turn_rewards").double(), 0.0),
        "turn_index": batch.padded("turn_index"),
        "turn_states": at_sampled(torch.tensor(states), 0),
        "uid": batch.batch["uid"],
        "successes": torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
        "valid": torch.ones(rows, dtype=torch.bool),
        "reward_components": torch.tensor([[2.5, 1.0], [1.0, 0.0], [4.0, 1.0]], dtype=torch.float64),
        "baseline_rewards": torch.full((rows,), 0.5, dtype=torch.float64),
    }


def equal_at_sampled(found: torch.Tensor, expected: torch.Tensor) -> None:
    one, other = (
        values[batch.padded("response_mask")] for batch, values in zip(BATCHES, (found, expected), strict=True)
    )
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_trajectory_whose_environment_failed_counts_no_turn_and_no_context():
    failed = Trajectory(0, 3, [Turn((), (), (), (), "abort")], "error", error="reset raised")
    batch = batch_of([*trajectories(repeated=True), failed])
    assert batch.batch["turns"].tolist() == [3, 2, 1, 0]
    assert batch.batch["contexts"].tolist() == [3, 2, 1, 0]


def test_a_row_marks_the_first_token_of_each_later_context():
    continued, repeated = BATCHES
    assert not continued.values("context_starts").any()
    assert repeated.values("responses")[repeated.values("context_starts")].tolist() == [5, 5, 5]
    assert repeated.batch["contexts"].tolist() == [3, 2, 1]
    for name in ("rollout_log_probs", "turn_index", "turn_rewards", "policy_version"):
        equal_at_sampled(*(batch.padded(name) for batch in BATCHES))


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
def test_T3_contexts_change_no_advantage(name):
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    results = []
    for batch in BATCHES:
        known = columns(batch)
        results.append(estimator(*[known[column] for column in columns_of(estimator)]))
    for found, expected in zip(*results, strict=True):
        equal_at_sampled(found, expected)
    assert float(results[0][0].abs().max()) > 0.1


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_T3_contexts_change_no_gradient_of_a_loss(name, mode):
    knobs = compose([f"algorithm.loss_mode={name}"])[0].algorithm.loss
    gradients = []
    for batch in BATCHES:
        known = columns(batch)
        if name in TOKEN_SELECTORS.names():
            known["selected"] = known["random_draws"] < 0.6
        start = torch.randn(int(known["response_mask"].sum()), generator=torch.Generator().manual_seed(3)).double()
        log_probs = known["old_log_probs"].masked_scatter(known["response_mask"], start - 2).requires_grad_()
        known["log_probs"] = log_probs
        known["entropy"] = known["entropies"]
        function = POLICY_LOSSES.get(name)
        losses, _ = function(*[known[column] for column in columns_of(function)], **knobs)
        total = aggregate_loss(losses, known["response_mask"], mode, max_response_length=50)
        gradients.append(torch.autograd.grad(total, log_probs)[0])
    equal_at_sampled(*gradients)
    assert float(gradients[0].abs().max()) > 0


def test_T2_contexts_change_no_log_prob_and_no_gradient_of_the_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2))
    model = model.double().eval()
    model.set_attn_implementation(PACKED)
    log_probs, gradients = [], []
    for batch in BATCHES:
        sampled = policy_output(model, pack(batch), temperature=0.7).log_probs[batch.values("response_mask")]
        weights = torch.arange(1.0, len(sampled) + 1)
        gradients.append(torch.autograd.grad((sampled * weights).sum(), list(model.parameters())))
        log_probs.append(sampled)
    torch.testing.assert_close(*log_probs, rtol=0, atol=2e-6)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_state_after_a_cut_answer_belongs_to_its_last_context():
    algorithm = compose(["algorithm=ppo", "algorithm.bootstrap_truncated=true"])[0].algorithm
    cut = [Trajectory(t.uid, t.sample, t.turns, "max_turns") for t in trajectories(repeated=True)]
    batch = batch_of(cut)
    longer = states_to_value(batch, algorithm)
    lengths = longer.lengths("responses")
    assert lengths.tolist() == (batch.lengths("responses") + 1).tolist()
    for own, more in zip(batch.padded("context_starts"), longer.padded("context_starts"), strict=True):
        assert own.nonzero().tolist() == more.nonzero().tolist()


def test_a_teacher_that_cannot_see_several_contexts_leaves_their_rows_out():
    continued, repeated = BATCHES
    assert several_contexts(continued) == ["", "", ""]
    assert [bool(why) for why in several_contexts(repeated)] == [True, True, False]
    assert several_contexts(repeated.select(["responses"])) == ["", "", ""]


def test_experts_of_contexts_and_of_rows_are_the_inverse_of_each_other():
    """The rows have 2 + 3, 1 + 1 and 3 + 0 tokens. A model runs on all tokens but the last one of a response."""
    prompts, responses = [[1, 2], [3], [4, 5, 6]], [[7, 8, 9], [10], []]
    batch = DataProto.from_dict({"prompts": jagged(prompts, torch.int64), "responses": jagged(responses, torch.int64)})
    experts = torch.arange(2 * 8, dtype=torch.int16).view(8, 2)
    of_prompts, of_responses = experts_by_row(batch, experts)
    assert of_prompts.tolist() == [[0, 1], [2, 3], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert of_responses.tolist() == [[4, 5], [6, 7], [-1, -1], [-1, -1]]
    batch = batch.with_values("prompts", prompt_experts=of_prompts)
    assert experts_of(batch.with_values("responses", response_experts=of_responses)).equal(experts)
