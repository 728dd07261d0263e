"""What `make test` leaves out runs in `make soak`, by name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORT = re.compile(
    r"^from tests\.(project\.sampling|golden\.logs|replay\.test_remake|replay\.test_view) import"
    r"[^\n]*\b(sample|IS_SOAK|SAMPLE|SAMPLED|GOLDEN)\b",
    re.MULTILINE,
)
"""What a file imports that samples, by itself or with the golden logs of another one."""


def test_files_that_try_a_few_cases_are_named_in_make_soak() -> None:
    """The full counts would run nowhere."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = re.findall(r"^\t(tests/\S+\.py)(?: \\)?$", makefile, re.MULTILINE)
    sampled = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if IMPORT.search(path.read_text("utf-8"))
    }
    assert len(sampled) > 1
    assert named == sorted(sampled)
    assert makefile.count("$(SAMPLED)") == 1
