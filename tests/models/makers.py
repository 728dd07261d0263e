"""What the makers' own package does with tools in duplex, as it was recorded.

`fixtures/duplex_tools.json.gz` was made by `minicpm-o5-sdk` 0.0.6 (MIT, ModelBest) of texts of
ours; its `about` says how each section was made. Where the package is installed (the extra
`duplex-tools`), its tokenizer and its wording of the prompt are compared too.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from protocol.values.model import Tool

Target = Literal["o45_fc", "o5"]
TARGETS: Final[tuple[Target, ...]] = ("o45_fc", "o5")
FILE: Final = Path(__file__).parents[2] / "fixtures" / "duplex_tools.json.gz"

TOOLS: Final = {
    tool.name: tool
    for tool in (
        Tool(name="clock", description="Tells the hour."),
        Tool(
            name="tide",
            description="Height of the tide in a harbour.",
            parameters='{"type": "object", "properties": {"harbour": {"type": "string"}, '
            '"hours": {"type": "integer"}}, "required": ["harbour"]}',
        ),
        Tool(
            name="note",
            parameters='{"type": "object", "properties": {"text": {"type": "string"}, '
            '"tags": {"type": "array", "items": {"type": "string"}}, '
            '"done": {"type": ["boolean", "null"]}, "weight": {"type": "number"}, '
            '"where": {"type": "object", "properties": {"x": {"type": "integer"}}}}}',
        ),
    )
}
"""The tools of the recorded sessions."""


@cache
def recorded() -> dict[str, Any]:
    """The recorded sections."""
    made: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return made
