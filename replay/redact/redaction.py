"""A log without its content (`antiphon recordings redact`): events edited, all else made again.

- Only events and the head are edited; effects, state hashes and `fin` follow from them.
- `FIELDS` names each field of each class in an event; an unknown one is an error. Lengths stay, of
  text, sound, tokens and codes, because the session counts them. Ids become 0; -1, for no token,
  stays. If anything is taken out, all hashes of inputs and logits are too: with a hash, a guess
  of a short text could be checked.
- The session must take the same course: each effect has the class, numbers and flags of the
  recorded one. Otherwise nothing is written: the log is damaged or of another version, or our
  editing is wrong.
- A mark keeps its time; its words are text, and its author is a name. Other records that are not
  the log's own are left out, and counted.
- A run reads the log once, and holds one event and its effects in memory.

The removed content is on stdout, as a table or as one JSON object; an error is one line on stderr.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import attrs
import click

from protocol.values import events as ev
from protocol.values import model
from protocol.values.frames import Refused, Shortened
from protocol.values.limits import NS_PER_S
from protocol.values.messages import QueuePlace
from protocol.values.records import RECORD_FIELDS
from recorder.format.format import Fields, Record, Value
from recorder.format.mapping import EFFECT_KINDS, EVENT_KINDS, MappingError, event_of
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.write.files import new_file
from runtime.model.models import MODELS

from ..rerun.difference import describe
from ..rerun.logic import LogRegenerator, RegenerationError, head_record, write
from ..shared.commands import counted, finish, progress, reading, table
from ..shared.recordings import REDACTED, RecordingType
from .content import KINDS, TRACES, Kind, Policy, Side, Tally, fill, mute
from .frames import FrameEditor

# -- events ----------------------------------------------------------------------------------------


Shape = Literal["words", "pcm", "ids", "name"]


class Special(Enum):
    """Fields with special rules."""

    NOTHING = "a number, a flag, a time, a name that the server made"
    BELOW = "a value with fields of its own, or several"
    TRACE = "a hash, or a measure of logits"
    FRAME = "a client's frame: `frames`"
    MEDIA = "what was decoded: it goes with the frame that it came in"


@attrs.frozen
class Content:
    """A field with content."""

    kinds: tuple[Kind, ...]
    side: Side
    shape: Shape


LEFT_OUT: Final = "the words of this error were left out"
ID_BYTES: Final = 8
"""The bytes that a token id or a code counts, in the report."""
_RULES: Final[Mapping[str, Content | Special]] = {
    "below": Special.BELOW,
    "trace": Special.TRACE,
    "frame": Special.FRAME,
    "media": Special.MEDIA,
    "words": Content(("text",), "model", "words"),
    "tokens": Content(("text",), "model", "ids"),
    "speech": Content(("audio",), "model", "pcm"),
    "codes": Content(("audio",), "model", "ids"),
    "user_words": Content(("text",), "user", "words"),
    "transcript": Content(("text",), "both", "words"),  # the user's words, written by the model
    "transcript_tokens": Content(("text",), "both", "ids"),
    "prompt": Content(("prompt",), "user", "ids"),
    "fed": Content(("text", "prompt"), "both", "ids"),  # words of both sides, and the prompt
    "user_name": Content(("name",), "user", "name"),
    "model_name": Content(("name",), "model", "name"),
}


def _fields(plain: str, **others: str) -> dict[str, Content | Special]:
    """List fields by name: those without content, then those of each rule."""
    named = [(Special.NOTHING, plain), *((_RULES[rule], names) for rule, names in others.items())]
    return {name: rule for rule, names in named for name in names.split()}


_TIMED: Final = _fields("at_ns")
_INDEXED: Final = _fields("at_ns index")
_LEASED: Final = _fields("at_ns lease")
FIELDS: Final[Mapping[type, Mapping[str, Content | Special]]] = {
    ev.ConnectionOpened: _fields(
        "at_ns recording_id created_ms mode seed recording endpoint behaviour quiet must_record"
        " recording_notice resume_hash",
        below="limits",
        user_name="label",
    ),
    ev.SessionLimits: _fields(
        "session_s init_wait_s cleanup_wait_s context_tokens idle_s sliding_windows can_rollback"
        " close_on_recording_failure pause_s watchdog_s models audio_bytes rebuild_wait_s"
        " rebuild_units can_repeat_turn can_force_speak has_vision detach_s resume_s transcriber"
        " barge_in backchannel_ms duplex_tools"
    ),
    ev.FrameReceived: _fields("at_ns has_room", frame="frame", below="shortened"),
    Shortened: _fields("size_bytes blake2b unreadable read_bytes", frame="head", below="refused"),
    Refused: _fields("code ignored", frame="message"),
    **dict.fromkeys((ev.SendFailed, ev.TicketLeft, ev.TicketCancelled, ev.Admitted), _TIMED),
    **dict.fromkeys((ev.RecordingFailed, ev.Draining, ev.Flooded, ev.AnswerCancelled), _TIMED),
    ev.Forked: _fields("at_ns resume_hash recording_notice", below="limits"),
    ev.PeerGone: _fields("at_ns close_code"),
    ev.PeerAttached: _fields("at_ns after resume_hash"),
    ev.TicketMoved: _fields("at_ns", below="place"),
    QueuePlace: _fields("position estimated_wait_s ticket_id queue_length"),
    ev.AdmissionRefused: _fields("at_ns code"),
    ev.SlotLeased: _fields("at_ns lease slot"),
    ev.BackendOpened: _fields("at_ns lease", below="opened"),
    model.Opened: _fields("prompt_length takes_events", prompt="fed_ids"),
    ev.BackendOpenFailed: _fields("at_ns lease context_full is_lost", frame="refused"),
    ev.MediaDecoded: _fields("at_ns media", media="pcm images stacked_images"),
    ev.MediaRejected: _fields("at_ns media reason"),
    **dict.fromkeys((ev.SpeechStarted, ev.SpeechStopped), _fields("at_ns at_ms")),
    ev.UserTranscribed: _fields("at_ns start_ms end_ms is_last", user_words="text"),
    ev.UnitDone: _fields("at_ns", below="result"),
    model.UnitResult: _fields(
        "index is_listen end_of_turn kv_length vision_slices vision_tokens",
        below="cut costs",
        trace="input_hash logits_hash margin",
        tokens="decided_ids fed_ids",
        codes="codec_ids",
        words="text",
        speech="pcm",
    ),
    model.Cut: _fields("stage step"),
    model.Costs: _fields("prefill_us generate_us llm_us tts_us token2wav_us wall_us"),
    ev.UnitFailed: _fields("at_ns index context_full"),
    ev.FinalizeDone: _fields("at_ns", below="finalized"),
    model.Finalized: _fields("index kv_length cost_us", tokens="fed_ids", below="silent"),
    model.Silent: _fields("end is_open", tokens="decided_ids", below="spans"),
    model.Span: _fields("kind", user_name="name", words="text arguments fault"),  # the user's tools
    **dict.fromkeys((ev.FinalizeFailed, ev.RollbackDone, ev.RollbackFailed), _INDEXED),
    ev.TurnPrefilled: _fields("at_ns", below="prefill"),
    model.Prefill: _fields("index input_tokens cost_us", fed="fed_ids", trace="input_hash"),
    ev.TurnProgress: _fields("at_ns", below="chunk"),
    model.TurnChunk: _fields(
        "index step", tokens="token_ids", codes="codec_ids", words="text", speech="pcm"
    ),
    ev.TurnDone: _fields("at_ns", below="result"),
    model.TurnResult: _fields(
        "index reason generated_tokens kv_length cut",
        below="tool_calls costs",
        trace="logits_hash margin",
        codes="codec_ids",
        words="text",
        speech="pcm",
    ),
    model.ToolCall: _fields("id", model_name="name", words="arguments"),
    ev.TurnFailed: _fields("at_ns index context_full refused"),
    ev.ChunkDone: _fields("at_ns", below="result"),
    model.ChunkResult: _fields(
        "utterance index reason prompt_tokens generated_tokens kv_length",
        trace="input_hash logits_hash margin",
        below="costs",
        transcript_tokens="token_ids",
        fed="fed_ids",
        transcript="text",
    ),
    ev.ChunkFailed: _fields("at_ns index utterance context_full"),
    **dict.fromkeys((ev.BackendLost, ev.LeaseRevoked), _LEASED),
    **dict.fromkeys((ev.RebuildFailed, ev.BackendReleased), _LEASED),
    ev.Rebuilt: _fields("at_ns lease steps batches cost_us"),
    ev.TimerFired: _fields("at_ns name generation"),
    ev.DrainBegan: _fields("at_ns wait_s"),
}
"""By class and name in records; `MediaRejected.reason` is the server's text, without content."""


