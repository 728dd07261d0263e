"""Who may fork a session, by its key."""

from __future__ import annotations

import pytest
from websockets.exceptions import InvalidStatus

from tests.network.requesting import request
from tests.runtime.serve.test_attaching import CLOSE, KEYS, SOUND, Shop, shop, until

__all__ = ("shop",)


def status_of_fork(shop: Shop, name: str, key: str) -> int:
    """The status with which a handshake is refused."""
    statuses = set()
    for address in (f"live/sessions/{name}/fork", f"realtime?mode=audio&fork={name}"):
        with pytest.raises(InvalidStatus) as refused, shop.connect(address, key):
            pass
        statuses.add(refused.value.response.status_code)
    (status,) = statuses
    return status


def owner_of(shop: Shop, session_id: str) -> str:
    """Whose a running session is."""
    told = request(shop.server.address, "/api/sessions", key=KEYS["root"], headers={}).said
    (owner,) = (it["owner"] for it in told["sessions"] if it["session_id"] == session_id)
    return str(owner)


def test_only_its_own_key_and_an_admin_may_fork_a_session(shop: Shop) -> None:
    """A caller could go on with what another one said, and hear the model repeat it."""
    with shop.session() as (session, name):
        session.send(SOUND)
        until(session, "session.output_audio.delta")
        for key, code in (("bert", 404), ("", 401)):
            assert status_of_fork(shop, name, key) == code
        for key in ("anna", "root"):
            with shop.connect(f"live/sessions/{name}/fork", key) as fork:
                fork.send('{"type": "session.start", "session": {}}')
                told = until(fork, "session.started")["session"]["id"]
                assert told != name
                assert owner_of(shop, told) == key
                assert status_of_fork(shop, told, "bert") == 404
                fork.send(CLOSE)
                until(fork, "session.closed")
