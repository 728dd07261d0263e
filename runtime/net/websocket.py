"""The server's `WebSocket`s: trio-websocket, and what reads and writes for it where it is slow.

A cancelled send may have left half a frame: the connection is aborted. `close` waits at most
`CLOSE_WAIT_S` for the peer; `abort` does not wait.

The codec (wsproto) hides the size of a message in progress, and reads a message above the limit to
its end. So its bytes are scanned first by `FrameScanner` (RFC 6455, 5.2), which keeps none: the
messages and fragments, the size of the one in progress, and whether it will exceed the limit, by
its header. The data frames of that message, and all later ones, do not reach the codec; control
frames do, for the closing handshake. The codec reports invalid frames to the peer: from there on
all bytes pass.

`Intake` is what the codec reads: each pull takes at most one read from the connection and passes on
as much as the rate allows, frame by frame. Above the rate, or without room for a large message, it
waits, and TCP slows the sender. `on_too_big` replaces a message above the limit.

Text messages of one frame, as clients send them, go to `take` without the codec, in the task that
reads: no task is woken. All else is the codec's: control frames, fragments, large, binary and wrong
messages, and text until `take` has seen all that the codec passed on. With pieces of 20 ms this
saves over half of the CPU: 3.0 to 3.9 ms a second of PCM16, not 6.2 to 6.8. `text_frames` writes a
server's messages: wsproto makes two copies more of each.

`tune` replaces the decoder of frames in a connection's codec, by private names
(`tests/test_private_names.py`):

- The pieces of an unfinished message are ours, to be told and to be let go of.
- wsproto decodes text, and trio-websocket joins the decoded pieces; one emoji would widen the whole
  string. So a piece that is not ASCII is passed on with a character for each byte (Latin-1), once
  it is known to be UTF-8, and `message_of` decodes the joined message.

How trio-websocket is used, and why:

- It gets a handshake that we write from the checked head: its reader task fails on some heads (an
  odd `Host`), and loses bytes sent before the 101.
- It reads 256 KiB at a time, and each connection gets our own decoder (`tune`).
- It sees no message above the limit: its own limit would end the WebSocket before the client can be
  told.
- Its reader task lives in `TrioWebSocket.run` and cannot end a session, though it may raise.
- It answers pings, but after a frame in flight and a full queue. Our pings bypass it: its `ping`
  waits for the pong. So do our messages: the lock of `send_message` costs a task switch for each.
- It offers no permessage-deflate, which costs ten times what it saves.
"""

from __future__ import annotations

import hashlib
import logging
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn

import attrs
import numpy as np
import trio
import trio_websocket
from wsproto.connection import SERVER, Connection
from wsproto.events import CloseConnection
from wsproto.frame_protocol import (
    CloseReason,
    Frame,
    FrameDecoder,
    Opcode,
    ParseFailed,
    XorMaskerSimple,
)

from protocol.values.frames import (
    KEPT_CHARS,
    TEXT_BYTES_MIN,
    UTF8_BYTES_MAX,
    Received,
    Shortened,
    Utf8Text,
)
from protocol.values.records import DIGEST_BYTES

from .connection import OnMessages, WebSocketClosed, WebSocketStalled, deliver_received
from .limits import FRAGMENT_BYTES_MIN, FRAGMENT_COST, UNCOUNTED_BYTES, Counters, RateLimiter, Share
from .link import READ_BYTES, RECEIVE_BUFFER_BYTES, ConnectionMonitor, Link, WatchedConnection

# -- frames ----------------------------------------------------------------------------------------