@attrs.define(kw_only=True)
class EventEditor:
    """Takes a policy's content out of events; `frames` has the policy, and the tally.

    `media` has the kind of each media item that was changed in its frame.
    """

    frames: FrameEditor
    media: dict[int, Kind] = attrs.Factory(dict)

    def edit(self, event: ev.Event) -> ev.Event:
        """The event without content; raises `KeyError` for a field that `FIELDS` does not name."""
        if isinstance(event, ev.ConnectionOpened):
            is_transcription = event.mode == "transcription"
            self.frames.is_pcm16 = is_transcription or event.endpoint in ev.EVENT_IDS
            self.frames.has_line_breaks = is_transcription
            self.frames.known_words |= frozenset(event.limits.models)
        if isinstance(event, ev.FrameReceived):
            frame = self.frames.edit(event.frame, event.at_ns)
            return attrs.evolve(event, frame=frame, shortened=self._edit_shortened(event))
        if isinstance(event, ev.BackendOpenFailed):
            return self._edit_refused(event)
        if isinstance(event, ev.MediaDecoded):
            kind = self.media.get(event.media)
            if kind is None:
                return event
            for part in filter(None, (event.pcm, *event.pictures, *event.stacked)):
                self.frames.tally.count(kind, "user", len(part))
            return without_media(event, self.frames.hide)
        if isinstance(event, ev.ConnectionOpened) and event.label in event.limits.models:
            nameless: ev.ConnectionOpened = self._edit(attrs.evolve(event, label=""), event.at_ns)
            return attrs.evolve(nameless, label=event.label)  # in `openai` it is the model's name
        edited: ev.Event = self._edit(event, event.at_ns)
        return edited

    def _edit_shortened(self, event: ev.FrameReceived) -> Shortened | None:
        """Remove a message's start, which may hold any content, and the answer, which may too."""
        short, policy = event.shortened, self.frames.policy
        if short is None or not any(policy.covers(it, "user", event.at_ns) for it in policy.kinds):
            return short
        refused = short.refused and attrs.evolve(short.refused, message=LEFT_OUT)
        hashed = short.blake2b if short.read_bytes is None else ""  # of a few bytes: a guess
        return attrs.evolve(short, head="", blake2b=hashed, refused=refused)

    def _edit_refused(self, event: ev.BackendOpenFailed) -> ev.BackendOpenFailed:
        """Remove why the model refused, which may quote a tool, but for what it is about."""
        policy = self.frames.policy
        covered = any(policy.covers(it, "user", event.at_ns) for it in policy.kinds)
        if not event.refused or not covered:
            return event
        about = "tools: " if event.refused.startswith("tools") else ""
        return attrs.evolve(event, refused=about + LEFT_OUT)

    def _edit(self, value: Any, at_ns: int) -> Any:
        changes: dict[str, object] = {}
        for field, name in RECORD_FIELDS[type(value)]:
            rule = FIELDS[type(value)][name]
            old = getattr(value, field.name)
            new = self._edit_field(rule, old, at_ns)
            if new is not old:
                changes[field.name] = new
        return attrs.evolve(value, **changes) if changes else value

    def _edit_field(self, rule: Content | Special, old: Any, at_ns: int) -> Any:
        if isinstance(rule, Content):
            return self._replace(rule, old) if old and self._covers(rule, at_ns) else old
        if rule is Special.BELOW and isinstance(old, tuple):
            edited = tuple(self._edit(each, at_ns) for each in old)
            return edited if edited != old else old
        if rule is Special.BELOW and old is not None:
            return self._edit(old, at_ns)
        if rule is Special.TRACE and old:
            self.frames.tally.count(TRACES, "both", len(old) if isinstance(old, str) else 8)
            return type(old)()
        return old

    def _covers(self, content: Content, at_ns: int) -> bool:
        frames = self.frames
        is_known = "prompt" in content.kinds and "prompt" in frames.changed
        return is_known or any(
            frames.policy.covers(kind, content.side, at_ns) for kind in content.kinds
        )

    def _replace(self, content: Content, old: Any) -> Any:
        new: object
        if content.shape == "pcm":
            new, size = mute(old), len(old)
        elif content.shape == "ids":
            new, size = tuple(min(number, 0) for number in old), ID_BYTES * len(old)
        else:
            new = fill(old) if content.shape == "words" else self.frames.names.of(old)
            size = len(old.encode("utf-8", "surrogatepass"))
        if new == old:
            return old
        self.frames.tally.count(content.kinds[0], content.side, size)
        return new


