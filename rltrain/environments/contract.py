"""Interface of the environments and tools that users write for rltrain.

An environment is a Python class. For each trajectory, rltrain creates one object of the environment class, and calls
the following methods of the object:

    reset(**columns) -> str | None     called once, with the data columns as keyword arguments; the returned text is
                                       appended to the last message of the prompt. If `reset` has a parameter `seed`,
                                       the parameter gets an int that depends on the run's seed, the prompt group and
                                       the sample.
    METHOD(**arguments) -> Any         in an environment without `step`, every public method whose name is not in
                                       `RESERVED` is a tool. The policy calls tools by name; the returned value is shown
                                       to the policy as text.
    step(text) -> (text, reward, done) gets the text of the policy's action, and returns the observation, the reward of
                                       the turn (or None) and whether the game is over. An environment with `step` is a
                                       game, and none of its methods is a tool.
    reward() -> float | None           optional: called after the last turn; returns the reward of the whole trajectory.
                                       In an environment without `step`, `reward` can also be an attribute that
                                       holds a number or None; the attribute is read after the last turn.
    close() -> None                    optional: called when the trajectory has ended, even after an error.

All methods of an environment can be coroutine functions. A method with the name `get_reward` is called in the same way
as `reward`. A tool is either a method of an environment without `step` or a function outside any class; a tool outside
any class has no state. A run can combine a game with functions outside any class: `step` gets each action that has no
tool call.
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
    """Raised if the code of an environment fails; an error of a tool call is instead shown to the policy as text."""


def tool_names(environment: type) -> list[str]:
    """Return the names of an environment's tools: all its public methods except the methods in `RESERVED`.

    A game, which is an environment with a method `step`, has no tools: its other methods are helpers, which the policy
    is never shown and cannot call.
    """
    if hasattr(environment, STEP):
        return []
    found = inspect.getmembers(environment, callable)
    return [name for name, _ in found if not name.startswith("_") and name not in RESERVED]


def reset_arguments(reset: Callable[..., Any], columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the arguments of `reset`: each data column that `reset` takes, and the seed if `reset` takes a seed."""
    given = arguments_of(reset, columns)
    return given | ({SEED: seed} if SEED in inspect.signature(reset).parameters else {})


def missing_columns(environment: type, columns: Sequence[str]) -> list[str]:
    """Return the parameters of `reset` without a default value and without a data column, except `self` and `seed`."""
    reset = getattr(environment, RESET, None)
    if reset is None:
        return []
    # The first parameter of `reset` is `self`, which needs no data column.
    first = next(iter(inspect.signature(reset).parameters), "")
    return missing_arguments(reset, [first, SEED, *columns])


def as_text(value: Any) -> str:
    """Convert a value that a tool or an environment has returned to the text that is shown to the policy."""
    if isinstance(value, str):
        return valid_unicode(value)
    if value is None:
        return ""
    try:
        return valid_unicode(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return valid_unicode(str(value))


def valid_unicode(text: str) -> str:
    """Replace each unpaired surrogate in a text by U+FFFD, because UTF-8 cannot encode unpaired surrogates."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_step(value: Any, name: str = STEP) -> tuple[str, float | None, bool]:
    """Check the value that an environment's `step` has returned, and return (observation, reward, done).

    Args:
        value: the value that `step` has returned.
        name: name of the method for error messages, such as `HigherLower.step`.

    Raises:
        EnvironmentFailure: the value that `step` has returned is not a tuple or list (observation, reward, done), or
            the reward is not a finite number.
    """
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise EnvironmentFailure(f"{name} returned {value!r:.80}; it must return (observation, reward, done)")
    observation, reward, done = value
    return as_text(observation), as_reward(reward), bool(done)


def as_reward(value: Any) -> float | None:
    """Return a reward as a float, or None if the environment gave no reward.

    Raises:
        EnvironmentFailure: the reward that the environment gave is not a finite number.
    """
    if value is None:
        return None
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFailure(f"the reward {value!r:.80} is not a number") from None
    if reward != reward or abs(reward) == float("inf"):
        raise EnvironmentFailure(f"the reward {reward} is not finite")
    return reward
