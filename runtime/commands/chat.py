"""`antiphon chat`: ask a server in words, with pictures, sound or a video; read its answer.

With a question on the command line, or on standard input, it is asked and the command ends. On a
terminal without one, questions are asked in turn until Ctrl-D. Ctrl-C cuts an answer short, and
ends the command at the prompt. Files are read and checked before anything is sent.

The history is kept here, because a server keeps none. Each question has a connection of its own, so
that the user may think about the next for longer than a server waits. A question without an answer
is forgotten. An answer is shown as words, or as JSON for programs.

It draws no Markdown, plays nothing on a loudspeaker and records nothing from a microphone.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs
import click

from protocol.values import requests as rq
from protocol.values.limits import VIDEO_BYTES_MAX
from protocol.values.messages import Created, Delta, QueuePlace, Response
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, ChatConfig
from protocol.wire.media import check_image, check_video, read_audio, read_reference_audio

from ..client import terminal
from ..client.chat import message
from ..client.errors import ClientError
from ..client.resuming import Reconnected, Reconnecting
from ..client.sdk import Dialect, connect
from ..media.sound import AudioFileError, read_wav, write_wav
from ..media.voices import NO_VOICE
from ..net.process import run

# -- a conversation --------------------------------------------------------------------------------


RETRIES: Final = 0
"""A user at a terminal wants to know at once that no server is there."""


class TextAnswer(terminal.TextOutput):
    """The words on standard output, and all else on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def begins(self, created: Created | None, *, record: bool) -> None:
        """Write that the session is recorded, or not as asked, where the server says so."""
        if created is not None:
            terminal.echo_recording(created, record=record)

    def waits(self, place: QueuePlace) -> None:
        """Write the place in the queue."""
        click.echo(f"in the queue: {terminal.show_place(place)}", err=True)

    def receives(self, delta: Delta) -> None:
        """Write the words."""
        self._text += delta.text
        self._is_within_line = not self._text.endswith("\n")
        click.echo(terminal.clean(delta.text), nl=False)

    def ends(self, response: Response, speech_s: float) -> None:
        """Write the rest of the text, and the reason of the end unless it is the model's own."""
        click.echo(terminal.clean(response.text.removeprefix(self._text)))
        if response.reason != "turn_end":
            why = "the token limit is reached" if response.reason == "length" else "cut short"
            click.echo(f"({why})", err=True)
        if speech_s:
            click.echo(f"({speech_s:.1f} s of speech)", err=True)


