"""What operators copy, read as the real commands, settings and links read it: tests of deploy."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import click
import pytest

from runtime.cli import main
from runtime.link.link import TcpAddress, read_address, read_token
from runtime.net.tls import Certificate
from runtime.serve.serve_command import check
from runtime.settings.settings import Settings
from runtime.settings.sources import given, read
from tests.test_deploy import DEPLOY, STEPS, shown

PATHS: Final = ("keys", "worker_token_file", "worker_ca", "tls_cert", "tls_key")
USER: Final = int(re.findall(r"--uid (\d+)", dict(STEPS)["RUN"])[0])

Json = dict[str, Any]
Real = Mapping[str, Path]
"""A path in a container, and what is there."""


def text_of(name: str) -> str:
    """A file of deploy/."""
    return (DEPLOY / name).read_text()


# -- command lines --------------------------------------------------------------------------------


def parse(words: list[str]) -> click.Context:
    """Read a command line as `antiphon` does, without running it."""
    name, *rest = words
    command = main.get_command(click.Context(main), name)
    while isinstance(command, click.Group):
        (name, *rest), command = rest, command.get_command(click.Context(command), rest[0])
    assert command is not None, name
    return command.make_context(name, rest)


def serving(words: list[str], environ: Mapping[str, str], real: Real) -> Settings:
    """The settings of `antiphon serve` in a container, whose files must be there and be right."""
    settings = read(flags=given(parse(words)), environ=environ).settings
    paths = {name: getattr(settings, name) for name in PATHS}
    found = {name: real[str(path)] for name, path in paths.items() if path is not None}
    check(attrs.evolve(settings, **found))
    return settings


def working(words: list[str], real: Real) -> TcpAddress:
    """The address of a worker in a container, whose files must be there and be right."""
    options = parse(words).params
    read_token(real[str(options["token_file"])])
    Certificate(real[str(options["tls_cert"])], real[str(options["tls_key"])])
    address = read_address(options["listen"])
    assert isinstance(address, TcpAddress)
    return address


# -- secrets --------------------------------------------------------------------------------------


def make_secrets(text: str, folder: Path) -> None:
    """Make what the first lines of a file say, below a folder."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    (words,) = [words for words in shown(text) if any("worker-secrets.sh" in it for it in words)]
    arguments = words[words.index("sh") + 2 :]
    subprocess.run(["sh", DEPLOY / "worker-secrets.sh", *arguments], cwd=folder, check=True)
    (folder / "keys").mkdir()
    (folder / "keys" / "keys.toml").touch()


def shake_hands(host: str, ca: Path, certificate: Certificate) -> None:
    """Let a gateway greet a worker by TLS, in memory; `ssl.SSLError` if it does not trust it."""
    ways = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=ca)
    ends = [
        context.wrap_bio(*ways, server_hostname=host),
        certificate.context.wrap_bio(*reversed(ways), server_side=True),
    ]
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


def check_health(command: list[str], port: int, real: Real) -> None:
    """A check of a worker: Python that connects to its port, and trusts its authority."""
    assert command[:2] == ["python", "-c"]
    compile(command[2], "health", "exec")
    assert re.findall(r"'127\.0\.0\.1', (\d+)", command[2]) == [str(port)]
    (ca,) = re.findall(r"cafile='([^']+)'", command[2])
    ssl.create_default_context(cafile=real[ca])
