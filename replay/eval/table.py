"""The table of measures: names, units, definitions and sources, each written once.

`antiphon eval --definitions` and the reference of the site show it. A measure that means nothing in
a recording is absent there: it has no value, and not 0.

Those of `--mode forced` say what a model decides on a recording's past. A decision is the first
token of a unit that was free to decide: to be silent, or to be heard. Each is judged on the
recorded past, so that one difference has no consequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from cattrs import structure

from protocol.values.limits import MS_PER_S, NS_PER_S, SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from runtime.measures import measure as at
from runtime.measures.measure import Measure
from runtime.measures.placing import JITTER_MS
from runtime.media import speech_detector as sd
from runtime.telemetry.meters import DEADLINE_NS

from ..rerun.outputs import NEAR_TIE_DRAW_GAP, NEAR_TIE_MARGIN


def _s(span_ms: int) -> str:
    return f"{span_ms / MS_PER_S:g} s"


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
        f"measures of turns. Gaps shorter than {_s(at.SPEECH_GAP_MS)} are part of a voice's "
        f"stretch, and so are those shorter than {_s(at.PAUSE_MS)} within a response."
    ),
    (
        f"A user's turn is speech with pauses shorter than {_s(at.PAUSE_MS)} in which the model "
        "was not heard, or began too early (`pause_take_over_rate`)."
    ),
    (
        "A barge-in is the user's speech that begins over the model's. Shorter than "
        f"{_s(at.SHORT_MS)}, and with a model that speaks on for more than {_s(at.YIELD_MS)}, it "
        "is a backchannel. The model yields if it falls silent before the user does, or within "
        f"{_s(at.YIELD_MS)}."
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

OWN_VOICE: Final = "own_voice_word_error"
_OVER: Final = "Of units in an open turn of the model in which the user speaks for "
_TABLE: Final = f"""
response_delay | times | s | lower
    From the end of a user's turn to the first sample of the model's answer, as played; an answer
    that began earlier has none.

time_to_first_audio | times | s | lower
    The response delay of the session's first answer.

take_over_rate | ratio | share | higher
    Share of the user's turns that the model answered before the user's next turn; the last turn
    counts if it was answered or {_s(at.ANSWER_WAIT_MS)} passed.

unanswered | total | count | lower
    Turns of the user after which the model was not heard for {_s(at.ANSWER_WAIT_MS)}.

pause_take_over_rate | ratio | share | lower
    Share of the user's pauses (shorter than {_s(at.PAUSE_MS)}) in which the model began to speak
    and was still heard when the user went on: pauses mistaken for ends.

false_starts | total | count | lower
    Stretches of the model shorter than {_s(at.SHORT_MS)} that begin in the user's silence and end
    while the user speaks.

early_starts | total | count | lower
    Stretches of the model that begin while the user speaks, backchannels left out.

overlap | total | s | lower
    Time in which both voices are heard.

talk_over | ratio | s/min | lower
    Time in which early starts are heard over the user, per minute from the first sound of either
    voice to the last.

barge_ins | total | count | -
    How often the user began to speak over the model, backchannels left out.

barge_in_yield_rate | ratio | share | higher
    Share of the barge-ins to which the model yielded.

barge_in_stop_latency | times | s | lower
    From the first sample of a barge-in to the last sample of the model that yielded to it.

barge_in_words | times | words | lower
    Words of the model whose sound began after a barge-in, until the model fell silent.

forced_stop_latency | times | s | lower
    From the arrival of a client's `force_listen` during the model's sound to the last sample of
    that stretch.

user_backchannels | total | count | -
    Backchannels of the user over the model's speech.

model_backchannels | total | count | -
    Stretches of the model shorter than {_s(at.SHORT_MS)} that are heard only while the user speaks.

self_talk | total | s | lower
    Sound of the model in stretches without speech of the user since the stretch before, or at all.

