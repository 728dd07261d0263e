"""The published vocoder as a `Vocoder`: the public token2wav package in its own process.

Its pins exclude ours, so the operator makes a virtual environment and names its interpreter
(`Options`). It was never run with the real weights or on a GPU; tests use a stand-in.

- A turn's state is a value: the codes so far (`Turn`). If the worker's caches are lost, the turn is
  sent again from its start. So an older state gives the same sound, and sessions share no caches.
- The package's random draws are seeded by the voice and the turn's codes.
- If the worker dies, hangs or answers garbage, the units in flight fail with `VoiceLost` and can be
  rolled back. A new worker starts in the background; until then, and for good after `RESTARTS_MAX`
  workers in a row without sound, units give only text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from ..base import BackendRefused
from .token2wav_batch import Asked, Place, SpokenVoice, Turn, digest_of, remember, unpacked
from .token2wav_link import WORKER, Link, VoiceLost, VoiceUnavailable
from .token2wav_worker import SILENT_CODE
from .vocoder import Pcm, Sounding

FILES: Final = (
    "flow.yaml",
    "flow.pt",
    "hift.pt",
    "campplus.onnx",
    "speech_tokenizer_v2_25hz.onnx",
)
"""The files of a checkpoint's `assets/token2wav`."""
DEFAULT_VOICES: Final = ("HT_ref_audio.wav", "system_ref_audio.wav")
"""The voice of sessions without reference audio, in that folder's parent; the first that exists."""

RATE_HZ: Final = 16_000
REFERENCE_S_MIN: Final = 0.5
"""Too little reference audio for a voice."""
REFERENCE_S_MAX: Final = 6.0
"""About the length of the published model's own voice. Caches grow with it (0.13 MB a step and
frame, 50 frames a second, in float32), and the package's buffers end at 17 s."""

START_WAIT_S: Final = 180.0
"""For importing torch and loading 1 GB from a cold disk."""
SOUND_WAIT_S: Final = 10.0
"""Far more than a second of sound takes; all sessions wait for it, so it is no longer."""
ITEM_WAIT_S: Final = 0.5
"""Added for each item of a batch, since items are computed in sequence."""
RESTARTS_MAX: Final = 3
"""Workers in a row without sound: the next would fail too."""
STATES_A_SLOT: Final = 2
"""A turn's newest state and the rollback's; others are sent again when needed."""

PYTHON: Final = "ANTIPHON_TOKEN2WAV_PYTHON"
STEPS: Final = "ANTIPHON_TOKEN2WAV_STEPS"
FLOAT16: Final = "ANTIPHON_TOKEN2WAV_FLOAT16"

_log = logging.getLogger("antiphon.model")


