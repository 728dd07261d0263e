"""What one connection may say: the buckets, with time as a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.net.rates import BURST_S, Rate
from runtime.settings.bounds import BYTES_PER_S_MAX, MESSAGES_PER_S_MAX

UNIT_BYTES = 64_000 * 4 // 3
"""A second of sound: float32, 16 kHz, base64."""
PICTURE_BYTES = 4 * 1024 * 1024 * 4 // 3
"""The largest picture, base64."""

steps = st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 1), st.integers(0, 500)), max_size=30)


@given(steps)
def test_no_more_passes_than_the_burst_and_the_rate(found: list[tuple[float, float, int]]) -> None:
    """A flood would get through by being sent in the right rhythm."""
    rate, now_s, messages, size_bytes = Rate(10, 1000, 1, 0.0), 0.0, 0.0, 0
    for pause_s, cost, size in found:
        now_s += pause_s
        while wait_s := rate.wait_s(now_s):
            now_s += max(wait_s, 0.001)
        rate.take(cost, size)
        messages += cost
        size_bytes += size
        assert messages <= 10 * (BURST_S + now_s) + 1e-6
        assert size_bytes <= 1000 * (BURST_S + now_s) + size + 1e-6


@given(st.floats(0, 1e6), st.floats(0, 100), st.integers(0, 100_000))
def test_after_the_wait_there_is_enough(now_s: float, messages: float, size_bytes: int) -> None:
    """A reader would wake up for nothing, again and again, or sleep too long."""
    rate = Rate(10, 1000, 1, now_s)
    rate.take(messages, size_bytes)
    wait_s = rate.wait_s(now_s)
    left_s = rate.wait_s(now_s + wait_s)
    assert left_s == pytest.approx(0, abs=1e-3)
    if wait_s:
        assert min(rate.messages - 1, rate.size_bytes / 100) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("per_s", "size_bytes"),
    [(1, UNIT_BYTES), (50, UNIT_BYTES // 50), (4, UNIT_BYTES // 4 + PICTURE_BYTES // 2)],
    ids=["units", "20 ms", "pictures"],
)
def test_a_client_in_real_time_never_waits(per_s: int, size_bytes: int) -> None:
    """Sound would arrive late that was sent on time, by the server's own doing."""
    rate = Rate(MESSAGES_PER_S_MAX, BYTES_PER_S_MAX, 24 << 20, 0.0)
    for i in range(600 * per_s):
        now_s = (i - i % per_s) / per_s  # The worst: all of a second at once.
        assert rate.wait_s(now_s) == 0.0
        rate.take(1.0, size_bytes)


def test_one_largest_message_is_never_held_up() -> None:
    """A chat with a video would take minutes on a fast line."""
    rate = Rate(10, 1000, 96 << 20, 0.0)
    rate.take(1.0, 96 << 20)
    assert rate.wait_s(0.0) == 0.0
    rate.take(1.0, 1)
    assert rate.wait_s(0.0) > 0.0


def test_silence_earns_no_more_than_a_burst() -> None:
    """A client that was quiet for an hour could flood the server for a minute."""
    rate = Rate(10, 1000, 1, 0.0)
    assert rate.wait_s(3600.0) == 0.0
    assert rate.messages == 10 * BURST_S
