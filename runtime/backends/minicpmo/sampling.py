"""Random numbers by counter, and the choice of one id from logits.

A draw is a function of (session seed, unit index, stage): nothing is carried from unit to unit, so
a unit can be run again by itself. All arithmetic on probabilities is float64 in numpy, and ties are
broken by the lower id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from protocol.model import Stage


def draws(seed: int, unit: int, stage: Stage, count: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) for one stage of one unit.

    Args:
        seed: the session's.
        unit: the unit's index.
        stage: which stage asks.
        count: how many.

    Returns:
        (count,); the same for the same arguments, on every machine.
    """
    digest = hashlib.blake2b(f"{seed}/{unit}/{stage}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def penalise(logits: NDArray[np.float64], ids: Iterable[int], penalty: float) -> None:
    """Divide the logits of ids by a penalty, whatever their sign, once each, in place."""
    chosen = sorted(set(ids))
    if chosen:
        logits[chosen] /= penalty


def _inverse(probabilities: NDArray[np.float64], draw: float) -> int:
    total = np.cumsum(probabilities)
    return int(min(np.searchsorted(total, draw * total[-1], side="right"), len(total) - 1))


def untempered(logits: NDArray[np.float64], draw: float) -> int:
    """Sample from the plain softmax.

    Args:
        logits: (V,).
        draw: in [0, 1).

    Returns:
        The id.
    """
    return _inverse(np.exp(logits - logits.max()), draw)


def choose(
    logits: NDArray[np.float64], draw: float, temperature: float, top_k: int, top_p: float
) -> int:
    """Sample with temperature, then the best k, then the smallest set of mass p.

    Args:
        logits: (V,); -inf is never chosen.
        draw: in [0, 1).
        temperature: 0 takes the most likely id.
        top_k: candidates kept, at least 1.
        top_p: mass kept, above 0; the most likely id is always kept.

    Returns:
        The id.
    """
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return int(order[0])
    order = order[:top_k]
    scaled = (logits[order] - logits[order[0]]) / temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    kept = before < top_p
    return int(order[kept][_inverse(probabilities[kept], draw)])
