"""Tests of the vLLM engine in a worker process: sampling, weight syncs, dying processes and refused models."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import ray
import torch
from engines import TOLERANCE, answers, buckets, check_each_token, model_log_probs, new_engine, requests, shaken
from ranks import load, on
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from rltrain.base.errors import ConfigError, SyncError, WorkerLost
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from workers.cluster.leftovers import shared_files
from workers.cluster.processes import Role
from workers.rollout.messages import Completion, Request
from workers.rollout.worker import RolloutWorker
from workers.sync.buckets import Bucket

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here", "process_group")]
WEIGHTS = "model.safetensors"
PROMPT = char_tokenizer()("2299907=")["input_ids"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(ray_here, start, tmp_path_factory):
    """Start an engine whose model directory sets default sampling parameters, which the engine must ignore."""
    path = tmp_path_factory.mktemp("opinionated") / "model"
    shutil.copytree(start, path)
    opinion = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.7, "eos_token_id": EOS_ID}
    (path / "generation_config.json").write_text(json.dumps(opinion))
    return await new_engine(str(path))


def asks(count: int, *, prompt=PROMPT, **kwargs) -> list[Request]:
    return requests(prompt, count, **kwargs)


def disguised(sent: list[Bucket], name: str, factor: float) -> list[Bucket]:
    """Change the probe of one matrix, so that the sender claims a different matrix product for equal weights."""
    for bucket in sent:
        bucket.pieces = [
            replace(p, probe=p.probe + factor * abs(p.probe).max()) if p.name == name else p for p in bucket.pieces
        ]
    return sent


def resolved(engine: Role, request: Request) -> dict[str, Any]:
    """Return the sampling parameters that vLLM uses for a request after applying all its defaults."""

    def of(host) -> dict[str, Any]:
        from workers.rollout.engines.vllm.engine import sampling_params  # only the engine's process imports vLLM

        made = host.roles["rollout"].engine
        prompt = {"prompt_token_ids": request.prompt_ids}
        params = sampling_params(request, made.stop_ids, made.config)
        processor = made.engine.input_processor
        found = processor.process_inputs("settings", prompt, params, supported_tasks=("generate",)).params
        return {name: getattr(found, name) for name in found.__struct_fields__}

    return ray.get(engine.process.actor.__ray_call__.remote(of))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_E1_engine_log_probs_are_log_softmax_of_logits_over_temperature(engine, start, temperature):
    model = AutoModelForCausalLM.from_pretrained(start)
    await load(engine, buckets(model))
    asked = asks(16, temperature=temperature)
    got = await answers(engine, asked)
    for request in asked:
        expected = model_log_probs(model, request, got[request.key])
        assert torch.allclose(torch.tensor(got[request.key].log_probs).double(), expected, atol=TOLERANCE)


async def test_E2_the_engine_resolved_the_configured_sampling_and_nothing_of_the_models_own(engine):
    settings = resolved(engine, Request((0, 0), PROMPT, 0.7, 5, 42))
    expected = {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "max_tokens": 5, "min_tokens": 0, "seed": 42, "stop_token_ids": [EOS_ID],
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected


async def test_E3_B4_ids_go_in_and_out_as_ids_and_only_a_generated_end_token_ends_an_answer(engine):
    odd = [0, EOS_ID, 7, 127, 50]  # the tokenizer encodes no text as these token ids
    got = await answers(engine, asks(64, prompt=odd))
    assert all(len(a.token_ids) == len(a.log_probs) == len(a.versions) for a in got.values())
    for answer in got.values():
        ended = answer.token_ids[-1] == EOS_ID
        assert answer.finish_reason == ("stop" if ended else "length")
        assert EOS_ID not in answer.token_ids[:-1]
        assert len(answer.token_ids) == 16 or ended
    assert {a.finish_reason for a in got.values()} == {"stop", "length"}


async def test_E5_a_bucket_with_one_corrupted_byte_is_refused(engine, start):
    bad = buckets(shaken(start, 0.01))
    bad[0].data = bad[0].data.clone()
    bad[0].data[1234] ^= 0x40
    with pytest.raises(SyncError, match=r"the bytes of 'model.embed_tokens.weight' are not those"):
        await load(engine, bad)


async def test_E5_a_head_that_keeps_its_old_weights_is_caught(ray_here, start):
    """On a CPU, vLLM's own reload of weights leaves old weights in an output head that is tied to the embedding.

    If rltrain does not repack the head after a reload, the check of the weights must fail.
    """
    victim = await new_engine(start)

    def forget_heads(host):
        from workers.rollout.engines.vllm import worker

        worker.repack_heads = lambda model: None

    await on([victim.process], forget_heads)
    with pytest.raises(SyncError, match=r"does not compute with the actor's 'lm_head.weight'"):
        await load(victim, buckets(shaken(start, 0.05)))


async def test_E5_wrong_weights_in_any_single_tensor_are_caught(engine, start):
    good = buckets(AutoModelForCausalLM.from_pretrained(start))
    names = [name for bucket in good for name in bucket.probes()]
    model = AutoModelForCausalLM.from_pretrained(start)
    assert set(names) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = good[0].aliases
    for name in names:
        if name in tied:  # a tied tensor is checked only under its first name
            continue
        bad = disguised(buckets(AutoModelForCausalLM.from_pretrained(start), version=3), name, 1e-3)
        with pytest.raises(SyncError, match="|".join([name, *(alias for alias in tied if tied[alias] == name)])):
            await load(engine, bad)
    await load(engine, good)


async def test_E6_after_a_sync_a_prompt_decodes_as_in_a_fresh_engine_with_those_weights(engine, start, tmp_path):
    new = shaken(start, 0.05, seed=5)
    new.save_pretrained(tmp_path)
    for file in Path(start).iterdir():
        if not (tmp_path / file.name).exists():
            shutil.copy(file, tmp_path)
    asked = [*asks(8, seed=3), Request((1, 0), PROMPT, 0.0, 16, 0)]
    before = await answers(engine, asked)  # the prefix cache now contains keys and values of the old weights
    await load(engine, buckets(new, version=6))
    synced, fresh = await answers(engine, asked), await answers(await new_engine(str(tmp_path)), asked)
    assert {k: a.token_ids for k, a in synced.items()} == {k: a.token_ids for k, a in fresh.items()}
    for key, answer in synced.items():
        assert torch.allclose(torch.tensor(answer.log_probs), torch.tensor(fresh[key].log_probs), atol=1e-5)
        assert set(answer.versions) == {6}
    assert any(before[key].token_ids != answer.token_ids for key, answer in synced.items())


async def with_sync_after_four_tokens(
    engine: Role[RolloutWorker], asked: list[Request], sent: list[Bucket] | None
) -> dict[tuple[int, int], Completion]:
    """Let an engine in its own process answer requests, and load new weights between two known decoding steps."""

    def scenario(host):
        engine = host.roles["rollout"].engine
        engine.add(asked)
        found = [answer for _ in range(4) for answer in engine.step()]
        if sent:
            engine.start_load()
            for bucket in sent:
                engine.load_bucket(bucket)
            engine.finish_load(sent[0].version)
        while engine.busy:
            found += engine.step()
        return {answer.key: answer for answer in found}

    # The scenario runs in the engine's own thread, which is idle.
    run = on([engine.process], lambda host: host.roles["rollout"]._run("scenario", lambda: scenario(host)))
    return (await run)[0]


async def test_E6_E7_weights_that_come_in_the_middle_of_an_answer_are_those_of_its_further_tokens(engine, start):
    """In this test, new weights arrive between two known decoding steps.

    The test checks versions, log-probs, random streams and the prefix cache.
    """
    models = {20: AutoModelForCausalLM.from_pretrained(start), 21: shaken(start, 0.05, seed=11)}
    same = AutoModelForCausalLM.from_pretrained(start)
    asked = [*asks(24, temperature=1.5, seed=8), *asks(1, temperature=0.6, uid=1)]

    async def interrupted(sent):
        await load(engine, buckets(models[20], version=20))
        return await with_sync_after_four_tokens(engine, asked, sent)

    undisturbed, with_same = await interrupted(None), await interrupted(buckets(same, version=22))
    assert {k: a.token_ids for k, a in with_same.items()} == {k: a.token_ids for k, a in undisturbed.items()}
    found = await interrupted(buckets(models[21], version=21))
    assert set(found) == {request.key for request in asked}
    assert any(found[key].token_ids != undisturbed[key].token_ids for key in found)
    for request in asked:
        answer = found[request.key]
        assert answer.token_ids[:3] == undisturbed[request.key].token_ids[:3]
        before = answer.versions.count(20)
        assert list(answer.versions) == [20] * before + [21] * (len(answer.versions) - before)
        check_each_token(models, request, answer)
    assert any(0 < answer.versions.count(20) < len(answer.versions) for answer in found.values())
    again = await answers(engine, asked)  # cached keys and values of the old weights must not be used
    for request in asked:
        assert set(again[request.key].versions) == {21}
        check_each_token(models, request, again[request.key])


@torch.no_grad()
def log_probs_with_kept_cache(models: dict[int, torch.nn.Module], request: Request, answer: Completion) -> list[float]:
    """Return the log-prob of each token of an answer under the weights of the token's version, with one KV cache."""
    cache, given, found = DynamicCache(), request.prompt_ids, []
    for token, version in zip(answer.token_ids, answer.versions, strict=True):
        logits = models[version](torch.tensor([given]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(float((logits.double() / request.temperature).log_softmax(-1)[token]))
        given = [token]
    return found


async def test_with_a_kept_cache_the_rest_of_an_answer_attends_to_keys_and_values_of_the_earlier_weights(
    ray_here, start
):
    """Keys and values of the earlier weights must not be used for requests that arrive after the sync."""
    models = {20: AutoModelForCausalLM.from_pretrained(start), 21: shaken(start, 0.05, seed=11)}
    lengths = ("rollout.max_prompt_length=40", "rollout.max_response_length=16")
    engine = await new_engine(start, "rollout.keep_kv_cache=true", "trainer.max_staleness=1", *lengths)
    prompt = PROMPT * 5  # The first 32 tokens fill a block of the prefix cache.
    asked = asks(12, temperature=1.5, seed=8, prompt=prompt)
    await load(engine, buckets(models[20], version=20))
    found, differs = await with_sync_after_four_tokens(engine, asked, buckets(models[21], version=21)), 0.0
    for request in asked:
        answer = found[request.key]
        expected = log_probs_with_kept_cache(models, request, answer)
        assert answer.log_probs == pytest.approx(expected, abs=1e-3)
        if set(answer.versions) == {20, 21}:
            recomputed = model_log_probs(models[21], request, answer)
            differs = max(differs, abs(float(recomputed[-1]) - answer.log_probs[-1]))
    assert differs > 1e-2, "a recomputed cache would give the same log-probs"
    again = await answers(engine, asked)
    for request in asked:
        assert set(again[request.key].versions) == {21}
        check_each_token(models, request, again[request.key])
    await engine.call(RolloutWorker.close)


async def test_E8_samples_have_their_own_streams_and_a_seed_reproduces_them(engine):
    first, again = await answers(engine, asks(32)), await answers(engine, asks(32))
    other = await answers(engine, asks(32, seed=1))
    texts = [tuple(a.token_ids) for a in first.values()]
    assert len(set(texts)) > 20
    assert texts == [tuple(again[key].token_ids) for key in first]
    assert sum(first[key].token_ids == other[key].token_ids for key in first) < 8


async def test_more_prompt_tokens_than_fit_one_engine_step_are_answered(engine):
    prompts = char_tokenizer()("0123456789012345")["input_ids"]
    got = await answers(engine, [r for uid in range(20) for r in asks(40, uid=uid, prompt=prompts)])
    assert len(got) == 800


async def test_two_unfinished_turns_of_one_trajectory_are_both_answered(engine):
    """A turn can be requested again while the engine still samples the same turn for a client that has died."""
    twice = [Request((0, 0, number), PROMPT, 1.0, 16, 0) for number in range(2)]
    got = await answers(engine, twice)
    assert got[0, 0, 0].token_ids == got[0, 0, 1].token_ids


async def weights_in_the_middle(engine: Role[RolloutWorker], models: dict[int, torch.nn.Module]) -> None:
    """Check that if new weights arrive during an answer, each token's log-prob is that of its version of the weights.

    The test cannot choose the token at which the new weights arrive, so the test repeats the check until an answer
    contains tokens of both versions of the weights.
    """
    first, second = (buckets(model, version=version) for version, model in models.items())
    for attempt in range(20):
        asked = asks(16, temperature=1.5, seed=attempt)
        await load(engine, first)
        await engine.call(RolloutWorker.submit, asked)
        await asyncio.sleep(0.01 * (attempt + 1))
        await load(engine, second)
        found = await answers(engine, [], count=len(asked))
        for request in asked:
            check_each_token(models, request, found[request.key])
        if any(len(set(answer.versions)) == 2 for answer in found.values()):
            return
    pytest.fail("no answer had tokens of two versions")


async def test_the_engine_in_processes_of_its_own_answers_syncs_and_checks_like_the_one_in_process(
    engine, ray_here, start
):
    """Test AsyncLLM with two tensor-parallel shards on the CPU, because runs on GPUs use AsyncLLM."""
    apart = await new_engine(start, "rollout.vllm.process=async", "rollout.vllm.tensor_parallel_size=2")
    new = shaken(start, 0.05, seed=9)
    asked = asks(8, seed=2)
    for target in (engine, apart):
        await load(target, buckets(new, version=8))
    here, there = await answers(engine, asked), await answers(apart, asked)
    assert {k: a.token_ids for k, a in here.items()} == {k: a.token_ids for k, a in there.items()}
    await weights_in_the_middle(apart, {30: new, 31: shaken(start, 0.05, seed=12)})
    bad = buckets(new, version=9)
    disguised(bad, "model.layers.1.self_attn.k_proj.weight", 1.0)
    with pytest.raises(SyncError, match=r"k_proj"):
        await load(apart, bad)
    family = psutil.Process((await on([apart.process], lambda host: os.getpid()))[0]).children(True)
    # The processes' shared-memory files have no names, so nothing is left behind however the processes end.
    assert shared_by(family, "psm_", " (deleted)")
    if "avx512" in Path("/proc/cpuinfo").read_text():  # vLLM's shards share memory of their own only with AVX-512.
        assert shared_by(family, "vllm_dist_", " (deleted)")
    assert shared_files([process.pid for process in family]) == set()
    next(process for process in family if process.cmdline()[0] == "VLLM::EngineCore").kill()
    with pytest.raises(WorkerLost, match=r"lost its engine: VLLM::EngineCore \(pid \d+\) is gone"):
        await load(apart, buckets(new, version=10))
    ray.kill(apart.process.actor)


def test_a_call_that_fails_because_a_process_of_the_engine_died_says_so(monkeypatch):
    """Until vLLM notices that a process died, vLLM's error message says only that a call of pause_scheduler failed."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from workers.rollout.engines.vllm.engine import Family

    with subprocess.Popen(["sleep", "1000"]) as worker:
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [psutil.Process(worker.pid)])
        while not psutil.Process(worker.pid).cmdline():  # The kernel sets the command line shortly after the start.
            time.sleep(0.001)
        family, raised = Family(), RuntimeError("Executor failed.")
        assert family.reason(raised) is raised
        assert str(family.reason(EngineDeadError())) == "lost its engine: the core of vLLM ended"
        worker.kill()
        reason = family.reason(raised)
    assert isinstance(reason, WorkerLost)
    assert str(reason).startswith(f"lost its engine: sleep 1000 (pid {worker.pid}) is gone")


def shared_by(processes: list[psutil.Process], prefix: str, suffix: str) -> list[str]:
    """Return the memory mappings of `processes` whose shared-memory file names have the given prefix and suffix."""
    maps = [line for process in processes for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    return [line for line in maps if f"/dev/shm/{prefix}" in line and line.endswith(suffix)]


# Tests of models that the engine refuses


async def test_weights_that_lack_a_tensor_or_have_names_that_vllm_does_not_know_are_refused_in_one_line(
    start, tmp_path
):
    tensors = load_file(f"{start}/model.safetensors")
    lacking, bare = (shutil.copytree(start, tmp_path / name) for name in ("lacking", "bare"))
    save_file({name: tensors[name] for name in tensors if "layers.1.mlp.down" not in name}, lacking / WEIGHTS)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, bare / WEIGHTS)
    with pytest.raises(ConfigError, match=rf"^model.path={lacking}: its weights lack model.layers.1.mlp.down_proj.wei"):
        await new_engine(str(lacking))  # vLLM alone would load the model without an error
    AutoModelForCausalLM.from_pretrained(bare)  # transformers also accepts tensor names without "model."
    with pytest.raises(
        ConfigError, match=rf"^model.path={bare}: vLLM does not start with this model \(ValueError: .*hf$"
    ):
        await new_engine(str(bare))
