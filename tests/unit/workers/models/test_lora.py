"""Tests of LoRA adapters: how adapters are trained, sent to the engine, merged in the engine, and saved."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rltrain.base.errors import ConfigError, SyncError
from rltrain.settings.compose import compose
from rltrain.settings.schema import LoRAConfig
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from tests.policy_weights import merged_weights
from workers.cluster.processes import LocalProcess, Role
from workers.cluster.worker_process import Host
from workers.models.adapter_weights import BaseWeights
from workers.models.lora import adapt, adapted_layers, adapter_parameters, adapters_of, is_adapter
from workers.placement import ROLES
from workers.rollout.engines.hf.engine import HFEngine, make
from workers.rollout.messages import Request
from workers.sync import adapters, buckets
from workers.sync.buckets import Bucket, join
from workers.sync.checks import probe
from workers.training.actor import ActorWorker
from workers.training.policy_update import update_policy
from workers.training.shared_columns import log_probs_columns
from workers.training.worker_group import WorkerGroup

pytestmark = pytest.mark.usefixtures("process_group")
LORA = "model.lora={rank:4}"
CONSTANT = [
    "actor.lr=3e-3", "actor.lr_schedule=constant", "trainer.prompts_per_step=3", "trainer.prompts_per_minibatch=3",
]  # fmt: skip
REQUEST = Request((0, 0), char_tokenizer()("2299907=")["input_ids"], 0.0, 8, 0)


class Run:
    """A newly started actor with LoRA adapters."""

    def __init__(self, path, *overrides):
        self.config = compose([*CONSTANT, LORA, *overrides])[0]
        process = LocalProcess(Host({}, verbose=True))
        process.build("actor", ROLES["actor"], self.config, path)
        self.actor, self.worker = WorkerGroup([Role(process, "actor")]), process.host.roles["actor"]

    async def log_probs(self, batch):
        columns = log_probs_columns(self.config.algorithm)
        found = await self.actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=8192)
        return found.values("old_log_probs")

    async def update(self, batch, times=1):
        plan = [list(range(len(batch)))]
        for _ in range(times):
            metrics = await update_policy(self.actor, batch, plan, self.config, max_tokens=8192, entropy_coef=0.0)
        return metrics

    def save(self, folder: Path) -> Path:
        """Save the actor's part of a checkpoint in `folder`, and return the path of the exported model."""
        self.worker.save_state(str(folder))
        while (saved := self.worker.saved_state()) is None:
            time.sleep(0.01)
        assert saved.error == ""
        return folder / "model"

    def sent(self, version: int) -> list[Bucket]:
        count = len(self.worker.start_export(None, version, True).takes_part)
        made = [join([self.worker.export(number, None)]) for number in range(count)]
        self.worker.end_export()
        return made


def engine(start: str, *overrides: str) -> HFEngine:
    return make(compose(["rollout=hf", LORA, *overrides])[0], start, [EOS_ID])


def load(made: HFEngine, sent: list[Bucket]) -> None:
    made.start_load()
    for bucket in sent:
        made.load_bucket(bucket)
        # after the engine has read the buffer, the buffer is overwritten, as happens in shared memory
        bucket.data[:] = 255
    made.finish_load(sent[0].version)


