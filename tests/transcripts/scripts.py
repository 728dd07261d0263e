"""What the scripted model does in a transcript, by the name in the transcript's first line.

Each is what a `ScriptedBackend` is made of. Where a client must come in between, a step takes long
enough that no machine is too slow for it; the pure player's clock jumps over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from protocol.values.model import Chunk, Tool, Turn, Unit
from runtime.model.backends.scripted import Call, ScriptedBackend, Speaks, Step, calling
from runtime.model.backends.scripted_chat import (
    Answer,
    Fault,
    Transcribed,
    call,
    default_answer,
    default_hearing,
    tone,
)

LONG_S: Final = 30.0
"""No client of a transcript waits that long: it cuts in."""
QUICK: Final = Step(prefill_s=0.005, generate_s=0.005, finalize=Call(duration_s=0.005))
WAY_IN_S: Final = 2.0
"""Between two answers, where a client says something in between, in several steps."""


def _says(unit: Unit, text: str, samples: int = 24_000, *, last: bool = False) -> Step:
    speech = Speaks(text=text, pcm=tone(unit.index, 0, samples=samples), end_of_turn=last)
    return attrs.evolve(QUICK, speech=speech)


def listens(unit: Unit, seed: int) -> Step:
    """Listen, always."""
    return QUICK


def _calls_quickly(step: Step, unit: Unit, tools: Sequence[Tool]) -> Step:
    """Call the clock in the first second, and say what it returned."""
    made = attrs.evolve(calling(at=0, arguments='{"zone": "UTC"}')(step, unit, tools), silent_s=0.0)
    heard = [each.text for each in unit.inputs if each.kind == "text"]
    return _says(unit, f"I see: {heard[0]}", 12_000, last=True) if heard else made


def timeline(unit: Unit, seed: int) -> Step:
    """Listen for two seconds, say what 000's example says in three, listen again."""
    match unit.index:
        case 2:
            return _says(unit, "Hello", 20_000)
        case 3:
            return _says(unit, ",")
        case 4:
            return _says(unit, "how can I help?", 18_000, last=True)
    return QUICK


def speaks(unit: Unit, seed: int) -> Step:
    """Say a word a unit; every third ends the turn."""
    return _says(unit, f"word {unit.index} ", last=unit.index % 3 == 2)


def mute(unit: Unit, seed: int) -> Step:
    """Speak without sound, then without words, then with neither."""
    match unit.index:
        case 0:
            return _says(unit, "only words", 0)
        case 1:
            return _says(unit, "")
        case 2:
            return _says(unit, "", 0, last=True)
    return QUICK


def long_winded(unit: Unit, seed: int) -> Step:
    """Speak the first second for very long; then listen."""
    if unit.index == 0:
        return attrs.evolve(_says(unit, "and so on "), generate_s=LONG_S, steps=3_000)
    return QUICK


def slow(unit: Unit, seed: int) -> Step:
    """Listen, but take long for the first unit, as a machine under load."""
    return attrs.evolve(QUICK, generate_s=3.0, steps=50) if unit.index == 0 else QUICK


def _failing(fault: Fault, *units: int, finalize: Fault | None = None) -> Callable[..., Step]:
    def script(unit: Unit, seed: int) -> Step:
        if unit.index not in units:
            return QUICK
        if finalize is not None:
            return attrs.evolve(QUICK, finalize=Call(fault=finalize))
        return attrs.evolve(QUICK, fault=fault)

    return script


# -- chat -----------------------------------------------------------------------------------------


def _answers(*tokens: str, **more: Any) -> Callable[[Turn], Answer]:
    answer = Answer(tokens=tokens, **more)
    return lambda turn: answer


def _answers_then_echoes(first: Answer) -> Callable[[Turn], Answer]:
    """Give the first turn its own answer, and the others the default."""
    return lambda turn: first if turn.index == 0 else default_answer(turn)


# -- transcription --------------------------------------------------------------------------------


