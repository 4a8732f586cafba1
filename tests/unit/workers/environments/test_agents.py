"""Tests of agent programs, which ask the policy through the unmodified client of OpenAI, with scripted answers."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import openai
import psutil
import pytest

from rltrain.base.errors import ConfigError
from rltrain.environments.tool_calls import BrokenCall, ParsedAction, ToolCall
from rltrain.run.environments import agent_of
from tests.scripted_turns import END, REQUEST, Script, call, limits, say
from workers.environments.agent_endpoint import AgentEndpoint
from workers.environments.agent_program import CommandProgram, FunctionProgram, run_agent
from workers.environments.agent_session import shown
from workers.environments.engines import ReplicaClient, ReplicaGone
from workers.environments.recording import ATTEMPTS

PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up a price.",
        "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
    },
}
ASK = call(("price", {"fruit": "pear"}))


def run(engine, program, **changed):
    async def running():
        endpoint = AgentEndpoint()
        chosen = program if isinstance(program, CommandProgram) else FunctionProgram(program)
        try:
            return await run_agent(REQUEST, engine, chosen, endpoint, limits(**changed))
        finally:
            await endpoint.close()

    return asyncio.run(running())


def client_of(base_url, api_key):
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def call_and_result(client, messages):
    """Let the model call the tool, and return two messages: the model's call and the tool's result."""
    done = await client.chat.completions.create(model="any", messages=messages, tools=[PRICE])
    made = done.choices[0].message
    return [made, {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "4"}]


# Tests of one program that is written for each API


async def shop(base_url, api_key, messages):
    """Ask for a price with the API chat completions, and return a result for each tool call of the model."""
    async with client_of(base_url, api_key) as client:
        while True:
            done = await client.chat.completions.create(model="any", messages=messages, tools=[PRICE])
            choice = done.choices[0]
            assert done.usage.completion_tokens == 2
            if choice.finish_reason != "tool_calls":
                return len(choice.message.content)
            messages.append(choice.message)
            for made in choice.message.tool_calls:
                fruit = json.loads(made.function.arguments)["fruit"]
                messages.append({"role": "tool", "tool_call_id": made.id, "content": f"{fruit}: 4"})


async def streamed_shop(base_url, api_key, messages):
    async with client_of(base_url, api_key) as client:
        while True:
            stream = await client.chat.completions.create(
                model="any", messages=messages, tools=[PRICE], stream=True, stream_options={"include_usage": True}
            )
            content, calls, reason, usage = "", [], None, None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
                    reason = choice.finish_reason or reason
            assert usage.completion_tokens == 2
            if reason == "stop":
                return len(content)
            made = [one.model_dump(exclude={"index"}) for one in calls]
            messages.append({"role": "assistant", "content": content or None, "tool_calls": made})
            messages += [{"role": "tool", "tool_call_id": one.id, "content": "pear: 4"} for one in calls]


FLAT = [{"type": "function", "strict": True, **PRICE["function"]}]


async def shop_with_responses(base_url, api_key, messages):
    items = list(messages)
    async with client_of(base_url, api_key) as client:
        while True:
            done = await client.responses.create(model="any", input=items, tools=FLAT)
            items += done.output
            calls = [item for item in done.output if item.type == "function_call"]
            if not calls:
                return len(done.output_text)
            items += [{"type": "function_call_output", "call_id": one.call_id, "output": "pear: 4"} for one in calls]


async def shop_with_earlier_responses(base_url, api_key, messages):
    async with client_of(base_url, api_key) as client:
        first = await client.responses.create(model="any", input=messages, tools=FLAT)
        (made,) = first.output
        result = {"type": "function_call_output", "call_id": made.call_id, "output": "pear: 4"}
        last = await client.responses.create(model="any", input=[result], tools=FLAT, previous_response_id=first.id)
        return len(last.output_text)


async def shop_with_streamed_responses(base_url, api_key, messages):
    items = list(messages)
    async with client_of(base_url, api_key) as client:
        while True:
            text, numbers, done = "", [], None
            async for event in await client.responses.create(model="any", input=items, tools=FLAT, stream=True):
                numbers.append(event.sequence_number)
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type == "response.completed":
                    done = event.response
            assert numbers == list(range(len(numbers)))
            assert text == done.output_text
            items += done.output
            calls = [item for item in done.output if item.type == "function_call"]
            if not calls:
                return len(text)
            items += [{"type": "function_call_output", "call_id": one.call_id, "output": "pear: 4"} for one in calls]


def blocking_shop(base_url, api_key, messages):
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        first = client.chat.completions.create(model="any", messages=messages, tools=[PRICE])
        call = first.choices[0].message
        result = {
            "role": "tool",
            "tool_call_id": call.tool_calls[0].id,
            "content": [{"type": "text", "text": "pear: 4"}],
        }
        done = client.chat.completions.create(model="any", messages=[*messages, call, result], tools=[PRICE])
        return len(done.choices[0].message.content)


PROGRAMS = [
    shop, streamed_shop, shop_with_responses, shop_with_earlier_responses, shop_with_streamed_responses, blocking_shop,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_each_form_of_the_api_gives_the_same_trajectory(program):
    engine = Script(ASK, say("four"))
    found = run(engine, program)
    assert (found.stop_reason, found.error, found.reward, found.finish_reason) == ("done", "", 4.0, "stop")
    assert list(found.response_ids()) == [50, END, 11, 51, END]
    assert [list(turn.log_probs) for turn in found.turns] == [[-0.5, -0.25]] * 2
    assert [list(turn.versions) for turn in found.turns] == [[0, 0], [1, 1]]
    first, second = engine.requests
    assert first.messages == [{"role": "user", "content": "go"}]
    assert second.messages == [{"role": "tool", "content": "pear: 4", "tool_call_id": "c0", "name": "price"}]
    assert (list(second.context_ids), list(second.action_ids)) == ([1], [50, END])
    assert list(first.tools) == list(second.tools) == [PRICE]
    assert [one["role"] for one in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "price", "arguments": {"fruit": "pear"}}
    assert found.tool_calls == 1


# Records


def test_T8_a_repeated_request_gets_the_recorded_answer_and_is_sampled_once():
    seen = []

    async def twice(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            ask = lambda: client.chat.completions.create(model="any", messages=messages)  # noqa: E731
            both = await asyncio.gather(ask(), ask())
            seen.extend([one.id, one.choices[0].message.content] for one in [*both, await ask()])

    engine = Script(say("once"))
    found = run(engine, twice)
    assert len(engine.requests) == len(found.turns) == 1
    assert [seen[0]] * 3 == seen
    assert seen[0][1] == "once"


def test_T8_a_request_after_the_end_is_refused():
    kept = {}

    async def keep(base_url, api_key, messages):
        kept.update(base_url=base_url, api_key=api_key)
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=messages)

    async def running():
        endpoint, engine = AgentEndpoint(), Script(say("a"), say("b"))
        try:
            found = await run_agent(REQUEST, engine, FunctionProgram(keep), endpoint, limits())
            async with client_of(**kept) as client:
                with pytest.raises(openai.AuthenticationError, match="has ended, or the key is wrong"):
                    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "more"}])
        finally:
            await endpoint.close()
        return found, engine

    found, engine = asyncio.run(running())
    assert len(found.turns) == len(engine.requests) == 1


def test_rewards_are_of_the_conversation_or_of_single_answers():
    async def returned(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            first = await client.chat.completions.create(model="any", messages=messages)
            more = [*messages, first.choices[0].message, {"role": "user", "content": "on"}]
            last = await client.chat.completions.create(model="any", messages=more)
        return {first.id: 0.25, last.id: 1}

    async def sent(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            first = await client.chat.completions.create(model="any", messages=messages)
        head = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=head) as http:
            for body in ({"reward": 0.5}, {"reward": 2, "id": first.id}):
                assert (await http.post(f"{base_url}/reward", json=body)).status_code == 200
            for body in ({"reward": "much"}, [], {"reward": 1, "id": "other"}):
                assert (await http.post(f"{base_url}/reward", json=body)).status_code == 400

    found = run(Script(say("a"), say("b")), returned)
    assert ([turn.reward for turn in found.turns], found.reward) == ([0.25, 1.0], None)
    found = run(Script(say("a")), sent)
    assert ([turn.reward for turn in found.turns], found.reward) == ([2.0], 0.5)


@pytest.mark.parametrize("returned", ["much", float("nan"), {"other": 1.0}])
def test_a_reward_that_is_no_number_is_a_failure(returned):
    async def answer(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=messages)
        return returned

    found = run(Script(say("a")), answer)
    assert found.stop_reason == "error"
    assert "reward" in found.error


# Limits


async def talk(base_url, api_key, messages):
    """Send requests without end."""
    async with client_of(base_url, api_key) as client:
        while True:
            done = await client.chat.completions.create(model="any", messages=messages)
            messages += [done.choices[0].message, {"role": "user", "content": "go on"}]


@pytest.mark.parametrize(
    ("changed", "stop_reason", "turns"),
    [({"max_turns": 2}, "max_turns", 2), ({"max_response_tokens": 8}, "max_response_length", 3)],
)
def test_a_limit_ends_the_conversation_and_the_program_is_not_at_fault(changed, stop_reason, turns):
    found = run(Script(*[say(f"text {n}") for n in range(8)]), talk, **changed)
    assert (found.stop_reason, found.error, len(found.turns)) == (stop_reason, "", turns)
    assert found.finish_reason == "length"


def test_a_program_that_takes_too_long_is_ended_and_its_answers_count():
    ended = []

    async def slow(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=messages)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    found = run(Script(say("a")), slow, timeout_s=1.0)
    assert (found.stop_reason, len(found.turns), ended) == ("deadline", 1, [True])


def test_a_program_that_does_not_end_when_it_is_cancelled_is_left_behind(monkeypatch):
    monkeypatch.setattr("workers.environments.agent_program.CANCEL_S", 0.2)

    async def stubborn(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=messages)
        while not released:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    async def running():
        endpoint = AgentEndpoint()
        found = await run_agent(REQUEST, Script(say("a")), FunctionProgram(stubborn), endpoint, limits(timeout_s=0.5))
        released.append(True)
        await endpoint.close()
        return found

    released = []
    found = asyncio.run(running())
    assert (found.stop_reason, len(found.turns)) == ("deadline", 1)


def test_programs_reach_the_server_without_the_proxy_of_the_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    assert run(Script(ASK, say("four")), shop).error == ""
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"


def test_a_request_may_limit_the_tokens_of_its_answer():
    async def short(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            done = await client.chat.completions.create(model="any", messages=messages, max_tokens=3)
            assert done.choices[0].finish_reason == "length"

    engine = Script(say("a"), reasons=["length"])
    assert run(engine, short).finish_reason == "length"
    assert engine.requests[0].max_tokens == 3


def test_a_message_that_was_cut_for_the_model_does_not_change_what_the_program_repeats():
    class Cutting(Script):
        async def sample(self, request):
            found = await super().sample(request)
            short = [message | {"content": message["content"][:3] + " [cut off]"} for message in found.messages]
            return replace(found, messages=short)

    found = run(Cutting(*[say(f"text {n}") for n in range(3)]), talk, max_turns=3)
    assert (found.stop_reason, len(found.turns)) == ("max_turns", 3)
    assert [one["content"] for one in found.messages[:3]] == ["go [cut off]", "text 0", "go  [cut off]"]


def test_a_program_may_go_on_after_a_refused_request():
    async def shorter(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            done = await client.chat.completions.create(model="any", messages=messages)
            messages.append(done.choices[0].message)
            hint = {"role": "user", "content": "on"}
            with pytest.raises(openai.BadRequestError, match="leaves no token for another answer"):
                await client.chat.completions.create(model="any", messages=messages + [hint] * 20)
            await client.chat.completions.create(model="any", messages=[*messages, hint])

    found = run(Script(say("a"), say("b")), shorter, max_response_tokens=20)
    assert (found.stop_reason, len(found.turns)) == ("done", 2)


def test_without_tool_calls_an_answer_is_text():
    async def last(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            exchange = await call_and_result(client, messages)
            done = await client.chat.completions.create(
                model="any", messages=[*messages, *exchange], tools=[PRICE], tool_choice="none"
            )
            assert done.choices[0].message.content == "text 1"

    found = run(Script(ASK, ASK), last)
    assert (found.stop_reason, len(found.turns), found.tool_calls) == ("done", 2, 1)


def test_a_late_answer_to_an_earlier_attempt_is_not_taken_for_the_answer_of_this_attempt():
    """The first attempt gives up while its second turn is sampled. The second attempt asks for the same turn."""

    class Slow(Script):
        def __init__(self, *actions):
            super().__init__(*actions)
            self.kept, self.results = None, []

        async def submit(self, client, requests):
            for request in requests:
                result = await self.sample(request)
                if request.key[2] == 1 and self.kept is None:
                    self.kept = result
                else:
                    late = [self.kept] if request.key[2] == 1 else []
                    self.results += [*late, result]

        async def poll(self, client):
            await asyncio.sleep(0.01)
            taken, self.results = self.results, []
            return taken

    tries = []

    async def impatient(base_url, api_key, messages):
        tries.append(1)
        async with client_of(base_url, api_key) as client:
            done = await client.chat.completions.create(model="any", messages=messages)
            more = [*messages, done.choices[0].message, {"role": "user", "content": "on"}]
            await client.chat.completions.create(model="any", messages=more, timeout=0.5 if len(tries) == 1 else 30)

    engine = Slow(say("a"), say("b"))
    found = run(ReplicaClient(engine, "worker"), impatient)
    assert (len(tries), len(engine.requests), engine.kept.serial) == (2, 4, 1)
    assert list(found.response_ids()) == [52, END, 31, 53, END]


# Failures


def failure_of(program, *actions):
    found = run(Script(*(actions or [say("a"), say("b")])), program)
    assert (found.stop_reason, list(found.response_ids())) == ("error", [])
    return found.error


def test_a_program_that_raises_or_never_asks_is_started_again_and_then_given_up():
    calls = []

    async def broken(base_url):
        calls.append(base_url)
        raise SystemExit("no licence")

    assert failure_of(broken) == "the agent failed: RuntimeError: SystemExit: no licence"
    assert len(calls) == ATTEMPTS

    class OwnExit(BaseException):
        pass

    async def leaves():
        raise OwnExit("now")

    async def cancels_itself():
        task = asyncio.ensure_future(asyncio.sleep(5))
        task.cancel()
        await task

    assert failure_of(leaves) == "the agent failed: RuntimeError: OwnExit: now"
    assert (
        failure_of(cancels_itself)
        == "the agent failed: RuntimeError: the user's code raised CancelledError, but the trajectory was not cancelled"
    )
    assert failure_of(lambda seed: 1.0) == "the agent got no answer: it made no request"


# New contexts


class Recorded(Script):
    """An engine that stores the context of each turn, and encodes each message as one token."""

    def __init__(self, count):
        super().__init__(*[say(f"text {n}") for n in range(count)])
        self.contexts = []

    async def sample(self, request):
        found = await super().sample(request)
        observed = [200 + sum(map(ord, message["content"])) % 99 for message in request.messages]
        self.contexts.append([*request.context_ids, *request.action_ids, *observed])
        return replace(found, observation_ids=observed)


def contexts_of(trajectory):
    """Return for each turn the token ids of the context in which the model sees the turn's action."""
    found, context = [], []
    for turn in trajectory.turns:
        context = [*([] if turn.new_context else context), *turn.observation_ids]
        found.append(list(context))
        context += turn.action_ids
    return found