class JsonAnswer:
    """One JSON object a line, without the sound."""

    def begins(self, created: Created | None, *, record: bool) -> None:  # noqa: ARG002
        """Write the session, where the server describes it."""
        if created is not None:
            names = ("session_id", "recording", "recording_id", "recording_notice")
            terminal.echo_json({"type": "created"} | {it: getattr(created, it) for it in names})

    def waits(self, place: QueuePlace) -> None:
        """Write the place in the queue."""
        terminal.echo_json({"type": "queued", **attrs.asdict(place)})

    def connects(self, change: Reconnecting | Reconnected) -> None:
        """Write that the connection is lost or back."""
        terminal.echo_json(terminal.connection_fields(change))

    def receives(self, delta: Delta) -> None:
        """Write a piece."""
        terminal.echo_json(
            {"type": "delta", "text": delta.text, "samples": len(delta.pcm) // SAMPLE_BYTES}
        )

    def ends(self, response: Response, speech_s: float) -> None:
        """Write the whole answer, and its cost."""
        terminal.echo_json(
            {
                "type": "response",
                "text": response.text,
                "reason": response.reason,
                "speech_s": round(speech_s, 3),
                "input_tokens": response.input_tokens,
                "generated_tokens": response.generated_tokens,
                "metrics": attrs.asdict(response.metrics),
            }
        )


Shown = TextAnswer | JsonAnswer


@attrs.define(kw_only=True)
class Chat:
    """A conversation, and its answers so far.

    Attributes:
        streams: the answers come as they are made.
        speech: None for words only.
        key: the API key, if the server needs one.
        record: whether the server may record it.
        system: the system message; empty for none.
        media: for the first question.
        speak: the file of the speech, if wanted.
    """

    url: str
    dialect: Dialect
    streams: bool
    speech: rq.SpeechRequest | None
    config: ChatConfig
    key: str | None = attrs.field(default=None, repr=False)
    record: bool = True
    system: str = ""
    media: tuple[rq.Part, ...] = ()
    speak: Path | None = None
    _history: list[rq.ChatMessage] = attrs.field(init=False, factory=list)
    _spoken: bytearray = attrs.field(init=False, factory=bytearray)
    _is_begun: bool = attrs.field(init=False, default=False)

    def ask(self, text: str, shown: Shown) -> Response:
        """Ask, show the answer as it comes, and remember both; return the end of the answer.

        `ClientError`: it was not answered, and is forgotten. `AudioFileError`: the speech cannot be
        written; the answer is remembered.
        """
        question = message("user", *self.media, text)
        system = (message("system", self.system),) if self.system else ()
        response, pcm = run(self._answer, (*system, *self._history, question), shown)
        self._history += [question, message("assistant", response.text)]
        self.media = ()
        self._spoken += pcm
        shown.ends(response, len(pcm) / SAMPLE_BYTES / OUTPUT_RATE_HZ)
        if self.speak is not None:
            write_wav(self.speak, bytes(self._spoken))
        return response

    async def _answer(
        self, conversation: tuple[rq.ChatMessage, ...], shown: Shown
    ) -> tuple[Response, bytes]:
        pcm = bytearray()
        async with connect(
            self.url,
            mode="chat",
            dialect=self.dialect,
            on_queue=shown.waits,
            on_connection=shown.connects,
            retries=RETRIES,
            key=self.key,
            init=rq.Init(instructions="", notices=True, record=self.record),
        ) as session:
            if not self._is_begun:
                shown.begins(session.created, record=self.record)
                self._is_begun = True
            answer = await session.ask(
                conversation, stream=self.streams, speech=self.speech or False, config=self.config
            )
            async for piece in answer:
                pcm += piece.pcm
                if isinstance(piece, Delta):
                    shown.receives(piece)
        assert answer.response is not None
        return answer.response, bytes(pcm)


# -- the command -----------------------------------------------------------------------------------


PROMPT: Final = "> "
TOKENS_MAX: Final = ChatConfig().max_new_tokens
FAILURES: Final = (ClientError, AudioFileError)
"""Errors that cost a question its answer, or the answer its WAV."""


@click.command("chat")
@click.argument("text", required=False)
@terminal.url_option
@terminal.key_option
@click.option("--system", default="", help="The system prompt.")
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A JPEG, PNG or WebP for the first question; repeatable.",
)
@click.option(
    "--audio",
    "sounds",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A WAV for the first question; repeatable.",
)
@click.option("--video", type=click.Path(path_type=Path), help="A video for the first question.")
@click.option(
    "--speak", type=click.Path(path_type=Path), help="Have the answer spoken, into this WAV."
)
@click.option("--voice", help="The voice: a name in the server's library, or a WAV.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 8192),
    default=TOKENS_MAX,
    show_default=True,
    help="Maximum tokens of an answer.",
)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token."
)
@click.option(
    "--stream/--no-stream",
    "streams",
    default=True,
    show_default=True,
    help="Words as they are made, or all at once.",
)
@terminal.dialect_option("realtime", "legacy-chat")
@terminal.no_record_option
@terminal.json_option
def chat_command(
    *,
    text: str | None,
    images: tuple[Path, ...],
    sounds: tuple[Path, ...],
    video: Path | None,
    voice: str | None,
    max_tokens: int,
    temperature: float | None,
    no_record: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Ask a server TEXT, and read what it answers.

    Without TEXT the question is read from standard input; on a terminal, one after the other,
    until Ctrl-D. Pictures, sound and video come before the words of the first question. With
    --speak all answers are written as one WAV file (mono, 24 kHz), one after the other; a file of
    that name is replaced.

    \b
    Example:
      antiphon serve                                       in one terminal
      antiphon chat "Good morning!"                        in another
      antiphon chat "What is in it?" --image photo.jpg
      antiphon chat "What was said?" --audio question.wav --no-stream
      antiphon chat "Say hello." --speak hello.wav --voice me.wav
      antiphon chat --system "Be brief."                   a conversation
      antiphon chat "Hello" --json | jq -r 'select(.type == "response").text'

    \b
    Exit codes:
      0  all was answered
      1  the server could not be reached, refused, or reported an error
      2  a file or an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    config = ChatConfig(max_new_tokens=max_tokens)
    if temperature is not None:
        config = attrs.evolve(config, temperature=temperature)
    chat = Chat(
        speech=_choose_speech(given["speak"], voice),
        config=config,
        record=not no_record,
        media=read_media(images, sounds, video),
        **given,
    )
    if text is None and sys.stdin.isatty() and not as_json:
        _converse(chat)
        return
    question = _read_all() if text is None else text
    if not question:
        raise terminal.UnusableError("there is no question")
    try:
        chat.ask(question, JsonAnswer() if as_json else TextAnswer())
    except FAILURES as error:
        if as_json:
            terminal.echo_error(error)
        raise click.ClickException(_explain(error, chat)) from error


def _explain(error: Exception, chat: Chat) -> str:
    """Say what went wrong; where a voice was named, also which."""
    text, voice = terminal.explain(error), chat.speech and chat.speech.voice
    if NO_VOICE in text and isinstance(voice, rq.VoiceName):
        text += f": {voice.name!r} is neither a file here nor in the server's library (--voices)"
    return text


def _converse(chat: Chat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - lets `input` edit the line
    while (question := _read_question()) is not None:
        if not question:
            continue
        try:
            chat.ask(question, TextAnswer())
        except KeyboardInterrupt:
            click.echo("\n(cut short and discarded)", err=True)
        except FAILURES as error:
            click.echo(f"Error: {_explain(error, chat)}", err=True)


def _read_all() -> str:
    """Read the question from standard input; `UnusableError` if it is not UTF-8."""
    try:
        question = sys.stdin.read().strip()
        question.encode()
    except UnicodeError as error:
        raise terminal.UnusableError("the question is not UTF-8") from error
    return question


def _read_question() -> str | None:
    """Wait for a line; None at the end of the input, nothing for one that is not UTF-8."""
    try:
        question = input(PROMPT).strip()
        question.encode()
        return question
    except UnicodeError:
        click.echo("Error: the question is not UTF-8", err=True)
        return ""
    except EOFError:
        click.echo()
        return None


def read_media(
    images: tuple[Path, ...], sounds: tuple[Path, ...], video: Path | None
) -> tuple[rq.Part, ...]:
    """Read the files that come with a question, and check them as a server will.

    `UnusableError`: one of them cannot be read, or a server would refuse it.
    """
    parts: list[rq.Part] = []
    with terminal.usable():
        for path in images:
            data = path.read_bytes()
            check_image(str(path), data)
            parts.append(rq.ImagePart(data=data))
        parts += [read_audio(str(path), read_wav(path)) for path in sounds]
        if video is not None:
            with video.open("rb") as file:
                data = file.read(VIDEO_BYTES_MAX + 1)
            check_video(str(video), data)
            parts.append(rq.VideoPart(data=data))
    return tuple(parts)


def _choose_speech(speak: Path | None, voice: str | None) -> rq.SpeechRequest | None:
    if speak is None:
        if voice is not None:
            raise terminal.UnusableError("--voice needs --speak")
        return None
    if not speak.absolute().parent.is_dir():
        raise terminal.UnusableError(f"--speak: there is no folder {speak.parent}")
    if speak.is_dir():
        raise terminal.UnusableError(f"--speak: {speak} is a folder")
    if voice is None:
        return rq.SpeechRequest()
    path = Path(voice)
    if not (path.exists() or path.suffix):
        return rq.SpeechRequest(mode="audio_assistant", voice=rq.VoiceName(name=voice))
    with terminal.usable():
        reference = read_reference_audio(f"--voice: {voice}", read_wav(path))
    return rq.SpeechRequest(mode="audio_assistant", voice=reference)
