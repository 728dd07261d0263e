"""What the protocols have, and no transcript shows: the list must be empty.

What they have is taken from the protocol's own description (`protocol.wire.schema`), which is
made of the tables: every message, every field, every optional field left out, every word that a
field may be, every error code. Close codes are those of `protocol.values.errors`. That the
description leaves out nothing of the sources is held by `SOURCES`, which was read out of them by
hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from jsonschema import Draft7Validator

from protocol.machine import core, reception
from protocol.values import state
from protocol.values.errors import CLOSE_MEANINGS
from protocol.values.messages import EndReason
from protocol.values.requests import Request
from protocol.values.state import RECEPTION, TRANSITIONS, Gate, SessionKind
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema import Message, Schema, describe
from runtime.serve import routing
from tests.transcripts.pure import PurePlayer
from tests.transcripts.reading import Step, Transcript, example, fill, load_all

SEEDS: Final = Path(__file__).resolve().parents[2] / "shared" / "seeds"

SLIDES = (
    "the scripted model slides no window; test_runtime_backends_minicpmo_window has one that does"
)
CANNOT: Final[Mapping[str, str]] = {
    "realtime client session.init duplex payload.config.sliding_window=basic": SLIDES,
    "realtime client session.init duplex payload.config.sliding_window=context": SLIDES,
    "legacy-duplex client prepare duplex config.sliding_window=basic": SLIDES,
    "legacy-duplex client prepare duplex config.sliding_window=context": SLIDES,
    "duplex-v1 client session.update duplex session.voice_config.sliding_window=basic": SLIDES,
    "duplex-v1 client session.update duplex session.voice_config.sliding_window=context": SLIDES,
    "realtime server response.output.delta duplex response_id absent": "each listen names a turn",
    "legacy-chat server error request code=not_ready": "its only message is never too early",
    "legacy-chat server error request code=unknown_event": "its messages have no type",
    "legacy-chat server error request code=worker_connect_failed": "a turn opens no session",
    "legacy-chat close 1003": "what is not JSON is the client's mistake, and closes with 1000",
    "legacy-chat close 1012": "a shutdown is service_unavailable, and closes with 1013",
    **{
        f"openai server session.created duplex session.{trait}": "it tells what nothing has changed"
        for trait in (
            "audio.input.turn_detection.backchannel_ms",
            "audio.input.turn_detection.idle_timeout_ms",
            "audio.input.turn_detection.prefix_padding_ms",
            "audio.input.turn_detection.silence_duration_ms",
            "audio.input.turn_detection.threshold",
            "audio.input.turn_detection.type=server_vad",
            "audio.output.voice",
            "output_modalities[]=text",
            *("tools[].description absent", "tools[].parameters absent"),
        )
    },
    "openai-transcription server rate_limits.updated transcription rate_limits[].name=tokens": (
        "it has no responses"
    ),
    "openai client response.cancel duplex response_id": "a transcript cannot know it before",
    **{
        f"{dialect} {trait}": why
        for dialect in ("transcription", "transcription-responses")
        for trait, why in {
            "close 1003": "what is not JSON is an error, and the connection stays",
            "server error transcription code=worker_connect_failed": "it opens no session",
        }.items()
    },
    **{
        f"openai-transcription server conversation.item.{step} transcription"
        " item.content[].transcript": "it is null: the text comes after the item"
        for step in ("added", "done")
    },
    "vllm-omni close 1003": "what is not JSON is an error, and the connection stays",
    "vllm-omni server session.created duplex resume_token": "it is drawn by a server that records",
    "vllm-omni server session.closed duplex reason=cancelled": "only one that waits is cancelled",
    "vllm-omni client response.cancel duplex response_id": "a transcript cannot know it before",
    "openai-transcription close 1003": "what is not JSON is an error, and the connection stays",
}
"""What cannot be shown, and why."""

OF_OPENAI: Final = frozenset(
    {Request.CLEAR, Request.RESPOND, Request.CANCEL, Request.CREATE_ITEM}
    | {Request.DELETE_ITEM, Request.RETRIEVE_ITEM, Request.TRUNCATE_ITEM}
)
OF_OMNI: Final = frozenset({Request.HEARTBEAT, Request.CLEAR_OUTPUT})
OF_TOOLS: Final = frozenset({Request.TOOL_RESULT, Request.STANDALONE})
NO_SUCH_REQUEST: Final[Mapping[Gate, frozenset[Request]]] = {
    **dict.fromkeys(
        (Gate.WAITING, Gate.KEPT, Gate.CONNECTED, Gate.OPENING),
        OF_OPENAI | OF_OMNI | {Request.COMMIT},
    ),
    Gate.ACTIVE: (OF_OPENAI - {Request.CANCEL, Request.RESPOND}) | OF_OMNI | {Request.COMMIT},
    Gate.STEERED: OF_TOOLS
    | frozenset({Request.SEE, Request.PAUSE, Request.RESUME})
    | {Request.MUTE, Request.UNMUTE, Request.UPDATE},
    Gate.OPEN: frozenset(Request)
    - OF_OPENAI
    - {Request.UPDATE, Request.APPEND, Request.COMMIT, Request.UNKNOWN},
    Gate.PAUSED: OF_OPENAI
    | OF_OMNI
    | OF_TOOLS
    | frozenset({Request.MISPLACED, Request.COMMIT, Request.MUTE, Request.UNMUTE, Request.UPDATE}),
    Gate.TURN: (OF_OPENAI - {Request.CANCEL})
    | OF_OMNI
    | OF_TOOLS
    | frozenset(
        {Request.SEE, Request.PAUSE, Request.RESUME, Request.INTERRUPT, Request.REPORT}
        | {Request.COMMIT, Request.MUTE, Request.UNMUTE, Request.UPDATE}
    ),
    **dict.fromkeys(
        (Gate.QUEUED, Gate.UNCHOSEN, Gate.TRANSCRIBING),
        frozenset(Request) - {Request.INIT, Request.APPEND, Request.COMMIT, Request.UNKNOWN},
    ),
    Gate.CLOSED: frozenset(Request),
}
"""What no dialect of such a session has a message for; to one that is CLOSED nothing is said."""
NEVER_AGAIN: Final = frozenset({"request QUEUED Queued"})
"""A request asks for a slot once; the row is shared with sessions that begin QUEUED."""

SOURCES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "000": (
        "duplex-v1",
        {
            "client session.update": "session session.instructions session.max_slice_nums"
            " session.ref_audio session.tts_ref_audio",
            "client input_audio_buffer.append": "audio video_frames force_listen max_slice_nums",
            "client session.close": "reason",
            "server session.created": "session_id prompt_length",
            "server response.output_audio.delta": "text audio end_of_turn kv_cache_length",
            "server response.listen": "kv_cache_length",
            "server session.closed": "reason",
            "server error": "error.code error.message error.type",
            "server session.queued": "",
            "server session.queue_update": "",
            "server session.queue_done": "",
        },
    ),
    "001": (
        "realtime",
        {
            "client session.init": "payload payload.system_prompt payload.instructions"
            " payload.config payload.config.length_penalty payload.voice.ref_audio_base64"
            " payload.voice.tts_ref_audio_base64",
            "client input.append": "input input.messages input.messages[].role"
            " input.messages[].content input.streaming input.generation.max_new_tokens"
            " input.generation.length_penalty input.tts.enabled input.audio input.video_frames"
            " input.force_listen input.max_slice_nums",
            "client session.close": "reason",
            "server session.queued": "position estimated_wait_s ticket_id queue_length",
            "server session.queue_update": "position estimated_wait_s ticket_id queue_length",
            "server session.queue_done": "",
            "server session.created": "session_id mode metrics",
            "server response.output.delta": "kind session_id response_id input_id text audio"
            " metrics",
            "server response.done": "session_id response_id text reason metrics",
            "server session.closed": "session_id reason",
            "server error": "error.code error.message error.type",
        },
    ),
    "002": (
        "legacy-duplex",
        {
            "client prepare": "system_prompt config",
            "client audio_chunk": "audio_base64 frame_base64_list force_listen",
            "client video_frame": "",
            "client pause": "",
            "client resume": "",
            "client stop": "",
            "server prepared": "",
            "server result": "is_listen text audio_data kv_cache_length",
        },
    ),
    "003": (
        "transcription",
        {
            "client session.update": "model",
            "client input_audio_buffer.append": "audio",
            "client input_audio_buffer.commit": "final",
            "server session.created": "",
            "server transcription.delta": "delta",
            "server transcription.done": "",
            "server error": "",
        },
    ),
    "004": (
        "legacy-chat",
        {
            "client request": "messages messages[].role messages[].content"
            " messages[].content[]<text>.text messages[].content[]<image>.data"
            " messages[].content[]<audio>.data messages[].content[]<audio>.sample_rate"
            " messages[].content[]<video>.data messages[].content[]<video>.stack_frames"
            " streaming generation.max_new_tokens generation.temperature generation.top_p"
            " generation.length_penalty tts.enabled tts.mode tts.ref_audio_path"
            " tts.ref_audio_data tts.language image.max_slice_nums image.use_image_id"
            " omni_mode enable_thinking",
            "server prefill_done": "input_tokens",
            "server chunk": "text_delta audio_data",
            "server done": "text generated_tokens input_tokens audio_data recording_session_id",
            "server error": "error",
            "server queued": "",
            "server queue_done": "",
        },
    ),
}
"""By source: its dialect, and the fields of its messages, as the source names them."""


# -- what there is --------------------------------------------------------------------------------


@cache
def described(dialect: str) -> tuple[tuple[Message, Draft7Validator], ...]:
    return tuple((message, Draft7Validator(message.schema)) for message in describe(dialect))


def name_of(message: Message) -> str:
    """Name a message, by the first of the session kinds that it is the same in."""
    kind = message.kind or "request"
    return f"{message.dialect} {message.sender} {kind} {message.session_kinds[0]}"


def all_traits() -> set[str]:
    """Name all that there is to be shown."""
    found = {f"{dialect} close {code}" for dialect in MODES_OF for code in CLOSE_MEANINGS}
    for dialect in MODES_OF:
        for message, _ in described(dialect):
            found.add(name_of(message))
            found |= {f"{name_of(message)} {trait}" for trait in traits(message.schema)}
    return found


def traits(schema: Schema, path: str = "") -> Iterator[str]:
    """Name the fields below a schema, those that may be absent once more, and their words."""
    for word in schema.get("enum", ()):
        if word is not None:
            yield f"{path}={word}"
    for tag, branch in branches(schema):
        yield from traits(branch, path + tag)
    if "items" in schema:
        yield from traits(schema["items"], f"{path}[]")
    for name, below in schema.get("properties", {}).items():
        inner = f"{path}.{name}".lstrip(".")
        if name == "type" and "const" in below:
            continue  # that is the message's own name, or the tag of a branch
        yield inner
        if name not in schema.get("required", ()):
            yield f"{inner} absent"
        if name == ROLE and "const" in below:
            yield f"{inner}={below['const']}"
        yield from traits(below, inner)


def branches(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The kinds that a value may be of, each with its tag; messages of all roles are one kind."""
    tag = schema.get("x-antiphon-tag")
    is_told = tag is not None and tag != ROLE
    for branch in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        yield (f"<{branch['properties'][tag]['const']}>" if is_told else ""), branch


