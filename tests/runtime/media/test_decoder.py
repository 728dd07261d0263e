"""Media: each kind goes to its decoder, off the event loop, a bounded number at a time."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import simplejpeg
import soundfile

from protocol.values.effects import DecodeMedia, MediaKind
from protocol.values.limits import FRAME_PIXELS_MAX
from runtime.media.decoder import (
    PIXELS_WAITING_MAX,
    PROCESSES_MAX,
    WORKERS_MAX,
    Client,
    MediaDecoder,
    decode_at_once,
)
from runtime.media.image import SMALL_PIXELS, decode_jpeg
from runtime.media.values import Decoded, MediaError
from runtime.media.video import read_video
from runtime.media.voices import VoiceLibrary
from tests.fairness.heavy_pictures import heavy_jpeg
from tests.media.videos import make_video, steady
from tests.project.sampling import ONE_LOOP

pytestmark = pytest.mark.anyio

JPEG = bytes(simplejpeg.encode_jpeg(np.zeros((48, 64, 3), np.uint8)))
MP4 = make_video(steady(12), sound=[(0, 1)])


def make_wav(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(seconds * 16_000), np.float32), 16_000, format="WAV")
    return file.getvalue()


def effect(kind: MediaKind, data: bytes, **fields: int) -> DecodeMedia:
    return DecodeMedia(media=0, kind=kind, data=data, **fields)


async def decode(kind: MediaKind, data: bytes, **fields: int) -> Decoded:
    return await MediaDecoder().decode(effect(kind, data, **fields), Client())


async def test_each_kind_becomes_what_the_model_takes(tmp_path: Path) -> None:
    """A picture would be heard, or a voice not found."""
    (tmp_path / "anna.wav").write_bytes(make_wav(1))
    decoder = MediaDecoder(VoiceLibrary(tmp_path))
    second = Decoded(pcm=bytes(64_000))
    made = {
        ("jpeg", JPEG): Decoded(),
        ("wav", make_wav(1)): second,
        ("voice", b"anna"): second,
        ("image", JPEG): Decoded(pictures=(JPEG,)),
        ("audio", make_wav(1)): second,
    }
    for (kind, data), decoded in made.items():
        assert await decoder.decode(effect(kind, data), Client()) == decoded  # type: ignore[arg-type]
    asked = effect("audio", bytes(96_000), rate_hz=24_000)
    assert await decoder.decode(asked, Client()) == second


async def test_a_video_is_decoded_the_same_in_a_process_and_here() -> None:
    """A replay or a test would see another video than the session did."""
    asked = effect("video", MP4, stack_frames=3)
    made = await MediaDecoder().decode(asked, Client())
    assert made == MediaDecoder().decode_here(asked) == read_video(MP4, 3)
    assert (len(made.pictures), len(made.stacked), len(made.pcm)) == (2, 1, 128_000)


@pytest.mark.costly
@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("kind", ["wav", "audio"])
async def test_a_packed_sound_is_decoded_the_same_in_a_process_and_here(kind: MediaKind) -> None:
    """A decoder that a stranger's file breaks would take the server with it."""
    file = io.BytesIO()
    sound = 0.5 * np.sin(np.arange(24_000) / 9)
    soundfile.write(file, sound, 24_000, format="OGG", subtype="VORBIS")
    asked = effect(kind, file.getvalue())
    decoder, client = MediaDecoder(), Client()
    assert await decoder.decode(asked, client) == decoder.decode_here(asked)
    assert decoder._processes._clients[client].finish_s > 0.01
    with pytest.raises(MediaError, match="sound file that is taken, or is damaged"):
        await decoder.decode(effect(kind, file.getvalue()[:99]), client)


async def test_decodes_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session on the server would stand still while one frame decodes."""
    threads: set[int] = set()

    def note(data: bytes) -> bytes:
        threads.add(threading.get_ident())
        return decode_jpeg(data)

    monkeypatch.setattr("runtime.media.decoder.decode_jpeg", note)
    assert await decode("jpeg", JPEG) == Decoded()
    assert threads
    assert threading.get_ident() not in threads


def test_only_what_is_quickly_proven_is_decoded_on_the_event_loop() -> None:
    """A large picture would hold all sessions up, and a damaged small one would be believed."""
    small = bytes(simplejpeg.encode_jpeg(np.zeros((480, 640, 3), np.uint8)))
    noise = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)
    assert decode_at_once(effect("jpeg", small)) == Decoded()
    tall = np.zeros((488, 640, 3), np.uint8)
    scans = small.replace(b"\xff\xda", b"\xff\xfe\x00\x04\xff\xda\xff\xda", 1)
    for data in (simplejpeg.encode_jpeg(tall), simplejpeg.encode_jpeg(noise, quality=95), scans):
        assert decode_at_once(effect("jpeg", bytes(data))) is None
    assert decode_at_once(effect("image", small)) is None
    for damaged in (small[: len(small) // 2], b"\xff\xd8" + b"\xff\xda"):
        with pytest.raises(MediaError):
            decode_at_once(effect("jpeg", damaged))


async def test_bounds_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of frames would take every core from the model."""
    lock, full = threading.Lock(), threading.Barrier(WORKERS_MAX)
    running = most = 0

    def slow(_: bytes) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(timeout=10)  # Passes only in groups of `WORKERS_MAX`.
        with lock:
            running -= 1
        return b""

    monkeypatch.setattr("runtime.media.decoder.decode_voice", slow)
    decoder = MediaDecoder()
    async with anyio.create_task_group() as tasks:
        for _ in range(3 * WORKERS_MAX):
            tasks.start_soon(decoder.decode, effect("wav", b""), Client())
    assert most == WORKERS_MAX


