"""The words by which a checkpoint's chat template offers tools; the template is not run.

A template is a program in Jinja. The prompt is laid out by our own code (`chat_prompt`), so only
what differs between checkpoints is read: two string literals, the text before the list of tools and
the text after it. A template without them, or of another form than Qwen3's (`<tool_call>`,
`<tool_response>`), has no tools here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs

TEMPLATE_CHARS_MAX: Final = 262_144
"""Fifty times the published template."""
TEMPLATE_FILE: Final = "chat_template.jinja"
"""Where newer checkpoints have it; older ones in `tokenizer_config.json`, as `chat_template`."""
_BODY: Final = r"(?:(?!\1)[^\\]|\\.)*"
_BEFORE: Final = re.compile(rf"""(["'])({_BODY}<tools>)\1""", re.DOTALL)
_AFTER: Final = re.compile(rf"""(["'])((?:\\n|\s)*</tools>{_BODY})\1""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final[Mapping[str, str]] = {"n": "\n", "t": "\t", "r": "\r"}
_MESSAGE_END: Final = "<|im_end|>"
_MARKS: Final = ("tool_calls", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@attrs.frozen
class ToolWords:
    """The text before and after the list of tools, without line breaks at its outer ends."""

    before: str
    after: str


def read_tool_words(folder: Path) -> ToolWords | None:
    """Read the words of a checkpoint; None if its chat template has no tools.

    `ValueError`: the template is no text, or too long.
    """
    path = folder / TEMPLATE_FILE
    if path.exists():
        return tool_words(path.read_text(encoding="utf-8"), path.name)
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    template = config.get("chat_template") if isinstance(config, dict) else None
    if template is None:
        return None
    return tool_words(template, f"{path.name}: chat_template")


def tool_words(template: object, where: str = "chat_template") -> ToolWords | None:
    """Find the words in a template; `ValueError` as of `read_tool_words`."""
    if not isinstance(template, str) or len(template) > TEMPLATE_CHARS_MAX:
        raise ValueError(f"{where} is no text of at most {TEMPLATE_CHARS_MAX} characters")
    before, after = _BEFORE.search(template), _AFTER.search(template)
    if before is None or after is None or not all(mark in template for mark in _MARKS):
        return None
    end = _unescaped(after[2]).partition(_MESSAGE_END)[0]
    return ToolWords(before=_unescaped(before[2]).lstrip("\n"), after=end.strip("\n"))


def _unescaped(literal: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), literal)