def without_media(event: ev.MediaDecoded, hide: Callable[[bytes], bytes]) -> ev.MediaDecoded:
    """Silence what was decoded, and hide its pictures by `hide`."""
    return attrs.evolve(
        event,
        pcm=mute(event.pcm),
        pictures=tuple(map(hide, event.pictures)),
        stacked=tuple(map(hide, event.stacked)),
    )


# -- the records of a log --------------------------------------------------------------------------


_KIND_OF_MEDIA: Final[Mapping[object, Kind]] = {
    "jpeg": "video",
    "video": "video",
    "image": "image",
    "audio": "audio",
    "second": "audio",
    "wav": "voice",
    "voice": "voice",
}
"""The kind of a `DecodeMedia`."""
_REPEATS: Final[Mapping[str, str]] = {
    "chat": "a chat says again what was said",
    "transcription": "a transcription is written some time after it was said",
}
"""By mode: why content before a given end would be left."""
_LOG_S_OWN: Final = frozenset({"session", "state", "fin"})
_CLIENT_S: Final = ("metadata", "parameters")
"""What a frame tells the client again: its names are the client's own, and are replaced."""
_SAME_WORDS: Final = frozenset({"type", "kind", "code"})
"""Texts of an effect and a sent frame that must stay the same."""
HEAD_KEPT: Final = frozenset(
    {"recording_id", "session_id", "schema", "software", "config", "fingerprint", "seed"}
    | {"wall_ms", "parent", "redacted", "shrunk"}
)
"""The fields of a head; others are left out."""
CONFIG_KEPT: Final = frozenset({"model", "mode", "durability", "deterministic", "owner"})
MARK_KEPT: Final = frozenset({"text", "by"})
"""The fields of a mark; others are left out."""


