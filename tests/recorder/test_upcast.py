"""Versions: what is old is read as if it were new, and what is too new says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import attrs
import pytest

from recorder.format import format as upcast
from recorder.format.format import (
    FORMAT_VERSIONS,
    HEADER_BYTES,
    RECORD_VERSIONS,
    Fields,
    FormatError,
    LogDamaged,
    Record,
    Unreadable,
    Upcast,
    pack_header,
    unpack_header,
)
from recorder.read.reader import LogReader, read
from recorder.read.scan import Damage
from recorder.repair import compact, recover, survey, verify
from tests.golden.logs import FOLDER
from tests.recorder.test_samples import block_offsets, make_log, pcm, record

SOUND: Final = pcm(100)


def rename_author(fields: Fields) -> Fields:
    """Version 2 of a mark: `by` became `author`."""
    rest = {name: value for name, value in fields.items() if name != "by"}
    return {**rest, "author": fields["by"]}


def count_sound(fields: Fields) -> Fields:
    """Version 3: says how long its sound is; blobs are in place by then."""
    sound = fields["sound"]
    assert isinstance(sound, bytes)
    return {**fields, "sound_bytes": len(sound)}


def mark_as_new(fields: Fields) -> Fields:
    """Version 2 of a session record."""
    return {**fields, "is_new": True}


UPCASTS: Final[Mapping[str, Mapping[int, Upcast]]] = {"mark": {1: rename_author, 2: count_sound}}
MARKS: Final = [[record("mark", 1, by="anna", sound=SOUND)], [record("event", 2, name="x")]]


@contextmanager
def versions(**newest: int) -> Iterator[None]:
    """Be a program that writes these versions, and can read what was before."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, version in newest.items():
            patch.setitem(RECORD_VERSIONS, kind, version)  # type: ignore[arg-type]
        patch.setattr(upcast, "UPCASTS", UPCASTS)
        yield


def items(log: bytes | Path) -> list[Record | Damage]:
    with LogReader(log) as reader:
        return list(reader)


def of_format_version(log: bytes, version: int) -> bytes:
    """Forge a log whose blocks are of a version, with sound checksums."""
    at = block_offsets(log)
    forged = b""
    for start, end in pairwise(at):
        header = unpack_header(log[start : start + HEADER_BYTES])
        forged += pack_header(attrs.evolve(header, version=version))
        forged += log[start + HEADER_BYTES : end]
    return forged


# -- records --------------------------------------------------------------------------------------


def test_old_records_are_read_as_new_ones() -> None:
    """After an update of the server the recordings of yesterday would be worthless."""
    log = make_log(MARKS)
    with versions(mark=3):
        found = items(log)
        assert verify(log).state == "finished"
    mark = found[1]
    assert isinstance(mark, Record)
    assert mark.fields == {"author": "anna", "sound": SOUND, "sound_bytes": len(SOUND)}
    assert [item for item in found if item is not mark] == [items(log)[0], *items(log)[2:]]


def test_a_version_is_upcast_from_where_it_is() -> None:
    """A step that was done already would be done again."""
    with versions(mark=2):
        log = make_log([[record("mark", 1, author="anna", sound=b"12345")]])
    with versions(mark=3):
        mark = items(log)[1]
    assert isinstance(mark, Record)
    assert mark.fields == {"author": "anna", "sound": b"12345", "sound_bytes": 5}


def test_the_head_and_its_copy_are_upcast() -> None:
    """Two forms of one session record would look like two sessions."""
    log = make_log(MARKS)
    with versions(session=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            upcast, "UPCASTS", {"session": {1: lambda fields: {**fields, "is_new": True}}}
        )
        with LogReader(log) as reader:
            found = list(reader)
            assert reader.head.fields["is_new"] is True
    assert not any(isinstance(item, Damage) for item in found)


