"""Run all that needs a GPU, or some stages of it: `python -m tests.gpu`, from the source tree.

The published shape gets random weights. Each finding is a line, and all of them are in `gpu.json`.
`--device cpu` tries it on `tiny`'s shape.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from runtime.commands.bench import ARRIVALS
from runtime.model.backends.minicpmo.config import ModelConfig, load_config
from runtime.model.backends.minicpmo.device import WHOLE
from runtime.model.backends.minicpmo.model import DuplexModel, full_config, gpu_bytes, random_model
from runtime.model.backends.minicpmo.quantized import BITS
from runtime.model.models import tiny_path
from tests.gpu import engine
from tests.gpu.agreement import agreement
from tests.gpu.steps import measure
from tests.gpu.voice import drawn
from tests.gpu.voice import measure as measure_voice
from tests.project.evidence import made

STAGES: Final = ("agreement", "voice", "steps", "staged", "served", "rebuilt", "profiled")
COUNTS: Final = "1,4,16,32,48,64"


@attrs.define
class Found:
    """What was found, as it is written."""

    out: Path | None
    name: str
    lines: dict[str, Any] = attrs.field(factory=dict)

    def say(self, name: str, found: object) -> None:
        """Print a finding, and keep it."""
        print(f"{name}: {found}", flush=True)
        self.keep(name, found)

    def keep(self, name: str, found: object) -> None:
        """Keep a finding, and write all so far: the time on a GPU may end at any moment."""
        self.lines[name] = found
        if self.out is not None:
            text = json.dumps(self.lines, indent=1, default=attrs.asdict)
            (self.out / f"{self.name}.json").write_text(text + "\n", "utf-8")


def _load(options: argparse.Namespace, found: Found) -> DuplexModel:
    device, is_cuda = torch.device(options.device), options.device == "cuda"
    began = time.perf_counter()
    model = random_model(
        _config(is_cuda=is_cuda, scale=1.0),
        tiny_path(),
        slots=options.slots,
        device=device,
        dtype=torch.bfloat16 if is_cuda else torch.float32,
        exact=options.deterministic,
        quantize=options.quantize,
        context_percent=options.context_percent,
    )
    found.say("loaded, s", round(time.perf_counter() - began, 1))
    found.say("attention", model.machine.attention)
    found.say("batch", model.machine.batch)
    found.say("each session gets its own", model.info.deterministic)
    found.say("a session's bytes", model.machine.slot_bytes)
    return model


def _config(*, is_cuda: bool, scale: float) -> ModelConfig:
    return full_config(scale) if is_cuda else load_config(tiny_path() / "config.json")


def _stage(name: str, options: argparse.Namespace, model: DuplexModel, found: Found) -> None:
    counts = [int(count) for count in options.sessions.split(",")]
    match name:
        case "steps":
            measure(model.machine, found.say)
        case "staged":
            found.keep(name, engine.staged(model, found.say))
        case "served":
            names = engine.LOADS if options.load is None else options.load.split(",")
            arrivals = ARRIVALS if options.due == "both" else (options.due,)
            runs = engine.served(
                model,
                counts,
                options.seconds,
                found.say,
                names=names,
                arrivals=arrivals,
                words=options.words,
            )
            found.keep(name, runs)
        case "rebuilt":
            found.keep(name, engine.rebuilt(model, found.say))
        case "profiled":
            engine.profiled(model, options.out or Path())


def main() -> None:
    """Make a model, and measure."""
    parser = argparse.ArgumentParser(description="what to run on a GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--deterministic", action="store_true", help="as of `antiphon serve`")
    parser.add_argument("--quantize", choices=BITS, help="as of `antiphon serve`")
    parser.add_argument("--context-percent", type=int, default=WHOLE, help="as of the same")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, with commas between them")
    parser.add_argument("--sessions", default=COUNTS, help="of the stages `served` and `voice`")
    parser.add_argument("--seconds", type=int, default=5, help="units a session, in `served`")
    parser.add_argument("--load", help=f"some of {', '.join(engine.LOADS)}, in `served`")
    parser.add_argument("--due", choices=["both", *ARRIVALS], default="both", help="in `served`")
    parser.add_argument("--words", type=int, default=0, help="of the instructions, in `served`")
    parser.add_argument("--layers", type=float, default=0.25, help="of `agreement`, a share")
    parser.add_argument("--out", type=made, help="a folder for what was found")
    parser.add_argument("--name", default="gpu", help="of the file in it")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    found, is_cuda = Found(options.out, options.name), options.device == "cuda"
    found.say("torch", (torch.__version__, torch.cuda.get_device_name() if is_cuda else "cpu"))
    if "agreement" in chosen:
        dtypes = (torch.bfloat16, torch.float32) if is_cuda else (torch.float32,)
        config = _config(is_cuda=is_cuda, scale=options.layers)
        off = agreement(config, tiny_path(), torch.device(options.device), dtypes)
        for dtype, kinds in off.items():
            found.say(
                f"off the CPU in {dtype}", {kind: f"{far:.1e}" for kind, far in kinds.items()}
            )
    if "voice" in chosen:
        dtype = torch.bfloat16 if is_cuda else torch.float32
        counts = [int(count) for count in options.sessions.split(",")]
        voice = drawn(
            torch.device(options.device), dtype, slots=max(counts), exact=options.deterministic
        )
        found.keep("voice", measure_voice(voice, counts, found.say))
        del voice
    rest = [name for name in STAGES[2:] if name in chosen]
    if rest:
        model = _load(options, found)
        for name in rest:
            _stage(name, options, model, found)
    found.say("most memory, bytes", gpu_bytes())


if __name__ == "__main__":
    main()
