"""Tools in a conversation's prompt, in the form of Qwen3's chat template.

The tools stand behind the system message, each as JSON in a line of its own, between the words of
the checkpoint (`chat_template`). A call is `<tool_call>`, a line of JSON, `</tool_call>` behind the
answer's text; results that follow one another are one message of the user, each between
`<tool_response>` and `</tool_response>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from protocol.values.model import Tool, ToolCall, ToolResult


def signatures(tools: Sequence[Tool]) -> str:
    """The list of tools, each on a new line."""
    return "".join(f"\n{json.dumps(_signature(tool), ensure_ascii=False)}" for tool in tools)


def _signature(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def call_body(call: ToolCall) -> str:
    """The text between a call's marks."""
    return f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'


def result_body(result: ToolResult) -> str:
    """The text between a result's marks."""
    return f"\n{result.output}\n"
