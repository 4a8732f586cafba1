"""Tests that the transformers engine's samples and log-probs are right, however requests are batched."""

import dataclasses
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.algorithms.draws import stream_draws
from rltrain.base.errors import ConfigError, SyncError
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from tests.attention_families import FAMILIES
from workers.rollout.engines.hf.engine import HFEngine, distribution_filters, make, sample
from workers.rollout.messages import Completion, Request
from workers.sync.buckets import Bucket, join
from workers.sync.sender import Sender

PROMPTS = [char_tokenizer()(text)["input_ids"] for text in ("2299907=", "1=", "99=", "0123456=")]


def engine(start: str, *overrides: str) -> HFEngine:
    return make(compose(["rollout=hf", *overrides])[0], start, [EOS_ID])


def answers(made: HFEngine, requests: list[Request]) -> dict[tuple[int, int], Completion]:
    made.add(requests)
    found: dict[tuple[int, int], Completion] = {}
    while made.busy:
        found |= {answer.key: answer for answer in made.step()}
    return found


def load(made: HFEngine, bucket: Bucket) -> None:
    made.start_load()
    made.load_bucket(bucket)
    made.finish_load(bucket.version)


def requests(count: int = 12, *, temperature: float = 1.0, seed: int = 0) -> list[Request]:
    return [Request((n % 4, n), PROMPTS[n % 4], temperature, 16, seed * 1000 + n) for n in range(count)]


def alone(answers: dict[tuple[int, int], Completion]) -> list[list[int]]:
    return [answer.token_ids for _, answer in sorted(answers.items())]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_E1_E3_log_probs_are_those_of_the_tempered_softmax_for_prompts_of_any_length(start, temperature):
    model, asked = AutoModelForCausalLM.from_pretrained(start), requests(temperature=temperature)
    found = answers(engine(start), asked)
    assert set(found) == {request.key for request in asked}
    for request in asked:
        answer = found[request.key]
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        predicting = (model(ids).logits[0] / temperature).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        expected = predicting.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.log_probs), expected.detach(), atol=1e-4)
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == EOS_ID else "length")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_E1_windows_caps_and_sinks_act_in_answers_of_any_length(family, start, tmp_path):
    """The windows of 6 tokens are shorter than the prompts, and the rows of the batch have different lengths."""
    tokenizer = char_tokenizer()
    config = CONFIG_MAPPING[family](
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, eos_token_id=EOS_ID,
        initializer_range=0.5, dtype="float32", **FAMILIES[family],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, asked = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"), requests()
    found = answers(engine(str(tmp_path)), asked)
    for request in asked:
        answer = found[request.key]
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        predicting = model(ids).logits[0].log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        expected = predicting.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.log_probs), expected.detach(), atol=1e-4)


def test_E8_answers_do_not_depend_on_what_shares_their_batch_and_seeds_decide_them(start):
    asked = requests()
    together, one_by_one = answers(engine(start), asked), {}
    for request in asked:
        one_by_one |= answers(engine(start), [request])
    assert alone(together) == alone(one_by_one)
    assert alone(answers(engine(start, "rollout.max_concurrent_sequences=5"), asked)) == alone(together)
    assert alone(answers(engine(start), requests(seed=1))) != alone(together)


def test_deterministic_batches_are_whole_groups(start):
    made = engine(start, "trainer.deterministic=true")
    made.add(sorted(requests(), key=lambda request: request.key))
    made.step()
    assert {request.key[0] for request in made.batch.requests} == {0}


def test_E8_answers_that_join_others_under_way_are_those_of_a_batch_of_their_own(start):
    asked, made, found = requests(20), engine(start), []
    for number in range(0, 20, 5):
        made.add(asked[number : number + 5])
        found += made.step() + made.step()
    assert len(made.batch.requests) > 5, "new requests must join unfinished ones"
    while made.busy:
        found += made.step()
    assert alone({answer.key: answer for answer in found}) == alone(answers(engine(start), asked))


def test_a_prompt_is_computed_once_for_all_its_answers(start, monkeypatch):
    made, rows = engine(start), []
    forward = made.model.forward
    monkeypatch.setattr(made.model, "forward", lambda **kw: (rows.append(len(kw["input_ids"])), forward(**kw))[1])
    made.add(requests())
    made.step()
    made.step()
    assert rows == [4, 12]


def test_deterministic_answers_are_bitwise_the_same_whatever_else_is_asked(start):
    made = engine(start, "trainer.deterministic=true")
    asked = sorted(requests(), key=lambda request: request.key)
    together = answers(made, asked)
    for uid in (2, 0):
        own = answers(made, [request for request in asked if request.key[0] == uid])
        assert own == {key: answer for key, answer in together.items() if key[0] == uid}


