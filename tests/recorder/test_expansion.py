"""What reading a log may cost: no more than its bytes allow, and our own logs never need more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from recorder.format.encoding import FRAME_CHARS_INLINE, RecordEncoder, decode_flac, encode_flac
from recorder.format.format import (
    ALLOWANCE,
    HEADER_BYTES,
    HEADER_BYTES_MAX,
    HEADER_VALUES_MAX,
    MIB,
    RATIO_MAX,
    RECORDS_MAX,
    SHARED_BYTES_MAX,
    BlockHeader,
    Expansion,
    FormatError,
    Record,
    RecordInvalid,
    frame_bytes_min,
    pack_header,
    split_records,
    unpack_header,
)
from recorder.read.reader import LogReader, parse
from recorder.read.scan import BytesSource, Damage, Scanner
from recorder.repair import NotRecoverable, recover, survey, verify
from recorder.storage.listing import START_BYTES, TAIL_BYTES, Listing
from recorder.storage.store import Store
from tests.forged.bombs import BOMBS, bomb
from tests.forged.logs import Part, framed, head, seal, second
from tests.forged.logs import record as forged_record
from tests.recorder.test_samples import make_log, record

SOUND = BlockHeader(
    first_seq=7,
    mono_ns=8,
    n_records=9,
    compressed_len=10,
    uncompressed_len=1000,
    payload_crc=11,
    chain=bytes(range(16)),
)


@attrs.define
class CountingSource:
    """A log in memory that counts what is read of it."""

    data: bytes
    read_bytes: int = 0
    reads: int = 0

    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, count: int) -> bytes:
        found = self.data[offset : offset + count]
        self.read_bytes += len(found)
        self.reads += 1
        return found

    def close(self) -> None:
        """Do nothing."""


def damage_of(log: bytes) -> list[Damage]:
    with LogReader(log) as reader:
        return [item for item in reader if isinstance(item, Damage)]


# -- a reader's bounds -----------------------------------------------------------------------------


def test_what_is_refused_is_not_counted() -> None:
    """A bomb must not take from what is sound behind it."""
    expansion = Expansion(lambda: 10, allowance=100, ratio=2)
    expansion.charge(100)
    with pytest.raises(FormatError, match="more than 120"):
        expansion.charge(21)
    expansion.charge(20)


def test_a_growing_log_may_expand_to_more() -> None:
    """A log that is read while it is written is not judged by what it was."""
    source = CountingSource(b"x")
    expansion = Expansion(source.size, allowance=0, ratio=2)
    with pytest.raises(FormatError):
        expansion.charge(3)
    source.data += b"x"
    expansion.charge(3)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_records": RECORDS_MAX + 1, "uncompressed_len": MIB},
        {"n_records": 2, "uncompressed_len": SHARED_BYTES_MAX + 1},
        {"n_records": 3, "uncompressed_len": 4 * MIB + SHARED_BYTES_MAX + 1, "has_head_copy": True},
    ],
)
def test_a_block_of_too_many_records_is_refused(changes: dict[str, Any]) -> None:
    """All headers of a block are in memory together."""
    with pytest.raises(FormatError, match="records"):
        unpack_header(pack_header(attrs.evolve(SOUND, **changes)))
    fewer = {**changes, "n_records": 1 + changes.get("has_head_copy", 0)}
    assert unpack_header(pack_header(attrs.evolve(SOUND, **fewer)))


def test_a_long_header_is_refused_before_it_is_parsed() -> None:
    """JSON takes a hundred times its length."""
    with pytest.raises(FormatError, match="a header of"):
        list(split_records(framed(b" " * (HEADER_BYTES_MAX + 1)), 1))
    values = b"[" + b"0," * HEADER_VALUES_MAX + b"0]"
    with pytest.raises(FormatError, match="values"):
        parse(values, memoryview(b""))


def test_flac_that_claims_other_samples_is_not_decoded() -> None:
    """A few bytes can claim gigabytes."""
    sound = encode_flac(np.arange(100, dtype=np.int16))
    assert decode_flac(sound, 99) is None
    assert decode_flac(sound, 100) is not None


@pytest.mark.parametrize("name", ["marks", "overlapping blocks", "endless blocks", "cut frames"])
def test_each_byte_is_read_a_few_times(name: str) -> None:
    """Headers claim what they like: what many of them claim must not be read for each."""
    source = CountingSource(bomb(name, 4))
    for _ in Scanner(source):
        pass
    windows = len(source.data) // 12 * 4096 if name == "marks" else 800 * 3 * 4096
    assert source.read_bytes <= 8 * len(source.data) + windows


def test_blobs_before_the_start_are_found_by_one_walk() -> None:
    """Records that each name a blob of long ago must not have the log walked over for each."""
    blob = forged_record("unit", 2, {}, blobs=[[0, 4, 4]], area=b"abcd")
    named = [
        Part(payload=forged_record("unit", seq, {"a": {"$blob": 0}}, blobs=[[2, 0]]), first_seq=seq)
        for seq in range(3, 203)
    ]
    source = CountingSource(seal([head(), second(), Part(payload=blob, first_seq=2), *named]))
    with LogReader(source.data) as reader:
        reader._source = reader._scanner._source = source  # type: ignore[assignment,misc]
        found = [item for item in reader.at(3) if isinstance(item, Record)]
    assert [item.fields["a"] for item in found] == [b"abcd"] * 200
    assert source.reads < 200 * 40


def test_text_is_refused_before_it_fills_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character may take four bytes where its text has two, and is held twice while joined."""
    monkeypatch.setattr("recorder.read.reader.RECORD_BYTES_MAX", 12)
    for times, is_sound in ((3, True), (4, False)):
        fields = {"a": {"$text": [[0]] * times}}
        text = forged_record("mark", 2, fields, blobs=[[0, 4, 4]], area=b"word")
        damage = damage_of(seal([head(), second(), Part(payload=text, first_seq=2)]))
        assert [it.reason for it in damage] == ([] if is_sound else ["blob"])


