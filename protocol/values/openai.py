"""The sessions of the `openai` and `live` dialects: requests of the client, answers of the server.

Names are those of the GA Realtime API where it has some: an *item* is a part of the conversation, a
*response* one speaking turn of the model, a *part* a piece of an item's content. `live`
has items too. A response is a `RealtimeResponse`, and a request for one is `Respond`; the answer of
a turn of chat is a `Response` (`messages`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, get_args

import attrs

from .limits import SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from .model import LIVE_RATES_HZ, Coding, Tool, ToolCall, ToolChoice, ToolResult

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
        is_whole: its text is sent also where it is empty, as strict clients need it.
        ends: samples of its sound and characters of its text after each second; of a response.
    """

    kind: PartKind
    text: str = ""
    picture: bytes = attrs.field(default=b"", repr=False)
    is_whole: bool = attrs.field(default=False, eq=False)
    ends: tuple[tuple[int, int], ...] = attrs.field(default=(), eq=False)


@attrs.frozen(kw_only=True)
class Item:
    """A part of the conversation.

    Attributes:
        id: the item; empty where the client leaves it to the server.
        role: who said it, or made the call, or returned its result.
        status: whether it is whole.
        parts: its content.
        call: a call of a tool, or its result, which has no content.
    """

    id: str = ""
    role: ItemRole
    status: ItemStatus = "completed"
    parts: tuple[Part, ...] = ()
    call: ToolCall | ToolResult | None = None

    @property
    def chars(self) -> int:
        """Characters of its text."""
        match self.call:
            case ToolCall(arguments=text) | ToolResult(output=text):
                return len(text)
        return sum([len(part.text) for part in self.parts])

    @property
    def pictures(self) -> tuple[bytes, ...]:
        """Its pictures: JPEG, PNG and WebP files whose headers have been checked."""
        return tuple(part.picture for part in self.parts if part.picture)


def as_prompt(instructions: str, items: Iterable[Item]) -> str:
    """Instructions, and the text of items after them, each with its role."""
    lines = [instructions]
    for item in items:
        text = "\n".join(part.text for part in item.parts if part.text)
        lines += [f"{item.role}: {text}"] if text else []
    return "\n".join(line for line in lines if line)