_FIN: Final = 0x80
_WHOLE_TEXT: Final = 0x81
_RESERVED: Final = 0x70
_OPCODE: Final = 0x0F
_CONTROL: Final = 0x08
_MASKED: Final = 0x80
_SIZE: Final = 0x7F
_OPCODES: Final = frozenset({0x0, 0x1, 0x2, 0x8, 0x9, 0xA})
_TWO_BYTES: Final = 126
_EIGHT_BYTES: Final = 127
_MASK_BYTES: Final = 4
_SIZES_MIN: Final = {6: 0, 8: _TWO_BYTES, 14: 1 << 16}
"""The least size of a masked frame by the length of its header: sizes have one form (5.2)."""
CONTROL_BYTES_MAX: Final = 125
"""RFC 6455, 5.5: longer ones are invalid."""


class ByteRun(NamedTuple):
    """A run of bytes of which all pass or none does, up to `end`; empty if more bytes are needed.

    `cost` counts the messages that began in it; a fragment is a part of one.
    """

    end: int
    passes: bool
    cost: float


class SingleFrameMessage(NamedTuple):
    """A text message in a single frame: its masked payload, up to `end`, which may not be here."""

    mask: bytes
    start: int
    end: int


class FrameScanner:
    """Scans the bytes of one client, with messages of at most `message_bytes_max` in all frames.

    `finished`: messages that have passed whole, or were taken; `passed_bytes`: of the payload of
    the message in progress; `message_bytes`: as its frames announced it. `is_too_big`: a message
    above the limit came; no data pass now.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._left = 0
        self._is_data = False
        self._is_last = True
        self._is_dropped = False
        self._is_lost = False
        self.finished = 0
        self.passed_bytes = 0
        self.message_bytes = 0
        self.is_too_big = False

    @property
    def missing_bytes(self) -> int:
        """The least bytes until the next action; 1 or more."""
        return max(self._left, 1)

    def whole(self, data: bytes, at: int, bytes_max: int) -> SingleFrameMessage | None:
        """The message at a place in `data`, where the last run ended; who takes it counts it.

        None for anything but a text message of one frame and at most `bytes_max`.
        """
        is_amid = self._left or not self._is_last or self._is_lost or self.is_too_big
        if is_amid or len(data) < at + 2 or data[at] != _WHOLE_TEXT or not data[at + 1] & _MASKED:
            return None
        start, size = _payload_at(data, at)
        if start > len(data) or size > min(bytes_max, self._message_bytes_max):
            return None
        if size < _SIZES_MIN[start - at]:
            return None
        return SingleFrameMessage(data[start - _MASK_BYTES : start], start, start + size)

    def run(self, data: bytes, at: int, cost_max: float) -> ByteRun:
        """Scan from `at`, where the last run ended, for at most `cost_max` (1 or more) messages."""
        start, end, cost = at, len(data), 0.0
        if self._is_lost:
            return ByteRun(end, True, cost)
        if self._left:
            at = self._walk(at, end)
            if self._left or self._is_dropped:
                return ByteRun(at, not self._is_dropped, cost)
        while at + 2 <= end:
            first, second = data[at], data[at + 1]
            body, size = _payload_at(data, at)
            if not _is_frame(first, second, size):
                self._is_lost = True
                return ByteRun(end, True, cost)
            if body > end:
                break
            is_counted = first & (_FIN | _CONTROL) or size < FRAGMENT_BYTES_MIN
            frame_cost = 1.0 if is_counted else FRAGMENT_COST
            if cost + frame_cost > cost_max:
                break
            is_dropped = not first & _CONTROL and (
                self.is_too_big or self.message_bytes + size > self._message_bytes_max
            )
            if is_dropped and at > start:
                break
            self.is_too_big = self.is_too_big or is_dropped
            cost += frame_cost
            at = self._begin(first, size, is_dropped=is_dropped, body=body, end=end)
            if is_dropped:
                return ByteRun(at, False, cost)
        return ByteRun(at, True, cost)

    def _begin(self, first: int, size: int, *, is_dropped: bool, body: int, end: int) -> int:
        self._left = size
        self._is_data = not first & _CONTROL
        self._is_dropped = is_dropped
        if self._is_data:
            self._is_last = bool(first & _FIN)
            self.message_bytes += size
        return self._walk(body, end)

    def _walk(self, at: int, end: int) -> int:
        """Go on within a frame, and count a message that ends in it."""
        size = min(self._left, end - at)
        self._left -= size
        if self._is_data and not self._is_dropped:
            self.passed_bytes += size
            if self._is_last and not self._left:
                self.finished += 1
                self.passed_bytes = 0
                self.message_bytes = 0
        return at + size


def _payload_at(data: bytes, at: int) -> tuple[int, int]:
    """Where the payload of a masked frame begins, and its size, if its header has come whole."""
    start, size = at + 2, data[at + 1] & _SIZE
    if size >= _TWO_BYTES:
        width = 2 if size == _TWO_BYTES else 8
        size = int.from_bytes(data[start : start + width], "big")
        start += width
    return start + _MASK_BYTES, size


def payload_in(data: bytes, end: int) -> bytes:
    """Unmask the payload of the frame at the beginning of `data`, as far as `end`."""
    start, _ = _payload_at(data, 0)
    return bytes(FastMasker(data[start - _MASK_BYTES : start]).process(data[start:end]))


def _is_frame(first: int, second: int, size: int) -> bool:
    """Whether it is a valid header of a client's frame; `size` counts only if it has come whole."""
    if first & _RESERVED or first & _OPCODE not in _OPCODES or not second & _MASKED:
        return False
    return not first & _CONTROL or (first & _FIN != 0 and size <= CONTROL_BYTES_MAX)


