"""Two gateways are restarted one after the other under conversations, which go on.

A small part of `tests.soak.gateways`; behind HAProxy, where it is installed.
"""

from __future__ import annotations

from pathlib import Path

from tests.soak.gateways import soak


def test_conversations_outlive_a_rolling_restart(tmp_path: Path) -> None:
    """An upgrade of the gateways would end conversations, or lose what was said."""
    found = soak(tmp_path, "scripted", sessions=4, rounds=1, settle_s=2.0)
    assert found["failures"] == []
    assert found["gateways restarted"] == 2
    assert sum(found["sessions of each gateway"].values()) == 4
