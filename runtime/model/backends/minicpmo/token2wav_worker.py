"""The child process that runs the public token2wav package, for `token2wav.py`.

The package keeps one stream in attributes, and its caches partly are views of buffers that the next
call overwrites. So the voice and the turn are set before each call and copied out after it; states
are immutable. Each call is seeded by its request, so its noise depends only on the voice and the
turn's codes.

This file is run by its path in the package's interpreter, and needs only numpy. Frames
(`read_frame`) go over standard input and output; the process ends with its input, so with its
parent. It was never run with the real weights or on a GPU; `Decoder` gave the public code's bytes
with minicpmo-utils 1.0.6 and 1.0.7, small and with random weights, on a CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import struct
import sys
import tempfile
import wave
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import metadata, util
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

REQUIREMENTS: Final = ("minicpmo-utils[tts]==1.0.6", "torchaudio>=2.3,<2.9", "setuptools<81")
"""For `pip install`; pyproject.toml gives the reason."""
INSTALL: Final = "pip install " + " ".join(f"'{name}'" for name in REQUIREMENTS)
DISTRIBUTIONS: Final = ("minicpmo-utils", "torch", "torchaudio", "onnxruntime")
MODULES: Final = ("stepaudio2", "s3tokenizer", "torch", "torchaudio", "onnxruntime", "hyperpyyaml")
"""Required modules; `stepaudio2` and `s3tokenizer` come with the package itself."""

FRAME: Final = struct.Struct("<II")
HEADER_BYTES_MAX: Final = 1 << 22
"""Three times a batch of 64 turns that are all sent again, two minutes each."""
BODY_BYTES_MAX: Final = 1 << 24
"""Three times the sound of such a batch, 60 kB each."""
REASON_CHARACTERS: Final = 500
"""The rest of a library's error is for its own log."""

CODES: Final = 6561
"""A larger code would break the GPU's context, for all sessions."""
CODES_A_CALL: Final = 64
"""The parent sends 28; the package's buffers end at 1000 frames, two per code."""
LOOKAHEAD: Final = 3
SILENT_CODE: Final = 4218
RATE_HZ: Final = 16_000
FAILURES_MAX: Final = 3
"""After this many failures in a row the process ends: a broken GPU context does not recover."""

VOICE_ATTRIBUTES: Final = ("cache", "_stream_prompt")
"""The package's attributes of the voice used by `stream`; the second since 1.0.7."""
FLOW, WAVE = "stream_cache", "hift_cache_dict"
"""Its attributes of the turn."""
PER_STEP: Final = ("estimator_cnn_cache", "estimator_att_cache")
"""Caches with 16 entries, whatever the number of steps; only the steps' are read again."""


class MalformedFrame(ValueError):  # noqa: N818 - names say what happened
    """The other side wrote an invalid frame, or ended within one."""