# -- the list --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOMBS)
def test_a_list_reads_the_two_ends(name: str, tmp_path: Path) -> None:
    """One forged file among thousands must not keep anybody from the others."""
    (tmp_path / "bomb.session.zst").write_bytes(bomb(name, 4))
    (tmp_path / "good.session.zst").write_bytes(make_log([[record("mark", 1, text="x")]]))
    listed = {it.recording_id: it.state for it in Listing(Store(tmp_path)).refresh()}
    assert listed == {"good": "finished", "bomb": "crashed"}


def test_a_forged_head_is_listed_as_unreadable(tmp_path: Path) -> None:
    """So is one behind a thousand marks."""
    heads = {
        "long": [Part(payload=framed(b'{"a":' + b"[]," * MIB + b"0}"))],
        "marks": [*BOMBS["marks"](0, 4), head()],
        "wide": [
            head(
                forged_record(
                    "session",
                    0,
                    {"a": {"$text": [0] * 900}},
                    blobs=[[0, MIB, MIB]],
                    area=bytes(MIB),
                )
            )
        ],
    }
    for name, parts in heads.items():
        (tmp_path / f"{name}.session.zst").write_bytes(seal(parts))
    listed = {it.recording_id: it.state for it in Listing(Store(tmp_path)).refresh()}
    assert listed == dict.fromkeys(heads, "unreadable")
    assert START_BYTES + TAIL_BYTES < 5 * MIB


# -- a writer keeps within them --------------------------------------------------------------------


def test_silence_is_written_so_that_it_can_be_read() -> None:
    """Zeros are packed by the ten thousand: what a writer makes must not look like a bomb."""
    steps = [[record("unit", seq, pcm=bytes(32 * MIB - 4 * seq))] for seq in range(1, 4)]
    log = make_log(steps)
    assert sum(len(bytes(32 * MIB)) for _ in steps) * 1.5 > ALLOWANCE
    assert damage_of(log) == []
    assert verify(log).state == "finished"


def test_a_frame_is_at_least_a_share_of_its_cost() -> None:
    """Where it matters, each block by itself is within the ratio: any log of them is."""
    log = make_log([[record("unit", 1, pcm=bytes(24 * MIB))]])
    blocks = [item for item in Scanner(BytesSource(log)) if not isinstance(item, Damage)]
    cost = blocks[1].header.uncompressed_len + 24 * MIB
    assert HEADER_BYTES + blocks[1].header.compressed_len >= cost // RATIO_MAX
    assert frame_bytes_min(HEADER_BYTES * RATIO_MAX) == 0


def test_a_frame_of_many_spans_has_a_short_header() -> None:
    """A client that sends thousands of small pictures must not make its recording unreadable."""
    span = '"' + "A" * 64 + '",' + '"' + "x y" * 1000 + '",'
    frame = "[" + span * 8000 + "0]"
    ((header, area),) = split_records(
        b"".join(RecordEncoder().encode(record("rx", 1, frame=frame)).pieces), 1
    )
    assert len(header) < FRAME_CHARS_INLINE * 6 + 4096 * 100
    assert len(area) > 1000
    log = make_log([[record("rx", 1, frame=frame)]])
    with LogReader(log) as reader:
        records = [item for item in reader if isinstance(item, Record)]
    assert records[1].fields["frame"] == frame


def test_long_text_anywhere_is_a_blob() -> None:
    """Escapes of JSON make a text six times longer; a header has a bound."""
    text = "\x01" * MIB
    fields = {"a": {"b": [text, "\ud800" * 5000]}}
    ((header, _),) = split_records(
        b"".join(RecordEncoder().encode(record("event", 1, **fields)).pieces), 1
    )
    assert len(header) < 1000
    assert json.loads(header)["fields"] == {"a": {"b": [{"$text": [[0]]}, {"$text": [[1]]}]}}
    with LogReader(make_log([[record("event", 1, **fields)]])) as reader:
        records = [item for item in reader if isinstance(item, Record)]
    assert records[1].fields == fields


def test_what_no_reader_takes_is_not_written() -> None:
    """Better no record than one that is lost when it is needed."""
    with pytest.raises(RecordInvalid, match="values"):
        RecordEncoder().encode(record("event", 1, a=[0] * HEADER_VALUES_MAX))


def test_a_small_log_is_not_salvaged_to_a_large_one(tmp_path: Path) -> None:
    """A block that claims to be the millionth would have a million marks written."""
    far = Part(payload=forged_record("mark", 90_000, {"text": "x"}), first_seq=90_000)
    path = tmp_path / "a.session.zst"
    path.write_bytes(seal([head(), second(), far]))
    with pytest.raises(NotRecoverable, match="consecutive records are lost"):
        recover(path, tmp_path / "b.session.zst", survey(path, salvage=True))
