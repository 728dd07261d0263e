"""The sound of a request, re-cut into the whole seconds that a model hears.

Sound of any length is taken, and how it was split makes no difference. What is left over waits for
the sound that follows. Where something else follows, or nothing, it is filled up with silence, as
at the end of an utterance (`protocol.transcription`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from protocol.model import SAMPLE_BYTES, UNIT_BYTES
from protocol.turn import Sound

from ..backends.base import BackendRefused
from ..backends.streams import Part


@attrs.define
class Recut:
    """The sound of one request.

    Attributes:
        left: what completes no second yet; float32 LE, less than a second of it.
    """

    left: bytes = b""

    def cut(self, prompt: Sequence[Part]) -> tuple[Part, ...]:
        """Re-cut a chunk's prompt.

        Returns:
            The parts with sound of whole seconds only; none, where all of it waits.

        Raises:
            BackendRefused: a part is no sound; the text names it.
        """
        return tuple(piece for place, part in enumerate(prompt) for piece in self._cut(place, part))

    def rest(self) -> tuple[Part, ...]:
        """Take what is left, filled up with silence; nothing is left where there is none."""
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
    """Refuse what is no sound here, where its place is still known."""
    if not pcm:
        raise BackendRefused(f"prompt[{place}].pcm has no samples")
    if len(pcm) % SAMPLE_BYTES:
        raise BackendRefused(
            f"prompt[{place}].pcm has {len(pcm) / SAMPLE_BYTES:g} samples: float32 has "
            f"{SAMPLE_BYTES} bytes each"
        )
    if not np.isfinite(np.frombuffer(pcm, "<f4")).all():
        raise BackendRefused(f"prompt[{place}].pcm: a sample is not finite")
