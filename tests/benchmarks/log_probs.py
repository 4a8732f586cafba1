"""Compares log-probs that are computed from all logits at once with log-probs that are computed in chunks.

The measurements are peak memory, time and differences of the results.

The peak memory is the largest total size of the tensors that the forward and the backward pass allocate, according to
the allocations and releases that the profiler records. The peak memory does not include inputs, gradients and earlier
allocations. All times are medians of CPU seconds, which other programs on the machine hardly affect. The compared
implementations are called alternately.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rltrain.algorithms import full_kl
from tests.benchmarks.row import Row
from workers.models.fused_head import token_log_probs

VOCABULARY, HIDDEN, TOKENS, TEMPERATURE = 151_936, 896, 2048, 0.7
COMMAND = "python -m tests.benchmarks.log_probs"

Form = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def plain(hidden: Tensor, head: Tensor, targets: Tensor, entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs from the full matrix of logits, with autograd's standard backward pass."""
    log_softmax = F.log_softmax(F.linear(hidden, head).float() / TEMPERATURE, dim=-1)
    chosen = log_softmax.gather(1, targets[:, None])[:, 0]
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1) if entropies else None


def exact(hidden: Tensor, head: Tensor, targets: Tensor, entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs from the full matrix of logits, without converting the logits to float32."""
    log_softmax = F.log_softmax(F.linear(hidden, head) / TEMPERATURE, dim=-1)
    chosen = log_softmax.gather(1, targets[:, None])[:, 0]
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1) if entropies else None


def ours(hidden: Tensor, head: Tensor, targets: Tensor, entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs in chunks, so that all logits are never in memory at once."""
    return token_log_probs(hidden, head, targets, temperature=TEMPERATURE, entropies=entropies)


def made(tokens: int, words: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states, head and targets, such that the logits have a standard deviation of 2."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    head = torch.randn(words, width, generator=generator) * (2 / width**0.5)
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(words, (tokens,), generator=generator)


def once(form: Form, inputs: tuple[Tensor, Tensor, Tensor], entropies: bool) -> list[Tensor]:
    """Run one forward and backward pass, and return the log-probs, the entropies if requested, and the gradients."""
    log_probs, entropy = form(*inputs, entropies)
    weights = torch.linspace(-1, 2, len(log_probs))
    loss = (weights * log_probs).sum() + (0 if entropy is None else (weights.flip(0) * entropy).sum())
    values = [log_probs.detach()] + ([] if entropy is None else [entropy.detach()])
    return [*values, *torch.autograd.grad(loss, inputs[:2])]


def peak(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak bytes of the tensors that a call of `function` allocates, and the result of the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = function()
    live = highest = 0
    for event in sorted(_allocations(seen), key=lambda event: event[0]):
        live += event[1]
        highest = max(highest, live)
    return highest, result


def _allocations(seen: profile) -> list[tuple[int, int]]:
    events = seen.profiler.kineto_results.events()
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


def seconds(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """Call all functions alternately, `repeats` times each, and return the median CPU seconds of each function.

    The caller must have called each function once before, as a warm-up.
    """
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, times in zip(functions, found, strict=True):
            begin = time.process_time()
            function()
            times.append(time.process_time() - begin)
    return [statistics.median(times) for times in found]


def furthest(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error over all tensors.

    The relative error of a tensor is its largest absolute error divided by the largest absolute expected value.
    """
    return max(float((a - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True))


def mib(number: float) -> str:
    """Format a number of bytes as MiB."""
    return f"{number / 2**20:,.0f} MiB"


def large_rows(entropies: bool, repeats: int) -> list[Row]:
    """Measure peak memory and time with the vocabulary size of a real model."""
    inputs, what = made(TOKENS, VOCABULARY, HIDDEN), " and entropies" if entropies else ""
    forms = [lambda form=form: once(form, inputs, entropies) for form in (ours, plain)]
    sizes = f"V={VOCABULARY:,}, hidden {HIDDEN}, {TOKENS:,} tokens, float32, {torch.get_num_threads()} threads"
    out = 4 * HIDDEN * (VOCABULARY + TOKENS)
    memory = [peak(form)[0] - out for form in forms]
    times = seconds(forms, repeats)
    return [
        Row(
            f"log-probs{what}: peak extra memory", memory[0] / memory[1], "of the value with full logits",
            "<= 0.125", mib(memory[0]), mib(memory[1]),
            f"{sizes}; without the gradients, which take {mib(out)} in both", COMMAND,
        ),
        Row(
            f"log-probs{what}: time, forward and backward", times[0] / times[1], "of the value with full logits",
            "<= 1.5", f"{times[0]:.2f} s", f"{times[1]:.2f} s", f"{sizes}; CPU seconds", COMMAND,
        ),
    ]  # fmt: skip


def error_row() -> Row:
    """Measure the errors of log-probs, entropies and gradients against a computation in float64.

    The number of tokens is smaller than in the other measurements, because float64 needs more memory.
    """
    inputs = made(TOKENS // 8, VOCABULARY, HIDDEN)
    hidden, head = (tensor.detach().double().requires_grad_() for tensor in inputs[:2])
    expected = [tensor.float() for tensor in once(exact, (hidden, head, inputs[2]), True)]
    errors = [furthest(once(form, inputs, True), expected) for form in (ours, plain)]
    return Row(
        "log-probs and entropies: largest error of values and gradients", errors[0], "of the largest value", "<= 1e-5",
        f"{errors[0]:.1e}", f"{errors[1]:.1e}",
        f"V={VOCABULARY:,}, hidden {HIDDEN}, {TOKENS // 8} tokens; compared with float64", COMMAND,
    )  # fmt: skip


def token_row() -> Row:
    """Measure how the peak memory grows with four times as many tokens, without the memory of the gradients."""
    found = []
    for tokens in (4 * TOKENS, TOKENS):
        inputs = made(tokens, VOCABULARY, HIDDEN)
        out = 4 * (tokens * HIDDEN + VOCABULARY * HIDDEN)
        found.append(peak(lambda inputs=inputs: once(ours, inputs, True))[0] - out)
    return Row(
        "log-probs and entropies: memory of 8,192 tokens", found[0] / found[1], "of the value of 2,048 tokens",
        "<= 1.1", mib(found[0]), mib(found[1]), f"V={VOCABULARY:,}, hidden {HIDDEN}; gradients not counted", COMMAND,
    )  # fmt: skip


def tiny_row() -> Row:
    """Measure the time with the small sizes of the built-in task, where computing in chunks must not be slower."""
    inputs = made(512, 24, 64)
    forms = [lambda form=form: [once(form, inputs, True) for _ in range(50)] for form in (ours, plain)]
    seconds(forms, 2)
    times = seconds(forms, 21)
    return Row(
        "log-probs and entropies of a tiny model: time", times[0] / times[1], "of the value with full logits",
        "<= 1.05", f"{times[0] * 20:.3f} ms", f"{times[1] * 20:.3f} ms", "V=24, hidden 64, 512 tokens", COMMAND,
    )  # fmt: skip


def kl_row() -> Row:
    """Measure the memory of the exact KL divergence, which without chunks needs the full logits of two models."""
    hidden, head, _ = made(TOKENS // 8, VOCABULARY, HIDDEN)
    ref_hidden, ref_head = (hidden + 0.1).detach(), head.detach()

    def definition() -> tuple[Tensor, ...]:
        log_pi = (hidden @ head.T / TEMPERATURE).log_softmax(-1)
        log_ref = (ref_hidden @ ref_head.T / TEMPERATURE).log_softmax(-1)
        return torch.autograd.grad((log_pi.exp() * (log_pi - log_ref)).sum(), (hidden, head))

    def chunked() -> tuple[Tensor, ...]:
        kl = full_kl(hidden, head, ref_hidden, ref_head, temperature=TEMPERATURE)
        return torch.autograd.grad(kl.sum(), (hidden, head))

    memory = [peak(chunked)[0], peak(definition)[0]]
    times = seconds([chunked, definition], 1)
    out = 4 * HIDDEN * (VOCABULARY + TOKENS // 8)
    return Row(
        "exact KL: peak extra memory without gradients", (memory[0] - out) / (memory[1] - out),
        "of the value with full logits", "", mib(memory[0] - out), mib(memory[1] - out),
        f"V={VOCABULARY:,}, hidden {HIDDEN}, {TOKENS // 8} tokens; {times[0] / times[1]:.2f} times the time", COMMAND,
    )  # fmt: skip


def run(*, repeats: int = 3, threads: int = 2) -> list[Row]:
    """Run all measurements, which need about 8 GB of memory and a few minutes, and return the results as rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [*large_rows(False, repeats), *large_rows(True, repeats), error_row(), token_row(), tiny_row(), kl_row()]
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for row in run(repeats=options.repeats, threads=options.threads):
        print(row)  # noqa: T201
