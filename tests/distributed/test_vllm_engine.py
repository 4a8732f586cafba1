"""vLLM behind the engine interface, in a process of its own as in a run: sections E and B of the invariants."""

import json
import shutil
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rltrain.compose import compose
from rltrain.errors import SyncError
from rltrain.prompt_groups import stream_seed
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from workers.fsdp import tied_names
from workers.group import RayHosts
from workers.placement import build, ray_hosts
from workers.rollout.messages import Completion, Request
from workers.weight_sync import Bucket, buckets_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here", "process_group")]
PROMPT = char_tokenizer()("2299907=")["input_ids"]


def engine(path: str, *overrides: str) -> RayHosts:
    config, _ = compose(list(overrides))
    hosts = ray_hosts(config, 1, gpus=1, concurrency=8)
    hosts.wait(build(hosts, "rollout", "workers.rollout.worker:RolloutWorker", config, path, [EOS_ID]))
    return hosts


@pytest.fixture(scope="module")
def hosts(ray_here, start, tmp_path_factory):
    """An engine whose model directory asks for a sampling of its own, which must not be followed (E2)."""
    path = tmp_path_factory.mktemp("opinionated") / "model"
    shutil.copytree(start, path)
    opinion = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.7, "eos_token_id": EOS_ID}
    (path / "generation_config.json").write_text(json.dumps(opinion))
    return engine(str(path))


def answers(hosts: RayHosts, requests: list[Request]) -> dict[tuple[int, int], Completion]:
    hosts.call("rollout", "submit", [(requests,)])
    found: dict[tuple[int, int], Completion] = {}
    while len(found) < len(requests):
        found |= {answer.key: answer for answer in hosts.call("rollout", "poll", [(5.0,)])[0]}
    return found


def requests(count: int, *, temperature: float = 1.0, seed: int = 0, uid: int = 0, prompt=PROMPT) -> list[Request]:
    return [Request((uid, n), prompt, temperature, 16, stream_seed(seed, uid, n)) for n in range(count)]


def buckets(model: torch.nn.Module, version: int = 1) -> list[Bucket]:
    named = ((name, p.detach()) for name, p in model.named_parameters())
    made = buckets_of(named, aliases=tied_names(model), version=version, dtype="float32", check=True)
    assert made is not None
    return made


def shaken(start: str, scale: float, seed: int = 0) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(start)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return model


def trainer_log_probs(model: torch.nn.Module, request: Request, answer: Completion) -> torch.Tensor:
    ids = torch.tensor([request.prompt_ids + answer.token_ids])
    with torch.no_grad():
        log_softmax = (model(ids).logits[0].double() / request.temperature).log_softmax(-1)
    predicting = log_softmax[len(request.prompt_ids) - 1 : -1]
    return predicting.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_E1_engine_log_probs_are_log_softmax_of_logits_over_temperature(hosts, start, temperature):
    model = AutoModelForCausalLM.from_pretrained(start)
    hosts.call("rollout", "load", [(buckets(model), 1)])
    asked = requests(16, temperature=temperature)
    got = answers(hosts, asked)
    for request in asked:
        expected = trainer_log_probs(model, request, got[request.key])
        assert torch.allclose(torch.tensor(got[request.key].log_probs).double(), expected, atol=1e-4)


