"""`antiphon talk`: speak to a server, by a sound file or a microphone, and read its answer.

The command reads and checks files before it connects, chooses how the conversation is shown, holds
it (`talk_session`), and writes the reply. Ctrl-C ends it politely if the server is quick, and a
second one at once. The reply so far is written if the file is new; an existing reply is replaced
only after a conversation that came to its end.

`LineView` writes one line for each event, `JsonView` one object a line, without the audio.
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import anyio
import attrs
import click
from rich.console import Console
from rich.text import Text

from protocol.values import messages as ms
from protocol.values.limits import Mode
from protocol.values.model import SAMPLE_BYTES
from protocol.values.openai import UserWords
from protocol.wire.media import check_frame

from ..client import terminal
from ..client.resuming import Reconnected, Reconnecting
from ..client.websocket import background
from ..media.sound import AudioFileError, read_wav, write_wav
from ..net.process import run
from .talk_session import Devices, Observer, Plan, Tally, TimedMessage, cut_units, talk

# -- views -----------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Keep a server's text on one line."""
    return terminal.clean(text, kept="")


class LineView(Observer):
    """A line for each event; `listens`: also for each unit that the model listened to."""

    def __init__(self, console: Console, *, listens: bool = True) -> None:
        self._console = console
        self._listens = listens
        self._had_sound: bool | None = None

    def sent(self, unit: int, at_s: float, *, has_sound: bool) -> None:  # noqa: ARG002
        """Write when the file begins to sound, and when it falls silent."""
        if has_sound != self._had_sound:
            self._write(at_s, "you", "(speaking)" if has_sound else "(silent)", style="cyan")
        self._had_sound = has_sound

    def received(self, timed: TimedMessage) -> None:
        """Write a server's message."""
        message, at_s = timed.message, timed.at_s
        match message:
            case ms.Queued(place=place) | ms.QueueUpdate(place=place):
                self._write(at_s, "queue", terminal.show_place(place))
            case ms.Created():
                text = f"{message.session_id}, {terminal.show_recording(message)}"
                self._write(at_s, "session", printable(text))
            case ms.Listen() if self._listens:
                self._write(at_s, "model", "(listens)", _cost(timed), style="dim")
            case ms.Speech() if message.text or not message.pcm:
                text = printable(message.text).strip() or "(speaks)"
                self._write(at_s, "model", text, _cost(timed), style="bold green")
            case UserWords(text=text):
                self._write(at_s, "you", printable(text).strip(), style="cyan")
            case ms.GoingAway(seconds_left=seconds_left):
                text = f"the server shuts down in {seconds_left} s"
                self._write(at_s, "session", text, style="yellow")
            case ms.ErrorReport():
                text = printable(f"{message.message} ({message.code})")
                self._write(at_s, "error", text, style="red")
            case ms.Closed():
                text = printable(message.client_reason or message.reason)
                self._write(at_s, "session", f"closed, {text}")

    def connects(self, change: Reconnecting | Reconnected, at_s: float) -> None:
        """Write that the connection is lost or back."""
        self._write(at_s, "session", terminal.show_connection(change), style="yellow")

    def end(self, summary: dict[str, object]) -> None:
        """Write the sums in two lines; a conversation that failed gets its error elsewhere."""
        if summary["session_id"] is None and summary["error"] is not None:
            return
        units = f"{summary['units_speech']} speaking, {summary['units_listen']} listening"
        line = f"{summary['units_sent']} s sent: {units}, {summary['units_dropped']} dropped"
        times = summary["round_trip_ms"]
        if isinstance(times, dict) and times["median"] is not None:
            line += f"; round trip {times['median']:.0f} ms, at most {times['max']:.0f} ms"
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        if not summary["answered"] and summary["error"] is None:
            self._console.print("the model did not answer", style="yellow", highlight=False)
        if summary["reply"] is not None:
            line = f"reply: {summary['reply']} ({summary['reply_s']:.1f} s)"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _write(self, at_s: float, who: str, text: str, note: str = "", *, style: str = "") -> None:
        line = Text(f"{at_s:6.1f}s  {who + ':':9}")
        line.append(text, style=style)
        if note:
            line.append(f"  [{note}]", style="dim")
        self._console.print(line, soft_wrap=True)


