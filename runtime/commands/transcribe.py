"""`antiphon transcribe`: transcribe a sound file on a server, and read the text as it comes.

The file is read and checked before anything is sent. It records nothing from a microphone. One task
sends the sound, another shows its text.

A file that is longer than an utterance may be is several: a model's context holds some ten minutes.
The next is sent only while the one before is being heard, so that the server keeps two at most,
however long the file is. In real time a second is sent each second.

A server that keeps less reports each lost piece. A transcript of the rest would have holes, so the
first such piece ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import click

from protocol.values.errors import ErrorCode
from protocol.values.messages import Created, ErrorReport, TranscriptDelta, TranscriptDone
from protocol.values.model import UNIT_BYTES

from ..client import terminal
from ..client.duplex import TranscriptionSession
from ..client.errors import ClientError, ReportedError, SessionClosedError
from ..client.resuming import Reconnected, Reconnecting
from ..client.sdk import transcribe
from ..client.websocket import background
from ..media.sound import read_wav
from ..net.process import run

UTTERANCE_S_MAX: Final = 300
"""Half of a context of 8192, and with two in flight a third of the sound that a server keeps."""
SLOWER: Final = "--realtime sends no faster than speech"
UTTERANCES_IN_FLIGHT: Final = 2
"""One that is heard, and one that waits after it."""


class TextTranscript(terminal.TextOutput):
    """The words on standard output, a line an utterance, and errors on standard error."""

    def begins(self, created: Created, *, record: bool) -> None:
        """Write that it is recorded, or not as asked."""
        terminal.echo_recording(created, record=record)

    def receives(self, delta: TranscriptDelta) -> None:
        """Write the words."""
        self._is_within_line = True
        click.echo(terminal.clean(delta.text), nl=False)

    def ends(self, _done: TranscriptDone) -> None:
        """End the line."""
        self._is_within_line = False
        click.echo()

    def fails(self, report: ErrorReport) -> None:
        """Write an error on a line of its own; the words go on."""
        if self._is_within_line:
            click.echo(err=True)
        click.echo(f"Error: {terminal.clean(report.message)} ({report.code})", err=True)

    def breaks_off(self, _error: Exception) -> None:
        """End a line that is not continued."""
        if self._is_within_line:
            click.echo()


class JsonTranscript:
    """One JSON object a line."""

    def begins(self, created: Created, *, record: bool) -> None:
        """Write whether it is recorded, and by what name."""
        recording_id = created.recording_id if record else ""
        notice = created.recording_notice if recording_id else ""
        fields = {"recording_id": recording_id, "recording_notice": notice}
        terminal.echo_json({"type": "created", "session_id": created.session_id, **fields})

    def receives(self, delta: TranscriptDelta) -> None:
        """Write a piece."""
        terminal.echo_json({"type": "delta", "text": delta.text})

    def connects(self, change: Reconnecting | Reconnected) -> None:
        """Write that the connection is lost or back."""
        terminal.echo_json(terminal.connection_fields(change))

    def ends(self, done: TranscriptDone) -> None:
        """Write an utterance's text, and its cost."""
        terminal.echo_json({"type": "done", **attrs.asdict(done)})

    def fails(self, report: ErrorReport) -> None:
        """Write an error."""
        terminal.echo_json({"type": "error", "code": report.code, "message": report.message})

    def breaks_off(self, error: Exception) -> None:
        """Write the error that ended it."""
        terminal.echo_error(error)


Shown = TextTranscript | JsonTranscript


