"""`antiphon doctor`: it says what serving would meet, and what to do about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from runtime.cli import main
from runtime.commands.doctor import Diagnosis, Finding, examine
from runtime.model.backends.minicpmo import device, runner
from runtime.model.backends.minicpmo.checkpoint import WEIGHTS
from runtime.model.backends.minicpmo.model import VOCODER, DuplexModel
from runtime.settings.settings import Settings
from tests.models.quantized import FORMS, rewrite
from tests.models.random_model import write_checkpoint


def antiphon(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def of(found: Diagnosis, check: str) -> list[Finding]:
    """The findings of a check; what every finding must hold is checked on the way."""
    for finding in found.findings:
        assert finding.says
        assert finding.do or finding.state != "problem"
    return [finding for finding in found.findings if finding.check == check]


def problem(folder: Path, check: str, **question: Any) -> str:
    """The one problem of a model that would not be served."""
    found = examine(Settings(model=str(folder), **question))
    assert not found.would_serve
    (finding,) = of(found, check)
    assert finding.state == "problem"
    return finding.says


def test_a_sound_checkpoint_would_be_served(checkpoint: Path) -> None:
    """The doctor would keep an operator from serving what works."""
    found = examine(Settings(model=str(checkpoint)))
    assert found.would_serve
    checks = ["folder", "config", "weights", "tokenizer", "vocoder", "device", "memory"]
    assert [finding.check for finding in found.findings] == [*checks, "full replay"]
    assert {part.name for part in found.parts} >= {"llm", "vpm", "apm", "tts", "resampler"}
    assert found.memory is not None
    model = DuplexModel.load(checkpoint, slots=1)
    sizes = found.memory.session_bytes
    assert sizes["llm"] + sizes["tts"] + sizes["audio"] == model.runner.slot_bytes
    assert found.memory.slots_fit > 1
    assert torch.__version__.startswith(found.versions["torch"])  # without a build such as `+cu130`


def test_nothing_is_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking would take as long and as much memory as serving."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("runtime.model.backends.minicpmo.checkpoint.load_parts", refuse)
    monkeypatch.setattr("runtime.model.backends.minicpmo.model.load_parts", refuse)
    assert examine(Settings(model=str(checkpoint))).would_serve


def test_each_wrong_key_is_told(copied: Path) -> None:
    """An operator would fix one key after the other, each after a long load."""
    state = load_file(copied / WEIGHTS)
    del state["llm.lm_head.weight"]
    state["llm.stranger"] = torch.zeros(1)
    state["tts.emb_text.weight"] = torch.zeros(2, 2)
    save_file(state, copied / WEIGHTS)
    found = examine(Settings(model=str(copied)))
    assert not found.would_serve
    said = [finding.says for finding in of(found, "weights")]
    assert len(said) == 3
    for text, kind in zip(said, ("missing", "unknown", "shape"), strict=True):
        assert kind in text
    assert "llm.lm_head.weight" in said[0]
    assert "llm.stranger" in said[1]
    assert "tts.emb_text.weight (2, 2) not (320, 16)" in said[2]


def test_what_is_missing_is_named(copied: Path) -> None:
    """An operator would not know which file to fetch."""
    (copied / "tokenizer.json").unlink()
    assert "tokenizer.json" in problem(copied, "tokenizer")
    (copied / WEIGHTS).unlink()
    assert WEIGHTS in problem(copied, "weights")
    (copied / "config.json").write_text("{}")
    assert "config.audio_config is missing" in problem(copied, "config")
    assert "unknown model" in problem(copied / "nowhere", "folder")


def test_without_a_vocoder_it_serves_text(copied: Path) -> None:
    """A model would be refused for want of a voice, or nobody told why it is silent."""
    shutil.rmtree(copied / VOCODER)
    found = examine(Settings(model=str(copied)))
    assert found.would_serve
    (finding,) = of(found, "vocoder")
    assert (finding.state, finding.says) == ("note", "no vocoder: text only")
    assert finding.do


def test_a_broken_vocoder_is_a_problem(copied: Path) -> None:
    """The server would end with a traceback after the weights were loaded."""
    (copied / VOCODER / "config.json").write_text("{}")
    assert "do not fit" in problem(copied, "vocoder")


def test_slots_that_do_not_fit_are_a_problem(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would be started that dies when its slots fill."""
    monkeypatch.setattr(device, "free_bytes", lambda _: 40_000_000)
    assert examine(Settings(model=str(checkpoint), slots=2)).would_serve
    assert "sessions that fit: " in problem(checkpoint, "memory", slots=500)