class RedactError(ValueError):
    """The log cannot be redacted."""


class Redaction:
    """One run over a log; a rehearsal only counts. `left_out` counts records left out."""

    def __init__(self, policy: Policy, *, is_rehearsal: bool = False) -> None:
        self.tally = Tally()
        self.left_out = 0
        self._policy: Final = policy
        frames = FrameEditor(policy=policy, tally=self.tally, is_rehearsal=is_rehearsal)
        self._events: Final = EventEditor(frames=frames)
        self._regenerator: Final = LogRegenerator()
        self._due: deque[Record] = deque()

    def records(self, items: Iterable[Record | Damage]) -> Iterator[Record]:
        """The records of the redacted log, without its head, from those of the log in order.

        `RedactError`: the log is damaged, or the session takes another course.
        """
        for item in items:
            if isinstance(item, Damage):
                raise RedactError(str(item))
            if item.kind in EVENT_KINDS:
                yield from self._take_event(item)
            elif item.kind in EFFECT_KINDS:
                self._take_effect(item)
            elif item.kind == "fin":
                self._see_that_nothing_is_due(item)
                yield self._regenerator.end()
            elif item.kind == "mark" and isinstance(item.fields.get("text"), str):
                yield self._regenerator.mark(item.at_ns, self._edit_mark(item))
            elif item.kind not in _LOG_S_OWN:
                self.left_out += 1

    def _take_event(self, record: Record) -> Iterator[Record]:
        self._see_that_nothing_is_due(record)
        try:
            event = event_of(record.fields, record.at_ns)
            mode = event.mode if isinstance(event, ev.ConnectionOpened) else ""
            if mode in _REPEATS and self._policy.to_ns is not None:
                raise RedactError(f"{_REPEATS[mode]}: it can only be redacted to its end")
            step = self._regenerator.step(self._events.edit(event))
        except (MappingError, RegenerationError) as error:
            raise RedactError(f"record {record.seq}: {error}") from error
        except KeyError as error:
            text = f"record {record.seq} has a field of unknown kind: {error}"
            raise RedactError(text) from error
        self._due.extend(made for made in step.records[1:] if made.kind in EFFECT_KINDS)
        yield from step.records

    def _edit_mark(self, record: Record) -> Fields:
        """A mark without its text, and without its author's name."""
        kept = _known(record.fields, MARK_KEPT, self.tally)
        text, by = kept["text"], kept.get("by")
        assert isinstance(text, str)
        if self._policy.covers("text", "both", record.at_ns):
            kept["text"] = fill(text)
            self.tally.count("text", "both", len(text.encode(errors="replace")))
        if by is not None and self._policy.covers("name", "user", record.at_ns):
            del kept["by"]
            self.tally.count("name", "user", len(str(by)))
        return kept

    def _take_effect(self, record: Record) -> None:
        made = self._due.popleft() if self._due else None
        try:
            is_other = made is None or _course(record.fields) != _course(made.fields)
        except (ValueError, RecursionError) as error:
            raise RedactError(f"record {record.seq}: its frame is not JSON: {error}") from error
        if made is None or is_other:
            raise _other_course(record, made)
        if made.fields["type"] == "DecodeMedia" and made.fields["data"] != record.fields["data"]:
            media = made.fields["media"]
            assert isinstance(media, int)
            self._events.media[media] = _KIND_OF_MEDIA[made.fields["kind"]]

    def _see_that_nothing_is_due(self, record: Record) -> None:
        if self._due:
            raise _other_course(record, self._due[0])


