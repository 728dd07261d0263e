"""G.711, held to the standard library's codec, which Python gives up after 3.12."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.model import Coding
from protocol.wire.audio import compress, expand

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    audioop = pytest.importorskip("audioop")

EVERY_SAMPLE = np.arange(-32_768, 32_768).astype("<i2").tobytes()
EVERY_BYTE = bytes(range(256))


@pytest.mark.parametrize("coding", ["audio/pcmu", "audio/pcma"])
def test_it_is_the_standard_s(coding: Coding) -> None:
    """A telephone would hear noise."""
    law = coding[-1]
    to_law = {"u": audioop.lin2ulaw, "a": audioop.lin2alaw}[law]
    from_law = {"u": audioop.ulaw2lin, "a": audioop.alaw2lin}[law]
    assert compress(EVERY_SAMPLE, coding) == to_law(EVERY_SAMPLE, 2)
    assert expand(EVERY_BYTE, coding) == from_law(EVERY_BYTE, 2)


@given(sound=st.binary(max_size=200).filter(lambda it: len(it) % 2 == 0))
def test_pcm_stays_as_it_is(sound: bytes) -> None:
    """A session without G.711 would lose bits."""
    assert compress(expand(sound, "audio/pcm"), "audio/pcm") == sound
