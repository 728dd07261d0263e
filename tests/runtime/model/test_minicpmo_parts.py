"""The model's modules, each against its definition, the stock one, or itself done whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from protocol.values.model import UNIT_SAMPLES
from runtime.model.backends.minicpmo.attention import KvSlots, Row, SlotCache, attend_whole
from runtime.model.backends.minicpmo.audio import BUFFER_DROP, EncodeAudio, MelCarry, MelFrontEnd
from runtime.model.backends.minicpmo.checkpoint import CODES_A_UNIT, Parts
from runtime.model.backends.minicpmo.config import UNIT_FRAMES
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner, rows_are_independent
from runtime.model.backends.minicpmo.vision import Slicing, patch_places, places_2d
from runtime.model.backends.minicpmo.work import EncodeImage, Feed, Speak
from tests.models import random_model
from tests.models.random_model import FEW_UNITS, SLIDING

FRAME = Path(__file__).parents[3] / "fixtures" / "speech" / "frame.jpg"
SLICING = Slicing(resolution=448, patch=14)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), SLIDING, FEW_UNITS, slots=3)


@pytest.fixture
def runner(model: DuplexModel) -> ModelRunner:
    for slot in range(model.info.slots):
        model.runner.clear(slot)
    return model.runner


@pytest.fixture(scope="module")
def parts(model: DuplexModel) -> Parts:
    return model.runner.parts


def noise(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7])
def test_slots_attend_as_the_whole_sequence_does(window: int | None) -> None:
    """Sessions would get other numbers than the model was trained on."""
    heads, groups, width, length = 2, 3, 8, 40
    store = KvSlots(layers=1, slots=4, heads=heads, capacity=64, width=width, window=window)
    query = noise(2, heads * groups, length, width, seed=1)
    key, value = noise(2, heads, length, width, seed=2), noise(2, heads, length, width, seed=3)
    whole = attend_whole(query, key, value, 0.3, window)
    at, pieces = 0, []
    for count in (1, 12, 1, 1, 20, 5):
        rows = [Row(slot=3, start=at), Row(slot=1, start=at)]
        cache = SlotCache(store, rows, count, groups)
        part = slice(at, at + count)
        views, _ = cache.update(key[:, :, part], value[:, :, part], 0)
        pieces.append(views.attend(query[:, :, part], 0.3))
        at += count
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-6)
    assert not store.keys[:, [0, 2]].any()


def test_padding_writes_nothing_and_sees_nothing() -> None:
    """A slot would be overwritten by rows that belong to nobody (B8)."""
    store = KvSlots(layers=1, slots=2, heads=1, capacity=8, width=4)
    cache = SlotCache(store, [Row(slot=1, start=0)], 2, groups=1)
    views, _ = cache.update(noise(3, 1, 2, 4), noise(3, 1, 2, 4), 0)
    out = views.attend(noise(3, 1, 2, 4), 1.0)
    assert not store.keys[:, 0].any()
    assert out[0].any()
    assert not out[1:].any()


def test_a_slot_is_never_written_beyond_its_end() -> None:
    """A session would write into the next one's slot (B8)."""
    store = KvSlots(layers=1, slots=2, heads=1, capacity=8, width=4)
    with pytest.raises(AssertionError):
        SlotCache(store, [Row(slot=0, start=7)], 2, groups=1)


def test_what_lies_behind_the_start_has_no_weight(runner: ModelRunner) -> None:
    """A rolled-back unit would leave a trace in what follows (B3)."""
    first, spoilt, last = noise(30, 192), noise(40, 192, seed=3), noise(9, 192, seed=4)

    def run(*, spoil: bool) -> Tensor:
        runner.compute([Feed(slot=0, start=0, rows=first)])
        if spoil:
            runner.compute([Feed(slot=0, start=30, rows=spoilt)])
        (fed,) = runner.compute([Feed(slot=0, start=30, rows=last)])
        logits: Tensor = fed.logits.whole()
        return logits

    assert torch.equal(run(spoil=True), run(spoil=False))


def test_steps_give_what_the_whole_gives(runner: ModelRunner, parts: Parts) -> None:
    """The model would be trained on other numbers than it is run on."""
    x = noise(400, 192)
    with torch.inference_mode():
        whole = parts.llm.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
    at, hidden = 0, []
    for count in (100, 1, 250, 48, 1):
        (fed,) = runner.compute([Feed(slot=2, start=at, rows=x[at : at + count])])
        at += count
        hidden.append((at - 1, fed.hidden))
    for index, row in hidden:
        torch.testing.assert_close(row, whole[index], rtol=1e-3, atol=1e-4)


