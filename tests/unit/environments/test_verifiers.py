"""Tests of the adapter for verifiers, against a server that repeats recorded messages of verifiers 0.4.0.

The recorded harness asks the policy twice. The recorded messages are shortened to the fields that matter.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import msgpack
import pytest
import zmq.asyncio

from rltrain.environments.servers import from_verifiers
from tests.scripted_turns import REQUEST, Script, limits, say
from workers.environments.agent_endpoint import AgentEndpoint
from workers.environments.agent_program import FunctionProgram, run_agent

EXCHANGE = [json.loads(line) for line in (Path(__file__).parent / "verifiers_exchange.jsonl").read_text().splitlines()]
REFUSED = [
    {"kind": "reply", "data": {"success": False, "error": "ValidationError: prompt", "head": None, "traces": []}}
]
BROKEN = [
    {"kind": "reply", "data": {"success": True, "error": None, "traces": [], "head": {"ok": False, "errors": [
        {"type": "EnvError", "message": "the harness broke"}]}}}
]  # fmt: skip


@contextlib.asynccontextmanager
async def recorded_server(exchange):
    """Yield the address of a server that answers each request with `exchange`, and the list of received requests."""
    socket, requests = zmq.asyncio.Context.instance().socket(zmq.ROUTER), []
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    async def converse(client, number, body):
        for one in exchange:
            if "ask" in one:
                url, headers = body["client"]["base_url"], {"Authorization": "Bearer EMPTY"}
                async with httpx.AsyncClient() as http:
                    (await http.post(f"{url}/chat/completions", json=one["ask"], headers=headers)).raise_for_status()
            elif one.get("kind"):
                await socket.send_multipart([client, number, one["kind"].encode(), msgpack.packb(one["data"])])

    async def serve():
        running = set()
        while True:
            client, number, method, payload = await socket.recv_multipart()
            requests.append((method.decode(), number.decode(), msgpack.unpackb(payload)))
            if method == b"run":
                running.add(asyncio.create_task(converse(client, number, requests[-1][2])))

    serving = asyncio.create_task(serve())
    try:
        yield f"tcp://127.0.0.1:{port}", requests
    finally:
        serving.cancel()
        socket.close(linger=0)


async def trajectory_of(address, *answers, **changed):
    endpoint = AgentEndpoint()
    try:
        program = FunctionProgram(from_verifiers(address))
        return await run_agent(REQUEST, Script(*answers), program, endpoint, limits(**changed))
    finally:
        await endpoint.close()


async def test_the_server_asks_the_policy_and_its_weighted_rewards_are_the_reward():
    async with recorded_server(EXCHANGE) as (address, requests):
        found = await trajectory_of(address, say("3"), say("7"))
    assert (found.stop_reason, found.reward, len(found.turns)) == ("done", 1.5, 2)
    assert [message["content"] for message in found.messages] == ["guess a digit", "3", "higher", "7"]
    ((method, _, body),) = requests
    assert method == "run"
    assert body["task_data"] == {"prompt": [{"role": "user", "content": "go"}], "answer": "7"}
    assert body["model"] == "policy"


@pytest.mark.parametrize(
    ("exchange", "said"), [(REFUSED, "reports: ValidationError: prompt"), (BROKEN, "reports: the harness broke")]
)
async def test_an_error_of_the_server_fails_the_conversation(exchange, said):
    async with recorded_server(exchange) as (address, requests):
        found = await trajectory_of(address)
    assert found.stop_reason == "error"
    assert said in found.error
    assert len(requests) == 2  # A failed conversation is tried a second time.


async def test_a_conversation_that_takes_too_long_is_cancelled_on_the_server():
    async with recorded_server([]) as (address, requests):
        found = await trajectory_of(address, timeout_s=0.3)
        while len(requests) < 4:
            await asyncio.sleep(0.01)
    assert found.stop_reason == "error"
    assert "the agent got no answer" in found.error
    assert [method for method, _, _ in requests] == ["run", "cancel"] * 2
    assert requests[1][2] == {"request_id": requests[0][1]}
