"""A conversation as the language model's input rows: chat template, media, tools, speech modes.

Each message is `<|im_start|>`, its role, a newline, its contents, `<|im_end|>`, a newline. The
generation prompt follows: `<|im_start|>assistant`, a newline, an empty think block unless thinking
is allowed, and `<|tts_bos|>` if speech is requested or sound was sent. Contents are joined by
newlines, in omni mode by nothing. Thoughts of earlier answers are omitted. A picture is `<image>`,
its embeddings, `</image>`, then the slices of its grid, with a newline between rows; a sound is
`<|audio_start|>`, ten embeddings a second, `<|audio_end|>`, in pieces of 30 s.

Tools have the form of Qwen3's chat template. They stand behind the system message, each as JSON in
a line of its own, between the words of the checkpoint (`tokens.ToolWords`). A call is
`<tool_call>`, a line of JSON, `</tool_call>` behind the answer's text; results that follow one
another are one message of the user, each between `<tool_response>` and `</tool_response>`.

Marks unknown to the tokenizer are omitted, but those of tools are text then. Text never yields a
control token; in a turn with tools it yields no mark of them either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import attrs

from protocol.values import model as md

from ..base import BackendError
from .config import UNIT_FRAMES, AudioConfig, ModelConfig
from .tokens import TOOL_MARKS, Tokens
from .vision import Slicing, jpeg_size

CLIP_S_MAX: Final = 30
"""Seconds of sound that the encoder takes at once, if its position table is that long."""
CLIP_MIN: Final = md.INPUT_RATE_HZ // 10
"""Samples that make one embedding; shorter sound is padded with silence."""
THOUGHT: Final = "</think>"
"""The end of the thoughts in an earlier answer."""
_MARKS: Final = re.compile("|".join(TOOL_MARKS).join("()"))

VOICED: Final[Mapping[tuple[md.SpeechMode, md.Language], tuple[str, str]]] = {
    ("default", "en"): ("", "You are a helpful assistant. Reply naturally."),
    ("default", "zh"): ("", "你是一位乐于助人的助手。请自然地回答。"),
    ("audio_assistant", "en"): (
        "Mimic the voice from the audio sample.",
        "You are a helpful assistant. Reply naturally.",
    ),
    ("audio_assistant", "zh"): (
        "请模仿这段录音里的声音。",
        "你是一位乐于助人的助手。请自然地回答。",
    ),
    ("omni", "en"): (
        "Mimic the voice from the audio sample.",
        "You hear and see what the user sends. Reply naturally.",
    ),
    ("omni", "zh"): ("请模仿这段录音里的声音。", "你能听到和看到用户发来的内容。请自然地回答。"),
    ("audio_roleplay", "en"): (
        "Mimic the voice from the audio sample.",
        "Be the person whom you heard, and talk with the user.",
    ),
    ("audio_roleplay", "zh"): ("请模仿这段录音里的声音。", "请扮演录音里的这个人，和用户交谈。"),
    ("voice_cloning", "en"): (
        "Mimic the voice from the audio sample.",
        "Say what the user writes in this voice.",
    ),
    ("voice_cloning", "zh"): ("请模仿这段录音里的声音。", "请用这个声音说出用户写的内容。"),
}
"""Text before and after the voice. Without a voice only the second; `default` omits the voice."""


@attrs.frozen(kw_only=True)
class Words:
    """Token ids to be fed."""

    ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Slice:
    """The embeddings of one slice (0: the whole picture) of a conversation's picture, from 0."""

    picture: int
    index: int


@attrs.frozen(kw_only=True)
class Clip:
    """The embeddings of a piece of sound (float32 LE, 16 kHz) that the encoder takes at once."""

    pcm: bytes = attrs.field(repr=False)
    count: int


Piece = Words | Slice | Clip


@attrs.frozen(kw_only=True)
class Prompt:
    """A conversation's layout: pieces in feeding order, their JPEG files, and the total rows."""

    pieces: tuple[Piece, ...]
    pictures: tuple[bytes, ...] = attrs.field(repr=False)
    length: int


def conversation(turn: md.Turn) -> tuple[md.Message, ...]:
    """A turn's messages, with the system message of its speech mode, or an empty one for tools."""
    messages = _voiced(turn)
    if turn.tools and messages[0].role != "system":
        return (md.Message(role="system", content=()), *messages)
    return messages


