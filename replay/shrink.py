"""The command `antiphon dev shrink`: a small log for a fixture, from a long one that fails.

The result is on stdout, as text or as one JSON object; progress is on stderr, if that is a
terminal. The best log is written at the end, after an interrupt too, and kept elsewhere if it
cannot be written.

The search is delta debugging over events, then simpler events:

    groups left out -> events left out -> events made simpler -> again, until nothing is left to do

- Larger pieces first, and later before earlier ones: the same log and command give the same result.
- An event first goes with its group: a client's frame with its answers.
- No candidate is tried twice. The best log so far is always a file.
- It ends when nothing can be left out or simplified by itself, or when the runs are used up.

A candidate is a log with fewer or simpler events than another, made by the real machine:

    the events of a log -> some left out, some simplified -> fitted to what was asked -> regenerated

Each is a whole log that verifies and logic-replays; otherwise `RegenerationError`. It keeps the
times of its events, and the `fin` if there is one; marks are left out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click
from rich.console import Console
from rich.status import Status

from protocol.values import effects as ef
from protocol.values import events as ev
from recorder.format.format import Fields, Record, RecorderError
from recorder.format.mapping import EVENT_KINDS, MappingError, event_of
from recorder.read.reader import LogReader, read
from recorder.read.scan import Damage
from recorder.write.files import check_new_file, new_file
from runtime.net.process import stdout_console

from .redact.content import Kind, Policy, Tally, hide_picture, mute
from .redact.frames import FrameEditor
from .redact.redaction import without_media
from .rerun.difference import describe
from .rerun.logic import LogRegenerator, RegenerationError, head_record, write
from .shared.commands import UnusableError, complaint, counted, print_json
from .shared.recordings import RecordingType
from .story.model_calls import ANSWERS, CallName, answered, asked, renumbered

# -- open questions -------------------------------------------------------------------------------


OUTSIDE: Final = (
    *(ev.ConnectionOpened, ev.Forked, ev.FrameReceived, ev.PeerGone, ev.PeerAttached),
    *(ev.SendFailed, ev.RecordingFailed, ev.Flooded, ev.DrainBegan, ev.Draining),
)
"""Events that answer nothing; each may come at any time."""
_MODEL_CALLS: Final = frozenset(
    {"open", "unit", "finalize", "rollback", "turn", "prefill", "utterance", "chunk", "rebuild"}
)
_ALSO_ASKED: Final[Mapping[type, str]] = {
    ef.EnterQueue: "queue",
    ef.LeaveQueue: "leave",
    ef.Admit: "admit",
    ef.DetectSpeech: "speech",
    ef.StartUnit: "words",
}
"""By effect: a question without a number."""
_REPORTS: Final[Mapping[type, str]] = {
    ev.TicketMoved: "queue",
    ev.SpeechStarted: "speech",
    ev.SpeechStopped: "speech",
    ev.UserTranscribed: "words",
}
"""By event: the question that must be open, and stays so."""
_ENDS: Final[Mapping[type, tuple[str, ...]]] = {
    ev.Admitted: ("admit",),
    ev.AdmissionRefused: ("admit", "queue"),
    ev.TicketCancelled: ("queue",),
    ev.TicketLeft: ("queue",),
    ev.SlotLeased: ("queue",),
}
"""By event: the questions of which it ends the first that is open."""


@attrs.define
class PendingAnswers:
    """The open questions of a session, so that each answer has its question.

    Events come from outside (frames, a lost peer, a shutdown), or answer an effect. After events
    were left out, effects differ or have other numbers. `fit` gives an answer the number of its
    open question, and drops one without a question. It checks neither times nor contents.

    `numbers` has the lease, unit or turn that a question is about. `media` maps an answer's number
    to the one that it must get, `timers` a name to its generation.
    """

    numbers: dict[str, int] = attrs.Factory(dict)
    media: dict[int, int] = attrs.Factory(dict)
    timers: dict[str, int] = attrs.Factory(dict)
    lease: int | None = None
    _is_gone: bool = False
    _chunks: int = 0

    def note(self, effects: Iterable[ef.Effect]) -> tuple[int, ...]:
        """Note a step's questions; return its media, whose answers must be named in `media`."""
        media: list[int] = []
        for effect in effects:
            call, also = asked(effect), _ALSO_ASKED.get(type(effect))
            if call is not None:
                self.numbers[call[0]] = call[1]
            if also is not None:
                self.numbers[also] = 0
            match effect:
                case ef.StartTurn(turn=turn):
                    self.numbers["prefill"] = turn.index
                case ef.RunChunk(chunk=chunk):
                    self.numbers["utterance"] = chunk.utterance
                case ef.SetTimer(name=name, generation=generation):
                    self.timers[name] = generation
                case ef.CancelTimer(name=name):
                    self.timers.pop(name, None)
                case ef.DecodeMedia(media=number):
                    media.append(number)
        return tuple(media)

    def fit(self, event: ev.Event) -> ev.Event | None:
        """The event with the numbers of its question; None without a question."""
        if type(event) in _REPORTS:
            return event if _REPORTS[type(event)] in self.numbers else None
        if type(event) in _ENDS:
            return self._end(event)
        match event:
            case ev.TimerFired(name=name):
                generation = self.timers.pop(name, None)
                return None if generation is None else attrs.evolve(event, generation=generation)
            case ev.MediaDecoded(media=old) | ev.MediaRejected(media=old):
                number = self.media.pop(old, None)
                return None if number is None else attrs.evolve(event, media=number)
            case ev.TurnPrefilled() | ev.TurnProgress() | ev.TurnDone() | ev.TurnFailed():
                return self._of_turn(event)
            case ev.BackendLost() | ev.LeaseRevoked():
                if self.lease is None:
                    return None
                if isinstance(event, ev.BackendLost):
                    self.numbers = {
                        name: it for name, it in self.numbers.items() if name not in _MODEL_CALLS
                    }
                return attrs.evolve(event, lease=self.lease)
        call = answered(event)
        return self._from_outside(event) if call is None else self._of_call(event, call[0])

    def _end(self, event: ev.Event) -> ev.Event | None:
        question = next((it for it in _ENDS[type(event)] if it in self.numbers), None)
        is_stale = isinstance(event, ev.TicketLeft) and "leave" not in self.numbers
        if question is None or is_stale:
            return None
        del self.numbers[question]
        if isinstance(event, ev.SlotLeased):
            self.lease = event.lease
        return event

    def _from_outside(self, event: ev.Event) -> ev.Event | None:
        """None for an event of a peer that is gone, until it comes back."""
        if not isinstance(event, OUTSIDE):
            return None
        if self._is_gone and isinstance(event, ev.FrameReceived | ev.PeerGone):
            return None
        if isinstance(event, ev.PeerGone | ev.PeerAttached):
            self._is_gone = isinstance(event, ev.PeerGone)
        if isinstance(event, ev.Forked):
            self._is_gone, self.lease = False, None
        return event

    def _of_turn(
        self, event: ev.TurnPrefilled | ev.TurnProgress | ev.TurnDone | ev.TurnFailed
    ) -> ev.Event | None:
        index, is_prefill = self.numbers.get("turn"), isinstance(event, ev.TurnPrefilled)
        fits = isinstance(event, ev.TurnFailed) or is_prefill is ("prefill" in self.numbers)
        if index is None or not fits:
            return None
        if isinstance(event, ev.TurnProgress):
            step, self._chunks = self._chunks, self._chunks + 1
            return renumbered(event, index, step=step)
        self.numbers.pop("prefill", None)
        self._chunks = 0
        if not is_prefill:
            del self.numbers["turn"]
        return renumbered(event, index)

    def _of_call(self, event: ev.Event, call: CallName) -> ev.Event | None:
        number = self.numbers.pop(call, None)
        if call == "release":
            self.lease = None
        if number is None:
            return None
        also = {"utterance": self.numbers.pop("utterance")} if call == "chunk" else {}
        return renumbered(event, number, **also)


