"""A suite: a folder with `suite.toml`, whose cases say what is expected of a conversation.

    [[case]]
    name = "answers a question"
    recording = "rec-1.session.zst"   # or user and model, or stereo: WAV files
    answers_by = 1.5                  # every turn of the user, in seconds after its end
    stops_within = 1.0                # at every barge-in, in seconds from its begin
    stays_silent = true               # the model is not heard at all
    takes_turn = false                # as Full-Duplex-Bench counts turns; `after` so many seconds
    says_one_of = ["yes", "of course"]

A folder without a manifest is read in the layout of Full-Duplex-Bench. The manifest is read
strictly: an unknown key, a value of another type and a path that leaves the folder are errors that
name the place (`$.case[0].answers_by`).
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any, Final

import attrs
from cattrs import Converter, transform_error
from cattrs.gen import make_dict_structure_fn

from ..shared.commands import UnusableError, reason

MANIFEST: Final = "suite.toml"
CASES_MAX: Final = 10_000
MANIFEST_BYTES_MAX: Final = 16 << 20
SECONDS_MAX: Final = 3600.0


@attrs.frozen(kw_only=True)
class Case:
    """One conversation, and what is expected.

    Attributes:
        recording: a log; or `user` and `model`, a WAV file each; or `stereo`, one for both voices,
            the user left. Paths are relative to the folder.
        transcript: the words of WAV files, as Full-Duplex-Bench has them (`output.json`).
        skipped: why it is not judged.
    """

    name: str
    recording: str = ""
    user: str = ""
    model: str = ""
    stereo: str = ""
    answers_by: float | None = None
    stops_within: float | None = None
    stays_silent: bool = False
    says_one_of: tuple[str, ...] = ()
    takes_turn: bool | None = None
    after: float | None = None
    transcript: str = ""
    skipped: str = ""

    def complaint(self) -> str:
        """Say what is wrong with it as a whole; empty if nothing is."""
        sources = [bool(self.recording), bool(self.user and self.model), bool(self.stereo)]
        spans = (self.answers_by, self.stops_within)
        does = spans != (None, None) or bool(self.says_one_of) or self.takes_turn is not None
        if sum(sources) != 1 or bool(self.user) != bool(self.model):
            return "give one of recording, user and model, or stereo"
        if not does and not self.stays_silent and not self.skipped:
            return "nothing is expected"
        if self.stays_silent and does:
            return "a model that stays silent does nothing else"
        if any(it is not None and not 0 <= it <= SECONDS_MAX for it in (*spans, self.after)):
            return f"a time is from 0 to {SECONDS_MAX:g} s"
        if self.after is not None and self.takes_turn is None:
            return "after says from when on takes_turn is judged"
        if self.transcript and self.recording:
            return "a recording has its words: transcript is of WAV files"
        if self.says_one_of and not self.recording and not self.transcript:
            return "says_one_of needs a recording or a transcript: the words of WAV are not known"
        for path in (self.recording, self.user, self.model, self.stereo, self.transcript):
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts:
                return f"{path!r} leaves the folder"
        return ""


@attrs.frozen(kw_only=True)
class Manifest:
    """The cases of a suite."""

    case: tuple[Case, ...]


@attrs.frozen(kw_only=True)
class Suite:
    """A suite, and its folder."""

    folder: Path
    cases: tuple[Case, ...]

    def path(self, name: str) -> Path:
        """Return a file of a case."""
        return self.folder / name


def read_suite(folder: Path) -> Suite:
    """Read the manifest of a folder; `UnusableError` names what is wrong, and where."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            raise UnusableError(f"{path}: more than {MANIFEST_BYTES_MAX} bytes")
        body = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise UnusableError(f"{path}: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path}: is no TOML: {error}") from error
    try:
        cases = _CONVERTER.structure(body, Manifest).case
    except Exception as error:
        raise UnusableError(f"{path}: {transform_error(error)[0]}") from error
    if not 0 < len(cases) <= CASES_MAX:
        raise UnusableError(f"{path}: {len(cases)} cases: from 1 to {CASES_MAX}")
    names = set[str]()
    for number, case in enumerate(cases):
        complaint = "another case has this name" if case.name in names else case.complaint()
        if complaint:
            raise UnusableError(f"{path}: $.case[{number}]: {complaint}")
        names.add(case.name)
    return Suite(folder=folder, cases=cases)


def _exactly(kind: type) -> Any:
    def check(value: object, _: Any) -> object:
        if type(value) is not kind:
            raise TypeError(f"is {type(value).__name__}, not {kind.__name__}")
        return value

    return check


def _number(value: object, _: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise TypeError(f"is {type(value).__name__}, not a finite number")
    return float(value)  # type: ignore[arg-type]


def _converter() -> Converter:
    """Make a converter that coerces nothing."""
    made = Converter(forbid_extra_keys=True)
    for kind in (str, bool):
        made.register_structure_hook(kind, _exactly(kind))
    made.register_structure_hook(float, _number)
    for cls in (Case, Manifest):
        hook = make_dict_structure_fn(cls, made, _cattrs_forbid_extra_keys=True)
        made.register_structure_hook(cls, hook)
    return made


_CONVERTER: Final = _converter()
