"""Sessions for the tests of `antiphon export`: what is said and shown is known to the sample."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import simplejpeg
import soundfile

from protocol.values import events as ev
from recorder.format.format import Record
from recorder.read.reader import LogReader
from replay.export.formats import Format, export
from replay.export.timeline import Moment, Timeline
from tests.replay.test_logs import HEAD, Scene
from tests.sessions.in_memory import base64

GOLDEN: Final = Path(__file__).parents[2] / "fixtures" / "logs"
VIDEO: Final = GOLDEN / "v1-realtime-video.session.zst"
AUDIO: Final = GOLDEN / "v1-duplex-v1-audio.session.zst"
CHAT: Final = GOLDEN / "v1-realtime-chat.session.zst"
ASKED_ALOUD: Final = GOLDEN / "v1-legacy-chat.session.zst"
PAUSED: Final = GOLDEN / "v1-legacy-duplex.session.zst"
MS: Final = 1_000_000
SECOND: Final = 16_000
"""Samples of the user."""


def impulses(samples: int, *at: int) -> bytes:
    """Silence with single samples of 0.5 in it: float32 LE."""
    pcm = np.zeros(samples, "<f4")
    pcm[list(at)] = 0.5
    return pcm.tobytes()


def jpeg(level: int, width: int = 64, height: int = 48) -> bytes:
    """A grey picture."""
    return bytes(simplejpeg.encode_jpeg(np.full((height, width, 3), level, np.uint8)))


class Talk(Scene):
    """A session whose times, sound and words a test decides."""

    def at(self, at_ns: int) -> None:
        """Go on to a time."""
        assert at_ns >= self.now_ns
        self.now_ns = at_ns

    def say(self, pcm: bytes, *jpegs: bytes, **fields: object) -> None:
        """Let the client send sound, and show pictures; they are decoded at once."""
        shown = {"video_frames": [base64(one) for one in jpegs]} if jpegs else {}
        body = {"type": "input.append", "input": {"audio": base64(pcm), **shown, **fields}}
        self.send(json.dumps(body))
        for _ in jpegs:
            self.answer()

    def reply(self, index: int, pcm: bytes = b"", text: str = "", *, ends: bool = False) -> None:
        """Let the model speak in the unit that runs, or listen; then it is finalized."""
        result = attrs.evolve(
            self.result(index, 0),
            is_listen=not pcm and not text,
            pcm=pcm,
            text=text,
            end_of_turn=ends,
        )
        self._asked.pop(0)  # the scene would make up another
        self.post(ev.UnitDone, result=result)
        self.answer()


def moments(records: list[Record], head: dict[str, Any] = HEAD) -> list[Moment]:
    """Tell what happened in records."""
    return list(Timeline(head, records))


def told(log: Path) -> list[Any]:
    """Tell what happened in a log."""
    with LogReader(log) as reader:
        return list(Timeline(reader.head.fields, reader))


def exported(log: Path, to: Format) -> bytes:
    """Export a log into memory."""
    file = io.BytesIO()
    with LogReader(log) as reader:
        export(reader.head.fields, reader, to, file)
    return file.getvalue()


def read_stereo(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Read a WAV of 48 kHz: float32, shape (frames, 2)."""
    stereo, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert rate_hz == 48_000
    return stereo


def peaks(channel: np.ndarray[Any, np.dtype[np.float32]]) -> list[int]:
    """Where a channel has the impulses of `impulses`."""
    is_peak = (channel > 0.4) & (channel >= np.roll(channel, 1)) & (channel > np.roll(channel, -1))
    return [int(at) for at in np.flatnonzero(is_peak)]
