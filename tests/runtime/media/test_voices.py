"""The library of voices: names find voices, and nothing else on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.limits import WAV_BYTES_MAX
from runtime.media import voices
from runtime.media.values import MediaError
from runtime.media.voices import VoiceLibrary, VoiceRefused

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
    assert tuple(VoiceLibrary(folder).sizes()) == ("Bo_b-2.1", "anna")
    assert VoiceLibrary(folder / "missing").sizes() == {}


def test_reads_a_voice(folder: Path) -> None:
    """The model would speak with another's voice."""
    library = VoiceLibrary(folder)
    assert {name: library.read(name) for name in library.sizes()} == {
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


@pytest.mark.parametrize("replace", [False, True])
def test_a_voice_is_added_whole(folder: Path, replace: bool) -> None:
    """A session never reads a part of a voice, and nothing else stays in the folder."""
    before = set(folder.iterdir())
    assert VoiceLibrary(folder).add("new", b"sound", replace=replace)
    assert set(folder.iterdir()) - before == {folder / "new.wav"}
    assert VoiceLibrary(folder).read("new") == b"sound"


def test_a_voice_replaces_one_only_where_that_is_asked_for(folder: Path) -> None:
    """An upload cannot cost a voice that somebody uses."""
    library = VoiceLibrary(folder)
    with pytest.raises(VoiceRefused) as refused:
        library.add("anna", b"other")
    assert (refused.value.reason, library.read("anna")) == ("exists", b"anna.wav")
    assert not library.add("anna", b"other", replace=True)
    assert library.read("anna") == b"other"


def test_a_link_is_replaced_and_not_followed(folder: Path) -> None:
    """What a link in the folder points to is never written, and never removed."""
    (folder / "link.wav").symlink_to(folder.parent / "secret.wav")
    (folder / "nowhere.wav").symlink_to(folder.parent / "made.wav")
    library = VoiceLibrary(folder)
    with pytest.raises(VoiceRefused):
        library.add("nowhere", b"x")
    for name in ("link", "nowhere"):
        library.add(name, b"mine", replace=True)
        library.remove(name)
    assert (folder.parent / "secret.wav").read_bytes() == b"secret"
    assert not (folder.parent / "made.wav").exists()


def files_of(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """What is below a folder, with mode, size and time of change; a look changes none of them."""
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {path: (it.st_mode, it.st_size, it.st_mtime_ns) for path, it in stats.items()}


@pytest.mark.parametrize("name", ["../secret", "..", "", ".hidden", "a/b", "a\0", "x" * 65, "a\n"])
def test_writes_and_removes_nothing_but_voices(folder: Path, name: str) -> None:
    """A client cannot change the server's files."""
    before = files_of(folder.parent)
    with pytest.raises(VoiceRefused) as refused:
        VoiceLibrary(folder).add(name, b"x", replace=True)
    assert refused.value.reason == "name"
    with pytest.raises(MediaError, match=NO_VOICE):
        VoiceLibrary(folder).remove(name)
    assert files_of(folder.parent) == before


def test_a_folder_of_a_voice_s_name_stays(folder: Path) -> None:
    """What is no voice is neither replaced nor removed."""
    with pytest.raises(OSError, match="directory"):
        VoiceLibrary(folder).add("folder", b"x", replace=True)
    with pytest.raises(MediaError, match=NO_VOICE):
        VoiceLibrary(folder).remove("folder")
    assert (folder / "folder.wav").is_dir()


def test_a_library_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads cannot fill the disk, whether by many voices or by large ones."""
    library = VoiceLibrary(folder)
    held_bytes = sum(it.lstat().st_size for it in folder.glob("*.wav"))
    monkeypatch.setattr(voices, "VOICES_BYTES_MAX", held_bytes + 10)
    with pytest.raises(VoiceRefused) as refused:
        library.add("new", b"x" * 11)
    assert refused.value.reason == "full"
    assert library.add("new", b"x" * 10)
    assert not library.add("new", b"y" * 10, replace=True)  # it takes its own place
    monkeypatch.setattr(voices, "VOICES_MAX", len(list(folder.glob("*.wav"))))
    with pytest.raises(VoiceRefused):
        library.add("newer", b"")
