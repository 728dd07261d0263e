"""A recording before a model is run on it: what it is, and why it may have to be skipped.

`SkippedError` says why a model cannot be judged on it; nothing is lost, and others go on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs

from protocol.values.digest import DIGEST_BYTES
from protocol.values.modes import OF_MODE
from recorder.format.records import Record
from recorder.read.reader import LogReader

from ..eval.gather import lost_in
from ..rerun.full import held_units
from ..shared.fields import typed


class SkippedError(Exception):
    """A recording on which no model can be judged; the message says why."""


@attrs.frozen(kw_only=True)
class Recording:
    """A log, by the hash of its bytes.

    Attributes:
        recording_id: its name; empty if the head has none.
        created_ms: when it was made, in Unix milliseconds.
        held_units: units that were held to another recording.
    """

    log: Path
    content: str
    mode: str
    recording_id: str
    created_ms: int
    held_units: int


def content_of(log: Path) -> str:
    """Hash the bytes of a log (blake2b-128, hex); `OSError` if it cannot be read."""
    with log.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)
        ).hexdigest()


def look_at(log: Path) -> Recording:
    """Look at a log before a model is run on it.

    `SkippedError`: none can be; `RecorderError` or `OSError`: it cannot be read.
    """
    with LogReader(log) as reader:
        head = reader.head.fields
        if "speech" in lost_in(head):
            raise SkippedError("redacted: the user's sound is not in it")
        first = next((it for it in reader if isinstance(it, Record) and it.seq > 0), None)
        mode = None if first is None else typed(first.fields, "mode", str)
        served = {name: known for name, known in OF_MODE.items() if name == mode}
        if mode is not None and not any(known.work == "unit" for known in served.values()):
            raise SkippedError(f"mode {mode}: only duplex sessions are run again")
    return Recording(
        log=log,
        content=content_of(log),
        mode=mode or "",
        recording_id=typed(head, "recording_id", str) or "",
        created_ms=typed(head, "wall_ms", int) or 0,
        held_units=held_units(head),
    )
