"""Environments, tools and agent programs of a run: loading and checking them before any worker starts."""

import inspect
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError, one_line
from rltrain.data.chat_templates import TemplateError
from rltrain.data.prompts import PromptSet
from rltrain.data.turn_rendering import TurnRenderer
from rltrain.environments.agents import OFFERED, is_function, missing_arguments
from rltrain.environments.contract import REWARDS, STEP, EnvironmentFailure, missing_columns, tool_names
from rltrain.environments.tool_calls import TOOL_CALL_FORMATS, format_of
from rltrain.rewards.loading import absolute, import_function, load_function
from rltrain.rewards.signatures import parameters
from rltrain.settings.schema import Config, RolloutConfig
from workers.environments.mcp_tools import is_url, tools_of
from workers.environments.messages import Environments, EnvironmentSource, Limits
from workers.rollout.turn_server import parser_of
from workers.rollout.turns import TurnFormat

AUTO = "auto"


def environments_for(
    config: RolloutConfig,
    tokenizer: Any,
    stop_ids: Sequence[int],
    prompts: Sequence[PromptSet],
    journal: Path,
    *,
    deterministic: bool,
) -> Environments:
    """Load and check the environment and the tools of a run.

    Args:
        config: section of the config with the environment and the tools.
        tokenizer: tokenizer of the model.
        stop_ids: token ids that end an answer.
        prompts: data sets of the run.
        journal: folder in which environment workers record the turns of unfinished trajectories.
        deterministic: whether the answers must be the same in every run with the same seed.

    Raises:
        ConfigError: the environment or a tool cannot be loaded, or the chat template cannot describe the tools to the
            model. `environments_for` raises ConfigError if a data set in `prompts` lacks a column that the environment
            needs, or if the descriptions of the tools make all prompts of a data set longer than
            `rollout.max_prompt_length`.
    """
    source, schemas = tools_of_run(config)
    if config.agent is not None:
        source = replace(source, agent=agent_of(config.agent, prompts))
    turns = turn_format(config, schemas, tokenizer, stop_ids)
    check_environment_columns(config, prompts)
    if schemas:
        check_prompt_lengths(config, schemas, tokenizer, stop_ids, prompts)
    limits = limits_of(config, deterministic=deterministic)
    return Environments(source, turns, limits, config.environment_memory_mb, journal)


