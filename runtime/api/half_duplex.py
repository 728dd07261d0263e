"""Half-duplex calls of MiniCPM-o's demo, `/ws/half_duplex/{id}`: one speaks at a time.

A call is a full-duplex session, `legacy-duplex`, whose client sends nothing while the model speaks:

| the page | the session |
|---|---|
| `prepare` | `prepare`: the texts and the first voice of `system_content`, three settings of `config` |
| `audio_chunk` | the same; discarded while the model speaks |
| `generating`, `chunk`, `turn_done` | the `result`s of a turn; each is answered by a second of silence |
| `vad_state` | nothing: the user begins or ends to speak, by loudness |
| `timeout` | the same, or `stopped` once the time is over that the client asked for |

Other messages are the same. The model decides when to answer, as in any session: `config.vad` has
an effect on `vad_state` only, and `max_new_tokens` has none.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import anyio
import numpy as np
import pybase64

from protocol.values.effects import DetectSpeech
from protocol.values.errors import FrameError
from protocol.values.events import SpeechStarted
from protocol.values.frames import Received, Shortened
from protocol.values.limits import MS_PER_S, NS_PER_S, OF_MODE, SPEECH_THRESHOLD
from protocol.values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES, UNIT_BYTES
from protocol.wire.audio import to_pcm16
from protocol.wire.codec import parse_frame

from ..media.speech_detector import SpeechDetector
from .adapters import dump

HALF_DUPLEX_PATH: Final = "/ws/half_duplex/"
TIMEOUT_S: Final = 300
"""The session's time, if the client asks for no other, as in the demo."""
SILENCE_MS: Final = 800
"""The silence that ends speech, if the client asks for no other, as in the demo."""
SILENCE: Final = dump(type="audio_chunk", audio=pybase64.b64encode(bytes(UNIT_BYTES)).decode())


