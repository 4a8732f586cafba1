"""Worker that runs many trajectories concurrently in one process, without importing torch or transformers."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rltrain.base.background_tasks import outside_event_loop
from rltrain.base.process_limits import limit_memory
from rltrain.batch.trajectory import Trajectory
from rltrain.rewards.loading import import_function
from workers.environments.agent_endpoint import AgentEndpoint
from workers.environments.agent_program import program_of, run_agent
from workers.environments.engines import Connection, ReplicaClient, ReplicaGone
from workers.environments.episode import Sampler, run_episode
from workers.environments.mcp_tools import McpServer
from workers.environments.messages import EnvironmentSource, EpisodeRequest, Limits
from workers.environments.turn_journal import JournaledSampler, ObservationChanged, ParallelSampler, TurnJournal
from workers.environments.user_environment import UserEnvironment

IDLE_S = 0.0005  # Seconds between two checks whether trajectories that wait for the user's code can continue.
DISCONNECT_S = 5.0  # Maximum time in seconds for which `close` waits until the processes of MCP servers have ended.
LINGER_S = 0.01  # Seconds for which `poll` waits for further trajectories after the first finished trajectory.


# Identity of a replica's process: the index of the replica in its pool, and the number of processes that the replica
# has started so far.
ReplicaId = tuple[int, int]


class EnvironmentWorker:
    """Worker that runs trajectories in environments.

    Args:
        name: Unique name with which the worker identifies itself to the replicas.
        source: Paths of the environment class and the tools, addresses of the MCP servers, and the agent program.
        limits: Limits on the turns, tokens and seconds of each trajectory.
        journal: Folder in which the worker records the turns of unfinished trajectories.
        threaded: Whether the trajectories run in a separate thread. If `threaded` is False, the trajectories run only
            during `poll`.
        memory_mb: Maximum memory in MB that the process may allocate after the imports of the user's modules; None for
            no limit. If the user's code allocates more than `memory_mb`, the allocation raises MemoryError.

    Attributes:
        records_events: Always True, which stops the worker process from recording the calls of this class's methods as
            timeline events. The calls of `poll` are not worth recording, because `poll` mostly waits.
    """

    records_events = True

    def __init__(
        self,
        name: str,
        source: EnvironmentSource,
        limits: Limits,
        journal: Path,
        *,
        threaded: bool,
        memory_mb: int | None = None,
    ) -> None:
        self.name, self.limits, self.epoch = name, limits, 0
        self.journal = TurnJournal(journal)
        path = source.environment
        self.make: Any = import_function(path, f"rollout.environment={path}", "class") if path else None
        self.tools: dict[str, Any] = {
            tool: import_function(path, f"rollout.tools: {path}") for tool, path in source.tools.items()
        }
        self.servers = {address: McpServer(address) for address in source.servers}
        for address, names in source.servers.items():
            self.tools |= {tool: self.servers[address].tool(tool) for tool in names}
        self.program = program_of(source.agent) if source.agent else None
        if memory_mb is not None:
            # `memory_mb` does not include the memory that the imports of the user's modules have allocated.
            limit_memory(memory_mb, beside_stacks=True)
        self.replicas: dict[ReplicaId, ReplicaClient] = {}
        self.running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.finished: list[Trajectory] = []
        self.error: BaseException | None = None
        self.news = threading.Condition()
        self.loop = asyncio.new_event_loop()
        self.endpoint = AgentEndpoint()
        self.threaded = threaded
        if threaded:
            threading.Thread(target=self.loop.run_forever, name="environments", daemon=True).start()

    def submit(self, replica: ReplicaId, connection: Connection, requests: Sequence[EpisodeRequest]) -> None:
        """Start trajectories whose actions one rollout replica samples, without waiting for the trajectories to end.

        Args:
            replica: Identity of the replica's process (see `ReplicaId`).
            connection: Connection to the replica's process, ignored if the worker already has a connection to the
                replica's process.
            requests: The trajectories to run. A running trajectory that has the same key as a request in `requests` is
                cancelled.
        """
        self._in_loop(lambda: self._start(replica, connection, requests))

    def _start(self, replica: ReplicaId, connection: Connection, requests: Sequence[EpisodeRequest]) -> None:
        if replica not in self.replicas:
            for old in [one for one in self.replicas if one[0] == replica[0]]:
                self.replicas.pop(old).close()
            self.replicas[replica] = ReplicaClient(connection, f"{self.name} {self.epoch}")
        for request in requests:
            if before := self.running.get(request.key):
                before.cancel()
            self.running[request.key] = asyncio.ensure_future(self._run(self.replicas[replica], request))

    async def _run(self, replica: ReplicaClient, request: EpisodeRequest) -> None:
        try:
            trajectory = await self._trajectory(replica, request)
        except ReplicaGone:
            # A trajectory whose replica has died is dropped. The rollout pool records the prompt groups that a dead
            # replica has not finished, and the driver submits these prompt groups again.
            return
        except Exception as error:
            with self.news:
                self.error = error
                self.news.notify_all()
            return
        finally:
            if self.running.get(request.key) is asyncio.current_task():
                del self.running[request.key]
        with self.news:
            self.finished.append(trajectory)
            self.news.notify_all()

    async def _trajectory(self, replica: ReplicaClient, request: EpisodeRequest) -> Trajectory:
        """Run one trajectory. The turns of the trajectory that are in the journal are not sampled again.

        If the environment no longer gives the recorded observations, the trajectory starts from its prompt again. An
        agent program whose requests are answered at the same time continues with new turns instead.
        """
        if self.program is not None and self.limits.max_parallel_turns > 1:
            found = self.journal.results_by_request(request.key)
            return await self._sampled(ParallelSampler(replica, self.journal, request.seed, found), request)
        recorded = self.journal.turns(request.key)
        try:
            return await self._sampled(JournaledSampler(replica, self.journal, recorded), request)
        except ObservationChanged:
            return await self._sampled(JournaledSampler(replica, self.journal, []), request)

    async def _sampled(self, engine: Sampler, request: EpisodeRequest) -> Trajectory:
        if self.program is not None:
            return await run_agent(request, engine, self.program, self.endpoint, self.limits)
        return await run_episode(request, engine, self._environment, self.limits)

    def _environment(self) -> UserEnvironment:
        return UserEnvironment(self.make, self.tools, self.limits.call_timeout_s)

    def poll(self, timeout_s: float) -> list[Trajectory]:
        """Return the trajectories that finished since the previous call of `poll`.

        Wait up to `timeout_s` seconds for the first finished trajectory.

        Raises:
            Exception: A call to a replica has failed, or rltrain's own code has raised an error.
        """
        if not self.threaded:
            with outside_event_loop():
                self.loop.run_until_complete(self._run_trajectories(timeout_s))
        with self.news:
            if self.threaded:
                self.news.wait_for(lambda: self.finished or self.error, timeout_s)
            if self.error:
                raise self.error
            if self.finished and self.threaded:
                self.news.wait_for(lambda: self.error, LINGER_S)
            taken, self.finished = self.finished, []
        return taken

    async def _run_trajectories(self, timeout_s: float) -> None:
        """Run the trajectories until at least one trajectory ends, or until `timeout_s` seconds have passed."""
        deadline = time.monotonic() + timeout_s
        while self.running and not self.finished and not self.error and time.monotonic() < deadline:
            generating = any(one.polling for one in self.replicas.values())
            # If no turn is being generated, the loop sleeps for `IDLE_S` seconds between two checks, because all
            # trajectories are waiting for the user's code, which runs in other threads.
            await asyncio.sleep(0 if generating else IDLE_S)

    def abort(self) -> None:
        """End all running trajectories, and drop all finished trajectories that `poll` has not returned yet."""
        self._in_loop(self._abort)

    def _abort(self) -> None:
        self.epoch += 1
        for task in self.running.values():
            task.cancel()
        for replica in self.replicas.values():
            replica.close()
        self.running.clear()
        self.replicas.clear()
        with self.news:
            self.finished = []

    def _in_loop(self, function: Callable[[], None]) -> None:
        """Run a function in the thread of the event loop, and wait until the function has ended."""

        async def run() -> None:
            function()

        self._await(run())

    def _await(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop, and wait until the coroutine has ended."""
        if self.threaded:
            asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        else:
            with outside_event_loop():
                self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """End all trajectories, stop the server for agent programs, and close the connections to MCP servers."""
        self.abort()
        self._await(self._disconnect())
        if not self.threaded:
            with outside_event_loop():
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def _disconnect(self) -> None:
        """Stop the server for agent programs, and then close the connections to MCP servers.

        `_disconnect` waits up to `DISCONNECT_S` seconds for the end of the MCP servers' processes.
        """
        await self.endpoint.close()
        tasks = [task for server in self.servers.values() if (task := server.close()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=DISCONNECT_S)
