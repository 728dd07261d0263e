"""Recent blobs of one log, so that a repeated blob is stored as a reference.

Repeats come soon (a voice is sent, then prepared), so few blobs are kept, as whole bytes: three
short probes find them and a full comparison confirms, which is cheaper than any hash and exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, TypeAlias

import attrs

from .format import MIB

REFERENCE_BYTES_MIN: Final = 64
"""A shorter blob is stored again: a reference costs as much."""
REMEMBERED_BYTES: Final = MIB
"""Kept per log: five seconds of both sides of a session, or one larger blob, such as a voice."""
_PROBE_BYTES: Final = 16
"""Taken at three places, where different PCM and JPEG files differ."""

Place: TypeAlias = tuple[int, int]
"""`(seq, index)` of a blob."""
_Key: TypeAlias = tuple[int, bytes, bytes, bytes]


@attrs.define
class BlobMemory:
    """Recent blobs and where they are stored; of blobs with equal probes, the last."""

    bytes_max: int = REMEMBERED_BYTES
    _kept: OrderedDict[_Key, tuple[bytes, Place]] = attrs.field(factory=OrderedDict, init=False)
    _kept_bytes: int = attrs.field(default=0, init=False)

    def find_or_keep(self, blob: bytes, place: Place) -> Place | None:
        """Return where an equal blob is stored, or None and remember it at `place`."""
        if len(blob) < REFERENCE_BYTES_MIN:
            return None
        key = _probe(blob)
        found = self._kept.pop(key, None)
        if found is not None and found[0] == blob:
            self._kept[key] = found
            return found[1]
        self._kept[key] = (blob, place)
        self._kept_bytes += len(blob) if found is None else 0
        while self._kept_bytes > self.bytes_max and len(self._kept) > 1:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)
        return None


class Parts:
    """Stands in for a `BlobMemory` in a run of records, some of whose blobs are joined in one.

    Args:
        whole: where that one is.
        blobs: those in it, in order; a blob counts as one of them only if it is the same object.
    """

    def __init__(self, whole: Place, blobs: Sequence[bytes]) -> None:
        self._whole = whole
        self._blobs = blobs
        ends = list(accumulate(map(len, blobs), initial=0))
        self._starts = {id(blob): start for blob, start in zip(blobs, ends, strict=False)}

    def find_or_keep(self, blob: bytes, _place: Place) -> tuple[int, ...] | None:
        """Return where a blob is: in the whole, from where, and how long; None: it is another."""
        start = self._starts.get(id(blob))
        return None if start is None else (*self._whole, start, len(blob))


def _probe(blob: bytes) -> _Key:
    middle = len(blob) // 2
    return (
        len(blob),
        blob[:_PROBE_BYTES],
        blob[middle : middle + _PROBE_BYTES],
        blob[-_PROBE_BYTES:],
    )
