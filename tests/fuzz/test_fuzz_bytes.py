"""Fuzzing with `--bytes`: broken bytes raise what is documented, and a planted bug is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from recorder.repair import verify
from tests.fuzz.__main__ import fuzz_command
from tests.fuzz.campaign import Budget, fuzz_bytes, read_frame, read_log
from tests.project.sampling import sample
from tests.sessions.telemetry import is_whole

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
LOGS = Path(__file__).parents[2] / "fixtures" / "logs"


@pytest.mark.parametrize(("kind", "inputs"), [("codec", 3000), ("log", 250)])
def test_broken_bytes_raise_only_what_is_documented(kind: str, inputs: int, tmp_path: Path) -> None:
    """A client could end a session's task, or a damaged log the command that reads it."""
    found = fuzz_bytes(kind, seed=11, budget=Budget(examples=inputs), out=tmp_path / "out")
    assert found.inputs == inputs
    assert found.findings == {}
    assert not (tmp_path / "out").exists()


def test_golden_frames_and_logs_are_read() -> None:
    """The parsers under test would be given nothing that they take."""
    lines = next(WIRE.glob("realtime/*.jsonl")).read_text().splitlines()
    for line in lines:
        read_frame(line.encode())
    paths = sorted(LOGS.glob("*.zst"))[:: sample(1, 3)]
    logs = [path.read_bytes() for path in paths]
    assert all(verify(log).state == "finished" for log in logs if is_whole(log))
    for log in logs:
        read_log(log)


def test_a_planted_bug_of_a_parser_is_found_and_made_small(tmp_path: Path) -> None:
    """One that breaks on some byte would pass, or be reported as a page of noise."""

    def careless(data: bytes) -> None:
        if b"\xff\xff" in data:
            raise KeyError("a bug")

    found = fuzz_bytes("codec", seed=1, budget=Budget(examples=2000), out=tmp_path, read=careless)
    (label,) = found.findings
    assert label == "KeyError in careless"
    assert len(found.findings[label].read_bytes()) <= 8


def test_a_log_is_broken_inside_its_checksums(tmp_path: Path) -> None:
    """Only the checksums would ever be tried, and never what they keep from view."""
    details = set()

    def note(data: bytes) -> None:
        details.update(damage.detail for damage in verify(data).damage)

    fuzz_bytes("log", seed=3, budget=Budget(examples=120), out=tmp_path, read=note)
    assert any("record" in detail and "crc" not in detail for detail in details), details


def test_a_first_block_whose_records_do_not_add_up_is_unreadable(tmp_path: Path) -> None:
    """`verify` raised for it, which it must for no content whatever; found by the fuzzer."""
    states = set()

    def note(data: bytes) -> None:
        states.add(verify(data).state)

    fuzz_bytes("log", seed=1, budget=Budget(examples=150), out=tmp_path, read=note)
    assert states >= {"unreadable", "damaged"}


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    """A script could not tell whether anything was found."""
    words = ["--bytes", "codec", "--examples", "50", "--seed", "1", "--json"]
    told = CliRunner().invoke(fuzz_command, [*words, "--out", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["inputs"] == 50
