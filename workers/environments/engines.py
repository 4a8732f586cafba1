"""Connections from an environment worker to the rollout replicas."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from workers.rollout.turns import SamplesTurns, TurnRequest, TurnResult

# Maximum duration of a `poll_turns` call, in seconds. LOCAL_POLL_S is shorter than REMOTE_POLL_S, because a
# `poll_turns` call in the process of the environment worker blocks all trajectories.
REMOTE_POLL_S, LOCAL_POLL_S = 1.0, 0.05


class ReplicaGone(Exception):
    """Raised in a trajectory if the process of the trajectory's rollout replica has ended.

    When a replica's process ends, the driver submits the prompt groups of the unfinished trajectories again.
    """


class Connection(Protocol):
    """Interface through which an environment worker calls the rollout worker of a replica."""

    async def submit(self, client: str, requests: Sequence[TurnRequest]) -> None:
        """Add turn requests to the queue of the rollout worker."""

    async def poll(self, client: str) -> list[TurnResult]:
        """Wait a short time for turns to finish, and return the finished turns."""


class LocalConnection:
    """Connection to a rollout worker in the same process."""

    def __init__(self, worker: SamplesTurns) -> None:
        self.worker = worker

    async def submit(self, client: str, requests: Sequence[TurnRequest]) -> None:
        """Add turn requests to the queue of the rollout worker."""
        self.worker.submit_turns(client, requests)

    async def poll(self, client: str) -> list[TurnResult]:
        """Let the engine generate until a turn is finished or a short time has passed, and return finished turns."""
        results = self.worker.poll_turns(client, LOCAL_POLL_S)
        await asyncio.sleep(0)
        return results


class RayConnection:
    """Connection to a rollout worker in another process, which is a Ray actor of the class `Host`.

    Args:
        actor: Handle of the Ray actor in whose process the rollout worker runs.
        role: Name under which the Ray actor stores the rollout worker.
    """

    def __init__(self, actor: Any, role: str) -> None:
        self.actor, self.role = actor, role

    async def submit(self, client: str, requests: Sequence[TurnRequest]) -> None:
        """Add turn requests to the queue of the rollout worker."""
        await self._call(SamplesTurns.submit_turns.__name__, client, requests)

    async def poll(self, client: str) -> list[TurnResult]:
        """Wait a short time for turns to finish, and return the finished turns."""
        results: list[TurnResult] = await self._call(SamplesTurns.poll_turns.__name__, client, REMOTE_POLL_S)
        return results

    async def _call(self, method: str, *args: Any) -> Any:
        import ray

        reference = self.actor.call.remote(self.role, method, *args)
        try:
            return await asyncio.wrap_future(reference.future())
        except ray.exceptions.RayActorError as error:
            raise ReplicaGone(str(error)) from error


class ReplicaClient:
    """Client of one rollout replica, through which the trajectories of an environment worker sample their actions.

    Requests that are made at the same time are sent together, and one task polls for the results of all requests.

    Args:
        connection: Connection to the replica's rollout worker.
        client: Name with which the environment worker identifies itself to the replica.
    """

    def __init__(self, connection: Connection, client: str) -> None:
        self.connection, self.client = connection, client
        # Maps serial numbers of requests to futures of the results.
        self.waiting: dict[int, asyncio.Future[TurnResult]] = {}
        self._serials = itertools.count()
        self.unsent: list[TurnRequest] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def polling(self) -> bool:
        """Whether a trajectory is waiting for the replica to sample a turn."""
        return self.task is not None and not self.task.done()

    async def sample(self, request: TurnRequest) -> TurnResult:
        """Sample the policy's action in response to new messages.

        Raises:
            ReplicaGone: the replica's process has ended.
        """
        future: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        serial = next(self._serials)
        self.waiting[serial] = future
        self.unsent.append(replace(request, serial=serial))
        if not self.polling:
            self.task = asyncio.create_task(self._serve())
        elif len(self.unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send_soon)
        try:
            return await future
        finally:
            self.waiting.pop(serial, None)

    def _send_soon(self) -> None:
        if self.unsent:
            task = asyncio.create_task(self._send())
            task.add_done_callback(self._sent)

    async def _send(self) -> None:
        requests, self.unsent = self.unsent, []
        await self.connection.submit(self.client, requests)

    def _sent(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _serve(self) -> None:
        """Send the unsent requests, and poll for results while any trajectory waits for the result of its request."""
        try:
            if self.unsent:
                await self._send()
            while self.waiting:
                for result in await self.connection.poll(self.client):
                    future = self.waiting.get(result.serial)
                    if future is not None and not future.done():
                        future.set_result(result)
                await asyncio.sleep(0)  # Let the trajectories process the received results before the next poll.
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Stop polling the replica for results."""
        if self.task is not None:
            self.task.cancel()
