"""What a fork changes: its request and result, and its client, which sends the recorded frames.

    ForkError
     ├── ForkRefusedError    the request is invalid, or the change is not possible at that unit
     └── CannotForkError     the recording cannot be continued here: its model, or the recording

Messages name an alternative, if there is one. Rules of the client:
- An unchanged frame is passed on verbatim. A changed frame is encoded again by its own dialect,
  from its message: fields that the dialect does not know are lost.
- Sound is replaced by its position in the client's whole sound, sample by sample, so that a unit
  gets it from its first sample on, however it was split. The length stays: silence follows the new
  sound. Pictures and flags stay.
- A unit is forced to listen by the flag of the append that completes it, as a client does it. That
  flag interrupts the unit in flight (B6), so all earlier units must be finished; an append that
  extends beyond the unit is sent in two pieces.
- A setting is changed in the init, and must be valid for the dialect and the server.

The client sends nothing else, and nothing at another time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import attrs

from protocol.machine.core import Phase
from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values import model as md
from protocol.values.errors import FieldError, LocalProtocolError
from protocol.values.limits import APPEND_SAMPLES_MIN
from protocol.values.requests import Append, BadPicture, Init, Request
from protocol.wire.codec import parse_frame
from protocol.wire.table import Dialect
from runtime.settings.settings import nearest

from ..story.wire import Wire

Setting = bool | int | float | str
NO_SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({})


class ForkError(Exception):
    """The fork was not made."""


class ForkRefusedError(ForkError):
    """The request is not possible for this recording."""


class CannotForkError(ForkError):
    """The recording cannot be continued here."""


@attrs.frozen(kw_only=True)
class Change:
    """The changes of a fork; None keeps the recorded value.

    Attributes:
        at: the first changed unit.
        force_listen: that unit has to listen.
        pcm: the sound from that unit on, float32 LE, 16 kHz mono, followed by silence.
        seed: of the session's random choices.
        settings: of the session's init, by name.
        model: another model's name.
    """

    at: int
    force_listen: bool = False
    pcm: bytes | None = attrs.field(default=None, repr=False)
    seed: int | None = None
    settings: Mapping[str, Setting] = NO_SETTINGS
    model: str | None = None


@attrs.frozen(kw_only=True)
class Prefix:
    """The units before the fork: the model's results compared with the recording.

    Of `units`, forced decoding changed the answers of `held`; the results of `otherwise` differ
    nevertheless. `first` is the first difference, in words.
    """

    units: int = 0
    held: int = 0
    otherwise: int = 0
    first: str | None = None


Decisions = tuple[bool, Sequence[int], Sequence[int]]
"""Of a unit: whether it listens, the ids decided, and the speech codes."""
Decided = Mapping[int, Decisions]
"""By unit."""


def decisions_of(result: md.UnitResult) -> Decisions:
    """Return the decisions in a unit's result."""
    return result.is_listen, result.decided_ids, result.codec_ids


@attrs.frozen
class Forked:
    """A fork that was made, from its `unit` on.

    Attributes:
        parent_seq: the parent's event by which the unit began: everything before it is equal.
        units: units started in it.
        prefix: the units before that one.
        ended_early: the fork was still running at the recording's end, so that its client left.
    """

    recording_id: str
    parent: str
    parent_seq: int
    unit: int
    model: str
    units: int
    prefix: Prefix
    ended_early: bool


# -- the client -----------------------------------------------------------------------------------


CONFIG_NAMES: Final = tuple(field.name for field in attrs.fields(md.DuplexConfig))
INIT_NAMES: Final = ("instructions", "max_slice_nums")
SETTING_NAMES: Final = (*INIT_NAMES, *CONFIG_NAMES)
"""The names of `--set`, those of the messages (`requests.Init`, `model.DuplexConfig`)."""


