"""`antiphon talk`: speak to a server, by a sound file or a microphone, and read its answer.

The command reads and checks files before it connects, chooses how the conversation is shown
(`view`), holds it (`session`), and writes the reply. Ctrl-C ends it politely if the server is
quick, and a second one at once. The reply so far is written if the file is new; an existing reply
is replaced only after a conversation that came to its end.

With `--mic` it records and plays (`devices`); else it plays nothing.
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import click
from rich.console import Console

from protocol.values.modes import Mode
from protocol.wire.media import check_frame

from ...client import terminal
from ...client.background import background
from ...media.sound import AudioFileError, read_wav, write_wav
from ..interrupts import run
from .devices import Aloud, Devices
from .session import Observer, Plan, cut_units, talk
from .tally import Tally
from .view import JsonView, LineView, LiveView, View, summarize

MODES: Final[tuple[Mode, ...]] = ("video", "audio")
GOODBYE_S: Final = 0.5
"""After Ctrl-C: a round trip across the world, and a short wait for the prompt."""
SILENCE_S: Final = 10
"""A model that has not begun to answer ten seconds after the question will not."""


@click.command("talk")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--mic", is_flag=True, help="Speak into the microphone, and hear the answer.")
@terminal.url_option
@terminal.key_option
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="What the session carries [default: video with --frame, else audio].",
)
@click.option("--frame", type=click.Path(path_type=Path), help="A JPEG, seen with every second.")
@click.option("--instructions", default="", help="The system prompt.")
@terminal.dialect_option("realtime", "duplex-v1", "legacy-duplex")
@click.option(
    "--reply",
    type=click.Path(path_type=Path),
    help="Where the model's speech goes [default: FILE's name with .reply.wav, in this folder; "
    "nowhere with --mic].",
)
@click.option(
    "--wait-s",
    type=click.IntRange(0, 600),
    default=SILENCE_S,
    show_default=True,
    help="Seconds of silence sent after FILE, at most, while the model has not answered.",
)
@click.option(
    "--fast",
    is_flag=True,
    help="Send a second as soon as the one before it was answered, and not in real time.",
)
@terminal.json_option
def talk_command(
    *,
    file: Path | None,
    mic: bool,
    url: str,
    key: str | None,
    mode: Mode | None,
    frame: Path | None,
    instructions: str,
    dialect: str,
    reply: Path | None,
    wait_s: int,
    fast: bool,
    as_json: bool,
) -> None:
    """Say FILE, or what you say, to a server in real time, and hear what it answers.

    FILE is a WAV of any rate; it is sent as it would be spoken, a second each second. After it
    comes silence, until the model has answered and listens again. The model's words are shown as
    they come; its voice is written as one WAV file (mono, 24 kHz): all it said, one reply after
    the other, without the pauses between them. The file is empty when the model said nothing.

    With --mic you speak into the default microphone and hear the model, until Ctrl-C. Use
    headphones: there is no echo cancellation. It needs antiphon[mic].

    \b
    Example:
      antiphon serve                          in one terminal
      antiphon talk question.wav              in another
      antiphon talk question.wav --frame photo.jpg --instructions "be brief"
      antiphon talk --mic
      antiphon talk question.wav --json --fast | jq -r 'select(.type == "summary").text'

    \b
    Exit codes:
      0  the conversation came to its end
      1  the server could not be reached, refused, reported an error, or ended it
      2  a file or an option that cannot be used
      130  interrupted; a reply that was there stays
    """  # noqa: D301 - click takes a backspace to keep the lines
    mode = mode or ("audio" if frame is None else "video")
    if frame is not None and mode == "audio":
        raise terminal.UnusableError("--frame: there is nothing to see with --mode audio")
    if (file is None) is not mic or (mic and fast):
        raise click.UsageError("either FILE or --mic is needed; --fast is for a FILE")
    devices = Devices() if mic else None
    plan = Plan(
        units=() if file is None else read_speech(file),
        instructions=instructions,
        frame=None if frame is None else read_frame(frame),
        silence_s_max=wait_s,
        fast=fast,
        microphone=devices,
    )
    reply = reply if file is None else reply or Path(f"{file.stem}.reply.wav")
    _check(file, reply, url, mode)
    tally = Tally()
    view = _choose_view(as_json, tally, file, url, len(plan.units))
    started_s = time.monotonic()
    heard = view if devices is None else Aloud(view, devices)
    talking = partial(_talk, url, plan, heard, mode=mode, dialect=dialect, key=key, tally=tally)
    with devices or nullcontext(), view:
        is_interrupted = run(talking)
    if is_interrupted and mic:  # which is how it ends
        is_interrupted, tally.failure = False, None
    _conclude(view, plan, tally, time.monotonic() - started_s, reply)
    if is_interrupted:
        raise KeyboardInterrupt
    if tally.failure is not None:
        raise click.ClickException(tally.failure)


def _conclude(view: View, plan: Plan, tally: Tally, elapsed_s: float, reply: Path | None) -> None:
    """Write the reply, if it is wanted, and show the sums."""
    written = None if reply is None else _write_reply(tally, reply)
    answered = plan.is_answered(tally)
    view.end(summarize(tally, answered=answered, elapsed_s=elapsed_s, reply=written))


def read_speech(path: Path) -> tuple[bytes, ...]:
    """Read a sound file as seconds of the model's input; `UnusableError` if it cannot be read."""
    with terminal.usable():
        return cut_units(read_wav(path))


