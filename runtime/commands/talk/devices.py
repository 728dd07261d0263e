"""The microphone and the loudspeaker of `antiphon talk --mic`, by sounddevice (PortAudio).

PortAudio calls from a thread of its own, so both directions have a buffer with a lock. Sound that
waits in the microphone's longer than `HEARD_S_MAX` is dropped: a conversation is about now. There
is no echo cancellation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Self

import attrs

from protocol.values.messages import Interrupted, Listen, ServerMessage, Speech
from protocol.values.model import (
    INPUT_RATE_HZ,
    OUTPUT_RATE_HZ,
    SAMPLE_BYTES,
    UNIT_BYTES,
)

from ...client.resuming import Reconnected, Reconnecting
from ...client.terminal import UnusableError
from .session import Observer
from .tally import Happening

BLOCK_MS: Final = 20
"""Of both directions: short, as it adds to the delay of an answer."""
HEARD_S_MAX: Final = 3
"""A server that accepts nothing for longer has lost what was said meanwhile."""
MISSING: Final = "--mic needs sounddevice: pip install 'antiphon[mic]'"


class Devices:
    """The default microphone (16 kHz mono) and loudspeaker (24 kHz mono), while it is entered."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._heard = bytearray()
        self._played = bytearray()
        self._streams: list[Any] = []
        self._amid_turn = False

    def __enter__(self) -> Self:
        """Open both; `UnusableError` without sounddevice, PortAudio or a device."""
        sound = _sounddevice()
        try:
            self._open(sound.RawInputStream, INPUT_RATE_HZ, self._hear)
            self._open(sound.RawOutputStream, OUTPUT_RATE_HZ, self._sound)
        except (sound.PortAudioError, ValueError) as error:
            self.__exit__()
            raise UnusableError(f"--mic: no microphone or loudspeaker: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Close both."""
        while self._streams:
            self._streams.pop().close()

    def _open(self, kind: Callable[..., Any], rate_hz: int, callback: Callable[..., None]) -> None:
        stream = kind(
            samplerate=rate_hz,
            channels=1,
            dtype="float32",
            blocksize=rate_hz * BLOCK_MS // 1000,
            callback=callback,
        )
        self._streams.append(stream)
        stream.start()

    # -- the microphone ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was heard so far."""
        with self._lock:
            self._heard.clear()

    def second(self) -> bytes | None:
        """Take the next second, float32 LE, 16 kHz mono; None before it is over."""
        with self._lock:
            if len(self._heard) < UNIT_BYTES:
                return None
            unit = bytes(self._heard[:UNIT_BYTES])
            del self._heard[:UNIT_BYTES]
            return unit

    def _hear(self, data: Any, *_: object) -> None:
        with self._lock:
            self._heard += bytes(data)
            del self._heard[: max(0, len(self._heard) - HEARD_S_MAX * UNIT_BYTES)]

    # -- the loudspeaker --------------------------------------------------------------------------

    def play(self, message: ServerMessage) -> None:
        """Play the model's sound; a listen during a turn, or an interruption, stops it."""
        match message:
            case Speech(pcm=pcm, end_of_turn=is_end):
                self._amid_turn = not is_end
                with self._lock:
                    self._played += pcm
            case Interrupted():
                self._stop()
            case Listen() if self._amid_turn:
                self._stop()

    def _stop(self) -> None:
        self._amid_turn = False
        with self._lock:
            self._played.clear()

    def _sound(self, data: Any, frames: int, *_: object) -> None:
        wanted = frames * SAMPLE_BYTES
        with self._lock:
            piece = bytes(self._played[:wanted])
            del self._played[:wanted]
        data[:] = piece.ljust(wanted, b"\0")


@attrs.frozen
class Aloud(Observer):
    """Plays what an observer is told, and tells it."""

    _observer: Observer
    _devices: Devices

    def sent(self, unit: int, at_s: float, *, has_sound: bool) -> None:
        """Pass it on."""
        self._observer.sent(unit, at_s, has_sound=has_sound)

    def heard(self, happening: Happening) -> None:
        """Play its sound, and pass it on."""
        self._devices.play(happening.message)
        self._observer.heard(happening)

    def connects(self, change: Reconnecting | Reconnected, at_s: float) -> None:
        """Pass it on."""
        self._observer.connects(change, at_s)


def _sounddevice() -> Any:
    try:
        return import_module("sounddevice")
    except ImportError as error:
        raise UnusableError(MISSING) from error
    except OSError as error:  # sounddevice is there, and PortAudio is not
        text = f"--mic: {error}: install PortAudio (on Debian: apt install libportaudio2)"
        raise UnusableError(text) from error
