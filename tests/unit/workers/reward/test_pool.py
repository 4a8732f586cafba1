"""Tests of the reward pool, first with fake workers that follow a script, and then with all parts in one process."""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose
from rltrain.settings.reward_config import RewardConfig, RewardFunctionConfig, RewardModelConfig
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.pool import RewardPool
from workers.reward.transport import Answer, Call, Held, Lost
from workers.reward.worker import RewardWorker

UNUSED = "rltrain.rewards.final_answer:final_answer"  # the fake workers never call the reward function


def function(name: str, path: str = UNUSED, **changes) -> RewardFunctionConfig:
    return reward_function(name, path, **changes)


def reward(functions: list[RewardFunctionConfig], **changes) -> RewardConfig:
    return replace(compose([])[0].reward, functions=functions, **{"timeout_s": 2.0} | changes)


FUNCTIONS = [function("number")]
TWO = [*FUNCTIONS, function("length", weight=2.0)]
ROUNDS = 20_000


class ScriptedWorkers:
    """Fake workers whose answers and losses follow a script.

    The function `lose(request, function, rng)` decides whether and how a worker is lost during a call.

    Answers arrive in random order, some answers contain only the first results, and a lost worker is replaced later.
    """

    def __init__(self, size: int, functions: int, lose, seed: int = 0) -> None:
        self.size, self._functions, self._lose = size, functions, lose
        self._rng = random.Random(seed)
        self._calls: dict[int, Call] = {}
        self._away: set[int] = set()
        self.log: list[Call] = []
        self.closed = self.rounds = 0

    def idle(self) -> list[int]:
        return [slot for slot in range(self.size) if slot not in self._calls and slot not in self._away]

    def start(self, slot: int, call: Call) -> None:
        assert slot in self.idle()
        self._calls[slot] = call
        self.log.append(call)

    async def events(self) -> list[Answer | Held | Lost]:
        self.rounds += 1
        assert self.rounds < ROUNDS, "the pool did not finish in time"
        await asyncio.sleep(0)
        return self._next()

    def _next(self) -> list[Answer | Held | Lost]:
        if self._away and (not self._calls or self._rng.random() < 0.5):
            self._away.pop()
            return []
        if not self._calls:
            return []
        slot = self._rng.choice(sorted(self._calls))
        return [self._outcome(slot, self._calls.pop(slot))]

    def close(self) -> None:
        self.closed += 1

    def _outcome(self, slot: int, call: Call) -> Answer | Lost:
        chosen = range(self._functions) if call.function is None else [call.function]
        fates = [self._lose(request, function, self._rng) for request in call.requests for function in chosen]
        if fate := next((fate for fate in fates if fate), None):
            self._away.add(slot)
            return Lost(slot, timed_out=fate == "late", reason="ended its process")
        count = self._rng.randint(1, len(call.requests))
        results = [
            SampleScores(r.key, tuple(float(r.response) * 10**function for function in chosen))
            for r in call.requests[:count]
        ]
        # the last result lacks a score, as if the time budget had run out between two functions
        if count < len(call.requests) and call.function is None:
            last = results[-1]
            results[-1] = SampleScores(last.key, last.scores[:1])
        return Answer(slot, results)


