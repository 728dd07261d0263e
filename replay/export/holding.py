"""Moments that wait until they are final, and come out in the order of their time.

Each voice is a line of sounds (`runtime.measures.placing`). The model's sound can be cut short
while it plays, so it is held until it has been heard. A session in real time holds a second or two;
one that was faster than its own sound can hold most of it, so PCM above `HELD_BYTES_MAX` lies in a
file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from tempfile import SpooledTemporaryFile
from typing import Final

import attrs

from protocol.values.model import SAMPLE_BYTES
from runtime.measures.placing import VOICES, Line, Sound, Stretch, Voice, sample_at, time_of

from .moments import Moment, Note, Words

HELD_BYTES_MAX: Final = 8 << 20
"""Of PCM in memory: half a minute of both voices; more goes to a temporary file."""


@attrs.define(order=False)
class _Held:
    begin_ns: int
    number: int
    until_ns: int
    moment: Moment
    place: int = 0
    length: int = 0
    moved: int = 0
    stretch: Stretch | None = None

    def __lt__(self, other: _Held) -> bool:
        return (self.begin_ns, self.number) < (other.begin_ns, other.number)


class Holding:
    """The moments that wait; its owner closes it.

    The user's sounds have their own queue: those of a stretch move together and keep their order.
    All others are in a heap.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._user: deque[_Held] = deque()
        self._count = self._model_sounds = 0
        self._pcm: SpooledTemporaryFile[bytes] | None = None
        self._pcm_bytes = 0
        self._lines: Final = {voice: Line(voice) for voice in VOICES}

    def close(self) -> None:
        """Close the file."""
        if self._pcm is not None:
            self._pcm.close()

    def settled_ns(self, voice: Voice, now_ns: int) -> int:
        """See `Line.settled_ns`."""
        return self._lines[voice].settled_ns(now_ns)

    def sound(
        self,
        voice: Voice,
        at_ns: int,
        pcm: bytes,
        *,
        is_captured: bool = False,
        response_id: str = "",
    ) -> Sound:
        """Hold a sound, placed after its voice's earlier sound; `is_captured` as in `place`."""
        samples = len(pcm) // SAMPLE_BYTES
        line = self._lines[voice]
        begin = line.place(at_ns, samples, is_captured=is_captured)
        sound = Sound(voice=voice, at_ns=at_ns, begin=begin, pcm=pcm, response_id=response_id)
        held = self._new(attrs.evolve(sound, pcm=b""), sound.begin_ns, sound.end_ns)
        held.place, held.length = self._pcm_bytes, len(pcm)
        if voice == "user":
            held.stretch, held.moved = line.stretch, line.stretch.moved
            self._user.append(held)
        else:
            self._model_sounds += 1
            heappush(self._held, held)
        if self._pcm is None:
            self._pcm = SpooledTemporaryFile(HELD_BYTES_MAX)  # noqa: SIM115 - `close` closes it
        self._pcm.seek(self._pcm_bytes)
        self._pcm.write(pcm)
        self._pcm_bytes += len(pcm)
        return sound

    def add(self, moment: Moment, begin_ns: int, end_ns: int | None = None) -> None:
        """Hold a moment; the model's until it is over, all others until they begin."""
        heappush(self._held, self._new(moment, begin_ns, end_ns))

    def _new(self, moment: Moment, begin_ns: int, end_ns: int | None) -> _Held:
        is_cut = isinstance(moment, Sound | Words) and moment.voice == "model"
        until_ns = end_ns if is_cut and end_ns is not None else begin_ns
        self._count += 1
        return _Held(begin_ns, self._count, until_ns, moment)

    def _first(self) -> _Held | None:
        if not self._user:
            return self._held[0] if self._held else None
        heard = self._user[0]
        _move_back(heard)
        return heard if not self._held or heard < self._held[0] else self._held[0]

    def cut(self, at_ns: int) -> None:
        """Drop the model's sound and words after this time; dropped words become a note."""
        held, self._held = sorted(self._held), []
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
            else:
                self._model_sounds -= 1
        self._lines["model"].cut(at_ns)
        if unheard:
            self.add(Note(begin_ns=at_ns, kind="unheard", text=unheard), at_ns)

    def ready(self, now_ns: int | None) -> Iterator[Moment]:
        """Yield the final moments: later ones begin at `now_ns` or after; None: no more come."""
        while (one := self._first()) is not None and (now_ns is None or one.until_ns <= now_ns):
            if one.stretch is not None:
                self._user.popleft()
            else:
                heappop(self._held)
                self._model_sounds -= isinstance(one.moment, Sound)
            yield self._whole(one)
        if not self._user and not self._model_sounds:
            self._pcm_bytes = 0

    def _whole(self, held: _Held) -> Moment:
        if not isinstance(held.moment, Sound) or self._pcm is None:
            return held.moment
        self._pcm.seek(held.place)
        return attrs.evolve(held.moment, pcm=self._pcm.read(held.length))


def _move_back(held: _Held) -> None:
    if held.stretch is None or not isinstance(held.moment, Sound):
        return
    samples, held.moved = held.stretch.moved - held.moved, held.stretch.moved
    if samples:
        held.moment = attrs.evolve(held.moment, begin=held.moment.begin - samples)
        held.begin_ns = held.until_ns = held.moment.begin_ns


def _shorten(held: _Held, at_ns: int) -> None:
    moment = held.moment
    if isinstance(moment, Sound):
        held.length = (sample_at("model", at_ns) - moment.begin) * SAMPLE_BYTES
        held.until_ns = time_of("model", sample_at("model", at_ns))
    elif isinstance(moment, Words):
        held.moment, held.until_ns = attrs.evolve(moment, end_ns=at_ns), at_ns