def by_peft(run: Run, start: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that peft gets by merging the saved adapter into the base model."""
    from peft import PeftModel

    base, saved = AutoModelForCausalLM.from_pretrained(start), run.save(folder)
    return dict(PeftModel.from_pretrained(base, saved / "adapter").merge_and_unload().named_parameters())


def same(found, expected, tolerance=1e-6) -> bool:
    return all(float((found[name] - tensor).detach().abs().max()) <= tolerance for name, tensor in expected.items())


async def test_merged_weights_are_those_that_peft_merges(start, sampled_batch, tmp_path):
    run = Run(start, "model.lora={rank:4,alpha:12,targets:[q_proj,down_proj]}")
    await run.update(sampled_batch, times=3)
    expected, found = by_peft(run, start, tmp_path), merged_weights(run.worker.model)
    assert found.keys() == expected.keys()
    assert same(found, expected)
    base = dict(AutoModelForCausalLM.from_pretrained(start).named_parameters())
    moved = {name for name in base if not torch.equal(found[name], base[name])}
    layers = ("self_attn.q_proj", "mlp.down_proj")
    assert moved == {f"model.layers.{n}.{layer}.weight" for n in range(2) for layer in layers}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert same(dict(saved.named_parameters()), expected)
    assert saved.config.architectures == ["Qwen2ForCausalLM"]
    assert set(load_file(tmp_path / "model/model.safetensors")) == set(load_file(Path(start) / "model.safetensors"))


async def test_nothing_but_adapters_is_trained_and_the_optimizer_has_nothing_else(start, sampled_batch):
    run = Run(start)
    before = {name: p.detach().clone() for name, p in run.worker.model.named_parameters()}
    await run.update(sampled_batch, times=2)
    for name, parameter in run.worker.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not is_adapter(name)), name
        assert parameter.dtype == torch.float32
        assert parameter.grad is None
    held = sum(p.numel() for p in run.worker.optimizer.parameters)
    assert held == adapter_parameters(start, run.config.model.lora)
    # rank 4 x (inputs + outputs) of q, k, v, o, gate, up and down, in two layers of width 128
    assert held == 2 * 4 * (256 + 192 + 192 + 256 + 3 * 512)


async def test_at_the_start_an_adapted_model_is_the_base_model_and_its_start_depends_on_the_seed_only(
    start, sampled_batch
):
    run, again, other = Run(start), Run(start), Run(start, "trainer.seed=1")
    plain = Run(start, "model.lora=null")
    assert torch.equal(*[await r.log_probs(sampled_batch) for r in (run, plain)])
    for name, adapter in adapters_of(run.worker.model).items():
        assert torch.equal(adapter.a, adapters_of(again.worker.model)[name].a)
        assert not torch.equal(adapter.a, adapters_of(other.worker.model)[name].a)


async def test_log_probs_with_adapters_are_those_of_the_merged_model(start, sampled_batch, tmp_path):
    run = Run(start)
    await run.update(sampled_batch, times=3)
    merged = Run(str(run.save(tmp_path)), "model.lora=null")
    found, expected, before = [await r.log_probs(sampled_batch) for r in (run, merged, Run(start))]
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-2)


# Tests of sending adapters to the engine


@pytest.mark.parametrize("bucket_bytes", [buckets.BUCKET_BYTES, 5000])
@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,down_proj]"])
async def test_E5_after_each_sync_the_engine_has_the_merged_weights_once(
    start, sampled_batch, tmp_path, monkeypatch, bucket_bytes, targets
):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    run, made = Run(start, f"model.lora={{rank:4,targets:{targets}}}"), engine(start)
    for version in range(4):  # version 0 has the base weights, and versions 2 and 3 have equal weights
        sent = run.sent(version)
        assert (len(sent) > 1) == (bucket_bytes == 5000)
        load(made, sent)
        assert same(dict(made.model.named_parameters()), by_peft(run, start, tmp_path / str(version)))
        if version != 2:
            await run.update(sampled_batch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_only_adapters_travel_in_float32_and_proofs_are_of_what_the_engine_holds(start, sampled_batch, dtype):
    run = Run(start, f"model.dtype={dtype}")
    await run.update(sampled_batch)
    sent = run.sent(0)
    places = [place for bucket in sent for place in bucket.places]
    assert {place.name.rpartition(".lora_")[2] for place in places} == {"A.weight", "B.weight"}
    assert sum(place.size for place in places) == 4 * adapter_parameters(start, run.config.model.lora)
    proofs, weights = sent[-1].probes(), merged_weights(run.worker.model)
    assert proofs.keys() == {*weights, "lm_head.weight"}
    for name, weight in weights.items():
        expected = probe(weight.to(getattr(torch, dtype)))
        assert float((torch.from_numpy(proofs[name]) - expected).abs().max() / expected.abs().max()) < 2e-4, name


async def test_E5_a_merge_onto_merged_weights_is_caught(start, sampled_batch, monkeypatch):
    run, made = Run(start), engine(start)
    merged = {}

    def tensor(self, name):
        """Return the tensor that the engine holds in memory, not the tensor in the model's files."""
        return dict(made.model.named_parameters())[name].detach().clone()

    monkeypatch.setattr(BaseWeights, "tensor", tensor)
    await run.update(sampled_batch)
    load(made, run.sent(1))  # the first merge is correct, because the first merge starts from the base weights
    merged |= dict(made.model.named_parameters())
    with pytest.raises(SyncError, match="does not compute with the actor's 'model"):
        load(made, run.sent(2))
    monkeypatch.undo()
    load(made, run.sent(3))
    assert same(dict(made.model.named_parameters()), merged)


@pytest.mark.parametrize("what", ["norm", "embedding", "scale"])
async def test_E5_other_base_weights_or_another_scale_are_caught(start, sampled_batch, what):
    run, made = Run(start), engine(start)
    await run.update(sampled_batch)
    sent = run.sent(1)
    if what == "scale":
        for bucket in sent:
            bucket.scale *= 1.01
    else:
        parameter = made.model.model.norm.weight if what == "norm" else made.model.model.embed_tokens.weight
        parameter.data[-1] += 1e-2
    with pytest.raises(SyncError, match="does not compute with the actor's"):
        load(made, sent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_E6_the_engine_says_what_a_fresh_one_with_the_merged_weights_says(start, sampled_batch, tmp_path, dtype):
    run, made = Run(start, f"model.dtype={dtype}"), engine(start, f"model.dtype={dtype}")
    await run.update(sampled_batch, times=3)
    load(made, run.sent(1))
    fresh = engine(str(run.save(tmp_path)), f"model.dtype={dtype}")
    answers = []
    for one in (made, fresh):
        one.add([REQUEST])
        found = []
        while one.busy:
            found += one.step()
        answers.append(found[0])
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].log_probs == pytest.approx(answers[1].log_probs, abs=1e-5 if dtype == "float32" else 2e-2)


def test_a_half_of_an_adapter_is_missed(start, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    made, sent = engine(start), Run(start).sent(1)
    half = "model.layers.0.self_attn.k_proj.lora_A.weight"
    with pytest.raises(
        SyncError, match=r"matrix A or B of the adapter for 'model\.layers\.0\.self_attn\.k_proj' did not arrive"
    ):
        load(made, [bucket for bucket in sent if bucket.places[0].name != half])


# Tests of files that contain base weights


def sharded(start: str, folder: Path) -> Path:
    """Copy a model to `folder`, and split its weights into two files with an index."""
    shutil.copytree(start, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"part-{number}.safetensors", {"format": "pt"})
        where |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def test_base_weights_are_read_from_the_files_that_transformers_reads(start, tmp_path):
    expected = load_file(Path(start) / "model.safetensors")
    indexed = sharded(start, tmp_path / "indexed")
    both, swapped = (shutil.copytree(indexed, tmp_path / name) for name in ("both", "swapped"))
    shutil.copy(Path(start) / "model.safetensors", both)  # a single weight file takes precedence over the index
    save_file({}, both / "part-0.safetensors")
    (swapped / "part-0.safetensors").rename(swapped / "part")
    (swapped / "part-1.safetensors").rename(swapped / "part-0.safetensors")
    (swapped / "part").rename(swapped / "part-1.safetensors")
    for folder in (start, indexed, both, swapped):
        base = BaseWeights(folder)
        assert base.files.keys() == expected.keys()
        assert all(torch.equal(base.tensor(name), tensor) for name, tensor in expected.items())
        base.require(list(expected))
    with pytest.raises(ConfigError, match=r"hold no tensor 'lm_head\.bias'.*model\.lora=null$"):
        base.require(["lm_head.bias"])
    (indexed / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=rf"^model.path={indexed}: holds no weights \(looked for model.safetensors, "):
        BaseWeights(indexed)


def test_merging_is_the_sum_and_the_scaled_product():
    w, a, b = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0], [-1.0]])
    assert adapters.merge(w, b, a, 0.5).tolist() == [[1.5, 1.0, 2.0], [0.5, 1.0, 0.0]]


