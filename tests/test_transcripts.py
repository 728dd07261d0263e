"""Golden transcripts against the session machine alone; and that the player sees what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from protocol.machine.client import ClientConnection
from protocol.values.behaviour import NEWEST
from protocol.values.limits import Mode
from protocol.values.requests import ChooseModel, Commit
from protocol.values.state import Gate, State
from tests.transcripts.pure import PurePlayer
from tests.transcripts.reading import ROOT, Mismatch, Transcript, check, example, load, load_all
from tests.transcripts.texts import renew
from tests.transcripts.wire_schema import problems

TRANSCRIPTS = load_all()


def by_name(transcript: Transcript) -> str:
    return transcript.name


WORKER: Final = "/ws/duplex?"
"""A worker's own address, where our client does not connect: nothing tells it of its turn."""


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=by_name)
def test_a_session_says_what_the_transcript_says(transcript: Transcript, tmp_path: Path) -> None:
    """The machine says something that no source has."""
    PurePlayer(transcript, tmp_path).play()


OLD: Final = {
    *(
        f"{dialect}/{name}"
        for dialect in ("transcription", "transcription-responses")
        for name in ("limit", "language-and-prompt", "models")
    ),
    *(f"legacy-chat/{name}" for name in ("defaults", "not-streaming", "tts-defaults")),
    *(f"legacy-chat/{name}" for name in ("tts-no-such-voice", "tts-voice-name")),
    "legacy-chat/wrong-tts-cloning",
    *("duplex-v1/append-wrong", "legacy-duplex/chunk-wrong", "realtime/append-wrong"),
    *(f"realtime/chat-{name}" for name in ("append-in-turn", "in-turn", "queue")),
    *("legacy-chat/queue-message", "legacy-chat/second-message"),
    *("realtime/no-mode-is-video", "realtime/chat-not-for-here", "live/refused-by-name"),
}
"""Where behaviours differ, besides those of `openai`: those with a number in their name show it."""


@pytest.mark.parametrize(
    "transcript",
    [one for one in TRANSCRIPTS if "openai" not in one.dialect and one.name not in OLD],
    ids=by_name,
)
def test_a_new_session_says_it_too(transcript: Transcript, tmp_path: Path) -> None:
    """A change of behaviour reaches dialects that it is not for."""
    PurePlayer(attrs.evolve(transcript, behaviour=NEWEST), tmp_path).play()


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=by_name)
def test_what_a_transcript_receives_is_described(transcript: Transcript) -> None:
    """The protocol document leaves out what the server says."""
    for body in transcript.bodies("receive"):
        found = problems(transcript.dialect, "server", example(body))
        assert not found, f"{body}: {found}"


@pytest.mark.parametrize(
    "transcript", [one for one in TRANSCRIPTS if not one.connect.startswith(WORKER)], ids=by_name
)
def test_our_own_client_reads_a_transcript(transcript: Transcript) -> None:
    """Our client takes something that our server says for a violation."""
    client = ClientConnection(transcript.dialect, mode_of(transcript))
    for step in transcript.steps:
        if step.kind == "receive":
            client.receive(json.dumps(example(step.value)))
        elif step.kind == "send" and "model" in step.value and client.gate is Gate.UNCHOSEN:
            client.send(ChooseModel(model=str(step.value["model"])))
        elif step.kind == "send" and client.gate is Gate.UNCHOSEN and _asks_for_text(step.value):
            client.send(Commit())
        elif step.kind == "connect":
            client = ClientConnection(transcript.dialect, mode_of(transcript))
        elif step.kind == "close":
            client.connection_closed(step.value["code"], step.value["reason"])
            assert client.state is State.CLOSED


def _asks_for_text(body: Mapping[str, Any]) -> bool:
    return body.get("type") in ("input_audio_buffer.commit", "response.create")


