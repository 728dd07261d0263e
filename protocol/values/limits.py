"""Every bound of a session, each a named constant with its reason, and the table of modes.

Times on the session's clock are integer nanoseconds (`_NS`); times that an operator or a source
gives in seconds keep their unit (`_S`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

import attrs

NS_PER_S: Final = 1_000_000_000
NS_PER_MS: Final = 1_000_000
MS_PER_S: Final = 1_000

# -- time ---------------------------------------------------------------------------------------

LIMIT_VIDEO_S: Final = 300
"""Total time of a video session, queueing and idling included (000, Mode Constraints)."""
LIMIT_AUDIO_S: Final = 600
"""Total time of an audio session (001, Modes)."""
INIT_WAIT_S: Final = 30
"""A slot is held until the client's init; it cannot be held for ever."""
CLEANUP_WAIT_S: Final = 10
"""A model call that is still running this long after the end condemns its worker (B4)."""
CALL_WAIT_S: Final = 30
"""A unit is a second of sound: a call that shows no life for so long hangs, and delays others."""
TURN_WAIT_S: Final = 120
"""The prefill of a full context reports only its end, and waits for the units of others."""
IDLE_S: Final = 60
"""Between its turns a chat holds a socket and memory (wire decisions), a transcription a slot."""
LIMIT_LIVE_S: Final = 3600
"""Total time of a session of `live`, as its clients know it."""
LAST_WORDS_S: Final = 10
"""What was heard when a transcription's time is over is transcribed for so long."""
LIMIT_TRANSCRIPTION_S: Final = 3600
"""Total time of a transcription session: a meeting; each utterance has an empty context."""
PAUSE_S: Final = 60
"""A paused session holds its slot; a client may ask for less, not for more (002)."""
DETACH_S: Final = 30
"""A client whose connection is lost is back in seconds, or has gone elsewhere."""
RESUME_S: Final = 600
"""A tunnel, or a call on the same phone; a session's total time bounds it as well."""
ESTIMATE_INTERVAL_S: Final = 3
"""The estimate changes all the time: sent at most this often when nothing else changed."""

# -- frames -------------------------------------------------------------------------------------

FRAME_BYTES_MAX: Final = 24 * 1024 * 1024
"""Ten seconds of audio and four frames of 4 MiB, base64, fit with room to spare; more: 1009."""
CHAT_FRAME_BYTES_MAX: Final = 96 * 1024 * 1024
"""A turn of chat carries its media whole: a video of 64 MiB in base64, and some more."""
JSON_DEPTH_MAX: Final = 32
"""The deepest message of any source nests 5 levels; a bomb nests thousands."""
REASON_CHARS_MAX: Final = 64
"""A client's own close reason is sent back to it, and is bounded for that."""
INSTRUCTIONS_CHARS_MAX: Final = 32_768
"""More characters than tokens that any context of 8192 could hold."""
INPUT_ID_CHARS_MAX: Final = 64
"""A client's own id for an append comes back in every delta, and is bounded for that."""

# -- audio --------------------------------------------------------------------------------------

APPEND_SAMPLES_MIN: Final = 4_000
"""250 ms (000, input_audio_buffer.append): smaller chunks cost more than they carry."""
APPEND_SAMPLES_MAX: Final = 160_000
"""Ten seconds: twice what may wait, so that an append can only replace what waits, not bury it."""
APPEND_S_MAX: Final = 10
"""The same in seconds, for sound of another rate."""
APPEND_BYTES_MAX: Final = 15 * 1024 * 1024
"""Of an append of `openai`, as its clients know it."""
BACKLOG_S_MAX: Final = 360
"""Seconds of `openai` that wait for the model, 17 MB: one append of the most fits, or a stall."""
REFERENCE_S_MIN: Final = 0.5
"""A voice cannot be heard in less."""
REFERENCE_S_MAX: Final = 30
"""The model's audio encoder sees 30 s at most."""
WAV_BYTES_MAX: Final = 12 * 1024 * 1024
"""30 s of 48 kHz stereo 32-bit, headers included."""

# -- frames of video ----------------------------------------------------------------------------

