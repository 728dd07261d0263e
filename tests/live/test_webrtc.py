"""A browser, and another peer, that call a real server by WebRTC through a real door."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import soundfile
import soxr
from openai import OpenAI
from openai.types.live import LiveCreateResponse
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime import RUN
from runtime.access.keys import Key, change_key_file, hash_key
from tests.browser.chromium import CHROMIUM, FAKE_DEVICES, Tab, chromium
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request
from tests.soak.clients import CLIENTS, prepare

pytest.importorskip("aiortc")

SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "heldout"
QUESTION: Final = "076-read-me-the-news.flac"
KEY: Final = "antiphon_of_anna"
LIVE_ANSWER: Final = TypeAdapter(LiveCreateResponse)
CALL: Final = """
globalThis.heard = [];
globalThis.begin = async (key, model) => {
  const peer = globalThis.peer = new RTCPeerConnection();
  const stream = await navigator.mediaDevices.getUserMedia({audio: true});
  peer.addTrack(stream.getTracks()[0]);
  const sound = new Audio();
  peer.ontrack = (event) => { sound.srcObject = event.streams[0]; sound.play(); };
  const channel = globalThis.channel = peer.createDataChannel('oai-events');
  channel.onmessage = (event) => heard.push(JSON.parse(event.data));
  await peer.setLocalDescription();
  const answer = await fetch(`/v1/realtime/calls?model=${model}`, {
    method: 'POST', body: peer.localDescription.sdp,
    headers: {Authorization: `Bearer ${key}`, 'Content-Type': 'application/sdp'},
  });
  if (!answer.ok) return `${answer.status} ${await answer.text()}`;
  await peer.setRemoteDescription({type: 'answer', sdp: await answer.text()});
  return `${answer.status} ${answer.headers.get('location')}`;
};
globalThis.all = (kind) => heard.filter((it) => it.type === kind);
globalThis.played = async () => {
  const found = [...(await peer.getStats()).values()].find((it) => it.type === 'inbound-rtp');
  return found ? found.totalAudioEnergy : 0;
};
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    """A server whose browsers call by a door."""
    anna = Key(name="anna", hash=hash_key(KEY), scope="admin")
    change_key_file(folder / "keys.toml", lambda _: (anna,), create=True)
    options = ("--keys", str(folder / "keys.toml"), "--record", str(folder / "recordings"))
    door = f"unix:{folder}/door"
    with live_server(*options, "--webrtc-door", door, model="tiny") as live:
        host, port = live.address
        command = (*RUN, "door", "--url", f"{host}:{port}", "--listen", door)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert [process.stdout.readline().strip() for _ in range(2)][-1] == "ready"
            yield live
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert "Traceback" not in live.errors.read_text()


