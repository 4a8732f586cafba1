"""Shared fixtures of all tests, such as tiny models and a local Ray, and a time limit for whole test sessions.

If the environment variable RLTRAIN_TEST_BUDGET_S is set, pytest starts no test after this number of seconds. At the
end, pytest names the tests that it did not run.
"""

import os
import time

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", RAY_USAGE_STATS_ENABLED="0")

import pytest
import torch

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose

BUDGET_S, BEGAN = float(os.environ.get("RLTRAIN_TEST_BUDGET_S", "inf")), time.monotonic()
LEFT_OUT = f"the time budget of {BUDGET_S:.0f} s is used up"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip a test if the time budget of the session is used up."""
    if time.monotonic() - BEGAN > BUDGET_S:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were skipped because the time budget of the session was used up."""
    names = [report.nodeid for report in terminalreporter.stats.get("skipped", ()) if LEFT_OUT in str(report.longrepr)]
    for name in names:
        terminalreporter.write_line(f"NOT RUN {name}: {LEFT_OUT}")


@pytest.fixture(scope="session")
def start(tmp_path_factory) -> str:
    """Return the directory of a tiny model after a few supervised steps.

    The model's answers vary, and some of them end with an end token.
    """
    from rltrain.tasks import TASKS
    from rltrain.tasks.tiny_model import make_start

    return str(make_start(TASKS["median"], tmp_path_factory.mktemp("models") / "start", seed=0, steps=12))


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory) -> str:
    """Return the directory of a tiny random reward model with the built-in tokenizer."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from rltrain.tasks.tokenizer import PAD_ID, VOCAB_SIZE, char_tokenizer

    path, config = tmp_path_factory.mktemp("models") / "judge", Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=PAD_ID, bos_token_id=None,
        eos_token_id=None, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForSequenceClassification(config).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
async def tasks():
    """Yield the background tasks of a run. The tasks are cancelled at the end of the test."""
    async with BackgroundTasks() as running:
        yield running


@pytest.fixture(scope="session")
def process_group():
    """Join a process group with the test process as its only rank."""
    from workers.cluster.torch_process_group import join

    join(0, 1, None, 60.0)


@pytest.fixture(scope="session")
def ray_here():
    """Start Ray on the local machine when the first test asks for it."""
    from workers.cluster.ray_connection import connect, disconnect

    config, _ = compose([])
    connect(config)
    yield
    disconnect()


@pytest.fixture(scope="session")
def sampled_batch() -> DataProto:
    """Return a batch like that of a finished rollout, with random tokens and advantages.

    Every seventh answer is empty.
    """
    generator = torch.Generator().manual_seed(0)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(48, 58, (length,), generator=generator).tolist()

    rows = 12
    responses = [[] if row % 7 == 6 else ids(1, 12) for row in range(rows)]
    tokens = sum(map(len, responses))
    batch = DataProto.from_dict(
        {
            "prompts": jagged([ids(2, 9) for _ in range(rows)], torch.int64),
            "responses": jagged(responses, torch.int64),
            "uid": torch.arange(rows) // 4,
        }
    )
    return batch.with_values(
        "responses",
        response_mask=torch.ones(tokens, dtype=torch.bool),
        advantages=torch.randn(tokens, generator=generator),
        rollout_log_probs=-torch.rand(tokens, generator=generator),
    )
