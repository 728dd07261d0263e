"""Descriptors: connections are refused before a log cannot be opened."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from recorder.storage.store import Store
from runtime import RUN
from runtime.net.limits import ConnectionLimiter, Counters
from runtime.serve.serving import LOGS_ENDING_MAX, OTHER_FILES, allow
from tests.live.servers import live_server
from tests.network.transport import limits
from tests.soak.server import handshake

FILES: Final = 200
CLIENTS: Final = 300
TIMEOUT_S: Final = 20

WITH_FEW_FILES: Final = (
    sys.executable,
    "-c",
    "import os, resource, sys; "
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES // 2}, {FILES})); "
    "os.execv(sys.argv[1], sys.argv[1:])",
    *RUN,
)


@given(wanted=st.integers(1, 10_000), files=st.integers(64, 50_000))
def test_what_is_allowed_fits_into_the_files(wanted: int, files: int) -> None:
    """The last connections would be taken, and their recordings lost."""
    connections_max, logs_ending_max = allow(wanted, files=files)
    assert 1 <= connections_max <= wanted
    assert 2 * connections_max + logs_ending_max <= files
    if files >= 2 * wanted + OTHER_FILES:
        assert connections_max == wanted


def test_without_a_limit_all_that_are_wanted_are_allowed() -> None:
    """A server without a limit would refuse clients."""
    assert allow(4096, files=None) == (4096, LOGS_ENDING_MAX)


def test_no_place_is_given_while_logs_need_the_files() -> None:
    """Logs that end slowly would leave no descriptor to those that begin."""
    has_files, counters = [False], Counters()
    limiter = ConnectionLimiter(limits(), counters, lambda: has_files[0])
    assert limiter.enter("10.0.0.1", 0.0) == "full"
    has_files[0] = True
    assert limiter.enter("10.0.0.1", 0.0) is None
    assert counters.refused["full"] == 1


def test_no_recording_fails_for_want_of_a_descriptor(tmp_path: Path) -> None:
    """Clients that open connections and say nothing would end the recordings of others."""
    with (
        live_server("--record", str(tmp_path), run=WITH_FEW_FILES) as server,
        ExitStack() as clients,
    ):
        host, port = server.address
        answers = list[bytes]()
        for _ in range(CLIENTS):
            with suppress(ConnectionError):  # it was refused without a word
                client = socket.create_connection((host, port), TIMEOUT_S)
                clients.enter_context(client)
                client.sendall(handshake(f"{host}:{port}", "/v1/realtime?mode=chat"))
                answers.append(client.recv(4096))
        said = server.errors.read_text()
    taken = sum(answer.startswith(b"HTTP/1.1 101 ") for answer in answers)
    allowed, _ = allow(4096, files=FILES)
    assert taken == allowed
    assert f"{FILES} files may be open" in said
    assert f"lowered from 4096 to {allowed}" in said
    assert "no longer recorded" not in said
    assert len(Store(tmp_path).logs()) == taken
