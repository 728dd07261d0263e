"""The memory plan: what it promises is what the model takes."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from protocol.values.limits import VOICE_STEPS
from runtime.model.backends.minicpmo.checkpoint import build_parts
from runtime.model.backends.minicpmo.config import ModelConfig, read_config
from runtime.model.backends.minicpmo.device import plan, stores
from runtime.model.backends.minicpmo.quantized import BITS, chosen
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.voices import REFERENCES_MAX, planned
from runtime.model.voice.config import FlowConfig, HiftConfig
from runtime.model.voice.flow import Flow
from runtime.model.voice.hift import Hift
from runtime.model.voice.reference import CODES_FILE, SPEAKER_FILE
from runtime.model.voice.vocoder import CODES_MAX, Chunk, VoiceSteps, session_bytes
from tests.models.full_shape import FULL, full_config
from tests.models.random_model import CONFIG, SLIDING, SMALL, changed
from tests.models.random_voice import STEPS, codes, reference, vocoder, write_folder

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SHAPES = [CONFIG, changed(CONFIG, SLIDING), changed(CONFIG, SMALL)]


def config_of(raw: dict[str, object]) -> ModelConfig:
    return read_config(raw, "random")


@pytest.mark.parametrize("raw", SHAPES, ids=["tiny", "sliding", "small"])
@pytest.mark.parametrize("quantize", [None, *BITS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plan_is_what_the_model_takes(
    raw: dict[str, object], dtype: torch.dtype, quantize: str | None
) -> None:
    """A server would promise slots that do not fit, and die when they are taken."""
    config = config_of(raw)
    parts = build_parts(config, dtype, CPU, chosen(config.quantization, quantize))
    needs = plan(config, dtype, quantize)
    runner = ModelRunner(parts, None, 2)
    weights = parts.state_dict()
    orders = sum(each.nbytes for key, each in weights.items() if key.endswith(".group_of"))
    assert needs.slot_bytes == runner.slot_bytes
    assert needs.model_bytes == sum(each.nbytes for each in weights.values()) - orders
    plain = build_parts(config, dtype, torch.device("meta")).parameters()
    assert sum(needs.parameters.values()) == sum(each.numel() for each in plain)


def test_half_the_precision_takes_half_the_memory() -> None:
    """An operator would be told that a smaller format does not help."""
    config = config_of(CONFIG)
    whole, half = plan(config, torch.float32), plan(config, torch.bfloat16)
    assert whole.model_bytes == 2 * half.model_bytes
    assert whole.slot_bytes == 2 * half.slot_bytes
    assert whole.host_bytes == half.host_bytes


def test_slots_fill_the_memory_and_no_more() -> None:
    """Slots would be left unused, or the last one run out of memory."""
    needs = plan(config_of(CONFIG), torch.float32)
    needs = attrs.evolve(needs, session_bytes={**needs.session_bytes, "vocoder": 1000})
    each = needs.each_bytes(CPU)
    assert each == needs.slot_bytes + 1000 + needs.host_bytes
    assert needs.each_bytes(CUDA) == needs.slot_bytes + 1000
    memory = int((needs.model_bytes + 3 * each) / 0.9) + 2
    assert needs.slots_that_fit(memory, CPU) == 3
    assert needs.slots_that_fit(memory - each, CPU) == 2
    assert needs.slots_that_fit(needs.model_bytes, CPU) == 0
    assert needs.slots_that_fit(0, CPU) == 0


def test_one_whole_context_is_counted_however_little_is_shared() -> None:
    """A small GPU would be promised sessions for which it has no memory."""
    needs = plan(config_of(CONFIG), torch.float32, None, 10)
    each = needs.session_bytes["llm"] + needs.session_bytes["tts"]
    assert needs.context_bytes // each == 10
    own = needs.each_bytes(CUDA) - each
    for fit in range(25):
        shared = max(needs.context_bytes, fit * each) * bool(fit)
        memory = int((needs.model_bytes + fit * own + shared) / 0.9) + 2
        assert needs.slots_that_fit(memory, CUDA) == fit
        if fit:
            assert needs.slots_that_fit(memory - 8, CUDA) == fit - 1


def test_the_full_shape_is_the_published_one() -> None:
    """A bench on random weights would measure some other model (model.md)."""
    needs = plan(full_config(), torch.bfloat16)
    assert 9.0e9 < sum(needs.parameters.values()) < 9.5e9
    assert 18e9 < needs.model_bytes < 19e9
    store = stores(full_config())["llm"]
    assert store.slot_bytes(torch.bfloat16) // store.capacity == 144 * 1024
    assert needs.session_bytes["audio"] < 147e6
    assert full_config().vision.siglip.num_hidden_layers == 26
    assert full_config(0.5).llm.num_hidden_layers == FULL["num_hidden_layers"] / 2


def test_the_table_of_the_documentation_is_what_is_planned() -> None:
    """An operator would buy a card on which the model does not fit."""
    with torch.device("meta"):
        flow, hift = Flow(FlowConfig()).to(torch.bfloat16), Hift(HiftConfig())
        modules, in_place = {"flow": flow, "hift": hift}, VoiceSteps(flow, hift, (1,)).bytes
    counts = {
        name: sum(each.numel() for each in module.state_dict().values())
        for name, module in modules.items()
    }
    rows = list[str]()
    for quantize, percent in ((None, 100), ("int8", 100), ("int4", 100), (None, 25), ("int4", 25)):
        needs = plan(full_config(), torch.bfloat16, quantize, percent)
        weights = {"flow": 2 * counts["flow"], "hift": 4 * counts["hift"]}
        voice = session_bytes(FlowConfig(), VOICE_STEPS, 2) + in_place
        needs = attrs.evolve(
            needs,
            weight_bytes={**needs.weight_bytes, **weights},
            session_bytes={**needs.session_bytes, "vocoder": voice},
        )
        fit = (needs.slots_that_fit(size * 10**9, CUDA) for size in (24, 48, 80, 141))
        sizes = (f"{needs.model_bytes / 1e9:.1f} GB", f"{needs.each_bytes(CUDA) / 1e9:.2f} GB")
        rows.append(f"| {' | '.join((quantize or 'no', f'{percent}', *sizes, *map(str, fit)))} |")
    text = (Path(__file__).parents[3] / "docs" / "model.md").read_text("utf-8")
    assert "\n".join(rows) in text, "\n".join(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_published_voice_is_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    """A GPU would be filled up to where the voice of the last session does not fit."""
    needs = plan(config_of(CONFIG), dtype)
    assert planned(needs, tmp_path, dtype, CPU, STEPS) == needs
    folder = write_folder(tmp_path / "assets" / "token2wav")
    voiced = planned(needs, folder, dtype, CPU, STEPS)
    speaker = vocoder(dtype)
    for name, module in (("flow", speaker.flow), ("hift", speaker.hift)):
        weights = module.state_dict().values()
        assert voiced.parameters[name] == sum(weight.numel() for weight in weights)
        sizes = [weight.numel() * weight.element_size() for weight in weights]
        assert voiced.weight_bytes[name] == sum(sizes)
    networks = sum((folder / name).stat().st_size for name in (CODES_FILE, SPEAKER_FILE))
    one = reference("a", 150)
    assert voiced.voices_bytes - networks > REFERENCES_MAX * (one.mel.nbytes + 8 * len(one.codes))
    on_cpu, on_gpu = (voiced.slots_that_fit(10**9, device) for device in (CPU, CUDA))
    less = attrs.evolve(voiced, voices_bytes=voiced.voices_bytes + 5 * voiced.each_bytes(CPU))
    assert (less.slots_that_fit(10**9, CPU), less.slots_that_fit(10**9, CUDA)) == (
        on_cpu - 5,
        on_gpu,
    )
    turn, taken = None, list[int]()
    for index in range(12):  # Until the caches are full.
        said = codes(f"{index}", CODES_MAX)
        chunk = Chunk(reference=reference("a", 150), turn=turn, codes=said, last=False)
        before, turn = turn, speaker.speak([chunk])[0].turn
        assert turn is not None
        rows = [turn.flow_rows, *([] if before is None else [before.flow_rows])]
        own = {id(piece): piece for pieces in rows for piece in pieces if not piece.is_shared}
        taken.append(sum(each.rows.numel() for each in own.values()) * dtype.itemsize)
    voice = speaker.voice(reference("a", 150)).bytes_of(shared=True)
    assert voice + max(taken) < voiced.session_bytes["vocoder"] < 1.2 * (voice + max(taken))
    assert planned(needs, folder, dtype, CPU, 2 * STEPS).each_bytes(CPU) > voiced.each_bytes(CPU)
    steps = vocoder(dtype, sizes=(1, 4)).steps
    assert steps is not None
    there = planned(needs, folder, dtype, CUDA, STEPS).session_bytes["vocoder"]
    in_place = 4 * (there - voiced.session_bytes["vocoder"])
    # Those of the largest size, in which the others lie; a time's numbers are the same for all.
    assert 0.98 * in_place < steps.bytes <= in_place