ROLE = "role"
"""The field that says whose a message is, and which fields it has."""


# -- what is shown --------------------------------------------------------------------------------


def shown_traits(transcript: Transcript) -> Iterator[str]:
    """Name what a transcript shows; a frame that is refused for what is in it shows nothing."""
    session_kind = session_kind_of_transcript(transcript)
    for step, after in zip(transcript.steps, (*transcript.steps[1:], None), strict=True):
        match step.kind:
            case "send" if is_refusal(after):
                pass
            case "close":
                yield f"{transcript.dialect} close {step.value['code']}"
            case "send" | "receive":
                sender = "client" if step.kind == "send" else "server"
                body = fill(step.value) if sender == "client" else example(step.value)
                yield from shown_by(transcript.dialect, sender, session_kind, body)


def is_refusal(step: Step | None) -> bool:
    """Whether the server takes nothing of what was sent before."""
    return step is not None and step.kind == "receive" and step.value["type"] == "error"


def session_kind_of_transcript(transcript: Transcript) -> SessionKind:
    if transcript.dialect == "legacy-chat":
        return SessionKind.REQUEST
    if "transcription" in transcript.dialect:
        return SessionKind.TRANSCRIPTION
    return SessionKind.CHAT if transcript.connect.endswith("mode=chat") else SessionKind.DUPLEX


