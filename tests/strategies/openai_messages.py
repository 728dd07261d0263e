"""Hypothesis strategies for the messages of `openai`."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from protocol.values.messages import Created, ErrorReport, ServerMessage, Speech
from protocol.values.model import ToolCall, ToolResult
from protocol.values.openai import (
    CancelResponse,
    ClearSound,
    CommitSound,
    Configure,
    Configured,
    ConversationCreated,
    CreateItem,
    DeleteItem,
    InputStep,
    Item,
    ItemDeleted,
    ItemRole,
    ItemStep,
    ItemTruncated,
    OpenAISession,
    Part,
    RateLimit,
    RealtimeResponse,
    ReplyState,
    ReplyStep,
    Respond,
    RetrieveItem,
    TruncateItem,
    TurnDetection,
)
from protocol.values.requests import AppendSound, ClientMessage
from protocol.wire.audio import to_pcm16
from protocol.wire.dialects.openai import ERROR_CODES
from protocol.wire.dialects.openai import TRANSCRIPTION_CODES as DICTATION_CODES
from protocol.wire.dialects.openai_shared import PARTS_OF
from tests.strategies.tools import names, tools

_counts = st.integers(0, 1 << 30)
_ids = st.text("0123456789abcdef", min_size=1, max_size=12)
_item_ids = _ids.map("item_{}".format)
_responses = _ids.map("resp_{}".format)
_texts = st.text(max_size=20)
_modalities = st.sampled_from(["audio", "text"])


def _idling(how: TurnDetection) -> st.SearchStrategy[TurnDetection]:
    """Only server_vad waits for a user who says nothing."""
    waits = st.just(0) | st.integers(1_000, 3_600_000)
    return waits.map(
        lambda idle_ms: attrs.evolve(how, idle_ms=idle_ms * (how.kind == "server_vad"))
    )


detections = st.builds(
    TurnDetection,
    kind=st.sampled_from(["server_vad", "semantic_vad"]),
    threshold=st.floats(0, 1),
    prefix_ms=st.integers(0, 10_000),
    silence_ms=st.integers(100, 10_000),
    creates=st.booleans(),
    interrupts=st.booleans(),
    backchannel_ms=st.none() | st.integers(0, 10_000),
).flatmap(_idling)


def _items(
    role: ItemRole, pictures: st.SearchStrategy[bytes] | None = None
) -> st.SearchStrategy[Item]:
    parts = st.builds(
        Part, kind=st.sampled_from(PARTS_OF[role]), text=_texts, is_whole=st.booleans()
    )
    if pictures is not None:  # as a client says it
        parts = st.builds(
            lambda part, picture: attrs.evolve(
                part, picture=picture * (part.kind == "input_image")
            ),
            parts,
            pictures,
        )
    return st.builds(
        Item,
        id=_item_ids,
        role=st.just(role),
        status=st.sampled_from(["completed", "incomplete", "in_progress"]),
        parts=st.lists(parts, max_size=3).map(tuple),
    )


_calls = st.builds(ToolCall, id=_ids, name=names, arguments=_texts)
call_items = st.builds(Item, id=_item_ids, role=st.just("assistant"), call=_calls)
new_calls = call_items.map(lambda item: attrs.evolve(item, status="in_progress"))
result_items = st.builds(
    Item,
    id=_item_ids,
    role=st.just("user"),
    call=st.builds(ToolResult, call_id=_ids, output=_texts),
)
items = st.one_of(*map(_items, PARTS_OF), call_items, result_items)
new_items = st.builds(Item, id=_item_ids, role=st.just("assistant"), status=st.just("in_progress"))
_made_parts = st.builds(
    Part, kind=st.sampled_from(["output_text", "output_audio"]), text=_texts, is_whole=st.booleans()
)
whole_items = st.builds(
    Item,
    id=_item_ids,
    role=st.just("assistant"),
    status=st.sampled_from(["completed", "incomplete"]),
    parts=_made_parts.map(lambda part: (part,)),
)
_changes = st.builds(
    Configure,
    instructions=st.none() | _texts,
    voice=st.none() | st.text("abc", min_size=1, max_size=9),
    modality=st.none() | _modalities,
    detection=st.none() | detections,
    tools=st.none() | tools,
    tool_choice=st.sampled_from([None, "auto", "none"]),
    is_parallel=st.none() | st.booleans(),
)


def _undetected(change: Configure, *, is_undetected: bool) -> Configure:
    is_undetected &= change.detection is None
    return attrs.evolve(change, is_undetected=is_undetected)


def openai_requests(
    sounds16: st.SearchStrategy[bytes], pictures: st.SearchStrategy[bytes]
) -> st.SearchStrategy[ClientMessage]:
    """Everything that a client can say in `openai`."""
    shown = st.one_of([*(_items(role, pictures) for role in PARTS_OF), result_items])
    return st.one_of(
        st.builds(_undetected, _changes, is_undetected=st.booleans()),
        st.builds(AppendSound, pcm16=sounds16),
        st.just(CommitSound()),
        st.just(ClearSound()),
        st.builds(
            Respond,
            modality=st.none() | _modalities,
            instructions=st.none() | _texts,
            max_tokens=st.integers(0, 10_000),
        ),
        st.builds(CancelResponse, response_id=st.none() | _responses),
        st.builds(CreateItem, item=shown, previous_id=st.none() | _item_ids),
        st.builds(DeleteItem, item_id=_item_ids),
        st.builds(RetrieveItem, item_id=_item_ids),
        st.builds(
            TruncateItem,
            item_id=_item_ids,
            content_index=st.integers(0, 3),
            audio_end_ms=st.integers(0, 86_400_000),
        ),
    )


sessions = st.builds(
    OpenAISession,
    id=_texts,
    model=_texts,
    expires_at=st.integers(0, 2**40),
    instructions=_texts,
    voice=_texts,
    modality=_modalities,
    detection=st.none() | detections,
    tools=tools,
    tool_choice=st.sampled_from(["auto", "none"]),
    is_parallel=st.booleans(),
)
_replies = st.one_of(
    st.builds(RealtimeResponse, id=_responses, modality=_modalities, conversation_id=_ids),
    st.builds(
        RealtimeResponse,
        id=_responses,
        status=st.just("completed"),
        items=st.tuples(whole_items, call_items) | call_items.map(lambda item: (item,)),
        modality=_modalities,
        fault=st.sampled_from(["", "unsupported"]),
        output_tokens=st.integers(0, 10_000),
        input_tokens=st.integers(0, 10_000),
        max_tokens=st.integers(0, 10_000),
    ),
    st.builds(
        RealtimeResponse,
        id=_responses,
        status=st.just("incomplete"),
        reason=st.just("max_output_tokens"),
        max_tokens=st.integers(1, 10_000),
        modality=_modalities,
    ),
    st.builds(
        RealtimeResponse,
        id=_responses,
        status=st.just("cancelled"),
        reason=st.sampled_from(["turn_detected", "client_cancelled"]),
        modality=_modalities,
    ),
    st.builds(
        RealtimeResponse,
        id=_responses,
        status=st.just("failed"),
        fault=st.sampled_from(["no_speech", "inference_error"]),
        message=_texts,
        modality=_modalities,
    ),
)


def _without_name(step: ReplyStep) -> ReplyStep:
    """A piece of the arguments, which does not name the tool."""
    assert step.item is not None
    item = attrs.evolve(step.item, call=attrs.evolve(step.item.call, name=""))
    return attrs.evolve(step, kind="call_delta", item=item)


_steps = st.one_of(
    st.builds(
        ReplyStep,
        kind=st.just("item_added"),
        response_id=_responses,
        item=new_items | new_calls,
        index=st.integers(0, 16),
    ),
    st.builds(
        ReplyStep,
        kind=st.just("item_done"),
        response_id=_responses,
        item=whole_items | call_items,
        index=st.integers(0, 16),
    ),
    st.builds(
        lambda step, is_whole: step if is_whole else _without_name(step),
        st.builds(
            ReplyStep,
            kind=st.just("call_done"),
            response_id=_responses,
            item=call_items,
            index=st.integers(0, 16),
        ),
        st.booleans(),
    ),
    st.builds(
        ReplyStep,
        kind=st.sampled_from(["part_added", "part_done"]),
        response_id=_responses,
        modality=_modalities,
        text=_texts,
    ),
    st.builds(ReplyStep, kind=st.just("audio_done"), response_id=_responses),
    st.builds(
        ReplyStep,
        kind=st.sampled_from(["transcript_done", "text_delta", "text_done"]),
        response_id=_responses,
        text=_texts,
    ),
)


plain_detections = detections.map(lambda how: attrs.evolve(how, backchannel_ms=None, idle_ms=0))
_silences = st.builds(
    InputStep,
    kind=st.just("timeout_triggered"),
    item_id=_item_ids,
    from_ms=st.integers(0, 2**40),
    at_ms=st.integers(0, 2**40),
)
_inputs = st.one_of(
    st.builds(
        InputStep,
        kind=st.sampled_from(["speech_started", "speech_stopped"]),
        item_id=_item_ids,
        at_ms=st.integers(0, 2**40),
    ),
    st.builds(
        InputStep, kind=st.just("committed"), item_id=_item_ids, previous_id=st.none() | _item_ids
    ),
    st.just(InputStep(kind="cleared")),
    st.builds(InputStep, kind=st.just("transcript_delta"), item_id=_item_ids, text=_texts),
    st.builds(
        InputStep,
        kind=st.just("transcript_done"),
        item_id=_item_ids,
        text=_texts,
        at_ms=st.integers(0, 10**7),
    ),
)
_failures = st.builds(
    InputStep,
    kind=st.just("transcript_failed"),
    item_id=_item_ids,
    text=_texts,
    fault=st.sampled_from(["inference_error", "context_full", "session_expired"]),
)


def with_status(step: ItemStep) -> ItemStep:
    """A call is in progress where it is added."""
    is_begun = step.kind == "added" and isinstance(step.item.call, ToolCall)
    item = attrs.evolve(step.item, status="in_progress") if is_begun else step.item
    return attrs.evolve(step, item=item)


_added = st.builds(
    ItemStep, kind=st.sampled_from(["added", "done"]), item=items, previous_id=st.none() | _item_ids
).map(with_status)


def _settings(
    session_ids: st.SearchStrategy[str], told: st.SearchStrategy[OpenAISession]
) -> st.SearchStrategy[Created | Configured]:
    """What tells the settings in force."""
    created = st.builds(
        Created,
        session_id=session_ids,
        prompt_length=st.integers(0, 9),
        recording=st.just("on"),
        openai=told,
    )
    return created | st.builds(Configured, openai=told)


def openai_answers(
    speeches: st.SearchStrategy[Speech], session_ids: st.SearchStrategy[str]
) -> st.SearchStrategy[ServerMessage]:
    """Everything that a server can say in `openai`."""
    named = st.builds(
        lambda speech, name: attrs.evolve(speech, response_id=name), speeches, _responses
    )
    spoken = named.filter(lambda speech: any(to_pcm16(speech.pcm)))
    return st.one_of(
        _settings(session_ids, sessions),
        st.builds(ConversationCreated, id=_ids),
        st.builds(RateLimit, limit=_counts, remaining=_counts, reset_s=_counts),
        _inputs,
        _silences,
        _failures,
        _added,
        st.builds(ItemStep, kind=st.just("retrieved"), item=items),
        st.builds(ItemDeleted, item_id=_item_ids),
        st.builds(
            ItemTruncated,
            item_id=_item_ids,
            content_index=st.integers(0, 3),
            audio_end_ms=st.integers(0, 86_400_000),
        ),
        st.builds(ReplyState, response=_replies),
        _steps,
        spoken,
        st.builds(ErrorReport, code=st.sampled_from(ERROR_CODES), message=st.text()),
    )


def dictation_requests(sounds16: st.SearchStrategy[bytes]) -> st.SearchStrategy[ClientMessage]:
    """Everything that a client can say in `openai-transcription`."""
    change = st.builds(
        Configure,
        detection=st.none() | plain_detections,
        input_format=st.none() | st.sampled_from(["audio/pcm", "audio/pcmu", "audio/pcma"]),
        transcriber=st.none() | _texts,
    )
    return st.one_of(
        st.builds(_undetected, change, is_undetected=st.booleans()),
        st.builds(AppendSound, pcm16=sounds16),
        st.just(CommitSound()),
        st.just(ClearSound()),
    )


def _spoken_item(item_id: str, *, is_whole: bool) -> Item:
    return Item(id=item_id, role="user", parts=(Part(kind="input_audio", is_whole=is_whole),))


_dictations = st.builds(
    OpenAISession,
    id=_texts,
    expires_at=st.integers(0, 2**40),
    detection=st.none() | plain_detections,
    input_format=st.sampled_from(["audio/pcm", "audio/pcmu", "audio/pcma"]),
    transcriber=_texts,
)


def dictation_answers(session_ids: st.SearchStrategy[str]) -> st.SearchStrategy[ServerMessage]:
    """Everything that a server can say in `openai-transcription`."""
    return st.one_of(
        _settings(session_ids, _dictations),
        _inputs,
        _failures,
        st.builds(
            ItemStep,
            kind=st.sampled_from(["added", "done"]),
            item=st.builds(_spoken_item, _item_ids, is_whole=st.booleans()),
            previous_id=st.none() | _item_ids,
        ),
        st.builds(ErrorReport, code=st.sampled_from(DICTATION_CODES), message=st.text()),
    )
