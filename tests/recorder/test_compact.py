"""Compaction: the same records in fewer bytes, and nothing else is ever taken for that."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import soundfile
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recorder import repair as compacting
from recorder.format import encoding as blobs
from recorder.format import format as log_format
from recorder.format.format import (
    COMPACT_VERSION,
    HEADER_BYTES,
    FormatError,
    LogUnsound,
    Record,
    Unreadable,
    Value,
    split_records,
    unpack_header,
)
from recorder.read.reader import LogReader
from recorder.read.scan import Block, BytesSource, Damage, Scanner
from recorder.repair import COMPACTED, KEPT_BLOCK_BYTES, NotCompactable, compact, is_compact, verify
from recorder.write.files import is_held
from recorder.write.logfile import FIN_FIELDS
from replay.rerun.folder import replay_log
from tests.golden.logs import FOLDER, SAMPLE, items
from tests.golden.versions import COMPACTED as GOLDEN
from tests.golden.versions import SPOKEN
from tests.recorder.test_samples import block_offsets, make_log, pcm, record, sample_steps

DIVISORS: Final = (32768.0, 32767.0)


def microphone(values: np.ndarray, divisor: float = DIVISORS[0]) -> bytes:
    """Samples of 16 bits, as a browser gives them."""
    return (values.astype("<f4") / np.float32(divisor)).astype("<f4").tobytes()


def speech(samples: int, seed: int = 0) -> np.ndarray:
    """16-bit samples that have something to predict, as speech does."""
    noise = np.random.default_rng(seed).normal(scale=40, size=samples)
    at = np.arange(samples)
    return (3000 * np.sin(at / 17 + seed) + 800 * np.sin(at / 5) + noise).astype(np.int16)


def log_of_seconds(count: int) -> bytes:
    """Sound of both kinds, sound that comes twice, text, and blocks that name others' blobs."""
    steps = []
    for index in range(count):
        heard, made = microphone(speech(16_000, index)), pcm(6_000, seed=index)
        fields: dict[str, object] = {"heard": heard, "again": heard, "made": made, "at": 0.1}
        steps.append([record("unit", 2 * index + 1, **fields), record("mark", 2 * index + 2)])
    return make_log(steps)


def made(log: bytes | Path, folder: Path) -> tuple[Path, Path]:
    """Compact a log; returns both."""
    source = log if isinstance(log, Path) else folder / "before.session.zst"
    if isinstance(log, bytes):
        source.write_bytes(log)
    target = folder / "after.session.zst"
    compact(source, target)
    return source, target


def headers(path: Path) -> list[dict[str, Value]]:
    """The JSON of each record as it is stored, in order, without its table of blobs."""
    found = []
    for item in Scanner(BytesSource(path.read_bytes())):
        assert isinstance(item, Block)
        framed = list(split_records(item.payload, item.header.n_records))
        for header, _ in framed[item.header.has_head_copy :]:
            text = json.loads(header)
            assert json.dumps(text, sort_keys=True, separators=(",", ":")).isascii()
            del text["blobs"]
            found.append(text)
    return found


def without_fin(path: Path) -> list[Record | Damage]:
    return items(path)[:-1]


# -- the same records -----------------------------------------------------------------------------


def test_a_spoken_session_is_smaller_and_the_same(tmp_path: Path) -> None:
    """What is kept for years would be other than what was recorded, or no smaller."""
    before, after = made(SPOKEN, tmp_path)
    assert without_fin(after) == without_fin(before)
    assert [repr(it) for it in headers(after)[:-1]] == [repr(it) for it in headers(before)[:-1]]
    assert verify(after).state == "finished"
    assert verify(after).has_seek_table
    assert after.stat().st_size < 0.9 * before.stat().st_size
    assert is_compact(after)
    assert not is_compact(before)


def test_it_replays_as_before(tmp_path: Path) -> None:
    """A recording would have to be unpacked again to be replayed."""
    before, after = made(SPOKEN, tmp_path)
    was, now = replay_log(before), replay_log(after)
    assert (was.result, now.result) == ("identical", "identical")
    assert now.report == was.report


def test_fin_says_what_the_log_was(tmp_path: Path) -> None:
    """The chain that somebody noted of the original could be compared with nothing."""
    before, after = made(SPOKEN, tmp_path)
    was, now = items(before)[-1], items(after)[-1]
    assert isinstance(was, Record)
    assert isinstance(now, Record)
    assert now.fields[COMPACTED] == {
        "blocks": was.fields["blocks"],
        "chain": was.fields["chain"],
        "file_bytes": before.stat().st_size,
    }
    same = was.fields.keys() - FIN_FIELDS
    assert {name: now.fields[name] for name in same} == {name: was.fields[name] for name in same}
    assert now.fields["counts"] == was.fields["counts"]


GOLDEN_LOGS: Final = SAMPLE


