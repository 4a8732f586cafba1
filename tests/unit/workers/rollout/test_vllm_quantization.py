"""Tests that vLLM's quantized layers are found, and that unsuitable models are refused. The layers are stand-ins."""

import pytest
import torch
from torch import nn

worker = pytest.importorskip("workers.rollout.engines.vllm.worker", reason="needs vLLM", exc_type=ImportError)


class Quantized(worker.OnlineLinearBase):
    """Stand-in for one of vLLM's methods of quantization."""

    def __init__(self):
        pass

    def apply(self, layer, x, bias=None):
        raise NotImplementedError


class Linear(worker.LinearBase):
    """A linear layer, quantized or not."""

    def __init__(self, *, quantized, bias=False):
        nn.Module.__init__(self)
        self.quant_method = Quantized() if quantized else None
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.bias = nn.Parameter(torch.zeros(2)) if bias else None


class Model(nn.Module):
    """A model with a fused layer and another layer."""

    def __init__(self, qkv, out):
        super().__init__()
        self.packed_modules_mapping = {"qkv": ["q", "k", "v"]}
        self.qkv, self.out = qkv, out


def test_each_part_of_a_quantized_fused_layer_has_its_name_in_the_checkpoint():
    model = Model(Linear(quantized=True), Linear(quantized=False))
    assert worker.quantized_weights(model) == {".q.weight", ".k.weight", ".v.weight"}
    assert worker.quantization_problem(model) == ""


def test_a_quantized_layer_with_a_bias_is_a_problem_on_cpus():
    model = Model(Linear(quantized=True), Linear(quantized=False, bias=True))
    assert worker.quantization_problem(model) == ""
    model = Model(Linear(quantized=True), Linear(quantized=True, bias=True))
    assert worker.quantization_problem(model) == "on CPUs, vLLM cannot add the bias of the quantized layer out"


def test_a_model_of_which_no_layer_is_quantized_is_a_problem():
    model = Model(Linear(quantized=False), Linear(quantized=False))
    assert worker.quantization_problem(model) == "vLLM quantizes no layer of this model"


def test_scales_of_quantized_experts_are_not_compared_with_the_actor():
    experts = nn.Module()
    experts.register_parameter("w13_weight_scale", nn.Parameter(torch.ones(4)))
    experts.register_parameter("e_score_correction_bias", nn.Parameter(torch.ones(4)))
    assert set(worker.layer_outputs(Model(experts, nn.Module()), products=False)) == {"qkv.e_score_correction_bias"}
