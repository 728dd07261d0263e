"""What the clients share: sound to say, at its pace, and what they report.

It stands alone: each client runs in an environment of its own, with its package and numpy.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

RATE_HZ: Final = 24_000
PIECE_S: Final = 0.02
QUICKLY: Final = 3.0
"""Times as fast as speech, where nothing is measured."""
SILENCE_S: Final = 8.0
WAIT_S: Final = 12.0
BYTES_A_SECOND: Final = 2 * RATE_HZ

Send = Callable[[bytes], Awaitable[None]]


class Report:
    """What a client heard.

    Attributes:
        events: by name.
        words: of the answer.
        sound_s: seconds of it that are not silent.
        failures: what it was told of errors.
        interrupted_s: from the first sample of an interruption until its client knew; in the Live
            API, which has no word for it, until the model's sound was silence.
    """

    def __init__(self, *, is_live: bool = False) -> None:
        self.is_live = is_live
        self.events: Counter[str] = Counter()
        self.words = ""
        self.sound_s = 0.0
        self.failures: list[str] = []
        self.interrupted_s: float | None = None
        self.speaks = asyncio.Event()
        self._spoke_s: float | None = None

    def heard(self, pcm16: bytes) -> None:
        """Take sound of the server."""
        if any(pcm16):
            self.sound_s += len(pcm16) / BYTES_A_SECOND
            self.speaks.set()
        elif self.is_live:
            self.interrupted()

    def interrupted(self) -> None:
        """Note that the client knows of the interruption."""
        if self._spoke_s is not None and self.interrupted_s is None:
            self.interrupted_s = time.monotonic() - self._spoke_s

    async def say(self, send: Send, sound: bytes, pace: float) -> None:
        """Say sound in pieces."""
        size = int(BYTES_A_SECOND * PIECE_S)
        for at in range(0, len(sound), size):
            await send(sound[at : at + size].ljust(size, b"\0"))
            await asyncio.sleep(PIECE_S / pace)

    async def ask(self, send: Send, question: bytes) -> None:
        """Ask a question, and be quiet until it is answered."""
        silence = bytes(int(BYTES_A_SECOND * SILENCE_S))
        await self.say(send, question + silence, QUICKLY)
        await asyncio.sleep(2.0)

    async def interrupt(self, send: Send, question: bytes) -> None:
        """Wait until the model speaks, and speak as well."""
        async with asyncio.timeout(WAIT_S):
            while not self.speaks.is_set():
                await self.say(send, bytes(BYTES_A_SECOND // 10), 1.0)
        self._spoke_s = time.monotonic()
        await self.say(send, question[: 2 * BYTES_A_SECOND], 1.0)
        await self.say(send, bytes(BYTES_A_SECOND), 1.0)

    async def act(self, scene: str, send: Send, question: bytes) -> None:
        """Play a scene."""
        await (self.interrupt if scene.startswith("interrupt") else self.ask)(send, question)

    def show(self) -> None:
        """Print it as a line of JSON."""
        print(json.dumps({name: it for name, it in vars(self).items() if _is_shown(name)}))


def _is_shown(name: str) -> bool:
    return not name.startswith("_") and name not in ("speaks", "is_live")


def arguments() -> tuple[str, str, str, bytes]:
    """The scene, the server's base address, the model and the question: PCM16, 24 kHz."""
    scene, base, model, question = sys.argv[1:5]
    return scene, base, model, Path(question).read_bytes()


def spoken(data: Any) -> bytes:
    """Bytes of whatever a package hands over as sound."""
    return bytes(data)