def text_frames(texts: Iterable[str]) -> bytes:
    """Write text messages as a server sends them, a frame each.

    `UnicodeEncodeError`: a text is not Unicode.
    """
    parts: list[bytes] = []
    for text in texts:
        payload = text.encode()
        size = len(payload)
        if size < _TWO_BYTES:
            parts += (bytes((_WHOLE_TEXT, size)), payload)
        elif size < 1 << 16:
            parts += (bytes((_WHOLE_TEXT, _TWO_BYTES)), size.to_bytes(2, "big"), payload)
        else:
            parts += (bytes((_WHOLE_TEXT, _EIGHT_BYTES)), size.to_bytes(8, "big"), payload)
    return b"".join(parts)


# -- the decoder for wsproto -----------------------------------------------------------------------


def tune(connection: Connection) -> ClientFrames:
    """Give a server's connection our decoder, before it has read a frame."""
    decoder = connection._proto._frame_decoder = ClientFrames(client=False)
    return decoder


class FastMasker:
    """The mask of RFC 6455, 5.3, eight bytes at a time, over a payload in pieces."""

    def __init__(self, masking_key: bytes | bytearray) -> None:
        self._key = bytes(masking_key)

    def process(self, data: bytes | bytearray | memoryview) -> bytearray:
        """Mask or unmask the next piece; in place, if it is a `bytearray`."""
        masked = mask(data, self._key)
        turn = len(masked) % 4
        self._key = self._key[turn:] + self._key[:turn]
        return masked


def mask(data: bytes | bytearray | memoryview, key: bytes) -> bytearray:
    """Mask or unmask a payload from its start; in place, if it is a `bytearray`."""
    masked = data if isinstance(data, bytearray) else bytearray(data)
    words = len(masked) // 8
    if words:
        view = np.frombuffer(masked, dtype=np.uint64, count=words)
        np.bitwise_xor(view, np.frombuffer(key * 2, dtype=np.uint64), out=view)
    for i in range(words * 8, len(masked)):
        masked[i] ^= key[i % 4]
    return masked


