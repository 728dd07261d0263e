"""Behaviour numbers: how what a session does can change while old recordings still replay.

A session keeps the behaviour of the server that recorded it: `ConnectionOpened.behaviour`. Where a
deliberate change of order, text or limit would part from older recordings, the machine asks
`Step.behaves`, and a dialect `Context.behaves`, for the change by its name, and a new field of a
message names it as `since`. New sessions have `NEWEST`; the old branches stay for old recordings.

A change is a name here, with the number of the release that brings it:

    LOUDER: Final = 1
    \"\"\"What it changes.\"\"\"

A released number is used up. Golden logs are never written again: the scene that shows a change
makes a new one.
"""

from __future__ import annotations

from typing import Final

NEWEST: Final = 2
"""The behaviour of sessions that begin now."""

WHOLE_PARTS: Final = 1
"""`openai`: a part of an item has its text or transcript also where that is empty."""
LATE_FORMATS: Final = 1
"""`openai`: the form of the sound may change until a second came; later that is refused."""
LENIENT_SETTINGS: Final = 1
"""`openai`: settings that change nothing here are taken, and an unreadable frame is an error."""
ASKED_ONLY: Final = 1
"""`openai`: a model that is to be asked listens until it is, also without turn detection."""
ANSWERS_COMMITTED: Final = 1
"""`openai`: a response answers the last sound before it, whose second is filled up at once."""
KEEPS_SOUND: Final = 1
"""`openai`: sound that comes faster than it was spoken is kept, up to a bound."""
ENDS_SPEECH: Final = 1
"""Who stops sending in the middle of speech is heard to its end (`openai`), and what is open at a
limit is answered before the session ends (transcriptions too)."""
OWN_TIME: Final = 1
"""`openai`: only its limit ends a client that is silent at first, without its wait in the queue, of
which it is told; an end by time is told."""
RESPONSE_OPTIONS: Final = 1
"""`openai`: options of one response are honoured or refused, and its input tokens are counted."""
CUTS_WORDS: Final = 1
"""`openai`: a truncated item loses the words that were not played; a wrong request is refused."""
CLOSING_ENDS: Final = 1
"""Where the dialect has no close, a client that closes the connection in order has ended the
session (`client`), and is not one that was lost (`peer_gone`)."""
ONLY_MODEL: Final = 1
"""Transcriptions: a commit without a choice takes the server's model, and `language` and `prompt`
are taken without effect."""
ASKED_SPEECH: Final = 1
"""`legacy-chat`: only a request whose `tts` has `enabled` is spoken."""
ANY_PICTURE: Final = 1
"""A frame of a duplex session may be a PNG or a WebP, and a wrong one costs only itself."""
DATA_URLS: Final = 1
"""Base64 of media may stand in a data URL."""
SOUND_FILES: Final = 1
"""A sound file may be of any common kind, or a WAV from a pipe, which does not know its size; and
samples of the other format are refused by name."""
CANCELS_TURNS: Final = 1
"""`realtime`, in chat: `response.cancel` ends an answer."""
TAKES_TOOLS: Final = 2
"""`openai`, `live`: tools are accepted and shown in the session, also where none is called."""
REPORTS_LATE_INSTRUCTIONS: Final = 2
"""`openai`: a response whose instructions come too late is made, and reports that at its end."""
AWAITED_EVENTS: Final = 2
"""`openai`: `conversation.created`, and `rate_limits.updated` where a response begins."""
IDLE_TURNS: Final = 2
"""`openai`: a response where the user says nothing for a while, by `idle_timeout_ms`."""
BACKCHANNELS: Final = 2
"""`openai`: how long speech is that interrupts may be chosen."""
DUPLEX_TOOLS: Final = 2
"""Duplex sessions may have tools and results; `realtime`, `duplex-v1`: events for the model too.

What follows from a call has this number too, such as the bound on refused calls: no older session
offers a tool, so none has a call."""
LAST_WORDS: Final = 2
"""`openai`: at its limit a session waits for the last words that it heard, or says none come."""
SENDS_USER_WORDS: Final = 2
"""`realtime`: a client that wants notices is sent what its user said, as it is transcribed."""
FORGETS_LOST: Final = 2
"""`openai`, transcriptions: sound that was cleared is not transcribed again after a loss."""
DURING_TURNS: Final = 2
"""A message that is refused while a turn is answered came `during a turn`."""
SLEEPS_AMID_MOVES: Final = 2
"""A session that falls asleep as it gives up its slot is not ended for want of another one."""

SNAPSHOT: Final = 1
"""The version of the keys of `Session.snapshot`."""