def talking(conversations):
    """Return a program that sends one request for each conversation.

    In a conversation, a text stands for a user's message, and a number n stands for the model's n-th answer, from 0.
    """

    async def program(base_url, api_key, messages):
        answers = []
        async with client_of(base_url, api_key) as client:
            for parts in conversations:
                sent = [{"role": "user", "content": part} if isinstance(part, str) else answers[part] for part in parts]
                done = await client.chat.completions.create(model="any", messages=sent)
                answers.append({"role": "assistant", "content": done.choices[0].message.content})

    return program


@pytest.mark.parametrize(
    ("conversations", "new_contexts"),
    [
        ([["a"], ["a", 0, "b"], ["a", 0, "b", 1, "c"]], [0, 0, 0]),
        ([["a"], ["sub"], ["sub", 1, "b"], ["a", 0, "c"]], [0, 1, 0, 1]),
        ([["a"], ["a", 0, "b"], ["summary", 1, "c"], ["summary", 1, "c", 2, "d"]], [0, 0, 1, 0]),
        ([["a"], ["a", 0, "b"], ["a", 0, "other"], ["a", 0, "b", 1, "c"]], [0, 0, 1, 1]),
        ([["a"], ["a", 0, "b"], ["a", 1, 0, "c"]], [0, 0, 1]),
        ([["a"], ["b"], ["a", 0, "c"], ["b", 1, "c"], ["a", 0, "c", 2, "d"]], [0, 1, 1, 1, 1]),
    ],
    ids=["continued", "sub-agent", "shortened", "taken back", "answers in another order", "side by side"],
)
def test_a_request_that_does_not_continue_the_last_turn_has_a_context_of_its_own(conversations, new_contexts):
    engine = Recorded(len(conversations))
    found = run(engine, talking(conversations), max_response_tokens=1000)
    assert [int(turn.new_context) for turn in found.turns] == new_contexts
    assert contexts_of(found) == engine.contexts
    sampled = [list(turn.action_ids) for turn in found.turns]
    assert sampled == [[50 + n, END] for n in range(len(conversations))]
    assert found.contexts == 1 + sum(new_contexts)


