"""Texts as a finding or a transcript shows them: short, and the same when it is found again."""

from __future__ import annotations

from typing import Any, Final

SHOWN_CHARS: Final = 200
"""Of a text that is shown."""


def plain(text: str) -> str:
    """Cut a text to what stays the same when the same is found again."""
    words = "".join("n" if char.isdigit() else char for char in text)
    return words[:SHOWN_CHARS]


def without_sound(value: Any) -> Any:
    """Shorten the long texts of a body, which are sound."""
    if isinstance(value, dict):
        return {key: without_sound(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{value[:40]}... ({len(value)} characters)"
    return value
