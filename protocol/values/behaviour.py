"""Behaviour numbers: how a session's course can change while old recordings still replay.

A session keeps the behaviour of the server that recorded it: `ConnectionOpened.behaviour`, 0 if
absent. Where a deliberate change of course, text, order or limit would part from older recordings,
the machine asks `Core.behaves` for the change by its name. New sessions have `NEWEST`; old branches
stay for old recordings.

A change gets a name here, with the number of the release that brings it; a released number is used
up. Golden logs are never written again; the scenes that show a change make new ones.
"""

from __future__ import annotations

from typing import Final

OWN_WORDS: Final = 1
"""A refused event is named as the client named it: `session.update while queued`."""
EARLY_INIT: Final = 1
"""An opening message that is sent while queued is kept, and taken at `queue_done`."""
SHORT_REFUSALS: Final = 1
"""Of a large message that is refused the recording keeps its length, its hash and its start."""
LOCKSTEP: Final = 1
"""Each `audio_chunk` of 002 has a result, also one that completes no unit."""
SHORT_APPENDS: Final = 1
"""`realtime` and `legacy-duplex` take one sample or more; the frames of a second are bounded."""
DROPPED_MEDIA: Final = 1
"""The frames of a unit that is dropped are decoded no more."""
OPENAI_ENDS: Final = 1
"""A `session.update` of OpenAI's API, before the session is set up, ends the connection."""
HINTS_REFUSED: Final = 1
"""A `language` or `prompt` that no model here takes is refused, and not ignored."""
LINE_BREAKS: Final = 1
"""The base64 of a transcription's sound may have line breaks."""
COMMIT_BEGINS_ANEW: Final = 1
"""The commit after an utterance that the server ended begins a new one, final or not."""
NO_MODEL_TOLD: Final = 1
"""A transcription that ends because no model was chosen says so."""
SOURCE_FIELDS: Final = 1
"""Every setting of the source's request schema is honoured or refused by its name."""
LAST_PIECE: Final = 1
"""All speech of a streamed chat answer is in its deltas, including the last piece."""
CHAT_PROMPT: Final = 1
"""A chat's init may hold a system prompt, for turns that bring none."""
LISTEN_TURN: Final = 1
"""A listen names the speaking turn that it ends, or else the one that it precedes."""
NOTICES: Final = 1
"""Only a client that asked for notices is told that the server goes away."""
TWO_SIGNALS: Final = 1
"""In the second set of names of 003 a commit ends sound, and `response.create` asks for text."""
WEBP: Final = 2
"""A conversation's pictures may be WebP."""
ITEM_PICTURES: Final = 2
"""A picture of an item of `openai` may be a PNG or a WebP."""

SESSION_NAMED: Final = 2
"""Every `error` names the session, and every `session.created` the recording."""
RECORD_ASKED: Final = 2
"""A client may ask not to be recorded, in the message that sets its session up."""
PLAYBACK: Final = 2
"""A client may report how much of the speech it has played."""
TOOLS: Final = 2
"""A turn of chat may offer tools; its conversation may hold calls and results of them."""
SAYS_WHERE: Final = 2
"""A Realtime session that wants to be a transcription is told the address of these."""

NEWEST: Final = 2
"""The behaviour of sessions that begin now."""

SNAPSHOT: Final = 1
"""The version of the keys of `Session.snapshot`; 0 had names of classes and attributes."""