def test_repeated_tokens_count_against_the_limit_of_the_trajectory():
    engine = Recorded(4)
    run(engine, talking([["a"], ["sub"], ["a", 0, "b"]]), max_response_tokens=100)
    # The first action has 2 tokens, the sub-agent's turn has 1 + 2 tokens, and the last turn repeats 3 tokens.
    assert [request.room for request in engine.requests] == [100, 98, 92]


def test_T8_a_repeated_request_in_an_earlier_context_gets_the_recorded_answer():
    engine = Recorded(3)
    found = run(engine, talking([["a"], ["sub"], ["a"], ["sub"], ["a", 2, "b"]]))
    assert len(engine.requests) == len(found.turns) == 3


# Requests at the same time


class Meeting(Recorded):
    """An engine that answers requests after the first only when a given number of requests wait for answers.

    Attributes:
        most: largest number of requests that waited at the same time.
    """

    def __init__(self, count, *, together):
        super().__init__(count)
        self.together, self.waiting, self.most, self.met = together, 0, 0, asyncio.Event()

    async def sample(self, request):
        found = await super().sample(request)
        if request.key[2]:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            if self.waiting >= self.together:
                self.met.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.met.wait(), 1)
            self.waiting -= 1
        return found


def user(text):
    return {"role": "user", "content": text}


