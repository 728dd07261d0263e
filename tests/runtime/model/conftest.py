"""What tests of the models share; torch is imported only by a test that asks for a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runtime.model.backends.minicpmo.model import DuplexModel
    from runtime.model.engine.backend import EngineBackend
    from tests.sessions.streaming import Gate


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DuplexModel:
    """As small as can be, with four slots of 256 tokens."""
    from runtime.model.backends.minicpmo.model import DuplexModel

    return DuplexModel.load(checkpoint, slots=4)


@pytest.fixture
def backend(model: DuplexModel) -> Iterator[EngineBackend]:
    """A backend of four slots; what a test leaves in them is a failure."""
    from runtime.model.engine.backend import EngineBackend
    from tests.runtime.model.test_minicpmo_anchor import wiped

    yield EngineBackend(model)
    assert all(wiped(model, slot) for slot in range(4))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The engine's computing, held until it is let go."""
    from tests.sessions.streaming import gated

    with gated(monkeypatch) as shut:
        yield shut