# Tests of models and settings that are refused


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_porj"], "model.lora.targets: no layer is called 'q_porj'; the nearest is 'q_proj', and all names are"),
        (
            ["lm_head"],
            "model.lora.targets: 'lm_head' is the last layer, where log-probs are computed without an adapter; "
            "remove this target",
        ),
        (["q_proj", "embed_tokens"], "model.lora.targets: 'embed_tokens' is of the kind Embedding, not nn.Linear; use"),
        (["proj"], "no layer is called 'proj'"),
        (["norm"], "'norm' is of the kind Qwen2RMSNorm"),
    ],
)
def test_a_target_that_is_no_linear_layer_within_the_model_is_refused(start, targets, message):
    model = AutoModelForCausalLM.from_pretrained(start)
    with pytest.raises(ConfigError) as error:
        adapt(model, LoRAConfig(rank=2, alpha=4.0, targets=targets))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_linear_layers_are_all_but_the_last_and_a_name_may_be_whole(start):
    model = AutoModelForCausalLM.from_pretrained(start)
    every = adapted_layers(model, LoRAConfig(rank=2, alpha=4.0, targets=["all-linear"]))
    assert len(every) == 14
    assert "lm_head" not in every
    one = "model.layers.1.self_attn.q_proj"
    assert adapted_layers(model, LoRAConfig(rank=2, alpha=4.0, targets=[one])) == [one]
    adapt(model, LoRAConfig(rank=2, alpha=4.0, targets=[one]))
    assert set(adapters_of(model)) == {f"{one}.weight"}
