"""Bombs: structures in a log that once cost, or might cost, far more than their bytes.

Each is given the `seq` that comes next and a scale from 1 to 64, and makes blocks or other bytes
that follow the first two blocks of a log. At scale 64 nothing in the format allows more of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Final

import numpy as np
import zstandard

from recorder.format.encoding import encode_flac
from recorder.format.format import (
    HEADER_BYTES_MAX,
    HEADER_VALUES_MAX,
    MARK,
    MIB,
    PAYLOAD_BYTES_MAX,
    RECORDS_MAX,
    SHARED_BYTES_MAX,
    BlockHeader,
    BlockSizes,
    pack_header,
)
from tests.forged.logs import Part, framed, head, record, seal, second

Bomb = Callable[[int, int], list[Part]]
"""Makes parts from a `seq` on, of a scale from 1 to 64."""


def _json_of(values: bytes) -> bytes:
    start = b'{"at_ns":0,"blobs":[],"fields":{"a":['
    return start + values + b'0]},"kind":"mark","seq":1,"version":1}'


def json_bomb(values: bytes, *, size: int = 64 * MIB) -> Bomb:
    """One record whose header is as long as a record may be."""

    def make(seq: int, scale: int) -> list[Part]:
        text = _json_of(values * (size // 64 * scale // len(values)))
        return [Part(payload=framed(text), first_seq=seq)]

    return make


def dense_bomb(values: bytes) -> Bomb:
    """Many blocks, each full of JSON up to every bound."""

    def make(seq: int, scale: int) -> list[Part]:
        text = framed(_json_of(values * (120_000 // len(values))))
        each = SHARED_BYTES_MAX // 2 // len(text)
        block = text * each
        return [
            Part(payload=block, n_records=each, first_seq=seq + number * each)
            for number in range(scale)
        ]

    return make


def count_bomb(text: bytes, each: int) -> Bomb:
    """Blocks of as many records as there can be, all alike."""

    def make(seq: int, scale: int) -> list[Part]:
        block = framed(text) * each
        return [
            Part(payload=block, n_records=each, first_seq=seq + number * each)
            for number in range(scale)
        ]

    return make


def full_header_bomb(seq: int, scale: int) -> list[Part]:
    """Headers of as many bytes and values as a reader takes."""
    values = b"[]," * (HEADER_VALUES_MAX // 2 - 20)
    text = _json_of(values + b'"' + b"x" * (HEADER_BYTES_MAX - len(values) - 200) + b'",')
    return [Part(payload=framed(text), first_seq=seq + number) for number in range(scale)]


def silence_bomb(seq: int, scale: int) -> list[Part]:
    """Blobs of nothing, each as large as a record may be, in two codecs."""
    stored = bytes(1 + 20 * MIB)
    blobs = [[2, 2 * (len(stored) - 1), len(stored)]]
    return [
        Part(
            payload=record("unit", seq + number, {"a": {"$blob": 0}}, blobs=blobs, area=stored),
            first_seq=seq + number,
        )
        for number in range(scale)
    ]


def text_bomb(seq: int, scale: int) -> list[Part]:
    """Frames of text that is wide in memory, or names one blob very often."""
    wide = ("é" * (3 * MIB) + "😀").encode()
    again = {"frame": {"$text": [*[[0]] * scale, 1]}, "type": "FrameReceived"}
    blobs = [[0, len(wide), len(wide)], [0, MIB, MIB]]
    return [
        Part(
            payload=record("rx", seq + number, again, blobs=blobs, area=wide + bytes(MIB)),
            first_seq=seq + number,
        )
        for number in range(3)
    ]


def reference_bomb(seq: int, scale: int) -> list[Part]:
    """Small records that all name one large blob of the record before them."""
    blob = bytes(8 * MIB)
    first = record("unit", seq, {"a": {"$blob": 0}}, blobs=[[0, len(blob), len(blob)]], area=blob)
    parts = [Part(payload=first, first_seq=seq)]
    for number in range(1, 200 * scale):
        text = record("unit", seq + number, {"a": {"$blob": 0}}, blobs=[[seq, 0]])
        parts.append(Part(payload=text, first_seq=seq + number))
    return parts


def shared_reference_bomb(seq: int, scale: int) -> list[Part]:
    """The same within one block."""
    blob = bytes(100_000)
    records = [record("unit", seq, {}, blobs=[[0, len(blob), len(blob)]], area=blob)]
    each = 150 * scale
    for number in range(1, each):
        fields = {"a": [{"$blob": 0}, {"$blob": 1}]}
        records.append(record("unit", seq + number, fields, blobs=[[seq, 0]] * 2))
    return [Part(payload=b"".join(records), n_records=each, first_seq=seq)]


def reload_bomb(seq: int, scale: int) -> list[Part]:
    """Blobs of two far blocks by turns, so that neither is ever kept."""
    area = bytes(17 * MIB)
    parts = [
        Part(
            payload=record(
                "unit",
                seq + at,
                {},
                blobs=[[0, 4, 4], [0, len(area), len(area)]],
                area=b"abcd" + area,
            ),
            first_seq=seq + at,
        )
        for at in (0, 1)
    ]
    for number in range(2, 20 * scale):
        fields = {"a": {"$blob": 0}}
        text = record("unit", seq + number, fields, blobs=[[seq + number % 2, 0]])
        parts.append(Part(payload=text, first_seq=seq + number))
    return parts


def flac_bomb(seq: int, scale: int) -> list[Part]:
    """FLAC of silence, and FLAC that lies about its samples."""
    samples = 1 << 20
    sound = b"\0" + encode_flac(np.zeros(samples, np.int16))
    lie = bytearray(sound)
    lie[22:27] = bytes((sound[22] | 15, *b"\xff\xff\xff\xff"))  # STREAMINFO's total samples
    parts = []
    for number in range(scale):
        stored, length = (bytes(lie), 4 << 34) if number % 3 == 2 else (sound, 4 * samples)
        blobs = [[3, length, len(stored)]]
        fields = {"a": [{"$blob": 0}] * 4}
        parts.append(
            Part(
                payload=record("unit", seq + number, fields, blobs=blobs, area=stored),
                first_seq=seq + number,
                changes={"version": 2},
            )
        )
    return parts


def short_frame_bomb(seq: int, scale: int) -> list[Part]:
    """Headers that claim all that a block may hold, of frames that are cut off or lie."""
    whole = zstandard.ZstdCompressor().compress(bytes(PAYLOAD_BYTES_MAX))
    cut = whole[:-3]
    return [
        Part(payload=bytes(PAYLOAD_BYTES_MAX), raw=cut, first_seq=seq + number)
        for number in range(scale)
    ]


def _sound_header(seq: int, compressed_len: int) -> bytes:
    return pack_header(
        BlockHeader(
            first_seq=seq,
            mono_ns=0,
            n_records=1,
            compressed_len=compressed_len,
            uncompressed_len=100,
            payload_crc=1,
        )
    )


def overlap_bomb(seq: int, scale: int) -> list[Part]:
    """Sound headers one after another, each of a block that would hold all the others."""
    headers = [_sound_header(seq + at, 1 << 20) for at in range(200 * scale)]
    return [Part(raw=b"".join(headers) + bytes(2 * MIB))]


def endless_bomb(seq: int, scale: int) -> list[Part]:
    """The same, of blocks that would not end before the file does."""
    headers = [_sound_header(seq + at, PAYLOAD_BYTES_MAX) for at in range(200 * scale)]
    return [Part(raw=b"".join(headers) + bytes(MIB))]


def mark_bomb(_seq: int, scale: int) -> list[Part]:
    """Nothing but marks, of which none starts a header."""
    return [Part(raw=MARK * (1000 * scale))]


def gap_bomb(seq: int, scale: int) -> list[Part]:
    """Blocks with large gaps in `seq` between them, up to the last number there is."""
    parts = []
    for number in range(scale):
        at = seq + (number + 1) * (1 << 19)
        parts.append(Part(payload=record("mark", at, {"text": "x"}), first_seq=at))
    last = (1 << 63) - 2
    return [*parts, Part(payload=record("mark", last, {}), first_seq=last)]


def table_bomb(_seq: int, scale: int) -> list[Part]:
    """Seek tables of any length, sound and not."""
    sizes = BlockSizes()
    for _ in range(1000 * scale):
        sizes.add(1, 1)
    empty = struct.pack("<II", 0x184D2A5E, 0)
    return [Part(raw=sizes.table()), Part(raw=empty * 1000), Part(raw=sizes.table())]


def deep_bomb(seq: int, _scale: int) -> list[Part]:
    """JSON that nests as deep as it is long."""
    text = _json_of(b"[" * 200_000)
    objects = _json_of(b'{"a":' * 900 + b"1" + b"}" * 900 + b",")
    return [Part(payload=framed(it), first_seq=seq + at) for at, it in enumerate((text, objects))]


def number_bomb(seq: int, scale: int) -> list[Part]:
    """Integers as long as Python reads them, in every place of a header."""
    huge = int("9" * 4000)
    changed: list[bytes] = []
    for name in ("seq", "at_ns", "version", "blobs"):
        value = [[huge, huge, huge], [huge, huge]] * (8 * scale) if name == "blobs" else huge
        body = {"at_ns": 0, "blobs": [], "fields": {}, "kind": "mark", "seq": seq, "version": 1}
        changed.append(framed(json.dumps({**body, name: value}).encode()))
    return [Part(payload=b"".join(changed), n_records=len(changed), first_seq=seq)]


def frame_bomb(text: bytes) -> Bomb:
    """Frames of a client that repeat a text, for a replay to parse."""

    def make(seq: int, scale: int) -> list[Part]:
        frame = (
            b'{"type":"input.append","input":[' + text * (MIB // 8 * scale // len(text)) + b"0]}"
        )
        fields = {"type": "FrameReceived", "frame": {"$text": [[0]]}}
        blobs = [[0, len(frame), len(frame)]]
        return [
            Part(
                payload=record("rx", seq + number, fields, blobs=blobs, area=frame),
                first_seq=seq + number,
            )
            for number in range(4)
        ]

    return make


MINIMAL: Final = b'{"at_ns":0,"blobs":[],"fields":{},"kind":"mark","seq":1,"version":1}'
BOMBS: Final[dict[str, Bomb]] = {
    "lists": json_bomb(b"[],"),
    "objects": json_bomb(b'{"a":{}},'),
    "numbers": json_bomb(b"1,"),
    "strings": json_bomb('"é",'.encode()),
    "full headers": full_header_bomb,
    "dense lists": dense_bomb(b"[],"),
    "dense objects": dense_bomb(b'{"a":{}},'),
    "dense blobs": dense_bomb(b'{"$blob":0},'),
    "empty records": count_bomb(b"", RECORDS_MAX),
    "most empty records": count_bomb(b"", PAYLOAD_BYTES_MAX // 64),
    "equal records": count_bomb(MINIMAL, SHARED_BYTES_MAX // 2 // (len(MINIMAL) + 8)),
    "silence": silence_bomb,
    "text": text_bomb,
    "references": reference_bomb,
    "references in a block": shared_reference_bomb,
    "references far back": reload_bomb,
    "flac": flac_bomb,
    "cut frames": short_frame_bomb,
    "overlapping blocks": overlap_bomb,
    "endless blocks": endless_bomb,
    "marks": mark_bomb,
    "gaps": gap_bomb,
    "seek tables": table_bomb,
    "deep": deep_bomb,
    "long numbers": number_bomb,
    "frames of lists": frame_bomb(b"[],"),
    "frames of objects": frame_bomb(b'{"audio":""},'),
}


def bomb(name: str, scale: int) -> bytes:
    """Make a log of the first two blocks and a bomb."""
    return seal([head(), second(), *BOMBS[name](2, scale)])