class ClientFrames(FrameDecoder):
    """Unmasks with `FastMasker`, checks text, and gives a message's pieces once all are here.

    `pieces`: those of the message in progress; they are cleared when the connection ends.
    """

    def __init__(self, *, client: bool) -> None:
        super().__init__(client)
        self.pieces = deque[bytes]()
        self._opcode: Opcode | None = None
        self._text: IncrementalDecoder | None = None
        self._is_whole = False

    def parse_header(self) -> bool:
        """Read a frame's header, once it is complete."""
        is_whole = super().parse_header()
        if is_whole and isinstance(self.masker, XorMaskerSimple):
            self.masker = FastMasker(self.masker.process(bytearray(4)))  # type: ignore[assignment]
        return is_whole

    def process_buffer(self) -> Frame | None:
        """Return a control frame, or a piece of a whole message, or None; `ParseFailed`."""
        while not self._is_whole:
            frame = super().process_buffer()
            if frame is None or frame.opcode.iscontrol():
                return frame
            self._hold(frame)
        opcode, self._opcode = self._opcode or Opcode.CONTINUATION, None
        payload = self.pieces.popleft()
        self._is_whole = bool(self.pieces)
        if self._text is not None and not payload.isascii():
            payload = payload.decode("latin-1").encode()
        return Frame(opcode, payload, frame_finished=True, message_finished=not self.pieces)

    def _hold(self, frame: Frame) -> None:
        """Check a piece of the message in progress, and keep it."""
        if (frame.opcode is Opcode.CONTINUATION) != (self._opcode is not None):
            raise ParseFailed(f"unexpected {frame.opcode!r}")
        if self._opcode is None:
            self._opcode = frame.opcode
            self._text = getincrementaldecoder("utf-8")() if frame.opcode is Opcode.TEXT else None
        assert isinstance(frame.payload, bytes)
        self._is_whole = frame.frame_finished and bool(frame.message_finished)
        if self._text is not None:
            try:
                self._text.decode(frame.payload, self._is_whole)
            except UnicodeDecodeError as error:
                why = CloseReason.INVALID_FRAME_PAYLOAD_DATA
                raise ParseFailed(str(error), why) from None
        self.pieces.append(frame.payload)


def message_of(joined: str | bytes) -> str | bytes | Utf8Text:
    """The message of `ClientFrames`' joined pieces: `str`, UTF-8 if large, or binary."""
    if isinstance(joined, bytes) or joined.isascii():
        return joined
    data = joined.encode("latin-1")
    return Utf8Text(data) if len(data) >= TEXT_BYTES_MIN else data.decode()


