"""Tests vLLM on a GPU together with the trainer: log-probs, weight syncs, sleeping and waking up.

The vLLM engine under test runs in a process of its own.
"""

import contextlib
import itertools

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rltrain.base.errors import SyncError
from rltrain.base.random_streams import stream_seed
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, VOCAB_SIZE, char_tokenizer
from workers.cluster.processes import Role, results
from workers.models.fsdp import device
from workers.models.loading import load_model
from workers.models.packed_forward import pack, policy_output, to_device
from workers.placement import ENGINE, spawner
from workers.rollout.messages import Completion, Request
from workers.rollout.worker import RolloutWorker
from workers.sync.buckets import join
from workers.sync.memory import readable_elsewhere
from workers.sync.sender import Sender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("ray_here", "process_group"),
    pytest.mark.timeout(900),  # The engine first compiles kernels and captures CUDA graphs.
]
PROMPT = char_tokenizer()("2299907=")["input_ids"]
NUMBERS = itertools.count()
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
# The engine takes 30% of the GPU's memory, which leaves room for the models of the tests.
SMALL = ["model.dtype=bfloat16", "rollout.vllm.gpu_memory_utilization=0.3"]


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, initializer_range=0.05), dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Save a model whose attention heads have a width that the GPU's attention kernels support."""
    path = tmp_path_factory.mktemp("models") / "start"
    model_of(0).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder, ray_here):
    """Start one engine replica on the GPU that the test process also uses."""
    config, _ = compose(SMALL)
    process = spawner(config, "rollout replica", 1)(0)
    await results([process.build("rollout", ENGINE, config, folder, [EOS_ID], threaded=True)])
    made: Role[RolloutWorker] = Role(process, "rollout")
    yield made
    await made.call(RolloutWorker.close)


async def load(
    engine: Role[RolloutWorker], model: torch.nn.Module, version: int = 1, *, spoil: bool = False, on_gpu: bool = False
) -> None:
    """Do a complete weight sync, including the checks of the weights.

    If `on_gpu` is true, the buckets stay in the memory of the GPU, and the engine maps this memory.
    """
    sender, name = Sender(model.to(device()), version=version, dtype="bfloat16", check=True), f"sync {next(NUMBERS)}"
    if on_gpu:
        sender.device = device()
    await engine.call(RolloutWorker.start_load, name, version)
    for number in range(len(sender.layout)):
        bucket = join([sender.write(number, None)])
        if spoil:
            for piece in bucket.pieces:
                if piece.name.endswith("layers.1.mlp.down_proj.weight"):
                    object.__setattr__(piece, "probe", piece.probe + abs(piece.probe).max())
        with readable_elsewhere(bucket) if on_gpu else contextlib.nullcontext(bucket) as given:
            await engine.call(RolloutWorker.load_bucket, name, None, given)
    await engine.call(RolloutWorker.finish_load, name, None)


async def answers(
    engine: Role[RolloutWorker], *, temperature: float, count: int = 16
) -> dict[tuple[int, int], Completion]:
    requests = [Request((0, n), PROMPT, temperature, 32, stream_seed(0, 0, n)) for n in range(count)]
    await engine.call(RolloutWorker.submit, requests)
    found: dict[tuple[int, int], Completion] = {}
    while len(found) < count:
        found |= {answer.key: answer for answer in await engine.call(RolloutWorker.poll, 5.0)}
    return found


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_E1_engine_and_trainer_agree_in_bfloat16_on_the_gpu(engine, folder, temperature):
    model = load_model(AutoModelForCausalLM, folder).eval()
    await load(engine, model)
    got = list((await answers(engine, temperature=temperature)).values())
    columns = {"prompts": [PROMPT] * len(got), "responses": [answer.token_ids for answer in got]}
    batch = DataProto.from_dict({name: jagged(ids, torch.int64) for name, ids in columns.items()})
    with torch.no_grad():
        packed = to_device(pack(batch), device())
        for parameter in model.parameters():  # Position buffers are not rounded.
            parameter.data = parameter.data.to(torch.bfloat16)
        ours = policy_output(model.to(device()), packed, temperature=temperature).log_probs.cpu()
    theirs = torch.tensor([log_prob for answer in got for log_prob in answer.log_probs])
    assert float((ours - theirs).abs().mean()) < 2e-2
    assert float((ours - theirs).mean().abs()) < 5e-3


async def test_E5_a_sync_to_the_gpu_engine_passes_its_checks_and_one_with_other_weights_does_not(engine):
    await load(engine, model_of(1))
    with pytest.raises(SyncError, match="down_proj"):
        await load(engine, model_of(1), spoil=True)
    await load(engine, model_of(1))
    assert await answers(engine, temperature=1.0)


async def test_E5_weights_in_gpu_memory_that_the_engine_maps_pass_the_same_checks(engine):
    await load(engine, model_of(6))
    expected = await answers(engine, temperature=0.0)
    await load(engine, model_of(7))
    await load(engine, model_of(6), on_gpu=True)
    got = await answers(engine, temperature=0.0)
    assert {key: a.token_ids for key, a in got.items()} == {key: a.token_ids for key, a in expected.items()}
    with pytest.raises(SyncError, match="down_proj"):
        await load(engine, model_of(7), spoil=True, on_gpu=True)
    await load(engine, model_of(7), on_gpu=True)


async def test_E6_an_engine_that_slept_gives_its_memory_back_and_answers_as_a_fresh_one(engine, tmp_path):
    model = model_of(2)
    await load(engine, model, 3)
    before, awake = await answers(engine, temperature=0.0), torch.cuda.mem_get_info()[0]
    assert await engine.call(RolloutWorker.sleep) is True
    freed, whole = torch.cuda.mem_get_info()[0] - awake, torch.cuda.mem_get_info()[1]
    assert freed > 0.15 * whole, "sleep freed less than the KV cache"
    # The tensor uses the freed memory, as training would.
    held = torch.full((int(0.8 * freed) // 4,), 7.0, device=device())
    assert float(held[-1]) == 7.0
    del held
    torch.cuda.empty_cache()
    await load(engine, model, 4)
    after = await answers(engine, temperature=0.0)
    assert {key: answer.token_ids for key, answer in after.items()} == {k: a.token_ids for k, a in before.items()}
    assert {version for answer in after.values() for version in answer.versions} == {4}


async def test_E6_weights_that_came_while_it_slept_are_those_that_it_answers_with(engine, tmp_path):
    await load(engine, model_of(2))
    await engine.call(RolloutWorker.sleep)
    await load(engine, model_of(5), 6)
    slept = await answers(engine, temperature=0.0)
    await load(engine, model_of(2))
    await load(engine, model_of(5), 6)
    assert {key: a.token_ids for key, a in (await answers(engine, temperature=0.0)).items()} == {
        key: a.token_ids for key, a in slept.items()
    }
