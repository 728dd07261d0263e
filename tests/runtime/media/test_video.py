"""Videos: the right pictures and sound are taken, and no file costs more than its bounds."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.events import MediaDecoded
from protocol.values.limits import VIDEO_BYTES_MAX, VIDEO_S_MAX
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from recorder.format.encoding import RecordEncoder
from recorder.format.format import Record
from recorder.format.mapping import event_record
from runtime.media import video
from runtime.media.values import Decoded, MediaError
from runtime.media.video import PACKETS_MAX, STREAMS_MAX, read_video
from tests.media.videos import (
    GREYS,
    claiming,
    frame_number,
    make_video,
    muxing,
    numbers,
    pixels,
    put,
    steady,
    tone,
    turned,
)

KINDS = {
    "mp4": {"container": "mp4", "codec": "mpeg4", "audio": "aac"},
    "mp4, h264": {"container": "mp4", "codec": "libx264", "audio": "aac"},
    "mov": {"container": "mov", "codec": "libx264", "audio": "pcm_s16le"},
    "webm": {"container": "webm", "codec": "libvpx", "audio": "libopus"},
    "webm, vp9": {"container": "webm", "codec": "libvpx-vp9", "audio": "libopus"},
    "matroska": {"container": "matroska", "codec": "libx264", "audio": "mp3"},
}
DAMAGED = "the video is damaged, or of a kind that is not taken"
SMALL = make_video(steady(12), sound=[(0, 1)])


def make(kind: str, times_ms: list[int], **options: Any) -> bytes:
    return make_video(times_ms, **{**KINDS[kind], **options})


def samples(made: Decoded) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(made.pcm, "<f4")


def reason(data: bytes, stack_frames: int = 1) -> str:
    with pytest.raises(MediaError) as refused:
        read_video(data, stack_frames)
    return refused.value.reason


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_a_second_is_taken(kind: str) -> None:
    """The model would miss what was shown, or see seconds that there are not."""
    made = read_video(make(kind, steady(19, 8)), 1)
    assert numbers(made.pictures) == [0, 8, 16]
    assert made.pcm == b""
    assert made.stacked == ()


@pytest.mark.parametrize(
    ("times_ms", "shown"),
    [
        (steady(20, 15 / 1.001), [0, 14]),  # 15 frames last 1.001 s: at 1 s it is the one before
        (steady(20, 7.5), [0, 7, 15]),
        ([0, 300, 1700, 1900, 2100], [0, 1, 3]),  # a screen that changes at times
        ([0, 2500, 3500], [0, 0, 0, 1]),  # and one that stands still
        ([0], [0]),
    ],
)
def test_what_is_shown_at_each_second_is_taken(times_ms: list[int], shown: list[int]) -> None:
    """A recording of a screen or of an odd camera would be seen at the wrong times."""
    for kind in ("mp4", "matroska"):
        assert numbers(read_video(make(kind, times_ms), 1).pictures) == shown


def test_time_counts_from_the_first_picture() -> None:
    """A part cut from a long recording would be refused as too long, or seen late."""
    made = read_video(make("matroska", steady(19, 8, start_ms=3_600_000)), 1)
    assert numbers(made.pictures) == [0, 8, 16]


@pytest.mark.parametrize(("count", "seconds"), [(30, 1), (31, 2), (60, 2)])
def test_a_rounded_time_begins_no_second(count: int, seconds: int) -> None:
    """Each web recording of whole seconds would cost the tokens of one more."""
    assert len(read_video(make("webm", steady(count, 30)), 1).pictures) == seconds


def test_other_pictures_lie_side_by_side() -> None:
    """The model would see the movement of a second in the wrong order, or not at all."""
    made = read_video(make("mp4", steady(25)), 5)
    assert numbers(made.pictures) == [0, 10, 0]
    square = pixels(made.stacked[0])
    assert square.shape == (2 * 48 + 6, 2 * 64 + 6, 3)
    cells = [square[y : y + 48, x : x + 64] for y in (0, 54) for x in (0, 70)]
    assert [frame_number(cell) for cell in cells] == [2, 4, 6, 8]
    assert square[48:54].max() < 30
    assert [len(made.stacked), pixels(made.stacked[2]).shape] == [3, (2 * 48 + 6, 64, 3)]


@pytest.mark.parametrize(
    ("stack_frames", "shape"), [(2, (48, 64)), (3, (102, 64)), (4, (156, 64)), (5, (102, 134))]
)
def test_pictures_lie_as_square_as_they_can(stack_frames: int, shape: tuple[int, int]) -> None:
    """The model would be shown another layout than it has learned."""
    made = read_video(make("mp4", steady(10)), stack_frames)
    assert pixels(made.stacked[0]).shape[:2] == shape


def test_a_last_second_may_have_no_others() -> None:
    """A video that ends just after a second would show its last picture twice."""
    made = read_video(make("mp4", steady(11)), 2)
    assert (numbers(made.pictures), numbers(made.stacked)) == ([0, 10], [5])


def test_pictures_of_other_shapes_are_fitted_on_white() -> None:
    """A recording whose window was resized would be torn."""
    wide, high = np.zeros((40, 80, 3), np.uint8), np.zeros((80, 40, 3), np.uint8)
    whole = video.stack([wide, high])
    assert whole.shape == (166, 80, 3)
    assert whole[:20].min() == 255
    assert whole[20:60].max() == 0
    assert whole[86:, :20].min() == 255
    assert whole[86:, 20:60].max() == 0


def test_large_pictures_are_scaled_down() -> None:
    """A 4K video would take megabytes a second that the model never sees."""
    made = read_video(make("mp4", steady(10, 5), size=(2560, 1440)), 5)
    assert pixels(made.pictures[0]).shape == (1080, 1920, 3)
    assert max(pixels(made.stacked[0]).shape) <= 1920
    assert numbers(made.pictures) == [0, 5]


def test_a_video_that_was_filmed_upright_is_turned() -> None:
    """Each video of a phone would be seen lying on its side."""
    video = make("mp4", steady(3), size=(64, 32), right_grey=230)
    lying, upright = (pixels(read_video(data, 1).pictures[0]) for data in (video, turned(video)))
    assert (lying.shape, upright.shape) == ((32, 64, 3), (64, 32, 3))
    assert upright[:24].mean() < 60
    assert upright[-24:].mean() > 200


# -- sound ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sound_is_heard_when_it_is_seen(kind: str) -> None:
    """What is said would come before or after what is shown, at another pitch or loudness."""
    made = read_video(make(kind, steady(25), sound=[(0, 2.5)]), 1)
    pcm = samples(made)
    assert len(pcm) == 3 * 16_000
    assert np.abs(pcm - tone(3, 16_000))[1_000:39_000].max() < 0.05
    assert np.abs(pcm[42_000:]).max() == 0


@pytest.mark.parametrize("kind", ["mp4", "webm", "matroska"])
def test_a_track_may_begin_late_and_have_gaps(kind: str) -> None:
    """After the first muted second, all that is said would be heard too early."""
    sound = [(5.5, 6.2), (7.0, 7.9)]
    pcm = samples(read_video(make(kind, steady(30, start_ms=5_000), sound=sound), 1))
    loud = np.flatnonzero(np.abs(pcm) > 0.1)
    gap = int(np.diff(loud).argmax())
    edges = np.array([loud[0], loud[gap], loud[gap + 1], loud[-1]])
    wanted = np.array([0.5, 1.2, 2.0, 2.9]) * 16_000
    assert np.abs(edges - wanted).max() < 800  # an encoder's own block


def test_sound_is_cut_to_the_pictures() -> None:
    """A track that is longer than its pictures would be heard beside no picture."""
    pcm = samples(read_video(make("mp4", steady(10), sound=[(0, 5)]), 1))
    assert len(pcm) == 16_000
    early = make("matroska", steady(10, start_ms=2_000), sound=[(0, 2)])
    assert np.abs(samples(read_video(early, 1))).max() < 0.01


# -- refusals -------------------------------------------------------------------------------------


def test_a_video_that_is_too_long_is_refused() -> None:
    """An hour's film would be decoded before it is refused."""
    assert reason(make("mp4", steady(66, 1))) == "the video lasts more than 64 s"
    assert len(read_video(make("mp4", steady(64, 1)), 1).pictures) == 64
    last = put(SMALL, b"stts", 16, struct.pack(">I", 0x7FFFFFFF))
    assert reason(last) == "the video lasts more than 64 s"


