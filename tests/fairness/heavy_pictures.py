"""The adversary "pictures": small files that take long to decode, and clients that show them.

`heavy_jpeg` is a progressive JPEG of 20 megapixels and 118 kB that takes 0.3 s of a processor, one
of 43 scans a second. `show_heavy_pictures` and `ask_of_heavy_pictures` are the two clients, over a
socket, for tests and benches: a live session that brings four of them with each second of sound,
and a chat that asks about five of them again and again.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import cache
from typing import Final

import anyio

from protocol.values.errors import ProtocolError
from protocol.values.limits import FRAMES_MAX
from protocol.values.requests import ImagePart
from runtime.client.chat import message
from runtime.client.duplex import DuplexSession
from runtime.client.errors import ClientError
from runtime.client.sdk import connect
from tests.sessions.in_memory import pcm

WIDTH, HEIGHT = 5_000, 4_000
COMPONENTS: Final = (1, 2, 3)
IMAGES: Final = 5
"""In a question: as many of 20 megapixels as may be."""
EOB_14, RUN_MIN, RUN_MAX = 0xE0, 1 << 14, (1 << 15) - 1
"""The symbol for a run of empty blocks, and the lengths of runs that it can say (T.81, G.1.2.2)."""


@cache
def heavy_jpeg(width: int = WIDTH, height: int = HEIGHT, passes: int = 3) -> bytes:
    """Make a grey progressive JPEG, each of whose scans is a pass over the whole picture.

    Args:
        width: in pixels; with the height at least 16,384 blocks of 8 x 8.
        height: in pixels.
        passes: over the components' details, 13 at most; with the first there are 1 + 3 * `passes`
            scans.
    """
    blocks = -(-width // 8) * -(-height // 8)
    one_code = bytes([1, *([0] * 15)])  # A Huffman table with one symbol, which is one bit long.
    frame = struct.pack(">BHHB", 8, height, width, len(COMPONENTS))
    jpeg = [
        b"\xff\xd8",
        _segment(0xDB, b"\0" + b"\1" * 64),
        _segment(0xC2, frame + b"".join(bytes([each, 0x11, 0]) for each in COMPONENTS)),
        _segment(0xC4, b"\0" + one_code + b"\0"),
        _segment(0xC4, b"\x10" + one_code + bytes([EOB_14])),
        _segment(0xDA, bytes([3, 1, 0, 2, 0, 3, 0, 0, 0, 0])),
        bytes(len(COMPONENTS) * blocks // 8 + 1),
    ]
    empty = _empty_blocks(blocks)
    for low in reversed(range(passes)):
        high = 0 if low == passes - 1 else low + 1
        for each in COMPONENTS:
            jpeg += [_segment(0xDA, bytes([1, each, 0, 1, 63, high << 4 | low])), empty]
    return b"".join([*jpeg, b"\xff\xd9"])


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def _empty_blocks(blocks: int) -> bytes:
    bits = ""
    while blocks > 0:
        run = min(max(blocks, RUN_MIN), RUN_MAX)
        bits += f"0{run - RUN_MIN:014b}"
        blocks -= run
    bits += "1" * (-len(bits) % 8)
    data = bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))
    return data.replace(b"\xff", b"\xff\0")


async def show_heavy_pictures(url: str, *, passes: int = 3, key: str | None = None) -> None:
    """Be a live session that shows four heavy pictures each second; runs until cancelled.

    It waits for no answer, and begins anew when it is ended.

    Args:
        url: `ws://host:port`.
        passes: of `heavy_jpeg`.
        key: the API key; None where there are none.
    """
    frames = [heavy_jpeg(passes=passes)] * FRAMES_MAX
    while True:
        try:
            async with (
                connect(url, mode="video", key=key) as session,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(_read, session)
                while session.raw.can_append:
                    await session.append(pcm(1), frames)
                    await anyio.sleep(1)
        except* (ClientError, ProtocolError):
            pass
        await anyio.sleep(1)


async def ask_of_heavy_pictures(url: str, *, passes: int = 3, key: str | None = None) -> None:
    """Be a chat that asks about five heavy pictures again and again; runs until cancelled.

    Args:
        url: `ws://host:port`.
        passes: of `heavy_jpeg`.
        key: the API key; None where there are none.
    """
    pictures = [ImagePart(data=heavy_jpeg(passes=passes))] * IMAGES
    while True:
        with suppress(ClientError, ProtocolError):
            async with connect(url, mode="chat", key=key) as session:
                while True:
                    await session.answer([message("user", "what is this?", *pictures)])
        await anyio.sleep(1)


async def _read(session: DuplexSession) -> None:
    async for _ in session:
        pass