def _other_course(record: Record, made: Record | None) -> RedactError:
    came_out = "nothing" if made is None else describe(made)
    return RedactError(
        f"the session would change: record {record.seq} is"
        f" {describe(record)}, and {came_out} came out; see `antiphon replay`"
    )


def _course(fields: Fields) -> Any:
    """The parts of an effect that must not change: numbers, flags and classes."""
    frame = fields.get("frame")
    if not isinstance(frame, str):
        return _without_content(fields)
    return fields.get("ordinal"), _without_content(json.loads(frame))


def _without_content(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_content(below, name)
            for name, below in value.items()
            if name not in ("blake2b", *_CLIENT_S)
        }
    if isinstance(value, list | tuple):
        return [_without_content(below) for below in value]
    return None if isinstance(value, str) and key not in _SAME_WORDS else value


# -- the head --------------------------------------------------------------------------------------


def redacted_head(head: Fields, policy: Policy, tally: Tally) -> Fields:
    """The head of the redacted log, without names; `tally` is a rehearsal's, and counts them."""
    kept = _known(head, HEAD_KEPT, tally)
    config = kept.get("config")
    if isinstance(config, Mapping):
        kept["config"] = known = _known(config, CONFIG_KEPT, tally)
        # A model that is not ours is a folder, or an address.
        is_ours = config.get("model", MODELS[0]) in MODELS
        for name in known.keys() & {"owner", *(() if is_ours else ("model",))}:
            if policy.covers("name", "user", 0):
                tally.count("name", "user", len(str(known.pop(name))))
    before = head.get(REDACTED)
    kept[REDACTED] = [
        *(before if isinstance(before, list | tuple) else ()),
        {**to_json(policy), "removed": tally.to_json()},
    ]
    return kept


def _known(fields: Fields, names: frozenset[str], tally: Tally) -> dict[str, Value]:
    """Keep the known fields; others may be hashes of content."""
    for name in fields.keys() - names:
        tally.count(TRACES, "both", len(str(fields[name])))
    return {name: fields[name] for name in fields if name in names}


def to_json(policy: Policy) -> dict[str, Value]:
    """A policy as JSON."""
    return {
        "side": policy.side,
        "kinds": sorted(policy.kinds),
        "from_s": policy.from_ns / NS_PER_S,
        "to_s": None if policy.to_ns is None else policy.to_ns / NS_PER_S,
    }


@attrs.frozen(kw_only=True)
class Redacted:
    """The results for a log; `records` counts the head too."""

    head: Fields
    tally: Tally
    records: int
    left_out: int