def test_what_holds_no_video_is_refused() -> None:
    """A song, or a text that was renamed, would be answered as an empty video."""
    with muxing("mp4") as (out, file):
        out.add_stream("aac", rate=48_000)
        out.start_encoding()
    assert reason(file.getvalue()) == "the video holds no pictures"
    assert reason(b"#EXTM3U\nhttp://x/y.ts\n") == (
        "the video is not of MP4, QuickTime, Matroska or WebM"
    )
    assert reason(bytes(VIDEO_BYTES_MAX + 1)) == f"the video has more than {VIDEO_BYTES_MAX} bytes"


def test_a_rare_codec_is_refused() -> None:
    """Decoders that nobody looks after would be open to whoever finds a hole in one."""
    refused = reason(make("matroska", steady(3), codec="ffv1"))
    assert refused == "the video is of a codec that is not taken"


def test_many_streams_are_refused() -> None:
    """A small file of a thousand streams would take memory for each."""
    with muxing("matroska") as (out, file):
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(STREAMS_MAX):
            out.add_stream("pcm_s16le", rate=48_000)
        out.start_encoding()
    assert reason(file.getvalue()) == DAMAGED


def test_huge_pictures_are_refused() -> None:
    """A small file would make the decoder allocate gigabytes."""
    strip = make("mp4", steady(2), size=(3200, 32))
    assert reason(strip) == "the video's pictures have sides of more than 50 to 1"
    vp8 = make("webm", steady(1))
    key = vp8.index(b"\x9d\x01\x2a") + 3
    bomb = vp8[:key] + struct.pack("<HH", 16_383, 16_383) + vp8[key + 4 :]
    assert reason(bomb) == DAMAGED


