"""Limits on what reading a log may cost, in proportion to its file size.

A few kilobytes can expand to gigabytes: zstd packs zeros 10,000 to 1, a short reference repeats a
large blob, and a small JSON object takes 100 bytes of memory; checksums do not stop a forger. So
blocks, headers and blobs are charged before they are decompressed, parsed or unpacked.

Rules: costs are in bytes. A payload and a blob cost their length, a blob once per reference; a
header costs its length plus a fixed amount per record and JSON value. Writers make blocks long
enough (`frame_bytes_min`); the allowance covers small logs of older writers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .errors import FormatError
from .format import HEADER_BYTES, HEADER_VALUES_MAX, MIB

RATIO_MAX: Final = 4096
"""Cost per byte of the file. A muted microphone costs 150 to 310, compacted 1400; speech 10."""
ALLOWANCE: Final = 64 * MIB
"""The allowance of every log of any size: five minutes of silence in one chat frame, decoded."""
RECORD_COST: Final = 8 << 10
"""Parsing a record without fields takes as long as handling this many bytes of a blob."""
VALUE_COST: Final = 64
"""The same for a JSON value; also about its size in memory."""


class Expansion:
    """The cost of everything read from a log so far, `spent`, in bytes.

    Args:
        size: returns the current size of the file in bytes.
        allowance: cost allowed for an empty file.
        ratio: further cost allowed per byte.
    """

    def __init__(
        self, size: Callable[[], int], *, allowance: int = ALLOWANCE, ratio: int = RATIO_MAX
    ) -> None:
        self._size: Final = size
        self._allowance: Final = allowance
        self._ratio: Final = ratio
        self._limit = allowance
        self.spent = 0

    def restart(self) -> None:
        """Count from zero, because the log is read again."""
        self.spent = 0

    def charge(self, cost: int) -> None:
        """Charge a cost in advance; `FormatError`, uncharged, if it is too much for the file."""
        if self.spent + cost > self._limit:
            self._limit = self._allowance + self._ratio * self._size()
            if self.spent + cost > self._limit:
                raise FormatError(f"the log expands to more than {self._limit} bytes")
        self.spent += cost


def header_cost(header: bytes) -> int:
    """Return the cost of parsing a record's JSON header."""
    return RECORD_COST + len(header) + VALUE_COST * count_values(header)


def count_values(header: bytes) -> int:
    """Count separators of JSON values, those in strings too: an upper bound of the values."""
    return len(header) - len(header.translate(None, b",:[{"))


def check_values(header: bytes) -> None:
    """Check the number of JSON values in a header; `FormatError` if there are too many."""
    if len(header) > HEADER_VALUES_MAX and (values := count_values(header)) > HEADER_VALUES_MAX:
        raise FormatError(f"a record's header has {values} values, at most {HEADER_VALUES_MAX}")


def frame_bytes_min(cost: int) -> int:
    """Return the minimum bytes of a block's zstd frame for the block's cost."""
    return max(0, -(-cost // RATIO_MAX) - HEADER_BYTES)