def write_frame(pipe: IO[bytes], header: Mapping[str, Any], body: bytes = b"") -> None:
    """Write one frame: two lengths (u32, little-endian), a JSON object, and plain bytes."""
    text = json.dumps(header).encode()
    pipe.write(FRAME.pack(len(text), len(body)) + text + body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame, None if the pipe was closed before it; `MalformedFrame` if it is invalid."""
    head = pipe.read(FRAME.size)
    if not head:
        return None
    if len(head) < FRAME.size:
        raise MalformedFrame("a frame ends within its lengths")
    lengths = FRAME.unpack(head)
    if lengths[0] > HEADER_BYTES_MAX or lengths[1] > BODY_BYTES_MAX:
        raise MalformedFrame(f"a frame of {lengths[0]} and {lengths[1]} bytes")
    text, body = (pipe.read(length) for length in lengths)
    if len(text) < lengths[0] or len(body) < lengths[1]:
        raise MalformedFrame("a frame ends too early")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise MalformedFrame("a frame's header is not JSON") from error
    if not isinstance(header, dict):
        raise MalformedFrame("a frame's header is no object")
    return header, body


def copied(value: Any) -> Any:
    """Deep-copy tensors, arrays, and dicts and sequences of them."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if hasattr(value, "clone") else value


def seed_all(seed: int) -> None:
    """Seed every generator that the package may use."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def reason_of(error: Exception) -> str:
    """Describe a failure in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{sys.executable} has no module {error.name!r}: {INSTALL} there"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:REASON_CHARACTERS]


class Decoder:
    """The package's `Token2wav`, used statelessly; `steps` of the flow are its `n_timesteps`."""

    def __init__(self, package: Any, steps: int) -> None:
        self._package, self._steps = package, steps
        torch = sys.modules.get("torch")
        self._mode = nullcontext if torch is None else torch.inference_mode

    @classmethod
    def load(cls, folder: str, *, float16: bool, steps: int) -> Decoder:
        """Import the package and load its weights, seeded, since it draws fixed noise then."""
        module = importlib.import_module("stepaudio2")
        seed_all(0)
        return cls(module.Token2wav(folder, float16=float16, n_timesteps=steps), steps)

    def voice(self, path: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Prepare a voice from a sound file: its path, the package's state, a first turn state."""
        seed_all(0)
        self._package.cache = None
        with self._mode():
            flow, vocoder = self._package.set_stream_cache(path)
        kept = {name: getattr(self._package, name, None) for name in VOICE_ATTRIBUTES}
        return path, kept, self._turn(flow, vocoder)

    def _turn(self, flow: Mapping[str, Any], vocoder: Any) -> dict[str, Any]:
        needed = {
            name: value[: self._steps] if name in PER_STEP else value
            for name, value in flow.items()
        }
        return {FLOW: copied(needed), WAVE: copied(vocoder)}

    def stream(
        self, voice: Any, turn: Mapping[str, Any], codes: Sequence[int], *, last: bool, seed: int
    ) -> tuple[bytes, dict[str, Any]]:
        """Turn codes into sound, signed 16 bit at 24 kHz; return also the turn's next state."""
        path, kept, _ = voice
        for name, value in {**kept, **copied(dict(turn))}.items():
            setattr(self._package, name, value)
        seed_all(seed)
        with self._mode():
            pcm = self._package.stream(list(codes), prompt_wav=path, last_chunk=last)
        return bytes(pcm), self._turn(self._package.stream_cache, self._package.hift_cache_dict)


class Worker:
    """Voices and turns, by the parent's numbers.

    Args:
        decoder: the package.
        states: maximum turns kept; the least recently used goes, and is answered `lost`.
        voices: maximum voices kept; the least recently used goes.
        default_voice: a sound file for sessions without a reference; None if there is none.
    """

    def __init__(
        self, decoder: Decoder, *, states: int, voices: int, default_voice: str | None
    ) -> None:
        self._decoder, self._states_max, self._voices_max = decoder, states, voices
        self._voices: OrderedDict[int, Any] = OrderedDict()
        self._states: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._default: Any = None if default_voice is None else decoder.voice(default_voice)
        self.failures = 0

    def warm_up(self) -> None:
        """Run once, so that the first listener does not wait for the choice of kernels."""
        if self._default is not None:
            turn, codes = self._default[2], [SILENT_CODE] * 28
            self._decoder.stream(self._default, turn, codes, last=False, seed=0)

    def open(self, handle: int, reference: bytes) -> None:
        """Prepare a voice from float32 at 16 kHz, or the default one if empty; keep any failure."""
        self._voices[handle] = self._opened(reference)
        while len(self._voices) > self._voices_max:
            self._voices.popitem(last=False)

    def _opened(self, reference: bytes) -> Any:
        if not reference:
            return self._default or "there is no reference audio and no default voice"
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "reference.wav")
                pcm = np.clip(np.frombuffer(reference, "<f4"), -1.0, 1.0)
                with wave.open(path, "wb") as file:
                    file.setnchannels(1)
                    file.setsampwidth(2)
                    file.setframerate(RATE_HZ)
                    file.writeframes(np.rint(pcm * 32767.0).astype("<i2").tobytes())
                return self._decoder.voice(path)
        except Exception as error:
            return f"the reference audio cannot be used: {reason_of(error)}"

    def drop(self, states: Sequence[int], voices: Sequence[int]) -> None:
        """Drop turns and voices; unknown numbers are ignored."""
        for handle in states:
            self._states.pop(handle, None)
        for handle in voices:
            self._voices.pop(handle, None)

    def sound(self, items: Sequence[Mapping[str, Any]], body: bytes) -> tuple[list[Any], bytes]:
        """Answer a batch, item by item and in order.

        Args:
            items: `voice`, `state` (0 at a turn's start), `next` (number of the resulting state),
                `codes` (count), `last`, `seed`, `spend` (`state` may be dropped), `heard` (sound is
                wanted, not only the state).
            body: the codes, int32.

        Returns:
            Per item `samples`, `error` or `lost`; and the sound of all.
        """
        codes, answers, sounds, at = np.frombuffer(body, "<i4").tolist(), [], [], 0
        for item in items:
            mine, at = codes[at : at + item["codes"]], at + item["codes"]
            try:
                answer, pcm = self._one(item, mine)
                self.failures = 0
            except Exception as error:
                answer, pcm = {"error": reason_of(error)}, b""
                self.failures += 1
            answers.append(answer)
            sounds.append(pcm)
        return answers, b"".join(sounds)

    def _one(self, item: Mapping[str, Any], codes: Sequence[int]) -> tuple[dict[str, Any], bytes]:
        voice = self._voices.get(item["voice"])
        if voice is None:
            return {"lost": "voice"}, b""
        if isinstance(voice, str):
            return {"error": voice}, b""
        self._voices.move_to_end(item["voice"])
        turn, last = (
            voice[2] if not item["state"] else self._states.get(item["state"]),
            item["last"],
        )
        if turn is None:
            return {"lost": "state"}, b""
        least = 1 if last else LOOKAHEAD + 1
        if not least <= len(codes) <= CODES_A_CALL or not all(0 <= code < CODES for code in codes):
            return {"error": f"{len(codes)} codes, or one that is none"}, b""
        pcm, after = self._decoder.stream(voice, turn, codes, last=last, seed=item["seed"])
        if item["spend"]:
            self._states.pop(item["state"], None)
        elif item["state"]:
            self._states.move_to_end(item["state"])
        if not last:
            self._states[item["next"]] = after
        while len(self._states) > self._states_max:
            self._states.popitem(last=False)
        pcm = pcm if item["heard"] else b""
        return {"samples": len(pcm) // 2}, pcm


def found() -> dict[str, Any]:
    """Report this interpreter's missing modules and versions, without imports."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    missing = [name for name in MODULES if util.find_spec(name) is None]
    return {"missing": missing, "versions": versions, "python": sys.version.split()[0]}


def serve(worker: Worker, asked: IO[bytes], answered: IO[bytes]) -> int:
    """Answer frames until the input ends; return the exit status."""
    while True:
        frame = read_frame(asked)
        if frame is None:
            return 0
        header, body = frame
        if header["do"] == "open":
            worker.open(header["voice"], body)
        elif header["do"] == "drop":
            worker.drop(header["states"], header["voices"])
        else:
            answers, sound = worker.sound(header["items"], body)
            write_frame(answered, {"number": header["number"], "answers": answers}, sound)
            if worker.failures >= FAILURES_MAX:
                return 1


def main(arguments: Sequence[str]) -> int:
    """Serve with the settings given as JSON; `--check` only reports the modules."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    if list(arguments) == ["--check"]:
        print(json.dumps(found()))
        return 0
    answered = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # The package prints, which is no frame.
    settings = json.loads(arguments[0])
    try:
        decoder = Decoder.load(
            settings["folder"], float16=settings["float16"], steps=settings["steps"]
        )
        worker = Worker(
            decoder,
            states=settings["states"],
            voices=settings["voices"],
            default_voice=settings["default_voice"],
        )
        worker.warm_up()
    except Exception as error:
        write_frame(answered, {"failed": reason_of(error)})
        return 1
    write_frame(answered, {"hello": found()})
    return serve(worker, sys.stdin.buffer, answered)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
