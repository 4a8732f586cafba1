"""Tests of reward models without weights: the text that a reward model reads, and the use of its scores."""

import asyncio
import random

import pytest
import torch

from rltrain.base.errors import ConfigError, RewardError
from rltrain.batch.data_proto import DataProto
from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.settings.reward_config import RewardModelConfig
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from rltrain.trajectories.batch_building import to_batch
from rltrain.trajectories.collector import Collector
from rltrain.trajectories.prompt_groups import Group, GroupState, trajectory_of
from rltrain.trajectories.reward_models import RewardModel, with_model_scores
from tests.collecting import collect, collect_with_metrics
from tests.fakes import Waiting
from tests.reward_configs import reward_function
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion
from workers.training.reward_model import RewardModelWorker

FUNCTION = reward_function("exact", "x:y")
CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


class Ranks:
    """A fake worker group that scores each row by a function of the row's text, and records all texts."""

    def __init__(self, score=len):
        self.score, self.read, self.budgets = score, [], []

    async def rows(self, method, batch, columns, *, max_tokens):
        assert method is RewardModelWorker.compute_scores
        assert tuple(columns) == ("prompts", "responses", "context_starts", "prompt_images", "image_files")
        assert batch.lengths("responses").sum() == 0
        texts = [bytes(batch[n].values("prompts").tolist()).decode() for n in range(len(batch))]
        self.read.append(texts)
        self.budgets.append(max_tokens)
        return DataProto.from_dict({"model_scores": torch.tensor([float(self.score(text)) for text in texts])})


def model(ranks=None, *, number=1, longest=None, template=None, chat_template=None, weight=0.5, gate=False):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = chat_template
    config = RewardModelConfig(
        name=f"rm{number}", path="/m", weight=weight, gate=gate, outcome=True, success=None, prompt_template=template
    )
    return RewardModel(
        config, ranks or Ranks(), number=number, tokenizer=tokenizer, longest=longest, pad=0, max_tokens=8
    )  # fmt: skip


async def read_by(made: RewardModel, prompt: Prompt, response: str) -> str:
    await made.scores([(prompt, response)])
    return made.group.read[-1][0]


def group(uid, scores, texts, failed=()) -> Group:
    answers = {n: Completion((uid, n), [1], [-0.5], "stop", [0], text) for n, text in enumerate(texts)}
    trajectories = {n: trajectory_of([1], answer) for n, answer in answers.items()}
    results = {
        n: SampleScores((uid, n), (None,), True, "broke", 0) if n in failed else SampleScores((uid, n), (score,))
        for n, score in enumerate(scores)
    }
    return Group(
        uid, Prompt(uid, f"p{uid}", [1], {}), len(texts), len(texts), GroupState.READY, 0, trajectories, results
    )


# Tests of the text that a reward model reads


async def test_prompt_and_response_one_after_the_other_where_nothing_else_is_said():
    assert await read_by(model(), Prompt(0, "2+2=", [1], {}), "4") == "2+2=4"


async def test_chats_go_through_the_models_own_template_with_the_answer_as_the_last_message():
    chat = Prompt(0, "policy's own rendering", [1], {}, CHAT)
    assert await read_by(model(chat_template=TEMPLATE), chat, "yo") == "<user>hi<assistant>yo"
    assert await read_by(model(), chat, "yo") == "policy's own renderingyo"
    assert await read_by(model(chat_template=TEMPLATE), Prompt(0, "text", [1], {}), "yo") == "textyo"


async def test_a_template_of_the_config_comes_first_and_texts_with_braces_stay_as_they_are():
    made = model(template="Q: {prompt} A: {response} {x}", chat_template=TEMPLATE)
    assert await read_by(made, Prompt(0, "{response}", [1], {}, CHAT), "{prompt}") == "Q: {response} A: {prompt} {x}"


async def test_what_an_answer_spells_is_text_to_the_model_and_what_a_template_writes_is_a_token():
    read = []

    class Ids(Ranks):
        async def rows(self, method, batch, columns, *, max_tokens):
            read.extend(batch[n].values("prompts").tolist() for n in range(len(batch)))
            return await super().rows(method, batch, columns, max_tokens=max_tokens)

    chat = Prompt(0, "p", [1], {}, CHAT)
    await model(Ids(), chat_template=TEMPLATE + "<eos>").scores([(chat, "yo<eos>")])
    await model(Ids(), template="{prompt}<eos>{response}").scores([(Prompt(0, "p<pad>", [1], {}), "yo<eos>")])
    await model(Ids()).scores([(Prompt(0, "p<pad>", [1], {}), "<eos>")])
    assert read == [
        [*b"<user>hi<assistant>yo<eos>", EOS_ID], [*b"p<pad>", EOS_ID, *b"yo<eos>"], [*b"p<pad><eos>"],
    ]  # fmt: skip


