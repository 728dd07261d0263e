"""What a replay found: plain values, the same for text, JSON and tests.

Rules: times are nanoseconds of the session's clock, 0 at its start. What was recorded and what came
out are short, readable text. Nothing here decides what a difference is, nor prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from recorder.read.scan import Damage

Kind = Literal[
    "changed",
    "missing",
    "left_over",
    "state",
    "head",
    "refused",
    "unmapped",
    "fin",
    "model",
    "model_failed",
]
"""How a replay parted from its log:

| kind | the log has | the replay has |
|---|---|---|
| `changed` | an effect | another effect, or one with another content |
| `missing` | the next event, or the end | an effect that was never recorded |
| `left_over` | an effect | nothing more, or an end |
| `state` | a state's hash | another state |
| `refused` | an event | a machine that refuses it |
| `unmapped` | a record | no event that it could stand for |
| `fin` | a session's end, counts and state | others, or a session that goes on |
| `head` | what the session is | a session that begins as another |
| `model` | the model's output | another output (full replay) |
| `model_failed` | the model's output | a model that failed (full replay) |
"""


@attrs.frozen(kw_only=True)
class Cause:
    """The event that led to something.

    Attributes:
        seq: its record.
        kind: its class, such as `UnitDone`.
        summary: its fields, shortened.
    """

    seq: int
    kind: str
    summary: str


@attrs.frozen(kw_only=True)
class Divergence:
    """The first place at which a replay parted from its log.

    Attributes:
        kind: how; see `Kind`.
        seq: the record at which it shows.
        record: what that record is, such as `tx` or `effect StartUnit`.
        at_ns: its time.
        unit: the last unit started by then; None before the first.
        field: where in the record; empty where all of it differs.
        recorded: what the log says.
        came_out: what the replay says.
        cause: the last event the machine took; None before the first.
        snr_db: of PCM that differs: how loud the recorded signal is beside the difference.
        margin: of a decision, where the model was forced: how many logits the model's own choice
            was above the recorded one.
        draw_gap: likewise: how far the random number was from one that gives the recorded one.
        near_tie: likewise: rounding could have turned it.
    """

    kind: Kind
    seq: int
    record: str
    at_ns: int
    unit: int | None
    field: str
    recorded: str
    came_out: str
    cause: Cause | None
    snr_db: float | None = None
    margin: float | None = None
    draw_gap: float | None = None
    near_tie: bool | None = None


@attrs.frozen(kw_only=True)
class Maker:
    """What recorded a session, or replays it.

    Attributes:
        software: the version of Antiphon; empty where the log does not say.
        schema: the version of events and effects.
        behaviour: the session's number (`protocol.values.behaviour`); of a replay the newest it
            knows.
    """

    software: str = ""
    schema: int = 1
    behaviour: int = 0


@attrs.frozen(kw_only=True)
class ReplayReport:
    """What logic replay found.

    Attributes:
        recorded_by: what recorded the session.
        replayed_by: what replayed it.
        records: records read, whatever their kind.
        events: events the machine took.
        effects: effects that came out as recorded, frames among them.
        frames: sent frames that came out byte for byte.
        states: state hashes that came out as recorded.
        states_of_old: of another snapshot's keys, and so not compared.
        units: units started.
        span_ns: the session's time from its start to the last record.
        finished: `fin` was reached; a log without it ends where its server was killed, or it is
            still being written.
        truncated: the log ends, without `fin`, amid the effects of its last event.
        divergence: the first one; None where everything came out as recorded.
        damage: damage of the log, up to a bound; replay stopped at the first unless told to go on.
        damage_count: all of it.
    """

    recorded_by: Maker
    replayed_by: Maker
    records: int
    events: int
    effects: int
    frames: int
    states: int
    states_of_old: int
    units: int
    span_ns: int
    finished: bool
    truncated: bool
    divergence: Divergence | None
    damage: tuple[Damage, ...]
    damage_count: int

    @property
    def is_newer(self) -> bool:
        """Whether the session was recorded by what this software does not know."""
        there, here = self.recorded_by, self.replayed_by
        return there.schema > here.schema or there.behaviour > here.behaviour

    @property
    def identical(self) -> bool:
        """Whether everything in the log came out as recorded, and all that was read is sound."""
        return self.divergence is None and not self.damage_count


@attrs.frozen(kw_only=True)
class Mismatch:
    """A line of the environment's fingerprint that differs; None where it is not there."""

    name: str
    recorded: str | None
    here: str | None


@attrs.frozen(kw_only=True)
class UnitDifference:
    """How one unit came out otherwise; its fields are those of `Divergence`."""

    unit: int
    seq: int
    field: str
    recorded: str
    came_out: str
    snr_db: float | None
    margin: float | None
    draw_gap: float | None
    near_tie: bool | None


@attrs.frozen(kw_only=True)
class FullReport:
    """What full replay found.

    Attributes:
        model: its name.
        environment: what differs between where it was recorded and here.
        fingerprint: what the environment here is, line by line.
        compared: whether the model ran: not where the environment differs and nobody insisted.
        teacher_forced: whether it was made to decide what was recorded.
        units: units that the model ran again.
        units_held: those of them that a fork had held to its parent's (`held`), and which were held
            again: what they decide is not judged.
        units_changed: those of them whose output differs in anything.
        changed: how each of those differs, the first of them up to a bound.
        turns: turns of chat that it answered again.
        turns_changed: those of them whose output differs in anything.
        chunks: chunks of a transcription that it heard again.
        chunks_changed: those of them whose output differs in anything.
        decisions: tokens and speech codes that it was forced to.
        decisions_changed: those of them that it would have decided otherwise.
        near_ties: those of these that rounding could have turned.
        logits_changed: the first unit whose first logits differ, even where its tokens do not.
        divergence: the first difference in what the model made.
        recorded: logic replay of the log as it is; None where nothing was compared.
        renewed: logic replay of the log with the model's new outputs in place of the old ones.
    """

    model: str
    environment: tuple[Mismatch, ...]
    compared: bool
    fingerprint: Mapping[str, str] = attrs.field(factory=dict)
    teacher_forced: bool = False
    units: int = 0
    units_held: int = 0
    units_changed: int = 0
    changed: tuple[UnitDifference, ...] = ()
    turns: int = 0
    turns_changed: int = 0
    chunks: int = 0
    chunks_changed: int = 0
    decisions: int = 0
    decisions_changed: int = 0
    near_ties: int = 0
    logits_changed: int | None = None
    divergence: Divergence | None = None
    recorded: ReplayReport | None = None
    renewed: ReplayReport | None = None

    @property
    def first_divergence(self) -> Divergence | None:
        """The model's own first; else the machine's: what it was given is the log's then."""
        reports = (self.recorded, self.renewed)
        return self.divergence or next((r.divergence for r in reports if r and r.divergence), None)

    @property
    def identical(self) -> bool:
        """Whether the model and the machine made again what was recorded."""
        reports = (self.recorded, self.renewed)
        return self.divergence is None and all(r is not None and r.identical for r in reports)
