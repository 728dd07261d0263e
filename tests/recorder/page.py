"""A reader and a writer of session logs, made from docs/log-format.md and nothing else.

They import no module of ours: what they cannot do, the page does not say. They check no more than
they need, since the logs that they are given are sound.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import soundfile
import zstandard

HEADER: Final = struct.Struct("<II4sBBHQQIIII")
MARK: Final = struct.pack("<II4s", 0x184D2A53, 60, b"ANTL")
BLOCK_BYTES_MAX: Final = 384 << 10
INLINE_CHARS_MAX: Final = 4096


class Entry(NamedTuple):
    """A record, with its bytes and texts in `fields`."""

    kind: str
    seq: int
    at_ns: int
    fields: dict[str, Any]


# -- reading ---------------------------------------------------------------------------------------


def entries(log: bytes) -> Iterator[Entry]:
    """Read the records of a sound log."""
    at, chain, blobs = 0, bytes(16), dict[tuple[int, int], bytes]()
    while log[at : at + 12] == MARK and len(log) >= at + 68:
        head = log[at : at + 68]
        *_, flags, _, first_seq, _, count, size, unpacked_size, crc = HEADER.unpack(head[:48])
        packed = log[at + 68 : at + 68 + size]
        if len(packed) < size:
            return  # it is being written
        assert zlib.crc32(head[:64]) == int.from_bytes(head[64:], "little")
        assert zlib.crc32(packed) == crc
        chain = hashlib.blake2b(chain + head[:48] + packed, digest_size=16).digest()
        assert chain == head[48:64]
        payload = zstandard.ZstdDecompressor().decompress(packed)
        assert len(payload) == unpacked_size
        if flags & 2:
            payload = payload.replace(MARK[:11] + b"\0", MARK[:11])
        records = list(_framed(payload))
        assert len(records) == count
        for seq, record in enumerate(records[flags & 1 :], first_seq):
            entry = _entry(*record, blobs)
            assert entry.seq == seq
            yield entry
        at += 68 + size


def _framed(payload: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    at = 0
    while at < len(payload):
        header_len, blob_len = struct.unpack_from("<II", payload, at)
        header, blobs = at + 8, at + 8 + header_len
        at = blobs + blob_len
        yield json.loads(payload[header:blobs]), payload[blobs:at]


def _entry(header: dict[str, Any], area: bytes, known: dict[tuple[int, int], bytes]) -> Entry:
    at, seq, mine = 0, header["seq"], list[bytes]()
    for index, place in enumerate(header["blobs"]):
        if len(place) == 3:
            codec, length, stored = place
            blob = known[seq, index] = _unpacked(codec, area[at : at + stored])
            assert len(blob) == length
            at += stored
        else:
            blob = known[place[0], place[1]]
            blob = blob[place[2] : place[2] + place[3]] if place[2:] else blob
        mine.append(blob)
    assert header.keys() == {"at_ns", "blobs", "fields", "kind", "seq", "version"}
    assert header["version"] == 1
    return Entry(header["kind"], seq, header["at_ns"], _fields(header["fields"], mine))


def _unpacked(codec: int, stored: bytes) -> bytes:
    if codec == 0:
        return stored
    if codec == 1:
        return np.frombuffer(stored, np.uint8).reshape(4, -1).T.tobytes()
    if codec == 2:
        planes = np.frombuffer(stored[1:], np.uint8).reshape(2, -1)
        samples = np.cumsum(np.frombuffer(planes.T.tobytes(), "<i2"), dtype="<i2")
    else:
        samples, _ = soundfile.read(io.BytesIO(stored[1:]), dtype="int16")
    divisor = np.float32([32768, 32767][stored[0]])
    return (samples.astype("<f4") / divisor).tobytes()


def _fields(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_fields(each, blobs) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$blob": int(at)} if len(value) == 1:
            return blobs[at]
        case {"$wtf8": int(at)} if len(value) == 1:
            return blobs[at].decode("utf-8", "surrogatepass")
        case {"$text": list(pieces)} if len(value) == 1:
            return "".join(_piece(piece, blobs) for piece in pieces)
    return {key.removeprefix("$"): _fields(each, blobs) for key, each in value.items()}


def _piece(piece: Any, blobs: list[bytes]) -> str:
    if isinstance(piece, str):
        return piece
    if isinstance(piece, int):
        return base64.b64encode(blobs[piece]).decode()
    return blobs[piece[0]].decode("utf-8", "surrogatepass")


# -- writing ---------------------------------------------------------------------------------------


def log_of(records: Iterable[Entry]) -> bytes:
    """Write a log; the records end with `fin`, whose own counts are made here."""
    log, chain, blocks, counts = bytearray(), bytes(16), 0, Counter[str]()
    sizes, head = bytearray(), b""
    for run in _runs(records):
        framed = list[bytes]()
        for entry in run:
            fields = entry.fields
            if entry.kind == "fin":
                fields = {**fields, "blocks": blocks, "chain": chain.hex(), "counts": dict(counts)}
            counts[entry.kind] += 1
            framed.append(_record(entry._replace(fields=fields)))
        has_copy = blocks == 1
        head = head or framed[0]
        payload = b"".join([head, *framed] if has_copy else framed)
        flags, packed = has_copy, zstandard.compress(payload)
        if MARK in packed:
            payload = payload.replace(MARK[:11], MARK[:11] + b"\0")
            flags, packed = flags | 2, zstandard.compress(payload)
        start = HEADER.pack(
            *(0x184D2A53, 60, b"ANTL", 1, flags, 0, run[0].seq, run[0].at_ns),
            *(len(framed) + has_copy, len(packed), len(payload), zlib.crc32(packed)),
        )
        chain = hashlib.blake2b(chain + start + packed, digest_size=16).digest()
        block = start + chain + struct.pack("<I", zlib.crc32(start + chain)) + packed
        log += block
        sizes += struct.pack("<IIII", 68, 0, len(packed), len(payload))
        blocks += 1
    footer = struct.pack("<IBI", 2 * blocks, 0, 0x8F92EAB1)
    return bytes(log + struct.pack("<II", 0x184D2A5E, len(sizes) + len(footer)) + sizes + footer)


def _runs(records: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The records of each block: the first and `fin` by themselves."""
    run, run_bytes = list[Entry](), 0
    for entry in records:
        size = len(_record(entry))
        is_apart = entry.kind in ("session", "fin")
        if run and (is_apart or run_bytes + size > BLOCK_BYTES_MAX):
            yield run
            run, run_bytes = [], 0
        run.append(entry)
        run_bytes += size
        if is_apart:
            yield run
            run, run_bytes = [], 0
    if run:
        yield run


