"""HiFT: mel frames to sound, 480 samples a frame at 24 kHz, over a source of harmonics.

The pitch of each frame gives a fundamental and eight overtones, and these and noise one source. The
mel is upsampled by 8, 5 and 3, joined at each rate by the source's spectrum, and becomes a spectrum
of 9 bands, whose inverse is the sound. Both transforms are convolutions with a table of waves.

The published code draws a first phase for each overtone, which its interpolation to the frames'
rate leaves out again; here no phase is drawn. It draws noise for each harmonic, and weighs all of
it by one linear layer; the weighted sum is drawn here, which has the same distribution.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .config import MEL, HiftConfig

RATE_HZ: Final = 24_000
FRAME: Final = 480
"""Samples a mel frame."""
HARMONICS: Final = 9
VOICED_HZ: Final = 10.0
SINE: Final = 0.1
"""Amplitude of a harmonic in voiced frames, ..."""
VOICED_NOISE: Final = 0.003
"""... of the noise there, ..."""
NOISE: Final = SINE / 3
"""... and of the noise elsewhere."""
STRIDES: Final = (8, 5, 3)
KERNELS: Final = (16, 11, 7)
BLOCK_KERNELS: Final = (3, 7, 11)
DILATIONS: Final = (1, 3, 5)
SOURCE_KERNELS: Final = (7, 7, 11)
WINDOW: Final = 16
HOP: Final = 4
BANDS: Final = WINDOW // 2 + 1
MAGNITUDE_MAX: Final = 100.0
LOUDEST: Final = 0.99


class Snake(nn.Module):
    """x + sin²(a x) / a, with an `a` for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T) -> (B, C, T)."""
        alpha = self.alpha[:, None]
        return x + (x * alpha).sin().square() / (alpha + 1e-9)


class ResBlock(nn.Module):
    """Three pairs of convolutions, the first of each dilated."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, dilation=dilation, padding="same")
            for dilation in DILATIONS
        )
        self.convs2 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, padding="same") for _ in DILATIONS
        )
        self.activations1 = nn.ModuleList(Snake(width) for _ in DILATIONS)
        self.activations2 = nn.ModuleList(Snake(width) for _ in DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T) -> (B, C, T)."""
        layers = (self.activations1, self.convs1, self.activations2, self.convs2)
        for snake1, conv1, snake2, conv2 in zip(*layers, strict=True):
            x = x + conv2(snake2(conv1(snake1(x))))
        return x


class PitchPredictor(nn.Module):
    """Mel frames to their pitch in Hz."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = list[nn.Module]()
        for inputs in (MEL, width, width, width, width):
            layers += [nn.Conv1d(inputs, width, 3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """(B, 80, F) -> (B, F)."""
        x = self.condnet(mel).transpose(1, 2)  # (B, F, C)
        return self.classifier(x)[..., 0].abs()  # type: ignore[no-any-return]


class Source(nn.Module):
    """Pitch to the source: harmonics and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(HARMONICS, 1)

    def forward(self, pitch: Tensor, noise: Tensor) -> Tensor:
        """Pitch (B, F) and normal noise (B, 480 F) -> (B, 480 F)."""
        numbers = torch.arange(1, HARMONICS + 1, device=pitch.device)[:, None]
        cycles = (pitch[:, None] * numbers / RATE_HZ % 1).cumsum(dim=-1)  # (B, 9, F), a sample each
        phase = cycles * (2 * math.pi) * FRAME
        phase = F.interpolate(phase, scale_factor=float(FRAME), mode="linear")  # (B, 9, 480 F)
        voiced = (pitch > VOICED_HZ).to(pitch).repeat_interleave(FRAME, dim=-1)  # (B, 480 F)
        sines = SINE * phase.sin() * voiced[:, None]
        amplitude = (voiced * VOICED_NOISE + (1 - voiced) * NOISE) * self.l_linear.weight.norm()
        harmonics = self.l_linear(sines.transpose(1, 2))[..., 0]
        return torch.tanh(harmonics + amplitude * noise)


class Hift(nn.Module):
    """See the module's docstring; parameters are named as in `hift.pt`, without weight norm."""

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        widths = [config.width >> level for level in range(len(STRIDES) + 1)]
        self.m_source = Source()
        self.conv_pre = nn.Conv1d(MEL, widths[0], 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(wide, narrow, kernel, stride, padding=(kernel - stride) // 2)
            for wide, narrow, kernel, stride in zip(
                widths, widths[1:], KERNELS, STRIDES, strict=False
            )
        )
        downs = [math.prod(STRIDES[level + 1 :]) for level in range(len(STRIDES))]  # 15, 3, 1
        self.source_downs = nn.ModuleList(
            nn.Conv1d(2 * BANDS, width, 2 * down if down > 1 else 1, down, padding=down // 2)
            for width, down in zip(widths[1:], downs, strict=True)
        )
        self.source_resblocks = nn.ModuleList(
            ResBlock(width, kernel)
            for width, kernel in zip(widths[1:], SOURCE_KERNELS, strict=True)
        )
        self.resblocks = nn.ModuleList(
            ResBlock(width, kernel) for width in widths[1:] for kernel in BLOCK_KERNELS
        )
        self.conv_post = nn.Conv1d(widths[-1], 2 * BANDS, 7, padding=3)
        self.f0_predictor = PitchPredictor(config.pitch_width)
        self._analysis = self._synthesis = self._power = torch.zeros(0)

    def prepare(self) -> None:
        """Make the tables of waves, once the weights are loaded."""
        place, band = torch.arange(float(WINDOW)), torch.arange(float(BANDS))[:, None]
        window = torch.hann_window(WINDOW)
        angle = 2 * math.pi / WINDOW * band * place  # (9, 16)
        twice = torch.full((BANDS, 1), 2.0)
        twice[0] = twice[-1] = 1.0
        weight = self.conv_pre.weight
        waves = torch.cat((angle.cos(), -angle.sin()))[:, None]  # (18, 1, 16)
        self._analysis = (waves * window).to(weight)
        self._synthesis = (waves * window * torch.cat((twice, twice))[:, None] / WINDOW).to(weight)
        self._power = window.square()[None, None].to(weight)

    def source(self, mel: Tensor, noise: Tensor) -> Tensor:
        """The source of mel frames (B, F, 80), with normal noise (B, 480 F) -> (B, 480 F)."""
        return self.m_source(self.f0_predictor(mel.transpose(1, 2)), noise)  # type: ignore[no-any-return]

    def speak(self, mel: Tensor, noise: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Source and sound of mel frames; `before`: the source of the first ones, (B, N)."""
        source = self.source(mel, noise)
        source = torch.cat((before, source[:, before.shape[1] :]), dim=1)
        return source, self(mel, source)

    def _spectrum(self, sound: Tensor) -> Tensor:
        """(B, N) -> (B, 18, N / 4 + 1): real parts, then imaginary ones."""
        edge = WINDOW // 2
        return F.conv1d(F.pad(sound[:, None], (edge, edge), "reflect"), self._analysis, stride=HOP)

    def _sound(self, spectrum: Tensor) -> Tensor:
        """(B, 18, N / 4 + 1) -> (B, N)."""
        edge = WINDOW // 2
        sound = F.conv_transpose1d(spectrum, self._synthesis, stride=HOP)
        frames = spectrum.new_ones(1, 1, spectrum.shape[-1])
        power = F.conv_transpose1d(frames, self._power, stride=HOP)
        return (sound / power)[:, 0, edge:-edge]

    def forward(self, mel: Tensor, source: Tensor) -> Tensor:
        """Mel frames (B, F, 80) and their source (B, 480 F) -> (B, 480 F)."""
        spectrum = self._spectrum(source)  # (B, 18, 120 F + 1)
        x = self.conv_pre(mel.transpose(1, 2))  # (B, C, F)
        kernels = len(BLOCK_KERNELS)
        for level, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))  # (B, C / 2, stride * F), and so on
            if level == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")  # As many columns as the spectrum has.
            x = x + self.source_resblocks[level](self.source_downs[level](spectrum))
            blocks = list(self.resblocks)[level * kernels : (level + 1) * kernels]
            x = torch.stack([block(x) for block in blocks]).sum(dim=0) / kernels
        magnitude, angle = self.conv_post(F.leaky_relu(x, 0.01)).split(BANDS, dim=1)
        magnitude, angle = magnitude.exp().clamp_max(MAGNITUDE_MAX), angle.sin()
        spectrum = torch.cat((magnitude * angle.cos(), magnitude * angle.sin()), dim=1)
        return self._sound(spectrum).clamp(-LOUDEST, LOUDEST)
