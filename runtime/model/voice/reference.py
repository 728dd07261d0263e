"""The reference sound of a voice: its codes, its speaker and its mel, from 16 kHz mono.

Codes and speaker are those of the published networks, run by onnxruntime on one CPU thread. Their
inputs and the mel are our own arithmetic, equal to that of the libraries they were trained with:

- codes: Whisper's log-mel, 128 bands at 16 kHz, its last frame left out;
- speaker: Kaldi's filter banks, 80 bands at 16 kHz, without dither, less their mean over time;
- mel: librosa's, 80 bands to 8 kHz of the sound at 24 kHz: magnitudes of 1920 samples, every 480.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.audio_utils import mel_filter_bank

from ..backends.base import BackendRefused
from .config import MEL, SPEAKER

Pcm = NDArray[np.float32]

RATE_HZ: Final = 16_000
MEL_RATE_HZ: Final = 24_000
SECONDS_MIN: Final = 0.5
"""Too little reference sound for a voice."""
SECONDS_MAX: Final = 6.0
"""About the length of the published model's own voice; caches grow with it. More is left out."""
CODES_A_SECOND: Final = 25

SPEAKER_FILE: Final = "campplus.onnx"
CODES_FILE: Final = "speech_tokenizer_v2_25hz.onnx"


@attrs.frozen(kw_only=True, eq=False)
class Reference:
    """What a voice is made of: codes, mel (frames, 80), and the speaker's embedding (192,)."""

    codes: tuple[int, ...]
    mel: NDArray[np.float32]
    speaker: NDArray[np.float32]

    @cached_property
    def digest(self) -> bytes:
        """A hash of all three."""
        codes = np.asarray(self.codes, "<i4")
        total = hashlib.blake2b(digest_size=16)
        for part in (codes, self.mel.astype("<f4"), self.speaker.astype("<f4")):
            total.update(len(part).to_bytes(8, "little") + part.tobytes())
        return total.digest()


def _bank(rate_hz: int, fft: int, bands: int, kind: str) -> Tensor:
    """Triangular filters to 8 kHz, (fft / 2 + 1, bands).

    `slaney`: from 0 Hz, of equal area; `kaldi`: from 20 Hz, of equal height.
    """
    bank = mel_filter_bank(
        num_frequency_bins=fft // 2 + 1,
        num_mel_filters=bands,
        min_frequency=20.0 if kind == "kaldi" else 0.0,
        max_frequency=8000.0,
        sampling_rate=rate_hz,
        norm="slaney" if kind == "slaney" else None,
        mel_scale=kind,
        triangularize_in_mel_space=kind == "kaldi",
    )
    return torch.from_numpy(bank).float()


def _spectrum(frames: Tensor, fft: int) -> Tensor:
    """Squared magnitudes, (N, window) -> (N, fft / 2 + 1)."""
    power: Tensor = torch.fft.rfft(frames, n=fft).abs().square()
    return power


class FrontEnd:
    """Sound to the three kinds of mel; holds only tables."""

    def __init__(self) -> None:
        self._mel = _bank(MEL_RATE_HZ, 1920, MEL, "slaney")
        self._whisper = _bank(RATE_HZ, 400, 128, "slaney")
        self._kaldi = _bank(RATE_HZ, 512, 80, "kaldi")
        self._povey = torch.hann_window(400, periodic=False).pow(0.85)

    def mel(self, pcm: Pcm) -> NDArray[np.float32]:
        """Natural log of magnitudes, of 24 kHz, at least 0.06 s: (frames, 80)."""
        sound = F.pad(torch.from_numpy(pcm)[None], (720, 720), mode="reflect")[0]
        frames = sound.unfold(0, 1920, 480) * torch.hann_window(1920)  # (N, 1920)
        magnitudes = (_spectrum(frames, 1920) + 1e-9).sqrt()
        found: NDArray[np.float32] = (magnitudes @ self._mel).clamp_min(1e-5).log().numpy()
        return found

    def whisper(self, pcm: Pcm) -> NDArray[np.float32]:
        """Whisper's log-mel of 16 kHz, scaled as its encoder wants it: (128, frames)."""
        sound = F.pad(torch.from_numpy(pcm)[None], (200, 200), mode="reflect")[0]
        frames = sound.unfold(0, 400, 160)[:-1] * torch.hann_window(400)  # (N, 400)
        mel = (_spectrum(frames, 400) @ self._whisper).clamp_min(1e-10).log10()
        found: NDArray[np.float32] = ((mel.clamp_min(mel.max() - 8) + 4) / 4).T.numpy()
        return found

    def kaldi(self, pcm: Pcm) -> NDArray[np.float32]:
        """Kaldi's filter banks of 16 kHz, in whole frames: (frames, 80), natural log of power."""
        frames = torch.from_numpy(pcm).unfold(0, 400, 160)  # (N, 400)
        frames = frames - frames.mean(dim=1, keepdim=True)
        before = torch.cat((frames[:, :1], frames[:, :-1]), dim=1)
        frames = (frames - 0.97 * before) * self._povey
        power = _spectrum(frames, 512) @ self._kaldi
        found: NDArray[np.float32] = power.clamp_min(torch.finfo(power.dtype).eps).log().numpy()
        return found


