"""The JavaScript client, run by Node against a live server and against peers that fail.

The scripts in `javascript/` assert by themselves and print `ok`; here stands what they talk to.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

from protocol.wire.audio import to_pcm16 as to_live
from protocol.wire.codec import encode_base64
from runtime.client.duplex import UnitCutter, pcm16_of
from tests.live.servers import live_server
from tests.network.peers import JPEG, WAIT_S, create, end, hear, peer, refuse, report, say
from tests.project.sampling import sample

NODE: Final = shutil.which("node")
SCRIPTS: Final = Path(__file__).parent / "javascript"
NODE_WITH_WEBSOCKET: Final = 22
"""The first version of Node with a WebSocket of its own; before, it is an experiment."""
SHOWN: Final = base64.b64encode(JPEG).decode()

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node to run JavaScript with")


@cache
def node() -> list[str]:
    """The words that begin a command which runs a script."""
    assert NODE is not None
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True)
    major = int(version.stdout.lstrip("v").split(".")[0])
    flags = [] if major >= NODE_WITH_WEBSOCKET else ["--experimental-websocket"]
    return [NODE, "--no-warnings", *flags]


def run(script: str, *arguments: str) -> str:
    """Run a script to its end; what it printed."""
    command = [*node(), str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout.strip()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose model follows a script."""
    with live_server("--no-record", "--slots", "2") as server:
        yield server.url


@pytest.mark.parametrize("mode", ["audio", "video"])
def test_a_session_from_beginning_to_end(url: str, mode: str) -> None:
    """The example in the file's head would not work."""
    assert run("duplex.mjs", url, mode, SHOWN) == "ok"


def test_events_are_told_to_functions() -> None:
    """Who would rather be called than iterate would hear nothing."""
    with live_server("--no-record", "--slots", "1") as server:
        assert run("callbacks.mjs", server.url) == "ok"


def test_a_recording_is_named_or_declined(tmp_path: Path) -> None:
    """A page could neither say what is kept of its user, nor ask that nothing is."""
    notice = ("--record", str(tmp_path), "--recording-notice", "This call is recorded.")
    with live_server(*notice) as server, live_server(*notice, "--record-always") as strict:
        assert run("recording.mjs", server.url, strict.url) == "ok"


def test_a_chat(url: str) -> None:
    """A page could not chat."""
    assert run("chat.mjs", url, SHOWN) == "ok"


def test_tools_of_a_duplex_session(url: str) -> None:
    """The functions of a page would not be run, or their results not be heard."""
    assert run("tools.mjs", url) == "ok"


def test_a_transcription(url: str) -> None:
    """A page could not write down what is said into its microphone."""
    assert run("transcription.mjs", url) == "ok"


def test_a_session_of_live(tmp_path: Path) -> None:
    """A page could not talk to a server of OpenAI's Live API, or not go on from its recording."""
    options = ("--record", str(tmp_path), "--slots", "1", "--queue-max", "0")
    with live_server(*options) as server, peer(write_down) as at:
        assert run("live.mjs", server.url, at) == "ok"


def write_down(websocket: ServerConnection) -> None:
    """Be a server of `live` with a transcriber."""
    say(websocket, "info", code="session_queued", message="position 1 of 1")
    say(websocket, "info", code="slot_assigned", message="")
    assert hear(websocket)["session"]["model"] == "scripted"
    say(websocket, "session.started", session={"id": "sess_1"})
    say(websocket, "session.input_transcript.delta", delta="hello", start_ms=200, end_ms=700)
    say(websocket, "session.of.later")
    say(websocket, "session.closed", reason="expired")
    websocket.close(1000, "timeout")


@given(st.lists(st.floats(-2, 2, width=32), max_size=50))
@example([number / 32_767 for number in (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 32_766.5)])
@example([number / 32_768 for number in (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 32_767.5)])
@settings(max_examples=sample(15, 4))
def test_sound_is_rounded_as_in_python(samples: list[float]) -> None:
    """One client's words would be heard otherwise than the other's."""
    sound = np.array(samples, "<f4")
    commit = {"type": "input_audio_buffer.commit"}
    append = {"type": "input_audio_buffer.append", "audio": encode_base64(pcm16_of(sound))}
    text = encode_base64(sound.tobytes())
    (_, *live) = json.loads(run("pcm16.mjs", text, "live"))
    cutter = UnitCutter()
    assert live == [
        {"type": "session.input_audio.append", "audio": encode_base64(to_live(append.pcm))}
        for append in (*cutter.add(sound), *cutter.rest())
    ]
    assert json.loads(run("pcm16.mjs", text, "realtime")) == [
        {"type": "session.update", "model": "m"},
        commit,
        *([append] if samples else []),
        commit | {"final": True},
    ]


def test_base64() -> None:
    """Sound would come out as noise in one engine or another."""
    assert run("base64.mjs") == "ok"


STEPS = st.lists(
    st.tuples(
        st.integers(0, 40_000),
        st.lists(st.sampled_from(["YQ==", "Yg==", "Yw=="]), max_size=3),
        st.sampled_from([None, "flush", "interrupt"]),
    ),
    min_size=1,
    max_size=8,
)


