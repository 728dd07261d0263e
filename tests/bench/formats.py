"""Other formats for a session, to compare with `recording`: one simpler, two well known.

Each gets the log's records, a unit at a time, and has written them when it returns.

| format | keeps |
|---|---|
| `json_lines` | each record as a line of JSON, base64 for bytes; a unit's lines are a zstd frame |
| `mcap` | each record as a message; decoded base64 in messages of their own |
| `wav` | both voices as 16-bit WAV, pictures as JPEG files in one, all else as lines of JSON |

In MCAP a unit is a flushed zstd chunk with each blob once; with base64 it would be larger. zstd has
the log's level. `wav` loses the bits of float samples below 16. `json_lines` is the baseline: it
has no blocks, checksums or chain.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
import orjson
import pybase64
import soundfile
import zstandard
from mcap.well_known import MessageEncoding
from mcap.writer import Writer

from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from recorder.format.encoding import extract
from recorder.format.format import Record, Value

FormatName = Literal["json_lines", "mcap", "wav"]
ZSTD_LEVEL: Final = 3
CHUNK_BYTES_MAX: Final = 1 << 30
"""Of MCAP: only a flush closes a chunk."""
PCM16_MAX: Final = 32_767
JPEG_START: Final = b"\xff\xd8"
JSON_MAX: Final = 200
"""Characters: a shorter text has no base64 in it."""


class UnitFormat(Protocol):
    """Writes a session's records by unit; `plain_bytes` counts them before compression."""

    name: FormatName
    keeps_every_byte: bool
    plain_bytes: int

    def write(self, records: Sequence[Record]) -> None:
        """Write a unit's records; the operating system has them when this returns."""

    def file_bytes(self) -> int:
        """Return the current size of all files."""

    def close(self) -> None:
        """Close the files."""


class JsonLines:
    """JSON with base64, compressed."""

    name: FormatName = "json_lines"
    keeps_every_byte = True

    def __init__(self, folder: Path) -> None:
        self.plain_bytes = 0
        self._file = (folder / "session.jsonl.zst").open("wb", buffering=0)
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def write(self, records: Sequence[Record]) -> None:
        """Write a unit's records."""
        lines = b"".join(_line(record, record.fields) for record in records)
        self.plain_bytes += len(lines)
        self._file.write(self._compressor.compress(lines))

    def file_bytes(self) -> int:
        """Return the file's size."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Mcap:
    """Messages in chunks."""

    name: FormatName = "mcap"
    keeps_every_byte = True

    def __init__(self, folder: Path) -> None:
        self.plain_bytes = 0
        self._file = (folder / "session.mcap").open("wb")
        self._writer = Writer(self._file, chunk_size=CHUNK_BYTES_MAX)
        self._writer.start()
        self._records = self._writer.register_channel("/records", MessageEncoding.JSON, 0)
        self._blobs = self._writer.register_channel("/blobs", "", 0)

    def write(self, records: Sequence[Record]) -> None:
        """Write a unit's records."""
        known: dict[bytes, int] = {}
        for record in records:
            blobs: list[bytes] = []
            self._add(self._records, record, _line(record, _taken_apart(record.fields, blobs)))
            for blob in blobs:
                if known.setdefault(blob, record.seq) == record.seq:
                    self._add(self._blobs, record, blob)
        self._writer.flush()  # type: ignore[no-untyped-call]

    def _add(self, channel: int, record: Record, data: bytes) -> None:
        self.plain_bytes += len(data)
        self._writer.add_message(channel, record.at_ns, data, record.at_ns, record.seq)

    def file_bytes(self) -> int:
        """Return the file's size."""
        return self._file.tell()

    def close(self) -> None:
        """Write the index, and close the file."""
        self._writer.finish()  # type: ignore[no-untyped-call]
        self._file.close()


class Wav:
    """Sound for any player, and the other records separately."""

    name: FormatName = "wav"
    keeps_every_byte = False

    def __init__(self, folder: Path) -> None:
        self.plain_bytes = 0
        self._paths = [folder / name for name in ("user.wav", "model.wav", "jpeg", "jsonl")]
        self._voices = [
            soundfile.SoundFile(path, "w", rate_hz, 1, subtype="PCM_16", format="WAV")
            for path, rate_hz in zip(self._paths, (INPUT_RATE_HZ, OUTPUT_RATE_HZ), strict=False)
        ]
        self._pictures, self._lines = (path.open("wb", buffering=0) for path in self._paths[2:])

    def write(self, records: Sequence[Record]) -> None:
        """Write a unit's records."""
        for record in records:
            blobs: list[bytes] = []
            fields = _taken_apart(record.fields, blobs)
            if record.kind != "tx":  # the model's result has it already
                for blob in blobs:
                    self._keep(record, blob)
            self._lines.write(_line(record, fields))
        for voice in self._voices:
            voice.flush()

    def _keep(self, record: Record, blob: bytes) -> None:
        if blob.startswith(JPEG_START):
            self._pictures.write(blob)
        else:
            samples = np.frombuffer(blob, "<f4").clip(-1, 1)
            voice = self._voices[0 if record.kind == "rx" else 1]
            voice.write(np.rint(samples * PCM16_MAX).astype(np.int16))

    def file_bytes(self) -> int:
        """Return the total size of the files."""
        return sum(os.stat(path).st_size for path in self._paths)

    def close(self) -> None:
        """Close the files."""
        for file in (*self._voices, self._pictures, self._lines):
            file.close()


def _taken_apart(value: Value, blobs: list[bytes]) -> Value:
    """Replace bytes, and base64 in texts, by their number among `blobs`."""
    match value:
        case bytes():
            blobs.append(value)
            return len(blobs) - 1
        case str() if len(value) > JSON_MAX:
            return [
                _taken_apart(piece, blobs) if isinstance(piece, bytes) else str(piece)
                for piece in extract(value)
            ]
        case dict():
            return {key: _taken_apart(item, blobs) for key, item in value.items()}
        case list() | tuple():
            return [_taken_apart(item, blobs) for item in value]
    return value


def _line(record: Record, fields: Value) -> bytes:
    body = {"kind": record.kind, "seq": record.seq, "at_ns": record.at_ns, "fields": fields}
    return orjson.dumps(body, default=_base64, option=orjson.OPT_APPEND_NEWLINE)


def _base64(value: object) -> str:
    assert isinstance(value, bytes)
    return pybase64.b64encode(value).decode("ascii")
