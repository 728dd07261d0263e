"""docs/log-format.md says what the code does: its tables name exactly what the code knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import attrs
import pytest

from protocol.values.frames import Frame
from protocol.values.records import RECORD_FIELDS, RECORD_NAMES
from recorder.format import encoding as blobs
from recorder.format import format as log_format
from recorder.format.format import (
    BLOB,
    BLOCK_BYTES,
    COMPACT_VERSION,
    FLAG_HEAD_COPY,
    FLAG_STUFFED,
    FLAGS_KNOWN,
    FORMAT_VERSION,
    FORMAT_VERSIONS,
    FRAME_BYTES_MAX,
    FRAME_CUT,
    HEAD_BYTES_MAX,
    HEADER_BYTES,
    MARK,
    MIB,
    RECORD_BYTES_MAX,
    RECORD_VERSIONS,
    SEEK_TABLE_MAGIC,
    SKIPPABLE_MAGIC,
    TAG,
    TEXT,
    UNPACKED_BYTES_MAX,
    WTF8,
    BlockHeader,
    pack_header,
)
from recorder.format.mapping import EFFECTS, EVENTS, plain_of
from recorder.read.reader import parse
from recorder.repair import COMPACTED, KEPT_BLOCK_BYTES, LOST, RECOVERED, Report, State
from recorder.storage import listing
from recorder.write.files import PART_PREFIX
from recorder.write.logfile import LEVEL, LEVEL_KEPT
from replay.library.keep import ENDING

DOCUMENT: Final = (Path(__file__).parents[2] / "docs" / "log-format.md").read_text()
WORDS: Final = " ".join(DOCUMENT.split())
"""Without its line breaks."""


def table(heading: str) -> list[list[str]]:
    """The rows of the table whose first row starts so, without it and without backticks."""
    lines = DOCUMENT.replace("`", "").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_codecs() -> None:
    """Whoever writes a reader of their own could not read some blobs."""
    named = {int(row[0]) for row in table("codec")}
    assert named == set(blobs._UNPACKERS)
    assert named == {blobs.RAW, blobs.SHUFFLE_4, blobs.EXACT_16, blobs.FLAC}


def test_records_and_their_versions() -> None:
    """A kind of record that is described nowhere could not be understood."""
    assert {row[0]: int(row[1]) for row in table("kind")} == RECORD_VERSIONS


def test_the_block_header() -> None:
    """Headers would be read from the wrong places."""
    rows = table("at")
    places = {row[2]: (int(row[0]), int(row[1])) for row in rows}
    assert all(a + size == b for (a, size), (b, _) in pairwise(places.values()))
    assert sum(size for _, size in places.values()) == HEADER_BYTES == 68
    values = {
        "magic": SKIPPABLE_MAGIC,
        "size": HEADER_BYTES - 8,
        "tag": int.from_bytes(TAG, "little"),
        "version": 2,
        "flags": FLAG_STUFFED,
        "reserved": 0,
        "first_seq": 1 << 40,
        "mono_ns": 1 << 41,
        "n_records": 3,
        "compressed_len": 500,
        "uncompressed_len": 600,
        "payload crc32": 0xABCDEF,
        "chain": int.from_bytes(b"c" * 16, "little"),
    }
    header = pack_header(
        BlockHeader(
            first_seq=1 << 40,
            mono_ns=1 << 41,
            n_records=3,
            compressed_len=500,
            uncompressed_len=600,
            payload_crc=0xABCDEF,
            chain=b"c" * 16,
            is_stuffed=True,
            version=2,
        )
    )
    for name, value in values.items():
        at, size = places[name]
        assert int.from_bytes(header[at : at + size], "little") == value, name
    assert places.keys() - values.keys() == {"header crc32"}
    flags = {int(number) for number in re.findall(r"(\d): ", " ".join(rows[4][3:]))}
    assert flags == {FLAG_HEAD_COPY, FLAG_STUFFED}
    assert sum(flags) == FLAGS_KNOWN
    assert len(MARK) == 12


def test_the_seek_table() -> None:
    """A table that is written by the document would be refused."""
    said = {row[1]: row[2] for row in table("size")}
    assert int(said["magic"], 16) == SEEK_TABLE_MAGIC
    assert int(said["footer magic"], 16) == log_format.FOOTER_MAGIC
    sizes = [sum(map(int, row[0].split(","))) for row in table("size")]
    assert sizes[0] + sizes[1] == log_format.PREAMBLE_BYTES
    assert sum(sizes[3:]) == log_format.FOOTER_BYTES
    assert f"more than {log_format.BLOCKS_MAX} blocks has none" in WORDS


def test_states_and_exit_codes() -> None:
    """A script would take damage for a log that is still open."""
    said = {state.strip(): int(row[1]) for row in table("verify") for state in row[0].split(",")}
    assert said.keys() == set(get_args(State))
    assert said == {state: Report(state=state).exit_code for state in get_args(State)}


def test_the_index() -> None:
    """A table of the index that is described is not the one that is there."""
    named = [name.strip() for row in table("column of logs") for name in row[0].split(",")]
    assert named == re.findall(r"(\w+) (?:TEXT|INTEGER|BLOB)", listing._TABLE)
    assert f"`{listing.INDEX_NAME}`" in DOCUMENT
    assert f"`user_version` {listing.INDEX_VERSION}," in DOCUMENT


def test_the_example_is_a_record() -> None:
    """The one record that is shown could not be read."""
    text = re.search(r"```json\n(.*?)\n```", DOCUMENT, re.DOTALL)
    assert text is not None
    assert parse(text[1].encode(), memoryview(bytes(64_000))).record.seq == 9
    assert list(json.loads(text[1])) == sorted(json.loads(text[1]))


@pytest.mark.parametrize(
    "words",
    [
        f"up to {BLOCK_BYTES >> 10} KiB ({KEPT_BLOCK_BYTES // MIB} MiB in a compacted log)",
        f"A record is at most {RECORD_BYTES_MAX // MIB} MiB",
        f"as often as its fields name them, are at most {UNPACKED_BYTES_MAX // MIB} MiB",
        f"the session record at most {HEAD_BYTES_MAX // MIB} MiB",
        f"A frame above {FRAME_BYTES_MAX // MIB} MiB keeps its start, and `{FRAME_CUT}`",
        f"The writer takes level {LEVEL},",
        f"`compact` takes level {LEVEL_KEPT}",
        f"zstd takes level {LEVEL_KEPT}",
        f"{FORMAT_VERSION}, or {COMPACT_VERSION} for a compacted log",
        f"writes one of format version {COMPACT_VERSION}",
        f'`{{"{BLOB}": i}}`',
        f'`{{"{TEXT}": [...]}}`',
        f'`{{"{WTF8}": i}}`',
        f"`{json.dumps(LOST)}`",
        f"`<recording id>{ENDING}`",
        f"`fin` has the reason `{RECOVERED}`",
        f"`fin` has the field `{COMPACTED}`",
        f"Names that begin with `{PART_PREFIX}`",
    ],
)
def test_numbers_and_names(words: str) -> None:
    """A bound or a name changes, and the document goes on telling the old one."""
    assert words in WORDS


def test_versions() -> None:
    """There are versions that the document does not know."""
    assert list(FORMAT_VERSIONS) == [FORMAT_VERSION, COMPACT_VERSION]
    assert f"{FORMAT_VERSION} is what servers write; {COMPACT_VERSION} says" in WORDS


# -- names -----------------------------------------------------------------------------------------


def kind_of(hint: Any) -> str:
    """The kind of a field in words, by its annotation."""
    if hint in (str, bytes, int, float, bool):
        return "text" if hint is str else hint.__name__
    if hint in RECORD_NAMES:
        return f"`{RECORD_NAMES[hint]}`"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "text"
    if hint == Frame:
        return "text, bytes or null"
    if get_origin(hint) is Literal:
        return "text"
    if get_origin(hint) is tuple:
        return f"list of {kind_of(get_args(hint)[0])}"
    names = [kind_of(each) for each in get_args(hint) if each is not type(None)]
    ends = ["null"] if type(None) in get_args(hint) else []
    return " or ".join(names + ends)


def default_of(default: Any) -> str:
    """A field's default as the page writes it; nothing for a field that has none."""
    if default is attrs.NOTHING:
        return ""
    if isinstance(default, bytes):
        return " = empty"
    return f" = `{json.dumps(plain_of(default) if attrs.has(type(default)) else default)}`"


def names_table(heading: str, classes: Iterable[type]) -> str:
    """The rows of the page for some classes of records: their names, and their fields."""
    lines = [f"| {heading} | its fields |", "|---|---|"]
    for cls in classes:
        hints = get_type_hints(cls)
        fields = [
            f"`{name}`: {kind_of(hints[field.name])}{default_of(field.default)}"
            for field, name in RECORD_FIELDS[cls]
            if name != "at_ns" or heading != "event"
        ]
        lines.append(f"| `{RECORD_NAMES[cls]}` | {'; '.join(fields)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def test_names_and_fields() -> None:
    """A writer by the page would leave out a field, or make one up."""
    others = [cls for cls in RECORD_NAMES if cls not in {*EVENTS.values(), *EFFECTS.values()}]
    for heading, classes in (
        ("event", EVENTS.values()),
        ("effect", EFFECTS.values()),
        ("value", others),
    ):
        table = names_table(heading, classes)
        assert table in DOCUMENT, table
