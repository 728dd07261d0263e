"""What a conversation of OpenAI's dialects is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

ItemRole = Literal["user", "assistant", "system", "developer"]
ItemStatus = Literal["completed", "incomplete", "in_progress"]
PartKind = Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]


@attrs.frozen(kw_only=True)
class Part:
    """A piece of an item's content.

    Attributes:
        kind: what it is.
        text: the text, or the transcript of sound; may be empty.
        picture: the file of a picture, as it comes; an item that is kept has it no more.
    """

    kind: PartKind
    text: str = ""
    picture: bytes = attrs.field(default=b"", repr=False)


@attrs.frozen(kw_only=True)
class Item:
    """A part of the conversation.

    Attributes:
        id: the item; empty where the client leaves it to the server.
        role: who said it.
        status: whether it is whole.
        parts: its content.
    """

    id: str = ""
    role: ItemRole
    status: ItemStatus = "completed"
    parts: tuple[Part, ...] = ()

    @property
    def pictures(self) -> tuple[bytes, ...]:
        """Its pictures: JPEG, PNG and WebP files whose headers have been checked."""
        return tuple(part.picture for part in self.parts if part.picture)


def as_prompt(instructions: str, items: Iterable[Item]) -> str:
    """Instructions, and the text of items after them, each with its role."""
    lines = [instructions]
    for item in items:
        said = "\n".join(part.text for part in item.parts if part.text)
        lines += [f"{item.role}: {said}"] if said else []
    return "\n".join(line for line in lines if line)
