"""API keys: made, hashed, kept in a file, found in constant time, and followed when they change."""

from __future__ import annotations

import logging
import os
import re
import stat
import string
from pathlib import Path

import anyio
import attrs
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.limits import MODES, Mode
from runtime.access import keys as ring_module
from runtime.access.keys import (
    FILE_BYTES_MAX,
    KEY_CHARS_MAX,
    KEYS_MAX,
    POLL_S,
    SESSIONS_MAX,
    Key,
    KeyFileError,
    KeyRing,
    KeysWrongError,
    change_key_file,
    format_keys,
    hash_key,
    is_name,
    new_key,
    parse_keys,
    read_key_file,
)
from runtime.cli import main
from tests.sessions.in_memory import on_virtual_time

SECRET = "antiphon_" + "s" * 43
LOGGER = "antiphon.access"

COUNTS = st.none() | st.integers(0, SESSIONS_MAX)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", fullmatch=True)


@st.composite
def a_key(draw: st.DrawFn) -> Key:
    """Any key that a file may hold."""
    modes: list[Mode] = draw(st.lists(st.sampled_from(MODES), min_size=1, unique=True))
    return Key(
        name=draw(NAMES),
        hash="sha256:" + draw(st.text(string.hexdigits.lower()[:16], min_size=64, max_size=64)),
        scope=draw(st.sampled_from(["use", "admin"])),  # type: ignore[arg-type]
        sessions_max=draw(COUNTS),
        sessions_per_hour=draw(COUNTS),
        modes=draw(st.none() | st.just(tuple(modes))),
    )


KEYS = st.lists(a_key(), max_size=4, unique_by=(lambda key: key.name, lambda key: key.hash)).map(
    tuple
)


def key(name: str, secret: str = "", **more: object) -> Key:
    """A key of that name; its secret is its name unless another is given."""
    return Key(name=name, hash=hash_key(secret or name), **more)  # type: ignore[arg-type]


def write(path: Path, *keys: Key) -> Path:
    """Write a file as `antiphon keys` does."""
    change_key_file(path, lambda _: keys, create=True)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the keys are."""
    return tmp_path / "keys.toml"


# -- the values ---------------------------------------------------------------------------------


@given(keys=KEYS)
def test_what_is_written_is_read_as_the_same(keys: tuple[Key, ...]) -> None:
    """A change of one key would change another."""
    assert parse_keys(format_keys(keys)) == keys


def test_a_new_key_fits_headers_and_subprotocols() -> None:
    """A key could not be sent by a browser, or be guessed."""
    drawn = {new_key() for _ in range(100)}
    assert len(drawn) == 100
    assert all(re.fullmatch(r"antiphon_[A-Za-z0-9_-]{43}", it) for it in drawn)
    assert all(len(it) <= KEY_CHARS_MAX for it in drawn)


HASH = f'hash = "{hash_key("x")}"'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys = 1", "not a [[key]]"),
        ("key = 1", "begins with a line [[key]]"),
        ("[key]\nname = 'a'", "begins with a line [[key]]"),
        ("[[key]]", "key 1: name must be"),
        ("[[key]]\nname = 'a b'", "key 1: name must be"),
        ("[[key]]\nname = ''", "key 1: name must be"),
        ("[[key]]\nname = 'a'", "key 1 (a): hash must be"),
        (f"[[key]]\nname = 'a'\nhash = '{SECRET}'", "key 1 (a): hash must be"),
        (f"[[key]]\nname = 'a'\nhash = '{hash_key('x').upper()}'", "hash must be"),
        (f"[[key]]\nname = 'a'\n{HASH}\nsession_max = 1", "1 unknown fields"),
        (f"[[key]]\nname = 'a'\n{HASH}\nscope = 'root'", "scope must be use or admin"),
        (f"[[key]]\nname = 'a'\n{HASH}\nscope = ['use']", "scope must be use or admin"),
        (f"[[key]]\nname = 'a'\n{HASH}\nsessions_max = -1", "sessions_max must be"),
        (f"[[key]]\nname = 'a'\n{HASH}\nsessions_max = true", "sessions_max must be"),
        (f"[[key]]\nname = 'a'\n{HASH}\nsessions_per_hour = 1e3", "sessions_per_hour must be"),
        (f"[[key]]\nname = 'a'\n{HASH}\nmodes = 'video'", "modes must be"),
        (f"[[key]]\nname = 'a'\n{HASH}\nmodes = []", "modes must be"),
        (f"[[key]]\nname = 'a'\n{HASH}\nmodes = ['fax']", "modes must be"),
        (f"[[key]]\nname = 'a'\n{HASH}\n[[key]]\nname = 'b'\n{HASH}", "the same hash"),
        (
            f"[[key]]\nname = 'a'\n{HASH}\n[[key]]\nname = 'a'\nhash = '{hash_key('y')}'",
            "the same name",
        ),
        ("[[key]\n", "is not TOML"),
        ("a = " + "[" * 100_000, "is not TOML"),
    ],
)
def test_a_file_that_is_not_exactly_one_is_refused_without_a_secret(text: str, told: str) -> None:
    """A limit with a typing error in it would be none; or an error would show what it must not."""
    with pytest.raises(KeysWrongError) as error:
        parse_keys(text)
    assert told in str(error.value)
    assert SECRET not in str(error.value)
    assert hash_key("x") not in str(error.value)


def test_there_are_not_endlessly_many_keys() -> None:
    """Each client that knocks would cost the server a second."""
    many = [key(f"k{number}") for number in range(KEYS_MAX + 1)]
    assert len(parse_keys(format_keys(many[1:]))) == KEYS_MAX
    with pytest.raises(KeysWrongError, match="at most"):
        parse_keys(format_keys(many))


@given(text=st.text(max_size=80))
def test_names_are_plain(text: str) -> None:
    """A name could break a log's line, a table or a path."""
    assert is_name(text) == (re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", text) is not None)


# -- the file -----------------------------------------------------------------------------------


def test_a_file_is_its_owner_s_alone(path: Path) -> None:
    """Everybody on the machine would learn who has keys."""
    write(path, key("a"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path).warning is None


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o640), (0o666, 0o640), (0o400, 0o600)])
def test_a_file_that_is_written_again_keeps_its_group_s_eyes(
    path: Path, before: int, after: int
) -> None:
    """A server that runs as another user could not read its keys after a change."""
    write(path, key("a"))
    path.chmod(before)
    write(path, key("b"))
    assert stat.S_IMODE(path.stat().st_mode) == after