late_units | total | count | lower
    Units answered more than {DEADLINE_NS // NS_PER_S} s after their last sample came, as
    `antiphon_units_late_total` counts them.

deadline_miss_rate | ratio | share | lower
    Share of the answered units that were late.

dropped_units | total | count | lower
    Seconds of input that were lost because too many waited (B7).

input_lead | times | s | -
    How long before it could have been spoken the user's sound came, at most: 0 with a microphone.
    What the model says is taken to be heard as much later than it was sent.

underruns | total | count | lower
    Gaps of more than {JITTER_MS} ms within the sound of one response: the next sound came too late.

near_tie_rate | ratio | share | -
    Share of the units, forced ones left out, whose first token (listen or speak) won by less than
    {at.NEAR_TIE_LOGITS} in logits; only with a model that records margins.

{OWN_VOICE} | ratio | share | lower
    Words inserted, left out or replaced in what a transcriber hears in the model's voice, per word
    of its text; only in `--mode closed` with `--transcriber`.

tool_calls | total | count | -
    Calls of tools in a duplex session, those included that the client was not sent.

tool_calls_unanswered | total | count | lower
    Calls without a result of the client: not sent, out of time, or open at the session's end.

tool_call_delay | times | s | lower
    From the end of the user's last speech before a call to the call.

tool_result_delay | times | s | lower
    From a call to the second that gives its result to the model.

tool_speech_delay | times | s | lower
    From that second to the next one in which the model speaks.

chat_response_delay | times | s | lower | chat
    From the arrival of a question to the first piece of its answer that was sent.

chat_time_to_first_audio | times | s | lower | chat
    From the arrival of a question to the first sample of its answer, as played.

chat_tokens_per_second | ratio | tokens/s | higher | chat
    Tokens generated, per second from the end of the prefill to the end of the answer.

word_delay | times | s | lower | transcription
    From the end of a second of sound, as heard, to its words; 0 for sound that was sent sooner than
    it is heard.

errors | total | count | lower | all
    Messages `error` that the client was sent.

fdb_v1_take_over_rate | ratio | share | - | duplex | Full-Duplex-Bench v1
    TOR of one conversation: 1 if the model's sound, from its first sample to its last, takes
    {_s(at.FDB_SHORT_MS)} or more, or has more than {at.FDB_WORDS_MAX} words; good or bad by the
    task.

fdb_v1_latency | times | s | lower | duplex | Full-Duplex-Bench v1
    From the end of the user's speech to the model's first sample, 0 if that is earlier; of
    conversations with one stretch of the user's speech and a TOR of 1.

fdb_v1_5_stop_latency | times | s | lower | duplex | Full-Duplex-Bench v1.5
    Length of each overlap of both voices, whose stretches are joined over gaps up to
    {_s(at.FDB_USER_GAP_MS)} (user) and {_s(at.FDB_MODEL_GAP_MS)} (model); of overlaps that end in
    the same millisecond, the shortest.

fdb_v1_5_response_latency | times | s | lower | duplex | Full-Duplex-Bench v1.5
    From the end of each such stretch of the user to the next beginning of the model; of stretches
    before the same beginning, the last.

decisions | total | count | - | forced
    Units in which the model is free to be silent or to be heard.

decision_agreement | ratio | share | higher | forced
    Share of the decisions, to be silent or to be heard, that are as recorded.

take_overs_missed | ratio | share | lower | forced
    Share of the units in which the recorded model began to speak, in which this one decides to
    listen.

take_overs_added | ratio | share | lower | forced
    Share of the units outside a turn in which the recorded model listened, in which this one
    decides to speak.

stops_missed | ratio | share | lower | forced
    Share of the units in an open turn whose first recorded token was `turn_eos` or `listen`, in
    which this model decides to go on.

stops_added | ratio | share | lower | forced
    Share of the units in an open turn in which the recorded model went on, in which this one
    decides by its first token to stop.

near_tie_flips | ratio | share | - | forced
    Share of the decisions not as recorded that rounding can turn: the two tokens are within
    {NEAR_TIE_MARGIN:g} in logits, or the draw within {NEAR_TIE_DRAW_GAP:g}.

silence_margin | ratio | logits | - | forced
    Mean of the decisions: the best logit of silence minus the best of all other tokens, penalties
    and `listen_prob_scale` included.

barge_in_stops | ratio | share | higher | forced
    {_OVER}{_s(at.OVERLAP_MS_MIN)}: the share in which this model decides to be silent.

barge_in_listen_probability | ratio | % | - | forced
    {_OVER}{_s(at.OVERLAP_MS_MIN)}: the mean probability of `listen` as first token.

barge_in_end_probability | ratio | % | - | forced
    {_OVER}{_s(at.OVERLAP_MS_MIN)}: the mean probability of `turn_eos` as first token.

logits_otherwise | ratio | share | - | forced
    Share of the units whose first logits differ in any bit from the recorded ones: the weights, the
    prompt, the precision or the machine is another. Rules of sampling do not count.

tokens_otherwise | ratio | share | lower | forced
    Share of the tokens for which this model decides otherwise, text included.

codes_otherwise | ratio | share | lower | forced
    Share of the speech codes for which this model decides otherwise.

sound_otherwise | ratio | share | lower | forced
    Share of the spoken units whose sound differs, though made of the same codes.

units_elsewhere | total | count | lower | forced
    Units that are not judged: this model did not take a recorded decision, so it was elsewhere
    since.
"""
"""Of each measure: name, kind, unit, which values are good, sessions that have it, source."""


def _read(table: str) -> Iterator[Measure]:
    for rows in table.strip().split("\n\n"):
        head, *lines = rows.splitlines()
        name, kind, unit, better, *rest = head.split(" | ")
        modes, source = (*rest, *("duplex", "Antiphon")[len(rest) :])
        definition = " ".join(" ".join(lines).split())
        fields = {"name": name, "kind": kind, "unit": unit, "better": better.strip("-")}
        fields |= {"modes": modes, "source": source, "definition": definition}
        yield structure(fields, Measure)


MEASURES: Final[Mapping[str, Measure]] = MappingProxyType({it.name: it for it in _read(_TABLE)})
"""All measures by name, in the order in which they are shown."""
