"""A llama.cpp-omni server written from wire.md ("Remote backend"), on a real loopback socket.

It holds its clients to that section: what they say otherwise ends their session and stands in
`violations`. Like the real one it reads its WebSocket only between units, so that a ping is
answered once the append before it is, and holds one session at a time; another one's connection
is closed without a word.

Left alone it listens twice, then speaks a turn of two units, again and again; in a `turn_based`
session it says back what it was asked, word by word. A test makes it stray by giving another
`answer`, `greeting`, `health` or `close_status`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import numpy as np
import pybase64
import pytest
import trio
import wsproto
from anyio.abc import SocketAttribute, SocketStream
from llama_omni import LlamaOmniBackend, LlamaOmniSession
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto import events as ws
from wsproto.connection import ConnectionState

from protocol.values.model import (
    ChatConfig,
    Content,
    DuplexConfig,
    Message,
    Opening,
    Text,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
    Voice,
)
from runtime.model.backends.base import BackendError, Piece, TurnSession
from tests.sessions.in_memory import pcm

Body = dict[str, Any]
HANG: Final = "hang"
CLOSE: Final = "close"
DROP: Final = "drop"
Item = Body | str | bytes
"""A message, a text frame or a binary frame as they are, or what else the server does."""

SECOND: Final = 24_000
SECRET: Final = "what the caller said"
INIT_FIELDS: Final = {"mode", "use_tts", "voice", "system_prompt", "config"}
INPUT_FIELDS: Final = {"audio", "video_frames", "max_slice_nums", "force_listen"}
CHAT_FIELDS: Final[dict[str, type]] = {
    "messages": list,
    "streaming": bool,
    "generation": dict,
    "image": dict,
    "tts": dict,
    "omni_mode": bool,
}
"""What an append of a `turn_based` session holds, of the backend protocol's schema (4.2)."""
CONTENT_FIELDS: Final = {"text": "text", "image": "data", "audio": "data"}
WORD_SAMPLES: Final = 4_800


def sound(samples: int, level: float = 0.25) -> bytes:
    """Make float32 LE samples, all of one level."""
    return np.full(samples, level, dtype="<f4").tobytes()


def delta(kind: str, **fields: object) -> Body:
    """Write a `response.output.delta`."""
    return {"type": "response.output.delta", "kind": kind, "session_id": "remote_1", **fields}


def audio(samples: int, level: float = 0.25, **fields: object) -> Body:
    """Write an audio delta."""
    return delta("audio", audio=pybase64.b64encode(sound(samples, level)).decode(), **fields)


def done(text: str = "", **fields: object) -> Body:
    """Write a `response.done`, as the server sends it after every unit that it speaks in."""
    return {"type": "response.done", "text": text, "reason": "turn_end", "audio": None, **fields}


