"""The streaming audio encoder: one second of 16 kHz sound to ten embeddings.

log-mel (100 frames a second) -> two convolutions (50 a second) -> a causal tower -> mean of 5 ->
two linear layers. Everything looks to the left only, over at most `tower.window` frames a layer, so
a second needs no more than the carry of the seconds before: the last 15 ms of sound, three mel
frames, and the keys and values of two seconds a layer. The carry is a value: `encode` takes one and
returns the next, and never changes it in place.

Keys are carried unrotated and the span is rotated anew from position 0, so that what a second gives
depends on the sound before it and not on how long the session has run.
"""

from __future__ import annotations

import math
from typing import Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protocol.model import INPUT_RATE_HZ, UNIT_SAMPLES

from .config import AudioConfig
from .layers import Tower, attend, rope_table, rotate, window_mask

FFT_SAMPLES: Final = 400
HOP_SAMPLES: Final = 160
PCM_CARRY: Final = FFT_SAMPLES - HOP_SAMPLES
"""Sound before a unit that its first mel frame still covers: 15 ms."""
MEL_CARRY: Final = 3
"""Mel frames before a unit that the two convolutions still see."""
FRAMES: Final = 50
"""Frames a unit after the convolutions."""
EMBEDDINGS: Final = 10
"""Embeddings a unit."""
POOL: Final = FRAMES // EMBEDDINGS
MEL_FLOOR: Final = 1e-7
"""Power below which a band counts as silent: about the noise of 16-bit sound."""


