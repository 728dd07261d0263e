"""The next code of a unit's speech: chosen for a batch, it is what the host would choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.model.backends.minicpmo.logits import CHOSEN_MIN, CodeChoice, CodeChooser
from runtime.model.backends.minicpmo.sampling import CODE_WINDOW, decide_code

CODES = 50
EOS = CODES - 1

choices = st.builds(
    CodeChoice,
    st.lists(st.integers(0, CODES - 2), max_size=CODE_WINDOW).map(tuple),
    st.floats(0, 1, exclude_max=True),
    may_end=st.booleans(),
)


def on_host(row: torch.Tensor, choice: CodeChoice) -> int:
    """The choice by the rule."""
    numbers = row.numpy().astype(np.float64)
    return decide_code(numbers, choice.chunk, choice.draw, EOS, may_end=choice.may_end)


@given(
    st.lists(choices, min_size=CHOSEN_MIN, max_size=12),
    st.integers(0, 2**32 - 1),
    st.sampled_from((0.0, 1.0, 8.0, 40.0)),
)
def test_a_batch_chooses_as_the_rule(asked: list[CodeChoice], seed: int, scale: float) -> None:
    """A replay, or the same session among others, would say other sounds."""
    rows = torch.randn(len(asked), CODES, generator=torch.Generator().manual_seed(seed)) * scale
    answers = CodeChooser(EOS, is_near=False).rows(rows, asked)
    for row, choice, answer in zip(rows, asked, answers, strict=True):
        assert answer.choose(choice, EOS) == on_host(row, choice)
        assert np.array_equal(answer.numbers(), row.numpy().astype(np.float64))


def test_nearly_all_are_chosen_in_the_batch() -> None:
    """Each that is not costs a transfer, and what the batch was to save."""
    generator, chooser = np.random.default_rng(0), CodeChooser(EOS, is_near=False)
    for seed in range(40):
        rows = torch.randn(25, CODES, generator=torch.Generator().manual_seed(seed))
        draws = generator.random(25).tolist()
        chooser.rows(rows, [CodeChoice((), draw, may_end=True) for draw in draws])
    assert (chooser.settled, chooser.unsettled) == (1000, 0)


def test_a_draw_between_two_codes_is_left_to_the_host() -> None:
    """Sums are rounded otherwise on a device: it may take the neighbour."""
    rows = torch.zeros(CHOSEN_MIN, 4)
    chooser = CodeChooser(3, is_near=False)
    draws = (0.0, 0.25, 0.5 + 1e-12, 0.6)
    asked = [CodeChoice((), draw, may_end=True) for draw in draws]
    answers = chooser.rows(rows, asked)
    assert (chooser.settled, chooser.unsettled) == (1, 3)
    assert [a.choose(c, 3) for a, c in zip(answers, asked, strict=True)] == [0, 1, 2, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_their_own_session(bad: float) -> None:
    """In half precision a model may overflow; its code would be any, and nothing would say so."""
    rows, choice = torch.zeros(CHOSEN_MIN, CODES), CodeChoice((), 0.5 + 1e-3, may_end=True)
    rows[1, 7] = bad
    answers = CodeChooser(EOS, is_near=False).rows(rows, [choice] * CHOSEN_MIN)
    for index, answer in enumerate(answers):
        if index == 1:
            with pytest.raises(ValueError, match="not all finite"):
                answer.choose(choice, EOS)
        else:
            assert answer.choose(choice, EOS) == CODES // 2


def test_rows_that_ask_for_no_code_come_whole() -> None:
    """Chat has rules of its own."""
    rows = torch.randn(CHOSEN_MIN, CODES)
    choice = CodeChoice((), 0.5, may_end=True)
    chooser = CodeChooser(EOS, is_near=False)
    answers = chooser.rows(rows, [choice] * (CHOSEN_MIN - 1) + [None])
    assert chooser.settled == 0
    assert torch.equal(answers[-1].whole(), rows[-1])
    assert answers[0].choose(choice, EOS) == on_host(rows[0], choice)


def test_a_row_that_asks_for_no_code_leaves_the_others_their_batch() -> None:
    """One spoken answer of chat would slow down every conversation."""
    rows = torch.randn(2 * CHOSEN_MIN, CODES)
    choice = CodeChoice((), 0.5, may_end=True)
    asked = [None if at % 2 else choice for at in range(len(rows))]
    chooser = CodeChooser(EOS, is_near=False)
    answers = chooser.rows(rows, asked)
    assert chooser.settled == CHOSEN_MIN
    for row, wanted, answer in zip(rows, asked, answers, strict=True):
        assert torch.equal(answer.whole(), row)
        if wanted is not None:
            assert answer.choose(wanted, EOS) == on_host(row, wanted)
