"""An MCP server for tests, over stdio by default, or over HTTP on the port that the command line gives."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(fruit: str) -> int:
    """Look up the price of a fruit."""
    return {"apple": 3, "pear": 4}[fruit]


@server.tool()
async def leave() -> None:
    """End the server's process."""
    sys.stdout.flush()
    import os

    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
