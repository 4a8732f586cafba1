"""Tests of the adapter for OpenEnv, against a server that repeats recorded answers of openenv-core 0.3.0.

The recorded environment has the action field `message` and the observation field `hint`.
"""

import contextlib
import json
from pathlib import Path

import pytest
from websockets.asyncio.server import serve

from rltrain.environments.contract import missing_columns, reset_arguments
from rltrain.environments.servers import from_openenv

EXCHANGE = [json.loads(line) for line in (Path(__file__).parent / "openenv_exchange.jsonl").read_text().splitlines()]
COLUMNS = {"prompt": "guess", "answer": "7"}


@contextlib.asynccontextmanager
async def recorded_server():
    """Yield the address of a server that accepts only the recorded requests, and all its connections."""
    answers = {json.dumps(one["request"], sort_keys=True): one["response"] for one in EXCHANGE}
    connections = set()

    async def answer(socket):
        assert socket.request.path == "/ws"
        connections.add(socket)
        async for message in socket:
            await socket.send(json.dumps(answers[json.dumps(json.loads(message), sort_keys=True)]))

    async with serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", connections


async def test_a_conversation_sends_what_an_openenv_server_expects_and_reads_its_answers():
    async with recorded_server() as (url, connections):
        environment = from_openenv(url, action="message", observation="hint")()
        assert await environment.reset(**reset_arguments(environment.reset, COLUMNS, 5)) == "seed 5: guess a digit"
        assert await environment.step("3") == ("higher", 0.25, False)
        assert await environment.step("7") == ("right", 1.0, True)
        (connection,) = connections
        await environment.close()
        await connection.wait_closed()


async def test_conversations_have_connections_of_their_own():
    async with recorded_server() as (url, connections):
        made = [from_openenv(url, action="message")() for _ in range(3)]
        for environment in made:
            await environment.reset(seed=(1 << 31) + 5, **COLUMNS)  # The server gets the seed modulo 2**31, which is 5.
        assert len(connections) == 3
        for environment in made:
            await environment.close()


async def test_functions_make_the_action_and_the_text_that_the_model_sees():
    async with recorded_server() as (url, _):
        environment = from_openenv(
            url + "/", action=lambda text: {"message": text.strip()}, observation=lambda fields: fields["hint"].upper()
        )()
        await environment.reset(seed=5, **COLUMNS)
        assert await environment.step(" 3\n") == ("HIGHER", 0.25, False)
        await environment.close()


async def test_without_a_name_the_model_sees_all_fields_as_json():
    async with recorded_server() as (url, _):
        environment = from_openenv(url, action="message")()
        assert await environment.reset(seed=5, **COLUMNS) == '{"hint": "seed 5: guess a digit"}'
        await environment.close()


async def test_an_error_of_the_server_is_raised_with_its_code_and_its_message():
    async with recorded_server() as (url, _):
        environment = from_openenv(url, action="message")()
        await environment.reset(seed=5, **COLUMNS)
        with pytest.raises(RuntimeError, match="EXECUTION_ERROR: not a digit"):
            await environment.step("x")
        await environment.close()


async def test_an_environment_that_never_reached_its_server_can_be_closed():
    environment = from_openenv("http://127.0.0.1:1", action="message")()
    with pytest.raises(OSError, match="Connect call failed"):
        await environment.reset(seed=5)
    await environment.close()


def test_an_address_without_a_known_scheme_is_refused():
    with pytest.raises(ValueError, match="localhost:8000: the address of an OpenEnv server starts with http"):
        from_openenv("localhost:8000", action="message")


def test_the_adapter_needs_no_column_of_the_data():
    assert missing_columns(from_openenv("http://localhost:8000", action="message"), []) == []
