"""Requests to a worker and its answers: voices and turns as values, and batches of them.

A turn is the voice and its codes, call by call. The worker's caches (`Place`) are only a shortcut.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from ..base import BackendError
from .token2wav_link import Frame, Link
from .vocoder import LOOKAHEAD, Pcm, Sounding

SAMPLES_A_CODE: Final = 960
SAMPLES_HELD: Final = 3840
"""The package holds back 160 ms at a turn's start and gives them at its end."""
SAMPLE_BYTES: Final = 2


@attrs.define(kw_only=True, eq=False)
class Place:
    """An object's place in a worker, valid while `link` lives; `kind` is `states` or `voices`."""

    kind: str
    link: Link | None = None
    number: int = 0

    def forget(self) -> None:
        """Have the worker drop the object."""
        if self.link is not None and self.link.is_alive:
            kinds: dict[str, list[int]] = {"states": [], "voices": []}
            self.link.tell({"do": "drop", **kinds, self.kind: [self.number]})


def remember(holder: object, place: Place) -> None:
    """Have the worker drop the object when `holder` is garbage-collected."""
    weakref.finalize(holder, place.forget).atexit = False


@attrs.define(kw_only=True, eq=False)
class SpokenVoice:
    """A voice: its reference, float32 at 16 kHz (empty: the default), and its worker's place."""

    reference: bytes
    digest: bytes
    place: Place


@attrs.define(kw_only=True, eq=False)
class Turn:
    """A turn's codes so far, call by call, as a value.

    `digest`: of voice and codes; it seeds the next call. `place`: of the worker's caches after it.
    """

    voice: SpokenVoice
    told: tuple[tuple[int, ...], ...]
    digest: bytes
    place: Place


def digest_of(before: bytes, codes: Sequence[int], *, last: bool) -> bytes:
    """Extend a digest by the next call's codes."""
    told = np.asarray(codes, "<i4").tobytes() + bytes([last])
    return hashlib.blake2b(before + told, digest_size=16).digest()


@attrs.define(kw_only=True, eq=False)
class Asked:
    """One sounding as items of `token2wav_worker.Worker.sound`; the last one gives its sound."""

    sounding: Sounding
    items: list[dict[str, Any]] = attrs.field(factory=list)
    codes: list[int] = attrs.field(factory=list)

    def add(self, codes: Sequence[int], before: bytes, **fields: Any) -> bytes:
        """Add an item; return the turn's new digest."""
        digest = digest_of(before, codes, last=fields["last"])
        seed = int.from_bytes(digest[:8], "little") >> 1
        self.items.append({"codes": len(codes), "seed": seed, **fields})
        self.codes.extend(codes)
        return digest


def unpacked(frame: Frame, items: Sequence[Mapping[str, Any]]) -> list[Pcm | None]:
    """Read an answer: each item's sound, or None where the worker lost its state.

    `ValueError`: it is no answer to these items; `BackendError`: the package failed for one of
    them.
    """
    header, body = frame
    answers, sounds, at = header.get("answers"), [], 0
    if not isinstance(answers, list) or len(answers) != len(items):
        raise ValueError(f"{len(items)} items were asked for")
    failed = ""
    for item, answer in zip(items, answers, strict=True):
        if not isinstance(answer, dict) or len(answer) != 1:
            raise ValueError(f"{answer!r}")
        samples = answer.get("samples", 0)
        whole = item["codes"] if item["last"] else item["codes"] - LOOKAHEAD
        most = item["heard"] * SAMPLES_A_CODE * whole + (SAMPLES_HELD if item["last"] else 0)
        if not isinstance(samples, int) or not 0 <= samples <= most:
            raise ValueError(f"{samples!r} samples, at most {most}")
        failed = failed or str(answer.get("error", ""))
        raw = body[at : at + samples * SAMPLE_BYTES]
        at += samples * SAMPLE_BYTES
        pcm = np.frombuffer(raw[: len(raw) // SAMPLE_BYTES * SAMPLE_BYTES], "<i2")
        sounds.append(
            (pcm / np.float32(32768.0)).astype(np.float32) if "samples" in answer else None
        )
    if at != len(body):
        raise ValueError(f"{len(body)} bytes of sound, not {at}")
    if failed:
        raise BackendError(f"the vocoder failed: {failed}")
    return sounds