def _cost(timed: TimedMessage) -> str:
    assert isinstance(timed.message, ms.Listen | ms.Speech)
    metrics = timed.message.metrics
    parts = [f"{metrics.wall_clock_ms:.0f} ms"]
    if timed.round_trip_ms is not None:
        parts.append(f"round trip {timed.round_trip_ms:.0f} ms")
    parts.append(f"kv {metrics.kv_cache_length}")
    if metrics.dropped_units:
        parts.append(f"{metrics.dropped_units} dropped")
    return ", ".join(parts)


class JsonView(Observer):
    """One JSON object a line, on standard output: each event, and a `summary` at the end."""

    def sent(self, unit: int, at_s: float, *, has_sound: bool) -> None:
        """Write that a second of input is being sent."""
        terminal.echo_json(
            {"type": "sent", "at_s": round(at_s, 3), "unit": unit, "has_sound": has_sound}
        )

    def received(self, timed: TimedMessage) -> None:
        """Write a server's message."""
        terminal.echo_json(
            {"type": _TYPES[type(timed.message)], "at_s": round(timed.at_s, 3), **_fields(timed)}
        )

    def connects(self, change: Reconnecting | Reconnected, at_s: float) -> None:
        """Write that the connection is lost or back."""
        terminal.echo_json({**terminal.connection_fields(change), "at_s": round(at_s, 3)})

    def end(self, summary: dict[str, object]) -> None:
        """Write the sums."""
        terminal.echo_json({"type": "summary", **summary})


View: TypeAlias = LineView | JsonView


_TYPES: Final[dict[type[ms.ServerMessage], str]] = {
    ms.Queued: "queued",
    ms.QueueUpdate: "queue_update",
    ms.QueueDone: "queue_done",
    ms.Created: "created",
    ms.Listen: "listen",
    ms.Speech: "speech",
    ms.GoingAway: "going_away",
    UserWords: "user_words",
    ms.ErrorReport: "error",
    ms.Closed: "closed",
}


def _fields(timed: TimedMessage) -> dict[str, object]:
    match message := timed.message:
        case ms.Queued(place=place) | ms.QueueUpdate(place=place):
            return attrs.asdict(place)
        case ms.QueueDone():
            return {}
        case ms.Listen() | ms.Speech():
            return {
                **_speech_fields(message),
                "unit": timed.unit,
                "round_trip_ms": timed.round_trip_ms,
                "metrics": attrs.asdict(message.metrics),
            }
    return attrs.asdict(message)


def _speech_fields(message: ms.Listen | ms.Speech) -> dict[str, object]:
    if isinstance(message, ms.Listen):
        return {}
    samples = len(message.pcm) // SAMPLE_BYTES
    return {
        "text": message.text,
        "samples": samples,
        "end_of_turn": message.end_of_turn,
        "response_id": message.response_id,
    }


def summarize(
    tally: Tally, *, answered: bool, elapsed_s: float, reply: Path | None
) -> dict[str, object]:
    """Return the fields of the `summary` of a finished conversation.

    `answered`: the model spoke after the last second with sound; `reply` is the file of its speech,
    if written.
    """
    return {
        "ok": tally.failure is None,
        "error": tally.failure,
        "session_id": tally.created.session_id if tally.created else None,
        "recording": tally.metrics.recording,
        "ended": tally.closed.reason if tally.closed else None,
        "answered": answered,
        "text": tally.text,
        "turns": [turn.strip() for turn in tally.turns],
        "reply": None if reply is None else str(reply),
        "reply_s": round(tally.reply_s, 3),
        "units_sent": tally.units_sent,
        "units_listen": tally.listens,
        "units_speech": tally.speeches,
        "units_dropped": tally.metrics.dropped_units,
        "errors": [attrs.asdict(report) for report in tally.errors],
        "kv_cache_length": tally.metrics.kv_cache_length,
        "wall_clock_ms": _spread(tally.wall_ms),
        "round_trip_ms": _spread(tally.round_trips_ms),
        "reconnects": tally.reconnects,
        "away_s": round(tally.away_s, 3),
        "elapsed_s": round(elapsed_s, 3),
    }


