"""The servers of the gateway bench, each in a process of its own: ours, and two yardsticks.

- `antiphon` and `recorded`: the server as `antiphon serve` runs it, on a model that answers each
  unit at once with speech made before. Limits that a bench meets on purpose are raised.
- `echo`: the same transport with nothing behind it. Every unit is answered by the same bytes.
- `websockets`: the unit's work written straight on the `websockets` library with uvloop, orjson
  and pybase64: parse, base64, check, decode the picture, write the deltas. No session, no log.
- `logged`: the same, with each message of either side as a line of JSON in a zstd file.

A server says where it listens, as `{"port": ...}` on a line. Then it answers each line of its
standard input with one of what it has used so far; see `meter`. It ends with its input.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Awaitable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, cast

import anyio
import anyio.to_thread
import attrs
import numpy as np
import orjson
import pybase64
import zstandard
from anyio.lowlevel import checkpoint

from protocol.values.frames import Frame
from protocol.values.limits import FRAME_BYTES_MAX
from protocol.values.model import (
    SAMPLE16_BYTES,
    UNIT_BYTES,
    UNIT_SAMPLES,
    Chunk,
    ChunkResult,
    Costs,
    Cut,
    Finalized,
    Opened,
    Opening,
    Unit,
    UnitResult,
)
from protocol.wire.audio import to_float32
from runtime.media.image import decode_jpeg
from runtime.model.backends.base import Backend, BackendInfo
from runtime.net import listener
from runtime.net.connection import WebSocketClosed
from runtime.net.http import make_app
from runtime.net.listener import Address, WebSocketRequest
from runtime.serve.serving import run
from runtime.settings.settings import Settings
from tests.bench.gateway.material import (
    CREATED,
    END,
    QUEUE_DONE,
    TEXT,
    Contender,
    deltas,
    make_exchanges,
    words,
)
from tests.bench.gateway.meter import Meter

HOST: Final = "127.0.0.1"
SLOTS: Final = 2048
"""More sessions than any pattern has, with those that are just being released."""
ENDLESS: Final = 1 << 30
"""For bounds that a bench would meet: tokens, messages and bytes a second."""
SESSION_S: Final = 3600
_UNBOUND: Final = Settings(
    host=HOST,
    port=0,
    model="bench",
    limit_video_s=SESSION_S,
    connections_per_address_max=SLOTS,
    connections_per_address_per_s_max=ENDLESS,
    messages_per_s_max=ENDLESS,
    bytes_per_s_max=ENDLESS,
)
"""Of both servers on our transport: what is measured is work, and not how clients are held back."""
TOKENS: Final = tuple(range(100, 112))
CODES: Final = tuple(code * 91 % 6561 for code in range(25))


# -- ours ---------------------------------------------------------------------------------------


class _Answering:
    """A session of a model that computes nothing: each unit is answered by speech."""

    def __init__(self, pcms: list[bytes]) -> None:
        self.opened = Opened(prompt_length=40)
        self._pcms = pcms
        self._kv_length = 40

    async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Answer at once."""
        await checkpoint()
        self._kv_length += 70
        return UnitResult(
            index=unit.index,
            is_listen=False,
            text=TEXT,
            pcm=self._pcms[unit.index % len(self._pcms)],
            kv_length=self._kv_length,
            decided_ids=TOKENS,
            fed_ids=TOKENS,
            codec_ids=CODES,
            input_hash="5" * 32,
            logits_hash="7" * 32,
            margin=1.25,
            vision_slices=len(unit.frames),
            vision_tokens=64 * len(unit.frames),
            costs=Costs(prefill_us=60_000, generate_us=300_000, llm_us=200_000, wall_us=360_000),
        )

    def interrupt(self, index: int) -> None:
        """Be done already."""

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close a unit at once."""
        await checkpoint()
        self._kv_length += 2
        return Finalized(index=index, kv_length=self._kv_length, fed_ids=(7, 8), cost_us=37_000)

    async def rollback(self, index: int) -> None:
        """Undo nothing: no unit fails."""

    async def release(self) -> None:
        """Hold nothing."""
        await checkpoint()


class _Hearing:
    """A transcription by a model that computes nothing: each second has the same words."""

    async def run(self, chunk: Chunk, cut: Cut | None = None) -> ChunkResult:
        """Answer at once."""
        await checkpoint()
        return ChunkResult(
            utterance=chunk.utterance,
            index=chunk.index,
            text=f"{TEXT} {chunk.index}",
            token_ids=TOKENS,
            reason="stop",
            prompt_tokens=12,
            generated_tokens=len(TOKENS),
            kv_length=40 + 24 * chunk.index,
            fed_ids=TOKENS,
            input_hash="5" * 32,
            logits_hash="7" * 32,
            margin=1.25,
        )

    async def release(self) -> None:
        """Hold nothing."""
        await checkpoint()


class _Model:
    """A model whose answers were made before."""

    def __init__(self) -> None:
        self._pcms = [exchange.pcm for exchange in make_exchanges()]
        self.info = BackendInfo(
            name="bench",
            modes=("video", "audio", "transcription"),
            slots=SLOTS,
            context_limit=ENDLESS,
            sliding_windows=("off",),
            can_rollback=True,
            deterministic=True,
            fingerprint={"backend": "bench"},
        )

    async def open(self, opening: Opening, *, slot: int) -> _Answering:
        """Open a session at once."""
        await checkpoint()
        return _Answering(self._pcms)

    async def transcribe(self, *, slot: int) -> _Hearing:
        """Begin a transcription at once."""
        await checkpoint()
        return _Hearing()


def _load(*_: object, **__: object) -> Backend:
    return _Model()


async def _serve_antiphon(meter: Meter, folder: Path | None) -> None:
    settings = attrs.evolve(_UNBOUND, record_to=folder)
    bound: list[Address] = []
    await run(
        settings, load=_load, on_bound=bound.extend, on_ready=lambda: meter.start(bound[0].port)
    )


# -- (a) an echo on our transport ---------------------------------------------------------------


async def _serve_echo(meter: Meter) -> None:
    answers = [
        tuple(delta.decode() for delta in deltas(str(number), exchange.pcm))
        for number, exchange in enumerate(make_exchanges())
    ]
    heard = [(words(number).decode(),) for number in range(len(answers))]

    async def echo(request: WebSocketRequest) -> None:
        websocket = await request.accept()
        is_heard = "transcription" in request.target
        await websocket.send(*(() if is_heard else (QUEUE_DONE,)))
        await websocket.send(CREATED)
        said = itertools.cycle(heard if is_heard else answers)

        def take(*messages: Frame) -> Awaitable[None] | None:
            units = sum(isinstance(it, str) and it.endswith(END) for it in messages)
            frames = [frame for _ in range(units) for frame in next(said)]
            return websocket.send(*frames) if units else None

        with suppress(WebSocketClosed):
            await websocket.deliver(take)

    listeners = await listener.bind(HOST, 0)
    async with anyio.create_task_group() as tasks:
        app = make_app(lambda: "ready")
        (address,) = await tasks.start(_listen, listeners, echo, app)
        meter.start(address.port)


async def _listen(
    listeners: Any, on_websocket: Any, app: Any, *, task_status: anyio.abc.TaskStatus[Any]
) -> None:
    await listener.serve(
        listeners, on_websocket=on_websocket, app=app, settings=_UNBOUND, task_status=task_status
    )


# -- (b) the same work on another library -------------------------------------------------------


class _Listener:
    """Does what a unit needs: parse, base64, join its pieces, check."""

    def __init__(self) -> None:
        self._sound = bytearray()
        self.jpeg: bytes | None = None

    def take(self, message: bytes) -> bool:
        """Take a message; whether a second is full, whose picture is `jpeg`."""
        body = orjson.loads(message)
        if body["type"] == "input_audio_buffer.append":
            self._sound += pybase64.b64decode(body["audio"], validate=True)
            second = UNIT_SAMPLES * SAMPLE16_BYTES
            if len(self._sound) < second:
                return False
            to_float32(bytes(self._sound[:second]))  # what the model hears
            del self._sound[:second]
            return True
        if body["type"] != "input.append":
            return False
        body = body["input"]
        piece = pybase64.b64decode(body["audio"], validate=True)
        if not np.isfinite(np.frombuffer(piece, "<f4")).all():
            raise ValueError("no sound")
        self._sound += piece
        if len(self._sound) < UNIT_BYTES:
            return False
        del self._sound[:UNIT_BYTES]
        frames = body.get("video_frames")
        self.jpeg = pybase64.b64decode(frames[0], validate=True) if frames else None
        return True


class _Lines:
    """The log that anybody would write: each message as a line of JSON, in a zstd file."""

    def __init__(self, folder: Path | None) -> None:
        self._count = 0
        self._file: zstandard.ZstdCompressionWriter | None = None
        if folder is not None:
            folder.mkdir(exist_ok=True)
            path = folder / f"{time.monotonic_ns()}.jsonl.zst"
            self._file = zstandard.ZstdCompressor().stream_writer(path.open("wb"))

    def write(self, side: str, *messages: bytes) -> None:
        """Write messages, and have them on the disk's way once a second is answered."""
        if self._file is None:
            return
        for message in messages:
            self._count += 1
            body = {"seq": self._count, "at_ns": time.monotonic_ns(), "side": side}
            self._file.write(orjson.dumps({**body, "frame": message.decode()}) + b"\n")
        if side == "out":
            self._file.flush()

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()


