"""What a client offers for a call (SDP), and what of it is passed on.

An offer is hostile text. It has one section of sound with Opus, and at most one of data. Its
candidates are left out: else a client could have this host send packets to any address. A
client is known by the address of its own checks (RFC 8445, peer reflexive).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

import attrs

OFFER_BYTES_MAX: Final = 64 * 1024
LINE_BYTES_MAX: Final = 8 * OFFER_BYTES_MAX
"""Of a line between gateway and door: an offer as JSON, with the session's settings."""
LINES_MAX: Final = 500
LINE_CHARS_MAX: Final = 1_000
_OPUS: Final = re.compile(r"a=rtpmap:(\d{1,3}) opus/48000/2", re.IGNORECASE)
_OF_TYPE: Final = re.compile(r"a=(?:rtpmap|fmtp|rtcp-fb):(\d+) ")
_LEFT_OUT: Final = ("a=candidate:", "a=end-of-candidates", "a=remote-candidates:")
_DIRECTIONS: Final = {"a=sendrecv", "a=sendonly", "a=recvonly", "a=inactive"}
_DISCARD: Final = 9
"""A port without a listener."""


class OfferError(ValueError):
    """An offer cannot be answered; the text says why, and may be shown to the client."""


@attrs.frozen
class Offer:
    """An offer that can be answered.

    Attributes:
        sdp: without candidates.
        payload_types: of Opus.
        has_data: whether there is a section of data.
    """

    sdp: str
    payload_types: frozenset[int]
    has_data: bool


def read_offer(data: bytes, placeholder: str) -> Offer:
    """Read an offer; `OfferError`.

    `placeholder` is an address of this host, the only candidate: the library gives up at once if
    there is none, before the client has sent its first check.
    """
    if len(data) > OFFER_BYTES_MAX:
        raise OfferError(f"an offer of {len(data)} bytes, at most {OFFER_BYTES_MAX} are read")
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise OfferError("the offer is not SDP: it is not ASCII") from None
    if not lines or lines[0] != "v=0":
        raise OfferError("the offer is not SDP: it does not begin with v=0")
    if len(lines) > LINES_MAX or max(map(len, lines)) > LINE_CHARS_MAX:
        raise OfferError(
            f"the offer has more than {LINES_MAX} lines, or one of over {LINE_CHARS_MAX} characters"
        )
    kept = [line for line in lines if line and not line.startswith(_LEFT_OUT)]
    media = [line for line in kept if line.startswith("m=")]
    kinds = [line[2:].partition(" ")[0] for line in media]
    if kinds.count("audio") != 1 or kinds.count("application") > 1 or len(kinds) > 2:
        raise OfferError("the offer needs one section of audio, and may have one of data")
    _check(kept, len(kinds))
    at = next(n for n, line in enumerate(kept) if line.startswith("m=audio"))
    end = next((n for n in range(at + 1, len(kept)) if kept[n].startswith("m=")), len(kept))
    sound = kept[at:end]
    types = frozenset(int(found[1]) for found in map(_OPUS.fullmatch, sound) if found)
    if not types:
        raise OfferError("the offer's audio has no opus/48000/2")
    if not _DIRECTIONS & set(sound):
        sound.append("a=sendrecv")  # which is meant where none is named (RFC 8866)
    kept[at:end] = [line for line in map(partial(_only, types), sound) if line]
    shown = f"a=candidate:1 1 udp 1 {placeholder} {_DISCARD} typ host"
    session, *sections = "\r\n".join(kept).split("\r\nm=")
    sdp = "\r\nm=".join([session, *(f"{it}\r\n{shown}" for it in sections)])
    return Offer(sdp + "\r\n", types, has_data="application" in kinds)


def _check(lines: Sequence[str], sections: int) -> None:
    """Refuse what the library would fail on later; `OfferError`."""
    mids = [line[6:] for line in lines if line.startswith("a=mid:")]
    groups = [line.split(" ")[1:] for line in lines if line.startswith("a=group:BUNDLE")]
    if len(mids) != sections or len({*mids}) != sections or (groups and groups != [mids]):
        raise OfferError("each section of the offer needs a mid of its own, and BUNDLE names all")
    if sections > 1 and not groups:
        raise OfferError("the sections of the offer need to be one BUNDLE")
    for name in ("a=fingerprint:", "a=ice-ufrag:", "a=ice-pwd:"):
        if not any(line.startswith(name) for line in lines):
            raise OfferError(f"the offer has no {name[2:-1]}")


def _only(types: frozenset[int], line: str) -> str:
    """Leave what is not Opus out of a line of the sound's section; empty if nothing is left."""
    if line.startswith("m="):
        words = line.split(" ")
        return " ".join([*words[:3], *(it for it in words[3:] if it in map(str, types))])
    of_type = _OF_TYPE.match(line)
    return "" if of_type and of_type[1] not in map(str, types) else line