async def answer_to(client, messages):
    done = await client.chat.completions.create(model="any", messages=messages)
    return {"role": "assistant", "content": done.choices[0].message.content}


async def with_helpers(base_url, api_key, messages):
    """Ask once, then let three helpers work at the same time, one of which has the program's own conversation."""
    async with client_of(base_url, api_key) as client:

        async def work(conversation):
            conversation = [*conversation, await answer_to(client, conversation)]
            await answer_to(client, [*conversation, user("more")])

        own = [*messages, await answer_to(client, messages)]
        await asyncio.gather(work([*own, user("on")]), work([user("search")]), work([user("compare")]))


def test_T1_requests_of_several_branches_are_answered_at_the_same_time_each_in_its_own_context():
    engine = Meeting(7, together=3)
    found = run(engine, with_helpers, max_response_tokens=1000)
    assert (engine.most, found.stop_reason, len(found.turns)) == (3, "done", 7)
    assert len({request.key for request in engine.requests}) == len({request.seed for request in engine.requests}) == 7
    # The first token of an action is the number of its request, in the order in which the engine got the requests.
    asked = {tuple(turn.action_ids): context for turn, context in zip(found.turns, contexts_of(found), strict=True)}
    assert asked == {(50 + number, END): context for number, context in enumerate(engine.contexts)}


