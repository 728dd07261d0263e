"""Runs a Python client of 004 as it is, in a world that has been bent to it by these shims alone.

Called as `python shims.py CLIENT HOST:PORT`, in a folder with a `ref.wav` of 16 kHz.

| shim | why |
|---|---|
| URL scheme and host | the example names a host, and TLS, which is spoken in front of us |
| receive limit | the library's 1 MiB holds 8 s of speech in one frame |
| `samplerate` of `soundfile.read` | soundfile refuses it for any file that has a header |
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import soundfile
import websockets

client, host = sys.argv[1:]
EXAMPLE_HOST = "wss://localhost:8006"

connect, read = websockets.connect, soundfile.read


def connect_here(uri: str, **options: Any) -> Any:
    """Connect to the server under test, and take frames of any length."""
    assert uri.startswith(EXAMPLE_HOST), uri
    return connect(uri.replace(EXAMPLE_HOST, f"ws://{host}"), max_size=None, **options)


def read_file(path: str, *, samplerate: int, **options: Any) -> Any:
    """Read a file whose rate is what the example asks for, without asking."""
    samples, rate_hz = read(path, **options)
    assert rate_hz == samplerate, f"the file has {rate_hz} Hz"
    return samples, rate_hz


websockets.connect = connect_here
soundfile.read = read_file
runpy.run_path(client, run_name="__main__")