@pytest.mark.parametrize(
    ("mode", "told"),
    [(0o644, "others can read"), (0o660, "can write"), (0o602, "can write"), (0o640, None)],
)
def test_a_file_that_is_open_to_others_is_warned_about(
    path: Path, mode: int, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else on the machine could make keys, and nobody would notice."""
    write(path, key("a")).chmod(mode)
    KeyRing(path)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (told is not None)
    assert told is None or told in lines[0]


def test_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    """The keys of a server would no longer be where its configuration puts them."""
    real = write(tmp_path / "real.toml", key("a"))
    path.symlink_to(real)
    write(path, key("b"))
    assert path.is_symlink()
    assert [it.name for it in read_key_file(real).keys] == ["b"]


def test_a_change_that_fails_leaves_the_file_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would lock every client out."""
    before = write(path, key("a")).read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match=r"keys\.toml: cannot be written: No space left"):
        write(path, key("b"))
    assert path.read_bytes() == before
    assert [it.name for it in path.parent.iterdir()] == [path.name]


def test_two_changes_at_once_are_one_and_a_refusal(path: Path) -> None:
    """One of two keys that were handed out at once would open nothing."""

    def change(keys: tuple[Key, ...]) -> tuple[Key, ...]:
        with pytest.raises(KeyFileError, match="another command"):
            write(path, key("b"))
        return (*keys, key("a"))

    change_key_file(path, change, create=True)
    assert [it.name for it in read_key_file(path).keys] == ["a"]


@pytest.mark.parametrize(
    "data", [b"\xff", b"#" * (FILE_BYTES_MAX + 1), b"[[key]]"], ids=["binary", "large", "wrong"]
)
def test_what_is_no_key_file_is_one_line_with_its_name(path: Path, data: bytes) -> None:
    """A server that cannot start would not say why."""
    for missing in (path, path.parent, path / "below"):
        with pytest.raises(KeyFileError, match="cannot be read"):
            read_key_file(missing)
    path.write_bytes(data)
    with pytest.raises(KeyFileError, match=re.escape(f"{path}: ")) as error:
        read_key_file(path)
    assert str(error.value).isprintable()


