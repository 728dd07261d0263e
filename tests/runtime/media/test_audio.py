"""Sound files of the command line: what is read, what is written, what is said of bad ones."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import soundfile

from protocol.values.errors import LocalProtocolError
from runtime.media import sound
from runtime.media.sound import AudioFileError, read_wav, write_wav


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    """Speech saved by the client would come out distorted, at another pitch or length."""
    path = tmp_path / "speech.wav"
    tone = (0.5 * np.sin(2 * np.pi * 300 * np.arange(24_000) / 24_000)).astype("<f4")
    write_wav(path, tone.tobytes())
    info = soundfile.info(path)
    assert (info.samplerate, info.channels, info.subtype) == (24_000, 1, "PCM_16")
    heard = np.frombuffer(read_wav(path), "<f4")
    expected = 0.5 * np.sin(2 * np.pi * 300 * np.arange(16_000) / 16_000)
    assert heard.shape == (16_000,)
    assert np.abs(heard - expected)[500:-500].max() < 0.001


def test_reads_any_rate_and_channels(tmp_path: Path) -> None:
    """A user's 44.1 kHz stereo recording could not be sent."""
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.full((44_100, 2), 0.25), 44_100)
    heard = np.frombuffer(read_wav(path), "<f4")
    assert heard.shape == (16_000,)
    assert np.allclose(heard[500:-500], 0.25, atol=0.001)


def test_reads_a_codec_that_cannot_seek(tmp_path: Path) -> None:
    """The recording of a telephone would end in a traceback."""
    path = tmp_path / "telephone.wav"
    soundfile.write(path, np.full(8_000, 0.25), 8_000, subtype="GSM610")
    assert len(read_wav(path)) >= 16_000 * 4


def test_clips_what_is_too_loud(tmp_path: Path) -> None:
    """Loud speech would wrap round and crack."""
    path = tmp_path / "loud.wav"
    write_wav(path, np.array([2, -2, 1, -1, 0], "<f4").tobytes())
    samples, _ = soundfile.read(path, dtype="int16")
    assert samples.tolist() == [32_767, -32_767, 32_767, -32_767, 0]


def test_writes_silence_of_no_length(tmp_path: Path) -> None:
    """A session in which the model only listened would end in a traceback."""
    path = tmp_path / "empty.wav"
    write_wav(path, b"")
    assert soundfile.info(path).frames == 0
    with pytest.raises(AudioFileError, match="holds no sound"):
        read_wav(path)


def test_says_what_is_wrong_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user would be shown a traceback instead of the file's name."""
    with pytest.raises(AudioFileError, match=r"missing\.wav: No such file or directory"):
        read_wav(tmp_path / "missing.wav")
    text = tmp_path / "text.wav"
    text.write_text("no sound at all")
    with pytest.raises(AudioFileError, match=r"text\.wav: not a sound file that can be read"):
        read_wav(text)
    with pytest.raises(AudioFileError, match="Is a directory"):
        write_wav(tmp_path, b"")
    broken = tmp_path / "broken.wav"
    soundfile.write(broken, np.array([0.0, np.nan]), 16_000, subtype="FLOAT")
    with pytest.raises(AudioFileError, match=r"broken\.wav: holds samples that are not finite"):
        read_wav(broken)
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(AudioFileError, match="a pipe cannot be read"):
        read_wav(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    monkeypatch.setattr(sound, "FILE_S_MAX", 1)
    long = tmp_path / "long.wav"
    soundfile.write(long, np.zeros(16_001), 16_000)
    with pytest.raises(AudioFileError, match="longer than 1 s"):
        read_wav(long)


@pytest.mark.parametrize("pcm", [b"123", np.array([np.nan], "<f4").tobytes()])
def test_refuses_pcm_that_is_none(tmp_path: Path, pcm: bytes) -> None:
    """A bug upstream would be written to disk as noise."""
    with pytest.raises(LocalProtocolError, match="PCM"):
        write_wav(tmp_path / "bad.wav", pcm)


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    """A full disk, or Ctrl-C, would leave half a reply where a good one was."""
    path, link = tmp_path / "reply.wav", tmp_path / "link.wav"
    write_wav(path, bytes(400))
    path.chmod(0o640)
    before = path.read_bytes()
    link.symlink_to(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(AudioFileError, match="File too large"):
            write_wav(link, bytes(400_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    write_wav(link, bytes(800))
    assert (soundfile.info(path).frames, path.stat().st_mode & 0o777) == (200, 0o640)
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_a_device_is_written_to() -> None:
    """`--reply /dev/null` would replace the device of the whole machine."""
    write_wav(Path("/dev/null"), bytes(400))
    assert Path("/dev/null").is_char_device()
