"""The JavaScript client's media: rates, the audio thread, a conversation with a played server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from websockets.sync.server import ServerConnection

from tests.browser.echoes import ECHOES, NONE, measure
from tests.network.peers import create, end, hear, peer, say
from tests.soak.console import compare
from tests.test_javascript import NODE, SCRIPTS, node, run

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node to run JavaScript with")


# -- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [48_000, 44_100, 24_000, 8_000])
def test_speech_keeps_its_level_and_what_is_too_high_is_taken_out(rate: int) -> None:
    """At 16 kHz a tone above 8 kHz would come back as another one, within speech."""
    tones = ["200", "1000", "3000"]
    folding = ["9500", "11000"] if rate > 22_000 else []
    told = json.loads(run("resampler.mjs", str(rate), "16000", *tones, *folding))
    kept, folded = told[: len(tones)], told[len(tones) :]
    assert all(abs(it["level"] - 0.5**0.5) < 0.01 for it in kept), kept
    assert all(it["level"] < 0.01 for it in folded), folded
    assert all(31_900 < it["count"] <= 32_000 for it in told)


# -- the audio thread -----------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["play", "flush", "render"]), st.integers(1, 60)),
    min_size=1,
    max_size=30,
)


Drive = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    """Drive the processors through `steps`; one process does all, for starting it takes longest."""
    command = [*node(), str(SCRIPTS / "worklets.mjs")]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given_, told = process.stdin, process.stdout

        def drive(**case: Any) -> dict[str, Any]:
            given_.write(json.dumps(case) + "\n")
            said: dict[str, Any] = json.loads(told.readline())
            return said

        yield drive


@given(steps=STEPS)
@example(steps=[("play", 40), ("render", 20), ("flush", 10), ("play", 5), ("render", 60)])
@example(steps=[("play", 60), ("play", 60), ("render", 60), ("render", 60), ("flush", 5)])
@settings(max_examples=25, deadline=None)
def test_each_sample_is_played_once_or_told_to_be_cut(
    drive: Drive, steps: list[tuple[str, int]]
) -> None:
    """A listener would hear a word twice, or a program not know how much was heard."""
    said = drive(capacity=20, most=100, cushion=4, steps=[*steps, ("render", 200)])
    sent = sum(count for kind, count in steps if kind == "play")
    lost = sum(it["lost"] for it in said["told"] if it["type"] == "full")
    flushed = [it for it in said["told"] if it["type"] == "flushed"]
    cut = [sample for it in flushed for sample in it["cut"]]
    played = [it["played"] for it in said["told"] if "played" in it]
    assert played == sorted(played)
    assert (played[-1] if played else 0) + len(cut) + lost == sent
    assert len(flushed) == sum(kind == "flush" for kind, _ in steps)
    heard = [round(sample * 65_536) for sample in said["heard"] if sample]
    if not flushed:
        assert heard == sorted(set(heard))
        assert len(heard) == sent - lost


def test_a_flush_fades_and_then_is_silent(drive: Drive) -> None:
    """A sound that stops at once clicks."""
    steps = [("play", 90), ("render", 20), ("flush", 10), ("render", 50)]
    said = drive(capacity=50, most=100, cushion=0, steps=steps)
    heard = said["heard"]
    ratios = [heard[20 + i] * 65_536 / (21 + i) for i in range(10)]
    assert ratios == pytest.approx([1 - i / 10 for i in range(10)], abs=1e-3)
    assert heard[30:] == [0] * 40
    (flushed,) = (it for it in said["told"] if it["type"] == "flushed")
    assert (flushed["played"], len(flushed["cut"])) == (30, 60)


@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000])
def test_each_sample_of_a_microphone_goes_out_once(drive: Drive, rate: int) -> None:
    """A model would hear clicks, or less than a second in a second; also if the device pauses."""
    quanta = 256
    steps = [("hear", 0 if number % 5 == 4 else 128) for number in range(quanta * 5 // 4)]
    blocks = drive(rate=rate, capacity=1, most=1, cushion=0, steps=steps)["blocks"]
    assert {len(block) for block in blocks} == {320}
    heard = np.concatenate(blocks) * 65_536
    kernel = 0 if rate == 16_000 else 60  # samples that wait, and those without a whole past
    assert quanta * 128 * 16_000 / rate - len(heard) < 320 + kernel
    wanted = 1 + np.arange(len(heard)) * rate / 16_000
    assert np.abs(heard - wanted)[kernel:].max() <= (0 if rate == 16_000 else 0.1)


def test_what_is_played_is_measured(drive: Drive) -> None:
    """A meter would compare the microphone with another sound, or with this one at another time."""
    frame = 480
    quanta = [("render", 128)] * 100
    said = drive(capacity=9000, most=9000, cushion=0, steps=[*quanta, ("play", 9000), *quanta])
    measured = dict[int, float]()
    for told in said["told"]:
        measured |= {told["frame"] + i: level for i, level in enumerate(told["levels"])}
    heard = np.array(said["heard"][: len(said["heard"]) // frame * frame]).reshape(-1, frame)
    levels = np.sqrt(np.mean(heard**2, axis=1))
    assert all(level == pytest.approx(levels[at]) for at, level in measured.items())
    sounding = np.flatnonzero(levels)
    assert set(sounding[:-1]) <= set(measured)  # the last one is not over when all was played


# -- echo -----------------------------------------------------------------------------------------


def test_a_model_that_hears_itself_is_told_from_a_user(tmp_path: Path) -> None:
    """A warning where there is no echo would not be believed where there is one."""
    said = measure(tmp_path, [*ECHOES, *NONE], range(1))
    warned = {
        name: any(echo["isHeard"] for run in runs for echo in run["told"])
        for name, runs in said.items()
    }
    assert warned == dict.fromkeys(ECHOES, True) | dict.fromkeys(NONE, False)
    assert all(len(run["told"]) > 5 for runs in said.values() for run in runs)
    (headphones,) = (said[name] for name in said if "headphones after" in name)
    assert not headphones[0]["told"][-1]["isHeard"]


def test_the_long_run_sees_what_is_lost_or_repeated() -> None:
    """`make soak` would say that nothing was lost, whatever was."""
    source = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    kept = np.concatenate([source[1000:4000], source[4007:9000], source[8990:19_000]])
    kept[-600] += 1
    assert compare(kept, source) == {
        **{"samples": len(kept), "lost": 7, "repeated": 10, "changed": 1},
        **{"before": 1000, "after": 1000},
    }
    began_in_silence = np.concatenate([np.zeros(900, np.float32), source])
    assert compare(began_in_silence[320:], began_in_silence) == {
        **{"samples": 20_580, "lost": 0, "repeated": 0, "changed": 0, "before": 320, "after": 0}
    }


# -- devices --------------------------------------------------------------------------------------


def test_a_microphone_is_let_go_of_and_its_errors_have_reasons() -> None:
    """A page's user would be recorded on, or not be told what to do."""
    assert run("microphone.mjs") == "ok"


