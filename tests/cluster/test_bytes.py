"""Tests of the bytes that a training step and a weight sync send over the network between three hosts."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from hosts import Cluster, hosts

pytestmark = [pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(900)]
MOST_OF_A_BATCH = 1.2  # Received bytes, as a multiple of the bytes of rows and columns that the host's ranks read.
MOST_OF_A_SYNC = 1.05  # Received bytes, as a multiple of the model's bytes.
SIZES = {
    "vocab_size": 64, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as made:
        cluster = Cluster(made, {"OMP_NUM_THREADS": "1"})
        for host in made:
            cluster.join(host, 3 if host is made[0] else 2)
        yield cluster


def test_each_host_receives_only_the_rows_and_columns_that_its_ranks_read_and_each_of_them_once(cluster):
    program = Path(__file__).with_name("batch_bytes.py")
    done = cluster.hosts[0].run([sys.executable, str(program), cluster.address], cluster.env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    far = [node for node in found["read"] if node != found["driver"]]
    assert len(far) == 2
    print({node: round(found["received"][node] / found["read"][node], 3) for node in far})  # noqa: T201
    for node in far:
        # A rank cannot read what its host has not received, because each host has a /dev/shm of its own.
        assert 0.95 < found["received"][node] / found["read"][node] < MOST_OF_A_BATCH


def model_in(folder: Path) -> int:
    """Save a random model with the tokens of the task `add`, and return the bytes of its weights in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rltrain.tasks.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, char_tokenizer

    sizes = {**SIZES, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def test_a_host_with_two_engines_receives_the_weights_once_in_a_sync(cluster, tmp_path):
    """The longer run sends four more weight syncs, so the difference in received bytes is nearly that of four syncs."""
    size, received = model_in(tmp_path / "model"), []
    for steps in (2, 6):
        output = tmp_path / f"steps{steps}"
        before = [host.bytes_on_link()[0] for host in cluster.hosts]
        done = cluster.main(
            f"trainer.output_dir={output}", f"model.path={tmp_path / 'model'}", f"trainer.total_steps={steps}",
            "trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=2",
            "rollout.max_prompt_length=16", "rollout.max_response_length=4", "data.val=null", "trainer.save_every=100",
            "placement=disaggregated", "rollout=hf", "placement.actor_ranks=1", "placement.rollout_replicas=5",
            "placement.reward_workers=1",
            timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        received.append([host.bytes_on_link()[0] - start for host, start in zip(cluster.hosts, before, strict=True)])
    table = json.loads((output / "processes.json").read_text())
    node = table["actor rank 0"]["node"]
    engines = Counter(one["node"] for name, one in table.items() if name.startswith("rollout replica"))
    assert sorted(engines[other] for other in engines if other != node) == [2, 2]
    ratios = sorted((many - few) / 4 / size for few, many in zip(*received, strict=True))
    print([round(ratio, 4) for ratio in ratios])  # noqa: T201
    assert ratios[0] < 0.05, "the host of the actor must receive no weights"
    assert all(0.95 < ratio < MOST_OF_A_SYNC for ratio in ratios[1:])
