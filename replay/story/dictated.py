"""The time at which the sound of a transcription's chunks is heard.

Each second of an utterance is given to the model as soon as it is there. A client that sends a file
at once sends it long before it would be heard; its text is placed where its sound is heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import attrs

from protocol.machine.session import Session
from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES


@attrs.frozen
class _Piece:
    utterance: int
    until: int
    end_ns: int


class Dictated:
    """Sound of a transcription not written down yet; the model was given all up to `heard_ns`."""

    def __init__(self) -> None:
        self.heard_ns = 0
        self._pieces: deque[_Piece] = deque()
        self._utterance = self._samples = 0

    def hear(self, samples: int, end_ns: int, session: Session | None) -> None:
        """Take samples of the open utterance, ending at `end_ns`.

        Without a session that took them the utterance is unknown.
        """
        utterance = 0 if session is None else session.counts.get("utterances", 1) - 1
        if utterance != self._utterance:
            self._utterance, self._samples = utterance, 0
        self._samples += samples
        self._pieces.append(_Piece(utterance, self._samples, end_ns))

    def write(self, chunk: object) -> None:
        """Take a chunk that the model is given, as in `StartChunk`."""
        if not isinstance(chunk, Mapping):
            return
        utterance, index = chunk.get("utterance"), chunk.get("index")
        if not isinstance(utterance, int) or not isinstance(index, int):
            return
        until = (index + 1) * UNIT_SAMPLES
        while self._pieces and self._pieces[0].utterance <= utterance:
            piece = self._pieces[0]
            if (piece.utterance, piece.until) >= (utterance, until):
                rest_ns = (piece.until - until) * NS_PER_S // INPUT_RATE_HZ
                self.heard_ns = max(self.heard_ns, piece.end_ns - rest_ns)
                return
            self.heard_ns = max(self.heard_ns, piece.end_ns)
            self._pieces.popleft()
