"""Writes the texts of errors into the transcripts anew, as the session machine says them now.

Run as `python -m tests.transcripts.texts` after a text was changed; look at the difference before
it is committed. Nothing but the texts of errors is changed: what else differs is reported, for a
protocol is not changed by writing down what a server happens to do.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.transcripts.pure import PurePlayer
from tests.transcripts.reading import ROOT, Mismatch, check, load


class TextLearner(PurePlayer):
    """Plays a transcript and takes the session's word for the texts of errors."""

    @staticmethod
    def check(  # type: ignore[override]
        expected: dict[str, Any], found: dict[str, Any], names: dict[str, object]
    ) -> None:
        """Take the text over, then compare the rest."""
        if expected["type"] == found["type"] == "error":
            if isinstance(expected["error"], dict):
                expected["error"]["message"] = found["error"]["message"]
            else:
                expected["error"] = found["error"]
        check(expected, found, names)


def renew(path: Path) -> bool:
    """Write a transcript's texts anew.

    Args:
        path: of the transcript.

    Returns:
        Whether there was another text in it.

    Raises:
        Mismatch: more than a text differs; the file is left as it was.
    """
    before = path.read_text("utf-8")
    transcript = load(path)
    with tempfile.TemporaryDirectory() as folder:
        TextLearner(transcript, Path(folder)).play()
    lines = [json.loads(before.splitlines()[0])]
    lines += [{step.kind: step.value} for step in transcript.steps]
    after = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(after, "utf-8")
    return after != before


if __name__ == "__main__":
    for transcript_path in sorted(ROOT.glob("*/*.jsonl")):
        try:
            if renew(transcript_path):
                print(f"{transcript_path}: another text")
        except Mismatch as error:
            print(f"left as it is: {error}")