# -- finding a key ------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", ["k0", "k3", "k6", "none of them", "", "\udcff", "é" * 200])
def test_every_key_is_compared_wherever_the_right_one_stands(
    path: Path, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    """How long an answer takes would tell which key was nearly right, or how many come before."""
    compared: list[str] = []

    def compare(ours: str, theirs: str) -> bool:
        compared.append(theirs)
        return ours == theirs

    keys = tuple(key(f"k{number}") for number in range(7))
    ring = KeyRing(write(path, *keys))
    monkeypatch.setattr(ring_module.hmac, "compare_digest", compare)
    found = ring.find(shown)
    assert (None if found is None else found.name) == (shown if shown.startswith("k") else None)
    assert compared == [it.hash for it in keys]


def test_what_is_longer_than_any_key_is_not_hashed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client could have the server hash megabytes."""
    ring = KeyRing(write(path, key("a", "x" * KEY_CHARS_MAX), key("b", "x" * (KEY_CHARS_MAX + 1))))
    assert ring.find("x" * KEY_CHARS_MAX) is not None
    monkeypatch.setattr(ring_module, "hash_key", None)
    assert ring.find("x" * (KEY_CHARS_MAX + 1)) is None


def test_no_key_is_shown_by_what_holds_it(path: Path) -> None:
    """A traceback would hand hashes to whoever reads the log."""
    ring = KeyRing(write(path, key("a")))
    assert hash_key("a") not in repr(ring.keys) + repr(read_key_file(path))


# -- following the file -------------------------------------------------------------------------


def names(ring: KeyRing) -> list[str]:
    return [it.name for it in ring.keys]


def test_the_file_is_looked_at_every_few_seconds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that leaked would be good until the server starts again."""
    ring = KeyRing(write(path, key("a")))
    looked: list[float] = []

    async def look() -> None:
        looked.append(anyio.current_time())

    async def scenario() -> None:
        begun = anyio.current_time()
        with anyio.move_on_after(3.5 * POLL_S):
            await ring.watch()
        assert [at - begun for at in looked] == pytest.approx([POLL_S, 2 * POLL_S, 3 * POLL_S])

    monkeypatch.setattr(ring, "refresh", look)
    on_virtual_time(scenario)


@pytest.mark.anyio
async def test_a_change_counts_when_it_is_seen(path: Path) -> None:
    """A key that was removed would go on opening the server."""
    ring = KeyRing(write(path, key("a"), key("b")))
    write(path, key("b"), key("c"))
    assert ring.find("a") is not None
    await ring.refresh()
    assert ring.find("a") is None
    assert names(ring) == ["b", "c"]


def spoil(path: Path, how: str) -> None:
    """Do to a file what editors and disks do."""
    if how == "missing":
        path.unlink(missing_ok=True)
    elif how == "binary":
        path.write_bytes(b"\xff")
    else:
        path.write_text(f"[[key]]\nname = 'a'\nhash = '{SECRET}'")


@pytest.mark.anyio
@pytest.mark.parametrize("broken", ["a key itself", "binary", "missing"])
async def test_a_broken_file_locks_nobody_out(
    path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A slip of an editor would close the server to all its clients."""
    ring = KeyRing(write(path, key("a")))
    spoil(path, broken)
    for _ in range(3):
        await ring.refresh()
    assert names(ring) == ["a"]
    (record,) = (it for it in caplog.records if it.levelno == logging.ERROR)
    assert "the keys stay as they were" in record.getMessage()
    assert SECRET not in record.getMessage()
    spoil(path, "missing")
    write(path, key("b"))
    await ring.refresh()
    assert names(ring) == ["b"]


@pytest.mark.anyio
async def test_nothing_that_goes_wrong_with_the_file_ends_the_server(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that is short of threads for a moment would end every session."""
    ring = KeyRing(write(path, key("a")))

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(ring_module, "read_key_file", fail)
        for _ in range(3):
            await ring.refresh()
    assert names(ring) == ["a"]
    (record,) = caplog.records
    assert "RuntimeError: can't start new thread; the keys stay" in record.getMessage()
    write(path, key("b"))
    await ring.refresh()
    assert names(ring) == ["b"]


def overwrite_unseen(path: Path, text: str) -> None:
    """Change a file without a change of its size or its times."""
    before = path.stat()
    with path.open("r+") as file:
        file.write(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.anyio
async def test_a_change_of_the_same_length_in_the_same_moment_counts(path: Path) -> None:
    """A clock of the disk that is too coarse would keep a key alive that was removed."""
    ring = KeyRing(write(path, key("a")))
    overwrite_unseen(path, format_keys([key("b")]))
    await ring.refresh()
    assert names(ring) == ["b"]


@pytest.mark.anyio
async def test_an_open_or_empty_file_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log would fill with one line every two seconds, or not say why nobody gets in."""
    ring = KeyRing(write(path, key("a")))
    os.chmod(path, 0o644)
    for _ in range(3):
        await ring.refresh()
    assert [it.levelno for it in caplog.records] == [logging.WARNING]
    write(path)
    for _ in range(3):
        await ring.refresh()
    assert "no client can connect" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2
    assert ring.find("a") is None


# -- the command --------------------------------------------------------------------------------


def keys(path: Path, *arguments: str) -> Result:
    """Run `antiphon keys`."""
    return CliRunner().invoke(main, ("keys", *arguments, "--file", str(path)))


def test_a_key_is_shown_once_and_alone(path: Path) -> None:
    """A key could not be piped to where it is needed, or could be read from the file."""
    made = keys(path, "add", "anna", "--sessions-max", "2", "--mode", "chat", "--mode", "audio")
    assert made.exit_code == 0, made.output
    shown = made.stdout.strip()
    assert SECRET[:9] == shown[:9]
    assert len(shown) == len(SECRET)
    assert shown not in path.read_text()
    found = KeyRing(path).find(shown)
    assert found == Key(name="anna", hash=hash_key(shown), sessions_max=2, modes=("audio", "chat"))


def test_a_key_is_renewed_and_removed(path: Path) -> None:
    """A key that leaked could not be taken out of the world without its limits and recordings."""
    first = keys(path, "add", "anna", "--scope", "admin", "--sessions-per-hour", "9").stdout.strip()
    keys(path, "add", "bert")
    second = keys(path, "renew", "anna").stdout.strip()
    ring = KeyRing(path)
    assert ring.find(first) is None
    renewed = ring.find(second)
    assert renewed is not None
    assert attrs.evolve(renewed, hash="") == Key(
        name="anna", hash="", scope="admin", sessions_per_hour=9
    )
    assert keys(path, "remove", "anna").exit_code == 0
    assert [it.name for it in read_key_file(path).keys] == ["bert"]


def test_keys_are_listed_without_their_hashes(path: Path) -> None:
    """An operator could not see who has a key, or would show hashes in a screenshot."""
    shown = keys(path, "add", "anna", "--sessions-max", "7").stdout.strip()
    path.chmod(0o644)
    listed = keys(path, "list")
    assert re.search(r"anna +use +7 +any +all", listed.stdout)
    assert hash_key(shown)[7:20] not in listed.output
    assert "others can read it" in listed.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("add", "anna"), "there already is a key anna"),
        (("add", "a b"), "a name is"),
        (("add", "bert", "--scope", "root"), "--scope"),
        (("add", "bert", "--sessions-max", "-1"), "--sessions-max"),
        (("renew", "bert"), "there is no key bert"),
        (("remove", "bert"), "there is no key bert"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    path: Path, arguments: tuple[str, ...], told: str
) -> None:
    """A typing error would be a traceback, or cost somebody a key."""
    before = write(path, key("anna")).read_bytes()
    wrong = keys(path, *arguments)
    assert wrong.exit_code in {1, 2}
    assert told in wrong.stderr
    assert wrong.stdout == ""
    assert path.read_bytes() == before


def test_a_file_that_is_not_there_is_made_by_add_alone(path: Path) -> None:
    """A wrong path would look like a file without keys."""
    for command in (("list",), ("remove", "anna"), ("renew", "anna")):
        assert "cannot be read" in keys(path, *command).stderr
        assert not path.exists()
    assert "cannot be opened" in keys(path / "below", "add", "anna").stderr
