"""How much one connection may say: two buckets, filled by time and emptied by what it sends.

A bucket holds a few seconds' worth, so that a client that is only uneven is never held up; beyond
it the reader waits, TCP slows the sender, and nobody is closed for it. What was read is paid after
it was read: so a bucket may be in debt by one piece, and then the reader waits for longer.

Time comes from the caller, in seconds; nothing here waits.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 3.0
"""What a mobile network holds back in a tunnel and then delivers at once."""
FRAGMENT_COST: Final = 0.125
"""Of a message: a fragment costs a tenth of the work, and large messages may come in many."""


class Rate:
    """What one WebSocket may send: a bucket of messages and one of bytes, both full at first.

    Args:
        messages_per_s: on average.
        bytes_per_s: likewise.
        message_bytes_max: one message of this size may come at once, whatever the rate.
        now_s: the time.

    Attributes:
        messages: that may be read, as of the last `wait_s`.
        size_bytes: likewise; below zero it is in debt.
    """

    def __init__(
        self, messages_per_s: float, bytes_per_s: float, message_bytes_max: int, now_s: float
    ) -> None:
        assert messages_per_s > 0
        assert bytes_per_s > 0
        self._messages_per_s = messages_per_s
        self._bytes_per_s = bytes_per_s
        self._messages_max = self.messages = max(1.0, BURST_S * messages_per_s)
        self._bytes_max = self.size_bytes = max(BURST_S * bytes_per_s, float(message_bytes_max))
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Say how long to wait until one more message, of any size, may be read; 0.0: not at all.

        Args:
            now_s: the time, which never goes back.
        """
        passed_s = now_s - self._at_s
        self._at_s = now_s
        self.messages = min(self._messages_max, self.messages + passed_s * self._messages_per_s)
        self.size_bytes = min(self._bytes_max, self.size_bytes + passed_s * self._bytes_per_s)
        if self.messages >= 1.0 and self.size_bytes >= 0.0:
            return 0.0
        for_messages_s = (1.0 - self.messages) / self._messages_per_s
        return max(for_messages_s, -self.size_bytes / self._bytes_per_s)

    def take(self, messages: float, size_bytes: int) -> None:
        """Pay for what was read, more than there is if need be."""
        self.messages -= messages
        self.size_bytes -= size_bytes