def tools_of_run(config: RolloutConfig) -> tuple[EnvironmentSource, list[dict[str, Any]]]:
    """Load the environment and the tools of a run, and connect once to each MCP server.

    Returns:
        A pair (source, schemas): `source` holds the paths of the environment class and of the tools, and the commands
        or URLs of the MCP servers. All file paths in `source` are absolute. `schemas` lists the schemas of all tools.

    Raises:
        ConfigError: the environment or a tool cannot be loaded, no schema can be made for a tool, an MCP server cannot
            be reached, or two tools have the same name.
    """
    environment = load_environment(config)
    methods = [] if environment is None else tool_names(environment)
    schemas = [_schema_of_method(environment, name) for name in methods]
    functions: dict[str, str] = {}
    servers: dict[str, list[str]] = {}
    for tool in config.tools:
        if tool.mcp is not None:
            found = _schemas_of_server(tool.mcp)
            servers[absolute_command(tool.mcp)] = [schema["function"]["name"] for schema in found]
            schemas += found
        elif tool.path is not None:
            where = f"rollout.tools: '{tool.path}'"
            schemas.append(_schema(_tool_function(tool.path, where), where))
            functions[tool.name] = absolute(tool.path)
    names = [schema["function"]["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"rollout.tools: two tools are called {twice[0]}; rename one of them")
    if config.environment is not None and not schemas and not hasattr(environment, STEP):
        raise ConfigError(
            f"rollout.environment={config.environment}: the class has neither a method `step` nor a public method that "
            "the model could call; add one"
        )
    return EnvironmentSource(absolute(config.environment) if config.environment else "", functions, servers), schemas


def agent_of(agent: str, prompts: Sequence[PromptSet]) -> str:
    """Check an agent program, and return its function path or its command with absolute file paths.

    Raises:
        ConfigError: the agent program is a function that cannot be imported or that has a parameter for which rltrain
            has no value, or the agent program is a command whose program does not exist.
    """
    where = f"rollout.agent={agent}"
    if not is_function(agent):
        return _agent_command(agent)
    function = import_function(agent, where)
    for one in prompts:
        if missing := missing_arguments(function, [*OFFERED, *one.columns]):
            raise ConfigError(
                f"{where}: the function needs {', '.join(missing)}, but rltrain offers only {', '.join(OFFERED)} and "
                f"the columns of {one.where} ({', '.join(one.columns) or 'none besides the prompt'}); rename the "
                "parameter or give it a default"
            )
    return absolute(agent)


def _agent_command(agent: str) -> str:
    try:
        words = shlex.split(absolute_command(agent))
    except ValueError as error:
        raise ConfigError(f"rollout.agent={agent}: not a valid command ({error}); correct the quotes") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"rollout.agent={agent}: there is no program {words[0] if words else ''!r}; give the path of a function, "
            "as in my_agent.py:run, or a command"
        )
    return shlex.join(words)


def absolute_command(address: str) -> str:
    """Return a command in which the paths of existing files are absolute.

    The URL of an MCP server is returned unchanged. Absolute paths are needed, because environment workers may have a
    different working directory than the driver.
    """
    if is_url(address):
        return address
    words = shlex.split(address)
    return shlex.join(str(Path(word).absolute()) if Path(word).is_file() else word for word in words)


def _schemas_of_server(address: str) -> list[dict[str, Any]]:
    try:
        found = tools_of(absolute_command(address))
    except (EnvironmentFailure, ValueError) as error:
        raise ConfigError(
            f"rollout.tools: {one_line(str(error), 300)}; start the MCP server, or correct the value of the key mcp"
        ) from error
    if not found:
        raise ConfigError(f"rollout.tools: the MCP server {address} offers no tools; remove it from rollout.tools")
    return found


def turn_format(
    config: RolloutConfig, schemas: Sequence[Mapping[str, Any]], tokenizer: Any, stop_ids: Sequence[int]
) -> TurnFormat:
    """Check that the model's chat template can add turns to a conversation, and return the format of the turns.

    Raises:
        ConfigError: the chat template cannot describe the tools or add turns to a conversation, or the parser of tool
            calls cannot be loaded.
    """
    template = _template_of(tokenizer)
    chosen = config.tool_format
    if chosen == AUTO:
        chosen = format_of(template) or ""
        if schemas and not chosen:
            raise ConfigError(
                "rollout.tool_format=auto: the model's chat template shows no known form of tool calls; set "
                f"rollout.tool_format to one of {', '.join(TOOL_CALL_FORMATS)}, or to a function of your own"
            )
        chosen = chosen or "json"
    parser_of(chosen)
    plays = hasattr(load_environment(config), STEP)
    # A run with tools gets messages of the role "tool". A run without tools, and a game, get messages of the user.
    roles = (["tool"] if schemas else []) + (["user"] if plays or not schemas else [])
    with TurnRenderer(tokenizer, tools=schemas, stop_ids=stop_ids) as renderer:
        refusal = renderer.probe(roles)
    if refusal:
        raise ConfigError(f"the model's chat template cannot add turns to a conversation: {refusal}")
    return TurnFormat(schemas, chosen)


def limits_of(config: RolloutConfig, *, deterministic: bool) -> Limits:
    """Return the limits on the turns, the tokens and the time of each trajectory.

    In a deterministic run, the requests of an agent program are answered one after another, because the order in which
    answers end depends on the speed of the engine.
    """
    return Limits(
        max_turns=config.max_turns,
        max_prompt_tokens=config.max_prompt_length,
        max_response_tokens=config.max_response_length,
        max_turn_tokens=config.max_turn_length or config.max_response_length,
        max_message_tokens=config.max_message_length,
        call_timeout_s=config.call_timeout_s,
        timeout_s=config.trajectory_timeout_s,
        max_parallel_turns=1 if deterministic else config.max_turns,
    )


def load_environment(config: RolloutConfig) -> type | None:
    """Import the class of the environment, or return None if the run has no environment.

    Raises:
        ConfigError: the class cannot be imported or needs arguments, or `rollout.environment` does not name a class.
    """
    if config.environment is None:
        return None
    where = f"rollout.environment={config.environment}"
    found: Any = import_function(config.environment, where, "class")
    if not inspect.isclass(found):
        raise ConfigError(f"{where}: names a function; an environment must be a class, as in my_env.py:HigherLower")
    if needed := _needed_arguments(found):
        raise ConfigError(
            f"{where}: the __init__ of the class needs {', '.join(needed)}, but rltrain creates each object without "
            "arguments; give each parameter a default, or make it a parameter of reset, which gets columns of the data"
        )
    return found


def unread_rewards(config: Config) -> str:
    """Return a warning if a run with an environment that can give rewards has no reward function that reads them.

    An environment can give rewards if its class has a method `step`, `reward` or `get_reward`. Otherwise, or if a
    reward function reads the rewards, `unread_rewards` returns "".

    Raises:
        ConfigError: the environment or a reward function cannot be loaded.
    """
    environment = load_environment(config.rollout)
    if environment is None or not any(callable(getattr(environment, name, None)) for name in (STEP, *REWARDS)):
        return ""
    for one in config.reward.functions:
        taken = parameters(load_function(one.path))
        if any(parameter.name == "environment_reward" for parameter in taken):
            return ""
    return (
        f"rollout.environment={config.rollout.environment}: any rewards of the environment do not count, "
        "because no reward function reads them; add environment_reward to reward.functions"
    )


def _needed_arguments(environment: type) -> list[str]:
    """Return the names of the parameters of the class's constructor that have no default value."""
    try:
        return missing_arguments(environment, [])
    except (TypeError, ValueError):  # Python cannot read the constructor's parameters of some classes in C.
        return []


def check_environment_columns(config: RolloutConfig, prompts: Sequence[PromptSet]) -> None:
    """Raise ConfigError if the environment's `reset` needs a column that the data does not have."""
    environment = load_environment(config)
    if environment is None:
        return
    for one in prompts:
        if missing := missing_columns(environment, one.columns):
            raise ConfigError(
                f"rollout.environment={config.environment}: reset needs {', '.join(missing)}, but {one.where} has only "
                f"the columns {', '.join(one.columns) or 'of the prompt'}; rename the parameter or give it a default"
            )


def check_prompt_lengths(
    config: RolloutConfig,
    schemas: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    stop_ids: Sequence[int],
    prompts: Sequence[PromptSet],
) -> None:
    """Raise ConfigError if tool descriptions make every prompt of a data set exceed `rollout.max_prompt_length`."""
    longest = max(max(one.token_counts(), default=0) for one in prompts)
    with TurnRenderer(tokenizer, tools=schemas, stop_ids=stop_ids) as renderer:
        for one in prompts:
            counts = one.token_counts()
            if not counts:
                continue
            shortest = one[counts.index(min(counts))]
            try:
                total = len(renderer.prompt_ids(shortest.chat))
                added = total - len(renderer.with_tools([]).prompt_ids(shortest.chat))
            except TemplateError:
                # If the chat template cannot render the prompt, the prompt's length is not checked here. The
                # trajectories of such a prompt fail later, during the run.
                continue
            if total > config.max_prompt_length:
                raise ConfigError(
                    f"rollout.max_prompt_length={config.max_prompt_length}: the descriptions of the tools add {added} "
                    f"tokens to each prompt, so even the shortest prompt of {one.where} has {total} tokens; set "
                    f"rollout.max_prompt_length={longest + total - len(shortest.ids)}, which is enough for the longest "
                    "prompt, or use fewer tools or shorter descriptions of the tools"
                )


def _unbound(environment: type | None, name: str) -> Callable[..., Any]:
    """Return a method of a class as a function without the parameter `self`."""
    method = inspect.getattr_static(environment, name)
    if isinstance(method, staticmethod | classmethod):
        found: Callable[..., Any] = getattr(environment, name)
        return found
    bound: Callable[..., Any] = method.__get__(object(), object)
    return bound


def _tool_function(path: str, where: str) -> Callable[..., Any]:
    function = import_function(path, where)
    if inspect.isclass(function):
        raise ConfigError(
            f"{where}: names a class, and a tool is a function; the class of an environment, whose methods are tools, "
            f"belongs in rollout.environment={path}"
        )
    return function


def _schema_of_method(environment: type | None, name: str) -> dict[str, Any]:
    method = _unbound(environment, name)
    code = getattr(inspect.unwrap(method), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    assert environment is not None, "a method that is a tool must belong to an environment"
    return _schema(method, f"rollout.environment: the method {name} of the class {environment.__name__}{place}")


def _schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the schema of a tool, made from its type hints and its docstring.

    Raises:
        ConfigError: the tool has no docstring, or a parameter of the tool has no type hint or no description.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{where}: no schema can be made for the model ({one_line(str(error), 200)}); give the function a "
            "docstring in Google style that describes each parameter under Args:, and a type hint for each parameter"
        ) from error
    return schema


def _template_of(tokenizer: Any) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except Exception as error:
        raise ConfigError(
            f"rollout.environment, rollout.tools and rollout.agent need a chat template ({one_line(str(error), 120)}); "
            "use an instruct model"
        ) from error
    return template
