"""Antiphon's client, under the distribution's own name: `import antiphon`.

    url = "ws://127.0.0.1:8006"
    async with antiphon.connect(url, mode="audio", instructions="Be brief.") as session:
        await session.append(pcm)              # any amount of float32, 16 kHz mono
        async for event in session:
            if isinstance(event, antiphon.Speech):
                play(event.samples)            # float32, 24 kHz mono

    async with antiphon.connect(url, mode="chat") as session:
        async for piece in await session.ask("Good morning!"):
            print(piece.text if isinstance(piece, antiphon.Delta) else "", end="", flush=True)

    async with antiphon.transcribe(url, model="tiny") as session:
        await session.append(pcm)
        await session.finish()                 # the utterance ends
        async for event in session:
            if isinstance(event, antiphon.TranscriptDone):
                break                          # the session would wait for the next one
            print(event.text if isinstance(event, antiphon.TranscriptDelta) else "", end="")

It runs on asyncio and on trio. One task sends and one receives. Every error is an
`antiphon.ClientError`.

It only re-exports from `protocol` and `runtime`, under the name that users install. It is a
package, because a single module cannot tell type checkers that it is typed (PEP 561).
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from protocol.values.errors import ErrorCode, ProtocolError
from protocol.values.messages import (
    Closed,
    Created,
    Delta,
    ErrorReport,
    GoingAway,
    Interrupted,
    Listen,
    Metrics,
    Paused,
    Prefilled,
    QueuePlace,
    Response,
    Resumed,
    Speech,
    TranscriptDelta,
    TranscriptDone,
)
from protocol.values.model import DuplexConfig
from protocol.values.requests import (
    Append,
    AudioPart,
    ChatMessage,
    ImagePart,
    Init,
    ReferenceAudio,
    SpeechRequest,
    TextPart,
    VideoPart,
    VoiceName,
)
from protocol.values.tools import Tool, ToolCall, ToolResult
from protocol.values.turn import ChatConfig
from runtime.client.chat import Answer, ChatSession, called, message, returned, tool
from runtime.client.duplex import DuplexSession, Event
from runtime.client.errors import (
    AddressError,
    CannotConnectError,
    ClientError,
    HandshakeRejectedError,
    LocalProtocolError,
    RemoteProtocolError,
    ReportedError,
    SessionClosedError,
    SessionRefusedError,
)
from runtime.client.resuming import Reconnected, Reconnecting
from runtime.client.sdk import connect, transcribe
from runtime.client.session import ClientSession
from runtime.client.session import connect as connect_raw
from runtime.client.transcription import TranscriptEvent, TranscriptionSession

__version__: Final = version("antiphon")

__all__ = [
    "AddressError",
    "Answer",
    "Append",
    "AudioPart",
    "CannotConnectError",
    "ChatConfig",
    "ChatMessage",
    "ChatSession",
    "ClientError",
    "ClientSession",
    "Closed",
    "Created",
    "Delta",
    "DuplexConfig",
    "DuplexSession",
    "ErrorCode",
    "ErrorReport",
    "Event",
    "GoingAway",
    "HandshakeRejectedError",
    "ImagePart",
    "Init",
    "Interrupted",
    "Listen",
    "LocalProtocolError",
    "Metrics",
    "Paused",
    "Prefilled",
    "ProtocolError",
    "QueuePlace",
    "Reconnected",
    "Reconnecting",
    "ReferenceAudio",
    "RemoteProtocolError",
    "ReportedError",
    "Response",
    "Resumed",
    "SessionClosedError",
    "SessionRefusedError",
    "Speech",
    "SpeechRequest",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolResult",
    "TranscriptDelta",
    "TranscriptDone",
    "TranscriptEvent",
    "TranscriptionSession",
    "VideoPart",
    "VoiceName",
    "__version__",
    "called",
    "connect",
    "connect_raw",
    "message",
    "returned",
    "tool",
    "transcribe",
]