# -- simpler events -------------------------------------------------------------------------------


Simplification = Callable[[ev.Event], ev.Event]

_FILES: Final[frozenset[Kind]] = frozenset({"audio", "video", "image", "voice"})
_WORDS: Final[frozenset[Kind]] = frozenset({"text", "prompt"})
_RESULTS: Final[Mapping[type, str]] = {
    ev.BackendOpened: "opened",
    **{answer: path.partition(".")[0] for answer, (_, path) in ANSWERS.items() if "." in path},
}
"""The field of a model's result, by event."""
_NUMBERS: Final = ("decided_ids", "fed_ids", "token_ids", "codec_ids")
_TRACES: Final = ("input_hash", "logits_hash", "margin", "costs")


def _frame_step(kinds: frozenset[Kind], *, is_shorter: bool = False) -> Simplification:
    def step(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.FrameReceived):
            return event
        editor = FrameEditor(policy=Policy(kinds=kinds), tally=Tally(), is_shorter=is_shorter)
        return attrs.evolve(event, frame=editor.edit(event.frame, event.at_ns))

    return step


def _result_step(*names: str) -> Simplification:
    """Give some fields of a model's result their defaults, or empty values."""

    def step(event: ev.Event) -> ev.Event:
        where = _RESULTS.get(type(event))
        if where is None:
            return event
        made: Any = getattr(event, where)
        fields = {field.name: field for field in attrs.fields(type(made))}
        empty = {
            name: type(getattr(made, name))()
            if fields[name].default is attrs.NOTHING
            else fields[name].default
            for name in names
            if name in fields
        }
        return attrs.evolve(event, **{where: attrs.evolve(made, **empty)})

    return step


