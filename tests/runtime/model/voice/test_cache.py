"""The caches' rules, next to the published code's way of cutting what it stores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.model.voice.vocoder import KEPT, Piece, Pieces, count, cut, cut_halved, joined


def piece(*labels: int, shared: bool = False) -> Piece:
    """A piece whose rows are labels."""
    return Piece(torch.tensor(labels)[:, None].repeat(1, 2), is_shared=shared)


def labels(pieces: Pieces) -> list[int]:
    return joined(pieces)[:, 0].tolist()


def cut_plainly(stored: list[int], prompt: int) -> list[int]:
    """What the published code keeps of what it stores."""
    if len(stored) <= prompt + KEPT:
        return stored
    return stored[:prompt] + stored[-KEPT:]


CHUNKS = st.lists(st.integers(1, 25), min_size=1, max_size=12)


@given(codes=st.integers(1, 150), chunks=CHUNKS)
def test_caches_are_cut_as_published(codes: int, chunks: list[int]) -> None:
    """A voice would sound other than published from the third chunk on."""
    prompt = 2 * codes
    halved: Pieces = (piece(*range(codes), shared=True),)
    oldest: Pieces = (piece(*range(prompt), shared=True),)
    newest = oldest
    plain_halved, plain_oldest, plain_newest = (
        list(range(codes)),
        list(range(prompt)),
        list(range(prompt)),
    )
    at = 1000
    for size in chunks:
        new, at = list(range(at, at + 2 * size)), at + 2 * size
        halved = cut_halved((*halved, piece(*new[:size])), prompt)
        oldest = cut((*oldest, piece(*new)), prompt)
        newest = cut((piece(*new), *newest), prompt)
        twice = 2 * (plain_halved + new[:size])
        plain_halved = cut_plainly(twice, prompt)
        plain_halved = plain_halved[: len(plain_halved) // 2]
        plain_oldest = cut_plainly(plain_oldest + new, prompt)
        plain_newest = cut_plainly(new + plain_newest, prompt)
        assert labels(halved) == plain_halved
        assert labels(oldest) == plain_oldest
        assert labels(newest) == plain_newest


@given(codes=st.integers(1, 150), chunks=CHUNKS)
def test_a_session_s_own_rows_are_bounded(codes: int, chunks: list[int]) -> None:
    """A long turn would fill the memory."""
    prompt = 2 * codes
    shared = piece(*range(prompt), shared=True)
    oldest: Pieces = (shared,)
    newest: Pieces = (shared,)
    for size in chunks:
        oldest = cut((*oldest, piece(*range(2 * size))), prompt)
        newest = cut((piece(*range(2 * size)), *newest), prompt)
        for pieces, most in ((oldest, KEPT), (newest, max(KEPT, prompt))):
            own = [each.rows for each in pieces if not each.is_shared]
            assert count(pieces) <= prompt + KEPT
            assert sum(len(rows) for rows in own) <= most
            assert sum(rows.untyped_storage().size() for rows in own) <= most * 16
            memory = shared.rows.untyped_storage().data_ptr()
            assert all(
                each.rows.untyped_storage().data_ptr() == memory
                for each in pieces
                if each.is_shared
            )


@pytest.mark.parametrize("prompt", [0, 40, 300])
def test_a_short_cache_is_left_alone(prompt: int) -> None:
    """Rows would be copied that nobody cuts."""
    pieces = (piece(*range(prompt)), piece(*range(50)), piece(*range(50)))
    assert cut(pieces, prompt) is pieces
