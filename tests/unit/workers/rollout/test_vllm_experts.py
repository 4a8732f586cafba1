"""Tests that the experts in made-up outputs of vLLM are converted correctly, and that incomplete ones are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rltrain.base.errors import ConfigError
from rltrain.data.prompt_images import PromptImages, decoded
from rltrain.settings.compose import compose
from tests.image_models import picture
from workers.rollout.messages import Request

vllm_engine = pytest.importorskip("workers.rollout.engines.vllm.engine", reason="needs vLLM", exc_type=ImportError)


REQUEST = Request((0, 0), [1, 2], 1.0, 4, 0)


class LogProb:
    logprob = -0.5


def output(experts):
    """Return vLLM's output for a prompt of two tokens and an answer of three."""
    answer = vllm_engine.CompletionOutput(
        index=0, text="", token_ids=[5, 6, 7], cumulative_logprob=None, logprobs=[{n: LogProb()} for n in (5, 6, 7)],
        routed_experts=experts, finish_reason="stop",
    )  # fmt: skip
    return vllm_engine.RequestOutput("0-0", None, [1, 2], None, [answer], finished=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_are_listed_token_by_token_and_layer_by_layer(dtype):
    experts = np.arange(4 * 3 * 2, dtype=dtype).reshape(4, 3, 2)
    completion = vllm_engine.completion_of(output(experts), REQUEST, record_experts=True)
    assert list(completion.experts) == list(range(24))
    assert list(completion.token_ids) == [5, 6, 7]


def test_experts_that_are_a_view_of_a_larger_array_are_read_right():
    experts = np.arange(4 * 3 * 4, dtype=np.uint8).reshape(4, 3, 4)[:, :, :2]
    completion = vllm_engine.completion_of(output(experts), REQUEST, record_experts=True)
    assert list(completion.experts) == experts.flatten().tolist()


def test_an_answer_lists_experts_only_if_they_are_recorded():
    assert list(vllm_engine.completion_of(output(np.zeros((4, 3, 2), dtype=np.uint8)), REQUEST).experts) == []


@pytest.mark.parametrize(
    ("experts", "tokens"), [(None, 0), (np.zeros((3, 3, 2), dtype=np.uint8), 3), (np.zeros((5, 3, 2)), 5)]
)
def test_missing_experts_and_those_of_another_number_of_tokens_are_refused(experts, tokens):
    with pytest.raises(ConfigError, match=f"experts for {tokens} tokens, but .* last token have 4; use actor.router"):
        vllm_engine.completion_of(output(experts), REQUEST, record_experts=True)


@pytest.mark.parametrize("record", [False, True])
def test_vllm_is_asked_for_experts_only_with_replay(record):
    arguments = vllm_engine.engine_arguments(
        compose([])[0].rollout, "model", "float32", vllm_engine.EngineOptions(record_experts=record)
    )
    assert arguments.get("enable_return_routed_experts", False) is record


def test_a_run_without_gpu_is_refused(start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="vLLM records the experts of tokens only on GPUs; use rollout=hf, or actor"):
        vllm_engine.make(compose(["actor.router_replay=engine"])[0], start, [2])


def test_a_prompt_whose_images_vllm_gives_other_tokens_is_refused():
    """The policy is trained on the tokens of the model's processor, so vLLM must have used the same ones."""
    same = replace(REQUEST, images=PromptImages(((7, b""),), [1], [7, 7]))
    assert list(vllm_engine.completion_of(output(None), same).token_ids) == [5, 6, 7]
    other = replace(same, prompt_ids=[1, 2, 2])
    with pytest.raises(
        ConfigError, match="vLLM made 2 tokens of a prompt with images, but the model's processor makes 3"
    ):
        vllm_engine.completion_of(output(None), other)
    # Prompts without images are not compared.
    assert list(vllm_engine.completion_of(output(None), replace(REQUEST, prompt_ids=[9])).token_ids) == [5, 6, 7]


def test_vllm_gets_the_images_and_one_placeholder_for_each():
    file = picture(3)
    request = replace(REQUEST, images=PromptImages(((7, file),), [1, 4, 2], [0, 7, 7, 0]), prompt_ids=[1, 4, 4, 2])
    prompt = vllm_engine.prompt_of(request, 0, compose([])[0].rollout)
    assert prompt["prompt_token_ids"] == [1, 4, 2]
    (image,) = prompt["multi_modal_data"]["image"]
    assert np.array_equal(np.asarray(image), np.asarray(decoded(file)))
