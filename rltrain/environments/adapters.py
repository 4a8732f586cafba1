"""Adapters that turn environments of other libraries into environments of rltrain.

The user passes a function that creates the other library's object, or the address of a server, so the adapters do not
import the other library. Example:

    import reasoning_gym
    from rltrain.environments.adapters import from_reasoning_gym

    Spelling = from_reasoning_gym(lambda seed: reasoning_gym.create_dataset("spell_backward", size=1, seed=seed))

The setting `rollout.environment=my_env.py:Spelling` makes a run use the class `Spelling`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from rltrain.environments.contract import as_text

SEEDS = 1 << 31  # Many libraries accept only seeds below 2**31.


def from_gymnasium(make: Callable[[], Any]) -> type:
    """Return an environment class for a Gymnasium environment whose actions and observations are text.

    The reward of a turn is the reward that the Gymnasium environment's `step` returns. The conversation ends when
    `step` reports that the environment has terminated or was truncated.

    Args:
        make: Function that creates the Gymnasium environment of one conversation.
    """

    class GymnasiumEnvironment:
        def __init__(self) -> None:
            self._env = make()

        def reset(self, seed: int) -> str:
            observation, _ = self._env.reset(seed=seed % SEEDS)
            return as_text(observation)

        def step(self, text: str) -> tuple[str, float, bool]:
            observation, reward, terminated, truncated, _ = self._env.step(text)
            return as_text(observation), float(reward), bool(terminated or truncated)

        def close(self) -> None:
            self._env.close()

    return GymnasiumEnvironment


def from_textarena(make: Callable[[], Any]) -> type:
    """Return an environment class for a TextArena game of one player.

    After each move, TextArena returns the text of the whole game. The adapter shows the model only the text that is new
    since the last move. The reward of the last turn is the game's reward of player 0. TextArena uses Python's global
    random generator, so a game that draws random numbers after its start is not reproducible if several games run in
    one process.

    Args:
        make: Function that creates the game of one conversation, for example `lambda: textarena.make("Mastermind-v0")`.
    """

    class TextArenaEnvironment:
        def __init__(self) -> None:
            self._env, self._shown = make(), ""

        def reset(self, seed: int) -> str:
            self._env.reset(num_players=1, seed=seed % SEEDS)
            return self._new_text()

        def step(self, text: str) -> tuple[str, float, bool]:
            done, _ = self._env.step(action=text)
            if not done:
                return self._new_text(), 0.0, False
            rewards, _ = self._env.close()
            return "", float(rewards[0]), True

        def _new_text(self) -> str:
            _, observation = self._env.get_observation()
            whole = as_text(observation)
            new = whole.removeprefix(self._shown)
            self._shown = whole
            return new.strip()

    return TextArenaEnvironment


def from_reasoning_gym(make: Callable[[int], Any]) -> type:
    """Return an environment class for a task of reasoning-gym; the environment asks one question and scores the answer.

    Args:
        make: Function that takes a seed and returns a data set of reasoning-gym. The conversation uses the first entry
            of the data set.
    """

    class ReasoningGymEnvironment:
        def reset(self, seed: int) -> str:
            self._data = make(seed % SEEDS)
            self._entry = self._data[0]
            return as_text(self._entry["question"])

        def step(self, text: str) -> tuple[str, float, bool]:
            return "", float(self._data.score_answer(text, self._entry)), True

    return ReasoningGymEnvironment


def from_openenv(
    url: str,
    *,
    action: str | Callable[[str], Mapping[str, Any]],
    observation: str | Callable[[Mapping[str, Any]], Any] | None = None,
) -> type:
    """Return an environment class for an environment of OpenEnv that a server offers at a URL.

    Each conversation opens a WebSocket connection to the server, because the server has one environment object for each
    connection. `reset` sends a seed and all columns of the data, and the server ignores names that its environment does
    not know. The reward of a turn is the reward of the observation.

    Args:
        url: Address of the server, for example `http://localhost:8000`.
        action: Name of the field of the action that gets the text of the answer, or a function that takes the text and
            returns all fields of the action.
        observation: Name of the field of the observation that the model sees, or a function that takes all fields and
            returns the text. None: the model sees all fields as JSON.

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
