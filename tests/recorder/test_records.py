"""Records: what is encoded is decoded, for any fields; nothing of a caller's is taken for ours."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from contextlib import nullcontext

import attrs
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.values.events import FrameReceived
from protocol.values.frames import Utf8Text
from recorder.format.encoding import REMEMBERED_BYTES, Framed, RecordEncoder
from recorder.format.format import (
    FRAME_CUT,
    NESTING_MAX,
    RECORD_VERSIONS,
    UPCASTS,
    Expansion,
    Fields,
    FormatError,
    LogMisuse,
    Record,
    RecordInvalid,
    frame_record,
    size_bytes,
    split_records,
)
from recorder.format.mapping import event_record
from recorder.read.reader import StoredRecord, decode, no_record, parse
from tests.recorder.test_samples import pcm, record

KEYS = st.one_of(st.text("ab$é\n", max_size=4), st.sampled_from(["$blob", "$text", "$wtf8", "$$"]))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=()), max_size=10),
    st.binary(max_size=80),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
FIELDS = st.dictionaries(KEYS, VALUES, max_size=5)


def joined(framed: Framed) -> bytes:
    data = b"".join(framed.pieces)
    assert len(data) == framed.framed_bytes
    return data


def write(*records: Record) -> dict[int, StoredRecord]:
    encoder = RecordEncoder()
    stored = {}
    for item in records:
        ((header, area),) = split_records(joined(encoder.encode(item)), 1)
        stored[item.seq] = parse(header, area)
    return stored


def read(stored: dict[int, StoredRecord], seq: int) -> Record:
    return decode(stored[seq], stored.__getitem__, Expansion(int))


def round_trip(fields: Fields, kind: str = "event") -> Fields:
    given = Record(kind=kind, seq=3, at_ns=4, fields=fields)
    found = read(write(given), 3)
    assert (found.kind, found.seq, found.at_ns) == (kind, 3, 4)
    return found.fields


def canonical(value: object) -> str:
    """Tell 1 from 1.0 and True, and 0.0 from -0.0; keys in any order."""
    if isinstance(value, dict):
        return repr({key: canonical(value[key]) for key in sorted(value)})
    return repr([canonical(item) for item in value] if isinstance(value, list) else value)


@given(FIELDS)
@example({"a": {"$blob": 0}, "$blob": b"x", "$$blob": {"$": None}})
@example({"high": "\ud83d", "low": "\ude00", "both": "\ud83d\ude00", "one": "😀"})
@example({"zero": -0.0, "tiny": 5e-324, "big": 1.7976931348623157e308, "int": 2**70})
def test_any_fields_round_trip(fields: Fields) -> None:
    """Replay compares what it reads with what it does: one changed value is a false alarm."""
    found = round_trip(fields)
    assert canonical(found) == canonical(fields)


@given(st.text(st.characters(exclude_categories=()), max_size=40), st.sampled_from(["rx", "tx"]))
@example('{"audio":"' + "AAAA" * 40 + '"}', "rx")
@example('{"text":"' + "\n" * 5000 + '","audio":"' + "AAAA" * 40 + '"}', "tx")
@example("\ud800" * 5000, "rx")
def test_text_frames_are_verbatim(frame: str, kind: str) -> None:
    """A sent frame that reads back otherwise makes byte-exact replay impossible."""
    assert round_trip({"frame": frame, "ordinal": 1}, kind) == {"frame": frame, "ordinal": 1}


BASE64 = b64encode(bytes(range(200))).decode()
LABEL = "data:image/png;base64,"


@given(
    st.lists(st.sampled_from(['"', BASE64, LABEL, "é", "😀", "x" * 50, "é" * 45, "\n" * 4100])),
    st.sampled_from([90, 1 << 20]),
)
@example(['"', "é" * 45, "x" * 13, LABEL, BASE64, '"'], 1 << 20)
@example(['"', "😀" * 4096, '"'], 1 << 20)
def test_text_that_came_as_bytes_is_stored_alike(parts: list[str], bytes_max: int) -> None:
    """Logs of the same frames would differ, by how the server happened to hold them."""
    text = "".join(parts)

    def stored(frame: str | Utf8Text) -> bytes:
        fields = event_record(FrameReceived(at_ns=0, frame=frame))[1]
        return joined(RecordEncoder(frame_bytes_max=bytes_max).encode(record("rx", 1, **fields)))

    assert stored(Utf8Text(text.encode())) == stored(text)


@given(st.binary(max_size=300))
def test_binary_frames_are_verbatim(frame: bytes) -> None:
    """A binary frame, or text that was not UTF-8, is what the client really sent."""
    assert round_trip({"frame": frame}, "rx") == {"frame": frame}


def test_headers_are_canonical() -> None:
    """The same record gives other bytes where `json` has to do what orjson does not."""
    fields = {"b": 1, "a": [True, None, "é\u2028\x1f\x7f", {"z": -0.5, "y": 2**63}]}
    for value in (fields, {**fields, "big": 2**70}):
        ((header, _),) = split_records(
            joined(RecordEncoder().encode(record("mark", 1, **value))), 1
        )
        found = json.loads(header)
        canonical = json.dumps(found, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        assert header.decode() == canonical


def test_same_audio_is_stored_once() -> None:
    """A unit's PCM and the frame it was sent in would double the log."""
    made = pcm(2000)
    audio = '{"audio":"' + b64encode(made).decode() + '"}'
    items = [record("unit", 1, pcm=made), record("tx", 2, frame=audio), record("unit", 3, a=[made])]
    stored = write(*items)
    assert [stored[seq].table for seq in (2, 3)] == [((1, 0),), ((1, 0),)]
    assert [read(stored, item.seq) for item in items] == items


