"""`antiphon demo`: serve, talk, record and replay in a minute, by the command line only.

It serves a model on a free port, plays a file to it in real time, stops the server with SIGTERM,
and runs `verify`, `replay` and `replay --full` on the log: processes of their own, with another
PYTHONHASHSEED. The server is stopped after an error or a signal too. One folder holds the log, the
reply and the server's standard error.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

import anyio
import attrs
import click
import orjson
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from rich.console import Console

from protocol.values.limits import Mode

from .. import ERROR, RUN, SOURCE_TREE
from ..client.terminal import UnusableError, echo_json, json_option, usable
from ..client.websocket import background
from ..media.sound import AudioFileError, write_wav
from ..model.models import MODELS, MOONSHINE, has_moonshine
from ..settings.extras import install
from .talk import JsonView, LineView, View, read_frame, read_speech, summarize
from .talk_session import Plan, Tally, talk

SAMPLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "demo.wav": "speech/demo.wav",
        "frame.jpg": "speech/frame.jpg",
        "news.flac": "speech/heldout/076-read-me-the-news.flac",
        "video.session.zst": "logs/v1-realtime-video.session.zst",
        "flood.session.zst": "logs/v1-realtime-flood.session.zst",
        "damaged.session.zst": "logs/v1-damaged-payload.session.zst",
    }
)
"""Files that the guides work on, and where they are in the sources, in `fixtures`."""
INSTRUCTIONS: Final = "Answer what you hear and see."
SILENCE_S: Final = 8
"""With the seconds that end the file and the close, within ten seconds of the file's end."""
CHECK_WAIT_S: Final = 600.0
"""A full replay computes all units again: minutes on a slow machine."""
CHECKS: Final = (("recordings", "verify"), ("replay",), ("replay", "--full"))


class DemoError(click.ClickException):
    """The demo failed; the message says where, in one line."""


@attrs.frozen(kw_only=True)
class Demo:
    """The demo's settings: `input_name` names the files for the user."""

    model: str
    folder: Path
    plan: Plan
    speech: Path
    input_name: str
    as_json: bool

    def echo(self, text: str, **fields: object) -> None:
        """Print a line for the user, or an object for programs."""
        if self.as_json:
            echo_json(fields)
        else:
            click.echo(text)


@attrs.frozen(kw_only=True)
class Check:
    """The outcome of one command on the log."""

    command: str
    exit_code: int
    elapsed_s: float
    output: str


def sample(name: str) -> Path:
    """One of `SAMPLES`: in the installed package, else in the sources."""
    installed = Path(__file__).parent / "samples" / name
    return installed if installed.exists() else SOURCE_TREE / "fixtures" / SAMPLES[name]


def write_samples(folder: Path) -> None:
    """Copy the samples into a folder; one that is there is written again. `UnusableError`."""
    with usable():
        folder.mkdir(parents=True, exist_ok=True)
        for name in SAMPLES:
            shutil.copyfile(sample(name), folder / name)


model_option: Final = click.option(
    "--model",
    type=click.Choice(MODELS),
    default="tiny",
    show_default=True,
    help="The model: the embedded trained one, or a script.",
)
"""Of the commands that serve an embedded model."""


@click.command("demo")
@model_option
@click.option(
    "--record",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo"),
    show_default=True,
    help="Folder of the log and the reply, created if missing; a reply in it is replaced.",
)
@click.option("--speech", type=click.Path(path_type=Path), help="Say this WAV [default: a sample].")
@click.option(
    "--frame", type=click.Path(path_type=Path), help="Show this JPEG [default: a sample]."
)
@click.option("--fast", is_flag=True, help="Send as fast as the model answers, not in real time.")
@click.option(
    "--samples",
    type=click.Path(path_type=Path, file_okay=False),
    help="Only write the sample files of the guides to this folder: speech, a picture, recordings.",
)
@json_option
def demo_command(
    *,
    samples: Path | None,
    model: str,
    folder: Path,
    speech: Path | None,
    frame: Path | None,
    fast: bool,
    as_json: bool,
) -> None:
    """Serve a model, talk to it, record the session and replay it: all in one go.

    It says a spoken sentence to the server in real time, with a picture now and then, and shows
    who speaks when. Then the server is stopped, and its log is checked, replayed, and computed
    again by the model, each in a new process: the same to the last byte, or the demo fails.

    \b
    Examples:
      antiphon demo
      antiphon demo --speech question.wav --record ./mine
      antiphon demo --samples samples

    \b
    Exit codes:
      0  the model answered, and the recording replays
      1  something failed: it says what
      2  a file that cannot be used
      130  interrupted; the server is stopped
    """  # noqa: D301 - click takes a backspace to keep the lines
    if samples is not None:
        write_samples(samples)
        click.echo(f"{samples}: {', '.join(SAMPLES)}")
        return
    demo = _plan(model, folder, speech, frame, fast=fast, as_json=as_json)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableError(f"--record: {folder}: {error.strerror}") from error
    cut_by = anyio.run(_run_unless_interrupted, demo, backend="trio")
    if cut_by is signal.SIGINT:
        raise KeyboardInterrupt
    if cut_by is not None:
        raise DemoError("interrupted")