# -- reading ---------------------------------------------------------------------------------------


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
        rate: at which it is read.
        message_bytes_max: larger messages are not passed on.
        share: of the room for large messages.
        on_too_big: called once, in the codec's task, before a message above the limit, with the
            size that its frames announced and the bytes of its last one that have come.
        last_words: the bytes to send before the codec closes without a close frame of its own.

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
        rate: RateLimiter,
        message_bytes_max: int,
        share: Share,
        counters: Counters,
        on_too_big: Callable[[int, bytes], object],
        last_words: Callable[[], bytes],
    ) -> None:
        self.link = link
        self.share = share
        self._head = head
        self._opened = trio.Event()
        self._rest = b""
        self._missing_bytes = 0
        self.scanner = FrameScanner(message_bytes_max)
        self._counters = counters
        self._on_too_big = on_too_big
        self._last_words = last_words
        self.take: Callable[[Sequence[str]], Awaitable[None] | None] | None = None
        self.seen = 0
        self.is_closing = False
        self._has_sent_close = False
        self._rate = rate

    def end(self) -> None:
        """Let go of the WebSocket: nothing is read now.

        The library refers to us. If we referred to it, by way of the WebSocket, the pieces of an
        unfinished message would wait minutes for the garbage collector.
        """
        self.take = None
        self._on_too_big, self._last_words = lambda *_: None, bytes

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
        missing = max(self._missing_bytes, self.scanner.missing_bytes)
        self.link.expect(1 if self.is_closing else missing)
        most = UNCOUNTED_BYTES if self.share.budget.is_tight else max(READ_BYTES, missing)
        more = await self.link.receive_some(min(most, bytes_max))
        self._rest += more
        return bool(more)

    async def _take_whole(self) -> SingleFrameMessage | None:
        """Hand over whole messages, as many as the rate allows; return the next one.

        It lacks `_missing_bytes`. None if the next bytes are the codec's, or there are none.
        """
        left = min(MESSAGES_A_READ, self._rate.messages_left)
        while True:
            messages, whole = self._cut_whole(left)
            left -= len(messages)
            if messages:
                assert self.take is not None
                waits = self.take(messages)
                if waits is not None:
                    await waits
                if self._rest:
                    continue
            if whole is not None and self._missing_bytes and len(self._rest) > UNCOUNTED_BYTES:
                with self.link.holding():
                    await self.share.hold(len(self._rest))
            return whole

    def _cut_whole(self, most: float) -> tuple[list[str], SingleFrameMessage | None]:
        """Take whole messages off `_rest`, only small ones together; if none, see the next one."""
        data, at, messages = self._rest, 0, list[str]()
        whole = None
        while self.take is not None and self.seen + len(messages) >= self.scanner.finished:
            whole = self.scanner.whole(data, at, WHOLE_BYTES_MAX)
            is_small = whole is None or whole.end - at <= TOGETHER_BYTES_MAX
            if whole is None or whole.end > len(data) or len(messages) + 1 > most:
                break
            if messages and not is_small:
                break
            try:
                payload = memoryview(data)[whole.start : whole.end]
                messages.append(mask(payload, whole.mask).decode())
            except UnicodeDecodeError:
                whole = None  # the codec tells the peer
                break
            self._rate.take(1.0, whole.end - at)
            self.share.finish(self.scanner.finished)
            self.scanner.finished += 1
            at, whole = whole.end, None
            if not is_small:
                break
        self._rest = data[at:] if at else data
        lacks = 0 if self._rest else 1
        self._missing_bytes = lacks if whole is None else max(0, whole.end - at - len(self._rest))
        return messages, None if messages else whole

    async def _pass_on(self) -> bytes:
        """Take the bytes that the rate allows from `_rest`; return those for the codec."""
        data, scanner = self._rest, self.scanner
        finished, was_too_big = scanner.finished, scanner.is_too_big
        end, passes, cost = scanner.run(data, 0, min(MESSAGES_A_READ, self._rate.messages_left))
        self._rate.take(cost, end)
        self._rest = data[end:]
        if scanner.is_too_big and not was_too_big:
            self._on_too_big(scanner.message_bytes, payload_in(data, end))
        if scanner.finished > finished:
            self.share.finish(finished)
        if scanner.passed_bytes > UNCOUNTED_BYTES:
            with self.link.holding():
                await self.share.hold(scanner.passed_bytes)
        return data[:end] if passes else b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all bytes of one of the codec's frames, or raise."""
        self._has_sent_close = data[:1] == CLOSE
        await self.link.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel takes more."""
        await self.link.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the connection; a peer that does not take the last bytes is dropped."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if not self._has_sent_close and (last_words := self._last_words()):
                await self.link.send_all(last_words)
        await self.link.aclose()


# -- the WebSocket ---------------------------------------------------------------------------------


MESSAGE_QUEUE_SIZE: Final = 4
"""A burst of small messages does not stall the reader; four of the largest fit in memory."""
CLOSE_WAIT_S: Final = 2.0
"""A live peer answers a close within a round trip; others are given up."""

SIZE_BYTES_MAX: Final = (1 << 63) - 1
"""The largest that a header may announce (RFC 6455, 5.2)."""
BROKEN: Final = {
    code: Connection(SERVER).send(CloseConnection(code=code, reason=text))
    for code, text in ((1002, "no frame of RFC 6455"), (1007, "invalid UTF-8"))
}
"""The close frame for a protocol error that the codec finds, by its code."""
CLOSE: Final = b"\x88"
"""How a close frame of ours begins (RFC 6455, 5.2)."""
ABNORMAL_CLOSURE: Final = 1006
"""The peer left without a close (RFC 6455, 7.1.5): never sent, only reported."""

_LOG: Final = logging.getLogger("antiphon.websocket")


@attrs.frozen(kw_only=True)
class Handshake:
    """A checked request: its `Sec-WebSocket-Key`, our subprotocol or None, the message limit."""

    key: str
    subprotocol: str | None
    frame_bytes_max: int

    def head(self) -> bytes:
        """A plain request for the library, without the client's other headers."""
        protocol = self.subprotocol and f"Sec-WebSocket-Protocol: {self.subprotocol}\r\n"
        return (
            "GET / HTTP/1.1\r\nHost: antiphon\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {self.key}\r\n{protocol or ''}\r\n"
        ).encode("ascii")


