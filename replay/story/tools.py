"""Calls of tools and their results in words, as the commands show them."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.values.model import ToolCall, ToolResult
from protocol.values.requests import Part, TextPart


def calls_text(calls: Iterable[ToolCall]) -> str:
    """Write calls in one line, such as `[calls clock {}]`; empty without any."""
    return " ".join(f"[calls {call.name} {call.arguments}]" for call in calls)


def asked_texts(content: Iterable[Part]) -> list[str]:
    """The texts of a question, and in its place a tool's result, such as `[returns 10:30]`."""
    return [
        part.text if isinstance(part, TextPart) else f"[returns {part.output}]"
        for part in content
        if isinstance(part, TextPart | ToolResult)
    ]