def test_E6_after_a_sync_it_decodes_with_the_new_weights(start, process_group, tmp_path):
    model = shaken(start, 0)
    model.save_pretrained(tmp_path)
    bucket, made = bucket_of(model, 3), engine(start)
    before = answers(made, requests())
    load(made, bucket)
    after = answers(made, requests())
    fresh = answers(engine(str(tmp_path)), requests())
    assert alone(after) == alone(fresh) != alone(before)
    assert set(next(iter(after.values())).versions) == {3}
    bucket.pieces = [
        dataclasses.replace(piece, probe=piece.probe + (piece.name == "model.norm.weight")) for piece in bucket.pieces
    ]
    with pytest.raises(SyncError, match=r"model\.norm\.weight"):
        load(made, bucket)


def shaken(start: str, seed: int) -> torch.nn.Module:
    """Return a copy of the model with slightly changed weights."""
    model, generator = AutoModelForCausalLM.from_pretrained(start), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def bucket_of(model: torch.nn.Module, version: int) -> Bucket:
    sender = Sender(model, version=version, dtype="float32", check=True)
    (bucket,) = [join([sender.write(number, None)]) for number in range(len(sender.layout))]
    return bucket


@torch.no_grad()
def one_by_one(models: list[torch.nn.Module], request: Request) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probs of an answer whose token t is sampled by `models[t]` without a KV cache."""
    tokens, log_probs = [], []
    stream = stream_draws(torch.full((request.max_tokens,), request.seed), torch.arange(request.max_tokens))
    for model, uniform in zip(models, stream, strict=False):
        logits = model(torch.tensor([request.prompt_ids + tokens])).logits[0, -1].double() / request.temperature
        probabilities = logits.softmax(-1)
        tokens.append(int((probabilities.cumsum(-1) <= uniform).sum()))
        log_probs.append(float(probabilities[tokens[-1]].log()))
    return tokens, log_probs


@pytest.mark.parametrize("together", [12, 5])
def test_E6_E7_weights_that_come_in_the_middle_of_an_answer_are_those_of_its_further_tokens(
    start, process_group, together
):
    """Each token has the version and the log-prob of the weights that sampled the token.

    The random number with which a token is sampled depends on the token's position, not on the weights.
    """
    models = {0: AutoModelForCausalLM.from_pretrained(start), 3: shaken(start, 1), 4: shaken(start, 2)}
    made, asked = engine(start, f"rollout.max_concurrent_sequences={together}"), requests(temperature=1.5)
    made.add(asked)
    found = [answer for _ in range(3) for answer in made.step()]
    load(made, bucket_of(models[3], 3))
    found += [answer for _ in range(2) for answer in made.step()]
    load(made, bucket_of(models[4], 4))
    while made.busy:
        found += made.step()
    assert sorted(answer.key for answer in found) == sorted(request.key for request in asked)
    for answer in found:
        (request,) = [request for request in asked if request.key == answer.key]
        tokens, log_probs = one_by_one([models[version] for version in answer.versions], request)
        assert list(answer.token_ids) == tokens
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-4)
    expected = [0] * 3 + [3] * 2 + [4] * 11
    began = [answer for answer in found if list(answer.versions) == expected[: len(answer.versions)]]
    later = [answer for answer in found if answer not in began]
    assert len(began) == together
    assert all(list(answer.versions) == sorted(answer.versions) for answer in later)
    assert any(len(answer.versions) > 5 for answer in began)


@torch.no_grad()
def with_kept_cache(models: list[torch.nn.Module], request: Request) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probs of an answer whose token t is sampled by `models[t]`, with one KV cache."""
    tokens, log_probs, cache = [], [], DynamicCache()
    stream = stream_draws(torch.full((request.max_tokens,), request.seed), torch.arange(request.max_tokens))
    for model, uniform in zip(models, stream, strict=False):
        given = torch.tensor([tokens[-1:] or request.prompt_ids])
        logits = model(given, past_key_values=cache, use_cache=True).logits[0, -1].double() / request.temperature
        probabilities = logits.softmax(-1)
        tokens.append(int((probabilities.cumsum(-1) <= uniform).sum()))
        log_probs.append(float(probabilities[tokens[-1]].log()))
    return tokens, log_probs