# -- a conversation -------------------------------------------------------------------------------


def scene(websocket: ServerConnection) -> None:
    """Listen, answer in a turn that ends, answer late in one that is cut, and drop a second."""
    create(websocket)
    told = 0
    while (message := hear(websocket))["type"] != "session.close":
        if message["type"] != "input.append":
            continue
        told += 1
        about = {"input_id": message["input_id"], "metrics": {"dropped_units": int(told == 5)}}
        delta: dict[str, Any] = {"session_id": "s", "response_id": f"resp_{told // 3}", **about}
        silence = "AAAAAAAAAAA="
        if told == 2:
            say(websocket, "response.output.delta", kind="text", text="Hello.", **delta)
            say(
                websocket,
                "response.output.delta",
                kind="audio",
                audio=silence,
                end_of_turn=True,
                **delta,
            )
        elif told == 3:
            say(websocket, "response.output.delta", kind="text", text="And then", **delta)
            say(websocket, "response.output.delta", kind="audio", audio=silence, **delta)
        else:
            say(websocket, "response.output.delta", kind="listen", **delta)
    end(websocket, message["reason"])


def converse(url: str, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    said = json.loads(run("conversation.mjs", url, name))
    return said["told"], said["devices"]


def test_a_conversation_tells_what_becomes_of_it() -> None:
    """States, captions, late and dropped seconds, an interruption: in the order of the session."""
    with peer(scene) as url:
        told, devices = converse(url, "whole")
    states = [it["state"] for it in told if it["name"] == "state"]
    assert states == [
        *("opening", "connecting", "listening", "speaking", "listening", "speaking"),
        *("listening", "ended"),
    ]
    units = [(it["kind"], it["isLate"]) for it in told if it["name"] == "unit"]
    assert units == [
        *(("listen", False), ("speak", False), ("speak", True), ("listen", False)),
        *(("dropped", False), ("listen", False)),
    ]
    assert [it["inputId"] for it in told if it["name"] == "late"] == ["in_3"]
    assert [it["isSoon"] for it in told if it["name"] == "answer"] == [True, True]
    assert [it["text"] for it in told if it["name"] == "turn"] == ["Hello."]
    captions = [(it["text"], it["isInterrupted"]) for it in told if it["name"] == "caption"]
    assert captions[-1] == ("And then", True)
    (cut,) = (it for it in told if it["name"] == "interrupted")
    assert (cut["playedMs"], cut["cutMs"]) == (250, 750)
    assert devices == [
        *("speaker open", "microphone open", "play 2", "play 2", "flush"),
        *("microphone closed", "speaker closed"),
    ]
    assert told[-1] == {"name": "ended", "reason": "stopped"}


def test_a_microphone_that_is_refused_ends_it() -> None:
    """A page would wait for a session that never comes, and keep the loudspeaker open."""
    told, devices = converse("ws://127.0.0.1:1", "refused")
    assert [it["name"] for it in told] == ["state", "state", "ended"]
    assert told[-1] == {"name": "ended", "reason": "failed", "error": "DeviceError"}
    assert devices[-2:] == ["microphone closed", "speaker closed"]


def test_it_can_be_stopped_while_it_waits() -> None:
    """A user who no longer wants to wait would hold the place in the queue."""

    def queue(websocket: ServerConnection) -> None:
        place = {"estimated_wait_s": 9, "ticket_id": "t", "queue_length": 2}
        say(websocket, "session.queued", position=2, **place)
        websocket.recv()

    with peer(queue) as url:
        told, _ = converse(url, "stopped")
    assert [it["position"] for it in told if it["name"] == "queue"] == [2]
    assert told[-1] == {"name": "ended", "reason": "stopped"}
