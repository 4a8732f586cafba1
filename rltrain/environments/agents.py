"""Interface between rltrain and the agent programs that users write.

An agent program is a function or a command that sends requests to the policy through an OpenAI-compatible HTTP API.
rltrain starts the agent program once for each trajectory:

    run(base_url, api_key, **columns) -> float | dict[str, float] | None

An agent function gets only the arguments that its signature names, or all possible arguments if its signature has
`**kwargs`. The possible arguments of an agent function are `base_url` and `api_key` for an OpenAI client, `model` (a
model name for the client), `messages` (the prompt as chat messages), `seed`, and the columns of the data by name. If
the agent function returns a number, the number is the reward of the trajectory. If the agent function returns a dict,
the dict maps the id of an answer to the reward of that answer's turn. An agent function can be a coroutine function. If
the agent program is a command, the docstring of the class `workers.environments.agent_program.CommandProgram` describes
the command's input.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OFFERED = ("base_url", "api_key", "model", "messages", "seed")  # Arguments that every agent function can get.
_FUNCTION = re.compile(r"\S+:[A-Za-z_]\w*")


def is_function(agent: str) -> bool:
    """Return whether `rollout.agent` names a function, in the form `package.module:function` or `file.py:function`.

    A value of `rollout.agent` that does not have the form of a function's name is a command.
    """
    return _FUNCTION.fullmatch(agent) is not None


def arguments_of(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in `offered` that a function accepts.

    A function accepts the arguments that its signature names, or all arguments if its signature has `**kwargs`.
    """
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def missing_arguments(function: Callable[..., Any], offered: Sequence[str]) -> list[str]:
    """Return the names of a function's parameters that have no default and that no argument in `offered` fills."""
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    needed = [one for one in parameters if one.default is inspect.Parameter.empty]
    unnamed = [one.name for one in needed if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    return unnamed + [one.name for one in needed if one.kind in plain and one.name not in offered]
