"""Moments that wait until nothing can change them, and come out in the order of their time.

- Each voice is a line, on which its sounds are placed one behind the other (`replay.placing`).
- What the model says can be cut short while it plays, so it is held until it has been heard.
- Whatever comes out begins no earlier than what came out before.

A session in real time holds a second or two. One that was faster than its own sound can hold most
of it, so held PCM lies in a file where it is more than `HELD_BYTES_MAX`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import Final

import attrs

from protocol.model import SAMPLE_BYTES

from ..placing import VOICES, Line, Voice, sample_at, time_of
from .moments import Moment, Note, Sound, Words

HELD_BYTES_MAX: Final = 8 << 20
"""Of PCM in memory: half a minute of both voices; beyond it a temporary file takes them."""


@attrs.define(order=False)
class _Held:
    """A moment; `place` and `length` tell where the PCM of a sound lies."""

    begin_ns: int
    number: int
    until_ns: int
    moment: Moment
    place: int = 0
    length: int = 0

    def __lt__(self, other: _Held) -> bool:
        return (self.begin_ns, self.number) < (other.begin_ns, other.number)


class Holding:
    """The moments that wait; whoever made it closes it."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._count = 0
        self._pcm: SpooledTemporaryFile[bytes] | None = None
        self._pcm_bytes = 0
        self._lines: Final = {voice: Line(voice) for voice in VOICES}

    def close(self) -> None:
        """Let go of the file."""
        if self._pcm is not None:
            self._pcm.close()

    def settled_ns(self, voice: Voice, now_ns: int) -> int:
        """See `Line.settled_ns`."""
        return self._lines[voice].settled_ns(now_ns)

    def sound(self, voice: Voice, at_ns: int, pcm: bytes, *, is_captured: bool = False) -> Sound:
        """Place a sound behind what its voice still says, and hold it.

        Args:
            voice: whose.
            at_ns: when it came.
            pcm: it.
            is_captured: see `Line.place`.

        Returns:
            The sound, so that its words can be placed with it.
        """
        samples = len(pcm) // SAMPLE_BYTES
        line = self._lines[voice]
        begin = line.place(at_ns, samples, is_captured=is_captured)
        if line.moved:
            self._move(voice, line.begin + line.moved, line.moved)
        sound = Sound(voice=voice, at_ns=at_ns, begin=begin, pcm=pcm)
        held = self.add(attrs.evolve(sound, pcm=b""), sound.begin_ns, sound.end_ns)
        held.place, held.length = self._pcm_bytes, len(pcm)
        if self._pcm is None:
            self._pcm = SpooledTemporaryFile(HELD_BYTES_MAX)  # noqa: SIM115 - `close` closes it
        self._pcm.seek(self._pcm_bytes)
        self._pcm.write(pcm)
        self._pcm_bytes += len(pcm)
        return sound

    def add(self, moment: Moment, begin_ns: int, end_ns: int | None = None) -> _Held:
        """Hold a moment; what the model says until it is over, all else until it begins."""
        is_cut = isinstance(moment, Sound | Words) and moment.voice == "model"
        until_ns = end_ns if is_cut and end_ns is not None else begin_ns
        self._count += 1
        held = _Held(begin_ns, self._count, until_ns, moment)
        insort(self._held, held)
        return held

    def _move(self, voice: Voice, begin: int, samples: int) -> None:
        """Move what a voice says from a sample on back by so many."""
        for one in self._held:
            moment = one.moment
            if isinstance(moment, Sound) and moment.voice == voice and moment.begin >= begin:
                one.moment = attrs.evolve(moment, begin=moment.begin - samples)
                one.begin_ns = one.until_ns = one.moment.begin_ns
        self._held.sort()

    def cut(self, at_ns: int) -> None:
        """Let the model say no more of what it was still to say; words of that become a note."""
        held, self._held = self._held, []
        unheard = ""
        for one in held:
            said = isinstance(one.moment, Sound | Words) and one.moment.voice == "model"
            if not said or one.until_ns <= at_ns:
                self._held.append(one)
            elif one.begin_ns < at_ns:
                _shorten(one, at_ns)
                self._held.append(one)
            elif isinstance(one.moment, Words):
                unheard += one.moment.text
        self._lines["model"].cut(at_ns)
        if unheard:
            self.add(Note(begin_ns=at_ns, kind="unheard", text=unheard), at_ns)

    def ready(self, now_ns: int | None) -> Iterator[Moment]:
        """Give what nothing can change any more.

        Args:
            now_ns: nothing that comes from now on begins before it; None: nothing will come.
        """
        count = 0
        for one in self._held:
            if now_ns is not None and one.until_ns > now_ns:
                break
            count += 1
        ready, self._held = self._held[:count], self._held[count:]
        for one in ready:
            yield self._whole(one)
        if not any(one.length for one in self._held):
            self._pcm_bytes = 0

    def _whole(self, held: _Held) -> Moment:
        if not isinstance(held.moment, Sound) or self._pcm is None:
            return held.moment
        self._pcm.seek(held.place)
        return attrs.evolve(held.moment, pcm=self._pcm.read(held.length))


def _shorten(held: _Held, at_ns: int) -> None:
    """End what the model says amid it."""
    moment = held.moment
    if isinstance(moment, Sound):
        held.length = (sample_at("model", at_ns) - moment.begin) * SAMPLE_BYTES
        held.until_ns = time_of("model", sample_at("model", at_ns))
    elif isinstance(moment, Words):
        held.moment, held.until_ns = attrs.evolve(moment, end_ns=at_ns), at_ns
