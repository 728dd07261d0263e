"""A telephone call at a real server, by a client that sends and plays as Twilio does."""

from __future__ import annotations

import asyncio
import base64
import json
import time
import urllib.parse
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import attrs
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from protocol.values.events import FrameReceived
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.api.twilio import SIGNATURE, signature_of
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request

SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
TOKEN: Final = "0123456789abcdef0123456789abcdef"
SID: Final = "MZ00000000000000000000000000000001"
PIECE: Final = 160
SILENCE: Final = b"\xff" * PIECE
WAIT_S: Final = 40
ANSWER_S: Final = 6
TRIES: Final = 5


def mu_law(samples: np.ndarray[Any, Any]) -> bytes:
    """Encode samples, 16 bits, as a telephone does."""
    level = np.minimum(np.abs(samples), 32_635) + 132
    exponent = np.floor(np.log2(level)).astype(int) - 7
    mantissa = (level.astype(int) >> (exponent + 3)) & 15
    sign = np.where(samples < 0, 128, 0)
    return bytes((~(sign | exponent << 4 | mantissa) & 255).astype(np.uint8))


def question() -> bytes:
    """A spoken question, by telephone."""
    with wave.open(str(SPEECH)) as file:
        rate_hz, frames = file.getframerate(), file.getnframes()
        samples = np.frombuffer(file.readframes(frames), "<i2").astype(np.float64)
    count = frames * 8_000 // rate_hz
    narrow = np.fft.irfft(np.fft.rfft(samples)[: count // 2 + 1], count) * count / frames
    loud = np.flatnonzero(np.abs(narrow) > 500)
    return mu_law(narrow[int(loud[0]) : int(loud[-1])])


def tone(seconds: float) -> bytes:
    """Somebody who speaks over the model."""
    return mu_law(np.sin(np.arange(int(seconds * 8_000)) / 3) * 9_000)


@attrs.define
class Phone:
    """The other end of a stream: it sends sound in real time, and plays what it gets.

    Attributes:
        saying: what its caller says; then silence.
        buffer: sound and marks that are not played yet.
        played: bytes of sound.
    """

    socket: ClientConnection
    saying: bytearray = attrs.Factory(bytearray)
    buffer: list[bytes | str] = attrs.Factory(list)
    played: int = 0
    events: Counter[str] = attrs.Factory(Counter)
    sizes: set[int] = attrs.Factory(set)
    sent: int = 0

    async def send(self, event: str, **body: Any) -> None:
        self.sent += 1
        told = {"event": event, "sequenceNumber": str(self.sent), "streamSid": SID, **body}
        await self.socket.send(json.dumps(told))

    async def begin(self, **parameters: str) -> None:
        """Begin the stream as Twilio does."""
        hello = {"event": "connected", "protocol": "Call", "version": "1.0.0"}
        await self.socket.send(json.dumps(hello))
        form = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
        start = {
            **{"accountSid": "AC1", "streamSid": SID, "callSid": "CA1", "tracks": ["inbound"]},
            **{"mediaFormat": form, "customParameters": parameters},
        }
        await self.send("start", start=start)

    async def speak(self) -> None:
        """Send 20 ms of sound each 20 ms, and play as much; return the marks as they are played."""
        begun, count = time.monotonic(), 0
        while True:
            piece = bytes(self.saying[:PIECE]).ljust(PIECE, b"\xff")
            del self.saying[:PIECE]
            media = {"track": "inbound", "chunk": str(count), "timestamp": str(20 * count)}
            payload = base64.b64encode(piece).decode()
            await self.send("media", media={**media, "payload": payload})
            is_played = False
            while self.buffer and not (is_played and isinstance(self.buffer[0], bytes)):
                item = self.buffer.pop(0)
                if isinstance(item, bytes):
                    self.played, is_played = self.played + len(item), True
                else:
                    await self.send("mark", mark={"name": item})
            count += 1
            await asyncio.sleep(max(0, begun + 0.02 * count - time.monotonic()))

    async def hear(self) -> None:
        """Take what the server sends."""
        async for message in self.socket:
            body = json.loads(message)
            assert body["streamSid"] == SID
            self.events[body["event"]] += 1
            if body["event"] == "media":
                sound = base64.b64decode(body["media"]["payload"])
                self.sizes.add(len(sound))
                self.buffer.append(sound)
            elif body["event"] == "mark":
                self.buffer.append(body["mark"]["name"])
            else:
                marks = [it for it in self.buffer if isinstance(it, str)]
                self.buffer.clear()
                for name in marks:  # they come back, though nothing of them was played
                    await self.send("mark", mark={"name": name})

    async def until(self, is_so: Callable[[], bool], wait_s: float = WAIT_S) -> bool:
        """Wait until something is so; whether it came to be."""
        end = time.monotonic() + wait_s
        while not is_so() and time.monotonic() < end:  # noqa: ASYNC110 - several things change
            await asyncio.sleep(0.01)
        return is_so()

    async def ask(self) -> None:
        """Ask, and wait until the answer begins."""
        before = self.played
        self.saying += question()
        assert await self.until(lambda: self.played > before)

    async def quiet(self) -> None:
        """Wait until all is played."""
        assert await self.until(lambda: not self.buffer)
        await asyncio.sleep(0.5)


def requests_in(log: Path) -> list[dict[str, Any]]:
    """What the session was asked, but for its sound."""
    with LogReader(log) as items:
        events = [event_of(it.fields, it.at_ns) for it in items if it.kind in EVENT_KINDS]
    found = [json.loads(str(it.frame)) for it in events if isinstance(it, FrameReceived)]
    return [it for it in found if it["type"] != "input_audio_buffer.append"]


def test_a_call_of_three_turns_with_an_interruption(tmp_path: Path) -> None:
    """A caller hears nothing, cannot interrupt, or the log says that all was heard."""

    async def call(server: LiveServer) -> Phone:
        address = server.url.replace("/v1/realtime", "/v1/twilio")
        async with connect(address) as socket:
            phone = Phone(socket)
            await phone.begin(greet="1", instructions="Answer briefly.")
            tasks = [asyncio.create_task(it) for it in (phone.speak(), phone.hear())]
            assert await phone.until(lambda: phone.played > 0)  # the greeting
            await phone.quiet()
            await phone.send("dtmf", dtmf={"track": "inbound_track", "digit": "5"})
            await phone.ask()
            for _ in range(TRIES):  # an answer may be over before it is spoken over
                await phone.quiet()
                await phone.ask()
                phone.saying += tone(1.5)
                if await phone.until(lambda: phone.events["clear"] > 0, ANSWER_S):
                    break
            await asyncio.sleep(1)
            await phone.send("stop", stop={"accountSid": "AC1", "callSid": "CA1"})
            for task in tasks:
                task.cancel()
            return phone

    with live_server("--record", str(tmp_path)) as server:
        phone = asyncio.run(call(server))
        assert "Traceback" not in server.errors.read_text()
    assert max(phone.sizes) == PIECE
    assert phone.events["clear"] == 1
    (log,) = tmp_path.rglob("*.session.zst")
    with LogReader(log) as items:
        assert replay(items).identical
    settings, greeting, key, *cut = requests_in(log)
    assert settings["session"]["tracing"]["group_id"] == "CA1"
    assert settings["session"]["instructions"] == "Answer briefly."
    assert greeting == {"type": "response.create"}
    assert key["item"]["content"][0]["text"] == "[key 5]"
    (truncate,) = cut
    assert truncate["type"] == "conversation.item.truncate"
    assert 0 < truncate["audio_end_ms"] < 2_000  # of an answer of two seconds
    with LogReader(log) as items:
        assert '"conversation.item.truncated"' in str([*items])


def signed(server: LiveServer, path: str, token: str = TOKEN, **fields: str) -> dict[str, str]:
    """The headers of a request of Twilio's to a proxy before the server."""
    scheme = "https" if fields else "wss"
    url = f"{scheme}://phone.example{path}"
    return {"Host": "phone.example", SIGNATURE: signature_of(token, url, [*fields.items()])}


def test_only_twilio_s_requests_are_taken(tmp_path: Path) -> None:
    """Any stranger calls, or is told how; or Twilio is asked for a key that it does not have."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    keys = (Key(name="twilio", hash=hash_key("antiphon_x")), Key(name="b", hash=hash_key("b")))
    change_key_file(tmp_path / "keys.toml", lambda _: keys[:1], create=True)
    options = (
        "--keys",
        str(tmp_path / "keys.toml"),
        "--twilio-token-file",
        str(tmp_path / "token"),
    )
    fields = {"CallSid": "CA1", "From": "+1 555", "To": "+1 556"}
    body = urllib.parse.urlencode(fields).encode()
    path = "/v1/twilio?instructions=Say%20%22hi%22%20%26%20%3C&greet=1"
    with live_server("--no-record", *options) as server:

        def ask(headers: dict[str, str], path: str = path, body: bytes = body) -> Any:
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            return request(server.address, path, method="POST", body=body, headers=headers | form)

        answer = ask(signed(server, path, **fields))
        assert answer.status == 200
        (stream,) = ElementTree.fromstring(answer.body).iter("Stream")
        assert stream.attrib == {"url": "wss://phone.example/v1/twilio"}
        told = {it.attrib["name"]: it.attrib["value"] for it in stream}
        assert told == {"instructions": 'Say "hi" & <', "greet": "1"}
        good = signed(server, path, **fields)
        for headers, *changed in (
            ({},),
            ({"Host": "phone.example"},),
            (signed(server, path, "f" * 32, **fields),),
            (good, "/v1/twilio?greet=1"),
            (good, path, body + b"&More=1"),
            (good, path, b""),
            ({"Authorization": "Bearer antiphon_x"},),
        ):
            assert ask(headers, *changed).status == 401, (headers, changed)

        async def call(headers: dict[str, str]) -> int:
            address = server.url.replace("/v1/realtime", "/v1/twilio")
            try:
                async with connect(address, additional_headers=headers) as socket:
                    await Phone(socket).begin()
                    return 101
            except InvalidStatus as refused:
                return refused.response.status_code

        url = f"wss://{server.address[0]}:{server.address[1]}/v1/twilio"
        for name, status in ((url, 101), (f"{url}/", 101), (f"{url}?a=1", 401), (path, 401)):
            assert asyncio.run(call({SIGNATURE: signature_of(TOKEN, name)})) == status
        assert asyncio.run(call({"Authorization": "Bearer antiphon_x"})) == 401
        change_key_file(tmp_path / "keys.toml", lambda _: keys[1:])
        time.sleep(2.5)  # the file is read again
        assert asyncio.run(call({SIGNATURE: signature_of(TOKEN, url)})) == 401


@pytest.mark.costly
@pytest.mark.parametrize(
    "message",
    [
        *("", "[]", "{", '{"event": "start"}', '{"event": "media", "media": {"payload": 1}}'),
        *('{"event": "media", "media": {"track": "inbound", "payload": "?"}}', '{"event": 5}'),
        *('{"event": "mark", "mark": {"name": "a:99999999999999999999"}}', '{"event": "other"}'),
    ],
)
def test_a_wrong_message_is_the_session_s_to_refuse(message: str, tmp_path: Path) -> None:
    """A message ends the server's task, or is in no log."""

    async def call(server: LiveServer) -> None:
        async with connect(server.url.replace("/v1/realtime", "/v1/twilio")) as socket:
            phone = Phone(socket)
            await phone.begin()
            await socket.send(message)
            await socket.send(b"\0")
            for _ in range(20):
                await phone.send("media", media={"track": "inbound", "payload": "f" * 216})
            await asyncio.sleep(0.2)

    with live_server("--record", str(tmp_path)) as server:
        asyncio.run(call(server))
        errors = server.errors.read_text()
    assert "Traceback" not in errors
    assert "broke" not in errors
    (log,) = tmp_path.rglob("*.session.zst")
    with LogReader(log) as items:
        assert replay(items).identical
