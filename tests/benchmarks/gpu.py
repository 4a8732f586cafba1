"""Measures training, generation and weight sync of two Qwen2 models on one GPU.

The results are tokens/s, model FLOPs utilisation (MFU), peak memory and the most expensive operations. The models have
random weights, so nothing is downloaded. The measurement of training needs only torch and transformers. Generation and
weight sync into an engine are measured only if vLLM is installed. MFU is the achieved share of the GPU's peak speed for
dense bfloat16, which is taken from the GPU's data sheet. The multiply-adds are estimated by `rltrain.batch.row_costs`,
for one forward and one backward pass, without the recomputation of activations.

python -m tests.benchmarks.gpu                  # prints JSON lines, and appends them to $OUT/gpu.jsonl if OUT is set
python -m tests.benchmarks.gpu --tiny           # a quick check with small shapes, which also runs on a CPU
"""

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rltrain.batch.row_costs import row_work
from tests.benchmarks.gpu_parts import (
    TINY,
    Bench,
    OutOfTime,
    Rows,
    actor,
    config_of,
    device,
    once,
    peak_gb,
    peak_tflops,
    plain_model,
    release,
    seconds,
    speed,
    synchronize,
    train_pass,
)
from tests.benchmarks.row import Row
from workers.cluster.torch_process_group import join
from workers.cluster.worker_process import quiet
from workers.models import packed_forward, varlen_attention
from workers.sync.buckets import join as whole_bucket
from workers.sync.memory import new_path
from workers.sync.sender import Sender

COMMAND = "python -m tests.benchmarks.gpu"
SEQUENCES, GENERATED = 16, 256
ENGINE_SHARE = 0.35  # Share of the GPU's memory that vLLM may use. The trained model uses the same GPU.


def matmul(bench: Bench) -> None:
    """Measure the speed of large matrix products, which is an upper bound for the speed of any model."""
    with bench.cell("matmul") as found:
        size = 256 if bench.tiny else 8192
        a, b = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
        found.update(speed(10 * size**3, 0, seconds(lambda: [a @ b for _ in range(10)])), size=size)


def train(bench: Bench, name: str, tokens: int, *, checkpointing: bool) -> None:
    """Measure the speed of training on one row of `tokens` tokens, and find the most expensive operations."""
    with bench.cell("train", model=name, tokens=tokens, checkpointing=checkpointing) as found:
        rows, work = Rows([tokens], config_of(name).vocab_size), row_work(config_of(name).to_dict(), head=True)
        model, optimizer = actor(name, checkpointing=checkpointing)
        packed = rows.pack()
        found.update(speed(3 * rows.work(work), tokens, seconds(lambda: train_pass(model, packed))))
        optimizer.step()  # The first step allocates the optimizer's state.
        train_pass(model, packed)
        found["optimizer_s"] = once(optimizer.step)
        found["peak_gb"] = peak_gb()
        found["costs"] = costs(lambda: (train_pass(model, packed), optimizer.step()))


def mixed(bench: Bench, name: str, tokens: int) -> None:
    """Measure training on a pack of rows with very different lengths, with two implementations of attention.

    The row lengths vary by a factor of up to 16. The measurement compares a single attention kernel for all rows with
    attention that is computed in buckets of rows with similar lengths.
    """
    with bench.cell("train, lengths 1:16", model=name, tokens=tokens) as found:
        source, lengths = random.Random(0), list[int]()
        while sum(lengths) < tokens:
            lengths.append(min(tokens - sum(lengths), int(tokens / 64 * 16 ** source.random())))
        rows = Rows(lengths, config_of(name).vocab_size)
        model, _ = actor(name, checkpointing=False)
        packed, work = rows.pack(), row_work(config_of(name).to_dict(), head=True)
        found.update(speed(3 * rows.work(work), tokens, seconds(lambda: train_pass(model, packed))), rows=len(lengths))
        found["kernel"] = kernel_name()
        usual, packed_forward.kernel_for = packed_forward.kernel_for, lambda query, value: None
        try:
            found["seconds_in_buckets"] = seconds(lambda: train_pass(model, packed))
        finally:
            packed_forward.kernel_for = usual


