"""Run what needs a GPU: `python -m tests.gpu`, from the source tree; it takes 8 minutes.

The published shape gets random weights, and its voice drawn ones. Sessions with voice and pictures
in bf16; what a session takes; 60 s rebuilt; the sessions in int4; a log of `--deterministic`
replayed. Each stage has its time (`STAGES`), at the end of which it stops; each finding is a line,
and all of them are in `gpu.json`, from which the table at the end is made. `--only` runs others:
how far numbers are off a CPU's, what each part takes. `--device cpu` tries it on `tiny`'s shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from runtime.commands.bench import ARRIVALS
from runtime.model.backends.minicpmo.config import ModelConfig, load_config
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.quantized import BITS
from runtime.model.models import tiny_path
from tests.gpu import engine
from tests.gpu.agreement import agreement
from tests.gpu.backend import give_voice
from tests.gpu.steps import measure
from tests.gpu.voice import drawn
from tests.gpu.voice import measure as measure_voice
from tests.models.full_shape import full_config, gpu_bytes, random_model
from tests.project.evidence import made

STAGES: Final[Mapping[str, float]] = {
    "served": 130,
    "grown": 50,
    "rebuilt": 50,
    "served int4": 120,
    "replayed": 130,
}
"""The stages of an ordinary run, each with its seconds, the loading of a model included."""
OTHERS: Final = ("agreement", "voice", "steps", "staged", "profiled")
"""Stages that run when they are asked for, without a limit of time."""
COUNTS: Final = "16,32,48,64"
ALONE: Final = ("agreement", "voice", "replayed")
LATE: Final = "most sessions with under 1% late units, voice and pictures"


class TimeUp(Exception):  # noqa: N818 - not an error
    """A stage's time is over."""


@attrs.define
class Found:
    """What was found, as it is written; `ends_s`: when the stage in progress stops."""

    out: Path | None
    name: str
    lines: dict[str, Any] = attrs.field(factory=dict)
    stage: str = ""
    ends_s: float = math.inf

    def say(self, name: str, found: object) -> None:
        """Print a finding, and keep it; `TimeUp` if the stage's time is over."""
        name = f"{self.stage}: {name}" if self.stage else name
        print(f"{name}: {found}", flush=True)
        self.keep(name, found)
        if time.perf_counter() > self.ends_s:
            raise TimeUp

    def keep(self, name: str, found: object) -> None:
        """Keep a finding, and write all so far: the time on a GPU may end at any moment."""
        self.lines[name] = found
        if self.out is not None:
            text = json.dumps(self.lines, indent=1, default=attrs.asdict)
            (self.out / f"{self.name}.json").write_text(text + "\n", "utf-8")

    def take(self, name: str, found: Iterable[object]) -> None:
        """Keep findings as they come."""
        for each in found:
            self.keep(name, [*self.lines.get(name, ()), each])


def _load(options: argparse.Namespace, found: Found, quantize: str | None) -> DuplexModel:
    device, is_cuda = torch.device(options.device), options.device == "cuda"
    began = time.perf_counter()
    model = random_model(
        _config(is_cuda=is_cuda, scale=1.0),
        tiny_path(),
        slots=options.slots,
        device=device,
        dtype=torch.bfloat16 if is_cuda else torch.float32,
        exact=options.deterministic,
        quantize=quantize,
        context_percent=options.context_percent,
    )
    if not options.mute:
        give_voice(model, exact=options.deterministic)
        model = DuplexModel.of(model.runner, model.tokens, {})
    found.say("loaded, s", round(time.perf_counter() - began, 1))
    found.say("attention", model.runner.attention)
    found.say("batch", model.runner.batch)
    found.say("each session gets its own", model.info.deterministic)
    found.say("a session's bytes", model.runner.slot_bytes)
    return model


def _config(*, is_cuda: bool, scale: float) -> ModelConfig:
    return full_config(scale) if is_cuda else load_config(tiny_path() / "config.json")


def _stage(name: str, options: argparse.Namespace, model: DuplexModel, found: Found) -> None:
    match name:
        case "steps":
            measure(model.runner, found.say)
        case "staged":
            found.keep(name, engine.staged(model, found.say))
        case "served" | "served int4":
            counts = [int(count) for count in options.sessions.split(",")]
            names = options.load.split(",")
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
            found.take(name, runs)
        case "grown":
            found.keep(name, engine.grown(model, found.say))
        case "rebuilt":
            found.keep(name, engine.rebuilt(model, found.say))
        case "profiled":
            engine.profiled(model, options.out or Path())


def _alone(name: str, options: argparse.Namespace, found: Found) -> None:
    """Run a stage that makes its own models."""
    is_cuda, device = options.device == "cuda", torch.device(options.device)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    if name == "agreement":
        dtypes = (torch.bfloat16, torch.float32) if is_cuda else (torch.float32,)
        config = _config(is_cuda=is_cuda, scale=options.layers)
        for each, kinds in agreement(config, tiny_path(), device, dtypes).items():
            far = {kind: f"{off:.1e}" for kind, off in kinds.items()}
            found.say(f"off the CPU in {each}", far)
    elif name == "voice":
        counts = [int(count) for count in options.sessions.split(",")]
        voice = drawn(device, dtype, slots=max(counts), exact=options.deterministic)
        found.keep(name, measure_voice(voice, counts, found.say))
    else:
        found.keep(name, replayed(options.device, found.ends_s - time.perf_counter()))
        found.say("result", found.lines[name])


