"""What happens to logs on disks and in crashes, done to golden logs on purpose.

Each harm takes the bytes of a sound log and gives those of a harmed one, always the same.
"""

from __future__ import annotations

from collections.abc import Callable

from recorder.format.format import HEADER_BYTES, MARK

Harm = Callable[[bytes], bytes]


def blocks(data: bytes) -> list[int]:
    """Return where blocks begin."""
    places = []
    at = data.find(MARK)
    while at >= 0:
        places.append(at)
        at = data.find(MARK, at + 1)
    return places


def middle(data: bytes) -> int:
    """Return where a block in the middle begins."""
    places = blocks(data)
    return places[len(places) // 2]


def flip(data: bytes, at: int) -> bytes:
    """Turn one bit."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def killed(data: bytes) -> bytes:
    """Keep whole blocks up to the middle: the server was killed between two writes."""
    return data[: middle(data)]


def torn(data: bytes) -> bytes:
    """Keep half a block more: it was killed amid a write."""
    places = blocks(data)
    number = len(places) // 2
    return data[: (places[number] + places[number + 1]) // 2]


def without_fin(data: bytes) -> bytes:
    """Take away the last block, and the seek table behind it."""
    return data[: blocks(data)[-1]]


def without_a_block(data: bytes) -> bytes:
    """Take a block out of the middle."""
    places = blocks(data)
    number = len(places) // 2
    return data[: places[number]] + data[places[number + 1] :]


def without_the_first(data: bytes) -> bytes:
    """Break the first block: the copy of its record in the second has to do."""
    return flip(data, blocks(data)[0] + HEADER_BYTES + 9)


def bad_payload(data: bytes) -> bytes:
    """Turn a bit in a block's payload."""
    return flip(data, middle(data) + HEADER_BYTES + 9)


def bad_header(data: bytes) -> bytes:
    """Turn a bit in a block's header."""
    return flip(data, middle(data) + 20)


def twice(data: bytes) -> bytes:
    """Write a block again."""
    places = blocks(data)
    number = len(places) // 2
    again = data[places[number] : places[number + 1]]
    return data[: places[number]] + again + data[places[number] :]


def swapped(data: bytes) -> bytes:
    """Write two blocks in each other's place."""
    places = blocks(data)
    first, second, end = places[len(places) // 2 :][:3]
    return data[:first] + data[second:end] + data[first:second] + data[end:]


def junk_inside(data: bytes) -> bytes:
    """Put bytes between two blocks that are none of a log's."""
    at = middle(data)
    return data[:at] + b"\0" * 4096 + data[at:]


HARMS: dict[str, tuple[str, Harm]] = {
    "killed": ("realtime-audio", killed),
    "torn": ("realtime-audio", torn),
    "without-fin": ("legacy-chat-at-once", without_fin),
    "chat-killed": ("chat-cut", killed),
    "damaged-first-block": ("realtime-audio", without_the_first),
    "damaged-payload": ("realtime-audio", bad_payload),
    "damaged-header": ("duplex-v1-video", bad_header),
    "damaged-lost-block": ("realtime-audio", without_a_block),
    "damaged-twice": ("chat-fails", twice),
    "damaged-swapped": ("realtime-audio", swapped),
    "damaged-junk": ("realtime-audio", junk_inside),
}
"""Each harmed log: of which scene, and what happened to it."""
