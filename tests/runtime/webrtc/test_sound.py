"""The sound of a call is whole and in real time, whatever the network does to its packets."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import pytest

pytest.importorskip("aiortc")

from av import AudioFrame, CodecContext

from runtime.webrtc.sound import (
    CLOCK_HZ,
    FRAME_BYTES,
    HELD_MAX,
    HOLD_S,
    RATE_HZ,
    JitterBuffer,
    Playout,
)

PACKET: Final = CLOCK_HZ // 50
SECONDS: Final = 20


def packets(seconds: float, hz: float = 440) -> list[bytes]:
    """A tone as packets of Opus, 20 ms each."""
    encoder: Any = CodecContext.create("libopus", "w")
    encoder.sample_rate, encoder.layout, encoder.format = CLOCK_HZ, "mono", "s16"
    made = []
    for number in range(int(seconds * 50)):
        at = (np.arange(PACKET) + number * PACKET) / CLOCK_HZ
        frame = AudioFrame(format="s16", layout="mono", samples=PACKET)
        frame.planes[0].update((8000 * np.sin(2 * np.pi * hz * at)).astype("<i2").tobytes())
        frame.sample_rate, frame.pts = CLOCK_HZ, number * PACKET
        made += [bytes(it) for it in encoder.encode(frame)]
    return made


def heard(
    delays: list[float | None], *, start: int = 0, drift: float = 1.0, until_s: float = 0
) -> tuple[np.ndarray[Any, Any], JitterBuffer]:
    """What comes of packets with these delays, in seconds; None: it is lost."""
    intake, sent = JitterBuffer(), packets(len(delays) / 50)
    coming = sorted(
        (n * 0.02 * drift + delay, n) for n, delay in enumerate(delays) if delay is not None
    )
    made, at_s = bytearray(), 0.0
    while at_s < (until_s or len(delays) * 0.02 * drift + 0.2):
        while coming and coming[0][0] <= at_s:
            came_s, number = coming.pop(0)
            intake.add((start + number * PACKET) % 2**32, sent[number], came_s)
        made += intake.take(at_s)
        at_s += 0.04
    return np.frombuffer(bytes(made), "<i2"), intake


def loud_share(samples: np.ndarray[Any, Any]) -> float:
    pieces = samples[: len(samples) // 240 * 240].reshape(-1, 240)
    return float((np.abs(pieces).max(axis=1) > 3000).mean())


@pytest.mark.parametrize("start", [0, 2**32 - 50 * PACKET])
def test_sound_comes_as_it_was_sent(start: int) -> None:
    """The RTP time begins anywhere, and wraps around."""
    samples, intake = heard([0.01] * 50 * 4, start=start)
    assert abs(len(samples) / RATE_HZ - 4) < 0.1 + HOLD_S
    assert loud_share(samples[: 39 * RATE_HZ // 10]) > 0.99
    assert intake.losses.late == 0
    assert intake.losses.filled_ms < 250, "only after the last packet"


def test_two_percent_that_are_lost_cost_two_percent() -> None:
    """The library's own buffer leaves out five packets for each."""
    draw = random.Random(1)
    delays = [None if draw.random() < 0.02 else 0.01 for _ in range(50 * SECONDS)]
    samples, intake = heard(delays)
    lost = delays.count(None)
    assert 10 < lost < 30
    assert lost * 20 <= intake.losses.filled_ms <= lost * 20 + 200
    assert loud_share(samples) > 1 - 1.3 * lost / len(delays) - 0.01
    assert abs(len(samples) / RATE_HZ - SECONDS) < 0.2


def test_jitter_below_the_hold_costs_nothing() -> None:
    """Packets overtake each other in every mobile network."""
    draw = random.Random(2)
    samples, intake = heard([draw.uniform(0, 0.045) for _ in range(50 * SECONDS)])
    assert intake.losses.late <= 3, "only at first, where the earliest is not known"
    assert loud_share(samples) > 0.98


def test_a_silence_that_is_not_sent_takes_its_time() -> None:
    """A session would hear the next word at the end of the last one (DTX)."""
    delays: list[float | None] = [0.01] * 100
    delays[30:80] = [0.01 if n % 20 == 0 else None for n in range(50)]
    samples, intake = heard(delays)
    assert abs(len(samples) / RATE_HZ - 2) < 0.2
    assert 800 < intake.losses.filled_ms < 1200


@pytest.mark.parametrize("drift", [0.999, 1.001])
def test_clocks_that_differ_lose_nothing(drift: float) -> None:
    """After a minute a browser's clock is 60 ms away."""
    samples, intake = heard([0.01] * 50 * 90, drift=drift)
    assert intake.losses.late < 5
    assert loud_share(samples) > 0.99


def test_a_flood_of_packets_is_bounded() -> None:
    """A client sends the future: memory would grow without an end."""
    intake, (payload, *_) = JitterBuffer(), packets(0.02)
    for number in range(10 * HELD_MAX):
        intake.add(number * PACKET, payload, 0.0)
    assert intake.losses.late >= 9 * HELD_MAX


def test_time_that_did_not_pass_is_not_made() -> None:
    """Some packets of made-up times made minutes of silence, over and over."""
    intake, (payload, *_) = JitterBuffer(), packets(0.02)
    at, made = 0, 0
    for number in range(500):
        at += [9 * CLOCK_HZ, CLOCK_HZ // 2, PACKET][number % 3]
        intake.add(at % 2**32, payload, number * 0.001)
        made += len(intake.take(number * 0.001 + HOLD_S))
    assert made / 2 / RATE_HZ < 2


def test_packets_that_overlap_do_not_deafen() -> None:
    """What is overtaken was kept for ever, until nothing else had a place."""
    intake, (payload, *_) = JitterBuffer(), packets(0.02)
    for number in range(3 * HELD_MAX):
        intake.add(number * PACKET // 2, payload, number * 0.01)
        intake.take(number * 0.01)
    assert len(intake._held) < 20


def test_what_is_no_opus_is_silence() -> None:
    """A client's bytes would end the call of another, or the door."""
    intake, draw = JitterBuffer(), random.Random(3)
    for number in range(100):
        intake.add(number * PACKET, draw.randbytes(draw.randrange(1, 200)), number * 0.02)
    samples = intake.take(2.06)
    assert 1.5 < len(samples) / 2 / RATE_HZ < 3.5


def test_what_is_cut_says_how_much_was_played() -> None:
    """A session would remember words that nobody heard."""
    voice = Playout()
    voice.play("item_a", "r", bytes(FRAME_BYTES * 2))
    voice.play("item_b", "r", bytes(FRAME_BYTES * 50))
    for _ in range(4):
        assert len(voice._piece()) == FRAME_BYTES
    assert voice.waiting_s == pytest.approx(0.96)
    assert voice.cut() == [("item_b", 40)]
    assert not voice.response
    assert voice._piece() == bytes(FRAME_BYTES)
