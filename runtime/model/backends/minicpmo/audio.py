"""Sound to embeddings: mel frames of a second, then ten embeddings.

*The mel front end* equals the public one, which recomputes the whole buffer each second, but
computes only new frames. Its rules (docs/model.md, "Hear"):

- The first unit is padded on the left to 1035 ms; from then on 80 samples wait for the next unit.
- Frames are 10 ms apart and centred. A unit has 100 frames, plus 2 on each side for the
  convolutions (none before the first): 102 frames, then 104.
- The floor: none below 5 s of buffer, then the buffer's maximum minus 8 (80 dB).
- The buffer holds at most 30 s: then its oldest 10 s are dropped, and its new edge is mirrored.

*The encoder* is Whisper's with a KV cache: two convolutions (100 -> 50 frames a second), blocks
that see the unit's frames both ways and all earlier ones, a projection, and a mean over five.
Positions are absolute and added before the first block, so cached values stay valid; after 29 units
the cache is dropped entirely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers.audio_utils import mel_filter_bank

from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES, UNIT_SAMPLES

from ..base import BackendError, BackendRefused
from .attention import Cache, KvSlots, Row, SlotCache, SpanCache, Spans
from .batched import Out
from .config import FFT, HOP, UNIT_FRAMES, AudioConfig

# -- the mel front end --------------------------------------------------------------------------

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
        used, waiting = sound[:-WAITING], sound[-WAITING:].clone()
        buffer, peaks = torch.cat((carry.buffer, used)), carry.peaks
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


# -- the encoder --------------------------------------------------------------------------------


class AudioAttention(nn.Module):
    """Whisper's attention: biases on all but the keys."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        width = config.d_model
        self.heads = config.encoder_attention_heads
        self.scale = (width // self.heads) ** -0.5
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, width) to queries, keys and values, (B, H, T, D) each."""
        b, t, _ = x.shape
        shape = (b, t, self.heads, -1)
        q: Tensor = self.q_proj(x).view(shape).transpose(1, 2)
        k: Tensor = self.k_proj(x).view(shape).transpose(1, 2)
        v: Tensor = self.v_proj(x).view(shape).transpose(1, 2)
        return q, k, v

    def join(self, attended: Tensor) -> Tensor:
        """(B, T, H, D) to (B, T, width)."""
        out: Tensor = self.out_proj(attended.flatten(2))
        return out


class AudioLayer(nn.Module):
    """One block of Whisper's encoder, normalised before attention and MLP."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn = AudioAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the normalised stream."""
        return self.self_attn.split(self.self_attn_layer_norm(x))

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output, then the MLP; (B, T, width) stays."""
        x = x + self.self_attn.join(attended)
        mixed: Tensor = self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return x + mixed


@attrs.frozen(kw_only=True, eq=False)
class EncodeAudio:
    """One unit's frames of one session: a request, answered by their embeddings, (10, width).

    Attributes:
        mel: (bands, 102) for the first unit of a session, else (bands, 104).
        units: units already in the slot, 0 to 28.
    """

    mel: Tensor
    slot: int
    units: int

    stage: ClassVar[int] = 1
    bucket: ClassVar[str] = "hear"

    @property
    def row(self) -> Row:
        """Where its frames go."""
        return Row(slot=self.slot, start=self.units * UNIT_FRAMES)


class AudioEncoder(nn.Module):
    """The encoder; its weights have the published names under `apm`."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, width)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(width)

    def blocks(self) -> list[AudioLayer]:
        """The blocks, typed."""
        return [layer for layer in self.layers if isinstance(layer, AudioLayer)]

    def convolve(self, mel: Tensor, context: int) -> Tensor:
        """Convolve (B, bands, context + 100 * U + 2) to (B, 50 * U, width).

        `context` is the number of frames before the first unit's own, 0 or 2.
        """
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x)).transpose(1, 2)  # (B, context / 2 + 50 * U + 1, width)
        return x[:, context // 2 : -(CONTEXT // 2)]

    def frames(self, requests: Sequence[EncodeAudio], *, together: bool = False) -> list[Tensor]:
        """One unit of each session as the first block takes it, (50, width) each.

        `together`: convolve those of one length together.
        """
        contexts = [item.mel.shape[1] - 2 * UNIT_FRAMES - CONTEXT for item in requests]
        if together and len(set(contexts)) == 1:
            mels = torch.stack([item.mel for item in requests])
            convolved = list(self.convolve(mels, contexts[0]))
        else:
            pairs = zip(requests, contexts, strict=True)
            convolved = [self.convolve(item.mel[None], context)[0] for item, context in pairs]
        table = self.embed_positions.weight
        return [
            rows + table[item.row.start : item.row.start + UNIT_FRAMES]
            for rows, item in zip(convolved, requests, strict=True)
        ]

    def encode_units(self, requests: Sequence[EncodeAudio], store: KvSlots) -> Tensor:
        """Encode one unit of each session into (B, 50, width), appending its keys to the slot."""
        x = torch.stack(self.frames(requests))
        cache = SlotCache(store, [item.row for item in requests], UNIT_FRAMES, 1, causal=False)
        return self.encode(x, cache)

    def encode(self, x: Tensor, cache: Cache) -> Tensor:
        """The blocks, for rows (B, 50, width) whose keys go through the cache."""
        for index, block in enumerate(self.blocks()):
            q, k, v = block.split(x)
            seen, _ = cache.update(k, v, index)
            x = block.join(x, seen.attend(q, block.self_attn.scale))
        out: Tensor = self.layer_norm(x)
        return out

    def whole(self, mel: Tensor) -> Tensor:
        """Encode whole sessions for training, (B, bands, 100 * U + 2) -> (B, 50 * U, width).

        Equal to `encode_units` unit by unit, up to rounding.
        """
        x = self.convolve(mel, 0)
        span = self.config.units * UNIT_FRAMES
        runs = torch.split(x, span, dim=1)  # The cache is empty at the start of each run.
        return torch.cat([self._run(run) for run in runs], dim=1)

    def reference(self, mel: Tensor) -> Tensor:
        """Encode reference audio whole (`MelFrontEnd.clip`), (1, bands, N) -> (1, N / 2, width)."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.embed_positions.weight[: x.shape[1]]
        unit = torch.arange(x.shape[1], device=x.device) // UNIT_FRAMES
        mask = unit[None, :] <= unit[:, None]  # (T, T): its own unit, and all before
        for block in self.blocks():
            q, k, v = block.split(x)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = block.join(x, seen.transpose(1, 2))
        out: Tensor = self.layer_norm(x)
        return out


class AudioNetwork:
    """The encoder's pass for many sessions, and the projection; see `batched.Network`."""

    is_causal = False
    name = "sound"

    def __init__(self, encoder: AudioEncoder, projection: AudioProjection, store: KvSlots) -> None:
        self._encoder, self._projection, self.store = encoder, projection, store
        self.width = encoder.config.d_model

    def forward(self, rows: Tensor, spans: Spans) -> Tensor:
        """See `Network.forward`."""
        return self._encoder.encode(rows, SpanCache(self.store, spans)).flatten(0, 1)

    def finish(self, hidden: Tensor, spans: Spans) -> Out:
        """The embeddings of each session's unit, (B, 10, width)."""
        return (self._projection(hidden.view(len(spans.begins), -1, self.width)),)


class AudioProjection(nn.Module):
    """Rows to embeddings of the language model's width: two layers, then the mean of five."""

    def __init__(self, config: AudioConfig, width: int) -> None:
        super().__init__()
        self.pool = config.pool
        self.linear1 = nn.Linear(config.encoder_ffn_dim // 4, width)
        self.linear2 = nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T / 5, width), rounded down; fewer than 5 rows give none."""
        x: Tensor = self.linear2(F.relu(self.linear1(rows)))
        if x.shape[1] < self.pool:
            return x[:, :0]
        return F.avg_pool1d(x.transpose(1, 2), self.pool).transpose(1, 2)


# -- sound from outside ---------------------------------------------------------------------------


def read_pcm(data: bytes) -> NDArray[np.float32]:
    """Copy float32 LE samples, shape (samples,), clipped to [-1, 1].

    `ValueError` unless all are whole and finite: one such value would spoil a session's caches.
    """
    if len(data) % SAMPLE_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole samples")
    samples = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(samples).all():
        raise ValueError("samples are not all finite")
    return samples.clip(-1.0, 1.0).astype(np.float32)


def samples_of(data: bytes, what: str, refusal: type[BackendError] = BackendRefused) -> Tensor:
    """As `read_pcm`; an error is a `refusal` that begins with `what`."""
    try:
        return torch.from_numpy(read_pcm(data))
    except ValueError as error:
        raise refusal(f"{what}: {error}") from error
