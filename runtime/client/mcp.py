"""Tools of an MCP server for a spoken session, by the official package `mcp` (the extra `mcp`).

    async with antiphon.tools_from_mcp("http://127.0.0.1:8000/mcp") as tools:
        async with antiphon.connect(url, mode="audio", tools=tools) as session: ...

Its tools are listed once, and called while the context is open; MCP's other parts are not used. A
tool has its name there, with `_` for what a model may not read in a name. A result is the texts
that the server returns, joined by line breaks; an error begins with `error: `.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from mcp import Client, MCPError

from protocol.values.limits import CALL_RESULT_S, TOOLS_MAX
from protocol.values.model import Tool

from .chat import tool
from .duplex import Function
from .errors import CannotConnectError, LocalProtocolError

NAME_CHARS_MAX: Final = 64
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]")


@asynccontextmanager
async def tools_from_mcp(url: str) -> AsyncIterator[dict[str | Tool, Function]]:
    """Connect to an MCP server over streamable HTTP, and list its tools for `connect`.

    An error, also of the block, is raised as it is and not in a group.

    Raises:
        CannotConnectError: no MCP server answers there, or it answers with an error.
        LocalProtocolError: it has more tools than a session may have, or two of one name.
    """
    failure: BaseException | None = None
    async with AsyncExitStack() as stack:
        try:
            try:
                client = await stack.enter_async_context(
                    Client(url, read_timeout_seconds=CALL_RESULT_S)
                )
            except (MCPError, OSError, ExceptionGroup) as error:
                raise CannotConnectError(f"no MCP server answers at {url}") from error
            yield _functions(client, await _listed(client, url))
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            failure = error
    if failure is not None:
        raise failure


def _functions(client: Client, found: list[Any]) -> dict[str | Tool, Function]:
    tools: dict[str, tuple[str | Tool, Function]] = {}
    for each in found:
        name = _NOT_IN_NAMES.sub("_", each.name)[:NAME_CHARS_MAX]
        if name in tools:
            raise LocalProtocolError(f"the MCP server has two tools with the name {name}")
        made = tool(name, each.description or "", each.input_schema)
        tools[name] = made, partial(_call, client, each.name)
    return dict(tools.values())


async def _listed(client: Client, url: str) -> list[Any]:
    found: list[Any] = []
    cursor = None
    for _ in range(TOOLS_MAX + 1):
        try:
            page = await client.list_tools(cursor=cursor)
        except MCPError as error:
            text = f"the MCP server at {url} answered with an error: {error}"
            raise CannotConnectError(text) from error
        found += page.tools
        cursor = page.next_cursor
        if len(found) > TOOLS_MAX:
            break
        if cursor is None:
            return found
    raise LocalProtocolError(f"the MCP server has more than {TOOLS_MAX} tools, or pages of them")


async def _call(client: Client, name: str, /, **arguments: Any) -> str:
    """Call a tool; what fails on the way there is raised, and becomes the result as well."""
    result = await client.call_tool(name, arguments)
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    text = "\n".join(texts)
    return f"error: {text}" if result.is_error else text
