"""What reading a log may cost, in proportion to its bytes.

A file of a few kilobytes can stand for gigabytes: zstd packs zeros by the ten thousand, a short
reference names a large blob again, and a small object of JSON takes a hundred bytes of memory.
Checksums do not prevent that, because a forger computes them too. So a reader counts what it makes
of a log, and refuses what is too much for the file: a block before it is decompressed, a record
before its header is parsed, a blob before it is unpacked.

Rules: costs are in bytes. A payload and a blob cost their length, a blob each time that a record
names it. A header costs its length and more for each record and each JSON value, since those take
time. A writer makes its blocks long enough (`frame_bytes_min`), so it never writes a log that a
reader refuses; the allowance is for small logs of writers that did not.

It reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .errors import FormatError
from .format import HEADER_BYTES, HEADER_VALUES_MAX, MIB

RATIO_MAX: Final = 4096
"""Cost of a byte of the file. A muted microphone costs 150 to 310, compacted 1400; speech 10."""
ALLOWANCE: Final = 64 * MIB
"""Cost of any log, whatever its size: five minutes of silence in one frame of chat, and decoded."""
RECORD_COST: Final = 8 << 10
"""It takes as long to parse a record without fields as to handle so many bytes of a blob."""
VALUE_COST: Final = 64
"""The same for a JSON value; it is also about what one takes in memory."""


class Expansion:
    """What was made of a log so far.

    Attributes:
        spent: cost of all that.

    Args:
        size: tells the bytes of the file as it is now.
        allowance: what may be made of a file of no bytes.
        ratio: what more may be made of each byte.
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
        """Count from zero: the log is read anew."""
        self.spent = 0

    def charge(self, cost: int) -> None:
        """Count what is about to be made; what is refused is not counted.

        Raises:
            FormatError: it is too much for the file.
        """
        if self.spent + cost > self._limit:
            self._limit = self._allowance + self._ratio * self._size()
            if self.spent + cost > self._limit:
                raise FormatError(f"the log expands to more than {self._limit} bytes")
        self.spent += cost


def header_cost(header: bytes) -> int:
    """Say what it costs to parse a record's JSON header."""
    return RECORD_COST + len(header) + VALUE_COST * count_values(header)


def count_values(header: bytes) -> int:
    """Count what is before or in each JSON value but the first; in strings it counts, too."""
    found = header.count
    return found(b",") + found(b":") + found(b"[") + found(b"{")


def check_values(header: bytes) -> None:
    """Check that a JSON text may be parsed.

    Raises:
        FormatError: it has too many values.
    """
    if len(header) > HEADER_VALUES_MAX and (values := count_values(header)) > HEADER_VALUES_MAX:
        raise FormatError(f"a record's header has {values} values, at most {HEADER_VALUES_MAX}")


def frame_bytes_min(cost: int) -> int:
    """Say how long a block's zstd frame must be at least for what the block costs."""
    return max(0, -(-cost // RATIO_MAX) - HEADER_BYTES)
