"""HTTP server of an environment worker, which lets agent programs call the policy with an OpenAI-compatible client."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rltrain.base.errors import described
from rltrain.environments.contract import EnvironmentFailure, as_reward
from rltrain.environments.openai_api import ApiError, Event, ModelRequest, plain_id
from rltrain.environments.openai_chat import chat_events, chat_request, chat_response
from rltrain.environments.openai_responses import responses_events, responses_request, responses_response
from workers.environments.agent_session import AgentSession

if TYPE_CHECKING:
    from aiohttp import web

MODEL = "policy"  # Model name that agent programs are given; requests with any other model name are answered, too.
LARGEST_REQUEST = 1 << 26  # Maximum size of a request in bytes.


class AgentEndpoint:
    """HTTP server on the loopback interface. The first call of `base_url` starts the server.

    Each session has its own API key, so the API key of a request identifies the request's session. If the client of an
    agent program cannot send the API key, the program must put the key into the URL: `http://HOST:PORT/KEY/v1` instead
    of `http://HOST:PORT/v1`.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def base_url(self) -> str:
        """Return the URL of the server's API, and start the server if it does not run yet."""
        async with self._starting:
            if self._runner is None:
                self._runner = await self._started()
            host, port = self._runner.addresses[0][:2]
            return f"http://{host}:{port}/v1"

    async def _started(self) -> "web.AppRunner":
        from aiohttp import web

        _bypass_proxies()
        app = web.Application(client_max_size=LARGEST_REQUEST)
        for base in ("/v1", "/{key}/v1"):
            app.router.add_post(f"{base}/chat/completions", self._chat)
            app.router.add_post(f"{base}/responses", self._responses)
            app.router.add_post(f"{base}/reward", self._reward)
            app.router.add_get(f"{base}/models", self._models)
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    @contextlib.contextmanager
    def open(self, session: AgentSession) -> Iterator[None]:
        """Answer requests of a session inside the `with` block, and refuse requests of the session afterwards."""
        self.sessions[session.key] = session
        try:
            yield
        finally:
            del self.sessions[session.key]
            session.close()

    async def close(self) -> None:
        """Stop the server."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _chat(self, http: "web.Request") -> "web.StreamResponse":
        async def answered(session: AgentSession, body: Mapping[str, Any]) -> "web.StreamResponse":
            asked = read(chat_request, body)
            answer = await session.answer(asked)
            if asked.stream:
                return await _streamed(http, chat_events(asked, answer), end="data: [DONE]\n\n")
            return _json(chat_response(asked, answer))

        return await self._with_session(http, answered)

    async def _responses(self, http: "web.Request") -> "web.StreamResponse":
        async def answered(session: AgentSession, body: Mapping[str, Any]) -> "web.StreamResponse":
            earlier = str(body.get("previous_response_id") or "") if isinstance(body, Mapping) else ""
            before = session.conversation(plain_id(earlier)) if earlier else ()
            asked = read(responses_request, body, before)
            answer = await session.answer(asked)
            if asked.stream:
                return await _streamed(http, responses_events(asked, answer))
            return _json(responses_response(asked, answer))

        return await self._with_session(http, answered)

    async def _reward(self, http: "web.Request") -> "web.StreamResponse":
        async def answered(session: AgentSession, body: Mapping[str, Any]) -> "web.StreamResponse":
            try:
                reward = as_reward(body.get("reward"))
            except (EnvironmentFailure, AttributeError) as error:
                raise ApiError(f'send {{"reward": NUMBER}}, or {{"reward": NUMBER, "id": ID}}: {error}') from error
            if body.get("id") is None:
                session.reward = reward
            else:
                session.rewarded(plain_id(body["id"]), reward)
            return _json({"reward": reward})

        return await self._with_session(http, answered)

    async def _models(self, http: "web.Request") -> "web.StreamResponse":
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rltrain"}
        return _json({"object": "list", "data": [model]})

    async def _with_session(self, http: "web.Request", answered: Any) -> "web.StreamResponse":
        """Answer a request in the session that the request's API key identifies."""
        key = http.match_info.get("key") or http.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self.sessions.get(key)
        task = asyncio.current_task()
        assert task is not None, "`_with_session` must run in an asyncio task"
        try:
            if session is None:
                raise ApiError(
                    "the API key belongs to no running conversation: the conversation has ended, or the key is wrong",
                    status=401,
                    code="invalid_api_key",
                )
            session.calls.add(task)
            response: web.StreamResponse = await answered(session, await _body(http))
        except ApiError as error:
            if session is not None:
                session.refusal = str(error)
            return _json(error.body(), error.status)
        finally:
            if session is not None:
                session.calls.discard(task)
        return response


async def _body(http: "web.Request") -> Any:
    """Return the JSON value of a request's body.

    Raises:
        ApiError: the body is too large, cannot be decoded or is not valid JSON.
    """
    try:
        return await http.json()
    except Exception as error:
        raise ApiError(f"the body of the request cannot be read: {described(error)}") from error


def read(function: Callable[..., ModelRequest], *arguments: Any) -> ModelRequest:
    """Parse a request with `function`, and convert an unexpected exception of `function` to an ApiError.

    Raises:
        ApiError: the request is malformed.
    """
    try:
        return function(*arguments)
    except ApiError:
        raise
    except Exception as error:
        raise ApiError(f"the request is malformed: {described(error)}") from error


def _bypass_proxies() -> None:
    """Make HTTP clients in this process and in its child processes reach the loopback address without a proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        if "127.0.0.1" not in hosts:
            os.environ[name] = ",".join([*hosts, "127.0.0.1"])


def _json(value: Mapping[str, Any], status: int = 200) -> "web.Response":
    from aiohttp import web

    return web.json_response(value, status=status)


async def _streamed(http: "web.Request", events: Iterator[Event], *, end: str = "") -> "web.StreamResponse":
    """Stream `events` to the client as server-sent events, and then send the text in `end`."""
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    await response.write_eof(end.encode())
    return response
