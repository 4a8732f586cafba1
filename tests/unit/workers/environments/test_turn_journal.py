"""Tests that an interrupted trajectory continues with its recorded turns if its environment behaves as before."""

import asyncio
import dataclasses
import logging
from typing import ClassVar

import openai
import pytest

from rltrain.environments.tool_calls import BrokenCall, ParsedAction, ToolCall
from tests.scripted_turns import REQUEST, Script, limits, say
from workers.environments.agent_program import FunctionProgram
from workers.environments.engines import ReplicaGone
from workers.environments.messages import EnvironmentSource
from workers.environments.turn_journal import JournaledSampler, TurnJournal, digest, fills
from workers.environments.worker import EnvironmentWorker
from workers.rollout.turns import TurnRequest, TurnResult


class Echo:
    """A game with four steps. The class attribute `first` is the observation after the first step."""

    first = "more"
    steps: ClassVar[list[str]] = []

    def reset(self):
        self.count = 0

    def step(self, text):
        self.steps.append(text)
        self.count += 1
        return (self.first, "again", "still")[min(self.count, 3) - 1], 0.5, self.count == 4


class Dying(Script):
    """An engine that dies at the turn `last`."""

    last = 2

    async def sample(self, request):
        if request.key[2] == self.last:
            raise ReplicaGone("killed")
        return await super().sample(request)


def run(folder, engine, request=REQUEST):
    Echo.steps.clear()
    worker = EnvironmentWorker("w", EnvironmentSource("", {}), limits(), folder, threaded=False)
    worker.make = Echo
    try:
        return asyncio.run(worker._trajectory(engine, request))
    finally:
        worker.close()


ACTIONS = [say(text) for text in "abcdefgh"]


def killed_in_turn_2(folder):
    with pytest.raises(ReplicaGone):
        run(folder, Dying(*ACTIONS))


def test_T5_a_killed_trajectory_takes_its_recorded_turns_again_and_samples_only_the_others(tmp_path):
    killed_in_turn_2(tmp_path / "turns")
    engine = Script(*ACTIONS)
    found = run(tmp_path / "turns", engine)
    assert [request.key[2] for request in engine.requests] == [2, 3]
    assert Echo.steps == ["a", "b", "c", "d"]
    undisturbed = run(tmp_path / "other", Script(*ACTIONS))
    # The scripted engine numbers its answers, so only the recorded turns are those of the undisturbed trajectory.
    assert found.turns[:2] == undisturbed.turns[:2]
    assert found.messages == undisturbed.messages
    assert [turn.reward for turn in found.turns] == [turn.reward for turn in undisturbed.turns]


def test_T5_a_trajectory_whose_observations_differ_starts_from_its_prompt_again(tmp_path, monkeypatch):
    killed_in_turn_2(tmp_path)
    monkeypatch.setattr(Echo, "first", "changed")
    engine = Script(*ACTIONS)
    found = run(tmp_path, engine)
    assert [request.key[2] for request in engine.requests] == [0, 1, 2, 3]
    assert [message["content"] for message in found.messages][2::2] == ["changed", "again", "still"]
    again = Script(*ACTIONS)
    assert run(tmp_path, again) == found  # The journal now has the turns of the new start.
    assert again.requests == []


def run_helpers(folder, engine, helpers):
    """Run an agent program that asks once, and then for each helper twice, all helpers at the same time."""

    async def program(base_url, api_key, messages):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

            async def ask(conversation):
                done = await client.chat.completions.create(model="any", messages=conversation)
                return [*conversation, {"role": "assistant", "content": done.choices[0].message.content}]

            async def help_with(name):
                said = await ask([{"role": "user", "content": name}])
                await ask([*said, {"role": "user", "content": f"more {name}"}])

            await ask(messages)
            await asyncio.gather(*[help_with(name) for name in helpers])

    async def running():
        worker = EnvironmentWorker("w", EnvironmentSource("", {}), limits(), folder, threaded=False)
        worker.program = FunctionProgram(program)
        try:
            return await worker._trajectory(engine, REQUEST)
        finally:
            await worker.endpoint.close()
            worker.loop.close()

    return asyncio.run(running())


class DyingLater(Script):
    """An engine that dies when it gets a second request of the helper `search`."""

    async def sample(self, request):
        if request.messages[-1]["content"] == "more search":
            raise ReplicaGone("killed")
        return await super().sample(request)


def test_T5_a_killed_program_takes_its_recorded_turns_again_in_whatever_order_it_asks(tmp_path):
    killed = DyingLater(*ACTIONS)
    with pytest.raises(ReplicaGone):
        run_helpers(tmp_path, killed, ["search", "compare"])
    engine = Script(*ACTIONS)
    found = run_helpers(tmp_path, engine, ["compare", "search"])
    recorded = {request.messages[-1]["content"] for request in killed.requests}
    assert {"go", "search"} <= recorded
    sampled = [request.messages[-1]["content"] for request in engine.requests]
    assert sorted([*recorded, *sampled]) == ["compare", "go", "more compare", "more search", "search"]
    assert (len(found.turns), found.stop_reason) == (5, "done")


