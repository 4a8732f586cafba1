"""Tests of the SGLang engine against a stand-in with SGLang's interface. No test runs SGLang itself."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.base.errors import ConfigError, SyncError
from rltrain.settings.compose import compose
from rltrain.settings.engine_description import engine_description
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from workers.rollout.messages import Request
from workers.sync.buckets import join
from workers.sync.sender import Sender

STAND_INS = Path(__file__).parents[3] / "stand_ins"
RUN = ["rollout=sglang"]
PROMPTS = [char_tokenizer()(text)["input_ids"] for text in ("2299907=", "0123456=")]


@pytest.fixture
def engines(monkeypatch):
    """Import the engine with the stand-in in place of SGLang."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in ("sglang", "workers.rollout.engines.sglang.engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("workers.rollout.engines.sglang.engine")
    for name in ("sglang", "workers.rollout.engines.sglang.engine"):
        sys.modules.pop(name, None)


@pytest.fixture
def made(engines, start):
    created = []

    def make(*overrides):
        created.append(engines.make(compose([*RUN, *overrides])[0], start, [EOS_ID]))
        return created[-1]

    yield make
    for engine in created:
        engine.abort()
        engine.loop.close()


def requests(count, *, temperature=0.7, first=0):
    return [Request((n % 2, n), PROMPTS[n % 2], temperature, 12 + n, 1000 + n) for n in range(first, first + count)]


def answers(engine):
    found = []
    while engine.busy:
        found += engine.step()
    return {answer.key: answer for answer in found}


def load(engine, bucket):
    engine.start_load()
    engine.load_bucket(bucket)
    engine.finish_load(bucket.version)