def replayed(device: str, limit_s: float) -> dict[str, Any]:
    """Replay a log of a server with `--deterministic`, each a process of its own."""
    model = "backend:full:voice" if device == "cuda" else "backend:full:tiny"
    with tempfile.TemporaryDirectory(prefix="antiphon-replayed-") as name:
        command = [sys.executable, "-m", "tests.gpu.served", "--deterministic", "--replay"]
        command += ["--model", model, "--sessions", "2", "--seconds", "4", "--out", name]
        env = {**os.environ} if device == "cuda" else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        limit = None if limit_s == math.inf else max(1.0, limit_s)
        try:
            subprocess.run(command, check=True, timeout=limit, env=env, stdout=subprocess.DEVNULL)
        except subprocess.SubprocessError as failed:
            return {"result": f"failed: {type(failed).__name__}"}
        found: dict[str, Any] = json.loads((Path(name) / "served.json").read_text("utf-8"))
    return dict(found["replay"])


def table(lines: Mapping[str, Any]) -> list[str]:
    """The table of documentation, of what was found; a dash for what was not."""

    def served(stage: str) -> str:
        most = {each["run"].arrival: each["served"] for each in lines.get(stage, ())}
        return ", ".join(f"{count} {arrival}" for arrival, count in most.items()) or "-"

    def found(stage: str, form: str, name: str = "") -> str:
        """What a stage has said, also if it was stopped then."""
        each = (value for key, value in lines.items() if key.startswith(f"{stage}: {name}"))
        return ", ".join(form.format(value) for value in each) or "-"

    rows = {
        f"{LATE}, bf16": served("served"),
        f"{LATE}, int4": served("served int4"),
        "a session's memory": found("grown", "{0[all]} MB at {0[s]} s", "a session after"),
        "60 s rebuilt exactly": found("rebuilt", "{} s", engine.REBUILT_EXACTLY),
        "a log of `--deterministic`, replayed": lines.get("replayed", {}).get("result", "-"),
    }
    return [f"| {name} | {value} |" for name, value in rows.items()]


def main() -> None:
    """Make models, and measure."""
    parser = argparse.ArgumentParser(description="what to run on a GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--deterministic", action="store_true", help="as of `antiphon serve`")
    parser.add_argument("--quantize", choices=BITS, help="as of `antiphon serve`")
    parser.add_argument("--context-percent", type=int, default=50, help="as of the same")
    parser.add_argument("--mute", action="store_true", help="codes are made, but no sound")
    parser.add_argument("--only", help=f"stages, of {', '.join((*STAGES, *OTHERS))}, with commas")
    parser.add_argument("--sessions", default=COUNTS, help="of the stages `served` and `voice`")
    parser.add_argument("--seconds", type=int, default=5, help="units a session, in `served`")
    parser.add_argument(
        "--load", default="speaking omni", help=f"some of {', '.join(engine.LOADS)}, in `served`"
    )
    parser.add_argument("--due", choices=["both", *ARRIVALS], default="both", help="in `served`")
    parser.add_argument("--words", type=int, default=0, help="of the instructions, in `served`")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times as long for each stage, on a CPU"
    )
    parser.add_argument("--layers", type=float, default=0.25, help="of `agreement`, a share")
    parser.add_argument("--out", type=made, help="a folder for what was found")
    parser.add_argument("--name", default="gpu", help="of the file in it")
    options = parser.parse_args()
    chosen = list(STAGES) if options.only is None else options.only.split(",")
    if unknown := set(chosen) - {*STAGES, *OTHERS}:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    found, is_cuda = Found(options.out, options.name), options.device == "cuda"
    found.say("torch", (torch.__version__, torch.cuda.get_device_name() if is_cuda else "cpu"))
    began, model, is_of = time.perf_counter(), None, None
    for name in chosen:
        limit_s = options.patience * STAGES.get(name, math.inf)
        found.stage, found.ends_s = name, time.perf_counter() + limit_s
        wanted = "int4" if "int4" in name else options.quantize
        try:
            if name in ALONE or wanted != is_of:
                model = None  # What follows needs the memory.
                gc.collect()
                torch.cuda.empty_cache()
            if name in ALONE:
                _alone(name, options, found)
                continue
            if model is None:
                model, is_of = _load(options, found, wanted), wanted
            _stage(name, options, model, found)
        except TimeUp:
            found.keep(f"{name}: stopped", "its time was over")
    found.stage, found.ends_s = "", math.inf
    found.say("most memory, bytes", gpu_bytes())
    found.say("all, s", round(time.perf_counter() - began))
    print("\n".join(table(found.lines)))


if __name__ == "__main__":
    main()
