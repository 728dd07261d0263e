"""Hypothesis strategies for the messages of `live`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from protocol.values.messages import Closed, Created, ErrorReport, ServerMessage, Speech
from protocol.values.openai import (
    LIVE_RATES_HZ,
    LiveSession,
    LiveSettings,
    Mute,
    Muted,
    Notice,
    Unmute,
    Unmuted,
    Update,
    Updated,
    Usage,
)
from protocol.values.requests import AppendSound, ClientMessage, CloseRequest, Init, VoiceName
from protocol.wire.audio import to_pcm16
from protocol.wire.dialects.openai_shared import ERROR_CODES

_event_ids = st.text(max_size=64)
live_settings = st.builds(
    LiveSettings,
    model=st.text(max_size=20),
    rate_hz=st.sampled_from(LIVE_RATES_HZ),
    delegation=st.sampled_from([None, "client"]),
    safety_identifier=st.text(max_size=64),
    event_id=_event_ids,
)


def live_requests(
    voice_names: st.SearchStrategy[VoiceName], sounds16: st.SearchStrategy[bytes]
) -> st.SearchStrategy[ClientMessage]:
    """Everything that a client can say in `live`."""
    return st.one_of(
        st.builds(
            Init,
            instructions=st.text(max_size=40),
            ref_audio=st.none() | voice_names,
            live=live_settings,
            record=st.booleans(),
        ),
        st.builds(AppendSound, pcm16=sounds16),
        st.builds(Mute, event_id=_event_ids),
        st.builds(Unmute, event_id=_event_ids),
        st.builds(Update, event_id=_event_ids),
        st.just(CloseRequest()),
    )


live_sessions = st.builds(
    LiveSession,
    id=st.text(max_size=20),
    expires_at=st.integers(0, 2**40),
    model=st.text(max_size=20),
    rate_hz=st.sampled_from(LIVE_RATES_HZ),
    delegation=st.sampled_from([None, "client"]),
    safety_identifier=st.text(max_size=20),
    instructions=st.text(max_size=20),
    voice=st.text(max_size=20),
    store=st.booleans(),
)


def live_answers(
    others: st.SearchStrategy[ServerMessage],
    speeches: st.SearchStrategy[Speech],
    session_ids: st.SearchStrategy[str],
    ends: st.SearchStrategy[Any],
) -> st.SearchStrategy[ServerMessage]:
    """Everything that a server can say in `live`; `others` are the same elsewhere."""
    return st.one_of(
        others,
        st.builds(
            Created,
            session_id=session_ids,
            prompt_length=st.integers(0, 9),
            recording=st.just("on"),
            live=live_sessions,
            client_event_id=_event_ids,
        ),
        speeches.filter(lambda speech: any(to_pcm16(speech.pcm))),
        st.builds(Muted, client_event_id=_event_ids),
        st.builds(Unmuted, client_event_id=_event_ids),
        st.builds(Updated, live=live_sessions, client_event_id=_event_ids),
        st.builds(Usage, seconds=st.integers(0, 100_000), ratio=st.floats(0, 1)),
        st.builds(
            Notice, code=st.sampled_from(["time_over", "context_full"]), text=st.text(max_size=20)
        ),
        st.builds(ErrorReport, code=st.sampled_from(ERROR_CODES), message=st.text()),
        st.builds(
            Closed,
            session_id=session_ids,
            reason=ends,
            live=live_sessions,
            seconds=st.integers(0, 100_000),
        ),
    )