def test_what_does_not_fit_its_version_is_damage() -> None:
    """A record that nobody wrote would end reading with a traceback."""

    def refuse(fields: Fields) -> Fields:
        raise FormatError("the mark has no author")

    log = make_log(MARKS)
    with versions(mark=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(upcast, "UPCASTS", {"mark": {1: refuse}})
        damage = [item for item in items(log) if isinstance(item, Damage)]
    assert [(item.first_seq, item.detail) for item in damage] == [(1, "the mark has no author")]


def test_a_log_is_never_rewritten_for_it(tmp_path: Path) -> None:
    """Compacting or recovering an old log would turn it into one that old programs cannot read."""
    source = tmp_path / "a"
    source.write_bytes(make_log(MARKS))
    with versions(mark=3):
        compact(source, tmp_path / "b")
        source.write_bytes(source.read_bytes()[:-1])
        recover(source, tmp_path / "c", survey(source))
    for name in "bc":
        assert items(tmp_path / name)[1] == items(source)[1]


def test_there_is_a_way_from_every_version() -> None:
    """A version goes up, and how old records become new ones is forgotten."""
    for kind, newest in RECORD_VERSIONS.items():
        assert sorted(upcast.UPCASTS.get(kind, {})) == list(range(1, newest)), kind
    assert upcast.UPCASTS.keys() <= RECORD_VERSIONS.keys()


def test_a_newer_record_names_both_versions() -> None:
    """An old program would call a sound log damaged, and nobody would know what to do."""
    with versions(mark=3):
        log = make_log(MARKS)
    found = items(log)
    (damage,) = (item for item in found if isinstance(item, Damage))
    assert (damage.reason, damage.first_seq) == ("version", 1)
    assert damage.detail == "mark record of version 3: this reader knows versions 1 to 1"
    assert [item.seq for item in found if isinstance(item, Record)] == [0, 2, 3]
    assert verify(log).exit_code == 1


def test_a_newer_head_names_both_versions() -> None:
    """That a log cannot be read because of its version would look like lost records."""
    with versions(session=2):
        log = make_log(MARKS)
    with pytest.raises(Unreadable, match=r"session record of version 2: .* knows versions 1 to 1"):
        LogReader(log)
    assert "version 2" in str(verify(log).detail)


def test_an_unknown_kind_names_it() -> None:
    """A kind that was added later would be skipped without a word."""
    with versions(gesture=1):
        log = make_log([[record("gesture", 1)]])
    (damage,) = (item for item in items(log) if isinstance(item, Damage))
    assert (damage.reason, damage.detail) == (
        "version",
        "a record of kind 'gesture' is not known to this reader",
    )


def test_version_0_is_nobody_s() -> None:
    """A writer with a bug would pass for a very old one."""
    with versions(mark=0):
        log = make_log(MARKS)
    (damage,) = (item for item in items(log) if isinstance(item, Damage))
    assert damage.reason == "record"


# -- the format -----------------------------------------------------------------------------------


def test_a_newer_format_names_both_versions() -> None:
    """A log of next year would be called damaged by a program of today."""
    newest = FORMAT_VERSIONS[-1]
    log = of_format_version(make_log(MARKS), newest + 1)
    said = (
        f"block of format version {newest + 1}, flags 0: this reader knows versions 1 to {newest}"
    )
    with pytest.raises(Unreadable, match=said):
        LogReader(log)
    report = verify(log)
    assert (report.exit_code, report.detail) == (2, said)


def test_a_newer_block_in_an_old_log_is_told(tmp_path: Path) -> None:
    """A log that was continued by a newer program would end without a reason."""
    log = make_log(MARKS)
    at = block_offsets(log)
    newer = of_format_version(log, FORMAT_VERSIONS[-1] + 1)
    path = tmp_path / "a"
    path.write_bytes(log[: at[2]] + newer[at[2] : at[3]] + log[at[3] :])
    with pytest.raises(LogDamaged, match=r"of a newer version .*: block of format version 3"):
        list(read(path))


def test_each_version_of_the_format_has_golden_logs() -> None:
    """A version is dropped, and no test reads a log of it."""
    found = {
        unpack_header(path.read_bytes()[:HEADER_BYTES]).version
        for path in FOLDER.glob("*.session.zst")
    }
    assert found == set(FORMAT_VERSIONS)
    for path in FOLDER.glob("*.session.zst"):
        first = unpack_header(path.read_bytes()[:HEADER_BYTES])
        assert path.name.startswith(f"v{first.version}-")


def test_forged_versions_are_as_they_should_be() -> None:
    """The tests above would prove nothing if forged blocks were refused for another reason."""
    log = of_format_version(make_log(MARKS), FORMAT_VERSIONS[-1])
    reasons = {item.reason for item in items(log) if isinstance(item, Damage)}
    assert reasons == {"chain"}, "the version is in the chain"
