import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rltrain.algorithms import full_kl
from rltrain.algorithms.chunks import CHUNK_SIZES


def inputs(n=7, v=11, h=4, ref_h=3, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, h), (v, h), (n, ref_h), (v, ref_h))
    hidden, head, *reference = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return hidden.requires_grad_(), head.requires_grad_(), *reference


def oracle(hidden, head, ref_hidden, ref_head, temperature=1.0):
    """Compute the exact KL by its definition, from all logits at once."""
    pi = torch.softmax(hidden @ head.T / temperature, -1)
    ref = torch.softmax(ref_hidden @ ref_head.T / temperature, -1)
    return (pi * torch.log(pi / ref)).sum(-1)


def value_and_gradients(function, arguments, **knobs):
    kl = function(*arguments, **knobs)
    weights = torch.linspace(-1, 2, len(kl), dtype=torch.float64)  # each position has a different weight
    return [kl.detach(), *torch.autograd.grad((weights * kl).sum(), arguments[:2])]


def test_two_words_by_hand():
    # The logits log 3 and 0 give pi = (3/4, 1/4), and the reference logits 0 and 0 give pi_ref = (1/2, 1/2).
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    head = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64)
    kl = full_kl(hidden, head, torch.zeros(1, 2).double(), torch.ones(2, 2).double())
    assert kl.tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)], rel=1e-14)
    kl.sum().backward()
    # d KL / d logit_0 = 3/4 (log 3/2 - KL) = 3/16 log 3, times d logit_0 / d hidden = log 3
    assert hidden.grad.item() == pytest.approx(3 / 16 * math.log(3) ** 2, rel=1e-14)