def _silence(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.MediaDecoded):
        return without_media(event, hide_picture)
    where = _RESULTS.get(type(event))
    made: Any = None if where is None else getattr(event, where)
    if where is None or not getattr(made, "pcm", b""):
        return event
    return attrs.evolve(event, **{where: attrs.evolve(made, pcm=mute(made.pcm))})


SIMPLIFICATIONS: Final[tuple[Simplification, ...]] = (
    _frame_step(_FILES),
    _silence,
    _result_step("pcm"),
    _result_step(*_NUMBERS),
    _result_step(*_TRACES),
    _frame_step(_WORDS, is_shorter=True),
    _result_step("text"),
)
"""In the order of the search: the largest savings first.

A client's frame keeps its fields: sound becomes silence of the same length, because units are made
from it, and words are removed.
"""


# -- candidates -----------------------------------------------------------------------------------


Change = Callable[[int, ev.Event], ev.Event | None]
"""Makes an event simpler, or leaves it out (None), by its place among the events."""
SHRUNK: Final = "shrunk"
"""The head's field for a shrunk log's origin."""


@attrs.frozen(kw_only=True)
class Shape:
    """The size of a log, and the start of each group: an event from outside, and its answers."""

    events: int
    groups: tuple[int, ...]


def shape_of(path: Path) -> Shape:
    """Count a log's events."""
    groups, events = [], 0
    with LogReader(path) as reader:
        for record in _sound(reader):
            if record.kind in EVENT_KINDS:
                if isinstance(_event(record), OUTSIDE):
                    groups.append(events)
                events += 1
    return Shape(events=events, groups=tuple(groups))


def origin_of(path: Path) -> Fields:
    """The head's field for the origin of a log made from this one."""
    with LogReader(path) as reader:
        head = reader.head.fields
    return {SHRUNK: {"recording": head.get("recording_id"), "events": shape_of(path).events}}


def build(source: Path, target: Path, change: Change, origin: Fields) -> None:
    """Write a candidate; the source's fields of the head win over `origin`'s.

    Raises:
        RegenerationError: there is no such session.
        RecorderError: the source cannot be read.
        OSError: the disk refused.
    """
    with LogReader(source) as reader:
        head = {**origin, **reader.head.fields}
        write(target, _records(head, _sound(reader), change), is_durable=False)


def _records(head: Fields, records: Iterable[Record], change: Change) -> Iterator[Record]:
    yield head_record(head)
    regenerator, asked = LogRegenerator(), PendingAnswers()
    media: deque[int] = deque()
    place = 0
    for record in records:
        if record.kind in EVENT_KINDS:
            media.clear()
            event = change(place, _event(record))
            place += 1
            is_over = regenerator.session is not None and regenerator.session.is_finished
            fitted = None if event is None or is_over else asked.fit(event)
            if fitted is not None:
                step = regenerator.step(fitted)
                media.extend(asked.note(step.effects))
                yield from step.records
        elif record.fields.get("type") == "DecodeMedia" and media:
            number = record.fields["media"]
            assert isinstance(number, int)
            asked.media[number] = media.popleft()
        elif record.kind == "fin":
            yield regenerator.end()


