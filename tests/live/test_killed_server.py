"""Servers are killed and stopped amid conversations, which the next one goes on with.

A small part of `tests.soak.restarts`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from tests.soak.restarts import soak

TOGETHER: Final = 8


def test_conversations_outlive_their_server(tmp_path: Path) -> None:
    """A server that is killed, or upgraded, ends all conversations."""
    found = Counter[str]()
    assert soak(["killed", "stopped"], 3, tmp_path, found, together=TOGETHER) == []
    ended = found["conversations"] + found["ended while their client was away"]
    assert ended >= TOGETHER  # on a busy machine each has time for one
    assert found["sessions taken up"] > 2
    assert found["left open"] < found["conversations"] / 4
