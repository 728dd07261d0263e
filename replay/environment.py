"""Whether a full replay here can be compared with what was recorded there.

Rules: the recorded fingerprint and the backend's own must be equal, line by line; a line that only
one of them has differs. A backend that says of itself that it is not deterministic cannot be
compared at all. Which lines there are is the backend's business.
"""

from __future__ import annotations

from collections.abc import Mapping

from recorder.records import Fields
from runtime.backends.base import BackendInfo

from .report import Mismatch


def model_of(head: Fields) -> str | None:
    """Return the name of the model that a log was made with, as its head says; None if not."""
    config = head.get("config")
    name = config.get("model") if isinstance(config, Mapping) else None
    return name if isinstance(name, str) else None


def mismatches(head: Fields, info: BackendInfo) -> tuple[Mismatch, ...]:
    """List what differs between where a log was recorded and here.

    Args:
        head: the fields of the log's `session` record.
        info: the backend that is to run it again.
    """
    said = head.get("fingerprint")
    there = {name: str(line) for name, line in said.items()} if isinstance(said, Mapping) else {}
    here = {name: str(line) for name, line in info.fingerprint.items()}
    found = [
        Mismatch(name=name, recorded=there.get(name), here=here.get(name))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    config = head.get("config")
    there_too = not (isinstance(config, Mapping) and config.get("deterministic") is False)
    if not (info.deterministic and there_too):
        found.append(
            Mismatch(name="deterministic", recorded=str(there_too), here=str(info.deterministic))
        )
    return tuple(found)
