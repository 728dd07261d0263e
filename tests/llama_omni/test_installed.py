"""`examples/llama_omni` as an installed package: a model by its name."""

from __future__ import annotations

from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from runtime.model import models
from runtime.model.models import ModelUnknownError, ModelUnusableError, check_model, load_backend
from tests.project.example_packages import EXAMPLES, install

URL = "ws://127.0.0.1:22500"


@pytest.mark.parametrize("name", [f"llama_omni:{URL}", f"backend:llama_omni:{URL}"])
def test_a_server_elsewhere_is_a_model_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`antiphon serve --model llama_omni:...` would be refused before anything was tried."""
    install(tmp_path, "llama_omni:load", EXAMPLES / "llama_omni")
    monkeypatch.syspath_prepend(tmp_path)
    check_model(name)
    info = load_backend(name).info
    assert (info.name, info.slots) == ("llama_omni", 1)
    with pytest.raises(ModelUnusableError, match=rf"^{name}: .*one session at a time"):
        load_backend(name, 2)
    with pytest.raises(ModelUnusableError, match="ws://"):
        load_backend("llama_omni:http://127.0.0.1:22500")
    with pytest.raises(ModelUnknownError, match="'llama_omni': choose from"):
        check_model("llama_omni")


@pytest.mark.parametrize("name", [f"llama_omni:{URL}", "backend:llama_omni", f"cascade:llm={URL}"])
def test_a_package_that_is_not_installed_is_named_with_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator of an older release would not know where the model has gone."""
    monkeypatch.setattr(models, "entry_points", lambda **_: EntryPoints())
    package = "cascade" if name.startswith("cascade") else "llama_omni"
    with pytest.raises(ModelUnknownError, match=rf"are none; .*pip install \./examples/{package}$"):
        check_model(name)
