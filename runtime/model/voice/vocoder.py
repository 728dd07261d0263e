"""The published vocoder: a turn's codes to sound, chunk by chunk, for many sessions.

A turn's state is a frozen value (`Turn`): a chunk takes one and returns the next, so that an older
one can be kept, rolled back to, or run again. A voice is the state that its turns start from: what
the prompt leaves in the caches. It is computed once and shared; the least recently used is dropped,
and computed again, to the same bits, when a turn needs it. What a chunk draws is keyed by the
vocoder's seed, the session's key and the place in the turn.

On a CPU each chunk is computed by itself, so its bits do not depend on others. On a GPU chunks are
computed together in fixed shapes, which gives the same up to rounding.

*Caches*: keys and values of past rows, as immutable pieces, and the published rules that cut them.

A cache is a sequence of pieces; a piece has the keys and values of some rows side by side, shape
(..., rows, 2 * head width). The prompt's pieces belong to its voice: sessions share them, and they
are never copied. A chunk adds one piece and changes no other, so an older state stays valid.

`P` is the number of the prompt's frames. A cache of more than `P` + `KEPT` rows loses what is
between its first `P` and its last `KEPT`:

- after the encoder's upsampling the oldest rows come first: the prompt and the newest rows stay;
- in the flow the newest rows come first: the newest `P` and the end of the prompt stay;
- before the encoder's upsampling there is half a row a frame. The published code stores these rows
  twice, one copy behind the other, cuts both as one, and reads the first half (`cut_halved`).

*Steps*: chunks of several sessions in a few fixed shapes, which a GPU captures as graphs.

A chunk is some 6,000 small kernels, most of them in the flow, and on a GPU launching them takes
longer than computing them. Here chunks are filled up to one length, caches to the longest, and
sessions to a few numbers: what fills up is not seen by attention, and comes after all that counts
where rows are convolved. The encoder, a step of the flow, and HiFT at its most frequent lengths
become one launch each. The flow's whole loop is not captured as one graph, since the caches of all
its steps would be in place at once, at ten times the memory.

All but the capture is tested on CPUs, which do not use it: they would gain nothing, and attention
over longer rows adds them up in another order.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from protocol.values.limits import VOICE_STEPS

from ..backends.minicpmo.batched import batches, captured
from ..backends.minicpmo.device import choose_kernels
from ..backends.minicpmo.sampling import keyed
from . import encoder, flow
from .config import MEL, SILENT_CODE, SPEAKER, FlowConfig
from .encoder import LOOKAHEAD, UP
from .flow import Flow
from .hift import FRAME, Hift
from .reference import CODES_A_SECOND, SECONDS_MAX, Reference

# -- captured steps --------------------------------------------------------------------------------


CODES: Final = 25
"""Codes of a chunk, without those ahead."""
FRAMES: Final = UP * CODES
CACHE: Final = 414
"""Frames of a cache: those of a prompt of 6 s, and 100. With those of a chunk they are a multiple
of 8, and so are its codes, as attention wants its masks."""
MEL_KEPT: Final = 8
"""Mel frames before a chunk that HiFT runs over again; their sound is faded into the chunk's."""
SOUNDS: Final = ((MEL_KEPT + FRAMES, MEL_KEPT), (FRAMES, 0), (30, 0))
"""Frames of HiFT's most frequent inputs, the most first, and how many of them are kept ones."""
SOUNDS_MAX: Final = 8
"""Sessions of a step of HiFT; more are arithmetic enough without one."""

_log = logging.getLogger("antiphon.model")


def sizes_on(device: torch.device, slots: int, width: int, *, exact: bool) -> tuple[int, ...]:
    """Sessions that a flow of a width computes together, ascending; none: each by itself."""
    if device.type == "cpu":
        return ()
    return (1,) if exact else batches(slots, 2 * FRAMES, width)


def mask_of(places: int, *seen: tuple[Tensor, Tensor]) -> Tensor:
    """0 from a start, (B,), to an end of what is seen, elsewhere -inf: (B, 1, 1, places)."""
    at, mask = torch.arange(places), torch.full((len(seen[0][0]), places), -math.inf)
    for start, end in seen:
        mask[(at >= start[:, None]) & (at < end[:, None])] = 0
    return mask[:, None, None]


