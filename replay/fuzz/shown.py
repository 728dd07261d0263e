"""Texts as a finding or a transcript shows them: short, and the same in each run."""

from __future__ import annotations

from typing import Any, Final

SHOWN_CHARS: Final = 200
"""Characters of a text that is shown."""


def plain(text: str) -> str:
    """A text without its digits, shortened: the same in each run."""
    words = "".join("n" if char.isdigit() else char for char in text)
    return words[:SHOWN_CHARS]


def without_sound(value: Any) -> Any:
    """A body with its long texts, which are sound, shortened."""
    if isinstance(value, dict):
        return {key: without_sound(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{value[:40]}... ({len(value)} characters)"
    return value