class HalfDuplex:
    """The `Translation` of one call; `label` is the client's name for it."""

    def __init__(self, label: str) -> None:
        self.due: list[str] = []
        self._label = label
        self._timeout_s: float = TIMEOUT_S
        self._begun_s: float | None = None
        self._is_over = False
        self._detector = SpeechDetector()
        self._threshold, self._silence_ms = SPEECH_THRESHOLD, SILENCE_MS
        self._samples = 0
        self._speaks_from_ms: int | None = None
        self._spoken_ms = 0
        self._states: list[bool] = []
        self._turns = 0
        self._pieces: list[str] | None = None

    def received(self, message: Received) -> list[Received]:
        """As `Translation`; what is wrong reaches the session, which refuses it."""
        if isinstance(message, Shortened):
            return [message]
        try:
            body = parse_frame(message, OF_MODE["audio"].frame_bytes_max)
        except FrameError:
            return [message]
        match body:
            case {"type": "prepare"}:
                return [self._prepare(body)]
            case {"type": "audio_chunk"} if self._pieces is not None:
                return []
            case {"type": "audio_chunk"} if self._elapsed_s > self._timeout_s:
                self._is_over = True
                return [dump(type="stop")]
            case {"type": "audio_chunk", "audio_base64": str(audio)} if self._begun_s is not None:
                self._detect(audio)
        return [message]

    def _prepare(self, body: Mapping[str, Any]) -> str:
        config, parts = body.get("config"), body.get("system_content")
        groups = config if isinstance(config, dict) else {}
        vad, generation, tts, times = (
            it if isinstance(it := groups.get(name), dict) else {}
            for name in ("vad", "generation", "tts", "session")
        )
        self._threshold = _number(vad.get("threshold"), SPEECH_THRESHOLD, 1)
        self._silence_ms = int(_number(vad.get("min_silence_duration_ms"), SILENCE_MS, 10_000))
        self._timeout_s = _number(times.get("timeout_s"), TIMEOUT_S, 86_400)
        items = [it for it in parts if isinstance(it, dict)] if isinstance(parts, list) else []
        texts = [it["text"] for it in items if isinstance(it.get("text"), str)]
        voices = [it["data"] for it in items if it.get("type") == "audio" and it.get("data")]
        kept = {"temperature", "length_penalty"} & generation.keys()
        made: dict[str, Any] = {"config": {name: generation[name] for name in sorted(kept)}}
        if tts.get("enabled") is False:
            made["config"]["generate_audio"] = False
        if texts:
            made["system_prompt"] = "\n".join(texts)
        if voices:
            made["ref_audio_base64"] = voices[0]
        known = ("system_prompt", "ref_audio_base64", "record")
        given = {name: body[name] for name in known if name in body}
        return dump(**given | made, type="prepare")

    def _detect(self, audio: str) -> None:
        """Look for the user's speech in a piece of sound, if it is any."""
        try:
            pcm = pybase64.b64decode(audio, validate=True)
        except ValueError:
            return
        if len(pcm) % SAMPLE_BYTES or not np.isfinite(np.frombuffer(pcm, "<f4")).all():
            return
        data = to_pcm16(pcm)
        effect = DetectSpeech(
            at=self._samples,
            rate_hz=INPUT_RATE_HZ,
            data=data,
            threshold=self._threshold,
            silence_ms=self._silence_ms,
            is_speech=self._speaks_from_ms is not None,
        )
        self._samples += len(data) // SAMPLE16_BYTES
        for event in self._detector.detect(effect, int(anyio.current_time() * NS_PER_S)):
            if isinstance(event, SpeechStarted):
                self._speaks_from_ms = event.at_ms
                self._states.append(True)
            else:
                self._stop_speech(event.at_ms)

    def _stop_speech(self, at_ms: int) -> None:
        if self._speaks_from_ms is not None:
            self._spoken_ms = max(at_ms - self._speaks_from_ms, 0)
            self._speaks_from_ms = None
            self._states.append(False)

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._begun_s is None else round(anyio.current_time() - self._begun_s, 1)

    def sent(self, body: dict[str, Any]) -> Iterator[str]:
        """As `Translation`."""
        is_speech = body["type"] == "result" and not (body["is_listen"] or "pending" in body)
        if is_speech and self._pieces is None:
            self._stop_speech(self._samples * MS_PER_S // INPUT_RATE_HZ)
        states, self._states = self._states, []
        for is_speaking in states:
            yield dump(type="vad_state", speaking=is_speaking)
        match body:
            case {"type": "prepared"}:
                self._begun_s = anyio.current_time()
                del body["prompt_length"]
                yield dump(**body, session_id=self._label, timeout_s=self._timeout_s)
            case {"type": "result"} if is_speech:
                yield from self._speak(body)
            case {"type": "result"}:
                if body["is_listen"] and "pending" not in body:
                    yield from self._end_turn()
            case {"type": kind} if kind == ("stopped" if self._is_over else "timeout"):
                yield dump(type="timeout", elapsed_s=self._elapsed_s)
            case _:
                yield dump(**body)
                if body["type"] == "error":
                    yield from self._end_turn()

    def _speak(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Write a second of the model's speech, and have the session hear another of silence."""
        if self._pieces is None:
            self._pieces = []
            yield dump(type="generating", speech_duration_ms=self._spoken_ms)
        yield dump(
            type="chunk",
            chunk_index=len(self._pieces),
            text_delta=body["text"],
            audio_data=body["audio_data"],
        )
        self._pieces.append(body["text"])
        if body["end_of_turn"]:
            yield from self._end_turn()
        else:
            self.due.append(SILENCE)

    def _end_turn(self) -> Iterator[str]:
        if self._pieces is not None:
            self._turns += 1
            yield dump(type="turn_done", turn_index=self._turns, text="".join(self._pieces))
            self._pieces = None


def _number(value: object, default: float, most: float) -> float:
    """Read a setting: the default in place of what is not a number, and the nearest bound."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return min(max(value, 0), most)
