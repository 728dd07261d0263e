"""`antiphon doctor`: whether a model can be served here; nothing is loaded.

`examine` follows `load_backend`: the folder, its config, the headers of its weights, the tokenizer,
the vocoder, the device, the memory. It goes on after a problem, and skips checks that need an
earlier result.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import click
import orjson
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..model.models import ModelUnknownError, ModelUnusableError, explained, model_folder
from ..net.process import importing, stdout_console
from ..settings.settings import QUANTIZATIONS, Settings
from ..settings.sources import loading_options

if TYPE_CHECKING:
    import torch

    from ..model.backends.minicpmo.config import ModelConfig
    from ..model.backends.minicpmo.device import MemoryPlan

# -- the examination -------------------------------------------------------------------------------


LIBRARIES: Final = ("antiphon", "torch", "transformers", "tokenizers", "safetensors", "numpy")
NVIDIA: Final = Path("/proc/driver/nvidia/version")
PROBE_BYTES_MAX: Final = 2_000_000_000
"""The largest weights for which the batch is tried: larger ones take minutes on a CPU."""
HALF_BYTES: Final = 2
"""Of a number in bf16 or fp16, the only formats of a GPU's exact steps."""
LAYOUT: Final = "the folder must contain a complete checkpoint in the published layout"
DOWNLOAD: Final = "download the safetensors files again, all of them"
OPTIONS: Final = "see `antiphon serve --help`"

State = Literal["ok", "note", "problem"]


@attrs.frozen(kw_only=True)
class Finding:
    """A check's result; `note`: limited, `problem`: not served; `do`: the remedy, or empty."""

    check: str
    state: State
    says: str
    do: str = ""


@attrs.frozen(kw_only=True)
class Part:
    """One part of the model; `weight_bytes` in the format of its computation."""

    name: str
    parameters: int
    weight_bytes: int


@attrs.frozen(kw_only=True)
class Memory:
    """The memory of the model and of each session: in parts, on the device, and free.

    `voices_bytes`: on the host, for reading reference audio.
    """

    weight_bytes: int
    voices_bytes: int
    session_bytes: dict[str, int]
    session_bytes_total: int
    free_bytes: int
    slots_fit: int


@attrs.frozen(kw_only=True)
class Diagnosis:
    """The result, in the order of loading; `attrs.asdict` makes its JSON.

    `parts` is empty where the config is unreadable, `memory` None where it cannot be planned.
    """

    model: str
    would_serve: bool
    findings: list[Finding]
    parts: list[Part]
    memory: Memory | None
    versions: dict[str, str]