def _plan(
    model: str, folder: Path, speech: Path | None, frame: Path | None, *, fast: bool, as_json: bool
) -> Demo:
    """Find and read the files; a speech of the user's own needs no picture."""
    if speech is None:
        speech, frame = sample("demo.wav"), frame or sample("frame.jpg")
    plan = Plan(
        units=read_speech(speech),
        instructions=INSTRUCTIONS,
        frame=None if frame is None else read_frame(frame),
        silence_s_max=SILENCE_S,
        fast=fast,
    )
    input_name = speech.name if frame is None else f"{speech.name}, showing {frame.name}"
    return Demo(
        model=model, folder=folder, plan=plan, speech=speech, input_name=input_name, as_json=as_json
    )


async def _run_unless_interrupted(demo: Demo) -> signal.Signals | None:
    """Run the demo; return the signal that ended it early, or None."""
    came: list[signal.Signals] = []
    async with background() as tasks:
        tasks.start_soon(_watch_signals, came, tasks.cancel_scope)
        await _run(demo)
    return came[0] if came else None


async def _watch_signals(came: list[signal.Signals], everything: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            came.append(number)
            everything.cancel()


async def _run(demo: Demo) -> None:
    before = _logs(demo.folder)
    async with _server(demo) as url:
        tally = await _converse(demo, url)
    demo.echo("\nthe server is stopped", type="server", state="stopped")
    logs = sorted(_logs(demo.folder) - before)
    if len(logs) != 1:
        raise DemoError(f"{demo.folder} has {len(logs)} new logs, one session was recorded")
    checks = await _check(demo, logs[0])
    _conclude(demo, tally, logs[0], checks)


def _logs(folder: Path) -> set[Path]:
    return set(folder.glob("*.session.zst"))


# -- the server ---------------------------------------------------------------------------------


READY_WAIT_S: Final = 120.0
"""Torch and a model from a cold disk on a busy machine take a part."""
STOP_WAIT_S: Final = 60.0
"""Longer than the server waits for its sessions; then it is killed."""
LOADING_WAIT_S: Final = 0.5
"""The same after an interrupt while the model loads: there is no recording to be finished."""
HURRY_WAIT_S: Final = 5.0
"""The same during a conversation: its last second is computed, and its recording gets its end."""
SERVE: Final = ("serve", "--port", "0", "--drain-s", "0")
"""What ends the server is over itself: sessions end at once, and in order."""
LINE_BYTES_MAX: Final = 4096
"""The server's lines are short."""


class ServerProcessError(click.ClickException):
    """The server did not start, or did not stop cleanly; the text says why, in one line."""


@asynccontextmanager
async def served(model: str, folder: Path, *arguments: str) -> AsyncIterator[str]:
    """Serve a model on a free port, and yield its address once it is ready.

    `folder` takes the logs, and the server's standard error in `server.log`. Raises
    `ServerProcessError` if the server did not start, or did not stop cleanly.
    """
    errors = folder / "server.log"
    words = (*SERVE, "--record", str(folder), "--model", model, *arguments)
    with errors.open("wb") as written:
        process = await anyio.open_process(
            [*RUN, *words],
            stdin=subprocess.DEVNULL,
            stderr=written,
            start_new_session=True,  # Ctrl-C is ours: we stop it
        )
    wait_s = LOADING_WAIT_S
    try:
        url = await _wait_until_ready(process, errors)
        wait_s = HURRY_WAIT_S
        yield url
        wait_s = STOP_WAIT_S
    except Exception:
        wait_s = STOP_WAIT_S
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process, wait_s)
    if process.returncode != 0:
        text = f"the server ended with exit code {process.returncode}, see {errors}"
        raise ServerProcessError(text)


async def _wait_until_ready(process: Process, errors: Path) -> str:
    assert process.stdout is not None
    lines = BufferedByteReceiveStream(process.stdout)
    url = ""
    try:
        with anyio.fail_after(READY_WAIT_S):
            while (line := words_of(await lines.receive_until(b"\n", LINE_BYTES_MAX))) != "ready":
                if line.startswith("listening on "):
                    url = line.removeprefix("listening on ")
    except TimeoutError:
        text = f"the server was not ready within {READY_WAIT_S:g} s"
        raise ServerProcessError(text) from None
    except (anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.EndOfStream):
        text = f"the server did not start: {_last_words(errors)} (see {errors})"
        raise ServerProcessError(text) from None
    return url


