"""Turns of chat on the remote backend, against a server written from the protocol's own pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio
import pybase64
import pytest
from llama_omni import LlamaOmniBackend
from llama_omni_wire import QUESTION_BYTES_MAX

from protocol.values.errors import LocalProtocolError
from protocol.values.model import (
    ChatConfig,
    Cut,
    Message,
    Picture,
    Prefill,
    Sound,
    SpeechConfig,
    Text,
    Turn,
    TurnChunk,
)
from runtime.model.backends.base import BackendError, BackendRefused, Chats, Piece, TurnSession
from tests.llama_omni.fake import (
    HANG,
    LISTENS,
    SECOND,
    WORD_SAMPLES,
    FakeServer,
    Item,
    answer,
    ask,
    audio,
    delta,
    done,
    failing,
    opening,
    said,
    saying,
    sound,
    still_chats,
    text,
    unit,
)

SPOKEN = SpeechConfig()
JPEG = b"\xff\xd8 a picture"


def told(pieces: Sequence[TurnChunk]) -> list[tuple[int, str, int]]:
    """Number, text and samples of each piece."""
    return [(piece.step, piece.text, len(piece.pcm) // 4) for piece in pieces]


# -- as it should be ------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_turn_is_answered_as_it_is_made() -> None:
    """Nobody could chat with a model behind a llama.cpp-omni server."""
    fake = FakeServer()
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        assert isinstance(backend, Chats)
        assert "chat" in backend.info.modes
        held = await backend.chat(slot=0)
        made: list[Piece] = []
        result = await held.run(ask(index=3), emit=made.append)
        prefill, pieces = made[0], [piece for piece in made if isinstance(piece, TurnChunk)]
        assert isinstance(prefill, Prefill)
        await held.release()
        await held.release()
    assert (prefill.index, prefill.input_tokens, prefill.cost_us) == (3, 40, 12_500)
    assert prefill.input_hash
    assert told(pieces) == [(0, "good ", 0), (1, "morning ", 0), (2, "to ", 0), (3, "you ", 0)]
    assert {piece.index for piece in pieces} == {3}
    assert (result.index, result.text, result.pcm) == (3, "good morning to you ", b"")
    assert (result.reason, result.cut) == ("turn_end", None)
    assert (result.generated_tokens, result.kv_length) == (4, 44)
    assert (result.costs.generate_us, result.costs.prefill_us) == (8_000, 0)
    assert fake.closes == ["remote_1"]
    assert fake.violations == []


@pytest.mark.anyio
async def test_each_turn_has_a_session_of_its_own() -> None:
    """A conversation would stand in the server's context twice, or another's before it (B8)."""
    fake = FakeServer()
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        for words in ("for ann ", "for bob "):
            _, result = await answer(backend, ask(Text(text=words)))
            assert result.text == words
        session = await backend.open(opening(), slot=0)
        assert said(await session.run(unit(0))) == LISTENS
        await session.release()
        await still_chats(fake, backend)
    modes = ["turn_based", "turn_based", "full_duplex", "turn_based"]
    assert [init["mode"] for init in fake.inits] == modes
    assert len(fake.closes) == 4


@pytest.mark.anyio
async def test_all_of_a_turn_is_sent() -> None:
    """The model would not see, hear or heed what the client asked."""
    fake = FakeServer()
    seen, heard, voice = b"\xff\xd8 a picture", sound(1600), sound(8000, 0.1)
    turn = ask(
        messages=(
            Message(role="system", content=(Text(text="be brief"),)),
            Message(
                role="user", content=(Picture(jpeg=b"\xff\xd8 1"), Picture(jpeg=b"\xff\xd8 2"))
            ),
            Message(role="assistant", content=(Text(text="two cats"),)),
            Message(role="user", content=(Text(text="and"), Picture(jpeg=seen), Sound(pcm=heard))),
        ),
        config=ChatConfig(
            max_new_tokens=7, temperature=0.0, top_p=0.5, top_k=9, length_penalty=1.5
        ),
        speech=SpeechConfig(mode="audio_assistant", language="zh", voice_pcm=voice),
        max_slice_nums=4,
        omni=True,
        tts_template=True,
    )
    async with fake.running():
        await answer(LlamaOmniBackend(fake.url), turn)

    def base64(data: bytes) -> str:
        return pybase64.b64encode(data).decode()

    assert fake.inits == [
        {
            "mode": "turn_based",
            "use_tts": True,
            "voice": {"tts_ref_audio": base64(voice)},
            "config": {"temperature": 0.0, "top_k": 9, "top_p": 0.5},
        }
    ]
    pictures = [{"type": "image", "data": base64(b"\xff\xd8 %d" % n)} for n in (1, 2)]
    question = [
        {"type": "text", "text": "and"},
        {"type": "image", "data": base64(seen)},
        {"type": "audio", "data": base64(heard)},
    ]
    assert fake.appends == [
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
                {"role": "user", "content": pictures},
                {"role": "assistant", "content": [{"type": "text", "text": "two cats"}]},
                {"role": "user", "content": question},
            ],
            "streaming": True,
            "generation": {"max_new_tokens": 7, "length_penalty": 1.5},
            "image": {"max_slice_nums": 4},
            "tts": {"enabled": True, "ref_audio_data": base64(voice)},
            "omni_mode": True,
        }
    ]
    assert fake.violations == []


@pytest.mark.anyio
async def test_speech_comes_as_it_is_made() -> None:
    """A client that asked for a voice would read."""
    async with FakeServer().running() as fake:
        backend = LlamaOmniBackend(fake.url)
        pieces, result = await answer(backend, ask(Text(text="hi you"), speech=SPOKEN))
    assert told(pieces) == [
        (0, "hi ", 0),
        (1, "", WORD_SAMPLES),
        (2, "you ", 0),
        (3, "", WORD_SAMPLES),
    ]
    assert pieces[1].pcm == sound(WORD_SAMPLES)
    assert result.text == "hi you "


@pytest.mark.anyio
async def test_speech_that_was_not_asked_for_is_left_out() -> None:
    """A client that asked for text would be talked to."""
    async with saying([text("hi"), audio(SECOND), done("hi")]).running() as fake:
        pieces, _ = await answer(LlamaOmniBackend(fake.url), ask())
    assert told(pieces) == [(0, "hi", 0)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said_items", "expected", "tokens"),
    [
        ([delta("text", delta="hi "), text("you"), done()], ["hi ", "you"], 2),
        ([done("hi you", full_text="hi you")], ["hi you"], 1),
        ([delta("listen"), text(""), text("hi"), delta("listen"), done("hi")], ["hi"], 1),
        ([text("hi"), done("hi", new={"a": 1}, metrics={"n_tokens": 9, "new": 1})], ["hi"], 9),
        ([done("")], [], 0),
        ([done("x" * 5000)], ["x" * 5000], 1),
    ],
)
async def test_servers_of_other_versions_are_understood(
    said_items: Sequence[Item], expected: list[str], tokens: int
) -> None:
    """An older or newer server would be refused for what does not matter."""
    async with saying(said_items).running() as fake:
        pieces, result = await answer(LlamaOmniBackend(fake.url), ask())
    assert [piece.text for piece in pieces] == expected
    assert result.text == "".join(expected)
    assert result.generated_tokens == tokens


@pytest.mark.anyio
async def test_an_answer_that_was_too_long_says_so() -> None:
    """A client could not tell half an answer from a whole one."""
    async with saying([text("hi"), done("hi") | {"reason": "length"}]).running() as fake:
        _, result = await answer(LlamaOmniBackend(fake.url), ask())
    assert result.reason == "length"


# -- what the server cannot do --------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("turn", "named"),
    [
        (ask(config=ChatConfig(repetition_penalty=1.5)), "generation.repetition_penalty:"),
        (ask(config=ChatConfig(min_new_tokens=3)), "generation.min_new_tokens:"),
        (ask(use_image_id=False), "image.use_image_id: false:"),
        (ask(thinking=True), "enable_thinking:"),
        (ask(tts_template=True), "use_tts_template without tts:"),
        (ask(speech=SpeechConfig(mode="voice_cloning")), "tts.mode: voice_cloning:"),
        (ask(Picture(jpeg=JPEG), Picture(jpeg=JPEG)), "more than one picture in a question:"),
        (ask(Sound(pcm=sound(9)), Sound(pcm=sound(9))), "more than one sound in a question:"),
        (
            ask(Sound(pcm=bytes(QUESTION_BYTES_MAX * 3 // 4))),
            rf"a turn of \d+ bytes: .* takes at most {QUESTION_BYTES_MAX}$",
        ),
    ],
)
async def test_what_the_server_would_pass_over_is_refused_by_name(turn: Turn, named: str) -> None:
    """A client would believe a setting to be in force that is not."""
    async with FakeServer().running() as fake:
        backend = LlamaOmniBackend(fake.url)
        held = await backend.chat(slot=0)
        await failing(held.run(turn), BackendRefused, f"^{named}")
        await held.release()
        assert fake.inits == []
        await still_chats(fake, backend)


@pytest.mark.anyio
async def test_one_turn_or_session_at_a_time() -> None:
    """The server would close the second without a word, and nobody know why."""
    async with FakeServer().running() as fake:
        backend = LlamaOmniBackend(fake.url)
        held = await backend.chat(slot=0)
        with pytest.raises(LocalProtocolError, match="not released"):
            await backend.chat(slot=0)
        with pytest.raises(LocalProtocolError, match="not released"):
            await backend.open(opening(), slot=0)
        await held.release()
        await still_chats(fake, backend)


@pytest.mark.anyio
async def test_no_answer_is_stopped_at_a_given_token() -> None:
    """A full replay would take what came for what was recorded."""
    async with FakeServer().running() as fake:
        held = await LlamaOmniBackend(fake.url).chat(slot=0)
        expected = "cannot be stopped at a given token"
        await failing(held.run(ask(), Cut(stage="llm", step=2)), BackendError, expected)
        await held.release()


# -- cut ------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_interrupt_cuts_the_answer_and_frees_the_server() -> None:
    """A client that has enough would wait, and with it everybody who wants the server."""
    async with saying([text("one "), text("two "), HANG]).running() as fake:
        backend = LlamaOmniBackend(fake.url)

        def cut(held: TurnSession) -> None:
            if len(seen) == 1:
                held.interrupt(0)
            seen.append(held)

        seen: list[TurnSession] = []
        pieces, result = await answer(backend, ask(), on_piece=cut)
        assert told(pieces)[0] == (0, "one ", 0)
        assert (result.reason, result.cut) == ("interrupted", len(pieces))
        assert result.text == "".join(piece.text for piece in pieces)
        assert fake.closes == ["remote_1"]
        await still_chats(fake, backend)


@pytest.mark.anyio
@pytest.mark.parametrize("at", ["the opening", "the question", "the answer"])
async def test_an_interrupt_ends_what_hangs(at: str) -> None:
    """A client that leaves would keep the only slot until a deadline."""
    greeting: list[Item] | None = [HANG] if at == "the opening" else None
    fake = FakeServer(lambda *_: [text("a"), HANG] if at == "the answer" else [HANG])
    fake.greeting = greeting
    async with fake.running():
        backend = LlamaOmniBackend(fake.url)
        held, pieces = await backend.chat(slot=0), list[Piece]()

        async def cut() -> None:
            if at == "the answer":
                while len(pieces) < 2:  # noqa: ASYNC110 - the prefill, and a piece
                    await anyio.sleep(0.01)
            await fake.until(lambda: bool(fake.inits if greeting else fake.appends))
            held.interrupt()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut)
            if at == "the answer":
                result = await held.run(ask(), emit=pieces.append)
                assert (result.text, result.reason, result.cut) == ("a", "interrupted", 1)
            else:
                await failing(held.run(ask()), BackendError, "^remote 127.*: the turn was cut$")
        await held.release()
        if not greeting:
            await still_chats(fake, backend)


@pytest.mark.anyio
async def test_a_turn_that_was_cut_before_asks_nothing() -> None:
    """The server would answer for nobody."""
    async with FakeServer().running() as fake:
        backend = LlamaOmniBackend(fake.url)
        held = await backend.chat(slot=0)
        held.interrupt()
        await failing(held.run(ask()), BackendError, "the turn was cut$")
        await held.release()
        assert fake.inits == []
        await still_chats(fake, backend)


@pytest.mark.anyio
async def test_a_cancelled_turn_frees_the_server() -> None:
    """A server that stops would leave the model busy."""
    async with saying([text("a"), HANG]).running() as fake:
        backend = LlamaOmniBackend(fake.url)
        held = await backend.chat(slot=0)
        with anyio.CancelScope() as scope:
            await held.run(ask(), emit=lambda _: scope.cancel())
        assert scope.cancelled_caught
        await held.release()
        await still_chats(fake, backend)


@pytest.mark.anyio
async def test_a_backend_that_closes_lets_go_of_its_turn() -> None:
    """A server that gives a call up would leave the model busy."""
    async with saying([text("a"), HANG]).running() as fake:
        backend = LlamaOmniBackend(fake.url)
        held, pieces = await backend.chat(slot=0), list[Piece]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(held.run, ask(), emit=pieces.append))
            while not pieces:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await backend.aclose()
        await fake.until(lambda: fake.active is None)
        assert fake.closes == ["remote_1"]