class ForkClient:
    """The client of a fork, whose unit begins at `begin_sample` of the client's sound."""

    def __init__(self, change: Change, connected: ev.ConnectionOpened, begin_sample: int) -> None:
        self._change: Final = change
        self._begin_sample: Final = begin_sample
        self._sent_samples = 0
        self._appending = (0, 0)
        self._is_changed: Final = (
            change.force_listen or change.pcm is not None or bool(change.settings)
        )
        self._wire: Final = Wire(connected)

    def frames_for(self, event: ev.FrameReceived, session: Session) -> tuple[ev.FrameReceived, ...]:
        """Return the client's frames in place of a recorded one, at its time.

        `session` is as before that frame. `ForkRefusedError`: the requested change is not possible.
        """
        self._count_sent(session)
        if not self._is_changed:
            return (event,)
        message = self._wire.request(event.frame)
        if isinstance(message, Append):
            self._appending = (len(message.pcm) // md.SAMPLE_BYTES, session.counts["appends"])
            sent = self._forced(self._sounding(message), session)
        elif isinstance(message, Init) and self._change.settings:
            return (attrs.evolve(event, frame=self._set_up(self._wire.dialect, message)),)
        if not isinstance(message, Append) or sent == (message,):
            return (event,)
        dialect = self._wire.dialect
        try:
            frames = [dialect.encode_request(_without_bad_pictures(one)) for one in sent]
        except LocalProtocolError as error:
            raise ForkRefusedError(
                "--replace-audio, --force-listen: sound can be changed in a session of realtime, "
                f"duplex-v1 or legacy-duplex, and this one is of {dialect.name}"
            ) from error
        return tuple(attrs.evolve(event, frame=frame) for frame in frames)

    # -- sound ----------------------------------------------------------------------------------

    def _count_sent(self, session: Session) -> None:
        samples, appends = self._appending
        if samples and session.counts["appends"] > appends:
            self._sent_samples += samples
        self._appending = (0, 0)

    def _sounding(self, append: Append) -> Append:
        """Replace the sound of an append, from the unit's first sample on."""
        new, samples = self._change.pcm, len(append.pcm) // md.SAMPLE_BYTES
        kept = max(0, self._begin_sample - self._sent_samples)
        if new is None or kept >= samples:
            return append
        start = max(0, self._sent_samples - self._begin_sample) * md.SAMPLE_BYTES
        wanted = (samples - kept) * md.SAMPLE_BYTES
        given = new[start : start + wanted].ljust(wanted, b"\0")
        return attrs.evolve(append, pcm=append.pcm[: kept * md.SAMPLE_BYTES] + given)

    # -- listening ------------------------------------------------------------------------------

    def _forced(self, append: Append, session: Session) -> tuple[Append, ...]:
        """Flag the append that completes the unit, and split off the sound of the next unit."""
        end = self._begin_sample + md.UNIT_SAMPLES - self._sent_samples
        samples = len(append.pcm) // md.SAMPLE_BYTES
        if not self._change.force_listen or not 0 < end <= samples:
            return (append,)
        at = self._change.at
        is_busy = session.phase not in (Phase.IDLE, Phase.OPENING)
        if end > md.UNIT_SAMPLES or session.units_waiting or is_busy:
            raise ForkRefusedError(
                f"--force-listen: the sound of unit {at} came before the model was done with what "
                "came before it, which an interruption would cut too; fork at an earlier unit"
            )
        flagged = attrs.evolve(append, force_listen=True)
        if end == samples:
            return (flagged,)
        if min(end, samples - end) < APPEND_SAMPLES_MIN:
            raise ForkRefusedError(
                f"--force-listen: unit {at} and the next share a piece of sound that is too short "
                f"to be parted: {APPEND_SAMPLES_MIN * 1000 // md.INPUT_RATE_HZ} ms are the least"
            )
        cut = end * md.SAMPLE_BYTES
        rest = attrs.evolve(append, pcm=append.pcm[cut:])
        flagged = attrs.evolve(flagged, pcm=append.pcm[:cut], frames=(), max_slice_nums=None)
        return flagged, rest  # pictures belong to the last sample

    # -- settings -------------------------------------------------------------------------------

    def _set_up(self, dialect: Dialect, recorded: Init) -> str:
        settings = self._change.settings
        config: dict[str, Any] = {n: settings[n] for n in CONFIG_NAMES if n in settings}
        own: dict[str, Any] = {n: settings[n] for n in INIT_NAMES if n in settings}
        changed = attrs.evolve(
            recorded, config=attrs.evolve(recorded.config, **config), ignored=(), **own
        )
        names = ", ".join(settings)
        try:
            frame = dialect.encode_request(changed)
            understood = dialect.parse(Request.INIT, parse_frame(frame), self._wire.context)
        except (LocalProtocolError, FieldError, TypeError) as error:
            raise ForkRefusedError(f"--set {names}: {error}") from error
        if understood != changed:
            raise ForkRefusedError(f"--set {names}: {dialect.name} cannot say it")
        return frame


def _without_bad_pictures(append: Append) -> Append:
    """Leave out the pictures that the recorded session left out: nothing is known of them."""
    good = tuple(frame for frame in append.frames if not isinstance(frame, BadPicture))
    return attrs.evolve(append, frames=good)


def read_setting(text: str) -> tuple[str, Setting]:
    """Read `NAME=VALUE`, the value JSON or text; `ForkRefusedError`: unknown, or no value."""
    name, equals, value = text.partition("=")
    if name not in SETTING_NAMES or not equals:
        known = ", ".join(SETTING_NAMES)
        raise ForkRefusedError(
            f"--set {text}: write NAME=VALUE, with one of {known}{nearest(name, SETTING_NAMES)}"
        )
    with suppress(ValueError):
        read = json.loads(value)
        if name != "instructions" and isinstance(read, bool | int | float | str):
            return name, read
    return name, value
