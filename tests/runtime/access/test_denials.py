"""Who was denied: counted, and told at a bounded rate."""

from __future__ import annotations

import logging

import pytest

from runtime.access.gate import LINES_MAX, WINDOW_S, Denials


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_is_counted_by_its_reason() -> None:
    """An operator would not see that somebody guesses keys, or that a client has an old one."""
    denials = Denials(Clock())
    assert denials.counts == {}
    for reason, times in (("wrong_key", 3), ("scope", 1)):
        for _ in range(times):
            denials.note(reason, peer="192.0.2.7", asked="HTTP")  # type: ignore[arg-type]
    assert denials.counts == {"wrong_key": 3, "scope": 1}


def test_a_line_says_who_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """An operator would see a number rise, and not from where."""
    caplog.set_level(logging.INFO, "antiphon.access")
    denials = Denials(Clock())
    denials.note("no_key", peer="192.0.2.7", asked="WebSocket")
    denials.note("mode", peer="::1", asked="WebSocket", name="anna")
    assert [record.getMessage() for record in caplog.records] == [
        "denied WebSocket to 192.0.2.7: no_key",
        "denied WebSocket to ::1 (key anna): mode",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_crowd_fills_no_disk(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever knocks all day would fill the disk on which recordings lie."""
    caplog.set_level(logging.INFO, "antiphon.access")
    clock = Clock()
    denials = Denials(clock)
    for knocked in range(10 * LINES_MAX):
        clock.now_s = knocked * WINDOW_S / (10 * LINES_MAX)
        denials.note("wrong_key", peer="192.0.2.7", asked="HTTP")
    assert len(caplog.records) == LINES_MAX
    clock.now_s = WINDOW_S
    denials.note("host", peer="192.0.2.8", asked="HTTP")
    assert [record.getMessage() for record in caplog.records[LINES_MAX:]] == [
        f"{9 * LINES_MAX} further denials were not logged",
        "denied HTTP to 192.0.2.8: host",
    ]
    assert denials.counts == {"wrong_key": 10 * LINES_MAX, "host": 1}
