"""docs/log-format.md is enough: a reader and a writer made from it agree with ours (`page`)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.values.records import digest
from recorder.format.format import SUFFIX, Record
from recorder.read.reader import LogReader
from recorder.repair import compact, verify
from replay.rerun.logic import replay
from tests.golden.logs import FOLDER, SAMPLE
from tests.recorder.page import MARK, Entry, digest_of, entries, log_of
from tests.recorder.test_document import DOCUMENT

SOUND = [path for path in SAMPLE if "damaged" not in path.name]


def as_entries(log: Path | bytes) -> list[Entry]:
    """A log's records, as our own reader gives them."""
    found = list[Entry]()
    with LogReader(log) as reader:
        for it in reader:
            assert isinstance(it, Record)
            found.append(Entry(it.kind, it.seq, it.at_ns, dict(it.fields)))
    return found


@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.name.removesuffix(SUFFIX))
def test_the_page_reads_and_writes_every_log(path: Path) -> None:
    """Whoever keeps recordings for years, without this software, could not read or make them."""
    known = as_entries(path)
    assert list(entries(path.read_bytes())) == known
    if known[-1].kind != "fin":
        return
    written = log_of(known)
    assert verify(written).state == "finished"
    assert verify(written).has_seek_table
    with LogReader(path) as reader:
        before = replay(reader)
    with LogReader(written) as reader:
        after = replay(reader)
    assert after == before
    assert [it for it in as_entries(written) if it.kind != "fin"] == known[:-1]


def test_the_page_reads_a_compacted_log(tmp_path: Path) -> None:
    """The codec of the oldest recordings, which are compacted, would be what cannot be read."""
    path = tmp_path / ("compacted" + SUFFIX)
    compact(FOLDER / ("v1-barge-in" + SUFFIX), path)
    assert list(entries(path.read_bytes())) == as_entries(path)


def test_the_page_keeps_marks_apart_and_odd_texts_whole() -> None:
    """A client that sends the mark, or half a character, would have the writer make a bad log."""
    odd = {"$key": MARK * 3, "text": "\ud800", "long": "é" * 5000, "n": [1.5, None, True]}
    records = [
        Entry("session", 0, 0, {"recording_id": "a"}),
        Entry("mark", 1, 5, odd),
        Entry("fin", 2, 9, {"reason": "test"}),
    ]
    written = log_of(records)
    assert written.count(MARK) == 3
    assert verify(written).state == "finished"
    assert as_entries(written)[1].fields == odd
    assert list(entries(written))[1].fields == odd


def test_the_example_of_a_digest_is_right() -> None:
    """The one encoding that is shown would mislead."""
    shown = "`m2:s1:aNoneType:None;s1:bl2:int:1;s2:é`"
    assert f'So `{{"b": [1, "é"], "a": null}}` is {shown}' in " ".join(DOCUMENT.split())
    hashed = hashlib.blake2b(shown.strip("`").encode(), digest_size=16).hexdigest()
    assert digest({"b": [1, "é"], "a": None}) == digest_of({"b": [1, "é"], "a": None}) == hashed


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@example({"b": [1, 1.0, True, None, "1", b"1"], "a": 1e16, "é": 1e-7, "Z": -0.0})
def test_the_page_makes_every_digest(value: Any) -> None:
    """The states of a second writer would be taken for a divergence."""
    assert digest_of(value) == digest(value)