class TrioWebSocket:
    """A server's WebSocket on trio-websocket; the monitor watches it while it is open.

    `link`: the connection, with the bytes after the request's head put back; `party`: to whom its
    messages count. The task that awaits `run` reads; cancelling it ends the WebSocket. The caller
    closes or aborts it.
    """

    def __init__(
        self, link: Link, handshake: Handshake, monitor: ConnectionMonitor, party: str
    ) -> None:
        self._link = link
        self._handshake = handshake
        self._monitor = monitor
        self._share = Share(monitor.budget)
        self._intake = Intake(
            link,
            head=handshake.head(),
            rate=monitor.rates.of(party, handshake.frame_bytes_max, trio.current_time()),
            message_bytes_max=handshake.frame_bytes_max,
            share=self._share,
            counters=monitor.counters,
            on_too_big=self._too_big_comes,
            last_words=self._close_frame_for_error,
        )
        self._watched = WatchedConnection(link=link, share=self._share)
        self._connection: trio_websocket.WebSocketConnection
        self._frames: ClientFrames
        self._reader_ended = trio.Event()
        self._received = 0
        self._too_big: Shortened | None = None
        self._too_big_reported = False
        self._getting = trio.CancelScope()
        self._waiting: trio.CancelScope | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer the request with 101, and hold the library's reader task; started then.

        `WebSocketClosed`: the peer left before it was open.
        """
        opened = False
        try:
            async with trio.open_nursery() as nursery:
                self._connection = await self._open(nursery)
                opened = True
                self._monitor.counters.websockets += 1
                self._monitor.add(self._watched)
                task_status.started()
        except* Exception as errors:
            # The library's bugs and the peer's departure look the same here: the connection is
            # over.
            _LOG.debug("the reader of a WebSocket ended early: %r", errors.exceptions)
            self._link.abort()
        finally:
            self._reader_ended.set()
            self._monitor.discard(self._watched)
            self._monitor.counters.websockets -= opened
            self._intake.end()
            if opened:
                # The library's tasks refer to them a while longer: they would wait minutes for
                # the garbage collector.
                self._frames.pieces.clear()
            self._share.close()
        if not opened:
            raise WebSocketClosed(ABNORMAL_CLOSURE, "the peer left during the handshake")

    async def _open(self, nursery: trio.Nursery) -> trio_websocket.WebSocketConnection:
        request = await trio_websocket.wrap_server_stream(
            nursery,
            self._intake,
            message_queue_size=MESSAGE_QUEUE_SIZE,
            max_message_size=self._handshake.frame_bytes_max,
            receive_buffer_size=RECEIVE_BUFFER_BYTES,
        )
        connection = await request.accept(subprotocol=self._handshake.subprotocol)
        self._frames = tune(connection._wsproto.connection)
        self._intake.open()
        return connection

    async def receive(self) -> Received:
        """As `WebSocket`."""
        self._saw()
        if self._too_big_reported:
            await self._reader_ended.wait()
            raise self._closed()
        message: str | bytes | None = None
        try:
            with trio.CancelScope() as self._getting:
                while not self._is_too_big_next() and (message is None or self._intake.is_closing):
                    message = await self._connection.get_message()
        except trio_websocket.ConnectionClosed:
            if not self._intake.scanner.is_too_big:
                raise self._closed() from None
        if message is None:
            self._too_big_reported = True
            return self._too_big
        self._received += 1
        return message_of(message)

    def _is_too_big_next(self) -> bool:
        scanner = self._intake.scanner
        return scanner.is_too_big and self._received == scanner.finished

    def _saw(self) -> None:
        """Note that the session has seen all messages that it was given."""
        self._intake.seen = self._received
        self._share.release(self._received - 1)

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        """As `WebSocket`; most messages are given by the library's task, which reads them."""
        failures: list[Exception] = []

        def fail(error: Exception) -> None:
            failures.append(error)
            self._intake.take = None
            delivering.cancel()

        def take(messages: Sequence[str]) -> Awaitable[None] | None:
            self._received += len(messages)
            try:
                waits = on_messages(*messages)
            except Exception as error:
                fail(error)
                return None
            if waits is not None:
                return wait(waits)
            self._saw()
            return None

        async def wait(waits: Awaitable[None]) -> None:
            with trio.CancelScope() as self._waiting:
                try:
                    await waits
                except Exception as error:
                    fail(error)
            self._saw()

        try:
            with trio.CancelScope() as delivering:
                self._intake.take = take
                await deliver_received(self, on_messages)
            raise failures[0]
        finally:
            self._stop_delivering()

    def _stop_delivering(self) -> None:
        """Leave what still comes to the library, which discards it at a close."""
        self._intake.take = None
        if self._waiting is not None:
            self._waiting.cancel()

    def _too_big_comes(self, size_bytes: int, beginning: bytes) -> None:
        """Let `receive` report it, after the messages before, while the WebSocket stays open."""
        self._too_big = _shortened(size_bytes, [*self._frames.pieces, beginning])
        if self._is_too_big_next():
            self._getting.cancel()

    def _close_frame_for_error(self) -> bytes:
        """The close frame for the rule of RFC 6455 that the peer broke (7.1.7), seen only here."""
        broken = self._connection.closed
        return b"" if broken is None else BROKEN.get(broken.code, b"")

    async def send(self, *frames: str) -> None:
        """As `WebSocket`."""
        if self._connection.closed is not None:
            raise self._closed()
        try:
            await self._link.send_all(text_frames(frames))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._closed() from None
        except BaseException:
            self._link.abort()  # Half a frame may be out: nothing can follow it.
            raise

    async def close(self, code: int, reason: str) -> None:
        """As `WebSocket`."""
        self._intake.is_closing = True
        self._link.expect(1)
        self._stop_delivering()
        self._watched.pings = False
        try:
            with trio.move_on_after(CLOSE_WAIT_S):
                await self._connection.aclose(code, reason or None)
                await self._reader_ended.wait()
                await self._link.linger()
        finally:
            self._link.socket.close()  # Not a reset: the kernel still delivers its buffers.

    async def abort(self) -> None:
        """As `WebSocket`."""
        self._link.abort()

    def _closed(self) -> WebSocketClosed:
        if self._link.dropped == "stalled":
            return WebSocketStalled(ABNORMAL_CLOSURE, "the peer takes nothing")
        reason = self._connection.closed
        if reason is None:
            return WebSocketClosed(ABNORMAL_CLOSURE, "")
        return WebSocketClosed(reason.code, reason.reason or "")


def _shortened(size_bytes: int, parts: Sequence[bytes]) -> Shortened:
    """Describe a message above the limit by the `parts` that were read."""
    hasher, head = hashlib.blake2b(digest_size=DIGEST_BYTES), bytearray()
    for part in parts:
        hasher.update(part)
        head += part[: KEPT_CHARS * UTF8_BYTES_MAX - len(head)]
    return Shortened(
        size_bytes=min(size_bytes, SIZE_BYTES_MAX),
        blake2b=hasher.hexdigest(),
        head=head.decode(errors="replace")[:KEPT_CHARS],
        read_bytes=sum(map(len, parts)),
    )
