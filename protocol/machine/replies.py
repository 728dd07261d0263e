"""The conversation of a session of `openai`: its items, and the response in progress."""

from __future__ import annotations

from typing import Any, Final

import attrs

from ..values.digest import derive_id
from ..values.errors import ErrorCode
from ..values.items import Item, Part, as_prompt
from ..values.limits import ITEMS_CHARS_MAX, ITEMS_MAX
from ..values.messages import Speech
from ..values.openai import (
    Configure,
    CreateItem,
    DeleteItem,
    ItemDeleted,
    ItemStep,
    ItemTruncated,
    Metadata,
    OpenAISession,
    Reply,
    ReplyKind,
    ReplyReason,
    ReplyState,
    ReplyStatus,
    ReplyStep,
    RetrieveItem,
    TruncateItem,
    item_of,
)
from ..values.requests import ClientMessage
from ..values.sound import rate_of
from ..values.state import State
from ..wire.rates import HISTORY_BYTES
from .pieces import Pieces

FIRST: Final = "root"
"""In place of an item's id: before all items."""


@attrs.define(kw_only=True, eq=False)
class Replies(Pieces):
    """What was said in a session, by either side.

    Attributes:
        told: the settings in force.
        items: of the conversation, by their ids; the oldest are forgotten.
        items_made: how many ids were made.
        reply: the response in progress.
        metadata: of the response that was asked for.
        words: its text so far.
    """

    told: OpenAISession = attrs.Factory(OpenAISession)
    items: dict[str, Item] = attrs.Factory(dict)
    items_made: int = 0
    reply: Reply | None = None
    metadata: Metadata | None = None
    words: str = ""

    # -- items ----------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Make the id of an item."""
        self.items_made += 1
        return derive_id("item", self.opened.recording_id, self.items_made)

    @property
    def last_id(self) -> str | None:
        """The id of the last item; None without one."""
        return next(reversed(self.items), None)

    def add(self, item: Item, after: str | None) -> None:
        """Add an item that is whole."""
        self.keep(item, after)
        previous = None if after == FIRST else after
        self.say(ItemStep(kind="added", item=item, previous_id=previous))
        self.say(ItemStep(kind="done", item=item, previous_id=previous))

    def keep(self, item: Item, after: str | None = None) -> None:
        """Keep an item, after all others or one of them, and forget the oldest of too many."""
        if after in (None, self.last_id):
            self.items[item.id] = item
        else:
            kept = list(self.items.items())
            at = 0 if after == FIRST else [*self.items].index(after) + 1
            self.items = dict([*kept[:at], (item.id, item), *kept[at:]])
        chars = sum(len(part.text) for kept in self.items.values() for part in kept.parts)
        while len(self.items) > ITEMS_MAX or chars > ITEMS_CHARS_MAX:
            oldest = self.items.pop(next(iter(self.items)))
            chars -= sum(len(part.text) for part in oldest.parts)

    def create_item(self, message: CreateItem) -> None:
        """Add an item; before the first sound, its text is part of the prompt."""
        item, after = message.item, message.previous_id
        if item.id in self.items:
            self.complain(ErrorCode.INVALID_PAYLOAD, "$.item.id: there is such an item")
            return
        if after not in (None, FIRST) and after not in self.items:
            text = "$.previous_item_id: there is no such item"
            self.complain(ErrorCode.ITEM_NOT_FOUND, text)
            return
        self.show(item.pictures)
        parts = tuple(attrs.evolve(part, picture=b"") for part in item.parts)
        item = attrs.evolve(item, id=item.id or self.new_id(), parts=parts)
        if self.state is State.ACTIVE:
            self.add(item, self.last_id if after is None else after)
        else:
            self.keep(item, after)

    def prompt(self, message: ClientMessage | None = None) -> str:
        """The instructions, and the text of the items that come before the first sound."""
        instructions, items = self.told.instructions, list(self.items.values())
        if isinstance(message, Configure) and message.instructions is not None:
            instructions = message.instructions
        elif isinstance(message, CreateItem):
            items.append(message.item)
        return as_prompt(instructions, items)

    def delete_item(self, message: DeleteItem) -> None:
        """Forget an item."""
        if self._knows(message.item_id):
            del self.items[message.item_id]
            self.say(ItemDeleted(item_id=message.item_id))

    def retrieve_item(self, message: RetrieveItem) -> None:
        """Tell an item again."""
        if self._knows(message.item_id):
            self.say(ItemStep(kind="retrieved", item=self.items[message.item_id]))

    def truncate_item(self, message: TruncateItem) -> None:
        """Note how much of an item was played: the message in the log says it."""
        if self._knows(message.item_id):
            self.say(
                ItemTruncated(
                    item_id=message.item_id,
                    content_index=message.content_index,
                    audio_end_ms=message.audio_end_ms,
                )
            )

    def _knows(self, item_id: str) -> bool:
        if item_id not in self.items:
            self.complain(ErrorCode.ITEM_NOT_FOUND, "$.item_id: there is no such item")
        return item_id in self.items

    # -- the response ---------------------------------------------------------------------------

    def speak(self, speech: Speech) -> None:
        """Send a second of the response: its text and sound, or its text."""
        if self.reply is None or self.reply.id != speech.response_id:
            self.finish("completed")
            self.begin_reply(speech.response_id)
        assert self.reply is not None
        tokens = self.reply.output_tokens + speech.metrics.n_tokens
        self.reply = attrs.evolve(self.reply, output_tokens=tokens)
        self.words += speech.text
        if self.reply.modality == "audio" and (speech.text or speech.pcm):
            coding = self.told.spoken
            pcm = self.resampled(speech.pcm, rate_of(coding))
            self.say(attrs.evolve(speech, pcm=pcm, coding=coding))
        elif speech.text:
            self.say(ReplyStep(kind="text_delta", response_id=self.reply.id, text=speech.text))
        if speech.end_of_turn:
            self.finish("completed")

    def give_none(self, status: ReplyStatus, reason: ReplyReason = "", **why: Any) -> None:
        """Tell that the response that was asked for does not come."""
        reply = self._new_reply(self._next_response_id)
        self.responses += 1
        self.say(ReplyState(reply=reply))
        self.say(ReplyState(reply=attrs.evolve(reply, status=status, reason=reason, **why)))

    def _new_reply(self, response_id: str) -> Reply:
        metadata, self.metadata = self.metadata, None
        return Reply(id=response_id, modality=self.told.modality, metadata=metadata)

    def begin_reply(self, response_id: str) -> None:
        """Begin a response."""
        self.words, self.spoken = "", bytes(HISTORY_BYTES)
        self.reply = self._new_reply(response_id)
        self.say(ReplyState(reply=self.reply))
        item = Item(id=item_of(response_id), role="assistant", status="in_progress")
        self.say(ReplyStep(kind="item_added", response_id=response_id, item=item))
        previous = self.last_id
        self.keep(item)
        self.say(ItemStep(kind="added", item=item, previous_id=previous))
        step = ReplyStep(kind="part_added", response_id=response_id, modality=self.told.modality)
        self.say(step)

    def finish(
        self, status: Any, reason: ReplyReason = "", *, fault: str = "", message: str = ""
    ) -> None:
        """End the response in progress, if there is one."""
        reply, self.reply = self.reply, None
        if reply is None:
            return
        is_sound, name = reply.modality == "audio", reply.id
        if is_sound:
            self.say(ReplyStep(kind="audio_done", response_id=name))
        done: ReplyKind = "transcript_done" if is_sound else "text_done"
        self.say(ReplyStep(kind=done, response_id=name, text=self.words))
        part = ReplyStep(
            kind="part_done", response_id=name, modality=reply.modality, text=self.words
        )
        self.say(part)
        content = Part(kind="output_audio" if is_sound else "output_text", text=self.words)
        item = Item(
            id=item_of(name),
            role="assistant",
            status="completed" if status == "completed" else "incomplete",
            parts=(content,),
        )
        ids = list(self.items)
        at = ids.index(item.id) if item.id in self.items else 0
        previous = ids[at - 1] if at else None
        if item.id in self.items:
            self.items[item.id] = item
        self.say(ReplyStep(kind="item_done", response_id=name, item=item))
        self.say(ItemStep(kind="done", item=item, previous_id=previous))
        ended = attrs.evolve(
            reply, status=status, reason=reason, fault=fault, message=message, items=(item,)
        )
        self.say(ReplyState(reply=ended))