async def test_bounds_its_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of videos would take all memory, and no frame would be looked at meanwhile."""
    running = most = 0
    begun, go_on = anyio.Event(), anyio.Event()

    async def slow(*_: Any) -> Decoded:
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun.set()
        await go_on.wait()
        running -= 1
        return Decoded()

    monkeypatch.setattr("runtime.media.decoder.decode_in_process", slow)
    decoder = MediaDecoder()
    async with anyio.create_task_group() as tasks:
        for _ in range(3 * PROCESSES_MAX):
            tasks.start_soon(decoder.decode, effect("video", b""), Client(is_live=False))
        await begun.wait()
        assert await decoder.decode(effect("jpeg", JPEG), Client()) == Decoded()
        go_on.set()
    assert most == PROCESSES_MAX


async def test_bounds_the_pictures_that_a_session_has_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that shows more than is decoded would wait for ever, and take all memory."""
    go_on = threading.Event()

    def slow(_: bytes) -> bytes:
        assert go_on.wait(timeout=30)
        return b""

    monkeypatch.setattr("runtime.media.decoder.decode_jpeg", slow)
    decoder, client, refused = MediaDecoder(), Client(), list[str]()
    frame = effect("jpeg", heavy_jpeg())

    async def show(whose: Client) -> None:
        try:
            await decoder.decode(frame, whose)
        except MediaError as error:
            refused.append(error.reason)

    async with anyio.create_task_group() as tasks:
        for _ in range(1 + PIXELS_WAITING_MAX // FRAME_PIXELS_MAX + 2):  # The first has begun.
            tasks.start_soon(show, client)
        tasks.start_soon(show, Client())
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert refused == ["more than 480 megapixels of this session would wait to be decoded"] * 2


async def test_tiny_pictures_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million pictures of one pixel wait as well as one of a million."""
    monkeypatch.setattr("runtime.media.decoder.PIXELS_WAITING_MAX", 10 * SMALL_PIXELS)
    decoder, client = MediaDecoder(), Client()
    results = list[bool]()

    async def show() -> None:
        try:
            results.append(await decoder.decode(effect("jpeg", JPEG), client) == Decoded())
        except MediaError:
            results.append(False)

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(show)
    assert 0 < sum(results) < 50


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_session_is_charged_the_processor_time_that_it_took(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """A session would come behind others because its thread waited, or not though it worked."""

    def work(_: bytes) -> bytes:
        began_s = time.thread_time()
        while is_busy and time.thread_time() < began_s + 0.2:
            pass
        if not is_busy:
            time.sleep(0.2)
        raise MediaError("it is damaged")

    monkeypatch.setattr("runtime.media.decoder.decode_jpeg", work)
    decoder, client = MediaDecoder(), Client()
    with pytest.raises(MediaError):
        await decoder.decode(effect("jpeg", JPEG), client)
    used_s = decoder._work._clients[client].finish_s
    assert used_s >= 0.2 if is_busy else used_s < 0.1


async def test_a_video_is_charged_the_time_of_its_process() -> None:
    """Who sends videos one after the other would come before those who sent none."""
    decoder, client = MediaDecoder(), Client(is_live=False)
    await decoder.decode(effect("video", MP4), client)
    assert decoder._processes._clients[client].finish_s > 0.01


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jpeg", "the image is not a JPEG, or is damaged"),
        ("wav", "the audio is not a sound file that is taken, or is damaged"),
        ("voice", "there is no voice of that name"),
        ("image", "the image is not a JPEG, or is damaged"),
        ("audio", "the audio is not a sound file that is taken, or is damaged"),
        ("video", "the video is not of MP4, QuickTime, Matroska or WebM"),
    ],
)
async def test_tells_what_is_wrong(kind: MediaKind, reason: str) -> None:
    """A client would lose its session, or be shown a library's error, over one bad file."""
    with pytest.raises(MediaError) as refused:
        await decode(kind, b"\xff\xd8\xff\xe0 and so on")
    assert refused.value.reason == reason


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_starting_does_not_load_the_video_library() -> None:
    """Every start would take longer, for what most servers are never sent."""
    code = "import sys, runtime.serve.serving; print('av' in sys.modules)"
    made = await anyio.run_process([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert made.stdout.split() == [b"False"]