def kernel_name() -> str:
    """Return the name of the attention kernel that is used on the device, or "buckets" if no kernel is usable."""
    heads = torch.empty(1, 1, 64, device=device(), dtype=torch.bfloat16)
    kernel = varlen_attention.kernel_for(heads, heads)
    return "buckets" if kernel is None else kernel.__qualname__.partition(".")[0].removeprefix("of_")


def costs(function: Callable[[], Any], most: int = 5) -> dict[str, float]:
    """Profile a function, and return the operations with the largest shares of the device's busy time.

    The entry "idle" of the result is the share of wall time in which the device does nothing.
    """
    cuda = torch.cuda.is_available()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        began = time.perf_counter()
        function()
        synchronize()
        wall = 1e6 * (time.perf_counter() - began)
    operations = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
    taken = {e.key: e.self_device_time_total if cuda else e.self_cpu_time_total for e in operations}
    total = sum(taken.values()) or 1.0
    top = sorted(taken, key=lambda key: -taken[key])[:most]
    return {key: round(taken[key] / total, 3) for key in top} | {"idle": round(max(0.0, 1 - total / wall), 3)}


def send(bench: Bench, name: str) -> None:
    """Measure only the actor's part of a weight sync: copying all weights to the host, with checksums and probes."""
    with bench.cell("sync, sending", model=name) as found:
        model, _ = actor(name, checkpointing=False)
        sizes: list[int] = []
        found["seconds"] = seconds(lambda: sizes.append(sum(len(bucket.data) for bucket in buckets(model))), 1)
        found.update(gb=sizes[0] / 1e9, seconds_per_gb=found["seconds"] / (sizes[0] / 1e9), peak_gb=peak_gb())


def buckets(model: nn.Module, version: int = 1, path: str | None = None) -> Iterator[Any]:
    """Yield all weights of a model in buckets, as a weight sync sends them."""
    sender = Sender(model, version=version, dtype="bfloat16", check=True)
    try:
        sender.offer(path)
        for number in range(len(sender.layout)):
            yield whole_bucket([sender.write(number, path)])
    finally:
        sender.close()


def with_engine(bench: Bench, name: str, lengths: tuple[int, ...]) -> None:
    """Start a vLLM engine, and measure generation and the weight sync into the engine."""
    try:
        import vllm  # noqa: F401 (only whether it is there)
    except ImportError as error:
        bench.add("generate", model=name, skipped=f"no vLLM: {error}")
        return
    with tempfile.TemporaryDirectory() as folder, bench.cell("generate: engine", model=name) as found:
        plain_model(name).to(torch.bfloat16).save_pretrained(folder)
        release()
        began = time.perf_counter()
        engine = make_engine(folder, max(lengths))
        found["start_s"] = time.perf_counter() - began
        try:
            for tokens in lengths:
                generate(bench, engine, name, tokens)
            sync(bench, engine, name)
        finally:
            engine.close()


