"""Client secrets: what one opens, for how long, and what is none."""

from __future__ import annotations

import base64
import json
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.access.gate import AccessControl, Admitted, Denied
from runtime.access.keys import (
    ANYONE,
    LIFETIME_S,
    SECRET_CHARS_MAX,
    SECRET_PREFIX,
    SKEW_S,
    ClientSecret,
    Key,
    KeyRing,
    SecretTooLongError,
    change_key_file,
    hash_key,
    read_secret,
)
from runtime.access.origins import read_origins

ANNA: Final = Key(name="anna", hash=hash_key("antiphon_anna"), scope="admin", sessions_max=2)
BERT: Final = Key(name="bert", hash=hash_key("antiphon_bert"))
NOW_S: Final = 1_800_000_000


class Clock:
    """The wall clock of a gateway."""

    now_s: float = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    change_key_file(file, lambda _: (ANNA, BERT), create=True)
    return file


@pytest.fixture
def gate(path: Path, clock: Clock) -> AccessControl:
    return gate_of(path, clock)


def gate_of(path: Path, clock: Clock) -> AccessControl:
    origins = read_origins((), has_keys=True, host="0.0.0.0")
    return AccessControl(KeyRing(path), origins, clock=lambda: 0.0, wall_clock=clock)


def secret(key: Key = ANNA, lifetime_s: int = LIFETIME_S, made_s: int = NOW_S, **more: Any) -> str:
    """Make a secret as the server does."""
    claims = ClientSecret(key_name=key.name, made_s=made_s, expires_s=made_s + lifetime_s, **more)
    return claims.sign(key)


def come(gate: AccessControl, text: str) -> Admitted:
    """Come with a secret on a WebSocket."""
    return gate.admit_websocket([("authorization", f"Bearer {text}")], (), secure=False)


def is_denied(gate: AccessControl, text: str) -> bool:
    """Whether a secret is answered as a wrong key is."""
    try:
        come(gate, text)
    except Denied as denied:
        return denied.status == HTTPStatus.UNAUTHORIZED
    return False


def test_it_begins_sessions_as_its_key(gate: AccessControl) -> None:
    """Its sessions are counted to no key, or have the rights of an admin."""
    session = {"type": "realtime", "instructions": "Sing."}
    admitted = come(gate, secret(session=session))
    assert admitted.principal == Key(name="anna", sessions_max=2)
    assert admitted.secret is not None
    assert admitted.secret.session == session
    offered = ("realtime", f"openai-insecure-api-key.{secret()}")
    assert gate.admit_websocket([], offered, secure=False).principal.name == "anna"


def test_it_opens_nothing_else(gate: AccessControl) -> None:
    """A page that is to talk reads, or removes, what belongs to the key."""
    with pytest.raises(Denied) as error:
        gate.admit_request("GET", [("authorization", f"Bearer {secret()}")], secure=False)
    assert (error.value.status, error.value.reason) == (403, "scope")


def test_the_console_s_may_do_what_its_key_may_but_sign(gate: AccessControl) -> None:
    """The console shows nothing; or a stolen secret is renewed for ever."""
    header = [("authorization", f"Bearer {secret(is_whole=True)}")]
    principal = gate.admit_request("POST", header, secure=False)
    assert (principal.name, principal.is_admin, principal.hash) == ("anna", True, "")


@pytest.mark.parametrize(
    ("late_s", "is_valid"),
    [
        *((0, True), (LIFETIME_S - 1, True), (LIFETIME_S, False), (10**6, False)),
        *((-SKEW_S, True), (-SKEW_S - 1, False), (-(10**6), False)),
    ],
)
def test_it_is_valid_for_its_time(
    gate: AccessControl, clock: Clock, late_s: int, is_valid: bool
) -> None:
    """It never expires; or another gateway, whose clock is a little behind, refuses a new one."""
    clock.now_s = NOW_S + late_s
    assert is_denied(gate, secret()) is not is_valid


def test_it_dies_with_its_key(gate: AccessControl, path: Path, clock: Clock) -> None:
    """A key that leaked is removed or renewed, and its secrets go on."""
    text = secret()
    assert not is_denied(gate, text)
    renewed = Key(name="anna", hash=hash_key("antiphon_other"))
    for keys in ((renewed, BERT), (BERT,), ()):
        change_key_file(path, lambda _, keys=keys: keys)
        assert is_denied(gate_of(path, clock), text)
    change_key_file(path, lambda _: (ANNA,))
    assert not is_denied(gate_of(path, clock), text)


def test_of_another_server_it_is_none(gate: AccessControl) -> None:
    """A secret is signed with any key, or with none."""
    for key in (Key(name="anna", hash=hash_key("guess")), Key(name="anna"), ANYONE):
        assert is_denied(gate, secret(key))
    claims = ClientSecret(key_name="anna", made_s=NOW_S, expires_s=NOW_S + 60)
    assert is_denied(gate, claims.sign(BERT))


def test_a_changed_one_is_none(gate: AccessControl) -> None:
    """A bit makes it longer, another key's, or an admin's."""
    text = secret(session={"type": "realtime"})
    body = text.removeprefix(SECRET_PREFIX)
    data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert is_denied(
            gate, SECRET_PREFIX + base64.urlsafe_b64encode(changed).decode().rstrip("=")
        )


@pytest.mark.parametrize(
    "body",
    [
        *("", "A", "=", "é", "\0", "." * 100, "A" * 1000, "A" * 10**6, " AAAA", "AAAA\n"),
        *("e30", base64.urlsafe_b64encode(b"[" * 900).decode().rstrip("=")),
    ],
)
def test_other_texts_are_none(gate: AccessControl, body: str) -> None:
    """A text that is no secret ends the connection's task."""
    assert is_denied(gate, SECRET_PREFIX + body)


@pytest.mark.parametrize(
    "claims",
    [
        *(
            "null",
            "{}",
            "[]",
            '["anna"]',
            '["anna", 0, 1, null, false, 1]',
            '[["anna"],0,0,null,true]',
        ),
        *('["anna","a","b",null,false]', "[null,0,9e99,null,true]", '["anna",NaN,0,null,true]'),
    ],
)
def test_signed_nonsense_is_none(gate: AccessControl, claims: str) -> None:
    """Claims of another version, or a reader of the key file, break the server."""
    mac = bytes(32)
    data = base64.urlsafe_b64encode(claims.encode() + mac).decode().rstrip("=")
    assert is_denied(gate, SECRET_PREFIX + data)


def test_settings_are_bounded() -> None:
    """A secret does not fit into a header, and every proxy refuses its sessions."""
    session = {"type": "realtime", "instructions": "a" * 4_000}
    assert len(secret(session=session)) < SECRET_CHARS_MAX
    with pytest.raises(SecretTooLongError):
        secret(session=session | {"instructions": "a" * 5_000})


def test_without_keys_only_settings_count(clock: Clock) -> None:
    """Where no key is needed a client that brings any is refused."""
    origins = read_origins((), has_keys=False, host="127.0.0.1")
    gate = AccessControl(None, origins, clock=lambda: 0.0, wall_clock=clock)
    host = ("host", "127.0.0.1")
    for text in ("ek_any", secret(ANYONE, session={"type": "realtime"})):
        header = [host, ("authorization", f"Bearer {text}")]
        admitted = gate.admit_websocket(header, (), secure=False)
        assert admitted.principal.name == ""
    assert admitted.secret is not None
    assert json.dumps(admitted.secret.session) == '{"type": "realtime"}'
    assert read_secret(secret(ANNA), lambda _: None, NOW_S) is None
