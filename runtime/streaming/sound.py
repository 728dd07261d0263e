"""The sound of a request, re-cut into whole seconds for the model.

The rest waits for the next sound; before other input, or at the end, it is padded with silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from protocol.values.model import SAMPLE_BYTES, UNIT_BYTES
from protocol.values.turn import Sound

from ..model.backends.base import BackendRefused
from ..model.backends.streams import Part


@attrs.define
class Recut:
    """The sound of one request; `left` is the rest: float32 LE, less than a second."""

    left: bytes = b""

    def cut(self, prompt: Sequence[Part]) -> tuple[Part, ...]:
        """Re-cut sound to whole seconds; `BackendRefused` names a part that is invalid sound."""
        return tuple(piece for place, part in enumerate(prompt) for piece in self._cut(place, part))

    def rest(self) -> tuple[Part, ...]:
        """Take the rest, padded with silence; empty if there is none."""
        left, self.left = self.left, b""
        return (Sound(pcm=left.ljust(UNIT_BYTES, b"\0")),) if left else ()

    def _cut(self, place: int, part: Part) -> Iterator[Part]:
        if not isinstance(part, Sound):
            yield from self.rest()
            yield part
            return
        _check(place, part.pcm)
        pcm = self.left + part.pcm
        whole = len(pcm) - len(pcm) % UNIT_BYTES
        self.left = pcm[whole:]
        if whole:
            yield Sound(pcm=pcm[:whole])


def _check(place: int, pcm: bytes) -> None:
    """Refuse invalid sound while its place is known."""
    if not pcm:
        raise BackendRefused(f"prompt[{place}].pcm has no samples")
    if len(pcm) % SAMPLE_BYTES:
        raise BackendRefused(
            f"prompt[{place}].pcm has {len(pcm) / SAMPLE_BYTES:g} samples: float32 has "
            f"{SAMPLE_BYTES} bytes each"
        )
    if not np.isfinite(np.frombuffer(pcm, "<f4")).all():
        raise BackendRefused(f"prompt[{place}].pcm: a sample is not finite")