def _voiced(turn: md.Turn) -> tuple[md.Message, ...]:
    speech = turn.speech
    if speech is None or any(message.role == "system" for message in turn.messages):
        return turn.messages
    before, after = VOICED[speech.mode, speech.language]
    content: tuple[md.Content, ...] = (md.Text(text=after),)
    if before and speech.voice_pcm:
        content = (md.Text(text=before), md.Sound(pcm=speech.voice_pcm), *content)
    return (md.Message(role="system", content=content), *turn.messages)


def without_thoughts(content: Sequence[md.Content]) -> tuple[md.Content, ...]:
    """An earlier answer without all text up to its last `</think>`."""
    ends = [
        i for i, part in enumerate(content) if isinstance(part, md.Text) and THOUGHT in part.text
    ]
    if not ends:
        return tuple(content)
    last = content[ends[-1]]
    assert isinstance(last, md.Text)
    rest = last.text.rpartition(THOUGHT)[2].lstrip("\n")
    return (md.Text(text=rest), *content[ends[-1] + 1 :])


def clip_samples(audio: AudioConfig) -> int:
    """Samples that the encoder takes at once."""
    return min(CLIP_S_MAX, audio.max_source_positions // UNIT_FRAMES) * md.INPUT_RATE_HZ


def clips(pcm: bytes, audio: AudioConfig) -> Iterator[Clip]:
    """Cut sound into the encoder's pieces; a rest that is too short is padded with silence."""
    step = clip_samples(audio) * md.SAMPLE_BYTES
    for start in range(0, len(pcm), step):
        piece = pcm[start : start + step].ljust(CLIP_MIN * md.SAMPLE_BYTES, b"\0")
        frames = -(-len(piece) // md.SAMPLE_BYTES // (md.INPUT_RATE_HZ // 100))
        yield Clip(pcm=piece, count=-(-frames // 2) // audio.pool)


@attrs.define
class _Writer:
    """A prompt under construction; adjacent texts are encoded together."""

    tokens: Tokens
    config: ModelConfig
    turn: md.Turn
    numbered: bool
    has_tools: bool
    pictures: list[bytes] = attrs.field(factory=list)
    _waiting: str = ""
    _ids: list[int] = attrs.field(factory=list)
    _pieces: list[Piece] = attrs.field(factory=list)

    def text(self, text: str) -> None:
        self._waiting += text

    def marks(self, *marks: int | None) -> None:
        """Add the control tokens that exist."""
        known = [mark for mark in marks if mark is not None]
        if known:
            self._encode()
            self._ids += known

    def media(self, *pieces: Piece) -> None:
        self._close()
        self._pieces += pieces

    def _encode(self) -> None:
        encode = self.tokens.spell if self.has_tools else self.tokens.encode
        self._ids += encode(self._waiting) if self._waiting else []
        self._waiting = ""

    def _close(self) -> None:
        self._encode()
        if self._ids:
            self._pieces.append(Words(ids=tuple(self._ids)))
            self._ids = []

    def pieces(self) -> tuple[Piece, ...]:
        self._close()
        return tuple(self._pieces)

    def template(self, text: str) -> None:
        """Add text of the template, in which marks of tools are marks."""
        for piece in _MARKS.split(text):
            mark = self.tokens.tool_marks.get(piece)
            if mark is None:
                self.text(piece)
            else:
                self.marks(mark)

    def message(self, message: md.Message) -> None:
        ids = self.tokens.ids
        self.marks(ids.im_start)
        self.text(f"{message.role}\n")
        is_answer = message.role == "assistant"
        content = without_thoughts(message.content) if is_answer else message.content
        if any(isinstance(part, md.ToolCall) for part in content):
            content = tuple(part for part in content if part != md.Text(text=""))
        for index, part in enumerate(content):
            self._part(part, is_first=not index)
        if message.role == "system" and self.turn.tools:
            self._offer(is_first=not content)
        self.marks(ids.im_end)
        self.text("\n")

    def _part(self, part: md.Content, *, is_first: bool) -> None:
        if isinstance(part, md.ToolCall):
            self.text("" if is_first else "\n")
            self.template("<tool_call>")
            self.text(call_body(part))
            self.template("</tool_call>")
            return
        self.text("" if is_first or self.turn.omni else "\n")
        match part:
            case md.Text(text=text):
                self.text(text)
            case md.Picture(jpeg=jpeg):
                self._picture(jpeg)
            case md.Sound(pcm=pcm):
                self.marks(self.tokens.ids.audio_start)
                self.media(*clips(pcm, self.config.audio))
                self.marks(self.tokens.ids.audio_end)

    def results(self, results: Sequence[md.ToolResult]) -> None:
        """Add the results of tools that follow one another, as one message."""
        self.marks(self.tokens.ids.im_start)
        self.text("user")
        for result in results:
            self.text("\n")
            self.template("<tool_response>")
            self.text(result_body(result))
            self.template("</tool_response>")
        self.marks(self.tokens.ids.im_end)
        self.text("\n")

    def _offer(self, *, is_first: bool) -> None:
        """Add the tools that the turn offers; the caller has checked that the model has any."""
        assert self.tokens.tools is not None
        self.text("" if is_first else "\n\n")
        self.template(self.tokens.tools.before)
        self.text(signatures(self.turn.tools))
        self.template(f"\n{self.tokens.tools.after}")

    def _picture(self, jpeg: bytes) -> None:
        ids, chat, place = self.tokens.ids, self.tokens.chat, len(self.pictures)
        self.pictures.append(jpeg)
        if self.numbered:
            self.marks(chat.image_id)
            self.text(str(place))
            self.marks(chat.image_id_end)
        self.marks(ids.image)
        self.media(Slice(picture=place, index=0))
        self.marks(ids.image_end)
        columns, rows = _grid(self.config, jpeg, place, self.turn.max_slice_nums)
        for row in range(rows):
            self.text("\n" if row else "")
            for column in range(columns):
                self.marks(ids.slice_)
                self.media(Slice(picture=place, index=1 + row * columns + column))
                self.marks(ids.slice_end)

    def ask(self, *, aloud: bool) -> None:
        """Add the generation prompt."""
        ids, chat = self.tokens.ids, self.tokens.chat
        self.marks(ids.im_start)
        self.text("assistant\n")
        if not self.turn.thinking and chat.think is not None:
            self.marks(chat.think)
            self.text("\n\n")
            self.marks(chat.think_end)
            self.text("\n\n")
        if aloud:
            self.marks(ids.tts_bos)


def _grid(config: ModelConfig, jpeg: bytes, place: int, slices_max: int) -> tuple[int, int]:
    """Columns and rows of a picture's slices, from its header; 0 and 0 if it stays whole."""
    try:
        width, height = jpeg_size(jpeg)
    except ValueError as error:
        raise BackendError(f"picture {place} cannot be decoded") from error
    return Slicing.of(config.vision).grid(width, height, slices_max) or (0, 0)


def lay_out(config: ModelConfig, tokens: Tokens, turn: md.Turn) -> Prompt:
    """Lay out a turn's conversation, undecoded; `BackendError` if a picture is not a JPEG."""
    messages = conversation(turn)
    parts = [part for message in messages for part in message.content]
    has_numbers = tokens.chat.image_id is not None and tokens.chat.image_id_end is not None
    several = sum(isinstance(part, md.Picture) for part in parts) > 1
    writer = _Writer(
        tokens=tokens,
        config=config,
        turn=turn,
        numbered=turn.use_image_id and has_numbers and several,
        has_tools=turn.has_tools,
    )
    for message, results in _grouped(messages):
        if results:
            writer.results(results)
        else:
            writer.message(message)
    has_sound = any(isinstance(part, md.Sound) for part in parts)
    writer.ask(aloud=turn.speech is not None or has_sound or turn.tts_template)
    pieces = writer.pieces()
    length = sum(rows_of(piece, config) for piece in pieces)
    return Prompt(pieces=pieces, pictures=tuple(writer.pictures), length=length)


def _grouped(messages: Sequence[md.Message]) -> Iterator[tuple[md.Message, list[md.ToolResult]]]:
    """The messages; those with results of tools that follow one another come as one."""
    for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
        if not is_tool:
            yield from ((message, []) for message in group)
            continue
        *_, last = kept = list(group)
        parts = (part for message in kept for part in message.content)
        yield last, [part for part in parts if isinstance(part, md.ToolResult)]


def rows_of(piece: Piece, config: ModelConfig) -> int:
    """Rows of a prompt's piece."""
    if isinstance(piece, Words):
        return len(piece.ids)
    return config.vision.queries if isinstance(piece, Slice) else piece.count


# -- tools --------------------------------------------------------------------------------------


def signatures(tools: Sequence[md.Tool]) -> str:
    """The list of tools, each on a new line."""
    return "".join(f"\n{json.dumps(_signature(tool), ensure_ascii=False)}" for tool in tools)


def _signature(tool: md.Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def call_body(call: md.ToolCall) -> str:
    """The text between a call's marks."""
    return f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'


def result_body(result: md.ToolResult) -> str:
    """The text between a result's marks."""
    return f"\n{result.output}\n"