def test_the_random_stream_of_a_turn_does_not_depend_on_the_order_of_the_requests(tmp_path):
    seeds = []
    for name in ("ab", "ba"):
        engine = Script(*[say("same")] * 8)
        run_helpers(tmp_path / name, engine, name)
        seeds.append({request.messages[-1]["content"]: request.seed for request in engine.requests if request.key[2]})
    # The second request of a helper has other sampled tokens in its context, so it may have another random stream.
    assert [seeds[0][name] for name in "ab"] == [seeds[1][name] for name in "ab"]
    assert len({*seeds[0].values()}) == 4


@pytest.mark.parametrize(
    ("size", "reason", "room", "fits"),
    [(4, "stop", 6, True), (4, "stop", 5, True), (4, "stop", 4, False), (4, "length", 5, True), (4, "length", 6, False),
     (8, "length", 99, True)],
)  # fmt: skip
def test_a_recorded_action_is_used_if_sampling_with_the_room_of_the_request_would_give_it(size, reason, room, fits):
    """The turn has one token before its action, and a request asks for at most 8 tokens."""
    recorded = dataclasses.replace(result(1, [1] * size), finish_reason=reason)
    assert fills(recorded, dataclasses.replace(turn(1), room=room, max_tokens=8)) == fits


def test_other_samples_of_a_group_have_turns_of_their_own(tmp_path):
    killed_in_turn_2(tmp_path)
    other, engine = dataclasses.replace(REQUEST, key=(3, 0)), Script(*ACTIONS)
    run(tmp_path, engine, other)
    assert len(engine.requests) == 4
    assert len(TurnJournal(tmp_path).turns((3, 0))) == 4
    assert len(TurnJournal(tmp_path).turns((3, 1))) == 2


def test_a_turn_that_is_sampled_again_replaces_the_later_turns(tmp_path):
    journal = TurnJournal(tmp_path)
    for number, token in ((0, 1), (1, 2), (2, 3), (1, 4)):
        journal.add(turn(number), result(number, [token]))
    assert [one.result.token_ids for one in journal.turns((7, 0))] == [[1], [4]]


def test_an_incomplete_line_of_a_killed_process_hides_no_later_line(tmp_path):
    journal = TurnJournal(tmp_path)
    journal.add(turn(0), result(0, [1]))
    path = tmp_path / "7.jsonl"
    path.write_text(path.read_text() + '\n{"sample": 0, "turn": 1, "req')
    TurnJournal(tmp_path).add(turn(1), result(1, [2]))
    assert [one.result.token_ids for one in journal.turns((7, 0))] == [[1], [2]]


def test_turns_of_weights_after_the_checkpoint_are_dropped(tmp_path):
    journal = TurnJournal(tmp_path)
    for number, versions in enumerate(([4, 4], [4, 5], [5])):
        journal.add(turn(number), result(number, [1] * len(versions), versions))
    journal.add(dataclasses.replace(turn(0), key=(8, 0, 0)), result(0, [1], [6]))
    journal.keep_until(4)
    assert len(journal.turns((7, 0))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["7.jsonl"]
    journal.forget([7, 8])
    assert list(tmp_path.iterdir()) == []


def test_a_recorded_turn_is_read_as_it_was_sampled(tmp_path):
    calls = [ToolCall("look", {"at": [1, None, "é"]}, "abc"), BrokenCall("<tool_call>{", "no JSON", "abd")]
    sampled = TurnResult(
        (7, 0, 0), [1, 2], [3, 4], [-0.1, float("-inf")], [0, 1], "stop", "text", ParsedAction("say", calls),
        [{"role": "user", "content": "\u2028 line\n"}], serial=5, written="as written",
    )  # fmt: skip
    journal = TurnJournal(tmp_path)
    journal.add(turn(0), sampled)
    (found,) = journal.turns((7, 0))
    assert found.result == dataclasses.replace(sampled, serial=0)
    assert found.request == digest(turn(0))


@pytest.mark.parametrize(
    "changed",
    [
        {"context_ids": [1, 3]}, {"action_ids": [2]}, {"messages": [{"role": "user", "content": "b"}]}, {"room": 9},
        {"temperature": 0.5}, {"seed": 2}, {"tools": []}, {"max_tokens": 7},
    ],
)  # fmt: skip
def test_a_digest_tells_apart_requests_whose_actions_have_other_distributions(changed):
    assert digest(dataclasses.replace(turn(0), **changed)) != digest(turn(0))


def test_a_digest_does_not_depend_on_the_number_of_the_request():
    assert digest(dataclasses.replace(turn(0), serial=9)) == digest(turn(0))


def test_a_journal_that_cannot_be_written_says_so_once_and_ends_no_trajectory(tmp_path, caplog):
    (tmp_path / "turns").write_text("a file")
    with caplog.at_level(logging.WARNING):
        found = run(tmp_path / "turns", Script(*ACTIONS))
    assert found.stop_reason == "done"
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


def test_a_turn_without_an_action_is_not_recorded(tmp_path):
    sampler = JournaledSampler(Script(say("a")), TurnJournal(tmp_path), [])
    asyncio.run(sampler.sample(dataclasses.replace(turn(0), room=0)))
    assert list(tmp_path.iterdir()) == []


def turn(number):
    message = {"role": "user", "content": "a"}
    return TurnRequest((7, 0, number), [1], [], [message], 10, 10, 10, 10, 1.0, 1)


def result(number, ids, versions=(0,)):
    return TurnResult((7, 0, number), [1], ids, [-0.5] * len(ids), list(versions), "stop", "t", say("t"))
