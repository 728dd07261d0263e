"""Tools of an MCP server in a spoken session: a real one, over streamable HTTP."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import create_connection, socket
from typing import Final

import anyio
import pytest

import antiphon
from tests.live.servers import live_server

pytest.importorskip("mcp", reason="the extra mcp is not installed")

WAIT_S: Final = 30
SECOND: Final = bytes(4 * 16_000)
SERVER: Final = '''
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("clock")

@server.tool(name="the.clock")
def clock(zone: str = "UTC") -> str:
    """Tells the time."""
    return f"nine in {zone}"

@server.tool()
def lamp() -> str:
    """Lights a lamp."""
    raise ValueError("no bulb")

server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
'''


@pytest.fixture(scope="module")
def mcp_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MCP server with two tools."""
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path: Path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    with subprocess.Popen([sys.executable, path, str(port)], stderr=subprocess.DEVNULL) as process:
        give_up = time.monotonic() + WAIT_S
        while True:
            try:
                create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < give_up
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
        process.terminate()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_spoken_session_calls_a_tool_of_an_mcp_server(mcp_url: str, backend: str) -> None:
    """A user of MCP servers would write each of their tools again."""
    texts: list[str] = []

    async def talk(url: str) -> None:
        async with (
            antiphon.tools_from_mcp(mcp_url) as tools,
            antiphon.connect(url, mode="audio", tools=tools) as session,
        ):
            assert [getattr(tool, "name", "") for tool in tools] == ["the_clock", "lamp"]
            await session.append(SECOND)
            async for event in session:
                if isinstance(event, antiphon.Speech) and event.text.startswith("it is"):
                    texts.append(event.text)
                    await session.close()
                elif isinstance(event, antiphon.Listen) or getattr(event, "pcm", b""):
                    await anyio.sleep(0.3)  # for the result
                    if not texts:
                        await session.append(SECOND)

    with live_server("--no-record") as server:
        anyio.run(talk, server.url, backend=backend)
    assert texts == ["it is nine in UTC."]


def test_what_an_mcp_server_refuses_is_a_result(mcp_url: str) -> None:
    """The session would end, or the model not learn why there is no light."""

    async def call() -> None:
        async with antiphon.tools_from_mcp(mcp_url) as tools:
            clock, lamp = tools.values()
            assert await clock(zone="CET") == "nine in CET"  # type: ignore[misc]
            for made in (await clock(zone=5), await lamp()):  # type: ignore[misc]
                assert made.startswith("error: ")

    anyio.run(call)


def test_an_address_without_an_mcp_server_is_an_error() -> None:
    """A program would end with errors of another package, in groups."""

    async def connect() -> None:
        async with antiphon.tools_from_mcp("http://127.0.0.1:1/mcp"):
            pass

    with pytest.raises(antiphon.CannotConnectError, match="no MCP server answers"):
        anyio.run(connect)