def _spread(values_ms: list[float]) -> dict[str, float | None]:
    if not values_ms:
        return {"median": None, "max": None}
    return {"median": round(median(values_ms), 3), "max": round(max(values_ms), 3)}


# -- the command -----------------------------------------------------------------------------------


MODES: Final[tuple[Mode, ...]] = ("video", "audio")
GOODBYE_S: Final = 0.5
"""After Ctrl-C: a round trip across the world, and a short wait for the prompt."""
SILENCE_S: Final = 10
"""A model that has not begun to answer ten seconds after the question will not."""


@click.command("talk")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--mic", is_flag=True, help="Speak into the microphone, and hear the answer.")
@terminal.url_option
@terminal.key_option
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="The mode of the session [default: video with --frame, else audio].",
)
@click.option("--frame", type=click.Path(path_type=Path), help="A JPEG to show with every second.")
@click.option("--instructions", default="", help="The system prompt.")
@terminal.dialect_option("realtime", "duplex-v1", "legacy-duplex")
@click.option(
    "--reply",
    type=click.Path(path_type=Path),
    help="File for the model's speech; one that exists is replaced. [default: FILE's name with "
    ".reply.wav, in this folder; none with --mic]",
)
@click.option(
    "--wait-s",
    type=click.IntRange(0, 600),
    default=SILENCE_S,
    show_default=True,
    help="Maximum seconds of silence to send after FILE while the model has not answered.",
)
@click.option(
    "--fast",
    is_flag=True,
    help="Send a second as soon as the one before it was answered, and not in real time: delays of "
    "such a recording mean nothing.",
)
@terminal.no_record_option
@terminal.json_option
def talk_command(
    *,
    file: Path | None,
    mic: bool,
    url: str,
    key: str | None,
    mode: Mode | None,
    frame: Path | None,
    instructions: str,
    dialect: str,
    reply: Path | None,
    wait_s: int,
    fast: bool,
    no_record: bool,
    as_json: bool,
) -> None:
    """Say FILE, or what you say, to a server in real time, and hear what it answers.

    FILE is a WAV of any rate; it is sent as it would be spoken, each second when it is over.
    After it comes silence, until the model has answered and listens again. The model's words are
    shown as they come; its voice is written as one WAV file (mono, 24 kHz): all it said, one reply
    after the other, without the pauses between them. The file is empty when the model said nothing.

    With --mic you speak into the default microphone and hear the model, until Ctrl-C. Use
    headphones: there is no echo cancellation. It needs the extra mic.

    \b
    Example:
      antiphon serve                          in one terminal
      antiphon talk question.wav              in another
      antiphon talk question.wav --frame photo.jpg --instructions "be brief"
      antiphon talk --mic
      antiphon talk question.wav --json --fast | jq -r 'select(.type == "summary").text'

    \b
    Exit codes:
      0  the conversation came to its end
      1  the server could not be reached, refused, reported an error, or ended it
      2  a file or an option that cannot be used
      130  interrupted; a reply that was there stays
    """  # noqa: D301 - click takes a backspace to keep the lines
    mode = mode or ("audio" if frame is None else "video")
    if frame is not None and mode == "audio":
        raise terminal.UnusableError("--frame: there is nothing to see with --mode audio")
    if (file is None) is not mic or (mic and fast):
        raise click.UsageError("name a WAV file, or give --mic; --fast needs a file")
    devices = Devices() if mic else None
    plan = Plan(
        units=() if file is None else read_speech(file),
        instructions=instructions,
        frame=None if frame is None else read_frame(frame),
        silence_s_max=wait_s,
        fast=fast,
        microphone=devices,
        record=not no_record,
    )
    reply = reply if file is None else reply or Path(f"{file.stem}.reply.wav")
    _check(file, reply)
    tally = Tally()
    view = _choose_view(as_json=as_json, is_file=file is not None)
    started_s = time.monotonic()
    talking = partial(_talk, url, plan, view, mode=mode, dialect=dialect, key=key, tally=tally)
    with devices or nullcontext():
        is_interrupted = run(talking)
    if is_interrupted and mic:  # which is how it ends
        is_interrupted, tally.failure = False, None
    _conclude(view, plan, tally, time.monotonic() - started_s, reply)
    if is_interrupted:
        raise KeyboardInterrupt
    if tally.failure is not None:
        raise click.ClickException(tally.failure)