def test_blobs_that_look_alike_are_told_apart() -> None:
    """Two blobs equal at the places probed must never be taken for the same."""
    first = bytes(400)
    second = bytes(100) + b"x" + bytes(299)
    items = [record("event", 1, a=first, b=first, c=second), record("event", 2, a=second, b=first)]
    stored = write(*items)
    assert [read(stored, item.seq) for item in items] == items
    assert stored[1].table[1] == (1, 0)


def test_memory_of_blobs_is_bounded() -> None:
    """An hour's session must not keep an hour's audio in memory; old repeats are stored again."""
    encoder = RecordEncoder()
    size = REMEMBERED_BYTES // 4
    blobs = [bytes([200 + index]) * size for index in range(5)]
    sizes = [
        encoder.encode(record("event", seq, a=blob)).framed_bytes
        for seq, blob in enumerate([*blobs, blobs[4], blobs[0]], start=1)
    ]
    assert sizes[5] < 1000
    assert sizes[6] > size


def test_oversized_frames_keep_start_length_and_hash() -> None:
    """A frame past every limit was refused; the log must say what it was and stay small."""
    encoder = RecordEncoder(frame_bytes_max=100)
    frame = "é" * 60
    ((header, area),) = split_records(joined(encoder.encode(record("rx", 1, frame=frame))), 1)
    found = decode(parse(header, area), no_record, Expansion(int))
    assert found.fields["frame"] == frame[:100]
    cut = found.fields[FRAME_CUT]
    assert isinstance(cut, dict)
    assert cut["bytes"] == 120
    assert cut["is_text"] is True
    with pytest.raises(RecordInvalid):
        encoder.encode(record("rx", 2, frame=bytes(101), frame_cut={}))


NESTED: list[object] = []
for _ in range(NESTING_MAX):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        [-math.inf],
        object(),
        {1: 2},
        {"\ud800": 1},
        {1, 2},
        bytearray(2),
        np.float32(1),
        {"a": [1, {"b": math.nan}]},
        10**5000,
        NESTED,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_exactly_is_refused(value: object) -> None:
    """A value stored as something else would be a lie that replay finds weeks later."""
    with pytest.raises(RecordInvalid):
        RecordEncoder().encode(record("event", 1, value=value))


@pytest.mark.parametrize(("kind", "more"), [("event", {}), ("rx", {"frame": "{}"})])
def test_deepest_value_round_trips(kind: str, more: dict[str, str]) -> None:
    """What the writer takes, the reader must give back; a frame takes none of the depth."""
    value: object = b"deep"
    for _ in range(NESTING_MAX):
        value = [value]
    fields = record(kind, 1, value=value, **more).fields
    assert round_trip(fields, kind) == fields


@pytest.mark.parametrize(
    "changes", [{"kind": "other"}, {"seq": -1}, {"seq": 2**63}, {"at_ns": 1.5}, {"seq": True}]
)
def test_records_are_checked_when_made(changes: dict[str, object]) -> None:
    """The caller must hear of its mistake at once, not the recorder's thread later."""
    with pytest.raises(LogMisuse):
        attrs.evolve(record("event", 1), **changes)  # type: ignore[arg-type]


def test_size_counts_what_is_heavy() -> None:
    """A backlog that does not count audio is not bounded."""
    assert size_bytes({"frame": "a" * 1000, "list": [b"b" * 500, {"c": "d" * 300}]}) > 1800
    assert size_bytes([1] * 1000) == 8000


