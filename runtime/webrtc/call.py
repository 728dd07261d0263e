"""One call: a browser's peer connection on one side, a WebSocket of a gateway on the other.

| the browser | a session of `openai` | of `live` |
|---|---|---|
| sound | `input_audio_buffer.append`, 20 ms each | `session.input_audio.append` |
| sound | `response.output_audio.delta` | `session.output_audio.delta`, all the time |
| messages of the data channel | the same, without formats: WebRTC has its own | the same |
| `output_audio_buffer.clear` | `conversation.item.truncate`: what was played | |

To sessions of `openai` the door adds `output_audio_buffer.started`, `stopped` and `cleared`, as
OpenAI's server does. When a response is cancelled, or the user speaks over the rest of one, what
waits is not played, and once the response is done the session hears how much was. At the end of a
call the session's log has what was lost of its sound, in a `session.update` that changes nothing
(`tracing`).

What comes to its UDP sockets is checked before a library sees it (`DatagramLimiter`). Any host can
send to a port. Each socket belongs to the call in whose context it was made; what comes too fast,
or under ever new names, is dropped here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final

import aiortc
import attrs
import orjson
import pybase64
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from protocol.wire.dialects import live, shared

from .offer import Offer, OfferError
from .sound import RATE_HZ, VOICE_S_MAX, JitterBuffer, Playout

# -- what arrives ----------------------------------------------------------------------------------

DATAGRAMS_PER_S: Final = 300
"""Sound has 50, and the data channel needs few."""
BURST: Final = 600
SOURCES_MAX: Final = 8
"""Streams (SSRC) of sound and reports: a browser has two or three; the library keeps each."""
_MEDIA: Final = range(128, 192)
"""The first byte of a packet of RTP or RTCP (RFC 7983)."""
_REPORTS: Final = range(192, 224)
"""The second one of RTCP."""


class DatagramLimiter:
    """The datagrams of one call.

    Attributes:
        last_s: when the last one came.
    """

    def __init__(self) -> None:
        self.last_s = time.monotonic()
        self._left = float(BURST)
        self._sources = set[bytes]()

    def accepts(self, data: bytes) -> bool:
        """Whether a datagram is passed on."""
        now_s = time.monotonic()
        self._left = min(BURST, self._left + (now_s - self.last_s) * DATAGRAMS_PER_S)
        self.last_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        if len(data) < 12 or data[0] not in _MEDIA:
            return True
        source = data[4:8] if data[1] in _REPORTS else data[8:12]
        if source not in self._sources and len(self._sources) >= SOURCES_MAX:
            return False
        self._sources.add(source)
        return True


CALL: Final[ContextVar[DatagramLimiter | None]] = ContextVar("call", default=None)
"""Of the call whose sockets are made."""


class _LimitedProtocol(asyncio.DatagramProtocol):
    """A socket's protocol behind a call's `DatagramLimiter`."""

    def __init__(self, inner: Any, limiter: DatagramLimiter) -> None:
        self._limiter = limiter
        self._inner = inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio`."""
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio`."""
        self._inner.connection_lost(exc)

    def error_received(self, exc: Exception) -> None:
        """As `asyncio`."""
        self._inner.error_received(exc)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """As `asyncio`."""
        if self._limiter.accepts(data):
            self._inner.datagram_received(data, addr)


class CallLoop(asyncio.SelectorEventLoop):
    """An event loop whose sockets of UDP take free ports of a range, and belong to a call."""

    def __init__(self, ports: range) -> None:
        super().__init__()
        self._ports = ports
        self._after = 0

    async def create_datagram_endpoint(  # type: ignore[override]
        self, factory: Callable[[], Any], **asked: Any
    ) -> Any:
        """As `asyncio`, where the port is 0."""
        host, port = asked.get("local_addr") or ("", -1)
        limiter = CALL.get()
        if port != 0 or limiter is None:
            return await super().create_datagram_endpoint(factory, **asked)
        inner = factory()
        for step in range(len(self._ports)):
            at = (self._after + step) % len(self._ports)
            place = asked | {"local_addr": (host, self._ports[at])}
            try:
                transport, _ = await super().create_datagram_endpoint(
                    lambda: _LimitedProtocol(inner, limiter), **place
                )
            except OSError:
                continue
            self._after = at + 1
            return transport, inner
        raise OSError(f"no port from {self._ports[0]} to {self._ports[-1]} is free")


# -- the call --------------------------------------------------------------------------------------

FORMAT: Final = {"type": "audio/pcm", "rate": RATE_HZ}
_DELTAS: Final = ("response.output_audio.delta", live.OUTPUT_AUDIO)
START_S: Final = 12.0
"""For a session of `live` to get its slot: its client waits for an answer to its request."""
FIRST_S: Final = 0.5
"""For the gateway to refuse a session of `openai`, before its client is answered."""
PIECE_S: Final = 0.02
CONNECT_S: Final = 15.0
"""From the answer until the browser is connected."""
SILENT_S: Final = 10.0
"""A browser checks its connection every few seconds: one that sends nothing for so long is gone."""
CLOSE_S: Final = 5.0
MESSAGE_BYTES_MAX: Final = 256 * 1024
FRAGMENTS_MAX: Final = 300
"""Of an unfinished message: the library looks through all of them for each that comes."""
TO_SESSION_BYTES_MAX: Final = 1 << 20
TO_CHANNEL_BYTES_MAX: Final = 4 << 20
"""That wait to be sent, before and in the channel."""
LIVE_WAIT_S_MAX: Final = 1.5
"""Of a session of `live`: it speaks or is silent all the time, so its delay could only grow."""
BUSY: Final = frozenset({"worker_busy", "queue_full", "queue_timeout", "service_unavailable"})
_LAST: Final = 1
"""The flag of a message's last fragment (RFC 9260)."""

_LOG: Final = logging.getLogger("antiphon.door")


class CallLost(Exception):  # noqa: N818 - what it is, not a fault
    """The call is over; the text says why."""


class BeginRefusedError(Exception):
    """The gateway refused the session, by a code and a text for its client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Call:
    """A call from its offer to its end.

    Args:
        offer: of the browser.
        session: the WebSocket of its session, open.
        settings: of the session, or None.
        is_live: whether the session is one of `live`, which begins before the offer is answered.

    Attributes:
        id: of the call; of a session of `live` its own.
    """

    def __init__(
        self,
        offer: Offer,
        session: ClientConnection,
        settings: Mapping[str, Any] | None,
        *,
        is_live: bool = False,
    ) -> None:
        self.id = f"rtc_{secrets.token_hex(12)}"
        self._is_live = is_live
        self._offer = offer
        self._session = session
        self._settings = dict(settings or {})
        self._limiter = DatagramLimiter()
        self._peer = aiortc.RTCPeerConnection(aiortc.RTCConfiguration(iceServers=[]))
        self._playout = Playout()
        self._jitter = JitterBuffer()
        self._source: int | None = None
        self._fragments = 0
        self._channel: aiortc.RTCDataChannel | None = None
        self._to_channel: deque[str] = deque()
        self._to_session: asyncio.Queue[str] = asyncio.Queue()
        self._waiting_bytes = {"channel": 0, "session": 0}
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_answering = False
        self._playing = ""
        self._cuts: list[tuple[str, int]] = []
        self._silenced = ""

    # -- its beginning --------------------------------------------------------------------------

    async def begin(self) -> None:
        """Give the session its settings, and formats; `BeginRefusedError`."""
        audio = self._settings.get("audio")
        audio = dict(audio) if isinstance(audio, dict) else {}
        if self._is_live:
            session = {**self._settings, "audio": {**audio, "format": FORMAT}}
            await self._send({"type": live.SESSION_START, "session": session})
        else:
            for side in ("input", "output"):
                given = audio.get(side)
                audio[side] = {**(given if isinstance(given, dict) else {}), "format": FORMAT}
            session = {"type": "realtime", **self._settings, "audio": audio}
            await self._send({"type": "session.update", "session": session})
        try:
            async with asyncio.timeout(START_S if self._is_live else FIRST_S):
                while not self._has_begun(orjson.loads(await self._session.recv())):
                    pass
        except TimeoutError:
            if self._is_live:
                text = "all slots are taken, try again later"
                raise BeginRefusedError("worker_busy", text) from None
        except ConnectionClosed as closed:
            text = closed.rcvd.reason if closed.rcvd is not None else ""
            raise BeginRefusedError("service_unavailable", text or "it was closed") from None

    def _has_begun(self, body: Mapping[str, Any]) -> bool:
        """Pass on a message; whether the session has begun with it. `BeginRefusedError`."""
        if body["type"] == "error":
            error = body["error"]
            raise BeginRefusedError(str(error.get("code")), str(error.get("message")))
        self._show(body)
        if body["type"] == live.SESSION_STARTED:
            self.id = str(body["session"]["id"])
        return body["type"] in (live.SESSION_STARTED, shared.SESSION_CREATED)

    async def answer(self) -> str:
        """Answer the offer (SDP); `OfferError`."""
        peer = self._peer
        peer.on("datachannel", self._open_channel)
        peer.on("connectionstatechange", self._note_state)
        CALL.set(self._limiter)  # its sockets are made in this context
        try:
            description = aiortc.RTCSessionDescription(self._offer.sdp, "offer")
            await peer.setRemoteDescription(description)
            (transceiver,) = peer.getTransceivers()
            peer.addTrack(self._playout)
            # The receiver's own buffer drops five packets for each that is lost.
            transceiver.receiver._handle_rtp_packet = self._take_packet
            # A small packet could ask for thousands of others, and late sound is useless.
            transceiver.sender._retransmit = _never
            if peer.sctp is not None:
                self._take_chunk = peer.sctp._receive_data_chunk
                peer.sctp._receive_data_chunk = self._take_bounded
            await peer.setLocalDescription(await peer.createAnswer())
        except Exception as error:
            _LOG.info("an offer was not understood: %r", error)
            raise OfferError("the offer cannot be answered") from None
        return str(peer.localDescription.sdp)

    async def run(self) -> str:
        """Carry the call until one side leaves; returns why it ended."""
        why = "it broke"
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (self._watch, self._send_sound, self._pass_on, self._speak):
                    tasks.create_task(part())
                if not self._is_live:
                    tasks.create_task(self._follow_playout())
        except* (CallLost, ConnectionClosed) as over:
            why = str(over.exceptions[0])
        finally:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._note_losses()
            await self.aclose()
        return why

    async def aclose(self) -> None:
        """Close both sides, even if one of them fails."""
        for side in (self._session, self._peer):
            try:
                async with asyncio.timeout(CLOSE_S):
                    await side.close()
            except Exception as error:
                _LOG.warning("call %s was not closed well: %r", self.id, error)

    # -- from the browser -----------------------------------------------------------------------

    async def _take_packet(self, packet: Any, arrival_time_ms: int) -> None:  # noqa: ARG002
        """Take a packet of RTP, as the library's receiver does."""
        if packet.payload_type in self._offer.payload_types and packet.payload:
            self._source = self._source or packet.ssrc
            if packet.ssrc == self._source:
                self._jitter.add(packet.timestamp, packet.payload, time.monotonic())

    async def _send_sound(self) -> None:
        """Send the session the sound of the browser."""
        kind = live.AUDIO_APPEND if self._is_live else shared.AUDIO_APPEND
        while True:
            await asyncio.sleep(PIECE_S)
            if pcm16 := self._jitter.take(time.monotonic()):
                await self._send({"type": kind, "audio": pybase64.b64encode_as_string(pcm16)})

    async def _take_bounded(self, chunk: Any) -> None:
        """Take a fragment of a message, as the library's transport does."""
        self._fragments = 0 if chunk.flags & _LAST else self._fragments + 1
        if self._fragments > FRAGMENTS_MAX:
            self._lose("a message has too many fragments")
        if not self._lost.done():
            await self._take_chunk(chunk)

    def _open_channel(self, channel: aiortc.RTCDataChannel) -> None:
        if self._channel is None:
            self._channel = channel
            channel.on("message", self._take_message)
            self._flush(channel)

    def _take_message(self, message: str | bytes) -> None:
        text = message if isinstance(message, str) else message.decode("utf-8", "replace")
        self._waiting_bytes["session"] += len(text)
        if len(text) > MESSAGE_BYTES_MAX or self._waiting_bytes["session"] > TO_SESSION_BYTES_MAX:
            self._lose("its messages are too long or too many")
        else:
            self._to_session.put_nowait(text)

    async def _pass_on(self) -> None:
        """Send the session the messages of the browser."""
        while True:
            text = await self._to_session.get()
            self._waiting_bytes["session"] -= len(text)
            try:
                body = orjson.loads(text)
            except orjson.JSONDecodeError:
                body = None
            match body:
                case {"type": "output_audio_buffer.clear"} if not self._is_live:
                    await self._cut()
                case {"type": "session.update", "session": {"audio": dict(audio)}}:
                    for side in audio.values():
                        if isinstance(side, dict):
                            side.pop("format", None)
                    await self._send(body)
                case _:
                    await self._session.send(text)

    # -- to the browser -------------------------------------------------------------------------

    async def _speak(self) -> None:
        """Pass on what the session sends."""
        async for frame in self._session:
            body = orjson.loads(frame)
            if body["type"] in _DELTAS:
                self._play(body)
                continue
            self._show(body)
            match body:
                case {"type": "response.created"}:
                    self._is_answering = True
                case {"type": "response.done", "response": {"status": status}}:
                    self._is_answering = False
                    await (self._cut() if status == "cancelled" else self._send_cuts())
                case {"type": "input_audio_buffer.speech_started"} if not self._is_answering:
                    await self._cut()
        raise CallLost("the session is over")

    def _play(self, body: Mapping[str, Any]) -> None:
        item, pcm16 = body.get("item_id", ""), pybase64.b64decode(body["delta"])
        waiting_s = self._playout.waiting_s
        if self._is_live and waiting_s > LIVE_WAIT_S_MAX and not any(pcm16):
            return
        if not item or item != self._silenced:
            self._playout.play(item, body.get("response_id", ""), pcm16)
        if waiting_s > VOICE_S_MAX:
            raise CallLost("an answer came too fast")

    async def _cut(self) -> None:
        """Play nothing more; the session forgets the rest when its response is done."""
        playing, self._playing = self._playing, ""
        if cut := self._playout.cut():
            self._cuts += cut
            self._silenced = cut[-1][0]
        if playing:
            self._send_buffer_event("cleared", playing)
        if not self._is_answering:
            await self._send_cuts()

    async def _send_cuts(self) -> None:
        cuts, self._cuts = self._cuts, []
        for item, played_ms in cuts:
            cut = {"item_id": item, "content_index": 0, "audio_end_ms": played_ms}
            await self._send({"type": "conversation.item.truncate", **cut})

    async def _follow_playout(self) -> None:
        """Tell the browser when the sound of a response begins, and when it is over."""
        while True:
            await asyncio.sleep(PIECE_S)
            response = self._playout.response
            if response == self._playing or (not response and self._is_answering):
                continue
            ended, self._playing = self._playing, response
            if ended:
                self._send_buffer_event("stopped", ended)
            if response:
                self._send_buffer_event("started", response)

    def _send_buffer_event(self, what: str, response: str) -> None:
        event = f"event_{secrets.token_hex(8)}"
        kind = f"output_audio_buffer.{what}"
        self._show({"type": kind, "event_id": event, "response_id": response})

    def _show(self, body: Mapping[str, Any]) -> None:
        """Send a message on the data channel, once it is open."""
        if not self._offer.has_data:
            return
        text = orjson.dumps(body).decode()
        self._to_channel.append(text)
        self._waiting_bytes["channel"] += len(text)
        if self._channel is not None:
            self._flush(self._channel)
        if self._waiting_bytes["channel"] > TO_CHANNEL_BYTES_MAX:
            self._lose("it did not open its data channel")

    def _flush(self, channel: aiortc.RTCDataChannel) -> None:
        while self._to_channel and channel.readyState == "open":
            text = self._to_channel.popleft()
            self._waiting_bytes["channel"] -= len(text)
            try:
                channel.send(text)
            except ValueError:
                self._lose("a message is longer than it takes")
        if channel.bufferedAmount > TO_CHANNEL_BYTES_MAX:
            self._lose("it does not read its data channel")

    # -- its end --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """End the call when the browser is gone."""
        began_s = time.monotonic()
        while not self._lost.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._lost), 1)
            now_s = time.monotonic()
            if self._peer.connectionState != "connected":
                if now_s - began_s > CONNECT_S:
                    self._lose("it did not connect")
            elif now_s - self._limiter.last_s > SILENT_S:
                self._lose("it fell silent")
        raise CallLost(self._lost.result())

    def _note_state(self) -> None:
        if self._peer.connectionState in ("failed", "closed"):
            self._lose("it left")

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)

    async def _note_losses(self) -> None:
        if self._is_live:  # no message of its protocol has a place for them
            _LOG.info("call %s: %s", self.id, self._jitter.losses)
            return
        losses = {name: str(count) for name, count in attrs.asdict(self._jitter.losses).items()}
        tracing = {"workflow_name": "webrtc", "group_id": self.id, "metadata": losses}
        session = {"type": "realtime", "tracing": tracing}
        await self._send({"type": "session.update", "session": session})

    async def _send(self, body: Mapping[str, Any]) -> None:
        await self._session.send(orjson.dumps(body).decode())


async def _never(_sequence_number: int) -> None:
    """Send nothing again."""
