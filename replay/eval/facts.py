"""What is gathered from the log of one recording, before it is measured: plain values."""

from __future__ import annotations

from typing import Literal

import attrs

from protocol.values.modes import Mode, Work
from runtime.measures.conversation import Conversation
from runtime.measures.talk import SpeechSource

Lost = Literal["speech", "words"]
"""What a redaction took out that measures need: the user's sound, or the model's text."""


@attrs.frozen(kw_only=True)
class Answer:
    """A question of a chat, and when its answer came.

    Attributes:
        piece_ns: when its first piece was sent; None if none was.
        sound_ns: when its first sample was played.
        generating_ns: from the end of the prefill to the end of the answer; 0 if it did not end.
    """

    asked_ns: int
    piece_ns: int | None = None
    sound_ns: int | None = None
    generated_tokens: int = 0
    generating_ns: int = 0


@attrs.frozen(kw_only=True)
class Facts:
    """A recording.

    Attributes:
        recording_id, mode, dialect: None if the log does not say.
        work: what its mode asks of a model.
        finished: the log has its end.
        damage_count: of the log; with damage the facts have gaps.
        lost: what is missing for some measures; speech only if the log does not say where it was.
        speech_source: who found the user's speech; None except in duplex sessions.
        input_lead: when sound came that could not have been spoken yet, and by how much.
        late_units, answered_units: late is None if the session could not be stepped to its end.
        decisions: units whose first token was free and has a margin.
        word_delays: of a transcription: when words came, and how long after their sound.
    """

    recording_id: str | None
    mode: Mode | None
    dialect: str | None
    work: Work
    duration_ns: int
    finished: bool
    damage_count: int
    lost: frozenset[Lost]
    speech_source: SpeechSource | None
    conversation: Conversation
    input_lead: tuple[int, int] | None
    errors: int
    dropped_units: int
    late_units: int | None
    answered_units: int
    underruns: int
    near_ties: int
    decisions: int
    answers: tuple[Answer, ...]
    word_delays: tuple[tuple[int, int], ...]
