"""Selects the vocoder for a checkpoint's `assets/token2wav`, and reports missing parts.

Pieces of sound are `tiny`'s; the published files are run by `runtime/model/voice`. Without either,
or without onnxruntime, a model gives only text, and logs why. Files that are there but do not fit
are an error.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import torch

from protocol.values.limits import VOICE_STEPS

from ....settings.extras import install
from ...voice import checkpoint as published
from ...voice import reference as audio
from ...voice.config import SILENT_CODE
from ...voice.vocoder import VOICES, Chunk, Turn, VoiceSteps, session_bytes, sizes_on
from ...voice.vocoder import Vocoder as PublishedVocoder
from .checkpoint import CheckpointError
from .device import MemoryPlan
from .vocoder import Pcm, PieceVocoder, Vocode, Vocoder

PIECES: Final = "pieces.safetensors"
FILES: Final = (
    *(published.FLOW_YAML, published.FLOW, published.HIFT),
    *(audio.SPEAKER_FILE, audio.CODES_FILE),
)
"""The published files."""
DEFAULT_VOICES: Final = ("HT_ref_audio.wav", "system_ref_audio.wav")
"""The voice of sessions without reference audio, in that folder's parent; the first that exists."""
REFERENCES_MAX: Final = 256
"""Reference sounds whose codes are kept."""
REFERENCE_BYTES: Final = 120_000
"""Of the longest one, whose mel has 300 frames of 80 float32, with its codes."""

FIRST_CODES: Final = 15
"""Others measured the first sound 18% sooner with these, and no loss of quality."""

_log = logging.getLogger("antiphon.model")


def lacking(folder: Path) -> tuple[str, ...]:
    """List what a voice lacks, a line each, as `antiphon doctor` shows it; loads nothing."""
    if (folder / PIECES).exists():
        return ()
    absent = [name for name in FILES if not (folder / name).is_file()]
    if len(absent) == len(FILES):
        return (f"no vocoder in {folder}: neither {PIECES} nor {', '.join(FILES)}",)
    lines = [f"{folder / name} is missing" for name in absent]
    if find_spec("onnxruntime") is None:
        lines.append(f"the voice needs onnxruntime: {install('voice')}")
    return tuple(lines)


def has_published(folder: Path) -> bool:
    """Whether the folder's voice is the published one, with nothing missing."""
    return not ((folder / PIECES).exists() or lacking(folder))


def survey(folder: Path) -> int:
    """Check a folder in which nothing is missing, without loading it; its number of codes.

    Pieces are loaded: they are small. Errors are those of `load_vocoder`.
    """
    if not has_published(folder):
        return PieceVocoder.load(folder).codes
    for name in (audio.CODES_FILE, audio.SPEAKER_FILE):
        _network(folder / name)
    _default(folder)
    return published.survey(folder)[0].config.codes


def has_default(folder: Path) -> bool:
    """Whether sessions without reference audio have a voice."""
    return _default(folder) is not None


def planned(
    needs: MemoryPlan, folder: Path, dtype: torch.dtype, device: torch.device, steps: int
) -> MemoryPlan:
    """Add a folder's published voice to a plan; `CheckpointError` if its files do not fit."""
    if not has_published(folder):
        return needs
    flow, hift = published.survey(folder)
    counts = {
        name: sum(weight.numel() for weight in module.state_dict().values())
        for name, module in (("flow", flow), ("hift", hift))
    }
    weights = {
        "flow": counts["flow"] * dtype.itemsize,
        "hift": counts["hift"] * torch.float32.itemsize,
    }
    each = session_bytes(flow.config, steps, dtype.itemsize)
    if device.type != "cpu":
        each += VoiceSteps(flow.to(dtype), hift, (1,)).bytes
    return attrs.evolve(
        needs,
        parameters={**needs.parameters, **counts},
        weight_bytes={**needs.weight_bytes, **weights},
        session_bytes={**needs.session_bytes, "vocoder": each},
        voices_bytes=REFERENCES_MAX * REFERENCE_BYTES
        + sum((folder / name).stat().st_size for name in (audio.CODES_FILE, audio.SPEAKER_FILE)),
    )