Modality = Literal["audio", "text"]
DetectionKind = Literal["server_vad", "semantic_vad"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
ResponseReason = Literal["", "turn_detected", "client_cancelled", "barge_in", "max_output_tokens"]
InputKind = Literal[
    "speech_started",
    "speech_stopped",
    "timeout_triggered",
    "committed",
    "cleared",
    "transcript_delta",
    "transcript_done",
    "transcript_failed",
]
Metadata = tuple[tuple[str, str], ...]
"""Names and values of a client's own, in its order."""
ItemKind = Literal["added", "done", "retrieved"]
ReplyKind = Literal[
    "item_added",
    "item_done",
    "part_added",
    "part_done",
    "audio_done",
    "transcript_done",
    "text_delta",
    "text_done",
    "call_delta",
    "call_done",
]


@attrs.frozen(kw_only=True)
class TurnDetection:
    """How the client's turns are found.

    Attributes:
        kind: `server_vad` has the detector's settings; `semantic_vad` leaves turns to the model.
        threshold: 0 to 1; a higher one needs louder speech.
        prefix_ms: how long before the speech its reported beginning is, in milliseconds.
        silence_ms: the silence that ends speech, in milliseconds.
        creates: the model answers by itself; else it listens until it is asked for a response.
        interrupts: speech of the client stops the model's.
        backchannel_ms: shorter speech does not stop it; None: as the server has it.
        idle_ms: the model speaks where the client says nothing for so long; 0: it waits.
    """

    kind: DetectionKind = "semantic_vad"
    threshold: float = SPEECH_THRESHOLD
    prefix_ms: int = 300
    silence_ms: int = SPEECH_SILENCE_MS
    creates: bool = True
    interrupts: bool = True
    backchannel_ms: int | None = None
    idle_ms: int = 0


@attrs.frozen(kw_only=True)
class OpenAISession:
    """A session as it is in force.

    Attributes:
        id: the session.
        model: the name by which the client chose it.
        expires_at: when it ends at the latest, Unix time in whole seconds.
        instructions: the system prompt; may be empty.
        voice: the name of the voice; empty for the model's own.
        modality: what a response is made of: speech with its transcript, or text.
        detection: how turns are found; None: only the model decides, and it is not interrupted.
        input_format: how the client's sound is written.
        output_format: how the model's sound is written.
        transcriber: the model that transcribes the client's speech; empty without one.
        tools: functions that the client offers.
        tool_choice: whether calls of them are sent.
        is_parallel: several calls may wait for their results at once.
    """

    id: str = ""
    model: str = ""
    expires_at: int = 0
    instructions: str = ""
    voice: str = ""
    modality: Modality = "audio"
    detection: TurnDetection | None = TurnDetection()
    input_format: Coding = "audio/pcm"
    output_format: Coding = "audio/pcm"
    transcriber: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    is_parallel: bool = True


@attrs.frozen(kw_only=True)
class RealtimeResponse:
    """A response, which is one speaking turn.

    Attributes:
        id: the response.
        status: how it stands.
        reason: why it was cancelled, or is incomplete.
        fault: why it failed, or what of its request was not honoured, for programs; may be empty.
        message: the same for people.
        items: what it is made of.
        modality: as of the session.
        metadata: the client's own names and values, from its request.
        output_tokens: tokens that the model generated.
        input_tokens: tokens that it held before.
        max_tokens: it ends with the second in which it has so many; 0: it has no bound.
        conversation_id: the conversation that it is part of; empty: it is not told.
        ends: as of its part.
    """

    id: str
    status: ResponseStatus = "in_progress"
    reason: ResponseReason = ""
    fault: str = ""
    message: str = ""
    items: tuple[Item, ...] = ()
    modality: Modality = "audio"
    metadata: Metadata | None = None
    output_tokens: int = 0
    input_tokens: int = 0
    max_tokens: int = 0
    conversation_id: str = ""
    ends: tuple[tuple[int, int], ...] = attrs.field(default=(), eq=False)


# -- what the client asks for ----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Configure:
    """Change settings; those that are None stay.

    Attributes:
        instructions: the system prompt; it can be changed until the model hears the first sound.
        voice: the name of the voice; until then too.
        modality: what a response is made of.
        detection: how turns are found.
        is_undetected: turns are not found: only the model decides.
        input_format: how the client's sound is written; may change until the first sound.
        output_format: how the model's sound is written; until then too.
        transcribes: the client wants to be told what it said.
        transcriber: the model that a transcription session asks for.
        tools: functions that the client offers.
        tool_choice: whether it takes calls of them.
        is_parallel: whether it takes a call while another waits for its result.
    """

    instructions: str | None = None
    voice: str | None = None
    modality: Modality | None = None
    detection: TurnDetection | None = None
    is_undetected: bool = False
    input_format: Coding | None = None
    output_format: Coding | None = None
    transcribes: bool | None = None
    transcriber: str | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: ToolChoice | None = None
    is_parallel: bool | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class CommitSound:
    """Make an item of the sound so far."""

    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class ClearSound:
    """Forget the sound that the model has not heard yet."""

    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Respond:
    """Ask for a response.

    Attributes:
        metadata: returned with the response.
        modality: what it is made of; None: as of the session.
        instructions: for this response; None: those of the session.
        max_tokens: its bound; 0: it has none.
        is_unheard: the model does not get the instructions, for it has its prompt already.
    """

    metadata: Metadata | None = None
    modality: Modality | None = None
    instructions: str | None = None
    max_tokens: int = 0
    is_unheard: bool = False
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class CancelResponse:
    """Have the model stop speaking.

    Attributes:
        response_id: the response; None: the one in progress.
    """

    response_id: str | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class CreateItem:
    """Add an item to the conversation.

    Attributes:
        item: the item.
        previous_id: the item that it follows; None: the last one.
    """

    item: Item
    previous_id: str | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class DeleteItem:
    """Forget an item; the model cannot.

    Attributes:
        item_id: the item.
    """

    item_id: str
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RetrieveItem:
    """Ask for an item.

    Attributes:
        item_id: the item.
    """

    item_id: str
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class TruncateItem:
    """Tell how much of an item's sound was played; the model cannot unhear the rest.

    Attributes:
        item_id: the item.
        content_index: of its part.
        audio_end_ms: what was played, in milliseconds.
    """

    item_id: str
    content_index: int = 0
    audio_end_ms: int
    ignored: tuple[str, ...] = ()


# -- what the client is told -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Configured:
    """The session's settings after a change.

    Attributes:
        openai: the session as it is in force.
    """

    openai: OpenAISession = OpenAISession()


@attrs.frozen(kw_only=True)
class ConversationCreated:
    """The session's conversation is there, without items.

    Attributes:
        id: the conversation.
    """

    id: str


@attrs.frozen(kw_only=True)
class RateLimit:
    """A limit: of the model's context, where a response begins; of sessions, before there is one.

    Attributes:
        name: of what: tokens of the context; sessions that wait, this one included.
        limit: how many there may be, or are.
        remaining: how many are left.
        reset_s: seconds until the session ends at the latest, or begins.
    """

    name: Literal["requests", "tokens"] = "tokens"
    limit: int
    remaining: int
    reset_s: int


@attrs.frozen(kw_only=True)
class InputStep:
    """A step of the client's sound: detected, committed, cleared, transcribed.

    Attributes:
        kind: what.
        item_id: the item that the sound is, or will be; empty where there is no item.
        at_ms: where in the client's sound, in milliseconds; how long, of a transcript.
        text: a transcript, or a piece of one; of a failure its reason.
        fault: the failure's code.
        previous_id: the item before it; None: it is the first one.
        from_ms: where silence began that triggered a response.
    """

    kind: InputKind
    item_id: str = ""
    at_ms: int = 0
    from_ms: int = 0
    text: str = ""
    fault: str = ""
    previous_id: str | None = None


@attrs.frozen(kw_only=True)
class ItemStep:
    """An item of the conversation was added, is complete, or was retrieved.

    Attributes:
        kind: which of them.
        item: the item.
        previous_id: the item before it; None: it is the first one.
    """

    kind: ItemKind
    item: Item
    previous_id: str | None = None


@attrs.frozen(kw_only=True)
class ItemDeleted:
    """An item was forgotten.

    Attributes:
        item_id: the item.
    """

    item_id: str


@attrs.frozen(kw_only=True)
class ItemTruncated:
    """It is noted how much of an item was played.

    Attributes:
        item_id: the item.
        content_index: of its part.
        audio_end_ms: what was played, in milliseconds.
    """

    item_id: str
    content_index: int = 0
    audio_end_ms: int


@attrs.frozen(kw_only=True)
class ReplyState:
    """A response begins or ends.

    Attributes:
        response: the response.
    """

    response: RealtimeResponse


@attrs.frozen(kw_only=True)
class ReplyStep:
    """A part of a response begins, continues or ends.

    Attributes:
        kind: what begins, or is whole.
        response_id: the response.
        item: the item.
        modality: sound or text; of a part.
        text: the text, or the transcript of sound.
        index: the place of the item in the response.
    """

    kind: ReplyKind
    response_id: str
    item: Item | None = None
    modality: Modality = "audio"
    text: str = ""
    index: int = 0


OpenAIRequest = (
    Configure
    | CommitSound
    | ClearSound
    | Respond
    | CancelResponse
    | CreateItem
    | DeleteItem
    | RetrieveItem
    | TruncateItem
)
OpenAIAnswer = (
    Configured
    | ConversationCreated
    | RateLimit
    | InputStep
    | ItemStep
    | ItemDeleted
    | ItemTruncated
    | ReplyState
    | ReplyStep
)


ANSWERS: Final = get_args(OpenAIAnswer)
"""All that only a client of `openai` is told."""


def item_of(response_id: str) -> str:
    """The id of the item that a response is made of."""
    return f"item_{response_id.partition('_')[2]}"


# -- the session of live ------------------------------------------------------------------------

Delegation = Literal["client", "responses"]
"""Who handles tasks that the model delegates: calls of tools, for `responses`, and nothing else."""


@attrs.frozen(kw_only=True)
class LiveSettings:
    """The settings of `session.start` that no other dialect has.

    Attributes:
        model: a name of the server's model.
        coding: of the sound, in and out.
        rate_hz: samples a second, in and out: 24000 or 16000; of G.711 8000.
        delegation: who handles delegated tasks, if the client said.
        backend: the model to which they would be delegated, for `responses`.
        safety_identifier: the client's name for its user; may be empty.
        event_id: the client's name for the message; may be empty.
        history: what was said before the session.
        tools: functions that are offered to the model.
    """

    model: str = ""
    coding: Coding = "audio/pcm"
    rate_hz: int = LIVE_RATES_HZ[0]
    delegation: Delegation | None = None
    backend: str = ""
    safety_identifier: str = ""
    event_id: str = ""
    history: tuple[Item, ...] = ()
    tools: tuple[Tool, ...] = ()


@attrs.frozen(kw_only=True)
class LiveSession:
    """A session as it is in force, with the defaults filled in.

    Attributes:
        id: the session.
        expires_at: when it ends at the latest, Unix time in whole seconds.
        model: the name by which the client chose it.
        coding: of the sound, in and out.
        rate_hz: samples a second, in and out.
        delegation: who handles delegated tasks, if the client said.
        backend: the model to which they would be delegated, for `responses`.
        safety_identifier: the client's name for its user; may be empty.
        instructions: the system prompt; may be empty.
        voice: the name of the voice; empty for the model's own.
        store: it is being recorded.
        tools: functions that are offered.
    """

    id: str = ""
    expires_at: int = 0
    model: str = ""
    coding: Coding = "audio/pcm"
    rate_hz: int = LIVE_RATES_HZ[0]
    delegation: Delegation | None = None
    backend: str = ""
    safety_identifier: str = ""
    instructions: str = ""
    voice: str = ""
    store: bool = False
    tools: tuple[Tool, ...] = ()


@attrs.frozen(kw_only=True)
class UserWords:
    """What the user said, as far as it is transcribed.

    Attributes:
        text: words since the last message, or a part of one; never empty.
        start_ms: where they begin in the session's sound, in milliseconds.
        end_ms: where they end there.
    """

    text: str
    start_ms: int
    end_ms: int


@attrs.frozen(kw_only=True)
class Muted:
    """From now on the model hears silence in place of the client's sound.

    Attributes:
        client_event_id: the client's name for its message; may be empty.
    """

    client_event_id: str = ""


@attrs.frozen(kw_only=True)
class Unmuted:
    """From now on the model hears the client's sound again.

    Attributes:
        client_event_id: the client's name for its message; may be empty.
    """

    client_event_id: str = ""


@attrs.frozen(kw_only=True)
class Updated:
    """The session's settings after an update.

    Attributes:
        live: the session as it is in force.
        client_event_id: the client's name for its message; may be empty.
    """

    live: LiveSession = LiveSession()
    client_event_id: str = ""


@attrs.frozen(kw_only=True)
class Usage:
    """The session's use so far.

    Attributes:
        seconds: whole seconds of sound that the model heard.
        ratio: part of the model's context that is full, 0 to 1.
    """

    seconds: int
    ratio: float


@attrs.frozen(kw_only=True)
class Notice:
    """Information without consequence.

    Attributes:
        code: for programs.
        text: for people.
    """

    code: str
    text: str


@attrs.frozen(kw_only=True)
class Mute:
    """Let the model hear silence from here on.

    Attributes:
        event_id: the client's name for the message; may be empty.
    """

    event_id: str = ""
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Unmute:
    """Let the model hear the client again.

    Attributes:
        event_id: the client's name for the message; may be empty.
    """

    event_id: str = ""
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Update:
    """Change settings of a session that is set up: only its tools; equal ones are taken.

    Attributes:
        event_id: the client's name for the message; may be empty.
        tools: functions that are offered; None leaves them.
    """

    event_id: str = ""
    tools: tuple[Tool, ...] | None = None
    ignored: tuple[str, ...] = ()


LiveAnswer = Muted | Unmuted | UserWords | Updated | Usage | Notice
LIVE_ANSWERS: Final = get_args(LiveAnswer)
"""All that only a client of `live` is told."""
