"""The text of an answer, piece by piece: whole characters alone."""

from __future__ import annotations

import pytest

from runtime.model.backends.minicpmo.tokens import TextStream, Tokens
from tests.runtime.model.test_minicpmo_chat import TINY


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(TINY)


def test_a_character_of_many_tokens_comes_whole(tokens: Tokens) -> None:
    """A client would be sent half a character, and show a box."""
    for text in ("naïve 😀 日本", "\u00e9", "a\ufffdb"):
        stream = TextStream(tokens)
        pieces = [stream.add(index) for index in tokens.encode(text)]
        assert "".join(pieces) + stream.end() == text == stream.text
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces)
        assert len(pieces) > len(text.split())


def test_bytes_that_are_no_character_are_not_held_forever(tokens: Tokens) -> None:
    """An answer of broken bytes would come all at its end, or never."""
    first = tokens.encode("😀")[0]
    stream = TextStream(tokens)
    pieces = [stream.add(first) for _ in range(100)]
    assert all(len(piece) <= 2 for piece in pieces)
    assert len("".join(pieces)) >= 90
    assert "".join(pieces) + stream.end() == stream.text
    assert len(stream.waiting) <= 16


def test_what_never_became_whole_is_given_at_the_end(tokens: Tokens) -> None:
    """The text of the result would not be that of the pieces."""
    stream = TextStream(tokens)
    assert stream.add(tokens.encode("😀")[0]) == ""
    assert stream.end() == "\ufffd" == stream.text