def test_requests_of_a_deterministic_run_are_answered_one_after_another():
    engine = Meeting(7, together=1)
    found = run(engine, with_helpers, max_response_tokens=1000, max_parallel_turns=1)
    assert (engine.most, len(found.turns)) == (1, 7)
    assert [list(turn.action_ids) for turn in found.turns] == [[50 + number, END] for number in range(7)]
    assert contexts_of(found) == engine.contexts


def test_T8_a_request_that_is_repeated_while_it_is_answered_is_sampled_once():
    answers = []

    async def impatient(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            own = [*messages, await answer_to(client, messages), user("on")]
            answers.extend(await asyncio.gather(*[answer_to(client, own) for _ in range(3)]))

    engine = Meeting(2, together=2)  # The engine never gets the second request, and answers after a second.
    found = run(engine, impatient)
    assert (engine.most, len(engine.requests), len(found.turns)) == (1, 2, 2)
    assert answers == [answers[0]] * 3


class Rambling(Meeting):
    """An engine whose actions have five tokens if there is room for them."""

    async def sample(self, request):
        found = await super().sample(request)
        if found.full:
            return found
        room = request.room - (len(found.observation_ids) if request.key[2] else 0)
        ids = [7, 7, 7, 7, END][:room]
        return replace(
            found, token_ids=ids, log_probs=[-0.5] * len(ids), versions=[0] * len(ids),
            finish_reason="stop" if len(ids) == 5 else "length",
        )  # fmt: skip


async def two_helpers(base_url, api_key, messages):
    async with client_of(base_url, api_key) as client:
        await answer_to(client, messages)
        helpers = [answer_to(client, [user(name)]) for name in ("search", "compare")]
        for found in await asyncio.gather(*helpers, return_exceptions=True):
            if isinstance(found, Exception):
                raise found


def test_answers_that_fit_only_one_by_one_stay_within_the_limit_of_the_trajectory():
    """The first action has 5 tokens. A helper's turn has 1 + 5, so 5 tokens are left for the other helper's turn."""
    engine = Rambling(3, together=2)
    found = run(engine, two_helpers, max_response_tokens=16)
    assert [len(turn.action_ids) for turn in found.turns] == [5, 5, 4]
    assert len(found.response_ids()) == 16
    assert found.turns[-1].finish_reason == "length"
    *_, second, again = engine.requests
    same = second if second.key == again.key else engine.requests[1]
    assert (again.key, again.seed, again.room) == (same.key, same.seed, 5)


def test_an_answer_for_which_no_room_is_left_is_refused():
    engine = Rambling(3, together=2)
    found = run(engine, two_helpers, max_response_tokens=12)
    assert (found.stop_reason, found.error) == ("max_response_length", "")
    assert [len(turn.action_ids) for turn in found.turns] == [5, 5]


def test_requests_that_are_being_answered_count_as_turns_and_do_not_hide_a_refusal():
    engine = Meeting(3, together=2)
    found = run(engine, two_helpers, max_turns=2)
    assert (found.stop_reason, found.error, len(found.turns), len(engine.requests)) == ("max_turns", "", 2, 2)


def test_other_tools_start_a_new_context():
    async def program(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            done = await client.chat.completions.create(model="any", messages=messages, tools=[PRICE])
            said = {"role": "assistant", "content": done.choices[0].message.content}
            longer = [*messages, said, {"role": "user", "content": "on"}]
            await client.chat.completions.create(model="any", messages=longer)

    engine = Recorded(2)
    found = run(engine, program)
    assert [turn.new_context for turn in found.turns] == [False, True]
    assert [len(request.messages) for request in engine.requests] == [1, 3]


def test_calls_that_a_new_context_repeats_are_counted_once():
    async def program(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            shorter = [{"role": "user", "content": "short"}, *await call_and_result(client, messages)]
            await client.chat.completions.create(model="any", messages=shorter, tools=[PRICE])

    engine = Script(ASK, say("4"))
    found = run(engine, program)
    assert (found.contexts, found.tool_calls) == (2, 1)
    assert engine.requests[1].messages[2]["name"] == "price"
    assert [message.get("context") for message in found.messages] == [None, None, 1, 1, 1, None]


def test_a_request_that_ends_with_an_answer_is_refused():
    async def strange(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            messages.append({"role": "assistant", "content": "mine"})
            await client.chat.completions.create(model="any", messages=messages)

    assert "the last message is an answer: send a new message after it" in failure_of(strange)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 2}, "n=2: a request gets one answer"),
        ({"stop": ["x"]}, "stop strings are not supported"),
        ({"tool_choice": "required", "tools": [PRICE]}, "the model decides whether to call a tool"),
        ({"response_format": {"type": "json_object"}}, "'json_object' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "something other than text"),
        ({"messages": []}, "at least one message"),
        ({"max_tokens": 0}, "must be a positive integer"),
        ({"tools": [{"type": "web_search"}]}, "must be a function with a name"),
        ({"logprobs": True}, "log-probabilities are not returned"),
        ({"functions": [PRICE["function"]]}, "use tools"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)
def test_what_training_does_not_support_is_refused_with_the_reason(options, said):
    async def ask(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(**({"model": "any", "messages": messages} | options))

    assert said in failure_of(ask)


MALFORMED = [
    {"stream_options": 5},
    {"text": 5},
    {"text": {"format": "text"}},
    {"response_format": "json"},
    {"response_format": [1]},
    {"tools": 5},
    {"tools": [5]},
    {"tools": [{"type": "function", "function": "name"}]},
    {"tools": [{"type": "function", "function": {"name": None}}]},
    {"tools": [{"type": "function", "function": {"name": 5}}]},
    {"messages": {"a": 1}, "input": {}},
    {"messages": [5], "input": [5]},
    {"messages": [{"role": []}], "input": [{"type": []}]},
    {"messages": [{"role": "user", "content": 5}], "input": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "assistant", "tool_calls": 5}], "input": [{"type": "function_call", "arguments": "["}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 10000}}]}], "input": 5},
]