def test_with_a_kept_cache_the_rest_of_an_answer_attends_to_keys_and_values_of_the_earlier_weights(
    start, process_group
):
    """Answers that start after the sync attend only to keys and values of the new weights."""
    models = {0: AutoModelForCausalLM.from_pretrained(start), 3: shaken(start, 1)}
    kept = ("rollout.keep_kv_cache=true", "trainer.max_staleness=1", "rollout.max_concurrent_sequences=6")
    made, asked = engine(start, *kept), requests(temperature=1.5)
    made.add(asked)
    found = [answer for _ in range(4) for answer in made.step()]
    load(made, bucket_of(models[3], 3))
    while made.busy:
        found += made.step()
    assert sorted(answer.key for answer in found) == sorted(request.key for request in asked)
    differs = 0.0
    for answer in found:
        (request,) = [request for request in asked if request.key == answer.key]
        weights = [models[version] for version in answer.versions]
        tokens, log_probs = with_kept_cache(weights, request)
        assert list(answer.token_ids) == tokens
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-4)
        if len(set(answer.versions)) > 1:
            differs = max(differs, abs(sum(one_by_one(weights, request)[1]) - sum(log_probs)))
    assert differs > 1e-2, "a recomputed cache would give the same log-probs"
    assert any(set(answer.versions) == {3} for answer in found)
    assert any(set(answer.versions) == {0, 3} for answer in found)


def test_E8_the_same_weights_loaded_in_the_middle_change_no_token(start, process_group):
    undisturbed, made = answers(engine(start), requests()), engine(start)
    made.add(requests())
    found = {answer.key: answer for _ in range(4) for answer in made.step()}
    load(made, bucket_of(AutoModelForCausalLM.from_pretrained(start), 1))
    while made.busy:
        found |= {answer.key: answer for answer in made.step()}
    assert alone(found) == alone(undisturbed)
    assert {tuple(sorted(set(answer.versions))) for answer in found.values()} >= {(0, 1)}


def test_E2_the_models_own_generation_config_is_not_followed(start):
    made = engine(start)
    made.model.generation_config.update(temperature=0.01, top_k=1, do_sample=False)
    assert alone(answers(made, requests())) == alone(answers(engine(start), requests()))


def test_aborted_requests_are_forgotten(start):
    made = engine(start)
    made.add(requests())
    made.step()
    made.abort()
    assert not made.busy


# Tests of the sampler


def test_frequencies_of_samples_are_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, log_probs = sample(logits.repeat(20_000, 1), torch.full((20_000,), 0.5), uniforms)
    expected = (logits / 0.5).softmax(-1)
    assert torch.allclose(tokens.bincount(minlength=4) / 20_000, expected, atol=1e-3)
    assert torch.allclose(log_probs, expected.log()[tokens], atol=1e-5)