def _sound(items: Iterable[Record | Damage]) -> Iterator[Record]:
    for item in items:
        if isinstance(item, Damage):
            raise RegenerationError(f"the log is {item}")
        yield item


def _event(record: Record) -> ev.Event:
    try:
        return event_of(record.fields, record.at_ns)
    except MappingError as error:
        raise RegenerationError(f"record {record.seq}: {error}") from error


# -- a run of the command --------------------------------------------------------------------------


PLACE: Final = "{}"
"""The place of a log's path in a command."""


class CannotRunError(Exception):
    """The command is missing, or may not be run."""


def command_fails(
    log: Path, command: Sequence[str], exit_code: int | None, timeout_s: float
) -> bool:
    """Run a command on a log: whether it fails with `exit_code` (None: any but 0), and in time.

    Each `{}` in the command is the log's path, which comes last without one. Its output is
    discarded; its process group is killed after a timeout or a cancellation. `CannotRunError`: it
    cannot be started.
    """
    words = [word.replace(PLACE, str(log)) for word in command]
    if words == list(command):
        words.append(str(log))
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        process = subprocess.Popen(words, start_new_session=True, **silent)
    except OSError as error:
        raise CannotRunError(f"{words[0]}: {error.strerror or error}") from error
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return False
    except BaseException:
        _kill(process)
        raise
    return code != 0 if exit_code is None else code == exit_code


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- the search -----------------------------------------------------------------------------------


Fails = Callable[[Path], bool]


class NoFailureError(ValueError):
    """Nothing to shrink: the log, or its regenerated events, do not fail."""


class OutOfRunsError(Exception):
    """The runs are used up."""


