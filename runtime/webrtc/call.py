"""One call: a browser's peer connection on one side, a WebSocket of a gateway on the other.

| the browser | a session of `openai` | of `live` |
|---|---|---|
| sound | `input_audio_buffer.append`, 20 ms each | `session.input_audio.append` |
| sound | `response.output_audio.delta` | `session.output_audio.delta`, all the time |
| messages of the data channel | the same, without formats: WebRTC has its own | the same |
| `output_audio_buffer.clear` | `conversation.item.truncate`: what was played | |

To sessions of `openai` the door adds `output_audio_buffer.started`, `stopped` and `cleared`, as
OpenAI's server does. When a response is cancelled, or the user speaks over the rest of one, what
waits is not played, and the session hears how much was. At the end of a call the session's log has
what was lost of its sound, in a `session.update` that changes nothing (`tracing`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import attrs
import orjson
import pybase64
from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCPeerConnection,
    RTCSessionDescription,
)
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from .offer import Offer, OfferError
from .sound import RATE_HZ, VOICE_S_MAX, Intake, Voice

LIVE_FORMAT: Final = {"type": "audio/pcm", "rate": RATE_HZ}
LIVE_APPEND: Final = "session.input_audio.append"
LIVE_DELTA: Final = "session.output_audio.delta"
START_S: Final = 12.0
"""For a session of `live` to get its slot: its client waits for an answer to its request."""
PIECE_S: Final = 0.02
CONNECT_S: Final = 15.0
"""From the answer until the browser is connected."""
SILENT_S: Final = 10.0
"""A microphone sends always, also in silence: a client that sends nothing for so long is gone."""
MESSAGE_BYTES_MAX: Final = 256 * 1024
MESSAGES_MAX: Final = 256
"""Of the data channel that wait for the session; and of the session until the channel is open."""
CHANNEL_BYTES_MAX: Final = 4 << 20
"""That wait to be sent on the data channel."""

_LOG: Final = logging.getLogger("antiphon.door")


class CallLost(Exception):  # noqa: N818 - what it is, not a fault
    """The call is over; the text says why."""


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
        self._settings = settings
        self._peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._voice = Voice()
        self._intake = Intake()
        self._packet_s = 0.0
        self._source: int | None = None
        self._channel: RTCDataChannel | None = None
        self._to_channel: deque[str] = deque()
        self._to_session: asyncio.Queue[str] = asyncio.Queue(MESSAGES_MAX)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_answering = False
        self._response = ""
        self._playing = ""

    async def begin_live(self) -> None:
        """Begin the session of `live`; `OfferError`: it was refused."""
        settings = dict(self._settings or {})
        audio = settings.get("audio")
        sound = {**(audio if isinstance(audio, dict) else {}), "format": LIVE_FORMAT}
        await self._send({"type": "session.start", "session": {**settings, "audio": sound}})
        self._settings = None
        async with asyncio.timeout(START_S):
            async for frame in self._session:
                body = orjson.loads(frame)
                if body["type"] == "error":
                    raise OfferError(f"session: {body['error']['message']}")
                self._show(body)
                if body["type"] == "session.started":
                    self.id = str(body["session"]["id"])
                    return
        raise OfferError("session: it ended before it began")

    async def answer(self) -> str:
        """Answer the offer (SDP); `OfferError`."""
        peer = self._peer
        peer.on("datachannel", self._open_channel)
        peer.on("connectionstatechange", self._note_state)
        try:
            await peer.setRemoteDescription(RTCSessionDescription(self._offer.sdp, "offer"))
            (transceiver,) = peer.getTransceivers()
            peer.addTrack(self._voice)
            # The receiver's own buffer drops five packets for each that is lost.
            transceiver.receiver._handle_rtp_packet = self._take_packet
            await peer.setLocalDescription(await peer.createAnswer())
        except Exception as error:
            await peer.close()
            _LOG.info("an offer was not understood: %r", error)
            raise OfferError("the offer cannot be answered") from None
        return str(peer.localDescription.sdp)

    async def run(self) -> str:
        """Carry the call until one side leaves; returns why it ended."""
        if self._settings is not None:
            await self._send({"type": "session.update", "session": self._settings})
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (self._watch, self._send_sound, self._pass_on, self._speak, self._play):
                    tasks.create_task(part())
        except* (CallLost, ConnectionClosed) as over:
            why = str(over.exceptions[0])
        finally:
            with suppress(ConnectionClosed):
                await self._note_losses()
            await self._session.close()
            await self._peer.close()
        return why

    # -- from the browser -----------------------------------------------------------------------

    async def _take_packet(self, packet: Any, arrival_time_ms: int) -> None:  # noqa: ARG002
        """Take a packet of RTP, as the library's receiver does."""
        if packet.payload_type in self._offer.payload_types and packet.payload:
            self._source = self._source or packet.ssrc
            if packet.ssrc == self._source:
                self._packet_s = time.monotonic()
                self._intake.add(packet.timestamp, packet.payload, self._packet_s)

    async def _send_sound(self) -> None:
        """Send the session the sound of the browser."""
        while True:
            await asyncio.sleep(PIECE_S)
            if pcm16 := self._intake.take(time.monotonic()):
                audio = pybase64.b64encode_as_string(pcm16)
                kind = LIVE_APPEND if self._is_live else "input_audio_buffer.append"
                await self._send({"type": kind, "audio": audio})

    def _open_channel(self, channel: RTCDataChannel) -> None:
        if self._channel is None:
            self._channel = channel
            channel.on("message", self._take_message)
            self._flush(channel)

    def _take_message(self, message: str | bytes) -> None:
        if len(message) > MESSAGE_BYTES_MAX or self._to_session.full():
            self._lose("its messages are too long or too many")
        else:
            text = message if isinstance(message, str) else message.decode("utf-8", "replace")
            self._to_session.put_nowait(text)

    async def _pass_on(self) -> None:
        """Send the session the messages of the browser."""
        while True:
            text = await self._to_session.get()
            try:
                body = orjson.loads(text)
            except orjson.JSONDecodeError:
                body = None
            match body:
                case {"type": "output_audio_buffer.clear"}:
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
            kind = body.get("type")
            if kind in ("response.output_audio.delta", LIVE_DELTA):
                self._response = body.get("response_id", "")
                self._voice.play(body.get("item_id", ""), pybase64.b64decode(body["delta"]))
                if self._voice.waiting_s > VOICE_S_MAX:
                    raise CallLost("an answer came too fast")
                continue
            self._show(body)
            if kind == "response.created":
                self._is_answering = True
            elif kind == "response.done":
                self._is_answering = False
                if body["response"]["status"] == "cancelled":
                    await self._cut()
            elif kind == "input_audio_buffer.speech_started" and not self._is_answering:
                await self._cut()
        raise CallLost("the session is over")

    async def _cut(self) -> None:
        """Play nothing more, and have the session forget what was not played."""
        for item, played_ms in self._voice.cut():
            cut = {"item_id": item, "content_index": 0, "audio_end_ms": played_ms}
            await self._send({"type": "conversation.item.truncate", **cut})
        if self._playing:
            self._send_buffer_event("cleared")

    async def _play(self) -> None:
        """Tell the browser when a response begins to be played, and when it was."""
        while True:
            await asyncio.sleep(PIECE_S)
            if self._is_live:
                continue
            if self._voice.is_playing and not self._playing:
                self._playing = self._response
                self._send_buffer_event("started", ends=False)
            elif self._playing and not (self._voice.is_playing or self._is_answering):
                self._send_buffer_event("stopped")

    def _send_buffer_event(self, what: str, *, ends: bool = True) -> None:
        event = f"event_{secrets.token_hex(8)}"
        kind = f"output_audio_buffer.{what}"
        self._show({"type": kind, "event_id": event, "response_id": self._playing})
        if ends:
            self._playing = ""

    def _show(self, body: Mapping[str, Any]) -> None:
        """Send a message on the data channel, once it is open."""
        if not self._offer.has_data:
            return
        self._to_channel.append(orjson.dumps(body).decode())
        if self._channel is not None:
            self._flush(self._channel)
        if len(self._to_channel) > MESSAGES_MAX:
            self._lose("it did not open its data channel")

    def _flush(self, channel: RTCDataChannel) -> None:
        while self._to_channel and channel.readyState == "open":
            channel.send(self._to_channel.popleft())
        if channel.bufferedAmount > CHANNEL_BYTES_MAX:
            self._lose("it does not read its data channel")

    # -- its end --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """End the call when the browser is gone."""
        began_s = time.monotonic()
        while not self._lost.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._lost), 1)
            now_s, state = time.monotonic(), self._peer.connectionState
            if state != "connected" and not self._packet_s and now_s - began_s > CONNECT_S:
                self._lose("it did not connect")
            if self._packet_s and now_s - self._packet_s > SILENT_S:
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
            _LOG.info("call %s: %s", self.id, self._intake.losses)
            return
        losses = {name: str(count) for name, count in attrs.asdict(self._intake.losses).items()}
        tracing = {"workflow_name": "webrtc", "group_id": self.id, "metadata": losses}
        session = {"type": "realtime", "tracing": tracing}
        await self._send({"type": "session.update", "session": session})

    async def _send(self, body: Mapping[str, Any]) -> None:
        await self._session.send(orjson.dumps(body).decode())
