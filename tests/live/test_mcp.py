"""Tools of an MCP server in a spoken session: a real one, over streamable HTTP."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from socket import create_connection, socket
from typing import Any, Final

import anyio
import pytest

import antiphon
from protocol.values.errors import ErrorCode
from tests.live.servers import live_server

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")
lowlevel = pytest.importorskip("mcp.server.lowlevel")

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


def _connect_to(
    pages: list[Any], monkeypatch: pytest.MonkeyPatch, block: Exception | None = None
) -> None:
    """Connect to a server in this process, whose last page comes for ever; enter the block."""
    given = iter(pages)

    async def list_tools(_context: Any, _asked: Any) -> Any:
        page = next(given, pages[-1])
        if isinstance(page, Exception):
            raise page
        names, cursor = page
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
        return mcp.types.ListToolsResult.model_validate({"tools": tools, "nextCursor": cursor})

    server = lowlevel.Server("pages", on_list_tools=list_tools)
    opened = partial(mcp.Client, server)
    monkeypatch.setattr("runtime.client.mcp.Client", lambda _url, **given: opened(**given))

    async def connect() -> None:
        async with antiphon.tools_from_mcp("http://mcp.example/mcp"):
            if block is not None:
                raise block

    anyio.run(connect)


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ([(["a.b", "a_b"], None)], "two tools with the name a_b"),
        ([([f"t{number}" for number in range(65)], None)], "more than 64 tools"),
        ([([], "more")], "more than 64 tools, or pages"),
    ],
)
def test_tools_that_a_session_cannot_have_are_one_error(
    pages: list[Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program would find it two groups down, or read empty pages for ever."""
    with pytest.raises(antiphon.LocalProtocolError, match=text):
        _connect_to(pages, monkeypatch)


def test_the_error_of_a_server_that_lists_no_tools_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who reads that nothing answers would look for the fault in the network."""
    failure = mcp.MCPError(-32603, "no catalogue")
    with pytest.raises(antiphon.CannotConnectError, match="answered with an error: no catalogue"):
        _connect_to([failure], monkeypatch)


def test_an_error_of_the_block_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`except antiphon.SessionRefusedError` around the guide's example would never match."""
    report = antiphon.ErrorReport(code=ErrorCode.QUEUE_FULL, message="no place")
    with pytest.raises(antiphon.SessionRefusedError, match="no place"):
        _connect_to([([], None)], monkeypatch, antiphon.SessionRefusedError(report))