@given(STEPS)
@example([(12_500, ["YQ=="], "interrupt"), (19_499, ["Yg=="], None), (1, ["Yw=="], "flush")])
@settings(max_examples=sample(15, 4))
def test_sound_is_cut_as_in_python(steps: list[tuple[int, list[str], str | None]]) -> None:
    """One client's sound would reach the model in other units than the other's."""
    cutter, expected, start = UnitCutter(), [], 0
    for samples, frames, action in steps:
        # As JavaScript computes it: in double precision, then rounded.
        sound = (np.arange(start, start + samples) / 1_000_000).astype("<f4")
        start += samples
        appends = cutter.add(sound, tuple(base64.b64decode(frame) for frame in frames))
        appends += cutter.rest() if action == "flush" else []
        appends += [cutter.at_once()] if action == "interrupt" else []
        expected += [
            {
                "audio": encode_base64(append.pcm),
                "force_listen": append.force_listen,
                **(
                    {"video_frames": [encode_base64(frame) for frame in append.frames]}
                    if append.frames
                    else {}
                ),
            }
            for append in appends
        ]
    assert json.loads(run("units.mjs", json.dumps(steps))) == expected


# -- what goes wrong ----------------------------------------------------------------------------


def stay(websocket: ServerConnection) -> None:
    """Wait for the client's end."""
    try:
        while hear(websocket)["type"] != "session.close":
            pass
        end(websocket, "client_closed")
    except ConnectionClosed:
        pass


def bad_init(websocket: ServerConnection) -> None:
    """Refuse the init."""
    say(websocket, "session.queue_done")
    hear(websocket)
    report(websocket, "invalid_payload")
    stay(websocket)


def lose(websocket: ServerConnection) -> None:
    """Report an error, then be gone."""
    create(websocket)
    report(websocket, "inference_error")
    websocket.close(1011, "out of memory")


def nonsense(websocket: ServerConnection) -> None:
    """Say what is no event."""
    websocket.send("[]")
    stay(websocket)


def flood(websocket: ServerConnection) -> None:
    """Say more than anybody would read."""
    create(websocket)
    for _ in range(5000):
        report(websocket, "inference_error")
    stay(websocket)


def greet(websocket: ServerConnection) -> None:
    """Let a client begin a transcription."""
    say(websocket, "session.created", id="sess_1", created=1_700_000_000)
    assert hear(websocket) == {"type": "session.update", "model": "tiny"}


def lose_model(websocket: ServerConnection) -> None:
    """Tell an error of a transcription, then its end."""
    greet(websocket)
    say(websocket, "error", error="not now", code="buffer_full")
    say(websocket, "transcription.of.later")
    say(websocket, "error", error="the model was lost", code="backend_error")
    websocket.close(1011, "backend_error")


def idle(websocket: ServerConnection) -> None:
    """End a transcription of which nothing comes."""
    greet(websocket)
    websocket.close(1000, "idle")


def refuse_transcription(websocket: ServerConnection) -> None:
    """Have no slot, and no place in the queue."""
    say(websocket, "error", error="the queue is full", code="queue_full")
    websocket.close(1013, "queue_full")


FAILURES: Final[dict[str, Any]] = {
    "badInit": bad_init,
    "cancelled": lambda websocket: websocket.close(1000, "cancelled"),
    "nonsense": nonsense,
    "lost": lose,
    "lostWhileTelling": lose,
    "nobodyToTell": lose,
    "addresses": stay,
    "unread": flood,
    "modelLost": lose_model,
    "idle": idle,
    "refusedTranscription": refuse_transcription,
}


@pytest.mark.costly
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_has_a_class(name: str) -> None:
    """A page could not tell a full server from a broken one, or would wait for ever."""
    with peer(FAILURES[name]) as at:
        assert run("failures.mjs", at, name) == "ok"


def test_nobody_there() -> None:
    """A page would wait for a server that is not there."""
    assert run("failures.mjs", "ws://127.0.0.1:1", "nobody") == "ok"


def test_a_refusal_is_not_tried_for_ever() -> None:
    """A page would never say that the server is full."""
    attempts: list[int] = []

    def answer(websocket: ServerConnection) -> None:
        attempts.append(1)
        refuse(websocket)

    with peer(answer) as at:
        assert run("failures.mjs", at, "refused") == "ok"
    assert len(attempts) == 2


def test_a_refusal_is_tried_again() -> None:
    """A page would give up on a server that is full for a moment."""
    refusals = iter([1, 2])

    def answer(websocket: ServerConnection) -> None:
        if next(refusals, None) is not None:
            refuse(websocket)
        else:
            create(websocket)
            stay(websocket)

    with peer(answer) as at:
        assert run("failures.mjs", at, "refusedTwice") == "ok"


def test_a_page_that_is_not_welcome_is_told_what_would_make_it(url: str) -> None:
    """Whoever writes a page would look for a server that is down."""
    assert run("failures.mjs", url, "unwelcome") == "ok"