@attrs.define(eq=False)
class Shrinker:
    """One search; the log is not changed, candidates are in `folder`.

    `fails` says whether a log fails; after its `KeyboardInterrupt` the best log stays. It is run
    `runs_max` times at most, with a call of `watch` before each. `best`, the smallest failing log
    so far, exists once `begin` has returned, and has so many `events`. `runs` counts those of
    `fails`, and `stage` says what is tried.
    """

    _log: Path
    _folder: Path
    _fails: Fails
    _runs_max: int = attrs.field(kw_only=True)
    _watch: Callable[[Shrinker], None] = attrs.field(default=lambda _: None, kw_only=True)
    runs: int = attrs.field(default=0, init=False)
    stage: str = attrs.field(default="", init=False)
    _tried: set[bytes] = attrs.field(factory=set, init=False)
    _shape: Shape = attrs.field(default=Shape(events=0, groups=()), init=False)
    _origin: Fields = attrs.field(factory=dict, init=False)

    @property
    def best(self) -> Path:
        """The smallest failing log so far."""
        return self._folder / self._log.name

    @property
    def events(self) -> int:
        """Its events; 0 before there is one."""
        return self._shape.events

    @property
    def _candidate(self) -> Path:
        return self._folder / "candidate" / self._log.name

    def begin(self) -> None:
        """Check that the log fails, and that it still does when it is made again.

        Raises:
            NoFailureError: it does not.
            RegenerationError: it cannot be made again.
            RecorderError: it cannot be read.
        """
        self._candidate.parent.mkdir()
        self._origin = origin_of(self._log)
        self.stage = "the log itself"
        if not self._asks(self._log):
            raise NoFailureError("the command does not fail on the log")
        self.stage = "the log, made again"
        if not self._accepts(self._log, lambda _, event: event):
            raise NoFailureError(
                "the command fails on the log and not on one that this version makes of its events:"
                " the failure is not in them (is the log damaged, or does it not replay?)"
            )

    def run(self) -> bool:
        """Search; return whether nothing smaller is left to try.

        `RecorderError`: a candidate cannot be read back; `OSError`: the disk refused.
        """
        try:
            is_smaller = True
            while is_smaller:
                is_smaller = self._leave_out("groups", by_group=True)
                is_smaller |= self._leave_out("events", by_group=False)
                is_smaller |= self._simplify()
        except OutOfRunsError:
            return False
        return True

    # -- fewer events ---------------------------------------------------------------------------

    def _leave_out(self, stage: str, *, by_group: bool) -> bool:
        """Leave out runs of groups or events, half of all at first; return whether any was."""
        self.stage = stage
        found = False
        size = len(self._starts(by_group)) // 2
        while size:
            found |= self._leave_out_each(size, by_group)
            size = min(size, len(self._starts(by_group))) // 2
        return found

    def _leave_out_each(self, size: int, by_group: bool) -> bool:
        found = False
        end = len(self._starts(by_group))
        while end > 0:
            starts = [*self._starts(by_group), self._shape.events]
            end = min(end, len(starts) - 1)
            begin = max(0, end - size)
            dropped = range(max(1, starts[begin]), starts[end])
            if dropped and self._accepts(self.best, _without(dropped)):
                found = True
            end = begin
        return found

    def _starts(self, by_group: bool) -> Sequence[int]:
        return self._shape.groups if by_group else range(self._shape.events)

    # -- simpler events -------------------------------------------------------------------------

    def _simplify(self) -> bool:
        """Make events simpler, all at once if possible; return whether any was."""
        found = False
        for number, step in enumerate(SIMPLIFICATIONS, start=1):
            self.stage = f"simpler events, {number} of {len(SIMPLIFICATIONS)}"
            found |= self._simplify_within(step, range(self._shape.events))
        return found

    def _simplify_within(self, step: Simplification, places: range) -> bool:
        if not places:
            return False
        if self._accepts(self.best, _simpler(step, places)):
            return True
        if len(places) == 1:
            return False
        middle = len(places) // 2
        late = self._simplify_within(step, places[middle:])
        return self._simplify_within(step, places[:middle]) or late

    # -- candidates -----------------------------------------------------------------------------

    def _accepts(self, source: Path, change: Change) -> bool:
        """Make a candidate; if it is new and fails, it becomes the best log."""
        self._candidate.unlink(missing_ok=True)
        try:
            build(source, self._candidate, change, self._origin)
        except RegenerationError:
            return False
        with self._candidate.open("rb") as file:
            name = hashlib.file_digest(file, "blake2b").digest()
        if name in self._tried:
            return False
        self._tried.add(name)
        if not self._asks(self._candidate):
            return False
        os.replace(self._candidate, self.best)
        self._shape = shape_of(self.best)
        return True

    def _asks(self, path: Path) -> bool:
        if self.runs >= self._runs_max:
            raise OutOfRunsError
        self.runs += 1
        self._watch(self)
        return self._fails(path)


def _without(dropped: range) -> Change:
    return lambda place, event: None if place in dropped else event


def _simpler(step: Simplification, places: range) -> Change:
    def change(place: int, event: ev.Event) -> ev.Event:
        return step(event) if place in places else event

    return change


# -- the command ----------------------------------------------------------------------------------


RUNS_MAX: Final = 500
"""Minutes of a command that takes half a second; a 10 minute log needs about 100."""
TIMEOUT_S: Final = 60.0
FOLDER_PREFIX: Final = "antiphon-shrink-"
"""Of the temporary folder of candidates."""
EVENTS_SHOWN: Final = 20
"""More are in the log."""
INTERRUPTED: Final = 128 + signal.SIGINT


class NothingYetError(click.ClickException):
    """Interrupted before there was a log to write."""

    exit_code = INTERRUPTED


