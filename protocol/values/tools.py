"""Tools of a chat: what a client offers, what the model calls, and what the client returns.

The server runs no tool. A turn offers tools; an answer may end with calls of them; the client runs
these, and asks again with the conversation, the calls and their results.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import attrs

ToolChoice = Literal["auto", "none"]
"""Whether the model may call tools; that it must is not offered: its tokens are not constrained."""
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The name of a tool: it stands in JSON that a model writes token by token."""
CALLS_MAX: Final = 16
"""Calls an answer: what a model writes beyond is text."""


@attrs.frozen(kw_only=True)
class Tool:
    """A function that the client offers to the model.

    Attributes:
        name: its name: 1 to 64 letters, digits, `_` and `-`.
        description: what it does, for the model.
        parameters: its arguments, as a JSON Schema; the model reads it, the server does not.
    """

    name: str
    description: str = ""
    parameters: str = ""


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call of a tool, which the model asks of the client.

    Attributes:
        id: names the call, for its result; empty until the session names it.
        name: of the tool.
        arguments: a JSON object, as text. It is not checked against the tool's `parameters`.
    """

    id: str = ""
    name: str
    arguments: str


@attrs.frozen(kw_only=True)
class ToolResult:
    """What a tool returned, in a message of the role `tool`.

    Attributes:
        call_id: the call that it answers.
        output: any text.
    """

    call_id: str
    output: str