def examine(settings: Settings) -> Diagnosis:
    """Check everything that serving a model by the settings needs."""
    visit = _Examination(settings)
    findings = list(visit.findings())
    return Diagnosis(
        model=settings.model,
        would_serve=all(finding.state != "problem" for finding in findings),
        findings=findings,
        parts=visit.parts,
        memory=visit.memory,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class _Examination:
    """One examination; a check's results are kept for the next."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.parts: list[Part] = []
        self.memory: Memory | None = None
        self._folder = Path()
        self._config: ModelConfig | None = None
        self._device: torch.device | None = None
        self._dtype: torch.dtype | None = None

    def findings(self) -> Iterator[Finding]:
        """Run the checks in order."""
        if self.settings.model == "scripted":
            yield Finding(check="model", state="ok", says="a script: needs no files and no device")
            return
        try:
            self._folder = model_folder(self.settings.model)
        except ModelUnknownError as error:
            do = "name the folder that contains config.json"
            yield Finding(check="folder", state="problem", says=str(error), do=do)
            yield self._where()
            return
        yield Finding(check="folder", state="ok", says=str(self._folder))
        yield from self._usable("config", LAYOUT, self._read_config())
        if self._config is not None:
            weights, tokenizer = self._weights(self._config), self._tokenizer(self._config)
            yield from self._usable("weights", DOWNLOAD, weights)
            yield from self._usable("tokenizer", LAYOUT, tokenizer)
        yield from self._usable("vocoder", LAYOUT, self._vocoder())
        yield self._where()
        if self._config is not None and self._device is not None and self._dtype is not None:
            yield self._plan(self._config, self._device, self._dtype)
            yield self._replay(self._config, self._device, self._dtype)

    def _usable(self, check: str, do: str, looked: Iterator[Finding]) -> Iterator[Finding]:
        """Look at files, which may be unusable."""
        try:
            with explained(self._folder):
                yield from list(looked)
        except ModelUnusableError as error:
            says = str(error).removeprefix(f"{self._folder}: ")
            yield Finding(check=check, state="problem", says=says, do=do)

    def _read_config(self) -> Iterator[Finding]:
        with importing():
            from ..model.backends.minicpmo.config import load_config

        self._config = load_config(self._folder / "config.json")
        llm, audio, tts = self._config.llm, self._config.audio, self._config.tts.llama
        says = (
            f"{self._config.name}: language model {llm.num_hidden_layers} x {llm.hidden_size}, "
            f"vision {self._config.vision.siglip.num_hidden_layers} x "
            f"{self._config.vision.siglip.hidden_size}, audio {audio.encoder_layers} x "
            f"{audio.d_model}, speech {tts.num_hidden_layers} x {tts.hidden_size}; "
            f"context {self._config.context_limit}"
        )
        yield Finding(check="config", state="ok", says=says)

    def _weights(self, config: ModelConfig) -> Iterator[Finding]:
        from ..model.backends.minicpmo.checkpoint import expected, survey, weight_files

        found = survey(expected(config, self._folder), self._folder)
        size = sum(path.stat().st_size for path in weight_files(self._folder))
        for problem in found.problems:
            do = "config.json and the weights differ in version: take both from the same source"
            yield Finding(check="weights", state="problem", says=problem, do=do)
        if not found.problems:
            says = f"{found.tensors} tensors, {_gb(size)} in files; every key known, none missing"
            yield Finding(check="weights", state="ok", says=says)

    def _tokenizer(self, config: ModelConfig) -> Iterator[Finding]:
        from ..model.backends.minicpmo.model import load_tokens

        tokens = load_tokens(self._folder, config)
        says = f"{tokens.size} ids, all control tokens, {len(tokens.forbidden)} ids never decided"
        yield Finding(check="tokenizer", state="ok", says=says)

    def _vocoder(self) -> Iterator[Finding]:
        from ..model.backends.minicpmo.model import VOCODER
        from ..model.backends.minicpmo.voices import has_default, has_published, lacking, survey

        assets = self._folder / VOCODER
        if missing := lacking(assets):
            do = "; ".join(missing)
            yield Finding(check="vocoder", state="note", says="no vocoder: text only", do=do)
            return
        codes = survey(assets)
        if self._config is not None and codes < self._config.tts.eos:
            says = f"the vocoder has {codes} codes, the model {self._config.tts.eos}"
            yield Finding(check="vocoder", state="problem", says=says, do=LAYOUT)
        says = "pieces of sound"
        if has_published(assets):
            says = f"token2wav, steps: {self.settings.voice_steps}"
            says += "" if has_default(assets) else "; sessions without reference audio get text"
        yield Finding(check="vocoder", state="ok", says=says)

    def _where(self) -> Finding:
        import torch

        from ..model.backends.minicpmo.device import device_name, pick_device, pick_dtype

        build = f"torch {torch.__version__}, built for CUDA {torch.version.cuda or 'no'}"
        if NVIDIA.exists():
            build += ", driver " + NVIDIA.read_text(errors="replace").splitlines()[0].strip()
        try:
            prefer_cuda = self.settings.model != "tiny"
            self._device = pick_device(self.settings.device, prefer_cuda=prefer_cuda)
            self._dtype = pick_dtype(self.settings.dtype, self._device)
        except ValueError as error:
            return Finding(check="device", state="problem", says=build, do=str(error))
        dtype = str(self._dtype).removeprefix("torch.")
        says = f"{device_name(self._device)}, {dtype}; {build}"
        return Finding(check="device", state="ok", says=says)

    def _plan(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Finding:
        from ..model.backends.minicpmo.device import free_bytes

        asked = self.settings.quantize
        try:
            needs = self._needs(config, device, dtype, asked)
        except ValueError as error:
            return Finding(check="memory", state="problem", says=str(error), do=OPTIONS)
        self.parts = [
            Part(name=name, parameters=count, weight_bytes=needs.weight_bytes[name])
            for name, count in needs.parameters.items()
        ]
        free = free_bytes(device)
        self.memory = _memory(needs, free, device)
        others = [name for name in QUANTIZATIONS if config.quantization is None and name != asked]
        quantized = ", ".join(
            f"{name} {self._needs(config, device, dtype, name).slots_that_fit(free, device)}"
            for name in others
        )
        each, fit = _gb(self.memory.session_bytes_total), self.memory.slots_fit
        voices = self.memory.voices_bytes
        says = (
            f"weights {_gb(self.memory.weight_bytes)}, "
            f"{f'{_gb(voices)} on the host to read voices, ' * bool(voices)}a session {each}; "
            f"{_gb(self.memory.free_bytes)} free, sessions that fit: {fit}"
            f"{f' (with --quantize: {quantized})' * bool(quantized)}"
        )
        wanted = self.settings.slots or 1
        if fit < wanted:
            do = f"give --slots {fit}, or " if fit else ""
            do += f"free memory, or take --quantize, a smaller --dtype, another device ({OPTIONS})"
            return Finding(check="memory", state="problem", says=says, do=do)
        return Finding(check="memory", state="ok", says=says)

    def _needs(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, quantize: str | None
    ) -> MemoryPlan:
        from ..model.backends.minicpmo.device import plan
        from ..model.backends.minicpmo.model import VOCODER
        from ..model.backends.minicpmo.voices import planned

        needs = plan(config, dtype, quantize, self.settings.context_percent)
        with suppress(ModelUnusableError), explained(self._folder):  # Its own finding says it.
            needs = planned(needs, self._folder / VOCODER, dtype, device, self.settings.voice_steps)
        return needs

    def _replay(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Finding:
        """Whether a session's bytes depend on the other sessions."""
        check, varies, do = "full replay", "", "serve it without --deterministic"
        if device.type == "cpu":
            if self.memory is None or self.memory.weight_bytes > PROBE_BYTES_MAX:
                says = "not tried here, as the model is too large; `antiphon serve` tries it"
                return Finding(check=check, state="note", says=says)
            if not self._is_independent(config, device, dtype):
                varies = "on this machine results depend on the batch"
        elif not self.settings.deterministic:
            varies = "on a GPU what is computed together may change the last bits"
        elif dtype.itemsize > HALF_BYTES:
            varies, do = "a GPU has no exact steps in this format", "take --dtype bf16 or fp16"
        else:
            says = "whether this GPU's steps are exact is tried when the model is loaded"
            return Finding(check=check, state="note", says=says)
        if not varies:
            says = "results are bitwise independent of the batch on this machine"
            return Finding(check=check, state="ok", says=says)
        if self.settings.deterministic:
            return Finding(check=check, state="problem", says=varies, do=do)
        return Finding(check=check, state="note", says=f"{varies}; logic replay works")

    def _is_independent(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> bool:
        from ..model.backends.minicpmo.checkpoint import build_parts
        from ..model.backends.minicpmo.quantized import chosen
        from ..model.backends.minicpmo.runner import rows_are_independent

        with explained(self._folder):
            how = chosen(config.quantization, self.settings.quantize)
            return rows_are_independent(build_parts(config, dtype, device, how))


def _memory(needs: MemoryPlan, free: int, device: torch.device) -> Memory:
    return Memory(
        weight_bytes=needs.model_bytes,
        voices_bytes=needs.voices_bytes,
        session_bytes={**needs.session_bytes, "mel": needs.host_bytes},
        session_bytes_total=needs.each_bytes(device),
        free_bytes=free,
        slots_fit=needs.slots_that_fit(free, device),
    )


# -- the command -----------------------------------------------------------------------------------


STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command("doctor")
@loading_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(*, as_json: bool, **asked: Any) -> None:
    """Say what would happen if a model were served here, without loading it.

    Looks at the folder, its config, the headers of its weights, the tokenizer, the vocoder, the
    device and its memory. Of the weights only the headers are read.

    \b
    Exit codes:
      0  it can be served
      1  it would not; each problem says what to do
      2  an option that cannot be used
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    found = examine(Settings(**asked))
    if as_json:
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        click.echo(orjson.dumps(attrs.asdict(found), option=options), nl=False)
    else:
        _show(stdout_console(), found)
    sys.exit(0 if found.would_serve else 1)


def _show(console: Console, found: Diagnosis) -> None:
    table = Table(box=SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found.findings:
        says = f"{finding.says}\n-> {finding.do}" if finding.do else finding.says
        style = STYLES[finding.state]
        table.add_row(finding.check, f"[{style}]{finding.state}[/]", says.replace("[", r"\["))
    console.print(table)
    if found.parts:
        console.print(_parts(found))
    if found.memory is not None:
        sizes = ", ".join(f"{k} {v / 1e6:.1f}" for k, v in found.memory.session_bytes.items())
        console.print(f"A session, MB: {sizes}", highlight=False)
    console.print(", ".join(f"{k} {v}" for k, v in found.versions.items()), soft_wrap=True)
    verdict = "can be served" if found.would_serve else "cannot be served"
    console.print(f"\n{found.model} {verdict}", highlight=False, markup=False, soft_wrap=True)


def _parts(found: Diagnosis) -> Table:
    table = Table("part", box=SIMPLE)
    table.add_column("parameters", justify="right")
    table.add_column("MB", justify="right")
    for part in found.parts:
        table.add_row(part.name, f"{part.parameters:,}", f"{part.weight_bytes / 1e6:.1f}")
    return table