class Fixed:
    """Work over tensors that stay in place, so that it can be captured.

    The next call may overwrite a result.
    """

    def __init__(self, compute: Callable[[], Any], *places: Tensor) -> None:
        self.compute, self._places = compute, places

    def __call__(self, *given: Tensor) -> Any:
        """Copy tensors to the beginnings of their places, and compute."""
        for place, tensor in zip(self._places, given, strict=True):
            place[tuple(map(slice, tensor.shape))].copy_(tensor)
        return self.compute()


class Padded:
    """Chunks of at most `size` sessions; rows without a session keep what was in them.

    Attributes:
        code_rows: the encoder's caches, (blocks, B, H, P, 2 D).
        frame_rows: those after its upsampling.
        rows: the flow's, of one step, (depth, 2, B, H, P, 2 D).
        encode: computes `Flow.encode` from codes, (B, 28), and of `encoder.Past` what is not a
            cache, in its order.
    """

    def __init__(self, flows: Flow, size: int, take: Callable[..., Tensor]) -> None:
        config, dit, int64 = flows.config.encoder, flows.config.dit, torch.int64
        heads, row, given = config.heads, 2 * (config.width // config.heads), CODES + LOOKAHEAD
        self.code_rows = take("code rows", config.blocks, size, heads, CACHE // UP, row)
        self.frame_rows = take("frame rows", config.up_blocks, size, heads, CACHE, row)
        shapes = {
            "ahead": (encoder.CONV_ROWS, config.width),
            "doubled": (encoder.UP_ROWS, config.width),
            "codes_mask": (1, 1, CACHE // UP + CODES),
            "frames_mask": (1, 1, CACHE + FRAMES),
            "given": (given, 1),
        }
        seen = {name: take(name, size, *shape) for name, shape in shapes.items()}
        seen["ends"] = take("counts", size, dtype=int64)
        codes, caches = take("codes", size, given, dtype=int64), (self.code_rows, self.frame_rows)
        encoded = encoder.Past(codes=caches[0].unbind(), frames=caches[1].unbind(), **seen)
        encode = partial(flows.encode, codes, encoded, last=False)
        self.encode = Fixed(encode, codes, *seen.values())
        row = 2 * dit.head_width
        self.rows = take("rows", dit.depth, 2, size, dit.heads, CACHE, row)
        news = take("news", dit.depth, 2, size, dit.heads, FRAMES, row)
        x = take("x", size, FRAMES, MEL, dtype=torch.float32)
        conditions = take("conditions", 2, size, FRAMES, 3 * MEL)
        time = [take("blocks", dit.depth, 3 * flow.PARTS, dit.width), take("final", 2, dit.width)]
        time.append(take("delta", dtype=torch.float32))
        before = take("before", dit.depth, 2, size, 2, flow.BEFORE, dit.width)
        mask, ends = take("mask", 2, size, 1, 1, FRAMES + CACHE), take("ends", 2, size, dtype=int64)
        rows, earlier = self.rows.flatten(1, 2), before.flatten(1, 2)
        past = flow.Past(rows=rows, before=earlier, mask=mask.flatten(0, 1), ends=ends.flatten())

        def step() -> tuple[Tensor, Tensor, Tensor]:
            after, rows, kept = flows.step(x, conditions.flatten(0, 1), time, past)
            news.copy_(rows.view_as(news))  # A result for each size would take too much memory.
            return after, news, kept.view_as(before)

        self.steps = Fixed(step, x, conditions, *time, before, mask, ends)

    def step(
        self, x: Tensor, conditions: Tensor, time: flow.Time, past: flow.Past
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `Flow.step` for (B, T, 80), with the cache that is in place."""
        assert past.mask is not None
        assert past.ends is not None
        count, before = len(x), past.before
        conditions, mask, ends = (
            each.view(2, count, *each.shape[1:]) for each in (conditions, past.mask, past.ends)
        )
        before = before.view(len(before), 2, count, *before.shape[2:])
        x, rows, kept = self.steps(x, conditions, *time, before, mask, ends)
        return x[:count], rows[:, :, :count].flatten(1, 2), kept[:, :, :count].flatten(1, 2)


class VoiceSteps:
    """The fixed shapes of a voice.

    Args:
        sizes: sessions that are computed together, ascending; fewer are filled up.
    """

    def __init__(self, flows: Flow, hift: Hift, sizes: Sequence[int]) -> None:
        self.sizes, self._hift, self._like = tuple(sizes), hift, flows.encoder_proj.weight
        self._few = [size for size in sizes if size <= SOUNDS_MAX]
        self._places = dict[str, Tensor]()
        # The largest come first, so that the others reuse their memory.
        self._padded = [Padded(flows, size, self._take) for size in reversed(self.sizes)]
        self._sounds = {
            (frames, kept): [self._sound(size, frames, kept) for size in reversed(self._few)]
            for frames, kept in SOUNDS
        }

    def _take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that shares its memory with smaller ones of the name."""
        count = math.prod(shape)
        if name not in self._places:
            self._places[name] = self._like.new_zeros(count, dtype=dtype or self._like.dtype)
        return self._places[name][:count].view(shape)

    def _sound(self, size: int, frames: int, kept: int) -> Fixed:
        shapes = {"mel": (frames, MEL), "noise": (frames * FRAME,), "source": (kept * FRAME,)}
        places = [
            self._take(name, size, *shape, dtype=torch.float32) for name, shape in shapes.items()
        ]
        return Fixed(partial(self._hift.speak, *places), *places)

    @property
    def bytes(self) -> int:
        """Memory of what stays in place."""
        return sum(each.numel() * each.element_size() for each in self._places.values())

    def padded(self, count: int) -> Padded:
        """The smallest shape for so many sessions."""
        return self._padded[-1 - bisect_left(self.sizes, count)]

    def sound(self, mel: Tensor, noise: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """`Hift.speak`, in a fixed shape if it is a frequent one."""
        count, frames, _ = mel.shape
        found = self._sounds.get((frames, before.shape[1] // FRAME))
        if found is None or (at := bisect_left(self._few, count)) == len(found):
            return self._hift.speak(mel, noise, before)
        source, sound = found[-1 - at](mel, noise, before)
        return source[:count].clone(), sound[:count].clone()

    def capture(self) -> None:
        """Capture all; what cannot be captured is launched kernel by kernel."""
        encoders, steps = zip(*((each.encode, each.steps) for each in self._padded), strict=True)
        kinds = [encoders, steps, *self._sounds.values()]
        try:
            with torch.inference_mode():
                # A result is overwritten by those of its kind only.
                works = [captured([each.compute for each in some]) for some in kinds]
        except Exception:  # Of the driver or a library, of any type.
            _log.exception("no captured steps of the voice: it is launched kernel by kernel")
            torch.cuda.synchronize()  # Raises if the GPU is lost to this process.
        else:
            for each, work in zip(chain(*kinds), chain(*works), strict=True):
                each.compute = work


TABLE_FRAMES: Final = 1000
"""Columns of the flow's noise. A chunk starts at the length of its cache, so few are used."""
HELD: Final = MEL_KEPT * FRAME
"""Samples that are held back until the next chunk."""
CODES_MIN: Final = 5 + LOOKAHEAD
"""Codes of a chunk before the last: its sound is longer than what is held back."""
CODES_MAX: Final = 25 + LOOKAHEAD
"""Codes of a chunk."""
PROMPT_MAX: Final = encoder.AHEAD_MAX // UP
"""Codes of a prompt."""
VOICES: Final = 4
"""Voices that are kept; of a prompt of 6 s, each has 0.4 GB."""
PROBES: Final = 3
"""Times that a turn is spoken, to see whether it has the same bits."""


def normal(key: str, count: int) -> NDArray[np.float32]:
    """Normal numbers for one purpose."""
    return keyed(key).standard_normal(count, dtype=np.float32)


# -- caches -------------------------------------------------------------------------------------

KEPT: Final = 100
"""Rows at the end of a cache that survive the cut."""


@attrs.frozen(eq=False)
class Piece:
    """Keys and values of some rows, (..., rows, 2 * D); `is_shared`: they are the voice's."""

    rows: Tensor
    is_shared: bool = False

    def part(self, start: int, stop: int) -> Piece:
        """Some of its rows; a session's own are copied, so that the others are freed."""
        rows = self.rows[..., start:stop, :]
        return Piece(rows if self.is_shared else rows.clone(), self.is_shared)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.shape[-2]


Pieces = tuple[Piece, ...]


def count(pieces: Sequence[Piece]) -> int:
    """Number of rows in all pieces."""
    return sum(piece.count for piece in pieces)


def _part(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The rows from `start` to `stop`."""
    for piece in pieces:
        low, high = max(0, start), min(piece.count, stop)
        if low < high:
            yield piece if high - low == piece.count else piece.part(low, high)
        start, stop = start - piece.count, stop - piece.count


def cut(pieces: Pieces, prompt: int) -> Pieces:
    """Keep the first `prompt` rows and the last `KEPT`."""
    rows = count(pieces)
    if rows <= prompt + KEPT:
        return pieces
    return (*_part(pieces, 0, prompt), *_part(pieces, rows - KEPT, rows))


def cut_halved(pieces: Pieces, prompt: int) -> Pieces:
    """Keep what `cut` would keep in the first half of the rows stored twice."""
    rows = count(pieces)
    if 2 * rows <= prompt + KEPT:
        return pieces
    half = (prompt + KEPT) // 2
    twice = (*pieces, *pieces)
    kept = [*_part(twice, 0, min(half, prompt))]
    if half > prompt:  # A prompt below two seconds: the rows before the end of the second copy.
        kept += _part(twice, 2 * rows - KEPT, 2 * rows - KEPT + half - prompt)
    return tuple(kept)


def joined(pieces: Sequence[Piece], *at: int) -> Tensor:
    """The rows of a cache at the leading indices `at`, (..., rows, 2 * D)."""
    return torch.cat([piece.rows[at] for piece in pieces], dim=-2)


# -- turns --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class Turn:
    """A turn between two chunks, or a voice: the start of its turns.

    Attributes:
        prompt: mel frames of the voice's prompt.
        speaker: the voice's, (80,).
        frames: mel frames spoken so far.
        ahead: rows before the encoder's look-ahead layer, (2, C).
        doubled: rows before its upsampling, (4, C).
        code_rows: keys and values of its blocks before the upsampling.
        frame_rows: of those after it.
        flow_rows: of the flow, the newest first.
        before: rows before the flow's convolutions, (steps, depth, 2, 2, 2, C).
        mel: the last frames, (8, 80); none at the turn's start.
        source: the samples of their source, (3840,).
        sound: the samples held back, (3840,).
    """

    prompt: int
    speaker: Tensor
    frames: int = 0
    ahead: Tensor
    doubled: Tensor
    code_rows: Pieces
    frame_rows: Pieces
    flow_rows: Pieces
    before: Tensor
    mel: Tensor
    source: Tensor
    sound: Tensor

    def bytes_of(self, *, shared: bool) -> int:
        """Memory of its caches: of what it shares with its voice, or of its own."""
        pieces = (*self.code_rows, *self.frame_rows, *self.flow_rows)
        tensors = [piece.rows for piece in pieces if piece.is_shared == shared]
        if not shared:
            tensors += [self.ahead, self.doubled, self.before, self.mel, self.source, self.sound]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@attrs.frozen(kw_only=True, eq=False)
class Chunk:
    """Codes to be spoken.

    Attributes:
        reference: of the voice.
        turn: the state before them; None at the turn's start.
        codes: at most 28; unless `last`, the final three are only seen ahead.
        last: the turn ends with them.
        key: what the session's draws are keyed by, such as its seed and unit.
    """

    reference: Reference
    turn: Turn | None
    codes: tuple[int, ...]
    last: bool
    key: str = ""


@attrs.frozen(kw_only=True, eq=False)
class Spoken:
    """A chunk's sound, float32 at 24 kHz, and the turn's next state, None after its last chunk.

    The others are what it is made of, for checks: the chunk's mel (T, 80), and the source and sound
    of these and the kept frames, before sound is faded and held back.
    """

    pcm: NDArray[np.float32]
    turn: Turn | None
    mel: Tensor
    source: Tensor
    raw: Tensor


class Vocoder:
    """Codes to sound; holds only weights and tables.

    Args:
        seed: what all draws are keyed by, such as the fingerprint of the weights.
        steps: of the flow.
        voices: that are kept, used or not.
        sizes: sessions whose chunks are computed together, ascending; none: each by itself.
        table: its noise, (frames, 80); None draws it.
        draw: gives normal numbers, by a key.
    """

    def __init__(
        self,
        flow: Flow,
        hift: Hift,
        *,
        seed: str,
        steps: int = VOICE_STEPS,
        voices: int = VOICES,
        sizes: Sequence[int] = (),
        table: Tensor | None = None,
        draw: Callable[[str, int], NDArray[np.float32]] = normal,
    ) -> None:
        self.flow, self.hift, self._seed, self._draw = flow, hift, seed, draw
        self._voices: OrderedDict[bytes, Turn] = OrderedDict()
        self._voices_max = voices
        weight = flow.encoder_proj.weight
        if table is None:
            drawn = draw(f"{seed}/table of the flow", TABLE_FRAMES * MEL)
            table = torch.from_numpy(drawn.reshape(TABLE_FRAMES, MEL))
        self._table = table.to(weight.device)
        fade = torch.from_numpy(np.hamming(2 * HELD).astype(np.float32)).to(weight.device)
        self._rise, self._fall = fade[:HELD], fade[HELD:]
        with torch.inference_mode():
            flow.prepare(steps)
            hift.prepare()
        choose_kernels()
        self.steps = VoiceSteps(flow, hift, sizes) if sizes else None

    # -- voices ------------------------------------------------------------------------------------

    def voice(self, reference: Reference) -> Turn:
        """The state that a voice's turns start from, from memory or computed."""
        voice = self._voices.pop(reference.digest, None)
        if voice is None:
            with torch.inference_mode():
                voice = self._prepared(reference)
        self._voices[reference.digest] = voice
        while len(self._voices) > self._voices_max:
            self._voices.popitem(last=False)
        return voice

    def _prepared(self, reference: Reference) -> Turn:
        """Run the prompt through the encoder and the flow; HiFT starts with each turn."""
        assert 0 < len(reference.codes) <= PROMPT_MAX, len(reference.codes)
        weight, rows = self.flow.encoder_proj.weight, UP * len(reference.codes)
        empty = self._empty(rows, torch.from_numpy(reference.speaker).to(weight))
        codes = (*reference.codes, *(SILENT_CODE,) * LOOKAHEAD)
        chunk = Chunk(reference=reference, turn=empty, codes=codes, last=False)
        mel = torch.from_numpy(fitted(reference.mel, rows)).to(weight.device)
        return _shared(self._flow(chunk, empty, mel)[1])

    def _empty(self, prompt: int, speaker: Tensor) -> Turn:
        """The state before a prompt."""
        config, dit = self.flow.config.encoder, self.flow.config.dit
        zeros = partial(torch.zeros, dtype=speaker.dtype, device=speaker.device)
        codes, frames = (
            (Piece(zeros(blocks, config.heads, 0, 2 * (config.width // config.heads))),)
            for blocks in (config.blocks, config.up_blocks)
        )
        leading = (self.flow.steps, dit.depth, 2)
        return Turn(
            prompt=prompt,
            speaker=self.flow.speaker(speaker),
            ahead=zeros(encoder.CONV_ROWS, config.width),
            doubled=zeros(encoder.UP_ROWS, config.width),
            code_rows=codes,
            frame_rows=frames,
            flow_rows=(Piece(zeros(*leading, dit.heads, 0, 2 * dit.head_width)),),
            before=zeros(*leading, 2, flow.BEFORE, dit.width),
            mel=torch.zeros(0, MEL, device=speaker.device),
            source=torch.zeros(0, device=speaker.device),
            sound=torch.zeros(0, device=speaker.device),
        )

    def repeats(self) -> bool:
        """Try whether chunks have the same bits again."""
        codes = (SILENT_CODE,) * CODES_MAX
        mel, speaker = np.zeros((UP, MEL), np.float32), np.ones(SPEAKER, np.float32)
        voice = Reference(codes=codes, mel=mel, speaker=speaker)
        chunk = Chunk(reference=voice, turn=None, codes=codes, last=False)
        turns = list[list[bytes]]()
        for _ in range(PROBES):
            first = self.speak([chunk])[0]
            second = self.speak([attrs.evolve(chunk, turn=first.turn)])[0]
            turns.append([first.pcm.tobytes(), second.pcm.tobytes()])
            del self._voices[voice.digest]
        return all(turn == turns[0] for turn in turns)

    # -- chunks ------------------------------------------------------------------------------------

    def speak(self, chunks: Sequence[Chunk]) -> list[Spoken]:
        """Speak chunks, each by itself or, with steps, as many as they hold together."""
        for chunk in chunks:
            assert (1 if chunk.last else CODES_MIN) <= len(chunk.codes) <= CODES_MAX, chunk.codes
            assert 0 <= min(chunk.codes) <= max(chunk.codes) < self.flow.config.codes, chunk.codes
        most = 1 if self.steps is None else self.steps.sizes[-1]
        with torch.inference_mode():
            return [
                one
                for at in range(0, len(chunks), most)
                for one in self._speak(chunks[at : at + most])
            ]

    def _speak(self, chunks: Sequence[Chunk]) -> list[Spoken]:
        for chunk in chunks:  # The voice of a turn in progress is in use: it must not go first.
            if chunk.reference.digest in self._voices:
                self._voices.move_to_end(chunk.reference.digest)
        turns = [chunk.turn or self.voice(chunk.reference) for chunk in chunks]
        if self.steps is not None and all(map(fits, chunks, turns)):
            mels = self._flow_together(chunks, turns, self.steps.padded(len(chunks)))
        else:
            nothing = self._table.new_zeros(1, MEL)
            mels = [
                self._flow(chunk, turn, nothing) for chunk, turn in zip(chunks, turns, strict=True)
            ]
        return self._sounded(chunks, turns, mels)

    def _flow(self, chunk: Chunk, turn: Turn, prompt: Tensor) -> tuple[Tensor, Turn]:
        """The mel frames of a chunk, (T, 80), and the state after it."""
        codes = torch.tensor([chunk.codes], device=self._table.device)  # (1, T + 3)
        mu, encoded = self.flow.encode(codes, encoder_past(turn), last=chunk.last)
        start, rows = count(turn.flow_rows), mu.shape[1]
        flow_out = self.flow(
            self._table[None, start : start + rows],
            self.flow.conditions(mu, turn.speaker[None], prompt),
            lambda at: flow.Past(rows=joined(turn.flow_rows, at), before=turn.before[at]),
        )
        return flow_out.mel[0], _after(turn, encoded, flow_out, 0, rows // UP)

    def _flow_together(
        self, chunks: Sequence[Chunk], turns: Sequence[Turn], padded: Padded
    ) -> list[tuple[Tensor, Turn]]:
        """The same for several chunks, filled up to one shape."""
        counts = torch.tensor([_length(chunk) for chunk in chunks])
        given = torch.tensor([[len(chunk.codes)] for chunk in chunks]) > torch.arange(CODES_MAX)
        codes = pad_sequence([torch.tensor(chunk.codes) for chunk in chunks], batch_first=True)
        held = [(turn.code_rows, turn.frame_rows, turn.flow_rows) for turn in turns]
        of_codes, of_frames, of_flow = torch.tensor([[*map(count, of)] for of in held]).unbind(1)
        for index, turn in enumerate(turns):
            places = (padded.code_rows[:, index], padded.frame_rows[:, index])
            for cache, into in zip((turn.code_rows, turn.frame_rows), places, strict=True):
                _place([piece.rows for piece in cache], into, into.shape[-2] - count(cache))
        half, frames = CACHE // UP, UP * counts
        mu, encoded = padded.encode(
            codes,
            torch.stack([turn.ahead for turn in turns]),
            torch.stack([turn.doubled for turn in turns]),
            mask_of(half + CODES, (half - of_codes, half + counts)),
            mask_of(CACHE + FRAMES, (CACHE - of_frames, CACHE + frames)),
            given[..., None],
            counts,
        )
        speakers = torch.stack([turn.speaker for turn in turns])
        nothing = self._table.new_zeros(1, MEL)
        conditions = self.flow.conditions(mu[: len(turns)], speakers, nothing)
        before = torch.stack([turn.before for turn in turns], dim=3).flatten(2, 3)
        own, cached = (0 * frames, frames), (0 * frames + FRAMES, of_flow + FRAMES)
        mask = mask_of(FRAMES + CACHE, own, cached)
        mask, ends = mask.repeat(2, 1, 1, 1).to(before), frames.repeat(2).to(before.device)

        def past(at: int) -> flow.Past:
            for index, turn in enumerate(turns):
                _place([piece.rows[at] for piece in turn.flow_rows], padded.rows[:, :, index], 0)
            return flow.Past(rows=padded.rows, before=before[at], mask=mask, ends=ends)

        noise = torch.stack([self._table[start : start + FRAMES] for start in of_flow.tolist()])
        flow_out = self.flow(noise, conditions, past, padded.step)
        return [
            (flow_out.mel[index, :length], _after(turn, encoded, flow_out, index, length // UP))
            for index, (turn, length) in enumerate(zip(turns, frames.tolist(), strict=True))
        ]

    # -- sound -------------------------------------------------------------------------------------

    def _sounded(
        self, chunks: Sequence[Chunk], turns: Sequence[Turn], mels: Sequence[tuple[Tensor, Turn]]
    ) -> list[Spoken]:
        """Turn mel frames into sound, those of one length together, with those kept before them."""
        found, groups = dict[int, Spoken](), dict[tuple[int, int], list[int]]()
        for index, (mel, _) in enumerate(mels):
            groups.setdefault((len(mel), len(turns[index].mel)), []).append(index)
        for group in groups.values():
            frames = torch.stack(
                [torch.cat((turns[index].mel, mels[index][0])) for index in group]
            )  # (B, F, 80)
            before = torch.stack([turns[index].source for index in group])  # (B, 3840) or (B, 0)
            noise = torch.stack([self._noise(chunks[index], turns[index]) for index in group])
            noise = F.pad(noise.to(frames.device), (before.shape[1], 0))
            if self.steps is None:
                source, raw = self.hift.speak(frames, noise, before)
            else:
                source, raw = self.steps.sound(frames, noise, before)
            for at, index in enumerate(group):
                mel, after = mels[index]
                after = attrs.evolve(
                    after,
                    mel=frames[at, -MEL_KEPT:].clone(),
                    source=source[at, -HELD:].clone(),
                    sound=raw[at, -HELD:].clone(),
                )
                found[index] = Spoken(
                    pcm=self._pcm(chunks[index], turns[index], raw[at]),
                    turn=None if chunks[index].last else after,
                    mel=mel,
                    source=source[at],
                    raw=raw[at],
                )
        return [found[index] for index in range(len(chunks))]

    def _noise(self, chunk: Chunk, before: Turn) -> Tensor:
        """The source's noise of a chunk's new samples."""
        key = f"{self._seed}/{chunk.key}/source {before.frames}"
        return torch.from_numpy(self._draw(key, UP * _length(chunk) * FRAME))

    def _pcm(self, chunk: Chunk, before: Turn, raw: Tensor) -> NDArray[np.float32]:
        """A chunk's sound after what was held back, without its end, which is held back."""
        sound = raw.clone()
        if len(before.sound):
            sound[:HELD] = sound[:HELD] * self._rise + before.sound * self._fall
        pcm = sound if chunk.last else sound[:-HELD]
        if not before.frames:
            pcm = F.pad(pcm, (HELD, 0))
        pcm = pcm.clamp(-1, 1)  # Where it fades, the two windows add up to 1.08.
        found: NDArray[np.float32] = pcm.cpu().numpy()
        return found


def session_bytes(config: FlowConfig, steps: int, itemsize: int) -> int:
    """The most memory of a session: its voice, and a turn's state with that of a rollback."""
    dit, width = config.dit, config.encoder.width
    flow_row = steps * dit.depth * 2 * dit.heads * 2 * dit.head_width
    encoder_row = 2 * width * config.encoder.up_blocks + width * config.encoder.blocks
    before = steps * dit.depth * 2 * 2 * flow.BEFORE * dit.width
    prompt = UP * int(SECONDS_MAX * CODES_A_SECOND)
    own = max(prompt, KEPT) + UP * CODES_MAX  # A state shares its rows with the one before it.
    return itemsize * ((prompt + own) * (flow_row + encoder_row) + 3 * before)


def fitted(mel: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
    """A prompt's mel with as many rows as wanted: cut, or its last row repeated."""
    return mel[:rows] if len(mel) >= rows else np.pad(mel, ((0, rows - len(mel)), (0, 0)), "edge")


def encoder_past(turn: Turn) -> encoder.Past:
    """What a chunk sees in the encoder."""

    def rows_of(cache: Pieces) -> list[Tensor]:
        return [joined(cache, block)[None] for block in range(len(cache[0].rows))]

    return encoder.Past(
        ahead=turn.ahead[None],
        doubled=turn.doubled[None],
        codes=rows_of(turn.code_rows),
        frames=rows_of(turn.frame_rows),
    )


def _length(chunk: Chunk) -> int:
    """Codes that a chunk gives sound for."""
    return len(chunk.codes) - (0 if chunk.last else LOOKAHEAD)


def fits(chunk: Chunk, turn: Turn) -> bool:
    """Whether a fixed shape holds a chunk; all that a session speaks are so."""
    return _length(chunk) <= CODES and turn.prompt + KEPT <= CACHE


def _place(pieces: Sequence[Tensor], into: Tensor, at: int) -> None:
    """Copy rows to a place on, and zeros elsewhere: NaN that is left there would spread."""
    into[..., :at, :] = 0
    for rows in pieces:
        into[..., at : at + rows.shape[-2], :] = rows
        at += rows.shape[-2]
    into[..., at:, :] = 0


def _after(
    turn: Turn, encoded: encoder.Encoded, flow_out: flow.FlowOutput, index: int, length: int
) -> Turn:
    """The state after a chunk of so many codes, the one at `index` of a batch."""
    prompt, rows = turn.prompt, UP * length

    def own(batch: Tensor) -> Tensor:
        """The chunk's part of what the flow keeps, without the rest of the batch."""
        return batch.view(*batch.shape[:2], 2, -1, *batch.shape[3:])[:, :, :, index]

    return attrs.evolve(
        turn,
        frames=turn.frames + rows,
        ahead=encoded.ahead[index].clone(),
        doubled=encoded.doubled[index].clone(),
        code_rows=cut_halved(
            (*turn.code_rows, Piece(encoded.codes[index, ..., :length, :].clone())), prompt
        ),
        frame_rows=cut(
            (*turn.frame_rows, Piece(encoded.frames[index, ..., :rows, :].clone())), prompt
        ),
        flow_rows=cut(
            (Piece(own(flow_out.rows)[..., :rows, :].contiguous()), *turn.flow_rows), prompt
        ),
        before=own(flow_out.before).contiguous(),
    )


def _shared(turn: Turn) -> Turn:
    """A voice's state, whose pieces sessions share."""

    def shared(pieces: Pieces) -> Pieces:
        return tuple(Piece(piece.rows, is_shared=True) for piece in pieces if piece.count)

    return attrs.evolve(
        turn,
        frames=0,
        code_rows=shared(turn.code_rows),
        frame_rows=shared(turn.frame_rows),
        flow_rows=shared(turn.flow_rows),
    )