FRAMES_MAX: Final = 4
"""Frames an append: what a camera needs is one a second."""
UNIT_FRAMES_MAX: Final = 16
"""Frames a second of input, however many appends it comes in: four appends of the most."""
FRAME_JPEG_BYTES_MAX: Final = 4 * 1024 * 1024
"""A 20 megapixel JPEG of good quality."""
FRAME_PIXELS_MAX: Final = 20_000_000
"""Decoding allocates 3 bytes a pixel: 60 MB is the most that one frame may cost."""
FRAME_SIDES_RATIO_MAX: Final = 50
"""One side to the other: a strip would be scaled to patches by the thousand, while others wait."""
SLICES_MAX: Final = 9
"""The model's own limit (000, max_slice_nums)."""

# -- the unit loop ------------------------------------------------------------------------------

UNITS_PENDING_MAX: Final = 5
"""Units that wait; beyond it the oldest is dropped, for the newest matters most (B7)."""
TURN_REBUILD_WAIT_S: Final = 10
"""As below, of a chat or a transcription: its client waits for an answer in silence."""
REBUILD_WAIT_S: Final = 75
"""For another slot after the loss of a worker: one that dies again and again is started after a
pause of up to a minute (`RETRY_S_MAX`), and then loads its model."""
REBUILD_UNITS_MAX: Final = 30
"""Units that wait for a model that is brought back: they are run faster than sound comes in."""
LOSSES_MAX: Final = 3
"""Workers lost in a row, without a call of the session that ended between."""
UNIT_FAILURES_MAX: Final = 3
"""Failures in a row after which the model is taken to be broken, not unlucky (B3)."""
ANSWER_UNITS: Final = 6
"""Seconds for which an answer of `openai` is due: a model that listens so long will not speak."""
SPEECH_THRESHOLD: Final = 0.5
"""From 0 to 1: how loud, or how sure, speech must be that is looked for."""
SPEECH_SILENCE_MS: Final = 500
"""The silence that ends a user's speech."""
BACKCHANNEL_MS: Final = 350
"""A user who speaks over the model for less does not interrupt it: mm-hm, a cough."""
ITEMS_MAX: Final = 256
"""Items of a conversation that a client of `openai` can name; the oldest are forgotten."""
ITEM_PARTS_MAX: Final = 16
"""Parts of an item: a question with some pictures."""
ITEM_CHARS_MAX: Final = 16_384
"""Of a part's text: pages."""
ITEMS_CHARS_MAX: Final = ITEM_PARTS_MAX * ITEM_CHARS_MAX
"""Of the text of all items that a session keeps: one item may have as much."""
USAGE_UNITS: Final = 10
"""A client of `live` hears of its use this often."""
STATE_HASH_UNITS: Final = 10
"""How often the state's hash is logged, for bisecting a divergence."""

# -- chat ---------------------------------------------------------------------------------------

MESSAGES_MAX: Final = 256
"""Messages a conversation: each takes five tokens of the context at least, most many more."""
CONTENTS_MAX: Final = 64
"""Contents a message."""
CHAT_TEXT_CHARS_MAX: Final = 131_072
"""Characters of a conversation's text: more than any context of 8192 tokens could hold."""
IMAGES_MAX: Final = 64
"""Images a conversation: 64 tokens each, half the context."""
IMAGE_PIXELS_SUM_MAX: Final = 100_000_000
"""Pixels of a conversation's images: five of the largest, a second or two of decoding."""
IMAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""A PNG of 20 megapixels, compressed as photographs are."""
AUDIO_S_MAX: Final = 300
"""Seconds of sound a content: 3000 tokens, and 19 MB as it comes."""
AUDIO_SUM_S_MAX: Final = 600
"""Seconds of sound a conversation: 6000 tokens, most of the context, and 38 MB decoded."""
AUDIO_SAMPLES_MIN: Final = 1_600
"""100 ms: the model's smallest piece of sound."""
SOUND_FILES_MAX: Final = 64
"""Sound files of a conversation that are not WAV: how long each lasts is known when it is decoded,
most in a process of its own."""
VIDEOS_MAX: Final = 1
"""Videos a conversation: each takes most of the context."""
VIDEO_BYTES_MAX: Final = 64 * 1024 * 1024
"""In base64 it still fits a frame (`CHAT_FRAME_BYTES_MAX`)."""
VIDEO_S_MAX: Final = 64
"""Seconds of a video: at 75 tokens and more each they fill the context."""
STACK_FRAMES_MAX: Final = 5
"""Pictures a second of a video."""
TOOLS_MAX: Final = 64
"""Tools a turn: each takes fifty tokens of the context or more."""
TOOL_CHARS_MAX: Final = 16_384
"""Characters of a tool's description, of its schema and of a call's arguments: half a context."""
TOOL_DEPTH_MAX: Final = 16
"""Levels of a tool's schema: an array of objects in an object takes eight."""
SILENT_CHARS_MAX: Final = 4_096
"""Characters of a call, or a thought, of a duplex session: at 25 tokens a second, half a minute."""
CALL_RESULT_S: Final = 60
"""For the result of a call of a duplex session: the model has told the user long before."""
CALLS_OPEN_MAX: Final = 16
"""Calls of a duplex session that wait for a result, as in an answer of chat."""
CALLS_A_MINUTE: Final = 30
"""One every other second: more is a model that calls in circles."""
REFUSALS_FED_MAX: Final = 3
"""Units with refused calls that keep a silent session going: a model may correct itself."""
CALLS_SESSION_MAX: Final = 1_024
"""At twice the pace of a busy assistant, an hour."""
INPUT_CHARS_MAX: Final = 4_096
"""Of a result, and of all events that a unit feeds but its first: a thousand tokens or two."""
INPUTS_MAX: Final = 32
"""Events that wait for the next units of a duplex session: a result of every open call, twice."""
INPUTS_CHARS_MAX: Final = 65_536
"""Characters of these: sixteen seconds of units."""
TEXTS_A_SECOND: Final = 4
"""Events without a call: each is read before the model may speak."""
CALL_ID_CHARS_MAX: Final = 64
"""A client may have made the id of an earlier call itself."""

