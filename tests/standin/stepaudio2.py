"""A stand-in for the public token2wav package (minicpmo-utils), small and deterministic; no test.

It has the surface and the habits that `token2wav_worker.py` must cope with, and no line of the
package: one stream in attributes of one object, caches that are views of buffers which the next
call writes over, or that are changed in place, noise from a global generator at every call, noise
drawn when it is made, and prints to standard output. Its sound means nothing.

Some codes make it misbehave: see `FAULTS`.
"""

from __future__ import annotations

import os
import threading
import wave
from pathlib import Path
from typing import Any

import numpy as np

DIES, HANGS, RAISES, OVERFLOWS = 6000, 6001, 6002, 6003
FAULTS = (DIES, HANGS, RAISES, OVERFLOWS)
BUFFER_STEPS, BUFFER_FRAMES = 16, 64
SAMPLES_A_CODE, HELD = 960, 3840


class Token2wav:
    """The package's only class, as far as it is used."""

    def __init__(self, model_path: str, float16: bool = False, n_timesteps: int = 10) -> None:
        print("loading", model_path)
        if (Path(model_path) / "flow.pt").read_bytes() == b"damaged":
            raise RuntimeError("flow.pt is\ndamaged")
        self.n_timesteps = n_timesteps
        self.noise = np.random.standard_normal(SAMPLES_A_CODE) * 0.01
        self.att_buffer = np.zeros((BUFFER_STEPS, BUFFER_FRAMES))
        self.cnn_buffer = np.zeros((BUFFER_STEPS, 2))
        self.cache: Any = None
        self.stream_cache: Any = None
        self.hift_cache_dict: Any = {}

    def set_stream_cache(self, prompt_wav: str) -> tuple[dict[str, Any], dict[str, Any]]:
        with wave.open(prompt_wav) as file:
            assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
            pcm = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        self.cache = (float(np.abs(pcm.astype(float)).mean()) / 32768, len(pcm))
        print("prompt", len(pcm))
        self._run([4218] * 3, np.zeros((self.n_timesteps, 4)), np.zeros((self.n_timesteps, 2)))
        wave_cache = {"speech": np.zeros(0), "calls": np.zeros(1)}
        return self._flow_cache(4), wave_cache

    def _run(self, codes: list[int], att: np.ndarray, cnn: np.ndarray) -> float:
        speaker, told = self.cache[0], float(np.sum(codes)) / 6561
        level = 0.0
        for step in range(self.n_timesteps):
            level = float(np.tanh(level + att[step].mean() + cnn[step].sum() + speaker + told))
            self.att_buffer[step] = level * (step + 1)
            self.cnn_buffer[step] = (level, told)
        return level

    def _flow_cache(self, frames: int) -> dict[str, Any]:
        return {
            "conformer_att_cache": np.full(2, self.cache[0]),
            "estimator_cnn_cache": self.cnn_buffer,
            "estimator_att_cache": self.att_buffer[:, :frames],
        }

    def stream(
        self,
        generated_speech_tokens: list[int],
        prompt_wav: str | None,
        last_chunk: bool = False,
        return_waveform: bool = False,
    ) -> bytes:
        codes = generated_speech_tokens
        if DIES in codes:
            os._exit(9)
        if HANGS in codes:
            threading.Event().wait()
        if RAISES in codes:
            raise RuntimeError("out of\nmemory")
        flow, held = self.stream_cache, self.hift_cache_dict
        level = self._run(codes, flow["estimator_att_cache"], flow["estimator_cnn_cache"])
        self.stream_cache = self._flow_cache(min(flow["estimator_att_cache"].shape[1] + 2, 40))
        whole = codes if last_chunk else codes[:-3]
        held["calls"] += 1  # In place.
        tone = np.concatenate([level * 0.5 + code / 20000 + self.noise for code in whole])
        tone += np.random.standard_normal(len(tone)) * 0.001 + held["calls"][0] / 1000
        is_first = len(held["speech"]) == 0
        speech = np.concatenate([held["speech"], tone])
        held["speech"] = speech[-HELD:]
        if not last_chunk:
            speech = speech[:-HELD]
            if is_first:
                speech = np.concatenate([np.zeros(HELD), speech])
        if OVERFLOWS in codes:
            speech = np.tile(speech, 3)
        return (np.clip(speech, -1, 1) * 32767).astype("<i2").tobytes()