def load_vocoder(
    folder: Path,
    *,
    slots: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    exact: bool = False,
    steps: int = VOICE_STEPS,
) -> Vocoder | None:
    """Load the vocoder for the folder's files; None if there is none, with the reason logged.

    `OSError`: a file cannot be read; `ValueError`: the files do not fit each other.
    """
    if (folder / PIECES).exists():
        return PieceVocoder.load(folder)
    reasons = lacking(folder)
    if not reasons:
        networks = [_network(folder / name) for name in (audio.CODES_FILE, audio.SPEAKER_FILE)]
        vocoder = published.load_vocoder(
            folder,
            steps=steps,
            voices=max(VOICES, slots),
            sizes=partial(sizes_on, torch.device(device), slots, exact=exact),
            dtype=dtype,
            device=device,
        )
        references = audio.References(*networks, vocabulary=vocoder.flow.config.codes)
        return PublishedVoice(vocoder, references, _default(folder))
    for reason in reasons:
        _log.warning("text alone, without speech: %s", reason)
    return None


def _network(path: Path) -> audio.Network:
    inputs = 2 if path.name == audio.CODES_FILE else 1
    try:
        network = audio.open_network(path)
        found = len(network.get_inputs())
    except Exception as error:  # Of onnxruntime, of any type.
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path.name} cannot be loaded: {text}") from error
    if found != inputs:
        raise CheckpointError(f"{path.name} has {found} inputs, not {inputs}")
    return network


def _default(folder: Path) -> Pcm | None:
    """The reference audio of sessions that bring none."""
    for path in (folder.resolve().parent / name for name in DEFAULT_VOICES):
        if path.is_file():
            from ....media.sound import AudioFileError, read_wav  # with what decodes sound

            try:
                sound = np.frombuffer(read_wav(path), "<f4")
            except AudioFileError as error:
                raise CheckpointError(str(error)) from error
            if len(sound) < audio.SECONDS_MIN * audio.RATE_HZ:
                raise CheckpointError(f"{path} is shorter than {audio.SECONDS_MIN} s")
            return sound[: int(audio.SECONDS_MAX * audio.RATE_HZ)]
    return None


def digest_of(sound: Pcm) -> bytes:
    """A hash of samples."""
    return hashlib.blake2b(sound.tobytes(), digest_size=16).digest()


class PublishedVoice:
    """The published voice as a `Vocoder`: a voice is a `Reference`, a state a `Turn`.

    Args:
        references: reads reference audio.
        default: that of sessions which bring none.
    """

    silent_code = SILENT_CODE
    first_codes = FIRST_CODES

    def __init__(
        self, vocoder: PublishedVocoder, references: audio.References, default: Pcm | None
    ) -> None:
        self._vocoder, self._references, self._default = vocoder, references, default
        self._sizes = () if vocoder.steps is None else vocoder.steps.sizes
        self._read: OrderedDict[bytes, audio.Reference] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def codes(self) -> int:
        """The size of the flow's vocabulary."""
        return self._vocoder.flow.config.codes

    @property
    def is_exact(self) -> bool:
        """Whether each chunk is computed by itself, and has the same bits again."""
        if max(self._sizes, default=1) > 1:
            return False
        is_on_cpu = self._vocoder.flow.encoder_proj.weight.device.type == "cpu"
        return is_on_cpu or self._vocoder.repeats()

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """The voice's arithmetic, and the libraries that read reference audio."""
        sizes = "/".join(map(str, self._sizes))
        return {
            "voice": f"token2wav in steps of {sizes}" if sizes else "token2wav",
            "voice_steps": str(self._vocoder.flow.steps),
            "default_voice": "none" if self._default is None else digest_of(self._default).hex(),
            **{name: version(name) for name in ("onnxruntime", "soxr")},
        }

    def open(self, reference: Pcm) -> audio.Reference | None:
        """Read reference audio, or recall what it gave."""
        if not len(reference):
            if self._default is None:
                _log.warning("a session without reference audio: the model has no voice of its own")
                return None
            reference = self._default
        digest = digest_of(reference)
        with self._lock:
            found = self._read.pop(digest, None)
        if found is None:
            found = self._references.read(reference)
        with self._lock:
            self._read[digest] = found
            while len(self._read) > REFERENCES_MAX:
                self._read.popitem(last=False)
        return found

    def prepare(self, voice: object) -> None:
        """Compute what the voice's turns start from."""
        assert isinstance(voice, audio.Reference), voice
        self._vocoder.voice(voice)

    def sound(self, requests: Sequence[Vocode]) -> list[tuple[Pcm, object]]:
        """Speak a chunk of each turn."""
        chunks = list[Chunk]()
        for each in requests:
            assert isinstance(each.voice, audio.Reference), each.voice
            assert each.state is None or isinstance(each.state, Turn), each.state
            chunks.append(
                Chunk(
                    reference=each.voice,
                    turn=each.state,
                    codes=each.codes,
                    last=each.last,
                    key=each.key,
                )
            )
        return [(one.pcm, one.turn) for one in self._vocoder.speak(chunks)]