@pytest.mark.parametrize("options", MALFORMED, ids=lambda one: json.dumps(one)[:40])
def test_a_malformed_request_is_refused_and_the_refusal_is_the_reason_of_the_failure(options):
    async def send(base_url, api_key):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            for path, own in (("chat/completions", "messages"), ("responses", "input")):
                if path == "responses" and not {"text", "tools", "input"} & options.keys():
                    continue
                body = {own: [{"role": "user", "content": "go"}]} | options
                response = await http.post(f"{base_url}/{path}", json=body)
                assert response.status_code == 400, (path, response.text)
                assert response.json()["error"]["message"]

    assert "it made no request" not in failure_of(send)


def test_text_that_is_no_valid_unicode_is_replaced():
    async def cut_emoji(base_url, api_key):
        body = '{"messages": [{"role": "user", "content": "so \\ud83d"}]}'
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            assert (await http.post(f"{base_url}/chat/completions", content=body)).status_code == 200

    found = run(Script(say("a")), cut_emoji)
    assert found.messages[0]["content"] == "so \ufffd"


def test_a_body_that_is_not_json_or_no_object_is_refused():
    statuses = []

    async def send(base_url, api_key):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
            for path in ("chat/completions", "responses", "reward"):
                for body in (b"{", b"[]", b"null", b"\xff", b"[" * 100_000):
                    statuses.append((await http.post(f"{base_url}/{path}", content=body)).status_code)
            assert (await http.get(f"{base_url}/models")).json()["data"][0]["id"] == "policy"

    failure_of(send)
    assert set(statuses) == {400}