def test_the_temperature_divides_the_logits():
    # the temperature 2 turns the logits 2 log 3 and 0 into log 3 and 0
    head = torch.tensor([[2 * math.log(3)], [0.0]], dtype=torch.float64)
    one = torch.ones(1, 1).double()
    kl = full_kl(one, head, torch.zeros(1, 2).double(), torch.ones(2, 2).double(), temperature=2.0)
    assert kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-14)
    default = full_kl(one, head, torch.zeros(1, 2).double(), torch.ones(2, 2).double())
    assert default.item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_D6_values_and_gradients_are_those_of_the_reverse_divergence(temperature):
    for actual, expected in zip(
        value_and_gradients(full_kl, inputs(), temperature=temperature, chunk_size=3),
        value_and_gradients(oracle, inputs(), temperature=temperature),
        strict=True,
    ):
        assert (actual - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_gradients_pass_gradcheck():
    hidden, head, *reference = inputs(n=3, v=4, h=2, ref_h=2)
    assert torch.autograd.gradcheck(
        lambda x, w: full_kl(x, w, *reference, temperature=0.5, chunk_size=2), (hidden, head)
    )


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_the_size_of_a_chunk_changes_nothing(chunk_size):
    whole = value_and_gradients(full_kl, inputs())
    for actual, expected in zip(value_and_gradients(full_kl, inputs(), chunk_size=chunk_size), whole, strict=True):
        assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


class LargestTensor(TorchDispatchMode):
    """Records the number of elements in the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf))])
        return out


def largest(n, v, **knobs):
    arguments = inputs(n=n, v=v, h=4, ref_h=3, dtype=torch.float32)
    with LargestTensor() as seen:
        full_kl(*arguments, **knobs).sum().backward()
    return seen.numbers


def test_all_logits_are_never_alive_forward_or_backward():
    n, v = 256, 512
    # a chunk of 4,096 elements is larger than each input, but much smaller than a quarter of the n * v logits
    assert largest(n, v, chunk_size=4096) == 4096
    # with a single chunk, the measurement sees a tensor of n * v elements
    assert largest(n, v, chunk_size=n * v) == n * v


def test_what_is_alive_at_once_does_not_grow_with_the_positions(monkeypatch):
    monkeypatch.setitem(CHUNK_SIZES, "cpu", 8192)
    # in the last case, the hidden states (4096 x 4) are the largest tensor
    assert [largest(n, 64) for n in (256, 1024, 4096)] == [8192, 8192, 4 * 4096]


def test_D7_where_policy_and_reference_agree_it_is_exactly_zero_with_zero_gradient():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hidden, head, *_ = inputs(dtype=dtype)
        kl = full_kl(hidden, head, hidden.detach(), head.detach(), chunk_size=2)
        gradients = torch.autograd.grad(kl.sum(), (hidden, head))
        assert (kl == 0).all()
        assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_words_with_a_logit_of_minus_infinity_in_both_models_are_as_if_they_were_not_there(chunk_size):
    """Unused words get logits of minus infinity, because 2 times the lowest float64 number overflows."""
    hidden, head, ref_hidden, ref_head = inputs()
    unused, used = [0, 1, 2, 5, 10], [3, 4, 6, 7, 8, 9]
    with torch.no_grad():
        for states, weights in ((hidden, head), (ref_hidden, ref_head)):
            states[:, -1], weights[unused, -1] = 2.0, torch.finfo(torch.float64).min
    assert (hidden @ head.T)[:, unused].isneginf().all()
    kl, to_hidden, to_head = value_and_gradients(full_kl, (hidden, head, ref_hidden, ref_head), chunk_size=chunk_size)
    small = hidden, head.detach()[used].requires_grad_(), ref_hidden, ref_head[used]
    for actual, expected in zip((kl, to_hidden, to_head[used]), value_and_gradients(oracle, small), strict=True):
        assert (actual - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert (to_head[unused] == 0).all()


def test_a_word_that_the_policy_says_and_the_reference_never_makes_the_divergence_infinite():
    hidden, head, ref_hidden, ref_head = inputs()
    ref_hidden[:, -1], ref_head[0, -1] = 2.0, torch.finfo(torch.float64).min
    assert full_kl(hidden, head, ref_hidden, ref_head, chunk_size=3).isposinf().all()


def test_it_is_never_negative_where_rounding_is_larger_than_the_divergence():
    hidden, head, *_ = inputs(n=512, v=64, h=16, dtype=torch.float32)
    nearly = hidden.detach() * (1 + 1e-6)
    raw = oracle(hidden, head, nearly, head)
    assert (raw < 0).any()  # without clipping, rounding makes some values of the KL negative
    kl = full_kl(hidden, head, nearly, head)
    assert (kl >= 0).all()
    assert kl.max() < 1e-6


def test_a_step_of_the_mean_lowers_the_divergence():
    hidden, head, *reference = inputs()
    kl = full_kl(hidden, head, *reference).mean()
    hidden_gradient, head_gradient = torch.autograd.grad(kl, (hidden, head))
    after = full_kl(hidden - 0.01 * hidden_gradient, head - 0.01 * head_gradient, *reference).mean()
    assert after < kl - 1e-3


def test_the_reference_gets_no_gradient():
    arguments = [argument.detach().requires_grad_() for argument in inputs()]
    full_kl(*arguments).sum().backward()
    assert arguments[0].grad is not None
    assert arguments[1].grad is not None
    assert arguments[2].grad is arguments[3].grad is None


def test_a_frozen_head_is_no_obstacle():
    hidden, head, *reference = inputs()
    (expected,) = torch.autograd.grad(full_kl(hidden, head, *reference).sum(), hidden)
    (actual,) = torch.autograd.grad(full_kl(hidden, head.detach(), *reference).sum(), hidden)
    assert torch.equal(actual, expected)


def test_no_position_gives_an_empty_result_that_can_be_differentiated():
    hidden, head, *reference = inputs(n=0)
    kl = full_kl(hidden, head, *reference)
    assert kl.shape == (0,)
    gradients = torch.autograd.grad(kl.sum(), (hidden, head))
    assert gradients[0].shape == (0, 4)
    assert torch.equal(gradients[1], torch.zeros(11, 4, dtype=torch.float64))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_past_the_products_narrow_types_are_computed_in_float32_also_under_autocast(dtype, autocast):
    """A model returns logits in its own dtype, so the oracle starts from logits of that dtype."""
    arguments = inputs(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        kl, *gradients = value_and_gradients(full_kl, arguments, chunk_size=8)
    z, ref = (arguments[i] @ arguments[i + 1].T for i in (0, 2))
    log_pi, log_ref = z.double().log_softmax(-1), ref.double().log_softmax(-1)
    expected_kl = (log_pi.exp() * (log_pi - log_ref)).sum(-1)
    _, *expected = value_and_gradients(lambda *_: expected_kl, arguments)
    assert kl.dtype == torch.float32
    assert torch.allclose(kl.double(), expected_kl, rtol=1e-5, atol=1e-6)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert actual.dtype == dtype  # gradients are rounded to `dtype` only once, at the end
        assert (actual.double() - wanted).abs().max() < (0.01 if dtype == torch.bfloat16 else 1e-5) * wanted.abs().max()


def test_far_logits_stay_finite():
    hidden = torch.tensor([[100.0, -100.0], [-100.0, 100.0]], requires_grad=True)
    head = torch.eye(2)
    kl = full_kl(hidden, head, -hidden.detach(), head)
    (gradient,) = torch.autograd.grad(kl.sum(), hidden)
    assert kl.tolist() == [200.0, 200.0]
    assert gradient.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_cannot_divide_is_refused(temperature):
    with pytest.raises(
        ValueError, match=rf"temperature={temperature} must be finite and > 0: .* use 1\.0, for example"
    ):
        full_kl(*inputs(), temperature=temperature)


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_an_empty_chunk_is_refused(chunk_size):
    with pytest.raises(ValueError, match=rf"chunk_size={chunk_size} must be >= 1: .* use None for a size"):
        full_kl(*inputs(), chunk_size=chunk_size)


def test_positions_or_vocabularies_that_differ_are_refused():
    hidden, head, ref_hidden, ref_head = inputs()
    with pytest.raises(ValueError, match="N=7, V=11 of the policy and N=1, V=11 of the reference must agree"):
        full_kl(hidden, head, ref_hidden[:1], ref_head)
    with pytest.raises(ValueError, match="N=7, V=11 of the policy and N=7, V=1 of the reference must agree"):
        full_kl(hidden, head, ref_hidden, ref_head[:1])


@pytest.mark.parametrize("chunk_size", [None, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_soft_cap_acts_on_both_models_before_the_temperature(chunk_size, temperature):
    source = torch.Generator().manual_seed(1)
    shapes = [(9, 8), (30, 8), (9, 6), (30, 6)]
    tensors = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
    hidden, head = (tensor.requires_grad_() for tensor in tensors[:2])
    capped = [1.5 * torch.tanh(states @ weight.T / 1.5) for states, weight in (tensors[:2], tensors[2:])]
    policy, reference = ((logits / temperature).log_softmax(-1) for logits in capped)
    expected = (policy.exp() * (policy - reference)).sum(-1)
    found = full_kl(*tensors, temperature=temperature, chunk_size=chunk_size, softcap=1.5)
    weights = torch.linspace(-1, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad((found * weights).sum(), (hidden, head)),
        torch.autograd.grad((expected * weights).sum(), (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