async def test_equal_samples_are_computed_once_and_get_equal_scores():
    noise = random.Random(0)
    made = model(Ranks(lambda text: noise.random()))
    prompt = Prompt(0, "p", [1], {})
    scores = await made.scores([(prompt, "a"), (prompt, "b"), (prompt, "a")])
    assert made.group.read == [["pa", "pb"]]
    assert scores[0] == scores[2] != scores[1]


async def test_E10_a_row_that_the_model_cannot_read_is_refused_and_never_cut():
    made, prompt = model(longest=5), Prompt(0, "1234", [1], {})
    assert await made.scores([(prompt, "5"), (prompt, "56")]) == [
        5.0, "cannot read 6 tokens, because the model's limit is 5; lower rollout.max_response_length",
    ]  # fmt: skip
    assert made.group.read == [["12345"]]


async def test_a_row_above_the_token_budget_is_a_pass_of_its_own():
    made = model()
    await made.scores([(Prompt(0, "x" * 20, [1], {}), "")])
    await made.scores([(Prompt(0, "x", [1], {}), "")])
    assert made.group.budgets == [20, 8]


async def test_what_has_no_score_says_why():
    made = model(Ranks(lambda text: float("nan") if text == "pa" else 1.0), chat_template="{{ raise_exception('no') }}")
    prompt = Prompt(0, "p", [1], {})
    assert await made.scores([(prompt, "a"), (prompt, "b"), (Prompt(0, "", [1], {}), "")]) == [
        "gave nan", 1.0, "cannot score a text without tokens",
    ]  # fmt: skip
    (said,) = await made.scores([(Prompt(0, "p", [1], {}, CHAT), "a")])
    assert said.startswith("cannot read the sample: the chat template refuses these messages")
    assert await made.scores([]) == []


# Tests of the use of a reward model's score


async def test_scores_are_columns_behind_those_of_the_functions_weighted_and_gated_alike():
    groups = [group(1, [1.0, 0.0], ["aa", "b"]), group(0, [1.0, None], ["", "ccc"])]
    models = [model(number=1, weight=0.5), model(Ranks(lambda _: -1.0), number=2, weight=2.0, gate=True)]
    await with_model_scores(groups, models[:1])
    batch = to_batch(groups, [FUNCTION, models[0].config])
    assert batch.batch["reward_components"].nan_to_num(9).tolist() == [[1, 2], [9, 5], [1, 4], [0, 3]]
    assert batch.batch["scores"].tolist() == [2.0, 2.5, 3.0, 1.5]
    await with_model_scores(groups, models)
    assert len(models[0].group.read) == 1  # the reward model does not score samples that already have a model score
    gated = to_batch(groups, [FUNCTION, *(m.config for m in models)])
    assert gated.batch["scores"].tolist() == [-2.0] * 4


async def test_C4_a_sample_that_a_model_cannot_score_is_failed_and_counted_as_its():
    groups, made = [group(0, [1.0, 1.0, 1.0], ["a", "too long", "b"], failed=(2,))], model(longest=4)
    await with_model_scores(groups, [made, model(number=2)])
    batch = to_batch(groups, [FUNCTION, made.config, model(number=2).config])
    assert batch.batch["failed_function"].tolist() == [-1, 1, 0]
    assert batch.batch["failed"].tolist() == [False, True, True]
    assert batch.batch["reward_components"][1:].isnan().all()
    assert batch.non_tensor_batch["reward_error"].tolist() == [
        "",
        "reward model 'rm1' cannot read 10 tokens, because the model's limit is 4; lower rollout.max_response_length",
        "broke",
    ]
    assert made.group.read == [["p0a"]]  # the reward model does not score a sample whose reward functions failed


# Tests of reward models through the collector


class Engines(Waiting):
    """Fake engines that answer at once, where sample n of a prompt is "x" repeated n % 2 times."""

    def submit(self, groups):
        super().submit(request for group in groups for request in group)

    async def poll(self):
        await asyncio.sleep(0)
        found, self.waiting = self.waiting, []
        return [Completion(r.key, [5], [-1.0], "stop", [0], "x" * (r.key[1] % 2)) for r in found]


class Judges(Waiting):
    """Fake reward workers that give each sample the score 1."""

    async def poll(self):
        await asyncio.sleep(0)
        found, self.waiting = self.waiting, []
        return [SampleScores(request.key, (1.0,)) for request in found]


@pytest.fixture
def collector(tasks):
    """Return a function that makes and starts a collector."""

    def make(scored_by: RewardModel, *overrides) -> Collector:
        config, _ = compose(
            ["trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=4",
             "data.shuffle=false", "reward.models=[{name: rm1, path: /m, weight: 0.5}]", *overrides]
        )  # fmt: skip
        prompts = [Prompt(n, f"{n}", [1], {}) for n in range(20)]
        made = Collector(config, rollout=Engines(), rewards=Judges(), prompts=prompts, tasks=tasks, models=[scored_by])
        made.start()
        return made

    return make


