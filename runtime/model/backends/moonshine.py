"""Moonshine: a small model that transcribes English speech, on any CPU (`--transcriber moonshine`).

The wheel of the package `moonshine-voice` (extra `antiphon[words]`) holds the weights: nothing is
downloaded.

- The model reads a whole segment at once, so more of an utterance means to read it again, from its
  beginning. Words that two readings in a row agree on are settled, and given: what was given is
  never taken back. The last word of a reading may be cut in two, so it is not settled. The end of
  the utterance settles the rest.
- A segment is read again once it is a quarter longer, so that reading an utterance costs a few
  times its length, and not its square. A long one is cut at its quietest moment.
- All sessions share one thread, of low priority. Each waits for one reading of its own at most, and
  readings that could be left out are, while others wait.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, Final

import anyio
import numpy as np

from protocol.values import model as md
from protocol.values.limits import MS_PER_S

from .base import BackendError, BackendInfo, BackendRefused, BackendSession

PACKAGE: Final = "moonshine-voice"
MODEL: Final = "tiny-en"
SLOTS: Final = 8
SEGMENT_S: Final = 12
"""A reading of it takes half a second; the model was trained on segments of up to 30 seconds."""
TAIL_MS: Final = 1500
QUIET_MS: Final = 300
"""A segment is cut in the quietest such part of its tail. An utterance that ended has been quiet
for longer, and the next one may have begun in its last second."""
STEP_MS: Final = 20
LOUDER: Final = 4
"""Times the power of the quiet, above which something follows it."""
UTTERANCE_S_MAX: Final = 3600
NICE: Final = 10
"""Of the model's thread: an answer is more urgent than the words of the user."""
NS_PER_US: Final = 1000
_HEADER: Final = 20_000
"""The version of the library's interface, as its own Python names it."""


def _give_way() -> None:
    """Let the event loop and the session's model go first, where a thread can."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def plain(word: str) -> str:
    """Return a word's letters and digits, in lower case: what two readings must agree on."""
    return "".join(filter(str.isalnum, word.lower()))


class Moonshine:
    """The model, which all sessions share; `ModuleNotFoundError` if it is not installed."""

    def __init__(self, slots: int | None) -> None:
        os.environ.setdefault("MOONSHINE_ORT_SINGLE_THREAD", "1")  # more take twice as much time
        from moonshine_voice import ModelArch, get_model_path
        from moonshine_voice.moonshine_api import TranscriberOptionC, TranscriptC, _MoonshineLib

        self.info: Final = BackendInfo(
            name="moonshine",
            modes=("transcription",),
            slots=SLOTS if slots is None else slots,
            context_limit=UTTERANCE_S_MAX,
            sliding_windows=("off",),
            can_rollback=False,
            deterministic=True,
            fingerprint={"backend": "moonshine", "model": MODEL, PACKAGE: version(PACKAGE)},
            speaks=False,
        )
        self._limiter: Final = anyio.CapacityLimiter(1)
        self._thread: Final = ThreadPoolExecutor(1, "moonshine", _give_way)
        self._library: Final[Any] = _MoonshineLib().lib
        self._transcript: Final = TranscriptC
        # What is speech was found before. A copy of the sound would stop the event loop.
        asked = {b"vad_threshold": b"0", b"return_audio_data": b"false"}
        options = (TranscriberOptionC * len(asked))(
            *(TranscriberOptionC(*it) for it in asked.items())
        )
        folder, kind = os.fsencode(get_model_path(MODEL)), ModelArch.TINY.value
        self._handle: Final[int] = self._library.moonshine_load_transcriber_from_files(
            folder, kind, options, len(options), _HEADER
        )
        if self._handle < 0:
            raise ValueError(f"{PACKAGE} cannot load {MODEL}: {self._error(self._handle)}")

    @property
    def is_busy(self) -> bool:
        """Whether a reading is in progress."""
        return self._limiter.borrowed_tokens > 0

    async def open(self, opening: md.Opening, *, slot: int) -> BackendSession:  # noqa: ARG002
        """Refuse: it transcribes, and does not answer."""
        raise BackendRefused("moonshine transcribes only")

    async def transcribe(self, *, slot: int) -> MoonshineTranscript:  # noqa: ARG002
        """Begin a transcription."""
        return MoonshineTranscript(self)

    async def read(self, pcm: bytes) -> list[str]:
        """Transcribe a segment of sound, in the model's thread; `BackendError`."""
        samples = np.frombuffer(pcm, "<f4").astype(np.float32)
        async with self._limiter:
            reading = self._thread.submit(self._read, samples)
            return (await anyio.to_thread.run_sync(reading.result)).split()

    async def aclose(self) -> None:
        """Free the model."""
        self._thread.submit(self._library.moonshine_free_transcriber, self._handle)
        await anyio.to_thread.run_sync(self._thread.shutdown)

    def _read(self, samples: np.ndarray[Any, Any]) -> str:
        found = ctypes.POINTER(self._transcript)()
        error = self._library.moonshine_transcribe_without_streaming(
            self._handle,
            samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            len(samples),
            md.INPUT_RATE_HZ,
            0,
            ctypes.byref(found),
        )
        if error < 0:
            raise BackendError(f"moonshine: {self._error(error)}")
        lines = [found.contents.lines[it].text for it in range(found.contents.line_count)]
        return b" ".join(ctypes.string_at(text) for text in lines if text).decode(errors="ignore")

    def _error(self, code: int) -> str:
        text: bytes | None = self._library.moonshine_error_to_string(code)
        return (text or b"").decode(errors="ignore") or f"error {code}"