def make_engine(path: str, longest: int) -> Any:
    """Start vLLM in the benchmark's process, on the GPU of the trained model."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from workers.rollout.engines.vllm.engine import InProcessVLLM

    settings = SimpleNamespace(
        top_p=1.0, top_k=0, stop=[],
        max_prompt_length=longest, max_response_length=GENERATED, max_concurrent_sequences=4 * SEQUENCES,
        keep_kv_cache=False,
        quantization=None,
        vllm=SimpleNamespace(
            tensor_parallel_size=1, gpu_memory_utilization=ENGINE_SHARE, kv_cache_mb=64, arguments={}
        ),
    )  # fmt: skip
    return InProcessVLLM(settings, path, "bfloat16", [])  # type: ignore[arg-type]


def generate(bench: Bench, engine: Any, name: str, tokens: int) -> None:
    """Measure the generation of a group of answers to one long prompt, which takes up most of the context.

    All answers of a group have the same prompt, so the engine computes the prompt only once per group.
    """
    from workers.rollout.messages import Request

    new = min(GENERATED, tokens // 4)
    with bench.cell("generate", model=name, tokens=tokens, sequences=SEQUENCES, new_tokens=new) as found:
        config, uids = config_of(name), iter(range(1000))

        def answers() -> None:
            uid = next(uids)
            source = random.Random(uid)
            prompt = [source.randrange(config.vocab_size) for _ in range(tokens - new)]
            engine.add([Request((uid, n), prompt, 1.0, new, 1000 * uid + n) for n in range(SEQUENCES)])
            while engine.busy:
                engine.step()

        work = row_work(config.to_dict(), head=True)
        prompt = work.of(tokens - new, 1)
        macs = prompt + SEQUENCES * (work.of(tokens, new) - work.of(tokens - new, 0))
        try:
            found.update(speed(macs, SEQUENCES * new, seconds(answers, 2)), peak_gb=peak_gb())
        finally:
            engine.abort()


def sync(bench: Bench, engine: Any, name: str) -> None:
    """Measure a sync of all weights into the engine through shared memory, including checksums and probes."""
    with bench.cell("sync", model=name) as found:
        model, versions = actor(name, checkpointing=False)[0], iter(range(1, 10))

        def send_all() -> None:
            version = next(versions)
            engine.start_load()
            for bucket in buckets(model, version, new_path()):
                engine.load_bucket(bucket)
            engine.finish_load(version)

        gb = 2 * sum(parameter.numel() for parameter in model.parameters()) / 1e9
        found["seconds"] = seconds(send_all, 2)
        found.update(gb=gb, seconds_per_gb=found["seconds"] / gb)


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Do the measurements, the most important ones first, until the time limit is reached. Return their results."""
    quiet()
    join(0, 1, None, 60.0)
    names, lengths = ((TINY,), (64, 128)) if bench.tiny else (("0.5B", "1.5B"), (4096, 16384))
    bench.add(
        "machine", device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", torch=torch.__version__,
        peak_tflops=peak_tflops(), attention=kernel_name(), python=sys.version.split()[0],
    )  # fmt: skip
    with contextlib.suppress(OutOfTime):
        matmul(bench)
        for name in names:
            for tokens in lengths:
                train(bench, name, tokens, checkpointing=False)
            train(bench, name, lengths[-1], checkpointing=True)
        for name in names:
            mixed(bench, name, lengths[-1])
            send(bench, name)
        for name in names:
            with_engine(bench, name, lengths)
    return bench.rows


def run() -> list[Row]:
    """Measure on the GPU, and return the rows of the results table."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU was found; run `python -m tests.benchmarks.gpu --tiny` to test the benchmark on a CPU")
    rows = measure(Bench(tiny=False, end=time.monotonic() + 420))
    where = f"{rows[0]['device']}, torch {rows[0]['torch']}, attention: {rows[0]['attention']}"
    return [line for row in rows[1:] if (line := table_line(row, where)) is not None]


def table_line(row: dict[str, Any], where: str) -> Row | None:
    """Convert a measurement to a row of the results table, or return None for kinds that the table omits."""
    sizes = ", ".join(f"{key} {row[key]}" for key in ("model", "tokens", "checkpointing") if key in row)
    name, notes = f"{row['what']}, {sizes}" if sizes else row["what"], f"{where}; {json.dumps(row)}"
    if "tokens_per_s" in row and row["what"] != "matmul":
        mfu = math.nan if row["mfu"] is None else row["mfu"]
        return Row(name, mfu, "of the device's peak (MFU)", "", f"{row['tokens_per_s']:,.0f} tokens/s",
                   f"{peak_tflops()} TFLOP/s", notes, COMMAND)  # fmt: skip
    if "seconds_per_gb" in row:
        return Row(name, row["seconds_per_gb"], "seconds per GB", "", f"{row['seconds']:.2f} s", f"{row['gb']:.2f} GB",
                   notes, COMMAND)  # fmt: skip
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="use small shapes, which also run on a CPU")
    parser.add_argument("--seconds", type=float, default=420, help="time after which no further measurement begins")
    arguments = parser.parse_args()
    measure(Bench(tiny=arguments.tiny, end=time.monotonic() + arguments.seconds))
