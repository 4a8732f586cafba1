"""Messages to and from environment workers, and the limits of a trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.rollout.turns import TurnFormat


@dataclass(frozen=True)
class EpisodeRequest:
    """Request to run one trajectory in an environment.

    Attributes:
        key: The trajectory as a tuple (prompt group uid, index of the sample in its prompt group).
        messages: Chat messages of the prompt.
        columns: Data columns of the prompt, as a mapping from column name to value.
        temperature: Sampling temperature. At temperature 0, the engine decodes greedily.
        seed: Seed of the run or of the evaluation, from which the random streams of the trajectory are derived.
    """

    key: tuple[int, int]
    messages: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Limits:
    """Limits of a trajectory.

    Attributes:
        max_turns: Maximum number of turns. A turn is one action of the policy, with the messages before the action.
        max_prompt_tokens: Maximum number of tokens in the prompt, including the schemas of the tools.
        max_response_tokens: Maximum total number of tokens after the prompt, over all turns and including observations.
        max_turn_tokens: Maximum number of tokens in one action.
        max_message_tokens: Maximum number of tokens in the text of one message from a tool or an environment.
        call_timeout_s: Maximum duration of one call of the user's code, in seconds.
        timeout_s: Maximum duration of a trajectory, in seconds.
        max_parallel_turns: Maximum number of turns of one agent program that are sampled at the same time.
    """

    max_turns: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_turn_tokens: int
    max_message_tokens: int
    call_timeout_s: float
    timeout_s: float
    max_parallel_turns: int = 1


@dataclass(frozen=True)
class EnvironmentSource:
    """Where the environment class, the tools and the agent program of a run come from.

    Attributes:
        environment: Path of the environment's class, `package.module:Class` or `file.py:Class`; "" if the run has no
            environment class.
        tools: Mapping from the name of each tool to the path of the function that implements the tool.
        servers: Mapping from the address of each MCP server to the names of the server's tools.
        agent: Path of the agent function, or the agent's command; "" if the run has no agent program.
    """

    environment: str
    tools: Mapping[str, str]
    servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    agent: str = ""


@dataclass(frozen=True)
class Environments:
    """The environments and tools of a run.

    Attributes:
        source: Paths of the environment class and the tools, addresses of the MCP servers, and the agent program.
        turn_format: Schemas of the tools, and the format of tool calls.
        limits: Limits of each trajectory.
        memory_mb: Maximum memory that an environment process may allocate after its start, in MB.
        journal: Folder in which environment workers record the turns of unfinished trajectories.
    """

    source: EnvironmentSource
    turn_format: TurnFormat
    limits: Limits
    memory_mb: int
    journal: Path