@attrs.frozen(kw_only=True)
class AudioCarry:
    """What the encoder remembers between units.

    Attributes:
        pcm: the last `PCM_CARRY` samples, (240,).
        mel: the last `MEL_CARRY` mel frames, (mels, 3).
        keys: unrotated keys a layer, (1, K, past, D) each.
        values: values a layer, shaped as `keys`.
    """

    pcm: Tensor
    mel: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def mel_filters(mels: int) -> Tensor:
    """Triangular mel filters between 40 Hz and 8 kHz, shape (201, mels)."""

    def hertz(mel: float) -> float:
        return 700.0 * (math.exp(mel / 1127.0) - 1.0)

    low, high = (1127.0 * math.log1p(f / 700.0) for f in (40.0, INPUT_RATE_HZ / 2))
    edges = [hertz(low + (high - low) * i / (mels + 1)) for i in range(mels + 2)]
    bins = torch.linspace(0.0, INPUT_RATE_HZ / 2, FFT_SAMPLES // 2 + 1)
    bands = []
    for left, middle, right in zip(edges, edges[1:], edges[2:], strict=False):
        rising = (bins - left) / (middle - left)
        falling = (right - bins) / (right - middle)
        bands.append(torch.minimum(rising, falling).clamp_min(0.0))
    return torch.stack(bands, dim=1)


class AudioEncoder(nn.Module):
    """Sound to embeddings of the language model's width."""

    def __init__(self, config: AudioConfig, width: int) -> None:
        super().__init__()
        self.config = config
        hidden = config.tower.hidden
        self.past = -(-(config.tower.window - 1) // FRAMES) * FRAMES
        self.conv1 = nn.Conv1d(config.mels, hidden, 3)
        self.conv2 = nn.Conv1d(hidden, hidden, 3, stride=2)
        self.tower = Tower(config.tower)
        self.linear1 = nn.Linear(hidden, width)
        self.linear2 = nn.Linear(width, width)
        self.register_buffer("filters", mel_filters(config.mels), persistent=False)
        self.register_buffer("hann", torch.hann_window(FFT_SAMPLES), persistent=False)
        span = torch.arange(self.past + FRAMES)
        mask = window_mask(span[self.past :], span, config.tower.window)
        self.register_buffer("mask", mask, persistent=False)

    def mel(self, pcm: Tensor) -> Tensor:
        """Log-mel frames.

        Args:
            pcm: (B, 240 + 160 * N), 16 kHz, in [-1, 1].

        Returns:
            (B, mels, N), about -1 to 1.5; a silent band is -1.
        """
        frames = pcm.unfold(1, FFT_SAMPLES, HOP_SAMPLES) * self.get_buffer("hann")  # (B, N, 400)
        power = torch.fft.rfft(frames).abs().square()  # (B, N, 201)
        bands = (power @ self.get_buffer("filters")).clamp_min(MEL_FLOOR)  # (B, N, mels)
        mel: Tensor = bands.log10() / 3.5 + 1.0  # (B, N, mels)
        return mel.transpose(1, 2)

    def convolve(self, mel: Tensor) -> Tensor:
        """(B, mels, 3 + 2 * N) -> (B, N, hidden)."""
        x = F.gelu(self.conv1(mel))  # (B, hidden, 1 + 2 * N)
        x = F.gelu(self.conv2(x))  # (B, hidden, N)
        return x.transpose(1, 2)

    def project(self, frames: Tensor) -> Tensor:
        """Pool and project, (B, N, hidden) -> (B, N / 5, width)."""
        b, n, hidden = frames.shape
        pooled = frames.reshape(b, n // POOL, POOL, hidden).mean(dim=2)  # (B, N/5, hidden)
        out: Tensor = self.linear2(F.gelu(self.linear1(pooled)))
        return out

    def attention_frames(self, x: Tensor, carry: AudioCarry) -> tuple[Tensor, AudioCarry]:
        """The tower over one unit's frames (1, 50, hidden) after the carried keys."""
        tower = self.config.tower
        cos, sin = rope_table(torch.arange(self.past + FRAMES), tower.head_dim, tower.rope_theta)
        keys, values = [], []
        for index, block in enumerate(self.tower.blocks()):
            q, k, v = block.project(x)
            k = torch.cat((carry.keys[index], k), dim=2)  # (1, K, past + 50, D)
            v = torch.cat((carry.values[index], v), dim=2)
            q = rotate(q, cos[self.past :], sin[self.past :])
            x = block.join(x, attend(q, rotate(k, cos, sin), v, self.get_buffer("mask")))
            keys.append(k[:, :, FRAMES:].clone())
            values.append(v[:, :, FRAMES:].clone())
        return self.tower.norm(x), attrs.evolve(carry, keys=tuple(keys), values=tuple(values))

    def start(self) -> AudioCarry:
        """The carry before the first unit: silence."""
        tower = self.config.tower
        empty = torch.zeros(1, tower.kv_heads, self.past, tower.head_dim)
        return AudioCarry(
            pcm=torch.zeros(PCM_CARRY),
            mel=self.mel(torch.zeros(1, PCM_CARRY + MEL_CARRY * HOP_SAMPLES))[0],
            keys=(empty,) * tower.layers,
            values=(empty,) * tower.layers,
        )

    def encode(self, pcm: Tensor, carry: AudioCarry) -> tuple[Tensor, AudioCarry]:
        """Encode one unit.

        Args:
            pcm: (16000,), 16 kHz, in [-1, 1].
            carry: from the unit before, or `start()`.

        Returns:
            Embeddings (10, width), and the carry for the next unit.
        """
        assert pcm.shape == (UNIT_SAMPLES,), pcm.shape
        sound = torch.cat((carry.pcm, pcm))
        mel = torch.cat((carry.mel, self.mel(sound[None])[0]), dim=1)  # (mels, 103)
        frames, after = self.attention_frames(self.convolve(mel[None]), carry)  # (1, 50, hidden)
        after = attrs.evolve(after, pcm=sound[-PCM_CARRY:].clone(), mel=mel[:, -MEL_CARRY:].clone())
        return self.project(frames)[0], after  # (10, width)

    def whole(self, pcm: Tensor) -> Tensor:
        """Encode whole sessions at once, as training does.

        Args:
            pcm: (B, 16000 * U).

        Returns:
            (B, 10 * U, width); equal to `encode` unit by unit up to rounding.
        """
        b, u = pcm.shape[0], pcm.shape[1] // UNIT_SAMPLES
        sound = F.pad(pcm, (PCM_CARRY + MEL_CARRY * HOP_SAMPLES, 0))
        x = self.convolve(self.mel(sound))  # (B, 50 * U, hidden)
        tower, before = self.config.tower, self.past // FRAMES
        cos, sin = rope_table(torch.arange(u * FRAMES), tower.head_dim, tower.rope_theta)
        cos, sin = (table.reshape(u, 1, FRAMES, -1).repeat(b, 1, 1, 1) for table in (cos, sin))

        def spread(y: Tensor) -> Tensor:
            shape = (b, u, tower.kv_heads, FRAMES, tower.head_dim)
            y = F.pad(y.reshape(shape), (0, 0, 0, 0, 0, 0, before, 0))
            y = torch.cat([y[:, i : i + u] for i in range(before + 1)], dim=3)
            return y.reshape(b * u, tower.kv_heads, self.past + FRAMES, tower.head_dim)

        x = x.reshape(b * u, FRAMES, -1)  # A unit is a row; its past is spread beside it.
        for block in self.tower.blocks():
            q, k, v = block.project(x)
            k = spread(rotate(k, cos, sin))
            mixed = attend(rotate(q, cos, sin), k, spread(v), self.get_buffer("mask"))
            x = block.join(x, mixed)
        x = self.tower.norm(x)
        return self.project(x.reshape(b, u * FRAMES, -1))
