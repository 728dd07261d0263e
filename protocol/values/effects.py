"""The machine's outputs: actions that a session requests, in the imperative.

Effects are performed in the order in which a step gives them. What a client sees
(`Send`, `Attach`, `Close`) waits for the log, so that no recording lacks it; the others never wait.
"""

from __future__ import annotations

from typing import Literal

import attrs

from .events import TimerName
from .limits import Mode
from .model import Chunk, Opening, Turn, Unit

MediaKind = Literal["jpeg", "wav", "voice", "image", "audio", "video", "second"]
"""The kind of media to decode: a frame to be proven; reference audio; the reference audio of that
name in the library (`data` is the name, UTF-8); an image, a sound, a video of a conversation; a
second of a client's sound to be resampled (`data` as in `protocol.wire.audio.resample`).
"""


@attrs.frozen(kw_only=True)
class Send:
    """Send a text frame; `ordinal` counts a session's frames from 0."""

    ordinal: int
    frame: str


@attrs.frozen(kw_only=True)
class Attach:
    """Greet the client's new connection, and send it again what the log holds of the session.

    Attributes:
        frame: the greeting, which has no number; `$token` in it stands for the token.
        after: ordinal of the last `Send` that the client has; -1 for none.
        before: the ordinal of the next `Send`.
    """

    frame: str
    after: int
    before: int


@attrs.frozen(kw_only=True)
class Close:
    """Close the WebSocket after everything before it is sent."""

    code: int
    reason: str


@attrs.frozen(kw_only=True)
class Admit:
    """Ask for room for a chat, which holds no slot yet: answered by `Admitted` or a refusal."""


@attrs.frozen(kw_only=True)
class EnterQueue:
    """Ask for a slot: answered by `SlotLeased`, `TicketMoved` or `AdmissionRefused`.

    `ahead`: the session lost its slot, so it goes before those that never had one.
    """

    mode: Mode
    ahead: bool = False


@attrs.frozen(kw_only=True)
class LeaveQueue:
    """Leave the queue: answered by `TicketLeft`, or a `SlotLeased` that was already on its way."""


@attrs.frozen(kw_only=True)
class OpenBackend:
    """Open the session on the leased slot."""

    lease: int
    opening: Opening


@attrs.frozen(kw_only=True)
class Rebuild:
    """Bring the model on the leased slot to the session's past, as its log holds it (B11)."""

    lease: int


@attrs.frozen(kw_only=True)
class DecodeMedia:
    """Decode media off the event loop.

    Attributes:
        media: counts a session's media from 0.
        kind: as the client declared it.
        data: the file; for `audio` without a WAV's head, float32 LE mono at `rate_hz`; for `second`
            signed 16-bit at `rate_hz`, which is 24000 if it is 0.
        stack_frames: of a `video`: pictures a second (see `requests.VideoPart`).
    """

    media: int
    kind: MediaKind
    data: bytes
    rate_hz: int = 0
    stack_frames: int = 1


@attrs.frozen(kw_only=True)
class CancelDecode:
    """Forget media that is no longer needed; an event about it may be on its way, and is stale."""

    media: int


@attrs.frozen(kw_only=True)
class DetectSpeech:
    """Find where the client begins or ends to speak: `SpeechStarted` and `SpeechStopped` follow.

    Attributes:
        at: samples of the client before these.
        data: signed 16-bit LE mono at `rate_hz`.
        threshold: 0 to 1; a higher one needs louder speech.
        silence_ms: the silence that ends speech, in milliseconds.
        is_speech: the client speaks already.
        speech_ms: shorter speech is not told: a sound of attention, which does not interrupt; in
            milliseconds.
    """

    at: int
    rate_hz: int
    data: bytes
    threshold: float
    silence_ms: int
    is_speech: bool
    speech_ms: int = 0


@attrs.frozen(kw_only=True)
class StartUnit:
    """Prefill and generate."""

    unit: Unit


@attrs.frozen(kw_only=True)
class Interrupt:
    """Cut the unit in flight at its next step (B6)."""

    index: int


@attrs.frozen(kw_only=True)
class StartFinalize:
    """Finalize the unit; `interrupted`: its answer was withheld (B6)."""

    index: int
    interrupted: bool


@attrs.frozen(kw_only=True)
class Rollback:
    """Restore the state from before the unit (B3)."""

    index: int


@attrs.frozen(kw_only=True)
class ForgetRecording:
    """Remove the session's log, and stop recording: its client asked not to be recorded."""


@attrs.frozen(kw_only=True)
class DropUnit:
    """A waiting unit is dropped for newer input (B7): a record that requires no action.

    Attributes:
        ordinal: its second of the session's input, from 0.
        input_id: the append that completed it.
        force_listen_passed: its `force_listen` passed to the next unit.
    """

    ordinal: int
    input_id: str
    force_listen_passed: bool


@attrs.frozen(kw_only=True)
class StartTurn:
    """Prefill a conversation on the leased slot, and answer it."""

    lease: int
    turn: Turn


@attrs.frozen(kw_only=True)
class CutTurn:
    """Cut the answer in progress at its next token."""

    index: int


@attrs.frozen(kw_only=True)
class RunChunk:
    """Transcribe a second of an utterance on the leased slot."""

    lease: int
    chunk: Chunk


@attrs.frozen(kw_only=True)
class Release:
    """Return the slot after its cleanup; `condemn`: its worker hangs (B4)."""

    lease: int
    condemn: bool = False


@attrs.frozen(kw_only=True)
class SetTimer:
    """Post `TimerFired` at `at_ns` of the session's clock; no timer of this name is set."""

    name: TimerName
    generation: int
    at_ns: int


@attrs.frozen(kw_only=True)
class CancelTimer:
    """Forget a timer; if it has fired already, its generation is stale."""

    name: TimerName
    generation: int


Effect = (
    Send
    | Attach
    | Close
    | Admit
    | EnterQueue
    | LeaveQueue
    | OpenBackend
    | Rebuild
    | DecodeMedia
    | CancelDecode
    | DetectSpeech
    | StartUnit
    | Interrupt
    | StartFinalize
    | Rollback
    | DropUnit
    | ForgetRecording
    | StartTurn
    | CutTurn
    | RunChunk
    | Release
    | SetTimer
    | CancelTimer
)
