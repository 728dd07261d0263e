"""Bounds of a link, each with its reason; both ends hold each other to them."""

from __future__ import annotations

from typing import Final

from recorder.format.format import MIB, RECORD_BYTES_MAX

PIECE_BYTES_MAX: Final = 64 << 10
"""A unit's sound is one piece. Large frames take turns after each."""
WRITE_BYTES: Final = 2 * PIECE_BYTES_MAX
"""Pieces of one write: a unit's answer, with its head. Urgent frames wait for one write."""
FRAME_BYTES_MAX: Final = RECORD_BYTES_MAX
"""A frame holds one record; the largest is a turn with all pictures and sound that fit a chat."""
PARTIAL_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Frames that have not arrived whole: one turn of that size, and units of all other sessions."""
PARTIAL_FRAMES_MAX: Final = 2048
"""One a session; a worker has 1024 slots at most."""
OUTBOX_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Frames that wait for the other end: a session has one call at a time, so more is a standstill."""
READ_BYTES: Final = 256 << 10
"""A unit and its head in one read."""
SHARED_BYTES_MAX: Final = 32 * MIB
"""Blobs of openings and turns that both ends keep: a dozen voices of 30 s, or a chat's pictures."""
SHARED_RECORDS_MAX: Final = 1024
"""Openings and turns that both ends keep with them: each takes kilobytes, however short it is."""

HELLO_BYTES_MAX: Final = 64 << 10
"""A greeting has 300 bytes, a worker's description some kilobytes."""
HELLO_WAIT_S: Final = 10.0
"""For TLS and the greeting, which compute nothing; a worker that still loads does not greet."""
BEAT_S: Final = 1.0
"""Between heartbeats: a thousandth of a core for hundreds of links."""
SILENT_BEATS_MAX: Final = 5
"""Beats of our own without a byte from the other end. An event loop that stands still so long
cannot serve units of a second. Counted in beats, so that our own pause is not taken for theirs."""
TEXT_CHARS_MAX: Final = 500
"""Of the other end's words that we show: an error is one line."""

LINKS_MAX: Final = 64
"""Gateways of one worker: each may hold a frame."""
GREETINGS_MAX: Final = 64
"""Connections of one worker that have not greeted: each may hold `HELLO_BYTES_MAX`."""
