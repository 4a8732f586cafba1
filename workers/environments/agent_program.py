"""Agent programs of users: Python functions or commands that call the policy through an OpenAI-compatible API."""

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.base.errors import described
from rltrain.batch.trajectory import Trajectory
from rltrain.environments.agents import arguments_of, is_function
from rltrain.environments.contract import EnvironmentFailure, as_reward
from rltrain.environments.openai_api import ApiError, plain_id
from rltrain.rewards.loading import import_function
from workers.cluster.daemon_threads import in_daemon_thread
from workers.environments.agent_endpoint import MODEL, AgentEndpoint
from workers.environments.agent_session import AgentSession
from workers.environments.episode import Sampler, environment_seed
from workers.environments.messages import EpisodeRequest, Limits
from workers.environments.recording import with_attempts
from workers.environments.user_environment import raised_at, without_exit

LAST_BYTES = 4096  # Number of bytes that are read from the end of a command's output to find the last line.
# Python program that asks the kernel to kill its process when the parent process ends (PR_SET_PDEATHSIG), and then
# replaces itself by the agent's command (exec).
_WRAPPER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
CANCEL_S = 5.0  # Maximum time in seconds to wait until a cancelled agent program has ended.


@dataclass(frozen=True)
class AgentTask:
    """Input that an agent program gets for one conversation.

    Attributes:
        base_url: URL of the OpenAI-compatible API from which the program requests the policy's answers.
        api_key: API key of the conversation.
        messages: Chat messages of the prompt.
        columns: Mapping from column name to value for the prompt's row of data.
        seed: Seed for the program's random numbers.
    """

    base_url: str
    api_key: str
    messages: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any]
    seed: int


class Program(Protocol):
    """Interface of an agent program."""

    async def run(self, task: AgentTask) -> Any:
        """Run the program until it ends, and return the reward of the conversation or None.

        Raises:
            Exception: the agent program has failed.
        """


class FunctionProgram:
    """An agent program that is a Python function or coroutine function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def run(self, task: AgentTask) -> Any:
        """Call the function with those arguments from the task that the function accepts.

        The arguments are the columns of the data row, `base_url`, `api_key`, `model`, `seed` and `messages`. A function
        that takes `**kwargs` gets all of these arguments.
        """
        offered = {"base_url": task.base_url, "api_key": task.api_key, "model": MODEL, "seed": task.seed}
        offered |= {"messages": [dict(message) for message in task.messages]}
        arguments = arguments_of(self.function, dict(task.columns) | offered)
        if inspect.iscoroutinefunction(self.function):
            return await without_exit(self.function(**arguments))
        result = await in_daemon_thread(lambda: self.function(**arguments))
        return await without_exit(result) if inspect.isawaitable(result) else result


class CommandProgram:
    """An agent program that is a command.

    The command gets the API's URL and key in the environment variables `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which
    OpenAI's clients read. The command gets the prompt, the data columns and the seed as one JSON object on its standard
    input. When the conversation ends, the command and all processes of its process group are killed.
    """

    def __init__(self, command: str) -> None:
        self.words = shlex.split(command)

    async def run(self, task: AgentTask) -> None:
        """Run the command.

        Raises:
            RuntimeError: the command's exit status is not 0. The error message contains the last line of the command's
                output.
        """
        given = {**task.columns, "messages": list(task.messages), "seed": task.seed}
        variables = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": MODEL}
        with tempfile.TemporaryFile("w+b") as output:
            process = await asyncio.create_subprocess_exec(
                *_ending_with_this_process(self.words),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | variables,
                start_new_session=True,
            )
            try:
                await process.communicate(json.dumps(given, default=str).encode())
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if process.returncode:
                output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_BYTES))
                lines = output.read().decode(errors="replace").strip().splitlines()
                raise RuntimeError(f"exit status {process.returncode}: {lines[-1] if lines else 'no output'}")


def _ending_with_this_process(words: Sequence[str]) -> list[str]:
    """Wrap the command `words`, so that the kernel kills the command's process when the current process ends."""
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *words]


def program_of(agent: str) -> Program:
    """Return the agent program that `rollout.agent` names.

    Raises:
        ConfigError: the function that `agent` names cannot be imported.
    """
    if is_function(agent):
        return FunctionProgram(import_function(agent, f"rollout.agent={agent}"))
    return CommandProgram(agent)


async def run_agent(
    request: EpisodeRequest, engine: Sampler, program: Program, endpoint: AgentEndpoint, limits: Limits
) -> Trajectory:
    """Run one trajectory of an agent program, and return the trajectory.

    If the program fails, the trajectory starts again with another API key. If the program fails in all attempts,
    `run_agent` returns a trajectory with an error and no actions.
    """

    async def attempt() -> Trajectory:
        session = AgentSession(request, engine, limits)
        url = await endpoint.base_url()
        task = AgentTask(url, session.key, request.messages, request.columns, environment_seed(request))
        with endpoint.open(session):
            stop_reason, reward = await _ended(program, task, session)
        if not session.record.turns:
            late = f"no request was answered within {limits.timeout_s:g} s" if stop_reason == "deadline" else ""
            raise EnvironmentFailure(f"the agent got no answer: {session.refusal or late or 'it made no request'}")
        return session.record.trajectory(stop_reason, reward)

    return await with_attempts(request, attempt)


def _reward_of(returned: Any, session: AgentSession) -> float | None:
    """Read a program's return value: the reward of the conversation, or a mapping from answer ids to rewards."""
    if not isinstance(returned, Mapping):
        return as_reward(returned)
    for answer, reward in returned.items():
        try:
            session.rewarded(plain_id(answer), as_reward(reward))
        except ApiError as error:
            raise EnvironmentFailure(f"the agent returned a reward for an unknown answer: {error}") from error
    return None


async def _ended(program: Program, task: AgentTask, session: AgentSession) -> tuple[str, float | None]:
    """Run a program until the program ends or exceeds its time limit, and return the stop reason and the reward.

    An agent program can fail because its request for an answer was refused. If the program fails after its last request
    was refused because of a limit, such as `rollout.max_turns`, the failure is ignored.

    Raises:
        EnvironmentFailure: the agent program has failed.
        Exception: the engine can sample no further answer; the engine's exception is raised unchanged.
    """
    running = asyncio.ensure_future(program.run(task))
    # If a program fails after its conversation has ended, no code below reads the program's exception. asyncio logs an
    # exception that no code reads, so a callback of the asyncio task reads the exception.
    running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait(
            {running, session.lost}, timeout=session.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if session.lost.done():
            session.lost.result()
        if not running.done():
            return "deadline", session.reward
        reward = _reward_of(running.result(), session)
    except EnvironmentFailure:
        raise
    except Exception as error:
        if session.lost.done():
            raise
        if not session.stop_reason:
            raise EnvironmentFailure(f"the agent failed: {described(error)}{raised_at(error)}") from error
        reward = None
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=CANCEL_S)
    return session.stop_reason or "done", session.reward if reward is None else reward