class MoonshineTranscript:
    """One session's utterance: its open segment, and the words of it that are given."""

    def __init__(self, owner: Moonshine) -> None:
        self._owner: Final = owner
        self._is_first = True
        self._rest: bytes | bytearray = b""
        self._due_s = 1
        self._begin(b"")

    async def run(self, call: md.Chunk, /, cut: md.Cut | None = None) -> md.ChunkResult:  # noqa: ARG002
        """Take a second of sound, and give the words that are settled."""
        began_ns = time.monotonic_ns()
        if call.index == 0:
            self._is_first = True
            self._begin(self._rest)
        self._rest = b""
        self._sound += call.pcm
        size_s = len(self._sound) // md.UNIT_BYTES
        ends = call.is_last or size_s >= SEGMENT_S
        words: list[str] = []
        if ends or (size_s >= self._due_s and not self._owner.is_busy):
            sound, rest = self._cut(is_last=call.is_last) if ends else (self._sound, b"")
            words = self._settle(await self._owner.read(bytes(sound)), ends=ends)
            self._due_s = size_s + -(-size_s // 4)
            if call.is_last:
                self._rest = rest
            elif ends:
                self._begin(rest)
        text = " ".join(words)
        lead = " " if words and not self._is_first else ""
        self._is_first = self._is_first and not words
        took_us = (time.monotonic_ns() - began_ns) // NS_PER_US
        return md.ChunkResult(
            utterance=call.utterance,
            index=call.index,
            text=lead + text,
            token_ids=(),
            reason="stop",
            prompt_tokens=1,
            generated_tokens=len(words),
            kv_length=call.index + 1,
            input_hash=blake2b(call.pcm, digest_size=16).hexdigest(),
            costs=md.Costs(generate_us=took_us, wall_us=took_us),
        )

    async def release(self) -> None:
        """Forget the sound."""
        self._begin(b"")

    def _begin(self, sound: bytes | bytearray) -> None:
        """Begin a segment with the sound that the last one left."""
        self._sound = bytearray(sound)
        self._last: list[str] = []
        self._given: list[str] = []
        self._due_s = 1

    def _settle(self, words: list[str], *, ends: bool) -> list[str]:
        """Return the words of a new reading that are settled now, and were not given."""
        read = [plain(word) for word in words]
        count = len(words) if ends else min(_agreed(read, self._last), len(words) - 1)
        new = words[_after(self._given, read) : count]
        self._given += map(plain, new)
        self._last = read
        return new

    def _cut(self, *, is_last: bool) -> tuple[bytearray, bytearray]:
        """Cut the segment in the quiet; the rest is empty if that is the end of an utterance."""
        size = md.INPUT_RATE_HZ * STEP_MS // MS_PER_S
        steps = min(TAIL_MS // STEP_MS, len(self._sound) // (size * md.SAMPLE_BYTES))
        tail = np.frombuffer(self._sound[-steps * size * md.SAMPLE_BYTES :], "<f4").reshape(
            steps, size
        )
        powers = np.square(tail).sum(axis=1)
        width = QUIET_MS // STEP_MS
        windows = np.convolve(powers, np.ones(width), "valid")
        at = int(np.argmin(windows)) + width // 2
        end = len(self._sound) - (steps - at) * size * md.SAMPLE_BYTES
        follows = not is_last or powers[at:].mean() > LOUDER * windows.min() / width
        return self._sound[:end], self._sound[end:] if follows else bytearray()


def _agreed(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the words with which both begin."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _after(given: Sequence[str], read: Sequence[str]) -> int:
    """Find where a reading goes on after the words that were given, which it may have otherwise."""
    count = len(given)
    if not given or list(read[:count]) == list(given):
        return count
    near = sorted(range(count - 2, count + 2), key=lambda at: abs(at - count + 1))
    found = (at + 1 for at in near if 0 <= at < len(read) and read[at] == given[-1])
    return next(found, count)