def test_answers_have_the_tokens_log_probs_and_reasons_that_sglang_returned(made, start):
    engine = made()
    asked = requests(6)
    engine.add(asked[:4])
    first = engine.step()
    engine.add(asked[4:])
    found = answers(engine) | {answer.key: answer for answer in first}
    model = AutoModelForCausalLM.from_pretrained(start).eval()
    assert len(found) == 6
    for request in asked:
        answer = found[request.key]
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        log_probs = (model(ids).logits[0] / 0.7).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        expected = log_probs.gather(1, torch.tensor(list(answer.token_ids))[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(list(answer.log_probs)), expected.detach(), rtol=1e-4, atol=1e-5)
        ended = answer.token_ids[-1] == EOS_ID
        assert answer.finish_reason == ("stop" if ended else "length")
        assert ended or len(answer.token_ids) == request.max_tokens
        assert set(answer.versions) == {0}


def test_each_request_is_answered_exactly_once(made):
    engine = made()
    engine.add(requests(4))
    found = []
    while engine.busy:
        found += engine.step()
    assert sorted(answer.key for answer in found) == sorted(request.key for request in requests(4))


def test_new_weights_are_used_and_named_in_later_answers(made, start):
    engine = made()
    model = AutoModelForCausalLM.from_pretrained(start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    sender = Sender(model, version=3, dtype="float32", check=True)
    (bucket,) = [join([sender.write(number, None)]) for number in range(len(sender.layout))]
    load(engine, bucket)
    assert engine.engine.log[-1] == "flush_cache"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(dict(engine.engine.model.named_parameters())[name], parameter)
    engine.add(requests(2))
    assert {version for answer in answers(engine).values() for version in answer.versions} == {3}
    engine.engine.broken = "model.norm.weight"
    with pytest.raises(SyncError, match=r"SGLang could not load .* tensors, .* \(unknown parameter model\.norm"):
        load(engine, bucket)
    # After a failed weight sync, SGLang's weight update is still open. The next sync ends it first.
    engine.engine.broken = ""
    load(engine, bucket)
    assert not engine.engine.session


def test_aborted_requests_are_never_answered(made):
    engine = made()
    engine.add(requests(3))
    engine.abort()
    assert not engine.busy
    assert engine.engine.aborted == 1
    engine.add(requests(2, first=5))
    assert sorted(answers(engine)) == sorted(request.key for request in requests(2, first=5))


def test_an_engine_that_shares_its_gpu_sleeps_and_wakes_in_order(made):
    engine = made()
    assert engine.engine.arguments["enable_memory_saver"]
    assert engine.sleep()
    assert engine.engine.log == ["flush_cache", "release weights kv_cache"]
    engine.engine.log.clear()
    engine.start_load()
    engine.finish_load(1)
    assert engine.engine.log == ["resume weights", "resume kv_cache", "flush_cache"]
    engine.close()
    assert engine.engine.log[-1] == "shutdown"


def test_options_become_arguments(made):
    engine = made("rollout.engine_options={shards: 2, gpu_share: 0.4, arguments: {disable_cuda_graph: true}}")
    found = engine.engine.arguments
    assert (found["tp_size"], found["mem_fraction_static"], found["disable_cuda_graph"]) == (2, 0.4, True)
    assert found["context_length"] == 32 + 7


def test_the_longest_prompt_gets_the_longest_answer(made):
    engine = made("rollout.max_response_length=4")
    engine.add([Request((0, 0), PROMPTS[0] * 2, 0.0, 4, 0)])
    (answer,) = answers(engine).values()
    assert len(answer.token_ids) == 4 or answer.token_ids[-1] == EOS_ID


def test_an_answer_that_sglang_aborts_is_an_error(made):
    engine = made()
    engine.add([Request((0, 0), PROMPTS[0] * 9, 1.0, 4, 0)])
    with pytest.raises(RuntimeError, match=r"SGLang did not finish the answer to request \(0, 0\).*Input is too long"):
        answers(engine)


def test_an_engine_that_does_not_start_says_why(made, engines, monkeypatch):
    with pytest.raises(ConfigError, match=r"SGLang does not start .*Unexpected keyword argument 'speed'"):
        made("rollout.engine_options={arguments: {speed: 2}}")
    monkeypatch.setattr(engines.sglang, "__version__", "0.6.0")
    with pytest.raises(ConfigError, match=r"the engine needs SGLang 0\.5\.23, and 0\.6\.0 is installed"):
        made()


REFUSED = {
    "rollout.verify_sync=true": "the engine cannot check that SGLang computes with new weights",
    "rollout.top_p=0.9": "SGLang returns log-probs of the distribution before tokens are left out",
    "rollout.stop=[a]": "stop strings are not supported",
    "trainer.max_staleness=1": "answers cannot continue after a weight sync",
    "trainer.deterministic=true": "use rollout=hf",
    "rollout.engine_options={gpu_share: 2}": "must be a number between 0 and 1",
    "rollout.engine_options={gpu_share: much}": "must be a number between 0 and 1",
    "rollout.engine_options={arguments: 3}": "must be a mapping from names to values",
    "rollout.engine_options={arguments: {tp_size: 2}}": "arguments.tp_size: the engine sets this argument itself",
}


@pytest.mark.parametrize("override", REFUSED)
def test_settings_that_the_engine_does_not_support_are_refused(override, monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS))
    check = engine_description("sglang").check
    check(compose(RUN)[0])
    with pytest.raises(ConfigError, match=REFUSED[override]):
        check(compose([*RUN, override])[0])


@pytest.mark.parametrize("value", ["two", "0", "1.9", "true"])
def test_a_number_of_shards_that_is_no_number_is_refused(value, monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS))
    with pytest.raises(ConfigError, match=r"shards=.*must be a whole number of at least 1"):
        engine_description("sglang").check(compose([*RUN, f"rollout.engine_options={{shards: {value}}}"])[0])


def test_without_sglang_the_engine_is_refused():
    with pytest.raises(ConfigError, match="SGLang is not installed"):
        engine_description("sglang").check(compose(RUN)[0])
