"""The describing twin of `codec.Value`, and where its values stand: see `sketch` for what for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar, cast

import attrs

from ..codec import Value
from ..limits import APPEND_SAMPLES_MAX, APPEND_SAMPLES_MIN, CHAT_FRAME_BYTES_MAX
from ..model import SAMPLE16_BYTES, SAMPLE_BYTES
from .material import FLOAT32, MEDIA, PCM16, Medium

T = TypeVar("T")
C = TypeVar("C", bound=str)
Schema = dict[str, Any]
"""A JSON Schema, grown while a parser runs."""

IN_FULL: Final = 1_000
"""Characters, samples or units up to which a representative value is as long as it may be asked."""


@attrs.frozen(kw_only=True)
class Leaf:
    """A value that a parser read.

    Attributes:
        path: where; of an object that is read by its kind, with the kind behind it, `$.a<text>.b`.
        options: its representative values.
        ancestors: paths of the fields that it stands in.
        picks: which kinds had to be picked for it to be read.
        schema: of its field, or of the array that it is an item of.
    """

    path: str
    options: tuple[object, ...]
    ancestors: tuple[str, ...]
    picks: Mapping[str, int]
    schema: Schema


@attrs.define(kw_only=True)
class Run:
    """One run of a parser: what it is given, and what it was seen to read.

    Attributes:
        picks: which representative value or kind is taken, by path; the first where it is not said.
        wanted: paths of the fields that are there although they need not be; None for all.
        leaves: the values that were read, by path.
        holders: the schemas of all fields that were read, by path.
        kinds: the schemas of objects that are read by their kind, by what their fields' paths begin
            with.
    """

    picks: Mapping[str, int] = attrs.field(factory=dict)
    wanted: frozenset[str] | None = None
    leaves: dict[str, Leaf] = attrs.field(factory=dict)
    holders: dict[str, Schema] = attrs.field(factory=dict)
    kinds: dict[str, Schema] = attrs.field(factory=dict)

    def is_wanted(self, path: str) -> bool:
        """Whether a field that may be absent is there."""
        return self.wanted is None or path in self.wanted

    def pick(self, path: str, options: tuple[T, ...]) -> T:
        """Take one of several values."""
        return options[min(self.picks.get(path, 0), len(options) - 1)]


@attrs.define(kw_only=True)
class Site:
    """Where a value stands: the run, the schema that it fills, and how one gets there."""

    run: Run
    schema: Schema
    path: str
    ancestors: tuple[str, ...]
    picks: Mapping[str, int]
    medium: Medium = MEDIA[0]
    is_binary: bool = False
    parent: Site | None = None

    def give(self, *options: T) -> T:
        """Answer a read by one of its representative values."""
        self.run.leaves[self.path] = Leaf(
            path=self.path,
            options=options,
            ancestors=self.ancestors
            if self.parent is None
            else (*self.ancestors, self.parent.path),
            picks=self.picks,
            schema=self.schema if self.parent is None else self.parent.schema,
        )
        return self.run.pick(self.path, options)

    def mark_binary(self) -> Medium:
        """Note that base64 was read, here and so in the field that holds it."""
        self.is_binary = True
        if self.parent is None:
            return self.medium
        return self.parent.mark_binary()


@attrs.frozen(kw_only=True)
class SketchValue(Value):
    """Describes what its methods are asked for; see `codec.Value` for what they are."""

    site: Site

    def text(self, chars_max: int | None = None, chars_min: int = 0) -> str:
        """Describe a string."""
        self.site.schema["type"] = "string"
        if chars_min:
            self.site.schema["minLength"] = chars_min
        if chars_max is not None:
            self.site.schema["maxLength"] = chars_max
        count = min(max(chars_min, 4), IN_FULL)
        return self.site.give("text"[:count].ljust(count, "t"), "word"[:count].ljust(count, "w"))

    def choice(self, options: tuple[C, ...]) -> C:
        """Describe one of several strings."""
        self.site.schema |= {"type": "string", "enum": [str(option) for option in options]}
        return self.site.give(*options)

    def flag(self) -> bool:
        """Describe a boolean."""
        self.site.schema["type"] = "boolean"
        return self.site.give(True, False)

    def integer(self, low: int = 0, high: int | None = None) -> int:
        """Describe an integer."""
        self.site.schema |= {"type": "integer", "minimum": low}
        if high is not None:
            self.site.schema["maximum"] = high
        return self.site.give(low, low + 1 if high is None else min(low + 1, high))

    def number(self, low: float, high: float, open_low: Literal["", "above "] = "") -> float:
        """Describe a number."""
        below = "exclusiveMinimum" if open_low else "minimum"
        self.site.schema |= {"type": "number", below: low, "maximum": high}
        return self.site.give(float(high), (low + high) / 2)

    def items(self, count_max: int, count_min: int = 0) -> tuple[Value, ...]:
        """Describe an array, and give one item."""
        item: Schema = {}
        self.site.schema |= {"type": "array", "items": item, "maxItems": count_max}
        if count_min:
            self.site.schema["minItems"] = count_min
        path = f"{self.path}[0]"
        site = attrs.evolve(self.site, schema=item, path=path, parent=self.site)
        return (value_at(site),)

    def binary(self, *, line_breaks: bool = False) -> bytes:  # noqa: ARG002
        """Describe base64 of the kind of file that is tried now."""
        medium = self.site.mark_binary()
        self.site.schema |= {"type": "string", "contentEncoding": "base64"}
        return self.site.give(*medium.samples)

    def pcm(
        self, samples_min: int = APPEND_SAMPLES_MIN, samples_max: int = APPEND_SAMPLES_MAX
    ) -> bytes:
        """Describe base64 of float32 LE samples, with the lengths that these have in base64."""
        self.site.schema |= {
            "type": "string",
            "contentEncoding": "base64",
            "x-media": [FLOAT32],
        }
        if (chars := _base64_chars(samples_max * SAMPLE_BYTES)) < CHAT_FRAME_BYTES_MAX:
            self.site.schema["maxLength"] = chars
        if samples_min:
            self.site.schema["minLength"] = _base64_chars(samples_min * SAMPLE_BYTES)
        count = max(samples_min, 1)
        return self.site.give(bytes(count * SAMPLE_BYTES), bytes((count + 1) * SAMPLE_BYTES))

    def pcm16(self, *, line_breaks: bool = False) -> bytes:  # noqa: ARG002
        """Describe base64 of 16-bit samples."""
        self.site.schema |= {
            "type": "string",
            "contentEncoding": "base64",
            "minLength": _base64_chars(SAMPLE16_BYTES),
            "x-media": [PCM16],
        }
        return self.site.give(bytes(SAMPLE16_BYTES), bytes(2 * SAMPLE16_BYTES))


def _base64_chars(count: int) -> int:
    return (count + 2) // 3 * 4


def described(read: Callable[[Value], T]) -> Callable[[Value], T]:
    """Take the describing method for one of `Value`, which readers name without an instance."""
    name = getattr(read, "__name__", "")
    is_method = vars(Value).get(name) is read
    return cast("Callable[[Value], T]", getattr(SketchValue, name)) if is_method else read


def value_at(site: Site) -> SketchValue:
    """Make the value that stands at a site."""
    return SketchValue(path=site.path, value=None, site=site)