def request(number: int, response: str | None = None, **columns) -> RewardRequest:
    return RewardRequest((number // 8, number % 8), "p", str(number) if response is None else response, columns)


async def finish(pool: RewardPool) -> list[SampleScores]:
    results: list[SampleScores] = []
    while pool.pending:
        results += await pool.poll()
    return results


def expected(number: int, functions: int) -> SampleScores:
    return SampleScores((number // 8, number % 8), tuple(float(number) * 10**f for f in range(functions)))


# Tests that every score belongs to its response


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("functions", [FUNCTIONS, TWO], ids=["one", "two"])
async def test_G3_score_i_belongs_to_response_i_under_losses_retries_and_any_order(seed, functions):
    deadly = {7: "late", 300: "dead", 301: "dead"}
    rng = random.Random(seed)

    def lose(asked: RewardRequest, function: int, dice: random.Random) -> str | None:
        return deadly.get(int(asked.response)) if function == len(functions) - 1 else None

    workers = ScriptedWorkers(3, len(functions), lose, seed)
    pool = RewardPool(workers, reward(functions))
    results, numbers = [], list(range(512))
    rng.shuffle(numbers)
    while numbers:
        count = rng.randint(1, 60)
        pool.submit(request(n) for n in numbers[:count])
        del numbers[:count]
        results += await pool.poll()
    results += await finish(pool)
    # no result is lost, and no result arrives twice
    assert Counter(r.key for r in results) == Counter(request(n).key for n in range(512))
    good = {r.key: r for r in results if not r.failed}
    assert good == {(n // 8, n % 8): expected(n, len(functions)) for n in range(512) if n not in deadly}
    last = functions[-1].name
    assert {r.key: r.error for r in results if r.failed} == {
        (0, 7): f"reward function '{last}' did not return within 2 s",
        (37, 4): f"reward function '{last}' ended its process",
        (37, 5): f"reward function '{last}' ended its process",
    }


async def test_G3_a_worker_that_dies_of_something_else_costs_no_sample():
    lost = iter(["dead"] + [None] * 10_000)
    pool = RewardPool(ScriptedWorkers(1, 1, lambda *_: next(lost)), reward(FUNCTIONS))
    pool.submit([request(3)])
    assert await finish(pool) == [expected(3, 1)]


async def test_G2_a_lone_sample_that_takes_too_long_is_not_tried_again():
    workers = ScriptedWorkers(1, 1, lambda *_: "late")
    pool = RewardPool(workers, reward(FUNCTIONS))
    pool.submit([request(3)])
    (result,) = await finish(pool)
    assert (result.failed, result.scores, len(workers.log)) == (True, (None,), 1)


async def test_chunks_grow_while_they_come_back_whole_and_are_shared_out_among_the_workers():
    workers = ScriptedWorkers(2, 1, lambda *_: None)
    workers._rng.randint = lambda low, high: high  # each worker returns all results of a call at once
    pool = RewardPool(workers, reward(FUNCTIONS))
    pool.submit(request(n) for n in range(512))
    assert len(await finish(pool)) == 512
    sizes = [len(call.requests) for call in workers.log]
    assert sizes[:2] == [16, 16]
    assert 64 <= max(sizes) <= 256
    assert len(sizes) < 16


async def test_chunks_shrink_to_what_a_slow_function_can_do():
    workers = ScriptedWorkers(1, 1, lambda *_: None)
    workers._rng.randint = lambda low, high: 1
    pool = RewardPool(workers, reward(FUNCTIONS))
    pool.submit(request(n) for n in range(64))
    await finish(pool)
    assert max(len(call.requests) for call in workers.log[2:]) <= 8


async def test_a_sample_cannot_be_submitted_twice_before_its_result_was_polled():
    pool = RewardPool(ScriptedWorkers(1, 1, lambda *_: None), reward(FUNCTIONS))
    pool.submit([request(3)])
    with pytest.raises(ValueError, match=r"sample \(0, 3\) is being scored already"):
        pool.submit([request(3)])
    await finish(pool)
    pool.submit([request(3)])
    assert await finish(pool) == [expected(3, 1)]


async def test_polling_with_nothing_pending_returns_at_once_and_closing_drops_what_is_left():
    workers = ScriptedWorkers(1, 1, lambda *_: None)
    with RewardPool(workers, reward(FUNCTIONS)) as pool:
        assert await pool.poll() == []
        assert workers.rounds == 0
        pool.submit([request(1), request(2)])
        assert pool.pending == 2
    assert (pool.pending, workers.closed) == (0, 1)


async def test_poll_waits_until_there_are_results_and_begins_nothing_after_it_was_cancelled():
    class Gated(ScriptedWorkers):
        gate = asyncio.Event()

        async def events(self):
            await self.gate.wait()
            return await super().events()

    workers = Gated(1, 1, lambda *_: None)
    workers._rng.randint = lambda low, high: high
    pool = RewardPool(workers, reward(FUNCTIONS))
    pool.submit(request(n) for n in range(40))
    polling = asyncio.create_task(pool.poll())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not polling.done()
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling
    assert (len(workers.log), pool.pending) == (1, 40)
    workers.gate.set()
    assert sorted(await finish(pool), key=lambda r: r.key) == [expected(n, 1) for n in range(40)]


# Tests of calls that take a long time


class Slow(ScriptedWorkers):
    """A fake worker with a spare process.

    A call that scores a response in `fates` is first reported as slow (`Held`), and then ends as `fates` determines.
    """

    def __init__(self, functions: int, fates: dict[str, str]) -> None:
        super().__init__(2, functions, lambda *_: None)
        self._rng.randint = lambda low, high: high
        self.size, self.fates, self.held = 1, fates, {}

    def idle(self):
        active = [slot for slot in self._calls if slot not in self.held]
        return [] if active else [slot for slot in (0, 1) if slot not in self._calls][:1]

    def _next(self):
        for slot, call in list(self._calls.items()):
            slow = [row for row, request in enumerate(call.requests) if request.response in self.fates]
            if slot not in self.held:
                if not slow:
                    return [self._outcome(slot, self._calls.pop(slot))]
                self.held[slot] = call.requests[slow[0]]
                return [Held(slot, self._so_far(call, slow[0]))]
        slot, request = self.held.popitem()
        call = self._calls.pop(slot)
        if self.fates[request.response] == "answers":
            return [Answer(slot, self._outcome(slot, replace(call, requests=(request,))).results)]
        late, now = self.fates[request.response] == "late", self._so_far(call, call.requests.index(request))
        return [Lost(slot, timed_out=late, reason="ended its process", results=now[call.requests.index(request) :])]

    def _so_far(self, call, row):
        """Return the complete results of all rows before `row`, and the first of two scores of `row` itself."""
        results = [SampleScores(r.key, (float(r.response), 1.0)[: self._functions]) for r in call.requests[: row + 1]]
        results[-1] = replace(results[-1], scores=results[-1].scores[: self._functions - 1])
        return results if self._functions > 1 else results[:-1]


@pytest.mark.parametrize("functions", [FUNCTIONS, TWO], ids=["one", "two"])
async def test_G3_a_call_that_takes_long_gives_back_the_samples_behind_it_and_fails_alone(functions):
    workers = Slow(len(functions), {"3": "late"})
    pool = RewardPool(workers, reward(functions))
    pool.submit(request(n) for n in range(12))
    results = await finish(pool)
    assert [r.key for r in results[-1:]] == [(0, 3)], "other samples wait for the slow one"
    assert sorted(r.key for r in results) == [request(n).key for n in range(12)]
    assert [(r.key, r.error, r.failed_function) for r in results if r.failed] == [
        ((0, 3), f"reward function '{functions[-1].name}' did not return within 2 s", len(functions) - 1)
    ]
    asked = [r.response for call in workers.log for r in call.requests]
    assert asked.count("3") == 1
    assert workers.log[0].hold_s < workers.log[0].deadline_s


async def test_a_call_that_takes_long_and_answers_has_its_score_and_leaves_the_size_of_chunks():
    workers = Slow(1, {"3": "answers"})
    pool = RewardPool(workers, reward(FUNCTIONS))
    pool.submit(request(n) for n in range(64))
    assert sorted(await finish(pool), key=lambda r: r.key) == [expected(n, 1) for n in range(64)]
    # calls contain more samples after earlier calls have returned all results
    assert [len(call.requests) for call in workers.log] == [16, 16, 44]


async def test_after_a_death_whose_call_is_known_the_others_of_its_chunk_are_not_tried_one_by_one():
    def lose(asked, function, dice):
        return "dead" if asked.response == "3" else None

    class Known(ScriptedWorkers):
        def _outcome(self, slot, call):
            event = super()._outcome(slot, call)
            before = [r for r in call.requests if r.key < (0, 3)]
            known = [SampleScores(r.key, (float(r.response),)) for r in before]
            return replace(event, results=known) if isinstance(event, Lost) else event

    workers = Known(1, 1, lose)
    workers._rng.randint = lambda low, high: high
    pool = RewardPool(workers, reward(FUNCTIONS))
    pool.submit(request(n) for n in range(12))
    results = await finish(pool)
    assert [r.key for r in results if r.failed] == [(0, 3)]
    assert sorted(r.key for r in results) == [request(n).key for n in range(12)]
    assert [[int(r.response) for r in call.requests] for call in workers.log] == [[*range(12)], [3], [*range(4, 12)]]


def test_async_calls_are_never_held_as_more_of_them_would_exceed_the_concurrency(tmp_path):
    (tmp_path / "own.py").write_text("async def score(response):\n    return 1.0\n")
    workers = ScriptedWorkers(1, 1, lambda *_: None)
    pool = RewardPool(workers, reward([function("score", f"{tmp_path}/own.py:score")]))
    pool.submit([request(3)])
    assert (workers.log[0].hold_s, workers.log[0].stepwise) == (float("inf"), False)


# Tests of the pool with all parts in one process


REWARDS = """
import sys, time
from rltrain.rewards.result import RewardResult

def number(response):
    if response == "raise":
        raise ValueError("no\\nnumber")
    if response == "exit":
        sys.exit(3)
    if response == "nan":
        return float("nan")
    return None if response == "none" else float(response)

def length(response, *, unit=1):
    return unit * len(response)

def slow(response):
    time.sleep(0.06)
    return float(response)

def correct(response):
    return RewardResult(score=1.0, success=response == "1")
"""


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)

    def configs(*names: str) -> list[RewardFunctionConfig]:
        return [function(n, f"{tmp_path}/rewards.py:{n}") for n in names]

    return configs


async def test_in_process_every_function_scores_every_sample_in_the_order_of_the_config(rewards):
    pool = RewardPool.in_process(reward(rewards("length", "number")))
    pool.submit([request(1, "25", unit=2), request(2, "7")])
    assert await finish(pool) == [SampleScores((0, 1), (4.0, 25.0)), SampleScores((0, 2), (1.0, 7.0))]


async def test_what_functions_decide_about_correctness_is_kept_if_a_sample_is_scored_in_several_calls(
    rewards, monkeypatch
):
    # with a time budget of 0, each call scores one sample with one reward function
    monkeypatch.setattr("workers.reward.pool._BUDGET_S", 0.0)
    pool = RewardPool.in_process(reward(rewards("correct", "number", "length")))
    pool.submit([request(1, "1"), request(2, "2")])
    assert sorted(await finish(pool), key=lambda r: r.key) == [
        SampleScores((0, 1), (1.0, 1.0, 1.0), success=True),
        SampleScores((0, 2), (1.0, 2.0, 1.0), success=False),
    ]


async def test_without_functions_as_beside_reward_models_nobody_is_called_and_nobody_can_be_lost():
    workers = ScriptedWorkers(2, 0, lose=lambda *_: "gone")
    pool = RewardPool(
        workers,
        reward(
            [],
            models=[
                RewardModelConfig(
                    name="rm", path="/m", weight=1.0, gate=False, outcome=True, success=None, prompt_template=None
                )
            ],
        ),
    )
    pool.submit([request(1, "25"), request(2, "7")])
    assert await finish(pool) == [SampleScores((0, 1), ()), SampleScores((0, 2), ())]
    assert workers.log == []


async def test_G4_a_component_that_does_not_apply_is_none_and_the_others_count(rewards):
    pool = RewardPool.in_process(reward(rewards("number", "length")))
    pool.submit([request(1, "none")])
    assert await finish(pool) == [SampleScores((0, 1), (None, 4.0))]


async def test_G4_a_row_to_which_nothing_applies_is_all_none_and_not_failed(rewards):
    pool = RewardPool.in_process(reward(rewards("number")))
    pool.submit([request(1, "none")])
    assert await finish(pool) == [SampleScores((0, 1), (None,), failed=False)]


async def test_G2_a_reward_that_raises_exits_or_returns_nonsense_is_failed_and_never_0(rewards):
    pool = RewardPool.in_process(reward(rewards("length", "number")))
    pool.submit([request(n, text) for n, text in enumerate(["raise", "5", "exit", "nan"])])
    results = await finish(pool)
    assert [(r.failed, r.scores) for r in results] == [
        (True, (None, None)),
        (False, (1.0, 5.0)),
        (True, (None, None)),
        (True, (None, None)),
    ]
    first, _, second, third = (r.error for r in results)
    assert first.startswith("reward function 'number' raised ValueError: no number (")
    assert first.endswith("rewards.py:7)")
    assert second.startswith("reward function 'number' raised SystemExit: 3 (")
    assert third.startswith("reward function 'number' returned nan: a score must be finite")


async def test_slow_functions_give_their_first_results_before_the_last_is_begun(rewards):
    pool = RewardPool.in_process(reward(rewards("slow", "number")))
    pool.submit(request(n) for n in range(8))
    first = await pool.poll()
    assert 1 <= len(first) < 8
    assert sorted(r.scores for r in first + await finish(pool)) == [(float(n), float(n)) for n in range(8)]


async def test_in_process_an_async_function_is_called_though_an_event_loop_runs_here(tmp_path):
    (tmp_path / "own.py").write_text(
        "import asyncio\nasync def score(response):\n    await asyncio.sleep(0)\n    return float(response)\n"
    )
    pool = RewardPool.in_process(reward([function("score", f"{tmp_path}/own.py:score")]))
    pool.submit([request(3), request(4)])
    assert await finish(pool) == [expected(3, 1), expected(4, 1)]


async def test_in_process_other_tasks_of_the_driver_run_between_two_calls(rewards):
    pool = RewardPool.in_process(reward(rewards("slow", "number")))
    pool.submit(request(n) for n in range(8))
    polling = asyncio.create_task(finish(pool))
    turns = 0
    while not polling.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(polling.result()) == 8
    assert turns > 2


def test_a_worker_stops_between_functions_when_its_time_is_up(rewards):
    worker = RewardWorker(rewards("slow", "number"))
    assert worker.score([request(3), request(4)], budget_s=0.0) == [SampleScores((0, 3), (3.0,))]
    assert worker.score([request(3)], function=1) == [SampleScores((0, 3), (3.0,))]
    assert len(worker.score([request(3), request(4)])) == 2


def test_a_function_that_cannot_be_loaded_is_a_config_error(rewards):
    with pytest.raises(ConfigError, match="has no function 'nmber'; the nearest is 'number'"):
        RewardPool.in_process(reward(rewards("nmber")))


@pytest.mark.parametrize("module", ["workers.reward.worker", "workers.reward.pool", "workers.reward.messages"])
def test_importing_it_imports_neither_torch_nor_ray(module):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