class Network(Protocol):
    """A network of onnxruntime."""

    def run(self, names: None, inputs: dict[str, Any], /) -> list[Any]:
        """Compute all outputs."""
        ...

    def get_inputs(self) -> list[Any]:
        """Describe the inputs, in order; each has a `name`."""
        ...


def open_network(path: Path) -> Network:
    """Load a network on one CPU thread; `ImportError`: onnxruntime is not installed."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(  # type: ignore[no-any-return]
        str(path), sess_options=options, providers=["CPUExecutionProvider"]
    )


class References:
    """Reads reference sound.

    Args:
        codes: the network of codes.
        speaker: the network of speakers.
        vocabulary: number of codes.
    """

    def __init__(self, codes: Network, speaker: Network, *, vocabulary: int) -> None:
        self._codes, self._speaker, self._vocabulary = codes, speaker, vocabulary
        self._front_end = FrontEnd()

    def read(self, pcm: Pcm) -> Reference:
        """Read at most `SECONDS_MAX` of reference sound, mono at 16 kHz, in [-1, 1].

        `BackendRefused`: there is too little of it, or a network finds no voice in it.
        """
        import soxr  # of the extra `server`; the engine is imported without it

        seconds = len(pcm) / RATE_HZ
        if seconds < SECONDS_MIN:
            raise BackendRefused(f"reference audio of {seconds:.2f} s is below {SECONDS_MIN} s")
        pcm = np.clip(pcm[: int(SECONDS_MAX * RATE_HZ)], -1, 1).astype(np.float32)
        return Reference(
            codes=self._codes_of(pcm),
            mel=self._front_end.mel(soxr.resample(pcm, RATE_HZ, MEL_RATE_HZ)),
            speaker=self._speaker_of(pcm),
        )

    def _codes_of(self, pcm: Pcm) -> tuple[int, ...]:
        mel = self._front_end.whisper(pcm)
        names = [each.name for each in self._codes.get_inputs()]
        length = np.array([mel.shape[1]], np.int32)
        found = self._codes.run(None, dict(zip(names, (mel[None], length), strict=True)))
        codes = np.asarray(found[0]).reshape(-1)
        most = int(SECONDS_MAX * CODES_A_SECOND)
        if not 0 < len(codes) <= most or not ((codes >= 0) & (codes < self._vocabulary)).all():
            raise BackendRefused(f"{CODES_FILE} gives {len(codes)} codes, or codes out of range")
        return tuple(codes.astype(int).tolist())

    def _speaker_of(self, pcm: Pcm) -> NDArray[np.float32]:
        bands = self._front_end.kaldi(pcm)
        bands = (bands - bands.mean(axis=0, keepdims=True))[None]  # (1, frames, 80)
        found = self._speaker.run(None, {self._speaker.get_inputs()[0].name: bands})
        speaker = np.asarray(found[0], np.float32).reshape(-1)
        if speaker.shape != (SPEAKER,) or not np.isfinite(speaker).all():
            raise BackendRefused(f"{SPEAKER_FILE} gives no {SPEAKER} finite numbers")
        return speaker