def test_a_request_has_the_same_bits_in_any_batch(runner: ModelRunner) -> None:
    """What a caller hears would depend on who else is connected (B8)."""
    assert rows_are_independent(runner.parts)
    for count in (1, 2, 11, 77):
        works = [Feed(slot=slot, start=0, rows=noise(count, 192, seed=slot)) for slot in range(3)]
        one_by_one = [runner.compute([work])[0].logits.whole() for work in works]
        for batch in ([0, 1, 2], [2, 0], [1]):
            fed = runner.compute([works[index] for index in batch])
            for index, got in zip(batch, fed, strict=True):
                assert torch.equal(got.logits.whole(), one_by_one[index])
    speaks = [Speak(slot=slot, start=0, rows=noise(1, 128, seed=slot)) for slot in range(3)]
    for got, work in zip(runner.compute(speaks), speaks, strict=True):
        assert torch.equal(got.whole(), runner.compute([work])[0].whole())


# -- sound ----------------------------------------------------------------------------------------


def stream(front_end: MelFrontEnd, pcm: Tensor) -> tuple[list[Tensor], list[MelCarry]]:
    carry, frames, carries = MelCarry.start(), [], []
    for second in torch.split(pcm, UNIT_SAMPLES):
        mel, carry = front_end.next_frames(second, carry)
        frames.append(mel)
        carries.append(carry)
    return frames, carries


def test_mel_streams_what_it_is_whole() -> None:
    """Words that cross the border of two seconds would be misheard."""
    front_end = MelFrontEnd(80)
    pcm = noise(7 * UNIT_SAMPLES) * 0.1
    frames, _ = stream(front_end, pcm)
    assert [mel.shape[1] for mel in frames] == [102, *[104] * 6]
    whole = front_end.whole(pcm[None])[0]
    for index, mel in enumerate(frames):
        expected = whole[:, max(0, 100 * index - 2) : 100 * index + 102]
        torch.testing.assert_close(mel, expected, rtol=0, atol=1e-5)


def test_mel_is_whispers() -> None:
    """The encoder would be given other numbers than the published weights know."""
    front_end, pcm = MelFrontEnd(80), noise(3 * UNIT_SAMPLES) * 0.1
    theirs = WhisperFeatureExtractor(feature_size=80)(pcm.numpy(), sampling_rate=16_000)
    expected = torch.tensor(np.asarray(theirs["input_features"])[0][:, :300])
    torch.testing.assert_close(front_end.clip(pcm), expected, rtol=0, atol=1e-4)


def test_the_floor_follows_the_loudest_sound_from_five_seconds_on() -> None:
    """Silence after a loud word would look like nothing the encoder has seen."""
    pcm = torch.zeros(7 * UNIT_SAMPLES)
    pcm[:8000] = noise(8000) * 0.3
    frames, carries = stream(MelFrontEnd(80), pcm)
    assert float(frames[3].min()) == pytest.approx((-10 + 4) / 4)
    for mel, carry in zip(frames[4:], carries[4:], strict=True):
        floor = (float(carry.peaks.max()) - 8 + 4) / 4
        assert float(mel.min()) == pytest.approx(floor)
        assert floor > (-10 + 4) / 4


def test_buffer_and_encoder_start_over_in_the_same_unit(model: DuplexModel) -> None:
    """A long session would be heard otherwise than by the public code."""
    _, carries = stream(MelFrontEnd(80), noise(31 * UNIT_SAMPLES) * 0.1)
    grown = [16_480 + UNIT_SAMPLES * index for index in range(31)]
    lengths = [len(carry.buffer) for carry in carries]
    assert lengths[:29] == grown[:29]
    assert lengths[29:] == [length - BUFFER_DROP for length in grown[29:]]
    assert all(len(carry.waiting) == 80 for carry in carries)
    assert (1500 - 3) // UNIT_FRAMES == 29
    assert model.runner.config.audio.units == 7


def test_frames_are_right_after_the_buffer_was_cut() -> None:
    """After half a minute the front end would mishear."""
    front_end, pcm = MelFrontEnd(80), noise(32 * UNIT_SAMPLES) * 0.1
    frames, _ = stream(front_end, pcm)
    whole = front_end.whole(pcm[None])[0]
    torch.testing.assert_close(frames[31], whole[:, 3098:3202], rtol=0, atol=1e-5)


def test_the_encoder_streams_what_it_was_trained_on(runner: ModelRunner, parts: Parts) -> None:
    """A session would hear otherwise than training did, the start over included."""
    pcm = noise(9 * UNIT_SAMPLES) * 0.1
    frames, _ = stream(parts.front_end, pcm)
    rows = []
    for index, mel in enumerate(frames):
        request = EncodeAudio(mel=mel, slot=1, units=index % 7)
        (heard,) = runner.compute([request])
        assert heard.shape == (10, 192)
        rows.append(heard)
    with torch.inference_mode():
        whole = parts.audio_projection_layer(parts.apm.whole(parts.front_end.whole(pcm[None])))[0]
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-3, atol=1e-4)