def test_a_lost_engine_is_not_the_programs_failure():
    class Gone:
        async def sample(self, request):
            raise ReplicaGone("killed")

    with pytest.raises(ReplicaGone, match="killed"):
        run(Gone(), talk)


def test_malformed_calls_are_text_for_the_program():
    broken, good = BrokenCall("<tool_call>{", "no JSON", "c1"), ToolCall("price", {}, "c2")
    assert shown(ParsedAction("so", [broken])) == ParsedAction("so\n<tool_call>{", [])
    assert shown(ParsedAction("so", [broken, good])) == ParsedAction("so\n<tool_call>{", [good])
    assert shown(ParsedAction("", [good])) == ParsedAction("", [good])


def test_T7_a_program_sees_the_malformed_calls_beside_the_good_ones_and_its_conversation_continues():
    seen = []

    async def ask_twice(base_url, api_key, messages):
        async with client_of(base_url, api_key) as client:
            answer, result = await call_and_result(client, messages)
            seen.append((answer.content, [one.function.name for one in answer.tool_calls]))
            await client.chat.completions.create(model="any", messages=[*messages, answer, result], tools=[PRICE])

    mixed = ParsedAction("Two calls.", [BrokenCall("<tool_call>{", "cut off", "c1"), *ASK.calls])
    engine = Script(mixed, say("four"))
    found = run(engine, ask_twice)
    assert (found.stop_reason, found.error, seen) == ("done", "", [("Two calls.\n<tool_call>{", ["price"])])
    assert [turn.new_context for turn in found.turns] == [False, False]
    assert found.messages[1]["content"] == "Two calls.\n<tool_call>{"


