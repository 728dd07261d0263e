"""`antiphon transcribe`: have a server write down a sound file, and read the text as it comes.

The file is read and checked before anything is sent. It records nothing from a microphone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attrs
import click

from protocol.messages import ErrorReport, TranscriptDelta, TranscriptDone

from ..audio import AudioFileError, read_wav
from ..chat.view import clean, echo_json
from ..client.errors import AddressError, ClientError
from ..client.options import key_option, url_option
from ..client.session import endpoint
from ..interrupts import run
from ..talk.command import UnusableError
from .dictation import cut_utterances, dictate


class TextTranscript:
    """The words on standard output, a line an utterance, and errors on standard error."""

    def __init__(self) -> None:
        self._is_amid_line = False

    def hears(self, delta: TranscriptDelta) -> None:
        """Write the words."""
        self._is_amid_line = True
        click.echo(clean(delta.text), nl=False)

    def ends(self, _done: TranscriptDone) -> None:
        """End the line."""
        self._is_amid_line = False
        click.echo()

    def fails(self, report: ErrorReport) -> None:
        """Say what went wrong, on a line of its own; the words go on."""
        if self._is_amid_line:
            click.echo(err=True)
        click.echo(f"Error: {clean(report.message)} ({report.code})", err=True)

    def breaks_off(self, _error: Exception) -> None:
        """End a line that nothing more comes of."""
        if self._is_amid_line:
            click.echo()


class JsonTranscript:
    """One JSON object a line."""

    def hears(self, delta: TranscriptDelta) -> None:
        """Write a piece."""
        echo_json({"type": "delta", "text": delta.text})

    def ends(self, done: TranscriptDone) -> None:
        """Write an utterance's text, and what it took."""
        echo_json({"type": "done", **attrs.asdict(done)})

    def fails(self, report: ErrorReport) -> None:
        """Write an error."""
        echo_json({"type": "error", "code": report.code, "message": report.message})

    def breaks_off(self, error: Exception) -> None:
        """Write what ended it."""
        code = getattr(error, "code", None)
        echo_json({"type": "error", "code": code, "message": str(error)})


@click.command("transcribe")
@click.argument("file", type=click.Path(path_type=Path))
@url_option
@key_option
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    help="The model, by a name that the server knows it by.",
)
@click.option("--realtime", is_flag=True, help="Send a second each second, as it would be spoken.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON objects, one a line.")
def transcribe_command(
    *, file: Path, url: str, key: str | None, model: str, realtime: bool, as_json: bool
) -> None:
    """Have a server write down what is said in FILE.

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
    """  # noqa: D301 - click takes a backspace to keep the lines
    try:
        endpoint(url, "transcription", "transcription")
        utterances = cut_utterances(read_wav(file))
    except AddressError as error:
        raise UnusableError(f"--url: {error}") from error
    except AudioFileError as error:
        raise UnusableError(str(error)) from error
    shown = JsonTranscript() if as_json else TextTranscript()
    dictation = partial(dictate, url, utterances, shown, model=model, key=key, realtime=realtime)
    try:
        whole = run(dictation)
    except ClientError as error:
        shown.breaks_off(error)
        raise click.ClickException(str(error)) from error
    if not whole:
        raise click.ClickException("not all of it was transcribed")
