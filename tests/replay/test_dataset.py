"""`antiphon export --to dataset`: a session's seconds as samples for a trainer."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

from recorder.read.reader import LogReader
from replay.export.formats import export_command
from replay.redact.redaction import redact_command
from replay.story.reading import SessionStory
from tests.replay.exported import AUDIO, CHAT, VIDEO, exported

ANSWERED = ("listen", "speech", "withheld")


def samples_in(data: bytes) -> dict[str, dict[str, bytes]]:
    """Read a shard as WebDataset does: files that follow one another and share a name."""
    found: dict[str, dict[str, bytes]] = {}
    last = ""
    with tarfile.open(fileobj=io.BytesIO(data)) as shard:
        for info in shard:
            key, _, ending = info.name.partition(".")
            assert key == last or key not in found
            file = shard.extractfile(info)
            assert file is not None
            found.setdefault(key, {})[ending] = file.read()
            last = key
    return found


def told(sample: dict[str, bytes]) -> Any:
    return json.loads(sample["json"])


def read_wav(data: bytes) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    samples, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples, rate_hz


def test_each_answered_second_is_a_sample() -> None:
    """A trainer would learn other decisions than those of the session."""
    samples = samples_in(exported(VIDEO, "dataset"))
    with LogReader(VIDEO) as reader:
        units = [it for it in SessionStory().read(reader) if it.outcome in ANSWERED]
    assert [told(it)["unit"] for it in samples.values()] == [it.index for it in units]
    for sample, unit in zip(samples.values(), units, strict=True):
        heard, rate_hz = read_wav(sample["user.wav"])
        assert (len(heard), rate_hz) == (16_000, 16_000)
        assert sum(name.endswith(".jpg") for name in sample) == unit.frames
        assert told(sample)["codec_ids"] == list(unit.codec_ids)
        if unit.outcome != "withheld":
            assert told(sample)["is_listen"] == (unit.outcome == "listen")
        assert ("model.wav" in sample) == (unit.outcome == "speech")
        if unit.outcome == "speech":
            spoken, rate_hz = read_wav(sample["model.wav"])
            assert (spoken.tobytes(), rate_hz) == (unit.pcm, 24_000)
            assert told(sample)["text"] == unit.text
    assert any(unit.pcm for unit in units)
    assert any(unit.frames for unit in units)


def test_the_same_log_gives_the_same_bytes() -> None:
    """A data set could not be told from another by its hash."""
    assert exported(AUDIO, "dataset") == exported(AUDIO, "dataset")


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (["--kind", "audio"], {"user.wav", "model.wav", "codec_ids"}),
        (["--kind", "text"], {"text", "decided_ids"}),
        (["--kind", "video"], {"0.jpg"}),
    ],
)
def test_what_a_redaction_took_out_is_left_out(
    options: list[str], missing: set[str], tmp_path: Path
) -> None:
    """Silence would be a sample of speech, and tokens would say what was taken out."""
    log = tmp_path / "redacted.session.zst"
    CliRunner().invoke(redact_command, [str(VIDEO), "--output", str(log), *options])
    samples = samples_in(exported(log, "dataset"))
    assert samples
    for sample in samples.values():
        assert missing.isdisjoint(sample.keys() | told(sample).keys())
        assert told(sample)["lost"]


def test_a_chat_has_no_seconds(tmp_path: Path) -> None:
    """A shard without samples would be taken for one of a silent session."""
    target = tmp_path / "chat.tar"
    result = CliRunner().invoke(export_command, [str(CHAT), "--output", str(target)])
    assert result.exit_code == 2
    assert "only duplex sessions have units" in result.output
    assert not target.exists()