@click.command("shrink")
@click.argument("log", type=RecordingType())
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The reduced log.")
@click.option(
    "--exit-code", type=click.IntRange(0, 255), help="The exit code that counts as the failure."
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds after which a run counts as passed.",
)
@click.option(
    "--budget",
    "runs_max",
    type=click.IntRange(min=2),
    default=RUNS_MAX,
    show_default=True,
    help="Maximum runs of the command.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def shrink_command(
    *,
    log: Path,
    command: tuple[str, ...],
    output: Path,
    exit_code: int | None,
    timeout_s: float,
    runs_max: int,
    as_json: bool,
) -> None:
    """Find the smallest log on which COMMAND still fails.

    Events are left out of LOG, sound is silenced and words are dropped, as long as COMMAND fails.
    This version's session machine makes the rest again: it verifies, and it replays. Each {} in
    COMMAND is the path of the log to try; without one, it comes last. COMMAND should fail for one
    reason only: a log that fails for another reason is accepted too.

    Ctrl-C ends the search and writes the best log so far.

    \b
    Examples:
      antiphon dev shrink long.session.zst --output small.session.zst -- ./check.sh
      antiphon dev shrink long.session.zst --output small.session.zst -- old/bin/antiphon replay {}
      antiphon dev shrink a.session.zst --output b.session.zst --exit-code 3 -- python check.py {}

    \b
    Exit codes:
      0    a small log was written
      1    COMMAND does not fail on LOG, or the failure is not in its events
      2    LOG cannot be read, COMMAND cannot be run, or OUTPUT cannot be written
      130  it was interrupted; the best log so far was written
    """  # noqa: D301 - click takes a backspace to keep the lines
    is_failing = partial(command_fails, command=command, exit_code=exit_code, timeout_s=timeout_s)
    try:
        check_new_file(output)
        body = _shrink(log, output, is_failing, runs_max)
    except NoFailureError as error:
        raise click.ClickException(str(error)) from error
    except CannotRunError as error:
        raise UnusableError(str(error)) from error
    except (OSError, RecorderError, RegenerationError) as error:
        raise UnusableError(complaint(error, log)) from error
    if as_json:
        print_json(body)
    else:
        _print(output, body)
    sys.exit(INTERRUPTED if body["interrupted"] else 0)


def _shrink(log: Path, output: Path, is_failing: Fails, runs_max: int) -> dict[str, Any]:
    """Shrink a log; return what is printed. `minimal`: no single event can be left out any more."""
    began = time.monotonic()
    before = shape_of(log)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder, _watched(before) as show:
        search = Shrinker(log, Path(folder), is_failing, runs_max=runs_max, watch=show)
        is_minimal = was_interrupted = False
        try:
            search.begin()
            is_minimal = search.run()
        except KeyboardInterrupt:
            was_interrupted = True
            if not search.best.exists():
                raise NothingYetError("interrupted before anything was found") from None
        _write(search.best, output, log)
    return {
        "log": str(log),
        "output": str(output),
        "events_before": before.events,
        "events": shape_of(output).events,
        "bytes_before": log.stat().st_size,
        "bytes": output.stat().st_size,
        "runs": search.runs,
        "minimal": is_minimal,
        "interrupted": was_interrupted,
        "elapsed_s": round(time.monotonic() - began, 3),
    }


def _write(best: Path, output: Path, log: Path) -> None:
    """Write the best log, or keep it elsewhere: minutes of work must not be lost."""
    try:
        with new_file(output, like=log) as part:
            shutil.copy(best, part)
    except OSError as error:
        kept = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)) / best.name
        best.rename(kept)  # a full disk has room for it where it is
        raise UnusableError(f"{complaint(error, output)}; it was kept as {kept}") from error


@contextmanager
def _watched(before: Shape) -> Iterator[Callable[[Shrinker], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Status("shrinking", console=console) as status:

        def show(search: Shrinker) -> None:
            left = search.events or before.events
            of = counted(before.events, "event")
            status.update(f"run {search.runs}: {left} of {of} left, {search.stage}")

        yield show


def _print(output: Path, body: dict[str, Any]) -> None:
    why = "nothing more can be removed" if body["minimal"] else "the budget of runs is used up"
    click.echo(
        f"{counted(body['events_before'], 'event')} became {body['events']},"
        f" {body['bytes_before']} bytes {body['bytes']}, in {counted(body['runs'], 'run')}"
        f" and {body['elapsed_s']:.1f} s: " + ("interrupted" if body["interrupted"] else why)
    )
    console = stdout_console()
    events = (record for record in read(output) if record.kind in EVENT_KINDS)
    for count, record in enumerate(events):
        if count == EVENTS_SHOWN:
            click.echo(f"  and {body['events'] - count} more")
            break
        line = f"  {record.seq:>5}  {describe(record)}"
        console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    click.echo(f"written to {output}")