GOOD = {"at_ns": 4, "blobs": [], "fields": {}, "kind": "event", "seq": 3, "version": 1}
BAD: list[tuple[object, bytes]] = [
    ([], b""),
    ({**GOOD, "kind": "other"}, b""),
    ({**GOOD, "kind": []}, b""),
    ({**GOOD, "version": 2}, b""),
    ({**GOOD, "version": True}, b""),
    ({**GOOD, "seq": "3"}, b""),
    ({**GOOD, "at_ns": -1}, b""),
    ({**GOOD, "extra": 1}, b""),
    ({**GOOD, "fields": []}, b""),
    ({**GOOD, "blobs": {}}, b""),
    ({**GOOD, "blobs": [[0, 1]]}, b"x"),
    ({**GOOD, "blobs": [[0, 2, 2]]}, b"x"),
    ({**GOOD, "blobs": [[0, -1, -1]]}, b""),
    ({**GOOD, "blobs": [[0, 1.0, 1]]}, b"x"),
    ({**GOOD, "blobs": [[0, 1, 1]], "fields": {"a": {"$blob": 1}}}, b"x"),
    ({**GOOD, "blobs": [[0, 1, 1]], "fields": {"a": {"$blob": True}}}, b"x"),
    ({**GOOD, "blobs": [[9, 1, 1]], "fields": {"a": {"$blob": 0}}}, b"x"),
    ({**GOOD, "blobs": [[0, 1, 1]], "fields": {"a": {"$wtf8": 0}}}, b"\xff"),
    ({**GOOD, "blobs": [[3, 0]], "fields": {"a": {"$blob": 0}}}, b""),
    ({**GOOD, "blobs": [[4, 0]], "fields": {"a": {"$blob": 0}}}, b""),
    ({**GOOD, "blobs": [[2, 0]], "fields": {"a": {"$blob": 0}}}, b""),
    ({**GOOD, "fields": {"a": {"$other": 0}}}, b""),
    ({**GOOD, "fields": {"a": {"$text": 0}}}, b""),
    ({**GOOD, "fields": {"a": {"$text": [None]}}}, b""),
    ({**GOOD, "fields": {"a": {"$text": [[0, 0]]}}}, b""),
    ({**GOOD, "fields": {"a": [NESTED]}}, b""),
]


def read_back(header: bytes, area: bytes) -> Record:
    return decode(parse(header, memoryview(area)), no_record, Expansion(int))


@pytest.mark.parametrize(("header", "area"), BAD)
def test_lies_in_a_header_are_refused(header: object, area: bytes) -> None:
    """Sound checksums do not make a sound writer; a reader must not trust one."""
    with pytest.raises(FormatError):
        read_back(json.dumps(header).encode(), area)
    assert read_back(json.dumps(GOOD).encode(), b"").seq == 3


@pytest.mark.parametrize("place", [[4, 0], [3, 0], [3, 1]])
def test_blobs_of_later_records_are_refused(place: list[int]) -> None:
    """A writer knows the past only; a reference to the future is a forgery, or a loop."""
    header = {**GOOD, "blobs": [place], "fields": {"a": {"$blob": 0}}}
    found = parse(json.dumps({**GOOD, "blobs": [[0, 1, 1]] * 2}).encode(), memoryview(b"xx"))
    with pytest.raises(FormatError):
        decode(parse(json.dumps(header).encode(), memoryview(b"")), lambda _: found, Expansion(int))


@pytest.mark.parametrize("piece", [0, [0]])
def test_a_blob_that_is_named_too_often_is_refused(
    monkeypatch: pytest.MonkeyPatch, piece: object
) -> None:
    """A log of kilobytes, sent in as a bug report, fills the memory of who verifies it."""
    monkeypatch.setattr("recorder.read.reader.UNPACKED_BYTES_MAX", 12)
    for times, is_sound in ((3, True), (4, False)):
        fields = {"a": {"$text": [piece] * times}}
        header = {**GOOD, "blobs": [[0, 4, 4]], "fields": fields}
        with nullcontext() if is_sound else pytest.raises(FormatError, match="unpacks to more"):
            assert read_back(json.dumps(header).encode(), b"word").fields["a"]


def test_what_could_not_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server records what no reader takes."""
    monkeypatch.setattr("recorder.format.format.UNPACKED_BYTES_MAX", 12)
    assert round_trip({"a": [b"word"] * 3}) == {"a": [b"word"] * 3}
    with pytest.raises(RecordInvalid, match="unpacks to 16, at most 12 bytes"):
        round_trip({"a": [b"word"] * 4})


@given(st.binary(max_size=80), st.binary(max_size=20))
@example(b'{"at_ns":NaN}', b"")
@example(b"[" * 100_000, b"")
@example(b"\xff", b"")
@example(b"1" * 5000, b"")
def test_garbage_is_no_record(header: bytes, area: bytes) -> None:
    """A reader meets garbage with one kind of error."""
    with pytest.raises(FormatError):
        read_back(header, area)


def test_every_kind_has_a_version() -> None:
    """A kind without a version could never be changed without breaking old logs."""
    for kind, version in RECORD_VERSIONS.items():
        assert UPCASTS.get(kind, {}).keys() == set(range(1, version))
    assert frame_record(b"{}", 0)[:8] == b"\x02\0\0\0\0\0\0\0"