def read_frame(path: Path) -> bytes:
    """Read a JPEG that a server will take; `UnusableError` if it is not a JPEG or too large."""
    with terminal.usable():
        data = path.read_bytes()
        check_frame(str(path), data)
        return data


def _check(file: Path | None, reply: Path | None, url: str, mode: Mode) -> None:
    """Check before the conversation for errors that would come after it."""
    terminal.check_url(url, mode)
    if reply is None:
        return
    if not reply.parent.is_dir():
        raise terminal.UnusableError(f"--reply: there is no folder {reply.parent}")
    if reply.is_dir() or (reply.exists() and file and reply.samefile(file)):
        raise terminal.UnusableError(f"--reply: {reply} would be overwritten")


def _choose_view(as_json: bool, tally: Tally, file: Path | None, url: str, file_s: int) -> View:
    if as_json:
        return JsonView()
    console = Console()
    if file is None:
        console.print("Speak; Ctrl-C ends it. Use headphones, or the model hears itself.")
        return LineView(console, listens=False)
    if not console.is_terminal:
        return LineView(console)
    return LiveView(console, tally, f"{file.name} to {url}", file_s)


async def _talk(
    url: str, plan: Plan, view: Observer, *, mode: Mode, dialect: str, key: str | None, tally: Tally
) -> bool:
    """Talk until Ctrl-C, which ends it politely; return whether there was one."""
    stop = anyio.Event()
    async with background() as tasks:
        tasks.start_soon(_watch_interrupts, stop, tasks.cancel_scope)
        await talk(url, plan, view, mode=mode, dialect=dialect, key=key, tally=tally, stop=stop)
    if stop.is_set():
        tally.failure = "interrupted"
    return stop.is_set()


async def _watch_interrupts(stop: anyio.Event, everything: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            if stop.is_set():
                everything.cancel()
            stop.set()
            everything.deadline = anyio.current_time() + GOODBYE_S


def _write_reply(tally: Tally, path: Path) -> Path | None:
    """Write the model's speech, even if empty, if there was a session and nothing is lost."""
    if tally.created is None or (tally.failure is not None and path.exists()):
        return None
    try:
        write_wav(path, bytes(tally.pcm))
    except AudioFileError as error:
        tally.failure = tally.failure or str(error)
        return None
    return path