def _conclude(view: View, plan: Plan, tally: Tally, elapsed_s: float, reply: Path | None) -> None:
    """Write the reply, if it is wanted, and show the sums."""
    written = None if reply is None else _write_reply(tally, reply)
    answered = plan.is_answered(tally)
    view.end(summarize(tally, answered=answered, elapsed_s=elapsed_s, reply=written))


def read_speech(path: Path) -> tuple[bytes, ...]:
    """Read a sound file as seconds of the model's input; `UnusableError` if it cannot be read."""
    with terminal.usable():
        return cut_units(read_wav(path))


def read_frame(path: Path) -> bytes:
    """Read a JPEG that a server will take; `UnusableError` if it is not a JPEG or too large."""
    with terminal.usable():
        data = path.read_bytes()
        check_frame(str(path), data)
        return data


def _check(file: Path | None, reply: Path | None) -> None:
    """Check before the conversation for errors that would come after it."""
    if reply is None:
        return
    if not reply.parent.is_dir():
        raise terminal.UnusableError(f"--reply: there is no folder {reply.parent}")
    if reply.is_dir() or (reply.exists() and file and reply.samefile(file)):
        raise terminal.UnusableError(f"--reply: {reply} would be overwritten")
    if reply.exists():
        click.echo(f"{reply} exists and will be replaced; --reply names another file", err=True)


def _choose_view(*, as_json: bool, is_file: bool) -> View:
    if as_json:
        return JsonView()
    if not is_file:
        click.echo("Speak; Ctrl-C ends the session. Use headphones, or the model hears itself.")
    return LineView(Console(), listens=is_file)


async def _talk(
    url: str, plan: Plan, view: Observer, *, mode: Mode, dialect: str, key: str | None, tally: Tally
) -> bool:
    """Talk until Ctrl-C, which ends it politely; return whether there was one."""
    stop = anyio.Event()
    async with background() as tasks:
        tasks.start_soon(_watch_interrupts, stop, tasks.cancel_scope)
        await talk(url, plan, view, mode=mode, dialect=dialect, key=key, tally=tally, stop=stop)
    if stop.is_set():
        tally.failure = "interrupted"
    return stop.is_set()


async def _watch_interrupts(stop: anyio.Event, everything: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            if stop.is_set():
                everything.cancel()
            stop.set()
            everything.deadline = anyio.current_time() + GOODBYE_S


def _write_reply(tally: Tally, path: Path) -> Path | None:
    """Write the model's speech, even if empty, if there was a session and nothing is lost."""
    if tally.created is None or (tally.failure is not None and path.exists()):
        return None
    try:
        write_wav(path, bytes(tally.pcm))
    except AudioFileError as error:
        tally.failure = tally.failure or str(error)
        return None
    return path
