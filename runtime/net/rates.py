"""The rate limit of one connection: token buckets for messages and bytes.

A bucket holds a few seconds' worth, so that an uneven client is not slowed; beyond it the reader
waits, TCP slows the sender, and no connection is closed. Bytes are paid after they were read: a
bucket may be in debt by one read. Time comes from the caller, in seconds; nothing here waits.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 3.0
"""A mobile network holds so much back in a tunnel and then delivers it at once."""
FRAGMENT_COST: Final = 0.125
"""Of a message: a fragment costs a tenth of the work, and large messages may come in many."""


class Rate:
    """The buckets of one WebSocket, of messages and of bytes, both full at first.

    One message of `message_bytes_max` may come at once, at any rate. Below zero a bucket is in
    debt.
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
        """The wait until one more message, of any size, may be read; 0.0 for none."""
        passed_s = now_s - self._at_s
        self._at_s = now_s
        self.messages = min(self._messages_max, self.messages + passed_s * self._messages_per_s)
        self.size_bytes = min(self._bytes_max, self.size_bytes + passed_s * self._bytes_per_s)
        if self.messages >= 1.0 and self.size_bytes >= 0.0:
            return 0.0
        for_messages_s = (1.0 - self.messages) / self._messages_per_s
        return max(for_messages_s, -self.size_bytes / self._bytes_per_s)

    def take(self, messages: float, size_bytes: int) -> None:
        """Pay for messages and bytes that were read, into debt if needed."""
        self.messages -= messages
        self.size_bytes -= size_bytes
