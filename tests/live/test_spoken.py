"""The published voice, at a small size, in sessions of every kind: served, recorded, run again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import anyio
import attrs
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from protocol.values.messages import Created, QueueDone, Response, Speech
from protocol.values.model import ChatConfig
from protocol.values.openai import LiveSettings
from protocol.values.requests import Append, Ask, ChatMessage, Init, SpeechRequest, TextPart
from recorder.read.reader import read
from runtime.client.session import ClientSession
from runtime.model.backends.minicpmo.checkpoint import WEIGHTS
from runtime.model.backends.minicpmo.tokens import Tokens
from runtime.model.voice.vocoder import Chunk, Turn
from runtime.model.voice.vocoder import Vocoder as PublishedVocoder
from tests.live.servers import LiveServer, live_server
from tests.live.test_forks import check_log, leave, results_of, say, serving, sounds, states_of
from tests.models.random_voice import STEPS, write_checkpoint
from tests.project.sampling import sample
from tests.runtime.model.voice.test_sessions import ROOM
from tests.sessions import resumed
from tests.sessions.in_memory import pcm
from tests.sessions.outliving import Load, differences
from tests.sessions.resumed import KINDS, UNITS, Told, converse, until

LONG: Final = {"max_position_embeddings": 8192, "tts_config": {"max_position_embeddings": 8192}}
"""Room for a turn that a model which never listens does not end."""
SPOKEN: Final = sample(
    tuple(kind for kind in KINDS if "transcription" not in kind),
    ("realtime, audio", "live", "openai", "realtime, chat", "legacy-chat"),
)
"""Those that speak; the others are duplex sessions as the first."""


def question() -> Ask:
    """A question that is answered in speech."""
    message = ChatMessage(role="user", content=(TextPart(text="the lazy dog"),))
    config = ChatConfig(max_new_tokens=6)
    return Ask(messages=(message,), config=config, speech=SpeechRequest())


async def duplex(session: ClientSession, rng: random.Random, model: str) -> None:
    """Send some seconds, and leave once one was answered in speech."""
    await until(session, QueueDone)
    await session.init(Init(instructions="be brief"))
    await until(session, Created)
    for number in range(UNITS):
        await session.append(Append(pcm=pcm(level=0.1 + number / 10)))
    await until(session, Speech)
    await session.close("enough")
    await resumed._hear(session)


async def chat(session: ClientSession, rng: random.Random, model: str) -> None:
    """Ask twice."""
    await until(session, QueueDone)
    await session.init(Init(instructions=""))
    await until(session, Created)
    for _ in range(2):
        await session.ask(question())
        await until(session, Response)
    await session.close("enough")
    await resumed._hear(session)


async def request(session: ClientSession, rng: random.Random, model: str) -> None:
    """Ask once."""
    await session.ask(question())
    await resumed._hear(session)


async def live(session: ClientSession, rng: random.Random, model: str) -> None:
    """Send some seconds, and leave once speech is heard, not its silence."""
    await until(session, QueueDone)
    await session.init(Init(instructions="be brief", live=LiveSettings(model=model)))
    await until(session, Created)
    for _ in range(UNITS * 10):
        await session.append_sound(bytes(rng.randint(1000, 3200) * 2))
    async for message in session:
        if isinstance(message, Speech) and any(message.pcm):
            break
    await session.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that never listens by itself, and ends its speech soon."""
    made = write_checkpoint(tmp_path_factory.mktemp("spoken"), ROOM, LONG)
    weights, listen = load_file(made / WEIGHTS), Tokens(made).ids.listen
    weights["llm.lm_head.weight"][listen] = 0
    weights["tts.head_code.0.parametrizations.weight.original0"][-1] *= 1.5
    save_file(weights, made / WEIGHTS)
    return made


@pytest.fixture(scope="module")
def logs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A session of each kind, all at once."""
    records = tmp_path_factory.mktemp("recordings")
    told = {kind: Told() for kind in SPOKEN}

    async def clients(server: LiveServer) -> None:
        url = server.url.removesuffix("/v1/realtime")
        async with anyio.create_task_group() as tasks:
            for kind, each in told.items():
                drawn = random.Random([*KINDS].index(kind))
                tasks.start_soon(converse, kind, url, each, drawn, "random")

    options = ("--record", str(records), "--slots", "4", "--voice-steps", str(STEPS))
    with pytest.MonkeyPatch.context() as patch:
        kinds = {kind: duplex for kind in SPOKEN if KINDS[kind][2] is resumed._duplex}
        kinds |= {"realtime, chat": chat, "legacy-chat": request, "live": live}
        for kind, session_kind in kinds.items():
            patch.setitem(KINDS, kind, (*KINDS[kind][:2], session_kind))
        with live_server(*options, model=str(folder)) as server:
            anyio.run(clients, server)
            assert server.stop() == 0
    return {
        kind: next(records.rglob(f"*{each.recording_id}*.session.zst"))
        for kind, each in told.items()
    }


@pytest.fixture(scope="module")
def load() -> Load:
    return Load()


@pytest.mark.costly
@pytest.mark.parametrize("kind", SPOKEN)
def test_a_session_speaks_and_its_sound_is_replayed(
    logs: dict[str, Path], load: Load, kind: str
) -> None:
    """A caller would get only text, or a replay another sound than the caller heard."""
    parts = [record.fields.get(name) for record in read(logs[kind]) for name in ("result", "chunk")]
    assert any(isinstance(part, dict) and part.get("codec_ids") for part in parts)
    assert not differences(logs[kind], load)


@pytest.mark.parametrize("kind", ["realtime, audio", "realtime, chat"])
def test_another_sound_is_found(
    logs: dict[str, Path], load: Load, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay would call identical what it does not compare."""
    monkeypatch.setattr(PublishedVocoder, "_noise", quieter)
    assert "pcm" in differences(logs[kind], load)


def test_a_fork_amid_an_answer_speaks_on_as_its_session_did(folder: Path, tmp_path: Path) -> None:
    """A fork would go on in another voice, or from the beginning of a sentence."""
    options = ("--slots", "2", "--voice-steps", str(STEPS))
    said = sounds()[:7]
    with serving(tmp_path, *options, model=str(folder)) as served:
        place = attrs.evolve(served, model="random")
        with place.parent() as (parent, name):
            told = say(parent, said)
            leave(parent)
        with place.fork(name, "?at=5") as (fork, session):
            again = say(fork, said[5:])
            leave(fork)
        logs = [place.log_of(it) for it in (name, session["id"])]
        before = results_of(logs[0])[4].result
        assert before.codec_ids
        assert not before.end_of_turn
        assert again == told[5:]
        assert states_of(logs[1]) == states_of(logs[0])
        check_log(logs[1])


def quieter(self: PublishedVocoder, chunk: Chunk, before: Turn) -> Tensor:
    """The source's noise, hardly another one."""
    return 0.999 * noise(self, chunk, before)


noise: Final = PublishedVocoder._noise
