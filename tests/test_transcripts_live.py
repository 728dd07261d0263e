"""Golden transcripts over a socket: a real server, a real client, the scripted model.

They are played many at once, before the first test of this module looks at its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.values import behaviour
from tests.test_transcripts import with_a_value_changed
from tests.transcripts.live import play_all
from tests.transcripts.reading import ROOT, Transcript, load, load_all

TRANSCRIPTS = load_all()


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Exception | None]:
    """What became of those that are asked for."""
    calls = [
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.path == request.path
    ]
    asked = [call.params["transcript"] for call in calls if call is not None]
    found = dict[str, Exception | None]()
    for number in sorted({one.behaviour for one in asked}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(behaviour, "NEWEST", number)  # of sessions that begin now
            group = [one for one in asked if one.behaviour == number]
            found |= play_all(group, tmp_path_factory.mktemp("transcripts"))
    return found


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.name)
def test_a_server_says_what_the_transcript_says(
    transcript: Transcript, played: dict[str, Exception | None]
) -> None:
    """A client of that protocol does not get along with the server."""
    error = played[transcript.name]
    if error is not None:
        raise error


def test_what_a_server_does_not_say_is_seen(tmp_path: Path) -> None:
    """The transcripts pass whatever the server says."""
    wrong = with_a_value_changed(load(ROOT / "realtime" / "lifecycle-video.jsonl"))
    (error,) = play_all([wrong], tmp_path).values()
    assert "Hullo" in str(error)