def test_E2_the_engine_resolved_the_configured_sampling_and_nothing_of_the_models_own(hosts):
    settings = hosts.call("rollout", "settings", [(Request((0, 0), PROMPT, 0.7, 5, 42),)])[0]
    expected = {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "max_tokens": 5, "min_tokens": 0, "seed": 42, "stop_token_ids": [EOS_ID],
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected


def test_E3_B4_ids_go_in_and_out_as_ids_and_only_a_generated_end_token_ends_an_answer(hosts):
    odd = [0, EOS_ID, 7, 127, 50]  # ids that no text encodes to
    got = answers(hosts, requests(64, prompt=odd))
    assert all(len(a.token_ids) == len(a.log_probs) == len(a.versions) for a in got.values())
    for answer in got.values():
        ended = answer.token_ids[-1] == EOS_ID
        assert answer.finish_reason == ("stop" if ended else "length")
        assert EOS_ID not in answer.token_ids[:-1]
        assert len(answer.token_ids) == 16 or ended
    assert {a.finish_reason for a in got.values()} == {"stop", "length"}


def test_E5_a_bucket_with_one_corrupted_byte_is_refused(hosts, start):
    bad = buckets(shaken(start, 0.01))
    bad[0].data = bad[0].data.copy()
    bad[0].data[1234] ^= 0x40
    with pytest.raises(SyncError, match=r"the bytes of 'model.embed_tokens.weight' are not those"):
        hosts.call("rollout", "load", [(bad, 7)])


def test_E5_a_head_that_keeps_its_old_weights_is_caught(ray_here, start):
    """vLLM's own reload leaves a tied head stale on CPU; without our second step the check must see it."""
    victim = engine(start)

    def forget_heads(host):
        from workers.rollout import vllm_worker

        vllm_worker.repack_heads = lambda model: None

    ray.get(victim.actors[0].__ray_call__.remote(forget_heads))
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'lm_head.weight'"):
        victim.call("rollout", "load", [(buckets(shaken(start, 0.05)), 2)])


def test_E5_wrong_weights_in_any_single_tensor_are_caught(hosts, start):
    good = buckets(AutoModelForCausalLM.from_pretrained(start))
    names = list(good[0].probes)
    model = AutoModelForCausalLM.from_pretrained(start)
    assert set(names) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in names:
        bad = buckets(AutoModelForCausalLM.from_pretrained(start), version=3)
        bad[0].probes[name] = bad[0].probes[name] + 1e-3 * abs(bad[0].probes[name]).max()
        with pytest.raises(SyncError, match=name):
            hosts.call("rollout", "load", [(bad, 3)])
    hosts.call("rollout", "load", [(good, 4)])


def test_E6_after_a_sync_a_prompt_decodes_as_in_a_fresh_engine_with_those_weights(hosts, start, tmp_path):
    new = shaken(start, 0.05, seed=5)
    new.save_pretrained(tmp_path)
    for file in Path(start).iterdir():
        if not (tmp_path / file.name).exists():
            shutil.copy(file, tmp_path)
    asked = [*requests(8, seed=3), Request((1, 0), PROMPT, 0.0, 16, 0)]
    before = answers(hosts, asked)  # fills the prefix cache with the old weights' keys and values
    hosts.call("rollout", "load", [(buckets(new, version=6), 6)])
    synced, fresh = answers(hosts, asked), answers(engine(str(tmp_path)), asked)
    assert {k: a.token_ids for k, a in synced.items()} == {k: a.token_ids for k, a in fresh.items()}
    for key, answer in synced.items():
        assert torch.allclose(torch.tensor(answer.log_probs), torch.tensor(fresh[key].log_probs), atol=1e-5)
        assert set(answer.versions) == {6}
    assert any(before[key].token_ids != answer.token_ids for key, answer in synced.items())


def test_E8_samples_have_their_own_streams_and_a_seed_reproduces_them(hosts):
    first, again = answers(hosts, requests(32)), answers(hosts, requests(32))
    other = answers(hosts, requests(32, seed=1))
    texts = [tuple(a.token_ids) for a in first.values()]
    assert len(set(texts)) > 20
    assert texts == [tuple(again[key].token_ids) for key in first]
    assert sum(first[key].token_ids == other[key].token_ids for key in first) < 8


def test_more_prompt_tokens_than_fit_one_engine_step_are_answered(hosts):
    prompts = char_tokenizer()("0123456789012345")["input_ids"]
    got = answers(hosts, [r for uid in range(20) for r in requests(40, uid=uid, prompt=prompts)])
    assert len(got) == 800


def test_the_engine_in_processes_of_its_own_answers_syncs_and_checks_like_the_one_in_process(hosts, ray_here, start):
    """AsyncLLM with two tensor-parallel shards: the path for GPUs, run here on the CPU."""
    apart = engine(start, "rollout.vllm.process=async", "rollout.vllm.tensor_parallel_size=2")
    new = shaken(start, 0.05, seed=9)
    asked = requests(8, seed=2)
    for target in (hosts, apart):
        target.call("rollout", "load", [(buckets(new, version=8), 8)])
    here, there = answers(hosts, asked), answers(apart, asked)
    assert {k: a.token_ids for k, a in here.items()} == {k: a.token_ids for k, a in there.items()}
    bad = buckets(new, version=9)
    bad[0].probes["model.layers.1.self_attn.k_proj.weight"] += 1.0
    with pytest.raises(SyncError, match=r"k_proj"):
        apart.call("rollout", "load", [(bad, 9)])
    apart.call("rollout", "close", [()])
