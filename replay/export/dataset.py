"""A duplex session for a trainer: each second of it as one sample of a WebDataset shard.

A shard is a tar archive in which the files of a sample follow one another and share the name before
the first dot (https://github.com/webdataset/webdataset). The standard library writes it:

    ID-000003.user.wav   what the model heard: 16 kHz, float32
    ID-000003.0.jpg      the pictures that it saw, in order
    ID-000003.model.wav  what it said: 24 kHz, float32; not of a listen
    ID-000003.json       what it decided, its text, and about which session

Units that failed or were undone are left out. What a redaction took out is left out too, with
the tokens that say it: silence is no sample of speech. A session whose client asked not to be
recorded has no log. Equal logs give equal bytes: files have no times or owner.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_MS
from protocol.values.messages import ServerMessage
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES, Unit, UnitResult
from protocol.values.modes import OF_MODE
from protocol.values.requests import ClientMessage

from ..rerun.environment import model_of
from ..shared.fields import below, removed_in, typed
from ..story.reading import Passage
from .moments import NoDatasetError
from .timeline import Timeline

USER: Final = ("audio", "user")
PICTURES: Final = ("video", "user")
VOICE: Final = ("audio", "model")
TEXT: Final = ("text", "model")
WAVE_FLOAT: Final = 3
"""The format tag of IEEE floats in a WAV file."""


def write_dataset(timeline: Timeline, file: BinaryIO) -> None:
    """Write the units of a session; `NoDatasetError`: it has none, or none that can be read."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as shard:
        units = _Units(timeline, shard)
        timeline.tell(units.watch)
        units.finish()


@attrs.define
class _Sample:
    """A unit, and its result once it is there."""

    unit: Unit
    at_ns: int
    result: UnitResult | None = None


class _Units:
    def __init__(self, timeline: Timeline, shard: tarfile.TarFile) -> None:
        self._timeline: Final = timeline
        self._shard: Final = shard
        self._lost: Final = removed_in(timeline.head)
        self._name = typed(timeline.head, "recording_id", str) or "session"
        self._sample: _Sample | None = None
        self._count = 0

    def watch(
        self, passage: Passage, _request: ClientMessage | None, _sent: Sequence[ServerMessage]
    ) -> None:
        """Take a record; a unit is written when the next one starts."""
        match passage.event, self._sample:
            case ev.UnitDone(result=result), _Sample(unit=unit) if result.index == unit.index:
                self._sample.result = result
            case ev.RollbackDone(index=index), _Sample(unit=unit) if index == unit.index:
                self._sample = None
        for effect in () if passage.step is None else passage.step.effects:
            if isinstance(effect, ef.StartUnit):
                self._write()
                self._sample = _Sample(effect.unit, passage.record.at_ns)

    def finish(self) -> None:
        """Write the last unit."""
        self._write()
        opened = self._timeline.story.opened
        if opened is not None and OF_MODE[opened.mode].work != "unit":
            raise NoDatasetError(f"mode {opened.mode}: only duplex sessions have units")
        if not self._count:
            raise NoDatasetError("no unit in it was answered, or its events cannot be run again")

    def _write(self) -> None:
        sample, self._sample = self._sample, None
        if sample is None or sample.result is None:
            return
        key = f"{self._name}-{sample.unit.index:06}"
        for ending, data in self._files(sample, sample.result):
            info = tarfile.TarInfo(f"{key}.{ending}")
            info.size = len(data)
            self._shard.addfile(info, io.BytesIO(data))
        self._count += 1

    def _files(self, sample: _Sample, result: UnitResult) -> Iterator[tuple[str, bytes]]:
        unit, lost = sample.unit, self._lost
        if USER not in lost:
            yield "user.wav", _wav(unit.pcm, INPUT_RATE_HZ)
        if PICTURES not in lost:
            for number, jpeg in enumerate(unit.frames):
                yield f"{number}.jpg", jpeg
        if VOICE not in lost and result.pcm and not result.is_listen:
            yield "model.wav", _wav(result.pcm, OUTPUT_RATE_HZ)
        is_said = TEXT not in lost
        body = {
            "recording_id": self._name,
            "model": model_of(self._timeline.head),
            "mode": typed(below(self._timeline.head, "config"), "mode", str),
            "unit": unit.index,
            "at_ms": round(sample.at_ns / NS_PER_MS, 3),
            "is_listen": result.is_listen,
            "forced": unit.force_listen,
            "cut": result.cut is not None,
            "end_of_turn": result.end_of_turn,
            **({"text": result.text, "decided_ids": [*result.decided_ids]} if is_said else {}),
            **({"codec_ids": [*result.codec_ids]} if VOICE not in lost else {}),
            "lost": sorted(" ".join((side, kind)) for kind, side in lost),
        }
        yield "json", json.dumps(body, sort_keys=True).encode()


def _wav(pcm: bytes, rate_hz: int) -> bytes:
    """Put a header before float32 LE mono; a library's has the time in it."""
    form = struct.pack("<HHIIHH", WAVE_FLOAT, 1, rate_hz, rate_hz * SAMPLE_BYTES, SAMPLE_BYTES, 32)
    count = struct.pack("<I", len(pcm) // SAMPLE_BYTES)
    chunks = b"".join(
        name + struct.pack("<I", len(data)) + data
        for name, data in ((b"fmt ", form), (b"fact", count), (b"data", pcm))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
