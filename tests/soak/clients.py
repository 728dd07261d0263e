"""Clients of others, as they are installed, each against a real server: `make soak`.

    python -m tests.soak.clients [--out FOLDER] [--environments FOLDER] [--only NAME]

LiveKit Agents (its Live and its Realtime model, with default arguments, and its `STT`), Pipecat
(both services, and its transcription), the OpenAI Agents SDK, of Python and of npm, and the package
`openai`, of Python and of npm (over `ws` and as in a browser), are installed, each in an
environment of its own. vLLM-Omni's `DuplexClient` is taken from its package, without the
packages of its models. Each asks `tiny` a recorded question and hears the answer, or has it write
the question down, and interrupts the scripted model while it speaks. Each offers a function of
its own, which costs nothing else, runs when the scripted model calls it, and is told by that
model (`tools`). The package of Python is also a telephone as Twilio's, whose media comes before
its settings, a client that sends nothing while its user is quiet, as Discord's, and one of push to
talk. The golden transcripts of `openai` are held to the schemas of the Agents SDK of npm. That its
own playback stops is its package's matter, and needs the event that is waited for here; in the Live
API, which has no such event, the silence of the model. What was found goes to `clients.json`,
without a date; it exits with 1 where a client got no answer, an error, or no word of its
interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import numpy as np
import soxr
import trustme

from protocol.values.behaviour import WHOLE_PARTS
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.rerun.logic import replay
from tests.live.servers import live_server
from tests.project.evidence import add_out
from tests.transcripts.reading import example, load_all

SCRIPTS: Final = Path(__file__).parents[1] / "unmodified"
SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
RATE_HZ: Final = 24_000
RUN_S: Final = 120
NAMES: Final = ("gpt-live-1", "gpt-realtime")
"""The models that LiveKit asks for by default: further names of ours."""
DEFAULT: Final = "-"
QUESTION: Final = "what time is it"
TOLD: Final = "it is nine o'clock."
"""What the scripted model says of the clients' function."""
SOUND_S_MIN: Final = 1.0
LOUD: Final = 1000
"""A sample of speech."""


@attrs.frozen
class Client:
    """A client: its script, the packages that it needs, the model's name, and its scenes."""

    script: str
    packages: tuple[str, ...]
    scenes: tuple[str, ...] = ("answer", "interrupt")
    model: str = ""

    @property
    def is_node(self) -> bool:
        """Whether it is JavaScript."""
        return self.script.endswith(".mjs")


SCENES: Final = ("answer", "interrupt", "tools")
_LIVEKIT: Final = ("livekit-agents==1.8.9", "livekit-plugins-openai==1.8.9", "numpy")
_PIPECAT: Final = ("pipecat-ai[openai,websockets-base]==1.14.0",)
OPENAI: Final = Client(
    "openai_realtime.py",
    ("openai[realtime]==3.57.0", "numpy"),
    ("answer", "interrupt", "tools", "twilio", "discord", "push-to-talk"),
)
CLIENTS: Final[Mapping[str, Client]] = MappingProxyType(
    {
        "openai": OPENAI,
        "livekit-live": Client("livekit_live.py", _LIVEKIT, ("answer", "interrupt-live"), DEFAULT),
        "livekit-realtime": Client("livekit_realtime.py", _LIVEKIT, model=DEFAULT),
        "livekit-agent": Client("livekit_agent.py", _LIVEKIT, ("tools", "tools-live"), DEFAULT),
        "livekit-stt": Client("livekit_stt.py", _LIVEKIT, ("transcribe",)),
        "pipecat": Client(
            "pipecat_both.py",
            _PIPECAT,
            (*("answer-live", "interrupt-live", "tools-live"), *SCENES, "transcribe"),
        ),
        "agents": Client("agents_realtime.py", ("openai-agents==0.24.0", "numpy"), SCENES),
        "vllm-omni": Client("vllm_omni_duplex.py", ("vllm-omni==0.30.0", "websockets", "pybase64")),
        "node": Client("node.mjs", (), ("answer", "answer-browser", "interrupt", "tools")),
        "node-http": Client("node_http.mjs", (), ("answer", "transcribe")),
        "node-agents": Client("node_agents.mjs", (), SCENES),
    }
)


def question() -> bytes:
    """A recorded question: PCM16, 24 kHz."""
    with wave.open(str(SPEECH)) as file:
        rate_hz = file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype("f4")
    resampled: bytes = (
        soxr.resample(samples, rate_hz, RATE_HZ).clip(-32768, 32767).astype("<i2").tobytes()
    )
    return resampled


def from_its_first_word(pcm16: bytes) -> bytes:
    """The same without the silence before it."""
    loud = np.abs(np.frombuffer(pcm16, "<i2").astype(np.int32)) > LOUD
    return pcm16[2 * int(loud.argmax()) :]


def prepare(client: Client, folder: Path) -> list[str]:
    """Install a client's packages; returns the words that run its script."""
    if client.is_node:
        home = folder / "node"
        home.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", client.script):
            (home / name).write_bytes((SCRIPTS / name).read_bytes())
        _call(["npm", "install", "--silent", "--no-fund", "--no-audit"], cwd=home)
        return ["node", str(home / client.script)]
    home = folder / client.packages[0].partition("==")[0].partition("[")[0]
    python = home / "bin" / "python"
    if not python.exists():
        _call([sys.executable, "-m", "venv", str(home)])
        first, *others = client.packages
        alone = ["--no-deps"] if first.startswith("vllm-omni") else []  # its client needs no model
        _call([str(python), "-m", "pip", "install", "--quiet", *alone, first])
        if others:
            _call([str(python), "-m", "pip", "install", "--quiet", *others])
    return [str(python), "-W", "ignore", str(SCRIPTS / client.script)]


