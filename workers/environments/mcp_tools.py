"""Tools of MCP servers (Model Context Protocol), which are programs or HTTP servers that offer tools."""

import asyncio
import contextlib
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any, TextIO

from rltrain.base.errors import described
from rltrain.environments.contract import EnvironmentFailure

CONNECT_TIMEOUT_S = 60.0  # Connecting can take long, because the server's command may install the server first.


def tools_of(address: str) -> list[dict[str, Any]]:
    """Connect to an MCP server, and return its tools' schemas in the format of `transformers.utils.get_json_schema`.

    Args:
        address: URL of the server, or the command that starts the server.

    Raises:
        EnvironmentFailure: the server cannot be reached. The message of the EnvironmentFailure is a single line.
    """

    async def listed() -> list[Any]:
        async with _connected(address) as client, asyncio.timeout(CONNECT_TIMEOUT_S):
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return found

    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in asyncio.run(listed())
    ]


class McpServer:
    """A connection to an MCP server that all trajectories of an environment worker share.

    The first call of a tool opens the connection to the MCP server. If the connection fails, the next call of a tool
    opens a new connection.

    Args:
        address: URL of the server, or the command that starts the server.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._client: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None

    def tool(self, name: str) -> Callable[..., Any]:
        """Return a coroutine function that calls the server's tool `name` and returns the result's text.

        If the tool reports an error, the tool's coroutine function raises RuntimeError with the text of the tool's
        error. If the MCP server cannot be reached or ends the connection, the tool's coroutine function raises
        EnvironmentFailure.
        """

        async def call(**arguments: Any) -> str:
            return await self._call(name, arguments)

        return call

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        client = await self._connection()
        task = self._task
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            # If the task has changed, another trajectory has already opened a new connection, which must stay open.
            if self._task is task:
                self.close()
            raise EnvironmentFailure(f"the MCP server {self.address} failed: {described(error)}") from error
        text = "\n".join(block.text for block in result.content if block.type == "text")
        if result.is_error:
            raise RuntimeError(text or "the tool failed without a message")
        return text

    async def _connection(self) -> Any:
        if self._client is None or (self._task is not None and self._task.done()):
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._client))
        # Several trajectories may wait for the same future, so the cancellation of one trajectory must not cancel the
        # future.
        return await asyncio.shield(self._client)

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Open the connection to the MCP server, and keep the connection open until the current task is cancelled.

        A client of the library mcp must be closed by the task that has opened the client.
        """
        try:
            async with _connected(self.address) as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except (Exception, asyncio.CancelledError) as error:
            if not ready.done():
                failure = error if isinstance(error, EnvironmentFailure) else _unreachable(self.address, error, "")
                ready.set_exception(failure)
                # asyncio logs an error if the exception of a future is never read. `ready.exception()` reads the
                # exception, in case no trajectory waits for the future `ready`.
                ready.exception()

    def close(self) -> asyncio.Task[None] | None:
        """Start closing the connection to the MCP server, without waiting until the connection is closed.

        Returns:
            A task that is done when the connection is closed and the process of the server, if any, has ended; None if
            no connection is open.
        """
        task, self._client, self._task = self._task, None, None
        if task is not None:
            task.cancel()
        return task


@contextlib.asynccontextmanager
async def _connected(address: str) -> AsyncIterator[Any]:
    """Open a connection to an MCP server.

    Raises:
        EnvironmentFailure: the server cannot be reached within `CONNECT_TIMEOUT_S` seconds, or the connection fails
            later.
    """
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    with tempfile.TemporaryFile("w+") as output:
        try:
            async with contextlib.AsyncExitStack() as stack:
                if is_url(address):
                    server: Any = address
                else:
                    command, *arguments = shlex.split(address)
                    server = stdio_client(StdioServerParameters(command=command, args=arguments), errlog=output)
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    client = await stack.enter_async_context(Client(server))
                yield client
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise _unreachable(address, error, _last_line(output)) from error


def is_url(address: str) -> bool:
    """Return whether the address of an MCP server is a URL rather than a command."""
    return address.startswith(("http://", "https://"))


def _last_line(output: TextIO) -> str:
    """Return the last line that an MCP server has written to stderr, because this line often describes the error."""
    output.seek(0)
    lines = output.read().strip().splitlines()
    return lines[-1].strip() if lines else ""


def _unreachable(address: str, error: BaseException, said: str) -> EnvironmentFailure:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = "no answer in time" if isinstance(error, TimeoutError) else described(error)
    return EnvironmentFailure(f"the MCP server {address} cannot be reached: {said or reason}")
