"""nginx and HAProxy, as deploy/ has them, before a real server.

They come from Debian (`nginx`, `haproxy`); where one is not installed, its file is only parsed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import trustme

from runtime import RUN
from runtime.settings.settings import Settings
from runtime.settings.sources import read
from tests.live.servers import live_server
from tests.soak.restarts import free_port

DEPLOY: Final = Path(__file__).parents[1] / "deploy"
NGINX: Final = (DEPLOY / "nginx.conf").read_text()
HAPROXY: Final = (DEPLOY / "haproxy.cfg").read_text()
NGINX_PROGRAM: Final = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
HAPROXY_PROGRAM: Final = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
WAIT_S: Final = 30


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The host and port of a server."""
    with live_server("--no-record") as server:
        yield server.url.removeprefix("ws://").partition("/")[0]


def changed(text: str, **lines: str) -> str:
    """Give some settings, each of which stands there once, other values."""
    for name, value in lines.items():
        text, found = re.subn(rf"(\b{name} )[^;\n]+", rf"\g<1>{value}", text)
        assert found == 1, name
    return text


@contextmanager
def running(port: int, *command: str | Path) -> Iterator[None]:
    """Run a proxy until the block ends; it listens when the block begins."""
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True) as process:
        try:
            give_up = time.monotonic() + WAIT_S
            while not _listens(port):
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < give_up
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            process.wait(WAIT_S)


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def ask(url: str, **environment: str) -> str:
    """Hold a conversation as a user would; return the answer."""
    done = subprocess.run(
        (*RUN, "chat", "hello", "--url", url),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(DEPLOY.parent)} | environment,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status_of(asked: urllib.request.Request, context: ssl.SSLContext) -> int:
    """Ask, and return the status of the answer."""
    try:
        with urllib.request.urlopen(asked, context=context, timeout=WAIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def settings_shown(text: str) -> Settings:
    """The settings that a file's first lines tell an operator to give the server."""
    shown = re.findall(r"^#     (\w+) = (.+)$", text, re.MULTILINE)
    named = {f"ANTIPHON_{name.upper()}": value for name, value in shown}
    return read(flags={}, environ=named, config=None).settings


def test_nginx_is_told_what_a_websocket_needs() -> None:
    """Sessions would be refused, delayed, or end in their first silence."""
    said = dict(re.findall(r"^\s+(\w+) ((?:[^;\n]|\bHost\b)+);$", NGINX, re.MULTILINE))
    headers = dict(re.findall(r"proxy_set_header (\w+) (\S+);", NGINX))
    assert headers["Host"] == "$http_host"  # with its port: pages of that name are the server's own
    assert headers["Upgrade"] == "$http_upgrade"
    assert said["proxy_http_version"] == "1.1"
    assert said["proxy_buffering"] == said["proxy_request_buffering"] == "off"
    assert said["proxy_read_timeout"] == said["proxy_send_timeout"] == "1h"
    settings = settings_shown(NGINX)
    assert settings.connections_per_address_max == settings.connections_max
    assert f"server 127.0.0.1:{settings.port};" in NGINX


def test_no_proxy_ends_a_session_that_is_only_silent() -> None:
    """The longest session, in which the client listens, would be cut off by the proxy."""
    hour_s = 3600
    assert Settings().limit_live_s <= hour_s
    assert re.findall(r"timeout (?:client|server) (\w+)", HAPROXY) == ["1h", "1h"]


@pytest.mark.skipif(NGINX_PROGRAM is None, reason="nginx is not installed")
def test_a_conversation_through_nginx(address: str, tmp_path: Path) -> None:
    """Over TLS: WebSockets, plain requests, and the name by which clients know the server."""
    authority, port = trustme.CA(), free_port()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "crt.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    text = changed(
        NGINX.replace("server 127.0.0.1:8006;", f"server {address};"),
        listen=f"127.0.0.1:{port} ssl",
        server_name="localhost",
        ssl_certificate=str(tmp_path / "crt.pem"),
        ssl_certificate_key=str(tmp_path / "key.pem"),
    )
    folders = "".join(
        f"{name}_temp_path {tmp_path / name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    around = f"pid {tmp_path}/pid; events {{}}\nhttp {{ {folders}\n{text}}}\n"
    (tmp_path / "nginx.conf").write_text(around)
    quiet = f"daemon off; error_log {tmp_path}/errors;"
    command = (NGINX_PROGRAM or "", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-g", quiet)
    with running(port, *command):
        trusted = {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
        assert "hello" in ask(f"wss://localhost:{port}", **trusted)
        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        health = urllib.request.Request(f"https://localhost:{port}/health")
        assert status_of(health, context) == 200
        for origin, status in ((f"https://localhost:{port}", 200), ("https://other", 403)):
            page = f"https://localhost:{port}/api/sessions"
            asked = urllib.request.Request(page, headers={"Origin": origin})
            assert status_of(asked, context) == status
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.skipif(HAPROXY_PROGRAM is None, reason="HAProxy is not installed")
def test_a_conversation_through_haproxy(address: str, tmp_path: Path) -> None:
    """It finds the gateway that is ready, and passes a WebSocket on."""
    port = free_port()
    text = changed(HAPROXY, bind=f"127.0.0.1:{port}")
    text = text.replace("gateway-1:8006\n", f"{address}\n")
    text = text.replace("gateway-2:8006\n", f"127.0.0.1:{free_port()}\n")
    (tmp_path / "haproxy.cfg").write_text(text)
    command = (HAPROXY_PROGRAM or "", "-db", "-q", "-f", tmp_path / "haproxy.cfg")
    with running(port, *command):
        time.sleep(1.5)  # until the gateway that is not there was looked at
        assert "hello" in ask(f"ws://127.0.0.1:{port}")