@pytest.fixture(scope="module")
def tab(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A page of the server's, with a microphone that asks a question again and again."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    question, rate = soundfile.read(SPEECH / QUESTION, dtype="float32")
    folder, pause = tmp_path_factory.mktemp("browser"), np.zeros(rate, np.float32)
    said = np.concatenate([pause, question, *[pause] * 6])
    soundfile.write(folder / "question.wav", said, rate, subtype="PCM_16")
    heard = f"--use-file-for-fake-audio-capture={folder / 'question.wav'}"
    with chromium(folder, *FAKE_DEVICES, heard) as tab:
        host, port = server.address
        tab.open(f"http://{host}:{port}/")
        tab.run(CALL)
        yield tab


def secret(server: LiveServer, **session: Any) -> str:
    """What a page gets in the place of a key."""
    host, port = server.address
    with OpenAI(api_key=KEY, base_url=f"http://{host}:{port}/v1", max_retries=0) as client:
        wish = {"type": "realtime", "model": "tiny", **session}
        return str(client.realtime.client_secrets.create(session=wish).value)  # type: ignore[arg-type]


def test_a_browser_talks(server: LiveServer, tab: Tab, folder: Path) -> None:
    """A page that uses OpenAI's API by WebRTC, as most do, has no server of ours."""
    began = tab.run(f"begin({secret(server)!r}, 'tiny')")
    assert began.startswith("201 /v1/realtime/calls/rtc_"), began
    tab.until("all('session.created').length === 1")
    tab.until("all('response.output_audio_transcript.done').length >= 1")
    tab.until("all('output_audio_buffer.stopped').length >= 1")
    assert "news" in tab.run("all('response.output_audio_transcript.done')[0].transcript")
    assert tab.run("played()") > 0.001
    order = [it["type"] for it in tab.run("heard")]
    assert "response.output_audio.delta" not in order, "sound has its own way"
    assert order.index("output_audio_buffer.started") < order.index("output_audio_buffer.stopped")
    # A response is cut: what was not played leaves the words of the session.
    tab.until("all('response.created').length >= 2")
    tab.run("heard.length = 0; channel.send(JSON.stringify({type: 'response.cancel'})); 1")
    tab.until("all('response.done').some((it) => it.response.status === 'cancelled')")
    audio = {"input": {"format": {"type": "audio/pcmu"}}}
    update = {"type": "session.update", "session": {"type": "realtime", "audio": audio}}
    tab.run(f"channel.send({json.dumps(update)!r}); 1")
    tab.until("all('session.updated').length === 1 || all('error').length === 1")
    assert not tab.run("all('error')")
    tab.run("peer.close(); 1")
    (log,) = finished(folder / "recordings", 1)
    with LogReader(log) as items:
        assert replay(items).identical
    with LogReader(log) as items:
        text = str([*items])
    assert "webrtc" in text, "what was lost of the sound is not in the log"
    assert "filled_ms" in text


LIVE: Final = """
globalThis.begin_live = async (key) => {
  const peer = globalThis.peer = new RTCPeerConnection();
  const stream = await navigator.mediaDevices.getUserMedia({audio: true});
  peer.addTrack(stream.getTracks()[0]);
  const sound = new Audio();
  peer.ontrack = (event) => { sound.srcObject = event.streams[0]; sound.play(); };
  const channel = peer.createDataChannel('events');
  channel.onmessage = (event) => heard.push(JSON.parse(event.data));
  await peer.setLocalDescription();
  const transport = {type: 'webrtc', sdp: peer.localDescription.sdp};
  const answer = await fetch('/v1/live/sessions', {
    method: 'POST', body: JSON.stringify({session: {model: 'tiny'}, transport}),
    headers: {Authorization: `Bearer ${key}`, 'Content-Type': 'application/json'},
  });
  const body = await answer.json();
  if (answer.ok) await peer.setRemoteDescription({type: 'answer', sdp: body.transport.sdp});
  return body;
};
"""


@pytest.mark.soak  # `test_a_browser_talks` goes the same way.
def test_a_browser_talks_live(server: LiveServer, tab: Tab) -> None:
    """OpenAI's Live API is for browsers by WebRTC first."""
    tab.run("heard.length = 0; 1")
    tab.run(LIVE)
    body = tab.run(f"begin_live({KEY!r})")
    LIVE_ANSWER.validate_python(body, strict=True)
    tab.until("all('session.started').length === 1")
    assert tab.run("all('session.started')[0].session.id") == body["session"]["id"]
    tab.until("heard.some((it) => /news/.test(it.delta ?? ''))")
    tab.until("played().then((energy) => energy > 0.001)")
    assert not tab.run("heard.some((it) => it.type === 'session.output_audio.delta')")
    tab.run("peer.close(); 1")


def finished(folder: Path, count: int) -> list[Path]:
    """The recordings that have their end, once there are so many."""
    for _ in range(300):
        logs = []
        for path in folder.glob("*.session.zst"):
            with LogReader(path) as items:
                if any(getattr(it, "kind", "") == "fin" for it in items):
                    logs.append(path)
        if len(logs) >= count:
            return logs
        time.sleep(0.1)
    raise AssertionError("a call has no end")


@pytest.mark.parametrize(
    ("body", "key", "status", "code"),
    [
        (b"", "", 401, "unauthorized"),
        (b"v=0", "ek_forged", 401, "unauthorized"),
        (b"", KEY, 400, "invalid_offer"),
        (b"hello", KEY, 400, "invalid_offer"),
        (b"v=0\r\n" + b"a=x\r\n" * 20_000, KEY, 413, "request_entity_too_large"),
    ],
)
def test_what_is_no_call_is_refused(
    server: LiveServer, body: bytes, key: str, status: int, code: str
) -> None:
    """A page waits for a connection that never comes; or a stranger takes a place."""
    headers = {"Content-Type": "application/sdp"}
    answer = request(
        server.address, "/v1/realtime/calls", method="POST", key=key, headers=headers, body=body
    )
    assert answer.status == status, answer.body
    assert json.loads(answer.body)["error"]["code"] == code


@pytest.mark.soak
def test_a_browser_that_is_killed_leaves_its_slot(
    server: LiveServer, folder: Path, tmp_path: Path
) -> None:
    """It says nothing of it; the next call of the same user comes at once."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    host, port = server.address
    ended = len(finished(folder / "recordings", 0))
    for name in ("killed", "again"):
        (tmp_path / name).mkdir()
        with chromium(tmp_path / name, *FAKE_DEVICES) as tab:
            tab.open(f"http://{host}:{port}/")
            tab.run(CALL)
            assert tab.run(f"begin({secret(server)!r}, 'tiny')").startswith("201")
            tab.until("all('session.created').length === 1")
            if name == "killed":
                with suppress(AssertionError, ConnectionClosed):
                    tab.call("Browser.crash")
    assert len(finished(folder / "recordings", ended + 2)) >= ended + 2


AGENTS: Final = """
globalThis.begin_agents = async (key, by) => {
  const {RealtimeAgent, RealtimeSession, OpenAIRealtimeWebRTC, OpenAIRealtimeWebSocket} =
    OpenAIAgentsRealtime;
  globalThis.events = [], globalThis.errors = [], globalThis.sound = 0;
  const agent = new RealtimeAgent({name: 'assistant', instructions: 'Answer briefly.'});
  const http = location.origin + '/v1/realtime';
  const url = by === 'WebRTC' ? `${http}/calls?model=tiny` : `ws${http.slice(4)}?model=tiny`;
  const transport = by === 'WebRTC'
    ? new OpenAIRealtimeWebRTC({baseUrl: `${http}/calls`}) : new OpenAIRealtimeWebSocket({url});
  const session = globalThis.session = new RealtimeSession(agent, {transport, model: 'tiny'});
  session.on('transport_event', (event) => events.push(event));
  session.on('error', (error) => errors.push(JSON.stringify(error)));
  session.on('audio', (event) => { sound += event.data.byteLength; });
  await session.connect({apiKey: key, url});
  return 'connected';
};
globalThis.say = async (pcm16, quiet_s) => {
  const sound = Uint8Array.from(atob(pcm16), (it) => it.charCodeAt(0));
  for (let at = 0; at < sound.length + 48_000 * quiet_s; at += 960) {
    const piece = new Uint8Array(960);
    piece.set(sound.subarray(at, at + 960));
    session.sendAudio(piece.buffer);
    await new Promise((done) => setTimeout(done, 20));
  }
  return 'said';
};
globalThis.all = (kind) => events.filter((it) => it.type === kind);
"""


@pytest.fixture
def agents(server: LiveServer, tab: Tab, tmp_path: Path) -> Tab:
    """A page with OpenAI's package for agents, which npm brings."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    prepare(CLIENTS["node-agents"], tmp_path)
    home = tmp_path / "node" / "node_modules" / "@openai" / "agents-realtime" / "dist" / "bundle"
    tab.call("Page.setBypassCSP", enabled=True)  # its schemas are compiled in the page
    host, port = server.address
    tab.open(f"http://{host}:{port}/?agents")
    tab.run((home / "openai-realtime-agents.umd.js").read_text("utf-8") + "; 1")
    tab.run(AGENTS)
    return tab


@pytest.mark.soak
def test_the_agents_sdk_calls_unmodified(server: LiveServer, agents: Tab) -> None:
    """Its user speaks over the second answer: what was not played is forgotten."""
    assert agents.run(f"begin_agents({secret(server)!r}, 'WebRTC')") == "connected"
    agents.until("all('output_audio_buffer.stopped').length >= 1")
    assert "news" in agents.run("JSON.stringify(session.history)")
    agents.until("all('output_audio_buffer.started').length >= 2")
    agents.run("session.interrupt(); 1")
    agents.until("all('output_audio_buffer.cleared').length >= 1")
    agents.until("all('conversation.item.truncated').length >= 1")
    agents.run("session.close(); 1")
    assert agents.run("errors.length") == 0, agents.run("errors")


@pytest.mark.soak
def test_the_agents_sdk_connects_with_a_secret(server: LiveServer, agents: Tab) -> None:
    """A page's WebSocket takes no other key; its user speaks over the answer."""
    assert agents.run(f"begin_agents({secret(server)!r}, 'WebSocket')") == "connected"
    samples, rate = soundfile.read(SPEECH / QUESTION, dtype="float32")
    spoken = (soxr.resample(samples, rate, 24_000) * 32_000).astype("<i2").tobytes()
    question = base64.b64encode(spoken).decode()
    assert agents.run(f"say({question!r}, 0.6)") == "said"
    for _ in range(200):
        if agents.run("say('', 0.1).then(() => sound > 10_000)"):
            break
    assert agents.run(f"say({question!r}, 6)") == "said"
    agents.until("all('response.output_audio_transcript.done').length >= 1")
    assert "news" in agents.run("JSON.stringify(session.history)")
    assert agents.run("all('input_audio_buffer.speech_started').length") >= 2
    agents.run("session.close(); 1")
    assert agents.run("errors.length") == 0, agents.run("errors")