@click.command("transcribe")
@click.argument("file", type=click.Path(path_type=Path))
@terminal.url_option
@terminal.key_option
@click.option("--model", help="The model's name [default: the server's own].")
@click.option(
    "--realtime", is_flag=True, help="Send in real time, one second of sound each second."
)
@terminal.no_record_option
@terminal.json_option
def transcribe_command(*, file: Path, no_record: bool, as_json: bool, **how: Any) -> None:
    """Have a server transcribe what is said in FILE.

    FILE is a WAV of any rate, an hour at most. Its text is printed as it comes, a line an
    utterance; a long file is cut into utterances of five minutes.

    \b
    Example:
      antiphon serve --model tiny                       in one terminal
      antiphon transcribe speech.wav                    in another
      antiphon transcribe speech.wav --realtime
      antiphon transcribe speech.wav --json | jq -r 'select(.type == "done").text'

    \b
    Exit codes:
      0  all of it was transcribed
      1  the server could not be reached, refused, reported an error, or ended it
      2  a file or an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    if no_record and how["model"] is None:
        raise click.UsageError("--no-record needs the model's name: add --model NAME")
    with terminal.usable():
        utterances = cut_utterances(read_wav(file))
    shown = JsonTranscript() if as_json else TextTranscript()
    dictation = partial(dictate, utterances=utterances, shown=shown, record=not no_record, **how)
    try:
        whole = run(dictation)
    except ClientError as error:
        shown.breaks_off(error)
        raise click.ClickException(f"{terminal.explain(error)}{_hint(error)}") from error
    if not whole:
        raise click.ClickException("the file was not transcribed to its end")


def _hint(error: ClientError) -> str:
    """Say what to do about a server that wants to be told its model."""
    is_unnamed = isinstance(error, ReportedError) and error.code is ErrorCode.MODEL_NOT_VALIDATED
    return "; name its model: --model NAME" if is_unnamed else ""


def cut_utterances(pcm: bytes, seconds: int = UTTERANCE_S_MAX) -> tuple[bytes, ...]:
    """Cut float32 LE, 16 kHz mono into utterances; joined, they are the sound."""
    size = seconds * UNIT_BYTES
    return tuple(pcm[start : start + size] for start in range(0, len(pcm), size))


async def dictate(
    url: str,
    utterances: Sequence[bytes],
    shown: Shown,
    *,
    model: str | None = None,
    key: str | None = None,
    realtime: bool = False,
    record: bool = True,
) -> bool:
    """Have a server transcribe sound; return whether no utterance had an error.

    Args:
        url: its address.
        utterances: float32 LE, 16 kHz mono, each within the model's context.
        model: by a name that the server knows it by; None takes the server's own.
        key: the API key, if the server needs one.
        realtime: send a second each second; else as fast as it goes.
        record: whether the server may record it.

    `ClientError`: the server could not be reached, refused, has no such model, or ended it; or it
    did not keep all of the sound.
    """
    opening = transcribe(url, model=model, record=record, key=key, on_connection=shown.connects)
    async with opening as session:
        shown.begins(session.created, record=record)
        places = anyio.Semaphore(UTTERANCES_IN_FLIGHT)
        async with background() as tasks:
            tasks.start_soon(partial(_send, session, utterances, places, realtime=realtime))
            return await _show(session, len(utterances), shown, places)


async def _send(
    session: TranscriptionSession,
    utterances: Sequence[bytes],
    places: anyio.Semaphore,
    *,
    realtime: bool,
) -> None:
    due_s = anyio.current_time()
    with suppress(SessionClosedError):  # what is read says why
        for utterance in utterances:
            await places.acquire()
            for start in range(0, len(utterance), UNIT_BYTES):
                await session.append(utterance[start : start + UNIT_BYTES])
                if realtime:
                    due_s += 1
                    await anyio.sleep_until(due_s)
            await session.finish()


async def _show(
    session: TranscriptionSession, count: int, shown: Shown, places: anyio.Semaphore
) -> bool:
    left, whole = count, True
    while left:
        match await anext(session):
            case TranscriptDelta() as delta:
                shown.receives(delta)
            case TranscriptDone() as done:
                shown.ends(done)
                left -= 1
                places.release()
            case ErrorReport() as report:
                if report.code == ErrorCode.BUFFER_FULL:
                    raise ClientError(f"{report.message}; {SLOWER}")
                shown.fails(report)
                whole = False
    return whole