def _record(entry: Entry) -> bytes:
    blobs = list[bytes]()
    header = {
        "at_ns": entry.at_ns,
        "blobs": [],
        "fields": _packed(entry.fields, blobs),
        "kind": entry.kind,
        "seq": entry.seq,
        "version": 1,
    }
    header["blobs"] = [[0, len(blob), len(blob)] for blob in blobs]
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    area = b"".join(blobs)
    return struct.pack("<II", len(text), len(area)) + text + area


def _packed(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, bytes):
        blobs.append(value)
        return {"$blob": len(blobs) - 1}
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        has_surrogates = any("\ud800" <= char <= "\udfff" for char in value)
        if len(value) <= INLINE_CHARS_MAX and not has_surrogates:
            return value
        blobs.append(data)
        at = len(blobs) - 1
        return {"$wtf8": at} if len(value) <= INLINE_CHARS_MAX else {"$text": [[at]]}
    if isinstance(value, list):
        return [_packed(each, blobs) for each in value]
    if isinstance(value, dict):
        return {
            "$" + key if key.startswith("$") else key: _packed(each, blobs)
            for key, each in value.items()
        }
    return value


# -- digests ---------------------------------------------------------------------------------------


def digest_of(value: Any) -> str:
    """The digest of a value of nothing but JSON's types and bytes."""
    return hashlib.blake2b(_encoded(value), digest_size=16).hexdigest()


def _encoded(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"NoneType:None;", True: b"bool:True;", False: b"bool:False;"}[value]
    if isinstance(value, int | float):
        return f"{type(value).__name__}:{value!r};".encode()
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(data) + data
    if isinstance(value, bytes):
        return b"b%d:" % len(value) + value
    if isinstance(value, Mapping):
        pairs = b"".join(_encoded(key) + _encoded(value[key]) for key in sorted(value))
        return b"m%d:" % len(value) + pairs
    return b"l%d:" % len(value) + b"".join(map(_encoded, value))