# Commands

COMMAND = """
import json, os, subprocess, sys
import openai
given = json.load(sys.stdin)
assert given["answer"] == "7" and isinstance(given["seed"], int)
done = openai.OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=given["messages"])
print("said", done.choices[0].message.content)
child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open(sys.argv[1], "w").write(str(child.pid))
sys.exit(sys.argv[2])
"""


def test_a_command_asks_with_the_environment_variables_of_the_client_and_its_processes_end(tmp_path):
    (tmp_path / "agent.py").write_text(COMMAND)
    command = f"{sys.executable} {tmp_path}/agent.py {tmp_path}/pid"
    assert (
        run(Script(say("a")), CommandProgram(f"{command} 0")).error
        == "the agent failed: RuntimeError: exit status 1: 0"
    )
    (tmp_path / "agent.py").write_text(COMMAND.replace("sys.exit(sys.argv[2])", ""))
    found = run(Script(say("a")), CommandProgram(command))
    assert (found.stop_reason, len(found.turns), found.reward) == ("done", 1, None)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


WORKER = """
import asyncio
from tests.scripted_turns import REQUEST, Script, limits, say
from workers.environments.agent_endpoint import AgentEndpoint
from workers.environments.agent_program import CommandProgram, run_agent

async def main():
    await run_agent(REQUEST, Script(say("a")), CommandProgram("sleep 297"), AgentEndpoint(), limits())

asyncio.run(main())
"""


def test_a_command_ends_with_a_worker_that_is_killed():
    worker = subprocess.Popen([sys.executable, "-c", WORKER])
    deadline = time.monotonic() + 60
    found = []
    while not found and time.monotonic() < deadline:
        found = [child for child in psutil.Process(worker.pid).children() if "297" in child.cmdline()[-1:]]
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    (command,) = found
    assert not psutil.wait_procs([command], timeout=10)[1] or command.status() == "zombie"


# Tests of the checks before a run


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("no_such_program_here --fast", "there is no program 'no_such_program_here'"),
        ("python 'x", "not a valid command"),
        ("no_such_module_here:run", "no_such_module_here"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_the_start(agent, said):
    with pytest.raises(ConfigError, match=said):
        agent_of(agent, [])


class Rows:
    where, columns = "rows.jsonl", ("answer",)


def test_a_function_gets_only_what_rltrain_and_the_data_offer(tmp_path):
    (tmp_path / "mine.py").write_text("def run(base_url, api_key, answer, topic):\n    pass\n")
    with pytest.raises(ConfigError, match=r"needs topic, but rltrain offers only base_url, .* \(answer\)"):
        agent_of(f"{tmp_path}/mine.py:run", [Rows])
    (tmp_path / "mine.py").write_text("def run(base_url, api_key, answer, topic=None, **more):\n    pass\n")
    assert agent_of(f"{tmp_path}/mine.py:run", [Rows]) == f"{tmp_path}/mine.py:run"
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    assert agent_of(f"{tmp_path}/tool --x 'a b'", []) == f"{tmp_path}/tool --x 'a b'"
