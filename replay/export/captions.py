"""Captions: the words of a session, as SubRip (SRT) or WebVTT.

Words with sound are a caption for as long as the sound lasts, one for each unit. Words without
sound are joined within one answer without a gap, and stand long enough to be read. Control
characters, line breaks and lone surrogates become spaces. Marks are comments in WebVTT only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import attrs

from protocol.values.limits import NS_PER_MS, NS_PER_S

from .moments import Moment, Note, Words
from .timeline import Timeline

CAPTION_NS_MIN: Final = NS_PER_S
"""A shorter one flickers."""
CHARS_PER_S: Final = 15
"""As fast as most people read along."""
GAP_NS_MAX: Final = 2 * NS_PER_S
"""Words that come later than that get a caption of their own, and are not shown ahead."""
CHARS_MAX: Final = 84
"""Two lines of 42, as broadcasters show at once."""


@attrs.frozen(kw_only=True)
class Caption:
    """One caption; times in nanoseconds of the session's clock."""

    begin_ns: int
    end_ns: int
    speaker: str
    text: str


def captions(moments: Iterable[Moment]) -> Iterator[Caption]:
    """Make captions of words, in the order in which they begin."""
    silent: Words | None = None
    last_ns = 0
    for moment in moments:
        if not isinstance(moment, Words):
            continue
        if silent is not None and _goes_on(silent, last_ns, moment):
            silent = attrs.evolve(silent, text=silent.text + moment.text)
            last_ns = moment.begin_ns
            continue
        if silent is not None:
            yield from _silent_caption(silent, last_ns, moment)
        silent, last_ns = None, moment.begin_ns
        if moment.end_ns is None:
            silent = moment
        else:
            least_ns = moment.begin_ns + CAPTION_NS_MIN if moment.is_transcribed else 0
            yield from _caption(moment, max(moment.end_ns, least_ns))
    if silent is not None:
        yield from _silent_caption(silent, last_ns, None)


def write_srt(timeline: Timeline, file: BinaryIO) -> None:
    """Write SubRip."""
    for number, caption in enumerate(captions(timeline), start=1):
        times = _times(caption, ",")
        text = caption.text.replace("-->", "->")
        file.write(f"{number}\n{times}\n{caption.speaker}: {text}\n\n".encode())


def write_vtt(timeline: Timeline, file: BinaryIO) -> None:
    """Write WebVTT, each caption with its voice."""
    marks: list[Note] = []
    file.write(b"WEBVTT\n")
    for caption in captions(_with_marks(timeline, marks)):
        _write_marks(marks, file)
        times = _times(caption, ".")
        text = caption.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        file.write(f"\n{times}\n<v {caption.speaker}>{text}\n".encode())
    _write_marks(marks, file)


def _with_marks(moments: Iterable[Moment], marks: list[Note]) -> Iterator[Moment]:
    for moment in moments:
        if isinstance(moment, Note) and moment.kind == "mark":
            marks.append(moment)
        yield moment


def _write_marks(marks: list[Note], file: BinaryIO) -> None:
    for mark in marks:
        time, text = _clock(mark.begin_ns // NS_PER_MS, "."), plain(mark.text).replace("-->", "->")
        file.write(f"\nNOTE {time} {text}\n".encode(errors="replace"))
    marks.clear()


def plain(text: str) -> str:
    """Replace characters that a terminal or a player could take for more than text by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _goes_on(words: Words, last_ns: int, more: Words) -> bool:
    if more.begin_ns - last_ns > GAP_NS_MAX:
        return False
    is_same = (words.voice, words.response_id) == (more.voice, more.response_id)
    fits = len(words.text) + len(more.text) <= CHARS_MAX
    return is_same and more.end_ns is None and words.voice == "model" and fits


def _silent_caption(words: Words, last_ns: int, following: Words | None) -> Iterator[Caption]:
    """Show words without sound until they are read, or the next words come."""
    reading_ns = max(CAPTION_NS_MIN, len(words.text) * NS_PER_S // CHARS_PER_S)
    end_ns = last_ns + reading_ns
    if following is not None and following.voice == words.voice:
        end_ns = min(end_ns, max(following.begin_ns, words.begin_ns + CAPTION_NS_MIN))
    yield from _caption(words, end_ns)


def _caption(words: Words, end_ns: int) -> Iterator[Caption]:
    text = " ".join(plain(words.text).split())
    if text:
        yield Caption(begin_ns=words.begin_ns, end_ns=end_ns, speaker=words.speaker, text=text)


def _times(caption: Caption, point: str) -> str:
    """Write the times of a caption; one that ends where the next begins does not overlap it."""
    begin_ms = caption.begin_ns // NS_PER_MS
    end_ms = max(caption.end_ns // NS_PER_MS, begin_ms + 1)
    return f"{_clock(begin_ms, point)} --> {_clock(end_ms, point)}"


def _clock(at_ms: int, point: str) -> str:
    seconds, ms = divmod(at_ms, 1000)
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{ms:03}"