async def _serve_websockets(meter: Meter, folder: Path | None) -> None:
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed

    pcms = [exchange.pcm for exchange in make_exchanges()]

    async def answer(connection: ServerConnection) -> None:
        assert connection.request is not None
        is_heard = "transcription" in connection.request.path
        if not is_heard:
            await connection.send(QUEUE_DONE)
            await connection.recv()
        await connection.send(CREATED)
        count, heard, lines = 0, _Listener(), _Lines(folder)
        with closing(lines), suppress(ConnectionClosed):
            while True:
                message = await connection.recv(decode=False)
                lines.write("in", message)
                if not heard.take(message):
                    continue
                if heard.jpeg is not None:
                    await anyio.to_thread.run_sync(decode_jpeg, heard.jpeg)
                pcm = pcms[count % len(pcms)]
                answers = (words(count),) if is_heard else deltas(str(count), pcm)
                lines.write("out", *answers)
                for delta in answers:
                    await connection.send(delta, text=True)
                count += 1

    async with serve(
        answer, HOST, 0, compression=None, max_size=FRAME_BYTES_MAX, ping_interval=None
    ) as server:
        meter.start(next(iter(server.sockets)).getsockname()[1])
        await anyio.sleep_forever()


def main(contender: Contender, folder: str, has_stages: bool = False) -> None:
    """Serve until the standard input ends.

    Args:
        contender: which server.
        folder: takes the logs of `recorded` and `logged`.
        has_stages: measure by stage; it costs some microseconds a unit.
    """
    meter = Meter(has_stages=has_stages)
    match contender:
        case "antiphon":
            anyio.run(_serve_antiphon, meter, None, backend="trio")
        case "recorded":
            anyio.run(_serve_antiphon, meter, Path(folder), backend="trio")
        case "echo":
            anyio.run(_serve_echo, meter, backend="trio")
        case "websockets" | "logged":
            options = {"use_uvloop": True}
            logs = Path(folder) if contender == "logged" else None
            anyio.run(_serve_websockets, meter, logs, backend="asyncio", backend_options=options)


if __name__ == "__main__":
    main(cast("Contender", sys.argv[1]), sys.argv[2], sys.argv[3:] == ["stages"])