def test_every_finished_golden_log_stays_what_it_is(tmp_path: Path) -> None:
    """An old log would lose something on its way into the archive."""
    done = 0
    for source in GOLDEN_LOGS:
        target = tmp_path / source.name
        if verify(source).state != "finished":
            with pytest.raises(NotCompactable):
                compact(source, target)
            continue
        compact(source, target)
        assert without_fin(target) == without_fin(source)
        done += 1
    assert done > len(GOLDEN_LOGS) / 2


def test_blocks_are_larger_and_flac_is_in_them(tmp_path: Path) -> None:
    """Compacting would do nothing but compress again."""
    source = tmp_path / "a"
    source.write_bytes(log_of_seconds(40))
    done = compact(source, tmp_path / "b")
    assert done.flac_blobs == 40
    made = (tmp_path / "b").read_bytes()
    assert len(block_offsets(made)) < len(block_offsets(source.read_bytes())) / 3
    assert done.after_bytes == len(made) < done.before_bytes * 0.95
    with LogReader(made) as reader:
        assert len([*reader]) == 82
    sizes = [
        item.header.uncompressed_len
        for item in Scanner(BytesSource((tmp_path / "b").read_bytes()))
        if isinstance(item, Block)
    ]
    assert max(sizes) <= KEPT_BLOCK_BYTES + 200
    assert without_fin(tmp_path / "b") == without_fin(source)


def test_a_flipped_bit_costs_one_block_of_it(tmp_path: Path) -> None:
    """A smaller log would be a log that one bad bit can destroy."""
    _, after = made(log_of_seconds(30), tmp_path)
    data = after.read_bytes()
    whole = items(after)
    rng = np.random.default_rng(0)
    for start, end in pairwise(block_offsets(data)):
        header = unpack_header(data[start : start + HEADER_BYTES])
        bad = bytearray(data)
        bad[int(rng.integers(start, end))] ^= 1 << int(rng.integers(8))
        with LogReader(bytes(bad)) as reader:
            found = list(reader)
        assert any(isinstance(item, Damage) for item in found)
        kept = [item for item in found if isinstance(item, Record)]
        lost = set(range(header.first_seq or 1, header.next_seq))  # the head is there twice
        assert kept == [item for seq, item in enumerate(whole) if seq not in lost]


def test_what_is_compact_can_be_compacted_again(tmp_path: Path) -> None:
    """FLAC would be packed into FLAC, or fail."""
    _, after = made(SPOKEN, tmp_path)
    compact(after, tmp_path / "again")
    assert without_fin(tmp_path / "again") == without_fin(SPOKEN)


# -- who can read it ------------------------------------------------------------------------------


def test_an_older_program_says_that_it_cannot_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would say that the log is damaged, or read sound as noise."""
    monkeypatch.setattr(log_format, "FORMAT_VERSIONS", range(1, 2))
    with pytest.raises(Unreadable, match="format version 2, flags 0: this reader knows versions 1"):
        LogReader(GOLDEN)


def test_the_golden_log_is_the_same_as_it_was() -> None:
    """A program reads old FLAC otherwise, and no test has the sound that it was."""
    assert verify(SPOKEN).has_seek_table
    assert without_fin(GOLDEN) == without_fin(SPOKEN)
    assert GOLDEN.stat().st_size < SPOKEN.stat().st_size


def test_the_golden_log_holds_flac() -> None:
    """No golden log would notice that FLAC cannot be read any more."""
    codecs = set[int]()
    for item in Scanner(BytesSource(GOLDEN.read_bytes())):
        assert isinstance(item, Block)
        assert item.header.version == COMPACT_VERSION
        for header, _ in split_records(item.payload, item.header.n_records):
            codecs |= {entry[0] for entry in json.loads(header)["blobs"] if len(entry) == 3}
    assert codecs >= {blobs.SHUFFLE_4, blobs.FLAC}


def test_flac_is_loaded_by_nobody_else() -> None:
    """Each server would carry a library that only old recordings need."""
    log = FOLDER / "v1-realtime-audio.session.zst"
    read_it = f"import sys, recorder.repair as v, pathlib; v.verify(pathlib.Path({str(log)!r}))"
    told = f"{read_it}; print('soundfile' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# -- FLAC -----------------------------------------------------------------------------------------

VALUES: Final = st.lists(st.integers(-32768, 32767), min_size=64, max_size=90)


@given(VALUES, st.sampled_from(DIVISORS))
@example([-32768, 32767] * 32, DIVISORS[1])
@settings(max_examples=60)
def test_sixteen_bits_come_back_from_flac(values: list[int], divisor: float) -> None:
    """One sample of a recording would be another one."""
    data = microphone(np.array(values), divisor)
    packed = blobs.pack(data)
    if packed.codec != blobs.EXACT_16:  # all zero, or so
        return
    kept = blobs.pack_flac(packed.stored)
    if kept is not None:
        assert kept.codec == blobs.FLAC
        assert blobs.unpack(kept.codec, memoryview(kept.stored), len(data)) == data


def test_speech_is_smaller_as_flac() -> None:
    """The codec would be there for nothing."""
    packed = blobs.pack(microphone(speech(16_000)))
    kept = blobs.pack_flac(packed.stored)
    assert kept is not None
    assert len(kept.stored) < 0.7 * len(packed.stored)


def as_flac(**changes: object) -> bytes:
    """A FLAC file that is not one of ours; a blob of codec 3 around it."""
    options = {"samplerate": 16_000, "format": "FLAC", "subtype": "PCM_16", **changes}
    data = options.pop("data", speech(100))
    file = BytesIO()
    soundfile.write(file, data, **options)
    return b"\0" + file.getvalue()


GOOD: Final = as_flac()


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\0",
        b"\0fLaC",
        b"\2" + GOOD[1:],
        GOOD[: len(GOOD) // 2],
        GOOD[:-40] + bytes(9) + GOOD[-31:],
        as_flac(subtype="PCM_24"),
        as_flac(data=np.zeros((100, 2), np.int16)),
        as_flac(format="WAV"),
        as_flac(data=np.zeros(99, np.int16)),
    ],
    ids=[
        "empty",
        "one-byte",
        "magic",
        "divisor",
        "cut",
        "holed",
        "24-bit",
        "stereo",
        "wav",
        "another-length",
    ],
)
def test_what_is_not_ours_is_refused(stored: bytes) -> None:
    """A forged log would be read as sound that nobody said, or crash its reader."""
    with pytest.raises(FormatError, match="codec 3"):
        blobs.unpack(blobs.FLAC, stored, 400)


def test_good_flac_is_taken() -> None:
    """The test above would pass if nothing were ever taken."""
    assert blobs.unpack(blobs.FLAC, GOOD, 400) == microphone(speech(100))


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of silence would fill the memory of whoever reads them."""
    monkeypatch.setattr(blobs, "SAMPLES_MAX", 99)
    with pytest.raises(FormatError):
        blobs.unpack(blobs.FLAC, GOOD, 400)


