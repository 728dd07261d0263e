"""Where the model is heard: its sound as a client plays it, and the words that go with it.

A piece begins when it was sent, or after the sound that still plays. An interruption cuts what is
not heard by then, with its words. Words stand where the sound does that is sent at the same time;
without one, where they were sent.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from .conversation import TICKS_PER_MS, TICKS_PER_SAMPLE, Span, Text, join
from .limits import PAUSE_MS, SPEECH_GAP_MS
from .placing import JITTER_MS, Line, sample_at, time_of

SAMPLE: Final = TICKS_PER_SAMPLE["model"]
GAP: Final = SPEECH_GAP_MS * TICKS_PER_MS
PAUSE: Final = PAUSE_MS * TICKS_PER_MS
JITTER: Final = JITTER_MS * TICKS_PER_MS


@attrs.define
class _Piece:
    """Sound from sample `begin` to `end`, which may still be cut, and the words in it."""

    response_id: str
    begin: int
    end: int
    words: int


class ModelSpeech:
    """Collects where the model is heard; `underruns` counts the gaps within responses."""

    def __init__(self) -> None:
        self.underruns = 0
        self.texts: Final[list[Text]] = []
        self._line: Final = Line("model")
        self._spans: list[Span] = []
        self._pieces = deque[_Piece]()
        self._last: tuple[str, int] = ("", 0)
        self._written = ""
        self._written_by: tuple[str, int] = ("", 0)

    def say(self, at_ns: int, text: str, samples: int, response_id: str) -> None:
        """Take words, or sound (24 kHz), or both; words may come before their sound."""
        self.settle(at_ns)
        if self._written_by != (response_id, at_ns):
            self.flush()
        self._written, self._written_by = self._written + text, (response_id, at_ns)
        if samples:
            begin = self._line.place(at_ns, samples, is_captured=False)
            words = len(self._written.split())
            self._pieces.append(_Piece(response_id, begin, begin + samples, words))
            self._written = ""

    def flush(self) -> None:
        """Let words be words without sound."""
        if self._written:
            at = sample_at("model", self._written_by[1])
            self._write(at, len(self._written.split()))
        self._written = ""

    def cut(self, at_ns: int) -> None:
        """Stop what would be heard from here on."""
        self.settle(at_ns)
        end = self._line.cut(at_ns)
        kept = [piece for piece in self._pieces if time_of("model", piece.begin) < at_ns]
        self._pieces = deque(attrs.evolve(piece, end=min(piece.end, end)) for piece in kept)

    def settle(self, now_ns: int | None) -> None:
        """Count what is heard by a time, or all: it is cut no more."""
        while self._pieces and (now_ns is None or time_of("model", self._pieces[0].end) <= now_ns):
            self._hear(self._pieces.popleft())

    def spans(self) -> tuple[Span, ...]:
        """Return the stretches of its sound, once all is said."""
        self.flush()
        self.settle(None)
        return tuple(self._spans)

    def _write(self, at: int, words: int) -> None:
        self.texts.append(Text(at * SAMPLE, words))

    def _hear(self, piece: _Piece) -> None:
        self._write(piece.begin, piece.words) if piece.words else None
        begin, end = piece.begin * SAMPLE, piece.end * SAMPLE
        if end <= begin:
            return
        response, ended = self._last
        is_same = response != "" and piece.response_id == response
        self.underruns += is_same and begin - ended > JITTER
        join(self._spans, Span(begin, end), PAUSE if is_same else GAP)
        self._last = (piece.response_id, end)