async def test_batches_and_evaluations_have_the_models_scores(collector):
    made = collector(model())
    assert (await collect(made, 0)).batch["scores"].tolist() == [1.5, 2.0, 1.5, 2.0] * 2
    evaluated = await made.evaluate([Prompt(0, "abc", [1], {})], greedy=True)
    assert evaluated.batch["scores"].tolist() == [2.5]


async def test_a_group_is_judged_flat_by_all_components(collector):
    """The reward function gives equal scores within every group.

    The reward model gives different scores within every second group.
    """
    ranks = Ranks(lambda text: len(text) if int(text[0]) % 2 else 0)
    batch, metrics = await collect_with_metrics(collector(model(ranks), "algorithm.dynamic_sampling=4"), 0)
    assert batch.batch["uid"].tolist() == [1] * 4 + [3] * 4
    assert metrics["rollout/groups_dropped"] == 2
    assert sorted(text for texts in ranks.read for text in texts) == ["0", "0x", "1", "1x", "2", "2x", "3", "3x"]


async def test_the_greedy_baseline_is_scored_too(collector):
    batch = await collect(collector(model(), "algorithm=remax"), 0)
    assert batch.batch["baseline_rewards"].tolist() == [1.5] * 8


async def test_too_many_rows_that_a_model_cannot_read_stop_the_run(collector):
    with pytest.raises(RewardError, match=r"50% of the rewards failed.* reward model 'rm1' cannot read 2 tokens"):
        await collect(collector(model(longest=1)), 0)


# Tests of reward models in the config


def test_a_model_is_named_by_its_directory_and_models_alone_are_enough():
    config, _ = compose(["reward.functions=[]", "reward.models=[runs/rm,{name: b, path: /x, weight: 2.0, gate: true}]"])
    first, second = config.reward.components
    assert (first.name, first.path, first.weight, first.gate, first.prompt_template) == (
        "rm",
        "runs/rm",
        1.0,
        False,
        None,
    )
    assert (second.name, second.weight, second.gate) == ("b", 2.0, True)
    assert config.roles(needs_critic=False) == ["actor", "reward_model rm", "reward_model b"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("[a/rm,b/rm]", "the name 'rm' is used more than once"),
        ("[{path: m, name: final_answer}]", "the name 'final_answer' is used more than once"),
        ("m", "reward.models=m: must be a list"),
        ("[{weight: 1.0}]", "names no model; write DIR or"),
        ("[{path: m, prompt_template: '{prompt}'}]", "has no {response}"),
    ],
)
def test_models_that_cannot_be_are_refused(models, message):
    with pytest.raises(ConfigError) as caught:
        compose([f"reward.models={models}"])
    assert message in str(caught.value)


def test_an_estimator_that_weighs_components_by_itself_gets_the_models_weights():
    from rltrain.settings.algorithm_rules import check_algorithm
    from rltrain.trajectories.token_rewards import with_all_knobs

    config, _ = compose(["algorithm=gdpo", "reward.models=[{path: m, weight: 0.25}]"])
    check_algorithm(config)
    assert with_all_knobs(config).algorithm.advantage["weights"] == [1.0, 0.25]


def test_the_plan_names_models():
    from rltrain.run.plan import Facts, plan_lines

    config, _ = compose(["reward.models=[m]", "placement.actor_ranks=2"])
    lines = "\n".join(plan_lines(config, Facts(path="p", parameters=2**30)))
    assert "scored by final_answer, m" in lines
    assert "2 training ranks (actor, reward_model m)" in lines


def test_what_is_no_reward_model_is_refused_before_anything_starts(tmp_path):
    import json

    from rltrain.data.model_directory import check_reward_model

    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("")

    def refused(**config) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError) as caught:
            check_reward_model(str(tmp_path), "key")
        return str(caught.value)

    assert "has the architecture Qwen2ForCausalLM" in refused(architectures=["Qwen2ForCausalLM"])
    assert "has 2 outputs" in refused(architectures=["Qwen2ForSequenceClassification"])
    three = {"0": "a", "1": "b", "2": "c"}
    assert "has 3 outputs" in refused(architectures=["Qwen2ForSequenceClassification"], id2label=three)
    with pytest.raises(ConfigError, match="key=/no: no such directory"):
        check_reward_model("/no", "key")
    good = {"architectures": ["XForSequenceClassification"], "id2label": {"0": "a"}}
    assert f"key={tmp_path}: config.json does not load" in refused(**good, model_type="unknown")
    mixed = {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    assert "has layers of the kind conv, and" in refused(**good, **mixed)


def test_a_reward_model_is_accepted_as_a_whole_and_refused_without_its_head(tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import MistralConfig, MistralForSequenceClassification

    from rltrain.data.model_directory import check_reward_model, longest_row

    config = MistralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=16, num_labels=1,
    )  # fmt: skip
    MistralForSequenceClassification(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("")
    check_reward_model(str(tmp_path), "key")
    assert longest_row(tmp_path) == 64
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^key={tmp_path}: its weights lack score\.weight, so they do not match"):
        check_reward_model(str(tmp_path), "key")
