"""The contract between rltrain and the environments and tools that users write.

An environment is a class. For each trajectory, rltrain creates one object of the class and calls:

    reset(**columns) -> str | None     once, with the columns of the data by name; the returned text is appended to the
                                       last message of the prompt. A parameter `seed` gets an int that depends on the
                                       run's seed, the prompt group and the sample.
    METHOD(**arguments) -> Any         each public method is a tool. The policy calls tools by name; the returned value
                                       is shown to the policy as text.
    step(text) -> (text, reward, done) for games without tool calls: gets the text of the policy's action, and returns
                                       the observation, the reward of the turn (or None) and whether the game is over.
    reward() -> float | None           optional: the reward of the whole trajectory, after the last turn.
    close() -> None                    optional: called at the end, whatever happened.

All methods may be coroutine functions. `get_reward` is another name of `reward`. A tool may also be a plain function,
which has no state.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltrain.environments.agents import arguments_of, missing_arguments

RESET, STEP, CLOSE = "reset", "step", "close"
REWARDS = ("reward", "get_reward")
RESERVED = (RESET, STEP, CLOSE, *REWARDS)  # Public methods of an environment that are not tools.
SEED = "seed"  # Name of the parameter of `reset` that gets the seed of the trajectory.


class EnvironmentFailure(Exception):
    """Raised if the code of an environment fails; a failed tool call raises no error, but is shown to the policy."""


def tool_names(environment: type) -> list[str]:
    """Return the names of an environment's tools: its public methods, except the methods that the contract defines."""
    found = inspect.getmembers(environment, callable)
    return [name for name, _ in found if not name.startswith("_") and name not in RESERVED]


def reset_arguments(reset: Callable[..., Any], columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of an environment's `reset`: the columns and the seed that its signature asks for."""
    given = arguments_of(reset, columns)
    return given | ({SEED: seed} if SEED in inspect.signature(reset).parameters else {})


def missing_columns(environment: type, columns: Sequence[str]) -> list[str]:
    """Return the parameters of an environment's `reset` that have neither a default nor a column of the data."""
    reset = getattr(environment, RESET, None)
    if reset is None:
        return []
    first = next(iter(inspect.signature(reset).parameters), "")  # The first parameter is `self`.
    return missing_arguments(reset, [first, SEED, *columns])


def as_text(value: Any) -> str:
    """Return the text with which the policy sees a value that a tool or an environment has returned."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def as_step(value: Any) -> tuple[str, float | None, bool]:
    """Check the value that an environment's `step` has returned, and return (observation, reward, done).

    Raises:
        EnvironmentFailure: the value is not a tuple (observation, reward, done).
    """
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise EnvironmentFailure(f"step returned {value!r:.80}; it must return (observation, reward, done)")
    observation, reward, done = value
    return as_text(observation), as_reward(reward), bool(done)


def as_reward(value: Any) -> float | None:
    """Return a reward as a float, or None if the environment gave no reward.

    Raises:
        EnvironmentFailure: the value is not a finite number.
    """
    if value is None:
        return None
    try:
        reward = float(value)
    except (TypeError, ValueError):
        raise EnvironmentFailure(f"the reward {value!r:.80} is not a number") from None
    if reward != reward or abs(reward) == float("inf"):
        raise EnvironmentFailure(f"the reward {reward} is not finite")
    return reward