def test_what_quantising_saves_is_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator with a small card would not know that the model can be served on it."""
    (told,) = of(examine(Settings(model=str(checkpoint))), "memory")
    assert " (with --quantize: int4 " in told.says
    assert ", int8 " in told.says
    found = examine(Settings(model=str(checkpoint), quantize="int4"))
    assert found.would_serve
    assert replayed(checkpoint, quantize="int4").state == "ok"
    plain = examine(Settings(model=str(checkpoint))).memory
    assert found.memory is not None
    assert plain is not None
    assert found.memory.weight_bytes < plain.weight_bytes
    (tmp_path / "plain").mkdir()
    copied, _ = rewrite(write_checkpoint(tmp_path / "plain"), tmp_path / "made", FORMS["awq"])
    assert examine(Settings(model=str(copied))).would_serve
    (told,) = of(examine(Settings(model=str(copied))), "memory")
    assert "--quantize" not in told.says
    assert "its files are quantised (awq)" in problem(copied, "memory", quantize="int8")


def test_a_gpu_that_is_not_there_is_a_problem(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would look for the fault in the model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.__version__ in problem(checkpoint, "device", device="cuda")


def replayed(folder: Path, **question: Any) -> Finding:
    """What is said of full replay."""
    (finding,) = of(examine(Settings(model=str(folder), **question)), "full replay")
    return finding


def test_what_cannot_be_replayed_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model would be loaded, and refused for --deterministic only then."""
    for asked in (False, True):
        assert replayed(checkpoint, deterministic=asked).state == "ok"
    monkeypatch.setattr(runner, "rows_are_independent", lambda _: False)
    assert "depend on the batch; logic replay" in replayed(checkpoint).says
    assert "depend on the batch" in problem(checkpoint, "full replay", deterministic=True)


def test_what_a_gpu_may_replay_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator would believe that --deterministic holds in any format, or nowhere."""
    monkeypatch.setattr(device, "pick_device", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(device, "device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(device, "free_bytes", lambda _: 10**11)
    assert "on a GPU" in replayed(checkpoint).says
    assert "tried when the model is loaded" in replayed(checkpoint, deterministic=True).says
    exact = {"deterministic": True, "dtype": "fp32"}
    assert "no exact steps in this format" in problem(checkpoint, "full replay", **exact)


def test_a_script_needs_nothing() -> None:
    """Whoever tries the server without a model would be told to get one."""
    assert examine(Settings(model="scripted")).would_serve


def test_the_command_s_exit_code_is_its_verdict(checkpoint: Path, copied: Path) -> None:
    """A script could not ask before it starts a server."""
    served = antiphon("--model", str(checkpoint))
    assert served.exit_code == 0, served.output
    assert "can be served" in served.output
    (copied / "config.json").unlink()
    refused = antiphon("--model", str(copied))
    assert refused.exit_code == 1
    assert "config.json" in refused.output
    assert "cannot be served" in refused.output


def test_json_holds_what_was_found(checkpoint: Path) -> None:
    """A script would have to read a table."""
    told = antiphon("--model", str(checkpoint), "--json")
    body = json.loads(told.output)
    assert body["would_serve"] is True
    assert {"model", "findings", "parts", "memory", "versions"} <= set(body)
    assert set(body["findings"][0]) == {"check", "state", "says", "do"}
    assert body["memory"]["slots_fit"] > 0
