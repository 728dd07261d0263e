"""How an answer of `antiphon chat` looks: as words, or as JSON for programs.

Both are told what `conversation.Shown` is told. A server's text is shown without control
characters, so that it cannot move the cursor.
"""

from __future__ import annotations

import json

import attrs
import click
import orjson

from protocol.messages import Delta, QueuePlace, Response
from protocol.model import SAMPLE_BYTES


class TextAnswer:
    """The words on standard output, and all else on standard error."""

    def __init__(self) -> None:
        self._said = ""

    def waits(self, place: QueuePlace) -> None:
        """Say where in the queue."""
        where = f"place {place.position} of {place.queue_length}"
        click.echo(f"in the queue: {where}, about {place.estimated_wait_s} s", err=True)

    def hears(self, delta: Delta) -> None:
        """Write the words."""
        self._said += delta.text
        click.echo(clean(delta.text), nl=False)

    def ends(self, response: Response, speech_s: float) -> None:
        """Write what was not written yet, and why it ends where it does not end by itself."""
        click.echo(clean(response.text.removeprefix(self._said)))
        if response.reason != "turn_end":
            why = "the limit of tokens is reached" if response.reason == "length" else "cut short"
            click.echo(f"({why})", err=True)
        if speech_s:
            click.echo(f"({speech_s:.1f} s of speech)", err=True)


class JsonAnswer:
    """One JSON object a line, without the sound."""

    def waits(self, place: QueuePlace) -> None:
        """Write where in the queue."""
        echo_json({"type": "queued", **attrs.asdict(place)})

    def hears(self, delta: Delta) -> None:
        """Write a piece."""
        echo_json({"type": "delta", "text": delta.text, "samples": len(delta.pcm) // SAMPLE_BYTES})

    def ends(self, response: Response, speech_s: float) -> None:
        """Write the whole answer, and what it took."""
        echo_json(
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


def echo_json(fields: dict[str, object]) -> None:
    """Write one JSON object as a line; a path that is not UTF-8 makes it one of ASCII."""
    try:
        line = orjson.dumps(fields).decode()
    except orjson.JSONEncodeError:
        line = json.dumps(fields, separators=(",", ":"))
    click.echo(line)


def clean(text: str) -> str:
    """Replace what could move a terminal's cursor, but for line ends and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)