def test_pictures_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A video of noise would fill the log and the memory with its pictures."""
    monkeypatch.setattr(video, "PICTURES_BYTES_MAX", 1_000)
    assert reason(SMALL) == "the video's pictures have more than 1000 bytes"


def test_the_largest_answer_fits_a_record_of_the_log() -> None:
    """A long video of noise would be answered, and cost the session its recording."""
    sizes = [video.PICTURES_BYTES_MAX // (2 * VIDEO_S_MAX)] * VIDEO_S_MAX
    noise = np.random.default_rng(0)
    event = MediaDecoded(
        at_ns=1,
        media=0,
        pcm=noise.bytes(VIDEO_S_MAX * INPUT_RATE_HZ * SAMPLE_BYTES),
        pictures=tuple(map(noise.bytes, sizes)),
        stacked=tuple(map(noise.bytes, sizes)),
    )
    assert sum(map(len, event.pictures + event.stacked)) == video.PICTURES_BYTES_MAX
    kind, fields = event_record(event)
    framed = RecordEncoder().encode(Record(kind=kind, seq=1, at_ns=1, fields=fields))
    assert framed.framed_bytes > video.PICTURES_BYTES_MAX


@pytest.mark.parametrize("name", ["PACKETS_MAX", "FRAMES_MAX"])
def test_packets_and_frames_are_counted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file of a million empty frames would keep a core busy until its time is up."""
    assert PACKETS_MAX > 64 * 60
    monkeypatch.setattr(video, name, 5)
    assert reason(SMALL).endswith(f"more than 5 {name.partition('_')[0].lower()}")


def test_broken_packets_refuse_a_video() -> None:
    """Half of a video would be answered as if it were the whole."""
    at = SMALL.index(b"mdat") + 4
    assert reason(SMALL[:at] + bytes(2_000) + SMALL[at + 2_000 :]) == DAMAGED
    assert reason(SMALL[: len(SMALL) // 2]) == DAMAGED


def test_the_same_bytes_give_the_same_answer() -> None:
    """A recording could not be replayed."""
    assert read_video(SMALL, 3) == read_video(SMALL, 3)


SEEDS = [
    SMALL,
    make("webm", steady(5), sound=[(0, 0.4)]),
    make("matroska", steady(5), sound=[(0, 0.4)]),
]


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(-1_500, 1_500), st.binary(min_size=1, max_size=5)), max_size=4),
    st.integers(0, 50_000),
    st.integers(1, 5),
)
def test_no_garbage_crashes_the_decoder(
    data: bytes, damage: list[tuple[int, bytes]], end: int, stack_frames: int
) -> None:
    """A damaged upload would end the session with an internal error."""
    data = data[:end]
    for place, piece in damage:
        at = place % max(len(data), 1)
        data = data[:at] + piece + data[at + len(piece) :]
    with contextlib.suppress(MediaError):
        made = read_video(data, stack_frames)
        assert 1 <= len(made.pictures) <= 64
        assert len(made.pcm) in (0, len(made.pictures) * 64_000)
        assert len(made.pictures) - 1 <= len(made.stacked) + len(made.pictures) * (stack_frames < 2)


def test_the_greys_tell_frames_apart() -> None:
    """These tests would pass whatever is shown."""
    assert [frame_number(np.full((4, 4, 3), grey, np.uint8)) for grey in GREYS] == [*range(20)]
    assert claiming(SMALL, 9) != SMALL
