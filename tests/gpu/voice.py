"""The published voice at its size with drawn weights: time, memory, and whether bits repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from protocol.values.limits import VOICE_STEPS
from runtime.model.backends.minicpmo.vocoder import Vocode
from runtime.model.backends.minicpmo.voices import PublishedVoice
from runtime.model.voice.checkpoint import fill_flow, fill_hift
from runtime.model.voice.config import FlowConfig, HiftConfig
from runtime.model.voice.reference import (
    CODES_FILE,
    SPEAKER_FILE,
    Reference,
    References,
    open_network,
)
from runtime.model.voice.vocoder import CODES_MAX, Vocoder, session_bytes, sizes_on
from tests.models import random_voice
from tests.models.random_voice import NETWORKS, reference_pcm

CHUNKS: Final = 6
"""Of a turn: by then the caches are cut."""
TIMED: Final = 3
"""The last ones of them."""
VOICES: Final = 8
PROMPT: Final = 150
"""Codes of six seconds."""

Say = Callable[[str, object], None]


def drawn(
    device: torch.device, dtype: torch.dtype, *, slots: int, exact: bool = False
) -> PublishedVoice:
    """The published modules with drawn weights, on a CPU the small ones."""
    is_small = device.type == "cpu"
    config = random_voice.CONFIG if is_small else FlowConfig()
    sizes = random_voice.HIFT_CONFIG if is_small else HiftConfig()
    flow = fill_flow(config, random_voice.flow_weights(config), dtype, device)
    hift = fill_hift(random_voice.hift_weights(sizes), device)
    together = (1, 2) if is_small else sizes_on(device, slots, config.dit.width, exact=exact)
    vocoder = Vocoder(
        flow, hift, seed="drawn", steps=VOICE_STEPS, voices=max(VOICES, slots), sizes=together
    )
    networks = (open_network(NETWORKS / name) for name in (CODES_FILE, SPEAKER_FILE))
    references = References(*networks, vocabulary=config.codes)
    return PublishedVoice(vocoder, references, reference_pcm(0))


def reference(number: int, codes: int) -> Reference:
    """A voice with a prompt of six seconds."""
    chance = np.random.default_rng(number)
    return Reference(
        codes=tuple(chance.integers(0, codes, PROMPT).tolist()),
        mel=chance.standard_normal((2 * PROMPT, 80), dtype=np.float32) - 4,
        speaker=chance.standard_normal(192, dtype=np.float32),
    )


def measure(voice: PublishedVoice, counts: Sequence[int], say: Say) -> dict[str, Any]:
    """Time a second of speech, launched kernel by kernel, then captured; and what it takes."""
    steps = voice._vocoder.steps
    assert steps is not None
    found = {"launched": timed(voice, counts, say)}
    say("the steps' places, MB", steps.bytes // 10**6)
    if voice._vocoder.flow.encoder_proj.weight.is_cuda:
        before, began = torch.cuda.memory_reserved(), time.perf_counter()
        steps.capture()
        say("captured, s", round(time.perf_counter() - began, 1))
        say("captures, MB", (torch.cuda.memory_reserved() - before) // 10**6)
        found["captured"] = timed(voice, counts, say)
    return found


def timed(voice: PublishedVoice, counts: Sequence[int], say: Say) -> dict[str, Any]:
    """Time a second of speech for so many sessions, each amid a turn."""
    device = voice._vocoder.flow.encoder_proj.weight.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    voices = [reference(number, voice.codes) for number in range(VOICES)]
    began = now()
    voice.prepare(voices[0])
    say("set-up of a voice, ms", round(1000 * (now() - began)))
    say("chunks have the same bits again", voice._vocoder.repeats())
    dtype = voice._vocoder.flow.encoder_proj.weight.dtype
    config, steps = voice._vocoder.flow.config, voice._vocoder.flow.steps
    say("a session by the plan, MB", session_bytes(config, steps, dtype.itemsize) // 10**6)
    found = dict[str, Any]()
    for count in counts:
        states, spent = [None] * count, list[float]()
        for each in voices[:count]:
            voice.prepare(each)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        for chunk in range(CHUNKS):
            chance = np.random.default_rng(chunk)
            requests = [
                Vocode(
                    codes=tuple(chance.integers(0, voice.codes, CODES_MAX).tolist()),
                    state=state,
                    last=False,
                    voice=voices[index % VOICES],
                    key=f"{index}/{chunk}",
                )
                for index, state in enumerate(states)
            ]
            began = now()
            spoken = voice.sound(requests)
            spent.append(1000 * (now() - began))
            assert all(np.isfinite(pcm).all() for pcm, _ in spoken)
            states = [state for _, state in spoken]
        after = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        ms = round(float(np.median(spent[-TIMED:])), 1)
        each_mb = round((after - before) / count / 1e6)
        found[str(count)] = {"ms": ms, "own_mb": each_mb}
        say(f"a second of speech of {count}, ms; own memory, MB", (ms, each_mb))
    return found
