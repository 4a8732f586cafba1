"""Adapters for environments that other libraries run on a server, in a separate process or container.

The server can have its own Python installation, so the environment's library need not be installed together with
rltrain. Example:

    from rltrain.environments.servers import from_openenv

    Game = from_openenv("http://localhost:8000", action="message", observation="hint")

The setting `rollout.environment=my_env.py:Game` makes a run use the class `Game`.
"""

import json
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rltrain.environments.adapters import SEEDS
from rltrain.environments.agents import OFFERED
from rltrain.environments.contract import as_text

LINGER_MS = 1000  # Time for which a closed socket still tries to send its last message, in milliseconds.


def from_openenv(
    url: str,
    *,
    action: str | Callable[[str], Mapping[str, Any]],
    observation: str | Callable[[Mapping[str, Any]], Any] | None = None,
) -> type:
    """Return an environment class for an environment of OpenEnv that a server offers at a URL.

    Each conversation opens a WebSocket connection to the server, because the server has one environment object for each
    connection. `reset` sends a seed and the prompt's data columns to the server. The server ignores columns that its
    environment does not know. The reward of a turn is the reward in the server's reply to `step`.

    Args:
        url: Address of the server, for example `http://localhost:8000`.
        action: Name of the action's field that contains the model's text, or a function that takes the model's text and
            returns all fields of the action.
        observation: Name of the only field of the observation that the model sees, or a function that takes all fields
            of the observation and returns the text that the model sees. If `observation` is None, the model sees all
            fields of the observation as JSON.

    Raises:
        ValueError: the URL does not start with http, https, ws or wss.
    """
    scheme, separator, address = url.partition("://")
    if not separator or scheme not in ("http", "https", "ws", "wss"):
        raise ValueError(f"{url}: the address of an OpenEnv server starts with http://, https://, ws:// or wss://")
    endpoint = f"{scheme.replace('http', 'ws')}://{address.rstrip('/')}/ws"

    class OpenEnvEnvironment:
        _socket: Any = None

        async def reset(self, seed: int, **columns: Any) -> str:
            from websockets.asyncio.client import connect

            self._socket = await connect(endpoint, max_size=None)
            return self._seen(await self._answer("reset", {**columns, "seed": seed % SEEDS}))

        async def step(self, text: str) -> tuple[str, float | None, bool]:
            result = await self._answer("step", {action: text} if isinstance(action, str) else dict(action(text)))
            return self._seen(result), result.get("reward"), bool(result.get("done"))

        async def close(self) -> None:
            if self._socket is not None:
                await self._socket.close()

        async def _answer(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
            await self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(await self._socket.recv())
            result: Mapping[str, Any] = answer["data"]
            if answer["type"] == "error":
                raise RuntimeError(f"the OpenEnv server {url} reports {result.get('code')}: {result.get('message')}")
            return result

        def _seen(self, result: Mapping[str, Any]) -> str:
            fields: Mapping[str, Any] = result["observation"]
            if observation is None:
                return as_text(fields)
            return as_text(fields[observation] if isinstance(observation, str) else observation(fields))

    return OpenEnvEnvironment


def from_verifiers(address: str) -> Callable[..., Coroutine[Any, Any, float]]:
    """Return an agent function that runs each conversation on an environment server of the library verifiers 0.4.

    The verifiers server runs its own agents and scores the conversation. The agents of the server send their requests
    for the policy to rltrain's API. The agent function returns the weighted sum of all rewards of the conversation. The
    columns of the data become the fields of verifiers' `TaskData`; if the data has no column `prompt`, the field
    `prompt` contains the chat messages of the prompt. The server must run on the machine of the environment worker,
    because rltrain's API listens only at the loopback address.

    Args:
        address: ZeroMQ address of the server, for example `tcp://127.0.0.1:5000`.
    """

    async def run(base_url: str, api_key: str, model: str, messages: list[Any], **columns: Any) -> float:
        task = {"prompt": messages} | {name: value for name, value in columns.items() if name not in OFFERED}
        # The URL contains the API key, because the verifiers server reads keys only from its own environment variables.
        url = f"{base_url.removesuffix('/v1')}/{api_key}/v1"
        client = {"type": "eval", "base_url": url, "api_key_var": "RLTRAIN_API_KEY"}
        return await _verifiers_reward(address, {"task_data": task, "client": client, "model": model, "sampling": {}})

    return run


async def _verifiers_reward(address: str, request: Mapping[str, Any]) -> float:
    """Run one conversation on an environment server of the library verifiers, and return the conversation's reward.

    A trace is the server's record of the conversation of one agent. The field `rewards` of a trace contains the score
    and the weight of each reward. During the conversation, the server sends messages that update or discard traces.
    After the end of the conversation, the server sends one last message, which says whether the conversation succeeded.

    Raises:
        RuntimeError: the server reports an error.
    """
    import msgpack
    import zmq.asyncio

    number = secrets.token_hex(8).encode()
    rewards, reply = dict[str, Mapping[str, Any]](), None
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    try:
        socket.connect(address)
        await socket.send_multipart([number, b"run", msgpack.packb(request, default=str)])
        while reply is None:
            _, kind, data = await socket.recv_multipart()
            message = msgpack.unpackb(data, strict_map_key=False)
            if kind == b"reply":
                reply = message
            elif message.get("discard"):
                rewards.pop(message["trace"], None)
            elif found := message.get("set", {}).get("rewards"):
                rewards[message["trace"]] = found
    finally:
        if reply is None:
            await socket.send_multipart([b"0", b"cancel", msgpack.packb({"request_id": number.decode()})])
        socket.close(linger=LINGER_MS)
    episode = reply["head"] or {"ok": False, "errors": [{"message": reply["error"]}]}
    if not episode["ok"]:
        said = [error["message"] for error in episode["errors"]] or ["the conversation failed"]
        raise RuntimeError(f"the verifiers server {address} reports: {said[0]}")
    scores = [one for of_trace in rewards.values() for one in of_trace.values() if one is not None]
    return float(sum(one["score"] * one["weight"] for one in scores))