def rehearse(head: Fields, items: Iterable[Record | Damage], policy: Policy) -> Redacted:
    """Count the content, and check the session's course; `RedactError` if it changes."""
    run = Redaction(policy, is_rehearsal=True)
    records = 1 + sum(1 for _ in run.records(items))
    made = redacted_head(head, policy, run.tally)
    return Redacted(head=made, tally=run.tally, records=records, left_out=run.left_out)


# -- the command -----------------------------------------------------------------------------------


@click.command("redact")
@click.argument("log", type=RecordingType())
@click.option("--output", type=click.Path(path_type=Path), help="The new log.")
@click.option(
    "--side",
    type=click.Choice(("user", "model", "both")),
    default="both",
    show_default=True,
    help="Whose content to remove.",
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(tuple(KINDS)),
    multiple=True,
    help="What to remove; repeatable [default: everything].",
)
@click.option("--from", "from_s", type=click.FloatRange(min=0), default=0.0, help="From second S.")
@click.option(
    "--to",
    "to_s",
    type=click.FloatRange(min=0),
    help="Up to this second; not for a chat or a transcription.",
)
@click.option("--dry-run", is_flag=True, help="Only report what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def redact_command(
    *,
    log: Path,
    output: Path | None,
    kinds: tuple[Kind, ...],
    from_s: float,
    to_s: float | None,
    dry_run: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Take the content out of LOG, and write the rest, which still replays.

    Sound becomes silence, words become others of the same length, pictures become grey; token ids,
    speech codes and hashes from which content could be guessed are taken out too. Lengths, times,
    counts and settings stay, and so the session takes the same course: logic replay holds. A full
    replay does not: the model would hear something else.

    Kinds: audio, video (camera frames, and files of videos), image (pictures in a chat), text,
    prompt, voice (reference audio), name (names that clients and operators gave).

    \b
    Examples:
      antiphon recordings redact a.session.zst --output shown.session.zst
      antiphon recordings redact a.session.zst --output b.session.zst --kind video
      antiphon recordings redact a.session.zst --output b.session.zst --side user --from 12 --to 20
      antiphon recordings redact a.session.zst --dry-run

    \b
    Exit codes:
      0  redacted
      2  nothing was written: LOG cannot be read, is damaged or does not replay, or there is a file
         of that name
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    if (output is None) is not dry_run:
        raise click.UsageError("give --output or --dry-run")
    to_ns = None if to_s is None else round(to_s * NS_PER_S)
    from_ns = round(from_s * NS_PER_S)
    policy = Policy(kinds=frozenset(kinds or KINDS), from_ns=from_ns, to_ns=to_ns, **how)
    with reading(log, RedactError):
        with LogReader(log) as reader, progress(reader.tail_bytes, "reading") as watch:
            found = rehearse(reader.head.fields, reader.watched(watch), policy)
        tally = found.tally if output is None else _write(log, output, policy, found)
    _print(log, output, policy, found, tally, as_json=as_json)


def _write(log: Path, output: Path, policy: Policy, found: Redacted) -> Tally:
    run = Redaction(policy)
    with (
        LogReader(log) as reader,
        progress(reader.tail_bytes, "writing") as watch,
        new_file(output, like=log) as part,
    ):
        write(part, chain([head_record(found.head)], run.records(reader.watched(watch))))
    return run.tally


def _print(
    log: Path, output: Path | None, policy: Policy, found: Redacted, tally: Tally, *, as_json: bool
) -> NoReturn:
    removed, short, left_out = found.tally.to_json(), tally.headers_only, found.left_out
    body = {
        "log": str(log),
        "output": None if output is None else str(output),
        **to_json(policy),
        "removed": removed,
        "records": found.records,
        "records_left_out": left_out,
        "pictures_without_content": short,
    }
    rows = [
        [f"{value:,}" if isinstance(value, int) else value for value in row.values()]
        for row in removed
    ]
    shown = table(("<kind", "<side", "pieces", "bytes"), rows, is_ruled=True)
    lines = [shown if removed else "nothing to remove"]
    if short:
        lines.append(f"pictures too short to be drawn, only headers are left: {short}")
    if left_out:
        lines.append(f"records that are not the session's own, left out: {left_out}")
    lines.append(counted(found.records, "record") + ("" if output is None else f" in {output}"))
    finish(body, lines, as_json=as_json)
