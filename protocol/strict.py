"""What a JSON parser lets through and a frame may not have: duplicate keys, and endless depth.

orjson keeps the last of two equal keys and says nothing. Two readers of such a frame may take it
for different things, so it is refused; a frame is looked through again only where it can have one.
"""

from __future__ import annotations

import json

from .errors import CLOSE_INVALID_FRAME, FrameError
from .limits import JSON_DEPTH_MAX


def not_json(reason: str) -> FrameError:
    """Make the error for a frame that is no JSON object, or not one that may be (1003)."""
    return FrameError(CLOSE_INVALID_FRAME, reason)


def has_more(text: str, char: str, count: int) -> bool:
    """Whether `char` stands in `text` more often; `str.count` takes ten times as long to say."""
    at = -1
    for _ in range(count + 1):
        at = text.find(char, at + 1)
        if at < 0:
            return False
    return True


def count_keys(value: dict[str, object]) -> int:
    """Count the keys of all objects, level by level, as deep as frames may be."""
    keys = 0
    level: list[dict[str, object] | list[object]] = [value]
    for _ in range(JSON_DEPTH_MAX):
        keys += sum(len(node) for node in level if isinstance(node, dict))
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return keys
    raise not_json(f"frame nested deeper than {JSON_DEPTH_MAX} levels")


def refuse_duplicates(frame: str) -> None:
    """Raise FrameError where an object in a frame, which is JSON, has a key twice."""
    # Numbers are not read again: `len` stands in for their parsers, so that none is too long.
    json.loads(frame, object_pairs_hook=_unique_keys, parse_int=len, parse_float=len)


def _unique_keys(pairs: list[tuple[str, object]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise not_json("frame with duplicate keys")