def test_a_temperature_of_zero_takes_the_most_likely_token_with_its_log_prob_at_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 1.0]])
    tokens, log_probs = sample(logits, torch.tensor([0.0, 0.0]), torch.tensor([0.99, 0.99], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(log_probs, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_interval_give_tokens_that_have_probability(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    tokens, log_probs = sample(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.item() in (1, 2)
    assert log_probs.item() == pytest.approx(-0.6931, abs=1e-3)


def test_an_engine_must_return_as_many_log_probs_as_tokens():
    good = Completion((0, 1), [5, 6], [-1.0, -2.0], "stop", [0, 0])
    with pytest.raises(ValueError, match=r"sample \(0, 1\): 2 tokens, 1 log-probs"):
        dataclasses.replace(good, log_probs=[-1.0])


def test_a_model_whose_attention_cannot_be_exchanged_is_refused(tmp_path):
    config = BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^model.path={tmp_path}: does not load for rollout=hf \(BloomFor.+another"):
        engine(str(tmp_path))


# Tests of top-p and top-k


def kept_tokens(logits: torch.Tensor, *, top_p: float, top_k: int) -> set[int]:
    """Return the tokens that top-p and top-k keep, computed by visiting all tokens in order of falling probability."""
    probabilities, kept, total = logits.double().softmax(-1), set[int](), 0.0
    order = probabilities.argsort(descending=True).tolist()[: top_k or None]
    whole = float(probabilities[order].sum())
    for token in order:
        if total >= top_p * whole:
            break
        kept.add(token)
        total += float(probabilities[token])
    return kept


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (1.0, 3), (0.9, 4), (1.0, 1)])
def test_tokens_are_sampled_from_the_most_likely_ones_with_their_renormalised_log_probs(start, top_p, top_k):
    model, asked = AutoModelForCausalLM.from_pretrained(start), requests(temperature=1.3)
    found = answers(engine(start, f"rollout.top_p={top_p}", f"rollout.top_k={top_k}"), asked)
    sizes = set()
    for request in asked:
        answer, prompt = found[request.key], len(request.prompt_ids)
        logits = (
            model(torch.tensor([[*request.prompt_ids, *answer.token_ids]])).logits[0, prompt - 1 : -1].detach() / 1.3
        )
        for row, token, log_prob in zip(logits, answer.token_ids, answer.log_probs, strict=True):
            kept = kept_tokens(row, top_p=top_p, top_k=top_k)
            assert token in kept
            expected = row[token] - row[sorted(kept)].logsumexp(-1)
            assert log_prob == pytest.approx(float(expected), abs=1e-4)
            sizes.add(len(kept))
    assert sizes == {top_k} if top_p == 1 else len(sizes) > 1


def test_frequencies_of_restricted_samples_are_the_renormalised_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    filters = distribution_filters(compose(["rollout=hf", "rollout.top_k=3", "rollout.top_p=0.8"])[0].rollout)
    tokens, _ = sample(logits.repeat(20_000, 1), torch.ones(20_000), uniforms, filters)
    expected = torch.tensor([0.0, 1.0, torch.e, 0.0]) / (1 + torch.e)
    assert torch.allclose(tokens.bincount(minlength=4) / 20_000, expected, atol=1e-3)


def test_greedy_answers_are_the_same_with_and_without_top_p_and_top_k_and_their_log_probs_too(start):
    asked = [*requests(4, temperature=0.0), Request((9, 9), PROMPTS[0], 1.0, 16, 5)]
    plain, restricted = (
        answers(engine(start, *settings), asked) for settings in ([], ["rollout.top_p=0.3", "rollout.top_k=2"])
    )
    for request in asked[:4]:
        assert plain[request.key].token_ids == restricted[request.key].token_ids
        assert plain[request.key].log_probs == pytest.approx(restricted[request.key].log_probs, abs=1e-5)


def test_a_top_k_of_one_is_greedy(start):
    sampled = answers(engine(start, "rollout.top_k=1"), requests(4, temperature=1.5))
    assert alone(sampled) == alone(answers(engine(start), requests(4, temperature=0.0)))
    assert all(log_prob == 0 for answer in sampled.values() for log_prob in answer.log_probs)


# Tests of stop strings


def ends_of(answer: Completion, stop: str) -> int | None:
    """Return the number of tokens up to the end of the stop string, or None if the answer lacks the stop string.

    Each token is one character.
    """
    at = char_tokenizer().decode(answer.token_ids).find(stop)
    return None if at < 0 else at + len(stop)


def common_pair(found: dict[tuple[int, int], Completion]) -> str:
    """Return a pair of adjacent characters that occurs in several answers, but not in all answers."""
    texts = [char_tokenizer().decode(answer.token_ids, skip_special_tokens=True) for answer in found.values()]
    pairs = Counter(pair for text in texts for pair in {text[at : at + 2] for at in range(1, len(text) - 1)})
    return next(
        pair for pair, count in pairs.most_common() if count < len(texts) and pair.isprintable() and "\\" not in pair
    )


def check_stopped(
    stopped: dict[tuple[int, int], Completion], whole: dict[tuple[int, int], Completion], stop: str
) -> None:
    cut = 0
    for key, full in whole.items():
        answer, length = stopped[key], ends_of(full, stop)
        cut += length is not None and length < len(full.token_ids)
        assert answer.token_ids == full.token_ids[:length]
        assert answer.log_probs == pytest.approx(full.log_probs[:length], abs=1e-5)
        assert answer.versions == full.versions[:length]
        assert answer.finish_reason == ("stop" if length is not None else full.finish_reason)
    assert 0 < cut < len(whole)


def test_an_answer_is_exactly_the_tokens_up_to_the_one_that_completes_a_stop_string(start):
    whole = answers(engine(start), requests(24))
    stop = common_pair(whole)
    made = make(with_stop(stop), start, [EOS_ID])
    check_stopped(answers(made, requests(24)), whole, stop)


def with_stop(stop: str) -> Config:
    config = compose(["rollout=hf"])[0]
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop=[stop]))


def test_a_stop_string_with_one_part_before_a_weight_sync_and_the_other_after_it_ends_the_answer(start, process_group):
    whole = answers(engine(start), requests(24))
    stop, model = common_pair(whole), AutoModelForCausalLM.from_pretrained(start)
    split = sorted({end - 1 for answer in whole.values() if (end := ends_of(answer, stop)) is not None})
    made, plain = make(with_stop(stop), start, [EOS_ID]), engine(start)
    for version, steps in enumerate(split[:3], start=1):
        found = []
        for one in (made, plain):
            one.add(requests(24))
            done = [answer for _ in range(steps) for answer in one.step()]
            load(one, bucket_of(model, version))
            while one.busy:
                done += one.step()
            found.append({answer.key: answer for answer in done})
        check_stopped(*found, stop)


def test_an_answer_whose_last_allowed_token_completes_a_stop_string_has_stopped(start):
    whole = answers(engine(start), requests(24))
    stop = common_pair(whole)
    request, answer = next((r, whole[r.key]) for r in requests(24) if ends_of(whole[r.key], stop))
    short = dataclasses.replace(request, max_tokens=ends_of(answer, stop))
    made = make(with_stop(stop), start, [EOS_ID])
    assert [a.finish_reason for a in answers(made, [short]).values()] == ["stop"]
    assert [a.finish_reason for a in answers(engine(start), [short]).values()] == ["length"]