def _call(command: Sequence[str], cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, stdout=subprocess.DEVNULL)


def play(
    words: Sequence[str], scene: str, model: str, said: Path, folder: Path, *, is_tls: bool
) -> dict[str, Any]:
    """Run one scene of a client against a server of its own; returns its report."""
    backend = "scripted" if scene.startswith(("interrupt", "tools")) else "tiny"
    flags = ["--record", str(folder / "logs")]
    flags += ["--barge-in"] if scene.endswith("-live") and scene != "tools-live" else []
    flags += [word for name in NAMES for word in ("--served-model-name", name)]
    environment = dict(os.environ)
    if is_tls:
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost")
        paths = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
        authority.cert_pem.write_to_path(paths[0])
        certificate.cert_chain_pems[0].write_to_path(paths[1])
        certificate.private_key_pem.write_to_path(paths[2])
        flags += ["--tls-cert", str(paths[1]), "--tls-key", str(paths[2])]
        environment["NODE_EXTRA_CA_CERTS"] = str(paths[0])
    with live_server(*flags, model=backend) as server:
        port = urlsplit(server.url).port
        base = f"https://localhost:{port}/v1" if is_tls else f"http://127.0.0.1:{port}/v1"
        done = subprocess.run(
            [*words, scene, base, model or backend, str(said)],
            check=False,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            env=environment,
        )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failures": [done.stderr[-2000:]]}
    report: dict[str, Any] = json.loads(lines[-1])
    report["replays"] = _replays(folder / "logs")
    return report


def _replays(folder: Path) -> bool:
    reports = []
    for info in Store(folder).logs():
        with LogReader(info.path) as log:
            reports.append(replay(log).identical)
    return bool(reports) and all(reports)


def refused_by_schemas(folder: Path, environments: Path) -> dict[str, Any]:
    """Hold golden transcripts to the schemas of the Agents SDK of npm; returns its report."""
    frames = [
        json.dumps(example(body))
        for it in load_all()
        if it.dialect == "openai" and it.behaviour >= WHOLE_PARTS
        for body in it.bodies("receive")
    ]
    file = folder / "frames.jsonl"
    file.write_text("\n".join(frames), "utf-8")
    *words, script = prepare(Client("node_schemas.mjs", ()), environments)
    command = [*words, script, str(file)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=Path(script).parent)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def wrong(scene: str, report: Mapping[str, Any]) -> str:
    """What is wrong with a report, or nothing."""
    if report["failures"]:
        return f"failures: {report['failures']}"
    if not report["replays"]:
        return "its recording does not replay"
    if scene.startswith("interrupt"):
        return "" if report["interrupted_s"] is not None else "it heard of no interruption"
    if scene.startswith("tools"):
        words = report["words"].replace('"', "")  # Pipecat writes a result as JSON
        return "" if TOLD in words else f"it was told {words!r}"
    if scene == "transcribe":
        return "" if report["words"] == QUESTION else f"it wrote {report['words']!r}"
    is_answered = report["words"] and report["sound_s"] >= SOUND_S_MIN
    return "" if is_answered else f"no answer: {report['words']!r}, {report['sound_s']} s"


def main() -> int:
    """Run all clients, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--environments", type=Path, help="keep the environments here")
    parser.add_argument("--only", choices=CLIENTS, action="append")
    asked = parser.parse_args()
    found, failures = dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said, spoken, quiet = [folder / f"{it}.pcm" for it in ("question", "spoken", "quiet")]
        said.write_bytes(question())
        quiet.write_bytes(bytes(6 * RATE_HZ))
        spoken.write_bytes(from_its_first_word(question()))
        for client in asked.only or CLIENTS:
            it = CLIENTS[client]
            words = prepare(it, asked.environments or folder)
            for scene in it.scenes:
                place = Path(tempfile.mkdtemp(dir=folder))
                sounds = {"interrupt": spoken, "tools": quiet}
                sound = sounds.get(scene.partition("-")[0], said)
                report = play(words, scene, it.model, sound, place, is_tls=it.is_node)
                text = wrong(scene, report)
                failures += [f"{client}, {scene}: {text}"] if text else []
                found[f"{client}, {scene}"] = {
                    key: _rounded(report.get(key)) for key in ("words", "sound_s", "interrupted_s")
                }
                print(f"{client}, {scene}: {text or 'good'}", file=sys.stderr)
            if client == "node-agents":
                read = refused_by_schemas(folder, asked.environments or folder)
                failures += [f"{client}, schemas: {it}" for it in read["failures"]]
                found[f"{client}, schemas"] = {"frames": read["read"]}
    packages = sorted({it for client in CLIENTS.values() for it in client.packages})
    node = json.loads((SCRIPTS / "package.json").read_text())["dependencies"]
    evidence = {
        "what": "clients of others, as they are installed, which ask and interrupt",
        "good": not failures,
        "packages": packages,
        "npm": node,
        "clients": found,
        "failures": failures,
    }
    text = json.dumps(evidence, indent=2) + "\n"
    (asked.out / "clients.json").write_text(text, "utf-8")
    print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
