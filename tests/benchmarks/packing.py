"""Compares packed with padded forward and backward passes, and measures padding and the balance of rank loads.

The lengths of the rows are log-uniform between 32 and 512 tokens. Packed passes are the actor's own passes: the rows of
each planned micro-batch are concatenated, and log-probs are computed for the response tokens. Padded passes use plain
transformers with an attention mask and PyTorch's scaled dot-product attention (sdpa). The rows of a padded micro-batch
keep the order of the mini-batch, and are padded on the right to the longest row. Packed and padded micro-batches have
the same token budget, which includes the padding. Before any measurement, the benchmark checks that packed and padded
passes give the same gradient.
"""

import copy
import os
import random
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from rltrain.base.balanced_parts import least_largest_sum
from rltrain.batch.contexts import row_tokens
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.row_assignment import assign_minibatch
from rltrain.batch.row_costs import RowWork, causal_pairs, row_work
from tests.benchmarks.row import Row
from workers.models.packed_forward import PACKED, pack, policy_output
from workers.training.dispatch import Minibatch, overhead_metrics, split_rows

COMMAND = "python -m tests.benchmarks.packing"
ROWS, PROMPT, SHORTEST, SPREAD, BUDGET = 32, 16, 32, 16, 8192  # The token budget is the config's default.
ROUNDS, THREADS, PLANS = 3, 1, 10_000
SIZES = {
    "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip


def run() -> list[Row]:
    """Run all measurements, and return their results as rows of the results table."""
    return [*throughput(), *balance_rows()]


def lengths_of(source: random.Random, rows: int) -> list[int]:
    """Draw the lengths of `rows` rows, log-uniform between 32 and 512 tokens."""
    return [int(SHORTEST * SPREAD ** source.random()) for _ in range(rows)]


def make_batch() -> DataProto:
    """Return a mini-batch of rows with random tokens."""
    source = random.Random(0)
    ids = [[source.randrange(SIZES["vocab_size"]) for _ in range(n)] for n in lengths_of(source, ROWS)]
    return DataProto.from_dict({
        "prompts": jagged([row[:PROMPT] for row in ids], torch.int64),
        "responses": jagged([row[PROMPT:] for row in ids], torch.int64),
    })  # fmt: skip


def packed_pass(model: nn.Module, batch: DataProto, plan: list[list[int]]) -> None:
    """Run forward and backward passes over packs, with the sum of the response tokens' log-probs as the loss."""
    for rows in plan:
        policy_output(model, pack(batch[rows]), temperature=1.0).log_probs.sum().backward()


def padded_pass(model: nn.Module, rows: list[Tensor], plan: list[list[int]]) -> None:
    """Run forward and backward passes over right-padded micro-batches, with the same loss as in `packed_pass`."""
    for part in plan:
        ids = pad_sequence([rows[row] for row in part], batch_first=True)
        lengths = torch.tensor([len(rows[row]) for row in part])
        mask = torch.arange(ids.size(1)) < lengths[:, None]
        logits = model(ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=ids.size(1) - PROMPT + 1).logits
        targets = ids[:, PROMPT:]
        log_probs = F.log_softmax(logits[:, :-1].float(), -1).gather(-1, targets[..., None])[..., 0]
        log_probs[mask[:, PROMPT:]].sum().backward()


def padded_plan(lengths: list[int], order: list[int], budget: int = BUDGET) -> list[list[int]]:
    """Split rows in the given order into micro-batches that, including padding, have at most `budget` tokens each."""
    plan: list[list[int]] = [[]]
    for row in order:
        tried = [*plan[-1], row]
        if len(tried) * max(lengths[r] for r in tried) > budget:
            plan.append([row])
        else:
            plan[-1] = tried
    return plan


def throughput() -> list[Row]:
    """Measure the speed of packed and padded passes, and the share of computed tokens that are padding.

    The speed counts only useful tokens, that is, tokens that are not padding.
    """
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa")).eval()
    model = copy.deepcopy(plain)
    model.set_attn_implementation(PACKED)
    batch = make_batch()
    answers = batch.values("responses").split(batch.lengths("responses").tolist())
    rows = [torch.cat(pair) for pair in zip(batch.values("prompts").split(PROMPT), answers, strict=True)]
    full, work = [len(row) for row in rows], row_work(plain.config.to_dict(), head=True)
    costs = work.of_rows(row_tokens(batch), batch.lengths("responses").tolist())
    packed = split_rows(row_tokens(batch), 1, BUDGET, work=costs)[0]
    padded = padded_plan(full, list(range(ROWS)))
    by_length = padded_plan(full, sorted(range(ROWS), key=lambda row: -full[row]))
    ways = {
        "packed": lambda: packed_pass(model, batch, packed),
        "padded": lambda: padded_pass(plain, rows, padded),
        "by length": lambda: padded_pass(plain, rows, by_length),
    }
    check_equal(model, plain, ways)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.process_time()  # With one thread, CPU time equals wall time on an idle core.
            way()
            times[name].append(time.process_time() - began)
            model.zero_grad()
            plain.zero_grad()
    seconds = {name: statistics.median(each) for name, each in times.items()}
    plans = {
        "padded": padded,
        "by_length": by_length,
        "padded_quarter": padded_plan(full, list(range(ROWS)), BUDGET // 4),
    }
    shares = {name: 1 - sum(full) / slots(full, plan) for name, plan in plans.items()}
    return [speed_row(seconds, sum(full), plain), waste_row(batch, packed, costs, shares, work)]


def slots(lengths: list[int], plan: list[list[int]]) -> int:
    """Return the total number of tokens in all padded micro-batches of a plan, including padding."""
    return sum(len(part) * max(lengths[row] for row in part) for part in plan)


def check_equal(model: nn.Module, plain: nn.Module, ways: dict) -> None:
    """Check that all ways to process the mini-batch give the same gradient.

    If the gradients differed, a comparison of the speeds would be meaningless. The check also serves as the warm-up of
    the measurements.
    """
    found = []
    for name, way in ways.items():
        used = model if name == "packed" else plain
        way()
        found.append([parameter.grad.clone() for parameter in used.parameters()])
        used.zero_grad()
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max(), "packed and padded gradients differ"


def speed_row(seconds: dict[str, float], tokens: int, model: nn.Module) -> Row:
    """Return the row that compares the packed and the padded speed in useful tokens per second."""
    speed = {name: tokens / each for name, each in seconds.items()}
    size = sum(parameter.numel() for parameter in model.parameters())
    notes = (
        f"Llama of {size / 1e6:.1f}M parameters, forward and backward, {ROWS} rows of {SHORTEST} to "
        f"{SHORTEST * SPREAD} tokens, {tokens:,} in all, micro-batches of at most {BUDGET:,}; float32, {THREADS} torch "
        f"thread, CPU time, median of {ROUNDS}; padded rows sorted by length: {speed['by length']:,.0f} tokens/s; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return Row(
        "speed with packed rows against padded rows, lengths 1:16", speed["packed"] / speed["padded"],
        "times more useful tokens/s than right-padded batches", ">= 2", f"{speed['packed']:,.0f} tokens/s",
        f"{speed['padded']:,.0f} tokens/s", notes, COMMAND,
        {"over_padded_by_length": speed["packed"] / speed["by length"]},
    )  # fmt: skip


def waste_row(
    batch: DataProto, plan: list[list[int]], costs: list[int], padded: dict[str, float], work: RowWork
) -> Row:
    """Return the row with the share of computed tokens that are padding or filler.

    The notes of the row give the share of multiply-adds that attention spends on padding in its buckets of rows.
    """
    lengths = row_tokens(batch)
    filler = overhead_metrics([[Minibatch(plan, 1, 1)]], lengths, costs)["filler_fraction"]
    packs = [pack(batch[rows]) for rows in plan]
    assert sum(p.input_ids.numel() for p in packs) == sum(lengths), "a pack holds more than its rows' tokens"
    ((_, pair),) = work.attention
    needed = sum(causal_pairs(length, None) for length in lengths)
    computed = sum(
        bucket.queries.size(0) * causal_pairs(bucket.queries.size(1), None)
        for one in packs for bucket in one.layout.attention_batches
    )  # fmt: skip
    attention = pair * (computed - needed) / (sum(costs) + pair * (computed - needed))
    notes = (
        f"share of the tokens that the model computes; attention, which batches rows of similar length, adds "
        f"{attention:.1%} of all multiply-adds as padding; padded rows sorted by length: {padded['by_length']:.1%}, "
        f"padded rows with a quarter of the token budget: {padded['padded_quarter']:.1%}"
    )
    return Row(
        "padding and filler among the computed tokens", filler, "of all computed tokens", "< 0.02", f"{filler:.1%}",
        f"{padded['padded']:.1%} padded", notes, COMMAND, {"attention_filler_of_work": attention, **padded},
    )  # fmt: skip


def balance_rows() -> list[Row]:
    """Measure the largest rank load in random plans, which assign the rows of a mini-batch to ranks.

    The main result is for plans with 8 to 32 rows per rank, and the notes describe plans with 1 to 8 rows per rank.
    """
    source = random.Random(0)
    many = [random_plan(source, source.uniform(8, 32)) for _ in range(PLANS)]
    few = [random_plan(source, source.uniform(1, 8)) for _ in range(PLANS // 10)]
    above = sum(over > 1.05 for over, _ in few) / len(few)
    source, ranks = random.Random(1), 256
    lengths, times = lengths_of(source, 4 * ranks), []
    for _ in range(9):
        began = time.process_time()
        assign_minibatch(lengths, list(range(len(lengths))), ranks, BUDGET)
        times.append(time.process_time() - began)
    notes = (
        f"{PLANS:,} plans of 2 to 64 ranks with 8 to 32 rows each, rows of {SHORTEST} to {SHORTEST * SPREAD} tokens, "
        f"attention 0 to 2/3 of the longest row's work, budgets of 512 to 8,192 tokens, none exceeded; 99 of 100 plans "
        f"are below {statistics.quantiles([over for over, _ in many], n=100)[-1]:.3f}; with 1 to 8 rows per rank "
        f"({len(few):,} plans) {above:.0%} are above 1.05, because rows cannot be split: the worst is "
        f"{max(over for over, _ in few):.2f}, or {max(bound for _, bound in few):.2f} relative to a lower bound of all "
        f"plans; 1,024 rows over 256 ranks are planned in {1e3 * statistics.median(times):.0f} ms"
    )
    worst = max(over for over, _ in many)
    return [
        Row("largest rank load over random plans", worst, "times max(mean load, heaviest row), the worst plan",
            "<= 1.05", f"{worst:.3f}", "1", notes, COMMAND,
            {"worst_few_rows": max(over for over, _ in few), "plan_ms_256_ranks": 1e3 * statistics.median(times)})
    ]  # fmt: skip


def random_plan(source: random.Random, rows_a_rank: float) -> tuple[float, float]:
    """Assign random rows to ranks, and return the largest rank load relative to two reference loads.

    The first reference load is max(mean load, heaviest row). The second reference load is a lower bound for the largest
    rank load of any plan.
    """
    ranks, budget = source.choice((2, 3, 4, 8, 16, 32, 64)), source.choice((512, 1024, 2048, 8192))
    lengths = lengths_of(source, max(1, round(ranks * rows_a_rank)))
    work = RowWork(token=1024, attention=((None, source.choice((0, 1, 2, 4, 8))),)).of_rows(lengths, lengths)
    plan = assign_minibatch(lengths, list(range(len(lengths))), ranks, budget, work=work)
    assert all(sum(lengths[row] for row in part) <= budget for rank in plan for part in rank), "above its budget"
    assert len({len(rank) for rank in plan}) == 1, "ranks run different numbers of micro-batches"
    largest = max(sum(work[row] for part in rank for row in part) for rank in plan)
    return largest / max(sum(work) / ranks, *work), largest / least_largest_sum(work, ranks)


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