def shown_by(dialect: str, sender: str, session_kind: SessionKind, body: Any) -> Iterator[str]:
    """Name what one frame shows."""
    for message, validator in described(dialect):
        is_it = message.sender == sender and session_kind in message.session_kinds
        if is_it and message.kind == body.get("type", "") and validator.is_valid(body):
            yield name_of(message)
            for trait in shown_in(message.schema, body):
                yield f"{name_of(message)} {trait}"


def shown_in(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """Name what a value shows of what `traits` names."""
    if value is not None and value in schema.get("enum", ()):
        yield f"{path}={value}"
    for tag, branch in branches(schema):
        if Draft7Validator(branch).is_valid(value):
            yield from shown_in(branch, value, path + tag)
    if isinstance(value, list) and "items" in schema:
        for item in value:
            yield from shown_in(schema["items"], item, f"{path}[]")
    if not isinstance(value, dict):
        return
    for name, below in schema.get("properties", {}).items():
        inner = f"{path}.{name}".lstrip(".")
        if value.get(name) is None and name not in schema.get("required", ()):
            yield f"{inner} absent"
        elif name in value:
            yield inner
            if name == ROLE and "const" in below:
                yield f"{inner}={value[name]}"
            yield from shown_in(below, value[name], inner)


@cache
def shown() -> Mapping[str, frozenset[str]]:
    """What each transcript shows, by its name."""
    return {it.name: frozenset(shown_traits(it)) for it in load_all()}


def not_shown(*, without: str = "") -> set[str]:
    """Name what no transcript shows.

    Args:
        without: the beginning of the names of transcripts that are left out.
    """
    kept = [seen for name, seen in shown().items() if not (without and name.startswith(without))]
    return all_traits() - set().union(*kept) - set(CANNOT)


def test_every_message_field_word_and_code_is_shown_by_a_transcript() -> None:
    """Whoever learns a protocol from its transcripts does not hear of a part of it."""
    missing = not_shown()
    assert not missing, "\n".join(sorted(missing))


def test_nothing_is_excused_that_is_shown() -> None:
    """An excuse outlives its reason and hides what is lost later."""
    assert set(CANNOT) <= all_traits()
    assert not set(CANNOT) & set().union(*shown().values())


@pytest.mark.parametrize(
    ("without", "lost"),
    [
        ("realtime/chat-tools", "realtime client session.init chat payload.tools=[]"),
        ("duplex-v1/too-big", "duplex-v1 close 1009"),
        ("legacy-chat/contents-stacked", ""),
        (
            "legacy-duplex/client-diagnostic",
            "legacy-duplex client client_diagnostic duplex metrics absent",
        ),
        ("legacy-chat/tts-omni", "legacy-chat client request request tts.mode=omni"),
        ("duplex-v1/worker-busy", "duplex-v1 server error duplex error.code=worker_busy"),
    ],
)
def test_a_transcript_that_is_gone_is_missed(without: str, lost: str) -> None:
    """The list is empty whatever is shown."""
    missing = not_shown(without=without)
    assert lost in missing if lost else not missing


def test_every_address_is_connected_to_by_a_transcript() -> None:
    """A server's address is one that no client has been shown to use."""
    there = re.findall(r"^\| `(/[^`]+)` \|", routing.__doc__ or "", re.MULTILINE)
    assert "/v1/live/sessions/{id}/fork" in there
    served = [it for it in load_all() if it.steps[-1].kind != "refused"]
    used = [it.connect for it in served]
    used += [step.value for it in served for step in it.steps if step.kind == "connect"]
    missing = {
        address
        for address in there
        if not any(re.fullmatch(f"{pattern_of(address)}([?&].*)?", url) for url in used)
    }
    assert missing == {
        "/v1/live/sessions/{id}/attach",  # it listens to another client's session
        "/v1/twilio",  # its messages become those of `openai`: tests/live/test_twilio.py
        "/ws/half_duplex/{label}",  # those of `legacy-duplex`: fixtures/translated
    }


def pattern_of(address: str) -> str:
    """What fits an address of the table in `runtime.serve.routing`."""
    return "[^/?&]+".join(map(re.escape, re.split(r"\{\w+\}", address)))


@pytest.mark.parametrize("source", SOURCES)
def test_the_description_has_all_that_the_source_names(source: str) -> None:
    """A field of a source is neither served nor missed."""
    dialect, messages = SOURCES[source]
    there = set()
    for trait in all_traits():
        words = trait.split(" ")
        if words[0] == dialect and words[1] != "close":
            there.add(" ".join((*words[1:3], *words[4:])))
    wanted = {f"{message} {field}" for message, text in messages.items() for field in text.split()}
    assert wanted | set(messages) <= there, sorted((wanted | set(messages)) - there)


@pytest.mark.parametrize("source", SOURCES)
def test_the_names_are_the_source_s(source: str) -> None:
    """A field that no source has is taken for one of its own."""
    files = list(SEEDS.glob(f"{source}_*"))
    if not files:
        pytest.skip("the sources are not beside the repository")
    text = files[0].read_text("utf-8")
    for message, fields in SOURCES[source][1].items():
        names = [message.split()[1], *(field.rpartition(".")[2] for field in fields.split())]
        for name in set(names) - {"request"}:
            assert name.removesuffix("[]") in text, name


# -- the tables -----------------------------------------------------------------------------------


def test_every_row_of_the_state_tables_is_shown_by_a_transcript(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a session says to a message in some state is known to its tables alone."""
    judged: set[tuple[Gate, Request]] = set()
    went: set[str] = set()
    ends: set[str | None] = set()
    judge, next_state = state.judge, state.next_state

    def judge_and_note(gate: Gate, request: Request) -> str:
        judged.add((gate, request))
        return judge(gate, request)

    def go_and_note(role: Any, session_kind: Any, state: Any, trigger: Any) -> Any:
        went.add(f"{session_kind} {state} {trigger.__name__}")
        return next_state(role, session_kind, state, trigger)

    monkeypatch.setattr(reception, "judge", judge_and_note)
    monkeypatch.setattr(core, "next_state", go_and_note)
    for transcript in load_all():
        player = PurePlayer(transcript, tmp_path)
        player.play()
        ends.add(player.session.end_reason if player.session else None)
    there = {
        (gate, it) for gate in RECEPTION for it in set(Request) - NO_SUCH_REQUEST.get(gate, set())
    }
    ways = {
        f"{session_kind} {state} {trigger.__name__}"
        for session_kind, rows in TRANSITIONS.items()
        for state, row in rows.items()
        for trigger in row
    }
    assert not there - judged, sorted(there - judged)
    assert not ways - went - NEVER_AGAIN, sorted(ways - went - NEVER_AGAIN)
    assert set(get_args(EndReason)) <= ends