# -- what is refused ------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(NotCompactable) as caught:
        compact(path, path.with_name("out"))
    assert not path.with_name("out").exists()
    return str(caught.value)


def test_logs_that_are_not_ready_are_refused(tmp_path: Path) -> None:
    """A session under way, or what is left of one, would be rewritten under somebody's hands."""
    path = tmp_path / "a"
    log = make_log(sample_steps())
    at = block_offsets(log)
    path.write_bytes(log)
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(path)
        assert "a server is writing it" in refusal(path)
    path.write_bytes(log[: at[4]])
    assert "no end" in refusal(path)
    path.write_bytes(log[: at[2] + 80] + b"?" + log[at[2] + 81 :])
    assert "damaged" in refusal(path)
    path.write_bytes(b"no log")
    assert "no block of a log" in refusal(path)


def test_a_log_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was put together of two states of a file would take its place."""
    path = tmp_path / "a"
    path.write_bytes(make_log(sample_steps()))
    other = sample_steps()
    other[2][1] = record("mark", 6, by="another", at=0.1)
    check = compacting._check

    def then_change(source: Path) -> None:
        check(source)
        log = make_log(other)
        at = block_offsets(log)
        path.write_bytes(log[: at[2] + 80] + b"?" + log[at[2] + 81 :])

    monkeypatch.setattr(compacting, "_check", then_change)
    with pytest.raises(LogUnsound, match="changed"):
        compact(path, tmp_path / "b")


def test_what_came_out_otherwise_is_never_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in a codec would destroy recordings, one folder at a time."""
    path = tmp_path / "a"
    path.write_bytes(log_of_seconds(2))

    def wrong(packed: bytes) -> blobs.Packed:
        return blobs.Packed(blobs.FLAC, b"\0" + blobs.encode_flac(speech(16_000, seed=77)))

    monkeypatch.setattr(compacting, "pack_flac", wrong)
    with pytest.raises(LogUnsound, match="differs"):
        compact(path, tmp_path / "b")


def test_only_the_end_of_a_log_may_be_otherwise(tmp_path: Path) -> None:
    """A record that came out otherwise is lost if what a file says of itself is left out of it."""
    steps = sample_steps()
    path, other, shorter = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    path.write_bytes(make_log([*steps, [record("mark", 7, counts=1)]]))
    other.write_bytes(make_log([*steps, [record("mark", 7, counts=2)]]))
    shorter.write_bytes(make_log(steps))
    compacting._compare(path, path)
    for wrong in (other, shorter):
        with pytest.raises(LogUnsound, match="differs"):
            compacting._compare(path, wrong)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """Somebody's file would be gone."""
    (tmp_path / "a").write_bytes(make_log(sample_steps()))
    (tmp_path / "b").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        compact(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"precious"
    assert unpack_header((tmp_path / "a").read_bytes()[:HEADER_BYTES]).version == 1