# -- transcription ------------------------------------------------------------------------------

SOUND_BYTES_MAX: Final = 32 * 1024 * 1024
"""PCM16 that waits for the model: 17 minutes, for the client of 003 sends a whole file at once."""
UTTERANCES_PENDING_MAX: Final = 256
"""Utterances that wait to be answered: empty ones hold no sound, but memory."""
MODEL_CHARS_SHOWN: Final = 64
"""Characters of a model's name that an error repeats: it is the client's own text."""

# -- names --------------------------------------------------------------------------------------

VOICE_NAME_CHARS_MAX: Final = 64
"""The name of a voice in the server's library."""
LABEL_CHARS_MAX: Final = 64
"""A client's own name for its session is sent back to it, and is bounded for that."""

# -- the published voice ------------------------------------------------------------------------

VOICE_STEPS: Final = 10
"""Of the published voice's flow, as it was published."""
VOICE_STEPS_MAX: Final = 16
"""More were never measured to sound better."""


# -- modes --------------------------------------------------------------------------------------

Mode = Literal["video", "audio", "chat", "transcription"]
"""The kind of a session."""
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
"""In the order in which they are listed."""

Work = Literal["unit", "turn", "chunk"]
"""What a model is asked for: a second of talk, a turn of chat, the text of a piece of sound."""


@attrs.frozen(kw_only=True)
class ModeRow:
    """A mode.

    Attributes:
        work: what its sessions ask of a model, and so their kind and what is counted of them.
        dialects: the names of those that have it.
        frame_bytes_max: of the longest frame, either way.
        limit: the setting of its longest session in seconds; empty means no limit.
    """

    work: Work
    dialects: frozenset[str]
    frame_bytes_max: int = FRAME_BYTES_MAX
    limit: str = ""


OF_MODE: Final[Mapping[Mode, ModeRow]] = MappingProxyType(
    {
        "video": ModeRow(
            work="unit",
            dialects=frozenset({"realtime", "duplex-v1", "legacy-duplex", "vllm-omni"}),
            limit="limit_video_s",
        ),
        "audio": ModeRow(
            work="unit",
            dialects=frozenset(
                {"realtime", "duplex-v1", "legacy-duplex", "live", "openai", "vllm-omni"}
            ),
            limit="limit_audio_s",
        ),
        "chat": ModeRow(
            work="turn",
            dialects=frozenset({"realtime", "legacy-chat"}),
            frame_bytes_max=CHAT_FRAME_BYTES_MAX,
        ),
        "transcription": ModeRow(
            work="chunk",
            dialects=frozenset(
                {"transcription", "transcription-responses", "openai-transcription"}
            ),
            limit="limit_transcription_s",
        ),
    }
)
"""The table of modes: what is true of each, written once."""
