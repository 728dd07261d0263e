"""A recording's words and measures as JSON, for a list of recordings to show and to search.

The words are those of the time line, the measures those of `antiphon eval`: the log is read once
for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final

from protocol.values.limits import NS_PER_MS
from recorder.format.records import Fields, Record
from recorder.read.scan import Damage

from ..eval.gather import Gathering
from ..eval.score import score
from ..eval.summary import own_values
from ..export.moments import Words

PASSAGE_MS: Final = 2_000
"""Words of a turn go on in one passage after a shorter silence."""
CHARS_MAX: Final = 200_000
"""Of all words: an hour of speech has a third of them."""


def digest_of(head: Fields, items: Iterable[Record | Damage]) -> Iterator[bytes]:
    """Read a session, given the fields of its `session` record; yield one JSON object, at its end.

    `said` holds passages of one turn, `{voice, at_ms, text}` in order; `measures` the recording's
    own values by name, in the units of their table.
    """
    said = _Said()
    with Gathering(head) as gathering:
        for item in items:
            said.take(gathering.take(item, gathering.story.take(item)))
        rest, facts = gathering.end()
        said.take(rest)
    measures = own_values(score(facts))
    yield json.dumps({"said": said.passages, "measures": measures}, allow_nan=False).encode()


class _Said:
    """What was said, as it is read."""

    def __init__(self) -> None:
        self.passages: list[dict[str, str | int]] = []
        self._turn = ("", "")
        self._end_ms = 0
        self._chars = 0

    def take(self, moments: Iterable[object]) -> None:
        for words in moments:
            if not isinstance(words, Words) or self._chars >= CHARS_MAX:
                continue
            text = words.text[: CHARS_MAX - self._chars]
            self._chars += len(text)
            at_ms, turn = words.begin_ns // NS_PER_MS, (words.voice, words.response_id)
            if words.response_id and turn == self._turn and at_ms - self._end_ms < PASSAGE_MS:
                self.passages[-1]["text"] = f"{self.passages[-1]['text']}{text}"
            else:
                self.passages.append({"voice": words.voice, "at_ms": at_ms, "text": text})
            self._turn = turn
            self._end_ms = (words.end_ns or words.begin_ns) // NS_PER_MS
