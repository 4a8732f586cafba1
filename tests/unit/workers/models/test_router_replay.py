"""Tests of `actor.router_replay`: the engine records the experts of each token, and the trainer uses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.base.errors import ConfigError
from rltrain.batch.token_arrays import NOT_RECORDED
from rltrain.batch.trajectory import Trajectory
from rltrain.run.checks import check
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from rltrain.trajectories.batch_building import batch_of
from rltrain.trajectories.prompt_groups import trajectory_of
from tests.attention_families import FAMILIES
from workers.models.fsdp import prepare
from workers.models.packed_forward import PACKED, microbatch, pack, policy_output
from workers.models.router_replay import ExpertRecorder, replay_routers, routers_of, set_experts
from workers.models.sequence_parallel import Ranks, Sequence, split
from workers.rollout.engines.hf.engine import HFEngine, make
from workers.rollout.messages import Completion, Request

MIXTURES = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"]
# The prompts have different lengths, so that the engine pads some rows on the left.
PROMPTS = [char_tokenizer()(text)["input_ids"] for text in ("2299907=", "1=", "99=", "2299907=")]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module", params=MIXTURES)
def path(request, tmp_path_factory):
    """Return the directory of a tiny random model of a family."""
    return saved(tmp_path_factory.mktemp(request.param), request.param)


def saved(folder: Path, family: str, **options: Any) -> str:
    torch.manual_seed(0)
    tokenizer = char_tokenizer()
    sizes = SIZES | FAMILIES[family] | {"vocab_size": len(tokenizer)} | options
    config = CONFIG_MAPPING[family](pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def engine(path: str, *overrides: str) -> HFEngine:
    return make(compose(["rollout=hf", "actor.router_replay=engine", *overrides])[0], path, [-1])


def answered(made: HFEngine, *, length: int = 6) -> list[Completion]:
    """Return one answer of the engine to each prompt of `PROMPTS`, in the order of `PROMPTS`."""
    made.add([Request((n, 0), prompt, 1.0, length + n, n) for n, prompt in enumerate(PROMPTS)])
    found: list[Completion] = []
    while made.busy:
        found += made.step()
    return sorted(found, key=lambda one: one.key)


def rows(completions: list[Completion]):
    return batch_of([trajectory_of(PROMPTS[c.key[0]], c) for c in completions], experts=True)


def trained(path: str, *, moved: float = 0.0) -> nn.Module:
    """Return the trainer's model, which can replay experts.

    Args:
        path: the model directory.
        moved: standard deviation of the noise that is added to the routers' weights. With noise, the routers choose
            other experts than the engine, as after an update.
    """
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED, dtype=torch.float32).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for router in routers_of(model, "model").values():
            router.weight += moved * torch.randn_like(router.weight)
    replay_routers(model, "model")
    return model


def log_probs(model: nn.Module, batch, *, share: bool = True):
    return policy_output(model, pack(batch, share=share), temperature=1.0).log_probs


def own_choices(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Return the experts (N, L * k) that a model's routers choose without replay for a sequence of N tokens."""
    found: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda module, inputs, output: found.append(output[2]))
        for router in routers_of(model, "model").values()
    ]
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.cat(found, 1)


