"""What is to be taken out of a log, and what was."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

import attrs

from .media import PictureStyle

Kind = Literal["audio", "video", "image", "text", "prompt", "voice", "name"]
Side = Literal["user", "model", "both"]

KINDS: Final[dict[Kind, str]] = {
    "audio": "what was said, as sound, and the speech codes that spell it",
    "video": "what a camera saw: frames, and files of videos with their sound",
    "image": "pictures in a conversation",
    "text": "words of a conversation, tokens that spell them, and whatever else a client wrote",
    "prompt": "what the model was told to be, and the tokens of it",
    "voice": "reference audio, and names of voices",
    "name": "names that clients and operators gave: of sessions, inputs, owners, models",
}
"""What each kind is. Settings, times, counts and ids that the server made are none of them."""
TRACES: Final = "trace"
"""No kind that one asks for: hashes and margins, by which what was taken out could be guessed."""


@attrs.frozen(kw_only=True)
class Policy:
    """What is to be taken out.

    Attributes:
        side: whose.
        kinds: of these.
        from_ns: from here on, on the session's clock; names always.
        to_ns: up to here, itself left out; None: to the end.
        pictures: what becomes of pictures.
    """

    side: Side = "both"
    kinds: frozenset[Kind] = frozenset(KINDS)
    from_ns: int = 0
    to_ns: int | None = None
    pictures: PictureStyle = "remove"

    def covers(self, kind: Kind, side: Side, at_ns: int) -> bool:
        """Whether something is to be taken out.

        Args:
            kind: what it is.
            side: whose; `both`: it tells of both, and goes with either.
            at_ns: when it was recorded.
        """
        if kind not in self.kinds or (side != self.side and "both" not in {side, self.side}):
            return False
        is_late = self.to_ns is not None and at_ns >= self.to_ns
        return kind == "name" or (at_ns >= self.from_ns and not is_late)


@attrs.define
class Tally:
    """What was taken out: pieces and bytes, by what it was and whose.

    Attributes:
        pieces: how many there were.
        bytes: how much it was.
        headers_only: pictures that could not be drawn in so few bytes.
    """

    pieces: Counter[tuple[str, Side]] = attrs.Factory(Counter)
    bytes: Counter[tuple[str, Side]] = attrs.Factory(Counter)
    headers_only: int = 0

    def count(self, kind: str, side: Side, size_bytes: int) -> None:
        """Note that something was taken out."""
        self.pieces[kind, side] += 1
        self.bytes[kind, side] += size_bytes

    def to_json(self) -> list[dict[str, str | int]]:
        """List it, in the order of the kinds."""
        order = [*KINDS, TRACES]
        return [
            {"kind": kind, "side": side, "pieces": count, "bytes": self.bytes[kind, side]}
            for (kind, side), count in sorted(
                self.pieces.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
            )
        ]
