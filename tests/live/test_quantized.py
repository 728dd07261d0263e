"""Quantised models as operators serve them: a session, its log, and its replay with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.servers import live_server
from tests.live.test_deterministic import DEMO, antiphon
from tests.models.quantized import FORMS, rewrite
from tests.models.random_model import write_checkpoint
from tests.project.sampling import sample


# `test_minicpmo_quantized.py` reads `awq` and `gptq`; the server knows them by their files alone.
@pytest.mark.parametrize("form", sample(["awq", "gptq", "int8"], ["int8"]))
def test_a_quantised_model_is_served_and_replayed(tmp_path: Path, form: str) -> None:
    """A recording of it could not be compared, or would be with the weights before."""
    model, options = "tiny", ["--quantize", form]
    if form in FORMS:
        (tmp_path / "source").mkdir()
        folder, _ = rewrite(write_checkpoint(tmp_path / "source"), tmp_path, FORMS[form])
        model, options = str(folder), []
    records = tmp_path / "recordings"
    with live_server("--record", str(records), *options, model=model) as server:
        reply = tmp_path / "reply.wav"
        talked = antiphon("talk", DEMO, "--url", server.url, "--fast", "--reply", reply)
        assert talked.returncode == 0, talked.stderr
        assert server.stop() == 0
    (log,) = records.glob("*.session.zst")
    replayed = antiphon("replay", "--full", log, "--json")
    body: dict[str, Any] = json.loads(replayed.stdout)
    assert (body["result"], replayed.returncode) == ("identical", 0)
    assert body["units"] > 5
    assert body["fingerprint"].get("quantize") == (None if form in FORMS else form)
