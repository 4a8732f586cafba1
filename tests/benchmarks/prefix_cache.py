"""Measures the share of context tokens that vLLM takes from its prefix cache, in all turns but the first.

A hundred conversations of eight turns run at the same time in one process. The prompt has about 200 tokens, an answer
64 on average, and a reply of the environment about 30. The benchmark uses the model of `slow_tools`.

    python -m tests.benchmarks.prefix_cache
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import tests.benchmarks.inside  # noqa: F401  sets environment variables that must be set before torch is imported
from tests.benchmarks.row import Row
from tests.benchmarks.slow_tools import save_model
from tests.chat_model import chat_tokenizer

CONVERSATIONS, TURNS, LEAST = 100, 8, 0.9
QUESTION, REPLY = "Here is a question with some words in it. " * 4, "The answer is not that. "


class Talk:
    """An environment that always gives the same reply."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the reply."""
        return REPLY, 0.0, False


def measure(folder: Path) -> tuple[int, int]:
    """Return the number of context tokens in all turns but the first, and the number of them in the cache."""
    from rltrain.settings.compose import compose
    from workers.environments.engines import LocalConnection, ReplicaClient
    from workers.environments.episode import run_episode
    from workers.environments.messages import EpisodeRequest, Limits
    from workers.environments.user_environment import UserEnvironment
    from workers.rollout.turns import TurnFormat
    from workers.rollout.worker import RolloutWorker

    save_model(folder)
    config, _ = compose(
        [
            f"model.path={folder}", "data.train=builtin:median", "rollout.max_prompt_length=400", "reward=median",
            "rollout.max_response_length=3000", f"rollout.max_concurrent_sequences={CONVERSATIONS}",
        ]
    )  # fmt: skip
    worker = RolloutWorker(
        config, str(folder), [chat_tokenizer().eos_token_id], threaded=False, turn_format=TurnFormat((), "json")
    )
    counted, seen = [0, 0], set[tuple[int, ...]]()
    core: Any = worker.engine
    step = core.engine.step

    def counting_step() -> list[Any]:
        found: list[Any] = step()
        for output in found:
            if output.finished:
                trajectory = core.requests[output.request_id].key[:2]
                if trajectory in seen:
                    counted[0] += len(output.prompt_token_ids)
                    counted[1] += output.num_cached_tokens
                seen.add(trajectory)
        return found

    core.engine.step = counting_step
    limits = Limits(TURNS, 400, 3000, 1000, 100, 60.0, 600.0)

    async def converse() -> None:
        replica = ReplicaClient(LocalConnection(worker), "benchmark")
        requests = [
            EpisodeRequest((uid, 0), [{"role": "user", "content": f"{uid}: {QUESTION}"}], {}, temperature=1.0, seed=uid)
            for uid in range(CONVERSATIONS)
        ]
        await asyncio.gather(
            *[run_episode(one, replica, lambda: UserEnvironment(Talk, {}, 60.0), limits) for one in requests]
        )

    asyncio.run(converse())
    worker.close()
    return counted[0], counted[1]


def run() -> list[Row]:
    """Return one row of results: the share of the context tokens that come from the cache."""
    with tempfile.TemporaryDirectory() as name:
        total, cached = measure(Path(name) / "model")
    return [
        Row(
            "context tokens of later turns that come from the prefix cache",
            cached / total,
            "of the context tokens from the second turn on",
            f">= {LEAST:g}",
            f"{cached:,} tokens",
            f"{total:,} tokens",
            f"{CONVERSATIONS} conversations of {TURNS} turns; vLLM on a CPU, blocks of 32 tokens",
            "python -m tests.benchmarks.prefix_cache",
        )
    ]


if __name__ == "__main__":
    for row in run():
        sys.stdout.write(f"{row}\n")
