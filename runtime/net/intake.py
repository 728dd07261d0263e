"""The bytes that one WebSocket's codec reads, within the client's rate and memory.

Each pull of the codec takes at most one read from the connection and passes on as much as the rate
allows, frame by frame. Above the rate, or without room for a large message, it waits, and TCP slows
the sender. `on_too_big` replaces a message above the limit (see `frames`).

Text messages of one frame, as clients send them, go to `take` without the codec, in the task that
reads: no task is woken. All else is the codec's: control frames, fragments, large, binary and wrong
messages, and text until `take` has seen all that the codec passed on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from ..settings.settings import Settings
from .budget import Share
from .codec import FastMasker
from .counters import Counters
from .frames import FrameScanner, Whole
from .limits import UNCOUNTED_BYTES
from .link import Link
from .rates import Rate
from .tcp import READ_BYTES, RECEIVE_BUFFER_BYTES

WHOLE_BYTES_MAX: Final = RECEIVE_BUFFER_BYTES
"""A larger message is unmasked in pieces: whole, it would hold up the event loop."""
MESSAGES_A_READ: Final = 32.0
"""Passed on at once: the codec does not yield between fragments, a quarter of a millisecond for
each of these."""
TOGETHER_BYTES_MAX: Final = UNCOUNTED_BYTES
"""Larger messages hold room, each its own, and are taken each by itself."""
PAUSE_S_MIN: Final = 0.02
"""A client above its rate is woken fifty times a second, not for each message."""


class Intake(trio.abc.Stream):
    """A connection as the codec reads it; sends go straight through.

    Args:
        head: read first; later bytes wait for `open`.
        message_bytes_max: larger messages are not passed on.
        share: of the room for large messages.
        on_too_big: called once, in the codec's task, before a message above the limit.
        last_words: gives the bytes to send before the codec closes the connection.

    Attributes:
        take: takes text messages of one frame, and returns what to wait for before the next, if
            anything; None: all messages are the codec's.
        seen: messages that the session has seen, in any way.
        is_closing: a close of ours is on its way: all that still comes is read as it comes, since
            bytes that are left unread would make the end a reset.
    """

    def __init__(
        self,
        link: Link,
        *,
        head: bytes,
        settings: Settings,
        message_bytes_max: int,
        share: Share,
        counters: Counters,
        on_too_big: Callable[[], None],
        last_words: Callable[[], bytes],
    ) -> None:
        self.link = link
        self.share = share
        self._head = head
        self._opened = trio.Event()
        self._rest = b""
        self._missing_bytes = 0
        self._scanner = FrameScanner(message_bytes_max)
        self._counters = counters
        self._on_too_big = on_too_big
        self._last_words = last_words
        self.take: Callable[[Sequence[str]], Awaitable[None] | None] | None = None
        self.seen = 0
        self.is_closing = False
        self._rate = Rate(
            settings.messages_per_s_max,
            settings.bytes_per_s_max,
            message_bytes_max,
            trio.current_time(),
        )

    @property
    def messages(self) -> int:
        """Messages that have been passed on whole."""
        return self._scanner.finished

    @property
    def is_too_big(self) -> bool:
        """Whether a message above the limit came: no other will be passed on."""
        return self._scanner.is_too_big

    def open(self) -> None:
        """Let the bytes after `head` be read."""
        self._opened.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Read the next bytes for the codec; empty at the end."""
        if self._head:
            await trio.lowlevel.checkpoint()
            head, self._head = self._head, b""
            return head
        if not self._opened.is_set():
            await self._opened.wait()
        needs_more = not self._rest
        while True:
            while wait_s := self._rate.wait_s(trio.current_time()):
                self._counters.pauses += 1
                with self.link.holding():
                    await trio.sleep(max(wait_s, PAUSE_S_MIN))
            if needs_more:
                if not await self._read(max_bytes or RECEIVE_BUFFER_BYTES):
                    return b""
            else:
                await trio.lowlevel.checkpoint()
            whole = await self._take_whole()
            if whole is not None or not self._rest:
                needs_more = self._missing_bytes > 0
                continue
            left = len(self._rest)
            if passed := await self._pass_on():
                return passed
            # Nothing was for the codec: it was a part of a header, or is dropped.
            needs_more = len(self._rest) == left or not self._rest

    async def _read(self, bytes_max: int) -> bool:
        """Read more into `_rest`, and hold it nowhere else; False at the end."""
        missing = max(self._missing_bytes, self._scanner.missing_bytes)
        self.link.expect(1 if self.is_closing else missing)
        most = UNCOUNTED_BYTES if self.share.budget.is_tight else max(READ_BYTES, missing)
        more = await self.link.receive_some(min(most, bytes_max))
        self._rest += more
        return bool(more)

    async def _take_whole(self) -> Whole | None:
        """Hand over whole messages, as many as the rate allows; return the next one.

        It lacks `_missing_bytes`. None if the next bytes are the codec's, or there are none.
        """
        left = min(MESSAGES_A_READ, self._rate.messages)
        while True:
            messages, whole = self._cut_whole(left)
            left -= len(messages)
            if messages:
                assert self.take is not None
                waits = self.take(messages)
                if waits is not None:
                    await waits
                continue
            if whole is not None and self._missing_bytes and len(self._rest) > UNCOUNTED_BYTES:
                with self.link.holding():
                    await self.share.hold(len(self._rest))
            return whole

    def _cut_whole(self, most: float) -> tuple[list[str], Whole | None]:
        """Take whole messages off `_rest`, only small ones together; if none, see the next one."""
        data, at, messages = self._rest, 0, list[str]()
        whole = None
        while self.take is not None and self.seen + len(messages) >= self._scanner.finished:
            whole = self._scanner.whole(data, at, WHOLE_BYTES_MAX)
            is_small = whole is None or whole.end - at <= TOGETHER_BYTES_MAX
            if whole is None or whole.end > len(data) or len(messages) + 1 > most:
                break
            if messages and not is_small:
                break
            try:
                payload = memoryview(data)[whole.start : whole.end]
                messages.append(FastMasker(whole.mask).process(payload).decode())
            except UnicodeDecodeError:
                whole = None  # the codec tells the peer
                break
            self._rate.take(1.0, whole.end - at)
            self.share.finish(self._scanner.finished)
            self._scanner.skip()
            at, whole = whole.end, None
            if not is_small:
                break
        self._rest = data[at:] if at else data
        lacks = 0 if self._rest else 1
        self._missing_bytes = lacks if whole is None else max(0, whole.end - at - len(self._rest))
        return messages, None if messages else whole

    async def _pass_on(self) -> bytes:
        """Take the bytes that the rate allows from `_rest`; return those for the codec."""
        data, scanner = self._rest, self._scanner
        finished, was_too_big = scanner.finished, scanner.is_too_big
        end, passes, cost = scanner.run(data, 0, min(MESSAGES_A_READ, self._rate.messages))
        self._rate.take(cost, end)
        self._rest = data[end:]
        if scanner.is_too_big and not was_too_big:
            self._on_too_big()
        if scanner.finished > finished:
            self.share.finish(finished)
        if scanner.passed_bytes > UNCOUNTED_BYTES:
            with self.link.holding():
                await self.share.hold(scanner.passed_bytes)
        return data[:end] if passes else b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes, or raise."""
        await self.link.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel takes more."""
        await self.link.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the connection; a peer that does not take the last bytes is dropped."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if last_words := self._last_words():
                await self.link.send_all(last_words)
        await self.link.aclose()