def test_units_heard_together_have_the_bits_of_one_alone(runner: ModelRunner) -> None:
    """What a caller says would be heard otherwise on a full server (B8)."""
    requests = [
        EncodeAudio(mel=noise(80, 102 if slot == 0 else 104, seed=slot), slot=slot, units=slot)
        for slot in range(3)
    ]
    one_by_one = [runner.compute([request])[0] for request in requests]
    together = runner.compute(requests)
    assert all(map(torch.equal, together, one_by_one))


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (640, 480, (192, 192, 192)),
        (1280, 720, (192, 256, 448)),
        (1920, 1080, (192, 256, 576)),
        (448, 448, (64, 64, 64)),
        (320, 240, (64, 64, 64)),
    ],
)
def test_slices_are_those_of_the_table(
    width: int, height: int, tokens: tuple[int, int, int]
) -> None:
    """A picture would take more or less of the context than the public code says (model.md)."""
    counts = [SLICING.count(width, height, most) for most in (2, 4, 9)]
    assert tuple(64 * count for count in counts) == tokens
    assert SLICING.count(width, height, 1) == 1


@pytest.mark.parametrize(
    ("width", "height"), [(640, 480), (1280, 720), (1, 900), (900, 1), (3, 2), (448, 448), (60, 61)]
)
@pytest.mark.parametrize("most", [1, 2, 9])
def test_a_picture_of_any_shape_is_cut_into_whole_patches(
    width: int, height: int, most: int
) -> None:
    """An odd picture would fail its unit, or break the context's count."""
    pixels = np.random.default_rng(1).integers(0, 255, (height, width, 3), dtype=np.uint8)
    cut = SLICING.cut(pixels, most)
    assert len(cut) == SLICING.count(width, height, most)
    for each in cut:
        assert each.shape[0] == 3
        assert all(side > 0 and side % 14 == 0 for side in each.shape[1:])
        assert -1.0 <= float(each.min()) <= float(each.max()) <= 1.0
    assert len({each.shape for each in cut[1:]}) <= 1


def test_slices_are_the_picture_row_by_row() -> None:
    """The model would see the parts of a picture in the wrong order."""
    pixels = np.zeros((448, 896, 3), np.uint8)
    pixels[:, 448:] = 255
    whole, left, right = SLICING.cut(pixels, 2)
    assert float(left.mean()) < -0.95
    assert float(right.mean()) > 0.95
    assert whole[:, :, 0].max() < whole[:, :, -1].min()


@pytest.mark.parametrize("size", [(112, 112), (84, 154), (14, 700), (112, 14)])
def test_a_slice_of_any_shape_is_sixty_four_embeddings(
    runner: ModelRunner, size: tuple[int, int]
) -> None:
    """A frame of another size would break the context's count."""
    picture = noise(3, *size).clamp(-1, 1)
    once, again = runner.compute([EncodeImage(picture=picture), EncodeImage(picture=picture)])
    assert once.shape == (64, 192)
    assert torch.equal(once, again)


def test_places_tell_rows_from_columns() -> None:
    """The model could not tell a tall picture from a wide one."""
    places = places_2d(2, 3, torch.zeros(16))  # (6, 16)
    assert places.shape == (6, 16)
    columns, rows = places[:, :8].reshape(2, 3, 8), places[:, 8:].reshape(2, 3, 8)
    assert torch.equal(columns[0], columns[1])
    assert torch.equal(rows[:, 0], rows[:, 2])
    assert not torch.equal(columns[:, 0], columns[:, 1])
    assert not torch.equal(rows[0], rows[1])


def test_patches_of_a_full_slice_have_the_places_of_the_table(parts: Parts) -> None:
    """The published position table would be read at the wrong places."""
    embeddings = parts.vpm.embeddings
    side = embeddings.side
    assert patch_places(side, side, side).tolist() == list(range(side * side))
    assert patch_places(side, 1, side // 2).tolist() == [0, 2, 4, 6]


def test_a_real_photograph_is_read() -> None:
    """No camera's frame would be seen."""
    pixels = simplejpeg.decode_jpeg(FRAME.read_bytes(), colorspace="RGB")
    height, width = pixels.shape[:2]
    assert len(SLICING.cut(pixels, 9)) == SLICING.count(width, height, 9)


# -- speech ---------------------------------------------------------------------------------------


def test_a_chunk_opens_with_its_text_and_the_mark(parts: Parts) -> None:
    """Speech would be conditioned on something else than what is said."""
    tts, hidden = parts.tts, noise(2, 192)
    rows = tts.opening([(5, hidden[0]), (7, hidden[1])])
    table = tts.emb_text.weight
    assert rows.shape == (3, 128)
    assert torch.equal(rows[2], table[tts.config.audio_bos_token_id])
    lengths = (rows[:2] - table[[5, 7]]).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(2), rtol=1e-4, atol=1e-4)
    assert torch.equal(tts.opening([]), rows[2:])


def test_speech_continues_where_its_turn_stopped(runner: ModelRunner, parts: Parts) -> None:
    """Each second of a sentence would begin anew."""
    rows = noise(CODES_A_UNIT, 128)
    with torch.inference_mode():
        whole = parts.tts.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]
        expected = parts.tts.logits(whole)[-1]
    runner.compute([Speak(slot=0, start=0, rows=rows[:20])])
    for index in range(20, CODES_A_UNIT):
        (logits,) = runner.compute([Speak(slot=0, start=index, rows=rows[index : index + 1])])
    torch.testing.assert_close(logits.whole(), expected, rtol=1e-3, atol=1e-4)
