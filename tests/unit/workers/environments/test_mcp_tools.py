"""Tests of tools of MCP servers, with real servers over stdio and HTTP."""

import asyncio
import dataclasses
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rltrain.base.errors import ConfigError
from rltrain.environments.contract import EnvironmentFailure
from rltrain.environments.tool_calls import ToolCall
from rltrain.run.environments import absolute_command, tools_of_run
from rltrain.settings.compose import compose
from rltrain.settings.schema import ToolConfig
from workers.environments.mcp_tools import McpServer, tools_of
from workers.environments.messages import EnvironmentSource, Limits
from workers.environments.user_environment import UserEnvironment
from workers.environments.worker import EnvironmentWorker

FILE = Path(__file__).parents[3] / "mcp_server.py"
COMMAND = f"{sys.executable} {FILE}"


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, FILE, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not listens(port) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["stdio", "http"])
def address(request):
    return COMMAND if request.param == "stdio" else request.getfixturevalue("url")


def with_tools(address, use):
    """Run the coroutine function `use` with an environment whose tools are those of the server."""

    async def run():
        server = McpServer(address)
        tools = {name: server.tool(name) for name in ("price", "leave")}
        try:
            return await use(UserEnvironment(None, tools, 60.0))
        finally:
            if (task := server.close()) is not None:
                await asyncio.wait([task], timeout=10)

    return asyncio.run(run())


def test_the_schemas_of_a_server_are_those_that_a_chat_template_takes(address):
    price, leave = tools_of(address)
    assert price["type"] == "function"
    assert (price["function"]["name"], price["function"]["description"]) == ("price", "Look up the price of a fruit.")
    assert price["function"]["parameters"]["properties"]["fruit"]["type"] == "string"
    assert price["function"]["parameters"]["required"] == ["fruit"]
    assert leave["function"]["name"] == "leave"


def test_results_and_errors_of_a_tool_are_texts_for_the_policy(address):
    async def use(environment):
        calls = [ToolCall("price", {"fruit": fruit}, "c") for fruit in ("apple", "pear", "stone")]
        return await asyncio.gather(*(environment.call(call) for call in [*calls, ToolCall("price", {}, "c")]))

    apple, pear, stone, nothing = with_tools(address, use)
    assert (apple, pear) == ("3", "4")
    assert stone.startswith("error: price: RuntimeError: Error executing tool price")
    assert "Field required" in nothing


def test_a_server_that_ends_is_a_failure_of_the_environment_and_the_next_call_starts_it_again():
    async def use(environment):
        with pytest.raises(EnvironmentFailure, match=r"the MCP server .* failed"):
            await environment.call(ToolCall("leave", {}, "c"))
        return await environment.call(ToolCall("price", {"fruit": "apple"}, "c"))

    assert with_tools(COMMAND, use) == "3"


def test_a_worker_that_closes_ends_the_server_that_it_started(tmp_path):
    limits = Limits(8, 50, 100, 10, 20, 60.0, 60.0)
    worker = EnvironmentWorker("w", EnvironmentSource("", {}, {COMMAND: ["price"]}), limits, tmp_path, threaded=True)
    call = asyncio.run_coroutine_threadsafe(worker.tools["price"](fruit="pear"), worker.loop)
    assert call.result(60) == "4"
    # A process that an earlier test has ended may still be a zombie, which has no command line.
    children = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    (child,) = [one for one in children if str(FILE) in one.cmdline() and len(one.cmdline()) == 2]
    worker.close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (f"{sys.executable} -c 'raise SystemExit(\"no licence\")'", "cannot be reached: no licence"),
        ("no_such_program --now", "cannot be reached: FileNotFoundError"),
        ("http://127.0.0.1:9/mcp", "cannot be reached: ConnectError"),
        ("program 'open quote", "No closing quotation"),
    ],
)
def test_a_server_that_cannot_be_reached_is_refused_in_one_line(address, reason):
    with pytest.raises(ConfigError) as error:
        tools_of_run(replaced(compose([])[0].rollout, [ToolConfig(path=None, mcp=address)]))
    assert reason in str(error.value)
    assert str(error.value).startswith("rollout.tools: ")
    assert "\n" not in str(error.value)


def test_a_server_that_never_answers_is_refused_with_a_reason(monkeypatch):
    monkeypatch.setattr("workers.environments.mcp_tools.CONNECT_TIMEOUT_S", 1.0)
    with pytest.raises(EnvironmentFailure, match="cannot be reached: no answer in time"):
        tools_of(f"{sys.executable} -c 'import time; time.sleep(60)'")


def test_tools_of_functions_and_servers_are_described_together_and_must_have_different_names(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text('def weigh(fruit: str) -> int:\n    """Weigh.\n\n    Args:\n        fruit: A fruit.\n    """\n')
    config = compose([f"rollout.tools=[{file}:weigh]"])[0].rollout
    source, schemas = tools_of_run(replaced(config, [*config.tools, ToolConfig(path=None, mcp=COMMAND)]))
    assert [schema["function"]["name"] for schema in schemas] == ["weigh", "price", "leave"]
    assert source == EnvironmentSource("", {"weigh": f"{file}:weigh"}, {COMMAND: ["price", "leave"]})
    file.write_text(file.read_text().replace("weigh", "price"))
    other = compose([f"rollout.tools=[{file}:price]"])[0].rollout
    with pytest.raises(ConfigError, match="two tools are called price"):
        tools_of_run(replaced(other, [*other.tools, ToolConfig(path=None, mcp=COMMAND)]))


def test_files_in_a_command_get_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").touch()
    assert absolute_command("python server.py --name 'a b'") == f"python {tmp_path}/server.py --name 'a b'"
    assert absolute_command("http://host/mcp") == "http://host/mcp"


def test_a_tool_is_a_function_or_a_server():
    tools = compose(["rollout.tools=[a.py:f, {mcp: 'python server.py'}]"])[0].rollout.tools
    assert tools == [ToolConfig(path="a.py:f", mcp=None), ToolConfig(path=None, mcp="python server.py")]
    assert [tool.name for tool in tools] == ["f", "python server.py"]
    for wrong in ("{}", "{path: a.py:f, mcp: b}", "{mcp: ''}", "3"):
        with pytest.raises(ConfigError, match=r"^rollout\.tools\[0\]"):
            compose([f"rollout.tools=[{wrong}]"])


def replaced(config, tools):
    return dataclasses.replace(config, tools=tools)
