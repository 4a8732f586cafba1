"""Test the memory that each of two ranks needs to load and to export a model of 10^9 parameters."""

import gc
import json
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(1800)]
RANKS = 2
SIZES = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
LIMIT = 0.65  # Largest accepted peak, as a fraction of the bytes of the whole model in float32.
FIXED = 400 << 20  # Bytes that loading may take in addition, for models of any size.


def saved(folder: Path, layers: int) -> int:
    """Save a random Llama, and return the number of bytes of its weights in float32."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, num_hidden_layers=layers))
    model.save_pretrained(folder, max_shard_size="2GB")
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def peak_bytes() -> int:
    """Return the largest resident memory of this process since the last call of `forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> int:
    """Reset the peak memory of this process, and return the current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def measure(rank: int, folder: Path) -> None:
    """Load this rank's part of the model and save a checkpoint, and write the peak memory of loading and export."""
    import functools

    from rltrain.settings.compose import compose
    from workers.cluster.worker_process import keep_freed_memory
    from workers.models.fsdp import shard
    from workers.models.row_isolation import load_policy
    from workers.training import rank_state

    keep_freed_memory()  # every training rank calls this function too
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    arrange = functools.partial(shard, config=compose([])[0])

    def load(name: str):
        return load_policy(str(folder / name), arrange=arrange, device=torch.device("cpu"))

    export_model, used = rank_state.export_model, {}

    def exported(*given):
        forget_peak()
        names = export_model(*given)
        used["export"] = peak_bytes() - base
        return names

    def save(model, name: str) -> None:
        state = rank_state.RankState("actor", model, None, base=folder / name)
        state.save(str(folder / f"checkpoint of {name}"))
        assert state.thread is not None
        state.thread.join()
        assert state.saved().error == ""

    save(load("small"), "small")  # the first use of a library takes memory that does not depend on the model
    gc.collect()
    base = forget_peak()
    model = load("large")
    used["sum"] = sum(float(parameter.detach().to_local().sum()) for parameter in model.parameters())
    used["load"] = peak_bytes() - base
    rank_state.export_model = exported
    save(model, "large")
    (folder / f"rank{rank}.json").write_text(json.dumps(used))


def test_loading_and_export_take_at_most_two_thirds_of_the_model_on_each_of_two_ranks(tmp_path):
    saved(tmp_path / "small", 1)
    size = saved(tmp_path / "large", 18)
    assert size > 4 * 10**9 * 0.95
    processes = multiprocessing.get_context("spawn")
    ranks = [processes.Process(target=measure, args=(rank, tmp_path)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert [one.exitcode for one in ranks] == [0] * RANKS
    used = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    print({phase: [round(one[phase] / size, 3) for one in used] for phase in ("load", "export")})  # noqa: T201
    for phase in ("load", "export"):
        for one in used:
            # Each rank must hold half of the weights. A smaller peak would show that a rank did not read its weights.
            assert 0.4 * size < one[phase] < LIMIT * size + FIXED, (phase, one[phase] / size)
