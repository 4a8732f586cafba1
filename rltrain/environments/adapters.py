"""Adapters that turn environments of other libraries into environments of rltrain.

An adapter gets a function that creates the environment object, so the adapter need not import the environment's
library. Example:

    import reasoning_gym
    from rltrain.environments.adapters import from_reasoning_gym

    Spelling = from_reasoning_gym(lambda seed: reasoning_gym.create_dataset("spell_backward", size=1, seed=seed))

The setting `rollout.environment=my_env.py:Spelling` makes a run use the class `Spelling`.
"""

from collections.abc import Callable
from typing import Any

from rltrain.environments.contract import as_text

SEEDS = 1 << 31  # Many libraries of environments accept only seeds below 2**31.


def from_gymnasium(make: Callable[[], Any]) -> type:
    """Return an environment class for a Gymnasium environment whose actions and observations are text.

    The reward of a turn is the reward that the Gymnasium environment's `step` returns. The conversation ends when the
    Gymnasium environment's `step` returns a true value for `terminated` or `truncated`.

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
    """Return an environment class for a single-player TextArena game.

    After each move, TextArena returns the text of the whole game. The adapter shows the model only the text that is new
    since the last move. The last turn of a game gets the reward that TextArena gives to player 0; each earlier turn
    gets 0. TextArena uses Python's global random generator, so a game that draws random numbers after its start is not
    reproducible if several games run in one process.

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
        make: Function that takes a seed and returns a data set of reasoning-gym. The environment asks the question of
            the data set's first entry, and ignores all other entries.
    """

    class ReasoningGymEnvironment:
        def reset(self, seed: int) -> str:
            self._data = make(seed % SEEDS)
            self._entry = self._data[0]
            return as_text(self._entry["question"])

        def step(self, text: str) -> tuple[str, float, bool]:
            return "", float(self._data.score_answer(text, self._entry)), True

    return ReasoningGymEnvironment