def words_of(line: bytes) -> str:
    """What a server's line says; with `--log-format json` each is an object."""
    return str(orjson.loads(line)["event"]) if line.startswith(b"{") else line.decode().strip()


def _last_words(errors: Path) -> str:
    """The last line with words of a possible traceback, framed as a group's is."""
    lines = errors.read_text(errors="replace").splitlines()
    stripped = (line.strip(" |+-") for line in reversed(lines))
    return next(filter(None, stripped), "it does not say why").removeprefix(ERROR)


async def _stop(process: Process, wait_s: float) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    with anyio.move_on_after(wait_s):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


@asynccontextmanager
async def _server(demo: Demo) -> AsyncIterator[str]:
    began_s = anyio.current_time()
    options = ("--transcriber", MOONSHINE) if has_moonshine() else ()
    async with served(demo.model, demo.folder, *options) as url:
        took_s = anyio.current_time() - began_s
        text = f"serving the {demo.model} model at {url} (ready in {took_s:.1f} s)"
        demo.echo(text, type="server", state="ready", url=url, model=demo.model)
        yield url


# -- the conversation ---------------------------------------------------------------------------


async def _converse(demo: Demo, url: str) -> Tally:
    demo.echo(f"saying {demo.input_name}\n", type="speech_file", seconds=len(demo.plan.units))
    began_s = anyio.current_time()
    mode: Mode = "audio" if demo.plan.frame is None else "video"
    reply = demo.folder / "reply.wav"
    view: View = JsonView() if demo.as_json else LineView(Console())
    tally = await talk(url, demo.plan, view, mode=mode)
    try:
        write_wav(reply, bytes(tally.pcm))
    except AudioFileError as error:
        raise DemoError(str(error)) from error
    elapsed_s = anyio.current_time() - began_s
    answered = demo.plan.is_answered(tally)
    view.end(summarize(tally, answered=answered, elapsed_s=elapsed_s, reply=reply))
    if tally.failure is not None:
        raise DemoError(tally.failure)
    return tally


# -- the replays --------------------------------------------------------------------------------


async def _check(demo: Demo, log: Path) -> list[Check]:
    """Run each command on the log, in a new process with another hash seed."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    checks = []
    for words in CHECKS:
        began_s = anyio.current_time()
        try:
            with anyio.fail_after(CHECK_WAIT_S):
                done = await anyio.run_process(
                    [*RUN, *words, str(log)],
                    check=False,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONHASHSEED": seed},
                )
        except TimeoutError:
            raise DemoError(f"{' '.join(words)} took more than {CHECK_WAIT_S:g} s") from None
        check = Check(
            command=" ".join(words),
            exit_code=done.returncode,
            elapsed_s=round(anyio.current_time() - began_s, 3),
            output=done.stdout.decode(errors="replace").strip(),
        )
        checks.append(check)
        _echo_check(demo, check)
    return checks


def _echo_check(demo: Demo, check: Check) -> None:
    verdict = "ok    " if check.exit_code == 0 else "FAILED"
    indented = "".join(f"\n        {line}" for line in check.output.splitlines())
    text = f"{verdict}  antiphon {check.command}  ({check.elapsed_s:.1f} s){indented}"
    demo.echo(text, type="check", **attrs.asdict(check))


def _typed() -> str:
    """What to type for this Antiphon: its path where the shell would find another, or none."""
    own, found = Path(sys.executable).with_name("antiphon"), shutil.which("antiphon")
    is_found = not own.exists() or (found is not None and own.samefile(found))
    return "antiphon" if is_found else os.path.relpath(own)


def _conclude(demo: Demo, tally: Tally, log: Path, checks: list[Check]) -> None:
    failed = [f"antiphon {check.command}" for check in checks if check.exit_code != 0]
    if not demo.plan.is_answered(tally):
        failed.insert(0, "the model did not answer")
    antiphon = _typed()
    text = f"""
log:    {log}
reply:  {demo.folder / "reply.wav"}

Try next:
  {antiphon} recordings inspect {log}
  {antiphon} talk {demo.speech}      while a server runs, or any WAV of yours
  {antiphon} serve --open --record {demo.folder}      and talk to it yourself
      It serves the model and opens the console, http://127.0.0.1:8006/, in your browser.
      Its Recordings have this session."""
    if not has_moonshine():
        text += f"\n  {install('words')}      to have your words transcribed too"
    demo.echo(text, type="demo", ok=not failed, failed=failed, log=str(log))
    if failed:
        raise DemoError(f"failed: {', '.join(failed)}")
