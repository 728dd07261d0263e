"""`antiphon serve`: settings from flags, then `runtime.serving`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Final, Literal

import anyio
import click

from protocol.limits import IDLE_S, LIMIT_AUDIO_S, LIMIT_VIDEO_S, PAUSE_S
from protocol.messages import Mode

from .admission import QUEUE_MAX
from .listener import Address
from .models import DEVICES, DTYPES, ModelUnknownError, check_model
from .settings import CHATS_MAX, DEFAULT_PORT, MODES, Settings

RECORDINGS: Final = Path("recordings")
"""Where logs go unless told otherwise: every session is recorded."""
EXIT_WAIT_S: Final = 15.0
"""A unit that runs is over by then, and logs are closed; a hanging one is not waited for."""


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port for WebSockets and HTTP; 0 takes a free one and prints it.",
)
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    help="tiny: the embedded trained model. scripted: plays a fixed script, hears nothing. "
    "llama_omni:ws://HOST:PORT: a llama.cpp-omni server, one session at a time. Otherwise the "
    "folder of a MiniCPM-o checkpoint: config.json, tokenizer.json, safetensors, and "
    "assets/token2wav for its voice. `antiphon doctor --model FOLDER` says whether it fits.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 1024),
    help="Sessions at once; the memory of all is taken at the start [default: tiny's own 8; of a "
    "folder as many as fit into memory, at most 64].",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    help="Where the model computes [default: cpu for tiny; of a folder cuda where there is one].",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Format of weights and caches [default: fp32 on cpu, bf16 on cuda]. Full replay is "
    "promised on cpu only.",
)
@click.option(
    "--record",
    "record_to",
    type=click.Path(path_type=Path, file_okay=False),
    default=RECORDINGS,
    show_default=True,
    help="Folder of the session logs; it is made where it is missing.",
)
@click.option("--no-record", is_flag=True, help="Record nothing.")
@click.option(
    "--durability",
    type=click.Choice(["none", "interval", "unit"]),
    default="interval",
    show_default=True,
    help="When logs are synced to the device, besides at their end: never, every second, or with "
    "every unit. A killed process loses nothing in any case; a power cut may.",
)
@click.option(
    "--on-recording-failure",
    type=click.Choice(["continue", "close"]),
    default="continue",
    show_default=True,
    help="What a session does when its log cannot be written: go on and say so, or end.",
)
@click.option(
    "--limit-video-s",
    type=click.IntRange(1),
    default=LIMIT_VIDEO_S,
    show_default=True,
    help="Total seconds of a video session, queueing and idling included.",
)
@click.option(
    "--limit-audio-s",
    type=click.IntRange(1),
    default=LIMIT_AUDIO_S,
    show_default=True,
    help="Total seconds of an audio session.",
)
@click.option(
    "--default-mode",
    type=click.Choice(MODES),
    default="video",
    show_default=True,
    help="The mode of a client that names none in its URL.",
)
@click.option(
    "--queue-max",
    type=click.IntRange(0),
    default=QUEUE_MAX,
    show_default=True,
    help="Sessions that may wait for a slot; 0 refuses instead (worker_busy).",
)
@click.option(
    "--chats-max",
    type=click.IntRange(0),
    default=CHATS_MAX,
    show_default=True,
    help="Chats that may be connected at once; each takes a slot for its turns alone.",
)
@click.option(
    "--chat-idle-s",
    type=click.IntRange(1),
    default=IDLE_S,
    show_default=True,
    help="Seconds that a chat may wait between two turns.",
)
@click.option(
    "--pause-s",
    type=click.IntRange(1),
    default=PAUSE_S,
    show_default=True,
    help="Seconds that a client of /ws/duplex may pause; it may ask for less.",
)
@click.option(
    "--voices",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of WAV files that clients may name as reference audio, each by its name without "
    ".wav [default: none].",
)
@click.option("-v", "--verbose", is_flag=True, help="Log what every session does.")
def serve_command(
    *,
    host: str,
    port: int,
    model: str,
    slots: int | None,
    device: str | None,
    dtype: str | None,
    record_to: Path,
    no_record: bool,
    durability: Literal["none", "interval", "unit"],
    on_recording_failure: Literal["continue", "close"],
    limit_video_s: int,
    limit_audio_s: int,
    default_mode: Mode,
    queue_max: int,
    chats_max: int,
    chat_idle_s: int,
    pause_s: int,
    voices: Path | None,
    verbose: bool,
) -> None:
    """Serve a model over WebSockets at /v1/realtime?mode=video|audio|chat.

    \b
    Clients of the older protocols connect to
      /ws/duplex/{session_id}   full duplex; ids that begin with adx_ or audio_duplex have no video
      /ws/chat                  one question a connection

    The same port takes HTTP (/health, /ready). Sessions and turns that find no free slot wait in
    one queue. Ctrl-C or SIGTERM ends every session cleanly; a second one ends at once.

    The server has no keys and no TLS yet: keep it on a loopback address or behind a proxy that
    has them.
    """  # noqa: D301 - click takes a backspace to keep the lines
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        check_model(model)
    except ModelUnknownError as error:
        raise click.ClickException(str(error)) from error
    settings = Settings(
        host=host,
        port=port,
        model=model,
        slots=slots,
        device=device,
        dtype=dtype,
        record_to=None if no_record else record_to,
        durability=durability,
        on_recording_failure=on_recording_failure,
        limit_video_s=limit_video_s,
        limit_audio_s=limit_audio_s,
        default_mode=default_mode,
        queue_max=queue_max,
        chats_max=chats_max,
        idle_s=chat_idle_s,
        pause_s=pause_s,
        voices=voices,
    )
    _serve(settings)


def _serve(settings: Settings) -> None:
    from .serving import CannotServeError, run

    try:
        serve = partial(
            run, settings, on_bound=_say_bound, on_ready=_say_ready, on_stopping=_exit_soon
        )
        anyio.run(serve, backend="trio")
    except CannotServeError as error:
        raise click.ClickException(str(error)) from error
    click.echo("stopped")


def _exit_soon() -> None:
    """See that the process ends, even where a thread hangs in the model and cannot be stopped."""
    timer = threading.Timer(EXIT_WAIT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _say_bound(addresses: tuple[Address, ...]) -> None:
    for address in addresses:
        host = f"[{address.host}]" if ":" in address.host else address.host
        click.echo(f"listening on ws://{host}:{address.port}/v1/realtime")
    sys.stdout.flush()


def _say_ready() -> None:
    click.echo("ready")
    sys.stdout.flush()
