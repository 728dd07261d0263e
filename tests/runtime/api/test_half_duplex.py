"""Half-duplex calls: their transcripts, at a real server, and the translation alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from protocol.values import behaviour
from runtime.api.half_duplex import SILENCE, HalfDuplex
from tests.transcripts.live import play_all
from tests.transcripts.reading import ROOT, Transcript, load_all

pytestmark = pytest.mark.anyio
TRANSCRIPTS: Final = load_all(ROOT.parent / "translated")
LISTENS: Final = {"type": "result", "is_listen": True, "text": "", "audio_data": None}
SPEAKS: Final = LISTENS | {"is_listen": False, "text": "Hi", "end_of_turn": False}
NOTHING: Final = {"type": "audio_chunk", "audio_base64": ""}


def chunk(samples: np.ndarray[Any, Any]) -> dict[str, str]:
    sound = base64.b64encode(samples.astype("<f4").tobytes()).decode()
    return {"type": "audio_chunk", "audio_base64": sound}


def sent(call: HalfDuplex, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """What the client gets of the session's messages."""
    return [json.loads(it) for body in bodies for it in call.sent(dict(body))]


def received(call: HalfDuplex, body: object) -> list[Any]:
    """What the session gets of a client's message."""
    return [json.loads(str(it)) for it in call.received(json.dumps(body))]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda it: it.name)
def test_a_server_says_what_the_transcript_says(
    transcript: Transcript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's page waits for a message that does not come."""
    monkeypatch.setattr(behaviour, "NEWEST", transcript.behaviour)
    (error,) = play_all([transcript], tmp_path).values()
    if error is not None:
        raise error


async def test_the_model_speaks_until_its_turn_ends() -> None:
    """The page, which sends nothing meanwhile, hears one second and no more."""
    call = HalfDuplex("hdx_1")
    kinds = [it["type"] for it in sent(call, SPEAKS, SPEAKS)]
    assert kinds == ["generating", "chunk", "chunk"]
    assert call.due == [SILENCE, SILENCE]
    assert not received(call, NOTHING)  # of the page's echo
    assert not sent(call, LISTENS | {"pending": True})
    (done,) = sent(call, LISTENS)
    assert done == {"type": "turn_done", "turn_index": 1, "text": "HiHi"}
    assert received(call, NOTHING) == [NOTHING]
    assert not sent(call, LISTENS)


async def test_a_failed_second_ends_its_turn() -> None:
    """The page stops sending for ever: it waits for the end of the turn."""
    call = HalfDuplex("hdx_1")
    kinds = [it["type"] for it in sent(call, SPEAKS, {"type": "error", "error": "it failed"})]
    assert kinds == ["generating", "chunk", "error", "turn_done"]


async def test_speech_is_shown_from_its_beginning_to_its_end() -> None:
    """The page's lamp says the opposite of what the user does."""
    call = HalfDuplex("hdx_1")
    received(call, {"type": "prepare", "config": {"vad": {"min_silence_duration_ms": 400}}})
    sent(call, {"type": "prepared", "prompt_length": 9})
    rng = np.random.default_rng(1)
    quiet, loud = rng.normal(0, 0.001, 8_000), rng.normal(0, 0.2, 8_000)
    shown = []
    for samples in (quiet, loud, loud, quiet, quiet):
        received(call, chunk(samples))
        shown.append([it["speaking"] for it in sent(call, LISTENS)])
    assert shown == [[], [True], [], [False], []]
    (generating, _) = sent(call, SPEAKS)
    assert 900 <= generating["speech_duration_ms"] <= 1_500


async def test_the_settings_that_a_session_has_reach_it() -> None:
    """A page's voice or prompt is lost, or a setting that it cannot know is refused."""
    call = HalfDuplex("hdx_1")
    parts = [{"type": "text", "text": "one"}, {"type": "audio", "data": "AA"}, None]
    config = {"generation": {"temperature": 0.5, "max_new_tokens": 9}, "tts": {"enabled": False}}
    body = {"type": "prepare", "system_content": [*parts, {"type": "text", "text": "two"}]}
    assert received(call, body | {"config": config, "record": False}) == [
        {
            "type": "prepare",
            "system_prompt": "one\ntwo",
            "ref_audio_base64": "AA",
            "config": {"temperature": 0.5, "generate_audio": False},
            "record": False,
        }
    ]
    assert received(call, {"type": "prepare", "system_prompt": "three"}) == [
        {"type": "prepare", "system_prompt": "three", "config": {}}
    ]
    (both,) = received(call, body | {"system_prompt": "three", "ref_audio_base64": "BB"})
    assert (both["system_prompt"], both["ref_audio_base64"]) == ("one\ntwo", "AA")
