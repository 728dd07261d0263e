"""Counter-based random numbers, and the choice of one id from logits.

A draw, in [0, 1), is a function of (session seed, unit index, stage), so a unit can be rerun by
itself. Logits have shape (V,), probabilities are float64; -inf is never chosen, and ties go
to the lower id.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def draws(seed: int, unit: int, stage: str, count: int) -> NDArray[np.float64]:
    """`count` uniform numbers for one stage of one unit or chat turn; the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{unit}/{stage}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def _inverse(probabilities: NDArray[np.float64], draw: float) -> int:
    total = np.cumsum(probabilities)
    return int(min(np.searchsorted(total, draw * total[-1], side="right"), len(total) - 1))


def _span(probabilities: NDArray[np.float64], wanted: int) -> tuple[float, float]:
    """The interval of draws that `_inverse` maps to `wanted`."""
    total = np.cumsum(probabilities)
    start = float(total[wanted - 1] / total[-1]) if wanted else 0.0
    return start, float(total[wanted] / total[-1])


def _gap(probabilities: NDArray[np.float64], draw: float, wanted: int) -> float | None:
    start, stop = _span(probabilities, wanted)
    return max(start - draw, draw - stop, 0.0) if stop > start else None


def untempered_gap(logits: NDArray[np.float64], draw: float, wanted: int) -> float | None:
    """Distance of a draw from those by which `untempered` gives `wanted`, or None if none do."""
    return _gap(np.exp(logits - logits.max()), draw, wanted)


def untempered_room(logits: NDArray[np.float64], draw: float, given: int) -> float | None:
    """Distance from a draw to where `untempered` gives another id than `given`; None: nowhere."""
    start, stop = _span(np.exp(logits - logits.max()), given)
    rooms = [draw - start] * (start > 0) + [stop - draw] * (stop < 1)
    return min(rooms, default=None)


def untempered(logits: NDArray[np.float64], draw: float) -> int:
    """Sample from the plain softmax."""
    return _inverse(np.exp(logits - logits.max()), draw)


def best(logits: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The ids of the `count` highest logits, or of all if fewer; ties by id."""
    if count < len(logits):
        edge = np.partition(logits, -count)[-count]
        kept = np.flatnonzero(logits >= edge)  # Ties at the edge may make it more than `count`.
    else:
        kept = np.arange(len(logits))
    order = np.argsort(-logits[kept], kind="stable")
    return kept[order][:count]


def choose(
    logits: NDArray[np.float64], draw: float, temperature: float, top_k: int, top_p: float
) -> int:
    """Sample with temperature, then the best k, then the smallest set of mass p.

    Args:
        logits: (V,).
        draw: in [0, 1).
        temperature: 0 takes the most likely id.
        top_k: candidates kept, at least 1.
        top_p: mass kept, above 0; the most likely id is always kept.
    """
    if temperature == 0:
        return int(logits.argmax())
    ids, probabilities = _candidates(logits, temperature, top_k, top_p)
    return int(ids[_inverse(probabilities, draw)])


def choose_gap(
    logits: NDArray[np.float64],
    draw: float,
    temperature: float,
    top_k: int,
    top_p: float,
    *,
    wanted: int,
) -> float | None:
    """Distance of a draw from those by which `choose` at a temperature gives `wanted`, or None."""
    ids, probabilities = _candidates(logits, temperature, top_k, top_p)
    places = np.flatnonzero(ids == wanted)
    return _gap(probabilities, draw, int(places[0])) if len(places) else None


def _candidates(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids that may be chosen, the most likely first, and their probabilities."""
    order = best(logits, top_k)
    scaled = (logits[order] - logits[order[0]]) / temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    kept = before < top_p
    return order[kept], probabilities[kept]