def _hears_slowly(chunk: Chunk) -> Transcribed:
    return attrs.evolve(default_hearing(chunk), takes_s=WAY_IN_S)


def _hears_but(fault: Fault) -> Callable[[Chunk], Transcribed]:
    """Hear all but the second second of the first utterance."""

    def script(chunk: Chunk) -> Transcribed:
        is_it = (chunk.utterance, chunk.index) == (0, 1)
        return Transcribed(fault=fault) if is_it else default_hearing(chunk)

    return script


def calls_tools(turn: Turn) -> Answer:
    """Think aloud and call the first tool twice, with text between that looks like a call."""
    if not turn.tools:
        return default_answer(turn)
    name = turn.tools[0].name
    first, second = call(name, '{"zone": "UTC"}'), call(name)
    return Answer(tokens=("Let me see. ", *first, " <tool_", "box> ", *call("missing"), *second))


SCRIPTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "default": {},
        "listens": {"script": listens},
        "cannot-be-asked": {"script": listens, "can_speak": False},
        "timeline-unasked": {"script": timeline, "can_speak": False},
        "timeline": {"script": timeline},
        "speaks": {"script": speaks},
        "mute": {"script": mute},
        "long-winded": {"script": long_winded},
        "slow": {"script": slow},
        "fails-once": {"script": _failing("fail", 0)},
        "fails-thrice": {"script": _failing("fail", 0, 1, 2)},
        "cannot-undo": {"script": _failing("fail", 0), "can_rollback": False},
        "cannot-finalize": {"script": _failing("fail", 0, finalize="fail")},
        "lost": {"script": _failing("gone", 0)},
        "hangs": {"script": _failing("hang", 0)},
        "full": {"script": _failing("context_full", 1)},
        "cannot-open": {"opening": lambda _: Call(fault="fail")},
        "lost-in-opening": {"opening": lambda _: Call(fault="gone")},
        "opens-slowly": {"opening": lambda _: Call(duration_s=WAY_IN_S)},
        "long-prompts": {
            "opening": lambda opening: Call(
                fault="context_full" if len(opening.instructions) > 100 else None
            )
        },
        "chat-test": {"chat": _answers("te", "st")},
        "chat-hello": {"chat": _answers("Hello", "! How can", " I help you?")},
        "chat-hesitates": {
            "chat": _answers_then_echoes(Answer(tokens=("Well", ", then"), token_s=WAY_IN_S))
        },
        "chat-fails": {
            "chat": _answers_then_echoes(Answer(tokens=("Hm",), fault="fail", fault_at=0))
        },
        "chat-lost": {
            "chat": _answers_then_echoes(Answer(tokens=("Hm",), fault="gone", fault_at=1))
        },
        "chat-hangs": {"chat": lambda turn: Answer(fault="hang")},
        "chat-full": {"chat": _answers_then_echoes(Answer(fault="context_full"))},
        "chat-without-tools": {"tools": False},
        "calls-tools": {"script": listens, "duplex_tools": True, "calls": _calls_quickly},
        "calls-speaking": {"script": speaks, "duplex_tools": True, "calls": _calls_quickly},
        "chat-calls": {"chat": calls_tools},
        "hears-slowly": {"hears": _hears_slowly},
        "hears-fails": {"hears": _hears_but("fail")},
        "hears-full": {"hears": _hears_but("context_full")},
        "hears-lost": {"hears": _hears_but("gone")},
        "chat-slow": {"chat": lambda turn: attrs.evolve(default_answer(turn), prefill_s=WAY_IN_S)},
    }
)


def make_backend(name: str, *, slots: int | None = None) -> ScriptedBackend:
    """Make the model of a transcript.

    Args:
        name: of the script.
        slots: sessions at once; None takes the model's own.

    Returns:
        The backend; nothing of it is shared with another transcript's.
    """
    more: dict[str, Any] = {} if slots is None else {"slots": slots}
    return ScriptedBackend(**SCRIPTS[name], **more)
