"""The streaming mel front end: one second of sound to the encoder's mel frames.

It equals the public front end, which recomputes the whole buffer each second, but computes only new
frames. Its rules (model.md, "audio"):

- The first unit is padded on the left to 1035 ms; from then on 80 samples wait for the next unit.
- Frames are 10 ms apart and centred. A unit has 100 frames, plus 2 on each side for the
  convolutions (none before the first): 102 frames, then 104.
- The floor: none below 5 s of buffer, then the buffer's maximum minus 8 (80 dB).
- The buffer holds at most 30 s: then its oldest 10 s are dropped, and its new edge is mirrored.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.audio_utils import mel_filter_bank

from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES

FFT: Final = 400
HOP: Final = 160
EDGE: Final = FFT // 2
FIRST_SAMPLES: Final = 16_560
"""The first unit, padded: 1035 ms."""
WAITING: Final = 80
"""Samples that wait for the next unit, since the front end takes whole hops."""
CORE: Final = 100
"""A unit's own frames."""
CONTEXT: Final = 2
"""Frames on each side for the convolutions."""
FLOOR_FROM: Final = 5 * INPUT_RATE_HZ
"""Buffer length from which the floor follows the maximum."""
RANGE: Final = 8.0
"""Powers of ten between the maximum and the floor."""
POWER_MIN: Final = 1e-10
BUFFER_MAX: Final = 30 * INPUT_RATE_HZ
BUFFER_DROP: Final = 10 * INPUT_RATE_HZ


@attrs.frozen(kw_only=True, eq=False)
class MelCarry:
    """The front end's state between units.

    `waiting`: samples not yet used, (80,) after the first unit; `buffer`: the sound used so far, at
    most 30 s, (N,); `peaks`: the highest band of each final frame of the buffer, (F,).
    """

    waiting: Tensor
    buffer: Tensor
    peaks: Tensor

    @classmethod
    def start(cls) -> MelCarry:
        """The state before the first unit."""
        return cls(waiting=torch.zeros(0), buffer=torch.zeros(0), peaks=torch.zeros(0))


def filters(bands: int) -> Tensor:
    """Whisper's mel filters (Slaney's scale, 0 to 8 kHz), (201, bands)."""
    bank = mel_filter_bank(
        num_frequency_bins=FFT // 2 + 1,
        num_mel_filters=bands,
        min_frequency=0.0,
        max_frequency=INPUT_RATE_HZ / 2,
        sampling_rate=INPUT_RATE_HZ,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(bank).float()


class MelFrontEnd:
    """Sound to log-mel frames; holds only tables."""

    def __init__(self, bands: int) -> None:
        self._filters = filters(bands)
        self._window = torch.hann_window(FFT, dtype=torch.float32, device="cpu")

    def log_mel(self, sound: Tensor) -> Tensor:
        """(..., 400 + 160 * (N - 1)) -> (..., N, bands): log10 power, at least -10, unscaled."""
        frames = sound.unfold(-1, FFT, HOP) * self._window  # (..., N, 400)
        power = torch.fft.rfft(frames).abs().square()  # (..., N, 201)
        mel: Tensor = (power @ self._filters).clamp_min(POWER_MIN).log10()
        return mel

    def _frames(self, buffer: Tensor, first: int, end: int) -> Tensor:
        """Frames `first` to `end` of a buffer, mirrored at its edges, (end - first, bands)."""
        low, high = first * HOP - EDGE, (end - 1) * HOP + EDGE
        left, right = max(0, -low), max(0, high - len(buffer))
        sound = buffer[max(0, low) : high]
        return self.log_mel(F.pad(sound[None, None], (left, right), mode="reflect")[0, 0])

    def next_frames(self, pcm: Tensor, carry: MelCarry) -> tuple[Tensor, MelCarry]:
        """Compute a unit's frames, scaled as Whisper's; `pcm` is (16000,), 16 kHz, in [-1, 1].

        They are (bands, 102) for the first unit and (bands, 104) after, with the next carry.
        """
        assert pcm.shape == (UNIT_SAMPLES,), pcm.shape
        first = len(carry.buffer) == 0
        if first:
            pcm = F.pad(pcm, (FIRST_SAMPLES - UNIT_SAMPLES, 0))
        sound = torch.cat((carry.waiting, pcm))
        taken, waiting = sound[:-WAITING], sound[-WAITING:].clone()
        buffer, peaks = torch.cat((carry.buffer, taken)), carry.peaks
        if len(buffer) >= BUFFER_MAX:
            buffer = buffer[BUFFER_DROP:].clone()
            peaks = peaks[BUFFER_DROP // HOP :].clone()
            mirrored = -(-EDGE // HOP)
            peaks[:mirrored] = self._frames(buffer, 0, mirrored).amax(dim=-1)
        count = len(buffer) // HOP
        settled = (len(buffer) - EDGE) // HOP + 1
        begin = settled - CORE - CONTEXT - (0 if first else CONTEXT)
        new = self._frames(buffer, begin, count)  # (count - begin, bands)
        peaks = torch.cat((peaks, new.amax(dim=-1)[len(peaks) - begin : settled - begin]))
        if len(buffer) >= FLOOR_FROM:
            new = new.clamp_min(torch.maximum(peaks.amax(), new.amax()) - RANGE)
        frames = (new[: settled - begin].T + 4.0) / 4.0  # (bands, 102 or 104)
        return frames, MelCarry(waiting=waiting, buffer=buffer, peaks=peaks)

    def whole(self, pcm: Tensor) -> Tensor:
        """All frames of whole sessions for training, (B, 16000 * U) -> (B, bands, 100 * U + 2).

        The floor of a unit is that of all sound up to its end: equal to `next_frames`, except for
        the edge frame and for sound dropped after 30 s.
        """
        sound = F.pad(pcm, (FIRST_SAMPLES - UNIT_SAMPLES, 0))[:, :-WAITING]
        mel = self.log_mel(F.pad(sound[:, None], (EDGE, 0), mode="reflect")[:, 0])  # (B, N, bands)
        units = pcm.shape[1] // UNIT_SAMPLES
        mel = mel[:, : CORE * units + CONTEXT]
        unit = ((torch.arange(mel.shape[1]) - CONTEXT) // CORE).clamp_min(0)  # (N,) whose frame
        peaks = torch.stack(
            [mel[:, : CORE * (u + 1) + CONTEXT].amax(dim=(1, 2)) for u in range(units)], dim=1
        )  # (B, U)
        floors = peaks - RANGE
        quiet = (FIRST_SAMPLES - WAITING + UNIT_SAMPLES * torch.arange(units)) < FLOOR_FROM
        floors = floors.masked_fill(quiet, -10.0)[:, unit]  # (B, N)
        return (torch.maximum(mel, floors[..., None]).transpose(1, 2) + 4.0) / 4.0

    def clip(self, pcm: Tensor) -> Tensor:
        """Frames of reference audio, (samples,) at 16 kHz -> (bands, samples / 160 rounded up).

        The sound, at most 30 s, is followed by silence; one floor applies to all frames.
        """
        count = -(-len(pcm) // HOP)
        sound = F.pad(pcm, (0, min(BUFFER_MAX, len(pcm) + FFT) - len(pcm)))
        sound = F.pad(sound[None, None], (EDGE, EDGE), mode="reflect")[0, 0]
        mel = self.log_mel(sound)
        return (mel.clamp_min(mel.amax() - RANGE)[:count].T + 4.0) / 4.0