def test_an_answer_lists_the_experts_of_its_prompt_and_of_all_its_tokens_but_the_last(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for prompt, completion in zip(PROMPTS, answered(engine(path)), strict=True):
        ids = [*prompt, *completion.token_ids][:-1]
        expected = own_choices(model, ids)
        assert torch.tensor(completion.experts).view(len(ids), -1).tolist() == expected.tolist()


def test_an_engine_records_nothing_unless_it_is_asked_to(path):
    made = make(compose(["rollout=hf"])[0], path, [-1])
    completions = answered(made)
    assert [list(one.experts) for one in completions] == [[]] * len(PROMPTS)
    assert "response_experts" not in rows(completions)


@pytest.mark.parametrize("share", [True, False])
def test_E1_a_trainer_whose_routers_have_moved_computes_with_the_experts_of_the_engine(path, share):
    """The test compares the log-probs with those of `by_hand`, which does not use the code under test."""
    batch, model = rows(answered(engine(path))), trained(path, moved=0.5)
    found = log_probs(model, batch, share=share)
    free = log_probs(model, batch.select(["prompts", "responses"]), share=share)
    assert (found - free).abs().max() > 0.05  # Without replay, the moved routers choose other experts.
    expected = torch.cat([by_hand(path, batch[[row]]) for row in range(len(batch))])
    assert torch.allclose(found, expected, atol=1e-4)


def by_hand(path: str, row) -> torch.Tensor:
    """Return the log-probs of a row from a model whose routers are replaced by the functions of `weighting`."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    torch.manual_seed(1)
    prompt, response = row.values("prompts").tolist(), row.values("responses").tolist()
    recorded = torch.cat([row.values("prompt_experts"), row.values("response_experts")[:-1]]).long()
    routers = routers_of(model, "model")
    with torch.no_grad():
        for number, router in routers.items():
            router.weight += 0.5 * torch.randn_like(router.weight)
            router.forward = weighting(router, recorded.unflatten(1, (len(routers), -1))[:, number], model.config)
        logits = model(torch.tensor([(prompt + response)[:-1]])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 :].gather(1, torch.tensor(response)[:, None])[:, 0]


def weighting(router: nn.Module, experts: torch.Tensor, config):
    """Return a replacement for a router's forward function, which weights the given experts as the model family does.

    gpt-oss normalises the scores of the chosen experts alone. The others normalise over all experts, and all but OLMoE
    and Qwen3-MoE, which have the option `norm_topk_prob`, divide by the sum over the chosen experts.
    """

    def forward(hidden: torch.Tensor):
        scores = hidden.reshape(-1, hidden.size(-1)) @ router.weight.T
        if config.model_type == "gpt_oss":
            scores = scores + router.bias
            return scores, scores.gather(1, experts).softmax(-1), experts
        weights = scores.softmax(-1).gather(1, experts)
        if getattr(config, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, weights, experts

    return forward


def test_E1_engine_and_trainer_agree_with_and_without_replay_if_their_weights_are_equal(path):
    completions = answered(engine(path))
    batch, model = rows(completions), trained(path)
    engines = batch.values("rollout_log_probs")
    assert torch.allclose(log_probs(model, batch), engines, atol=1e-4)
    assert torch.allclose(log_probs(model, batch.select(["prompts", "responses"])), engines, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_B6_gradients_flow_into_the_routers_and_recomputed_layers_replay_too(path, checkpointing):
    batch = rows(answered(engine(path)))
    config = compose([f"model.activation_checkpointing={'true' if checkpointing else 'false'}"])[0]
    found = []
    for share in (True, False):
        model = trained(path, moved=0.5)
        for layer in model.model.layers:
            prepare(layer, config.model)
        log_probs(model, batch, share=share).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
        assert all(router.weight.grad.abs().max() > 0 for router in routers_of(model, "model").values())
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=2e-4 * float(other.abs().max().clamp(min=1)))


def test_recomputed_layers_have_the_gradients_of_kept_activations(path):
    batch = rows(answered(engine(path)))
    found = []
    for value in ("false", "true"):
        model = trained(path, moved=0.5)
        for layer in model.model.layers:
            prepare(layer, compose([f"model.activation_checkpointing={value}"])[0].model)
        log_probs(model, batch).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_router_chooses_itself_where_no_experts_were_recorded(path):
    batch = rows(answered(engine(path)))
    experts = batch.values("response_experts").clone()
    model, plain = trained(path, moved=0.5), batch.select(["prompts", "responses"])
    unknown = batch.with_values("prompts", prompt_experts=torch.full_like(batch.values("prompt_experts"), NOT_RECORDED))
    unknown = unknown.with_values("responses", response_experts=torch.full_like(experts, NOT_RECORDED))
    replayed = log_probs(model, batch)
    assert torch.allclose(log_probs(model, unknown), log_probs(model, plain), atol=1e-6)
    assert not torch.allclose(replayed, log_probs(model, plain), atol=1e-2)
    # If the next batch has no recorded experts, the routers choose experts by their own scores again.
    set_experts(model, None)
    assert torch.allclose(log_probs(model, plain), log_probs(trained(path, moved=0.5), plain), atol=1e-6)


def test_each_rank_of_a_sequence_group_has_the_experts_of_its_slice(path):
    packed = pack(rows(answered(engine(path))))
    slices = [split(packed, Sequence(ranks := Ranks(None, 2, rank), ranks, Ranks()))[0] for rank in range(2)]
    together = torch.cat([one.experts for one in slices])
    count = packed.input_ids.size(1)
    assert together[:count].equal(packed.experts)
    assert (together[count:] == NOT_RECORDED).all()
    assert all(len(one.experts) == one.input_ids.size(1) for one in slices)


def test_the_experts_of_a_micro_batch_are_not_padded_and_survive_a_checkpoint(path):
    completions = answered(engine(path))
    kept = [trajectory_of(PROMPTS[c.key[0]], c) for c in completions]
    again = [Trajectory.from_state(t.state_dict(t.prompt_ids), t.prompt_ids) for t in kept]
    assert [t.turns[0].experts for t in again] == [t.turns[0].experts for t in kept]
    _, packed, columns = microbatch(batch_of(again, experts=True), [1, 2])
    assert "response_experts" not in columns
    assert packed.experts.equal(pack(batch_of(kept, experts=True)[[1, 2]]).experts)


def test_an_answer_that_was_sampled_by_two_weight_versions_keeps_the_experts_of_the_first(path):
    made = engine(path)
    made.add([Request((0, 0), PROMPTS[0], 1.0, 8, 0)])
    for _ in range(4):
        made.step()
    known = made.batch.experts[:, :-1].clone()
    assert (known != NOT_RECORDED).all()
    with torch.no_grad():
        for router in routers_of(made.model, "model").values():
            router.weight.copy_(-router.weight)
    made.stale = True
    made.step()
    assert made.batch.experts[:, : known.size(1)].equal(known)
    assert (made.batch.experts[:, known.size(1) : -1] != NOT_RECORDED).all()


def test_a_model_without_known_routers_is_refused(start):
    model = AutoModelForCausalLM.from_pretrained(start)
    for prepared in (replay_routers, ExpertRecorder):
        with pytest.raises(ConfigError, match=r"^model.path=X: actor.router_replay needs a mixture-of-experts model"):
            prepared(model, "model.path=X")


def test_dense_layers_are_left_out(tmp_path):
    """The engine records no experts for the dense layer, and recorded numbers of a dense layer have no effect."""
    path = saved(tmp_path / "model", "qwen3_moe", mlp_only_layers=[0], num_hidden_layers=3)
    batch, model = rows(answered(engine(path))), trained(path, moved=0.5)
    experts = batch.values("prompt_experts").unflatten(1, (3, 2))
    assert (experts[:, 0] == NOT_RECORDED).all()
    assert (experts[:, 1:] != NOT_RECORDED).all()
    expected = log_probs(model, batch)
    experts[:, 0] = 3
    again = batch.with_values("prompts", prompt_experts=experts.flatten(1))
    assert log_probs(model, again).equal(expected)
    assert not torch.allclose(expected, log_probs(model, batch.select(["prompts", "responses"])), atol=1e-2)


def test_a_layer_with_two_routers_and_experts_of_other_layers_are_refused(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.model.layers[0].second = type("SecondTopKRouter", (nn.Module,), {})()
    with pytest.raises(ConfigError, match=r"which has 2 routers in a layer; use actor.router_replay=null"):
        replay_routers(model, "model.path=X")
    with pytest.raises(
        ConfigError, match=r"each token has 5 recorded experts, which is not a multiple of the model's 2"
    ):
        set_experts(trained(path), torch.zeros(3, 5, dtype=torch.int16))
    batch = rows(answered(engine(path)))
    for family, name in (("prompts", "prompt_experts"), ("responses", "response_experts")):
        batch = batch.with_values(family, **{name: torch.zeros(len(batch.values(family)), 6, dtype=torch.int16)})
    with pytest.raises(ConfigError, match=r"chooses 2 experts for each of \d+ tokens, but 3 experts of \d+ tokens are"):
        log_probs(trained(path), batch)


class TwiceTopKRouter(nn.Module):
    """A router that calls `torch.topk` twice: first to choose a group of experts, and then to choose experts."""

    def forward(self, hidden):
        groups = torch.topk(hidden, 1).indices
        return hidden, *torch.topk(hidden + groups, 2)


def test_a_router_with_several_choices_is_refused_by_name():
    model = nn.Sequential(TwiceTopKRouter())
    vars(model)["_no_split_modules"] = ["TwiceTopKRouter"]
    replay_routers(model, "model.path=X")
    set_experts(model, torch.zeros(3, 2, dtype=torch.int16))
    with pytest.raises(
        ConfigError, match="does not support TwiceTopKRouter, which does not choose its experts by a single call"
    ):
        model(torch.randn(3, 4))


class TwoNumbersTopKRouter(nn.Module):
    """A router that returns two integer tensors."""

    def forward(self, hidden):
        return hidden, hidden.long(), hidden.long()


def test_a_router_whose_experts_cannot_be_told_from_other_numbers_is_refused_by_name():
    model = nn.Sequential(TwoNumbersTopKRouter())
    vars(model)["_no_split_modules"] = ["TwoNumbersTopKRouter"]
    ExpertRecorder(model, "model.path=X")
    with torch.no_grad(), pytest.raises(ConfigError, match="TwoNumbersTopKRouter, which returns 2 integer tensors"):
        model(torch.randn(3, 4))


def test_a_model_without_routers_is_refused_before_any_worker_starts(start):
    with pytest.raises(ConfigError, match="needs a mixture-of-experts model such as Qwen3-MoE"):
        check(compose([f"model.path={start}", "profile=demo", "actor.router_replay=engine", "rollout=hf"])[0])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rollout=stored", "rollout.run=outputs/RUN"], "with rollout.engine=stored: stored answers have no experts"),
        (["rollout=vllm", "rollout.stop=[x]"], "vLLM returns no experts for an answer that a stop string ends"),
        (["rollout=hf", "data=higher_lower"], "the engine records experts only for answers of one turn"),
        (["rollout=hf", "model.compile=true"], "a compiled layer cannot replay experts"),
        (["actor.router_replay=actor", "algorithm.old_log_probs=rollout"], "no forward pass before the update"),
        (
            ["actor.router_replay=actor", "trainer.prompts_per_minibatch=64"],
            "with one optimizer step per training step",
        ),
    ],
)
def test_settings_that_exclude_replay_are_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        compose(["actor.router_replay=engine", *overrides])
