"""The content to take out of a log, and what was taken out."""

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
    "prompt": "the system prompt, and its tokens",
    "voice": "reference audio, and names of voices",
    "name": "names that clients and operators gave: of sessions, inputs, owners, models",
}
"""The kinds of content. Settings, times, counts and the server's ids are not content."""
TRACES: Final = "trace"
"""Always taken out: hashes and margins, from which content could be guessed."""


@attrs.frozen(kw_only=True)
class Policy:
    """The content to take out, from `from_ns` to `to_ns` (exclusive; None: the end).

    Times are on the session's clock; names are taken out everywhere.
    """

    side: Side = "both"
    kinds: frozenset[Kind] = frozenset(KINDS)
    from_ns: int = 0
    to_ns: int | None = None
    pictures: PictureStyle = "remove"

    def covers(self, kind: Kind, side: Side, at_ns: int) -> bool:
        """Whether content of a time is taken out; a side of `both` goes with either."""
        if kind not in self.kinds or (side != self.side and "both" not in {side, self.side}):
            return False
        is_late = self.to_ns is not None and at_ns >= self.to_ns
        return kind == "name" or (at_ns >= self.from_ns and not is_late)


@attrs.define
class Tally:
    """The pieces and bytes taken out, and the pictures of which only the header is left."""

    pieces: Counter[tuple[str, Side]] = attrs.Factory(Counter)
    bytes: Counter[tuple[str, Side]] = attrs.Factory(Counter)
    headers_only: int = 0

    def count(self, kind: str, side: Side, size_bytes: int) -> None:
        """Count a piece."""
        self.pieces[kind, side] += 1
        self.bytes[kind, side] += size_bytes

    def to_json(self) -> list[dict[str, str | int]]:
        """The counts, in the order of the kinds."""
        order = [*KINDS, TRACES]
        return [
            {"kind": kind, "side": side, "pieces": count, "bytes": self.bytes[kind, side]}
            for (kind, side), count in sorted(
                self.pieces.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
            )
        ]
