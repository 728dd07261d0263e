"""The library of voices: names find voices, and nothing else on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.limits import WAV_BYTES_MAX
from runtime.media.values import MediaError
from runtime.voices import VoiceLibrary

NO_VOICE = "there is no voice of that name"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A library of two voices among other things, and a secret beside it."""
    library = tmp_path / "voices"
    library.mkdir()
    (tmp_path / "secret.wav").write_bytes(b"secret")
    for name in ("anna.wav", "Bo_b-2.1.wav", ".hidden.wav", "two words.wav", "notes.txt"):
        (library / name).write_bytes(name.encode())
    (library / "folder.wav").mkdir()
    return library


def test_names_the_voices(folder: Path) -> None:
    """A client would be offered a voice that it cannot have, or not learn of one."""
    assert VoiceLibrary(folder).list() == ("Bo_b-2.1", "anna")
    assert VoiceLibrary(folder / "missing").list() == ()


def test_reads_a_voice(folder: Path) -> None:
    """The model would speak with another's voice."""
    library = VoiceLibrary(folder)
    assert {name: library.read(name) for name in library.list()} == {
        "anna": b"anna.wav",
        "Bo_b-2.1": b"Bo_b-2.1.wav",
    }
    (folder / "new.wav").write_bytes(b"new")
    assert library.read("new") == b"new"


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "..", ".", "", "/", ".hidden", "two words", "anna.wav", "anna\n", "anna\0"),
        *("voices/anna", "../voices/anna", "äöü", "a" * 65, "x" * 5_000, "folder", "notes.txt"),
    ],
)
def test_reads_nothing_but_voices(folder: Path, name: str) -> None:
    """A client could read the server's files."""
    with pytest.raises(MediaError) as refused:
        VoiceLibrary(folder).read(name)
    assert refused.value.reason == NO_VOICE


@given(st.text(max_size=80))
def test_any_name_is_answered(name: str) -> None:
    """A strange name would end the session with an internal error."""
    with pytest.raises(MediaError, match=f"^{NO_VOICE}$"):
        VoiceLibrary(Path("no-such-folder")).read(name)


def test_bounds_a_voice(folder: Path) -> None:
    """A huge file that was put there by mistake would fill the memory for each client."""
    with (folder / "huge.wav").open("wb") as file:
        file.truncate(WAV_BYTES_MAX + 1)
    with pytest.raises(MediaError, match=f"more than {WAV_BYTES_MAX} bytes"):
        VoiceLibrary(folder).read("huge")