@attrs.frozen(kw_only=True)
class Options:
    """The operator's settings of the worker.

    `python`: the interpreter that has the package. `steps`: of the flow, 1 to 16; fewer are faster
    and rougher. `float16`: run the flow in half precision.
    """

    python: str = sys.executable
    steps: int = attrs.field(
        default=10, validator=[attrs.validators.ge(1), attrs.validators.le(16)]
    )
    float16: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Read `ANTIPHON_TOKEN2WAV_PYTHON`, `_STEPS`, `_FLOAT16` (`1`: yes), or `ValueError`."""
        steps = environment.get(STEPS, "10")
        if not steps.isdecimal():
            raise ValueError(f"{STEPS} is {steps!r}, not a number from 1 to 16")
        return cls(
            python=environment.get(PYTHON) or sys.executable,
            steps=int(steps),
            float16=environment.get(FLOAT16, "0") == "1",
        )


class Token2Wav:
    """The public package as a vocoder; `VoiceUnavailable` says why the worker cannot start."""

    silent_code = SILENT_CODE
    is_exact = False
    """Unproven on a GPU."""

    def __init__(self, folder: Path, options: Options, *, slots: int) -> None:
        beside = (folder.resolve().parent / name for name in DEFAULT_VOICES)
        default = next((str(path) for path in beside if path.exists()), None)
        settings = {
            "folder": str(folder.resolve()),
            "float16": options.float16,
            "steps": options.steps,
            "states": STATES_A_SLOT * slots,
            "voices": slots + 1,
            "default_voice": default,
        }
        self._has_default_voice = default is not None
        self._command = [options.python, str(WORKER), json.dumps(settings)]
        self._settled = threading.Condition()
        self._calls = threading.Lock()
        self._numbers = itertools.count(1)
        self._voices: weakref.WeakValueDictionary[bytes, SpokenVoice] = (
            weakref.WeakValueDictionary()
        )
        self._restarts, self._is_closed = 0, False
        self._link: Link | None = None
        link, hello = self._start()
        self._adopt(link)
        versions = (f"{name} {version}" for name, version in hello["versions"].items())
        precision = "float16" if options.float16 else "float32"
        self.fingerprint = ", ".join([*versions, precision, f"{options.steps} steps"])

    def _start(self) -> tuple[Link, dict[str, Any]]:
        mine = weakref.WeakMethod(self._ended)

        def ended(link: Link, reason: str) -> None:
            method = mine()
            if method is not None:
                method(link, reason)

        link = Link(self._command, ended)
        hello = link.greeting(START_WAIT_S)
        weakref.finalize(self, link.close)
        return link, hello

    # -- the life of the worker -------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a worker is running."""
        link = self._link
        return link is not None and link.is_alive

    def settle(self, wait_s: float) -> bool:
        """Wait at most `wait_s` for a starting worker; return whether one is running."""
        with self._settled:
            self._settled.wait_for(
                lambda: self.is_ready or self._is_closed or self._restarts > RESTARTS_MAX, wait_s
            )
        return self.is_ready

    def close(self) -> None:
        """End the worker; from now on units give only text."""
        with self._settled:
            self._is_closed = True
            link, self._link = self._link, None
            self._settled.notify_all()
        if link is not None:
            link.close()

    def _ended(self, link: Link, reason: str) -> None:
        with self._settled:
            if link is not self._link or link.was_closed:
                return
            self._link = None
        _log.error("%s; a new one is started", reason)
        threading.Thread(target=self._restart, name="token2wav-restart", daemon=True).start()

    def _restart(self) -> None:
        while True:
            with self._settled:
                self._restarts += 1
                self._settled.notify_all()
                if self._is_closed:
                    return
                if self._restarts > RESTARTS_MAX:
                    _log.error("the vocoder is given up; units give text only")
                    return
            try:
                link, _ = self._start()
            except VoiceUnavailable as error:
                _log.error("the vocoder does not start again: %s", error)
                continue
            self._adopt(link)
            return

    def _adopt(self, link: Link) -> None:
        with self._settled:
            if not self._is_closed:
                self._link = link
            self._settled.notify_all()
        if self._is_closed:
            link.close()
        elif not link.is_alive:  # It died before it was adopted.
            self._ended(link, "the vocoder's process is lost")

    # -- voices and sound -------------------------------------------------------------------------

    def open(self, reference: Pcm) -> object:
        """Open a voice, or None; `BackendError` if there is too little reference audio."""
        seconds = len(reference) / RATE_HZ
        if len(reference) and seconds < REFERENCE_S_MIN:
            raise BackendRefused(f"reference audio of {seconds:.2f} s is below {REFERENCE_S_MIN} s")
        if not len(reference) and not self._has_default_voice:
            _log.warning("a session without reference audio: the model has no voice of its own")
            return None
        kept = reference[: int(REFERENCE_S_MAX * RATE_HZ)].astype("<f4").tobytes()
        digest = hashlib.blake2b(kept, digest_size=16).digest()
        with self._calls:
            voice = self._voices.get(digest)
            if voice is None:
                place = Place(kind="voices")
                voice = SpokenVoice(reference=kept, digest=digest, place=place)
                remember(voice, place)
                self._voices[digest] = voice
            if self._link is not None:
                self._send_voice(self._link, voice)
        return voice

    def _send_voice(self, link: Link, voice: SpokenVoice, *, again: bool = False) -> None:
        if voice.place.link is not link or again:
            voice.place.link, voice.place.number = link, next(self._numbers)
            link.tell({"do": "open", "voice": voice.place.number}, voice.reference)

    def sound(self, soundings: Sequence[Sounding]) -> list[tuple[Pcm, object]]:
        """Turn codes into sound; the worker answers the soundings in sequence.

        `VoiceLost`: the worker is lost, and a new one is starting; `BackendError`: the package
        failed.
        """
        with self._calls:
            link = self._link
            if link is None:
                raise VoiceLost("the vocoder is being started again")
            asked = [self._ask_for(link, sounding) for sounding in soundings]
            results = self._exchange(link, asked)
            for index, result in enumerate(results):
                if result is None:  # The worker lost the turn: send it all again.
                    once_more = self._ask_for(link, soundings[index], again=True)
                    (results[index],) = self._exchange(link, [once_more])
            self._restarts = 0
        answers = [result for result in results if result is not None]
        if len(answers) < len(results):
            raise VoiceLost("the worker forgets what it was just told")
        return answers

    def _ask_for(self, link: Link, sounding: Sounding, *, again: bool = False) -> Asked:
        voice, state = sounding.voice, sounding.state
        assert isinstance(voice, SpokenVoice), voice
        assert state is None or isinstance(state, Turn), state
        self._send_voice(link, voice, again=again)
        asked = Asked(sounding=sounding)
        common = {"voice": voice.place.number}
        if state is not None and (again or state.place.link is not link):
            before, digest = 0, voice.digest
            for codes in state.told:
                after = next(self._numbers)
                step = {"state": before, "next": after, "spend": before > 0, "heard": False}
                digest = asked.add(codes, digest, **step, last=False, **common)
                before = after
            state.place.link, state.place.number = link, before
        number = state.place.number if state is not None else 0
        digest = voice.digest if state is None else state.digest
        final = {"state": number, "next": next(self._numbers), "spend": False, "heard": True}
        asked.add(sounding.codes, digest, **final, last=sounding.last, **common)
        return asked

    def _exchange(self, link: Link, batch: Sequence[Asked]) -> list[tuple[Pcm, object] | None]:
        items = [item for asked in batch for item in asked.items]
        codes = np.concatenate([np.asarray(asked.codes, "<i4") for asked in batch]).tobytes()
        wait_s = SOUND_WAIT_S + ITEM_WAIT_S * len(items)
        frame = link.ask({"do": "sound", "items": items}, codes, wait_s)
        try:
            sounds = unpacked(frame, items)
        except ValueError as error:
            link.kill(f"malformed answer: {error}")
            raise VoiceLost(f"the vocoder gave a malformed answer: {error}") from error
        results: list[tuple[Pcm, object] | None] = []
        for asked in batch:
            mine, sounds = sounds[: len(asked.items)], sounds[len(asked.items) :]
            pcm = None if any(sound is None for sound in mine) else mine[-1]
            results.append(None if pcm is None else (pcm, self._after(link, asked)))
        return results

    def _after(self, link: Link, asked: Asked) -> Turn | None:
        sounding, number = asked.sounding, asked.items[-1]["next"]
        voice, state = sounding.voice, sounding.state
        assert isinstance(voice, SpokenVoice), voice
        if sounding.last:
            return None
        told, digest = (state.told, state.digest) if isinstance(state, Turn) else ((), voice.digest)
        place = Place(kind="states", link=link, number=number)
        turn = Turn(
            voice=voice,
            told=(*told, sounding.codes),
            digest=digest_of(digest, sounding.codes, last=False),
            place=place,
        )
        remember(turn, place)
        return turn
