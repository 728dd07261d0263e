"""Hypothesis strategies for the messages of `vllm-omni`."""

from __future__ import annotations

from typing import get_args

import attrs
from hypothesis import strategies as st

from protocol.values.messages import Closed, Created, ErrorReport, Listen, ServerMessage, Speech
from protocol.values.model import DuplexConfig
from protocol.values.omni import (
    Acknowledged,
    AckPlayback,
    BargeIn,
    ClearOutput,
    CommitTurn,
    Heartbeat,
    HeartbeatAck,
    History,
    OmniSession,
    OmniSettings,
    OutputCleared,
    Overlap,
    Playback,
    RateLimits,
    SessionUpdated,
    Speaking,
)
from protocol.values.openai import (
    CancelResponse,
    ClearSound,
    InputStep,
    ItemStep,
    Respond,
    TurnDetection,
)
from protocol.values.requests import Append, ClientMessage, Init, Report
from protocol.wire.audio import to_float32
from protocol.wire.dialects.omni import ERROR_CODES
from tests.strategies.openai_messages import (
    detections,
    items,
    openai_answers,
    openai_requests,
    with_status,
)

_texts = st.text(max_size=20)
_names = st.text("0123456789abcdef", min_size=1, max_size=12)
_responses, _items = _names.map("resp_{}".format), _names.map("item_{}".format)
_counts = st.integers(0, 10**6)
_modalities = st.sampled_from(["audio", "text"])
_overlaps, _histories = st.sampled_from(get_args(Overlap)), st.sampled_from(get_args(History))
_detections = detections.map(
    lambda it: TurnDetection(kind="server_vad", threshold=it.threshold, silence_ms=it.silence_ms)
)
_settings = st.builds(
    OmniSettings,
    model=st.none() | _texts,
    modality=st.none() | _modalities,
    overlap=st.none() | _overlaps,
    history=st.none() | _histories,
    answers=st.none() | st.booleans(),
    detection=st.none() | _detections,
)
_sessions = st.builds(
    OmniSession,
    id=_texts,
    model=_texts,
    instructions=_texts,
    modality=_modalities,
    overlap=_overlaps,
    history=_histories,
    detection=st.none() | _detections,
    epoch=_counts,
    turn_id=_counts,
)
_playback = st.builds(Playback, generated_ms=_counts, played_ms=_counts, committed_ms=_counts)
_OWN = ("Configure", "AppendSound", "CommitSound", "Respond")


def omni_requests(
    sounds16: st.SearchStrategy[bytes],
    pictures: st.SearchStrategy[bytes],
    jpegs: st.SearchStrategy[bytes],
    voices: st.SearchStrategy[object],
    closes: st.SearchStrategy[ClientMessage],
) -> st.SearchStrategy[ClientMessage]:
    """Everything that a client can say in `vllm-omni`."""
    of_openai = openai_requests(sounds16, pictures)
    return st.one_of(
        st.builds(
            Init,
            instructions=_texts,
            ref_audio=st.none() | voices,
            config=st.builds(
                DuplexConfig, temperature=st.floats(0, 2), force_listen_count=st.integers(0, 100)
            ),
            omni=_settings,
            record=st.booleans(),
        ),
        st.builds(
            Append,
            pcm=sounds16.map(to_float32),
            frames=st.lists(jpegs, max_size=2).map(tuple),
            max_slice_nums=st.none() | st.integers(1, 9),
        ),
        st.builds(CommitTurn, responds=st.none() | st.booleans(), is_speech=st.booleans()),
        st.builds(
            AckPlayback,
            played_ms=_counts,
            committed_ms=st.none() | _counts,
            response_id=st.none() | _responses,
            item_id=st.none() | _items,
            truncates=st.booleans(),
        ),
        st.builds(Respond, modality=st.none() | _modalities, max_tokens=st.integers(0, 10_000)),
        st.sampled_from([Heartbeat(), BargeIn(), ClearOutput(), Report(), ClearSound()]),
        st.just(CancelResponse()),
        of_openai.filter(lambda message: type(message).__name__ not in _OWN),
        closes,
    )


_STEPS = ("committed", "cleared", "transcript_done")
_FOREIGN = (
    "Configured",
    "ConversationCreated",
    "Created",
    "ErrorReport",
    "ItemStep",
    "RateLimit",
    "Speech",
)


def _is_told(message: ServerMessage) -> bool:
    if isinstance(message, InputStep):
        return message.kind in _STEPS
    return type(message).__name__ not in _FOREIGN


def omni_answers(
    queue: st.SearchStrategy[ServerMessage],
    listens: st.SearchStrategy[Listen],
    speeches: st.SearchStrategy[Speech],
    session_ids: st.SearchStrategy[str],
    ends: st.SearchStrategy[str],
) -> st.SearchStrategy[ServerMessage]:
    """Everything that a server can say in `vllm-omni`."""
    return st.one_of(
        queue,
        st.builds(
            Created,
            session_id=session_ids,
            prompt_length=st.integers(0, 9),
            recording=st.just("on"),
            omni=_sessions,
        ),
        st.builds(SessionUpdated, omni=_sessions),
        st.builds(lambda it, epoch: attrs.evolve(it, epoch=epoch), listens, _counts),
        speeches,
        openai_answers(speeches, session_ids).filter(_is_told),
        st.builds(
            ItemStep,
            kind=st.sampled_from(["added", "done"]),
            item=items,
            previous_id=st.none() | _items,
        ).map(with_status),
        st.builds(ItemStep, kind=st.just("retrieved"), item=items),
        st.builds(HeartbeatAck, session_id=session_ids),
        st.builds(Speaking, response_id=_responses, epoch=_counts),
        st.builds(OutputCleared, response_id=_responses),
        st.just(RateLimits()),
        st.builds(
            Acknowledged,
            session_id=session_ids,
            epoch=_counts,
            item_id=_items,
            playback=_playback,
            truncates=st.booleans(),
            is_whole=st.booleans(),
        ),
        st.builds(Closed, session_id=session_ids, reason=ends),
        st.builds(ErrorReport, code=st.sampled_from(ERROR_CODES), message=st.text()),
    )
