"""Tests of top-p, top-k and stop strings in vLLM, which must follow the same rules as in the transformers engine."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from engines import answers, buckets, requests
from ranks import built, load
from transformers import AutoModelForCausalLM

from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from workers.cluster.processes import Role
from workers.placement import ENGINE, spawner
from workers.rollout.engines.hf.engine import distribution_filters
from workers.rollout.messages import Completion, Request
from workers.rollout.stop_strings import StopStrings, text_before
from workers.rollout.worker import RolloutWorker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here", "process_group")]
PROMPT = char_tokenizer()("2299907=")["input_ids"]


@contextlib.asynccontextmanager
async def engine_of(path: str, *overrides: str, stop: list[str] | None = None) -> AsyncIterator[Role[RolloutWorker]]:
    """Start an engine, and end its process afterwards."""
    config, _ = compose(list(overrides))
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop=stop or []))
    process = spawner(config, "rollout replica", 1)(0)
    try:
        yield (await built([process], "rollout", ENGINE, config, path, [EOS_ID], threaded=True))[0]
    finally:
        process.kill()


def asks(count: int, **kwargs) -> list[Request]:
    return requests(PROMPT, count, **kwargs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(ray_here, start):
    """Return answers that were generated without stop strings."""
    async with engine_of(start) as engine:
        return await answers(engine, asks(48))


def common_pair(found: dict[tuple[int, int], Completion]) -> str:
    """Return a pair of adjacent characters that occurs in several answers, but not in all."""
    pairs = Counter(pair for a in found.values() for pair in {a.text[at : at + 2] for at in range(1, len(a.text) - 1)})
    return next(pair for pair, count in pairs.most_common() if count < len(found))


@pytest.mark.broad
@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (0.9, 4), (1.0, 1)])
async def test_vllm_samples_and_weighs_what_the_transformers_engine_keeps(start, top_p, top_k):
    """Each sampled token passes the filters top-p and top-k, and its log-prob is renormalised over the kept tokens.

    The filters do not apply to greedy sampling.
    """
    settings, model = [f"rollout.top_p={top_p}", f"rollout.top_k={top_k}"], AutoModelForCausalLM.from_pretrained(start)
    sampled, greedy = asks(16, temperature=1.2), asks(1, temperature=0.0, uid=1)
    async with engine_of(start, *settings) as engine:
        got = await answers(engine, [*sampled, *greedy])
    filters, dropped = distribution_filters(compose(settings)[0].rollout), 0
    for request in [*sampled, *greedy]:
        answer = got[request.key]
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt_ids, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        kept = logits / (request.temperature or 1.0)
        for keep in filters if request.temperature else []:
            kept = keep(None, kept)
        dropped += int(kept.isinf().sum())
        expected = kept.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.log_probs), expected, atol=1e-3)
        if not request.temperature:
            assert list(answer.token_ids) == logits.argmax(-1).tolist()
        if top_k == 1:
            assert answer.token_ids == got[1, 0].token_ids
    assert dropped


@pytest.mark.parametrize("process", ["inprocess", pytest.param("async", marks=pytest.mark.broad)])
async def test_an_answer_is_exactly_the_tokens_up_to_the_one_that_completes_a_stop_string(start, plain, process):
    stop, model = common_pair(plain), AutoModelForCausalLM.from_pretrained(start)
    search, cut, split = StopStrings([stop], char_tokenizer()), 0, 0
    async with engine_of(start, f"rollout.vllm.process={process}", stop=[stop]) as engine:
        stopped = await answers(engine, asks(48))
        for key, full in plain.items():
            ends = (length for length in range(1, len(full.token_ids) + 1) if search.end(full.token_ids[:length]))
            length = next(ends, None)
            cut += length is not None and length < len(full.token_ids)
            assert stopped[key].token_ids == full.token_ids[:length]
            assert stopped[key].log_probs == pytest.approx(full.log_probs[:length], abs=1e-4)
            assert stopped[key].finish_reason == ("stop" if length is not None else full.finish_reason)
            assert stopped[key].text == text_before(full.text, [stop])
            assert set(stopped[key].versions) == {0}
        for version in range(1, 9):  # the sync loads the same weights again, so the tokens do not change
            await engine.call(RolloutWorker.submit, asks(48))
            await load(engine, buckets(model, version))
            again = await answers(engine, [], count=48)
            for key, answer in again.items():
                assert answer.token_ids == stopped[key].token_ids
                assert answer.finish_reason == stopped[key].finish_reason
                assert list(answer.versions) == sorted(answer.versions)
                assert set(answer.versions) <= {version - 1, version}
                split += answer.finish_reason == "stop" and len(set(answer.versions)) > 1
    assert 0 < cut < len(plain)
    assert split
