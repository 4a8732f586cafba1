"""Parts of the GPU benchmark: a recorder of results, models like the actor's, and packs of random rows.

The module needs only torch and transformers besides rltrain itself.
"""

import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

try:
    import tensordict
except ImportError:  # An empty class takes the place of TensorDict, so that imports succeed.
    tensordict = ModuleType("tensordict")
    tensordict.TensorDict = type("TensorDict", (), {})
    sys.modules["tensordict"] = tensordict

from transformers import AutoModelForCausalLM, Qwen2Config

from rltrain.batch.row_costs import RowWork
from workers.models.fsdp import Optimizer, shard
from workers.models.packed_forward import PACKED, Pack, pack, policy_output, to_device

TINY = "tiny"
QWEN2 = {
    "vocab_size": 151_936, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "tie_word_embeddings": True
}  # fmt: skip
MODELS = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    TINY: {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
           "vocab_size": 512},
}  # fmt: skip
# Peak speed of each GPU in TFLOP/s, for dense bfloat16.
PEAKS = {"H200": 989.0, "H100": 989.0, "GH200": 989.0, "A100": 312.0, "L40S": 362.0}
ROUNDS = 3


@dataclass
class Bench:
    """Records measurements, and stops the benchmark after a time limit.

    Attributes:
        tiny: Whether to use small shapes, with which the benchmark also runs on a CPU.
        end: Value of `time.monotonic()` after which no new measurement begins.
        rows: All measurements so far.
    """

    tiny: bool
    end: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, **figures: Any) -> None:
        """Print a row of results, and append the row to the file in $OUT."""
        row = {"what": what, **{name: round(v, 5) if isinstance(v, float) else v for name, v in figures.items()}}
        self.rows.append(row)
        sys.stdout.write(f"{json.dumps(row)}\n")
        sys.stdout.flush()
        if folder := os.environ.get("OUT"):
            with (Path(folder) / "gpu.jsonl").open("a") as file:
                file.write(f"{json.dumps(row)}\n")

    @contextlib.contextmanager
    def cell(self, what: str, **sizes: Any) -> Iterator[dict[str, Any]]:
        """Record one measurement: the values that the `with` block puts into the yielded dictionary, or its error."""
        found: dict[str, Any] = {}
        if time.monotonic() > self.end:
            self.add(what, **sizes, skipped="no time left")
            raise OutOfTime
        release()
        try:
            yield found
            self.add(what, **sizes, **found)
        except OutOfTime:
            raise
        except Exception as error:  # After an error, such as out of memory, the remaining measurements still run.
            self.add(what, **sizes, failed=f"{type(error).__name__}: {str(error)[:300]}")


class OutOfTime(Exception):
    """Raised when a measurement would begin after the time limit of the benchmark."""


def device() -> torch.device:
    """Return the GPU, or the CPU if there is no GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def release() -> None:
    """Free the memory that earlier measurements used, and reset the peak memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float:
    """Return the peak GPU memory of tensors in GB since the last call of `release`, or 0 without a GPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def peak_tflops() -> float | None:
    """Return the peak speed of the GPU in TFLOP/s according to its data sheet, or None if `PEAKS` has no such GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def seconds(function: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Call the function once to warm up and `rounds` times more, and return the median seconds per call."""
    return statistics.median([once(function) for _ in range(rounds + 1)][1:])


def once(function: Callable[[], Any]) -> float:
    """Return the wall seconds of one call, including the work that the call starts on the GPU."""
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait until the GPU has finished all of its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(macs: float, tokens: int, taken: float) -> dict[str, Any]:
    """Return tokens/s, TFLOP/s and MFU of a computation with `macs` multiply-adds that took `taken` seconds.

    MFU is the share of the GPU's peak speed that the computation reached, or None if the peak is unknown.
    """
    tflops, peak = 2 * macs / taken / 1e12, peak_tflops()
    return {"tokens_per_s": tokens / taken, "seconds": taken, "tflops": tflops, "mfu": tflops / peak if peak else None}


# Functions that make a model and its rows.


class Rows:
    """Random rows of tokens, which the function `pack` accepts in place of a batch.

    One eighth of each row is the prompt, and the rest is the answer.
    """

    def __init__(self, lengths: list[int], vocabulary: int) -> None:
        source = torch.Generator().manual_seed(0)
        prompts = [max(1, length // 8) for length in lengths]
        sizes = {"prompts": prompts, "responses": [n - p + 1 for n, p in zip(lengths, prompts, strict=True)]}
        self.sizes = {name: torch.tensor(each) for name, each in sizes.items()}
        self.ids = {
            name: torch.randint(vocabulary, (int(each.sum()),), generator=source) for name, each in self.sizes.items()
        }

    def lengths(self, column: str) -> Tensor:
        """Return the number of tokens that each row has in the column `prompts` or `responses`."""
        return self.sizes[column]

    def __contains__(self, column: str) -> bool:
        """Return whether the rows have the column; `pack` asks for columns that only some batches have."""
        return column in self.sizes

    def values(self, column: str) -> Tensor:
        """Return the concatenated token ids of all rows in the column `prompts` or `responses`, int64."""
        return self.ids[column]

    def work(self, work: RowWork) -> int:
        """Return the estimated number of multiply-adds in a forward pass over all rows."""
        pairs = zip(self.sizes["prompts"].tolist(), self.sizes["responses"].tolist(), strict=True)
        return sum(work.of(prompt + answer - 1, answer) for prompt, answer in pairs)

    def pack(self) -> Pack:
        """Concatenate all rows into one pack on the device."""
        return to_device(pack(self), device())  # type: ignore[arg-type]


def config_of(name: str) -> Qwen2Config:
    """Return the transformers config of the benchmark model `name`, a key of `MODELS`."""
    return Qwen2Config(**{**QWEN2, **MODELS[name]})


def plain_model(name: str) -> nn.Module:
    """Create the benchmark model `name` on the device, with random float32 weights."""
    torch.manual_seed(0)
    with device():
        return AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32, attn_implementation=PACKED).eval()


def actor(name: str, *, checkpointing: bool) -> tuple[nn.Module, Optimizer]:
    """Create a model and an optimizer like those of an actor with a single rank.

    Matrix products are in bfloat16, the master weights are in float32, and the optimizer is AdamW.
    """
    settings = SimpleNamespace(
        model=SimpleNamespace(
            dtype="bfloat16", cpu_offload=False, activation_checkpointing=checkpointing, compile=False
        ),
        placement=SimpleNamespace(shard_ranks=None, sequence_ranks=1, context_ranks=1, tensor_ranks=1, expert_ranks=1),
    )
    model = shard(plain_model(name), settings)  # type: ignore[arg-type]
    rates = SimpleNamespace(
        lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.0, max_grad_norm=1.0, lr_warmup_steps=0, lr_schedule="constant"
    )
    return model, Optimizer(list(model.parameters()), rates, 1000, max_skipped=0)  # type: ignore[arg-type]


def train_pass(model: nn.Module, packed: Pack) -> None:
    """Run a forward and a backward pass over a pack, and add the result to the model's gradient."""
    policy_output(model, packed, temperature=1.0).log_probs.sum().backward()
