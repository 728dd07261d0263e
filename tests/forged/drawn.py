"""Forged logs drawn at random: sound ones, broken under sound checksums, with bombs among them.

A log depends on its number and on the golden logs, so what fails can be made again here:
`draw(Random(number))`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import attrs

from recorder.format.format import MARK, FormatError, split_records
from recorder.read.scan import Block, BytesSource, Scanner
from tests.forged.bombs import BOMBS
from tests.forged.logs import Part, framed, head, seal, second, table_for

FOLDER: Final = Path(__file__).parents[2] / "fixtures" / "logs"
BASE_BYTES_MAX: Final = 24 << 10
"""Sound logs to break: small ones have all the structure, and hide no bomb's cost."""
FILE_BYTES_MAX: Final = 128 << 10
"""Of a log: enough to tell what grows with the file from what grows faster, in seconds."""
CHANGES_MAX: Final = 4
NASTY: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 200, 1.5, 1e308, -0.0),
    *("", "x", "\ud800", "\0" * 1000, "é" * 5000, "[" * 3000, '{"type":"session.init"}'),
    *([], {}, [[]], {"$blob": 0}, {"$blob": 99}, {"$text": [0, [0], "x"]}, {"$wtf8": 0}),
    *({"$text": [[0]] * 300}, {"$text": [0] * 300}, [{"$blob": 0}] * 300, {"$": 1}, {"$$a": 1}),
    *([[0, 1 << 40, 0]], [[0, 0]] * 500, [[3, 1 << 27, 40]], [[2, 8, 5]], [[0, 0, 0]] * 500),
    *([0] * 5000, {str(key): {} for key in range(2000)}),
)
"""Values to put anywhere in a record's header."""


@cache
def _bases() -> tuple[tuple[Part, ...], ...]:
    """Take the small golden logs apart."""
    paths = sorted(FOLDER.glob("*.session.zst"))
    return (
        (head(), second()),
        *(_parts_of(path) for path in paths if path.stat().st_size <= BASE_BYTES_MAX),
    )


def _parts_of(path: Path) -> tuple[Part, ...]:
    return tuple(
        Part(
            payload=item.payload,
            n_records=item.header.n_records,
            first_seq=item.header.first_seq,
            changes={"version": item.header.version, "has_head_copy": item.header.has_head_copy},
        )
        for item in Scanner(BytesSource(path.read_bytes()))
        if isinstance(item, Block)
    )


def draw(chance: Random) -> bytes:
    """Draw a log; most can be read, at least in part."""
    parts = list(chance.choice(_bases()))
    for _ in range(chance.randint(1, CHANGES_MAX)):
        chance.choice(CHANGES)(chance, parts)
    log = seal(parts)[:FILE_BYTES_MAX]
    if chance.random() < 0.2:
        log = log[: chance.randint(len(log) // 2, len(log))]
    if chance.random() < 0.2:
        log += table_for(log)
    return log


# -- changes ---------------------------------------------------------------------------------------


def _put_bomb(chance: Random, parts: list[Part]) -> None:
    at = chance.randint(min(2, len(parts)), len(parts))
    seq = parts[at - 1].first_seq + parts[at - 1].n_records if at else 0
    name = chance.choice(list(BOMBS))
    parts[at:at] = BOMBS[name](seq, 1 << chance.randint(0, 6))


def _break_record(chance: Random, parts: list[Part]) -> None:
    """Put a value where another stood, in the header of a record."""

    def change(header: bytes, area: bytes) -> bytes:
        try:
            found = json.loads(header)
        except (ValueError, RecursionError):
            return framed(header, area)
        if isinstance(found, dict):
            _replace(chance, found)
        return framed(json.dumps(found, sort_keys=True).encode(), area)

    _change_records(chance, parts, change)


def _replace(chance: Random, value: dict[str, Any]) -> None:
    """Go down some way and put something nasty there."""
    place: Any = value
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
            place = place[key]
            continue
        place[key] = chance.choice(NASTY)
        return


def _repeat_record(chance: Random, parts: list[Part]) -> None:
    """Have a record often, numbered on, as a client that repeats itself would."""
    _change_records(chance, parts, framed, times=1 << chance.randint(1, 12))


def _change_records(
    chance: Random, parts: list[Part], change: Callable[[bytes, bytes], bytes], *, times: int = 1
) -> None:
    """Change a record of a block; those after it keep their numbers, where it comes once."""
    at = chance.randrange(len(parts))
    part = parts[at]
    if part.payload is None or part.raw is not None or part.n_records > 5000:
        return
    records = [(header, bytes(area)) for header, area in _split(part)]
    if not records:
        return
    index = chance.randrange(len(records))
    made = [framed(*each) for each in records]
    made[index : index + 1] = [
        change(_numbered(records[index][0], number), records[index][1]) for number in range(times)
    ]
    count = part.n_records + times - 1
    parts[at] = attrs.evolve(part, payload=b"".join(made), n_records=count)


def _split(part: Part) -> list[tuple[bytes, memoryview]]:
    assert part.payload is not None
    try:
        return list(split_records(part.payload, part.n_records))
    except FormatError:
        return []


def _numbered(header: bytes, further: int) -> bytes:
    if not further:
        return header
    try:
        found = json.loads(header)
        found["seq"] += further
    except (ValueError, RecursionError, TypeError, KeyError):
        return header
    return json.dumps(found, sort_keys=True).encode()


def _repeat_block(chance: Random, parts: list[Part]) -> None:
    at = chance.randrange(len(parts))
    times = 1 << chance.randint(1, 10)
    first_seq, step = parts[at].first_seq, parts[at].n_records * chance.choice((0, 1, 1000))
    parts[at:at] = [
        attrs.evolve(parts[at], first_seq=(first_seq + step * number) % (1 << 62))
        for number in range(times)
    ]


def _break_header(chance: Random, parts: list[Part]) -> None:
    at = chance.randrange(len(parts))
    name, value = chance.choice(
        (
            *(("first_seq", it) for it in (0, 1, 1 << 20, (1 << 63) - 2)),
            *(("mono_ns", it) for it in (0, (1 << 64) - 1)),
            *(("n_records", it) for it in (0, 1, 2, 1 << 14, (1 << 32) - 1)),
            *(("compressed_len", it) for it in (0, 1, 1 << 20, 1 << 27, (1 << 32) - 1)),
            *(("uncompressed_len", it) for it in (0, 1, 1 << 27, (1 << 32) - 1)),
            *(("payload_crc", 0), ("has_head_copy", True), ("has_head_copy", False)),
            *(("is_stuffed", True), ("version", 2), ("version", 9)),
        )
    )
    parts[at] = attrs.evolve(parts[at], changes={**parts[at].changes, name: value})


def _put_bytes(chance: Random, parts: list[Part]) -> None:
    raw = chance.choice((MARK, MARK[:6], b"\0" * 100, chance.randbytes(300), table_for(b"")))
    at = chance.randint(0, len(parts))
    parts.insert(at, Part(raw=raw * (1 << chance.randint(0, 10))))


def _swap(chance: Random, parts: list[Part]) -> None:
    one, other = (chance.randrange(len(parts)) for _ in range(2))
    parts[one], parts[other] = parts[other], parts[one]


CHANGES: Final[tuple[Callable[[Random, list[Part]], None], ...]] = (
    *(_put_bomb, _put_bomb, _put_bomb),
    *(_break_record, _break_record, _break_record),
    *(_repeat_record, _repeat_block, _break_header, _put_bytes, _swap),
)