class FakeServer:
    """The server; `running` serves it.

    Args:
        answer: what to say to append `index` of a session whose init is `init`.
        greeting: said instead of `session.created`.
        health: the status and body of `/health`; None never answers.
        close_status: of a close; None closes the session as it should, 0 never answers.

    Attributes:
        inits: the payloads that came, of all sessions.
        appends: the inputs that came, of all sessions.
        closes: the ids that were closed by POST.
        violations: what clients did that wire.md does not have.
        active: the session that is held.
        refused: connections that were closed because another session is held.
        socket: its WebSocket.
        hold: set; one that is not holds every answer back.
    """

    def __init__(
        self,
        answer: Callable[[int, Body, Body], Sequence[Item]] | None = None,
        *,
        greeting: Sequence[Item] | None = None,
        health: tuple[int, str] | None = (200, '{"status": "ok"}'),
        close_status: int | None = None,
    ) -> None:
        self.answer = answer or self.play
        self.greeting = greeting
        self.health = health
        self.close_status = close_status
        self.inits: list[Body] = []
        self.appends: list[Body] = []
        self.closes: list[str] = []
        self.violations: list[str] = []
        self.active: str | None = None
        self.refused = 0
        self.url = ""
        self._sessions = 0
        self.socket: _Socket | None = None
        self.hold = anyio.Event()
        self.hold.set()
        self._changed = anyio.Event()

    def play(self, index: int, init: Body, body: Body) -> Sequence[Item]:
        """As the session's mode is."""
        talk = self.say_back if init["mode"] == "turn_based" else self.listen_and_speak
        return talk(index, init, body)

    def say_back(self, index: int, init: Body, body: Body) -> Sequence[Item]:
        """The words of the last message one by one, each with its sound where speech is asked."""
        content = body["messages"][-1]["content"]
        text = " ".join(part["text"] for part in content if part["type"] == "text")
        words = [f"{word} " for word in text.split()]
        said: list[Item] = []
        for count, word in enumerate(words):
            metrics = {"kv_cache_length": 40 + count, "prefill_ms": 12.5}
            said.append(delta("text", text=word, response_id="resp_1", metrics=metrics))
            if body["tts"]["enabled"]:
                said.append(audio(WORD_SAMPLES, response_id="resp_1"))
        metrics = {"kv_cache_length": 40 + len(words), "n_tokens": len(words), "generate_ms": 8.0}
        return [*said, done("".join(words), response_id="resp_1", metrics=metrics)]

    def listen_and_speak(self, index: int, init: Body, body: Body) -> Sequence[Item]:
        """Two listens, a second of speech, and its end; the instructions come back in the text."""
        response = {"response_id": f"resp_{index}", "metrics": {"kv_cache_length": 100 + index}}
        if body["force_listen"] or index % 4 < 2:
            return [delta("listen", **response)]
        text = delta("text", text=f"{init.get('system_prompt', '')} {index}, ", **response)
        if index % 4 == 2:
            return [text, audio(SECOND, **response), done(text["text"], **response)]
        end = [audio(SECOND // 2, **response), delta("listen", **response)]
        return [text, *end, done(text["text"], **response)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds of what came."""
        while not condition():
            changed = self._changed
            await changed.wait()

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[FakeServer]:
        """Serve on a port of the loopback; 0 takes a free one."""
        listeners = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
        port = listeners.extra(SocketAttribute.local_port)
        self.url = f"ws://127.0.0.1:{port}"
        async with listeners, anyio.create_task_group() as tasks:
            tasks.start_soon(listeners.serve, self._handle)
            yield self
            tasks.cancel_scope.cancel()

    async def _handle(self, stream: SocketStream) -> None:
        try:
            async with stream:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += await stream.receive()
                if b"upgrade: websocket" in head.lower():
                    await self._talk(_Socket(stream, head), head)
                else:
                    await self._answer_http(stream, head)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            pass  # The client left.

    # -- HTTP -----------------------------------------------------------------------------------

    async def _answer_http(self, stream: SocketStream, head: bytes) -> None:
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        status, body = 404, "{}"
        if (method, target) == ("GET", "/health"):
            if self.health is None:
                await anyio.sleep_forever()
            status, body = self.health or (0, "")
        elif method == "POST" and target.startswith("/sessions/") and target.endswith("/close"):
            status, body = await self._close(target.split("/")[2])
        else:
            self.violations.append(f"{method} {target}")
        if status == 0:
            await stream.send(b"what is it?\r\n\r\n")
            return
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await stream.send(head + body.encode())

    async def _close(self, session_id: str) -> tuple[int, str]:
        self.closes.append(session_id)
        self._notify()
        if self.close_status == 0:
            await anyio.sleep_forever()
        if self.close_status is not None:
            return self.close_status, "{}"
        if session_id != self.active or self.socket is None:
            return 404, '{"error": "session not found"}'
        self.active = None
        await self.socket.say({"type": "session.closed", "reason": "client_closed"})
        await self.socket.close()
        return 200, json.dumps({"ok": True, "session_id": session_id, "closed": True})

    # -- the WebSocket --------------------------------------------------------------------------

    async def _talk(self, socket: _Socket, head: bytes) -> None:
        if not head.startswith(b"GET /backend "):
            self.violations.append(head.split(b"\r\n")[0].decode())
        frame = await socket.receive()
        if frame is None or self.active is not None:
            self.refused += frame is not None
            self._notify()
            await socket.close()
            return
        init = self._read(frame, "session.init", "payload", INIT_FIELDS)
        self._sessions += 1
        name = self.active = f"remote_{self._sessions}"
        self.socket = socket
        try:
            self.inits.append(init)
            self._notify()
            created = {"type": "session.created", "session_id": name, "mode": init.get("mode")}
            created["metrics"] = {"kv_cache_length": 68, "backend": "fake"}
            if await socket.perform([created] if self.greeting is None else self.greeting):
                await self._serve(socket, name, init)
        finally:
            if self.active == name:
                self.active = None
            self._notify()

    async def _serve(self, socket: _Socket, name: str, init: Body) -> None:
        index = 0
        while self.active == name and (frame := await socket.receive()) is not None:
            if init.get("mode") == "turn_based":
                body = self._read_question(frame)
            else:
                body = self._read(frame, "input.append", "input", INPUT_FIELDS)
            if self.violations:
                await socket.say({"type": "session.closed", "reason": "invalid_input"})
                await socket.close()
                return
            self.appends.append(body)
            self._notify()
            await self.hold.wait()
            if not await socket.perform(self.answer(index, init, body)):
                return
            index += 1

    def _read(self, frame: str, kind: str, name: str, fields: set[str]) -> Body:
        """Hold the client to the section: these fields, of these types, and no others."""
        message = json.loads(frame)
        body: Body = message.get(name, {})
        if message.keys() != {"type", name} or message["type"] != kind:
            self.violations.append(f"{kind}: {sorted(message)} of type {message.get('type')}")
        if unknown := body.keys() - fields:
            self.violations.append(f"{kind}: unknown {sorted(unknown)}")
        types = {"mode": str, "use_tts": bool, "voice": dict, "system_prompt": str, "config": dict}
        types |= {"audio": str, "video_frames": list, "max_slice_nums": int, "force_listen": bool}
        wrong = [key for key, value in body.items() if type(value) is not types.get(key)]
        if wrong:
            self.violations.append(f"{kind}: {wrong} of the wrong type")
        if kind == "session.init" and body.get("mode") not in ("full_duplex", "turn_based"):
            self.violations.append("session.init: another mode")
        if kind == "input.append" and "audio" not in body:
            self.violations.append("input.append: no audio")
        return body

    def _read_question(self, frame: str) -> Body:
        """Hold the client to what a `turn_based` session takes."""
        message = json.loads(frame)
        body: Body = message.get("input", {})
        if message.keys() != {"type", "input"} or message["type"] != "input.append":
            self.violations.append(f"input.append: {sorted(message)}")
        if {name: type(value) for name, value in body.items()} != CHAT_FIELDS:
            self.violations.append(f"input.append: {sorted(body)} of a turn")
        inner = {"generation": {"max_new_tokens", "length_penalty"}, "image": {"max_slice_nums"}}
        wrong = [name for name, keys in inner.items() if body[name].keys() != keys]
        if wrong or not {"enabled"} <= body["tts"].keys() <= {"enabled", "ref_audio_data"}:
            self.violations.append(f"input.append: {wrong or 'tts'}")
        for said in body["messages"]:
            for part in said["content"]:
                if part.keys() != {"type", CONTENT_FIELDS[part["type"]]}:
                    self.violations.append(f"input.append: {sorted(part)} as a content")
        return body

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class _Socket:
    """The server's end of one WebSocket; it reads, and answers pings, only in `receive`."""

    def __init__(self, stream: SocketStream, head: bytes) -> None:
        self._stream = stream
        self._connection = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
        self._connection.receive_data(head)
        self._text = ""
        self.pongs = 0
        self._lock = anyio.Lock()

    async def receive(self) -> str | None:
        """Wait for a message; None at the end."""
        while True:
            for event in self._connection.events():
                match event:
                    case ws.Request():
                        await self._send(ws.AcceptConnection())
                    case ws.Ping():
                        await self._send(event.response())
                    case ws.Pong():
                        self.pongs += 1
                    case ws.CloseConnection():
                        if self._connection.state is ConnectionState.REMOTE_CLOSING:
                            await self._send(event.response())
                        return None
                    case ws.TextMessage():
                        self._text += event.data
                        if event.message_finished:
                            text, self._text = self._text, ""
                            return text
            self._connection.receive_data(await self._stream.receive())

    async def perform(self, items: Sequence[Item]) -> bool:
        """Say or do some things; False where nothing can follow them."""
        frames = [item for item in items if item not in (HANG, CLOSE, DROP)]
        data = b"".join(map(self._encode, frames))
        if data:
            await self._write(data)  # at once, as they mostly arrive
        if HANG in items:
            await anyio.sleep_forever()
        if CLOSE in items:
            await self.close()
        return not (CLOSE in items or DROP in items)

    async def say(self, body: Body) -> None:
        """Say one message."""
        await self._write(self._encode(body))

    async def ping(self) -> None:
        """Ask the client whether it is there."""
        await self._send(ws.Ping())

    async def close(self) -> None:
        """Close the WebSocket."""
        await self._send(ws.CloseConnection(code=1000))

    def _encode(self, item: Item) -> bytes:
        if isinstance(item, bytes):
            return self._connection.send(ws.BytesMessage(data=item))
        text = item if isinstance(item, str) else json.dumps(item)
        return self._connection.send(ws.TextMessage(data=text))

    async def _send(self, event: ws.Event) -> None:
        await self._write(self._connection.send(event))

    async def _write(self, data: bytes) -> None:
        async with self._lock:  # a close comes from another task
            await self._stream.send(data)


# -- what its tests share -------------------------------------------------------------------------


def opening(instructions: str = "be brief", **fields: Any) -> Opening:
    values = {"voice": Voice(), "config": DuplexConfig(), "seed": 1} | fields
    return Opening(instructions=instructions, **values)


def unit(index: int, **fields: Any) -> Unit:
    return Unit(index=index, pcm=pcm(), **fields)


def saying(*answers: Sequence[Item]) -> FakeServer:
    """A server that gives these answers, one a unit, and listens after them."""

    def answer(index: int, init: object, body: object) -> Sequence[Item]:
        return answers[index] if index < len(answers) else [delta("listen")]

    return FakeServer(answer)


@asynccontextmanager
async def session_on(fake: FakeServer) -> AsyncIterator[LlamaOmniSession]:
    """Serve a fake and hold a session on it, released at the end."""
    async with fake.running():
        session = await LlamaOmniBackend(fake.url).open(opening(), slot=0)
        try:
            yield session
        finally:
            await session.release()
        assert fake.violations == []


def text(words: str) -> Item:
    """A text delta."""
    return delta("text", text=words)


def ask(*content: Content, **fields: Any) -> Turn:
    """A turn of chat: a question, or `messages` and settings as they are given."""
    messages = (Message(role="user", content=content or (Text(text="good morning to you"),)),)
    values = {"index": 0, "messages": messages, "config": ChatConfig(), "speech": None}
    flags = {"max_slice_nums": 9, "use_image_id": True, "omni": False, "thinking": False}
    return Turn(**values | flags | {"seed": 1} | fields)


async def answers_of(session: LlamaOmniSession, units: int, **fields: Any) -> list[UnitResult]:
    """Run units as the session machine does."""
    results = []
    for index in range(units):
        results.append(await session.run(unit(index, **fields)))
        await session.finalize(index, interrupted=False)
    return results


def said(result: UnitResult) -> tuple[bool, str, int, bool]:
    """Whether it listens, its text, its samples, and whether it ends a turn."""
    return (result.is_listen, result.text, len(result.pcm) // 4, result.end_of_turn)


LISTENS = (True, "", 0, False)


async def failing(call: Awaitable[object], kind: type[BackendError], expected: str) -> None:
    """Await a call that must fail, and how."""
    with pytest.raises(kind, match=expected) as caught:
        await call
    assert type(caught.value) is kind


async def answer(
    backend: LlamaOmniBackend, turn: Turn, *, on_piece: Callable[[TurnSession], None] | None = None
) -> tuple[list[TurnChunk], TurnResult]:
    """Run a turn as `Calls` does, and release it whatever becomes of it."""
    pieces: list[TurnChunk] = []
    held = await backend.chat(slot=0)

    def emit(piece: Piece) -> None:
        if not isinstance(piece, TurnChunk):
            return
        pieces.append(piece)
        if on_piece is not None:
            on_piece(held)

    try:
        return pieces, await held.run(turn, emit=emit)
    finally:
        await held.release()


async def still_chats(fake: FakeServer, backend: LlamaOmniBackend) -> None:
    """The next turn is answered: nothing of the one before is left."""
    await fake.until(lambda: fake.active is None)
    fake.answer, fake.greeting = fake.play, None
    _, result = await answer(backend, ask(Text(text="and now")))
    assert result.text == "and now "
    assert fake.violations == []


def on_moved_clock(body: Callable[[MockClock], Awaitable[None]]) -> None:
    """Run a test on trio's clock, which stands still until the test moves it."""
    clock = MockClock()
    trio.run(body, clock, clock=clock)


async def pass_time(clock: MockClock, seconds: float) -> None:
    """Let time pass once everybody waits."""
    await wait_all_tasks_blocked()
    clock.jump(seconds)