def mode_of(transcript: Transcript) -> Mode:
    """What the address asks for; a refused one asks for nothing that matters here."""
    if transcript.dialect == "legacy-chat" or transcript.connect.endswith("mode=chat"):
        return "chat"
    if "transcription" in transcript.dialect:
        return "transcription"
    if transcript.dialect in ("live", "openai"):
        return "audio"
    return "audio" if "audio" in transcript.connect or "adx" in transcript.connect else "video"


# -- the detectors --------------------------------------------------------------------------------


def _first(steps: tuple[Any, ...], kind: str) -> int:
    return next(at for at, step in enumerate(steps) if step.kind == kind)


def with_a_field_more(transcript: Transcript) -> Transcript:
    at = _first(transcript.steps, "receive")
    step = transcript.steps[at]
    more = attrs.evolve(step, value={**step.value, "mood": "good"})
    return attrs.evolve(
        transcript, steps=(*transcript.steps[:at], more, *transcript.steps[at + 1 :])
    )


def with_a_value_changed(transcript: Transcript) -> Transcript:
    text = json.dumps([attrs.asdict(step) for step in transcript.steps]).replace("Hello", "Hullo")
    steps = tuple(type(transcript.steps[0])(**step) for step in json.loads(text))
    return attrs.evolve(transcript, steps=steps)


def without_a_frame(transcript: Transcript) -> Transcript:
    at = _first(transcript.steps, "receive")
    return attrs.evolve(transcript, steps=transcript.steps[:at] + transcript.steps[at + 1 :])


def with_another_close(transcript: Transcript) -> Transcript:
    end = attrs.evolve(transcript.steps[-1], value={"code": 1001, "reason": "stopped"})
    return attrs.evolve(transcript, steps=(*transcript.steps[:-1], end))


def without_its_end(transcript: Transcript) -> Transcript:
    at = max(i for i, step in enumerate(transcript.steps) if step.kind == "send")
    return attrs.evolve(transcript, steps=transcript.steps[:at])


@pytest.mark.parametrize(
    "spoil",
    [with_a_field_more, with_a_value_changed, without_a_frame, with_another_close, without_its_end],
)
def test_a_transcript_that_is_wrong_fails(
    spoil: Callable[[Transcript], Transcript], tmp_path: Path
) -> None:
    """The transcripts pass whatever the server says."""
    whole = load(ROOT / "realtime" / "lifecycle-video.jsonl")
    with pytest.raises(Mismatch):
        PurePlayer(spoil(whole), tmp_path).play()


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": None}, {"a": 1}),
        ({"a": 1}, {"a": True}),
        ([1], [1, 2]),
        ({"$any": "number"}, True),
        ({"$any": "string"}, 1),
        ({"$pcm": 2}, "AAAAAA=="),
        ({"$pcm": 1}, "AADAfw=="),
        ({"$id": "sess"}, "sess_XYZ"),
        ({"$metrics": {}}, {"kv_cache_length": 1}),
        ([{"$same": "a"}, {"$same": "a"}], [1, 2]),
    ],
)
def test_a_value_that_is_another_is_seen(expected: object, found: object) -> None:
    """A marker stands for anything at all."""
    with pytest.raises(Mismatch):
        check(expected, found, {})


def test_a_text_is_written_anew_and_nothing_else_is(tmp_path: Path) -> None:
    """A changed error text costs an hour of editing, or hides that the protocol has changed."""
    folder = tmp_path / "duplex-v1"
    folder.mkdir()
    path = folder / "too-early.jsonl"
    golden = (ROOT / "duplex-v1" / "too-early.jsonl").read_text("utf-8")
    path.write_text(golden.replace("input_audio_buffer.append before", "another text"), "utf-8")
    assert renew(path)
    assert path.read_text("utf-8") == golden
    wrong = golden.replace("not_ready", "invalid_event")
    path.write_text(wrong, "utf-8")
    with pytest.raises(Mismatch):
        renew(path)
    assert path.read_text("utf-8") == wrong
