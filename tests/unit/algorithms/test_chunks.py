"""Tests that gradients summed over chunks of the logits equal the gradients of the whole matrix product."""

import itertools

import pytest
import torch

from rltrain.algorithms.chunks import GradientSums, RunningSoftmax, chunks, default_chunk_size


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_gradients_of_a_layer_are_summed_over_its_chunks_and_only_those_that_are_wanted(wanted):
    generator = torch.Generator().manual_seed(0)
    hidden, head, bias, to_logits = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (7, 3), (7,), (5, 7))
    )
    sums = GradientSums(hidden, head, bias, wanted)
    for rows, columns in chunks(5, 7, 6):
        sums.add(rows, columns, to_logits[rows, columns])
    expected = (to_logits @ head, to_logits.T @ hidden, to_logits.sum(0))
    for found, whole, is_wanted in zip((sums.to_hidden, sums.to_head, sums.to_bias), expected, wanted, strict=True):
        assert (found is not None) == is_wanted
        assert found is None or torch.allclose(found, whole)


def test_a_layer_without_a_bias_has_no_gradient_of_one():
    hidden, head = torch.ones(2, 3), torch.ones(4, 3)
    assert GradientSums(hidden, head, None, (True, True, True)).to_bias is None


def test_the_mean_distance_to_the_largest_logit_is_that_of_all_words_whatever_the_chunks():
    logits = torch.tensor([[0.5, -1.0, 3.0, -torch.inf, 2.0], [-torch.inf, 4.0, 4.0, 1.0, -700.0]], dtype=torch.float64)
    share = logits.softmax(-1)
    distance = (logits - logits.amax(-1, keepdim=True)).nan_to_num(neginf=0.0)
    softmax = RunningSoftmax(torch.zeros(2, 1, dtype=torch.float64), with_mean=True)
    for columns in (slice(0, 2), slice(2, 4), slice(4, 5)):
        softmax.add(slice(0, 2), logits[:, columns].clone())
    assert torch.allclose(softmax.log_sum, logits.logsumexp(-1), rtol=1e-12)
    assert torch.allclose(softmax.mean, (share * distance).sum(-1), rtol=1e-12)


@pytest.mark.parametrize(("device", "logits"), [("cpu", 2_097_152), ("cuda", 67_108_864)])
def test_a_chunk_has_two_million_logits_on_a_cpu_and_67_million_elsewhere(device, logits):
    assert default_chunk_size(torch.device(device)) == logits
