"""vLLM engines in worker processes, and the log-probs that their answers must have."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from ranks import built
from torch import nn
from transformers import AutoModelForCausalLM

from rltrain.base.random_streams import stream_seed
from rltrain.settings.compose import compose
from rltrain.settings.schema import LoRAConfig
from rltrain.tasks.tokenizer import EOS_ID
from workers.cluster.processes import Role
from workers.models.lora import adapt
from workers.placement import ENGINE, spawner
from workers.rollout.messages import Completion, Request
from workers.rollout.worker import RolloutWorker
from workers.sync.buckets import Bucket, join
from workers.sync.sender import AdapterSender, Sender

TOLERANCE = 1e-4  # Largest difference between a log-prob of an engine and the same log-prob of a transformers model.


async def new_engine(path: str, *overrides: str, stop_ids: Sequence[int] = (EOS_ID,)) -> Role[RolloutWorker]:
    """Start an engine with the model in the directory `path`, in a new process."""
    config, _ = compose(list(overrides))
    process = spawner(config, "rollout replica", 1)(0)
    return (await built([process], "rollout", ENGINE, config, path, list(stop_ids), threaded=True))[0]


def requests(prompt: list[int], count: int, *, temperature: float = 1.0, seed: int = 0, uid: int = 0) -> list[Request]:
    """Return requests for `count` answers of at most 16 tokens to one prompt."""
    return [Request((uid, n), prompt, temperature, 16, stream_seed(seed, uid, n)) for n in range(count)]


async def answers(
    engine: Role[RolloutWorker], asked: list[Request], *, count: int = 0
) -> dict[tuple[int, ...], Completion]:
    """Submit the requests `asked`, and return all answers, also the answers to `count` requests submitted earlier."""
    await engine.call(RolloutWorker.submit, asked)
    found: dict[tuple[int, ...], Completion] = {}
    while len(found) < len(asked) + count:
        found |= {answer.key: answer for answer in await engine.call(RolloutWorker.poll, 5.0)}
    return found


def shaken(path: str, scale: float, seed: int = 0) -> nn.Module:
    """Load a model, and add normal noise with the standard deviation `scale` to its weights."""
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return model


def adapted(path: str, lora: LoRAConfig, *, scale: float, seed: int) -> nn.Module:
    """Load a model, and add LoRA adapters.

    The matrices A and B of the adapters are normal noise with the standard deviation `scale`.
    """
    model = AutoModelForCausalLM.from_pretrained(path)
    adapt(model, lora)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            layer, _, last = name.rpartition(".")
            values = scale * torch.randn(parameter.shape, generator=generator)
            setattr(model.get_submodule(layer), last, nn.Parameter(values))
    return model.eval()


def buckets(model: nn.Module, version: int = 1, *, dtype: str = "float32") -> list[Bucket]:
    """Return the buckets of a sync of the weights of `model`."""
    return _written(Sender(model, version=version, dtype=dtype, check=True))


def adapter_buckets(model: nn.Module, version: int = 1, *, merged: bool, dtype: str = "float32") -> list[Bucket]:
    """Return the buckets of a sync of a model with adapters, which contain the matrices A and B.

    With `merged`, the probes are those of the merged weights. Otherwise, they are those of the base weights.
    """
    return _written(AdapterSender(model, version=version, dtype=dtype, check=True, merged=merged))


def _written(sender: Sender) -> list[Bucket]:
    return [join([sender.write(number, None)]) for number in range(len(sender.layout))]


@torch.no_grad()
def model_log_probs(model: nn.Module, request: Request, answer: Completion) -> torch.Tensor:
    """Return the log-probs (T,) of an answer's tokens under the weights of `model`, in float64."""
    ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
    logits = model(ids, use_cache=False).logits[0].double() / request.temperature
    predicted = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return predicted.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]


def check_each_token(models: Mapping[int, nn.Module], request: Request, answer: Completion) -> None:
    """Check each token's log-prob, given all earlier tokens, against the weights of the token's version."""
    by_version = {version: model_log_probs(models[version], request, answer) for version in set(answer.versions)}
    expected = [float(by_version[version][place]) for place, version in enumerate(answer.versions)]
    assert answer.log_probs == pytest.approx(expected, abs=TOLERANCE)


async def log_prob_gap(engine: Role[RolloutWorker], model: nn.Module, prompt: list[int], *, seed: int = 0) -> float:
    """Return the largest difference between the log-probs of an engine's answers and those of `model`."""
    asked = requests(prompt, 8, seed=seed)
    found = await answers(engine, asked)
    gaps = [model_log_probs(model, one, found[one.key]) - torch.tensor(found[one.key].log_probs) for one in asked]
    return max(float(gap.abs().max()) for gap in gaps)
