"""Checks of settings against each other and against the disk, before anything starts.

Each value was checked when it was read. All problems are reported at once, each with its remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from recorder.keep.remote import RemoteStore, StoreError

from ..access.keys import KeyFileError, read_key_file
from ..access.origins import is_loopback, read_origins
from ..link.address import read_address
from ..link.hello import read_token
from ..media.voices import NAME_RULE, is_voice_name
from ..model.models import ModelUnknownError, check_model
from ..placement.placement import PLACEMENTS, offer
from ..settings.declaration import shown
from ..settings.settings import Settings
from ..settings.sources import ConfigError
from .gateways import read_gateway

_OF_WORKERS: Final = ("isolate", "workers", "slots", "device", "dtype")
"""Settings of a model, which a server with workers elsewhere does not load."""
NOTICE_CHARS_MAX: Final = 2_000
"""A page of text: longer than clients read before speaking; each session's log holds it."""


def check(settings: Settings) -> None:
    """Raise `ConfigError` if settings do not fit together, or name a missing file."""
    problems = [*_access(settings), *_tls(settings), *_models(settings), *_workers(settings)]
    problems += [*_placements(settings), *_voices(settings), *_static(settings), *_notice(settings)]
    problems += [*_store(settings), *_gateways(settings)]
    if 0 < settings.pong_wait_s <= settings.ping_s:
        problems.append(
            f"pong_wait_s: {settings.pong_wait_s} is no longer than ping_s, {settings.ping_s}: "
            "clients would be dropped before they are asked"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def warnings(settings: Settings) -> tuple[str, ...]:
    """Warnings about valid but risky settings."""
    for text in settings.gateways:
        scheme, host, _ = read_gateway(text)
        if scheme == "http" and not is_loopback(host):
            return (f"gateways: keys and sessions cross the network to {text} in the clear",)
    if is_loopback(settings.host):
        return ()
    if settings.keys is None:
        return (f"{settings.host}: there are no keys; every client there may use this server",)
    if settings.tls_cert is None:
        text = "keys and sessions cross the network in the clear; use --tls-cert, or a proxy"
        return (f"{settings.host}: {text} with TLS",)
    return ()


def _access(settings: Settings) -> Iterator[str]:
    if settings.keys is None and not settings.insecure and not is_loopback(settings.host):
        yield (
            f"host: {settings.host} is no loopback address, and there are no keys. Make one with "
            "`antiphon keys add NAME --file FILE` and give --keys FILE; or say --insecure, and "
            "every client that reaches this address may use the server"
        )
    if settings.keys is not None:
        yield from _tried("keys", partial(read_key_file, settings.keys), KeyFileError)
    has_keys = settings.keys is not None
    read = partial(read_origins, settings.origins, has_keys=has_keys, host=settings.host)
    yield from _tried("origins", read)


def _tls(settings: Settings) -> Iterator[str]:
    if settings.tls_cert is not None and settings.tls_key is None:
        yield "tls_cert: a certificate needs its private key, tls_key"
    if settings.tls_key is not None and settings.tls_cert is None:
        yield "tls_key: a private key needs its certificate, tls_cert"
    yield from _file("tls_cert", settings.tls_cert)
    yield from _file("tls_key", settings.tls_key)


def _workers(settings: Settings) -> Iterator[str]:
    """Check the addresses of workers, and what their network asks for."""
    file = settings.worker_token_file
    yield from _file("worker_ca", settings.worker_ca)
    if file is not None:
        yield from _tried("worker_token_file", partial(read_token, file))
    if not settings.worker_addresses:
        return
    for text in settings.worker_addresses:
        try:
            address = read_address(text)
        except ValueError as error:
            yield f"worker_addresses: {error}"
        else:
            if file is None and not address.is_local:
                yield f"worker_addresses: {address} is not on this machine: give worker_token_file"
    for name in _OF_WORKERS:
        if getattr(settings, name):
            yield f"{name}: give it to `antiphon worker`; worker_addresses has only addresses"


def _placements(settings: Settings) -> Iterator[str]:
    for name in PLACEMENTS:
        yield from offer(name).problems(settings)


def _gateways(settings: Settings) -> Iterator[str]:
    yield from _file("gateway_ca", settings.gateway_ca)
    for text in settings.gateways:
        yield from _tried("gateways", partial(read_gateway, text))


def _models(settings: Settings) -> Iterator[str]:
    if settings.worker_addresses or settings.placement != "auto":
        return
    for name, model in (("model", settings.model), *(("workers", it) for it in settings.workers)):
        yield from _tried(name, partial(check_model, model), ModelUnknownError)


def _voices(settings: Settings) -> Iterator[str]:
    folder, name = settings.voices, settings.default_voice
    if folder is not None and not folder.is_dir():
        yield f"voices: there is no folder {folder}"
    if name is None:
        return
    if folder is None:
        yield "default_voice: it is the name of a voice in voices, and there is no such folder"
    elif not is_voice_name(name):
        yield f"default_voice: {shown(name)} is no name: {NAME_RULE}"


def _static(settings: Settings) -> Iterator[str]:
    folder = settings.static
    if folder is None:
        return
    if not folder.is_dir():
        yield f"static: there is no folder {folder}"
    for name in ("keys", "tls_key", "record_to"):
        path: Path | None = getattr(settings, name)
        if path is not None and path.resolve().is_relative_to(folder.resolve()):
            yield f"static: {folder} holds {name}, {path}: every client could read it there"


def _notice(settings: Settings) -> Iterator[str]:
    text = settings.recording_notice or ""
    if len(text) > NOTICE_CHARS_MAX:
        yield f"recording_notice: {len(text)} characters, at most {NOTICE_CHARS_MAX}"


def _store(settings: Settings) -> Iterator[str]:
    url, folder = settings.store, settings.record_to
    if url is None:
        return
    if folder is None:
        yield "store: nothing is recorded that could be stored; leave out --no-record"
        return
    yield from _tried("store", partial(RemoteStore.open, url), StoreError)
    place = urlsplit(url)
    if place.scheme == "file" and Path(unquote(place.path)).resolve() == folder.resolve():
        yield f"store: {url} is the folder of the recordings itself, record_to"


def _file(name: str, path: Path | None) -> Iterator[str]:
    """Check that a setting's file can be read."""
    if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
        yield f"{name}: there is no file {path} that can be read"


def _tried(
    name: str, read: Callable[[], object], wrong: type[Exception] = ValueError
) -> Iterator[str]:
    """Read a setting, and say why it is wrong."""
    try:
        read()
    except wrong as error:
        yield f"{name}: {error}"
