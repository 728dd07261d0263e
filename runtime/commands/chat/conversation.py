"""A conversation of `antiphon chat`: its history, and the next question.

The history is kept here, because a server keeps none. Each question has a connection of its own, so
that the user may think about the next for longer than a server waits. A question without an answer
is forgotten. An answer is shown as words, or as JSON for programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs
import click

from protocol.values.messages import Delta, QueuePlace, Response
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES
from protocol.values.requests import ChatMessage, Part, SpeechRequest
from protocol.values.turn import ChatConfig

from ...client import terminal
from ...client.chat import message
from ...client.resuming import Reconnected, Reconnecting
from ...client.sdk import Dialect, connect
from ...media.sound import write_wav
from ..interrupts import run

RETRIES: Final = 0
"""A user at a terminal wants to know at once that no server is there."""


@attrs.frozen(kw_only=True)
class Asking:
    """The settings of each question.

    `streams`: the answer comes as it is made; `speech` is None for words only; `key` is the API
    key, if the server needs one.
    """

    url: str
    dialect: Dialect
    streams: bool
    speech: SpeechRequest | None
    config: ChatConfig
    key: str | None = attrs.field(default=None, repr=False)


class TextAnswer(terminal.Words):
    """The words on standard output, and all else on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._said = ""

    def waits(self, place: QueuePlace) -> None:
        """Write the place in the queue."""
        click.echo(f"in the queue: {terminal.show_place(place)}", err=True)

    def hears(self, delta: Delta) -> None:
        """Write the words."""
        self._said += delta.text
        self._is_amid_line = not self._said.endswith("\n")
        click.echo(terminal.clean(delta.text), nl=False)

    def ends(self, response: Response, speech_s: float) -> None:
        """Write the rest of the text, and the reason of the end unless it is the model's own."""
        click.echo(terminal.clean(response.text.removeprefix(self._said)))
        if response.reason != "turn_end":
            why = "the limit of tokens is reached" if response.reason == "length" else "cut short"
            click.echo(f"({why})", err=True)
        if speech_s:
            click.echo(f"({speech_s:.1f} s of speech)", err=True)


class JsonAnswer:
    """One JSON object a line, without the sound."""

    def waits(self, place: QueuePlace) -> None:
        """Write the place in the queue."""
        terminal.echo_json({"type": "queued", **attrs.asdict(place)})

    def connects(self, change: Reconnecting | Reconnected) -> None:
        """Write that the connection is lost or back."""
        terminal.echo_json(terminal.connection_fields(change))

    def hears(self, delta: Delta) -> None:
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


class Chat:
    """A conversation, and its answers so far.

    Args:
        asking: the settings of each question.
        system: the system message; empty for none.
        media: for the first question.
        speak: the file of the speech, if wanted.
    """

    def __init__(
        self, asking: Asking, *, system: str, media: tuple[Part, ...], speak: Path | None
    ) -> None:
        self._asking = asking
        self._history: list[ChatMessage] = [message("system", system)] if system else []
        self._media = media
        self._speak = speak
        self._speech = bytearray()

    def ask(self, text: str, shown: Shown) -> Response:
        """Ask, show the answer as it comes, and remember both; return the end of the answer.

        `ClientError`: it was not answered, and is forgotten. `AudioFileError`: the speech cannot be
        written; the answer is remembered.
        """
        question = message("user", *self._media, text)
        response, pcm = run(self._answer, (*self._history, question), shown)
        self._history += [question, message("assistant", response.text)]
        self._media = ()
        self._speech += pcm
        shown.ends(response, len(pcm) / SAMPLE_BYTES / OUTPUT_RATE_HZ)
        if self._speak is not None:
            write_wav(self._speak, bytes(self._speech))
        return response

    async def _answer(
        self, conversation: tuple[ChatMessage, ...], shown: Shown
    ) -> tuple[Response, bytes]:
        how = self._asking
        pcm = bytearray()
        async with connect(
            how.url,
            mode="chat",
            dialect=how.dialect,
            on_queue=shown.waits,
            on_connection=shown.connects,
            retries=RETRIES,
            key=how.key,
        ) as session:
            answer = await session.ask(
                conversation,
                stream=how.streams,
                speech=how.speech or False,
                config=how.config,
            )
            async for piece in answer:
                pcm += piece.pcm
                if isinstance(piece, Delta):
                    shown.hears(piece)
        assert answer.response is not None
        return answer.response, bytes(pcm)
