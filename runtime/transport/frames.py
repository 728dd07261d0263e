"""Where a client's WebSocket frames begin and end, without looking into them.

The codec behind us hides how large a message in progress is, and reads a message above the limit
for as long as it comes. So its bytes are walked over here first (RFC 6455, 5.2), header by header:
how many messages and fragments there are, how large the one in progress is, and whether it will be
above the limit, which a header says before the payload comes. The data frames of that message, and
all after it, are not for the codec; control frames still are, so that the close can be shaken on.

What is no frame is left to the codec, which says so to the peer: from there on all bytes pass.
Pure: no waiting, no clock, and no bytes are kept.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .rates import FRAGMENT_COST

_FIN: Final = 0x80
_RESERVED: Final = 0x70
_OPCODE: Final = 0x0F
_CONTROL: Final = 0x08
_MASKED: Final = 0x80
_SIZE: Final = 0x7F
_OPCODES: Final = frozenset({0x0, 0x1, 0x2, 0x8, 0x9, 0xA})
_TWO_BYTES: Final = 126
_EIGHT_BYTES: Final = 127
_MASK_BYTES: Final = 4
CONTROL_BYTES_MAX: Final = 125
"""RFC 6455, 5.5: longer ones are no frames."""


class Run(NamedTuple):
    """A run of bytes of which all pass or none does.

    Attributes:
        end: where it ends; where it began if more bytes are needed.
        passes: it is for the codec.
        cost: messages that began in it; a fragment is a part of one.
    """

    end: int
    passes: bool
    cost: float


class FrameScanner:
    """Walks over what one client sends.

    Args:
        message_bytes_max: the payload of a message, all its frames together.

    Attributes:
        finished: messages that have passed whole.
        passed_bytes: of the payload of the message in progress.
        is_too_big: a message above the limit came, behind all that has passed; no data pass now.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._message_bytes = 0
        self._left = 0
        self._is_data = False
        self._is_last = False
        self._is_dropped = False
        self._is_lost = False
        self.finished = 0
        self.passed_bytes = 0
        self.is_too_big = False

    @property
    def missing_bytes(self) -> int:
        """At least so many are to come before there is anything new to be done; 1 or more."""
        return max(self._left, 1)

    def run(self, data: bytes, at: int, cost_max: float) -> Run:
        """Walk on from `at`, which is where the last run ended.

        Args:
            data: what came, with what the last run left of it.
            at: an index into it.
            cost_max: stop before more messages than this; at least 1.
        """
        start, end, cost = at, len(data), 0.0
        if self._is_lost:
            return Run(end, True, cost)
        if self._left:
            at = self._walk(at, end)
            if self._left or self._is_dropped:
                return Run(at, not self._is_dropped, cost)
        while at + 2 <= end:
            first, second = data[at], data[at + 1]
            body, size = at + 2 + _MASK_BYTES, second & _SIZE
            if size >= _TWO_BYTES:
                width = 2 if size == _TWO_BYTES else 8
                size = int.from_bytes(data[at + 2 : at + 2 + width], "big")
                body += width
            if not _is_frame(first, second, size):
                self._is_lost = True
                return Run(end, True, cost)
            if body > end:
                break
            is_whole = first & _FIN or first & _CONTROL
            frame_cost = 1.0 if is_whole else FRAGMENT_COST
            if cost + frame_cost > cost_max:
                break
            is_dropped = not first & _CONTROL and (
                self.is_too_big or self._message_bytes + size > self._message_bytes_max
            )
            if is_dropped and at > start:
                break
            self.is_too_big = self.is_too_big or is_dropped
            cost += frame_cost
            at = self._begin(first, size, is_dropped=is_dropped, body=body, end=end)
            if is_dropped:
                return Run(at, False, cost)
        return Run(at, True, cost)

    def _begin(self, first: int, size: int, *, is_dropped: bool, body: int, end: int) -> int:
        self._left = size
        self._is_data = not first & _CONTROL
        self._is_last = bool(first & _FIN)
        self._is_dropped = is_dropped
        if self._is_data:
            self._message_bytes += size
        return self._walk(body, end)

    def _walk(self, at: int, end: int) -> int:
        """Go on within a frame; at its end, note what it ended."""
        size = min(self._left, end - at)
        self._left -= size
        if self._is_data and not self._is_dropped:
            self.passed_bytes += size
            if self._is_last and not self._left:
                self.finished += 1
                self.passed_bytes = 0
                self._message_bytes = 0
        return at + size


def _is_frame(first: int, second: int, size: int) -> bool:
    """Tell a header of a client's frame; `size` counts only where all of it has come."""
    if first & _RESERVED or first & _OPCODE not in _OPCODES or not second & _MASKED:
        return False
    return not first & _CONTROL or (first & _FIN != 0 and size <= CONTROL_BYTES_MAX)
