"""The table of measures: names, units, definitions and sources, each written once.

`antiphon eval --definitions` and docs/evaluate.md show it. A measure that means nothing in a
recording is absent there: it has no value, and not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from protocol.values.limits import MS_PER_S, NS_PER_S, SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from runtime.measures.measure import (
    ANSWER_WAIT_MS,
    FDB_MODEL_GAP_MS,
    FDB_SHORT_MS,
    FDB_USER_GAP_MS,
    FDB_WORDS_MAX,
    NEAR_TIE_LOGITS,
    PAUSE_MS,
    SHORT_MS,
    SPEECH_GAP_MS,
    YIELD_MS,
    Measure,
)
from runtime.measures.placing import JITTER_MS
from runtime.media import speech_detector as sd
from runtime.telemetry.meters import DEADLINE_NS

from .forced_table import FORCED


def _s(span_ms: int) -> str:
    return f"{span_ms / MS_PER_S:g} s"


OWN_VOICE: Final = "own_voice_word_error"
SETTINGS: Final = (
    (
        "The user's speech is what the log says (`SpeechStarted`, `SpeechStopped`) if its server "
        f"searched for it. Else the energy detector finds it: frames of {sd.FRAME_MS} ms, "
        f"{sd.START_FRAMES} of {sd.WINDOW_FRAMES} loud begin speech, at a threshold of "
        f"{SPEECH_THRESHOLD}, and {SPEECH_SILENCE_MS} ms of silence end it, where the silence "
        "began. It searches the sound as it was sent, at its own rate."
    ),
    (
        "The model's sound is where a client plays it: from the time it was sent, after earlier "
        "sound, until an interruption, loud or not; of a model that only writes there are no "
        f"measures of turns. Gaps shorter than {_s(SPEECH_GAP_MS)} are part of a voice's stretch, "
        f"and so are those shorter than {_s(PAUSE_MS)} within a response."
    ),
    (
        f"A user's turn is speech with pauses shorter than {_s(PAUSE_MS)} in which the model was "
        "not heard, or began too early (`pause_take_over_rate`)."
    ),
    (
        "A barge-in is the user's speech that begins over the model's. Shorter than "
        f"{_s(SHORT_MS)}, and with a model that speaks on for more than {_s(YIELD_MS)}, it is a "
        "backchannel. The model yields if it falls silent before the user does, or within "
        f"{_s(YIELD_MS)}."
    ),
    (
        "In a redacted recording whose user's sound was taken out, and whose server did not search "
        "it for speech, all measures of turns and overlaps are absent; without the model's text, "
        "those of words."
    ),
    (
        "Times are those of samples. Speech begins and ends with a frame of its detector "
        f"({sd.FRAME_MS} ms with the energy detector); sound that is not sent at 16 kHz is placed "
        "to 2 ms."
    ),
    (
        "Full-Duplex-Bench (arXiv 2503.04721, 2507.23159): its measures are computed as its code "
        "does from prepared timestamps; here these are the log's, and no transcriber's or "
        "detector's. Its JSD of backchannels, its ratings, and v2 (arXiv 2510.07838), which a "
        "language model judges, cannot be computed from a log."
    ),
)
"""What holds for several definitions: one paragraph each."""

_ROWS: Final = (
    Measure(
        name="response_delay",
        kind="times",
        unit="s",
        better="lower",
        definition=(
            "From the end of a user's turn to the first sample of the model's answer, as played; "
            "an answer that began earlier has none."
        ),
    ),
    Measure(
        name="time_to_first_audio",
        kind="times",
        unit="s",
        better="lower",
        definition=("The response delay of the session's first answer."),
    ),
    Measure(
        name="take_over_rate",
        kind="ratio",
        unit="share",
        better="higher",
        definition=(
            "Share of the user's turns that the model answered before the user's next turn; the "
            f"last turn counts if it was answered or {_s(ANSWER_WAIT_MS)} passed."
        ),
    ),
    Measure(
        name="unanswered",
        kind="total",
        unit="count",
        better="lower",
        definition=(
            f"Turns of the user after which the model was not heard for {_s(ANSWER_WAIT_MS)}."
        ),
    ),
    Measure(
        name="pause_take_over_rate",
        kind="ratio",
        unit="share",
        better="lower",
        definition=(
            f"Share of the user's pauses (shorter than {_s(PAUSE_MS)}) in which the model began to "
            "speak and was still heard when the user went on: pauses mistaken for ends."
        ),
    ),
    Measure(
        name="false_starts",
        kind="total",
        unit="count",
        better="lower",
        definition=(
            f"Stretches of the model shorter than {_s(SHORT_MS)} that begin in the user's silence "
            "and end while the user speaks."
        ),
    ),
    Measure(
        name="early_starts",
        kind="total",
        unit="count",
        better="lower",
        definition=(
            "Stretches of the model that begin while the user speaks, backchannels left out."
        ),
    ),
    Measure(
        name="overlap",
        kind="total",
        unit="s",
        better="lower",
        definition=("Time in which both voices are heard."),
    ),
    Measure(
        name="talk_over",
        kind="ratio",
        unit="s/min",
        better="lower",
        definition=(
            "Time in which early starts are heard over the user, per minute from the first sound "
            "of either voice to the last."
        ),
    ),
    Measure(
        name="barge_ins",
        kind="total",
        unit="count",
        better="",
        definition=("How often the user began to speak over the model, backchannels left out."),
    ),
    Measure(
        name="barge_in_yield_rate",
        kind="ratio",
        unit="share",
        better="higher",
        definition=("Share of the barge-ins to which the model yielded."),
    ),
    Measure(
        name="barge_in_stop_latency",
        kind="times",
        unit="s",
        better="lower",
        definition=(
            "From the first sample of a barge-in to the last sample of the model that yielded to "
            "it."
        ),
    ),
    Measure(
        name="barge_in_words",
        kind="times",
        unit="words",
        better="lower",
        definition=(
            "Words of the model whose sound began after a barge-in, until the model fell silent."
        ),
    ),
    Measure(
        name="forced_stop_latency",
        kind="times",
        unit="s",
        better="lower",
        definition=(
            "From the arrival of a client's `force_listen` during the model's sound to the last "
            "sample of that stretch."
        ),
    ),
    Measure(
        name="user_backchannels",
        kind="total",
        unit="count",
        better="",
        definition=("Backchannels of the user over the model's speech."),
    ),
    Measure(
        name="model_backchannels",
        kind="total",
        unit="count",
        better="",
        definition=(
            f"Stretches of the model shorter than {_s(SHORT_MS)} that are heard only while the "
            "user speaks."
        ),
    ),
    Measure(
        name="self_talk",
        kind="total",
        unit="s",
        better="lower",
        definition=(
            "Sound of the model in stretches without speech of the user since the stretch before, "
            "or at all."
        ),
    ),
    Measure(
        name="late_units",
        kind="total",
        unit="count",
        better="lower",
        definition=(
            f"Units answered more than {DEADLINE_NS // NS_PER_S} s after their last sample came, "
            "as `antiphon_units_late_total` counts them."
        ),
    ),
    Measure(
        name="deadline_miss_rate",
        kind="ratio",
        unit="share",
        better="lower",
        definition=("Share of the answered units that were late."),
    ),
    Measure(
        name="dropped_units",
        kind="total",
        unit="count",
        better="lower",
        definition=("Seconds of input that were lost because too many waited (B7)."),
    ),
    Measure(
        name="input_lead",
        kind="times",
        unit="s",
        better="",
        definition=(
            "How long before it could have been spoken the user's sound came, at most: 0 with a "
            "microphone. A client that sends a file ahead is answered earlier by that time."
        ),
    ),
    Measure(
        name="underruns",
        kind="total",
        unit="count",
        better="lower",
        definition=(
            f"Gaps of more than {JITTER_MS} ms within the sound of one response: the next sound "
            "came too late."
        ),
    ),
    Measure(
        name="near_tie_rate",
        kind="ratio",
        unit="share",
        better="",
        definition=(
            "Share of the units, forced ones left out, whose first token (listen or speak) won by "
            f"less than {NEAR_TIE_LOGITS} in logits; only with a model that records margins."
        ),
    ),
    Measure(
        name=OWN_VOICE,
        kind="ratio",
        unit="share",
        better="lower",
        definition=(
            "Words inserted, left out or replaced in what a transcriber hears in the model's "
            "voice, per word of its text; only in `--mode closed` with `--transcriber`."
        ),
    ),
    Measure(
        name="chat_response_delay",
        kind="times",
        unit="s",
        better="lower",
        modes="chat",
        definition=(
            "From the arrival of a question to the first piece of its answer that was sent."
        ),
    ),
    Measure(
        name="chat_time_to_first_audio",
        kind="times",
        unit="s",
        better="lower",
        modes="chat",
        definition=("From the arrival of a question to the first sample of its answer, as played."),
    ),
    Measure(
        name="chat_tokens_per_second",
        kind="ratio",
        unit="tokens/s",
        better="higher",
        modes="chat",
        definition=(
            "Tokens generated, per second from the end of the prefill to the end of the answer."
        ),
    ),
    Measure(
        name="word_delay",
        kind="times",
        unit="s",
        better="lower",
        modes="transcription",
        definition=(
            "From the end of a second of sound, as heard, to its words; 0 for sound that was sent "
            "sooner than it is heard."
        ),
    ),
    Measure(
        name="errors",
        kind="total",
        unit="count",
        better="lower",
        modes="all",
        definition=("Messages `error` that the client was sent."),
    ),
    Measure(
        name="fdb_v1_take_over_rate",
        kind="ratio",
        unit="share",
        better="",
        source="Full-Duplex-Bench v1",
        definition=(
            "TOR of one conversation: 1 if the model's sound, from its first sample to its last, "
            f"takes {_s(FDB_SHORT_MS)} or more, or has more than {FDB_WORDS_MAX} words; good or "
            "bad by the task."
        ),
    ),
    Measure(
        name="fdb_v1_latency",
        kind="times",
        unit="s",
        better="lower",
        source="Full-Duplex-Bench v1",
        definition=(
            "From the end of the user's speech to the model's first sample, 0 if that is earlier; "
            "of conversations with one stretch of the user's speech and a TOR of 1."
        ),
    ),
    Measure(
        name="fdb_v1_5_stop_latency",
        kind="times",
        unit="s",
        better="lower",
        source="Full-Duplex-Bench v1.5",
        definition=(
            "Length of each overlap of both voices, whose stretches are joined over gaps up to "
            f"{_s(FDB_USER_GAP_MS)} (user) and {_s(FDB_MODEL_GAP_MS)} (model); of overlaps that "
            "end in the same millisecond, the shortest."
        ),
    ),
    Measure(
        name="fdb_v1_5_response_latency",
        kind="times",
        unit="s",
        better="lower",
        source="Full-Duplex-Bench v1.5",
        definition=(
            "From the end of each such stretch of the user to the next beginning of the model; of "
            "stretches before the same beginning, the last."
        ),
    ),
)
MEASURES: Final[Mapping[str, Measure]] = MappingProxyType({it.name: it for it in (*_ROWS, *FORCED)})
"""All measures by name, in the order in which they are shown."""
